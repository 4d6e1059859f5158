"""The device tier: which of an engine's KV blocks hold which prefix.

It is a `PageIndex` whose pages are block numbers. Routers read it from any process. Two kinds:

- `MirroredBlocks`: the engine allocates and evicts its blocks, and reports it. The index is a
  mirror: every block belongs to this process, named or not, and we never evict one.
- `ManagedBlocks`: we allocate and evict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import _arguments
from lightcache._arguments import Keys, Offsets, Pages
from lightcache._together import together
from lightcache.errors import ConfigError, InUse, OutOfPages
from lightcache.layout import MAX_PAGES, Cause, HeldProgress, KeyStatus
from lightcache.leases import Allocation, Lease, NamingResult
from lightcache.manager.stats import TierCapacity
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.shm import Segment

NONE: Pages = np.zeros(0, np.int32)
NO_KEYS: Keys = np.zeros((0, 2), np.uint64)


class DeviceTier:
    """Base of `MirroredBlocks` and `ManagedBlocks`."""

    owned: bool
    independent = False
    """Whether a block may be evicted before those that hang on it."""

    def __init__(
        self,
        name: str,
        *,
        block_tokens: int,
        blocks: int | None = None,
        eviction: str | None = None,
        role: str = "scheduler",
        lock_timeout: float = 1.0,
    ) -> None:
        """Creates the index if the number of blocks is known.

        Args:
            name: name of the index in shared memory; one for each data-parallel rank.
            block_tokens: tokens of a device block.
            blocks: number of device blocks; None: given later, by `set_blocks`.
            eviction: the order in which blocks go; None: see `PageIndex.create`.
            role: role of this process.
            lock_timeout: seconds; besides this process only tools take this lock.
        """
        self.name, self._order = name, eviction
        self.block_tokens = _arguments.count(block_tokens, "block_tokens", 1, 1 << 20)
        self._role, self._lock_timeout = role, lock_timeout
        self._evicted: Counter[str] = Counter()
        self.index: PageIndex | None = None
        """None until the number of blocks is known: until then nothing is found on the device."""
        self._spaces: dict[tuple[str, str], Namespace] = {}
        if blocks is not None:
            self.set_blocks(blocks)

    @property
    def blocks(self) -> int:
        """Number of device blocks; 0: not known yet."""
        return self.index.pages if self.index is not None else 0

    def set_blocks(self, blocks: int) -> None:
        """Set the number of blocks, once the engine knows it or has changed it. The index begins
        empty. An index that a dead process left is removed, since its blocks' content is lost; a
        router that still reads it finds it retired.

        Raises:
            ConfigError: not 1 to 40 million.
            InUse: another live process has an index of that name.
        """
        _arguments.count(blocks, "blocks", 1, MAX_PAGES)  # before the old index is closed
        self.close()
        self.index = create_index(
            self.name,
            pages=blocks,
            role=self._role,
            config={"block_tokens": self.block_tokens},
            independent=self.independent,
            eviction=self._order,
            lock_timeout=self._lock_timeout,
        )
        self._began()

    def _began(self) -> None:
        """Called with a new, empty index."""

    def space(self, weights: str, tenant: str) -> Namespace:
        """The device's namespace of a weights version and a tenant."""
        assert self.index is not None
        namespace = self._spaces.get((weights, tenant))
        if namespace is None:
            namespace = self._spaces[weights, tenant] = self.index.namespace(weights, tenant)
        return namespace

    def clear_weights(self, weights: str) -> None:
        """Clear a version: nothing of it is found or accepted any more."""
        for known, tenant in list(self._spaces):
            if known == weights:
                self.clear_tenant(weights, tenant)

    def clear_tenant(self, weights: str, tenant: str) -> None:
        """Clear one tenant of a version."""
        space = self._spaces.get((weights, tenant))
        if space is not None:
            self._clear(space)
            del self._spaces[weights, tenant]  # afterwards: after an error it is cleared again

    def _clear(self, space: Namespace) -> None:
        if self.index is not None:
            self.index.clear(space)

    def take_evicted(self) -> Counter[str]:
        """Blocks evicted since the last call, by cause: "room", "drop", "clear", and "engine" if
        the engine evicts. Without demoted blocks."""
        self._count_evicted()
        evicted, self._evicted = self._evicted, Counter()
        return evicted

    def _count_evicted(self) -> None:
        """Add what the index has counted to `_evicted`."""

    def room(self) -> TierCapacity:
        """Number of blocks in all, free, and available."""
        return capacity_of(self.index)

    def close(self) -> None:
        """Leave the index; its last client removes it."""
        if self.index is not None:
            self._count_evicted()
            self.index.close()
            self.index = None
            self._spaces.clear()

    def name_many(
        self,
        blocks: Pages,
        keys: Keys,
        offsets: Offsets,
        starts: Any,
        space: Namespace,
        into: NamingResult,
    ) -> None:
        """Name blocks that hold the KV of these keys; see `PageIndex.name_many`. The outcome of
        each is in `into`, also after an error or an interrupt."""
        raise NotImplementedError


