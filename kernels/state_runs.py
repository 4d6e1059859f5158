"""Where the bytes of a state are: contiguous runs, each the same distance from slot to slot."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import Share
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.kernels.rows import WIDEST
from lightcache.kernels.shares import Cell
from lightcache.shm.errors import ConfigError

Table = npt.NDArray[np.int64]


def state_runs(share: Share, planes: DevicePlanes) -> Table:
    """Runs of one state of a rank, int64 of shape (n, 3): address in slot 0, bytes between slots,
    bytes. Runs that touch in every slot are one.

    Raises:
        ConfigError: pages that are no states, planes that are missing, or slots in blocks.
    """
    rule = share.geometry.rule.kind
    if rule != "point":
        raise ConfigError(
            f"states: expected a geometry of KVGroup.state, found one of rule {rule!r}"
        )
    runs: list[tuple[int, int, int]] = []
    for cell in share.cells:
        plane = planes.find(share.geometry, cell)
        runs += _runs(cell, plane, _distance(cell, plane))
    joined: list[tuple[int, int, int]] = []
    for stride, address, nbytes in sorted(runs):
        if joined and joined[-1][0] == stride and sum(joined[-1][1:]) == address:
            nbytes += joined[-1][2]
            address = joined.pop()[1]
        joined.append((stride, address, nbytes))
    found = [(address, stride, nbytes) for stride, address, nbytes in joined]
    return np.array(found, np.int64).reshape(-1, 3)


def _distance(cell: Cell, plane: DevicePlane) -> int:
    block_units, _, distance = plane.spacing
    if block_units != 1:
        raise ConfigError(
            f"plane {cell.plane.name!r} of layer {cell.layer}: expected states evenly spaced, "
            f"found blocks of {block_units}; describe a plane whose slots are one stride apart"
        )
    return distance


def _runs(cell: Cell, plane: DevicePlane, distance: int) -> list[tuple[int, int, int]]:
    row, head = cell.plane.row_bytes, plane.head_stride
    start = plane.address + cell.row * plane.row_stride + cell.own_head * head
    if cell.heads == 1 or head == row:
        return [(distance, start, cell.heads * row)]
    return [(distance, start + number * head, row) for number in range(cell.heads)]


def tiles_of(runs: Table, most: int) -> Table:
    """The same runs in tiles of at most `most` bytes each."""
    counts = -(-runs[:, 2] // most)
    rows = np.repeat(runs, counts, axis=0)
    firsts = np.cumsum(counts) - counts
    offset = (np.arange(len(rows)) - np.repeat(firsts, counts)) * most
    rows[:, 0] += offset
    rows[:, 2] = np.minimum(rows[:, 2] - offset, most)
    return rows


def word_of(runs: Table) -> int:
    """Bytes of the widest access that every address, distance and length is a multiple of."""
    return math.gcd(WIDEST, *(int(value) for value in runs.ravel()))


__all__ = ["Table", "state_runs", "tiles_of", "word_of"]
