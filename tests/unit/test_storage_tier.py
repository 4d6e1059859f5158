"""StorageTier with a real cache: writing, prefetching, the queue, and bad input."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.refusals import refused
from support.storing import (
    KEYS,
    PAGE_TOKENS,
    Recorder,
    empty,
    fill,
    full,
    holds,
    make_cache,
    sound,
    store,
)

from lightcache import Cache, ConfigError, LayoutMismatch, PermissionDenied, WaitTimeout
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier, TaskState
from lightcache.storage.executor import READ, WRITE, WorkQueue
from lightcache.storage.tasks import TaskProgress
from lightcache.storage.testing import Fault, FlakyStorage
from lightcache.storage.testing.conformance import make_keys

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED

# ---------------------------------------------------------------- it works


def test_there_and_back(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS)
    storage = empty(cache)
    with make_tier(cache, storage, group=8) as tier:
        task = tier.write(KEYS, "request 1")
        result = task.wait()
        assert task.state is FINISHED
        assert (result.pages, result.prefix, result.stored) == (20, 20, 20)
        assert task.tokens == 20 * PAGE_TOKENS
        assert holds(storage, KEYS) == 20
        assert cache.evict(96) == 20
        task = tier.prefetch(KEYS)
        result = task.wait()
        assert (result.pages, result.prefix, result.loaded, result.absent) == (20, 20, 20, 0)
        assert result.reasons == ()
        assert sound(cache, KEYS) == 20
        found = tier.stats()
        assert (found.loaded, found.stored, found.tasks_finished) == (20, 20, 2)
        assert (found.queued, found.running, found.writing, found.state) == (0, 0, 0, "closed")


def test_what_is_stored_is_not_written_again(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS)
    storage = Recorder(StorageSpec.of(cache))
    with make_tier(cache, storage) as tier:
        tier.write(KEYS[:5]).wait()
        result = tier.write(KEYS[:9]).wait()
        assert (result.present, result.stored, result.prefix) == (5, 4, 9)
        result = tier.write(KEYS[:9]).wait()
        assert (result.present, result.stored) == (9, 0)
    assert storage.calls == [
        *[("contains", 5), ("write", 5), ("contains", 9), ("write", 4), ("contains", 9)]
    ]


def test_each_group_hangs_on_the_one_before(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS[:10])
    storage = Recorder(StorageSpec.of(cache))
    with make_tier(cache, storage, group=4) as tier:
        assert tier.write(KEYS[:10]).wait().stored == 10
    assert storage.parents[0] is None
    parents = [each.tolist() for each in storage.parents[1:]]
    assert parents == [KEYS[3:4].tolist(), KEYS[7:8].tolist()]


def test_a_backend_cannot_write_to_what_it_is_to_store(make_tier: Any, cache: Cache) -> None:
    seen: list[bool] = []

    class Curious(MemoryStorage):
        def write(self, keys: Any, buffers: Any, *, timeout: float, parent: Any = None) -> Any:
            seen.extend(memoryview(each).readonly for each in buffers)
            return super().write(keys, buffers, timeout=timeout)

    fill(cache, KEYS[:3])
    with make_tier(cache, Curious(StorageSpec.of(cache))) as tier:
        assert tier.write(KEYS[:3]).wait().stored == 3
    assert seen == [True] * 3


def test_only_what_the_cache_lacks_is_read(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS[:7])
    storage = Recorder(StorageSpec.of(cache))
    store(storage, KEYS[:15])
    storage.calls.clear()
    with make_tier(cache, storage) as tier:
        result = tier.prefetch(KEYS, 4).wait()
        assert (result.pages, result.present, result.loaded, result.absent) == (16, 3, 8, 5)
        assert result.prefix == 11
        assert storage.calls == [("contains", 13), ("read", 8)]
        assert sound(cache, KEYS) == 15


def test_a_hole_in_the_cache_is_read_and_the_rest_left_alone(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS)
    with cache.match(KEYS) as hit:
        ends = hit.pages.tolist()
    assert len(ends) == 20
    storage = Recorder(StorageSpec.of(cache))
    store(storage, KEYS)
    cache.evict(96)
    fill(cache, KEYS[3:6].copy())
    storage.calls.clear()
    with make_tier(cache, storage) as tier:
        result = tier.prefetch(KEYS[:8]).wait()
        assert (result.loaded, result.present, result.prefix) == (5, 3, 8)
    assert ("read", 5) in storage.calls
    assert sound(cache, KEYS) == 8


def test_nothing_to_do(make_tier: Any, cache: Cache) -> None:
    storage = Recorder(StorageSpec.of(cache))
    with make_tier(cache, storage) as tier:
        assert tier.prefetch(KEYS, 20).wait().pages == 0
        result = tier.write(KEYS).wait()
        assert (result.skipped, result.reasons) == (20, ("nothing of it is in the cache",))
        assert tier.prefetch(KEYS).wait().absent == 20
    assert storage.calls == [("contains", 20)]


# ---------------------------------------------------------------- what is worth writing


def test_a_short_prompt_is_not_written(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS)
    with make_tier(cache, empty(cache), min_tokens=4 * PAGE_TOKENS) as tier:
        result = tier.write(KEYS[:3]).wait()
        assert (result.skipped, result.stored) == (3, 0)
        assert "48 tokens" in result.reasons[0]
        assert tier.write(KEYS[:3], tokens=4 * PAGE_TOKENS).wait().stored == 3
        assert tier.write(KEYS[:4]).wait().stored == 1


def test_pages_are_written_when_they_were_seen_often_enough(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS)
    with make_tier(cache, empty(cache), seen=2, seen_keys=8) as tier:
        assert tier.write(KEYS[:4]).wait().skipped == 4
        result = tier.write(KEYS[:6]).wait()
        assert (result.stored, result.skipped) == (4, 2)
        assert "not seen often enough" in result.reasons[0]
        tier.write(KEYS[10:20]).wait()  # more than are remembered: the last two are forgotten
        assert tier.write(KEYS[10:20]).wait().stored == 8


def test_writes_pin_no_more_than_they_may(cache: Cache) -> None:
    fill(cache, KEYS)
    storage = Recorder(StorageSpec.of(cache))
    storage.gate.clear()
    with StorageTier(cache, storage, threads=1, write_pages=8, group=4) as tier:
        first = tier.write(KEYS[:6])
        assert storage.arrived.acquire(timeout=60.0)
        assert tier.stats().writing == 6
        second = tier.write(KEYS[6:12])
        assert tier.stats().writing == 8  # of its six pages two
        third = tier.write(KEYS[12:15])
        assert tier.stats().writing == cache.check().pins == 8
        storage.gate.set()
        assert [task.wait().stored for task in (first, second, third)] == [6, 6, 3]
        assert tier.stats().writing == cache.check().pins == 0
    with StorageTier(cache, empty(cache), write_pages=0) as tier:
        assert tier.write(KEYS).wait().refused == 20


def test_a_prompt_of_more_pages_than_writes_may_pin_is_stored(
    make_tier: Any, cache: Cache, caplog: Any
) -> None:
    """By the default, a quarter of the pool."""
    keys = make_keys(90, seed=6)
    fill(cache, keys)
    most, storage = [0], empty(cache)
    write = storage.write

    def counted(*given: Any, **how: Any) -> Any:
        most[0] = max(most[0], cache.check().pins)
        return write(*given, **how)

    storage.write = counted  # type: ignore[method-assign]
    with make_tier(cache, storage) as tier:
        result = tier.write(keys).wait(60.0)
        assert (result.stored, result.refused, result.skipped) == (90, 0, 0)
        assert 24 <= most[0] <= 24 + 16
        assert tier.stats().unstored == 0
    assert holds(storage, keys) == 90
    assert "not stored" not in caplog.text


def test_what_was_evicted_before_its_turn_is_counted_and_told_once(
    cache: Cache, caplog: Any
) -> None:
    storage = Recorder(StorageSpec.of(cache))
    storage.gate.clear()
    with StorageTier(cache, storage, threads=1, write_pages=4, group=4) as tier:
        for seed in (6, 7):
            keys = make_keys(20, seed=seed)
            fill(cache, keys)
            task = tier.write(keys)
            assert storage.arrived.acquire(timeout=60.0)
            cache.evict(96)  # all but those that are pinned
            storage.gate.set()
            assert (task.wait(60.0).stored, task.result.skipped) == (4, 16)
            storage.gate.clear()
        found = tier.stats()
        assert (found.unstored, found.unstored_gone, found.unstored_unreachable) == (32, 8, 24)
        storage.gate.set()
    assert caplog.text.count("4 pages of a prompt were not stored: they were evicted") == 1


@pytest.mark.parametrize("left", [0, 5])
def test_what_the_cache_does_not_have_is_counted_and_not_logged(
    make_tier: Any, cache: Cache, caplog: Any, left: int
) -> None:
    with make_tier(cache, empty(cache)) as tier:
        for seed in (6, 7):
            keys = make_keys(20, seed=seed)
            fill(cache, keys[:left])
            result = tier.write(keys).wait(60.0)
            assert (result.stored, result.skipped) == (left, 20 - left)
            assert "cache" in result.reasons[0]
        found = tier.stats()
        assert found.unstored == found.unstored_absent == 2 * (20 - left)
        assert tier.take_figures()["unstored_absent"] == 2 * (20 - left)
    assert "not stored" not in caplog.text  # ordinary where the pool is full


@pytest.mark.parametrize("kind", ["failed", "refused"])
def test_pages_that_are_not_stored_are_counted_by_reason(
    make_tier: Any, cache: Cache, caplog: Any, kind: str
) -> None:
    fill(cache, KEYS)
    fault = Fault("fail" if kind == "failed" else "refuse", at=1)
    flaky = FlakyStorage(empty(cache), script={"write": [fault] * 2})
    with make_tier(cache, flaky, group=4, min_tokens=2 * PAGE_TOKENS) as tier:
        for _ in range(2):
            tier.write(KEYS).wait(60.0)
        tier.write(KEYS[:1]).wait(60.0)
        found = tier.stats()
        by_kind = (found.unstored_failed, found.unstored_refused, found.unstored_unreachable)
        assert sum(by_kind[:2]) == getattr(found, f"unstored_{kind}") == 2
        assert found.unstored == sum(by_kind) > 2
        assert found.skipped_short == 1
    assert caplog.text.count("1 pages of a prompt were not stored") == 1


def test_pages_of_tasks_that_end_before_are_counted(cache: Cache) -> None:
    now = [0.0]
    fill(cache, KEYS)
    flaky = FlakyStorage(empty(cache), script={"write": [None, Fault("hang")]})
    how: Any = {"threads": 1, "group": 4, "timeout": 10.0, "grace": 0.0, "clock": lambda: now[0]}
    with StorageTier(cache, flaky, **how) as tier:
        task = tier.write(KEYS)
        assert flaky.wait_hanging()
        now[0] = 10.0
        tier.poll()
        assert (task.result.stored, task.result.skipped) == (4, 16)
        assert tier.write(KEYS).wait(60.0).skipped == 20
        found = tier.stats()
        assert (found.unstored, found.unstored_ended, found.unstored_disabled) == (36, 16, 20)
        flaky.let_go()


def test_a_write_that_gets_on_has_its_time_anew(cache: Cache) -> None:
    """Each group takes 6 of 10 seconds."""
    now = [0.0]
    fill(cache, KEYS)
    storage = empty(cache)
    write = storage.write

    def slow(*given: Any, **how: Any) -> Any:
        now[0] += 6.0
        return write(*given, **how)

    storage.write = slow  # type: ignore[method-assign]
    with StorageTier(cache, storage, group=4, timeout=10.0, clock=lambda: now[0]) as tier:
        assert tier.write(KEYS).wait(60.0).stored == 20
    assert now[0] == 30.0


# ---------------------------------------------------------------- the queue


def test_calls_have_pages_of_one_request_and_reads_go_first(cache: Cache) -> None:
    fill(cache, KEYS)
    storage = Recorder(StorageSpec.of(cache))
    wanted = make_keys(4, seed=8)
    store(storage, wanted)
    storage.calls.clear()
    storage.batches.clear()
    storage.gate.clear()
    with StorageTier(cache, storage, threads=1, group=4) as tier:
        a = tier.write(KEYS[:6].copy(), "a")
        b = tier.write(KEYS[10:13].copy(), "b")
        again = tier.write(KEYS[:9].copy(), "a")
        assert storage.arrived.acquire(timeout=60.0)  # in the first group of a
        read = tier.prefetch(wanted)
        assert (a.state, b.state) == (TaskState.RUNNING, TaskState.NOT_STARTED)
        storage.gate.set()
        for task in (a, b, again, read):
            assert task.wait(60.0).prefix == task.result.pages
    assert storage.calls == [
        *[("contains", 6), ("write", 4)],
        *[("contains", 4), ("read", 4)],  # between two groups of a write
        ("write", 2),
        *[("contains", 9), ("write", 3)],  # the same request's before those of b
        *[("contains", 3), ("write", 3)],
    ]
    for batch in storage.batches:
        assert len({any((key == row).all() for row in KEYS[10:13]) for key in batch}) == 1


def test_a_write_that_was_put_back_is_next() -> None:
    def work(kind: int, group: object) -> Any:
        return SimpleNamespace(kind=kind, group=group)

    queue = WorkQueue()
    waiting, begun, read = work(WRITE, "a"), work(WRITE, "b"), work(READ, "c")
    queue.put(waiting)
    queue.put(begun, back=True)
    queue.put(read)
    assert queue.all() == [read, begun, waiting]
    assert len(queue) == 3
    assert [queue.pop() for _ in range(4)] == [read, begun, waiting, None]
    assert not queue.remove(begun)
    assert len(queue) == 0


def test_a_task_waits_with_a_limit(make_tier: Any, cache: Cache) -> None:
    storage = Recorder(StorageSpec.of(cache))
    storage.closed_gate_for = "contains"
    storage.gate.clear()
    with make_tier(cache, storage, threads=1) as tier:
        task = tier.prefetch(KEYS)
        refused(WaitTimeout, "20 pages has not ended", task.wait, 0.0)
        assert not task.ended
        storage.gate.set()
        assert task.wait().absent == 20


def test_a_task_is_counted_before_it_is_over() -> None:
    task, seen = TaskProgress("read", 4, None), []
    task.count(loaded=4)
    assert task.end(failed=False, count=lambda counts: seen.append((counts["loaded"], task.ended)))
    assert not task.end(failed=True, count=lambda counts: seen.append((4, task.ended)))
    assert seen == [(4, False)]
    assert task.state is FINISHED


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "how",
    [
        {"threads": 0},
        {"min_tokens": -1},
        {"seen": 0},
        {"seen_keys": 0},
        {"group": 0},
        {"write_pages": 97},
        {"timeout": -1.0},
        {"grace": None},
        {"retry": float("nan")},
        {"failures": 0},
    ],
)
def test_arguments_out_of_range(make_tier: Any, cache: Cache, how: Any) -> None:
    before = set(threading.enumerate())
    refused(ConfigError, next(iter(how)), make_tier, cache, empty(cache), **how)
    assert not set(threading.enumerate()) - before


def test_a_storage_for_other_pages(make_tier: Any, cache: Cache) -> None:
    for spec in (StorageSpec(8192), StorageSpec(4096, "another model")):
        refused(LayoutMismatch, r"StorageSpec\.of", make_tier, cache, MemoryStorage(spec))
    refused(ConfigError, "expected a Storage", make_tier, cache, {})
    make_tier(cache, MemoryStorage(StorageSpec(4096))).close()


def test_a_cache_that_is_attached_read_only(cache: Cache) -> None:
    with Cache.attach(cache.name, readonly=True, secret=b"a secret of tests") as reader:
        refused(PermissionDenied, "", StorageTier, reader, empty(cache))


def test_bad_calls(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS)
    with make_tier(cache, empty(cache)) as tier, cache.match(KEYS) as lease:
        refused(ConfigError, "keys", tier.write, KEYS.astype(np.int64))
        refused(ConfigError, "keys", tier.prefetch, KEYS[::2])
        refused(ConfigError, "start", tier.prefetch, KEYS, 21)
        refused(ConfigError, "lease", tier.write, KEYS[:5], lease=lease)
        refused(ConfigError, "hashable", tier.write, KEYS, [])
        refused(ConfigError, "timeout", tier.prefetch, KEYS, timeout="soon")


def test_a_cache_without_page_tokens(segment_name: str) -> None:
    with make_cache(segment_name, page_tokens=None) as cache:
        refused(ConfigError, "min_tokens", StorageTier, cache, empty(cache), min_tokens=1)
        with StorageTier(cache, full(cache)) as tier:
            task = tier.prefetch(KEYS)
            task.wait(60.0)
            refused(ConfigError, "page_tokens", lambda: task.tokens)
