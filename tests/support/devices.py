"""Device planes read the slow way: a row's bytes at the address that its description gives."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from lightcache.kernels.geometry import Share
from lightcache.kernels.planes import DevicePlane, DevicePlanes

Oracle = Callable[[int, int, int], "torch.Tensor"]
"""Elements of (slot, head, row) by plain indexing."""


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of random bytes: no two rows alike."""
    width = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8)
    return raw.view(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of its elements, in the order of its axes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


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


def check(planes: DevicePlanes, place: tuple[str, int, str], oracle: Oracle, **sizes: int) -> None:
    """Every row of a plane must be where it is said to be.

    Args:
        sizes: slots, heads (1), rows (1).
    """
    plane = planes.planes[place]
    assert plane.slots == sizes["slots"], place
    for slot in range(plane.slots):
        for head in range(sizes.get("heads", 1)):
            for row in range(sizes.get("rows", 1)):
                right = raw(oracle(slot, head, row))
                found = ctypes.string_at(address(plane, slot, head, row), len(right))
                assert found == right, f"{place}: slot {slot}, head {head}, row {row}"


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
