"""How engines lay their KV out on the device, as `DevicePlanes`; nothing is copied.

    mine = Shard(geometry, rank=3, ranks=8)              # layers=range(16, 32) for a stage
    planes = join(
        vllm(mine, "kv", kv_caches, axes="kbnhc"),
        plane(mine, "indexer", "opaque", indexer_caches, axes="bnc"),
    )

Tensors are given for each of the shard's layers in the group: a list in layer order, or a mapping
from layer numbers; one tensor if the axes have an `l`. `lightcache.kernels.planes` defines the
letters of axes. Heads are the rank's own. An engine with another name may use a layout that matches
its own; `attention` and `plane` describe any other layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache.kernels.geometry import KVGroup, PageGeometry, Share, check_rank, held_heads
from lightcache.kernels.groups import Plane, layer_numbers
from lightcache.kernels.planes import DevicePlane, DevicePlanes, View, check_axes, join, view
from lightcache.shm.errors import ConfigError

# ---- From tensors to `DevicePlanes`

Tensors = Any
"""A tensor, a sequence of tensors, or a mapping from layer numbers to tensors. In CPU memory an
array of numpy is a tensor too."""


@dataclass(frozen=True)
class Shard:
    """One process's part of the model: a tensor-parallel rank, and the layers of a pipeline stage.
    Heads of its tensors are the rank's own.

    Raises:
        ConfigError: a rank outside its group, or no geometry.
    """

    geometry: PageGeometry
    rank: int = 0
    ranks: int = 1
    layers: Sequence[int] | None = None
    """None: all. Numbers that the geometry lacks are ignored, as in `PageGeometry.share`."""

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, PageGeometry):
            raise ConfigError(f"shard: expected a PageGeometry, found {self.geometry!r}")
        check_rank(self.rank, self.ranks)
        if self.layers is not None:
            object.__setattr__(self, "layers", layer_numbers(self.layers, "layers of a shard"))

    def share(self, *, writing: bool = False) -> Share:
        """This shard's part of a page: see `PageGeometry.share`."""
        return self.geometry.share(self.rank, self.ranks, layers=self.layers, writing=writing)

    def layers_of(self, group: KVGroup) -> tuple[int, ...]:
        """The shard's layers of a group, ascending."""
        if self.layers is None:
            return group.layers
        return tuple(layer for layer in group.layers if layer in self.layers)

    def views(self, group: KVGroup, tensors: Tensors, axes: str) -> dict[int, View]:
        """A view of each layer's tensor.

        Raises:
            ConfigError: tensors of other layers than the shard's, or tensors that `view` refuses.
        """
        what, layers = f"group {group.name!r}", self.layers_of(group)
        check_axes(axes, what)
        if "l" in axes:
            whole = view(tensors, axes, what).expect("l", len(layers), f"numbers {layers}")
            return {layer: whole.take("l", place) for place, layer in enumerate(layers)}
        layer_tensors = by_layer(tensors, layers, what)
        return {
            layer: view(layer_tensors[layer], axes, f"{what}, layer {layer}") for layer in layers
        }

    def describe(
        self, group: KVGroup, views: Mapping[tuple[int, str], View], keep: Any
    ) -> DevicePlanes:
        """Planes of a group from the views of each (layer, plane).

        Raises:
            ConfigError: rows, heads or blocks that do not fit the geometry, or several devices.
        """
        planes: dict[tuple[str, int, str], DevicePlane] = {}
        devices = {plane_view.device for plane_view in views.values()}
        if len(devices) != 1:
            raise ConfigError(
                f"group {group.name!r}: expected tensors of layers {self.layers_of(group)} on one "
                f"device, found {sorted(devices)}"
            )
        shapes: dict[str, tuple[Plane, int, int]] = {}
        for (layer, name), plane_view in views.items():
            if name not in shapes:
                plane = group.plane(name)
                heads = held_heads(plane, self.rank, self.ranks).count
                shapes[name] = plane, heads, group.units(plane)
            planes[group.name, layer, name] = plane_view.plane(*shapes[name])
        return DevicePlanes(planes, device=devices.pop(), keep=keep)


def by_layer(tensors: Tensors, layers: Sequence[int], what: str) -> Mapping[int, Any]:
    """Map each layer to its tensor.

    Raises:
        ConfigError: a single tensor, or tensors of other layers.
    """
    whole = hasattr(tensors, "data_ptr") or isinstance(tensors, np.ndarray)
    if whole or not isinstance(tensors, Iterable):
        raise ConfigError(
            f"{what}: expected one tensor for each of layers {tuple(layers)}, found "
            f"{type(tensors).__name__}; name its axis of layers `l`, or put it in a list"
        )
    if isinstance(tensors, Mapping):
        if set(tensors) != set(layers):
            raise ConfigError(
                f"{what}: expected tensors of layers {tuple(layers)}, found {list(tensors)}"
            )
        return tensors
    listed = list(tensors)
    if len(listed) != len(layers):
        raise ConfigError(
            f"{what}: expected {len(layers)} tensors, for layers {tuple(layers)}, found "
            f"{len(listed)}"
        )
    return dict(zip(layers, listed, strict=True))


