"""Finding: the deepest position that both KV and a checkpoint reach."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys
from lightcache.errors import LightcacheError
from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.seeking import Seeker, Stored
from lightcache.hybrid.spaces import Path, StateSpace, Tier
from lightcache.manager.matches import ANY, PrefixMatch, Wishes
from lightcache.manager.planned import joined
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import NO_KEYS, Space

if TYPE_CHECKING:
    from lightcache.hybrid.checkpoints import Found
    from lightcache.hybrid.manager import HybridManager
    from lightcache.storage.tasks import StorageTask

_NONE = PrefixMatch(0)


@dataclass(eq=False)
class Edge:
    """What to look at to learn whether KV goes as deep as it did, and no deeper."""

    device: Keys
    """Of the blocks: the last that was there, and the one behind it."""
    host: Keys
    there: tuple[int, int]
    """How many of each are there while nothing has changed."""


@dataclass(eq=False)
class HybridPlan:
    """What is known of a request that waits."""

    prompt: Prompt
    wishes: Wishes
    limit: int | None
    space: Space | None
    """None: the weights are being changed; nothing is found."""
    states: StateSpace | None
    path: Path | None
    """None: nothing is looked for."""
    kv: PrefixMatch = _NONE
    """What looking found."""
    edge: Edge | None = None
    """None: look again, whatever is said of it."""
    found: Found | None = None
    """The checkpoint that is pinned."""
    planned: PrefixMatch = _NONE
    """What the manager has planned up to there."""
    match: HybridMatch | None = None
    of: Any = None
    """What the match was made of."""
    given: int | None = None
    """Device tokens that an engine found itself."""
    stored: Stored = field(default_factory=Stored)


Waiting = tuple[Hashable, HybridPlan]


class HybridPlanner:
    """The plans of one `HybridManager`. Its lock is around every call."""

    def __init__(self, owner: HybridManager) -> None:
        """Nothing is planned yet."""
        self._owner = owner
        self._plans: dict[Hashable, HybridPlan] = {}
        self._seeker = Seeker(owner)

    def plan(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        wishes: Sequence[Wishes] | None,
        limits: Sequence[int | None] | None,
        device_tokens: Sequence[int] | None,
    ) -> list[HybridMatch]:
        """See `HybridManager.plan_many`."""
        plans: list[Waiting] = []
        spaces: dict[str, tuple[Space | None, StateSpace | None]] = {}
        for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            if prompt.tenant not in spaces:
                space = self._owner.manager._weights.space_of(prompt.tenant)
                states = None if space is None else self._owner.states_of(space)
                spaces[prompt.tenant] = space, states
            wish = wishes[i] if wishes is not None else ANY
            limit = limits[i] if limits is not None else None
            known = self._known(request, prompt, wish, limit, *spaces[prompt.tenant])
            plans.append((request, known))
        given = None if device_tokens is None else dict(zip(requests, device_tokens, strict=True))
        for request, plan in plans if given is not None else []:
            plan.given = given[request] if given is not None else None
        self._look(self._due(plans) if given is None else plans, given)
        self._agree(plans, given)
        return [self._match(plan) for _, plan in plans]

    def _known(
        self,
        request: Hashable,
        prompt: Prompt,
        wishes: Wishes,
        limit: int | None,
        space: Space | None,
        states: StateSpace | None,
    ) -> HybridPlan:
        """The plan of a request: the one that it has, if it asks for the same as before."""
        known = self._plans.get(request)
        if (
            known is not None
            and known.prompt is prompt
            and known.wishes is wishes
            and known.limit == limit
            and known.space is space
            and known.states is states
        ):
            return known
        path = None
        if space is not None and states is not None and wishes.read:
            path = Path(self._owner.keys_of(prompt, space), states)
        made = HybridPlan(prompt, wishes, limit, space, states, path)
        if known is not None:
            if known.prompt is prompt and known.states is states and wishes.read:
                made.stored = known.stored
            else:
                known.stored.cancel()
        self._plans[request] = made
        return made

    # ---- what there is

    def _due(self, plans: list[Waiting]) -> list[Waiting]:
        """Those whose KV goes deeper or less deep than it did, or for which there are deeper
        checkpoints."""
        due = [entry for entry in plans if entry[1].edge is None]
        rest = [entry for entry in plans if entry[1].edge is not None]
        if not rest:
            return due
        manager, changed = self._owner.manager, np.zeros(len(rest), np.bool_)
        for space in {plan.space for _, plan in rest}:
            members = [i for i, (_, plan) in enumerate(rest) if plan.space is space]
            edges = [plan.edge for i in members if (plan := rest[i][1]).edge is not None]
            if space is None:
                continue
            for index, where, windows, there in (
                (manager.device.index, space.device, [e.device for e in edges], 0),
                (manager.host.index, space.host, [e.host for e in edges], 1),
            ):
                if index is not None and where is not None:
                    keys, offsets = joined(windows)
                    found = index.peek_many(keys, offsets, namespace=where)
                    changed[members] |= found != np.array([e.there[there] for e in edges])
        changed |= self._deeper([plan for _, plan in rest])
        return due + [entry for entry, other in zip(rest, changed.tolist(), strict=True) if other]

    def _deeper(self, plans: list[HybridPlan]) -> npt.NDArray[np.bool_]:
        """For which there are checkpoints between the one that was found and the end of KV, or one
        that storage had."""
        owner, found = self._owner, np.array([plan.stored.news for plan in plans], np.bool_)
        behind: dict[tuple[StateSpace, Tier], list[tuple[int, Keys]]] = {}
        tiers = [tier for tier, _ in owner.checkpoints.tiers()]
        for i, plan in enumerate(plans):
            first = 0 if plan.found is None else plan.found[1]
            last = plan.kv.usable // owner.step
            if plan.path is not None and last > first:
                for tier in tiers:
                    if tier.value in plan.wishes.tiers:
                        group = behind.setdefault((plan.path.space, tier), [])
                        group.append((i, plan.path.keys[first:last]))
        for (space, tier), group in behind.items():
            keys, offsets = joined([part for _, part in group])
            there = owner.checkpoints.deepest_many(keys, offsets, space, tier)
            found[[i for i, _ in group]] |= there > 0
        return found

    def _look(self, plans: list[Waiting], given: dict[Hashable, int] | None) -> None:
        """How deep KV goes, and which checkpoint is the deepest within that."""
        if not plans:
            return
        found = self._owner.manager.peek_many(
            [plan.prompt for _, plan in plans],
            wishes=[plan.wishes for _, plan in plans],
            limits=[plan.limit for _, plan in plans],
            device_tokens=None if given is None else [given[request] for request, _ in plans],
        )
        for (_, plan), kv in zip(plans, found, strict=True):
            plan.kv, plan.edge = kv, None if given is not None else self._edge(plan, kv)
            self._choose(plan, kv.usable // self._owner.step)
            self._seeker.seek(plan)

    def _choose(self, plan: HybridPlan, most: int) -> None:
        plan.found = None
        if plan.path is not None and most:
            plan.found = self._owner.checkpoints.deepest(plan.path, most, tiers=plan.wishes.tiers)

    def _edge(self, plan: HybridPlan, kv: PrefixMatch) -> Edge | None:
        manager, space = self._owner.manager, plan.space
        if space is None:
            return None
        most = len(plan.prompt) - 1 if plan.limit is None else min(len(plan.prompt) - 1, plan.limit)
        block, tokens, tiers = manager.device.block_tokens, manager.page_tokens, plan.wishes.tiers
        device = host = NO_KEYS
        blocks, first = kv.device // block, kv.device // tokens
        pages = -(-(kv.device + kv.host) // tokens) - first if kv.host else 0
        if "device" in tiers and plan.wishes.read:
            every = plan.prompt.keys(space.device_spec)[: most // block]
            device = every[max(0, blocks - 1) : blocks + 1]
        if "host" in tiers and plan.wishes.read:
            every = plan.prompt.keys(space.host_spec)[first : most // tokens]
            host = every[max(0, pages - 1) : pages + 1]
        return Edge(device, host, (min(blocks, 1), min(pages, 1)))

    # ---- what of it can be used

    def _agree(self, plans: list[Waiting], given: dict[Hashable, int] | None) -> None:
        """Pin the checkpoints, and have KV planned that far; where it goes less far by now, or a
        checkpoint has gone, look at the ones before it. Each turn is less deep than the one
        before."""
        owner = self._owner
        while plans:
            gone = self._pin(plans)
            while gone:
                gone = self._pin(gone)
            kvs = owner.manager.plan_many(
                [request for request, _ in plans],
                [plan.prompt for _, plan in plans],
                wishes=[plan.wishes for _, plan in plans],
                limits=[self.position(plan) for _, plan in plans],
                device_tokens=None if given is None else [given[request] for request, _ in plans],
            )
            short = []
            for (request, plan), kv in zip(plans, kvs, strict=True):
                plan.planned = kv
                if plan.found is not None and kv.usable < self.position(plan):
                    self._choose(plan, min(plan.found[1] - 1, kv.usable // owner.step))
                    short.append((request, plan))
            plans = short

    def _pin(self, plans: list[Waiting]) -> list[Waiting]:
        """Those whose checkpoint has gone since it was found; they have another now."""
        checkpoints, some = self._owner.checkpoints, []
        for request, plan in plans:
            if plan.found is None:
                checkpoints.cancel(request)
            else:
                some.append((request, plan))
        if not some:
            return []
        ttl = self._owner.manager.config.plan_ttl
        pinned = checkpoints.plan_many(
            [request for request, _ in some],
            [plan.path for _, plan in some if plan.path is not None],
            [plan.found for _, plan in some if plan.found is not None],
            max(plan.wishes.ttl or ttl for _, plan in some),
        )
        gone = [entry for entry, there in zip(some, pinned, strict=True) if not there]
        for _, plan in gone:
            assert plan.found is not None
            self._choose(plan, plan.found[1] - 1)
        return gone

    def position(self, plan: HybridPlan) -> int:
        """Of its checkpoint, in tokens."""
        return 0 if plan.found is None else plan.found[1] * self._owner.step

    def _match(self, plan: HybridPlan) -> HybridMatch:
        known, stored = plan.match, plan.stored
        of = id(plan.planned), id(plan.kv), plan.found, stored.pending, stored.kv_pages
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

    def readings(self, request: Hashable) -> list[StorageTask]:
        """What storage is being read for."""
        plan = self._plans.get(request)
        return [] if plan is None else plan.stored.going

    def again(self, request: Hashable) -> None:
        """Plan what was planned before, anew."""
        plan = self._plans.get(request)
        if plan is not None:
            plan.edge = None
            given = None if plan.given is None else [plan.given]
            self.plan([request], [plan.prompt], [plan.wishes], [plan.limit], given)

    def forget(self, request: Hashable) -> HybridPlan | None:
        """Its plan; None: there was none. What it pinned is not let go."""
        plan = self._plans.pop(request, None)
        if plan is not None:
            plan.stored.cancel()
        return plan

    def cancel(self, request: Hashable) -> None:
        """Nothing is wanted of a plan any more."""
        self.forget(request)
        self._owner.checkpoints.cancel(request)
        self._owner.manager.cancel(request)

    def let_go(self) -> None:
        """The cache is not asked any more: no checkpoint stays pinned for those who wait."""
        for request in self._plans:
            with contextlib.suppress(LightcacheError):
                self._owner.checkpoints.cancel(request)

    def close(self) -> None:
        """Forget all of them."""
        for request in list(self._plans):
            self.cancel(request)


__all__ = ["HybridPlan", "HybridPlanner"]
