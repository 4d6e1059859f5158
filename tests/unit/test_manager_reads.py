"""Reads from storage that a request waits for: how long, who gets what they bring, and that no call
of a scheduler blocks."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.manager_case import Shelf, World, tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache import Cache
from lightcache.errors import LeaseLost, OutOfPages, WaitTimeout
from lightcache.manager import Prompt, RequestOptions, WritePolicy
from lightcache.shm import layout
from lightcache.shm.layout import LOCK_OFFSET, LockRecord
from lightcache.shm.waiting import Condition
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier
from lightcache.storage.testing import FlakyStorage
from lightcache.storage.testing.faults import Fault

PROMPT = Prompt(tokens(18))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, for plans and what waits for reads."""
    made = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: made[0])
    return made


def shelved(worlds: Any, **how: Any) -> tuple[World, Any]:
    """Storage alone has PROMPT."""
    world = worlds(storage=Shelf, **how)
    shelf = world.manager._storage
    shelf.store(PROMPT)
    return world, shelf


# ---- taking


def test_not_yet_while_a_read_goes_on(worlds: Any) -> None:
    world, shelf = shelved(worlds)
    manager = world.manager
    assert manager.plan("a", PROMPT).pending
    for _ in range(3):
        assert manager.take("a") is None
    (reading,) = shelf.tasks
    reading.go_on()
    match = manager.take("a")
    assert (match.storage, match.usable, match.pending) == (16, 16, False)
    assert not reading.cancelled
    manager.release("a")
    assert manager.stats().requests == 1


def test_a_read_is_waited_for_a_second_and_serves_the_next(worlds: Any, now: list[float]) -> None:
    world, shelf = shelved(worlds)
    manager = world.manager
    manager.plan("a", PROMPT)
    now[0] += 5.0  # in the queue, which is nobody's waiting for it
    assert manager.take("a") is None
    now[0] += 0.99
    assert manager.take("a") is None
    now[0] += 0.01
    match = manager.take("a")
    assert (match.usable, match.pending) == (0, True)
    (reading,) = shelf.tasks
    assert not reading.cancelled
    reading.go_on()  # late, as of a storage that takes 11 s
    manager.release("a", publish=False)
    assert not reading.cancelled
    assert manager.plan("b", PROMPT).host == 16
    assert manager.take("b").usable == 16
    manager.release("b")


def test_the_time_follows_what_computing_takes(worlds: Any, now: list[float]) -> None:
    world, shelf = shelved(worlds, blocks=200, pages=200)
    manager = world.manager
    other = Prompt(tokens(512, 1))
    manager.plan("other", other)
    shelf.tasks.pop().go_on()  # nothing of it is stored
    manager.take("other")
    table = manager.allocate("other", 512)
    for begin, end in ((0, 256), (256, 512)):
        world.store.write(table, begin, stamps_of(other.tokens)[begin:end])
        now[0] += 32.0
        manager.commit("other", end)  # 8 tokens a second
    now[0] += 100.0
    manager.release("other")
    assert manager.state.pace.tokens_per_s == pytest.approx(8.0)
    manager.plan("a", PROMPT)
    assert manager.take("a") is None
    now[0] += 1.99
    assert manager.take("a") is None  # 16 tokens
    now[0] += 0.02
    assert manager.take("a").usable == 0
    manager.release("a")


def test_what_says_nothing_about_computing(worlds: Any) -> None:
    """A short prompt, and one of which a part was loaded."""
    world = worlds(blocks=200, pages=200)
    world.run("short", tokens(255))
    world.device.index.evict(200)
    assert world.run("loaded", Prompt(tokens(600))).load == 252
    assert not world.manager.state.pace.tokens_per_s
    world.run("long", tokens(256, 1))
    assert world.manager.state.pace.tokens_per_s > 0


