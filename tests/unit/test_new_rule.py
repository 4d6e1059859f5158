"""A kind of group that the product does not know, added in this file alone: attention in chunks
that overlap. docs/design/groups.md, section 27, says how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.storing import Recorder
from support.window_engine import WindowEngine

from lightcache import Cache, PageIndex, Router
from lightcache.group_index import GroupIndex
from lightcache.groups import Group, GroupSet, Rule
from lightcache.hybrid import open_hybrid
from lightcache.hybrid.checkpoints import Tier
from lightcache.kernels import KVGroup, PageGeometry
from lightcache.manager import Prompt
from lightcache.storage import StorageSpec, StorageTier

OVERLAP = Rule("chunk24-8", align=24, back=8)
"""Chunks of 24 tokens, which also see the 8 tokens before."""
STEM = [i * 7 % 50 + 1 for i in range(60)]


def needed(tokens: int) -> int:
    """The first token that a position needs, said without `Rule`."""
    return max(0, tokens - tokens % 24 - 8)


def kept(cache: Cache) -> StorageTier:
    """Takes what it is given."""
    return StorageTier(cache, Recorder(StorageSpec.of(cache)), write_pages=cache.pages)


@pytest.mark.parametrize("page", [4, 8, 16])
def test_a_match(segment_name: str, page: int) -> None:
    """The deepest position of which all pages are there, whatever is missing."""
    keys = np.arange(40, dtype=np.uint64).reshape(20, 2)
    draw = np.random.default_rng(page)
    for times in range(8):
        there = draw.random(20) < (0.8 if times else 1)
        with PageIndex.create(f"{segment_name}.{times}", pages=32, independent=True) as index:
            for i in np.flatnonzero(there):
                with index.reserve(np.ascontiguousarray(keys[i : i + 1])) as new:
                    new.publish()
            group = GroupSet([Group("new", OVERLAP, index)], page_tokens=page)
            for end in range(21):
                good = [n for n in range(end + 1) if there[needed(n * page) // page : n].all()]
                with group.match(keys[:end]) as match:
                    assert (match.pages, group.peek(keys[:end]).pages) == (good[-1], good[-1])
                    assert len(match.leases[0]) == good[-1] - needed(good[-1] * page) // page


@pytest.mark.parametrize("sizes", [(4, 8), (16, 8)])
def test_a_scheduler(segment_name: str, sizes: tuple[int, int]) -> None:
    """Every answer of the toy model is compared with one that has no cache: found on the device, on
    the host and in storage, and by a router."""
    block, page = sizes
    rules = (OVERLAP, Rule.window(11))
    engine = WindowEngine(segment_name, rules, block=block, page=page, storage=kept)
    position = 56 // max(sizes) * max(sizes)
    engine.run(STEM, 9)
    engine.settle()
    assert engine.run(STEM, 9).match.tiers[OVERLAP.name] is Tier.DEVICE
    engine.settle()
    engine.forget_device()
    host: dict[Rule, Any] = {Rule.prefix(): engine.host}
    device: dict[Rule, Any] = {Rule.prefix(): engine.device.name}
    for window in engine.windows:
        host[window.rule] = GroupIndex(engine.host.index, window.run)
        device[window.rule] = window.name
    with Router(host, {"gpu0": device}, spec=engine.host.key_spec()) as router:
        pages = router.route(Prompt(STEM), {"gpu0": 0}).host_pages  # it knows no blocks
        assert pages * page // engine.unit * engine.unit == position
    found = engine.run(STEM, 9)
    assert (found.match.usable, found.match.tiers[OVERLAP.name]) == (position, Tier.HOST)
    engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    engine.forget_device()
    engine.host.index.evict(1000)
    found = engine.run(STEM, 9)
    assert (found.match.usable, found.match.kv.storage) == (position, position)
    stats = engine.manage.window_stats()
    assert stats.groups[OVERLAP.name].storage_tokens == position - needed(position) // block * block
    engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    engine.nothing_left()
    engine.close()


def test_a_format_of_pages(segment_name: str) -> None:
    how: dict[str, Any] = {"heads": 1, "head_dim": 8, "dtype_bytes": 2, "page_tokens": 4}
    made = [
        PageGeometry([KVGroup.attention("a", layers=2, rule=rule, **how)])
        for rule in (OVERLAP, Rule.chunk(24))
    ]
    assert made[0].page_bytes == made[1].page_bytes
    assert made[0].fingerprint() != made[1].fingerprint()


def test_from_tensors(segment_name: str) -> None:
    full, other = ([np.zeros((2, 32, 4, 1, 8), np.float32)] for _ in range(2))
    how: dict[str, Any] = {"model": "m", "axes": "kbnhc", "page_tokens": 8, "pages": 64}
    with open_hybrid(
        full, name=segment_name, windows={OVERLAP: other}, secret=bytes(16), **how
    ) as made:
        manager = made.manager(f"{segment_name}-gpu")
        for usable in (0, 56):
            manager.plan("a", Prompt(STEM))
            assert manager.take("a").usable == usable
            tables = manager.allocate("a", 60)
            assert (tables[OVERLAP.name][: needed(usable) // 4] == -1).all()
            manager.load("a").wait(60)
            manager.commit("a", 60)
            manager.release("a")
