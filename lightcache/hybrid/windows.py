"""WindowManager: blocks of layers that see a window or a chunk, beside a `KVCacheManager`."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary

import numpy as np

from lightcache._arguments import Keys, Pages, count
from lightcache._together import together
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
from lightcache.hashing import KeySpec, Tokens
from lightcache.hybrid.checkpoints import Checkpoints, Tier
from lightcache.hybrid.manager import HybridLoadHandle, loaded_well, of_kv
from lightcache.hybrid.planning import kv_up_to
from lightcache.hybrid.window_blocks import WindowBlocks, WindowTable
from lightcache.leases import Allocation, Lease, NamingResult
from lightcache.manager.blocks import NONE, ManagedBlocks
from lightcache.manager.limits import nothing
from lightcache.manager.lookup import LookupRequest, begin_when_read
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.request import (
    ANY,
    PINNED,
    CacheScope,
    Delivery,
    Owed,
    PrefixMatch,
    Prompt,
    Request,
    RequestOptions,
    check_hashable,
    slots_of,
)
from lightcache.manager.stats import TierCapacity, TierGauges
from lightcache.manager.transfers import BlockTransfer
from lightcache.namespaces import Namespace
from lightcache.runs import PLAIN
from lightcache.shm.locking import Hurried

if TYPE_CHECKING:
    from lightcache.storage.tasks import StorageTask

PREFIX = Rule.prefix().name
"""Full attention, among the names of rules."""
APART = (
    "no manager joins them: give the layers with a window to full attention, which keeps every "
    "token, and join KV and states with a HybridManager"
)
"""What to do for a model with states and windows."""
EVERY = 4096
"""Default distance of saved positions, in tokens."""


# ---- Matches and figures


@dataclass(frozen=True)
class WindowMatch:
    """The part of a prompt that need not be computed: as far as KV and every window reach. All
    numbers are tokens."""

    kv: PrefixMatch
    """KV of full attention up to the position. Only this is pinned and loaded."""
    usable: int = 0
    """Tokens that need not be computed: the position that all rules accept, or 0."""
    kv_tokens: int = 0
    """All cached KV of the prompt that could be used. Advisory: KV after the position is not
    pinned."""
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    """By name of a rule: the tier that has its pages; without those that need none here."""
    limit: str | None = None
    """The name of the rule that has no deeper position; None: none limits it."""
    branching: int | None = None
    """The position at which the coming prefill saves windows, since KV reaches further than they
    do: other prompts share this prefix, and the next one will hit."""
    pending: bool = False
    """Storage is being read: planning again may find more."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.kv.tokens

    @property
    def best(self) -> bool:
        """Whether nothing better can be found: the device has all, to the deepest position."""
        here = self.kv.device >= self.usable and set(self.tiers.values()) <= {Tier.DEVICE}
        return self.limit is None and here

    @property
    def unusable(self) -> int:
        """Tokens with KV that must still be computed, since a window lacks pages."""
        return max(0, self.kv_tokens - self.usable)


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
    """Counters of one `WindowManager`. Windows are counted one for each rule of a request."""

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
    """Windows that were not written: their blocks had no key, or were evicted, or the weights had
    gone."""
    freed_blocks: int = 0
    """Blocks that running requests gave back, since no later token sees them."""
    groups: Mapping[str, GroupHits] = field(default_factory=dict)
    """By name of a rule, "prefix" for full attention."""


_NAMES = frozenset(each.name for each in fields(WindowStats)) - {"groups"}
_OF_GROUPS = tuple(each.name for each in fields(GroupHits))


@dataclass(frozen=True)
class WindowGauges(TierGauges):
    """Current room. `device` is full attention's; requests and transfers are of all groups."""

    windows: Mapping[str, TierCapacity] = field(default_factory=dict)
    """Blocks of the device, by name of a rule."""


# ---- Running requests


@dataclass(eq=False)
class _Running:
    """One request, from `take` until no copy uses its blocks."""

    inner: Request
    """Its request in the KV manager."""
    match: WindowMatch
    tables: list[WindowTable]
    positions: list[int]
    """The position with which it began, and those that were saved, ascending."""
    published: int = -1
    """Full blocks for which all is done that a commit does."""
    loads: list[BlockTransfer] = field(default_factory=list)
    owed: dict[str, Owed] = field(default_factory=dict)
    """Blocks that the caller has to exchange, by rule."""
    counted: Counter[str] = field(default_factory=Counter)
    """Its counts in the statistics."""

    @property
    def saved(self) -> int:
        """The last of its positions; 0: there is none."""
        return self.positions[-1] if self.positions else 0

    def sound(self) -> bool:
        """Whether its loads have finished and succeeded. Until then no other request may find what
        it computes after them. Does not block."""
        waiting = any(table.host is not None for table in self.tables)
        return not waiting and loaded_well(self.inner, self.loads)

    def owe(self, rule: str, changed: Mapping[int, int]) -> None:
        """Note blocks that the caller has to exchange."""
        if changed:
            owed = self.owed.get(rule)
            before = {} if owed is None or owed.told else owed.changed
            self.owed[rule] = Owed({**before, **changed})

    def settle(self) -> None:
        """Note what a naming has done that an interrupt cut short."""
        for table in self.tables:
            self.owe(table.window.rule.name, table.settle())


