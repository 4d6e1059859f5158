"""The router: real indexes in shared memory, what it makes of their loss, and its sums."""

from __future__ import annotations

import ctypes
import itertools
import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.filling import fill
from support.keys import keys, prompt
from support.refusals import refused
from support.scripts import with_support

from lightcache import Cache, ConfigError, Detached, PageIndex, Router, RouterPolicy
from lightcache.groups import Rule
from lightcache.router import _Query
from lightcache.shm.layout import SegmentHeader

Made = Callable[..., PageIndex]
POLICY = RouterPolicy(page_tokens=10, host_weight=0.25)
IDLE = {"a": 0, "b": 0, "c": 0}


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def index(segment_name: str) -> Iterator[Made]:
    """`index("x", page_tokens=...)` makes one; closed at the end."""
    made: list[PageIndex] = []

    def make(suffix: str, pages: int = 32, **config: Any) -> PageIndex:
        made.append(PageIndex.create(f"{segment_name}-{suffix}", pages=pages, config=config))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---------------------------------------------------------------- choosing


def test_the_longest_prefix_on_a_device_wins(index: Made) -> None:
    a, b = index("a"), index("b")
    fill(a, 1, 2)
    fill(b, 1, 5)
    with Router(None, {"a": a, "b": b.name, "c": None}, policy=POLICY) as router:
        choice = router.route(prompt(1, 8), IDLE)
        assert (choice.worker, choice.device_pages, choice.host_pages) == ("b", 5, 0)
        assert choice.costs == {"a": 60, "b": 30, "c": 80}
        assert choice.stale == ()
        assert router.problems == {}


def test_a_load_can_be_worth_more_than_a_prefix(index: Made) -> None:
    a, b = index("a"), index("b")
    fill(b, 1, 5)
    with Router(None, {"a": a, "b": b}, policy=POLICY) as router:
        assert router.route(prompt(1, 8), {"a": 0, "b": 49}).worker == "b"
        assert router.route(prompt(1, 8), {"a": 0, "b": 51}).worker == "a"
    policy = RouterPolicy(page_tokens=10, load_weight=0.5)
    with Router(None, {"a": a, "b": b}, policy=policy) as router:
        choice = router.route(prompt(1, 8), {"a": 0, "b": 51})
        assert choice.worker == "b"
        assert choice.costs == {"a": 80, "b": 55.5}


def test_what_the_host_has_is_loaded_not_computed(index: Made) -> None:
    host, a, b = index("host", page_tokens=10), index("a"), index("b")
    fill(host, 1, 6)
    fill(a, 1, 2)
    policy = RouterPolicy(host_weight=0.25)
    with Router(host, {"a": a, "b": b}, policy=policy) as router:
        choice = router.route(prompt(1, 8), {"a": 0, "b": 0})
        assert (choice.worker, choice.device_pages, choice.host_pages) == ("a", 2, 6)
        assert choice.costs == {"a": 20 + 0.25 * 40, "b": 20 + 0.25 * 60}
        fill(b, 1, 8)
        choice = router.route(prompt(1, 8), {"a": 0, "b": 0})
        assert choice.costs == {"a": 30, "b": 0}
        assert router.statistics.host_pages == 4
        assert router.statistics.device_pages == 2 + 8


def test_a_cache_is_a_host(index: Made, segment_name: str) -> None:
    with Cache.create(
        segment_name, pages=4, page_bytes=64, page_tokens=16, fingerprint="x", secret=bytes(16)
    ) as cache:
        with cache.reserve(prompt(1, 2)) as new:
            new.publish()
        with Router(cache, {"a": None}) as router:
            assert router.route(prompt(1, 3), {"a": 0}).host_pages == 2
            assert router.route(prompt(1, 3), {"a": 0}).costs["a"] == pytest.approx(16 + 3.2)
        assert cache.peek(prompt(1, 2)) == 2, "it stays the caller's"


def test_equal_costs_go_to_the_least_loaded(index: Made) -> None:
    a, b = index("a"), index("b")
    fill(a, 1, 3)
    with Router(None, {"b": b, "a": a}, policy=POLICY) as router:
        assert router.route(prompt(1, 4), {"a": 30, "b": 0}).worker == "b"
    with Router(None, {"a": a, "b": b}, policy=POLICY) as router:
        assert router.route(prompt(1, 4), {"a": 30, "b": 0}).worker == "b"


