"""Plans: what they pin, for how long, and what `take` makes of them."""

from __future__ import annotations

import ctypes
import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.filling import fill, pins
from support.interrupts import interrupt
from support.keys import keys, prompt
from support.refusals import refused
from support.scripts import with_support

from lightcache import (
    Cache,
    ConfigError,
    Detached,
    Lease,
    LeaseLost,
    NoSpace,
    NotReady,
    PageIndex,
    PermissionDenied,
)
from lightcache.plans import Plans
from lightcache.shm import layout as shm_layout


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(index: PageIndex) -> Clock:
    index._book.clock = made = Clock()
    return made


# ---------------------------------------------------------------- planning


def test_what_is_planned_stays_until_it_is_taken(index: PageIndex) -> None:
    have = fill(index, 1, 3)
    assert index.plan("a", prompt(1, 5)) == 3
    assert index.plans == Plans(requests=1, pages=3)
    assert index.evict(16) == 0
    with index.take("a") as lease:
        assert lease.pages.tolist() == index.match(have).pages.tolist()
        assert index.plans == Plans(0, 0)
        assert pins(index) == 3
    assert pins(index) == 0
    assert index.evict(16) == 3


def test_part_of_a_plan_is_taken_and_the_rest_is_given_back(index: PageIndex) -> None:
    have = fill(index, 1, 6)
    for wanted, expected in [(0, 0), (2, 2), (6, 6), (9, 6), (None, 6)]:
        assert index.plan("a", have) == 6
        with index.take("a", pages=wanted) as lease:
            assert lease.pages.tolist() == index.match(have).pages.tolist()[:expected]
            assert pins(index) == expected
        assert pins(index) == 0
    index.plan("a", have)
    refused(ConfigError, "pages", index.take, "a", pages=-1)
    assert index.plans == Plans(1, 6)


def test_a_request_counts_once_however_often_it_is_planned(index: PageIndex, clock: Clock) -> None:
    def counted() -> tuple[int, int]:
        (client,) = index.clients()
        return client.hit_pages, client.missed_pages

    wanted = prompt(1, 6)
    for pages in range(1, 5):  # the prefix grows while it waits
        fill(index, 1, pages)
        assert index.plan("a", wanted) == pages
        index.plan_many(["a"], wanted, np.array([0, 6]))
    assert counted() == (0, 0)
    index.take("a", pages=1).release()
    assert counted() == (4, 2)
    index.plan("a", wanted)
    assert index.cancel("a")
    assert counted() == (8, 4)
    index.plan("a", wanted, timeout=1)
    clock.now += 2
    assert index.plans.requests == 0
    assert counted() == (12, 6)
    index.plan("a", wanted)
    index.plan("a", wanted[:3])  # another prompt of the same request: it counts as that
    index.take("a").release()
    assert counted() == (15, 6)


def test_planning_again_pins_nothing_twice(index: PageIndex) -> None:
    have = fill(index, 1, 4)
    first = index.plan(7, have)
    lease = index._book.plans[7].lease
    assert [index.plan(7, have), index.plan(7, have.copy())] == [first, first]
    assert index._book.plans[7].lease is lease
    assert pins(index) == 4


def test_keys_are_copied_unless_they_are_frozen(index: PageIndex) -> None:
    have = fill(index, 1, 4)
    for frozen in (False, True):
        index.plan(frozen, have, frozen=frozen)
        assert np.shares_memory(index._book.plans[frozen].keys, have) is frozen


def test_planning_again_sees_the_prefix_grow(index: PageIndex) -> None:
    wanted = prompt(1, 5)
    assert index.plan("a", wanted) == 0
    for pages in (1, 2, 5):
        fill(index, 1, pages)
        assert index.plan("a", wanted) == pages
        assert pins(index) == pages
    assert index.plan("a", wanted) == 5


