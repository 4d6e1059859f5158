"""Parts of a page: what a tensor-parallel rank, a pipeline stage, a window of layers has of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lightcache.kernels.groups import Plane, layer_numbers, whole
from lightcache.shm.errors import ConfigError

if TYPE_CHECKING:
    from lightcache.kernels.geometry import PageGeometry


@dataclass(frozen=True)
class HeldHeads:
    """The heads of a plane that one rank holds, and who else holds the same."""

    first: int
    count: int
    copy: int
    """Which of the ranks with these heads it is."""
    copies: int
    """How many ranks have these heads."""


def check_rank(rank: int, ranks: int) -> None:
    """Raises ConfigError: a rank outside its group."""
    whole(ranks, "ranks")
    if type(rank) is not int or not 0 <= rank < ranks:
        raise ConfigError(f"rank: expected 0 to {ranks - 1}, found {rank!r}")


def held_heads(plane: Plane, rank: int, ranks: int) -> HeldHeads:
    """How tensor parallelism divides a plane: contiguous runs of heads; fewer heads than ranks are
    held by several neighbouring ranks each.

    Raises:
        ConfigError: a rank outside its group, or neither number is a multiple of the other.
    """
    check_rank(rank, ranks)
    if plane.heads % ranks == 0:
        count = plane.heads // ranks
        return HeldHeads(rank * count, count, 0, 1)
    if ranks % plane.heads == 0:
        copies = ranks // plane.heads
        return HeldHeads(rank // copies, 1, rank % copies, copies)
    raise ConfigError(
        f"{plane.heads} heads of plane {plane.name!r} cannot be divided among {ranks} ranks; "
        "choose ranks that divide the heads or are a multiple of them"
    )


@dataclass(frozen=True)
class Cell:
    """The smallest piece that has an address of its own on both sides: one row number of one plane
    of one layer of one head group, all units of it.

    Byte `b` of the `h`-th of its `heads` heads of unit `u` is in the page at
    `offset + u * unit_stride + h * row_bytes + b`.
    """

    group: int
    """Position of its group in the geometry."""
    layer: int
    """Number of the model's layer."""
    plane: Plane
    row: int
    head: int
    """The first head of these, of the whole model."""
    own_head: int
    """The same head as the rank counts, from the first one that it holds: as `DevicePlane` does."""
    heads: int
    units: int
    offset: int
    unit_stride: int

    @property
    def contiguous(self) -> bool:
        """Whether its bytes in the page touch each other."""
        return self.units == 1 or self.unit_stride == self.heads * self.plane.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return self.units * self.heads * self.plane.row_bytes


class Share:
    """A part of every page: the cells that one rank reads or writes, in the order of the page.
    It may be empty: a rank then has nothing to move."""

    def __init__(self, geometry: PageGeometry, cells: tuple[Cell, ...]) -> None:
        """For `PageGeometry.share`."""
        self.geometry = geometry
        self.cells = cells

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a page that it covers."""
        return sum(cell.nbytes for cell in self.cells)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers in it, ascending."""
        return tuple(sorted({cell.layer for cell in self.cells}))

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of each contiguous piece of a page that belongs to it, ascending."""
        pieces: list[tuple[int, int]] = []
        for start, length in sorted(self._pieces()):
            if pieces and sum(pieces[-1]) == start:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + length)
            else:
                pieces.append((start, length))
        return tuple(pieces)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for cell in self.cells:
            row = cell.heads * cell.plane.row_bytes
            if cell.contiguous:
                yield cell.offset, cell.nbytes
            else:
                for unit in range(cell.units):
                    yield cell.offset + unit * cell.unit_stride, row

    def window(self, layers: Sequence[int]) -> Share:
        """The part of it that belongs to some layers; numbers that it does not have are ignored."""
        wanted = set(layer_numbers(layers, "window"))
        return Share(self.geometry, tuple(cell for cell in self.cells if cell.layer in wanted))

    def windows(self, layers: int) -> list[Share]:
        """Consecutive windows of so many layers, the last of them perhaps smaller."""
        whole(layers, "layers of a window")
        own = self.layers
        return [self.window(own[at : at + layers]) for at in range(0, len(own), layers)]

    def __repr__(self) -> str:
        return f"<Share of {len(self.cells)} cells, {self.nbytes} bytes of {self.geometry!r}>"


__all__ = ["Cell", "HeldHeads", "Share", "check_rank", "held_heads"]
