"""Every layout that we describe, with tensors on a GPU, in every mode, both ways, compared with
plain indexing. The cases share shapes, so that about a hundred kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu.place import DEADLINE, place
from support.layout_transfers import (
    ACROSS,
    HOLES,
    IN_BLOCKS,
    PAGES,
    WAYS,
    WITH_HOLES,
    Case,
    Way,
    both_ways,
    runs_exist,
)
from support.layouts import CASES, random
from support.refusals import refused

from lightcache import ConfigError
from lightcache.kernels.geometry import KVGroup, PageGeometry, Share
from lightcache.kernels.layouts import Shard, dynamic_cache, vllm
from lightcache.kernels.measured import layout_digest
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlanes

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
STAND_IN = True
DIM = 8
Make = Callable[[str, int], Case]


def page_memory(pages: int, page_bytes: int) -> HostPages:
    """Registered."""
    array: Any = np.empty((pages, page_bytes), np.uint8)
    if torch.cuda.is_available():
        array = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=True).numpy()
    memory: Any = HostPages(array)
    memory.ready = pages
    return memory


class Site:
    """Makes engines on one device."""

    def __init__(self, where: Any) -> None:
        self.where = where

    def engine(self, geometry: PageGeometry, planes: Any, memory: HostPages, **how: Any) -> Any:
        from lightcache.kernels.engine import TransferEngine

        if self.where.memory == "cpu":
            planes = DevicePlanes(planes.planes, device=self.where.name, keep=planes.keep)
            how["device"] = self.where.stand_in
        self.where.synchronize()
        torch_done(self.where.memory)
        return TransferEngine(geometry, planes, memory, **how)

    def of_case(self, mine: Shard, share: Share, case: Case, way: Way) -> tuple[Any, HostPages]:
        memory = page_memory(PAGES, mine.geometry.page_bytes)
        engine = self.engine(
            mine.geometry,
            case.planes,
            memory,
            share=share,
            mode=way.mode,
            staging_bytes=way.staging_bytes,
            calibration=way.thresholds,
        )
        return engine, memory


def torch_done(memory: str) -> None:
    """Tensors are made."""
    if memory != "cpu":
        torch.cuda.synchronize(memory)


@pytest.fixture(scope="module")
def site() -> Any:
    made = place()
    yield Site(made)
    made.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "copies"])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_both_ways(site: Site, make: Make, way: str) -> None:
    both_ways(make(site.where.memory, DIM), WAYS[way], site.of_case)


@pytest.mark.parametrize("name", WITH_HOLES)
def test_rows_that_are_left_out_stay(site: Site, name: str) -> None:
    both_ways(CASES[name](site.where.memory, DIM), HOLES, site.of_case)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_runs_across_blocks(site: Site, name: str) -> None:
    both_ways(CASES[name](site.where.memory, DIM), ACROSS, site.of_case)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_copy_engine_alone_where_bytes_lie_so(site: Site, make: Make) -> None:
    case, way = make(site.where.memory, DIM), WAYS["copies"]
    if runs_exist(case, way, page_memory(1, 2 * case.shard.geometry.page_bytes)):
        both_ways(case, way, site.of_case)
    else:
        refused(ConfigError, "mode='copies'", both_ways, case, way, site.of_case)


# ---- a cache that moves as it grows


def small_shard() -> Shard:
    """All of two layers of two heads of 8 bf16 elements."""
    group = KVGroup.attention(
        "kv", layers=2, heads=2, head_dim=8, dtype_bytes=2, page_tokens=8, head_groups=1
    )
    return Shard(PageGeometry([group]))


class PlainCache:
    """What transformers' DynamicCache is, where transformers is missing."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, keys: Any, values: Any, layer: int) -> None:
        """Append tokens: new tensors, as in transformers."""
        if layer == len(self.layers):
            one = SimpleNamespace(keys=keys[..., :0, :], values=values[..., :0, :])
            one.get_seq_length = lambda: one.keys.shape[-2]
            self.layers.append(one)
        mine = self.layers[layer]
        mine.keys = torch.cat([mine.keys, keys], dim=-2)
        mine.values = torch.cat([mine.values, values], dim=-2)