def test_other_keys_replace_a_plan_and_common_pages_are_never_let_go(
    index: PageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(index, 1, 4)
    fill(index, 2, 2)
    index.plan("a", prompt(1, 2))
    release = Lease._give_back
    seen = []

    def watched(lease: Lease) -> None:
        seen.append(pins(index))
        release(lease)

    monkeypatch.setattr(Lease, "_give_back", watched)
    assert index.plan("a", prompt(1, 4)) == 4
    assert seen == [2 + 4], "the new is pinned before the old is let go"
    assert index.plan("a", prompt(2, 2)) == 2
    assert pins(index) == 2
    assert index.plans.requests == 1


def test_a_callers_buffer_may_be_used_again(index: PageIndex) -> None:
    buffer = fill(index, 1, 2).copy()
    fill(index, 2, 2)
    index.plan("a", buffer)
    buffer[:] = prompt(2, 2)
    assert index.plan("a", buffer) == 2
    with index.take("a") as lease, index.match(prompt(2, 2)) as other:
        assert lease.pages.tolist() == other.pages.tolist()


def test_the_limit_bounds_what_is_planned_and_taken(index: PageIndex) -> None:
    have = fill(index, 1, 6)
    assert index.plan("a", have, limit=2) == 2
    assert index.plan("a", have, limit=3) == 3
    assert index.plan("b", have, limit=100) == 6
    assert index.plan("c", have, limit=0) == 0
    assert pins(index) == 9
    sizes = [len(index.take(request)) for request in "abc"]
    assert sizes == [3, 6, 0]


def test_no_keys(index: PageIndex) -> None:
    assert index.plan("a", keys()) == 0
    assert index.plan("a", keys()) == 0
    assert index.plan_many(["a", "b"], keys(), np.array([0, 0, 0])).tolist() == [0, 0]
    assert index.plan_many([], keys(), np.array([0])).tolist() == []
    with index.take("a") as lease:
        assert len(lease) == 0


# ---------------------------------------------------------------- a whole queue


def test_a_queue_in_one_call(index: PageIndex) -> None:
    fill(index, 1, 2)
    fill(index, 2, 3)
    asked = np.concatenate([prompt(1, 4), prompt(9, 2), prompt(2, 3)])
    offsets = np.array([0, 4, 6, 6, 9])
    ids = ["a", "b", "c", "d"]
    assert index.plan_many(ids, asked, offsets).tolist() == [2, 0, 0, 3]
    assert index.plans == Plans(4, 5)
    assert index.plan_many(ids, asked, offsets).tolist() == [2, 0, 0, 3]
    assert pins(index) == 5
    fill(index, 1, 4)
    fill(index, 9, 1)
    assert index.plan_many(ids, asked, offsets).tolist() == [4, 1, 0, 3]
    assert pins(index) == 8
    assert [index.plan(name, k) for name, k in [("a", prompt(1, 4)), ("d", prompt(2, 3))]] == [4, 3]
    assert pins(index) == 8
    for name, pages in (("a", 4), ("b", 1), ("c", 0), ("d", 3)):
        with index.take(name) as lease:
            assert len(lease) == pages
    assert pins(index) == 0


def test_a_queue_of_old_new_and_changed_requests(index: PageIndex) -> None:
    for name in (1, 2, 3):
        fill(index, name, 3)
    index.plan_many(["a", "b"], np.concatenate([prompt(1, 3), prompt(2, 3)]), np.array([0, 3, 6]))
    kept = index._book.plans["a"].lease
    asked = np.concatenate([prompt(3, 3), prompt(1, 3), prompt(3, 2)])
    found = index.plan_many(["new", "a", "b"], asked, np.array([0, 3, 6, 8]))
    assert found.tolist() == [3, 3, 2]
    assert index._book.plans["a"].lease is kept
    assert pins(index) == 8
    # With a limit the runs that are asked for do not touch each other.
    found = index.plan_many(["new", "a", "b"], asked, np.array([0, 3, 6, 8]), limit=1)
    assert found.tolist() == [1, 1, 1]
    assert [len(index.take(name)) for name in ("new", "a", "b")] == [1, 1, 1]


def test_a_queue_where_all_are_new_or_have_grown(index: PageIndex) -> None:
    fill(index, 1, 1)
    index.plan("old", prompt(1, 3))
    fill(index, 1, 2)
    fill(index, 2, 3)
    asked = np.concatenate([prompt(2, 3), prompt(1, 3)])
    assert index.plan_many(["new", "old"], asked, np.array([0, 3, 6])).tolist() == [3, 2]
    assert [len(index.take(name)) for name in ("new", "old")] == [3, 2]


def test_a_plan_does_not_keep_a_queue_of_keys_alive(index: PageIndex) -> None:
    index.plan_many(["a", "b"], np.concatenate([prompt(1, 2), prompt(2, 2)]), np.array([0, 2, 4]))
    index.plan("c", np.concatenate([prompt(1, 2), prompt(2, 2)])[:2])
    for plan in index._book.plans.values():
        assert plan.keys.base is None


# ---------------------------------------------------------------- taking and cancelling


def test_take_gives_more_if_the_prefix_has_grown(index: PageIndex) -> None:
    fill(index, 1, 2)
    index.plan("a", prompt(1, 5))
    fill(index, 1, 4)
    with index.take("a") as lease:
        assert len(lease) == 4
        assert pins(index) == 4
    assert pins(index) == 0


def test_a_short_match_takes_nothing_away(
    index: PageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when an evictor marks a page at that instant, and is stopped before it looks at our pin.
    fill(index, 1, 3)
    index.plan("a", prompt(1, 3)[:2])
    index.plan("b", prompt(1, 5))
    fill(index, 1, 5)
    pinned, peek, match_many = PageIndex._pinned, PageIndex.peek, PageIndex.match_many

    def short(self: PageIndex, where: Any, n: int, ref: int) -> Lease:
        return pinned(self, where, min(n, 1), ref)

    def short_many(self: PageIndex, wanted: Any, offsets: Any, **more: Any) -> Any:
        begins = offsets[:-1]
        return match_many(self, wanted[begins], np.arange(len(begins) + 1), **more)

    with monkeypatch.context() as patched:
        patched.setattr(PageIndex, "_pinned", short)
        patched.setattr(PageIndex, "match_many", short_many)
        assert index.plan("b", prompt(1, 5)) == 3, "its growth was not seen"
        assert index.plan("a", prompt(1, 4)) == 2, "replaced by a longer prompt"
        assert index.plan_many(["a"], prompt(1, 5), np.array([0, 5])).tolist() == [2]
        assert index.plan_many(["a"], prompt(1, 5), np.array([0, 5])).tolist() == [2]
        patched.setattr(PageIndex, "peek", lambda *_, **__: 0)
        assert index.plan("b", prompt(1, 5)) == 3
        assert pins(index) == 5
        with index.take("b") as lease:
            assert len(lease) == 3
    assert index.peek(prompt(1, 5)) == peek(index, prompt(1, 5)) == 5
    with index.take("a") as lease:
        assert len(lease) == 5
    assert pins(index) == 0


def test_what_there_is_no_plan_of(index: PageIndex) -> None:
    have = fill(index, 1, 2)
    refused(LeaseLost, "no plan of 'a'", index.take, "a")
    assert index.cancel("a") is False
    index.plan("a", have)
    index.take("a").release()
    refused(LeaseLost, "taken", index.take, "a")
    index.plan("a", have)
    assert index.cancel("a") is True
    assert index.cancel("a") is False
    assert pins(index) == 0
    refused(LeaseLost, "", index.take, "a")


# ---------------------------------------------------------------- the time limit


def test_a_plan_ends_with_its_time_limit(index: PageIndex, clock: Clock) -> None:
    have = fill(index, 1, 2)
    index.plan("a", have, timeout=10)
    clock.now += 9.9
    index.plan("a", have, timeout=10)
    clock.now += 9.9
    assert index.plans.pages == 2, "renewed"
    clock.now += 0.1
    refused(LeaseLost, "timeout", index.take, "a")
    assert pins(index) == 0
    index.plan("a", have, timeout=10)
    clock.now += 10
    assert index.cancel("a") is False


def take_nothing(index: PageIndex) -> None:
    refused(LeaseLost, "", index.take, "nobody")


def test_any_call_drops_what_has_ended(index: PageIndex, clock: Clock) -> None:
    have = fill(index, 1, 2)
    calls: list[Callable[[], object]] = [
        lambda: index.plans,
        lambda: index.cancel("nobody"),
        lambda: index.plan("z", keys()),
        lambda: index.plan_many(["z"], keys(), np.array([0, 0])),
        lambda: take_nothing(index),
    ]
    for call in calls:
        index.plan("short", have, timeout=5)
        index.plan("long", have[:1], timeout=50)
        clock.now += 5
        call()
        assert pins(index) == 1, "the long one is left"
        clock.now += 45
        call()
        assert pins(index) == 0


def test_a_time_limit_may_be_shortened(index: PageIndex, clock: Clock) -> None:
    have = fill(index, 1, 2)
    for again in (
        lambda: index.plan("a", have, timeout=5),
        lambda: index.plan_many(["a"], have, np.array([0, 2]), timeout=5),
    ):
        index.plan("a", have, timeout=math.inf)
        again()
        clock.now += 5
        assert index.plans == Plans(0, 0)
        index.plan("a", have, timeout=100)
        again()
        index.plan("a", have, timeout=100)
        clock.now += 99
        assert index.plans == Plans(1, 2), "and lengthened again"
        clock.now += 1
        assert index.plans == Plans(0, 0)


def test_a_taken_plan_is_not_dropped_with_its_old_time_limit(
    index: PageIndex, clock: Clock
) -> None:
    have = fill(index, 1, 2)
    index.plan("a", have, timeout=5)
    with index.take("a") as lease:
        index.plan("a", have, timeout=50)
        clock.now += 10
        assert index.plans == Plans(1, 2)
        assert len(lease) == 2
        assert pins(index) == 4


def test_the_past_is_forgotten(index: PageIndex, clock: Clock) -> None:
    have = fill(index, 1, 2)
    index.plan("stays", have, timeout=7)
    for _ in range(1000):
        index.plan("comes and goes", have, timeout=1e6)
        index.cancel("comes and goes")
    assert len(index._book._due) < 100
    index.plan("stays", have, timeout=3)
    clock.now += 2
    index.plan("stays", have, timeout=10)
    clock.now += 6
    assert index.plans == Plans(1, 2)
    assert len([entry for entry in index._book._due if entry[2] == "stays"]) == 1
    clock.now += 4
    assert index.plans == Plans(0, 0)


# ---------------------------------------------------------------- namespaces


@pytest.mark.parametrize("again", ["take", "plan", "plan_many"])
def test_nothing_of_a_cleared_namespace_is_taken(index: PageIndex, again: str) -> None:
    have, old = fill(index, 1, 3), index.default_namespace
    assert index.plan("a", have) == 3
    index.clear()
    fill(index, 1, 3)
    assert index.plans.pages == 3, "their bytes stay until somebody looks"
    if again == "plan":
        assert index.plan("a", have, namespace=old) == 0
    elif again == "plan_many":
        assert index.plan_many(["a"], have, np.array([0, 3]), namespace=old).tolist() == [0]
    with index.take("a") as lease:
        assert len(lease) == 0
    assert pins(index) == 0


def test_a_plan_of_a_cleared_namespace_may_be_made_again(index: PageIndex) -> None:
    fill(index, 1, 3)
    index.plan("a", prompt(1, 3))
    index.clear()
    fill(index, 1, 2)
    assert index.plan("a", prompt(1, 3)) == 2, "of the namespace that is the default now"
    assert len(index.take("a")) == 2


def test_a_plan_belongs_to_its_namespace(index: PageIndex) -> None:
    space = index.namespace("w2", "tenant")
    fill(index, 1, 2)
    fill(index, 2, 3, namespace=space)
    assert index.plan("a", prompt(2, 3)) == 0
    assert index.plan("a", prompt(2, 3), namespace=space) == 3
    index.use(space)
    assert index.plan("b", prompt(2, 3)) == 3
    index.use(index.namespace())
    with index.take("b") as lease:
        assert len(lease) == 3, "that of when it was planned"
    index.clear(space)
    index.namespace("w2", "tenant")
    assert len(index.take("a")) == 0


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "arguments",
    [
        {"keys": [1, 2]},
        {"keys": np.zeros((2, 2), np.int64)},
        {"request": []},
        {"limit": -1},
        {"limit": 1.5},
        {"timeout": -1},
        {"timeout": math.nan},
        {"timeout": "1"},
        {"timeout": True},
        {"namespace": "w"},
    ],
)
def test_bad_arguments_change_nothing(index: PageIndex, arguments: dict[str, Any]) -> None:
    fill(index, 1, 2)
    index.plan("a", prompt(1, 2))
    call = {"request": "a", "keys": prompt(1, 2), **arguments}
    refused(ConfigError, "", index.plan, **call)
    many = {"offsets": np.array([0, 2]), "ids": [call.pop("request")], **call}
    refused(ConfigError, "", index.plan_many, **many)
    assert index.plans == Plans(1, 2)
    assert len(index.take("a")) == 2


def test_bad_queues(index: PageIndex) -> None:
    have = fill(index, 1, 2)
    for ids, offsets in ((["a"], [0, 1, 2]), (["a", "a"], [0, 1, 2]), (["a"], [0, 3])):
        refused(ConfigError, "", index.plan_many, ids, have, np.array(offsets))
    assert index.plans == Plans(0, 0)


def test_ids_that_cannot_be_hashed(index: PageIndex) -> None:
    for call in (index.take, index.cancel):
        refused(ConfigError, "hashable", call, [])


def test_more_pins_than_a_row_counts(index: PageIndex) -> None:
    have = fill(index, 1, 2)
    index.plan("a", have[:1])
    many = np.tile(have[:1], (65_534, 1))
    held = index.match_many(many, np.arange(len(many) + 1))
    for call in (
        lambda: index.plan("a", have),
        lambda: index.plan("b", have),
        lambda: index.plan_many(["a", "b"], np.concatenate([have, have]), np.array([0, 2, 4])),
    ):
        refused(NoSpace, "", call)
        assert index.plans == Plans(1, 1)
    held.release()
    assert index.plan("b", have) == 2


def test_take_keeps_the_plan_when_the_match_is_refused(index: PageIndex) -> None:
    fill(index, 1, 1)
    index.plan("a", prompt(1, 2))
    have = fill(index, 1, 2)
    many = np.tile(have[1:], (65_535, 1))
    held = index.match_many(many, np.arange(len(many) + 1))
    refused(NoSpace, "", index.take, "a")
    held.release()
    assert len(index.take("a")) == 2


def test_read_only(index: PageIndex) -> None:
    have = fill(index, 1, 2)
    with PageIndex.attach(index.name, readonly=True) as reader:
        refused(PermissionDenied, "", reader.plan, "a", have)
        refused(PermissionDenied, "", reader.plan_many, ["a"], have, np.array([0, 2]))
        refused(LeaseLost, "", reader.take, "a")
        assert reader.cancel("a") is False
        assert reader.plans == Plans(0, 0)


def calls_of(index: PageIndex, have: Any) -> list[Callable[[], object]]:
    return [
        lambda: index.plan("a", have),
        lambda: index.plan("b", have),
        lambda: index.plan_many(["a"], have, np.array([0, 2])),
        lambda: index.take("a"),
        lambda: index.take("nobody"),
        lambda: index.plans,
    ]


def test_use_after_close(segment_name: str) -> None:
    keeper = PageIndex.create(segment_name, pages=4)
    index = PageIndex.attach(segment_name)
    have = fill(index, 1, 2)
    index.plan("a", have)
    assert pins(keeper) == 2
    index.close()
    assert pins(keeper) == 0, "given back with everything"
    for call in [*calls_of(index, have), lambda: index.cancel("a")]:
        refused(Detached, "", call)
    keeper.close()


def test_a_replaced_cache_is_detached(segment_name: str) -> None:
    index = PageIndex.create(segment_name, pages=4)
    have = fill(index, 1, 2)
    index.plan("a", have)
    assert type(index.segment).unlink(segment_name, force=True)
    for call in calls_of(index, have):
        refused(Detached, "replaced", call)
    assert index.cancel("a") is True  # giving back is no use, but no error either
    index.close()


def disable(index: PageIndex, value: int) -> None:
    at = index.segment.address + shm_layout.SegmentHeader.disabled.offset
    ctypes.c_uint32.from_address(at).value = value


def test_a_disabled_cache_plans_nothing_and_lets_go(index: PageIndex) -> None:
    have = fill(index, 1, 2)
    index.plan("a", have)
    disable(index, 1)
    for call in calls_of(index, have):
        refused(NotReady, "", call)
    disable(index, 0)
    assert len(index.take("a")) == 2
    index.plan("a", have)
    disable(index, 1)
    assert index.cancel("a") is True
    disable(index, 0)
    assert pins(index) == 0


def test_a_forked_child_is_not_attached_even_while_a_thread_plans(
    script: Callable[..., Any], segment_name: str
) -> None:
    done = script(
        with_support(
            """
import gc, os, sys, threading
import numpy as np
from support.keys import prompt
from lightcache import Detached, PageIndex
index = PageIndex.create(sys.argv[1], pages=8)
a = prompt(1, 2)
with index.reserve(a) as new:
    new.publish()
index.plan("a", a)
held, go = threading.Event(), threading.Event()
def hold():
    with index._book.lock:
        held.set()
        go.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
import warnings
warnings.simplefilter("ignore")  # of forking with threads, which is the point
child = os.fork()
if child == 0:
    calls = [
        lambda: index.plan("a", a), lambda: index.plan_many(["a"], a, np.array([0, 2])),
        lambda: index.take("a"), lambda: index.cancel("a"), lambda: index.plans,
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except Detached:
            continue
        print("no Detached from call", number, flush=True)
        os._exit(1)
    del calls, call, index
    gc.collect()
    os._exit(0)
_, status = os.waitpid(child, 0)
go.set()
thread.join()
assert status == 0, status
assert index.check().pins == 2
assert len(index.take("a")) == 2
index.close()
"""
        ),
        segment_name,
    )
    assert done.stderr == ""


def test_a_dropped_handle_takes_its_plans_with_it(segment_name: str) -> None:
    keeper = PageIndex.create(segment_name, pages=4)
    have = fill(keeper, 1, 2)
    index = PageIndex.attach(segment_name)
    index.plan("a", have)
    assert pins(keeper) == 2
    del index
    gc.collect()
    keeper.reap()
    assert pins(keeper) == 0
    assert len(keeper.clients()) == 1
    keeper.close()


# ---------------------------------------------------------------- interrupts and threads


def plan_and_take(index: PageIndex) -> None:
    index.plan("a", prompt(1, 4))
    index.plan("a", prompt(1, 2))
    index.plan("a", prompt(1, 2))
    index.take("a").release()
    index.plan("a", prompt(1, 5), timeout=0)
    _ = index.plans


def plan_and_grow(index: PageIndex) -> None:
    index.plan("a", prompt(1, 6))
    with index.reserve(prompt(1, 6)) as new:
        new.publish()
    index.plan("a", prompt(1, 6))
    index.cancel("a")


def plan_a_queue(index: PageIndex) -> None:
    asked = np.concatenate([prompt(1, 4), prompt(1, 6)])
    index.plan("b", prompt(1, 3))
    index.plan_many(["a", "b"], asked, np.array([0, 4, 10]))
    with index.reserve(prompt(1, 6)) as new:
        new.publish()
    index.plan_many(["b", "a"], asked, np.array([0, 4, 10]))
    index.plan_many(["b", "a"], asked, np.array([0, 4, 10]), timeout=1)


ACTIONS = [plan_and_take, plan_and_grow, plan_a_queue]


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS, ids=lambda a: a.__name__)
def test_an_interrupt_anywhere_leaks_nothing(
    index: PageIndex, clock: Clock, action: Callable[[PageIndex], None]
) -> None:
    interrupted, at = True, 0
    while interrupted:
        index.evict(16)
        fill(index, 1, 4)
        interrupted = interrupt(lambda: action(index), at)
        planned = index.plans
        if pins(index) != planned.pages:
            gc.collect()
        assert pins(index) == planned.pages, f"place {at}"
        # The time limit of all that are left holds: each is still known to the heap.
        clock.now += 60
        assert index.plans == Plans(0, 0), f"place {at}"
        assert pins(index) == 0, f"place {at}: pins leaked"
        at += 1
    assert at > 15, "the places were not seen"


