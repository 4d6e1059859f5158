"""Storage services and clients that another thread, a forked child or the next service finds."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.storing import KEYS, Recorder, full, store

from lightcache import Cache, Detached
from lightcache.storage import StorageSpec, StorageTask, TaskState
from lightcache.storage.service import StorageClient, StorageService, serving
from lightcache.storage.service.board import Board
from lightcache.storage.service.serving import Peer

Wait = Callable[[Callable[[], bool], str], None]

# ---------------------------------------------------------------- answers


def test_an_answer_that_cannot_be_made_takes_no_other_along(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache, grace=0.0) as client:
        whole, failed = serving._answer, []

        def answer(number: int, task: StorageTask, state: TaskState) -> bytes:
            if task.kind == "write" and state is TaskState.FINISHED:
                failed.append(number)
                raise ValueError("ours")
            return whole(number, task, state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving, "_answer", answer)
            lost = client.write(KEYS, timeout=0.1)
            assert client.prefetch(KEYS).wait(60.0).loaded == 20
            assert "does not say how far it is" in lost.wait(60.0).reasons[0]
            (peer,) = service._peers.values()
            assert not peer._untold  # it would fail again, for ever
        assert len(failed) == 1
        assert not peer.tasks


def test_an_answer_that_was_not_pushed_is_repeated_once_more_at_the_end(cache: Cache) -> None:
    service, refused = StorageService(cache, full(cache)), threading.Event()
    service._repeat = lambda: None  # type: ignore[method-assign]
    with StorageClient(cache) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Peer, "_push", lambda peer, answer: refused.set())
            task = client.prefetch(KEYS, timeout=600.0)
            assert refused.wait(60.0)
            while not service.stats().lost:
                pass
        assert not task.ended
        del service._repeat
        assert service.close()
        assert task.wait(60.0).prefix == 20
        assert task.state is TaskState.FINISHED


# ---------------------------------------------------------------- forked children


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_the_parent(cache: Cache) -> None:
    recorder = Recorder(StorageSpec.of(cache))
    store(recorder, KEYS)
    recorder.closed_gate_for = "read"
    recorder.gate.clear()
    with StorageService(cache, recorder) as service, StorageClient(cache) as client:
        task = client.prefetch(KEYS, timeout=60.0)
        assert recorder.arrived.acquire(timeout=60.0)
        calls: list[Callable[[], object]] = [
            *(task.wait, task.cancel, task.stop),
            *(client.stats, client.service, lambda: client.prefetch(KEYS)),
            *(lambda: client._push([b"x"]), service.stats),
        ]
        locks: list[Any] = [client._pushing, client._changed, task.progress.changed]
        locks += [client._board._looking, service._board._looking, service._publishing]
        for lock in locks:
            lock.acquire()
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os._exit(_refused(calls))
        for lock in locks:
            lock.release()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        recorder.gate.set()
        assert status == 0
        assert task.wait(60.0).prefix == 20


def _refused(calls: list[Callable[[], object]]) -> int:
    """0: each is. In a thread, as the locks are those of the thread that forked."""
    found: list[int] = []

    def ask() -> None:
        for number, call in enumerate(calls, 1):
            try:
                call()
            except Detached:
                continue
            except BaseException:
                found.append(50 + number)
            else:
                found.append(number)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0] if found else 0


# ---------------------------------------------------------------- other threads


@pytest.mark.parametrize("name", ["stats", "service"])
def test_closing_waits_for_who_looks(cache: Cache, wait_until: Wait, name: str) -> None:
    board = Board.open(cache)
    board.claim(1.0)
    inside, gate = threading.Event(), threading.Event()
    segment = board.segment
    whole_lives, whole_busy = segment.lives, segment.busy

    def held(whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with whole_busy():
                inside.set()
                assert gate.wait(60.0)
            return whole(*given)

        return call

    segment.lives = held(whole_lives)  # type: ignore[method-assign]
    segment.busy = held(whole_busy)  # type: ignore[method-assign]
    looking = threading.Thread(target=getattr(board, name))
    looking.start()
    assert inside.wait(60.0)
    failed: list[BaseException] = []

    def close() -> None:
        try:
            board.close()
        except BaseException as error:
            failed.append(error)

    closing = threading.Thread(target=close)
    closing.start()
    closing.join(0.1)
    gate.set()
    looking.join(60.0)
    closing.join(60.0)
    assert failed == []
    assert segment.closed


def test_figures_while_a_service_is_closed(cache: Cache) -> None:
    service = StorageService(cache, full(cache))
    whole = service._publish

    def publish() -> None:
        whole()
        service._publish = whole  # type: ignore[method-assign]
        service.close()

    service._publish = publish  # type: ignore[method-assign]
    found = service.stats()
    assert not found.serving
    assert found == service.stats()
