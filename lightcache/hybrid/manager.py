"""HybridManager: KV and the other groups of a model as one prefix cache, for a scheduler."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from lightcache._arguments import Pages, count
from lightcache._together import together
from lightcache.errors import ConfigError, LeaseLost, LightcacheError, OutOfPages
from lightcache.hashing import Tokens
from lightcache.hybrid.checkpoints import Checkpoints, CheckpointStats, Tier
from lightcache.hybrid.donating import Donor, slot_array, taking_over
from lightcache.hybrid.planning import HybridParts, HybridPlan, HybridPlanner
from lightcache.hybrid.requests import (
    POINT,
    PREFIX,
    HybridLoadHandle,
    HybridMatch,
    HybridRequest,
    Restored,
)
from lightcache.hybrid.saving import (
    Grid,
    HybridConfig,
    RequestSlots,
    Saved,
    SavePlan,
    SavePolicy,
    Stretch,
    check_features,
)
from lightcache.hybrid.window_blocks import WindowBlocks
from lightcache.hybrid.windows import WindowGroups, WindowStats
from lightcache.leases import Allocation, Lease
from lightcache.manager.limits import nothing, seconds_of
from lightcache.manager.lookup import LookupBatch, LookupRequest, begin_when_read
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.request import (
    ANY,
    Delivery,
    PrefixMatch,
    Prompt,
    RequestOptions,
    check_hashable,
)
from lightcache.manager.stats import TierCapacity, TierGauges
from lightcache.manager.transfers import BlockTransfer
from lightcache.manager.weights import WeightsState
from lightcache.manager.write_back import when_there_is_room
from lightcache.plans import TIMEOUT

if TYPE_CHECKING:
    from lightcache.storage.tasks import StorageTask

# ---- The manager


@dataclass(frozen=True)
class HybridGauges(TierGauges):
    """Current room of KV and of other groups; requests and transfers of all together. `device` and
    `host` are KV's. A request is leaving while a copy touches its blocks or its slots; `transfers`
    also counts launches from slot to slot that have not finished."""

    device_states: TierCapacity
    """Slots, in states; all 0 if the engine has its own."""
    host_states: TierCapacity
    """Host pages, in states."""
    windows: Mapping[str, TierCapacity] = field(default_factory=dict)
    """Blocks of the device, by the name of a window's rule."""


P = ParamSpec("P")
R = TypeVar("R")


