"""StorageTier when calls hang, and when tasks are given up."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.refusals import refused
from support.storing import (
    KEYS,
    Recorder,
    empty,
    fill,
    full,
    given_back,
    holds,
    make_cache,
    sound,
    store,
    threads,
)

from lightcache import Cache, ConfigError, Detached, InUse, LockTimeout
from lightcache.storage import MemoryStorage, StorageSpec, StorageStats, StorageTier, TaskState
from lightcache.storage.testing import Fault, FlakyStorage
from lightcache.storage.testing.conformance import make_keys

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED

# ---------------------------------------------------------------- calls that hang


def test_a_read_that_hangs(cache: Cache) -> None:
    now = [0.0]
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("hang", at=2)]})
    tier = StorageTier(cache, flaky, group=4, timeout=10.0, grace=0.0, clock=lambda: now[0])
    task = tier.prefetch(KEYS)
    assert flaky.wait_hanging()
    now[0] = 10.0
    tier.poll()
    result = task.wait(60.0)
    assert task.state is FAILED
    assert result.loaded == 4
    assert "hangs" in result.reasons[0]
    assert result.reasons[0].startswith("timed out")
    assert tier.stats().stuck == tier.stats().timeouts == 1
    # Its keys are nobody's, and its pages not to be had, for it may still write into them.
    others = make_keys(92, seed=4)
    with cache.reserve(KEYS[:8].copy(), 4) as mine:
        assert len(mine.pages) == 4
        with cache.reserve(others) as more:
            assert len(more.pages) == 96 - 4 - 8  # 4 are ready and of our chain, 4 hang
            for page in (*mine.pages.tolist(), *more.pages.tolist()):
                cache.pool[page][:] = 7
            flaky.let_go()
            assert tier.close()
            for page in (*mine.pages.tolist(), *more.pages.tolist()):
                assert (cache.pool[page] == 7).all()
    assert sound(cache, KEYS) == 4


def test_a_write_that_hangs_keeps_its_pages(cache: Cache) -> None:
    fill(cache, KEYS)
    flaky = FlakyStorage(empty(cache), script={"write": [Fault("hang", at=1)]})
    now = [0.0]
    tier = StorageTier(cache, flaky, timeout=10.0, grace=0.0, clock=lambda: now[0])
    task = tier.write(KEYS[:8])
    assert flaky.wait_hanging()
    now[0] = 10.0
    tier.poll()
    task.wait(60.0)  # the watching thread may have been faster, and be at it
    assert task.state is FAILED
    assert tier.stats().stuck == 1
    assert cache.check().pins == 8
    other = tier.write(KEYS[:10].copy(), timeout=60.0)
    assert "disabled" in other.wait(60.0).reasons[0]  # nothing came back in all of its time
    assert cache.check().pins == 8
    assert not tier.close(0.0)
    assert cache.check().pins == 8
    flaky.let_go()
    assert tier.close()
    assert cache.check().pins == 0


def test_all_threads_hang(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang"), Fault("hang")]})
    now = [0.0]
    tier = StorageTier(cache, flaky, timeout=10.0, grace=0.0, clock=lambda: now[0], threads=2)
    tasks = [tier.prefetch(KEYS[:2].copy()), tier.prefetch(KEYS[5:7].copy())]
    assert flaky.wait_hanging(2)
    tasks.append(tier.prefetch(KEYS[10:]))
    tasks.append(tier.write(KEYS))
    now[0] = 10.0
    tier.poll()
    for task in tasks:
        task.wait(60.0)
    assert [task.state for task in tasks] == [FAILED, FAILED, FAILED, FINISHED]
    assert "in the queue" in tasks[2].result.reasons[0]
    flaky.let_go()
    assert tier.close()


def test_waiting_in_the_queue_has_a_limit(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang")]})
    with StorageTier(cache, flaky, threads=1) as tier:
        running = tier.prefetch(KEYS)
        assert flaky.wait_hanging()
        queued = tier.prefetch(KEYS, timeout=0.05)
        assert "in the queue" in queued.wait(60.0).reasons[0]
        assert queued.state is FAILED
        flaky.let_go()
        assert running.wait(60.0).loaded == 20


def test_a_call_that_comes_back_late_publishes_nothing(cache: Cache) -> None:
    now = [0.0]
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    tier = StorageTier(cache, flaky, timeout=10.0, grace=1.0, clock=lambda: now[0])
    task = tier.prefetch(KEYS[:4])
    assert flaky.wait_hanging()
    now[0] = 10.5
    tier.poll()
    assert not task.ended  # within its grace
    now[0] = 11.0
    tier.poll()
    task.wait(60.0)  # the watching thread may have been faster, and be at it
    assert task.state is FAILED
    flaky.let_go()
    assert tier.close()
    assert cache.stats().ready == 0
    assert task.result.loaded == 0
    assert tier.stats().stuck == 0


# ---------------------------------------------------------------- giving up


def test_cancelling(cache: Cache) -> None:
    fill(cache, KEYS[:4])
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    with StorageTier(cache, flaky, threads=1, group=4) as tier:
        running = tier.prefetch(KEYS, 4)
        assert flaky.wait_hanging()
        queued = tier.write(KEYS[:4])
        assert queued.state is TaskState.NOT_STARTED
        assert tier.stats().queued == 1
        queued.cancel()
        assert (queued.state, queued.result.reasons) == (FAILED, ("cancelled",))
        running.cancel()
        given_back(tier)
        with cache.reserve(KEYS[:8], 4) as mine:  # nobody waits for what was given up
            assert len(mine.pages) == 4
        flaky.let_go()
        assert running.wait(60.0).reasons == ("cancelled",)
        assert cache.check().pins == 0
        running.cancel()
        queued.cancel()
        assert running.result.loaded == 0
    assert sound(cache, KEYS) == 4


def test_cancelling_a_write_ends_it_behind_the_call(cache: Cache) -> None:
    fill(cache, KEYS)
    storage = Recorder(StorageSpec.of(cache))
    storage.gate.clear()
    with StorageTier(cache, storage, threads=1, group=4) as tier:
        task = tier.write(KEYS)
        assert storage.arrived.acquire(timeout=60.0)
        task.cancel()
        storage.gate.set()
        task.wait(60.0)
        assert task.state is FAILED
        assert cache.check().pins == 0
    assert [n for what, n in storage.calls if what == "write"] == [4]


@pytest.mark.parametrize("hold", [True, False])
def test_cancelling_between_reading_and_publishing(cache: Cache, hold: bool) -> None:
    with StorageTier(cache, full(cache)) as tier:
        read: Any = tier._executor.read

        def cancelling(job: Any, *arguments: Any) -> Any:
            result = read(job, *arguments)
            job.cancel()
            return result

        tier._executor.read = cancelling  # type: ignore[method-assign]
        task = tier.prefetch(KEYS, hold=hold)
        assert task.wait(60.0).reasons == ("cancelled",)
        assert cache.check().pins == 0
        assert cache.stats().ready == 0


def test_cancelling_while_pages_are_reserved(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Recorder(StorageSpec.of(cache))
    store(storage, KEYS)
    reserve = cache.index.reserve
    with StorageTier(cache, storage) as tier:
        storage.closed_gate_for = "contains"
        storage.gate.clear()
        task = tier.prefetch(KEYS)

        def cancelling(*arguments: Any, **how: Any) -> Any:
            made = reserve(*arguments, **how)
            task.cancel()
            return made

        monkeypatch.setattr(cache.index, "reserve", cancelling)
        storage.gate.set()
        assert task.wait(60.0).reasons == ("cancelled",)
        assert [what for what, _ in storage.calls] == ["write", "contains"]
        assert cache.check().pins == 0
        monkeypatch.undo()


def test_closing_finishes_what_is_queued(cache: Cache) -> None:
    fill(cache, KEYS)
    storage = empty(cache)
    tier = StorageTier(cache, storage, threads=1, group=2)
    tasks = [tier.write(KEYS[at : at + 5].copy()) for at in (0, 5, 10, 15)]
    assert tier.close(60.0)
    assert tier.close()
    assert [task.state for task in tasks] == [FINISHED] * 4
    assert holds(storage, KEYS) == 20
    for call in (lambda: tier.write(KEYS), lambda: tier.prefetch(KEYS)):
        refused(Detached, "make another one", call)


def test_closing_abandons_what_takes_too_long(cache: Cache, caplog: Any) -> None:
    fill(cache, KEYS[:4])
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    tier = StorageTier(cache, flaky, threads=1, grace=0.0)
    running, queued = tier.prefetch(KEYS, 4), tier.write(KEYS[:4])
    assert flaky.wait_hanging()
    assert not tier.close(0.0)
    assert "pages stay pinned" in caplog.text
    assert (running.state, queued.state) == (TaskState.RUNNING, FAILED)
    assert cache.peek(KEYS) == 4
    flaky.let_go()
    assert running.wait(60.0).reasons == ("cancelled",)
    assert tier.close()


def test_pages_that_could_not_be_given_back_are_tried_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from lightcache.storage.jobs import ReadJob

    release = ReadJob.release
    failures = [LockTimeout("somebody holds it"), LockTimeout("still")]

    def reluctant(job: ReadJob) -> None:
        if failures:
            raise failures.pop()
        release(job)

    monkeypatch.setattr(ReadJob, "release", reluctant)
    flaky = FlakyStorage(full(cache), script={"read": [Fault("die")]})
    with StorageTier(cache, flaky) as tier:
        assert tier.prefetch(KEYS).wait(60.0).loaded == 0
        while failures:
            tier.poll()
        tier.poll()
    assert not failures
    assert "could not be given back yet" in caplog.text


def test_an_error_of_our_own_ends_the_task(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(cache.index, "reserve", lambda *a, **k: 1 / 0)
    with StorageTier(cache, full(cache)) as tier:
        task = tier.prefetch(KEYS)
        assert "ZeroDivisionError" in task.wait(60.0).reasons[0]
        assert task.state is FAILED
        assert "should not happen" in caplog.text
        monkeypatch.undo()
        assert tier.prefetch(KEYS).wait(60.0).loaded == 20


def test_a_closed_cache_ends_tasks(segment_name: str) -> None:
    cache = make_cache(segment_name)
    tier = StorageTier(cache, full(cache))
    cache.close()
    refused(Detached, "", tier.prefetch, KEYS)
    assert tier.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_storage_of_our_own_is_closed_when_its_call_returns(
    cache: Cache, wait_until: Any, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    tier = StorageTier(cache, flaky, grace=0.0)
    tier.owns_storage = True
    task = tier.prefetch(KEYS)
    assert flaky.wait_hanging()
    with caplog.at_level(logging.WARNING):
        assert not tier.close(0.0)
        assert not tier.close(0.0)
    assert "1 calls of the storage hang; pages stay pinned" in caplog.text
    assert "until they return, and the storage open" in caplog.text
    assert not flaky._calls._closed
    assert (tier.stats().running, cache.check().pins) == (1, 16)
    refused(InUse, "", cache.close)
    flaky.let_go()
    if again:
        assert tier.close()
    else:
        wait_until(lambda: flaky._calls._closed, "the end of the storage")
    wait_until(lambda: not any(each.is_alive() for each in threads(tier)), "the threads")
    assert flaky._calls._closed
    assert cache.check().pins == 0
    assert task.state is FAILED
    assert tier.close()


def test_a_storage_that_is_given_stays_open_when_its_call_returns(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    tier = StorageTier(cache, flaky, grace=0.0)
    tier.prefetch(KEYS)
    assert flaky.wait_hanging()
    assert not tier.close(0.0)
    flaky.let_go()
    for each in threads(tier):
        each.join(60.0)
    assert not flaky._calls._closed
    assert tier.close()


def test_what_ends_just_when_it_is_left_is_closed_at_once(cache: Cache) -> None:
    closed: list[int] = []
    tier = StorageTier(cache, full(cache))
    tier.owns_storage = True
    tier.storage.close = lambda: closed.append(1)  # type: ignore[method-assign]
    tier._executor.wait_idle = lambda timeout: False  # type: ignore[method-assign]
    assert tier.close()
    assert tier.close()
    assert closed == [1]


def test_time_without_an_end(cache: Cache) -> None:
    storage = full(cache)
    with StorageTier(cache, storage, timeout=math.inf) as tier:
        task = tier.prefetch(KEYS, timeout=math.inf)
        assert task.wait(math.inf).loaded == len(KEYS)
        assert tier.write(KEYS).wait(60.0).present == len(KEYS)
        assert all(thread.is_alive() for thread in threads(tier))


def test_held_pages_of_a_read_that_ends_while_the_tier_is_closed(cache: Cache) -> None:
    storage = Recorder(StorageSpec.of(cache))
    store(storage, KEYS)
    storage.closed_gate_for = "read"
    storage.gate.clear()
    tier = StorageTier(cache, storage, group=32)
    tier.prefetch(KEYS, hold=True)
    assert storage.arrived.acquire(timeout=60.0)
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(tier.close(60.0)))
    closer.start()
    with tier._executor.changed:
        assert tier._executor.changed.wait_for(lambda: tier._executor.closing, 60.0)
    storage.gate.set()
    closer.join(60.0)
    assert closed == [True]
    with cache.reserve(KEYS) as again:
        assert (len(again.new), len(again.busy)) == (20, 0)


@pytest.mark.parametrize(
    "wrong", [math.nan, "soon", None, 1j, True, pytest.param(10**400, id="too many")]
)
def test_seconds_that_are_none(cache: Cache, wrong: Any) -> None:
    with StorageTier(cache, full(cache)) as tier:
        refused(ConfigError, "timeout: expected seconds", tier.close, wrong)
        assert tier.prefetch(KEYS).wait(60.0).loaded == 20  # it is as open as before
        assert tier.close(math.inf)


def test_figures_of_a_storage_are_numbers_of_python(cache: Cache) -> None:
    class Other(MemoryStorage):
        """Counts with numpy."""

        def stats(self) -> StorageStats:
            return replace(super().stats(), evicted=np.int64(3))  # type: ignore[arg-type]

    fill(cache, KEYS)
    with StorageTier(cache, Other(StorageSpec.of(cache))) as tier:
        tier.write(KEYS).wait(60.0)
        assert type(tier.stats().evicted) is int
        assert tier.stats().evicted == 3
