"""Pages that a tier has to give back while somebody holds the cache's lock, and its end then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.refusals import refused
from support.storing import KEYS, empty, full, make_keys, nothing_is_held, sound, store, threads

from lightcache import Cache, LockTimeout
from lightcache.storage import StorageTask, StorageTier
from lightcache.storage.jobs import ReadJob
from lightcache.storage.testing import Fault, FlakyStorage

Wait = Callable[[Callable[[], bool], str], None]


class HeldLock:
    """The cache's lock, as a stopped process has it: who gives back waits for it in vain."""

    def __init__(self) -> None:
        """It is free."""
        self.held = False
        self.waited: list[threading.Thread] = []
        self.waiting, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def refuse(self, whole: Callable[[ReadJob], None]) -> Callable[[ReadJob], None]:
        """Of a job: what waits for the lock."""

        def waits(job: ReadJob) -> None:
            if self.held and job.held:
                self.waited.append(threading.current_thread())
                self.waiting.set()
                assert self.gate.wait(60.0)
                raise LockTimeout("somebody holds it")
            whole(job)

        return waits


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldLock]:
    """Free, in the beginning and in the end."""
    made = HeldLock()
    for name in ("release", "abandon_keys"):
        monkeypatch.setattr(ReadJob, name, made.refuse(getattr(ReadJob, name)))
    yield made
    made.held = False
    made.gate.set()


def held(tier: StorageTier, keys: Any = KEYS) -> StorageTask:
    """A prefetch that is over, and holds these."""
    task = tier.prefetch(keys, hold=True)
    assert task.wait(60.0).prefix == len(keys)
    with tier._executor.changed:
        assert tier._executor.changed.wait_for(lambda: not tier._executor.running, 60.0)
    return task


def ended(tier: StorageTier, cache: Cache) -> None:
    """It ends by itself, and keeps nothing."""
    for thread in threads(tier):
        thread.join(60.0)
        assert not thread.is_alive()
    nothing_is_held(cache)
    assert tier.close()


def test_closing_while_pages_are_tried_to_be_given_back(
    cache: Cache, lock: HeldLock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = StorageTier(cache, full(cache), grace=0.0)
    task = held(tier)
    lock.held = True
    task.cancel()
    lock.gate.clear()
    lock.waiting.clear()
    assert lock.waiting.wait(60.0)  # the thread that tries again
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(tier.close(0.0)), daemon=True)
    closer.start()
    closer.join(20.0)
    lock.held = False
    lock.gate.set()
    assert closed == [False]
    assert "pages of 1 tasks could not be given back" in caplog.text
    assert "hang" not in caplog.text
    ended(tier, cache)


def test_closing_where_held_pages_cannot_be_given_back(cache: Cache, lock: HeldLock) -> None:
    tier = StorageTier(cache, full(cache), grace=0.0)
    held(tier)
    lock.held = True
    lock.gate.clear()
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(tier.close(0.0)))
    closer.start()
    assert lock.waiting.wait(60.0)
    watching = tier._executor._watcher
    with tier._executor.changed:
        tier._executor.changed.notify_all()
    watching.join(0.2)  # it would end, if nobody was busy
    assert watching.is_alive()
    lock.gate.set()
    closer.join(60.0)
    assert closed == [False]
    lock.held = False
    ended(tier, cache)


def test_publishing_while_the_tier_is_closed(cache: Cache, lock: HeldLock) -> None:
    tier = StorageTier(cache, full(cache), grace=0.0)
    task = held(tier)
    lock.held = True
    lock.gate.clear()
    publisher = threading.Thread(target=task.publish, args=(20,))
    publisher.start()
    assert lock.waiting.wait(60.0)
    assert not tier._executor.holding
    assert not tier._executor.wait_idle(0.0)
    lock.gate.set()
    publisher.join(60.0)
    assert not tier.close(0.0)
    lock.held = False
    assert sound(cache, KEYS) == 20
    ended(tier, cache)


@pytest.mark.parametrize("closing", [True, False])
def test_waits_for_the_lock_do_not_add_up(cache: Cache, lock: HeldLock, closing: bool) -> None:
    storage, now = empty(cache), [0.0]
    tier = StorageTier(cache, storage, grace=0.0, timeout=10.0, clock=lambda: now[0])
    for keys in [make_keys(4, seed=60 + i) for i in range(5)]:
        store(storage, keys)
        held(tier, keys)
    lock.held = True
    if closing:
        assert not tier.close(0.0)
    else:
        now[0] = 20.0
        tier.poll()
    assert lock.waited.count(threading.current_thread()) <= 1  # 0: another thread was faster
    lock.held = False
    assert tier.close(60.0)
    nothing_is_held(cache)


def test_held_pages_are_kept_from_the_end_of_their_task(cache: Cache) -> None:
    """Also where its call comes back behind that."""
    now = [0.0]
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("hang", at=1)]})
    how: Any = {"group": 8, "timeout": 10.0, "grace": 1.0, "clock": lambda: now[0]}
    with StorageTier(cache, flaky, **how) as tier:
        task = tier.prefetch(KEYS, hold=True)
        assert flaky.wait_hanging()
        now[0] = 12.0
        tier.poll()
        with tier._executor.changed:  # the watching thread may have been faster to see it
            assert tier._executor.changed.wait_for(lambda: task.ended, 60.0)
        assert task.pages_done == 8
        now[0] = 21.0
        flaky.let_go()
        with tier._executor.changed:
            assert tier._executor.changed.wait_for(lambda: not tier._executor.running, 60.0)
        assert cache.stats().writing == 8
        now[0] = 22.0
        tier.poll()
        with tier._executor.changed:
            assert tier._executor.changed.wait_for(lambda: not tier._executor.busy, 60.0)
        assert cache.stats().writing == 0


def test_a_storage_of_our_own_is_closed_though_its_closing_was_interrupted(cache: Cache) -> None:
    tier = StorageTier.open(cache, "memory:?capacity=1MiB")
    whole, calls = tier.storage.close, 0

    def close() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        whole()

    tier.storage.close = close  # type: ignore[method-assign]
    refused(KeyboardInterrupt, "", tier.close)
    assert tier.close()
    assert tier.close()
    assert calls == 2
