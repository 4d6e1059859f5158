"""Lookup for hybrid models: the last position that KV and all other groups accept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import LeaseLost, LightcacheError
from lightcache.hybrid.checkpoints import Path, StateSpace, Tier, last_ready
from lightcache.hybrid.requests import POINT, PREFIX, HybridMatch, HybridRequest
from lightcache.hybrid.windows import WindowGroups
from lightcache.leases import Lease
from lightcache.manager.limits import Foreign
from lightcache.manager.lookup import Arguments, LookupBatch, LookupRequest, peeked
from lightcache.manager.request import NO_KEYS, CacheScope, PrefixMatch, Prompt, RequestOptions

if TYPE_CHECKING:
    from lightcache.hybrid.checkpoints import Checkpoints, Found
    from lightcache.hybrid.saving import Grid
    from lightcache.manager.manager import KVCacheManager
    from lightcache.manager.state import ManagerState
    from lightcache.storage.tasks import StorageTask


# ---- State shared by the parts of a hybrid manager

Where = tuple[CacheScope | None, "StateSpace | None"]
"""The namespaces of a tenant's KV and states; None: there are none."""


@dataclass(frozen=True)
class HybridParts:
    """The manager of KV, the other groups, and the grid of one hybrid model."""

    manager: KVCacheManager
    checkpoints: Checkpoints
    """Without tiers if the model has no states."""
    windows: WindowGroups
    grid: Grid
    step: int
    """Every position is a multiple of it, in tokens."""
    states: bool
    """Whether the model has states."""

    # Cached: each plan reads them.

    @cached_property
    def inner(self) -> ManagerState:
        """The state shared by the manager's parts."""
        return self.manager.state

    @cached_property
    def by_blocks(self) -> bool:
        """Whether keys are those of device blocks, not of host pages."""
        return self.grid.block_tokens <= self.grid.page_tokens

    def states_of(self, space: CacheScope) -> StateSpace | None:
        """The namespaces of a scope's states; None: it was cleared."""
        weights = self.inner.weights
        return self.checkpoints.spaces.beside(space.host, lambda: weights.is_valid(space))

    def where(self, tenant: str) -> Where:
        """The namespaces of a tenant, opened if needed."""
        space = self.inner.weights.scope_of(tenant)
        return space, None if space is None else self.states_of(space)

    def path_of(self, prompt: Prompt, tokens: int) -> Path | None:
        """The positions among the first tokens of a prompt; None: there are none, or its tenant or
        weights were cleared."""
        space, states = self.where(prompt.tenant)
        if space is None or states is None or tokens < self.step:
            return None
        return Path(self.keys_of(prompt, space)[: tokens // self.step], states)

    def path_so_far(self, request: HybridRequest) -> Path | None:
        """The positions of a running request's tokens; None: it may not save, or it has ended."""
        running = self.inner.requests.get(request.inner.id)
        if request.states is None or running is None or running.space is None:
            return None
        chain = running.device_chain if self.by_blocks else running.host_chain
        return Path(self.strided(chain.keys), request.states)

    def unpin(self, request: Hashable) -> None:
        """Drop what other groups than KV have pinned for a waiting request."""
        self.checkpoints.cancel(request)
        self.windows.unpin(request)

    def keys_of(self, prompt: Prompt, space: CacheScope) -> Keys:
        """Keys of the positions of a prompt at which checkpoints are looked up."""
        every = prompt.keys(space.device_spec if self.by_blocks else space.host_spec)
        return every if self.ratio == 1 else self.strided(every)

    @cached_property
    def ratio(self) -> int:
        """Of all keys of a sequence, checkpoints are looked up at each so many-th."""
        return self.step // self.grid.fine

    def strided(self, every: Keys) -> Keys:
        """Of all keys of a sequence, those at which checkpoints are looked up."""
        ratio = self.ratio
        return every if ratio == 1 else np.ascontiguousarray(every[ratio - 1 :: ratio])


# ---- Storage lookup: once for each request


@dataclass(eq=False)
class Stored:
    """Storage reads for a waiting request: of the last position that storage has whole, or, where
    states have a storage of their own, of its state and then of KV up to it."""

    state: StorageTask | None = None
    """Reads the last stored checkpoint, or the whole position, to the host."""
    kv: StorageTask | None = None
    """Reads KV up to that checkpoint."""
    there: int | None = None
    """Tokens of KV that were there before a whole position was read. None: states are read
    alone."""
    seen: bool = False
    """Whether the arrival of `state` was noticed."""

    @property
    def running(self) -> list[StorageTask]:
        """Tasks that have not finished; while there are any, more may be found."""
        every = (self.state, self.kv)
        return [task for task in every if task is not None and not task.ended]

    @property
    def news(self) -> bool:
        """Whether `state` has arrived since the last lookup."""
        return self.state is not None and self.state.ended and not self.seen

    @property
    def brought(self) -> int:
        """Positions up to the checkpoint that was read, or pages; 0: none."""
        if self.state is None or not self.state.ended:
            return 0
        return self.state.pages_done

    @property
    def kv_pages(self) -> int:
        """Host pages of KV that were read."""
        return 0 if self.kv is None else self.kv.pages_done

    def reached(self, position: int, page_tokens: int) -> bool:
        """Whether what this position lacked was read, with all of its groups."""
        if self.state is None or self.there is None or not self.state.ended:
            return False
        return 0 < position <= self.brought * page_tokens and self.state.result.loaded > 0

    def attributed(self, kv: PrefixMatch, usable: int, page_tokens: int) -> PrefixMatch:
        """A match of KV that counts these pages as read from storage."""
        if self.state is None:
            return kv
        tokens = self.kv_pages * page_tokens
        if self.there is not None:
            tokens = max(0, usable - self.there) if self.reached(usable, page_tokens) else 0
        tokens = min(kv.host, tokens)
        if not tokens:
            return kv
        return replace(kv, host=kv.host - tokens, storage=kv.storage + tokens)

    def cancel(self, foreign: Foreign) -> None:
        """Cancel the reads."""
        for task in self.running:
            foreign.cancel(task)


# ---- What a request may read of one group


class Side(Protocol):
    """What a request may read of one rule, in all tiers, for the planner: of a window, or of
    states."""

    rule: str
    """Its name."""
    tier: Tier | None
    """The tier that has what was pinned last; None: the position needs nothing of this rule."""

    def needs(self, position: int) -> bool:
        """Whether a position needs anything of this rule."""

    def deepest(self, limit: int, step: int) -> int:
        """The deepest position up to this one, a multiple of `step`, that a tier accepts."""

    def pin(self, request: Hashable, position: int, ttl: float | None) -> bool:
        """Pin what a position needs, in place of what was pinned before. False: it has gone.

        Args:
            ttl: seconds that the pins last; None: only look.
        """

    def take(self, request: Hashable, position: int) -> Lease | None:
        """What was pinned for a position. None: it has gone."""


def agreed(sides: Sequence[Side], limit: int, step: int) -> tuple[int, list[str]]:
    """The deepest position up to this one that all sides accept, a multiple of `step`, and the
    rules that lowered it, in order."""
    position, rules, agreeing, number = limit // step * step, [], 0, len(sides)
    while position:
        for side in sides:
            found = side.deepest(position, step)
            agreeing += 1
            if found < position:
                position, agreeing = found, 1
                rules.append(side.rule)
            if agreeing == number or not position:
                return position, rules
    return position, rules


# ---- Plans

_NONE = PrefixMatch(0)


@dataclass(eq=False, slots=True)
class StateSide:
    """What a request may read of states: see `Side`."""

    checkpoints: Checkpoints
    path: Path
    step: int
    """Tokens of a position of the path."""
    tiers: frozenset[str]
    rule: str = POINT
    tier: Tier | None = None
    found: Found | None = None
    """The last checkpoint that was looked up; it has what is pinned."""
    edges: dict[str, tuple[Keys, int]] | None = None
    """Results of `edge`, by tier, since the last pin."""

    def deepest(self, limit: int, step: int) -> int:
        """See `Side`. One call for a tier, which goes from one checkpoint to the next and not from
        key to key: a tenth of what `GroupSet.peek` takes for a prompt without one."""
        self.found = self.checkpoints.last_ready(self.path, limit // step, tiers=self.tiers)
        return 0 if self.found is None else self.found[1] * step

    def pin(self, request: Hashable, position: int, ttl: float | None) -> bool:
        """See `Side`."""
        found = self.found = self.found if position else None
        self.edges = None
        self.tier = None if found is None else found[0]
        if ttl is None:
            return True
        if found is None:
            self.checkpoints.cancel(request)
            return not position
        return self.checkpoints.plan(request, self.path, found, ttl)

    def take(self, request: Hashable, position: int) -> Lease | None:
        """See `Side`."""
        try:
            taken = self.checkpoints.take(request)
        except LeaseLost:  # its time limit has passed
            return None
        if taken is None:
            return None
        self.tier, lease = taken
        return lease

    def needs(self, position: int) -> bool:
        """See `Side`."""
        return position > 0

    def edge(self, tier: Tier, name: str, kv: int) -> tuple[Keys, int]:
        """Keys that show whether a lookup in this tier would find another checkpoint, up to so many
        tokens of KV; and up to which of them there is one if nothing has changed."""
        if self.edges is None:
            self.edges = {}
        edge = self.edges.get(name)
        if edge is None:
            begin = end = 0
            if self.found is not None:
                end = self.found[1]
                begin = end - 1 if self.found[0] is tier else end
            keys = self.path.keys[begin : max(end, kv // self.step)]
            edge = self.edges[name] = keys, end - begin
        return edge


Edge = tuple[Keys, Keys, int, int]
"""Keys that show whether cached KV still ends where it did: of the last cached block and the block
after it, and of host pages likewise; and how many of each are present if nothing has changed."""


@dataclass(eq=False, slots=True)
class HybridPlan:
    """The plan of one request."""

    asked: LookupRequest
    most: int
    """Maximum number of tokens to reuse."""
    given: int | None
    """Device tokens that an engine found itself."""
    space: CacheScope | None
    """None: the weights are being changed, and nothing is found."""
    states: StateSpace | None
    state: StateSide | None
    """Of the model's states."""
    sides: Sequence[Side] | None
    """Of all groups beside KV, states first. None: nothing is looked up."""
    kv: PrefixMatch = _NONE
    """All cached KV, also after the position."""
    ends: bool = False
    """Whether the device had no KV after the checkpoint when that was chosen."""
    looked: bool = False
    """Whether `_changed` may check if the lookup's result still holds."""
    edge: Edge | None = None
    """Made by the first such check."""
    position: int = 0
    """What all groups accept, in tokens; 0: none."""
    pinned: int = -1
    """The position for which all sides hold pins; -1: an interrupt came before they did."""
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    """By name of a rule: the tier in which what the position needs is pinned."""
    limit: str | None = None
    """The rule that has lowered the position last."""
    again: bool = False
    """Whether a rule other than that of states has lowered it: then nothing less than looking again
    tells whether it still does."""
    planned: PrefixMatch = _NONE
    """The manager's plan of KV up to the position."""
    match: HybridMatch | None = None
    of: Any = None
    """The inputs that `match` was made of."""
    stored: Stored = field(default_factory=Stored)
    read_until: float | None = None
    """Time until which `take` waits for storage; None: it has not been called."""


# ---- Plans of waiting requests


class HybridPlanner:
    """The plans of one `HybridManager`. Its lock is held around every call."""

    def __init__(self, parts: HybridParts) -> None:
        """Plans nothing yet."""
        self._parts = parts
        self._plans: dict[Hashable, HybridPlan] = {}

    def plan(self, many: LookupBatch) -> list[HybridMatch]:
        """See `HybridManager.plan_many`."""
        wheres: dict[str, Where] = {}
        plans: list[HybridPlan] = []
        given: Iterable[int | None] = (
            repeat(None) if many.device_tokens is None else many.device_tokens
        )
        for (request, asks), tokens in zip(many.entries, given, strict=False):
            tenant = asks[0].tenant
            if tenant not in wheres:
                wheres[tenant] = self._parts.where(tenant)
            plans.append(self._known(request, asks, tokens, wheres[tenant]))
        changed, now = self._changed(plans), time.monotonic()
        for (request, _), plan, other in zip(many.entries, plans, changed, strict=True):
            self._renew(request, plan, other, now)
        return [self._match(plan) for plan in plans]

    def _known(
        self, request: Hashable, asks: Arguments, device_tokens: int | None, where: Where
    ) -> HybridPlan:
        """The plan of a request: its current plan, if it asks for the same as before."""
        known, (space, states) = self._plans.get(request), where
        if (
            known is not None
            and known.asked == asks
            and known.space is space
            and known.states is states
        ):
            known.given, known.looked = device_tokens, known.looked and device_tokens is None
            return known
        lookup = LookupRequest(*asks)
        same = known is not None and known.asked.prompt == lookup.prompt
        if known is not None and same:  # its keys are already hashed
            lookup = LookupRequest(known.asked.prompt, lookup.options, lookup.limit)
        plan = self._new(lookup, device_tokens, where)
        if known is not None:
            if same and known.states is states and lookup.options.read:
                plan.stored, plan.read_until = known.stored, known.read_until
            else:
                known.stored.cancel(self._parts.checkpoints.transfers.foreign)
        self._plans[request] = plan
        return plan

    def _new(self, lookup: LookupRequest, device_tokens: int | None, where: Where) -> HybridPlan:
        parts, (space, states), options = self._parts, where, lookup.options
        state: StateSide | None = None
        sides: list[Side] | None = None
        if options.read and space is not None and (states is not None or not parts.states):
            sides = []
            if states is not None and parts.states:
                path = Path(parts.keys_of(lookup.prompt, space), states)
                state = StateSide(parts.checkpoints, path, parts.step, options.tiers)
                sides.append(state)
            if parts.windows.blocks:
                sides += parts.windows.sides_of(space, options, lookup.prompt.keys)
        return HybridPlan(lookup, lookup.most, device_tokens, space, states, state, sides)

    def peek(
        self,
        every: list[PrefixMatch],
        prompts: Sequence[Prompt],
        options: Sequence[RequestOptions],
        limits: Sequence[int | None] | None,
        device_tokens: Sequence[int] | None,
    ) -> list[HybridMatch]:
        """See `HybridManager.peek_many`.

        Args:
            every: all KV of the prompts, as peeked.
        """
        where, plans = self._parts.where, []
        wheres = {tenant: where(tenant) for tenant in {prompt.tenant for prompt in prompts}}
        for i, (kv, prompt) in enumerate(zip(every, prompts, strict=True)):
            within = options[i].within(self._parts.manager.tiers)
            lookup = LookupRequest(prompt, within, None if limits is None else limits[i])
            tokens = None if device_tokens is None else device_tokens[i]
            plan = self._new(lookup, tokens, wheres[prompt.tenant])
            plan.kv = kv
            self._lower(plan, kv.usable)
            self._agree(i, plan, pin=False)
            plans.append(plan)
        return [self._match(plan) for plan in plans]

    # ---- the usable part

    def _renew(self, request: Hashable, plan: HybridPlan, changed: bool, now: float) -> None:
        """If something changed, look up and pin the usable part again; otherwise only if the pins
        expire soon. Those of all groups and of KV were made together."""
        if not changed:
            if not self._parts.manager.lookup.holds(request, now):
                self._agree(request, plan)
            return
        seen = self._look(plan)
        self._agree(request, plan)
        if not seen:
            self._look_beyond(request, plan)
        self._read(plan)

    def _agree(self, request: Hashable, plan: HybridPlan, *, pin: bool = True) -> None:
        """Pin what each group needs at the plan's position, and plan KV up to it. If a group lacks
        something now, or KV is shorter, try an earlier position.

        Args:
            pin: False: only look.
        """
        parts, asked = self._parts, plan.asked
        ttl = (asked.options.ttl or parts.manager.config.plan_ttl) if pin else None
        tokens = None if plan.given is None else (plan.given,)
        if pin and plan.sides is None:
            parts.unpin(request)  # the pins of the plan before
        while True:
            position, sides = plan.position, plan.sides or ()
            plan.pinned = -1
            lacking = [side.rule for side in sides if not side.pin(request, position, ttl)]
            if lacking:
                self._lower(plan, position - parts.step, lacking[-1])
                continue
            plan.pinned = position
            if pin:
                batch = LookupBatch(((request, asked.up_to(position)),), tokens)
                (kv,) = parts.manager.lookup.plan(batch, {asked.prompt.tenant: plan.space})
            else:
                (kv,) = parts.manager.peek_many(
                    [asked.prompt], options=[asked.options], limits=[position], device_tokens=tokens
                )
            plan.planned = kv
            if kv.usable >= position:
                plan.tiers = {side.rule: side.tier for side in sides if side.tier is not None}
                return
            self._lower(plan, kv.usable, PREFIX)

    def _lower(self, plan: HybridPlan, most: int, rule: str | None = None) -> None:
        """Choose the deepest position up to so many tokens that every group accepts.

        Args:
            rule: has refused the position so far; None: it is the first one.
        """
        rules: list[str] = []
        plan.position = 0
        if plan.sides is not None:
            plan.position, rules = agreed(plan.sides, most, self._parts.step)
        if rule is None:
            plan.again = False
        else:
            rules.insert(0, rule)
        plan.limit = rules[-1] if rules else None
        plan.again |= rules.count(POINT) < len(rules)

    def take(self, request: Hashable, plan: HybridPlan) -> dict[str, Lease] | None:
        """What was pinned of each group for a plan's position, by rule. None: some has gone, and
        none is taken. Asks the sides, not `tiers`: an interrupt may have ended the last plan, also
        between a lower position and its pins."""
        leases: dict[str, Lease] = {}
        sides = [side for side in plan.sides or () if side.needs(plan.position)]
        if sides and plan.pinned != plan.position:
            self._parts.unpin(request)
            return None
        for side in sides:
            lease = side.take(request, plan.position)
            if lease is None:
                for each in leases.values():
                    each.close()
                self._parts.unpin(request)
                return None
            leases[side.rule] = lease
        plan.tiers = {side.rule: side.tier for side in sides if side.tier is not None}
        return leases

    def limit(self, plan: HybridPlan, kv: int, position: int) -> str | None:
        """The rule that has no deeper position than this one.

        Args:
            kv: tokens of KV that there are.
        """
        if position + self._parts.step > plan.most:
            return None
        return PREFIX if kv - position < self._parts.step else plan.limit or PREFIX

    def _match(self, plan: HybridPlan) -> HybridMatch:
        known, stored = plan.match, plan.stored
        reads = None if stored.state is None else (bool(stored.running), stored.kv_pages)
        of = id(plan.planned), id(plan.kv), plan.position, plan.tiers, plan.limit, reads
        if known is not None and plan.of == of:
            return known
        plan.of = of
        position, deep, kv = plan.position, max(plan.kv.usable, plan.planned.usable), plan.planned
        if reads is not None:
            kv = stored.attributed(kv, position, self._parts.manager.page_tokens)
        # As in `PrefixLookup._match`: the class is frozen, and its own `__init__` takes longer.
        match = plan.match = object.__new__(HybridMatch)
        vars(match).update(
            kv=kv,
            kv_tokens=deep,
            usable=position,
            tiers=plan.tiers,
            limit=self.limit(plan, deep, position),
            branching=self._parts.grid.branching(deep, position),
            pending=plan.planned.pending or (reads is not None and reads[0]),
        )
        return match

    # ---- lookup: the end of cached KV, and the deepest position within it; pins nothing

    def _look(self, plan: HybridPlan) -> bool:
        """Choose a position. False: the end of KV is unknown until `_look_beyond`.

        With states it tries the last checkpoint first. If the KV key that ends with it is present,
        so is all KV before it, in a tier that evicts from the ends; planning checks that anyway.
        Only if the key is missing, or the engine evicts in its own order, KV is looked up from the
        beginning, and the position is chosen within that. Windows alone accept most positions, so
        KV is looked up first.
        """
        parts, device_tokens, plan.ends = self._parts, plan.given, False
        if parts.states and device_tokens is None and parts.manager.device.owned:
            self._lower(plan, plan.most)
            if not plan.position or self._stands(plan):
                return False
        (plan.kv,) = parts.manager.peek_many(
            [plan.asked.prompt],
            options=[plan.asked.options],
            limits=[plan.asked.limit],
            device_tokens=None if device_tokens is None else [device_tokens],
        )
        self._looked(plan, device_tokens is None)
        self._lower(plan, plan.kv.usable)
        return True

    def _look_beyond(self, request: Hashable, plan: HybridPlan) -> None:
        """Find the end of KV for a new plan: at least as far as planned, then by lookup."""
        match: PrefixMatch | None = plan.planned
        if not self._ends_there(plan):
            match = self._parts.manager.lookup.peek_beyond(request, plan.asked.limit)
        plan.kv = plan.planned if match is None else match
        self._looked(plan, match is not None)

    def _looked(self, plan: HybridPlan, believed: bool) -> None:
        """Note whether `_changed` may check the result. The check itself makes `edge`."""
        plan.looked, plan.edge = believed and plan.space is not None, None

    def _stands(self, plan: HybridPlan) -> bool:
        """Whether the KV key that ends at the position is present; also notes whether the device
        has no KV after it."""
        manager, space, lookup = self._parts.manager, plan.space, plan.asked
        if space is None:
            return False
        position, block = plan.position, manager.device.block_tokens
        for tier, index, where, spec, tokens in (
            ("device", manager.device.index, space.device, space.device_spec, block),
            ("host", manager.host.index, space.host, space.host_spec, manager.page_tokens),
        ):
            page = position // tokens
            if index is None or where is None or tier not in lookup.options.tiers:
                continue
            if page * tokens != position:
                continue
            window = lookup.prompt.keys(spec)[page - 1 : min(page + 1, plan.most // tokens)]
            present = index.peek(window, namespace=where)
            if present:
                plan.ends = present == 1 and tier == "device"
                return True
        return False

    def _ends_there(self, plan: HybridPlan) -> bool:
        """Whether KV ends where the plan ends: neither the device (see `HybridPlan.ends`) nor the
        host has more."""
        position, space, index = plan.planned.device, plan.space, self._parts.manager.host.index
        if not plan.ends or space is None or position != plan.planned.usable:
            return False
        if not position or position != plan.position:
            return False
        tokens = self._parts.manager.page_tokens
        page = position // tokens
        if "host" not in plan.asked.options.tiers or page >= plan.most // tokens:
            return True
        return not index.peek(
            plan.asked.prompt.keys(space.host_spec)[page : page + 1], namespace=space.host
        )

    # ---- checks of earlier results

    def _changed(self, plans: list[HybridPlan]) -> list[bool]:
        """For each plan, whether its KV ends elsewhere than before, its checkpoint is gone, or a
        later one exists; always where `HybridPlan.again` says so."""
        changed = [not plan.looked or plan.again or plan.stored.news for plan in plans]
        if not all(changed):
            self._other_kv(plans, changed)
            self._other_checkpoints(plans, changed)
        return changed

    def _other_kv(self, plans: list[HybridPlan], changed: list[bool]) -> None:
        """The last key of KV must be present and the key after it absent, in each tier."""
        manager = self._parts.manager
        unchanged = [i for i, other in enumerate(changed) if not other]
        for space in {plans[i].space for i in unchanged}:
            assert space is not None
            members = [i for i in unchanged if plans[i].space is space]
            edges = [self._edge_of(plans[i], space) for i in members]
            device, host, blocks, pages = zip(*edges, strict=True)
            for index, where, keys, present in (
                (manager.device.index, space.device, device, blocks),
                (manager.host.index, space.host, host, pages),
            ):
                if index is not None and where is not None:
                    counts = peeked(index, keys, where)
                    for i, count, expected in zip(members, counts, present, strict=True):
                        changed[i] |= count != expected

    def _other_checkpoints(self, plans: list[HybridPlan], changed: list[bool]) -> None:
        """The checkpoint found must still exist, with none between it and the end of KV."""
        for tier, name, index in self._parts.checkpoints.tiers:
            groups: dict[StateSpace, list[tuple[int, Keys, int]]] = {}
            for i, plan in enumerate(plans):
                if changed[i] or plan.state is None or name not in plan.asked.options.tiers:
                    continue
                keys, expected = plan.state.edge(tier, name, plan.kv.usable)
                if len(keys):
                    groups.setdefault(plan.state.path.space, []).append((i, keys, expected))
            for space, group in groups.items():
                counts = last_ready(index, [keys for _, keys, _ in group], space.of(tier))
                for (i, _, expected), count in zip(group, counts, strict=True):
                    changed[i] = count != expected

    def _edge_of(self, plan: HybridPlan, space: CacheScope) -> Edge:
        """Made on first use: a request that is taken immediately needs none."""
        if plan.edge is None:
            kv, manager, (prompt, options, _) = plan.kv, self._parts.manager, plan.asked
            block, tokens = manager.device.block_tokens, manager.page_tokens
            device = host = NO_KEYS
            blocks, first = kv.device // block, kv.device // tokens
            pages = -(-(kv.device + kv.host) // tokens) - first if kv.host else 0
            if "device" in options.tiers and options.read:
                every = prompt.keys(space.device_spec)[: plan.most // block]
                device = every[max(0, blocks - 1) : blocks + 1]
            if "host" in options.tiers and options.read:
                every = prompt.keys(space.host_spec)[first : plan.most // tokens]
                host = every[max(0, pages - 1) : pages + 1]
            plan.edge = device, host, min(blocks, 1), min(pages, 1)
        return plan.edge

    # ---- storage: positions that only it has; read once for each request

    def _read(self, plan: HybridPlan) -> None:
        """Request a position after the plan's from storage. If states have their own: a checkpoint,
        and once it has arrived KV up to it."""
        if self._parts.windows.blocks:
            self._read_position(plan)
            return
        tier, state, step = self._parts.checkpoints.storage, plan.state, self._parts.step
        if tier is None or state is None or not {"host", "storage"} <= plan.asked.options.tiers:
            return
        stored = plan.stored
        if stored.state is None:
            first = plan.position // step
            # Storage may have KV after the KV found here.
            most = plan.kv.usable if self._parts.inner.storage is None else plan.most
            keys = state.path.keys[: most // step]
            if first < len(keys):
                space, groups = state.path.space.host, self._parts.checkpoints.groups
                stored.state = tier.prefetch_last_ready(
                    keys, groups=groups, start=first, namespace=space
                )
        elif stored.news:
            stored.seen = True
            self._read_kv(plan, stored.brought * step)

    def _read_position(self, plan: HybridPlan) -> None:
        """Request all that a position after the plan's needs, if storage has it."""
        stored, options = plan.stored, plan.asked.options
        stored.seen = stored.state is not None and stored.state.ended
        if stored.state is not None or plan.space is None or not options.read:
            return
        if {"host", "storage"} <= options.tiers:
            stored.state = self.prefetch(plan.asked, plan.space, plan.position)
            stored.there = plan.kv.usable

    def prefetch(
        self, lookup: LookupRequest, space: CacheScope, position: int
    ) -> StorageTask | None:
        """Begin to read the last position after this one. None: there is no storage, or no
        position."""
        storage, step = self._parts.inner.storage, self._parts.step
        most, page = lookup.most // step * step, self._parts.manager.page_tokens
        while (cut := lookup.prompt.cut_item(most)) is not None:
            most = cut.start // step * step
        if storage is None or most <= position:
            return None
        groups = self._parts.windows.groups
        if self._parts.states:
            groups = [*groups, *self._parts.checkpoints.groups]
        task = storage.prefetch_last_ready(
            lookup.prompt.keys(space.host_spec)[: most // page],
            groups=groups,
            start=position // page,
            # States are at fewer positions: where one is not stored, no other group is looked up.
            step=self._parts.windows.unit // page,
            namespace=space.host,
        )
        self._parts.inner.tasks.add(task)
        return task

    def _read_kv(self, plan: HybridPlan, position: int) -> None:
        manager, space, tier = self._parts.manager, plan.space, self._parts.inner.storage
        if tier is None or space is None or position <= plan.kv.usable:
            return
        prompt = plan.asked.prompt
        keys = prompt.keys(space.host_spec)[: position // manager.page_tokens]
        present = manager.host.peek(keys, namespace=space.host)
        plan.stored.kv = tier.prefetch(
            keys, present, namespace=space.host, tokens=prompt.told_tokens
        )

    # ---- ending

    def reading(self, request: Hashable, now: float) -> tuple[StorageTask, float] | None:
        """The storage read for a plan that is about to be taken, and the seconds left to wait for
        it: see `PrefixLookup.reading`. First the state is read, then the KV up to it, which is
        requested here. The plan's pins stay."""
        plan, lookup = self._plans.get(request), self._parts.manager.lookup
        if plan is None or plan.space is None:
            return None
        if plan.stored.state is None and lookup.reading(request, now) is None:
            return None
        (changed,) = self._changed([plan])
        self._renew(request, plan, changed, now)  # pages that arrived may lead to more
        read = lookup.reading(request, now)
        running = [*plan.stored.running, *([] if read is None else read[:1])]
        task = next(iter(running), None)
        if task is None:
            return None
        if plan.read_until is None:
            plan.read_until = now + self._parts.inner.pace.seconds(plan.most - plan.position)
        return None if now >= plan.read_until else (task, plan.read_until - now)

    def taken(self, request: Hashable) -> HybridPlan | None:
        """Remove and return the plan of a request that begins; None: there was none. Its storage
        reads continue, for later requests."""
        return self._plans.pop(request, None)

    def forget(self, request: Hashable) -> HybridPlan | None:
        """Remove and return the plan, without releasing its pins; None: there was none."""
        plan = self._plans.get(request)
        if plan is not None:
            plan.stored.cancel(self._parts.checkpoints.transfers.foreign)
        return self._plans.pop(request, None)  # last: an interrupt before this repeats all

    def cancel(self, request: Hashable) -> None:
        """Cancel a plan."""
        self.forget(request)
        self._parts.unpin(request)
        self._parts.manager.cancel(request)

    def let_go(self) -> None:
        """Release what other groups have pinned for waiting requests after the cache is
        disabled."""
        for request, plan in self._plans.items():
            plan.looked = False
            with contextlib.suppress(LightcacheError):
                self._parts.unpin(request)

    def close(self) -> None:
        """Drop all plans."""
        for request in list(self._plans):
            self.cancel(request)


__all__ = [
    "HybridParts",
    "HybridPlan",
    "HybridPlanner",
    "Side",
    "StateSide",
    "Stored",
    "agreed",
]