def test_equal_workers_share_and_a_conversation_stays() -> None:
    names = {f"w{i}": None for i in range(4)}
    loads = dict.fromkeys(names, 7)
    with Router(None, names, policy=POLICY) as router:
        first = {c: router.route(prompt(c, 3), loads).worker for c in range(200)}
        longer = {c: router.route(prompt(c, 9), loads).worker for c in range(200)}
        assert first == longer, "decided by the first key"
        counted = Counter(first.values())
        assert set(counted) == set(names)
        assert min(counted.values()) > 25
        router.route(keys(), loads)
    backwards = dict(reversed(names.items()))
    with Router(None, backwards, policy=POLICY) as router:
        assert {c: router.route(prompt(c, 3), loads).worker for c in range(200)} == first
        # Without w0 only its conversations move.
        rest = [name for name in names if name != "w0"]
        for c, worker in first.items():
            now = router.route(prompt(c, 3), loads, among=rest).worker
            assert now == worker or worker == "w0"


def test_only_those_that_are_asked_for(index: Made) -> None:
    a, b = index("a"), index("b")
    fill(a, 1, 3)
    with Router(None, {"a": a, "b": b, "c": None}, policy=POLICY) as router:
        choice = router.route(prompt(1, 3), {"b": 3, "c": 1}, among=["b", "c", "b"])
        assert choice.worker == "c"
        assert set(choice.costs) == {"b", "c"}


def test_many_are_routed_as_one_after_another(index: Made) -> None:
    host, a, b = index("host"), index("a"), index("b")
    fill(a, 1, 4)
    fill(b, 2, 3)
    fill(host, 3, 2)
    asked = np.concatenate([prompt(1, 5), prompt(2, 5), prompt(3, 5), prompt(4, 1)])
    offsets = np.array([0, 5, 10, 10, 15, 16])
    workers: dict[str, Any] = {"a": a, "b": b.name, "c": None}
    with Router(host, workers, policy=POLICY) as router:
        many = router.route_many(asked, offsets, IDLE, spread=False)
        one = [router.route(asked[i:j], IDLE) for i, j in itertools.pairwise(offsets)]
        assert many == one
        assert [choice.worker for choice in many][:2] == ["a", "b"]
        assert router.route_many(keys(), np.array([0]), IDLE) == []
        assert router.statistics.requests == 10


def test_a_queue_is_spread(index: Made) -> None:
    a, b = index("a"), index("b")
    fill(a, 1, 4)
    asked = np.concatenate([prompt(1, 5)] * 6)
    offsets = np.arange(0, 31, 5)
    loads = {"a": 0, "b": 0}
    with Router(None, {"a": a, "b": b}, policy=POLICY) as router:
        alone = router.route_many(asked, offsets, loads, spread=False)
        assert {choice.worker for choice in alone} == {"a"}
        spread = router.route_many(asked, offsets, loads)
        # 10 tokens each on a: the fifth costs 50 there, as on b, whose load is less.
        assert [choice.worker for choice in spread] == ["a"] * 4 + ["b", "a"]
        assert [choice.costs["a"] for choice in spread] == [10, 20, 30, 40, 50, 50]
        assert loads == {"a": 0, "b": 0}


def test_statistics_are_a_snapshot(index: Made) -> None:
    a = index("a")
    fill(a, 1, 2)
    with Router(None, {"a": a, "b": None}, policy=POLICY) as router:
        before = router.statistics
        router.route(prompt(1, 3), {"a": 0, "b": 0})
        after = router.statistics
        assert (before.requests, after.requests) == (0, 1)
        assert after.by_worker == {"a": 1, "b": 0}
        assert (after.pages, after.device_pages, after.host_pages) == (3, 2, 0)
        with pytest.raises(TypeError):
            after.by_worker["a"] = 5  # type: ignore[index]


