"""A storage service and its clients in one process: what a StorageTier has no need of."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.interrupts import interrupt
from support.serving import ServedTier
from support.storing import (
    KEYS,
    PAGE_BYTES,
    SECRET,
    Recorder,
    cache,
    empty,
    fill,
    full,
    holds,
    make_cache,
    sound,
)

from lightcache import (
    Cache,
    CacheCorrupted,
    ConfigError,
    Detached,
    InUse,
    LockTimeout,
    NotReady,
    PermissionDenied,
)
from lightcache.shm import Segment, layout, ofd
from lightcache.shm.objects import OpenObject
from lightcache.storage import Fault, FlakyStorage, StorageSpec, StorageTask, TaskState
from lightcache.storage.conformance import make_keys
from lightcache.storage.service import StorageClient, StorageService, rings, service_stats
from lightcache.storage.service.answering import Served
from lightcache.storage.service.asking import Silence
from lightcache.storage.service.board import Phase
from lightcache.storage.service.messages import PART_BYTES, Answer, Kind, Part
from lightcache.storage.service.peers import Peer
from lightcache.tools.keep import _switch

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED
Wait = Callable[[Callable[[], bool], str], None]

__all__ = ["cache"]


@pytest.fixture
def client(cache: Cache) -> Iterator[StorageClient]:
    """One that came before any service."""
    with StorageClient(cache, grace=0.2) as made:
        yield made


def ours(cache: Cache) -> list[str]:
    """What a service and its clients have in /dev/shm."""
    start = f"lightcache.{cache.name}.storage-"
    return sorted(path.name for path in Path("/dev/shm").glob(f"{start}*"))


# ---------------------------------------------------------------- who comes, and goes


def test_without_a_service_tasks_fail_at_once(cache: Cache, client: Any, caplog: Any) -> None:
    fill(cache, KEYS)
    with caplog.at_level(logging.WARNING):
        for task in (client.write(KEYS), client.prefetch(KEYS), client.prefetch_deepest(KEYS)):
            assert task.over
            assert task.state is FAILED
            assert task.result.failed == 20
            assert f"lightcache storage {cache.name}" in task.result.reasons[0]
            assert task.take().prefix == 0
            task.cancel()
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # once
    found = client.stats()
    assert (found.tasks_failed, found.failed, found.state) == (3, 60, "open")
    assert not client.service().serving


def test_a_client_finds_a_service_that_comes_later_and_the_next_one(
    cache: Cache, client: Any
) -> None:
    fill(cache, KEYS)
    storage = empty(cache)
    for times in range(1, 4):
        with StorageService(cache, storage):
            task = client.write(KEYS)
            assert task.wait(60.0).prefix == 20
            assert client.service().serving
            assert client.stats().tasks_finished == times  # of all services of this board
        assert client.write(KEYS).state is FAILED
    assert holds(storage, KEYS) == 20
    assert client.stats().stored == 20


def test_a_second_service_is_refused_and_names_the_first(cache: Cache) -> None:
    before = threading.active_count()
    with Cache.attach(cache.name, secret=SECRET) as other:
        with StorageService(cache, empty(cache)) as first:
            with pytest.raises(InUse, match=f"pid {os.getpid()}.*StorageClient"):
                StorageService(other, empty(cache))
            assert first.stats().serving
            with StorageClient(cache) as client:
                assert client.prefetch(KEYS).wait(60.0).absent == 20
        with StorageService(other, empty(cache)):
            pass
    assert threading.active_count() == before


def test_nothing_is_left(cache: Cache) -> None:
    for first in (StorageClient, StorageService):
        given = () if first is StorageClient else (empty(cache),)
        one: Any = first(cache, *given)
        two: Any = StorageService(cache, empty(cache)) if not given else StorageClient(cache)
        assert len(ours(cache)) == 3
        one.close()
        one.close()
        two.close()
        two.close()
        assert ours(cache) == []


def test_the_service_lets_go_of_a_client_that_left(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, empty(cache)) as service:
        with StorageClient(cache) as client:
            client.prefetch(KEYS).wait(60.0)
            assert service.stats().clients == 1
            assert len(ours(cache)) == 3
        wait_until(lambda: service.stats().clients == 0, "the client that left")
        assert len(ours(cache)) == 2  # counted out when its ring is gone


def test_what_the_queue_had_goes_to_the_next_service(cache: Cache, wait_until: Wait) -> None:
    fill(cache, KEYS)
    storage = empty(cache)
    with StorageClient(cache) as client:
        with StorageService(cache, storage) as service:
            service._ending.set()  # takes nothing out any more
            service.wait(60.0)
            service._turn = lambda timeout: 0  # type: ignore[method-assign]
            task = client.write(KEYS)
            service.close(0.0)
        wait_until(lambda: task.over, "the end of its service")
        assert task.state is FAILED
        assert f"is gone (pid {os.getpid()})" in task.result.reasons[0]
        with StorageService(cache, storage):
            wait_until(lambda: client.stats().stored == 20, "what was left in the ring")
    assert holds(storage, KEYS) == 20


def test_what_was_left_too_long_is_dropped(cache: Cache, wait_until: Wait) -> None:
    fill(cache, KEYS)
    storage = Recorder(StorageSpec.of(cache))
    with StorageClient(cache, grace=0.0) as client:
        with StorageService(cache, storage, grace=0.0) as service:
            service._ending.set()
            service.wait(60.0)
            service._turn = lambda timeout: 0  # type: ignore[method-assign]
            task = client.write(KEYS, timeout=0.0)
            wait_until(lambda: task.over, "its time")
            service.close(0.0)
        with StorageService(cache, storage) as service:
            wait_until(lambda: service.stats().late == 1, "the late one")
    assert storage.calls == []


def test_a_cache_that_is_removed_ends_the_service(segment_name: str, wait_until: Wait) -> None:
    cache = make_cache(segment_name)
    service, client = StorageService(cache, empty(cache)), StorageClient(cache)
    assert client.prefetch(KEYS).wait(60.0).absent == 20
    assert not service.wait(0.0)
    Segment.unlink(segment_name, force=True)
    assert service.wait(60.0)
    assert service.why
    with pytest.raises(Detached):
        client.prefetch(KEYS)
    assert client.close()
    assert service.close()
    assert ours(cache) == []
    cache.close()


def test_a_cache_that_is_made_again_has_a_service_of_its_own(segment_name: str) -> None:
    with make_cache(segment_name) as first, StorageService(first, empty(first)):
        Segment.unlink(segment_name, force=True)
        with make_cache(segment_name) as second, StorageClient(second) as client:
            assert client.write(KEYS).state is FAILED
            with StorageService(second, empty(second)):
                assert client.prefetch(KEYS).wait(60.0).absent == 20


def test_what_lies_between_is_removed_under_both(cache: Cache, wait_until: Wait) -> None:
    service, client = StorageService(cache, empty(cache)), StorageClient(cache)
    for name in ours(cache):
        Segment.unlink(name.removeprefix("lightcache."), force=True)
    assert service.wait(60.0)
    task = client.prefetch(KEYS)
    assert (task.state, task.result.failed) == (FAILED, 20)
    assert client.close()
    assert service.close()


def test_a_cache_that_is_disabled_or_cleared(cache: Cache) -> None:
    fill(cache, KEYS)
    space = cache.namespace("v2")
    with StorageService(cache, full(cache)), StorageClient(cache) as client:
        cache.clear(space)
        task = client.prefetch(KEYS, namespace=space)
        assert task.wait(60.0).prefix == 0
        assert task.state is FAILED
        _switch(cache.name, None, 1)
        for task in (client.write(KEYS), client.prefetch(KEYS), client.prefetch_deepest(KEYS)):
            assert "disabled the cache" in task.wait(60.0).reasons[0]
            assert task.state is FAILED
        _switch(cache.name, None, 0)
        assert client.write(KEYS).wait(60.0).present == 20


def test_a_client_that_is_attached_read_only(cache: Cache) -> None:
    with StorageService(cache, full(cache)), Cache.attach(cache.name, readonly=True) as reader:
        with StorageClient(reader) as client:
            assert client.prefetch(KEYS).wait(60.0).loaded == 20


def test_a_namespace_is_the_clients(cache: Cache) -> None:
    space = cache.namespace("v2", "tenant")
    with Cache.attach(cache.name, secret=SECRET) as other:
        other.index.use(space)
        with StorageService(cache, full(cache)), StorageClient(other) as client:
            assert client.prefetch(KEYS).wait(60.0).loaded == 20
        assert (other.peek(KEYS), cache.peek(KEYS)) == (20, 0)
    cache.clear(space)


# ---------------------------------------------------------------- a service that is silent


def silent(service: StorageService) -> threading.Event:
    """It takes nothing out any more, and lives; set what is returned before it is closed."""
    gate, whole = threading.Event(), service._take
    service._take = lambda message: (gate.wait(60.0), whole(message))[0]  # type: ignore
    return gate


def test_tasks_of_a_silent_service_end_and_it_is_left_alone(cache: Cache, caplog: Any) -> None:
    now = [0.0]
    with StorageService(cache, full(cache), grace=0.0) as service:
        with StorageClient(cache, timeout=0.0, grace=0.0, failures=3, clock=lambda: now[0]) as one:
            gate = silent(service)
            with caplog.at_level(logging.WARNING):
                for _ in range(3):
                    task = one.prefetch(KEYS)
                    assert "does not say" in task.wait(60.0).reasons[0]
                    assert task.state is FAILED
                task = one.prefetch(KEYS)
                assert task.over
                assert "did not answer 3 tasks" in task.result.reasons[0]
                assert one.write(KEYS).over
            texts = [record.getMessage() for record in caplog.records]
            assert sum("did not answer 3 tasks" in text for text in texts) == 1
            now[0] = 5.0  # it is tried again: one failure is enough now
            one.prefetch(KEYS).wait(60.0)
            assert one.prefetch(KEYS).over
            gate.set()
            now[0] = 10.0
            one.prefetch(KEYS, timeout=60.0).wait(60.0)
            again = one.prefetch(KEYS, timeout=60.0).wait(60.0)
            assert again.reasons[0].endswith("in the queue")  # its clock is not ours: but it speaks


def test_silence_is_counted_in_a_row() -> None:
    now = [0.0]
    silence = Silence(2, 5.0, lambda: now[0])
    for _ in range(2):
        silence.unanswered()
        assert silence.reason == ""
        silence.answered()
    silence.unanswered()
    silence.unanswered()
    assert "2 tasks in a row" in silence.reason
    now[0] = 5.0
    assert silence.reason == ""
    silence.unanswered()
    assert silence.reason


def test_the_end_of_a_task_is_told_when_it_was_counted() -> None:
    task = StorageTask("read", 4, None)
    served = Served(None, 1, 2, task)  # type: ignore[arg-type]
    task._reach(4)
    task._end(failed=False)
    found = Answer.unpack(served.answer())
    assert (found.task, found.state, found.prefix) == (2, TaskState.RUNNING, 4)
    task._settle()
    assert Answer.unpack(served.answer()).state is FINISHED


def test_a_full_queue_refuses(cache: Cache) -> None:
    with StorageService(cache, full(cache), most=1) as service, StorageClient(cache) as client:
        gate = silent(service)
        tasks = [client.prefetch(KEYS) for _ in range(rings.TASKS + 40)]
        refused = [task for task in tasks if task.over]
        assert 20 < len(refused) <= 40
        assert "cannot be asked" in refused[0].result.reasons[0]
        gate.set()
        for task in tasks:
            task.wait(60.0)
        assert sound(cache, KEYS) == 20


def test_answers_that_nobody_reads_are_lost(cache: Cache, wait_until: Wait) -> None:
    how: Any = {"grace": 0.0}
    with (
        StorageService(cache, full(cache), **how) as service,
        StorageClient(cache, **how) as client,
    ):
        client._messages = list  # type: ignore[method-assign]
        ring = rings.find_answers(cache, client._pid, client._client)
        while ring.push_many([b"x"] * 256):
            pass
        task = client.prefetch(KEYS, timeout=0.5)
        wait_until(lambda: sound(cache, KEYS) == 20, "the pages, which come all the same")
        wait_until(lambda: service.stats().lost > 0, "answers that found no room")
        assert task.wait(60.0).reasons[0].startswith("timed out")
        ring.close()


def test_an_end_that_found_no_room_is_told_again(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        client._messages = list  # type: ignore[method-assign]
        with rings.find_answers(cache, client._pid, client._client) as ring:
            while ring.push_many([b"x"] * 256):
                pass
            task = client.prefetch(KEYS, timeout=600.0)
            wait_until(lambda: service.stats().tier.tasks_finished == 1, "the end")
            wait_until(lambda: service.stats().lost > 0, "answers that found no room")
            (peer,) = service._peers._every()
            pushes, whole = [], peer.push
            peer.push = lambda some: (pushes.append(some), whole(some))[1]  # type: ignore
            wait_until(lambda: len(pushes) == 2, "that it is tried again, in vain")
            del client._messages
            assert task.wait(60.0).loaded == 20
        assert service.stats().lost == 1  # once, however often it was tried


def test_nothing_is_told_again_to_who_is_gone(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service:
        with StorageClient(cache) as client:
            client._messages = list  # type: ignore[method-assign]
            with rings.find_answers(cache, client._pid, client._client) as ring:
                while ring.push_many([b"x"] * 256):
                    pass
            client.prefetch(KEYS, timeout=600.0)
            wait_until(lambda: service.stats().tier.tasks_finished == 1, "the end")
            client.close(0.0)
        wait_until(lambda: not service._answers._untold, "the end of telling")
        wait_until(lambda: service.stats().clients == 0, "the client that left")


@pytest.mark.parametrize("service_goes", [True, False])
def test_answers_that_nobody_listened_to_in_time(
    cache: Cache, wait_until: Wait, service_goes: bool
) -> None:
    """More of them than are heard at once lie in the ring when the listener comes to it: of a
    service that is gone meanwhile, or of tasks that are overdue."""
    late, gate, told = [0.0], threading.Event(), threading.Event()

    def clock() -> float:
        return time.monotonic() + late[0]

    with StorageService(cache, full(cache)) as service, StorageClient(cache, clock=clock) as client:
        client._messages = lambda: (gate.wait(60.0), [])[1]  # type: ignore
        whole = service._answers._tell_of
        told.set()

        def tell_of(news: Any) -> None:
            told.clear()
            whole(news)
            told.set()

        service._answers._tell_of = tell_of  # type: ignore[method-assign]
        tasks = [client.prefetch(KEYS) for _ in range(70)]
        wait_until(
            lambda: service.stats().taken == 70 and not len(service._answers) and told.is_set(),
            "the last answer",
        )
        assert len(client._answers) >= 70
        assert service.stats().lost == 0
        if service_goes:
            service.close()
        else:
            late[0] = 1000.0
        gate.set()
        assert {task.wait(60.0).prefix for task in tasks} == {20}
        assert {task.state for task in tasks} == {FINISHED}


def failing(error: Exception) -> Callable[..., Any]:
    """What raises this, whatever it is given."""

    def fail(*given: object) -> Any:
        raise error

    return fail


def test_a_service_whose_thread_fails_says_that_it_does_not_serve(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        service._look_around = failing(RuntimeError("ours"))  # type: ignore[method-assign]
        assert service.wait(60.0)
        assert service.why == "RuntimeError('ours')"
        assert not client.service().serving
        task = client.prefetch(KEYS)
        assert (task.state, task.result.failed) == (FAILED, 20)


def test_answers_go_out_though_figures_do_not(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        service._answers._publish = failing(RuntimeError("ours"))
        assert client.prefetch(KEYS).wait(60.0).loaded == 20


def test_answers_that_cannot_be_taken_out(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        client._messages = failing(CacheCorrupted("broken"))  # type: ignore[method-assign]
        assert "cannot be heard: broken" in client.prefetch(KEYS).wait(60.0).reasons[0]
        client._messages = failing(RuntimeError("ours"))  # type: ignore[method-assign]
        task = client.prefetch(KEYS)
        assert service.close()
        task.wait(60.0)  # looks at who serves do not end
        assert task.state is FINISHED


def test_an_answer_that_cannot_be_used_takes_no_other_along(client: StorageClient) -> None:
    heard: list[bytes] = []

    def hear(message: bytes) -> None:
        heard.append(message)
        raise RuntimeError("ours")

    client._hear = hear  # type: ignore[method-assign]
    client._hear_all([b"first", b"second"])
    assert heard == [b"first", b"second"]


# ---------------------------------------------------------------- strange messages


def push(cache: Cache, *messages: bytes) -> None:
    with rings.tasks(cache) as ring:
        for message in messages:
            ring.push(message, timeout=60.0)


def test_malformed_messages_are_counted_and_passed_over(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        own = (client._pid, client._client)
        bad = [
            b"",
            b"nonsense",
            Part(Kind.WRITE, *own, 1 << 40, 0, 1, b"no body").pack(),
            Part(Kind.WRITE, *own, 1 << 40, 1, 2, b"no first part").pack(),
        ]
        push(cache, *bad)
        wait_until(lambda: service.stats().malformed == 4, "four malformed messages")
        push(cache, Part(Kind.CANCEL, *own, 1 << 40, 0, 1, b"").pack())  # of nothing: nothing
        assert client.prefetch(KEYS).wait(60.0).loaded == 20
        assert service.stats().malformed == 4


def test_messages_of_who_is_gone_are_counted(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        push(cache, Part(Kind.WRITE, 1, 2, 3, 0, 1, b"x").pack())
        wait_until(lambda: service.stats().orphans == 1, "a message of nobody")
        half = Part(
            Kind.WRITE, client._pid, client._client, 1 << 40, 0, 2, b"x" * (PART_BYTES - 32)
        )
        push(cache, half.pack())
        assert client.prefetch(KEYS).wait(60.0).loaded == 20
        assert service.stats().halves == 1
        push(cache, half.pack())
        wait_until(lambda: service.stats().taken == 4, "the other half")
        client.close()
        wait_until(lambda: service.stats().clients == 0, "the client that left")
        assert service.stats().halves == 2


def test_a_malformed_answer_is_passed_over(cache: Cache) -> None:
    with StorageService(cache, full(cache)), StorageClient(cache) as client:
        with rings.find_answers(cache, client._pid, client._client) as ring:
            ring.push(b"nonsense")
        assert client.prefetch(KEYS).wait(60.0).loaded == 20


# ---------------------------------------------------------------- tasks


def test_long_chains(segment_name: str) -> None:
    keys = make_keys(2500, seed=9)
    with make_cache(segment_name, pages=2600) as cache:
        fill(cache, keys)
        with ServedTier(cache, empty(cache), group=500, write_pages=2600) as tier:
            assert tier.write(keys).wait(60.0).stored == 2500
            while cache.stats().ready:
                cache.evict(2600)
            assert tier.prefetch(keys).wait(60.0).loaded == 2500
            task = tier.prefetch(make_keys((1 << 16) + 1, seed=3))
            assert task.over
            assert "more than one task" in task.result.reasons[0]


def test_cancelling(cache: Cache, wait_until: Wait) -> None:
    storage = Recorder(StorageSpec.of(cache))
    storage.gate.clear()
    fill(cache, KEYS)
    with ServedTier(cache, storage, threads=1, group=4, write_pages=96) as tier:
        first, second = tier.write(KEYS), tier.write(KEYS[:6])
        assert storage.arrived.acquire(timeout=60.0)
        second.cancel()
        assert second.wait(60.0).reasons == ("cancelled",)
        first.cancel()
        (job,) = tier.serving._tier._crew.running
        wait_until(lambda: job._given_up, "the word to cancel")
        storage.gate.set()
        assert first.wait(60.0).reasons == ("cancelled",)
    assert storage.calls == [("contains", 20), ("write", 4)]


def test_taking_what_there_is(cache: Cache, wait_until: Wait) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("hang", at=1)]})
    with ServedTier(cache, flaky, group=8, read_policy="best_effort") as tier:
        assert tier.read_policy == "best_effort"
        task = tier.prefetch(KEYS)
        assert flaky.wait_hanging()
        wait_until(lambda: task.pages_done == 8, "the first group")
        assert task.take().prefix == 8
        wait_until(
            lambda: next(iter(tier.serving._tier._crew.running)).stopping, "the word to stop"
        )
        flaky.let_go()
        assert task.wait(60.0).prefix == 16  # the group at hand, and nothing more
        assert task.state is FINISHED


def test_taking_behind_a_deadline(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    with ServedTier(cache, flaky, read_policy="deadline", read_seconds=0.01) as tier:
        task = tier.prefetch(KEYS)
        assert task.take().prefix == 0
        assert not task.over
        flaky.let_go()
        task.wait(60.0)
    with ServedTier(cache, full(cache), read_policy="deadline", read_seconds=60.0) as tier:
        assert tier.prefetch(KEYS).take().prefix == 20


def test_a_task_that_may_take_for_ever(cache: Cache) -> None:
    with ServedTier(cache, full(cache)) as tier:
        assert tier.prefetch(KEYS, timeout=float("inf")).wait(60.0).loaded == 20
        assert tier.prefetch(KEYS, timeout=1e300).wait(60.0).present == 20
        assert tier._crew._threads[-1].is_alive()


def test_figures_are_given_once(cache: Cache) -> None:
    fill(cache, KEYS)
    with ServedTier(cache, empty(cache)) as tier, StorageClient(cache) as other:
        tier.write(KEYS).wait(60.0)
        assert other._take_figures() == {"written_bytes": 20 * PAGE_BYTES}
        assert tier._take_figures() == other._take_figures() == {}
        other.write(KEYS[:3]).wait(60.0)
        cache.evict(96)
        tier.prefetch(KEYS[:5]).wait(60.0)
        assert tier._take_figures() == {"read_bytes": 5 * PAGE_BYTES}
        assert tier.stats() == other.stats()
        assert service_stats(cache.name).tier == tier.stats()


def test_holding_is_refused(cache: Cache) -> None:
    with ServedTier(cache, full(cache)) as tier:
        with pytest.raises(ConfigError, match="StorageTier"):
            tier.prefetch(KEYS, hold=True)
        task = tier.prefetch(KEYS)
        task.wait(60.0)
        with pytest.raises(ConfigError, match="holds nothing"):
            task.publish(1)


# ---------------------------------------------------------------- the end


def test_closing_a_client_while_tasks_run(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    with StorageService(cache, flaky, threads=1):
        client = StorageClient(cache)
        task = client.prefetch(KEYS)
        assert flaky.wait_hanging()
        assert client.close(0.0)
        assert task.state is FAILED
        assert task.result.reasons == ("the storage client was closed",)
        with pytest.raises(Detached, match="make another"):
            client.prefetch(KEYS)
        flaky.let_go()


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
    assert not task.over
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
    cache: Cache, wait_until: Wait
) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [Fault("hang", at=1)]})
    service, client = StorageService(cache, flaky, most=1), StorageClient(cache)
    tasks = [client.prefetch(KEYS)]
    assert flaky.wait_hanging()
    tasks += [client.prefetch(KEYS[:4]) for _ in range(5)]
    assert len(client._tasks) == 5
    closing = threading.Thread(target=service.close, args=(60.0,))
    closing.start()
    wait_until(lambda: not service._thread.is_alive(), "the closing")
    seen = service.stats().full
    wait_until(lambda: service.stats().full > seen or not closing.is_alive(), "a look in vain")
    flaky.let_go()
    closing.join(60.0)
    assert {task.wait(60.0).failed for task in tasks} == {0}
    assert {task.state for task in tasks} == {FINISHED}
    assert client.close()


def test_closing_that_was_interrupted_goes_on(cache: Cache) -> None:
    """Between any two steps: another service may have come meanwhile."""
    for where in ("_peers.close", "_board.end", "_ring.close", "_board.close"):
        part, _, name = where.partition(".")
        service = StorageService(cache, full(cache))
        owner = getattr(service, part)
        whole = getattr(owner, name)

        def stop(*given: Any, whole: Any = whole, name: str = name) -> None:
            whole(*given)
            if name != "end" or given == (Phase.NONE,):
                raise KeyboardInterrupt

        setattr(owner, name, stop)
        with pytest.raises(KeyboardInterrupt):
            service.close()
        setattr(owner, name, whole)
        if where in ("_peers.close", "_ring.close"):
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
    half = Part(Kind.WRITE, client._pid, client._client, 1 << 40, 0, 2, b"x" * (PART_BYTES - 32))
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


def test_closing_may_take_for_ever_and_says_what_is_no_time(cache: Cache) -> None:
    service, client = StorageService(cache, full(cache)), StorageClient(cache)
    for each in (service, client):
        for bad in (None, float("nan"), "1"):
            with pytest.raises(ConfigError, match="timeout: expected seconds"):
                each.close(bad)  # type: ignore[attr-defined]
    task = client.prefetch(KEYS)
    assert client.close(float("inf"))
    assert task.result.loaded == 20
    assert service.close(float("inf"))


def test_a_figure_that_is_counted_stands_behind_what_it_counts(
    cache: Cache, wait_until: Wait
) -> None:
    """Words are stored one after another, and others read in between."""
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        half = Part(
            Kind.WRITE, client._pid, client._client, 1 << 40, 0, 2, b"x" * (PART_BYTES - 32)
        )
        push(cache, half.pack())
        board, seen = service._board, []
        whole = board._words["halves"].store

        def store(value: int) -> None:
            seen.append((value, board.read()["clients"]))
            whole(value)

        board._words["halves"].store = store  # type: ignore[method-assign]
        wait_until(lambda: service.stats().clients == 1, "its half")
        client.close()
        wait_until(lambda: service.stats().halves == 1, "the half that is dropped")
        assert seen[-1] == (1, 0)


def test_who_was_killed_has_nothing_at_hand(cache: Cache) -> None:
    with StorageClient(cache) as client:
        with StorageService(cache, full(cache)):
            client.prefetch(KEYS).wait(60.0)
        names = ("queued", "running", "stuck", "writing", "clients")
        client._board.store(**dict.fromkeys(names, 3))  # as a kill leaves them
        found = client.service()
        assert [getattr(found.tier, name) for name in names[:-1]] == [0, 0, 0, 0]
        assert found.clients == 0
        assert found.tier == client.stats()
        assert found.tier.loaded == 20


def test_only_answers_that_were_not_pushed_are_lost() -> None:
    class Ring:
        def push_many(self, messages: list[bytes]) -> int:
            if len(messages) < 3:
                raise LockTimeout("held")
            return 1

    peer = Peer(Ring())  # type: ignore[arg-type]
    assert peer.push([b"a", b"b", b"c"]) == 2
    assert peer.push([b"d"]) == 1  # mute for a while


def test_a_forked_child_touches_nothing(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        child = os.fork()
        if not child:
            status = 1
            try:
                with pytest.raises(Detached):
                    client.prefetch(KEYS)
                assert client.close()
                assert service.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert client.prefetch(KEYS).wait(60.0).loaded == 20


def test_ctrl_c_anywhere_in_a_call(cache: Cache, wait_until: Wait) -> None:
    fill(cache, KEYS[:4])
    with StorageService(cache, full(cache)), StorageClient(cache) as client:
        done: list[Any] = []
        for at in range(0, 400, 3):
            interrupt(lambda: done.append(client.prefetch(KEYS[:4])), at)
            interrupt(lambda: done.append(client.write(KEYS[:4], "r")), at)
            for task in done:  # no more of them at once than writes may pin
                assert task.wait(60.0).prefix == 4
        assert client.prefetch(KEYS).wait(60.0).prefix == 20
        assert len(done) > 10
        wait_until(lambda: not client._asked, "the end of calls that were left")


def test_what_lies_between_is_for_the_group_that_the_cache_is_for(segment_name: str) -> None:
    group = os.getgid()
    with make_cache(segment_name, group=group) as cache, ServedTier(cache, full(cache)) as tier:
        assert tier.prefetch(KEYS).wait(60.0).loaded == 20
        for name in ours(cache):
            access = (Path("/dev/shm") / name).stat()
            assert (access.st_mode & 0o777, access.st_gid) == (0o660, group)
        assert service_stats(segment_name, group=group).clients == 1


@contextlib.contextmanager
def held_lock(cache: Cache, client: StorageClient) -> Iterator[None]:
    """Of the ring of tasks, as by somebody who was stopped in a push."""
    with rings.tasks(cache) as other:
        lock = layout.LockRecord.from_address(other.segment.address + layout.LOCK_OFFSET)
        holder = other.segment.client
        assert holder is not None
        while True:  # the service takes it for its pops
            lock.word = holder.slot | holder.epoch << layout.LOCK_EPOCH_SHIFT
            try:
                client._tasks.push(b"")
            except LockTimeout:
                break
        try:
            yield
        finally:
            lock.word = 0


def test_a_lock_that_is_held_holds_up_one_call(cache: Cache) -> None:
    with StorageService(cache, full(cache)), StorageClient(cache) as client:
        with held_lock(cache, client):
            task = client.prefetch(KEYS)
            assert "the lock" in task.result.reasons[0]
            assert "holds the lock" in client.prefetch(KEYS).result.reasons[0]


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
        ring, whole = client._tasks, client._tasks.push

        def push(*given: Any, **how: Any) -> None:
            with ring.segment.busy():
                inside.set()
                assert gate.wait(60.0)
            whole(*given, **how)

        ring.push = push  # type: ignore[method-assign]
        saying = threading.Thread(target=task._stop)
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


def test_a_client_that_is_stopped_while_it_leaves_holds_up_nobody_else(cache: Cache) -> None:
    with (
        StorageService(cache, full(cache)) as service,
        StorageClient(cache) as client,
        StorageClient(cache) as leaving,
    ):
        own = (leaving._pid, leaving._client)
        opened = OpenObject.open(rings.answers_name(cache, *own), writable=True)
        assert opened is not None
        with contextlib.closing(opened), ofd.locked(opened.fd, layout.BYTE_LIFE, timeout=60.0):
            push(cache, Part(Kind.CANCEL, *own, 1, 0, 1, b"").pack())
            assert client.prefetch(KEYS).wait(5.0).loaded == 20  # not the 10 s of an attach
        assert service.stats().orphans == 1


def test_no_figure_is_stored_behind_the_end(cache: Cache) -> None:
    service, ends = StorageService(cache, full(cache)), []
    whole = service._board.end

    def end(phase: Phase) -> None:
        ends.append((phase, service._publishing.locked()))
        whole(phase)

    service._board.end = end  # type: ignore[method-assign]
    service.close()
    assert ends[-1] == (Phase.NONE, True)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "how", [{"timeout": -1}, {"grace": "1"}, {"failures": 0}, {"retry": float("nan")}]
)
def test_a_clients_arguments(cache: Cache, how: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(how))):
        StorageClient(cache, **how)
    assert ours(cache) == []


def test_a_services_arguments(cache: Cache) -> None:
    for how, what in (({"most": 0}, "most"), ({"group": 0}, "group"), ({"seen": 0}, "seen")):
        with pytest.raises(ConfigError, match=what):
            StorageService(cache, empty(cache), **how)
    with pytest.raises(TypeError):
        StorageService(cache, empty(cache), speed=1)
    with Cache.attach(cache.name, readonly=True) as reader, pytest.raises(PermissionDenied):
        StorageService(reader, empty(cache))
    assert ours(cache) == []


def test_bad_calls(cache: Cache, client: Any) -> None:
    with StorageService(cache, empty(cache)):
        for bad in (KEYS.astype(np.int64), KEYS[::2], [1, 2]):
            with pytest.raises(ConfigError, match="keys"):
                client.prefetch_deepest(bad)
        with pytest.raises(ConfigError, match="most"):
            client.prefetch_deepest(KEYS, most=-1)
        with pytest.raises(ConfigError, match="tokens"):
            client.write(KEYS, tokens=-1)
        for call in (client.write, client.prefetch, client.prefetch_deepest):
            with pytest.raises(ConfigError, match="expected a Namespace, found 'x'"):
                call(KEYS, namespace="x")


def test_who_asks_of_a_service_that_never_was(cache: Cache) -> None:
    with pytest.raises(NotReady):
        service_stats(cache.name)
    with pytest.raises(NotReady):
        service_stats(f"{cache.name}-not")