@dataclass(frozen=True, eq=False)
class _Side:
    """The pages of one rule in one tier, for one weights version and tenant."""

    window: WindowBlocks
    tier: Tier
    index: GroupIndex
    space: Namespace
    spec: KeySpec
    group: GroupSet
    """The same pages, to be peeked."""

    @classmethod
    def of(
        cls, window: WindowBlocks, tier: Tier, index: GroupIndex, space: Namespace, spec: KeySpec
    ) -> _Side:
        """The pages in this index."""
        group = Group(window.rule.name, window.rule, index.index, space, index.run)
        return cls(
            window, tier, index, space, spec, GroupSet([group], page_tokens=spec.page_tokens)
        )

    def deepest(self, prompt: Prompt, limit: int, unit: int) -> int:
        """The deepest position up to this one, a multiple of `unit`, that it accepts."""
        tokens = self.spec.page_tokens
        keys = prompt.keys(self.spec)[: limit // tokens]
        return self.group.peek(keys, step=unit // tokens).pages * tokens

    def plan(
        self, request: Hashable, prompt: Prompt, begin: int, end: int, ttl: float | None
    ) -> bool:
        """Pin the pages of these tokens, unless `ttl` is None. False: they are not all there, and
        nothing is pinned."""
        keys = prompt.keys(self.spec)[begin // self.spec.page_tokens : end // self.spec.page_tokens]
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


def _slice(keys: Keys, begin: int, end: int) -> Keys:
    return np.ascontiguousarray(keys[begin:end])


_Chosen = dict[str, _Side]
"""By name of a rule: where its pages are pinned, or taken from."""


@dataclass(eq=False)
class _Reading:
    """A read from storage for a request that waits."""

    task: StorageTask
    there: int
    """Tokens of KV that were there before."""
    until: float | None = None
    """Time until which `take` waits; None: it was not called yet."""

    def reached(self, position: int, page_tokens: int) -> bool:
        """Whether it has brought what this position lacked."""
        came = self.task.pages_done * page_tokens if self.task.ended else 0
        return 0 < position <= came and self.task.result.loaded > 0


@dataclass(frozen=True, eq=False)
class _Plan:
    """A request that waits."""

    lookup: LookupRequest
    space: CacheScope | None
    match: WindowMatch
    chosen: _Chosen
    reading: _Reading | None = None


# ---- The manager


class WindowManager:
    """Joins a `KVCacheManager`, which has the KV of full attention, and the blocks of layers that
    see a window or a chunk, for the scheduler of such a model.

    A request makes the same calls as a dense one, on this object: `plan`, `take`, `allocate`,
    `load`, `commit`, `release`; `poll` each step. It has a block table for each rule. A hit is as
    long as KV and the windows at its end reach. Calls share the KV manager's lock; none waits for
    bytes unless documented. Requests that do not write to the device save no windows.
    """

    def __init__(
        self, manager: KVCacheManager, windows: Sequence[WindowBlocks], *, every: int = EVERY
    ) -> None:
        """The caller closes the parts, after this object: the manager, then the windows.

        Args:
            windows: one for each rule.
            every: windows are saved at multiples of so many tokens, rounded up to whole blocks and
                pages; also where a prompt and a request end, and where prompts part. A window of n
                tokens takes n / every of the host bytes that all KV of its layers would take.

        Raises:
            ConfigError: no windows, two of one rule or of one group of the host cache, other block
                sizes, blocks that the engine owns, a backend without a host cache, or a storage
                and a window without a backend.
        """
        count(every, "every", 1, 1 << 30)
        self.windows = tuple(windows)
        self._check(manager)
        self.manager = manager
        block, page = manager.device.block_tokens, manager.page_tokens
        self.unit = max(block, page)
        """Every position is a multiple of so many tokens."""
        self.every = math.lcm(self.unit, -(-every // self.unit) * self.unit)
        self._state, self._lock = manager.state, manager.state.lock
        self._fail_open = self._state.new_fail_open(self._let_go, "WindowManager")
        self._counts: Counter[str] = Counter()
        self._plans: dict[Hashable, _Plan] = {}
        self._running: dict[Hashable, _Running] = {}
        self._leaving: list[_Running] = []
        """Ended requests, until no load writes their blocks."""
        self._unfreed: list[Allocation] = []
        """Blocks whose index did not answer."""
        self._sides: WeakKeyDictionary[CacheScope, list[list[_Side]]] = WeakKeyDictionary()
        self._indexes = {
            (window, Tier.DEVICE): GroupIndex(window.open_index, PLAIN) for window in self.windows
        }
        for window in self.windows:
            if window.backend is not None:
                self._indexes[window, Tier.HOST] = GroupIndex(manager.host.index, window.run)
        self._groups = [
            (Rule.prefix(), PLAIN),
            *((window.rule, window.run) for window in self.windows),
        ]
        """What a position has in storage."""

    def _check(self, manager: KVCacheManager) -> None:
        given: Any = self.windows
        for window in given:
            if isinstance(window, Checkpoints):
                raise ConfigError(f"windows: expected WindowBlocks, found states; {APART}")
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
        rules = [window.rule.name for window in self.windows]
        groups = [window.run.group for window in self.windows if window.backend is not None]
        if not rules or len(set(rules)) < len(rules) or len(set(groups)) < len(groups):
            raise ConfigError(
                f"windows: expected one or more, each with its own rule and its own group of the "
                f"host cache, found rules {rules} and groups {groups}"
            )
        if not isinstance(manager.device, ManagedBlocks):
            raise ConfigError(
                "manager: expected ManagedBlocks, found MirroredBlocks: blocks of windows are "
                "allocated here, beside those of KV"
            )
        alone = [window.name for window in self.windows if window.backend is None]
        if manager.state.storage is not None and alone:
            raise ConfigError(
                f"windows: expected a backend and a run for each, as the manager has a storage, "
                f"found none for {alone}: stored KV without its windows is of no use"
            )

    def start(self, rule: Rule, position: int) -> int:
        """The first token whose block and page a position needs, and all tokens after it."""
        return rule.first(position // self.unit, self.unit) * self.unit

    # ---- lookup

    def plan(
        self,
        request: Hashable,
        prompt: Prompt,
        *,
        options: RequestOptions = ANY,
        limit: int | None = None,
    ) -> WindowMatch:
        """Find the deepest position that KV and every window accept, on the device and the host,
        and pin what it needs tentatively. Otherwise as `KVCacheManager.plan`. A repeated call is
        cheap where the device has all that can be reused; else it looks again."""
        with self._lock:
            batch = self.manager.lookup.batch_of_one(request, prompt, options, limit, None)
            lookup, known = LookupRequest(*batch.entries[0][1]), self._plans.get(request)
            if known is not None and known.lookup.prompt == prompt:  # its keys are hashed already
                lookup = LookupRequest(known.lookup.prompt, lookup.options, lookup.limit)
            return self._planned(request, lookup).match

    def plan_many(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        *,
        options: Sequence[RequestOptions] | None = None,
        limits: Sequence[int | None] | None = None,
    ) -> list[WindowMatch]:
        """`plan` for a whole queue. A refused call changes nothing.

        Raises:
            ConfigError, Detached: as `KVCacheManager.plan_many`.
        """
        with self._lock:
            batch = self.manager.lookup.batch(requests, prompts, options, limits, None)
            return [
                self.plan(request, asks[0], options=asks[1], limit=asks[2])
                for request, asks in batch.entries
            ]

    def peek_many(
        self,
        prompts: Sequence[Prompt],
        *,
        options: Sequence[RequestOptions] | None = None,
        limits: Sequence[int | None] | None = None,
    ) -> list[WindowMatch]:
        """What `plan_many` would find on the device and the host now. Nothing is pinned, counted as
        used, or asked of storage, so a later plan may find less. Arguments and errors as
        `KVCacheManager.peek_many`."""
        with self._lock:
            self.manager.peek_many(prompts, options=options, limits=limits)  # raises
            matches = []
            for i, prompt in enumerate(prompts):
                within = (ANY if options is None else options[i]).within(self.manager.tiers)
                lookup = LookupRequest(prompt, within, None if limits is None else limits[i])
                miss = _Plan(lookup, None, WindowMatch(PrefixMatch(len(prompt)), limit=PREFIX), {})
                look = partial(self._agree, None, lookup, pin=False)
                matches.append((self._fail_open.run(look, nothing) or miss).match)
            return matches

    def cancel(self, request: Hashable) -> None:
        """Drop a plan. Harmless if there is none."""
        with self._lock:
            self._forget(request)
            self.manager.cancel(request)

    def _planned(self, request: Hashable, lookup: LookupRequest, *, read: bool = True) -> _Plan:
        """The plan of a request as of now.

        Args:
            read: whether to ask storage for more.
        """
        known, now = self._plans.get(request), time.monotonic()
        if known is not None and known.lookup == lookup and known.match.best:
            good = known.space is self._state.weights.space_or_none(lookup.prompt.tenant)
            if good and self.manager.lookup.holds(request, now):
                return known
        plan = self._fail_open.run(
            partial(self._agree, request, lookup), partial(self._missed, request, lookup)
        )
        plan = self._plans[request] = self._with_reading(plan, known, read)
        self._unpin(request, [side.index for side in plan.chosen.values()])
        return plan

    # ---- storage

    def _with_reading(self, plan: _Plan, known: _Plan | None, read: bool) -> _Plan:
        """The plan with what is read for it from storage: once for each request, the last position
        that storage has whole."""
        reading = None
        if known is not None and known.reading is not None:
            if known.space is plan.space and known.lookup.prompt == plan.lookup.prompt:
                reading = known.reading
            else:
                self._state.transfers.foreign.cancel(known.reading.task)
        if reading is None and read:
            task = self._fail_open.run(partial(self._read, plan), lambda: None, proves=False)
            reading = None if task is None else _Reading(task, plan.match.kv_tokens)
        if reading is None:
            return plan
        match, kv = plan.match, plan.match.kv
        if reading.reached(match.usable, self.manager.page_tokens):
            tokens = max(0, min(kv.host, match.usable - reading.there))
            kv = replace(kv, host=kv.host - tokens, storage=kv.storage + tokens)
        match = replace(match, kv=kv, pending=not reading.task.ended)
        return replace(plan, match=match, reading=reading)

    def _read(self, plan: _Plan) -> StorageTask | None:
        options = plan.lookup.options
        if plan.space is None or not options.read or not {"host", "storage"} <= options.tiers:
            return None
        return self._prefetch(plan.lookup, plan.space, plan.match.usable)

    def _prefetch(
        self, lookup: LookupRequest, space: CacheScope, usable: int
    ) -> StorageTask | None:
        """Begin to read the last position after this one. None: there is no storage, or no
        position."""
        storage, unit, page = self._state.storage, self.unit, self.manager.page_tokens
        most = lookup.most // unit * unit
        while (cut := lookup.prompt.cut_item(most)) is not None:
            most = cut.start // unit * unit
        if storage is None or most <= usable:
            return None
        task = storage.prefetch_last_ready(
            lookup.prompt.keys(space.host_spec)[: most // page],
            groups=self._groups,
            start=usable // page,
            step=unit // page,
            namespace=space.host,
        )
        self._state.tasks.add(task)
        return task

    def prefetch(self, prompt: Prompt) -> StorageTask | None:
        """Begin to read the last position of a prompt that storage has from there to the host,
        before a request needs it. Returns the task; None: the prompt has no position. Does not
        block.

        Raises:
            ConfigError, Abandoned, Detached: as `KVCacheManager.prefetch`.
        """
        with self._lock:
            space = self.manager.scope_to_prefetch(prompt)
            return self._prefetch(LookupRequest(prompt), space, 0)

    def _stored(self, running: _Running, keys: Keys) -> Keys:
        """What storage gets of a request that ends: KV up to its last position of which the host
        has every window, and after it what windows need at its positions.

        Args:
            keys: of the pages of KV that may be stored.
        """
        page, space, end = self.manager.page_tokens, running.inner.space, 0
        assert space is not None
        ends = dict.fromkeys(self.windows, 0)
        spans: list[tuple[WindowBlocks, int, int]] = []
        for last in [position // page for position in running.positions]:
            needed = [
                (window, max(self.start(window.rule, last * page) // page, ends[window]), last)
                for window in self.windows
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

    def _missed(self, request: Hashable, lookup: LookupRequest) -> _Plan:
        """An empty match: the request computes everything."""
        kv = self.manager.plan(request, lookup.prompt, options=lookup.options, limit=0)
        return _Plan(lookup, None, WindowMatch(kv, limit=PREFIX), {})

    def _agree(self, request: Hashable, lookup: LookupRequest, *, pin: bool = True) -> _Plan:
        """Find and pin the deepest position that all accept. If something goes between looking and
        pinning, look again with less."""
        (prompt, options, most), unit = lookup, self.unit
        space = self._state.weights.space_or_none(prompt.tenant)
        (kv,) = self.manager.peek_many([prompt], options=[options], limits=[most])
        deep = position = kv.usable // unit * unit if space is not None else 0
        limit = None if deep == lookup.most // unit * unit else PREFIX
        sides = [[] for _ in self.windows] if space is None else self._sides_of(space, options)
        while True:
            position, limit = self._deepest(prompt, sides, position, limit)
            planned = kv_up_to(self.manager, request, lookup.up_to(position), None, space, pin=pin)
            if planned.usable < position:
                position, limit = planned.usable // unit * unit, PREFIX
                continue
            chosen = self._pinned(request, lookup, sides, position, pin=pin)
            if not isinstance(chosen, str):
                break
            position, limit = position - unit, chosen
        tiers = {rule: side.tier for rule, side in chosen.items()}
        branching = deep if deep > position else None
        match = WindowMatch(planned, position, kv.usable, tiers, limit, branching)
        return _Plan(lookup, space, match, chosen)

    def _deepest(
        self, prompt: Prompt, sides: list[list[_Side]], position: int, limit: str | None
    ) -> tuple[int, str | None]:
        """The deepest position up to this one that every window accepts, and the rule that limits
        it: this one, unless a window lowers it."""
        agreed = 0
        for window, places in itertools.cycle(zip(self.windows, sides, strict=True)):
            if agreed == len(sides) or not position:
                break
            found = 0
            for side in places:
                if found < position:
                    found = max(found, side.deepest(prompt, position, self.unit))
            agreed += 1
            if found < position:
                position, limit, agreed = found, window.rule.name, 1
        return position, limit

    def _sides_of(self, space: CacheScope, options: RequestOptions) -> list[list[_Side]]:
        """Where a request may read the pages of each window: the device first."""
        every = self._sides.get(space)
        if every is None:
            every = []
            for window in self.windows:
                own, index = window.beside(space.host), self._indexes[window, Tier.DEVICE]
                sides = [_Side.of(window, Tier.DEVICE, index, own, space.device_spec)]
                if (host := self._indexes.get((window, Tier.HOST))) is not None:
                    sides.append(_Side.of(window, Tier.HOST, host, space.host, space.host_spec))
                every.append(sides)
            self._sides[space] = every  # all or none of them
        return [[side for side in sides if side.tier.value in options.tiers] for sides in every]

    def _pinned(
        self,
        request: Hashable,
        lookup: LookupRequest,
        sides: list[list[_Side]],
        position: int,
        *,
        pin: bool,
    ) -> _Chosen | str:
        """Pin what a position needs of each window. The name of a rule: its pages have gone."""
        chosen: _Chosen = {}
        ttl = lookup.options.ttl or self.manager.config.plan_ttl if pin else None
        for window, places in zip(self.windows, sides, strict=True):
            begin = self.start(window.rule, position)
            if begin == position:
                continue
            for side in places:
                if side.plan(request, lookup.prompt, begin, position, ttl):
                    chosen[window.rule.name] = side
                    break
            else:
                return window.rule.name
        return chosen

    def _forget(self, request: Hashable) -> None:
        check_hashable([request], "cancel")
        self._unpin(request)
        plan = self._plans.get(request)
        if plan is not None and plan.reading is not None:
            self._state.transfers.foreign.cancel(plan.reading.task)
        self._plans.pop(request, None)  # last: after an interrupt before this, all is repeated

    def _unpin(self, request: Hashable, kept: Sequence[GroupIndex] = ()) -> None:
        """Drop the pins of windows for a plan, also of one that an interrupt has ended."""
        for index in self._indexes.values():
            if index not in kept:
                index.cancel(request)

    def _let_go(self) -> None:
        """The cache is disabled: drop the pins of requests that wait."""
        for request, plan in list(self._plans.items()):
            nothing_found = WindowMatch(PrefixMatch(plan.match.tokens), limit=PREFIX)
            self._plans[request] = _Plan(plan.lookup, None, nothing_found, {}, plan.reading)
            self._unpin(request)

    # ---- running requests

    @overload
    def take(self, request: Hashable, *, wait: Literal[True]) -> WindowMatch: ...

    @overload
    def take(self, request: Hashable, *, wait: bool = False) -> WindowMatch | None: ...

    def take(self, request: Hashable, *, wait: bool = False) -> WindowMatch | None:
        """Begin a request, which takes over its plan. No less than was planned, unless that was
        cleared or its time limit has passed. Returns None, as `KVCacheManager.take` does, while a
        position is being read from storage: call again in the next step.

        Args:
            wait: block until reading has finished or timed out.

        Raises:
            LeaseLost: not planned, or cancelled; plan it first.
            ConfigError: the request is running already.
        """
        return begin_when_read(
            self._lock,
            partial(self._check_take, request),
            partial(self._reading, request),
            lambda: self._begin(request, self._renewed(request)),
            self._fail_open,
            wait,
        )

    def _check_take(self, request: Hashable) -> None:
        self.manager.check_take(request)
        if request not in self._plans:
            raise LeaseLost(f"take: there is no plan of {request!r}; plan it first")

    def _renewed(self, request: Hashable) -> _Plan:
        """Its plan once more: one whose time limit has passed pins nothing, and storage may have
        been read meanwhile."""
        return self._planned(request, self._plans[request].lookup)

    def _reading(self, request: Hashable, now: float) -> tuple[StorageTask, float] | None:
        """The read from storage that a request waits for, and the seconds left to wait: as long as
        computing takes. None: there is none, or the time is up."""
        if self._plans[request].reading is None:
            return None
        plan = self._renewed(request)
        reading = plan.reading
        if reading is None or reading.task.ended:
            return None
        if reading.until is None:
            left = plan.lookup.most - plan.match.usable
            reading.until = now + self._state.pace.seconds(left)
        return None if now >= reading.until else (reading.task, reading.until - now)

    def _begin(self, request: Hashable, plan: _Plan) -> WindowMatch:
        kv = self.manager.begin(request)
        try:
            leases: dict[str, Lease | None] = self._fail_open.run(
                partial(self._leases, request, plan), dict
            )
            found = [lease for lease in leases.values() if lease is not None]
            if kv.usable != plan.match.usable or len(found) < len(plan.chosen):  # cleared meanwhile
                for lease in found:
                    lease.close()
                self.manager.untake(request)
                plan, leases = self._missed(request, plan.lookup), {}
                self.manager.begin(request)
            match = plan.match
            running = self._made(request, match, leases)
        except BaseException:
            self._leave([request])
            self.manager.untake(request)
            raise
        running.counted = self._counted(plan)
        self._counts.update(running.counted)
        return match

    def _counted(self, plan: _Plan) -> Counter[str]:
        """What a request that begins adds to the counters; those of a group are "RULE:NAME"."""
        match, reading = plan.match, plan.reading
        stored = reading is not None and reading.reached(match.usable, self.manager.page_tokens)
        counts = Counter(f"{tier.value}_hits" for tier in match.tiers.values())
        counts.update(requests=1, usable_tokens=match.usable, unusable_tokens=match.unusable)
        if stored:
            counts["storage_hits"] = counts["host_hits"]
        kv = match.kv
        counts[f"{PREFIX}:device_tokens"] = min(kv.device, match.usable)
        counts[f"{PREFIX}:host_tokens"] = max(0, match.usable - kv.device)
        counts[f"{PREFIX}:storage_tokens"] = min(kv.storage, max(0, match.usable - kv.device))
        for window in self.windows:
            rule, tokens = window.rule, match.usable - self.start(window.rule, match.usable)
            if (tier := match.tiers.get(rule.name)) is not None:
                counts[f"{rule.name}:{tier.value}_tokens"] = tokens
                if stored and tier is Tier.HOST:
                    counts[f"{rule.name}:storage_tokens"] = tokens
        if match.limit is not None:
            counts[f"{match.limit}:limited_requests"] = 1
            lost = match.tokens - match.usable if match.limit == PREFIX else match.unusable
            counts[f"{match.limit}:limited_tokens"] = lost
        return counts

    def _leases(self, request: Hashable, plan: _Plan) -> dict[str, Lease | None]:
        """The pages that were pinned, by rule; None where they have gone."""
        usable = plan.match.usable
        return {
            rule: side.take(request, usable - self.start(side.window.rule, usable))
            for rule, side in plan.chosen.items()
        }

    def _made(
        self, request: Hashable, match: WindowMatch, leases: Mapping[str, Lease | None]
    ) -> _Running:
        """A running request. It takes over the pins of device blocks in the instant in which it is
        known."""
        tables, ours = [], []
        for window in self.windows:
            begin = self.start(window.rule, match.usable) // window.block_tokens
            lease, blocks = leases.get(window.rule.name), np.full(begin, -1, np.int32)
            if lease is not None and match.tiers[window.rule.name] is Tier.DEVICE:
                ours.append(lease)
                blocks, lease = np.concatenate([blocks, lease.pages]), None
            kind = bytearray([PINNED]) * len(blocks)
            tables.append(WindowTable(window, blocks, kind, begin, len(blocks), lease))
        positions = [match.usable] if match.usable else []
        running = _Running(self.manager.request(request), match, tables, positions)
        running.inner.sound = running.sound
        if self._state.storage is not None:
            running.inner.stored_with = partial(self._stored, running)
        together(
            partial(self._running.__setitem__, request, running),
            partial(self._plans.pop, request, None),
            *(partial(setattr, lease, "ended", True) for lease in ours),
        )
        return running

    def allocate(
        self, request: Hashable, tokens: int, *, timeout: float | None = 0.0
    ) -> dict[str, Pages]:
        """Grow the request's tables to `tokens` tokens: those of the pass that comes, and no more,
        for blocks before the window are given back by `commit` only. Returns the table of each rule
        by its name, "prefix" for full attention: int32, -1 for blocks before the window.

        Raises:
            OutOfPages: not enough blocks of some rule. Blocks that were added to the tables of
                others stay the request's: call again, or release it.
            ConfigError, LeaseLost: as `KVCacheManager.allocate`.
        """
        with self._lock:
            running = self._request(request)
            wanted = count(tokens, "tokens", 0, 1 << 62)
            blocks = -(-wanted // self.manager.device.block_tokens)
            if any(len(table.blocks) < blocks for table in running.tables):
                self._grow(running, wanted)
            tables = {table.window.rule.name: table.blocks for table in running.tables}
        return {PREFIX: self.manager.allocate(request, tokens, timeout=timeout), **tables}

    def _grow(self, running: _Running, tokens: int) -> None:
        try:
            with Hurried(self.manager.config.time_limit):
                for table in running.tables:
                    try:
                        table.grow(tokens)
                    except OutOfPages:  # unless finished copies still pin blocks
                        self._state.transfers.poll()
                        self._look_at_leaving()
                        table.grow(tokens)
        except LockTimeout as error:
            raise OutOfPages(f"allocate: not now; ask in the next step: {error}") from error

    def load(self, request: Hashable) -> HybridLoadHandle:
        """Copy what was found on the host to the request's blocks: KV, and the pages of windows.
        Returns at once. If a load fails, nothing of the match can be used: `restart`.

        Raises:
            ConfigError: the tables are too short: `allocate` first.
            LeaseLost: no such request.
        """
        with self._lock:
            running = self._request(request)
            for table in running.tables:
                have = len(table.blocks) * table.window.block_tokens
                if table.host is not None and have < running.match.usable:
                    raise ConfigError(
                        f"load {request!r}: expected blocks for {running.match.usable} tokens, "
                        f"found {table.window.rule.name!r} for {have}; allocate them first"
                    )
            kv = self.manager.load(request)
            for table in running.tables:
                if table.host is not None:
                    self._load(running, table, table.host)
            return HybridLoadHandle(running.match.usable, kv, running.loads)

    def _load(self, running: _Running, table: WindowTable, lease: Lease) -> None:
        window, end = table.window, running.match.usable
        slots = slots_of(table.blocks, window.block_tokens, self.start(window.rule, end), end)
        assert window.backend is not None
        self._state.transfers.begin(
            NONE,  # its blocks are of another device index than KV's
            window.backend,
            window.backend.load,
            lease,
            (slots, 0),
            lambda ok, _: self._count(**{"loads" if ok else "failed_loads": 1}),
            of=running.loads,
            instead_of=(table, "host"),
        )

    def restart(self, request: Hashable, *, limit: int = 0) -> WindowMatch:
        """Begin a request again with empty tables, and `allocate` again: after a failed load, from
        its first token. Also instead of `load`, if there are no blocks to load into: with the
        device's part of KV, `match.kv.device`, as its limit.

        Raises:
            ConfigError: no number of tokens.
            LeaseLost: no such request.
        """
        with self._lock:
            running = self._request(request)
            inner = running.inner
            count(limit, "limit", 0, 1 << 62)
            self._leave([request])
            self._counts.subtract(running.counted)
            self.manager.untake(request)
            lookup = LookupRequest(inner.prompt, inner.options, limit)
            return self._begin(request, self._planned(request, lookup, read=False))

    def commit(
        self, request: Hashable, total: int, *, new_tokens: Tokens | None = None
    ) -> Mapping[str, Mapping[int, int]]:
        """As `KVCacheManager.commit`; also saves windows where that is due, and gives back the
        blocks that no later token sees. Returns the blocks to exchange, position -> block, of each
        rule that has any.

        Raises:
            ConfigError, LeaseLost: as `KVCacheManager.commit`; nothing was changed.
        """
        fresh = None if new_tokens is None else [new_tokens]
        return self.commit_many([request], [total], fresh)[0]

    def commit_many(
        self,
        requests: Sequence[Hashable],
        totals: Sequence[int],
        new_tokens: Sequence[Tokens | None] | None = None,
    ) -> list[Mapping[str, Mapping[int, int]]]:
        """`commit` for a batch of different requests. A refused call changes nothing.

        Raises:
            ConfigError, LeaseLost: as `KVCacheManager.commit_many`.
        """
        delivery = Delivery()
        with self._lock:
            batch = [self._request(request) for request in requests]
            changed = self.manager.commit_many(requests, totals, new_tokens)
            for running, blocks in zip(batch, changed, strict=True):
                running.owe(PREFIX, blocks)
            block = self.manager.device.block_tokens
            for running in batch:
                if running.inner.total // block != running.published:
                    self._fail_open.run(partial(self._publish, running), nothing)
                    self._trim(running)
            result: list[Mapping[str, Mapping[int, int]]] = [
                {rule: owed.by(delivery) for rule, owed in running.owed.items() if not owed.told}
                if running.owed
                else {}
                for running in batch
            ]
        delivery.done = True
        return result

    def _publish(self, running: _Running, *, last: bool = False) -> None:
        """Name full blocks, and save windows where that is due.

        Args:
            last: the request ends: its last position is due.
        """
        inner, space, sound = running.inner, running.inner.space, running.sound()
        limit = inner.publishable() if sound else 0
        if space is None or not inner.on_device or not self._state.weights.is_valid(space):
            return
        for table in running.tables:
            self._name(running, table, space, limit)
        for position in self._due(running, limit // self.unit * self.unit, last):
            for table in running.tables:
                self._save(running, table, space, position)
            running.positions.append(position)
        if sound:
            running.published = inner.total // self.manager.device.block_tokens

    def _due(self, running: _Running, full: int, last: bool) -> list[int]:
        """The positions to save, of those before and at `full` that are not saved yet."""
        prompt, saved = running.match.tokens, running.saved
        due = {prompt // self.unit * self.unit, (prompt - 1) // self.unit * self.unit}
        due.update(range(saved // self.every * self.every + self.every, full + 1, self.every))
        due.update([full] if last else [], [running.match.branching or 0])
        return sorted(position for position in due if saved < position <= full)

    def _name(self, running: _Running, table: WindowTable, space: CacheScope, limit: int) -> None:
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
        self, running: _Running, table: WindowTable, space: CacheScope, position: int
    ) -> None:
        """Write the pages that a position needs to the host, except those that are there."""
        window, inner, options = table.window, running.inner, running.inner.options
        begin, block = self.start(window.rule, position), window.block_tokens
        backend, page = window.backend, self.manager.page_tokens
        if backend is None or begin == position:
            return
        if "host" not in options.tiers or options.priority < 0:
            return
        # The copy's own pins: the request may give these blocks back while it runs.
        keys = np.ascontiguousarray(inner.device_chain.keys[begin // block : position // block])
        pins = window.open_index.match(keys, namespace=window.beside(space.host))
        with contextlib.ExitStack() as unless_copied:
            unless_copied.callback(pins.close)
            if len(pins) < len(keys):
                self._count(unsaved=1)
                return
            keys = np.ascontiguousarray(inner.host_chain.keys[begin // page : position // page])
            index, limit = self._indexes[window, Tier.HOST], self.manager.config.time_limit
            try:
                new = index.reserve(
                    keys, 0, shards=backend.shards, namespace=space.host, timeout=limit
                )
            except Abandoned:  # another process has cleared the weights
                self._count(unsaved=1)
                return
            if not len(new.pages):
                self._count(no_room=int(len(new.missing) > 0))
                new.release()
                return
            unless_copied.pop_all()
        self._state.transfers.begin(
            NONE,  # its blocks are of another device index than KV's
            backend,
            backend.offload,
            new,
            (slots_of(pins.pages, block, 0, position - begin),),
            lambda ok, _: self._count(**{"offloads" if ok else "failed_offloads": 1}),
            # What is stored when the request has ended is on the host by then.
            of=None if self._state.storage is None else inner.transfers,
            on_end=lambda _: pins.close(),
        )

    def _trim(self, running: _Running) -> None:
        """Give back blocks that neither later tokens nor later positions need."""
        if not running.sound():
            return
        for table in running.tables:
            begin, window = table.begin, table.window
            self._give_back(table, self.start(window.rule, running.inner.total))
            self._count(freed_blocks=table.begin - begin)

    def _give_back(self, table: WindowTable, tokens: int) -> None:
        held = table.give_back(tokens // table.window.block_tokens)
        if held is not None:
            self._unfreed.append(held)
            self._free()

    def _free(self) -> None:
        """Free blocks without a key; the next `poll` tries again where an index does not answer."""
        for held in list(self._unfreed):
            try:
                with Hurried(self.manager.config.time_limit):
                    held.close()
            except LightcacheError:
                continue
            self._unfreed.remove(held)

    def _request(self, request: Hashable) -> _Running:
        self.manager.request(request)  # raises
        running = self._running.get(request)
        if running is None:
            raise LeaseLost(f"the request {request!r} was taken from the KV manager, not from here")
        running.settle()
        return running

    # ---- the end

    def release(self, request: Hashable, *, publish: bool = True) -> None:
        """End or preempt a request: its last windows are saved, its blocks are given back when no
        copy writes them; full ones stay cached. Harmless if there is no such request.

        Args:
            publish: False: abort; save nothing more.
        """
        self.release_many([request], publish=publish)

    def release_many(self, requests: Sequence[Hashable], *, publish: bool = True) -> None:
        """`release` for several.

        Raises:
            ConfigError: a request's id is not hashable.
        """
        with self._lock:
            check_hashable(requests, "release")
            for request in requests:
                self._forget(request)
            try:
                ending = [self._running[each] for each in requests if each in self._running]
                for running in ending if publish else ():
                    running.settle()
                    self._fail_open.run(partial(self._publish, running, last=True), nothing)
            finally:
                self.manager.release_many(requests, publish=publish)
                self._leave(requests)

    def _leave(self, requests: Sequence[Hashable]) -> None:
        """Move running requests to those that leave, and give back what no load writes."""
        known = [request for request in dict.fromkeys(requests) if request in self._running]
        ending = [self._running[request] for request in known]
        together(
            partial(self._leaving.extend, ending),
            partial(deque, map(self._running.pop, known), 0),
        )
        self._look_at_leaving()

    def _look_at_leaving(self) -> None:
        for running in list(self._leaving):
            running.settle()
            for load in running.loads:
                load.cancel()  # if it waits for `resume`
            for table in running.tables:
                if table.host is not None:
                    table.host.close()
                    table.host = None
            if all(load.finished for load in running.loads):
                for table in running.tables:
                    self._give_back(table, len(table.blocks) * table.window.block_tokens)
                self._leaving.remove(running)

    def poll(self) -> int:
        """Call each step: `KVCacheManager.poll`, and for windows. Returns the number of transfers
        in flight, of KV and windows. Raises as that."""
        with self._lock:
            try:
                return self.manager.poll()
            finally:
                self._look_at_leaving()
                self._free()

    # Copies are of both, and what windows have of cleared weights or tenants is not found.
    begin_update = of_kv(KVCacheManager.begin_update)
    finish_update = of_kv(KVCacheManager.finish_update)
    clear_tenant = of_kv(KVCacheManager.clear_tenant)
    pause = of_kv(KVCacheManager.pause)
    resume = of_kv(KVCacheManager.resume)

    def gauges(self) -> WindowGauges:
        """Current room in each tier, requests and transfers. Takes no lock of another process.

        Raises:
            Detached: the host cache is closed.
        """
        with self._lock:
            rooms = {window.rule.name: window.room() for window in self.windows}
            return WindowGauges(**vars(self.manager.gauges()), windows=rooms)

    @property
    def leaving(self) -> int:
        """Number of ended requests whose blocks of windows a load still writes."""
        return len(self._leaving)

    @property
    def disabled(self) -> bool:
        """Whether nothing is found or saved any more, after too many errors in a row."""
        return self._fail_open.disabled or self.manager.disabled

    def enable(self) -> None:
        """Use the cache again."""
        self._fail_open.enable()
        self.manager.enable()

    def stats(self) -> WindowStats:
        """The counters of windows; those of KV are the manager's."""
        with self._lock:
            counts = self._counts
            groups = {
                rule: GroupHits(**{name: counts[f"{rule}:{name}"] for name in _OF_GROUPS})
                for rule in (PREFIX, *(window.rule.name for window in self.windows))
            }
            return WindowStats(**{name: counts[name] for name in _NAMES}, groups=groups)

    def _count(self, **counts: int) -> None:
        assert counts.keys() <= _NAMES, counts
        self._counts.update(counts)

    def close(self, timeout: float | None = 10.0) -> None:
        """End running requests and plans, and wait for the copies of both.

        Raises:
            WaitTimeout: a copy is still in flight; call again.
            As `poll`, when all of this is done.
        """
        with self._lock:
            for request in list(self._plans):
                self.cancel(request)
            self.release_many(list(self._running), publish=False)
        self.manager.resume()
        try:
            self.manager.wait_blocks(None, timeout)
        finally:
            self.poll()


__all__ = [
    "GroupHits",
    "WindowGauges",
    "WindowManager",
    "WindowMatch",
    "WindowStats",
]