def test_a_namespace_is_found_by_its_names_in_each_index(index: Made) -> None:
    host, a = index("host", page_tokens=1), index("a")
    a.namespace("other", "first")  # so that the numbers differ
    space = host.namespace("w", "t")
    own = a.namespace("w", "t")
    fill(a, 1, 3, namespace=own)
    fill(host, 1, 2, namespace=space)
    clock = Clock()
    with Router(host, {"a": a}, clock=clock) as router:
        assert router.route(prompt(1, 4), {"a": 0}).device_pages == 0
        choice = router.route(prompt(1, 4), {"a": 0}, namespace=space)
        assert (choice.device_pages, choice.host_pages) == (3, 2)
        a.clear(own)
        assert router.route(prompt(1, 4), {"a": 0}, namespace=space).device_pages == 0
        fill(a, 1, 1, namespace=a.namespace("w", "t"))
        clock.now += 1
        assert router.route(prompt(1, 4), {"a": 0}, namespace=space).device_pages == 1
    host.use(space)
    with Router(host, {"a": a}) as router:
        assert router.route(prompt(1, 4), {"a": 0}).device_pages == 1, "that of the host"


def test_a_namespace_that_is_used_later_is_the_routers_too(index: Made) -> None:
    host = index("host", page_tokens=1)
    with Router(host, {"a": None}) as router:
        fill(host, 1, 2, namespace=host.namespace("w", "t"))
        assert router.route(prompt(1, 4), {"a": 0}).host_pages == 0
        host.use(host.namespace("w", "t"))
        assert router.route(prompt(1, 4), {"a": 0}).host_pages == 2


