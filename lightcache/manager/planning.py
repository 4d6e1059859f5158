"""Finding: one match over device, host and storage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from lightcache.errors import LeaseLost, LightcacheError
from lightcache.leases import Lease
from lightcache.manager.asking import Asked, AskedMany
from lightcache.manager.looking import Looker
from lightcache.manager.matches import PrefixMatch, Why
from lightcache.manager.planned import Planned, Waiting
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Request, Space
from lightcache.manager.usable import Usable

if TYPE_CHECKING:
    from lightcache.costs import Costs
    from lightcache.manager.manager import KVCacheManager
    from lightcache.storage.tasks import StorageTask
    from lightcache.storage.tiers import BaseTier


class Planner:
    """The plans of one manager. Its lock is around every call."""

    def __init__(
        self, manager: KVCacheManager, costs: Costs | None, storage: BaseTier | None
    ) -> None:
        """Nothing is planned yet."""
        self._manager = manager
        self._looker = Looker(manager, storage)
        self.usable = Usable(manager, costs)
        self._plans: dict[Hashable, Planned] = {}
        self._failed: dict[Hashable, Prompt] = {}
        """Of requests whose last plan failed: what they asked."""
        self._computing: dict[bytes, Hashable] = {}
        """Keys of blocks that running requests will have computed; with "wait" only."""
        self._index = manager.device.index
        """What the device's blocks are pinned in: another one has none of these pins."""

    def plan(self, many: AskedMany) -> list[PrefixMatch]:
        """See `KVCacheManager.plan_many`."""
        now = time.monotonic()
        plans = self._known_many(many, now)
        if self._failed:
            for request in many.requests:
                self._failed.pop(request, None)
        due = plans if many.given is not None else self._looker.due(plans, now)
        if due:
            self._looker.look(due, many.given, now)
        absent = sum([plan.absent for _, plan in plans])
        if absent:
            self._manager._figures.add(absent_pages=absent)
        return [self._match(request, plan, plan.device, plan.host_pages) for request, plan in plans]

    def plan_one(
        self, request: Hashable, asked: Asked, space: Space | None, given: int | None
    ) -> PrefixMatch:
        """`plan` for one request alone.

        Args:
            space: of its tenant, looked up just now.
            given: device tokens that an engine found itself; None: look.
        """
        now = time.monotonic()
        if self._index is not self._manager.device.index:
            self._see_device()
        plan = self._plans.get(request)
        if plan is None or plan.asked != asked or plan.space is not space:
            plan = self._renewed(request, asked, space, plan, now)
        if self._failed:
            self._failed.pop(request, None)
        if given is not None or self._looker.due([(request, plan)], now):
            self._looker.look_one(request, plan, given, now)
        if plan.absent:
            self._manager._figures.add(absent_pages=plan.absent)
        return self._match(request, plan, plan.device, plan.host_pages)

    def _known_many(self, many: AskedMany, now: float) -> list[Waiting]:
        """The plan of each request: the one that it has, if it asks for the same as before."""
        if self._index is not self._manager.device.index:
            self._see_device()
        tenants = {prompt.tenant for prompt in many.prompts}  # all, before a plan is renewed
        spaces = {each: self._manager._weights.space_or_none(each) for each in tenants}
        plans = []
        each = zip(many.prompts, many.wishes, many.limits, strict=True)
        for request, asks in zip(many.requests, each, strict=True):
            space, plan = spaces[asks[0].tenant], self._plans.get(request)
            if plan is None or plan.asked != asks or plan.space is not space:
                plan = self._renewed(request, Asked._make(asks), space, plan, now)
            plans.append((request, plan))
        return plans

    def _see_device(self) -> None:
        """What was pinned in another index of the device is not."""
        self._index = self._manager.device.index
        for plan in self._plans.values():
            plan.settled = 0.0

    def _renewed(
        self,
        request: Hashable,
        asked: Asked,
        space: Space | None,
        before: Planned | None,
        now: float,
    ) -> Planned:
        """A plan for something new, in the place of the one before."""
        made = self.made(asked, space, now)
        if before is not None:
            made.on_host, made.pinned = before.on_host, before.pinned
            if before.asked.prompt is asked.prompt and before.space is space:
                made.reading, made.since = before.reading, before.since
            else:
                self._stop_reading(before)
        if not made.most:
            self._let_go(request)  # what was planned before
            made.on_host = made.pinned = False
        self._plans[request] = made
        return made

    def made(self, asked: Asked, space: Space | None, now: float) -> Planned:
        """What a request asks; nothing was looked for."""
        wishes = asked.wishes
        most, tiers = asked.most if wishes.read and space is not None else 0, wishes.tiers
        blocks = most // self._manager.device.block_tokens if "device" in tiers else 0
        pages = most // self._manager.page_tokens if "host" in tiers else 0
        ttl = wishes.ttl or self._manager.config.plan_ttl
        return Planned(asked, space, most, ttl, now, blocks, pages)

    def _let_go(self, request: Hashable) -> None:
        for tier in (self._manager.device, self._manager.host.index):
            # Closed: nothing is pinned any more. Else its pins go at the plan's time limit.
            with contextlib.suppress(LightcacheError):
                tier.cancel(request)

    def _stop_reading(self, plan: Planned) -> None:
        if plan.reading is not None:
            self._manager._traffic.foreign.cancel(plan.reading)

    def failed(self, request: Hashable) -> bool:
        """Whether the last plan of a request failed, or was let go of."""
        return request in self._failed

    def missed(self, request: Hashable, prompt: Prompt) -> PrefixMatch:
        """Nothing is found; what was asked is known to `prompt_of`."""
        self._failed[request] = prompt
        return PrefixMatch(len(prompt), why=Why.DISABLED)

    def prompt_of(self, request: Hashable) -> Prompt:
        """What a request asked whose plan failed, or cannot be taken. The plan goes.

        Raises:
            LeaseLost: it was not planned.
        """
        planned, failed = self._plans.get(request), self._failed.pop(request, None)
        if planned is None and failed is None:
            raise LeaseLost(f"take: the request {request!r} was not planned; plan it first")
        self.cancel(request)
        return failed if failed is not None else planned.asked.prompt  # type: ignore[union-attr]

    def holds(self, request: Hashable, now: float) -> bool:
        """Whether what was planned is pinned for half of its time still, so that planning it again
        would find no less. Never where an engine may evict it, or others are waited for."""
        plan = self._plans.get(request)
        if plan is None or plan.reading is not None:
            return False
        if self._manager.config.same_prefix == "wait":
            return False
        return plan.settled > now or not plan.most

    def planned(self, request: Hashable) -> Planned:
        """The plan of a request that has one."""
        return self._plans[request]

    # ---- what of it can be used

    def _match(self, request: Hashable, plan: Planned, device: int, pages: int) -> PrefixMatch:
        if plan.match is not None and plan.matched == (device, pages) and not self._computing:
            return plan.match
        tokens = self._manager.page_tokens
        end = (plan.host_first + pages) * tokens if pages else 0
        host = max(0, end - device)
        from_storage, pending = 0, False
        if plan.reading is not None:
            from_storage = min(host, int(plan.reading.pages_done) * tokens)
            pending = not plan.reading.over
        usable, why, cut = self.usable.of(plan, device, device + host)
        found = PrefixMatch(
            len(plan.asked.prompt),
            device,
            host - from_storage,
            from_storage,
            usable,
            why,
            cut,
            pending,
            self._other(request, plan, usable) if self._computing else None,
        )
        if plan.reading is None and not self._computing:
            plan.match, plan.matched = found, (device, pages)
        return found

    # ---- the same prefix, by two at once

    def _other(self, request: Hashable, plan: Planned, usable: int) -> Hashable | None:
        """Who computes the block that this one would compute first."""
        if plan.space is None:
            return None
        at = usable // self._manager.device.block_tokens
        if at >= plan.blocks:
            return None
        key = plan.device_keys[at].tobytes() if at else plan.first_block()
        other = self._computing.get(key)
        late = time.monotonic() - plan.since >= self._manager.config.wait_limit
        if other is None or other == request or late:
            return None
        if not plan.waited:
            plan.waited = True
            self._manager._figures.add(waits=1)
        return other

    def computes(self, one: Request) -> None:
        """A request begins to compute what it has not."""
        if self._manager.config.same_prefix == "wait" and one.wishes.write:
            for key in one.device_chain.keys[one.named :]:
                self._computing.setdefault(key.tobytes(), one.id)

    def computed(self, one: Request) -> None:
        """A request has ended: what it did not compute, it will not."""
        if self._computing:
            for key in one.device_chain.keys:
                if self._computing.get(digest := key.tobytes()) == one.id:
                    del self._computing[digest]

    def without_host(self, prompt: Prompt, match: PrefixMatch) -> int:
        """Tokens that are usable of a match if nothing is loaded."""
        return self.usable.without_host(prompt, match)

    # ---- taking

    def reading(self, request: Hashable) -> StorageTask | None:
        """What brings pages from storage for a plan; None: nothing does."""
        plan = self._plans.get(request)
        return plan.reading if plan is not None else None

    def take(self, request: Hashable) -> tuple[Planned, PrefixMatch, Lease | None, Lease | None]:
        """The plan, what can be used of it, and its pins on the device and the host.

        Raises:
            LeaseLost: there is none, or its time is over.
        """
        plan = self._plans.get(request)
        if plan is None:
            raise LeaseLost(f"take: the request {request!r} was not planned; plan it first")
        manager = self._manager
        if plan.space is None or not manager._weights.good(plan.space):
            self.cancel(request)
            plan.space = plan.reading = None  # it runs without
            return plan, self._match(request, plan, 0, 0), None, None
        hit = host = None
        try:
            if plan.nowhere_until:
                self._looker.again(request, plan)
            if manager.device.index is not None and plan.blocks and not plan.nowhere_until:
                hit = manager.device.take(request)
            if plan.on_host:
                host = manager.host.index.take(request)
        except BaseException as error:
            for lease in (hit, host):
                if lease is not None:
                    lease.release()
            self.cancel(request)
            if not isinstance(error, LeaseLost):
                self._failed[request] = plan.asked.prompt  # it may still run, without the cache
            raise
        del self._plans[request]
        device = len(hit) * manager.device.block_tokens if hit is not None else plan.device
        match = self._match(request, plan, device, len(host) if host is not None else 0)
        return plan, match, hit, host

    def cancel(self, request: Hashable) -> None:
        """Forget a plan."""
        self._failed.pop(request, None)
        plan = self._plans.pop(request, None)
        if plan is None:
            return
        self._stop_reading(plan)
        self._let_go(request)

    def let_go(self) -> None:
        """The cache is not asked any more: nothing stays pinned. Who was planned may begin, and
        finds nothing."""
        for request, plan in list(self._plans.items()):
            self.cancel(request)
            self._failed[request] = plan.asked.prompt

    def close(self) -> None:
        """Forget all of them."""
        for request in list(self._plans):
            self.cancel(request)
        self._failed.clear()


__all__ = ["Planner"]
