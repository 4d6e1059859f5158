"""How page memory is cut into pieces for registration, and how far they are done.

A piece begins and ends where pages and OS pages both do; only the last ends with the memory. Pages
are cut from the first on and may be done in any order. Plain arithmetic: whoever shares it locks.
"""

from __future__ import annotations

import math
import mmap
import time
from dataclasses import dataclass

OS_PAGE = max(4096, mmap.PAGESIZE)


@dataclass(frozen=True)
class Piece:
    """Memory to be registered by one call: the pages `first` to `last` - 1, where it has pages."""

    address: int
    nbytes: int
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class PinStatistics:
    """What has been registered until now."""

    nbytes: int
    pieces: int
    first_seconds: float
    """From the beginning until the first pages could be used; 0.0 while none can."""
    seconds: float
    """Until the last piece was registered."""


class Pieces:
    """The pieces of some page memory."""

    def __init__(self, address: int, pages: int, page_bytes: int, steps: tuple[int, int]) -> None:
        """Nothing is cut yet.

        Args:
            address: a multiple of `OS_PAGE`.
            steps: bytes of the first piece, and of those behind it, more or less: whole units of
                lcm(page_bytes, OS_PAGE) bytes, at least one.
        """
        unit = math.lcm(page_bytes, OS_PAGE)
        self.unit = unit // page_bytes
        """Pages that a piece holds a multiple of."""
        self.ready = 0
        """Pages whose pieces are done, from the first on."""
        self._address, self._pages, self._page_bytes = address, pages, page_bytes
        self._steps = [max(1, size // unit) * self.unit for size in steps]
        self._cut = 0
        self._apart: dict[int, int] = {}  # done before one in front of them
        self._began = self._first = self._last = time.monotonic()
        self._count = self._nbytes = 0

    @property
    def all_cut(self) -> bool:
        """Whether there are no more."""
        return self._cut == self._pages

    def cut(self, have: int) -> Piece | None:
        """The next piece, when `have` pages have memory; None: not enough of them. While the first
        is being registered there is no second: they would delay each other, and somebody waits."""
        if self._cut and not self.ready:
            return None
        have = min(have, self._pages)
        if have < self._pages:
            have -= have % self.unit
        first, last = self._cut, min(self._cut + self._steps[self._cut > 0], have)
        if last <= first:
            return None
        self._cut = last
        offset = first * self._page_bytes
        return Piece(self._address + offset, last * self._page_bytes - offset, first, last)

    def done(self, piece: Piece) -> int:
        """A piece is registered; how many pages are, in all."""
        self._apart[piece.first] = piece.last
        while self.ready in self._apart:
            self.ready = self._apart.pop(self.ready)
        self._last = time.monotonic()
        if piece.first == 0:
            self._first = self._last
        self._count += 1
        self._nbytes += piece.nbytes
        return self.ready + sum(last - first for first, last in self._apart.items())

    @property
    def statistics(self) -> PinStatistics:
        """How much was registered, and how long it took."""
        return PinStatistics(
            self._nbytes, self._count, self._first - self._began, self._last - self._began
        )


__all__ = ["OS_PAGE", "Piece", "Pieces", "PinStatistics"]
