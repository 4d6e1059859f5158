"""From tensors to `DevicePlanes`: what a process has of the model, and the letters of its axes.

`lightcache.kernels.layouts` names the layouts of the engines we know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightcache.kernels.axes import View, check_axes, view
from lightcache.kernels.geometry import KVGroup, PageGeometry, Share, held_heads
from lightcache.kernels.groups import layer_numbers
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.kernels.shares import check_rank
from lightcache.shm.errors import ConfigError

Tensors = Any
"""A tensor, a sequence of tensors, or a mapping from layer numbers to tensors."""


@dataclass(frozen=True)
class Shard:
    """What one process has of the model: a rank of the tensor-parallel group, and the layers of a
    pipeline stage. Heads of its tensors are the rank's own.

    Raises:
        ConfigError: a rank outside its group, or no geometry.
    """

    geometry: PageGeometry
    rank: int = 0
    ranks: int = 1
    layers: Sequence[int] | None = None
    """None: all. Numbers that the geometry does not have are ignored, as in its `share`."""

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, PageGeometry):
            raise ConfigError(f"shard: expected a PageGeometry, found {self.geometry!r}")
        check_rank(self.rank, self.ranks)
        if self.layers is not None:
            object.__setattr__(self, "layers", layer_numbers(self.layers, "layers of a shard"))

    def share(self, *, writing: bool = False) -> Share:
        """The part of a page that belongs to it: see `PageGeometry.share`."""
        return self.geometry.share(self.rank, self.ranks, layers=self.layers, writing=writing)

    def layers_of(self, group: KVGroup) -> tuple[int, ...]:
        """The layers of a group that are here, ascending."""
        if self.layers is None:
            return group.layers
        return tuple(layer for layer in group.layers if layer in self.layers)

    def views(self, group: KVGroup, tensors: Tensors, axes: str) -> dict[int, View]:
        """A view of each layer's tensor.

        Raises:
            ConfigError: tensors of other layers than the shard has, or none that `view` takes.
        """
        what, layers = f"group {group.name!r}", self.layers_of(group)
        check_axes(axes, what)
        if "l" in axes:
            whole = view(tensors, axes, what).expect("l", len(layers), f"numbers {layers}")
            return {layer: whole.take("l", at) for at, layer in enumerate(layers)}
        found = by_layer(tensors, layers, what)
        return {layer: view(found[layer], axes, f"{what}, layer {layer}") for layer in layers}

    def describe(
        self, group: KVGroup, views: Mapping[tuple[int, str], View], keep: Any
    ) -> DevicePlanes:
        """Planes of a group from the views of each (layer, plane).

        Raises:
            ConfigError: rows, heads or blocks that do not fit the geometry, or several devices.
        """
        planes: dict[tuple[str, int, str], DevicePlane] = {}
        devices = {found.device for found in views.values()}
        if len(devices) != 1:
            raise ConfigError(
                f"group {group.name!r}: expected tensors of layers {self.layers_of(group)} on one "
                f"device, found {sorted(devices)}"
            )
        for (layer, name), found in views.items():
            plane = group.plane(name)
            heads = held_heads(plane, self.rank, self.ranks).count
            planes[group.name, layer, name] = found.plane(plane, heads, group.units(plane))
        return DevicePlanes(planes, device=devices.pop(), keep=keep)


def by_layer(tensors: Tensors, layers: Sequence[int], what: str) -> Mapping[int, Any]:
    """One thing for each layer.

    Raises:
        ConfigError: one tensor, or things for other layers.
    """
    if hasattr(tensors, "data_ptr") or not isinstance(tensors, Iterable):
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
    found = list(tensors)
    if len(found) != len(layers):
        raise ConfigError(
            f"{what}: expected {len(layers)} tensors, for layers {tuple(layers)}, found "
            f"{len(found)}"
        )
    return dict(zip(layers, found, strict=True))


def plane(shard: Shard, group: str, name: str, tensors: Tensors, *, axes: str) -> DevicePlanes:
    """One plane of a group, from any tensors. Besides what the named layouts are made of:

    - scales beside a cache: "th" for `[tokens, heads]`, "bnh" for `[blocks, block, heads]`
    - opaque rows: "tc" for `[tokens, 132]`, "bnc" for `[blocks, block, 132]`
    - opaque blocks: "tc" for `[blocks, bytes]`; a slot is a block there
    - recurrent states: "thcc" for `[slots, heads, key_dim, value_dim]`; a slot is a state

    Raises:
        ConfigError: as `Shard.views` and `Shard.describe`.
    """
    found = shard.geometry.group(group)
    views = shard.views(found, tensors, axes)
    return shard.describe(found, {(layer, name): one for layer, one in views.items()}, tensors)


def attention(
    shard: Shard, group: str, tensors: Tensors, *, axes: str, suffix: str = ""
) -> DevicePlanes:
    """K and V, or the packed or single plane, of one tensor for each layer or of one for all.

    Planes `k` and `v` are the two places of axis `k`; without one, they are the two parts of the
    contents, K first. Plane `kv` has no axis `k`.

    Args:
        suffix: "_scale" for the scales of these planes, where they are laid out in the same way.

    Raises:
        ConfigError: as `Shard.views` and `Shard.describe`; K and V apart for a group that packs
            them, contents that cannot be parted.
    """
    found = shard.geometry.group(group)
    names = [name + suffix for name in kv_names(found)]
    views = {
        (layer, name): part
        for layer, one in shard.views(found, tensors, axes).items()
        for name, part in _part(found, one, names).items()
    }
    return shard.describe(found, views, tensors)


def kv_names(group: KVGroup) -> list[str]:
    """The planes of attention: `k` and `v`, or `kv`."""
    names = {plane.name for plane in group.planes}
    return ["kv"] if "kv" in names else ["k", "v"]


def _part(group: KVGroup, found: View, names: list[str]) -> dict[str, View]:
    """K and V of a view of both."""
    if len(names) == 1:
        return {names[0]: found}
    if found.has("k"):
        found.expect("k", 2, "K, then V")
        return {name: found.take("k", at) for at, name in enumerate(names)}
    widths = [group.plane(name).row_bytes for name in names]
    contents = [axis for axis in found.axes if axis.letter == "c"]
    if len(contents) != 1 or found.row_bytes != sum(widths) or widths[0] % found.element_bytes:
        raise ConfigError(
            f"{found.what}: expected rows of {widths[0]} bytes of K and {widths[1]} of V in one "
            f"axis of contents, found {found.row_bytes} bytes in {len(contents)}"
        )
    first = widths[0] // found.element_bytes
    parts = (found.cut("c", 0, first), found.cut("c", first, contents[0].size - first))
    return dict(zip(names, parts, strict=True))


__all__ = ["Shard", "Tensors", "attention", "by_layer", "kv_names", "plane"]
