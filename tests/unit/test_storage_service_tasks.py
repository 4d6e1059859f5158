"""Tasks that a storage service carries out, its figures, and messages that are none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from support.serving import ServedTier, push
from support.storing import KEYS, PAGE_BYTES, Recorder, empty, fill, full, make_cache

from lightcache import Cache
from lightcache.storage import StorageSpec, TaskState
from lightcache.storage.service import StorageClient, StorageService, board
from lightcache.storage.service.board import service_stats
from lightcache.storage.service.messages import PART_BYTES, Answer, Ask, Part, split
from lightcache.storage.testing import Fault, FlakyStorage
from lightcache.storage.testing.conformance import make_keys

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED
Wait = Callable[[Callable[[], bool], str], None]

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
            assert task.ended
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
        (job,) = tier.serving._tier._executor.running
        wait_until(lambda: job.given_up, "the word to cancel")
        storage.gate.set()
        assert first.wait(60.0).reasons == ("cancelled",)
    assert storage.calls == [("contains", 20), ("write", 4)]


def test_stopping_never_waits(make_tier: Any, cache: Cache, wait_until: Wait) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("hang", at=1)]})
    with make_tier(cache, flaky, group=8) as tier:  # whose policy is to wait
        task = tier.prefetch(KEYS)
        assert flaky.wait_hanging()
        wait_until(lambda: task.pages_done == 8, "the first group")
        assert task.stop().prefix == 8
        assert not task.ended
        if isinstance(tier, ServedTier):
            (job,) = tier.serving._tier._executor.running
            wait_until(lambda: job.stopping, "the word to stop")
        flaky.let_go()
        assert task.wait(60.0).prefix == 16  # the group in flight, and nothing more
        assert task.stop().prefix == 16


def test_a_task_that_may_take_for_ever(cache: Cache) -> None:
    with ServedTier(cache, full(cache)) as tier:
        assert tier.prefetch(KEYS, timeout=float("inf")).wait(60.0).loaded == 20
        assert tier.prefetch(KEYS, timeout=1e300).wait(60.0).present == 20
        assert tier._executor._watcher.is_alive()


# ---------------------------------------------------------------- figures


def test_figures_are_given_once(cache: Cache) -> None:
    fill(cache, KEYS)
    with ServedTier(cache, empty(cache)) as tier, StorageClient(cache) as other:
        tier.write(KEYS).wait(60.0)
        assert other.take_figures() == {"written_bytes": 20 * PAGE_BYTES}
        assert tier.take_figures() == other.take_figures() == {}
        other.write(KEYS[:3]).wait(60.0)
        cache.evict(96)
        tier.prefetch(KEYS[:5]).wait(60.0)
        assert tier.take_figures() == {"read_bytes": 5 * PAGE_BYTES}
        assert tier.stats() == other.stats()
        assert service_stats(cache.name).tier == tier.stats()


def test_a_figure_that_is_counted_stands_behind_what_it_counts(
    cache: Cache, wait_until: Wait
) -> None:
    """Words are stored one after another, and others read in between."""
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        half = Part(client._client, 1 << 40, 0, 2, b"x" * (PART_BYTES - 32))
        push(cache, half.pack())
        board, seen = service._board, []
        whole = board._words["halves"].store

        def store(value: int) -> None:
            seen.append((value, board.load("clients")))
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


# ---------------------------------------------------------------- strange messages


def test_malformed_messages_are_counted_and_passed_over(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        own = client._client
        bad = [
            b"",
            b"nonsense",
            Part(own, 1 << 40, 0, 1, b"no body").pack(),
            Part(own, 1 << 40, 1, 2, b"no first part").pack(),
        ]
        push(cache, *bad)
        wait_until(lambda: service.stats().malformed == 4, "four malformed messages")
        push(cache, *split(own, 1 << 40, Ask("cancel").pack()))  # of nothing: nothing
        assert client.prefetch(KEYS).wait(60.0).loaded == 20
        assert service.stats().malformed == 4


def test_a_second_task_of_one_number_is_malformed(cache: Cache, wait_until: Wait) -> None:
    recorder = Recorder(StorageSpec.of(cache))
    recorder.closed_gate_for = "contains"
    recorder.gate.clear()
    with StorageService(cache, recorder) as service, StorageClient(cache) as client:
        space = cache.index.default_namespace
        ask = Ask("prefetch", time.monotonic() + 600.0, KEYS, space, {"start": 0})
        push(cache, *split(client._client, 7, ask.pack()) * 2)
        wait_until(lambda: service.stats().malformed == 1, "the second")
        recorder.gate.set()
        wait_until(lambda: service.stats().tier.tasks_finished == 1, "the first")


def test_messages_of_who_is_gone_are_counted(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        push(cache, Part(2, 3, 0, 1, b"x").pack())
        wait_until(lambda: service.stats().orphans == 1, "a message of nobody")
        half = Part(client._client, 1 << 40, 0, 2, b"x" * (PART_BYTES - 32))
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
        with board.answers_ring(cache, client._tasks, client._client) as ring:
            ring.push(b"nonsense")
        assert client.prefetch(KEYS).wait(60.0).loaded == 20


# ---------------------------------------------------------------- what a client's task is given


def test_the_same_request_of_two_clients_is_two(cache: Cache) -> None:
    fill(cache, KEYS)
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as one:
        asked, whole = [], service._tier.write

        def write(keys: Any, request: Any, **how: Any) -> Any:
            asked.append(request)
            return whole(keys, request, **how)

        service._tier.write = write  # type: ignore[method-assign]
        with StorageClient(cache) as other:
            for client in (one, one, other):
                client.write(KEYS, "request 7").wait(60.0)
            one.write(KEYS).wait(60.0)
    assert asked[0] == asked[1] != asked[2]
    assert asked[3] is None


def test_a_write_that_advances_gets_its_whole_time_again(cache: Cache, wait_until: Wait) -> None:
    fill(cache, KEYS)
    storage = Recorder(StorageSpec.of(cache))
    storage.gate.clear()
    with StorageService(cache, storage), StorageClient(cache, silence=60.0) as client:
        client.write(KEYS, timeout=600.0)
        assert storage.arrived.acquire(timeout=60.0)
        (task,) = client._asked.values()
        before = task.end
        with board.answers_ring(cache, client._tasks, client._client) as ring:
            ring.push(Answer(task.number, TaskState.RUNNING, 4, {}, ()).pack())
        wait_until(lambda: task.end is not before, "its new end")
        assert task.end.timeout > 600.0
        storage.gate.set()
