"""Storage services and clients of which one does not answer, or does not listen."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.serving import failing, held_lock, push, silent
from support.storing import KEYS, Recorder, fill, full, sound, store

from lightcache import Cache, CacheCorrupted, LockTimeout, WaitTimeout
from lightcache.shm import layout, ofd
from lightcache.shm.objects import OpenObject
from lightcache.storage import StorageSpec, StorageTask, TaskState
from lightcache.storage.service import StorageClient, StorageService, board
from lightcache.storage.service.board import Service
from lightcache.storage.service.messages import Answer, Part
from lightcache.storage.service.serving import Peer
from lightcache.storage.tasks import TaskProgress
from lightcache.storage.testing.conformance import make_keys

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED
Wait = Callable[[Callable[[], bool], str], None]

# ---------------------------------------------------------------- a service that is silent


def test_a_service_that_is_stopped_costs_its_clients_one_detection(
    cache: Cache, caplog: Any, wait_until: Wait
) -> None:
    begun, later = time.monotonic(), [0.0]
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(StorageService(cache, full(cache)))
        clock = lambda: begun + later[0]  # noqa: E731
        gate = silent(service)
        stack.callback(gate.set)
        with StorageClient(cache, silence=2.0, clock=clock) as one:
            with caplog.at_level(logging.WARNING):
                task = one.prefetch(KEYS)
                wait_until(lambda: not len(one._tasks), "that it stands still")
                assert not task.ended
                later[0] = 2.5
                reason = task.wait(60.0).reasons[0]  # long before its time, 30 s
                assert "has not looked at its messages for 2 s" in reason
                for call in (one.prefetch, one.write, one.prefetch_last_ready):
                    assert call(KEYS).state is FAILED  # nothing is asked, nothing is waited for
                later[0] = 1000.0
                assert one.prefetch(KEYS).ended
                assert not len(one._tasks)
            texts = [record.getMessage() for record in caplog.records]
            assert sum("has not looked at its messages" in text for text in texts) == 1
            gate.set()
            later[0] = time.monotonic() - begun
            begun_again = time.monotonic() * 1e6
            wait_until(lambda: service._board.load("looked_us") > begun_again, "that it looks")
            again = one.prefetch(KEYS)  # at once, and no task was a probe
            assert again.wait(60.0).prefix == 20


def test_a_service_is_silent_when_it_has_not_looked_for_long(cache: Cache) -> None:
    now, service = [0.0], Service(word=5, pid=7)
    with StorageClient(cache, silence=2.0, clock=lambda: now[0]) as client:
        client._board.store(serving=1)
        for looked, at, expected in (
            *((1, 1.0, False), (1, 3.0, False), (1, 3.1, True), (4, 4.0, False), (4, 7.0, True)),
            *((9, 8.0, False), (9, 50.0, True)),
        ):
            now[0] = at
            client._board.store(looked_us=looked * 10**6)
            assert ("(pid 7) has not looked" in client._silent(service)) is expected
        client._board.store(serving=0)  # it closes
        assert not client._silent(service)


def test_tasks_of_a_service_are_lost_when_the_next_one_serves(cache: Cache) -> None:
    with (
        StorageService(cache, full(cache)) as service,
        StorageClient(cache, silence=60.0) as client,
    ):
        gate = silent(service)
        task = client.prefetch(KEYS)
        (asked,) = client._asked.values()
        asked.service = Service(asked.service.word + 1, 7)  # as if another came meanwhile
        with contextlib.suppress(WaitTimeout):
            task.wait(5.0)
        gate.set()
        assert "is gone (pid 7)" in task.wait(60.0).reasons[0]


def test_a_service_looks_between_the_messages_of_a_batch(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    monkeypatch.setattr("lightcache.storage.service.serving._LOOK", 1e9)
    looked: list[int] = []
    with StorageService(cache, full(cache)) as service:
        take = service._take
        service._take = lambda message: (  # type: ignore[method-assign]
            looked.append(service._board.load("looked_us")),
            take(message),
        )[1]
        push(cache, *[Part(2, n, 0, 1, b"x").pack() for n in range(8)])
        wait_until(lambda: service.stats().orphans == 8, "all of them")
    assert len(set(looked)) == 8


def test_reads_of_a_client_that_is_gone_hold_up_nobody(cache: Cache, wait_until: Wait) -> None:
    recorder = Recorder(StorageSpec.of(cache))
    store(recorder, KEYS)
    recorder.closed_gate_for = "contains"
    recorder.gate.clear()
    fill(cache, make_keys(2, seed=9))
    with StorageService(cache, recorder, threads=1) as service, StorageClient(cache) as other:
        with StorageClient(cache) as gone:
            tasks = [gone.prefetch(make_keys(3, seed=70 + i)) for i in range(20)]
            written = gone.write(make_keys(2, seed=9))
            assert recorder.arrived.acquire(timeout=60.0)
            wait_until(lambda: service.stats().taken == 21, "all of its tasks")
            wanted = other.prefetch(KEYS)
            wait_until(lambda: service.stats().taken == 22, "that of another")
            gone.tell = lambda *given: True  # type: ignore[method-assign]  # as if it was killed
            gone.close(0.0)
        wait_until(lambda: service.stats().tier.queued == 2, "the reads that are given up")
        recorder.gate.set()
        assert wanted.wait(60.0).loaded == 20
        assert all(task.ended for task in (*tasks, written))
    reads = [n for what, n in recorder.calls if what == "contains"]
    assert reads == [3, 20, 2]  # the one that was begun, the other client's, and the write


def test_a_full_queue_refuses(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightcache.storage.service.serving.MOST_TASKS", 1)
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        gate = silent(service)
        tasks = [client.prefetch(KEYS) for _ in range(board.MESSAGES + 40)]
        refused = [task for task in tasks if task.ended]
        assert 20 < len(refused) <= 40
        assert "cannot be asked" in refused[0].result.reasons[0]
        gate.set()
        for task in tasks:
            task.wait(60.0)
        assert sound(cache, KEYS) == 20


def test_a_service_whose_thread_fails_says_that_it_does_not_serve(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        service._look_around = failing(RuntimeError("ours"))  # type: ignore[method-assign]
        assert service.wait(60.0)
        assert service.why == "RuntimeError('ours')"
        assert not client.service().serving
        task = client.prefetch(KEYS)
        assert (task.state, task.result.failed) == (FAILED, 20)


# ---------------------------------------------------------------- answers


class Ring:
    """Has room for answers of which `room` says so."""

    def __init__(self, room: Callable[[], bool] = lambda: True) -> None:
        self.room = room
        self.answers: list[Answer] = []

    def push_many(self, messages: list[bytes]) -> int:
        if not self.room():
            return 0
        self.answers += map(Answer.unpack, messages)
        return len(messages)


def test_progress_is_told_when_there_is_some_and_the_end_when_it_is_counted() -> None:
    ring, task = Ring(), StorageTask(TaskProgress("read", 4, None))
    peer = Peer(ring, Counter())  # type: ignore[arg-type]
    peer.tasks[2] = task
    peer.repeat()
    assert not ring.answers  # it waits in the queue, as its client takes for granted
    task.progress.start()
    for prefix in (0, 0, 4, 4):
        task.progress.set_prefix(prefix)
        peer.repeat()
    task.progress.end(failed=False)
    peer.repeat()
    told = [(TaskState.RUNNING, 0), (TaskState.RUNNING, 4)]
    assert [(answer.state, answer.prefix) for answer in ring.answers] == told
    for _ in range(2):
        peer.end(2)  # as when a call that was late returns
    assert [(answer.task, answer.state) for answer in ring.answers[2:]] == [(2, FINISHED)]


def test_progress_that_found_no_room_is_told_later() -> None:
    room = [False]
    ring, task = Ring(lambda: room[0]), StorageTask(TaskProgress("read", 4, None))
    peer = Peer(ring, counted := Counter())  # type: ignore[arg-type]
    peer.tasks[2] = task
    task.progress.start()
    peer.repeat()
    room[0] = True
    peer.repeat()
    peer.repeat()
    assert [answer.state for answer in ring.answers] == [TaskState.RUNNING]
    assert not counted["lost"]


def test_a_task_that_is_given_up_halfway_counts_every_page_once(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        gate = silent(service)
        task = client.prefetch(KEYS)
        task.progress.replace(TaskState.RUNNING, 5, {"loaded": 5, "failed": 2}, ["broken"])
        (asked,) = client._asked.values()
        client.give_up(asked, "enough")
        found = task.result
        assert (task.state, found.loaded, found.failed, found.pages) == (FAILED, 5, 15, 20)
        assert (client.stats().tasks_failed, client.stats().failed) == (1, 15)
        client.give_up(asked, "again")
        assert client.stats().failed == 15
        gate.set()


def test_answers_that_nobody_reads_are_lost(cache: Cache, wait_until: Wait) -> None:
    late = [0.0]

    def clock() -> float:
        return time.monotonic() + late[0]

    with (
        StorageService(cache, full(cache), grace=0.0) as service,
        StorageClient(cache, grace=0.0, clock=clock) as client,
    ):
        client._hear = lambda timeout: time.sleep(0.01)  # type: ignore[method-assign]
        ring = board.answers_ring(cache, client._tasks, client._client)
        while ring.push_many([b"x"] * 256):
            pass
        task = client.prefetch(KEYS, timeout=600.0)
        wait_until(lambda: sound(cache, KEYS) == 20, "the pages, which come all the same")
        wait_until(lambda: service.stats().lost == 1, "the answer that found no room")
        late[0] = 1000.0
        assert task.wait(60.0).reasons[0].startswith("timed out")
        ring.close()


def test_an_end_that_found_no_room_is_told_again(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        client._hear = lambda timeout: time.sleep(0.01)  # type: ignore[method-assign]
        with board.answers_ring(cache, client._tasks, client._client) as ring:
            while ring.push_many([b"x"] * 256):
                pass
            task = client.prefetch(KEYS, timeout=600.0)
            wait_until(lambda: service.stats().tier.tasks_finished == 1, "the end")
            wait_until(lambda: service.stats().lost == 1, "the answer that found no room")
            (peer,) = service._peers.values()
            pushes, whole = [], peer._push
            peer._push = lambda some: (pushes.append(some), whole(some))[1]  # type: ignore
            wait_until(lambda: len(pushes) >= 2, "that it is tried again, in vain")
            del client._hear
            assert task.wait(60.0).loaded == 20
        assert service.stats().lost == 1  # once, however often it was tried


def test_a_client_that_does_not_listen_costs_one_attempt_a_turn(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    monkeypatch.setattr("lightcache.storage.service.serving.MOST_UNTOLD", 3)
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        client._hear = lambda timeout: time.sleep(0.01)  # type: ignore[method-assign]
        with board.answers_ring(cache, client._tasks, client._client) as ring:
            while ring.push_many([b"x"] * 256):
                pass
            for _ in range(10):
                client.prefetch(KEYS, timeout=600.0)
            wait_until(lambda: service.stats().lost == 10, "the ends")
            service._ending.set()
            assert service.wait(60.0)
            (peer,) = service._peers.values()
            assert len(peer._untold) == 3  # others are forgotten
            pushes, whole = [], peer._push
            peer._push = lambda some: (pushes.append(some), whole(some))[1]  # type: ignore
            service._repeat()
            assert len(pushes) == 1
            assert len(peer._untold) == 3
            while ring.pop_many(256):
                pass
            service._repeat()
            assert len(ring) == 3
            assert not peer._untold
        client.close(0.0)
        assert service.stats().lost == 10


def test_nothing_is_told_again_to_who_is_gone(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service:
        with StorageClient(cache) as client:
            client._hear = lambda timeout: time.sleep(0.01)  # type: ignore[method-assign]
            with board.answers_ring(cache, client._tasks, client._client) as ring:
                while ring.push_many([b"x"] * 256):
                    pass
            client.prefetch(KEYS, timeout=600.0)
            wait_until(lambda: service.stats().tier.tasks_finished == 1, "the end")
            client.close(0.0)
        wait_until(lambda: service.stats().clients == 0, "the client that left")
        assert not service._peers  # whom `_repeat` tells


@pytest.mark.parametrize("service_goes", [True, False])
def test_answers_that_nobody_listened_to_in_time(
    cache: Cache, wait_until: Wait, service_goes: bool
) -> None:
    """More of them than are heard at once lie in the ring when the listener comes to it: of a
    service that is gone meanwhile, or of tasks that are overdue."""
    late, gate = [0.0], threading.Event()

    def clock() -> float:
        return time.monotonic() + late[0]

    with StorageService(cache, full(cache)) as service, StorageClient(cache, clock=clock) as client:
        whole = client._hear
        client._hear = lambda timeout: gate.wait(60.0) and whole(timeout)  # type: ignore
        tasks = [client.prefetch(KEYS) for _ in range(70)]
        wait_until(lambda: len(client._answers) >= 70, "the last answer")
        assert service.stats().lost == 0
        if service_goes:
            service.close()
        else:
            late[0] = 1000.0
        gate.set()
        assert {task.wait(60.0).prefix for task in tasks} == {20}
        assert {task.state for task in tasks} == {FINISHED}


def test_answers_go_out_though_figures_do_not(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        whole, fail = service._publish, failing(RuntimeError("ours"))

        def publish() -> None:
            if threading.current_thread() in service._tier._executor.threads:
                fail()
            whole()

        service._publish = publish  # type: ignore[method-assign]
        assert client.prefetch(KEYS).wait(60.0).loaded == 20


def test_answers_that_cannot_be_taken_out(cache: Cache) -> None:
    with StorageService(cache, full(cache)), StorageClient(cache) as client:
        client._hear = failing(CacheCorrupted("broken"))  # type: ignore[method-assign]
        assert "cannot be heard: broken" in client.prefetch(KEYS).wait(60.0).reasons[0]
        client._hear = failing(RuntimeError("ours"))  # type: ignore[method-assign]
        assert "cannot be heard: ours" in client.prefetch(KEYS).wait(60.0).reasons[0]


def test_a_client_whose_ring_is_locked_is_mute_for_a_while() -> None:
    pushes: list[list[bytes]] = []

    class Ring:
        def push_many(self, messages: list[bytes]) -> int:
            pushes.append(messages)
            if len(pushes) == 2:
                raise LockTimeout("held")
            return 1

    peer = Peer(Ring(), Counter())  # type: ignore[arg-type]
    assert [peer._push(b"") for _ in range(3)] == [True, False, False]
    assert len(pushes) == 2


# ---------------------------------------------------------------- who is stopped


def test_a_lock_that_is_held_holds_up_one_call(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightcache.storage.service.client.HELD", 600.0)
    with StorageService(cache, full(cache)), StorageClient(cache) as client:
        with held_lock(cache, client):
            task = client.prefetch(KEYS)
            assert "the lock" in task.result.reasons[0]
            assert "holds the lock" in client.prefetch(KEYS).result.reasons[0]


def test_a_client_that_is_stopped_while_it_leaves_holds_up_nobody_else(cache: Cache) -> None:
    with (
        StorageService(cache, full(cache)) as service,
        StorageClient(cache) as client,
        StorageClient(cache) as leaving,
    ):
        name = leaving._answers.segment.name
        opened = OpenObject.open(name, writable=True)
        assert opened is not None
        with contextlib.closing(opened), ofd.locked(opened.fd, layout.BYTE_LIFE, timeout=60.0):
            push(cache, Part(leaving._client, 1, 0, 1, b"x").pack())
            assert client.prefetch(KEYS).wait(5.0).loaded == 20  # not the 10 s of an attach
        assert service.stats().orphans == 1
