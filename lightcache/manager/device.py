"""The device tier: which of an engine's KV blocks hold which prefix.

It is a `PageIndex` whose pages are block numbers. Routers read it from any process. Two kinds:

- `AttachedDevice`: the engine allocates and evicts its blocks, and says what it did. The index is a
  mirror: every block belongs to this process, named or not, and nothing is ever evicted by us.
- `OwnedDevice`: we allocate and evict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Keys, Offsets, Pages
from lightcache.attached import MAX_PAGES
from lightcache.errors import InUse
from lightcache.leases import Lease
from lightcache.manager.statistics import Room
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.shm import Segment

NONE: Pages = np.zeros(0, np.int32)


class DeviceTier:
    """What `AttachedDevice` and `OwnedDevice` have in common."""

    owned: bool

    def __init__(
        self,
        name: str,
        *,
        block_tokens: int,
        blocks: int | None = None,
        role: str = "scheduler",
        lock_timeout: float = 1.0,
    ) -> None:
        """Makes the index if the number of blocks is known.

        Args:
            name: of the index in shared memory; one for each data-parallel rank.
            block_tokens: of a device block.
            blocks: how many there are; None: said later, by `set_blocks`.
            role: of this process.
            lock_timeout: seconds; nobody but tools takes this lock beside us.
        """
        self.name = name
        self.block_tokens = _arguments.count(block_tokens, "block_tokens", 1, 1 << 20)
        self._role, self._lock_timeout = role, lock_timeout
        self._evicted: Counter[str] = Counter()
        self.index: PageIndex | None = None
        """None until the number of blocks is known: then nothing is found on the device."""
        self._spaces: dict[tuple[str, str], Namespace] = {}
        if blocks is not None:
            self.set_blocks(blocks)

    @property
    def blocks(self) -> int:
        """Device blocks; 0 while that is not known."""
        return self.index.pages if self.index is not None else 0

    def set_blocks(self, blocks: int) -> None:
        """The engine has found out how many blocks fit, or has changed it: the index begins empty.
        One that a dead process has left is removed: what its blocks held went with it. A router
        that still looks into that finds it retired.

        Raises:
            ConfigError: not 1 to 40 million.
            InUse: another process lives in an index of that name.
        """
        _arguments.count(blocks, "blocks", 1, MAX_PAGES)  # before the old one is gone
        self.close()
        try:
            self.index = self._create(blocks)
        except InUse:
            remove_orphan(self.name)
            self.index = self._create(blocks)
        self._began()

    def _create(self, blocks: int) -> PageIndex:
        return PageIndex.create(
            self.name,
            pages=blocks,
            role=self._role,
            config={"block_tokens": self.block_tokens},
            lock_timeout=self._lock_timeout,
        )

    def _began(self) -> None:
        """A new, empty index."""

    def space(self, weights: str, tenant: str) -> Namespace:
        """The namespace here for a weights version and a tenant."""
        assert self.index is not None
        found = self._spaces.get((weights, tenant))
        if found is None:
            found = self._spaces[weights, tenant] = self.index.namespace(weights, tenant)
        return found

    def clear_weights(self, weights: str) -> None:
        """Forget a version: nothing of it is found or accepted any more."""
        for known, tenant in list(self._spaces):
            if known == weights:
                self.clear_tenant(weights, tenant)

    def clear_tenant(self, weights: str, tenant: str) -> None:
        """The same for one of its tenants."""
        space = self._spaces.get((weights, tenant))
        if space is not None:
            self._clear(space)
            del self._spaces[weights, tenant]  # behind it: what failed is cleared again

    def _clear(self, space: Namespace) -> None:
        if self.index is not None:
            self.index.clear(space)

    def take_evicted(self) -> Counter[str]:
        """Blocks that went since this was asked last, by cause: "room", "drop", "clear", and
        "engine" where that evicts. Those that were demoted are not among them."""
        self._count_evicted()
        found, self._evicted = self._evicted, Counter()
        return found

    def _count_evicted(self) -> None:
        """Whoever else counts gives it away now."""

    def room(self) -> Room:
        """Blocks that there are, that are free, and that could be had."""
        return room_of(self.index)

    def close(self) -> None:
        """Leave the index; it ends with its last client."""
        if self.index is not None:
            self._count_evicted()
            self.index.close()
            self.index = None
            self._spaces.clear()

    # ---- what a manager asks of either kind

    def plan_many(
        self, ids: Sequence[Hashable], parts: list[Keys], space: Namespace, ttl: float
    ) -> list[int]:
        """Blocks of the longest prefix of each request, which asks for one part of the keys."""
        raise NotImplementedError

    def plan(self, request: Hashable, keys: Keys, space: Namespace, ttl: float) -> int:
        """The same for one request."""
        raise NotImplementedError

    def take(self, request: Hashable) -> Lease | None:
        """What was planned; None: nothing is pinned for requests here."""
        raise NotImplementedError

    def cancel(self, request: Hashable) -> None:
        """Nothing is wanted of a plan any more."""
        raise NotImplementedError

    def name_many(
        self, blocks: Pages, keys: Keys, offsets: Offsets, starts: Any, space: Namespace
    ) -> tuple[Pages, Any]:
        """Say that blocks hold the KV of these keys; see `PageIndex.name_many`. Returns the block
        that stands for each key, and a status for each."""
        raise NotImplementedError


def remove_orphan(name: str) -> None:
    """Remove an index without a living client, whoever reads in it.

    Raises:
        InUse: it has one.
    """
    try:
        Segment.unlink(name)
    except InUse:
        with PageIndex.attach(name, readonly=True) as left:
            if any(client.alive for client in left.clients()):
                raise
        Segment.unlink(name, force=True)


def room_of(index: PageIndex | None) -> Room:
    """Room in an index; none if there is none. No lock; when little of it is free, some 20 times 1
    to 2 ns a page."""
    if index is None:
        return Room(0, 0, 0)
    least, most = 0, index.pages
    while least < most:
        middle = (least + most + 1) // 2
        if index.can_allocate(middle):
            least = middle
        else:
            most = middle - 1
    return Room(index.pages, index.stats().free, least)


__all__ = ["NONE", "DeviceTier", "remove_orphan", "room_of"]
