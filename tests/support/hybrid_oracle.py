"""What must be usable of each prompt, by the rules alone, where there is room for everything."""

from __future__ import annotations

from typing import NamedTuple

from lightcache.hybrid import Grid

Ids = tuple[int, ...]


class Wanted(NamedTuple):
    """Of a prompt that comes now, in tokens."""

    kv: int
    usable: int
    branching: int | None


class Oracle:
    """It is told of each request that has ended, and keeps sets of prefixes."""

    def __init__(self, grid: Grid, *, ahead: bool) -> None:
        """Nothing was served."""
        self.grid, self.ahead = grid, ahead
        self.computed: list[Ids] = []
        """Tokens whose KV was committed, of each request."""
        self.states: set[Ids] = set()

    def wanted(self, prompt: Ids) -> Wanted:
        """Every position is tried."""
        grid, kv = self.grid, 0
        for one in self.computed:
            shared = common(one, prompt[:-1])
            for size in (grid.block_tokens, grid.page_tokens):
                kv = max(kv, shared // size * size)
        usable = max((n for n in range(kv + 1) if prompt[:n] in self.states), default=0)
        branching = kv // grid.grid * grid.grid
        return Wanted(kv, usable, branching if branching > usable else None)

    def served(self, every: Ids, prompt: int) -> None:
        """A request of so many tokens has ended behind `every`, whose last token's KV was not
        computed."""
        grid, wanted, end = self.grid, self.wanted(every[:prompt]), len(every) - 1
        saved = {wanted.branching or 0, prompt // grid.grid * grid.grid}
        self.states |= {every[:n] for n in saved if n > wanted.usable}
        decoded = end // grid.interval * grid.interval
        last = 0 if self.ahead or end % grid.grid else end  # the working slot's
        newest = max(decoded if decoded > prompt else 0, last)
        if newest > wanted.usable:
            self.states.add(every[:newest])
        self.computed.append(every[:end])


def common(one: Ids, other: Ids) -> int:
    """Tokens with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


__all__ = ["Oracle", "Wanted"]