def test_waiting_for_a_read(worlds: Any) -> None:
    world, shelf = shelved(worlds)
    manager = world.manager
    manager.plan("a", PROMPT)
    (reading,) = shelf.tasks
    limits = []

    def wait(timeout: float) -> None:
        limits.append(timeout)
        reading.go_on()
        raise WaitTimeout("as it may be")

    reading.wait = wait
    assert manager.take("a", wait=True).usable == 16
    assert len(limits) == 1
    assert 0.9 < limits[0] <= 1.0
    manager.release("a")


def test_what_is_being_read_for_lives_on(worlds: Any, now: list[float]) -> None:
    """Asking for it again and again keeps what it has pinned, though it is not planned again."""
    world, shelf = shelved(worlds, plan_ttl=10.0)
    manager = world.manager
    world.device.index._book.clock = lambda: now[0]
    manager.state.pace.note(256, 25600.0)  # 0.01 tokens a second: a read may take long
    part = Prompt(tokens(18)[:9])
    world.run("part", part, options=RequestOptions(tiers=frozenset({"device", "host"})))
    manager.plan("a", PROMPT)
    for _ in range(20):
        now[0] += 4.0
        assert manager.take("a") is None
        assert world.device.index.plans.pages == 2
    (reading,) = shelf.tasks
    reading.go_on()
    assert manager.take("a").usable == 16
    manager.release("a")


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("tier", ["device", "host", "nowhere"])
def test_a_plan_whose_time_is_up_is_looked_for_again(
    worlds: Any, now: list[float], tier: str, lost: bool
) -> None:
    world = worlds(plan_ttl=10.0)
    manager = world.manager
    for index in (world.device.index, world.cache.index):
        index._book.clock = lambda: now[0]
    if tier != "nowhere":
        world.run("first", PROMPT)
    if tier == "host":
        world.device.index.evict(32)
    manager.plan("a", PROMPT)
    now[0] += 11.0
    if lost:
        assert not world.device.index.plans.pages + world.cache.index.plans.pages
        world.device.index.evict(32)
        world.cache.evict(32)
    match = manager.take("a")
    assert match.usable == (0 if lost or tier == "nowhere" else 16)
    manager.release("a")
    refused(LeaseLost, "not planned", manager.take, "a")


# ---- a new Prompt in each step


def test_a_prompt_that_is_made_again_in_each_step(worlds: Any) -> None:
    world, shelf = shelved(worlds)
    manager = world.manager
    for _ in range(5):
        assert manager.plan("a", Prompt(tokens(18))).pending
        assert manager.plan_many(["a"], [Prompt(tokens(18).tolist())])[0].pending
        assert manager.plan("a", Prompt(tokens(18)), limit=17).pending
    (reading,) = shelf.tasks
    assert not reading.cancelled
    reading.go_on()
    assert manager.plan("a", Prompt(tokens(18))).usable == 16
    assert manager.take("a").usable == 16
    manager.release("a")
    for other in (Prompt(tokens(19)), Prompt(tokens(18), salt="other"), Prompt(tokens(18, 1))):
        assert other != PROMPT
        assert manager.plan("b", Prompt(tokens(18))).usable == 16
        assert manager.plan("b", other).usable == (16 if len(other) == 19 else 0)
    manager.cancel("b")
    assert [task.cancelled for task in shelf.tasks[1:]]


def test_equal_prompts() -> None:
    made = Prompt([1, 2, 3], salt="s", lora=b"l", tenant="t")
    same = Prompt([1, 2, 3], salt="s", lora=b"l", tenant="t")
    assert made == same
    assert hash(made) == hash(same)
    assert made != [1, 2, 3]
    for other in ({"salt": "o"}, {"lora": b"o"}, {"tenant": "o"}):
        assert made != Prompt([1, 2, 3], **{"salt": "s", "lora": b"l", "tenant": "t", **other})


# ---- no call blocks


