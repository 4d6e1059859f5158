"""What other caches can do with several ranks, row by row of the list: each has a test or more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.crew import PAGE, Crew
from support.manager_world import Engine, open_cache
from support.refusals import refused
from support.scripts import with_support
from support.shard_backend import open_sharded

from lightcache.errors import Abandoned, TransferFailed, WaitTimeout
from lightcache.manager import KVCacheManager, ManagedBlocks, ManagerConfig, Prompt, WritePolicy
from lightcache.manager.handoff import hand_off, receive
from lightcache.manager.ranks.coordinator import RankCoordinator
from lightcache.manager.ranks.startup import wait_for_ranks
from lightcache.shm import SharedLog

TOKENS = Prompt(np.arange(4 * PAGE + 1))


@pytest.fixture
def crew(segment_name: str) -> Iterator[Crew]:
    made = Crew(segment_name, ranks=3)
    yield made
    made.close()


@pytest.fixture
def manager(crew: Crew) -> Iterator[KVCacheManager]:
    """Of the crew's coordinator, on device blocks of its own."""
    device = ManagedBlocks(f"{crew.name}.device", block_tokens=PAGE, blocks=16)
    with KVCacheManager(
        crew.cache, device, crew.coordinator, config=ManagerConfig(write_group=1)
    ) as one:
        yield one
        for each in crew.ranks:
            each.backend.finish()
        crew.poll()
    device.close()


def run(crew: Crew, manager: KVCacheManager, request: str) -> Any:
    """Plan, take, allocate, load."""
    manager.plan(request, TOKENS)
    manager.take(request)
    table = manager.allocate(request, len(TOKENS))
    return table, manager.load(request)


def compute(crew: Crew, manager: KVCacheManager, request: str) -> None:
    """A request from its beginning, published."""
    table, _ = run(crew, manager, request)
    for each in crew.ranks:
        each.device.write(table, 0, each.stamps(TOKENS.tokens))
    manager.commit(request, len(TOKENS))
    manager.release(request)
    crew.step()
    manager.poll()


# ---------------------------------------------------------------- A6


def test_a6_a_page_is_ready_when_the_last_rank_has_written_it(
    crew: Crew, manager: KVCacheManager
) -> None:
    for each in crew.ranks:
        each.backend.at_once = False
    compute(crew, manager, "a")
    keys = TOKENS.keys(manager.state.weights.open_space("").host_spec)
    for each in crew.ranks:
        assert crew.cache.peek(keys) == 0
        assert manager.in_flight() == 1  # the request has left, its blocks are not free
        each.backend.finish()
        each.worker.poll()
    assert crew.cache.peek(keys) == 4
    assert manager.poll() == 0


def test_a6_what_is_written_back_is_every_ranks(crew: Crew) -> None:
    device = ManagedBlocks(f"{crew.name}.device", block_tokens=PAGE, blocks=16)
    config = ManagerConfig(write=WritePolicy.BACK)
    with KVCacheManager(crew.cache, device, crew.coordinator, config=config) as manager:
        compute(crew, manager, "a")
        assert crew.cache.stats().ready == 0
        assert manager.demote(4) == 4
        crew.step()
        manager.poll()
        assert crew.cache.stats().ready == 4
        assert manager.stats().demotions == 4
    device.close()


# ---------------------------------------------------------------- B7


def test_b7_the_ranks_that_came_least_far_count(crew: Crew, manager: KVCacheManager) -> None:
    compute(crew, manager, "a")
    assert manager.device.index is not None
    manager.device.index.evict(16)
    crew.ranks[1].backend.fail_next = 1
    _, load = run(crew, manager, "b")
    assert load.tokens == 4 * PAGE
    crew.step()
    refused(TransferFailed, r"rank 1 .* failed", load.done)
    assert load.tokens == 0  # for every rank, also for those that have loaded all of it
    manager.release("b", publish=False)
    assert manager.device.index.stats().free == 16
    assert crew.cache.check().pins == 0
    assert crew.step().failed == (load.number,)


# ---------------------------------------------------------------- B15


