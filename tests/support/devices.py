"""Device planes read the slow way: a row's bytes at the address that its description gives."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from support.pages import Model

from lightcache.kernels.geometry import Share
from lightcache.kernels.planes import DevicePlane, DevicePlanes


def address(plane: DevicePlane, slot: int, head: int = 0, row: int = 0) -> int:
    """As documented; and the same where blocks that touch are taken as one."""
    within = head * plane.head_stride + row * plane.row_stride
    block, place = divmod(slot, plane.block_units)
    documented = plane.address + block * plane.block_stride + place * plane.unit_stride
    if plane.block_units == 1 and not plane.block_stride:
        documented = plane.address + slot * plane.unit_stride
    units, stride, step = plane.spacing
    assert documented == plane.address + slot // units * stride + slot % units * step
    return documented + within


def check(planes: DevicePlanes, rows: Model) -> None:
    """Every row of every plane must be where it is said to be, and no other plane is described.

    Args:
        rows: the right bytes, as (slots, rows, heads, row_bytes) of each plane.
    """
    assert set(planes.planes) == set(rows)
    for place, right in rows.items():
        plane = planes.planes[place]
        slots, lines, heads, size = right.shape
        assert plane.slots == slots, place
        for slot, row, head in np.ndindex(slots, lines, heads):
            found = ctypes.string_at(address(plane, slot, head, row), size)
            wanted = right[slot, row, head].tobytes()
            assert found == wanted, f"{place}: slot {slot}, row {row}, head {head}"


def move(share: Share, page: Any, planes: DevicePlanes, slots: list[int], *, to_page: bool) -> None:
    """A page of one request, row by row: `slots[u]` is the place of unit u."""
    for cell in share.cells:
        plane, size = planes.find(share.geometry, cell), cell.plane.row_bytes
        for unit in range(cell.units):
            for head in range(cell.heads):
                there = page.ctypes.data + cell.offset + unit * cell.unit_stride + head * size
                here = address(plane, slots[unit], cell.own_head + head, cell.row)
                target, source = (there, here) if to_page else (here, there)
                ctypes.memmove(target, source, size)
