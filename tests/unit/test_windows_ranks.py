"""Windows of an engine with ranks that share each page: the scheduler orders, each rank copies its
share of every group, and what one of them does not write is nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.crew import Crew
from support.refusals import refused
from support.state_team import StateTeam, open_host_of_both, state
from support.storing import Recorder
from support.window_engine import LateBackend, WindowEngine

from lightcache import Cache
from lightcache.errors import ConfigError, TransferFailed
from lightcache.group_index import GroupIndex
from lightcache.groups import Rule
from lightcache.hybrid import Checkpoints, WindowBlocks
from lightcache.hybrid.checkpoints import Tier
from lightcache.leases import TICKET_BYTES
from lightcache.manager import KVCacheManager, ManagedBlocks, Prompt, WritePolicy
from lightcache.manager.ranks.messages import Kind, Order, decode, encode
from lightcache.runs import Run
from lightcache.storage import StorageSpec, StorageTier

WINDOW, CHUNK = Rule.window(11), Rule.chunk(24)
NEVER = 1 << 20  # for `every`
STEM = [i * 7 % 50 + 1 for i in range(60)]
OTHER = [i * 11 % 50 + 1 for i in range(60)]
Make = Callable[..., WindowEngine]


@pytest.fixture
def engines(segment_name: str) -> Iterator[Make]:
    """Makes engines of two ranks, with a window and chunks."""
    made: list[WindowEngine] = []

    def make(*rules: Rule, **how: Any) -> WindowEngine:
        how = {"ranks": 2, "every": NEVER, **how}
        name = f"{segment_name}.{len(made)}"
        made.append(WindowEngine(name, rules or (WINDOW, CHUNK), **how))
        return made[-1]

    yield make
    for engine in made:
        for request in list(engine.running):
            engine.end(request, publish=False)
        engine.settle()
        if engine.tier is not None:
            assert engine.tier._executor.wait_idle(60.0)
        engine.nothing_left()
        engine.close()


def drop(engine: WindowEngine, number: int, page: int, part: int) -> None:
    """The host forgets one part of a page of STEM."""
    space, run = engine.manager.state.weights.open_space(""), engine.windows[number].run
    keys = Prompt(STEM).keys(space.host_spec)
    key = run.keys(np.ascontiguousarray(keys[page : page + 1]))[part].reshape(1, 2)
    assert engine.host.index.drop(key, namespace=space.host) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_writes_and_loads_its_share_of_each_group(engines: Make, ranks: int) -> None:
    engine = engines(ranks=ranks)
    first = engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()
    again = engine.run(STEM, 3)  # the answers compare every row of every rank
    assert (again.match.usable, set(again.match.tiers.values())) == (56, {Tier.HOST})
    assert again.tokens[:60] == first.tokens[:60]
    assert [worker.failures for worker in engine.workers] == [0] * ranks
    stats = engine.manage.window_stats()
    assert (stats.loads, stats.failed_offloads, stats.unsaved) == (2, 0, 0)
    share = [worker.offloaded_bytes for worker in engine.workers]
    assert len(set(share)) == 1
    assert sum(share) > 0


def test_parts_that_are_there_are_not_written_again(engines: Make) -> None:
    """A page in two parts lacks the last one: the order says which the ranks have to write."""
    engine = engines(WINDOW)
    engine.run(STEM, 0)
    engine.settle()
    assert engine.windows[0].run.parts == 2
    for page, part in ((5, 1), (6, 1), (6, 0)):
        drop(engine, 0, page, part)
    before = sum(worker.offloaded_bytes for worker in engine.workers)
    engine.forget_device()
    assert engine.run(STEM, 0).match.usable == 0
    engine.settle()
    written = sum(worker.offloaded_bytes for worker in engine.workers) - before
    assert written == 3 * engine.host.page_bytes
    engine.forget_device()
    assert engine.run(STEM, 2).match.usable == 56


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_did_not_write_is_not_found(engines: Make, rank: int) -> None:
    engine = engines(WINDOW, wrap=LateBackend)
    engine.team[rank].backends[1].fail_next = 1
    engine.run(STEM, 0)
    engine.settle()
    stats = engine.manage.window_stats()
    assert (stats.failed_offloads, stats.offloads) == (1, 0)
    assert engine.workers[rank].failures == 1
    engine.forget_device()
    (match,) = engine.manage.peek_many([Prompt(STEM)])
    assert (match.usable, match.kv_tokens, match.limit) == (0, 56, "window11")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_one_rank_fails_fails_for_all(engines: Make, rank: int) -> None:
    engine = engines(WINDOW, wrap=LateBackend)
    engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()
    request = engine.begin(STEM, 2)
    assert engine.running[request].match.usable == 56
    engine.step(request)
    engine.team[rank].backends[1].fail_next = 1
    engine.settle()
    load = engine.running[request].load
    with pytest.raises(TransferFailed, match=f"rank {rank} .* failed"):
        load.done()
    assert (load.failed, load.tokens) == (True, 0)
    while engine.step(request):  # it restarts, from its first token
        engine.settle()
    engine.end(request)


def test_write_back_is_every_ranks(engines: Make) -> None:
    how: dict[str, Any] = {"write": WritePolicy.BACK, "low_water": 0.0, "wrap": LateBackend}
    engine = engines(WINDOW, **how)
    engine.run(STEM, 0)
    (back,) = engine.manage.parts.windows._backs.values()
    assert back.demote(64) == 15
    for rank, backend in enumerate(engine.backends[1::2]):
        assert engine.windows[0].free == 49  # until the last one has written its share
        engine.order()
        assert backend.going
        backend.finish()
        engine.workers[rank].drain(60)
        engine.manage.poll()
    assert engine.windows[0].free == 64
    engine.settle()
    assert engine.manage.window_stats().demotions == 4
    (match,) = engine.manage.peek_many([Prompt(STEM)])
    assert (match.usable, match.tiers) == (56, {"window11": Tier.HOST})


def kept(cache: Cache) -> StorageTier:
    """Takes what it is given."""
    return StorageTier(cache, Recorder(StorageSpec.of(cache)), write_pages=cache.pages)


def test_positions_of_ranks_come_back_from_storage(engines: Make) -> None:
    engine = engines(storage=kept)
    engine.run(STEM, 0)
    engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    engine.forget_device()
    engine.host.index.evict(1000)
    match = engine.run(STEM, 3).match
    assert (match.usable, match.kv.storage) == (56, 56)


def test_an_engine_of_other_ranks_reads_what_these_wrote(engines: Make) -> None:
    """Two engines of two ranks share the host."""
    one = engines()
    other = engines(host=one.host.name)
    one.run(STEM, 0)
    one.settle()
    assert other.run(STEM, 3).match.usable == 56


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 1)])
def test_ranks_share_states_in_the_cache_of_kv(
    segment_name: str, writers: int, readers: int
) -> None:
    with open_host_of_both(f"{segment_name}.kv") as host:
        for number, (ranks, usable) in enumerate(((writers, 0), (readers, 12))):
            team = StateTeam(f"{segment_name}.{number}", host, host, ranks)
            match, slot = team.begin("a", STEM[:13])
            assert match.usable == usable
            if usable:
                assert match.tier is Tier.HOST
                assert team.wrong(slot, state(1)) == []
            team.write(slot, state(1))
            team.end("a", 12)
            assert not [each.worker.last_error for each in team.ranks if each.worker.failures]
            team.close()
        assert host.check().pins == 0


# ---- orders


@pytest.mark.parametrize("positions", [None, (0, 3), ()])
def test_an_order_says_its_group(positions: Any) -> None:
    slots = np.array([4, 5, -1])
    order = Order(Kind.OFFLOAD, 3, bytes(TICKET_BYTES), slots, 0, 2, positions)
    read = decode(encode(order))
    assert isinstance(read, Order)
    assert (read.group, read.positions, read.slots.tolist()) == (2, positions, slots.tolist())
    kv = decode(encode(Order(Kind.LOAD, 3, bytes(TICKET_BYTES), slots)))
    assert isinstance(kv, Order)
    assert (kv.group, kv.positions) == (0, None)


def test_a_rank_without_the_group_fails_the_copy(engines: Make) -> None:
    engine = engines(WINDOW)
    del engine.workers[1]._backends[1]
    engine.run(STEM, 0)
    engine.settle()
    assert engine.manage.window_stats().failed_offloads == 1
    with pytest.raises(ConfigError, match="rank 1: expected a transfer backend for group 1"):
        raise engine.workers[1].last_error or AssertionError


def test_copies_of_another_group_are_refused(segment_name: str) -> None:
    crew = Crew(segment_name)
    coordinator, words = crew.coordinator, "expected one for pages of Run"
    how: dict[str, Any] = {"rule": WINDOW, "block_tokens": 4, "blocks": 8, "run": Run(1, 2)}
    name = f"{segment_name}.w"
    for backend in (coordinator, coordinator.group(Run(2, 2)), coordinator.group(Run(1, 3))):
        refused(ConfigError, words, WindowBlocks, name, backend=backend, **how)
    WindowBlocks(name, backend=coordinator.group(Run(1, 2)), **how).close()
    refused(ConfigError, words, Checkpoints, None, crew.cache, coordinator, run=Run(1, 2))
    refused(ConfigError, "page_tokens: expected", coordinator.group, Run(1), page_tokens=0)
    device = ManagedBlocks(f"{segment_name}.d", block_tokens=4, blocks=8)
    refused(ConfigError, words, KVCacheManager, crew.cache, device, coordinator.group(Run(1, 2)))
    device.close()
    crew.close()


def test_an_offload_of_other_shards_is_refused(engines: Make) -> None:
    engine = engines(WINDOW)
    backend = engine.windows[0].backend
    assert backend is not None
    keys = Prompt(STEM).keys(engine.host.key_spec())[:1]
    index = GroupIndex(engine.host.index, engine.windows[0].run)
    with index.reserve(keys, 0, shards=1) as new:
        refused(ConfigError, "a reservation of 2 shards", backend.offload, new, np.arange(8))
