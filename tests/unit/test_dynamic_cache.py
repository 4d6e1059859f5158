"""Caches of transformers, described by duck typing: both styles of attributes, rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.devices import check, random

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


@pytest.mark.parametrize("style", ["layers", "key_cache"])
@pytest.mark.parametrize("row", [0, 2])
def test_dynamic_cache(style: str, row: int) -> None:
    """Slots are positions of one row; the first keys of a prompt are a permuted projection."""
    tensors = [random((3, 2, 9, 3)), random((3, 9, 2, 3)).transpose(1, 2)]
    one = cache(style, *map(layer, tensors))
    planes = dynamic_cache(shard(), "kv", one, row=row)
    found = one.layers if style == "layers" else None
    for at in range(2):
        values = found[at].values if found else one.value_cache[at]
        for name, of in (("k", tensors[at]), ("v", values)):
            check(
                planes,
                ("kv", at, name),
                lambda slot, head, _, of=of: of[row, head, slot],
                slots=9,
                heads=2,
            )


def test_dynamic_cache_of_some_layers() -> None:
    """Layers are found by their numbers in the model."""
    group = KVGroup.attention(
        "kv", layers=[1, 3], heads=2, head_dim=3, dtype_bytes=2, page_tokens=8
    )
    tensors = [random((1, 2, 5, 3)) for _ in range(4)]
    layers = [layer(None), layer(tensors[1]), layer(None), layer(tensors[3])]
    planes = dynamic_cache(Shard(PageGeometry([group])), "kv", cache("layers", *layers))
    assert {at for _, at, _ in planes.planes} == {1, 3}
    check(planes, ("kv", 3, "k"), lambda slot, head, _: tensors[3][0, head, slot], slots=5, heads=2)


def test_dynamic_cache_as_it_grows() -> None:
    """What was described stays alive, and the cache is described again."""
    one = cache("layers", layer(random((1, 2, 5, 3))), layer(random((1, 2, 5, 3))))
    old = one.layers[0].keys
    before = dynamic_cache(shard(), "kv", one)
    copy = old.clone()
    for grown in one.layers:
        grown.keys = torch.cat([grown.keys, random((1, 2, 1, 3))], dim=-2)
        grown.values = torch.cat([grown.values, random((1, 2, 1, 3))], dim=-2)
    del old
    check(before, ("kv", 0, "k"), lambda slot, head, _: copy[0, head, slot], slots=5, heads=2)
    for at in range(2):
        one.layers[at].get_seq_length = lambda: 6
    after = dynamic_cache(shard(), "kv", one)
    keys = one.layers[0].keys
    check(after, ("kv", 0, "k"), lambda slot, head, _: keys[0, head, slot], slots=6, heads=2)


def test_dynamic_cache_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    one = transformers.DynamicCache()
    tensors = [(random((2, 2, 5, 3)), random((2, 2, 5, 3))) for _ in range(2)]
    for at, (k, v) in enumerate(tensors):
        one.update(k, v, at)
    planes = dynamic_cache(shard(), "kv", one, row=1)
    for at, pair in enumerate(tensors):
        for name, of in zip("kv", pair, strict=True):
            check(
                planes,
                ("kv", at, name),
                lambda slot, head, _, of=of: of[1, head, slot],
                slots=5,
                heads=2,
            )


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
    "empty keys": (
        lambda: dynamic_cache(shard(), "kv", cache("layers", layer(random((1, 2, 0, 3))))),
        "found none",
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
    with pytest.raises(ConfigError, match=message):
        make()
