"""Where an engine keeps its KV: base address and strides of each plane of each layer.

The engine's tensors stay as they are. `lightcache.kernels.layouts` describes those of the engines
we know and, by the letters of its axes, any other tensor; what is no tensor, plane by plane.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightcache.kernels.device_names import device_name
from lightcache.kernels.geometry import Cell, PageGeometry
from lightcache.kernels.groups import whole
from lightcache.shm.errors import ConfigError


@dataclass(frozen=True)
class DevicePlane:
    """One plane of one layer, as one rank holds it.

    Byte `b` of row `r` of head `h` (the rank's own, from 0) of slot `s` is at
    `address + s // block_units * block_stride + s % block_units * unit_stride + h * head_stride
    + r * row_stride + b`. A slot is what the engine numbers: a token, or a unit of several tokens
    for opaque planes, or the state of a request.
    """

    address: int
    unit_stride: int
    """Bytes between neighbouring slots of a block."""
    slots: int
    """Slots there are: 0 to slots - 1."""
    block_units: int = 1
    """Slots of a block; 1 where all slots are evenly spaced."""
    block_stride: int = 0
    """Bytes between blocks; unused when evenly spaced."""
    head_stride: int = 0
    row_stride: int = 0

    def __post_init__(self) -> None:
        for name, least in (("address", 1), ("slots", 1), ("block_units", 1)):
            whole(getattr(self, name), f"device plane: {name}", least)
        for name in ("unit_stride", "block_stride", "head_stride", "row_stride"):
            whole(getattr(self, name), f"device plane: {name}", 0)

    @property
    def spacing(self) -> tuple[int, int, int]:
        """(block_units, block_stride, unit_stride), with blocks that touch taken as one: then
        block_units is 1 and both strides are the distance of neighbouring slots."""
        if self.block_units == 1:  # a stride within blocks of one slot means nothing
            step = self.block_stride or self.unit_stride
            return 1, step, step
        if self.block_stride == self.block_units * self.unit_stride:
            return 1, self.unit_stride, self.unit_stride
        return self.block_units, self.block_stride, self.unit_stride


class DevicePlanes:
    """All planes of one rank: made once for an engine, or for each transfer where tensors move."""

    def __init__(
        self,
        planes: Mapping[tuple[str, int, str], DevicePlane],
        *,
        device: str | int = "cpu",
        keep: Any = None,
    ) -> None:
        """Describe planes by (group name, layer number, plane name).

        Args:
            device: "cpu" or "cuda:0", as torch writes it, or the number of a GPU. "cuda" is the
                current one, or 0 where torch has not used any so far.
            keep: whatever owns the memory; kept alive as long as this.

        Raises:
            ConfigError: no name of a device.
        """
        self.planes = dict(planes)
        self.device = device_name(device)
        """As `device_name` has it: "cpu", or "cuda:0" with its number."""
        self.keep = keep

    def find(self, geometry: PageGeometry, cell: Cell) -> DevicePlane:
        """The plane that a cell of a page belongs to.

        Raises:
            ConfigError: it was not described.
        """
        name = geometry.groups[cell.group].name
        found = self.planes.get((name, cell.layer, cell.plane.name))
        if found is None:
            raise ConfigError(
                f"plane {cell.plane.name!r} of layer {cell.layer} of group {name!r} is not among "
                f"the {len(self.planes)} described planes; describe it, or leave its layer out"
            )
        return found


def join(*parts: DevicePlanes) -> DevicePlanes:
    """Everything that one rank has, described part by part: groups, and planes of a group.

    Raises:
        ConfigError: nothing, parts on several devices, or a plane described twice.
    """
    devices = sorted({part.device for part in parts})
    if len(devices) != 1:
        raise ConfigError(f"planes to join: expected parts on one device, found {devices}")
    planes: dict[tuple[str, int, str], DevicePlane] = {}
    for part in parts:
        twice = sorted(planes.keys() & part.planes.keys())
        if twice:
            raise ConfigError(
                f"planes to join: expected each (group, layer, plane) once, found {twice[0]} twice"
            )
        planes.update(part.planes)
    return DevicePlanes(planes, device=devices[0], keep=[part.keep for part in parts])


__all__ = ["DevicePlane", "DevicePlanes", "join"]
