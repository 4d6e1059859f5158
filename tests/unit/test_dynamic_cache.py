"""Caches of transformers, described by duck typing; other styles and rows are in test_layouts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.devices import check
from support.layouts import random
from support.pages import Model
from support.refusals import refused

from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.layouts import Shard, dynamic_cache
from lightcache.shm.errors import ConfigError


def shard() -> Shard:
    """All of two layers of two heads of 3 bf16 elements."""
    group = KVGroup.attention("kv", layers=2, heads=2, head_dim=3, dtype_bytes=2, page_tokens=8)
    return Shard(PageGeometry([group]))


def layer(keys: Any, length: int | None = None) -> SimpleNamespace:
    """A layer of a cache as 4.54 and newer have it."""
    values = None if keys is None else random(tuple(keys.shape))
    held = 0 if keys is None else keys.shape[-2]
    seen = held if length is None else length
    return SimpleNamespace(keys=keys, values=values, get_seq_length=lambda: seen)


def cache(style: str, *layers: SimpleNamespace) -> SimpleNamespace:
    if style == "layers":
        return SimpleNamespace(layers=list(layers))
    keys, values = [one.keys for one in layers], [one.values for one in layers]
    return SimpleNamespace(key_cache=keys, value_cache=values)


def rows(pairs: list[tuple[torch.Tensor, torch.Tensor]], row: int = 0) -> Model:
    """Right bytes of [batch, heads, seq, dim], of each layer's keys and values."""
    return {
        ("kv", at, name): one[row]
        .transpose(0, 1)
        .contiguous()
        .unsqueeze(1)
        .view(torch.uint8)
        .numpy()
        for at, pair in enumerate(pairs)
        for name, one in zip("kv", pair, strict=True)
    }


def test_as_it_grows() -> None:
    """What was described stays alive with its planes, and the cache is described again."""
    one = cache("layers", layer(random((1, 2, 5, 3))), layer(random((1, 2, 5, 3))))
    before = dynamic_cache(shard(), "kv", one)
    old = rows([(at.keys.clone(), at.values.clone()) for at in one.layers])
    address = one.layers[0].keys.data_ptr()
    for grown in one.layers:
        grown.keys = torch.cat([grown.keys, random((1, 2, 1, 3))], dim=-2)
        grown.values = torch.cat([grown.values, random((1, 2, 1, 3))], dim=-2)
        grown.get_seq_length = lambda: 6
    assert any(tensor.data_ptr() == address for tensor in before.keep)
    check(before, old)
    after = dynamic_cache(shard(), "kv", one)
    check(after, rows([(at.keys, at.values) for at in one.layers]))
    assert {plane.slots for plane in after.planes.values()} == {6}


def test_caches_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    one = transformers.DynamicCache()
    pairs = [(random((2, 2, 5, 3)), random((2, 2, 5, 3))) for _ in range(2)]
    for at, (k, v) in enumerate(pairs):
        one.update(k, v, at)
    check(dynamic_cache(shard(), "kv", one, row=1), rows(pairs, 1))


EMPTY = SimpleNamespace(keys=torch.tensor([]), values=torch.tensor([]), get_seq_length=lambda: 0)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "row of the batch": (
        lambda: dynamic_cache(shard(), "kv", cache("layers", layer(random((2, 2, 5, 3)))), row=2),
        r"layer 0: expected row 2 of a batch .*, found shape \(2, 2, 5, 3\)",
    ),
    "keys without a batch": (
        lambda: dynamic_cache(shard(), "kv", cache("key_cache", layer(random((2, 5, 3))))),
        r"found shape \(2, 5, 3\)",
    ),
    "empty layer": (
        lambda: dynamic_cache(shard(), "kv", cache("layers", layer(None))),
        "layer 0: expected keys and values in the SimpleNamespace, found none; prefill",
    ),
    "keys that were made but not filled": (
        lambda: dynamic_cache(shard(), "kv", cache("layers", EMPTY)),
        "layer 0: expected keys and values .* found none; prefill",
    ),
    "layer that is not there": (
        lambda: dynamic_cache(shard(), "kv", cache("key_cache", layer(random((1, 2, 5, 3))))),
        "layer 1: expected keys and values",
    ),
    "no cache": (lambda: dynamic_cache(shard(), "kv", 7), "in the int, found none"),
    "window that has slid": (
        lambda: dynamic_cache(shard(), "kv", cache("layers", layer(random((1, 2, 5, 3)), 9))),
        "all 9 positions, found the last 5 .a sliding window",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(make: Callable[[], object], message: str) -> None:
    refused(ConfigError, message, make)
