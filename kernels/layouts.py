"""How engines lay their KV out on the device, as `DevicePlanes`; nothing is copied.

    mine = Shard(geometry, rank=3, ranks=8)              # layers=range(16, 32) for a stage
    planes = join(
        vllm(mine, "kv", kv_caches, axes="kbnhc"),
        plane(mine, "indexer", "opaque", indexer_caches, axes="bnc"),
    )

Tensors are given for each layer that the shard has of the group: a list in the order of the layers,
or a mapping from layer numbers; one tensor where the axes have an `l`. Letters of axes are those of
`lightcache.kernels.axes`. Heads are the rank's own. Engines that agree with a layout here but have
another name are welcome to it; what fits none is described by `attention` or `plane`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightcache.kernels.axes import View, view
from lightcache.kernels.geometry import KVGroup, held_heads
from lightcache.kernels.planes import DevicePlanes, join
from lightcache.kernels.tensors import Shard, Tensors, attention, by_layer, kv_names, plane
from lightcache.shm.errors import ConfigError


def vllm(shard: Shard, group: str, kv_caches: Tensors, *, axes: str = "kbnhc") -> DevicePlanes:
    """vLLM's `kv_caches`, of the V1 engine.

    Args:
        axes: of the shape that the backend's `get_kv_cache_shape` names. The order in memory (HND,
            or one of the permutations) is in the strides, which are honoured, not in the axes:

            - "kbnhc": FlashAttention `[2, blocks, block, heads, dim]`
            - "bknhc": FlashInfer, Triton, later FlashAttention `[blocks, 2, block, heads, dim]`
            - "bhnc", or "lbhnc" for one tensor of all layers: releases that have `KVCacheLayout`,
              `[L, B, H, N, C]` with K, then V, of a head and token in C
            - "bnhc": the same without them, `[blocks, block, heads, dim + value_dim]`
            - "bnc": latents `[blocks, block, 576]` (content="single"), or 656 bytes of them

            Where K and V share C, the group's content may be "packed", or "separate": two planes.

    Slots are vLLM's slot mapping: block number * block size + place in the block.

    Raises:
        ConfigError: as `attention`.
    """
    return attention(shard, group, kv_caches, axes=axes)


def sglang(
    shard: Shard, group: str, k_buffer: Tensors, v_buffer: Tensors | None = None
) -> DevicePlanes:
    """SGLang's token pools: `k_buffer` and `v_buffer` of an MHA pool, `[tokens, heads, dim]` for
    each layer; or the `kv_buffer` of an MLA pool alone, `[tokens, 1, 576]` (content="single").

    Slots are its token indices, `req_to_token`; the padded slot 0 counts as one.

    Raises:
        ConfigError: as `plane`.
    """
    if v_buffer is None:
        return plane(shard, group, "kv", k_buffer, axes="thc")
    return join(
        plane(shard, group, "k", k_buffer, axes="thc"),
        plane(shard, group, "v", v_buffer, axes="thc"),
    )


def lightllm(
    shard: Shard, group: str, kv_buffer: Tensors, scale_buffer: Tensors | None = None
) -> DevicePlanes:
    """LightLLM's memory manager: `kv_buffer` of `[layers, tokens, 2 * heads, dim]`, K heads before
    V heads, and its scales in the same order; or of `[layers, tokens, 1, dim]` for latents
    (content="single").

    Slots are its `req_to_token_indexs`. The layers are the shard's, in their order.

    Raises:
        ConfigError: as `attention`.
    """
    found = shard.geometry.group(group)
    parts = []
    for tensor, suffix in ((kv_buffer, ""), (scale_buffer, "_scale")):
        if tensor is None:
            continue
        views = {
            (layer, name + suffix): half
            for layer, one in shard.views(found, tensor, "lthc").items()
            for name, half in _halves_of_heads(one, kv_names(found)).items()
        }
        parts.append(shard.describe(found, views, tensor))
    return join(*parts)


def _halves_of_heads(found: View, names: list[str]) -> dict[str, View]:
    if len(names) == 1:
        return {names[0]: found}
    apart = found.unfold("h", "k", 2)
    return {name: apart.take("k", at) for at, name in enumerate(names)}


def flashinfer(
    shard: Shard, group: str, paged_kv_caches: Tensors, *, kv_layout: str = "NHD"
) -> DevicePlanes:
    """FlashInfer's `paged_kv_cache`, one for each layer: a tensor `[pages, 2, page_size, heads,
    dim]` (NHD) or `[pages, 2, heads, page_size, dim]` (HND), or a tuple of K and V without the
    axis of 2.

    Slots are page number * page size + place in the page.

    Raises:
        ConfigError: another layout, or as `attention`.
    """
    if kv_layout not in ("NHD", "HND"):
        raise ConfigError(f"kv_layout: expected NHD or HND, found {kv_layout!r}")
    order = "nhc" if kv_layout == "NHD" else "hnc"
    found = shard.geometry.group(group)
    caches = by_layer(paged_kv_caches, shard.layers_of(found), f"group {group!r}")
    if not any(isinstance(one, (tuple, list)) for one in caches.values()):
        return attention(shard, group, caches, axes=f"bk{order}")
    for layer, one in caches.items():
        if not isinstance(one, (tuple, list)) or len(one) != 2:
            length = f" of {len(one)}" if hasattr(one, "__len__") else ""
            raise ConfigError(
                f"group {group!r}, layer {layer}: expected (k, v), found a "
                f"{type(one).__name__}{length}"
            )
    return join(
        *(
            plane(
                shard, group, name, {at: one[half] for at, one in caches.items()}, axes=f"b{order}"
            )
            for half, name in enumerate(("k", "v"))
        )
    )


def dynamic_cache(shard: Shard, group: str, cache: Any, *, row: int = 0) -> DevicePlanes:
    """One row of the batch of a transformers `DynamicCache` (or `StaticCache`): `[batch, heads,
    seq, dim]` for each layer, `cache.layers[i].keys` of 4.54 and newer, or `cache.key_cache[i]`.

    A `DynamicCache` makes new tensors whenever it grows, so describe it again for each transfer;
    these planes keep the tensors alive that they describe. That takes about 0.1 ms for each layer.
    Slots are positions, 0 to seq - 1.

    Raises:
        ConfigError: a row or layers that the cache does not have, a layer that is empty yet, or one
            that does not keep every position (a sliding window that has slid, quantised layers).
    """
    found = shard.geometry.group(group)
    views: dict[tuple[int, str], View] = {}
    keep = []
    for layer in shard.layers_of(found):
        what = f"group {group!r}, layer {layer}"
        for name, tensor in zip("kv", _keys_and_values(cache, layer, what), strict=True):
            batch = int(tensor.shape[0]) if len(tensor.shape) == 4 else 0
            if type(row) is not int or not 0 <= row < batch:
                raise ConfigError(
                    f"{what}: expected row {row!r} of a batch [batch, heads, seq, dim], found "
                    f"shape {tuple(tensor.shape)}"
                )
            keep.append(tensor)
            views[layer, name] = view(tensor[row], "htc", f"{what}, {name}")
    return shard.describe(found, views, keep)


def _keys_and_values(cache: Any, layer: int, what: str) -> tuple[Any, Any]:
    keys: Any = None
    values: Any = None
    length: Any = 0
    if hasattr(cache, "layers"):
        if layer < len(cache.layers):
            one = cache.layers[layer]
            keys, values = getattr(one, "keys", None), getattr(one, "values", None)
            length = one.get_seq_length() if keys is not None else 0
    elif layer < len(getattr(cache, "key_cache", ())):
        keys, values = cache.key_cache[layer], cache.value_cache[layer]
    if not all(hasattr(tensor, "data_ptr") and tensor.numel() for tensor in (keys, values)):
        raise ConfigError(
            f"{what}: expected keys and values in the {type(cache).__name__}, found none; prefill "
            "first, and number layers as the cache does"
        )
    held = int(keys.shape[-2])
    # Static layers answer with a tensor, and always have room for every position.
    if isinstance(length, int) and length > held:
        raise ConfigError(
            f"{what}: expected all {length} positions, found the last {held} (a sliding window, or "
            "a quantised layer); slots would not be positions"
        )
    return keys, values


def convolution(
    shard: Shard, group: str, sections: Sequence[str], tensors: Tensors, *, axes: str
) -> DevicePlanes:
    """Convolution states of linear attention, sharded in sections (such as the channels of q, k
    and v), each of them a plane. A slot is a state; the other states are `plane`s.

    Args:
        sections: planes in the order of the rank's channels; together they are all of them.
        axes: "tcr" for `[slots, channels, width]`, "trc" for `[slots, width, channels]`, as shaped;
            memory may be permuted. Planes with `rows` equal to the width have channels that touch;
            planes with one row have all of a head's channels, each with its width, in one piece.

    Raises:
        ConfigError: channels that are not those of the sections, or as `plane`.
    """
    found = shard.geometry.group(group)
    views = {
        (layer, name): part
        for layer, one in shard.views(found, tensors, axes).items()
        for name, part in _sections(shard, found, sections, one).items()
    }
    return shard.describe(found, views, tensors)


def _sections(
    shard: Shard, group: KVGroup, sections: Sequence[str], found: View
) -> dict[str, View]:
    parts, first = {}, 0
    width = max(1, found.axis("r").size)
    for name in sections:
        one = group.plane(name)
        heads = held_heads(one, shard.rank, shard.ranks).count
        channel_bytes = found.element_bytes * (width if one.rows == 1 else 1)
        if one.row_bytes % channel_bytes:
            raise ConfigError(
                f"{found.what}: expected channels that divide the {one.row_bytes} bytes of a head "
                f"of plane {name!r}, found channels of {channel_bytes} bytes"
            )
        channels = heads * (one.row_bytes // channel_bytes)
        part = found.cut("c", first, channels).unfold("c", "h", heads)
        # A row of its own has each channel's width together, whichever axis was named first.
        parts[name] = part.last("r").rename("r", "c") if one.rows == 1 else part
        first += channels
    found.expect("c", first, f"channels of {', '.join(sections)} of this rank")
    return parts


__all__ = [
    "Shard",
    "attention",
    "convolution",
    "dynamic_cache",
    "flashinfer",
    "join",
    "lightllm",
    "plane",
    "sglang",
    "vllm",
]