def test_b15_ranks_count_what_is_in_flight(crew: Crew, manager: KVCacheManager) -> None:
    for each in crew.ranks:
        each.backend.at_once = False
    manager.pause()
    run(crew, manager, "a")
    manager.commit("a", len(TOKENS))
    assert crew.coordinator.in_flight() == (0, 0, 0)
    manager.resume()
    assert crew.coordinator.in_flight() == (1, 1, 1)
    crew.step()
    crew.ranks[0].backend.finish()
    crew.poll()
    assert crew.coordinator.in_flight() == (0, 1, 1)
    refused(WaitTimeout, "", manager.pause, 0)
    for each in crew.ranks:
        each.backend.finish()
    crew.poll()
    assert manager.poll() == 0
    assert crew.coordinator.in_flight() == (0, 0, 0)
    manager.resume()
    manager.release("a")


# ---------------------------------------------------------------- B17


RANK = with_support(
    """
import os, signal, sys
from support.crew import Rank
rank = Rank(sys.argv[1], sys.argv[1] + ".log", int(sys.argv[2]))
if len(sys.argv) > 3:
    os.kill(os.getpid(), signal.SIGKILL)
rank.worker.ready(60)
print("ready", flush=True)
sys.stdin.readline()
rank.close()
"""
)


def starting(tmp_path: Any, name: str, *arguments: Any) -> subprocess.Popen[bytes]:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path), name, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ),
    )


@pytest.mark.parametrize("dies", [False, True])
def test_b17_a_scheduler_waits_for_its_ranks(segment_name: str, tmp_path: Any, dies: bool) -> None:
    with open_sharded(segment_name, 8, PAGE, 2) as cache:
        log = SharedLog.create(f"{segment_name}.log", capacity=8, message_bytes=64)
        ranks = [starting(tmp_path, segment_name, 0)]
        ranks.append(starting(tmp_path, segment_name, 1, *(["dies"] if dies else [])))
        names = ["rank 0", "rank 1"]
        watch = {name: each.pid for name, each in zip(names, ranks, strict=True)}
        try:
            if dies:
                refused(Abandoned, "rank 1", wait_for_ranks, cache, log, names, 60, watch=watch)
                assert ranks[1].wait(60) == -signal.SIGKILL
            else:
                found = wait_for_ranks(cache, log, names, 60, watch=watch)
                assert RankCoordinator(log, found).shards == 2
        finally:
            for each in ranks:
                each.kill()
                each.communicate()
            log.close()
            cache.reap()


# ---------------------------------------------------------------- handoff


def test_handoff_from_one_engine_to_another_with_ranks(crew: Crew, manager: KVCacheManager) -> None:
    """The prefill side has ranks; what they wrote is loaded by the same ranks again."""
    whole = Prompt(np.arange(2 * PAGE + 3))
    manager.plan("a", whole)
    manager.take("a")
    table = manager.allocate("a", len(whole))
    for each in crew.ranks:
        each.device.write(table, 0, each.stamps(whole.tokens))
    manager.commit("a", len(whole))
    begin = crew.coordinator.save

    def save(*what: Any) -> Any:
        made = begin(*what)
        crew.step()  # ranks are processes of their own elsewhere
        return made

    crew.coordinator.save = save  # type: ignore[method-assign]
    handed = hand_off(manager, "a", [crew.cache.client_id])
    manager.release("a")
    crew.step()
    assert manager.device.index is not None
    manager.device.index.evict(16)
    longer = Prompt(np.arange(2 * PAGE + 4))
    found = receive(manager, "b", longer, bytes(handed))
    assert not found.done()
    crew.step()
    assert found.done()
    assert found.tokens == 2 * PAGE + 3
    table = manager.state.requests["b"].table
    for each in crew.ranks:
        assert (each.device.read(table, 0, len(whole)) == each.stamps(whole.tokens)).all()
    manager.release("b")


def test_data_parallel_ranks_share_the_host(segment_name: str) -> None:
    how: dict[str, Any] = {"owned": True, "blocks": 16, "block": PAGE, "page": PAGE, "pages": 16}
    with open_cache(segment_name, 16, PAGE) as cache:
        zero, one = (Engine(f"{segment_name}.{i}", cache=cache, **how) for i in range(2))
        for i, engine in enumerate((zero, one)):
            assert engine.begin(i, TOKENS)
            assert engine.compute(i, len(TOKENS), [])
        assert one.manager.stats().host_tokens == 4 * PAGE
        for engine in (zero, one):
            engine.settle()
            engine.close()
