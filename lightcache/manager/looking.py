"""Looking: what of the prompts that wait is there, tier by tier."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from lightcache.errors import LeaseLost
from lightcache.manager.lookups import pinned, there
from lightcache.manager.planned import NO_KEYS, Planned, Waiting, by_space
from lightcache.manager.requests import Space

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager
    from lightcache.storage.tiers import BaseTier


class Looker:
    """Finds and pins what plans can use. The manager's lock is around every call."""

    def __init__(self, manager: KVCacheManager, storage: BaseTier | None) -> None:
        """Nothing is looked for yet."""
        self._manager, self._storage = manager, storage

    def due(self, plans: list[Waiting], now: float) -> list[Waiting]:
        """Those that have to be looked at. What a plan has found is pinned, so while its time is
        not half over only more can be found: and then the key behind it is there. What another
        process does to the weights is seen when a space is asked for."""
        settled = [plan for _, plan in plans if plan.settled > now]
        if not settled:
            return plans
        host, device = self._manager.host.index, self._manager.device.index
        host.peek(NO_KEYS)  # raises if it was closed, or disabled by an operator
        for space in {plan.space for plan in settled}:
            assert space is not None
            assert space.device is not None
            assert device is not None
            members = [plan for plan in settled if plan.space is space]
            for i in there(device, [plan.next_device for plan in members], space.device):
                members[i].settled = 0.0
            for i in there(host, [plan.next_host for plan in members], space.host):
                members[i].settled = 0.0
        return [entry for entry in plans if entry[1].settled <= now]

    def look(self, plans: list[Waiting], given: Sequence[int] | None, now: float) -> None:
        """Look in every tier. Where a prompt's first page is in none, the rest is not hashed.

        Args:
            given: tokens that the engine itself found on the device; None: look there.
        """
        if given is not None:
            self._believe(plans, given)
        wanted = self._begun_somewhere(plans, given is not None, now)
        if given is None:
            self._on_device(wanted)
        self._on_host(wanted)
        if given is None:
            for _, plan in plans:
                self._settle(plan, now)

    def look_one(self, request: Hashable, plan: Planned, given: int | None, now: float) -> None:
        """`look` for one plan alone, without what it takes to gather many."""
        space = plan.space
        if given is not None:
            self._believe([(request, plan)], [given])
        plan.nowhere_until = 0.0
        if self._is_fresh(plan) and not self._begun_somewhere(
            [(request, plan)], given is not None, now
        ):
            self._settle(plan, now)
            return
        if not plan.most or space is None:
            plan.settled = 0.0
            return
        ttl, device = plan.ttl, self._manager.device
        if given is None and space.device is not None:
            blocks = device.plan(request, plan.device_keys, space.device, ttl)
            plan.device, plan.pinned = blocks * device.block_tokens, True
        if self._asks_host(request, plan):
            keys = plan.host_keys[plan.host_first :]
            index = self._manager.host.index
            pages = index.plan(request, keys, namespace=space.host, timeout=ttl, frozen=True)
            self._told_by_host(plan, space, pages)
        if given is None:
            self._settle(plan, now)

    def again(self, request: Hashable, plan: Planned) -> None:
        """Look once more for a plan that had found nothing, before it is taken.

        Raises:
            LeaseLost: its time is over.
        """
        now = time.monotonic()
        if now > plan.nowhere_until:
            raise LeaseLost(
                f"take: the plan of {request!r} was not renewed within its time; plan it again"
            )
        # What an engine has on its device is as it said.
        given = None if self._manager.device.owned else [plan.device]
        self.look([(request, plan)], given, now)

    # ---- first pages

    def _begun_somewhere(self, plans: list[Waiting], given: bool, now: float) -> list[Waiting]:
        """Without those whose first page is in no tier, as most that are quite new."""
        for _, plan in plans:
            plan.nowhere_until = 0.0
        fresh = [entry for entry in plans if self._is_fresh(entry[1])]
        if not fresh:
            return plans
        for space, members in by_space(fresh):
            begun = self._begun(space, [plan for _, plan in members], given)
            for _, plan in members:
                if plan not in begun:  # it is as a look would have left it
                    plan.nowhere_until = now + plan.ttl
                    plan.host_first = plan.host_pages = 0
                    plan.absent, plan.on_host = plan.pages, False
        return [entry for entry in plans if not entry[1].nowhere_until]

    def _is_fresh(self, plan: Planned) -> bool:
        """Whether its prompt was not hashed for this look's sake, and may not have to be."""
        if plan.pinned or plan.device or plan.space is None or not plan.most:
            return False
        if self._storage is not None and "storage" in plan.asked.wishes.tiers:
            return False  # storage is asked for what lies behind
        return not plan.asked.prompt.is_hashed(plan.space.device_spec)

    def _begun(self, space: Space, plans: list[Planned], given: bool) -> set[Planned]:
        """Those of them whose first page is there."""
        device, host = self._manager.device.index, self._manager.host.index
        begun: set[Planned] = set()
        if not given and device is not None and space.device is not None:
            keys = [plan.first_block() for plan in plans]
            begun.update(plans[i] for i in there(device, keys, space.device))
        rest = [plan for plan in plans if plan not in begun]
        keys = [plan.first_page() for plan in rest]
        begun.update(rest[i] for i in there(host, keys, space.host))
        return begun

    # ---- tier by tier

    def _believe(self, plans: list[Waiting], given: Sequence[int]) -> None:
        block = self._manager.device.block_tokens
        for (_, plan), tokens in zip(plans, given, strict=True):
            plan.device = min(tokens, plan.most) // block * block
            plan.settled = 0.0  # nothing is pinned

    def _on_device(self, plans: list[Waiting]) -> None:
        device = self._manager.device
        for space, members in by_space(plans):
            if space.device is None:
                continue
            ids = [request for request, _ in members]
            parts = [plan.device_keys for _, plan in members]
            counts = device.plan_many(ids, parts, space.device, _longest(members))
            for (_, plan), blocks in zip(members, counts, strict=True):
                plan.device = blocks * device.block_tokens
                plan.pinned = True

    def _on_host(self, plans: list[Waiting]) -> None:
        index = self._manager.host.index
        for space, members in by_space(plans):
            asked = [entry for entry in members if self._asks_host(*entry)]
            if not asked:
                continue
            ids = [request for request, _ in asked]
            parts = [plan.host_keys[plan.host_first :] for _, plan in asked]
            counts = pinned(index, ids, parts, space.host, _longest(members))
            for (_, plan), pages in zip(asked, counts, strict=True):
                self._told_by_host(plan, space, pages)

    def _asks_host(self, request: Hashable, plan: Planned) -> bool:
        """Whether the host may have pages behind what the device has."""
        plan.host_first, plan.host_pages, plan.absent = (
            plan.device // self._manager.page_tokens,
            0,
            0,
        )
        asks = plan.pages > plan.host_first
        if plan.on_host and not asks:
            self._manager.host.index.cancel(request)
        plan.on_host = asks
        return asks

    def _told_by_host(self, plan: Planned, space: Space, pages: int) -> None:
        plan.host_pages, plan.pinned = pages, True
        plan.absent = plan.pages - plan.host_first - pages
        if plan.absent:
            self._in_storage(plan, space, pages)

    def _in_storage(self, plan: Planned, space: Space, pages: int) -> None:
        """Begin to bring what follows to the host, once for each request."""
        if (
            self._storage is None
            or plan.reading is not None
            or "storage" not in plan.asked.wishes.tiers
        ):
            return
        keys, first = plan.host_keys, plan.host_first + pages
        plan.reading = self._storage.prefetch(keys, first, namespace=space.host)

    # ---- how long it holds

    def _settle(self, plan: Planned, now: float) -> None:
        """Note what has to appear before more of a plan can be found."""
        device, space = self._manager.device, plan.space
        plan.settled = 0.0
        if space is None or space.device is None or not plan.most or not device.owned:
            return  # nothing was looked for; or an engine may evict what was found
        if plan.nowhere_until:
            plan.next_device, plan.next_host = plan.first_block(), plan.first_page()
        else:
            block = plan.device // device.block_tokens
            page = plan.host_first + plan.host_pages
            plan.next_device = plan.device_keys[block : block + 1].tobytes()
            plan.next_host = plan.host_keys[page].tobytes() if plan.absent else b""
        plan.settled = now + plan.ttl / 2


def _longest(members: list[Waiting]) -> float:
    return max([plan.ttl for _, plan in members])


__all__ = ["Looker"]
