"""The windows of a `HybridManager`: where their pages are, and the blocks of its requests."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from lightcache._arguments import Keys, Pages, count
from lightcache.errors import (
    Abandoned,
    ConfigError,
    LeaseLost,
    LightcacheError,
    LockTimeout,
    OutOfPages,
)
from lightcache.group_index import GroupIndex
from lightcache.groups import Group, GroupSet, Rule
from lightcache.hashing import KeySpec
from lightcache.hybrid.checkpoints import Checkpoints, Tier
from lightcache.hybrid.requests import POINT, PREFIX, HybridMatch, HybridRequest
from lightcache.hybrid.window_blocks import WindowBlocks, WindowTable
from lightcache.leases import Allocation, Lease, NamingResult
from lightcache.manager.blocks import NONE, ManagedBlocks
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.request import (
    PINNED,
    CacheScope,
    RequestOptions,
    WritePolicy,
    slots_of,
)
from lightcache.manager.transfers import BlockTransfer
from lightcache.manager.write_back import BlockWriteBack, WrittenBack
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.runs import PLAIN
from lightcache.shm.locking import Hurried

EVERY = 4096
"""Default distance of saved positions, in tokens."""


# ---- Figures


@dataclass(frozen=True)
class GroupHits:
    """What requests found of one rule, and what it cost that they did not find more."""

    device_tokens: int = 0
    """Tokens whose blocks were on the device."""
    host_tokens: int = 0
    """Tokens whose pages were on the host alone; includes those read from storage."""
    storage_tokens: int = 0
    """Of these, tokens whose position was read from storage; of full attention, its own pages."""
    limited_requests: int = 0
    """Requests that continued from no deeper position since this rule has none."""
    limited_tokens: int = 0
    """Tokens that these computed: of a window those that have KV, of full attention all others."""


@dataclass(frozen=True)
class WindowStats:
    """Counters of the windows of one `HybridManager`, one for each rule of a request."""

    requests: int = 0
    """Requests taken."""
    usable_tokens: int = 0
    """Tokens of prompts that need not be computed."""
    unusable_tokens: int = 0
    """Tokens with KV, after these, for which a window lacked pages."""
    device_hits: int = 0
    """Windows that were on the device."""
    host_hits: int = 0
    """Windows that were on the host alone."""
    storage_hits: int = 0
    """Of the host hits, those at a position that was read from storage."""
    loads: int = 0
    failed_loads: int = 0
    offloads: int = 0
    """Windows of which pages were written to the host."""
    failed_offloads: int = 0
    no_room: int = 0
    """Windows that the host had no room for."""
    unsaved: int = 0
    """Windows that were not written: their blocks had no key, or were evicted, the weights had
    gone, or copies to the host are disabled after failures (`HybridGauges.offloads`)."""
    demotions: int = 0
    """With write-back: blocks that a position needs, freed with a copy on the host."""
    demotions_lost: int = 0
    """Such blocks freed without one: the host had no room, or the copy failed."""
    freed_blocks: int = 0
    """Blocks that running requests gave back, since no later token sees them."""
    groups: Mapping[str, GroupHits] = field(default_factory=dict)
    """By name of a rule, "prefix" for full attention and "point" for states."""


_OF_REQUESTS = ("requests", "usable_tokens", "unusable_tokens")
"""Counted once for all groups."""
_NAMES = frozenset(each.name for each in fields(WindowStats)) - {"groups", *_OF_REQUESTS}
_OF_GROUPS = tuple(each.name for each in fields(GroupHits))


# ---- What a request may read of one rule

KeysOf = Callable[[KeySpec], Keys]
"""The keys of a sequence, as `Prompt.keys`."""


@dataclass(frozen=True, eq=False)
class Place:
    """The pages of one window in one tier, for one weights version and tenant."""

    tier: Tier
    index: GroupIndex
    space: Namespace
    spec: KeySpec
    group: GroupSet
    """The same pages, to be peeked."""

    @classmethod
    def of(
        cls, rule: Rule, tier: Tier, index: GroupIndex, space: Namespace, spec: KeySpec
    ) -> Place:
        """The pages in this index."""
        group = Group(rule.name, rule, index.index, space, index.run)
        return cls(tier, index, space, spec, GroupSet([group], page_tokens=spec.page_tokens))

    def deepest(self, keys_of: KeysOf, limit: int, step: int) -> int:
        """See `Side`."""
        tokens = self.spec.page_tokens
        return self.group.peek(keys_of(self.spec)[: limit // tokens], step=step // tokens).pages * (
            tokens
        )

    def pin(
        self, request: Hashable, keys_of: KeysOf, begin: int, end: int, ttl: float | None
    ) -> bool:
        """Pin the pages of these tokens: see `Side`. Nothing is pinned if they are not all
        there."""
        tokens = self.spec.page_tokens
        keys = keys_of(self.spec)[begin // tokens : end // tokens]
        if ttl is None:
            return self.index.peek(keys, namespace=self.space) == len(keys)
        return self.index.plan(request, keys, namespace=self.space, timeout=ttl)

    def take(self, request: Hashable, tokens: int) -> Lease | None:
        """The pages of so many tokens that were pinned. None: they have gone."""
        try:
            lease = self.index.take(request)
        except LeaseLost:  # its time limit has passed
            return None
        if len(lease) == tokens // self.spec.page_tokens * self.index.run.parts:
            return lease
        lease.close()
        return None


@dataclass(eq=False, slots=True)
class WindowSide:
    """See `Side`."""

    groups: WindowGroups
    window: WindowBlocks
    places: list[Place]
    """The device first."""
    keys_of: KeysOf
    rule: str = field(init=False)
    tier: Tier | None = None
    chosen: Place | None = None
    """It has what was pinned."""

    def __post_init__(self) -> None:
        self.rule = self.window.rule.name

    def deepest(self, limit: int, step: int) -> int:
        """See `Side`."""
        found = 0
        for place in self.places:
            if found < limit:
                found = max(found, place.deepest(self.keys_of, limit, step))
        return found

    def pin(self, request: Hashable, position: int, ttl: float | None) -> bool:
        """See `Side`."""
        begin, self.chosen = self.groups.start(self.window.rule, position), None
        if begin < position:
            for place in self.places:
                if place.pin(request, self.keys_of, begin, position, ttl):
                    self.chosen = place
                    break
        self.tier = None if self.chosen is None else self.chosen.tier
        if ttl is not None:
            self.groups.unpin(request, self.window, self.chosen)
        return begin == position or self.chosen is not None

    def take(self, request: Hashable, position: int) -> Lease | None:
        """See `Side`."""
        if self.chosen is None:  # an interrupt has ended the plan
            return None
        return self.chosen.take(request, position - self.groups.start(self.window.rule, position))

    def needs(self, position: int) -> bool:
        """See `Side`."""
        return self.groups.start(self.window.rule, position) < position


def _slice(keys: Keys, begin: int, end: int) -> Keys:
    return np.ascontiguousarray(keys[begin:end])


# ---- Pages that positions need, from the device to the host


@dataclass(frozen=True, eq=False)
class Stretch:
    """Tokens of a window in whole blocks and whole host pages."""

    space: CacheScope
    own: Namespace
    """The device's. It stays, where `WindowBlocks.beside` would open a new one after a clear."""
    device_keys: Keys
    """Of its blocks."""
    host_keys: Keys
    """Of its pages."""
    stored: Keys | None = None
    """With a storage: KV's keys up to the position that needs it."""