def numbers_of(blocks: Any) -> Pages:
    """Block numbers of any sequence as an array; negative ones pass.

    Raises:
        ConfigError: no integers.
    """
    try:
        numbers = np.asarray(blocks)
    except ValueError as error:
        raise ConfigError(f"blocks: expected block numbers: {error}") from None
    if numbers.size and numbers.dtype.kind not in "iu":
        raise ConfigError(f"blocks: expected block numbers, found {numbers.dtype} {numbers.shape}")
    return np.ascontiguousarray(numbers, np.int32)


def create_index(name: str, **how: Any) -> PageIndex:
    """`PageIndex.create` for what is on a device. An index that a dead process left is removed,
    since the content of its pages is lost.

    Raises:
        InUse: another live process has an index of that name.
    """
    try:
        return PageIndex.create(name, **how)
    except InUse:
        _remove_orphan(name)
        return PageIndex.create(name, **how)


def _remove_orphan(name: str) -> None:
    """Remove an index that has no live client, even if a process reads it.

    Raises:
        InUse: it has a live client.
    """
    try:
        Segment.unlink(name)
    except InUse:
        with PageIndex.attach(name, readonly=True) as left:
            if any(client.alive for client in left.clients()):
                raise
        Segment.unlink(name, force=True)


def capacity_of(index: PageIndex | None) -> TierCapacity:
    """Capacity of an index; zeros for None. Takes no lock; when few pages are free, costs about 20
    times 1 to 2 ns a page."""
    if index is None:
        return TierCapacity(0, 0, 0)
    least, most = 0, index.pages
    while least < most:
        middle = (least + most + 1) // 2
        if index.can_allocate(middle):
            least = middle
        else:
            most = middle - 1
    return TierCapacity(index.pages, index.stats().free, least)


# ---- MirroredBlocks

Heir = tuple[int, Keys, Namespace]
"""A block that inherits the name of another block, with the key and the namespace."""
NamingKeys = tuple[Keys, Offsets, Any]
"""Keys, offsets and starts, as `PageIndex.name_many` takes them."""


@dataclass(eq=False)
class _MirrorNaming:
    """Mirrored blocks that the index is naming. It fills `named` in the same call."""

    named: NamingResult
    blocks: Pages
    own: Keys
    space: Namespace
    pins: Lease | None = None
    """Pins of other blocks that have the names already."""


@dataclass(frozen=True, eq=False)
class _Unnaming:
    """Blocks that lose their names. The index fills `progress` in the same call."""

    blocks: Pages
    heirs: list[Heir]
    cause: str
    progress: HeldProgress


