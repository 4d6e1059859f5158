"""A layout as measured: true descriptions have one digest, whatever they describe; wrong ones have
others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.refusals import refused

from lightcache import ConfigError
from lightcache.kernels import KVGroup, PageGeometry, Plane, Shard, layout_digest
from lightcache.kernels.layouts import plane, sglang, vllm
from lightcache.kernels.planes import DevicePlanes

LAYERS, HEADS, DIM, BLOCKS = 2, 4, 16, 6
Writer = Callable[[Any, Any], None]


def shard(page_tokens: int = 8, rank: int = 0, ranks: int = 1, **more: Any) -> Shard:
    shape = {"layers": LAYERS, "heads": HEADS, "head_dim": DIM, "dtype_bytes": 2, **more}
    return Shard(
        PageGeometry([KVGroup.attention("kv", page_tokens=page_tokens, **shape)]), rank, ranks
    )


def writer(caches: list[Any], heads: int, put: Callable[..., None]) -> Writer:
    """A backend's operation: `put(cache, slots, keys, values)` for each layer."""

    def write(slots: Any, pattern: Any) -> None:
        keys, values = (torch.from_numpy(pattern(name, heads, DIM)) for name in "kv")
        for cache in caches:
            put(cache, torch.from_numpy(slots), keys.to(cache.dtype), values.to(cache.dtype))

    return write


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]


def nhd(mine: Shard, heads: int = HEADS, block: int = 16) -> tuple[DevicePlanes, Writer]:
    """[2, blocks, block, heads, dim]."""

    def put(cache: Any, slots: Any, keys: Any, values: Any) -> None:
        cache[0].view(-1, heads, DIM)[slots] = keys
        cache[1].view(-1, heads, DIM)[slots] = values

    caches = tensors(2, BLOCKS, block, heads, DIM)
    return vllm(mine, "kv", caches, axes="kbnhc"), writer(caches, heads, put)


def hnd(mine: Shard, axes: str = "kbhnc", block: int = 16) -> tuple[DevicePlanes, Writer]:
    """[2, blocks, heads, block, dim], described as such or otherwise."""

    def put(cache: Any, slots: Any, keys: Any, values: Any) -> None:
        cache[0][slots // block, :, slots % block] = keys
        cache[1][slots // block, :, slots % block] = values

    caches = tensors(2, BLOCKS, HEADS, block, DIM)
    shape = (2, BLOCKS, block, HEADS, DIM)
    described = [cache.view(shape) for cache in caches] if axes == "kbnhc" else caches
    return vllm(mine, "kv", described, axes=axes), writer(caches, HEADS, put)


def packed(mine: Shard, swapped: bool = False) -> tuple[DevicePlanes, Writer]:
    """[blocks, block, heads, 2 * dim]: a key and its value side by side."""

    def put(cache: Any, slots: Any, keys: Any, values: Any) -> None:
        pair = (values, keys) if swapped else (keys, values)
        cache.view(-1, HEADS, 2 * DIM)[slots] = torch.cat(pair, -1)

    caches = tensors(BLOCKS, 16, HEADS, 2 * DIM)
    return vllm(mine, "kv", caches, axes="bnhc"), writer(caches, HEADS, put)


def paged(mine: Shard) -> tuple[DevicePlanes, Writer]:
    """SGLang: [slots, heads, dim] for each of K and V."""
    k, v = tensors(64, HEADS, DIM), tensors(64, HEADS, DIM)

    def write(slots: Any, pattern: Any) -> None:
        for name, caches in (("k", k), ("v", v)):
            for cache in caches:
                cache[torch.from_numpy(slots)] = torch.from_numpy(pattern(name, HEADS, DIM)).to(
                    cache.dtype
                )

    return sglang(mine, "kv", k, v), write


BLOCK = np.arange(16, 32)


def measured(mine: Shard, made: tuple[DevicePlanes, Writer], slots: Any = BLOCK) -> str:
    return layout_digest(mine, *made, slots)


def test_true_descriptions_have_one_digest() -> None:
    mine = shard()
    digest = measured(mine, nhd(mine))
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    half, large = shard(rank=1, ranks=2), shard(page_tokens=64)
    by_layout = {
        "HND": measured(mine, hnd(mine)),
        "packed": measured(mine, packed(mine)),
        "SGLang": measured(mine, paged(mine)),
        "scattered slots": measured(mine, paged(mine), [40, 3, 9, 22, 21, 60, 0, 5]),
        "another block": measured(mine, nhd(mine, block=8)),
        "another rank": measured(half, nhd(half, heads=2)),
        "another page": measured(large, nhd(large)),
        "again": measured(mine, nhd(mine)),
    }
    assert by_layout == dict.fromkeys(by_layout, digest)


def test_wrong_descriptions_have_others() -> None:
    mine = shard()
    truth = measured(mine, nhd(mine))
    lies = {
        "HND said to be NHD": measured(mine, hnd(mine, "kbnhc")),
        "values before keys": measured(mine, packed(mine, swapped=True)),
    }
    assert truth not in lies.values()
    assert len(set(lies.values())) == 2


def test_elements_in_another_order() -> None:
    """A packing within rows is no error: its pages are just not those of others."""
    mine = shard()
    planes, write = nhd(mine)

    def packs(slots: Any, pattern: Any) -> None:
        write(slots, lambda *of: np.ascontiguousarray(pattern(*of)[..., ::-1]))

    assert measured(mine, (planes, packs)) not in (measured(mine, nhd(mine)), "")


def test_another_content_is_another_layout() -> None:
    mine = shard(content="packed")
    caches = tensors(BLOCKS, 16, HEADS, 2 * DIM)

    def write(slots: Any, pattern: Any) -> None:
        for cache in caches:
            rows = cache.view(-1, HEADS, 2 * DIM)
            rows[torch.from_numpy(slots)] = torch.from_numpy(pattern("kv", HEADS, 2 * DIM)).to(
                cache.dtype
            )

    planes = plane(mine, "kv", "kv", caches, axes="bnhc")
    digest = measured(mine, (planes, write))
    assert digest == measured(mine, (planes, write))
    assert digest != measured(shard(), nhd(shard()))


def test_a_page_in_parts_has_the_same() -> None:
    mine = shard()
    cut = Shard(PageGeometry(mine.geometry.groups, part_bytes=1024))
    assert measured(cut, nhd(cut)) == measured(mine, nhd(mine))


def test_what_is_refused() -> None:
    mine = shard()
    planes, write = nhd(mine)
    refused(ConfigError, "at least 8 to write, found 7", measured, mine, (planes, write), BLOCK[:7])
    refused(ConfigError, "slots", measured, mine, (planes, write), ["a"])
    other = nhd(mine)[1]
    refused(ConfigError, r"layers \[0, 1\] is where", measured, mine, (planes, other))

    def first_layer(slots: Any, pattern: Any) -> None:
        kept = second.clone()
        write(slots, pattern)
        second.copy_(kept)

    second = planes.keep[1]
    refused(ConfigError, r"layers \[1\] is where", measured, mine, (planes, first_layer))
    state = Shard(PageGeometry([KVGroup.state("s", layers=1, parts=[Plane("s", 16)])]))
    refused(ConfigError, "states", layout_digest, state, planes, write, BLOCK)