def plane(shard: Shard, group: str, name: str, tensors: Tensors, *, axes: str) -> DevicePlanes:
    """One plane of a group, from any tensors. Axes of tensors that the named layouts do not cover:

    - scales beside a cache: "th" for `[tokens, heads]`, "bnh" for `[blocks, block, heads]`
    - opaque rows: "tc" for `[tokens, 132]`, "bnc" for `[blocks, block, 132]`
    - opaque blocks: "tc" for `[blocks, bytes]`; a slot is a block there
    - recurrent states: "thcc" for `[slots, heads, key_dim, value_dim]`; a slot is a state

    Raises:
        ConfigError: as `Shard.views` and `Shard.describe`.
    """
    kv_group = shard.geometry.group(group)
    views = shard.views(kv_group, tensors, axes)
    by_plane = {(layer, name): layer_view for layer, layer_view in views.items()}
    return shard.describe(kv_group, by_plane, tensors)


def attention(
    shard: Shard, group: str, tensors: Tensors, *, axes: str, suffix: str = ""
) -> DevicePlanes:
    """K and V, or the packed or single plane, from one tensor for each layer or one for all layers.

    Planes `k` and `v` are the two places of axis `k`; without that axis they are the two parts of
    the contents, K first. Plane `kv` has no axis `k`.

    Args:
        suffix: "_scale" for the scales of these planes, if they have the same layout.

    Raises:
        ConfigError: as `Shard.views` and `Shard.describe`; separate K and V for a group that packs
            them, or contents that cannot be split.
    """
    kv_group = shard.geometry.group(group)
    names = [name + suffix for name in kv_names(kv_group)]
    views = {
        (layer, name): part
        for layer, both in shard.views(kv_group, tensors, axes).items()
        for name, part in _part(kv_group, both, names).items()
    }
    return shard.describe(kv_group, views, tensors)


def kv_names(group: KVGroup) -> list[str]:
    """The planes of attention: `k` and `v`, or `kv`."""
    names = {plane.name for plane in group.planes}
    return ["kv"] if "kv" in names else ["k", "v"]


def _part(group: KVGroup, both: View, names: list[str]) -> dict[str, View]:
    """K and V of a view of both."""
    if len(names) == 1:
        return {names[0]: both}
    if both.has("k"):
        both.expect("k", 2, "K, then V")
        return {name: both.take("k", place) for place, name in enumerate(names)}
    widths = [group.plane(name).row_bytes for name in names]
    contents = [axis for axis in both.axes if axis.letter == "c"]
    if len(contents) != 1 or both.row_bytes != sum(widths) or widths[0] % both.element_bytes:
        raise ConfigError(
            f"{both.what}: expected rows of {widths[0]} bytes of K and {widths[1]} of V in one "
            f"axis of contents, found {both.row_bytes} bytes in {len(contents)}"
        )
    first = widths[0] // both.element_bytes
    parts = (both.cut("c", 0, first), both.cut("c", first, contents[0].size - first))
    return dict(zip(names, parts, strict=True))


# ---- Layouts of known engines


