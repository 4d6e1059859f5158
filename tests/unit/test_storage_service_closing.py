"""The end of a storage service, and of its clients."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.refusals import refused
from support.serving import failing, held_lock, ours, push, silent
from support.storing import KEYS, Recorder, fill, full

from lightcache import Cache, ConfigError, Detached
from lightcache.storage import StorageSpec, TaskState
from lightcache.storage.service import StorageClient, StorageService
from lightcache.storage.service.messages import PART_BYTES, Part
from lightcache.storage.testing import Fault, FlakyStorage

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED
Wait = Callable[[Callable[[], bool], str], None]


def test_closing_a_client_while_tasks_run(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    with StorageService(cache, flaky, threads=1):
        client = StorageClient(cache)
        task = client.prefetch(KEYS)
        assert flaky.wait_hanging()
        assert client.close(0.0)
        assert task.state is FAILED
        assert task.result.reasons == ("the storage client was closed",)
        refused(Detached, "make another", client.prefetch, KEYS)
        flaky.let_go()


def test_a_lock_that_is_held_is_waited_for_once_at_the_end(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        gate = silent(service)
        tasks = [client.prefetch(KEYS) for _ in range(5)]
        with held_lock(cache, client):
            pushed: list[Any] = []
            whole = client._push
            client._push = lambda parts: (pushed.append(parts), whole(parts))[1]  # type: ignore
            assert client.close(0.0)
        gate.set()
        assert len(pushed) == 1
        assert {task.state for task in tasks} == {FAILED}


def test_closing_waits_for_a_word_that_is_being_said(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)), StorageClient(cache) as client:
        task = client.prefetch(KEYS)
        task.wait(60.0)
        inside, gate = threading.Event(), threading.Event()
        ring, whole = client._tasks, client._tasks.push_many

        def push(messages: Any) -> int:
            with ring.segment.busy():
                inside.set()
                assert gate.wait(60.0)
            return whole(messages)

        ring.push_many = push  # type: ignore[method-assign]
        saying = threading.Thread(target=client.tell, args=("stop", task.progress.owner))
        saying.start()
        assert inside.wait(60.0)
        closed: list[bool] = []
        closing = threading.Thread(target=lambda: closed.append(client.close()))
        closing.start()
        wait_until(lambda: client._answers.segment.closed, "the closing")
        gate.set()
        saying.join(60.0)
        closing.join(60.0)
        assert closed == [True]


def test_stopping_what_has_ended_says_nothing(cache: Cache) -> None:
    with StorageService(cache, full(cache)), StorageClient(cache) as client:
        task = client.prefetch(KEYS)
        done = task.wait(60.0)
        client._tasks.push_many = failing(AssertionError("a message"))  # type: ignore[method-assign]
        assert task.stop() == done


def test_closing_the_service_finishes_what_is_queued(cache: Cache) -> None:
    fill(cache, KEYS)
    storage = Recorder(StorageSpec.of(cache))
    storage.gate.clear()
    service, client = StorageService(cache, storage, threads=1, group=4), StorageClient(cache)
    task = client.write(KEYS)
    assert storage.arrived.acquire(timeout=60.0)
    closing = threading.Thread(target=service.close, args=(60.0,))
    closing.start()
    while client.service().serving:
        pass
    assert client.write(KEYS[:2]).state is FAILED  # nothing new
    assert not task.ended
    storage.gate.set()
    assert task.wait(60.0).stored == 20
    closing.join(60.0)
    assert client.close()


def test_closing_a_service_of_which_a_call_hangs(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    service, client = StorageService(cache, flaky, grace=0.0), StorageClient(cache)
    task = client.prefetch(KEYS)
    assert flaky.wait_hanging()
    assert not service.close(0.0)
    assert task.wait(60.0).prefix == 0
    assert task.state is FAILED
    flaky.let_go()
    assert service.close()
    assert client.close()
    assert ours(cache) == []


def test_closing_takes_what_stands_in_the_ring_though_it_has_its_most(
    cache: Cache, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightcache.storage.service.serving.MOST_TASKS", 1)
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    service, client = StorageService(cache, flaky), StorageClient(cache)
    tasks = [client.prefetch(KEYS)]
    assert flaky.wait_hanging()
    tasks += [client.prefetch(KEYS[:4]) for _ in range(5)]
    assert len(client._tasks) == 5
    closing = threading.Thread(target=service.close, args=(60.0,))
    closing.start()
    wait_until(service._ending.is_set, "the closing")
    seen = service.stats().full
    wait_until(lambda: service.stats().full > seen or not closing.is_alive(), "a look in vain")
    flaky.let_go()
    closing.join(60.0)
    assert {task.wait(60.0).failed for task in tasks} == {0}
    assert {task.state for task in tasks} == {FINISHED}
    assert client.close()


def test_closing_that_was_interrupted_goes_on(cache: Cache) -> None:
    """Between any two steps: another service may have come meanwhile."""
    for where in ("_drop_peers", "_board.leave", "_ring.close", "_board.close"):
        part, _, name = where.rpartition(".")
        service = StorageService(cache, full(cache))
        owner = getattr(service, part) if part else service
        whole = getattr(owner, name)

        def stop(*given: Any, whole: Any = whole, name: str = name, **how: Any) -> None:
            whole(*given, **how)
            if how == {"alive": False}:  # of the service's own thread
                return
            raise KeyboardInterrupt

        setattr(owner, name, stop)
        refused(KeyboardInterrupt, "", service.close)
        setattr(owner, name, whole)
        if where in ("_drop_peers", "_ring.close"):
            assert service.close()
        with StorageService(cache, full(cache)) as next_one, StorageClient(cache) as client:
            assert service.close()
            assert client.prefetch(KEYS).wait(60.0).prefix == 20
            assert next_one.stats().serving
            assert next_one.stats().clients == 1
        assert ours(cache) == []


def test_the_last_figures_have_what_closing_finished(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    service, client = StorageService(cache, flaky), StorageClient(cache)
    client.prefetch(KEYS)
    assert flaky.wait_hanging()
    half = Part(client._client, 1 << 40, 0, 2, b"x" * (PART_BYTES - 32))
    push(cache, half.pack())
    closing = threading.Thread(target=service.close, args=(60.0,))
    closing.start()
    flaky.let_go()
    closing.join(60.0)
    found = service.stats()
    assert (found.tier.tasks_finished, found.tier.loaded, found.halves) == (1, 20, 1)
    assert (found.serving, found.pid) == (False, os.getpid())
    assert client.service().halves == 1
    assert client.close()
    assert service.stats() == found


def test_no_figure_is_stored_behind_the_end(cache: Cache) -> None:
    service, ends = StorageService(cache, full(cache)), []
    whole = service._board.leave

    def leave() -> None:
        ends.append(service._publishing.locked())
        whole()

    service._board.leave = leave  # type: ignore[method-assign]
    service.close()
    assert ends == [True]


def test_closing_may_take_for_ever_and_says_what_is_no_time(cache: Cache) -> None:
    service, client = StorageService(cache, full(cache)), StorageClient(cache)
    for each in (service, client):
        for bad in (None, float("nan"), "1"):
            refused(ConfigError, "timeout: expected seconds", each.close, bad)
    task = client.prefetch(KEYS)
    assert client.close(float("inf"))
    assert task.result.loaded == 20
    assert service.close(float("inf"))
