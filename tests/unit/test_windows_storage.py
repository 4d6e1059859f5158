"""Windows in storage: the groups of a position travel together, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.serving import ServedTier
from support.storing import Recorder
from support.window_engine import WindowEngine

from lightcache import Cache
from lightcache.errors import ConfigError, StorageError
from lightcache.group_index import GroupIndex
from lightcache.groups import Rule
from lightcache.hybrid import HybridManager, WindowBlocks
from lightcache.hybrid.checkpoints import Tier
from lightcache.manager import (
    KVCacheManager,
    ManagedBlocks,
    MultimodalItem,
    NullBackend,
    Prompt,
    RequestOptions,
    WritePolicy,
)
from lightcache.runs import PLAIN, Run
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier
from lightcache.storage.testing.conformance import make_keys

WINDOW, CHUNK = Rule.window(11), Rule.chunk(24)
NEVER = 1 << 20  # for `every`
STEM = [i * 7 % 50 + 1 for i in range(60)]
Make = Callable[..., WindowEngine]


def kept(cache: Cache) -> StorageTier:
    """Takes what it is given."""
    return StorageTier(cache, Recorder(StorageSpec.of(cache)), write_pages=cache.pages)


def served(cache: Cache) -> ServedTier:
    """The same, by way of a service."""
    return ServedTier(cache, MemoryStorage(StorageSpec.of(cache)), write_pages=cache.pages)


@pytest.fixture
def engines(segment_name: str) -> Iterator[Make]:
    """Makes engines of a window and chunks, with a storage."""
    made: list[WindowEngine] = []

    def make(*rules: Rule, **how: Any) -> WindowEngine:
        how = {"storage": kept, "every": NEVER, **how}
        name = f"{segment_name}.{len(made)}"
        made.append(WindowEngine(name, rules or (WINDOW, CHUNK), **how))
        return made[-1]

    yield make
    for engine in made:
        for request in list(engine.running):
            engine.end(request, publish=False)
        engine.settle()
        assert engine.tier._executor.wait_idle(60.0)
        engine.nothing_left()
        engine.close()


def forget(engine: WindowEngine) -> None:
    """Storage alone has what it was given."""
    engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    engine.forget_device()
    engine.host.index.evict(1000)
    for index in (engine.host.index, engine.device.index):
        assert index is not None
        assert index.stats().ready == 0


def keys_of(engine: WindowEngine, tokens: list[int]) -> Any:
    """Those of host pages."""
    return Prompt(tokens).keys(engine.manager.state.weights.open_space("").host_spec)


def stored(engine: WindowEngine, tokens: list[int]) -> list[list[int]]:
    """Pages of KV and of each window that storage has whole."""
    keys, found = keys_of(engine, tokens), []
    for run in (PLAIN, *(window.run for window in engine.windows)):
        parts = [run.keys(np.ascontiguousarray(keys[i : i + 1])) for i in range(len(keys))]
        contains = engine.tier.storage.contains
        found.append([i for i, each in enumerate(parts) if contains(each, timeout=9) == len(each)])
    return found


# ---- what is stored, and found again


def test_write_back_of_kv_stores_positions_whole(engines: Make) -> None:
    """With `WritePolicy.BACK` KV stays on the device until it is evicted there; at the end of a
    request with a storage it goes to the host all the same, and with its windows to storage."""
    engine = engines(write=WritePolicy.BACK)
    engine.run(STEM, 0)
    engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    kv, window, chunk = stored(engine, STEM)
    assert (kv, chunk) == ([*range(7)], [6])
    assert {5, 6} <= set(window)
    forget(engine)
    again = engine.run(STEM, 3)
    assert (again.match.usable, set(again.match.tiers.values())) == (56, {Tier.HOST})
    assert engine.manager.config.write is WritePolicy.BACK


@pytest.mark.parametrize("kind", [kept, served])
@pytest.mark.parametrize("sizes", [(4, 8), (8, 8), (16, 8)])
def test_a_position_comes_back_from_storage(
    engines: Make, kind: Any, sizes: tuple[int, int]
) -> None:
    block, page = sizes  # of 16 and 8: the window of 48 begins at 41, its block at 32
    engine = engines(Rule.window(7), CHUNK, block=block, page=page, storage=kind)
    first, position = engine.run(STEM, 0), 56 // max(sizes) * max(sizes)
    forget(engine)
    again = engine.run(STEM, 3)
    assert (again.match.usable, again.match.limit, again.match.pending) == (position, None, False)
    assert set(again.match.tiers.values()) == {Tier.HOST}
    assert (again.match.kv.host, again.match.kv.storage) == (0, position)
    assert again.tokens[:60] == first.tokens[:60]
    stats = engine.manage.window_stats()
    assert stats.storage_hits == stats.host_hits == len(again.match.tiers)
    for name, hits in stats.groups.items():
        assert hits.device_tokens == 0
        assert hits.storage_tokens == hits.host_tokens
        assert bool(hits.host_tokens) == (name == "prefix" or name in again.match.tiers)


def test_storage_has_what_a_position_needs_and_no_more(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 7)  # the prompt ends at 56, the request at 64: each needs 2 pages and 1, or 0
    forget(engine)
    tokens = [*STEM, *[0] * 4]
    assert stored(engine, tokens)[0][:7] == [0, 1, 2, 3, 4, 5, 6]
    assert [pages[:7] for pages in stored(engine, tokens)[1:]] == [[5, 6], [6]]
    writes = engine.tier.storage.calls.count
    assert engine.tier.stats().unstored == 0
    assert writes(("delete", 1)) == 0


def test_kv_without_its_windows_is_not_stored(engines: Make) -> None:
    """The host has no room for one window: storage gets nothing of that position."""
    engine = engines(every=24)
    reserve, refused = GroupIndex.reserve, engine.windows[0].run

    def full(self: GroupIndex, keys: Any, *rest: Any, **how: Any) -> Any:
        if self.run == refused and len(keys) and (keys[-1] == keys_of(engine, STEM)[6]).all():
            return reserve(self, keys[:0], *rest, **how)
        return reserve(self, keys, *rest, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupIndex, "reserve", full)
        engine.run(STEM, 0)
    forget(engine)
    assert stored(engine, STEM) == [[0, 1, 2, 3, 4, 5], [1, 2, 4, 5], []]
    assert engine.run(STEM, 0).match.usable == 48


def test_a_part_that_storage_lost_makes_the_position_useless(engines: Make) -> None:
    """The last position lacks one part of one window; the one before has all."""
    engine = engines(every=24)
    engine.run(STEM, 0)
    forget(engine)
    run = engine.windows[0].run
    for part, usable, loaded in ((-1, 48, 6 + 4 + 0), (0, 48, 10)):
        gone = run.keys(np.ascontiguousarray(keys_of(engine, STEM)[6:7]))[part]
        assert engine.tier.storage.delete(gone.reshape(1, 2), timeout=9) == 1
        before = engine.tier.stats().loaded
        request = engine.begin(STEM, 0)
        assert engine.running[request].match.usable == usable
        engine.settle()
        if part == -1:  # what storage lacks is not read in vain
            assert engine.tier.stats().loaded - before == loaded
        while engine.step(request):
            pass
        engine.end(request)  # what was lost is stored again
        forget(engine)
        assert [pages[-1] for pages in stored(engine, STEM)] == [6, 6, 6]


def test_a_part_that_cannot_be_read_makes_the_position_useless(engines: Make) -> None:
    engine = engines(every=24)
    engine.run(STEM, 0)
    forget(engine)
    storage, bad = engine.tier.storage, engine.windows[1].run.keys(keys_of(engine, STEM)[6:7])[0]
    read = storage.read

    def broken(keys: Any, buffers: Any, *, timeout: float) -> Any:
        result = read(keys, buffers, timeout=timeout)
        if (keys == bad).all(axis=1).any():
            raise StorageError("arranged")
        return result

    storage.read = broken
    match = engine.run(STEM, 0).match
    assert (match.usable, match.kv.usable) == (0, 0)  # the task has failed
    storage.read = read
    forget(engine)
    assert engine.run(STEM, 0).match.usable == 56


def test_what_the_host_has_is_not_read_again(engines: Make) -> None:
    engine = engines(every=24)
    engine.run(STEM, 0)
    forget(engine)
    engine.run(STEM[:50], 0)  # 48, from storage
    engine.settle()
    engine.forget_device()
    loaded = engine.tier.stats().loaded
    assert loaded == 6 + 2 * 2
    match = engine.run(STEM, 0).match
    assert (match.usable, match.kv.host, match.kv.storage) == (56, 48, 8)
    # A page of KV; of the window the second of its pages; of the chunk that began at 48 its one.
    assert engine.tier.stats().loaded - loaded == 1 + 2 + 2


def test_a_request_waits_for_storage_as_long_as_it_is_worth(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    forget(engine)
    storage = engine.tier.storage
    storage.closed_gate_for = "read"
    storage.gate.clear()
    match = engine.manage.plan("a", Prompt(STEM))
    assert (match.usable, match.pending) == (0, True)
    assert engine.manage.take("a") is None
    assert engine.manage.plan("a", Prompt(STEM)).pending  # one read for each request
    assert storage.arrived.acquire(timeout=60.0)
    storage.gate.set()
    match = engine.manage.take("a", wait=True)
    assert (match.usable, match.pending) == (56, False)
    engine.manage.release("a")
    assert engine.tier.stats().tasks_finished == 3  # the first one's read and write, and this read


def test_a_request_does_not_wait_longer(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines()
    engine.run(STEM, 0)
    forget(engine)
    storage = engine.tier.storage
    storage.closed_gate_for = "read"
    storage.gate.clear()
    monkeypatch.setattr(engine.manager.state.pace, "seconds", lambda tokens: 0.0)
    engine.manage.plan("a", Prompt(STEM))
    match = engine.manage.take("a")
    assert match is not None
    assert (match.usable, match.limit) == (0, "prefix")
    storage.gate.set()
    assert engine.tier._executor.wait_idle(60.0)  # for later requests
    assert engine.manage.plan("b", Prompt(STEM)).usable == 56
    engine.manage.cancel("b")
    engine.manage.release("a")


def test_a_plan_that_is_cancelled_ends_its_read(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    forget(engine)
    storage = engine.tier.storage
    storage.closed_gate_for = "read"
    storage.gate.clear()
    engine.manage.plan("a", Prompt(STEM))
    assert storage.arrived.acquire(timeout=60.0)
    engine.manage.cancel("a")
    storage.gate.set()
    assert engine.tier._executor.wait_idle(60.0)
    assert engine.host.index.stats().ready == 0


def test_other_weights_read_anew(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    forget(engine)
    engine.manager.begin_update(wait=False)
    assert not engine.manage.plan("a", Prompt(STEM)).pending
    engine.manager.finish_update("")
    assert engine.manage.plan("a", Prompt(STEM)).pending  # keys say what is stored
    assert engine.manage.take("a", wait=True).usable == 56
    engine.manage.release("a")


@pytest.mark.parametrize("tiers", [{"device", "host"}, {"device", "storage"}])
def test_a_request_without_storage_asks_nothing(engines: Make, tiers: set[str]) -> None:
    engine = engines()
    engine.run(STEM, 0)
    forget(engine)
    match = engine.manage.plan("a", Prompt(STEM), options=RequestOptions(tiers=frozenset(tiers)))
    assert (match.usable, match.pending) == (0, False)
    engine.manage.cancel("a")


def test_an_abort_stores_nothing(engines: Make) -> None:
    engine = engines()
    request = engine.begin(STEM, 0)
    while engine.step(request):
        pass
    engine.end(request, publish=False)
    forget(engine)
    assert stored(engine, STEM) == [[], [], []]


def test_an_item_is_not_split(engines: Make) -> None:
    engine = engines()
    prompt = Prompt(STEM, items=[MultimodalItem(50, 58, b"i" * 32)])
    asked = []
    tier = engine.tier
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "prefetch_last_ready", lambda keys, **how: asked.append(len(keys)))
        patch.setattr(engine.manager.state.tasks, "add", lambda task: None)
        engine.manage.plan("a", prompt)
    engine.manage.cancel("a")
    assert asked == [6]


def test_a_prompt_is_read_ahead_of_its_request(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    forget(engine)
    (task,) = engine.manage.prefetch(Prompt(STEM))
    assert task.wait(60.0).loaded == 7 + 4 + 2
    assert engine.manage.plan("a", Prompt(STEM)).usable == 56
    engine.manage.cancel("a")
    assert engine.manage.prefetch(Prompt(STEM[:5])) == []
    assert engine.manage.prefetch(Prompt(STEM))[0].wait(60.0).loaded == 0


def test_what_is_read_is_counted(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    forget(engine)
    engine.run(STEM, 0)
    stats, read = engine.manager.stats(), (7 + 4 + 2) * engine.host.page_bytes
    assert (stats.storage_read_bytes, stats.storage_written_bytes) == (read, read)


def test_a_manager_that_is_closed_has_stored_what_ended(segment_name: str) -> None:
    """The tier of a URL is the manager's: it drains what ended requests have."""
    storages = []

    def kept_open(cache: Cache) -> StorageTier:
        storages.append(MemoryStorage(StorageSpec.of(cache)))
        return StorageTier(cache, storages[0], write_pages=cache.pages)

    engine = WindowEngine(segment_name, (WINDOW, CHUNK), storage=kept_open, every=NEVER)
    engine.run(STEM, 0)
    engine.manage.close()
    engine.manager.close()
    assert engine.tier.close(60.0)
    assert storages[0].stats().pages == 7 + 4 + 2
    engine.close()