@contextlib.contextmanager
def blocked() -> Iterator[list[str]]:
    """Notes where this thread waits for another one, but for one that it starts, or sleeps."""
    me, found = threading.get_ident(), []
    sleep = time.sleep

    def noted(wait: Any) -> Any:
        def noting(self: Any, timeout: float | None = None) -> bool:
            starts = sys._getframe(2).f_code is threading.Thread.start.__code__
            if threading.get_ident() == me and timeout != 0 and not starts:
                found.append(f"wait {timeout}")
            return wait(self, timeout)

        return noting

    def slept(seconds: float) -> None:
        if threading.get_ident() == me:
            found.append(f"sleep {seconds}")
        sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (threading.Condition, Condition):
            patch.setattr(kind, "wait", noted(kind.wait))
        patch.setattr(time, "sleep", slept)
        yield found


def hanging(cache: Cache) -> StorageTier:
    """Every call of it hangs for ever."""
    inner = MemoryStorage(StorageSpec.of(cache))
    script: Any = {what: [Fault("hang")] * 99 for what in ("contains", "read", "write")}
    return StorageTier(cache, FlakyStorage(inner, script=script), timeout=1e6)


@pytest.mark.parametrize("write", list(WritePolicy))
def test_no_call_waits_for_a_storage_that_hangs(
    worlds: Any, now: list[float], write: WritePolicy
) -> None:
    world = worlds(ends_busy=True, storage=hanging, write=write)
    manager = world.manager
    tier: Any = manager._storage
    names = [f"r{i}" for i in range(4)]
    prompts = [Prompt(tokens(18, i)) for i in range(4)]
    with blocked() as found:
        for _ in range(3):
            manager.plan(names[0], prompts[0])
            manager.plan_many(names, prompts)
            assert [manager.take(name) for name in names] == [None] * 4
            manager.stats()
        now[0] += 1.0
        for name, prompt in zip(names, prompts, strict=True):
            assert manager.take(name).usable == 0
            table = manager.allocate(name, 20)
            manager.load(name).wait_on()
            world.store.write(table, 0, stamps_of(prompt.tokens))
            manager.commit(name, 18)
            manager.poll()
        manager.release(names[0])
        manager.release_many(names[1:])
        manager.plan("late", Prompt(tokens(18, 9)))
        manager.cancel("late")
        manager.can_allocate(32, evict=True)
        manager.poll()
        manager.stats()
        manager.gauges()
    assert found == []
    assert tier.storage.wait_hanging()
    tier.storage.let_go()


def test_no_call_of_a_hybrid_model_waits_either(
    hybrids: Any, now: list[float], wait_until: Any
) -> None:
    world = hybrids(state_storage=hanging, storage=hanging)
    hybrid, tiers = world.hybrid, (world.storage, world.manager._storage)
    with blocked() as found:
        for _ in range(3):
            assert hybrid.plan("a", Prompt(tokens(42))).pending
            assert hybrid.plan_many(["a"], [Prompt(tokens(42))])[0].pending
            assert hybrid.take("a") is None
        now[0] += 1.0
        assert hybrid.take("a").usable == 0
        hybrid.allocate("a", 42)
        hybrid.restore(["a"])
        hybrid.load("a").wait_on()
        hybrid.commit("a", 42)
        hybrid.poll()
        hybrid.stats()
        hybrid.release("a", at=42)
        hybrid.plan("late", Prompt(tokens(42, 1)))
        hybrid.cancel("late")
    assert found == []
    wait_until(lambda: world.storage.stats().tasks_failed == 1, "the one that was cancelled")
    for tier in tiers:
        tier.storage.let_go()
        tier.close()


