"""Finding: the deepest position that both KV and a checkpoint reach."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import LightcacheError
from lightcache.hybrid.checkpoints import Path, StateSpace, Tier
from lightcache.manager.blocks import peeked
from lightcache.manager.limits import Foreign
from lightcache.manager.lookup import LookupBatch, LookupRequest
from lightcache.manager.request import NO_KEYS, CacheScope, PrefixMatch, Prompt, RequestOptions

if TYPE_CHECKING:
    from lightcache.hybrid.checkpoints import Found
    from lightcache.hybrid.manager import HybridManager
    from lightcache.storage.tasks import StorageTask


# ---- What a match of a hybrid model's prompt found.


@dataclass(frozen=True)
class HybridMatch:
    """How much of a prompt need not be computed: as far as both KV and a checkpoint go. All figures
    are tokens."""

    kv: PrefixMatch
    """KV up to the checkpoint, which is all that is pinned and loaded."""
    kv_tokens: int = 0
    """How deep KV goes, as far as it could be used: advisory, nothing holds what is behind the
    checkpoint."""
    checkpoint: int = 0
    """The position of the checkpoint that is used: state behind so many tokens; 0: none."""
    tier: Tier | None = None
    """Where it is."""
    branching: int | None = None
    """Where the coming prefill should save a state: KV goes deeper than any checkpoint, so other
    prompts have come this way, and the next one that does will hit."""
    pending: bool = False
    """Storage is still being asked or read: planning again may find more."""

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return self.kv.tokens

    @property
    def usable(self) -> int:
        """That need not be computed: 0, or the checkpoint's position."""
        return self.checkpoint

    @property
    def unusable(self) -> int:
        """Whose KV is there, and that must be computed for want of a state."""
        return max(0, self.kv_tokens - self.checkpoint)

    @property
    def device_tokens(self) -> int:
        """Of the usable ones, whose KV is in device blocks."""
        return min(self.kv.device, self.usable)

    @property
    def host_tokens(self) -> int:
        """Of these, whose KV is loaded from host pages."""
        return min(self.usable - self.device_tokens, self.kv.host)

    @property
    def storage_tokens(self) -> int:
        """Of these, whose KV was read from storage for this request."""
        return self.usable - self.device_tokens - self.host_tokens


# ---- Seeking: checkpoints that only storage has, and KV up to them.


@dataclass(eq=False)
class Stored:
    """What storage is asked for a waiting request."""

    state: StorageTask | None = None
    """Brings the deepest checkpoint that is stored to the host."""
    first: int = 0
    """Positions before those that were asked for."""
    kv: StorageTask | None = None
    """Brings KV up to that."""
    seen: bool = False
    """Whether it was noticed that the checkpoint is there."""

    @property
    def going(self) -> list[StorageTask]:
        """Tasks that are not over."""
        every = (self.state, self.kv)
        return [task for task in every if task is not None and not task.over]

    @property
    def pending(self) -> bool:
        """Whether more may be found."""
        state, kv = self.state, self.kv
        return (state is not None and not state.over) or (kv is not None and not kv.over)

    @property
    def news(self) -> bool:
        """Whether the checkpoint has come, and nobody has looked since."""
        return self.state is not None and self.state.over and not self.seen

    @property
    def brought(self) -> int:
        """Positions up to the checkpoint that was brought; 0: none was."""
        if self.state is None or not self.state.over or not self.state.pages_done:
            return 0
        return self.first + self.state.pages_done

    @property
    def kv_pages(self) -> int:
        """Host pages of KV that were brought."""
        return 0 if self.kv is None else self.kv.pages_done

    def attributed(self, kv: PrefixMatch, page_tokens: int) -> PrefixMatch:
        """A match of KV in which these count as storage's."""
        tokens = 0 if self.kv is None else min(kv.host, self.kv_pages * page_tokens)
        if not tokens:
            return kv
        return replace(kv, host=kv.host - tokens, storage=kv.storage + tokens)

    def cancel(self, foreign: Foreign) -> None:
        """Nothing of it is wanted any more."""
        for task in self.going:
            foreign.cancel(task)


