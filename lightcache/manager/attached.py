"""AttachedDevice: the mirror of blocks that an engine allocates and evicts itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, Offsets, Pages
from lightcache.errors import ConfigError
from lightcache.layout import KeyStatus
from lightcache.manager.device import DeviceTier
from lightcache.manager.lookups import peeked
from lightcache.manager.statistics import Room
from lightcache.namespaces import Namespace


class AttachedDevice(DeviceTier):
    """The engine reports which blocks hold what, and which it has evicted or overwritten.

    Every block belongs to this process, named or not, so nobody ever evicts one here. An engine may
    have a content in several blocks: one of them has the name, the others inherit it.
    """

    owned = False

    def _began(self) -> None:
        assert self.index is not None
        self.index.allocate(self.index.pages).detach()  # all of them: 0 to pages - 1
        self._named: npt.NDArray[np.int32] = np.full(self.index.pages, -1, np.int32)
        """Of each block, the namespace's number that it is named in; -1: none."""
        self._doubles: dict[int, tuple[bytes, Namespace]] = {}
        """Blocks with the content of another that bears the name: their key."""
        self._heirs: dict[tuple[bytes, Namespace], list[int]] = {}
        """The same by key."""
        self._lives: npt.NDArray[np.int64] = np.zeros(self.index.pages, np.int64)
        """Of each block, how often its content has changed."""

    def room(self) -> Room:
        """See `DeviceTier`. Free are those without a name; the engine may use them."""
        if self.index is None:
            return Room(0, 0, 0)
        free = int((self._named < 0).sum()) - len(self._doubles)
        return Room(self.blocks, free, free)

    def named(self, blocks: Pages) -> Pages:
        """Those of these blocks that lookups find."""
        self._check(blocks)
        found: Pages = blocks[self._named[blocks] >= 0]
        return found

    def lives(self, blocks: Pages) -> npt.NDArray[np.int64]:
        """Of each block a number that is another as soon as it holds something else."""
        found: npt.NDArray[np.int64] = self._lives[blocks]
        return found

    def plan_many(
        self, ids: Sequence[Hashable], parts: list[Keys], space: Namespace, ttl: float
    ) -> list[int]:
        """Looks only: the engine itself keeps its blocks."""
        del ids, ttl
        assert self.index is not None
        return peeked(self.index, parts, space)

    def plan(self, request: Hashable, keys: Keys, space: Namespace, ttl: float) -> int:
        """Looks only, as `plan_many`."""
        del request, ttl
        assert self.index is not None
        return self.index.peek(keys, namespace=space)

    def take(self, request: Hashable) -> None:
        """Nothing is pinned here for requests."""

    def cancel(self, request: Hashable) -> None:
        """Nothing is pinned here for requests."""

    def name_many(
        self, blocks: Pages, keys: Keys, offsets: Offsets, starts: Any, space: Namespace
    ) -> tuple[Pages, Any]:
        """See `DeviceTier`. A block that had a name loses it."""
        assert self.index is not None
        self._check(blocks)
        self.evicted(blocks)
        return self._name(blocks, keys, offsets, starts, space)

    def _name(
        self, blocks: Pages, keys: Keys, offsets: Offsets, starts: Any, space: Namespace
    ) -> tuple[Pages, Any]:
        assert self.index is not None
        named = self.index.name_many(blocks, keys, offsets, starts, merge=False, namespace=space)
        self._named[blocks[named.status == KeyStatus.NEW]] = space.id
        present = np.flatnonzero(named.status == KeyStatus.PRESENT)
        if len(present):
            # The bearers of these names were pinned once more by this call.
            self.index.unpin(np.ascontiguousarray(named.pages[present]))
            where = _positions(offsets, starts)
            for at in present.tolist():
                entry = keys[where[at]].tobytes(), space
                self._doubles[int(blocks[at])] = entry
                self._heirs.setdefault(entry, []).append(int(blocks[at]))
        return blocks, named.status

    def evicted(self, blocks: Pages | Sequence[int]) -> int:
        """The engine has evicted or overwritten these blocks: nobody finds them any more. Returns
        how many had a name. Takes the lock.

        Raises:
            ConfigError: no such blocks.
        """
        numbers = np.ascontiguousarray(blocks, np.int32)
        if self.index is None or not len(numbers):
            return 0
        self._check(numbers)
        self._lives[numbers] += 1
        if self._doubles:
            for block in numbers.tolist():
                self._forget_double(block)
        named = np.unique(numbers[self._named[numbers] >= 0])
        if not len(named):
            return 0
        bequeathed = self._bequeathed(named)
        self.index.unname(named)
        self._named[named] = -1
        self._evicted["engine"] += len(named)
        for block, key, space in bequeathed:
            one = np.array([block], np.int32)
            self._name(one, key, np.array([0, 1]), np.zeros(1, np.int64), space)
        return len(named)

    def _clear(self, space: Namespace) -> None:
        """Names go first: what is cleared with its name would be doomed, and lost to the mirror."""
        if self.index is None:
            return
        for block in [block for block, (_, own) in self._doubles.items() if own == space]:
            self._forget_double(block)
        named = np.flatnonzero(self._named == space.id).astype(np.int32)
        if len(named):
            self.index.unname(named)
            self._named[named] = -1
            self._evicted["clear"] += len(named)
        self.index.clear(space)

    def _bequeathed(self, blocks: Pages) -> list[tuple[int, Keys, Namespace]]:
        """Who inherits the names of these blocks. Their place behind their prefix is not known any
        more; it matters to eviction only, and here nothing is evicted."""
        if not self._heirs or self.index is None:
            return []
        found = []
        spaces = {space.id: space for space in self._spaces.values()}
        for block, key in zip(blocks.tolist(), self.index.keys_of(blocks), strict=True):
            entry = key.tobytes(), spaces.get(int(self._named[block]))
            heirs = self._heirs.get(entry)  # type: ignore[arg-type]
            if heirs and entry[1] is not None:
                heir = heirs[0]
                self._forget_double(heir)
                found.append((heir, key.reshape(1, 2).copy(), entry[1]))
        return found

    def _forget_double(self, block: int) -> None:
        entry = self._doubles.pop(block, None)
        if entry is not None:
            heirs = self._heirs[entry]
            heirs.remove(block)
            if not heirs:
                del self._heirs[entry]

    def _check(self, blocks: Pages) -> None:
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.blocks:
            raise ConfigError(
                f"blocks: expected numbers of 0 to {self.blocks - 1}, found {int(blocks.min())} to "
                f"{int(blocks.max())}; `set_blocks` says how many there are"
            )


def _positions(offsets: Offsets, starts: Any) -> npt.NDArray[np.int64]:
    """Of each block to be named, the position of its key."""
    parts = [np.arange(offsets[i] + starts[i], offsets[i + 1]) for i in range(len(offsets) - 1)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


__all__ = ["AttachedDevice"]