# ---- refusals


def test_windows_without_a_host_have_no_storage(segment_name: str, engines: Make) -> None:
    engine = engines()
    alone = WindowBlocks(f"{segment_name}.a", rule=Rule.window(3), block_tokens=4, blocks=8)
    device = ManagedBlocks(f"{segment_name}.d", block_tokens=4, blocks=8)
    with KVCacheManager(engine.host, device, NullBackend(), storage=engine.tier) as manager:
        with pytest.raises(ConfigError, match="windows: expected a backend and a run for each"):
            HybridManager(manager, windows=[alone])
    for closeable in (alone, device):
        closeable.close()


@pytest.mark.parametrize(
    "groups", [(), None, [(WINDOW,)], [(PLAIN, WINDOW)], [(WINDOW, PLAIN)] * 17]
)
def test_a_tier_refuses_groups(engines: Make, groups: Any) -> None:
    tier = engines().tier
    with pytest.raises(ConfigError, match="groups: expected 1 to 16 pairs of a Rule and a Run"):
        tier.prefetch_last_ready(make_keys(3, seed=1), groups=groups)


def test_a_tier_refuses_positions(engines: Make) -> None:
    tier, keys = engines().tier, make_keys(3, seed=1)
    for name, values in (("start", (-1, 4)), ("step", (0, 1 << 16)), ("most", (-1,))):
        for value in values:
            with pytest.raises(ConfigError, match=name):
                tier.prefetch_last_ready(keys, **{name: value})
    assert tier.prefetch_last_ready(keys, groups=[(WINDOW, Run(1, 2))], start=3).wait(9).loaded == 0