# ---------------------------------------------------------------- what can never be found


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the router has said since this was asked last."""
    found = [record.getMessage() for record in caplog.records]
    assert {record.name for record in caplog.records} <= {"lightcache.router"}
    caplog.clear()
    return found


@pytest.mark.parametrize("by_name", [True, False])
def test_an_index_of_another_page_size_is_refused(index: Made, by_name: bool) -> None:
    """Host pages of 64 tokens, device blocks of 16: no key is one of both."""
    host, a, b = index("host", page_tokens=64), index("a", block_tokens=16), index("b")
    fill(a, 1, 3)
    message = (
        r"gpu0: index .*-a. has pages of 16 tokens, .* are of pages of 64, "
        "so none of them can be found"
    )
    refused(ConfigError, message, Router, host, {"gpu1": b, "gpu0": a.name if by_name else a})
    assert a.peek(prompt(1, 3)) == 3, "the caller's own stays open"


def test_the_policy_and_the_host_must_agree(index: Made) -> None:
    host = index("host", page_tokens=64)
    with pytest.raises(ConfigError, match=r"expected page_tokens=64, .* found 16"):
        Router(host, {"a": None}, policy=RouterPolicy(page_tokens=16))
    with Router(host, {"a": None}, policy=RouterPolicy(page_tokens=64)) as router:
        assert router.route(prompt(1, 1), {"a": 0}).costs == {"a": 64}


def test_an_index_of_another_page_size_that_appears_later(
    index: Made, segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    workers = {"a": f"{segment_name}-late", "b": None}
    with Router(None, workers, policy=RouterPolicy(page_tokens=64), clock=clock) as router:
        fill(index("late", block_tokens=16), 1, 3)
        for seconds in range(1, 4):
            clock.now = seconds
            choice = router.route(prompt(1, 3), {"a": 0, "b": 0})
            assert (choice.stale, choice.device_pages) == (("a",), 0)
        assert "pages of 16 tokens" in router.problems["a"]
        assert logged(caplog) == [router.problems["a"]], "once"
        assert router.statistics.stale == 3


def test_a_namespace_that_was_forgotten(index: Made, caplog: pytest.LogCaptureFixture) -> None:
    """Managers serve weights="step-1000"; each call that misses it is counted."""
    host, a = index("host", page_tokens=1), index("a")
    with Router(host, {"a": a}) as router:
        router.route(prompt(1, 4), {"a": 0})
        assert router.statistics.other_namespace == 0, "there is nothing at all"
    space = host.namespace("step-1000")
    fill(a, 1, 3, namespace=a.namespace("step-1000"))
    with Router(host, {"a": a}) as router:
        assert router.route(prompt(1, 4), {"a": 0}, namespace=space).device_pages == 3
        assert logged(caplog) == []
        for _ in range(3):
            assert router.route(prompt(1, 4), {"a": 0}).device_pages == 0
        router.route_many(prompt(1, 4), np.array([0, 2, 4]), {"a": 0})
        (said,) = logged(caplog)
        assert "with weights '', tenant '', and no index has a page of these" in said
        assert "pages of weights 'step-1000', tenant ''" in said
        counted = router.statistics
        assert (counted.requests, counted.missed, counted.other_namespace) == (6, 5, 5)
        # A tenant's first request is no news; weights that nobody serves are.
        router.route(prompt(1, 4), {"a": 0}, namespace=host.namespace("step-1000", "new"))
        assert logged(caplog) == []
        router.route(prompt(1, 4), {"a": 0}, namespace=host.namespace("step-1001"))
        assert "weights 'step-1001'" in logged(caplog)[0]
        assert router.statistics.other_namespace == 7
        assert router.route(prompt(1, 4), {"a": 0}, namespace=space).device_pages == 3


def test_keys_that_no_manager_makes(index: Made, caplog: pytest.LogCaptureFixture) -> None:
    """Routed in the right namespace, but hashed without it: no key is ever found."""
    a = index("a")
    with Router(None, {"a": a}, policy=POLICY) as router:
        for number in range(200):
            router.route(prompt(number, 4), {"a": 0})
        assert logged(caplog) == [], "there is nothing that could be found"
    fill(a, 1, 3)
    with Router(None, {"a": a}, policy=POLICY) as router:
        for number in range(63):
            router.route(prompt(100 + number, 4), {"a": 0})
        router.route(prompt(1, 4), {"a": 0})
        for number in range(63):
            router.route(prompt(100 + number, 4), {"a": 0})
        assert logged(caplog) == []
        for number in range(200):
            router.route(prompt(100 + number, 4), {"a": 0})
        (said,) = logged(caplog)
        assert "64 requests in a row had no page in any index" in said
        assert "10 tokens a page" in said
        assert router.statistics.missed == 63 + 63 + 200
        assert router.statistics.other_namespace == 0


# ---------------------------------------------------------------- indexes that come and go


def test_an_index_that_is_not_there_is_attached_when_it_appears(
    index: Made, segment_name: str
) -> None:
    clock = Clock()
    workers = {"a": f"{segment_name}-late", "b": None}
    with Router(None, workers, policy=POLICY, clock=clock) as router:
        choice = router.route(prompt(1, 3), {"a": 0, "b": 0})
        assert choice.stale == ("a",)
        assert "late" in router.problems["a"]
        late = index("late")
        fill(late, 1, 3)
        assert router.route(prompt(1, 3), {"a": 0, "b": 0}).stale == ("a",), "not looked yet"
        clock.now += 1
        choice = router.route(prompt(1, 3), {"a": 0, "b": 0})
        assert (choice.worker, choice.device_pages, choice.stale) == ("a", 3, ())
        assert router.route(prompt(1, 3), {"b": 0}, among=["b"]).stale == ()


def test_an_owner_that_leaves_takes_its_index_with_it(segment_name: str) -> None:
    clock = Clock()
    index = PageIndex.create(segment_name, pages=8)
    fill(index, 1, 3)
    with Router(None, {"a": segment_name, "b": index}, policy=POLICY, clock=clock) as router:
        assert router.route(prompt(1, 3), IDLE, among="ab").device_pages == 3
        index.close()
        clock.now += 1
        choice = router.route(prompt(1, 3), IDLE, among="ab")
        assert (choice.device_pages, choice.stale) == (0, ("a", "b"))
        clock.now += 1
        assert router.route(prompt(1, 3), IDLE, among="ab").stale == ("a", "b")
        with PageIndex.create(segment_name, pages=8) as other:
            fill(other, 1, 2)
            clock.now += 1
            choice = router.route(prompt(1, 3), IDLE, among="ab")
            assert (choice.device_pages, choice.stale) == (2, ())


def test_a_replaced_index(segment_name: str) -> None:
    clock = Clock()
    index = PageIndex.create(segment_name, pages=8)
    fill(index, 1, 3)
    with Router(None, {"a": segment_name}, policy=POLICY, clock=clock) as router:
        assert type(index.segment).unlink(segment_name, force=True)
        with PageIndex.create(segment_name, pages=4) as other:
            fill(other, 1, 1)
            choice = router.route(prompt(1, 3), {"a": 0})
            assert (choice.device_pages, choice.stale) == (0, ("a",))
            assert "replaced" in router.problems["a"]
            assert router.route_many(prompt(1, 3), (0, 3), {"a": 0})[0].stale == ("a",)
            clock.now += 1
            choice = router.route(prompt(1, 3), {"a": 0})
            assert (choice.device_pages, choice.stale) == (1, ())
    index.close()


@pytest.mark.crash
def test_a_dead_owner(segment_name: str, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        with_support(
            """