@dataclass(eq=False)
class _Batch(WrittenBack):
    """Blocks of a window that are being written back."""

    notes: dict[int, tuple[Stretch, Keys]] = field(default_factory=dict)
    """What positions need of each block, and the block's key."""


class WindowWriteBack(BlockWriteBack):
    """The write-back of one window. Most blocks of a window are needed by no position, and go
    unwritten; a block that a position needs has a note, which outlives the request. The manager's
    lock is around every call."""

    _new = _Batch

    def __init__(self, groups: WindowGroups, window: WindowBlocks, host: GroupIndex) -> None:
        """No block has a note."""
        super().__init__(groups.state, window, groups.offloader)
        self._groups, self._window, self._host = groups, window, host
        self._notes: dict[int, Stretch] = {}
        """By block. A note is stale if the block has another key by now."""

    def note(self, blocks: Pages, needed: Stretch, unit: int) -> None:
        """Note the blocks of a position: before one of `unit` blocks that begin at a multiple of
        `unit` is evicted, the host gets the pages of all of them."""
        pages = len(needed.host_keys) * unit // len(blocks)
        for i in range(len(blocks) // unit):
            own = slice(i * unit, (i + 1) * unit)
            keys = needed.host_keys[i * pages : (i + 1) * pages].copy()
            blocks_keys = needed.device_keys[own].copy()
            note = Stretch(needed.space, needed.own, blocks_keys, keys, needed.stored)
            self._notes.update(dict.fromkeys(blocks[own].tolist(), note))

    def _write(self, batch: WrittenBack, pages: Pages, keys: Keys) -> bool:
        assert isinstance(batch, _Batch)
        ours: dict[int, tuple[Stretch, dict[bytes, int]]] = {}
        for block, key in zip(pages.tolist(), keys, strict=True):
            note = self._notes.get(block)
            if note is not None and (note.device_keys == key).all(axis=1).any():
                batch.notes[block] = note, key.reshape(1, 2)
                ours.setdefault(id(note), (note, {}))[1][key.tobytes()] = block
        for note, blocks in ours.values():
            if not self._offloader.may_copy():
                return False
            try:
                if not self._on_host(note) and self._state.weights.is_valid(note.space):
                    self._copy(batch, note, blocks)
            except LightcacheError:  # each may be a long wait
                self._groups.count(failed_offloads=1)
                return False
        return True

    def _copy(self, batch: WrittenBack, note: Stretch, ours: Mapping[bytes, int]) -> None:
        """Begin to write what a note says, if all of its blocks are there. Only blocks that are not
        written back are matched: that would be a use, and others would be evicted instead.

        Args:
            ours: its blocks of the batch, by key.
        """
        names = [key.tobytes() for key in note.device_keys]
        others = [i for i, name in enumerate(names) if name not in ours]
        blocks = np.array([ours.get(name, -1) for name in names], np.int32)
        with contextlib.ExitStack() as unless_copied:
            if others:
                index = self._window.open_index
                pins = index.match(note.device_keys[others], namespace=note.own)
                unless_copied.callback(pins.close)
                if len(pins) < len(others):
                    return
                blocks[others] = pins.pages
            pages = unless_copied.pop_all()
            self._groups.copy(self._window, note, blocks, pages, batch.transfers)

    def _on_host(self, note: Stretch) -> bool:
        found = self._host.peek(note.host_keys, namespace=note.space.host)
        return found == len(note.host_keys)

    def _freed(self, batch: WrittenBack, index: PageIndex, listed: int, freed: int) -> None:
        assert isinstance(batch, _Batch)
        for block, (note, key) in batch.notes.items():
            if index.peek(key, namespace=note.own):
                continue  # a request has matched it meanwhile
            if self._notes.get(block) is note:
                del self._notes[block]
            self._groups.count(**{"demotions" if self._on_host(note) else "demotions_lost": 1})

    def _store(self, batch: WrittenBack) -> None:
        """Positions that the host has whole since these pages came there."""
        assert isinstance(batch, _Batch)
        positions = {
            (note.space, note.stored[-1].tobytes()): note.stored
            for note, _ in batch.notes.values()
            if note.stored is not None and not batch.stay
        }
        for (space, _), kv in positions.items():
            if not self._state.weights.is_valid(space):
                continue
            keys = self._groups.whole(kv, space, [len(kv)])
            if len(keys) and self._state.host.peek(kv, namespace=space.host) == len(kv):
                self._write_to_storage(keys, space)

    def close(self) -> None:
        """See `WriteBack`."""
        super().close()
        self._notes.clear()


# ---- The windows of a manager


class WindowGroups:
    """The layers that see a window or a chunk. The KV manager's lock is held around every call."""

    def __init__(
        self,
        manager: KVCacheManager,
        windows: Sequence[WindowBlocks],
        *,
        counts: Counter[str],
        every: int | None = None,
        states: Checkpoints | None = None,
    ) -> None:
        """See `HybridManager`.

        Args:
            counts: of the manager's requests and groups; ours are "windows:NAME" and "RULE:NAME".
            states: where the manager has states, these windows are saved.

        Raises:
            ConfigError: see `HybridManager`.
        """
        self.blocks = tuple(windows)
        self._manager, self.state, self._states = manager, manager.state, states
        self.offloader = manager.offloader
        self._check(manager)
        block, page = manager.device.block_tokens, manager.page_tokens
        self.unit = max(block, page)
        """What a position needs begins at a multiple of so many tokens."""
        if every is not None and (states is not None or not self.blocks):
            raise ConfigError("every: windows are saved where states are; leave it out")
        wanted = count(EVERY if every is None else every, "every", 1, 1 << 30)
        self.every = math.lcm(self.unit, -(-wanted // self.unit) * self.unit)
        self._counts = counts
        self._unfreed: list[Allocation] = []
        """Blocks whose index did not answer."""
        self._places: WeakKeyDictionary[CacheScope, list[list[Place]]] = WeakKeyDictionary()
        self._indexes = {
            (window, Tier.DEVICE): GroupIndex(window.open_index, PLAIN) for window in self.blocks
        }
        for window in self.blocks:
            if window.backend is not None:
                self._indexes[window, Tier.HOST] = GroupIndex(manager.host.index, window.run)
        back = manager.config.write is WritePolicy.BACK
        self._backs = {
            window: WindowWriteBack(self, window, index)
            for (window, tier), index in self._indexes.items()
            if back and tier is Tier.HOST
        }
        self.groups = [
            (Rule.prefix(), PLAIN),
            *((window.rule, window.run) for window in self.blocks),
        ]
        """What a position has in storage, without states."""
        if self.blocks and self.state.storage is not None:
            self.state.stored_with = self._last_whole

    def _check(self, manager: KVCacheManager) -> None:
        given: Any = self.blocks
        for window in given:
            if not isinstance(window, WindowBlocks):
                raise ConfigError(f"windows: expected WindowBlocks, found {window!r}")
            if window.block_tokens != manager.device.block_tokens:
                raise ConfigError(
                    f"windows: expected blocks of {manager.device.block_tokens} tokens, as the "
                    f"manager's are, found {window.block_tokens} in {window.name!r}"
                )
            if window.backend is not None and "host" not in manager.tiers:
                raise ConfigError(
                    f"windows: {window.name!r} has a backend, and the manager no host cache; leave "
                    "out backend and run, or give the manager a cache"
                )
        if not self.blocks:
            return
        rules = [window.rule.name for window in self.blocks]
        groups = [window.run.group for window in self.blocks if window.backend is not None]
        if len(set(rules)) < len(rules) or len(set(groups)) < len(groups):
            raise ConfigError(
                f"windows: expected each with its own rule and its own group of the "
                f"host cache, found rules {rules} and groups {groups}"
            )
        if not isinstance(manager.device, ManagedBlocks):
            raise ConfigError(
                "manager: expected ManagedBlocks, found MirroredBlocks: blocks of windows are "
                "allocated here, beside those of KV"
            )
        alone = [window.name for window in self.blocks if window.backend is None]
        if manager.state.storage is not None and alone:
            raise ConfigError(
                f"windows: expected a backend and a run for each, as the manager has a storage, "
                f"found none for {alone}: stored KV without its windows is of no use"
            )

    def start(self, rule: Rule, position: int) -> int:
        """The first token whose block and page a position needs, and all tokens after it."""
        return rule.first(position // self.unit, self.unit) * self.unit

    # ---- lookup

    def sides_of(
        self, space: CacheScope, options: RequestOptions, keys_of: KeysOf
    ) -> list[WindowSide]:
        """What a request may read of each window."""
        every = self._places.get(space)
        if every is None:
            every = []
            for window in self.blocks:
                own, index = window.beside(space.host), self._indexes[window, Tier.DEVICE]
                places = [Place.of(window.rule, Tier.DEVICE, index, own, space.device_spec)]
                if (host := self._indexes.get((window, Tier.HOST))) is not None:
                    where = space.host, space.host_spec
                    places.append(Place.of(window.rule, Tier.HOST, host, *where))
                every.append(places)
            self._places[space] = every  # all or none of them
        return [
            WindowSide(
                self,
                window,
                [place for place in places if place.tier.value in options.tiers],
                keys_of,
            )
            for window, places in zip(self.blocks, every, strict=True)
        ]

    def unpin(
        self, request: Hashable, only: WindowBlocks | None = None, kept: Place | None = None
    ) -> None:
        """Drop the pins of a plan, also of one that an interrupt has ended, except this.

        Args:
            only: of this window; None: of all.
        """
        for (window, _), index in self._indexes.items():
            if only in (None, window) and (kept is None or index is not kept.index):
                index.cancel(request)

    # ---- storage

    def stored(self, running: HybridRequest, keys: Keys, space: CacheScope) -> Keys:
        """What storage gets of a request that ends: KV up to its last position of which the host
        has every window, and after it what windows need at its positions.

        Args:
            keys: of the pages of KV that may be stored.
        """
        page = self._manager.page_tokens
        return self.whole(keys, space, [position // page for position in running.positions])

    def _last_whole(self, keys: Keys, space: CacheScope) -> Keys:
        """As `stored`, of KV that came to the host after its request had ended: up to the last
        position of which the host has every window, and the state. If it has no state of any, one
        may have been in storage before: then without."""
        host = [
            Group(window.rule.name, window.rule, index.index, space.host, index.run)
            for (window, tier), index in self._indexes.items()
            if tier is Tier.HOST
        ]
        for groups in ([*host, *self._states_on_host(space)], host):
            page = self._manager.page_tokens
            step = self.unit // page
            pages = GroupSet(groups, page_tokens=page).peek(keys, step=step).pages
            if pages:
                return self.whole(keys, space, [pages])
        return keys[:0]

    def _states_on_host(self, space: CacheScope) -> list[Group]:
        index = None if self._states is None else self._states.host_states
        if not isinstance(index, GroupIndex):
            return []
        return [Group(POINT, Rule.point(), index.index, space.host, index.run)]

    def whole(self, keys: Keys, space: CacheScope, positions: Sequence[int]) -> Keys:
        """What storage gets of these positions, in pages, ascending: see `stored`."""
        page, end = self._manager.page_tokens, 0
        ends = dict.fromkeys(self.blocks, 0)
        spans: list[tuple[WindowBlocks, int, int]] = []
        for last in positions:
            needed = [
                (window, max(self.start(window.rule, last * page) // page, ends[window]), last)
                for window in self.blocks
            ]
            if last <= len(keys) and all(self._on_host(keys, space, *each) for each in needed):
                end = last
                spans += needed
                ends.update((window, last) for window, _, _ in needed)
        parts = [window.run.keys(_slice(keys, *span)) for window, *span in spans]
        return np.concatenate([keys[:end], *parts])

    def _on_host(
        self, keys: Keys, space: CacheScope, window: WindowBlocks, begin: int, end: int
    ) -> bool:
        index, own = self._indexes[window, Tier.HOST], _slice(keys, begin, end)
        return index.peek(own, namespace=space.host) == len(own)

    # ---- running requests

    def begin(
        self, running: HybridRequest, match: HybridMatch, leases: Mapping[str, Lease]
    ) -> list[Lease]:
        """Give a request that begins its tables. Returns the pins of device blocks, which are the
        tables' once the request is known."""
        ours = []
        for window in self.blocks:
            begin = self.start(window.rule, match.usable) // window.block_tokens
            lease, blocks = leases.get(window.rule.name), np.full(begin, -1, np.int32)
            if lease is not None and match.tiers[window.rule.name] is Tier.DEVICE:
                ours.append(lease)
                blocks, lease = np.concatenate([blocks, lease.pages]), None
            kind = bytearray([PINNED]) * len(blocks)
            running.tables.append(WindowTable(window, blocks, kind, begin, len(blocks), lease))
        running.positions += [match.usable] if match.usable else []
        if self.state.storage is not None:
            running.inner.stored_with = partial(self.stored, running)
        return ours

    def grow(self, running: HybridRequest, tokens: int) -> None:
        """Add blocks up to so many tokens.

        Raises:
            OutOfPages: see `HybridManager.allocate`.
        """
        try:
            with Hurried(self._manager.config.time_limit):
                for table in running.tables:
                    back = self._backs.get(table.window)
                    table.grow(tokens, table.window.hold if back is None else back.hold)
        except LockTimeout as error:
            raise OutOfPages(f"allocate: not now; ask in the next step: {error}") from error

    def load(self, running: HybridRequest, table: WindowTable, lease: Lease) -> None:
        """Load the pages of a window that were found on the host."""
        window, end = table.window, running.match.usable
        slots = slots_of(table.blocks, window.block_tokens, self.start(window.rule, end), end)
        assert window.backend is not None
        self.state.transfers.begin(
            NONE,  # its blocks are of another device index than KV's
            window.backend,
            window.backend.load,
            lease,
            (slots, 0),
            lambda ok, _: self.count(**{"loads" if ok else "failed_loads": 1}),
            of=running.loads,
            instead_of=(table, "host"),
        )

    def publish(self, running: HybridRequest, *, last: bool = False) -> None:
        """Name full blocks, and save windows where that is due.

        Args:
            last: the request ends: its last position is due.
        """
        inner, space, sound = running.inner, running.inner.space, running.sound()
        limit = inner.publishable() if sound else 0
        if space is None or not inner.on_device or not self.state.weights.is_valid(space):
            return
        for table in running.tables:
            self._name(running, table, space, limit)
        for position in self._due(running, limit // self.unit * self.unit, last):
            for table in running.tables:
                self._save(running, table, space, position)
            running.positions.append(position)
        if sound:
            running.published = inner.total // self._manager.device.block_tokens

    def _due(self, running: HybridRequest, full: int, last: bool) -> list[int]:
        """The positions to save, of those before and at `full` that are not saved yet."""
        prompt, saved = running.match.tokens, running.saved
        if self._states is not None:  # without its state no position is of use
            return sorted(position for position in running.due if saved < position <= full)
        due = {prompt // self.unit * self.unit, (prompt - 1) // self.unit * self.unit}
        due.update(range(saved // self.every * self.every + self.every, full + 1, self.every))
        due.update([full] if last else [], [running.match.branching or 0])
        return sorted(position for position in due if saved < position <= full)

    def _name(
        self, running: HybridRequest, table: WindowTable, space: CacheScope, limit: int
    ) -> None:
        """Give the full blocks up to so many tokens their keys."""
        window, first = table.window, max(table.named, table.begin)
        full = min(limit // window.block_tokens, len(table.blocks))
        if full <= first:
            return
        keys = np.ascontiguousarray(running.inner.device_chain.keys[first:full])
        offsets, starts = np.array([0, len(keys)]), np.zeros(1, np.int64)
        naming = NamingResult(len(keys))
        table.naming = naming, first  # noted before the index changes
        try:
            own = window.beside(space.host)
            window.name_many(table.blocks[first:full], keys, offsets, starts, own, naming)
        finally:
            running.settle()

    def _save(
        self, running: HybridRequest, table: WindowTable, space: CacheScope, position: int
    ) -> None:
        """Write the pages that a position needs to the host, except those that are there."""
        window, inner, options = table.window, running.inner, running.inner.options
        begin, block = self.start(window.rule, position), window.block_tokens
        page, back = self._manager.page_tokens, self._backs.get(window)
        if window.backend is None or begin == position:
            return
        if "host" not in options.tiers or options.priority < 0:
            return
        stored = self.state.storage is not None and "storage" in options.tiers
        needed = Stretch(
            space,
            window.beside(space.host),
            np.ascontiguousarray(inner.device_chain.keys[begin // block : position // block]),
            np.ascontiguousarray(inner.host_chain.keys[begin // page : position // page]),
            inner.host_chain.keys[: position // page] if back is not None and stored else None,
        )
        # What is stored when the request has ended is on the host by then.
        of = None if self.state.storage is None else inner.transfers
        # The copy's own pins: the request may give these blocks back while it runs.
        pins = window.open_index.match(needed.device_keys, namespace=needed.own)
        with contextlib.ExitStack() as unless_copied:
            unless_copied.callback(pins.close)
            if len(pins) < len(needed.device_keys):
                self.count(unsaved=1)
                return
            if back is not None:
                back.note(pins.pages, needed, self.unit // block)
            if back is None or self.state.storage is not None:
                self.copy(window, needed, pins.pages.copy(), unless_copied.pop_all(), of)

    def copy(
        self,
        window: WindowBlocks,
        needed: Stretch,
        blocks: Pages,
        pins: contextlib.ExitStack,
        of: list[BlockTransfer] | None,
    ) -> None:
        """Write pages to the host, except those that are there.

        Args:
            blocks: those that have them.
            pins: what is closed when the copy has finished, or did not begin.
            of: see `TransferTracker.begin`.
        """
        page, space, backend = self._manager.page_tokens, needed.space, window.backend
        assert backend is not None
        with pins:
            if not self.offloader.may_copy():
                self.count(unsaved=1)
                return
            index, limit = self._indexes[window, Tier.HOST], self._manager.config.time_limit
            try:
                new = index.reserve(
                    needed.host_keys, 0, shards=backend.shards, namespace=space.host, timeout=limit
                )
            except Abandoned:  # another process has cleared the weights
                self.count(unsaved=1)
                return
            if not len(new.pages):
                self.count(no_room=int(len(new.missing) > 0))
                new.release()
                return
            held = pins.pop_all()
        self.offloader.copy(
            backend,
            new,
            slots_of(blocks, window.block_tokens, 0, len(needed.host_keys) * page),
            NONE,  # its blocks are of another device index than KV's
            space,
            lambda ok, _: self.count(**{"offloads" if ok else "failed_offloads": 1}),
            of=of,
            on_end=lambda _: held.close(),
        )

    def trim(self, running: HybridRequest) -> None:
        """Give back blocks that neither later tokens nor later positions need."""
        if not running.sound():
            return
        for table in running.tables:
            begin, window = table.begin, table.window
            self._give_back(table, self.start(window.rule, running.inner.total))
            self.count(freed_blocks=table.begin - begin)

    def _give_back(self, table: WindowTable, tokens: int) -> None:
        held = table.give_back(tokens // table.window.block_tokens)
        if held is not None:
            self._unfreed.append(held)
            self.free()

    def writing(self) -> BlockTransfer | None:
        """A copy in flight that makes room for blocks; None: there is none."""
        return next(filter(None, (back.running() for back in self._backs.values())), None)

    def poll(self) -> None:
        """Free what has been written back, and write back ahead of need."""
        for back in self._backs.values():
            back.poll()
            back.keep_free(self._manager.config.kept_free)
        self.free()

    def close(self) -> None:
        """Nothing is written back any more."""
        for back in self._backs.values():
            back.close()

    def free(self) -> None:
        """Free blocks without a key; the next `poll` tries again where an index does not answer."""
        for held in list(self._unfreed):
            try:
                with Hurried(self._manager.config.time_limit):
                    held.close()
            except LightcacheError:
                continue
            self._unfreed.remove(held)

    # ---- the end

    def leave(self, running: HybridRequest) -> None:
        """A request has ended: no load of it begins any more, and what was not loaded is
        unpinned."""
        running.settle()
        for load in running.loads:
            load.cancel()  # if it waits for `resume`
        for table in running.tables:
            if table.host is not None:
                table.host.close()
                table.host = None

    def give_all_back(self, running: HybridRequest) -> None:
        """Give back the blocks of a request that no load writes any more."""
        for table in running.tables:
            self._give_back(table, len(table.blocks) * table.window.block_tokens)

    # ---- figures

    def counted(self, match: HybridMatch, stored: bool) -> Counter[str]:
        """What a request that begins adds to the counters of windows and groups.

        Args:
            stored: whether its position was read from storage.
        """
        kv, usable = match.kv, match.usable
        hits = Counter(tier for rule, tier in match.tiers.items() if rule != POINT)
        counts: Counter[str] = Counter(
            {f"windows:{tier.value}_hits": windows for tier, windows in hits.items()}
        )
        if stored:
            counts["windows:storage_hits"] = hits[Tier.HOST]
        counts[f"{PREFIX}:device_tokens"] = min(kv.device, usable)
        counts[f"{PREFIX}:host_tokens"] = max(0, usable - kv.device)
        counts[f"{PREFIX}:storage_tokens"] = min(kv.storage, max(0, usable - kv.device))
        tokens = {
            window.rule.name: usable - self.start(window.rule, usable) for window in self.blocks
        }
        for rule, tier in match.tiers.items():
            counts[f"{rule}:{tier.value}_tokens"] = tokens.get(rule, usable)
            if stored and tier is Tier.HOST and rule in tokens:
                counts[f"{rule}:storage_tokens"] = tokens[rule]
        if match.limit is not None:
            counts[f"{match.limit}:limited_requests"] = 1
            lost = match.tokens - usable if match.limit == PREFIX else match.unusable
            counts[f"{match.limit}:limited_tokens"] = lost
        return counts

    def stats(self) -> WindowStats:
        """See `HybridManager.window_stats`."""
        counts = self._counts
        rules = [PREFIX, *(window.rule.name for window in self.blocks)]
        groups = {
            rule: GroupHits(**{name: counts[f"{rule}:{name}"] for name in _OF_GROUPS})
            for rule in [*rules, POINT][: -1 if self._states is None else None]
        }
        requests = {name: counts[name] for name in _OF_REQUESTS}
        windows = {name: counts[f"windows:{name}"] for name in _NAMES}
        return WindowStats(**requests, **windows, groups=groups)

    def count(self, **counts: int) -> None:
        """Add to the counters of `WindowStats`."""
        assert counts.keys() <= _NAMES, counts
        self._counts.update({f"windows:{name}": count for name, count in counts.items()})


__all__ = [
    "EVERY",
    "GroupHits",
    "Place",
    "WindowGroups",
    "WindowSide",
    "WindowStats",
    "WindowWriteBack",
]
