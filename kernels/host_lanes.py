"""Host memory and device planes as numpy views, and copying between them.

A lane is a series of rows of one width that are evenly addressable on both sides: a cell of the
page with the plane it belongs to, or one head of it where the device keeps heads apart. Its rows
are numpy items (void of the row's width), so an indexed copy moves each with memcpy and lets other
threads run meanwhile; runs of rows that follow each other on both sides move as slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import Cell, Share
from lightcache.kernels.memory import HostPages
from lightcache.kernels.moves import Batch, Ints
from lightcache.kernels.planes import DevicePlane, DevicePlanes

Bytes = npt.NDArray[np.uint8]
Copy = Callable[[], None]

# An indexed copy costs about 0.1 us a row beside its bytes, a slice about 2 us.
_RUN_BYTES = 8 << 10
# Of one piece of work. numpy lets other threads run only where an indexed copy has 500 items.
_PIECE_BYTES = 512 << 10
_PIECE_ROWS = 512


@dataclass(frozen=True)
class Lane:
    """Rows with one address for each (page, unit) and each slot."""

    layer: int
    unit_tokens: int
    host: Bytes
    """uint8 of shape (pages, units, row_bytes)."""
    device: Bytes
    """uint8 of shape (slots, row_bytes), or (blocks, block_units, row_bytes)."""
    block_units: int
    """0 where slots are evenly spaced."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.host.shape[-1])

    @cached_property
    def host_rows(self) -> npt.NDArray[np.void]:
        """(pages, units), each item a row."""
        return _items(self.host)

    @cached_property
    def device_rows(self) -> npt.NDArray[np.void]:
        """(slots,) or (blocks, block_units), each item a row."""
        return _items(self.device)


def _items(rows: Bytes) -> npt.NDArray[np.void]:
    found: npt.NDArray[np.void] = rows.view(f"V{rows.shape[-1]}")[..., 0]
    return found


class _Foreign:
    """Memory at an address, for numpy, with whoever owns it kept alive."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], owner: object
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }


def lanes(share: Share, memory: HostPages, planes: DevicePlanes) -> list[Lane]:
    """All rows of a share, in the order of the page.

    Raises:
        ConfigError: a plane was not described.
    """
    found: list[Lane] = []
    for cell in share.cells:
        device = planes.find(share.geometry, cell)
        together = cell.heads == 1 or device.head_stride == cell.plane.row_bytes
        for head in range(1 if together else cell.heads):
            row = cell.plane.row_bytes * (cell.heads if together else 1)
            host = _host_view(memory, cell, head, row)
            at = (
                device.address
                + (cell.own_head + head) * device.head_stride
                + cell.row * device.row_stride
            )
            view, block_units = _device_view(device, at, row, planes)
            found.append(Lane(cell.layer, cell.plane.unit_tokens, host, view, block_units))
    return found


def _host_view(memory: HostPages, cell: Cell, head: int, row: int) -> Bytes:
    view: Bytes = np.ndarray(
        (memory.pages, cell.units, row),
        np.uint8,
        memory.array,
        cell.offset + head * cell.plane.row_bytes,
        (memory.page_bytes, cell.unit_stride, 1),
    )
    return view


def _device_view(
    device: DevicePlane, address: int, row: int, owner: DevicePlanes
) -> tuple[Bytes, int]:
    block_units, block_stride, unit_stride = device.spacing
    if block_units == 1:
        shape: tuple[int, ...] = (device.slots, row)
        strides: tuple[int, ...] = (block_stride, 1)
        block_units = 0
    else:
        shape = (-(-device.slots // block_units), block_units, row)
        strides = (block_stride, unit_stride, 1)
    view: Bytes = np.asarray(_Foreign(address, shape, strides, owner))
    return view, block_units


class Index:
    """Rows of a batch as the lanes of one unit size and block size take them."""

    def __init__(self, batch: Batch, unit_tokens: int, block_units: int) -> None:
        """Computed once for a transfer and shared by its lanes; O(rows)."""
        self.page, self.unit, slot = batch.rows(unit_tokens)
        self.place: tuple[Ints, ...] = (slot,)
        if block_units:
            self.place = tuple(np.divmod(slot, block_units))

    def __len__(self) -> int:
        return len(self.page)

    @cached_property
    def runs(self) -> Ints:
        """Where each run of neighbours begins, and the number of rows."""
        if not len(self):
            return np.zeros(1, np.int64)
        breaks = (np.diff(self.page) != 0) | (np.diff(self.unit) != 1)
        breaks |= np.diff(self.place[-1]) != 1
        for block in self.place[:-1]:
            breaks |= np.diff(block) != 0
        return np.concatenate(([0], np.flatnonzero(breaks) + 1, [len(self)]))

    def pieces(self, lane: Lane, to_host: bool) -> Iterator[tuple[int, Copy]]:
        """(bytes, call) of each piece of work of a lane; they may run in any order."""
        bounds, row = self.runs, lane.row_bytes
        if len(self) * row >= (len(bounds) - 1) * _RUN_BYTES:
            step = max(1, _PIECE_BYTES * (len(bounds) - 1) // max(1, len(self) * row))
            for low in range(0, len(bounds) - 1, step):
                part = bounds[low : low + step + 1]
                yield int(part[-1] - part[0]) * row, partial(self._slices, lane, part, to_host)
        else:
            step = max(_PIECE_ROWS, _PIECE_BYTES // row)
            for low in range(0, len(self), step):
                rows = slice(low, min(low + step, len(self)))
                yield (rows.stop - low) * row, partial(self._indexed, lane, rows, to_host)

    def _indexed(self, lane: Lane, rows: slice, to_host: bool) -> None:
        host = self.page[rows], self.unit[rows]
        device: Any = tuple(part[rows] for part in self.place)
        if to_host:
            lane.host_rows[host] = lane.device_rows[device]
        else:
            lane.device_rows[device] = lane.host_rows[host]

    def _slices(self, lane: Lane, bounds: Ints, to_host: bool) -> None:
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            unit, slot = int(self.unit[low]), int(self.place[-1][low])
            host = lane.host[int(self.page[low]), unit : unit + high - low]
            device = lane.device
            if lane.block_units:
                device = device[int(self.place[0][low])]
            device = device[slot : slot + high - low]
            if to_host:
                host[...] = device
            else:
                device[...] = host


__all__ = ["Copy", "Index", "Lane", "lanes"]
