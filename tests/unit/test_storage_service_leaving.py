"""Storage services and clients that another thread, a forked child or the next service finds."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.serving import failing, push
from support.storing import KEYS, Recorder, cache, empty, full, store

from lightcache import Cache, Detached
from lightcache.storage import StorageSpec, StorageTask, TaskState
from lightcache.storage.service import StorageClient, StorageService
from lightcache.storage.service.answering import Answers, Served
from lightcache.storage.service.board import Board
from lightcache.storage.service.bodies import Publish
from lightcache.storage.service.messages import Answer, Kind, split

Wait = Callable[[Callable[[], bool], str], None]

__all__ = ["cache"]


class Ear:
    """A client that lets answers in, or not."""

    there = True

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.refused = threading.Event()
        self.heard: list[Answer] = []

    def push(self, answers: list[bytes]) -> int:
        """See `Peer`."""
        if self.deaf:
            self.refused.set()
            return len(answers)
        self.heard += [Answer.unpack(answer) for answer in answers]
        return 0


def served(ear: Any, number: int) -> Served:
    """A task that is over."""
    task = StorageTask("read", 4, None)
    task._end(failed=False)
    task._settle()
    return Served(ear, 1, number, task)


# ---------------------------------------------------------------- the next service


def test_the_next_service_holds_nothing_for_who_gave_up(cache: Cache, wait_until: Wait) -> None:
    with StorageClient(cache) as client:
        first, idle = StorageService(cache, empty(cache)), threading.Event()

        def turn(timeout: float) -> int:
            idle.set()
            first._ending.wait(timeout)
            return 0

        first._turn = turn  # type: ignore[method-assign]
        first._take_the_rest = lambda deadline: None  # type: ignore[method-assign]
        assert idle.wait(60.0)
        task = client.prefetch(KEYS, hold=True)
        first.close()  # with the message in the ring, as if it had been killed
        assert "is gone" in task.wait(60.0).reasons[0]
        with StorageService(cache, full(cache)) as service:
            wait_until(lambda: service.stats().taken == 2, "the task, and the word to cancel it")
            wait_until(lambda: not service._carrying.holds, "that it is remembered no more")
            wait_until(lambda: cache.stats().writing == 0, "the pages")
            assert client.prefetch(KEYS).wait(60.0).prefix == 20


# ---------------------------------------------------------------- answers


def test_publishing_nothing_of_what_was_refused(cache: Cache) -> None:
    """It has no pages in front of it, and certainly not fewer than none."""
    task = StorageTask("read", 20, None)
    task._settle()
    assert Answer.unpack(Served(Ear(), 1, 2, task, -20).answer()).prefix == 0  # type: ignore
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        service._tier.prefetch = lambda *a, **how: service._tier._nothing(  # type: ignore
            "read", 20, "refused", failed=20
        )
        held = client.prefetch(KEYS, hold=True)
        assert held.wait(60.0).reasons == ("refused",)
        body = Publish(client.clock() + 60.0, 60.0, held._job.number, 0).pack()  # type: ignore
        said = split(Kind.PUBLISH, client._pid, client._client, 77, body)
        other = client.prefetch(KEYS[:4])
        push(cache, *said)
        assert other.wait(60.0).reasons == ("refused",)
        assert client.prefetch(KEYS).wait(60.0).reasons == ("refused",)


def test_an_answer_that_cannot_be_made_takes_no_other_along() -> None:
    lost: list[int] = []
    ear = Ear()
    answers = Answers(lambda: None, lost.append)
    bad = served(ear, 1)
    bad.answer = failing(ValueError("ours"))  # type: ignore[method-assign]
    for each in (bad, served(ear, 2)):
        answers.serve(each)
    answers.start()
    answers.close()
    assert [answer.task for answer in ear.heard] == [2]
    assert sum(lost) == 1
    assert len(answers) == 0


def test_what_was_not_let_in_is_told_once_more_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightcache.storage.service.answering.AGAIN", 600.0)
    ear = Ear(deaf=True)
    answers = Answers(lambda: None, lambda lost: None)
    answers.serve(served(ear, 1))
    answers.start()
    assert ear.refused.wait(60.0)
    with answers._changed:
        assert answers._changed.wait_for(lambda: bool(answers._untold), 60.0)
    ear.deaf = False
    answers.close()
    assert [(answer.task, answer.state) for answer in ear.heard] == [(1, TaskState.FINISHED)]


# ---------------------------------------------------------------- forked children


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_the_parent(cache: Cache) -> None:
    recorder = Recorder(StorageSpec.of(cache))
    store(recorder, KEYS)
    recorder.closed_gate_for = "read"
    recorder.gate.clear()
    with StorageService(cache, recorder) as service, StorageClient(cache) as client:
        task = client.prefetch(KEYS, hold=True)
        assert recorder.arrived.acquire(timeout=60.0)
        calls: list[Callable[[], object]] = [
            *(task.wait, task.take, task.cancel, task.stop, lambda: task.publish(0)),
            *(client.stats, client.service, lambda: client.prefetch(KEYS)),
            *(lambda: client._push([b"x"]), service.stats),
        ]
        locks: list[Any] = [client._pushing, client._changed, task._changed]
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


@pytest.mark.parametrize("name", ["read", "service"])
def test_closing_waits_for_who_looks(cache: Cache, wait_until: Wait, name: str) -> None:
    board = Board.open(cache)
    board.claim()
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
