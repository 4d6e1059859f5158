"""The arguments of `plan_many`, checked, and keys gathered for the core."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Keys, Offsets
from lightcache._plan_book import Asked
from lightcache.attached import MAX_PAGES
from lightcache.errors import ConfigError

_KEY = np.dtype("V16")


@dataclass
class Queue:
    """A queue: request i asks for keys[begins[i]:ends[i]]."""

    ids: list[Hashable]
    keys: Keys
    bounds: Offsets
    """As they were given."""
    begins: Offsets
    ends: Offsets
    asked: list[Asked]
    limited: bool
    """Whether there may be keys behind `ends[i]` that are not asked for."""

    def keys_of(self, i: int) -> Keys:
        """Request i's, copied: a plan must not keep the keys of a whole queue alive."""
        found: Keys = self.keys[self.begins[i] : self.ends[i]].copy()
        return found

    def part(self, which: list[int]) -> tuple[Keys, Offsets]:
        """The keys of some requests, one behind the other, and their offsets."""
        if len(which) == len(self.ids) and not self.limited and which == sorted(which):
            return self.keys, self.bounds
        return gathered(self.keys, self.begins[which], self.ends[which])


def queue_of(
    ids: Sequence[Hashable], keys: Keys, offsets: Offsets, limit: int | None, ref: int
) -> Queue:
    """Check what `plan_many` was given; `ref` names the namespace.

    Raises:
        ConfigError: see there.
    """
    n = _arguments.keys(keys)[1]
    bounds = _arguments.offsets(offsets, n)
    begins, ends = bounds[:-1], bounds[1:]
    if limit is not None:
        ends = np.minimum(ends, begins + _arguments.count(limit, "limit", 0, MAX_PAGES))
    names = list(ids)
    if len(names) != len(begins):
        raise ConfigError(
            f"ids: expected one for each of {len(begins)} requests, found {len(names)}"
        )
    try:
        twice = len(set(names)) != len(names)
    except TypeError as error:
        raise ConfigError(f"ids: expected hashable ones: {error}") from None
    if twice:
        raise ConfigError("ids: one of them is named twice; a request has one plan")
    counts = (ends - begins).tolist()
    # A record of 16 bytes becomes one `bytes`, at a third of what a list of two integers costs. A
    # request without keys gets somebody's: it may count as changed, and is matched in no time.
    lasts = keys[ends - 1].view(_KEY).ravel().tolist() if n else [b""] * len(names)
    asked = list(zip(counts, lasts, itertools.repeat(ref)))
    return Queue(names, keys, bounds, begins, ends, asked, limit is not None)


def gathered(keys: Keys, begins: Offsets, ends: Offsets) -> tuple[Keys, Offsets]:
    """Runs of keys one behind the other, as the core takes them, and their offsets."""
    sizes = ends - begins
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    rows = np.arange(bounds[-1]) + np.repeat(begins - bounds[:-1], sizes)
    return keys[rows], bounds


def seconds_of(timeout: Any) -> float:
    """A time limit.

    Raises:
        ConfigError: not a number of seconds, or below 0.
    """
    if type(timeout) is float and timeout >= 0:
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ConfigError(f"timeout: expected seconds, at least 0, found {timeout!r}")
    return float(timeout)


__all__ = ["Queue", "gathered", "queue_of", "seconds_of"]