def test_threads_share_a_book(index: PageIndex) -> None:
    have = fill(index, 1, 4)
    failures: list[BaseException] = []
    begin = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            begin.wait()
            for turn in range(300):
                own = (number, turn % 3)
                assert index.plan(own, have) == 4
                index.plan("shared", have[: 1 + (number + turn) % 4])
                found = index.plan_many([own, (number, 7)], np.tile(have, (2, 1)), (0, 4, 8))
                assert found.tolist() == [4, 4]
                with index.take(own) as lease:
                    assert len(lease) == 4
                index.cancel("shared")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for number in range(4):
        assert index.cancel((number, 7))
    index.cancel("shared")
    assert index.plans == Plans(0, 0)
    assert pins(index) == 0


# ---------------------------------------------------------------- Cache


def test_a_cache_plans_as_its_index_does(segment_name: str) -> None:
    with Cache.create(
        segment_name, pages=8, page_bytes=4096, fingerprint="x", secret=bytes(16)
    ) as cache:
        with cache.reserve(prompt(1, 3)) as new:
            new.publish()
        assert cache.plan("a", prompt(1, 3), limit=2, timeout=9) == 2
        found = cache.plan_many(["a", "b"], prompt(1, 3), np.array([0, 2, 3]), timeout=9)
        assert found.tolist() == [2, 1]
        assert cache.plans == cache.index.plans == Plans(2, 3)
        with cache.take("a") as lease:
            assert len(lease) == 2
        assert cache.cancel("b")
        assert not cache.cancel("b")