class MirroredBlocks(DeviceTier):
    """Blocks of an engine that reports their content, and which it has evicted or overwritten.

    Every block belongs to this process, named or not, so the index never evicts one. An engine may
    have the same content in several blocks: one of them has the name, the others inherit it.
    """

    owned = False

    def _began(self) -> None:
        assert self.index is not None
        self._naming: _MirrorNaming | None = None
        self._unnaming: _Unnaming | None = None
        self._named: npt.NDArray[np.int32] = np.full(self.index.pages, -1, np.int32)
        """For each block, the number of the namespace in which it has a name; -1: no name."""
        self._doubles: dict[int, tuple[bytes, Namespace]] = {}
        """Key of each block whose content another block has under that name."""
        self._heirs: dict[tuple[bytes, Namespace], dict[int, None]] = {}
        """The same blocks, by key."""
        self._lives: npt.NDArray[np.int64] = np.zeros(self.index.pages, np.int64)
        """For each block, how often its content has changed."""
        self.index.allocate(self.index.pages).detach()  # all of them: 0 to pages - 1

    def room(self) -> TierCapacity:
        """See `DeviceTier`. Blocks without a name count as free; the engine may use them."""
        if self.index is None:
            return TierCapacity(0, 0, 0)
        self._settle()
        free = int((self._named < 0).sum()) - len(self._doubles)
        return TierCapacity(self.blocks, free, free)

    def named(self, blocks: Pages) -> Pages:
        """Those of these blocks that have a name."""
        self._check(blocks)
        self._settle()
        named: Pages = blocks[self._named[blocks] >= 0]
        return named

    def lives(self, blocks: Pages) -> npt.NDArray[np.int64]:
        """For each block a number that changes with its content."""
        lives: npt.NDArray[np.int64] = self._lives[blocks]
        return lives

    def name_many(
        self,
        blocks: Pages,
        keys: Keys,
        offsets: Offsets,
        starts: Any,
        space: Namespace,
        into: NamingResult,
    ) -> None:
        """See `DeviceTier`. A block that had a name loses it."""
        self._check(blocks)
        self.evicted(blocks)
        self._name(blocks, keys[_positions(offsets, starts)], (keys, offsets, starts), space, into)

    def _name(
        self,
        blocks: Pages,
        own: Keys,
        chain: NamingKeys,
        space: Namespace,
        into: NamingResult | None = None,
    ) -> None:
        """Args:
        own: the key of each block.
        chain: what `PageIndex.name_many` takes.
        """
        assert self.index is not None
        keys, offsets, starts = chain
        named = NamingResult(len(blocks)) if into is None else into
        self._naming = _MirrorNaming(named, blocks, own, space)  # noted before the index changes
        try:
            self.index.name_many(
                blocks, keys, offsets, starts, merge=False, namespace=space, into=named
            )
        finally:
            self._settle()

    def evicted(self, blocks: Pages | Sequence[int]) -> int:
        """Take the names of blocks that the engine has evicted or overwritten. Returns how many had
        a name. Takes the lock.

        Raises:
            ConfigError: no such blocks.
        """
        numbers = np.ascontiguousarray(blocks, np.int32)
        if self.index is None or not len(numbers):
            return 0
        self._check(numbers)
        self._settle()
        self._lives[numbers] += 1
        if self._doubles:
            for block in numbers.tolist():
                self._forget_double(block)
        named = np.unique(numbers[self._named[numbers] >= 0])
        if len(named):
            self._unname(named, self._bequeathed(named), "engine")
        return len(named)

    def _unname(self, blocks: Pages, heirs: list[Heir], cause: str) -> None:
        assert self.index is not None
        unnaming = self._unnaming = _Unnaming(blocks, heirs, cause, HeldProgress())
        try:
            self.index.unname(blocks, into=unnaming.progress)
        finally:
            self._settle()

    def _settle(self) -> None:
        """Note what the index did in the last call, which an interrupt may have cut short. Safe to
        repeat."""
        if self._naming is not None:
            self._settle_naming(self._naming)
            self._naming = None
        unnaming = self._unnaming
        if unnaming is not None:
            self._named[unnaming.blocks[: unnaming.progress.done]] = -1
            self._unnaming = None
            self._evicted[unnaming.cause] += int(unnaming.progress.done)
            for block, key, space in unnaming.heirs:
                if self._named[block] < 0:
                    chain = key, np.array([0, 1]), np.zeros(1, np.int64)
                    self._name(np.array([block], np.int32), key, chain, space)

    def _settle_naming(self, naming: _MirrorNaming) -> None:
        assert self.index is not None
        status, blocks = naming.named.status, naming.blocks
        self._named[blocks[status == KeyStatus.NEW]] = naming.space.id
        present = np.flatnonzero(status == KeyStatus.PRESENT)
        if not len(present):
            return
        if naming.pins is None:  # that call pinned the blocks that have these names
            pins, take = Lease.attached_to(self.index.core, naming.named.pages[present])
            together(partial(setattr, naming, "pins", pins), take)
        assert naming.pins is not None
        naming.pins.close()
        for place in present.tolist():
            entry = naming.own[place].tobytes(), naming.space
            self._heirs.setdefault(entry, {})[int(blocks[place])] = None
            self._doubles[int(blocks[place])] = entry

    def _clear(self, space: Namespace) -> None:
        """Clear a namespace. Names are taken first: a block cleared with its name would be doomed,
        and lost to the mirror."""
        if self.index is None:
            return
        self._settle()
        for block in [
            block for block, (_, namespace) in self._doubles.items() if namespace == space
        ]:
            self._forget_double(block)
        named = np.flatnonzero(self._named == space.id).astype(np.int32)
        if len(named):
            self._unname(named, [], "clear")
        self.index.clear(space)

    def _bequeathed(self, blocks: Pages) -> list[Heir]:
        """The heirs of the names of these blocks. The position in the prefix is lost; it matters
        only to eviction, and nothing is evicted here."""
        if not self._heirs or self.index is None:
            return []
        found = []
        spaces = {space.id: space for space in self._spaces.values()}
        for block, key in zip(blocks.tolist(), self.index.keys_of(blocks), strict=True):
            entry = key.tobytes(), spaces.get(int(self._named[block]))
            heirs = self._heirs.get(entry)  # type: ignore[arg-type]
            if heirs and entry[1] is not None:
                heir = next(iter(heirs))
                self._forget_double(heir)
                found.append((heir, key.reshape(1, 2).copy(), entry[1]))
        return found

    def _forget_double(self, block: int) -> None:
        entry = self._doubles.get(block)
        heirs = None if entry is None else self._heirs.get(entry)
        if entry is not None and heirs is not None:
            heirs.pop(block, None)
            if not heirs:
                self._heirs.pop(entry, None)
        self._doubles.pop(block, None)  # last: after an interrupt before this, all is repeated

    def _check(self, blocks: Pages) -> None:
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.blocks:
            raise ConfigError(
                f"blocks: expected numbers of 0 to {self.blocks - 1}, found {int(blocks.min())} to "
                f"{int(blocks.max())}; `set_blocks` says how many there are"
            )


