"""A storage service and its clients in one process: what a StorageTier has no need of."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.interrupts import interrupt
from support.refusals import refused
from support.serving import ServedTier, ours
from support.storing import KEYS, SECRET, Recorder, empty, fill, full, holds, make_cache

from lightcache import Cache, ConfigError, Detached, InUse, NotReady, PermissionDenied
from lightcache.shm import Segment
from lightcache.storage import StorageSpec, TaskState
from lightcache.storage.service import StorageClient, StorageService, board
from lightcache.storage.service.board import service_stats
from lightcache.storage.service.messages import Answer
from lightcache.tools.maintenance import _switch

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED
Wait = Callable[[Callable[[], bool], str], None]

# ---------------------------------------------------------------- who comes, and goes


def test_without_a_service_tasks_fail_at_once(cache: Cache, client: Any, caplog: Any) -> None:
    fill(cache, KEYS)
    with caplog.at_level(logging.WARNING):
        for task in (client.write(KEYS), client.prefetch(KEYS), client.prefetch_last_ready(KEYS)):
            assert task.ended
            assert task.state is FAILED
            assert task.result.failed == 20
            assert f"lightcache storage {cache.name}" in task.result.reasons[0]
            assert task.stop().prefix == 0
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
    before = set(threading.enumerate())
    with Cache.attach(cache.name, secret=SECRET) as other:
        with StorageService(cache, empty(cache)) as first:
            refused(InUse, f"pid {os.getpid()}.*StorageClient", StorageService, other, empty(cache))
            assert first.stats().serving
            with StorageClient(cache) as client:
                assert client.prefetch(KEYS).wait(60.0).absent == 20
        with StorageService(other, empty(cache)):
            pass
    assert not set(threading.enumerate()) - before


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
            task = client.write(KEYS)
            service.close(0.0)
        wait_until(lambda: task.ended, "the end of its service")
        assert task.state is FAILED
        assert f"is gone (pid {os.getpid()})" in task.result.reasons[0]
        assert task.result.failed == 20
        assert (client.stats().tasks_failed, client.stats().failed) == (1, 20)
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
            task = client.write(KEYS, timeout=0.0)
            wait_until(lambda: task.ended, "its time")
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
    refused(Detached, "", client.prefetch, KEYS)
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
        for task in (client.write(KEYS), client.prefetch(KEYS), client.prefetch_last_ready(KEYS)):
            assert "disabled the cache" in task.wait(60.0).reasons[0]
            assert task.state is FAILED
        _switch(cache.name, None, 0)
        assert client.write(KEYS).wait(60.0).present == 20


def test_answers_of_a_killed_client_come_to_no_later_one(cache: Cache) -> None:
    with StorageClient(cache) as client:
        left = board.answers_ring(cache, client._tasks, client._client)
        left.push(Answer(1, FINISHED, 20, {}, ()).pack())  # and nobody removes it
        Segment.unlink(client._tasks.segment.name, force=True)
    with StorageClient(cache) as later:
        assert later._client == client._client  # in another ring of tasks
        with StorageService(cache, empty(cache)):
            assert later.prefetch(KEYS).wait(60.0).absent == 20
    left.close()


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


def test_a_forked_child_touches_nothing(cache: Cache) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        child = os.fork()
        if not child:
            status = 1
            try:
                refused(Detached, "", client.prefetch, KEYS)
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


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "how", [{"timeout": -1}, {"grace": "1"}, {"silence": -1.0}, {"silence": float("nan")}]
)
def test_a_clients_arguments(cache: Cache, how: Any) -> None:
    refused(ConfigError, next(iter(how)), StorageClient, cache, **how)
    assert ours(cache) == []


def test_a_services_arguments(cache: Cache) -> None:
    for how, what in (({"threads": 0}, "threads"), ({"group": 0}, "group"), ({"seen": 0}, "seen")):
        refused(ConfigError, what, StorageService, cache, empty(cache), **how)
    refused(TypeError, "", StorageService, cache, empty(cache), speed=1)
    with Cache.attach(cache.name, readonly=True) as reader, pytest.raises(PermissionDenied):
        StorageService(reader, empty(cache))
    assert ours(cache) == []


def test_bad_calls(cache: Cache, client: Any) -> None:
    with StorageService(cache, empty(cache)):
        for bad in (KEYS.astype(np.int64), KEYS[::2], [1, 2]):
            refused(ConfigError, "keys", client.prefetch_last_ready, bad)
        refused(ConfigError, "most", client.prefetch_last_ready, KEYS, most=-1)
        refused(ConfigError, "tokens", client.write, KEYS, tokens=-1)
        for call in (client.write, client.prefetch, client.prefetch_last_ready):
            refused(ConfigError, "expected a Namespace, found 'x'", call, KEYS, namespace="x")


def test_a_client_refuses_to_hold_pages(cache: Cache, client: Any) -> None:
    with StorageService(cache, full(cache)):
        with pytest.raises(ConfigError, match=r"open the storage embedded.*StorageTier\.open"):
            client.prefetch(KEYS, hold=True)
        task = client.prefetch(KEYS)
        refused(ConfigError, "holds nothing", task.publish, 0)
        assert task.wait(60.0).loaded == 20


def test_who_asks_of_a_service_that_never_was(cache: Cache) -> None:
    refused(NotReady, "", service_stats, cache.name)
    refused(NotReady, "", service_stats, f"{cache.name}-not")