class Seeker:
    """Asks storage, once for each request."""

    def __init__(self, owner: HybridManager) -> None:
        """Nothing was asked."""
        self._owner = owner

    def seek(self, plan: HybridPlan) -> None:
        """A plan was looked at: ask for a checkpoint deeper than the one it has; and when that has
        come, for KV that reaches it."""
        tier = self._owner.checkpoints.storage
        if tier is None or plan.path is None or not {"host", "storage"} <= plan.asked.options.tiers:
            return
        stored = plan.stored
        if stored.state is None:
            stored.first = 0 if plan.found is None else plan.found[1]
            behind = plan.path.keys[stored.first : self._most(plan)]
            if len(behind):
                keys = np.ascontiguousarray(behind)
                stored.state = tier.prefetch_last_ready(keys, namespace=plan.path.space.host)
        elif stored.news:
            stored.seen = True
            self._seek_kv(plan, stored.brought * self._owner.step)

    def _most(self, plan: HybridPlan) -> int:
        """Positions that are worth asking for: storage may have KV behind what we have."""
        tokens = plan.kv.usable if self._owner.inner.storage is None else plan.most
        return tokens // self._owner.step

    def _seek_kv(self, plan: HybridPlan, position: int) -> None:
        manager, space, tier = self._owner.manager, plan.space, self._owner.inner.storage
        if tier is None or space is None or position <= plan.kv.usable:
            return
        keys = plan.asked.prompt.keys(space.host_spec)[: position // manager.page_tokens]
        there = manager.host.peek(keys, namespace=space.host)
        plan.stored.kv = tier.prefetch(keys, there, namespace=space.host)


# ---- What is known of a request that waits for KV and a checkpoint.

_NONE = PrefixMatch(0)


@dataclass(eq=False, slots=True)
class Edge:
    """What to look at to learn whether KV goes as deep as it did, and no deeper."""

    device: Keys
    """Of the blocks: the last that was there, and the one behind it."""
    host: Keys
    there: tuple[int, int]
    """How many of each are there while nothing has changed."""


@dataclass(eq=False, slots=True)
class HybridPlan:
    """What is known of one request."""

    asked: LookupRequest
    most: int
    """Tokens that may be reused at most."""
    given: int | None
    """Device tokens that an engine found itself."""
    space: CacheScope | None
    """None: the weights are being changed; nothing is found."""
    states: StateSpace | None
    path: Path | None
    """None: nothing is looked for."""
    kv: PrefixMatch = _NONE
    """What there is of KV, beyond the checkpoint too."""
    ends: bool = False
    """Whether the device has no KV behind the checkpoint, as was seen when that was chosen."""
    looked: bool = False
    """Whether that is worth asking if it is still so."""
    edge: Edge | None = None
    """Made when that is asked."""
    found: Found | None = None
    """The checkpoint that is pinned."""
    planned: PrefixMatch = _NONE
    """What the manager has planned up to there."""
    match: HybridMatch | None = None
    of: Any = None
    """What the match was made of."""
    stored: Stored = field(default_factory=Stored)
    read_until: float | None = None
    """Until when `take` waits for what storage brings; None: it was not asked for yet."""


# ---- Looking: how deep KV goes, and which checkpoint is the deepest within that. Pins nothing.


class Looker:
    """Looks for one `HybridManager`, whose lock is around every call."""

    def __init__(self, owner: HybridManager) -> None:
        """Nothing is looked for yet."""
        self._owner = owner

    def look(self, plan: HybridPlan) -> bool:
        """Choose a checkpoint. False: it is not known yet how deep KV goes; `look_behind` will say,
        when it is planned.

        The deepest checkpoint of all comes first. If KV's key that ends with it is there, all
        before it is, in a tier that evicts from the ends; and planning looks at that anyway, so
        nobody does before. Only where it is not, and where an engine evicts as it likes, KV is
        looked at from the beginning, and the deepest checkpoint within it is chosen.
        """
        owner, given, plan.ends = self._owner, plan.given, False
        if given is None and owner.owned:
            self.choose(plan, plan.most // owner.step)
            if plan.found is None or self._stands(plan):
                return False
        (plan.kv,) = owner.manager.peek_many(
            [plan.asked.prompt],
            options=[plan.asked.options],
            limits=[plan.asked.limit],
            device_tokens=None if given is None else [given],
        )
        self._looked(plan, given is None)
        self.choose(plan, plan.kv.usable // owner.step)
        return True

    def look_behind(self, request: Hashable, plan: HybridPlan) -> None:
        """How deep KV goes, of a plan just made: as far as that, and then by looking."""
        found: PrefixMatch | None = plan.planned
        if not self._ends_there(plan):
            found = self._owner.manager.lookup.peek_beyond(request, plan.asked.limit)
        plan.kv = plan.planned if found is None else found
        self._looked(plan, found is not None)

    def _looked(self, plan: HybridPlan, believed: bool) -> None:
        """Whether it is worth asking if it is still so. `edge` is found when that is asked."""
        plan.looked, plan.edge = believed and plan.space is not None, None

    def choose(self, plan: HybridPlan, most: int) -> None:
        """The deepest checkpoint among the first `most` positions."""
        plan.found = None
        if plan.path is not None and most:
            plan.found = self._owner.checkpoints.last_ready(
                plan.path, most, tiers=plan.asked.options.tiers
            )

    def _stands(self, plan: HybridPlan) -> bool:
        """Whether the key of KV that ends where the checkpoint does is there; and notes whether the
        device has none behind it."""
        manager, space, asked = self._owner.manager, plan.space, plan.asked
        if space is None or plan.found is None:
            return False
        position, block = plan.found[1] * self._owner.step, manager.device.block_tokens
        for tier, index, where, spec, tokens in (
            ("device", manager.device.index, space.device, space.device_spec, block),
            ("host", manager.host.index, space.host, space.host_spec, manager.page_tokens),
        ):
            at = position // tokens
            if index is None or where is None or tier not in asked.options.tiers:
                continue
            if at * tokens != position:
                continue
            window = asked.prompt.keys(spec)[at - 1 : min(at + 1, plan.most // tokens)]
            found = index.peek(window, namespace=where)
            if found:
                plan.ends = found == 1 and tier == "device"
                return True
        return False

    def _ends_there(self, plan: HybridPlan) -> bool:
        """Whether KV ends where it was planned to, so that nothing is behind: the device has no
        more, as was seen, and the host neither."""
        position, space, index = plan.planned.device, plan.space, self._owner.manager.host.index
        if not plan.ends or space is None or position != plan.planned.usable:
            return False
        if plan.found is None or position != plan.found[1] * self._owner.step:
            return False
        tokens = self._owner.manager.page_tokens
        at = position // tokens
        if "host" not in plan.asked.options.tiers or at >= plan.most // tokens:
            return True
        return not index.peek(
            plan.asked.prompt.keys(space.host_spec)[at : at + 1], namespace=space.host
        )

    # ---- once more

    def changed(self, plans: list[HybridPlan]) -> list[bool]:
        """Of each whether its KV goes deeper or less deep than it did, its checkpoint has gone, or
        there is a deeper one."""
        changed = [not plan.looked or plan.stored.news for plan in plans]
        if not all(changed):
            self._other_kv(plans, changed)
            self._other_checkpoints(plans, changed)
        return changed

    def _other_kv(self, plans: list[HybridPlan], changed: list[bool]) -> None:
        manager = self._owner.manager
        asked = [i for i, other in enumerate(changed) if not other]
        for space in {plans[i].space for i in asked}:
            assert space is not None
            members = [i for i in asked if plans[i].space is space]
            edges = [self._edge_of(plans[i], space) for i in members]
            for index, where, windows, there in (
                (manager.device.index, space.device, [e.device for e in edges], 0),
                (manager.host.index, space.host, [e.host for e in edges], 1),
            ):
                if index is not None and where is not None:
                    found = peeked(index, windows, where)
                    for i, edge, count in zip(members, edges, found, strict=True):
                        changed[i] |= count != edge.there[there]

    def _other_checkpoints(self, plans: list[HybridPlan], changed: list[bool]) -> None:
        """The one that was found must be there, and none between it and the end of KV."""
        owner = self._owner
        groups: dict[tuple[StateSpace, Tier], list[tuple[int, Keys, int]]] = {}
        tiers = [tier for tier, _ in owner.checkpoints.tiers()]
        for i, plan in enumerate(plans):
            if plan.path is None:
                continue
            first = 0 if plan.found is None else plan.found[1]
            last = max(first, plan.kv.usable // owner.step)
            for tier in tiers:
                its = int(plan.found is not None and plan.found[0] is tier)
                if last > first - its and tier.value in plan.asked.options.tiers:
                    keys = plan.path.keys[first - its : last]
                    groups.setdefault((plan.path.space, tier), []).append((i, keys, its))
        for (space, tier), group in groups.items():
            found = owner.checkpoints.last_ready_many([keys for _, keys, _ in group], space, tier)
            for (i, _, its), count in zip(group, found, strict=True):
                changed[i] |= count != its

    def _edge_of(self, plan: HybridPlan, space: CacheScope) -> Edge:
        """Made when it is first asked for: a request that is taken at once needs none."""
        if plan.edge is None:
            kv, manager, (prompt, options, _) = plan.kv, self._owner.manager, plan.asked
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
            plan.edge = Edge(device, host, (min(blocks, 1), min(pages, 1)))
        return plan.edge


# ---- Finding: the deepest position that both KV and a checkpoint reach.

Where = tuple[CacheScope | None, StateSpace | None]
"""Where a tenant's KV and states are; None: nowhere."""
Asks = tuple[Prompt, RequestOptions, int | None]
"""As a `LookupRequest` is, which is made where it asks for something new."""


class HybridPlanner:
    """The plans of one `HybridManager`. Its lock is around every call."""

    def __init__(self, owner: HybridManager) -> None:
        """Nothing is planned yet."""
        self._owner = owner
        self._plans: dict[Hashable, HybridPlan] = {}
        self._looker = Looker(owner)
        self._seeker = Seeker(owner)

    def plan(self, many: LookupBatch) -> list[HybridMatch]:
        """See `HybridManager.plan_many`."""
        spaces: dict[str, Where] = {}
        plans: list[HybridPlan] = []
        given = [None] * len(many.entries) if many.device_tokens is None else many.device_tokens
        for (request, asks), tokens in zip(many.entries, given, strict=True):
            tenant = asks[0].tenant
            if tenant not in spaces:
                spaces[tenant] = self._where(tenant)
            plans.append(self._known(request, asks, tokens, spaces[tenant]))
        changed, now = self._looker.changed(plans), time.monotonic()
        for (request, _), plan, other in zip(many.entries, plans, changed, strict=True):
            self._renew(request, plan, other, now)
        return [self._match(plan) for plan in plans]

    def plan_one(self, request: Hashable, asked: LookupRequest, given: int | None) -> HybridMatch:
        """The same for one request alone.

        Args:
            given: device tokens that an engine found itself; None: look.
        """
        plan = self._known(request, asked, given, self._where(asked.prompt.tenant))
        changed = not plan.looked or self._looker.changed([plan])[0]
        self._renew(request, plan, changed, time.monotonic())
        return self._match(plan)

    def _where(self, tenant: str) -> Where:
        space = self._owner.inner.weights.scope_of(tenant)
        return space, None if space is None else self._owner.states_of(space)

    def _known(self, request: Hashable, asks: Asks, given: int | None, where: Where) -> HybridPlan:
        """The plan of a request: the one that it has, if it asks for the same as before."""
        known, (space, states) = self._plans.get(request), where
        if (
            known is not None
            and known.asked == asks
            and known.space is space
            and known.states is states
        ):
            known.given, known.looked = given, known.looked and given is None
            return known
        asked = LookupRequest(*asks)
        same = known is not None and known.asked.prompt == asked.prompt
        if known is not None and same:  # its keys are hashed
            asked = LookupRequest(known.asked.prompt, asked.options, asked.limit)
        path = None
        if space is not None and states is not None and asked.options.read:
            path = Path(self._owner.keys_of(asked.prompt, space), states)
        made = HybridPlan(asked, asked.most, given, space, states, path)
        if known is not None:
            if same and known.states is states and asked.options.read:
                made.stored, made.read_until = known.stored, known.read_until
            else:
                known.stored.cancel(self._owner.checkpoints.traffic.moves.foreign)
        self._plans[request] = made
        return made

    # ---- what of it can be used

    def _renew(self, request: Hashable, plan: HybridPlan, changed: bool, now: float) -> None:
        """Look if something has changed, and pin what can be used; if nothing has, only where the
        pins may end before long. Those of the checkpoint and of KV were made at once."""
        if not changed:
            if not self._owner.manager.lookup.holds(request, now):
                self._agree(request, plan)
            return
        seen = self._looker.look(plan)
        self._agree(request, plan)
        if not seen:
            self._looker.look_behind(request, plan)
        self._seeker.seek(plan)

    def _agree(self, request: Hashable, plan: HybridPlan) -> None:
        """Pin the checkpoint, and have KV planned that far; where it goes less far by now, or the
        checkpoint has gone, look at the one before it. Each turn is less deep than the one
        before."""
        owner, ttl = self._owner, plan.asked.options.ttl or self._owner.manager.config.plan_ttl
        while True:
            while plan.found is not None and plan.path is not None:
                if owner.checkpoints.plan(request, plan.path, plan.found, ttl):
                    break
                self._looker.choose(plan, plan.found[1] - 1)
            else:
                owner.checkpoints.cancel(request)
            position = self.position(plan)
            asked = plan.asked.up_to(position)
            tokens = None if plan.given is None else (plan.given,)
            batch = LookupBatch(((request, asked),), tokens)
            (kv,) = owner.manager.lookup.plan(batch, {asked.prompt.tenant: plan.space})
            plan.planned = kv
            if plan.found is None or kv.usable >= position:
                return
            self._looker.choose(plan, min(plan.found[1] - 1, kv.usable // owner.step))

    def position(self, plan: HybridPlan) -> int:
        """Of its checkpoint, in tokens."""
        return 0 if plan.found is None else plan.found[1] * self._owner.step

    def _match(self, plan: HybridPlan) -> HybridMatch:
        known, stored = plan.match, plan.stored
        reads = None if stored.state is None else (stored.pending, stored.kv_pages)
        of = id(plan.planned), id(plan.kv), plan.found, reads
        if known is not None and plan.of == of:
            return known
        plan.of = of
        position = self.position(plan)
        deep = max(plan.kv.usable, plan.planned.usable)
        plan.match = HybridMatch(
            stored.attributed(plan.planned, self._owner.manager.page_tokens),
            deep,
            position,
            None if plan.found is None else plan.found[0],
            self._owner.grid.branching(deep, position),
            plan.planned.pending or stored.pending,
        )
        return plan.match

    # ---- ending

    def reading(self, request: Hashable, now: float) -> tuple[StorageTask, float] | None:
        """What brings pages from storage for a plan that is to be taken, and for how many seconds
        that is waited for still: see `PrefixLookup.reading`. First the state, then the KV up to it,
        which is asked for here. What the plan has found stays pinned."""
        plan, lookup = self._plans.get(request), self._owner.manager.lookup
        if plan is None or plan.space is None:
            return None
        if plan.stored.state is None and lookup.reading(request, now) is None:
            return None
        changed = not plan.looked or self._looker.changed([plan])[0]
        self._renew(request, plan, changed, now)  # what has come may lead to more
        read = lookup.reading(request, now)
        going = [*plan.stored.going, *([] if read is None else read[:1])]
        task = next(iter(going), None)
        if task is None:
            return None
        if plan.read_until is None:
            plan.read_until = now + self._owner.inner.pace.seconds(plan.most - self.position(plan))
        return None if now >= plan.read_until else (task, plan.read_until - now)

    def taken(self, request: Hashable) -> HybridPlan | None:
        """Its plan, which is a request's from now on; None: there was none. What is being read for
        it goes on, for those who come next."""
        return self._plans.pop(request, None)

    def forget(self, request: Hashable) -> HybridPlan | None:
        """Its plan; None: there was none. What it pinned is not let go."""
        plan = self._plans.pop(request, None)
        if plan is not None:
            plan.stored.cancel(self._owner.checkpoints.traffic.moves.foreign)
        return plan

    def cancel(self, request: Hashable) -> None:
        """Nothing is wanted of a plan any more."""
        self.forget(request)
        self._owner.checkpoints.cancel(request)
        self._owner.manager.cancel(request)

    def let_go(self) -> None:
        """The cache is not asked any more: no checkpoint stays pinned for those who wait."""
        for request, plan in self._plans.items():
            plan.looked = False
            with contextlib.suppress(LightcacheError):
                self._owner.checkpoints.cancel(request)

    def close(self) -> None:
        """Forget all of them."""
        for request in list(self._plans):
            self.cancel(request)


__all__ = ["Edge", "HybridMatch", "HybridPlan", "HybridPlanner", "Looker", "Seeker", "Stored"]