def _positions(offsets: Offsets, starts: Any) -> npt.NDArray[np.int64]:
    """For each block to be named, the position of its key."""
    parts = [np.arange(offsets[i] + starts[i], offsets[i + 1]) for i in range(len(offsets) - 1)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


# ---- ManagedBlocks


# Without DISCARDED, which write-back asks for: `WriteBack` counts those, by cause.
_EVICTED = {
    Cause.ASKED: "room",
    Cause.ROOM: "room",
    Cause.QUOTA: "room",
    Cause.DROPPED: "drop",
    Cause.CLEARED: "clear",
}


class ManagedBlocks(DeviceTier):
    """Device blocks that we allocate, name and evict. Blocks of running requests have no key and
    belong to this process. Full blocks are named and shared; unused ones are evicted from the
    leaves."""

    owned = True

    def _began(self) -> None:
        pass

    def _count_evicted(self) -> None:
        if self.index is None:
            return
        for cause, blocks in self.index.core.take_evicted().items():
            if blocks and cause in _EVICTED:
                self._evicted[_EVICTED[cause]] += blocks

    @property
    def free(self) -> int:
        """Number of empty, unused blocks."""
        return self.index.stats().free if self.index is not None else 0

    @property
    def available(self) -> int:
        """Blocks that an allocation can get, free or by eviction. Advisory."""
        return self.room().available

    def allocate(self, n: int) -> Pages:
        """Allocate n blocks without a key, evicting if necessary. Raises as `hold`."""
        return self.hold(n).detach() if n else NONE

    def hold(self, n: int) -> Allocation:
        """As `allocate`, as an object that gives the blocks back unless they are detached.

        Raises:
            OutOfPages: not enough blocks; nothing was allocated.
            ConfigError: the number of blocks is not known yet.
        """
        if self.index is None:
            raise ConfigError("allocate: the number of device blocks is not known; `set_blocks`")
        if n > self.blocks:
            raise OutOfPages(f"allocate: {n} blocks were asked for, the device has {self.blocks}")
        return self.index.allocate(n)

    def can_allocate(self, n: int, *, evict: bool = False) -> bool:
        """Whether n blocks are available now, free or by eviction. Advisory, takes no lock.

        Args:
            evict: evict until n blocks are free; the answer is then exact. Takes the lock.

        Raises:
            ConfigError: no number of blocks.
            LockTimeout: with `evict`.
        """
        if self.index is None or not self.index.can_allocate(n):
            return False
        if evict and self.free < n:
            self.index.evict(n - self.free)
            return self.free >= n
        return True

    def free_blocks(self, blocks: Pages) -> None:
        """Give back blocks without a key.

        Raises:
            LeaseLost: some are not ours, or were given back already; none was given back.
        """
        if len(blocks):
            assert self.index is not None
            self.index.free(blocks)

    def unpin(self, blocks: Pages) -> None:
        """Stop using named blocks; they stay cached until they are evicted."""
        if len(blocks):
            assert self.index is not None
            self.index.unpin(blocks)

    def name_many(
        self,
        blocks: Pages,
        keys: Keys,
        offsets: Offsets,
        starts: Any,
        space: Namespace,
        into: NamingResult,
    ) -> None:
        """See `DeviceTier`. If another block has the same content already, `into` has that block,
        and ours is given back."""
        assert self.index is not None
        self.index.name_many(blocks, keys, offsets, starts, namespace=space, into=into)


__all__ = [
    "NONE",
    "NO_KEYS",
    "DeviceTier",
    "ManagedBlocks",
    "MirroredBlocks",
    "capacity_of",
    "create_index",
    "numbers_of",
]
