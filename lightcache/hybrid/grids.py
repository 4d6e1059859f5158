"""Grid: the positions of a prompt at which recurrent state is saved.

A state exists only where somebody saved it, and it can be found only where KV has a key. So each
position is a multiple of several sizes, and this is the one place that knows which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightcache._arguments import count
from lightcache.errors import ConfigError

Tokens = npt.NDArray[np.int64]

_MOST = 1 << 20
_MOST_INTERVAL = 1 << 40


@dataclass(frozen=True, init=False)
class Grid:
    """Positions at which prefill and decoding save. A position n means: behind the first n tokens.

    grid = Grid(block_tokens=16, page_tokens=64)
    grid.fine, grid.chunk, grid.grid, grid.interval   # 16, 64, 64, 256
    """

    block_tokens: int
    """Of a device block."""
    page_tokens: int
    """Of a host page."""
    model_chunk: int
    """Tokens that the model's kernels take at once. Inside of such a chunk, counted from where a
    forward pass begins, no state exists; at the end of the pass one always does."""
    every: int
    """While decoding, about so many tokens lie between two saved states."""

    def __init__(
        self, block_tokens: int, page_tokens: int, chunk: int = 64, every: int = 256
    ) -> None:
        """Check and keep.

        Args:
            block_tokens, page_tokens: of device and host; one a multiple of the other.
            chunk: of the model: 64 for gated delta nets, its `chunk_size` for Mamba 2.
            every: tokens between states saved while decoding, rounded up to what is reachable.

        Raises:
            ConfigError: a size out of range, sizes that do not fit each other, or an interval
                that no sequence reaches.
        """
        for name, value in (
            ("block_tokens", block_tokens),
            ("page_tokens", page_tokens),
            ("model_chunk", chunk),
            ("every", every),
        ):
            object.__setattr__(self, name, count(value, f"grid: {name}", 1, _MOST))
        big, small = sorted((self.block_tokens, self.page_tokens), reverse=True)
        if big % small:
            raise ConfigError(
                f"grid: expected pages and blocks of which one is a multiple of the other, found "
                f"host pages of {self.page_tokens} tokens and device blocks of {self.block_tokens}"
            )
        if self.interval > _MOST_INTERVAL:
            raise ConfigError(
                f"grid: states would be saved every {self.interval} tokens, the least common "
                f"multiple of {self.grid} and every={self.every}; choose `every` a multiple or a "
                f"divisor of {self.grid}"
            )

    @cached_property
    def fine(self) -> int:
        """Tokens of the smaller of block and page: every key, and so every position, is a multiple
        of it."""
        return min(self.block_tokens, self.page_tokens)

    @cached_property
    def chunk(self) -> int:
        """The model's chunk, or `fine` if that is larger: no two states are nearer than this."""
        return max(self.model_chunk, self.fine)

    @cached_property
    def grid(self) -> int:
        """Prefill saves at multiples of it: there KV ends in a whole block and a whole page."""
        return math.lcm(self.chunk, self.block_tokens, self.page_tokens)

    @cached_property
    def interval(self) -> int:
        """Decoding saves at multiples of it."""
        return math.lcm(self.grid, self.every)

    def floor(self, tokens: int) -> int:
        """The last position of the grid that is not behind so many tokens; 0 if there is none."""
        return tokens // self.grid * self.grid

    def fine_floor(self, tokens: int) -> int:
        """The same of all positions that have a key: where a prompt's last state may be."""
        return tokens // self.fine * self.fine

    def positions(self, begin: int, end: int) -> Tokens:
        """All positions of the grid in (begin, end], ascending, int64 of shape (n,)."""
        return np.arange(self.floor(begin) + self.grid, end + 1, self.grid, dtype=np.int64)

    def branching(self, kv: int, checkpoint: int) -> int | None:
        """Where prompts part that no state was saved for: the last position of the grid within
        the KV that was found, if it lies behind the deepest checkpoint, else None.

        Others have gone this way, and left KV but no state. If the coming prefill saves one here,
        the next prompt down this prefix hits (as SGLang's branching point).

        Args:
            kv: tokens whose KV was found, in any tier.
            checkpoint: position of the deepest checkpoint within them; 0 if there is none.
        """
        found = self.floor(kv)
        return found if found > checkpoint else None

    def reachable(self, begin: int, position: int) -> bool:
        """Whether a forward pass from `begin` on has a state at `position` on its way: a whole
        number of the model's chunks behind `begin`. Where `begin` is off the grid, as behind a
        stretch that filled a budget of tokens, no position of the grid may be reachable."""
        return position > begin and (position - begin) % self.model_chunk == 0


__all__ = ["Grid"]