from support.keys import prompt
from lightcache import PageIndex
index = PageIndex.open(sys.argv[1], pages=8)
with index.reserve(prompt(1, 3)) as new:
    if len(new.new):
        new.publish()
print("ready", flush=True)
sys.stdin.read()
"""
        )
    )

    def owner() -> Any:
        made = subprocess.Popen(
            [sys.executable, script, segment_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        return made

    clock = Clock()
    first = owner()
    try:
        with Router(None, {"a": segment_name}, policy=POLICY, clock=clock) as router:
            assert router.route(prompt(1, 3), {"a": 0}).device_pages == 3
            first.send_signal(signal.SIGKILL)
            first.communicate()
            clock.now += 1
            choice = router.route(prompt(1, 3), {"a": 0})
            assert (choice.worker, choice.device_pages, choice.stale) == ("a", 0, ("a",))
            assert "lives" in router.problems["a"]
            # It is not held fast: its successor may replace it by another one.
            PageIndex.open(segment_name, pages=4, replace=True).close()
            first = owner()
            clock.now += 1
            choice = router.route(prompt(1, 3), {"a": 0})
            assert (choice.device_pages, choice.stale) == (3, ())
    finally:
        first.kill()
        first.communicate()
    PageIndex.open(segment_name, pages=8).close()


def test_liveness_is_looked_at_once_in_a_while(
    index: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    a = index("a")
    looks = []
    monkeypatch.setattr(PageIndex, "clients", lambda self: looks.append(1) or [])
    policy = RouterPolicy(page_tokens=1, refresh=5)
    with Router(None, {"a": a.name}, policy=policy, clock=clock) as router:
        for _ in range(9):
            router.route(prompt(1, 1), {"a": 0})
            clock.now += 1
        assert len(looks) == 2


def test_a_disabled_or_other_segment_is_no_error(index: Made, segment_name: str) -> None:
    from lightcache.shm import SharedList

    name = f"{segment_name}-list"
    with SharedList.create(name, nodes=4):
        workers = {"a": name, "b": None}
        with Router(None, workers, policy=POLICY) as router:
            assert router.route(prompt(1, 1), {"a": 0, "b": 0}).stale == ("a",)
            assert "expected" in router.problems["a"]
    off = index("off")
    fill(off, 1, 2)
    with Router(None, {"a": off.name}, policy=POLICY) as router:
        at = off.segment.address + SegmentHeader.disabled.offset
        for value, pages in ((0, 2), (1, 0)):
            ctypes.c_uint32.from_address(at).value = value
            assert router.route(prompt(1, 2), {"a": 0}).device_pages == pages
            assert bool(router.problems) is bool(value)


def test_a_host_that_is_gone_is_no_error(segment_name: str) -> None:
    clock = Clock()
    host = PageIndex.create(segment_name, pages=8, config={"page_tokens": 4})
    fill(host, 1, 3)
    with Router(host, {"a": None}, clock=clock) as router:
        assert router.route(prompt(1, 3), {"a": 0}).host_pages == 3
        host.close()
        choice = router.route(prompt(1, 3), {"a": 0})
        assert (choice.host_pages, choice.stale) == (0, ())
        assert "" in router.problems
        with PageIndex.create(segment_name, pages=8, config={"page_tokens": 4}) as again:
            fill(again, 1, 2)
            clock.now += 1
            assert router.route(prompt(1, 3), {"a": 0}).host_pages == 2


def test_it_holds_no_slot_and_changes_nothing(index: Made) -> None:
    host, a = index("host", page_tokens=4), index("a")
    fill(host, 1, 3)
    fill(a, 1, 2)

    def everything() -> list[bytes]:
        return [Path(f"/dev/shm/lightcache.{one.name}").read_bytes() for one in (host, a)]

    before = everything()
    with Router(host, {"a": a.name}) as router:
        assert len(a.clients()) == 1
        for _ in range(3):
            router.route(prompt(1, 3), {"a": 0})
            router.route_many(prompt(1, 3), np.array([0, 3]), {"a": 0})
        source = router._workers["a"].groups[Rule.prefix()]._index
        assert source is not None
        assert source.readonly
    assert everything() == before


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("host", "workers"),
    [
        (None, {}),
        (None, {"": None}),
        (None, {1: None}),
        (None, {"a": 7}),
        (None, {"a": "no/name"}),
        ("x", {"a": None}),
    ],
)
def test_routers_that_make_no_sense(host: Any, workers: Any) -> None:
    refused(ConfigError, "", Router, host, workers, policy=POLICY)


def test_somebody_must_know_the_size_of_a_page(index: Made) -> None:
    refused(ConfigError, "page_tokens", Router, None, {"a": None})
    refused(ConfigError, "page_tokens", Router, index("host"), {"a": None})


@pytest.mark.parametrize(
    "policy",
    [
        {"page_tokens": 0},
        {"page_tokens": 1.5},
        {"load_weight": -1},
        {"load_weight": math.nan},
        {"host_weight": 1.01},
        {"host_weight": "1"},
        {"refresh": math.inf},
        {"refresh": True},
    ],
)
def test_policies_out_of_range(policy: dict[str, Any]) -> None:
    refused(ConfigError, next(iter(policy)), RouterPolicy, **policy)


@pytest.mark.parametrize(
    "call",
    [
        {"keys": np.zeros((2, 2))},
        {"loads": {"a": 0}},
        {"loads": {"a": 0, "b": -1}},
        {"loads": {"a": 0, "b": math.inf}},
        {"loads": {"a": 0, "b": "1"}},
        {"among": []},
        {"among": ["z"]},
    ],
)
def test_calls_that_make_no_sense(call: dict[str, Any]) -> None:
    with Router(None, {"a": None, "b": None}, policy=POLICY) as router:
        arguments = {"keys": prompt(1, 2), "loads": {"a": 0, "b": 0}, **call}
        refused(ConfigError, "", router.route, **arguments)
        refused(ConfigError, "", router.route_many, offsets=np.array([0, 2]), **arguments)
        assert router.statistics.requests == 0
        with pytest.raises(ConfigError, match="offsets"):
            router.route_many(prompt(1, 2), np.array([0, 3]), {"a": 0, "b": 0})


def test_use_after_close(index: Made) -> None:
    a = index("a")
    router = Router(None, {"a": a, "b": a.name}, policy=POLICY)
    router.close()
    router.close()
    for call in (
        lambda: router.route(prompt(1, 1), {"a": 0, "b": 0}),
        lambda: router.route_many(prompt(1, 1), np.array([0, 1]), {"a": 0, "b": 0}),
    ):
        refused(Detached, "closed", call)
    assert a.peek(prompt(1, 1)) == 0, "the caller's own stays open"


# ---------------------------------------------------------------- the sums


pages = st.integers(0, 12)


@settings(deadline=None)
@given(
    n=st.integers(0, 12),
    host=pages,
    workers=st.lists(st.tuples(pages, st.integers(0, 50)), min_size=1, max_size=5),
    first=st.integers(0, (1 << 64) - 1),
    weights=st.tuples(st.sampled_from([0, 0.5, 1, 3]), st.sampled_from([0, 0.1, 0.5, 1])),
)
def test_the_chosen_cost_is_minimal(
    n: int, host: int, workers: list[tuple[int, int]], first: int, weights: tuple[float, float]
) -> None:
    policy = RouterPolicy(page_tokens=16, load_weight=weights[0], host_weight=weights[1])
    names = [f"w{i}" for i in range(len(workers))]
    router = Router(None, dict.fromkeys(names), policy=policy)
    device = [min(held, n) for held, _ in workers]
    host = min(host, n)
    tokens = [weights[0] * load for _, load in workers]
    choice = router._choose(n, first, host, device, _Query(names, tokens, "", ""))
    expected = {}
    for name, held, load in zip(names, device, tokens, strict=True):
        computed = n - max(held, host)
        loaded = max(held, host) - held
        expected[name] = (computed + weights[1] * loaded) * 16 + load
    assert choice.costs == pytest.approx(expected)
    assert choice.costs[choice.worker] == min(choice.costs.values())
    at = names.index(choice.worker)
    equal = [i for i, name in enumerate(names) if choice.costs[name] == choice.costs[names[at]]]
    assert tokens[at] == min(tokens[i] for i in equal)
    assert (choice.device_pages, choice.host_pages) == (device[at], host)
    # The order in which workers are named decides nothing.
    turned = _Query(names[::-1], tokens[::-1], "", "")
    assert router._choose(n, first, host, device[::-1], turned).worker == choice.worker