def test_a_state_comes_and_then_the_keys_and_values_up_to_it(hybrids: Any, wait_until: Any) -> None:
    world = hybrids(state_storage=kept, storage=kept)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    for tier, evict in (
        (world.storage, (world.slots, world.states)),
        (world.manager._storage, (world.world.index, world.manager.host)),
    ):
        world.settle()
        assert tier._executor.wait_idle(60.0)
        for index in evict:
            index.evict(99)
    hybrid = world.hybrid
    hybrid.plan("b", prompt)
    assert hybrid.take("b") is None or world.storage.stats().loaded

    def come() -> bool:
        found.append(hybrid.take("b"))
        return found[-1] is not None

    found: list[Any] = []
    wait_until(come, "state and KV")
    assert (found[-1].usable, found[-1].storage_tokens) == (40, 40)
    hybrid.release("b", publish=False)


def kept(cache: Cache) -> StorageTier:
    """Everything that reaches the host is stored."""
    return StorageTier(cache, MemoryStorage(StorageSpec.of(cache)), write_pages=cache.pages)


@contextlib.contextmanager
def held(cache: Any) -> Iterator[list[float]]:
    """Another client holds an index's lock. Notes for how long each call would wait for it, and
    lets none of them wait."""
    index, asked = cache, []
    segment = index.segment
    record = LockRecord.from_address(segment.address + LOCK_OFFSET)
    with type(index).attach(segment.name, role="holder") as holder:
        client = holder.client_id
        word = client.slot | (client.epoch << layout.LOCK_EPOCH_SHIFT)

        def deadline(seconds: float | None) -> int:
            asked.append(float("inf") if seconds is None else seconds)
            return 0

        assert record.word == 0
        record.word = ctypes.c_uint32(word).value
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("lightcache.shm.locking.deadline_ns", deadline)
                yield asked
        finally:
            record.word = 0


@pytest.mark.parametrize("write", list(WritePolicy))
@pytest.mark.parametrize("which", ["host", "device"])
def test_no_call_waits_long_for_a_lock(
    worlds: Any, now: list[float], which: str, write: WritePolicy
) -> None:
    world = worlds(storage=hanging, write=write, blocks=48, pages=64)
    manager = world.manager
    for i in range(7):
        manager.plan(i, Prompt(tokens(18, i), tenant=f"t{i % 2}"))
        assert manager.take(i) is None
    now[0] += 1.0
    for i in range(7):
        assert manager.take(i) is not None
        manager.allocate(i, 20)
    index = world.cache.index if which == "host" else world.device.index
    with held(index) as asked:
        for first in (0, 3):
            for name, call in calls_of(manager, first):
                before = len(asked)
                with contextlib.suppress(OutOfPages):
                    call()
                assert sum(asked[before:]) <= 0.05, (name, asked[before:])
            assert sum(asked) <= 0.02  # the second time none is waited for
    assert asked
    assert not manager.disabled
    now[0] += 2.0
    manager.commit(6, 18)  # what was missed is done by later calls
    manager.release(6)
    manager.release_many(["new0", "new3"])
    manager.poll()
    tier: Any = manager._storage
    tier.storage.let_go()
    tier.close()


def calls_of(manager: Any, first: int) -> list[tuple[str, Callable[[], object]]]:
    """What a scheduler calls, for three requests that run and one that is new."""
    new, three = f"new{first}", [first, first + 1, first + 2]
    return [
        ("plan", lambda: manager.plan(new, Prompt(tokens(18, 9), tenant=new))),
        ("plan_many", lambda: manager.plan_many(["more"], [Prompt(tokens(18, 8))])),
        ("take", lambda: manager.take(new)),
        ("allocate", lambda: manager.allocate(first, 40)),
        ("can_allocate", lambda: manager.can_allocate(30, evict=True)),
        ("load", lambda: manager.load(first)),
        ("commit", lambda: manager.commit_many(three, [18, 18, 18])),
        ("poll", manager.poll),
        ("release", lambda: manager.release(first)),
        ("release_many", lambda: manager.release_many(three[1:])),
        ("cancel", lambda: manager.cancel("more")),
        ("stats", manager.stats),
        ("gauges", manager.gauges),
    ]