def vllm(shard: Shard, group: str, kv_caches: Tensors, *, axes: str = "kbnhc") -> DevicePlanes:
    """vLLM's `kv_caches`, of the V1 engine.

    Args:
        axes: of the shape that the backend's `get_kv_cache_shape` returns. Strides give the order
            in memory (HND, or another permutation) and are honoured; axes do not:

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
    kv_group = shard.geometry.group(group)
    parts = []
    for tensor, suffix in ((kv_buffer, ""), (scale_buffer, "_scale")):
        if tensor is None:
            continue
        views = {
            (layer, name + suffix): half
            for layer, both in shard.views(kv_group, tensor, "lthc").items()
            for name, half in _halves_of_heads(both, kv_names(kv_group)).items()
        }
        parts.append(shard.describe(kv_group, views, tensor))
    return join(*parts)


def _halves_of_heads(both: View, names: list[str]) -> dict[str, View]:
    if len(names) == 1:
        return {names[0]: both}
    apart = both.unfold("h", "k", 2)
    return {name: apart.take("k", half) for half, name in enumerate(names)}


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
    kv_group = shard.geometry.group(group)
    caches = by_layer(paged_kv_caches, shard.layers_of(kv_group), f"group {group!r}")
    if not any(isinstance(layer_cache, (tuple, list)) for layer_cache in caches.values()):
        return attention(shard, group, caches, axes=f"bk{order}")
    for layer, layer_cache in caches.items():
        if not isinstance(layer_cache, (tuple, list)) or len(layer_cache) != 2:
            length = f" of {len(layer_cache)}" if hasattr(layer_cache, "__len__") else ""
            raise ConfigError(
                f"group {group!r}, layer {layer}: expected (k, v), found a "
                f"{type(layer_cache).__name__}{length}"
            )
    return join(
        *(
            plane(
                shard,
                group,
                name,
                {layer_number: layer_cache[half] for layer_number, layer_cache in caches.items()},
                axes=f"b{order}",
            )
            for half, name in enumerate(("k", "v"))
        )
    )


def dynamic_cache(shard: Shard, group: str, cache: Any, *, row: int = 0) -> DevicePlanes:
    """One row of the batch of a transformers `DynamicCache` (or `StaticCache`): `[batch, heads,
    seq, dim]` for each layer, `cache.layers[i].keys` of 4.54 and newer, or `cache.key_cache[i]`.

    A `DynamicCache` makes new tensors whenever it grows, so describe it again for each transfer,
    which takes about 0.03 ms for each layer. The planes keep their tensors alive. Slots are
    positions, 0 to seq - 1.

    Raises:
        ConfigError: a row or layer that the cache lacks, an empty layer, or a layer that does not
            keep every position (a sliding window that has slid, quantised layers).
    """
    kv_group = shard.geometry.group(group)
    views: dict[tuple[int, str], View] = {}
    keep = []
    for layer in shard.layers_of(kv_group):
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
    return shard.describe(kv_group, views, keep)


def _keys_and_values(cache: Any, layer: int, what: str) -> tuple[Any, Any]:
    keys: Any = None
    values: Any = None
    length: Any = 0
    if hasattr(cache, "layers"):
        if layer < len(cache.layers):
            cache_layer = cache.layers[layer]
            keys, values = getattr(cache_layer, "keys", None), getattr(cache_layer, "values", None)
            length = cache_layer.get_seq_length() if keys is not None else 0
    elif layer < len(getattr(cache, "key_cache", ())):
        keys, values = cache.key_cache[layer], cache.value_cache[layer]
    for tensor in (keys, values):
        if not (hasattr(tensor, "data_ptr") and tensor.numel()):
            raise ConfigError(
                f"{what}: expected keys and values in the {type(cache).__name__}, found none; "
                "prefill first, and number layers as the cache does"
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
    """Convolution states of linear attention, sharded in sections (such as the channels of q, k and
    v), each a plane. A slot is a state. `plane` describes the other states.

    Args:
        sections: planes in the order of the rank's channels; together they cover all channels.
        axes: "tcr" for `[slots, channels, width]`, "trc" for `[slots, width, channels]`, as shaped;
            memory may be permuted. In planes with `rows` equal to the width, channels are
            contiguous; in planes with one row, all of a head's channels, each with its width, are
            contiguous.

    Raises:
        ConfigError: channels that are not those of the sections, or as `plane`.
    """
    state_group = shard.geometry.group(group)
    views = {
        (layer, name): part
        for layer, all_sections in shard.views(state_group, tensors, axes).items()
        for name, part in _sections(shard, state_group, sections, all_sections).items()
    }
    return shard.describe(state_group, views, tensors)


def _sections(
    shard: Shard, group: KVGroup, sections: Sequence[str], all_sections: View
) -> dict[str, View]:
    parts, first = {}, 0
    width = max(1, all_sections.axis("r").size)
    for name in sections:
        section = group.plane(name)
        heads = held_heads(section, shard.rank, shard.ranks).count
        channel_bytes = all_sections.element_bytes * (width if section.rows == 1 else 1)
        if section.row_bytes % channel_bytes:
            raise ConfigError(
                f"{all_sections.what}: expected channels that divide the {section.row_bytes} bytes "
                f"of a head of plane {name!r}, found channels of {channel_bytes} bytes"
            )
        channels = heads * (section.row_bytes // channel_bytes)
        part = all_sections.cut("c", first, channels).unfold("c", "h", heads)
        # A row of its own has each channel's width together, whichever axis was named first.
        parts[name] = part.last("r").rename("r", "c") if section.rows == 1 else part
        first += channels
    all_sections.expect("c", first, f"channels of {', '.join(sections)} of this rank")
    return parts


__all__ = [
    "Shard",
    "Tensors",
    "attention",
    "by_layer",
    "convolution",
    "dynamic_cache",
    "flashinfer",
    "join",
    "kv_names",
    "lightllm",
    "plane",
    "sglang",
    "vllm",
]