def _transformers_cache() -> Any:
    return pytest.importorskip("transformers").DynamicCache()


def grow(cache: Any, tokens: int, device: str) -> None:
    for layer in range(2):
        keys, values = (random((1, 2, tokens, 8), device=device) for _ in "kv")
        cache.update(keys, values, layer)


def content(cache: Any) -> list[torch.Tensor]:
    return [each.clone() for layer in cache.layers for each in (layer.keys, layer.values)]


@pytest.mark.parametrize("mode", ["staged", "direct", "auto"])
@pytest.mark.parametrize("make", [PlainCache, _transformers_cache], ids=["plain", "transformers"])
def test_a_cache_that_grows_between_transfers(site: Site, make: Any, mode: str) -> None:
    """One engine; each page is written when its tokens are there, from wherever they are then, and
    all of them are loaded into a cache of another life."""
    mine, where = small_shard(), site.where

    def described(cache: Any) -> DevicePlanes:
        torch_done(where.memory)
        planes = dynamic_cache(mine, "kv", cache)
        if where.memory == "cpu":
            return DevicePlanes(planes.planes, device=where.name, keep=planes.keep)
        return planes

    cache = make()
    grow(cache, 8, where.memory)
    memory = page_memory(4, mine.geometry.page_bytes)
    with site.engine(mine.geometry, described(cache), memory, mode=mode) as engine:
        pages, transfers = [2, 0, 3], []
        for number, page in enumerate(pages):
            planes = described(cache)
            move = Move([page], np.arange(number * 8, number * 8 + 8))
            transfers.append(engine.offload(move, planes=planes))
            del planes  # what is described lives as long as the transfer
            grow(cache, 8, where.memory)
        for transfer in transfers:
            transfer.wait(DEADLINE)
        kept = content(cache)
        other = make()
        grow(other, 32, where.memory)
        before = content(other)
        engine.load(Move(pages, np.arange(1, 25)), planes=described(other)).wait(DEADLINE)
        for found, own, right in zip(content(other), before, kept, strict=True):
            as_bytes = [each.view(torch.uint8) for each in (found, own, right)]
            assert torch.equal(as_bytes[0][:, :, 1:25], as_bytes[2][:, :, :24]), "loaded"
            assert torch.equal(as_bytes[0][:, :, 25:], as_bytes[1][:, :, 25:]), "not touched"
            assert torch.equal(as_bytes[0][:, :, :1], as_bytes[1][:, :, :1]), "not touched"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the engine is not given a stand-in")
@pytest.mark.parametrize("order", ["kbnhc", "kbhnc"])
def test_a_layout_is_measured_as_on_a_cpu(order: str) -> None:
    """By the digest of what a backend's operation leaves where the planes say."""
    sizes, device = {"k": 2, "b": 4, "n": 16, "h": 2, "c": 8}, "cuda:0"
    mine = Shard(
        PageGeometry(
            [KVGroup.attention("kv", layers=2, heads=2, head_dim=8, dtype_bytes=2, page_tokens=8)]
        )
    )
    caches = [
        torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16, device=device)
        for _ in range(2)
    ]

    def write(slots: Any, pattern: Any) -> None:
        blocks, units = (torch.from_numpy(slots).to(device) // 16, torch.from_numpy(slots) % 16)
        for cache in caches:
            by_slot = cache if order == "kbnhc" else cache.transpose(2, 3)
            for side, name in enumerate("kv"):
                rows = torch.from_numpy(pattern(name, 2, 8)).to(cache)
                by_slot[side][blocks, units.to(device)] = rows

    planes = vllm(mine, "kv", caches, axes=order)
    digest = layout_digest(mine, planes, write, np.arange(16, 32))
    assert digest == "80ef87392b589c99", "as on a CPU"
