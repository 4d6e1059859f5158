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

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import count
from lightcache.errors import ConfigError
from lightcache.hybrid.saving import Grid, Tokens

# ---- Workloads, and what of them would be reused: the distances that say how much room a hit
# takes.
#
# A page, or a state, is still there when it is asked for if fewer others were used since it was
# used last than there is room for. So one pass over a trace says for every size at once what
# would hit (Mattson's stack distances, 1970), and no size has to be tried.

Path = Tokens  # a prompt's whole pages, one number for each; equal numbers: the same prefix


@dataclass(frozen=True)
class Workload:
    """Conversations of several turns, so many at a time, one after another."""

    prompt_tokens: int
    """Of a conversation's first prompt, with what it shares."""
    shared_tokens: int = 0
    """Of these, the same in all conversations: a system prompt."""
    turns: int = 1
    turn_tokens: int = 512
    """By which each turn's prompt is longer: the answer before, and the next question."""
    branching: int = 1
    """Conversations that have the same first prompt, and part behind it."""
    conversations: int = 1
    """At a time; the next turn of each comes in any order."""
    rounds: int = 3
    """How many conversations follow one another in each place."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a figure out of range.
        """
        most = 1 << 30
        count(self.prompt_tokens, "prompt_tokens", 1, most)
        count(self.shared_tokens, "shared_tokens", 0, self.prompt_tokens)
        count(self.turn_tokens, "turn_tokens", 0, most)
        for name in ("turns", "branching", "conversations", "rounds"):
            count(getattr(self, name), name, 1, 1 << 20)

    def trace(self, page_tokens: int, seed: int = 0) -> list[Path]:
        """The prompts in their order: for each its whole pages. The same for the same seed."""
        chance = random.Random(seed)
        waiting = iter(range(self.conversations * self.rounds))
        live = [[next(waiting), 0] for _ in range(self.conversations)]
        found = []
        while live:
            chance.shuffle(live)
            for one in live:
                found.append(self._path(one[0], one[1], page_tokens))
                one[1] += 1
                if one[1] == self.turns:
                    one[:] = [next(waiting, -1), 0]
            live = [one for one in live if one[0] >= 0]
        return found

    def _path(self, conversation: int, turn: int, page_tokens: int) -> Path:
        """A page is its number, and whose it is: everybody's, a group's, or a conversation's."""
        pages = np.arange((self.prompt_tokens + turn * self.turn_tokens) // page_tokens)
        ends = (pages + 1) * page_tokens
        group = 1 + 2 * (conversation // self.branching)
        owner = np.where(ends <= self.prompt_tokens, group, 2 + 2 * conversation)
        return np.where(ends <= self.shared_tokens, 0, owner) * (1 << 32) + pages


def paths_of(prompts: Sequence[npt.NDArray[Any]]) -> list[Path]:
    """A trace of prompts as page keys: uint64 of shape (n, 2), as `hash_pages` makes them, or one
    integer for each page.

    Raises:
        ConfigError: something else.
    """
    arrays = [np.asarray(prompt) for prompt in prompts]
    for row, keys in enumerate(arrays):
        if keys.dtype.kind not in "iu" or keys.shape not in ((len(keys),), (len(keys), 2)):
            raise ConfigError(
                f"trace: expected page keys of shape (n, 2), found {keys.dtype} {keys.shape} for "
                f"prompt {row}"
            )
    wide = [keys if keys.ndim == 2 else np.stack([keys, keys], axis=1) for keys in arrays]
    if not wide:
        return []
    every = np.concatenate(wide).astype(np.uint64)
    ids = np.unique(every, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return np.split(ids, np.cumsum([len(keys) for keys in wide])[:-1])


class _Recent:
    """What was used, in the order of its last use, by weight (a Fenwick tree over time)."""

    def __init__(self, uses: int) -> None:
        self._tree = [0] * (uses + 1)
        self._last: dict[int, tuple[int, int]] = {}
        self._now = self._total = 0

    def __contains__(self, thing: int) -> bool:
        return thing in self._last

    def newer(self, thing: int) -> int:
        """Weight of all that was used after it."""
        at, found = self._last[thing][0], 0
        while at:
            found += self._tree[at]
            at &= at - 1
        return self._total - found

    def use(self, thing: int, weight: int = 1) -> None:
        old = self._last.get(thing)
        if old is not None:
            self._add(old[0], -old[1])
        self._now += 1
        self._last[thing] = self._now, weight
        self._add(self._now, weight)

    def _add(self, at: int, weight: int) -> None:
        self._total += weight
        while at < len(self._tree):
            self._tree[at] += weight
            at += at & -at


@dataclass(frozen=True, eq=False)
class Reuse:
    """What a trace reuses, and how much room each hit takes. Positions are in pages."""

    paths: list[list[int]]
    grid: int
    """States are saved at multiples of so many pages."""
    request: Tokens
    """Of each checkpoint that a request finds on its path, ascending."""
    position: Tokens
    """Where it is."""
    states: Tokens
    """It is there if there is room for so many states, about: in which order states are used is
    taken from a cache that never evicts one."""
    reach: Tokens
    """KV is there as far as it if there is room for so many pages."""
    row: Tokens
    """Of each run of pages that a request finds: which request."""
    newer: Tokens
    """Pages used since by others."""
    length: Tokens
    """Pages of the run."""

    def estimate(self, states: int, pages: int) -> int:
        """Pages that need not be computed, given so much room for each: at once, but not exact."""
        good = (self.states <= states) & (self.reach <= pages)
        rows, places = self.request[good].tolist(), self.position[good].tolist()
        return sum(dict(zip(rows, places, strict=True)).values())  # of each the last, the deepest

    def found(self, pages: float) -> Tokens:
        """Pages of each request whose KV is found, whether or not a state lets them be used."""
        depths = np.zeros(len(self.paths), np.int64)
        np.add.at(depths, self.row, np.clip(pages - self.newer, 0, self.length).astype(np.int64))
        return depths

    def replay(self, states: int, pages: float) -> int:
        """The same as `estimate`, from the states that a cache with this room really has."""
        held: dict[int, None] = {}  # the one used longest ago first
        total = 0
        for path, depth in zip(self.paths, self.found(pages).tolist(), strict=True):
            branching, last = (int(n) // self.grid for n in (depth, min(len(path), pages)))
            places = range(branching * self.grid, 0, -self.grid)
            hit = next((at for at in places if path[at - 1] in held), 0)
            total += hit
            for at in sorted({hit, branching * self.grid, last * self.grid}):
                if at >= max(hit, 1):
                    held.pop(path[at - 1], None)
                    held[path[at - 1]] = None
                    if len(held) > states:
                        del held[next(iter(held))]
        return total


def reuse_of(paths: Sequence[Path], grid: int) -> Reuse:
    """Run through a trace once.

    Args:
        grid: states are saved at multiples of so many pages.
    """
    runs, rows = _runs(paths), [path.tolist() for path in paths]
    kv, saved = _Recent(sum(len(each) for each in runs)), _Recent(3 * len(paths))
    entries: list[tuple[int, int, int, int]] = []
    found: list[tuple[int, int, int]] = []
    for row, path in enumerate(rows):
        depth, deepest = 0, 0
        reach: list[int] = []  # room that each page found takes
        for begin, end in runs[row]:
            if path[begin] not in kv:
                break
            newer, depth = kv.newer(path[begin]), end
            reach += range(newer + 1, newer + end - begin + 1)
            found.append((row, newer, end - begin))
        for at in range(grid, depth + 1, grid):
            if path[at - 1] in saved:
                deepest = at
                entries.append((row, at, saved.newer(path[at - 1]) + 1, reach[at - 1]))
        # What was used, the branching point, and the prompt's last position.
        for at in sorted({deepest, depth // grid * grid, len(path) // grid * grid}):
            if at >= max(deepest, 1):
                saved.use(path[at - 1])
        for begin, end in reversed(runs[row]):  # the first page of all is the one used last
            kv.use(path[begin], end - begin)
    checkpoints = np.array(entries, np.int64).reshape(-1, 4).T
    return Reuse(rows, grid, *checkpoints, *np.array(found, np.int64).reshape(-1, 3).T)


def _runs(paths: Sequence[Path]) -> list[list[tuple[int, int]]]:
    """Pages [begin, end) of each path that the same requests have, and so are used together.

    Who has a page has all before it: so the same requests have two neighbours if as many do.
    """
    every = np.concatenate([np.empty(0, np.int64), *paths])
    _, inverse, uses = np.unique(every, return_inverse=True, return_counts=True)
    shared, found, at = uses[inverse.reshape(-1)], [], 0
    for path in paths:
        cuts = (np.flatnonzero(np.diff(shared[at : at + len(path)])) + 1).tolist()
        bounds = [0, *cuts, len(path)] if len(path) else []
        found.append(list(pairwise(bounds)))
        at += len(path)
    return found


# ---- How much room states should have beside KV: a helper for whoever configures a tier.
#
#     split = best_split(40 << 30, state_bytes=77_000_000, page_bytes=1_500_000, page_tokens=64,
#                        load=Workload(prompt_tokens=8000, turns=6, conversations=200))
#     split.states, split.pages, split.hit_tokens
#
# A state is as large as thousands of tokens of KV, and each is useless without the other. Divide
# by guess, and one side starves: with pages for hundreds of prompts and states for three, nothing
# hits.
#
# *What this assumes*, and so where it errs. Both sides evict what was used longest ago, states
# each on its own, KV from the end of a prefix; nothing is pinned or kept for good. Every prompt's
# whole pages are cached; an answer counts as part of the next prompt. A state is saved at each
# prompt's last position of the grid and at its branching point, not on the way and not while
# decoding. A match uses one checkpoint and refreshes only that. There is one tier. Requests that
# run hold nothing: take their slots off the budget before. The future is like the past.

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
        state_bytes: of a state; see `lightcache.hybrid.copiers`.
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


__all__ = [
    "Load",
    "Path",
    "Reuse",
    "Split",
    "Workload",
    "best_split",
    "check_split",
    "paths_of",
    "reuse_of",
]
