"""Finding: the deepest position that both KV and a checkpoint reach."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from lightcache.errors import LightcacheError
from lightcache.hybrid.looking import Looker
from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.planned import HybridPlan
from lightcache.hybrid.seeking import Seeker
from lightcache.hybrid.spaces import Path, StateSpace
from lightcache.manager.asking import Asked, AskedMany
from lightcache.manager.matches import Wishes
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Space

if TYPE_CHECKING:
    from lightcache.hybrid.manager import HybridManager
    from lightcache.storage.tasks import StorageTask

Where = tuple[Space | None, StateSpace | None]
"""Where a tenant's KV and states are; None: nowhere."""

Asks = tuple[Prompt, Wishes, int | None]
"""As an `Asked` is, which is made where it asks for something new."""


class HybridPlanner:
    """The plans of one `HybridManager`. Its lock is around every call."""

    def __init__(self, owner: HybridManager) -> None:
        """Nothing is planned yet."""
        self._owner = owner
        self._plans: dict[Hashable, HybridPlan] = {}
        self._looker = Looker(owner)
        self._seeker = Seeker(owner)

    def plan(self, many: AskedMany) -> list[HybridMatch]:
        """See `HybridManager.plan_many`."""
        spaces: dict[str, Where] = {}
        plans: list[HybridPlan] = []
        given = [None] * len(many.requests) if many.given is None else many.given
        each = zip(many.prompts, many.wishes, many.limits, strict=True)
        for request, asks, tokens in zip(many.requests, each, given, strict=True):
            tenant = asks[0].tenant
            if tenant not in spaces:
                spaces[tenant] = self._where(tenant)
            plans.append(self._known(request, asks, tokens, spaces[tenant]))
        changed, now = self._looker.changed(plans), time.monotonic()
        for request, plan, other in zip(many.requests, plans, changed, strict=True):
            self._renew(request, plan, other, now)
        return [self._match(plan) for plan in plans]

    def plan_one(self, request: Hashable, asked: Asked, given: int | None) -> HybridMatch:
        """The same for one request alone.

        Args:
            given: device tokens that an engine found itself; None: look.
        """
        plan = self._known(request, asked, given, self._where(asked.prompt.tenant))
        changed = not plan.looked or self._looker.changed([plan])[0]
        self._renew(request, plan, changed, time.monotonic())
        return self._match(plan)

    def _where(self, tenant: str) -> Where:
        space = self._owner.inner.space_of(tenant)
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
        asked = Asked._make(asks)
        path = None
        if space is not None and states is not None and asked.wishes.read:
            path = Path(self._owner.keys_of(asked.prompt, space), states)
        made = HybridPlan(asked, asked.most, given, space, states, path)
        if known is not None:
            same = known.asked.prompt is asked.prompt and known.states is states
            if same and asked.wishes.read:
                made.stored = known.stored
            else:
                known.stored.cancel(self._owner.checkpoints.traffic.moves.foreign)
        self._plans[request] = made
        return made

    # ---- what of it can be used

    def _renew(self, request: Hashable, plan: HybridPlan, changed: bool, now: float) -> None:
        """Look if something has changed, and pin what can be used; if nothing has, only where the
        pins may end before long. Those of the checkpoint and of KV were made at once."""
        if not changed:
            if not self._owner.inner.holds(request, now):
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
        owner, ttl = self._owner, plan.asked.wishes.ttl or self._owner.manager.config.plan_ttl
        while True:
            while plan.found is not None and plan.path is not None:
                if owner.checkpoints.plan(request, plan.path, plan.found, ttl):
                    break
                self._looker.choose(plan, plan.found[1] - 1)
            else:
                owner.checkpoints.cancel(request)
            position = self.position(plan)
            plan.planned = kv = owner.inner.plan(
                request, plan.asked.up_to(position), plan.space, plan.given
            )
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

    def readings(self, request: Hashable) -> list[StorageTask]:
        """What storage is being read for."""
        plan = self._plans.get(request)
        return [] if plan is None else plan.stored.going

    def again(self, request: Hashable) -> None:
        """Plan what was planned before, anew."""
        plan = self._plans.get(request)
        if plan is not None:
            plan.looked = False
            self.plan_one(request, plan.asked, plan.given)

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


__all__ = ["HybridPlanner"]