def of_kv(
    method: Callable[Concatenate[KVCacheManager, P], R],
) -> Callable[Concatenate[HybridManager, P], R]:
    """A method that is the KV manager's of that name."""

    @wraps(method)
    def call(self: HybridManager, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(self.manager, method.__name__)(*args, **kwargs)
        return result

    return call


class HybridManager:
    """Joins a `KVCacheManager`, which has the KV of full attention, with the other groups of a
    model: `Checkpoints` of recurrent states, `WindowBlocks` of layers that see a window or a chunk,
    or both.

    A request makes the same calls as a dense one, on this object: `plan`, `take`, `allocate`,
    `restore` if there are states, `load`, `commit`, `release`; `poll` each step. It has a block
    table for each rule. A hit is as long as KV and all groups reach. Calls share the manager's
    lock; none waits for bytes unless documented.

    Methods with the docstring of `KVCacheManager` are its own: `demote` and others of blocks. They
    leave checkpoints, slots and windows as they are; see `Checkpoints.demote`,
    `Checkpoints.in_flight` and `gauges` for these. What a request commits is found by others once
    its loads have succeeded; a later commit, or its release, makes up for that. Requests that do
    not write to the device save neither states nor windows.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        checkpoints: Checkpoints | None = None,
        grid: Grid | None = None,
        *,
        windows: Sequence[WindowBlocks] = (),
        every: int | None = None,
        config: HybridConfig | None = None,
    ) -> None:
        """The caller closes the parts, after this object: checkpoints and manager, then windows.

        Args:
            checkpoints: with a copier. None: the model has no states.
            grid: with checkpoints: positions at which states are saved, made for the manager's
                blocks and pages. Windows are saved there as well.
            windows: one for each rule.
            every: without states, windows are saved at multiples of so many tokens, rounded up to
                whole blocks and pages; also where a prompt and a request end, and where prompts
                part. A window of n tokens takes n / every of the host bytes that all KV of its
                layers would take. None: 4,096.
            config: of states.

        Raises:
            ConfigError: neither states nor windows; a grid of other blocks or pages, no copier, or
                conflicting settings, all in one message. Of windows: two of one rule or of one
                group of the host cache, other block sizes, blocks that the engine owns, a backend
                without a host cache, a storage and a window without a backend, or states that have
                a cache or a storage of their own.
        """
        block, page = manager.device.block_tokens, manager.page_tokens
        if (checkpoints is None) != (grid is None) or (grid is None and not windows):
            raise ConfigError(
                "hybrid: expected checkpoints with their grid, windows=, or both, found "
                f"checkpoints {checkpoints}, grid {grid} and {len(windows)} windows"
            )
        self.config = config or HybridConfig()
        states = checkpoints is not None
        if grid is None:
            grid = Grid(block, page, 1)
        if checkpoints is None:
            checkpoints = Checkpoints(None, None)
        elif (grid.block_tokens, grid.page_tokens) != (block, page):
            raise ConfigError(
                f"grid: expected one for blocks of {block} tokens and pages of {page}, found {grid}"
            )
        elif checkpoints.copier is None:
            raise ConfigError("checkpoints: expected a copier, found none; give copier=")
        else:
            check_features(self.config, checkpoints, grid)
        self.windows = tuple(windows)
        self.manager, self.checkpoints, self.grid = manager, checkpoints, grid
        step = grid.fine if self.config.tail else grid.grid
        counts = checkpoints.counts
        owner = checkpoints if states else None
        groups = WindowGroups(manager, windows, counts=counts, every=every, states=owner)
        if windows and states:
            self._check_joined(step, groups.unit)
        self.parts = HybridParts(manager, checkpoints, groups, grid, step, states)
        """Shared by its parts."""
        self._policy = SavePolicy(grid, self.config.saves, self.config.tail, self.config.between)
        self.inner = manager.state
        """The state shared by the parts of the KV manager."""
        self._lock = self.inner.lock
        self._planner = HybridPlanner(self.parts)
        self._donor = Donor(self.parts, self.config.drop_tails)
        # A separate guard: the KV manager's calls within these succeed while states fail, and would
        # tell a shared guard that the cache works.
        self._fail_open = self.inner.new_fail_open(self._planner.let_go, "HybridManager")
        self._requests: dict[Hashable, HybridRequest] = {}
        self.inner.trackers.append(checkpoints.transfers)

    def _check_joined(self, step: int, unit: int) -> None:
        """Raises ConfigError: states and windows that cannot be found together."""
        checkpoints, storage = self.checkpoints, self.manager.state.storage
        if step % unit:
            raise ConfigError(
                f"tail: windows are found at multiples of {unit} tokens, states of {step}; "
                "turn it off, or use blocks and pages of one size"
            )
        if checkpoints.host is not None and checkpoints.host is not self.manager.host:
            raise ConfigError(
                "checkpoints: beside windows, expected states in the host cache of KV (run=), "
                "found a cache of their own"
            )
        if storage is not None and (checkpoints.host is None or checkpoints.storage is None):
            raise ConfigError(
                "checkpoints: expected a host cache and a storage, as the manager has a storage: "
                "stored KV without its states is of no use"
            )
        if storage is not None and unit > self.manager.page_tokens:
            raise ConfigError(
                f"storage: with windows and states, expected blocks no larger than host pages, "
                f"which have {self.manager.page_tokens} tokens, found {unit}"
            )

    # ---- lookup

    def plan(
        self,
        request: Hashable,
        prompt: Prompt,
        *,
        options: RequestOptions = ANY,
        limit: int | None = None,
        device_tokens: int | None = None,
    ) -> HybridMatch:
        """Find the last position that KV and all groups accept, over all tiers, and pin what it
        needs tentatively. Otherwise as `KVCacheManager.plan`: cheap when repeated, unless a window
        lacks pages."""
        with self._lock:
            return self._planned(
                self.manager.lookup.batch_of_one(request, prompt, options, limit, device_tokens)
            )[0]

    def plan_many(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        *,
        options: Sequence[RequestOptions] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[HybridMatch]:
        """`plan` for a whole queue in one call."""
        with self._lock:
            return self._planned(
                self.manager.lookup.batch(requests, prompts, options, limits, device_tokens)
            )

    def _planned(self, batch: LookupBatch) -> list[HybridMatch]:
        return self._fail_open.run(
            partial(self._planner.plan, batch),
            lambda: [
                self._missed(request, LookupRequest._make(asks)) for request, asks in batch.entries
            ],
        )

    def peek_many(
        self,
        prompts: Sequence[Prompt],
        *,
        options: Sequence[RequestOptions] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[HybridMatch]:
        """What `plan_many` would find on the device and the host now, of all groups.
        Nothing is pinned, counted as used, or asked of storage, so a later plan may find less.
        Arguments and errors as `KVCacheManager.peek_many`."""
        with self._lock:
            every = self.manager.peek_many(
                prompts, options=options, limits=limits, device_tokens=device_tokens
            )
            options = [ANY] * len(prompts) if options is None else options
            return self._fail_open.run(
                lambda: self._planner.peek(every, prompts, options, limits, device_tokens),
                lambda: [HybridMatch(PrefixMatch(len(prompt)), limit=PREFIX) for prompt in prompts],
            )

    def _missed(self, request: Hashable, lookup: LookupRequest) -> HybridMatch:
        """An empty match: the request runs without the cache."""
        self._planner.forget(request)
        with contextlib.suppress(LightcacheError):  # else its plan expires
            self.parts.unpin(request)
        kv = self.manager.plan(request, lookup.prompt, options=lookup.options, limit=0)
        return HybridMatch(kv, limit=PREFIX)

    def cancel(self, request: Hashable) -> None:
        """Drop a plan. Harmless if there is none."""
        with self._lock:
            check_hashable([request], "cancel")
            self._planner.cancel(request)

    @overload
    def take(self, request: Hashable, *, wait: Literal[True]) -> HybridMatch: ...

    @overload
    def take(self, request: Hashable, *, wait: bool = False) -> HybridMatch | None: ...

    def take(self, request: Hashable, *, wait: bool = False) -> HybridMatch | None:
        """Begin a request, which takes over its plan. Returns None, as `KVCacheManager.take` does,
        while what it needs is being read from storage: call again in the next step.

        Args:
            wait: block until reading has finished or timed out.

        Raises:
            LeaseLost: not planned, or cancelled; plan it first.
            ConfigError: the request is running already.
        """
        return begin_when_read(
            self._lock,
            partial(self.manager.check_take, request),
            partial(self._planner.reading, request),
            partial(self._begin, request),
            self._fail_open,
            wait,
        )

    def _begin(self, request: Hashable) -> HybridMatch:
        """Begin a request with the pages present now. If its plan expired and its pins were
        released, look for them once more."""
        plan = self._planner.taken(request)
        try:
            return self._taken(request, plan)
        except LeaseLost:
            if plan is None:
                raise
        options = plan.asked.options
        longer = replace(options, ttl=max(options.ttl or 0.0, TIMEOUT))
        lookup = plan.asked.prompt, longer, plan.asked.limit
        tokens = None if plan.given is None else (plan.given,)
        self._planned(LookupBatch(((request, lookup),), tokens))
        return self._taken(request, self._planner.taken(request), again=True)

    def _taken(
        self, request: Hashable, plan: HybridPlan | None, *, again: bool = False
    ) -> HybridMatch:
        """Take the other groups first: without them no KV is taken.

        Args:
            again: False: raises LeaseLost if something of a group has gone.
        """
        manager, leases = self.manager, {}
        position, complete = 0 if plan is None else plan.position, plan is not None
        try:
            if plan is not None:
                found = self._fail_open.run(partial(self._planner.take, request, plan), nothing)
                complete, leases = found is not None, found or {}
                if not (complete or again):
                    raise LeaseLost(f"take: the pins of {request!r} have expired")
            if position and not complete and plan is not None:  # cleared meanwhile
                manager.plan(request, plan.asked.prompt, options=plan.asked.options, limit=0)
            kv = manager.begin(request)
            if kv.usable and not (complete and kv.usable == position):
                kv = self._take_nothing(request)
            if not kv.usable:
                for lease in leases.values():
                    lease.close()
                leases = {}
            return self._made(request, plan, kv, leases)
        except BaseException:
            if request not in self._requests:
                for lease in leases.values():
                    lease.close()
            self._planner.cancel(request)
            raise

    def _take_nothing(self, request: Hashable) -> PrefixMatch:
        """A taken request restarts from its first token."""
        inner = self.manager.untake(request)
        self.manager.plan(request, inner.prompt, options=inner.options, limit=0)
        return self.manager.begin(request)

    def _made(
        self,
        request: Hashable,
        plan: HybridPlan | None,
        kv: PrefixMatch,
        leases: Mapping[str, Lease],
    ) -> HybridMatch:
        """A running request. It takes over all pins in the instant in which it is known."""
        windows, usable, page = self.parts.windows, kv.usable, self.manager.page_tokens
        deep, limit = usable, None
        tiers: Mapping[str, Tier] = {}
        if plan is not None:
            deep = max(plan.kv.usable, usable)
            kv = plan.stored.attributed(kv, usable, page)
            limit = self._planner.limit(plan, deep, usable)
            tiers = plan.tiers if usable else tiers
        branching = self.grid.branching(deep, usable)
        match = HybridMatch(kv, deep, usable, tiers, limit, branching)
        inner = self.inner.requests.get(request)
        assert inner is not None
        states = None
        if inner.space is not None and inner.options.write and "device" in inner.options.tiers:
            states = self.parts.states_of(inner.space)
        checkpoint = leases.get(POINT)
        found = None if checkpoint is None else (tiers[POINT], checkpoint)
        running = HybridRequest(inner, match, states, found, self._counted(match, plan))
        inner.sound = running.sound
        known = partial(self._requests.__setitem__, request, running)
        counted = self._counting(running, 1)
        if self.windows:
            ours = windows.begin(running, match, leases)
            together(known, *[partial(setattr, lease, "ended", True) for lease in ours], counted)
        else:
            together(known, counted)
        return match

    def _counting(self, running: HybridRequest, times: int) -> partial[Any]:
        """For `together`: count a request that begins, or once less."""
        counts = self.checkpoints.counts
        after = {name: counts[name] + times * count for name, count in running.counted.items()}
        return partial(dict.update, counts, after)

    def _counted(self, match: HybridMatch, plan: HybridPlan | None) -> Counter[str]:
        """What a request that begins adds to the counters."""
        usable, page, tier = match.usable, self.manager.page_tokens, match.tier
        counted = Counter(requests=1, usable_tokens=usable, unusable_tokens=match.unusable)
        if tier is not None and plan is not None:
            counted[f"{tier.value}_hits"] = 1
            brought = plan.stored.brought * (self.parts.step if plan.stored.there is None else page)
            counted["storage_hits"] = int(brought == usable and tier is Tier.HOST)
        if self.windows:
            stored = plan is not None and plan.stored.reached(usable, page)
            counted.update(self.parts.windows.counted(match, stored))
        return counted

    # ---- running

    def allocate(
        self, request: Hashable, tokens: int, *, timeout: float | None = 0.0
    ) -> dict[str, Pages]:
        """Grow the request's tables to `tokens` tokens. With windows: those of the pass that comes,
        and no more, for blocks before a window are given back by `commit` only. Returns the table
        of each rule by its name, "prefix" for full attention: int32, -1 for blocks before a window.

        Raises:
            OutOfPages: not enough blocks of some rule. Blocks that were added to the tables of
                others stay the request's: call again, or release it.
            ConfigError, LeaseLost: as `KVCacheManager.allocate`.
        """
        if not self.windows:
            return {PREFIX: self.manager.allocate(request, tokens, timeout=timeout)}
        limit = seconds_of(timeout)
        if limit == 0:  # nearly always
            with self._lock:
                tables = self._grown(request, tokens)
            return {PREFIX: self.manager.allocate(request, tokens), **tables}
        end = None if limit is None else time.monotonic() + limit
        grown = partial(self._grown, request, tokens)
        tables = when_there_is_room(self._lock, grown, self.parts.windows.writing, limit)
        left = None if end is None else max(0.0, end - time.monotonic())
        return {PREFIX: self.manager.allocate(request, tokens, timeout=left), **tables}

    def _grown(self, request: Hashable, tokens: int) -> dict[str, Pages]:
        """The tables of windows, with blocks for so many tokens."""
        running, windows = self._request(request), self.parts.windows
        wanted = count(tokens, "tokens", 0, 1 << 62)
        try:
            windows.grow(running, wanted)
        except OutOfPages:  # unless finished copies still pin blocks
            self.inner.transfers.poll()
            self._donor.poll()
            windows.grow(running, wanted)
        return {table.window.rule.name: table.blocks for table in running.tables}

    can_allocate = of_kv(KVCacheManager.can_allocate)

    def commit(
        self,
        request: Hashable,
        total: int,
        *,
        new_tokens: Tokens | None = None,
        table: Pages | None = None,
    ) -> Mapping[str, Mapping[int, int]]:
        """As `KVCacheManager.commit`; also saves windows where that is due, and gives back the
        blocks that no later token sees. Returns the blocks to exchange, position -> block, of each
        rule that has any.

        Raises:
            ConfigError, LeaseLost: as `KVCacheManager.commit`; nothing was changed.
        """
        fresh = None if new_tokens is None else [new_tokens]
        return self.commit_many([request], [total], fresh, None if table is None else [table])[0]

    def commit_many(
        self,
        requests: Sequence[Hashable],
        totals: Sequence[int],
        new_tokens: Sequence[Tokens | None] | None = None,
        tables: Sequence[Pages] | None = None,
    ) -> list[Mapping[str, Mapping[int, int]]]:
        """`commit` for a batch of different requests. A refused call changes nothing.

        Raises:
            ConfigError, LeaseLost: as `KVCacheManager.commit_many`.
        """
        delivery = Delivery()
        with self._lock:
            check_hashable(requests, "commit")
            batch = [self._request(request) for request in requests]
            changed = self.manager.commit_many(requests, totals, new_tokens, tables)
            for running, blocks in zip(batch, changed, strict=True):
                running.owe(PREFIX, blocks)
            if self.windows:
                self._publish(batch)
            result: list[Mapping[str, Mapping[int, int]]] = [
                {rule: owed.by(delivery) for rule, owed in running.owed.items() if not owed.told}
                if running.owed
                else {}
                for running in batch
            ]
        delivery.done = True
        return result

    def _publish(self, batch: Sequence[HybridRequest]) -> None:
        """Name and save windows, and give back their blocks, where that is due."""
        block, windows = self.manager.device.block_tokens, self.parts.windows
        for running in batch:
            if running.inner.total // block != running.published:
                self._fail_open.run(partial(windows.publish, running), nothing)
                windows.trim(running)

    wait_blocks = of_kv(KVCacheManager.wait_blocks)
    evicted = of_kv(KVCacheManager.evicted)
    evicting = of_kv(KVCacheManager.evicting)
    demote = of_kv(KVCacheManager.demote)

    def restore(
        self,
        requests: Sequence[Hashable],
        slots: Sequence[Sequence[int]] | None = None,
        stream: Any = None,
    ) -> Restored:
        """Give taken requests their slots, and begin to fill each working slot with the initial
        state: copied from a device checkpoint, loaded from the host, or zero. One launch makes all
        copies. A checkpoint stays pinned until its copy has been executed. Does not block.

        Args:
            slots: the engine's, if checkpoints have no device slots: for each request a working
                slot, and `RequestSlots.needed` slots to save in, or none of these. Steps that use
                them may be in flight on the current stream only.
            stream: the computing stream, for copies and zeros; None: the current one. Loads from
                the host always wait for the current stream: no step uses a free slot of the cache.

        Raises:
            OutOfPages: fewer working slots than requests. Nothing changed; release a request.
            ConfigError: invalid slots, or a request that was restored before.
            LeaseLost: no such request.
        """
        with self._lock:
            running = [self._request(name) for name in requests]
            self._check_states("restore")
            for request in running:
                if request.slots is not None:
                    raise ConfigError(
                        f"restore: {request.inner.id!r} has its slots already; restart or release "
                        "it if its restore was interrupted"
                    )
            if slots is not None:
                self._give_slots(running, slots)
            elif running:
                with self._acquired(len(running)) as acquired:
                    numbers = acquired.pages.reshape(len(running), -1).tolist()
                    self._give_slots(running, numbers, taking_over(acquired))
            return self._launch(running, stream)

    def _give_slots(
        self,
        running: list[HybridRequest],
        numbers_of: Sequence[Sequence[int]],
        *calls: partial[Any],
    ) -> None:
        """Give all requests their slots, and make these calls, in one instruction."""
        loose = self.checkpoints.loose if self.checkpoints.slots is not None else None
        slots_of = [
            RequestSlots(
                numbers[0],
                numbers[1:],
                ahead=self.config.ahead,
                keep=request.match.branching,
                loose=loose,
            )
            for request, numbers in zip(running, numbers_of, strict=True)
        ]
        each = zip(running, slots_of, strict=True)
        together(*(partial(setattr, request, "slots", slots) for request, slots in each), *calls)

    def _acquired(self, requests: int) -> Allocation:
        """Slots for each request: only a working slot if there are too few."""
        needed = RequestSlots.needed(self.config.ahead) if self.config.alternating else 0
        try:
            return self.checkpoints.acquire(requests * (1 + needed))
        except OutOfPages:
            return self.checkpoints.acquire(requests)

    def _launch(self, running: list[HybridRequest], stream: Any) -> Restored:
        slots_of = [request.own_slots for request in running]
        loads: dict[Hashable, BlockTransfer] = {}
        pairs: list[tuple[HybridRequest, int, int]] = []
        empty: list[HybridRequest] = []
        for request, slots in zip(running, slots_of, strict=True):
            if request.found is None:
                empty.append(request)
            elif request.found[0] is Tier.DEVICE:
                pairs.append((request, int(request.found[1].pages[0]), slots.working))
            else:
                loads[request.inner.id] = self.checkpoints.load(
                    request.found[1],
                    slots.working,
                    of=request.transfers,
                    into=(request, "loading"),
                    instead_of=(request, "found"),
                )
        working = slot_array([slots.working for slots in slots_of])
        zeroed = self._donor.zero(empty, stream)
        sources = targets = slot_array([])
        if pairs:
            sources, targets = self._donor.copy(pairs, stream)
            self.checkpoints.counts.update(copies=len(pairs))
        return Restored(working, sources, targets, zeroed, loads)

    def load(self, request: Hashable, table: Pages | None = None) -> HybridLoadHandle:
        """Begin to load what was found on the host to the device, KV and windows, after `allocate`
        of `match.usable` tokens; see `KVCacheManager.load`. The result covers the state's load as
        well, so call `restore` first. Copies nothing if the device has all of it.

        Raises:
            ConfigError: it was not restored, or a table is shorter than the match.
            LeaseLost, Detached: as `KVCacheManager.load`.
        """
        with self._lock:
            running, usable = self._request(request), 0
            if self.parts.states and running.slots is None:
                raise ConfigError(
                    f"load {request!r}: restore it first, or `skip_load` what it found"
                )
            usable = running.match.usable
            for windows_table in running.tables:
                have = len(windows_table.blocks) * windows_table.window.block_tokens
                if have < usable:
                    raise ConfigError(
                        f"load {request!r}: expected blocks for {usable} tokens, found "
                        f"{windows_table.window.rule.name!r} for {have}; allocate them first"
                    )
            kv = self.manager.load(request, table)
            for windows_table in running.tables:
                if windows_table.host is not None:
                    self.parts.windows.load(running, windows_table, windows_table.host)
            states = [] if running.loading is None else [running.loading]
            return HybridLoadHandle(usable, kv, [*states, *running.loads])

    def skip_load(self, request: Hashable) -> HybridMatch:
        """Call instead of `restore` and `load` if there is no room for the KV to load: takes the
        last position within the KV on the device instead, with empty tables. Returns the new match.

        Raises:
            ConfigError: the request was restored already.
        """
        with self._lock:
            running = self._request(request)
            if running.slots is not None:
                raise ConfigError(f"skip_load {request!r}: it was restored already; restart it")
            if not running.match.kv.load:
                return running.match
            self._begin_anew(running, running.match.device_tokens)
            return self._request(request).match

    def restart(self, request: Hashable, stream: Any = None) -> HybridMatch:
        """Restart a request after a failed load: from its first token, in the same slots, with
        empty tables; `allocate` again.

        Raises:
            ConfigError: it was not restored, or its state's load is in flight; wait for it.
            LeaseLost: no such request.
        """
        with self._lock:
            running = self._request(request)
            slots, loading = running.slots, running.loading
            unfinished = loading is not None and not loading.finished
            if self.parts.states and (slots is None or unfinished):
                raise ConfigError(f"restart {request!r}: restore it, and wait for its loads first")
            self._begin_anew(running, 0)
            restarted = self._request(request)
            if slots is not None:
                restarted.transfers = running.transfers
                together(
                    partial(setattr, running, "slots", None),
                    partial(setattr, restarted, "slots", slots),
                )
                slots.reject(0)
                slots.keep = restarted.match.branching
                self._donor.zero([restarted], stream)
            self._donor.poll()  # blocks of windows go back
            return restarted.match

    def _begin_anew(self, running: HybridRequest, limit: int) -> None:
        """Plan and take again, with at most `limit` tokens. Until the caller takes them, its slots
        are those of a request that has ended."""
        inner = running.inner
        together(
            partial(self._donor.ending.append, running),
            partial(self._requests.pop, inner.id),
            self._counting(running, -1),
        )
        running.let_go()
        self.manager.untake(inner.id)
        self.plan(inner.id, inner.prompt, options=inner.options, limit=limit)
        self._begin(inner.id)

    # ---- saving

    def save_plan(self, request: Hashable, begin: int, end: int) -> SavePlan:
        """The state that a forward pass over tokens [begin, end) of the prompt saves, and the
        position at which the pass must end for that.

        Raises:
            ConfigError: tokens outside of the prompt.
            LeaseLost: no such request.
        """
        with self._lock:
            running = self._request(request)
            stretch = Stretch(
                begin,
                end,
                running.match.tokens,
                running.match.usable,
                running.match.branching,
            )
            if running.states is None:
                return SavePlan(begin, end, None)
            return self._policy.plan(stretch)

    def saving(self, request: Hashable, position: int) -> int | None:
        """The slot to which the pass being launched writes the state after `position` tokens: for
        states inside a pass, and for engines that write two states in a pass. None: save nothing.

        Raises:
            ConfigError: not a position at which checkpoints are looked up, or not after those saved
                before.
        """
        with self._lock:
            slots = self._saving(request, position)
            return None if slots is None else slots.begin_save(position)

    def next_slot(self, request: Hashable, position: int) -> int | None:
        """As `saving`, without a copy, for kernels that read one slot and write another: the
        working slot keeps the state after `position` tokens. The step being launched begins at that
        position or crosses it, and writes the returned slot, which is the working slot from now on;
        call `saved` with the results of this step. None: save nothing, continue in the same slot.

        Raises:
            ConfigError: as `saving`.
        """
        with self._lock:
            slots = self._saving(request, position)
            return None if slots is None else slots.next_slot(position)

    def _saving(self, request: Hashable, position: int) -> RequestSlots | None:
        """The slots of a request that saves at this position. None: it saves nothing."""
        running = self._request(request)
        slots = running.own_slots
        if position < 1 or position % self.parts.step:
            raise ConfigError(
                f"saving {request!r}: expected a position that is a multiple of "
                f"{self.parts.step}, found {position}; use that of `save_plan`"
            )
        if running.states is None:
            return None
        running.due.add(position)
        # states that found no replacement slot, or waited for a load
        self._donor.exchange(running, slots)
        return slots

    def save(
        self, requests: Sequence[Hashable], positions: Sequence[int], stream: Any = None
    ) -> list[bool]:
        """Copy each request's working slot to its save slot, in one launch after the forward pass
        that ends at these positions. Returns which are saved. Call `saved` when the results have
        arrived."""
        with self._lock:
            running = [self._request(name) for name in requests]
            slots = [self.saving(*each) for each in zip(requests, positions, strict=True)]
            pairs = [
                (request, request.own_slots.working, slot)
                for request, slot in zip(running, slots, strict=True)
                if slot is not None
            ]
            if pairs:
                self._donor.copy(pairs, stream)
            return [slot is not None for slot in slots]

    def saved(self, request: Hashable, position: int) -> bool:
        """Confirm a save: the results of its pass have arrived. A state of the prompt becomes a
        checkpoint now if a replacement slot is free and the request's loads have succeeded;
        while a load is in flight it waits for the end, and after a failed load it never becomes
        one. A state of generated tokens becomes a checkpoint when the request ends. Returns whether
        it is one now.

        Raises:
            ConfigError: not the oldest save in flight.
        """
        with self._lock:
            running = self._request(request)
            slots = running.own_slots
            slots.confirm(position)
            newest = slots.newest
            if newest is None or newest.position != position or position > running.match.tokens:
                return False  # rejected, or from decoding, whose last state is donated at the end
            if self.checkpoints.slots is None:
                return self._donor.lend(running, slots, newest)
            return position in self._donor.exchange(running, slots)

    def reject(self, request: Hashable, accepted: int) -> Saved | None:
        """Speculation failed and only the first `accepted` tokens count: see
        `RequestSlots.reject`."""
        with self._lock:
            slots = self._request(request).slots
            return None if slots is None else slots.reject(accepted)

    # ---- the end

    def release(
        self,
        request: Hashable,
        *,
        at: int | None = None,
        kept: int | None = None,
        publish: bool = True,
        stream: Any = None,
    ) -> int:
        """End or preempt a request: its newest saved state becomes a checkpoint, and so does the
        state of the branching point if it is not one yet; its slots go back when no copy uses them.
        Harmless if there is no such request.

        Args:
            at: position of the working slot's state, if no step of the request is in flight: it can
                be donated like a saved state. None: a step may still write its slots.
            kept: maximum tokens to keep; None: all committed ones.
            publish: False: abort; make no checkpoint.
            stream: of its last step; None: the current one.

        Returns:
            Position of the last state donated now; 0: none.
        """
        return self.release_many([request], at=[at], kept=[kept], publish=publish, stream=stream)[0]

    def release_many(
        self,
        requests: Sequence[Hashable],
        *,
        at: Sequence[int | None] | None = None,
        kept: Sequence[int | None] | None = None,
        publish: bool = True,
        stream: Any = None,
    ) -> list[int]:
        """`release` for several different requests, which ran on one stream; one mark on it waits
        for the steps of all. Does not block.

        Args:
            at, kept: as for `release`, for each request; None: None for all.

        Returns:
            For each request, the position of the last state donated now; 0: none.

        Raises:
            ConfigError: lists of different lengths, a request that is named twice, or an id that
                is not hashable. Nothing changed.
        """
        n = len(requests)
        if check_hashable(requests, "release") != n:
            raise ConfigError("release: one of the requests is named twice; name each once")
        at, kept = [None] * n if at is None else at, [None] * n if kept is None else kept
        for name, values in (("at", at), ("kept", kept)):
            if len(values) != n:
                raise ConfigError(
                    f"{name}: expected one for each of {n} requests, found {len(values)}"
                )
        with self._lock:
            for request in requests:
                self._planner.cancel(request)
            rows = [row for row, request in enumerate(requests) if request in self._requests]
            running, positions = [self._requests[requests[row]] for row in rows], [0] * n
            for row, each in zip(rows, running, strict=True):
                each.ended = at[row] is not None, stream
                if self.windows and publish:
                    self._publish_last(each, at[row])
            together(
                partial(self._donor.ending.extend, running),
                *(partial(self._requests.pop, requests[row]) for row in rows),
            )
            try:
                ended = self._donor.end(
                    running, [kept[i] for i in rows], [at[i] for i in rows], publish
                )
                for row, position in zip(rows, ended, strict=True):
                    positions[row] = position
            finally:
                try:
                    self.manager.release_many(requests, publish=publish)
                finally:
                    self._donor.poll()
            return positions

    def _publish_last(self, running: HybridRequest, at: int | None) -> None:
        """Save the last windows of a request that ends."""
        running.settle()
        if at is not None and at % self.parts.step == 0:
            running.due.add(at)
        last = partial(self.parts.windows.publish, running, last=True)
        self._fail_open.run(last, nothing)

    def poll(self) -> int:
        """Call in each step: `KVCacheManager.poll` for KV, states and windows. Returns the number
        of copies in flight."""
        with self._lock:
            try:
                going = self.manager.poll()
            finally:  # an error of one transfer backend does not stop the other
                try:
                    states = self.checkpoints.poll()
                finally:
                    self._donor.poll()
                    self.parts.windows.poll()
            return going + states

    # ---- blocks of the device

    def in_flight(self, blocks: Pages | Sequence[int] | None = None) -> Any:
        """Which of these device blocks a copy reads or writes, as `KVCacheManager.in_flight`; for
        slots see `Checkpoints.in_flight`. None: the number of transfers of KV and states, as
        `poll`."""
        with self._lock:
            found = self.manager.in_flight(blocks)
            return found if blocks is not None else found + self.checkpoints.in_flight()

    @property
    def leaving(self) -> int:
        """Number of ended requests whose slots, or blocks of windows, a copy still uses."""
        return self._donor.going

    def close(self, timeout: float | None = 10.0) -> None:
        """End running requests and plans, wait for copies of states and windows.

        Raises:
            WaitTimeout: a copy is still in flight; call again.
            As `poll`, when all of this is done.
        """
        with self._lock:
            self._planner.close()
            self.release_many(list(self._requests), publish=False)
            self.parts.windows.close()
        if self.windows:  # their copies are the KV manager's
            self.manager.resume()
        try:
            self.checkpoints.close(timeout)
            if self.windows:
                self.manager.wait_blocks(None, timeout)
        finally:  # slots with finished copies go back, whatever the others do
            self.poll()

    # ---- prefixes, independent of running requests

    def protect(self, prompt: Prompt) -> Mapping[str, int]:
        """As `KVCacheManager.protect`, and the last checkpoint within that KV, in each tier.
        Returns the tokens of KV protected, by tier, and under "checkpoints" their number.

        Raises:
            Detached: the manager is closed.
            LockTimeout: as `PageIndex.protect`; a part may be protected.
        """
        with self._lock:
            tokens = self.manager.protect(prompt)
            path = self.parts.path_of(prompt, max(tokens.values()))
            return {**tokens, "checkpoints": 0 if path is None else self.checkpoints.protect(path)}

    def unprotect(self, prompt: Prompt) -> Mapping[str, int]:
        """Undo `protect`. Returns what was protected, as `protect` does.

        Raises:
            Detached, LockTimeout: as `protect`.
        """
        with self._lock:
            tokens = self.manager.unprotect(prompt)
            path = self.parts.path_of(prompt, len(prompt))
            count = 0 if path is None else self.checkpoints.unprotect(path)
            return {**tokens, "checkpoints": count}

    def drop(self, prompt: Prompt, start: int = 0) -> Mapping[str, int]:
        """As `KVCacheManager.drop`, and all checkpoints after token `start` that are not in use.
        Returns the tokens of KV dropped, by tier, and the number of "checkpoints".

        Raises:
            ConfigError, Detached, LockTimeout: as `KVCacheManager.drop`.
        """
        with self._lock:
            tokens = self.manager.drop(prompt, start)
            path = self.parts.path_of(prompt, len(prompt))
            count = 0 if path is None else self.checkpoints.drop(path, start // self.parts.step)
            return {**tokens, "checkpoints": count}

    def prefetch(self, prompt: Prompt) -> list[StorageTask]:
        """Begin to read a prompt's KV and its last stored checkpoint, or the last position that
        storage has of KV and windows, to the host before a request needs them. Returns the tasks:
        one for each that has a storage and a position. Does not block.

        Raises:
            ConfigError: neither KV nor the checkpoints have a storage.
            Abandoned, Detached: as `KVCacheManager.prefetch`.
        """
        with self._lock:
            if self.windows:
                scope = self.manager.scope_to_prefetch(prompt)
                task = self._planner.prefetch(LookupRequest(prompt), scope, 0)
                return [] if task is None else [task]
            storage, tasks = self.checkpoints.storage, []
            if self.inner.storage is not None or storage is None:
                tasks.append(self.manager.prefetch(prompt))
            path = self.parts.path_of(prompt, LookupRequest(prompt).most)
            if storage is not None and path is not None:
                space, groups = path.space.host, self.checkpoints.groups
                tasks.append(storage.prefetch_last_ready(path.keys, groups=groups, namespace=space))
            return tasks

    def set_blocks(self, blocks: int) -> None:
        """See `KVCacheManager.set_blocks`: plans are forgotten, with their checkpoints. Slots
        stay."""
        with self._lock:
            self.manager.set_blocks(blocks)
            self._planner.close()

    # ---- for the parts

    def _request(self, request: Hashable) -> HybridRequest:
        running = self._requests.get(request)
        if running is None:
            if request in self.inner.requests:
                raise LeaseLost(f"{request!r} was taken from the KV manager, not from here")
            raise LeaseLost(f"there is no running request {request!r}; plan and take it first")
        if running.tables:
            running.settle()
        return running

    def _check_states(self, call: str) -> None:
        if not self.parts.states:
            raise ConfigError(f"{call}: the model has no states; leave the call out")

    # ---- transfers and weights

    pause = of_kv(KVCacheManager.pause)
    resume = of_kv(KVCacheManager.resume)

    @property
    def weights_state(self) -> WeightsState:
        """See `KVCacheManager.weights_state`; states go with KV."""
        return self.manager.weights_state

    def begin_update(self, timeout: float | None = None, *, wait: bool = True) -> None:
        """As `KVCacheManager.begin_update`, for KV and states."""
        timeout = seconds_of(timeout)
        with self._lock:
            version = self.inner.weights.version
            self.manager.begin_update(wait=False)
            self.checkpoints.clear(version, everywhere=self.inner.weights.ours)
        if wait:
            self.inner.wait(timeout)

    def finish_update(self, version: str) -> None:
        """As `KVCacheManager.finish_update`."""
        with self._lock:
            self.checkpoints.clear(self.inner.weights.version, everywhere=False)
            self.manager.finish_update(version)

    def clear_tenant(self, tenant: str) -> bool:
        """As `KVCacheManager.clear_tenant`, for KV and states."""
        with self._lock:
            weights = self.inner.weights.version
            cleared = self.manager.clear_tenant(tenant)
            if cleared:
                self.checkpoints.clear(weights, tenant)
            return cleared

    @property
    def disabled(self) -> bool:
        """Whether the cache of KV, or both caches, are disabled after too many errors: then nothing
        is usable."""
        return self._fail_open.disabled or self.manager.disabled

    def enable(self) -> None:
        """Enable both again. `KVCacheManager.enable` alone does not."""
        self.manager.enable()
        self._fail_open.enable()

    def stats(self) -> CheckpointStats:
        """This process's figures of requests and checkpoints; `KVCacheManager` has those of KV."""
        return self.checkpoints.stats()

    def window_stats(self) -> WindowStats:
        """This process's figures of windows."""
        with self._lock:
            return self.parts.windows.stats()

    def gauges(self) -> HybridGauges:
        """Current room in each tier, requests and transfers, of all groups. Does not block.

        Raises:
            Detached: a cache of KV or states is closed.
        """
        with self._lock, self.checkpoints.lock:
            states, figures = self.checkpoints.room(), vars(self.manager.gauges())
            figures = {**figures, "leaving": figures["leaving"] + self._donor.slots_alone}
            return HybridGauges(
                **figures,
                device_states=states["device"],
                host_states=states["host"],
                windows={window.rule.name: window.room() for window in self.windows},
            )


__all__ = ["HybridGauges", "HybridManager"]
