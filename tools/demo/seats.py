"""What a worker keeps on its device: the transformers caches of the last few requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache._arguments import Pages
from lightcache.tools.demo.messages import Tokens


@dataclass(eq=False)
class Seat:
    """A place for one request's cache, with the numbers of its device blocks."""

    first: int
    """Number of its first block."""
    most: int
    """Blocks that it has numbers for."""
    tokens: Tokens
    """Those that `past` holds."""
    past: Any = None

    def table(self, blocks: int) -> Pages:
        """The first so many blocks, or all."""
        return np.arange(self.first, self.first + min(blocks, self.most), dtype=np.int32)


class Seats:
    """Places for requests. A request goes on in the place of one that is over if its prompt begins
    with all that this one left; otherwise what was left for longest goes.

    Nothing is paged here: a cache has tensors of its own, and blocks are numbers by which its pages
    stand in the index that a manager keeps of the device.
    """

    def __init__(self, kept: int, most: int) -> None:
        """All are free.

        Args:
            kept: caches to keep when their requests are over.
            most: blocks of the longest request.
        """
        self._kept, self._most = kept, most
        self._free = list(range(kept, -1, -1))  # one more: for the request that runs
        self._left: list[Seat] = []  # the one that was left first goes first

    @property
    def blocks(self) -> int:
        """Block numbers of all seats."""
        return (self._kept + 1) * self._most

    def take(self, prompt: Tokens) -> Seat:
        """The longest cache that a prompt goes on from, or an empty place. For one request at a
        time."""
        found = [seat for seat in self._left if _goes_on(seat.tokens, prompt)]
        if not found:
            return Seat(self._free.pop() * self._most, self._most, prompt[:0])
        longest = max(found, key=lambda seat: len(seat.tokens))
        self._left.remove(longest)
        return longest

    def leave(self, seat: Seat) -> Seat | None:
        """A request is over. Returns the seat whose blocks hold nothing any more from now on."""
        self._left.append(seat)
        if len(self._left) <= self._kept:
            return None
        gone = self._left.pop(0)
        self._free.append(gone.first // self._most)
        gone.past = None
        return gone


def _goes_on(before: Tokens, prompt: Tokens) -> bool:
    """Whether a token is left to compute behind these."""
    return len(before) < len(prompt) and bool((prompt[: len(before)] == before).all())
