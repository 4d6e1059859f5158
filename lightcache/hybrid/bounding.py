"""The bound on checkpoints of one path: the shallowest go, but no forks."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError
from lightcache.hybrid.spaces import Path, Tier
from lightcache.hybrid.statistics import Counts
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.reservations import Positions

_PARTED = 1 << 12  # forks that are remembered


class PathBound:
    """With more than so many on a path the shallowest go, but no forks, not the deepest, and none
    in use; the one that was added goes last. Whoever adds one enforces it, as far as it knows the
    path: what hangs on the new one by other keys is seen by whoever adds one there."""

    def __init__(self, most: int | None, counts: Counts) -> None:
        """No fork is known.

        Args:
            most: on one path of either tier; None: no bound.

        Raises:
            ConfigError: `most` is below 1.
        """
        self._most = None if most is None else _arguments.count(most, "most", 1, 1 << 20)
        self._counts = counts
        self._parted: OrderedDict[bytes, None] = OrderedDict()
        """Keys at which prompts part."""

    def parts(self, key: Keys) -> None:
        """Prompts part there, though nothing hangs on it yet."""
        self._parted[key.tobytes()] = None
        if len(self._parted) > _PARTED:
            self._parted.popitem(last=False)

    def enforce(self, index: PageIndex, path: Path, tier: Tier, count: int) -> None:
        """One was added at the last of the first `count` positions of a path, which may go on."""
        if self._most is not None:
            with contextlib.suppress(LightcacheError):  # then whoever adds the next one looks
                self._enforce(index, path, tier, count, self._most)

    def _enforce(self, index: PageIndex, path: Path, tier: Tier, count: int, most: int) -> None:
        space, keys = path.space.of(tier), path.keys
        there = _standing(index, keys, space)
        excess = len(there) - most
        if excess <= 0:
            return
        forks = self._forks(index.children(keys[there], namespace=space), keys[there])
        others = zip(there[:-1].tolist(), forks, strict=False)
        for i, fork in sorted(others, key=lambda one: one[0] == count - 1):
            if excess and not fork and index.drop(keys[i : i + 1], namespace=space):
                self._counts.add(bounded=1)
                excess -= 1

    def _forks(self, children: Pages, keys: Keys) -> list[bool]:
        """Which of these are forks, or were: if what hangs on one has gone by the bound, prompts
        still part there, and nothing but this tells."""
        found = []
        for count, key in zip(children.tolist(), keys, strict=True):
            if count > 1:
                self.parts(key)
            found.append(key.tobytes() in self._parted)
        return found


def _standing(index: PageIndex, keys: Keys, space: Namespace | None) -> Positions:
    """Where checkpoints stand on a path, the shallowest first: few among thousands of keys, so
    `deepest` goes from one to the next, 5 ns a key in all."""
    found, behind = [], len(keys)
    while behind := index.deepest(keys[:behind], namespace=space):
        behind -= 1
        found.append(behind)
    return np.array(found[::-1], np.int64)


__all__ = ["PathBound"]
