"""How much room states should have beside KV: a helper for whoever configures a tier.

    split = best_split(40 << 30, state_bytes=77_000_000, page_bytes=1_500_000, page_tokens=64,
                       load=Workload(prompt_tokens=8000, turns=6, conversations=200))
    split.states, split.pages, split.hit_tokens

A state is as large as thousands of tokens of KV, and each is useless without the other. Divide by
guess, and one side starves: with pages for hundreds of prompts and states for three, nothing hits.

*What this assumes*, and so where it errs. Both sides evict what was used longest ago, states each
on its own, KV from the end of a prefix; nothing is pinned or kept for good. Every prompt's whole
pages are cached; an answer counts as part of the next prompt. A state is saved at each prompt's
last position of the grid and at its branching point, not on the way and not while decoding. A match
uses one checkpoint and refreshes only that. There is one tier. Requests that run hold nothing: take
their slots off the budget before. The future is like the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import count
from lightcache.errors import ConfigError
from lightcache.hybrid.grids import Grid
from lightcache.hybrid.workloads import Reuse, Workload, paths_of, reuse_of

Load = Workload | Sequence[npt.NDArray[Any]] | Reuse

_MOST = 1 << 62
_ESTIMATED = 1000  # splits; each is one look at all checkpoints that requests found
_REPLAYED = 50  # of these the best; each runs through the trace
_STARVED = 0.9  # of the hits of the best split


@dataclass(frozen=True)
class Split:
    """A division of some bytes, and what it is expected to bring for a whole trace."""

    states: int
    pages: int
    hit_tokens: int
    """That need not be computed: both a state and the KV before it are there."""
    kv_tokens: int
    """Whose KV is found, with a state or without."""
    state_tokens: int
    """That would be hit if all KV were there. Seldom fewer than `hit_tokens`: more branching points
    are found then, and the states saved there take room."""
    prompt_tokens: int
    """Of all prompts, as far as they fill pages."""
    warnings: tuple[str, ...] = ()
    """Which side starves, and the numbers to use instead."""


def best_split(
    budget: int,
    *,
    state_bytes: int,
    page_bytes: int,
    page_tokens: int,
    load: Load,
    grid: Grid | None = None,
) -> Split:
    """The split of a budget with the most hits. Takes seconds for a trace of a million pages.

    Args:
        budget: bytes of a tier, for both.
        state_bytes: of a state; see `lightcache.hybrid.parts`.
        page_bytes, page_tokens: of a page of KV.
        load: a workload; or a trace: for each prompt its page keys, in the order of arrival; or
            what `reuse_of` found in one, which is most of the time, for many budgets.
        grid: at which states are saved; by default that of pages of this size.

    Raises:
        ConfigError: figures out of range, a grid that pages do not fit, or not that of `load`.
    """
    sizes = _Sizes(state_bytes, page_bytes, page_tokens)
    count(budget, "budget", 1, _MOST)
    return sizes.best(budget, sizes.reuse(load, grid))


def check_split(
    states: int,
    pages: int,
    *,
    state_bytes: int,
    page_bytes: int,
    page_tokens: int,
    load: Load,
    grid: Grid | None = None,
) -> Split:
    """What a given split brings, with a warning if another one of as many bytes brings much more.

    Raises:
        ConfigError: as `best_split`.
    """
    sizes = _Sizes(state_bytes, page_bytes, page_tokens)
    count(states, "states", 0, 1 << 40)
    count(pages, "pages", 0, 1 << 40)
    reuse = sizes.reuse(load, grid)
    given = sizes.split(states, pages, reuse)
    budget = states * state_bytes + pages * page_bytes
    best = sizes.best(budget, reuse)
    if given.hit_tokens >= _STARVED * best.hit_tokens:
        return given
    few_states = reuse.replay(1 << 40, pages) >= reuse.replay(states, float("inf"))
    few, many = f"{states} states", f"{pages} pages of KV"
    if not few_states:
        few, many = many, few
    text = (
        f"{few} starve {many}: {given.hit_tokens} of {given.prompt_tokens} tokens would be hit; "
        f"{best.states} states and {best.pages} pages, in as many bytes, hit {best.hit_tokens}"
    )
    return replace(given, warnings=(text,))


@dataclass(frozen=True)
class _Sizes:
    """Of both sides."""

    state: int
    page: int
    tokens: int

    def __post_init__(self) -> None:
        count(self.state, "state_bytes", 1, _MOST)
        count(self.page, "page_bytes", 1, _MOST)
        count(self.tokens, "page_tokens", 1, 1 << 20)

    def reuse(self, load: Load, grid: Grid | None) -> Reuse:
        grid = grid or Grid(self.tokens, self.tokens)
        if grid.grid % self.tokens:
            raise ConfigError(
                f"grid: expected a multiple of pages of {self.tokens} tokens, found {grid.grid}"
            )
        if isinstance(load, Reuse):
            if load.grid * self.tokens != grid.grid:
                raise ConfigError(
                    f"load: expected one for a grid of {grid.grid} tokens, found "
                    f"{load.grid * self.tokens}"
                )
            return load
        paths = load.trace(self.tokens) if isinstance(load, Workload) else paths_of(load)
        return reuse_of(paths, grid.grid // self.tokens)

    def split(self, states: int, pages: int, reuse: Reuse) -> Split:
        kv = int(reuse.found(pages).sum()) * self.tokens
        hit, state = (reuse.replay(states, n) * self.tokens for n in (pages, float("inf")))
        return Split(states, pages, hit, kv, state, sum(map(len, reuse.paths)) * self.tokens)

    def best(self, budget: int, reuse: Reuse) -> Split:
        """Hits change only where one more state, or one more page, lets a checkpoint be used."""
        most = budget // self.state
        edges = np.concatenate([reuse.states, (budget - reuse.reach * self.page) // self.state])
        tried = np.unique(np.clip(np.append(edges, (0, most)), 0, most))
        tried = tried[np.linspace(0, len(tried) - 1, min(len(tried), _ESTIMATED)).astype(np.int64)]
        rooms = [(n, (budget - n * self.state) // self.page) for n in tried.tolist()]
        order = np.argsort([-reuse.estimate(*room) for room in rooms], kind="stable")
        rooms = sorted(rooms[row] for row in order[:_REPLAYED])
        hits = np.array([reuse.replay(*room) for room in rooms])
        # Of several that are as good, the one in the middle: no side is near its edge.
        good = np.flatnonzero(hits == hits.max())
        states, pages = rooms[good[len(good) // 2]]
        return self.split(states, pages, reuse)


__all__ = ["Load", "Split", "best_split", "check_split"]
