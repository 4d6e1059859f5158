"""StorageTier with a real cache: writing, prefetching, the queue, and bad input."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.serving import make_tier
from support.storing import (
    KEYS,
    PAGE_TOKENS,
    Recorder,
    cache,
    empty,
    fill,
    full,
    holds,
    make_cache,
    sound,
    store,
)

from lightcache import Cache, ConfigError, LayoutMismatch, PermissionDenied, WaitTimeout
from lightcache.storage import (
    MemoryStorage,
    StorageSpec,
    StorageTask,
    StorageTier,
    TaskState,
)
from lightcache.storage.conformance import make_keys
from lightcache.storage.queueing import JobQueue

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED

__all__ = ["cache", "make_tier"]


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
    with StorageTier(cache, storage, threads=1, write_pages=8) as tier:
        first = tier.write(KEYS[:6])
        assert storage.arrived.acquire(timeout=60.0)
        assert tier.stats().writing == 6
        result = tier.write(KEYS[6:9]).wait()
        assert (result.refused, result.stored) == (3, 0)
        assert "3 pages are more" in result.reasons[0]
        storage.gate.set()
        assert first.wait().stored == 6
        assert tier.write(KEYS[6:9]).wait().stored == 3


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
    def job(kind: str, request: object) -> Any:
        return SimpleNamespace(task=SimpleNamespace(kind=kind), request=request)

    queue = JobQueue()
    waiting, begun, read = job("write", "a"), job("write", "b"), job("read", None)
    queue.put(waiting)
    queue.put_back(begun)
    queue.put(read)
    assert sorted(map(id, queue.jobs())) == sorted(map(id, (waiting, begun, read)))
    assert [queue.pop() for _ in range(4)] == [read, begun, waiting, None]
    assert not queue.remove(begun)


def test_a_task_waits_with_a_limit(make_tier: Any, cache: Cache) -> None:
    storage = Recorder(StorageSpec.of(cache))
    storage.closed_gate_for = "contains"
    storage.gate.clear()
    with make_tier(cache, storage, threads=1) as tier:
        task = tier.prefetch(KEYS)
        with pytest.raises(WaitTimeout, match="20 pages is not over"):
            task.wait(0.0)
        assert not task.over
        storage.gate.set()
        assert task.wait().absent == 20


def test_a_task_is_counted_before_it_is_over() -> None:
    task, seen = StorageTask("read", 4, None), []
    assert task._end(failed=False, count=lambda found: seen.append((found.pages, task.over)))
    assert not task._end(failed=True, count=lambda found: seen.append((found.pages, task.over)))
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
        {"read_policy": "later"},
        {"busy": "fight"},
        {"group": 0},
        {"write_pages": 97},
        {"timeout": -1.0},
        {"grace": None},
        {"retry": float("nan")},
        {"failures": 0},
        {"read_seconds": "1"},
    ],
)
def test_arguments_out_of_range(make_tier: Any, cache: Cache, how: Any) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=next(iter(how))):
        make_tier(cache, empty(cache), **how)
    assert threading.active_count() == before


def test_a_storage_for_other_pages(make_tier: Any, cache: Cache) -> None:
    for spec in (StorageSpec(8192), StorageSpec(4096, "another model")):
        with pytest.raises(LayoutMismatch, match=r"StorageSpec\.of"):
            make_tier(cache, MemoryStorage(spec))
    with pytest.raises(ConfigError, match="expected a Storage"):
        make_tier(cache, {})  # type: ignore[arg-type]
    make_tier(cache, MemoryStorage(StorageSpec(4096))).close()


def test_a_cache_that_is_attached_read_only(cache: Cache) -> None:
    with Cache.attach(cache.name, readonly=True, secret=b"a secret of tests") as reader:
        with pytest.raises(PermissionDenied):
            StorageTier(reader, empty(cache))


def test_bad_calls(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS)
    with make_tier(cache, empty(cache)) as tier, cache.match(KEYS) as lease:
        with pytest.raises(ConfigError, match="keys"):
            tier.write(KEYS.astype(np.int64))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="keys"):
            tier.prefetch(KEYS[::2])
        with pytest.raises(ConfigError, match="start"):
            tier.prefetch(KEYS, 21)
        with pytest.raises(ConfigError, match="lease"):
            tier.write(KEYS[:5], lease=lease)
        with pytest.raises(ConfigError, match="hashable"):
            tier.write(KEYS, [])
        with pytest.raises(ConfigError, match="timeout"):
            tier.prefetch(KEYS, timeout="soon")  # type: ignore[arg-type]


def test_a_cache_without_page_tokens(segment_name: str) -> None:
    with make_cache(segment_name, page_tokens=None) as cache:
        with pytest.raises(ConfigError, match="min_tokens"):
            StorageTier(cache, empty(cache), min_tokens=1)
        with StorageTier(cache, full(cache)) as tier:
            task = tier.prefetch(KEYS)
            task.wait(60.0)
            with pytest.raises(ConfigError, match="page_tokens"):
                _ = task.tokens
