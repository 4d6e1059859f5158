"""Device planes in CPU memory in any arrangement, host pages in any order, and a plain oracle of
what a transfer does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import PageGeometry, Share
from lightcache.kernels.moves import Move
from lightcache.kernels.planes import DevicePlane, DevicePlanes

Bytes = npt.NDArray[np.uint8]
OTHERS = 4  # pages of the host that no page of the geometry has a part in


class Placed:
    """Where pages, or their parts, lie among the pages of the host: anywhere, others in between."""

    def __init__(self, geometry: PageGeometry, pages: int, seed: int = 0, more: int = 0) -> None:
        """`more`: bytes of a host page that the geometry does not know of; 0 if it has parts."""
        assert not more or geometry.parts == 1
        self.page_bytes = geometry.page_bytes + more
        """Of a whole page."""
        self._rng, count = np.random.default_rng(seed), pages * geometry.parts
        self._shape = (count + OTHERS, geometry.part_bytes + more)
        self._parts = self._rng.permutation(count + OTHERS)[:count].reshape(pages, geometry.parts)

    def pages(self) -> Bytes:
        """Whole pages of random bytes, of shape (pages, page_bytes)."""
        return self._rng.integers(0, 256, (len(self._parts), self.page_bytes), np.uint8)

    def memory(self, pages: Bytes) -> Bytes:
        """The memory of the host with these pages in it, and the same bytes in all others."""
        made = np.full(self._shape, 0xCD, np.uint8)
        made[self._parts.ravel()] = pages.reshape(-1, self._shape[1])
        return made

    def moves(self, moves: Sequence[Move], kind: Any = np.int64) -> list[Move]:
        """The same moves, by the numbers of host pages."""
        return [
            replace(move, pages=self._parts[np.asarray(move.pages, int)].ravel().astype(kind))
            for move in moves
        ]


class Device:
    """The planes of one rank, all in one array of random bytes, with gaps in between."""

    def __init__(self, share: Share, slots: int, seed: int = 0) -> None:
        """Arranges each plane in a way that the seed chooses."""
        self._rng = random.Random(seed)
        self._named: dict[tuple[str, int, str], DevicePlane] = {}
        heads: dict[tuple[str, int, str], set[int]] = {}
        geometry = share.geometry
        at = 64  # no address is 0
        for cell in share.cells:
            name = geometry.groups[cell.group].name, cell.layer, cell.plane.name
            heads.setdefault(name, set()).update(range(cell.head, cell.head + cell.heads))
        for cell in share.cells:
            name = geometry.groups[cell.group].name, cell.layer, cell.plane.name
            if name not in self._named:
                row, rows = cell.plane.row_bytes, cell.plane.rows
                units = -(-slots // cell.plane.unit_tokens)
                self._named[name], at = self._plane(at, row, rows, len(heads[name]), units)
        self.first = {name: min(found) for name, found in heads.items()}
        generator = np.random.default_rng(seed)
        self.memory: Bytes = generator.integers(0, 256, at + 64, np.uint8)
        base = int(self.memory.ctypes.data)
        self.planes = DevicePlanes(
            {
                name: DevicePlane(**{**vars(plane), "address": base + plane.address})
                for name, plane in self._named.items()
            },
            keep=self.memory,
        )

    def _plane(
        self, at: int, row: int, rows: int, heads: int, units: int
    ) -> tuple[DevicePlane, int]:
        at += self._rng.randrange(8)
        gap = self._rng.choice([0, 0, 4, row])
        unit = heads * rows * row
        kind = self._rng.choice(["tokens", "blocks", "heads apart"])
        block = self._rng.choice([2, 4, 8])
        blocks = -(-units // block)
        if kind == "tokens":  # [unit][row][head], perhaps with something else in between
            stride = unit + gap
            plane = DevicePlane(at, stride, units, head_stride=row, row_stride=heads * row)
            return plane, at + units * stride
        if kind == "blocks":  # [block][unit][head][row], blocks apart
            stride = block * unit + gap
            plane = DevicePlane(at, unit, units, block, stride, rows * row, row)
            return plane, at + blocks * stride
        stride = block * unit + gap  # [block][head][unit][row]
        plane = DevicePlane(at, rows * row, units, block, stride, block * rows * row, row)
        return plane, at + blocks * stride

    def row(self, name: tuple[str, int, str], slot: int, head: int, line: int, size: int) -> slice:
        """Where the bytes of a head (counted from the model's first) of a slot lie in `memory`."""
        p = self._named[name]
        at = p.address + head * p.head_stride + line * p.row_stride
        if p.block_stride:
            at += slot // p.block_units * p.block_stride + slot % p.block_units * p.unit_stride
        else:
            at += slot * p.unit_stride
        return slice(at, at + size)


def rows(
    share: Share, device: Device, page_bytes: int, moves: Sequence[Move]
) -> Iterator[tuple[slice, slice]]:
    """(range in the flat page memory, range in the device's memory) of each row that moves, by
    the words of `Cell`, `DevicePlane` and `Move` alone."""
    geometry: PageGeometry = share.geometry
    for move in moves:
        for number, slot in enumerate(move.slots):
            page, token = divmod(move.first + number, geometry.page_tokens)
            if slot < 0 or (move.skip is not None and move.skip[page]):
                continue
            start = int(move.pages[page]) * page_bytes
            for cell in share.cells:
                unit, inside = divmod(token, cell.plane.unit_tokens)
                if inside:
                    continue
                name = geometry.groups[cell.group].name, cell.layer, cell.plane.name
                size = cell.plane.row_bytes
                for head in range(cell.heads):
                    at = start + cell.offset + unit * cell.unit_stride + head * size
                    yield (
                        slice(at, at + size),
                        device.row(
                            name,
                            int(slot) // cell.plane.unit_tokens,
                            cell.head + head - device.first[name],
                            cell.row,
                            size,
                        ),
                    )
