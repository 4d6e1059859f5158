"""Finding: one match over device, host and storage."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Keys, Offsets
from lightcache.errors import ConfigError, Detached, LeaseLost
from lightcache.leases import Lease
from lightcache.manager.matches import ANY, PrefixMatch, Why, Wishes
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Request, Space

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


@dataclass(eq=False)
class Planned:
    """A plan: what was asked, and where the host's part begins."""

    prompt: Prompt
    wishes: Wishes
    space: Space | None
    """None: the weights are being changed."""
    most: int
    """Tokens that may be reused at most: the limit, and one is left to compute."""
    limited: bool
    device: int = 0
    """Tokens found on the device."""
    host_first: int = 0
    """Number of the first host page that is planned."""
    host_pages: int = 0
    reading: Any = None
    """The task that brings pages from storage, if one was begun."""
    since: float = 0.0
    """When it was first planned."""


class Planner:
    """The plans of one manager. Its lock is around every call."""

    def __init__(self, manager: KVCacheManager, costs: Any, storage: Any) -> None:
        """Nothing is planned yet."""
        self._manager, self._costs, self._storage = manager, costs, storage
        self._plans: dict[Hashable, Planned] = {}
        self._failed: dict[Hashable, Prompt] = {}
        """Of requests whose last plan failed: what they asked."""
        self._computing: dict[bytes, Hashable] = {}
        """Keys of blocks that running requests will have computed; with "wait" only."""

    def plan(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        wishes: Sequence[Wishes] | None,
        limits: Sequence[int | None] | None,
        device_tokens: Sequence[int] | None,
    ) -> list[PrefixMatch]:
        """See `KVCacheManager.plan_many`."""
        plans = []
        for i, prompt in enumerate(prompts):
            wish = wishes[i] if wishes is not None else ANY
            plans.append(self._asked(requests[i], prompt, wish, limits[i] if limits else None))
        self._look_on_device(requests, plans, device_tokens)
        self._look_on_host(requests, plans)
        return [
            self._match(requests[i], plan, plan.device, plan.host_pages)
            for i, plan in enumerate(plans)
        ]

    def _asked(
        self, request: Hashable, prompt: Prompt, wishes: Wishes, limit: int | None
    ) -> Planned:
        if limit is not None and limit < 0:
            raise ConfigError(f"limit: expected tokens >= 0, found {limit}")
        most = max(0, len(prompt) - 1)
        limited = limit is not None and limit < most
        if limited:
            most = limit or 0
        weights, space = self._manager._weights, None
        if weights.open:
            space = self._manager._spaces.of(prompt.tenant)
        if not wishes.read or space is None or not weights.good(space):
            most = 0
        self._failed.pop(request, None)
        known = self._plans.get(request)
        made = Planned(prompt, wishes, space, most, limited)
        made.since = time.monotonic()
        if known is not None and known.prompt is prompt:
            made.reading, made.since = known.reading, known.since
        self._plans[request] = made
        return made

    def _look_on_device(
        self,
        requests: Sequence[Hashable],
        plans: list[Planned],
        given: Sequence[int] | None,
    ) -> None:
        device = self._manager.device
        if given is not None:
            for plan, tokens in zip(plans, given, strict=True):
                plan.device = min(tokens, plan.most) // device.block_tokens * device.block_tokens
            return
        if device.index is None:
            return
        for space, members in _by_space(plans):
            assert space.device is not None
            keys, offsets = _joined(
                [plans[i].prompt.keys(space.device_spec)[: self._blocks(plans[i])] for i in members]
            )
            ids = [requests[i] for i in members]
            ttl = self._ttl(plans, members)
            counts = device.plan_many(ids, keys, offsets, space.device, ttl)
            for i, blocks in zip(members, counts.tolist(), strict=True):
                plans[i].device = blocks * device.block_tokens

    def _blocks(self, plan: Planned) -> int:
        return (
            plan.most // self._manager.device.block_tokens if "device" in plan.wishes.tiers else 0
        )

    def _look_on_host(self, requests: Sequence[Hashable], plans: list[Planned]) -> None:
        manager, tokens = self._manager, self._manager.page_tokens
        for space, members in _by_space(plans):
            parts, ids, asked = [], [], []
            for i in members:
                plan = plans[i]
                last = plan.most // tokens if "host" in plan.wishes.tiers else 0
                plan.host_first = plan.device // tokens
                if last > plan.host_first:
                    asked.append(i)
                    ids.append(requests[i])
                    parts.append(plan.prompt.keys(space.host_spec)[plan.host_first : last])
                else:
                    manager.host.index.cancel(requests[i])
            if not asked:
                continue
            keys, offsets = _joined(parts)
            counts = manager.host.index.plan_many(
                ids, keys, offsets, namespace=space.host, timeout=self._ttl(plans, members)
            )
            for i, pages, part in zip(asked, counts.tolist(), parts, strict=True):
                plans[i].host_pages = pages
                manager._figures.add(absent_pages=len(part) - pages)
                if pages < len(part):
                    self._look_in_storage(plans[i], space, pages)

    def _ttl(self, plans: list[Planned], members: list[int]) -> float:
        own = self._manager.config.plan_ttl
        return max((plans[i].wishes.ttl or own for i in members), default=own)

    def _look_in_storage(self, plan: Planned, space: Space, pages: int) -> None:
        """Begin to bring what follows to the host, once for each request."""
        if self._storage is None or plan.reading is not None or "storage" not in plan.wishes.tiers:
            return
        last = plan.most // self._manager.page_tokens
        keys = plan.prompt.keys(space.host_spec)[:last]
        plan.reading = self._storage.prefetch(keys, plan.host_first + pages, namespace=space.host)

    def missed(self, requests: Sequence[Hashable], prompts: Sequence[Prompt]) -> list[PrefixMatch]:
        """Nothing is found; what was asked is known to `prompt_of`."""
        self._failed.update(zip(requests, prompts, strict=True))
        return [PrefixMatch(len(prompt), why=Why.DISABLED) for prompt in prompts]

    def prompt_of(self, request: Hashable) -> Prompt:
        """What a request asked whose plan failed.

        Raises:
            LeaseLost: it was not planned.
        """
        planned, failed = self._plans.pop(request, None), self._failed.pop(request, None)
        if planned is None and failed is None:
            raise LeaseLost(f"take: the request {request!r} was not planned; plan it first")
        return failed if failed is not None else planned.prompt  # type: ignore[union-attr]

    # ---- what of it can be used

    def _match(self, request: Hashable, plan: Planned, device: int, pages: int) -> PrefixMatch:
        tokens = self._manager.page_tokens
        end = (plan.host_first + pages) * tokens if pages else 0
        host = max(0, end - device)
        from_storage = 0
        pending = False
        if plan.reading is not None:
            from_storage = min(host, int(plan.reading.pages_done) * tokens)
            pending = not plan.reading.finished
        found = PrefixMatch(len(plan.prompt), device, host - from_storage, from_storage)
        usable, why, cut = self._usable(plan, found)
        other = self._other(request, plan, usable)
        return replace(found, usable=usable, why=why, cut=cut, pending=pending, waits_for=other)

    # ---- the same prefix, by two at once

    def _other(self, request: Hashable, plan: Planned, usable: int) -> Hashable | None:
        """Who computes the block that this one would compute first."""
        if not self._computing or plan.space is None:
            return None
        at = usable // self._manager.device.block_tokens
        keys = plan.prompt.keys(plan.space.device_spec)
        if at >= min(len(keys), self._blocks(plan)):
            return None
        other = self._computing.get(keys[at].tobytes())
        late = time.monotonic() - plan.since >= self._manager.config.wait_limit
        return None if other == request or late else other

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

    def _usable(self, plan: Planned, found: PrefixMatch) -> tuple[int, Why, Any]:
        if not plan.wishes.read:
            return 0, Why.WISHES, None
        if plan.space is None:
            return 0, Why.WEIGHTS, None
        usable, why = found.found, Why.NOTHING
        if usable > found.device and not self._worth_loading(usable - found.device):
            usable, why = found.device, Why.BREAK_EVEN
        cut = plan.prompt.cut_item(usable)
        if cut is not None:
            return self._before(cut.start, found), Why.ITEM, cut
        if why is Why.NOTHING and usable < found.found:
            why = Why.LIMIT if plan.limited else Why.LAST_TOKEN
        return usable, why, None

    def _before(self, position: int, found: PrefixMatch) -> int:
        """The last boundary not beyond a position: of a block on the device, of a page on the
        host."""
        block = self._manager.device.block_tokens
        on_device = min(position, found.device) // block * block
        if position <= found.device:
            return on_device
        return max(on_device, position // self._manager.page_tokens * self._manager.page_tokens)

    def _worth_loading(self, tokens: int) -> bool:
        least = self._manager.config.min_load_tokens
        if least is not None:
            return tokens >= least
        pages = -(-tokens // self._manager.page_tokens)
        return self._costs is None or bool(self._costs.worth_loading(pages))

    # ---- taking

    def take(self, request: Hashable) -> tuple[Planned, PrefixMatch, Lease | None, Lease | None]:
        """The plan, what can be used of it, and its pins on the device and the host.

        Raises:
            LeaseLost: there is none, or its time is over.
        """
        if request in self._failed:
            raise Detached(f"take: planning {request!r} failed")
        plan = self._plans.get(request)
        if plan is None:
            raise LeaseLost(f"take: the request {request!r} was not planned; plan it first")
        manager = self._manager
        hit = host = None
        try:
            if manager.device.index is not None and self._blocks(plan):
                hit = manager.device.take(request)
            if plan.host_pages:
                host = manager.host.index.take(request)
            else:
                manager.host.index.cancel(request)
        except BaseException as error:
            for lease in (hit, host):
                if lease is not None:
                    lease.release()
            self.cancel(request)
            if not isinstance(error, LeaseLost):
                self._failed[request] = plan.prompt  # it may still run, without the cache
            raise
        del self._plans[request]
        device = len(hit) * manager.device.block_tokens if hit is not None else plan.device
        match = self._match(request, plan, device, len(host) if host is not None else 0)
        return plan, match, hit, host

    def cancel(self, request: Hashable) -> None:
        """Forget a plan."""
        self._failed.pop(request, None)
        plan = self._plans.pop(request, None)
        if plan is not None and plan.reading is not None:
            plan.reading.cancel()
        self._manager.device.cancel(request)
        self._manager.host.index.cancel(request)

    def close(self) -> None:
        """Forget all of them."""
        for request in list(self._plans):
            self.cancel(request)


def _by_space(plans: list[Planned]) -> list[tuple[Space, list[int]]]:
    """Positions of plans that may look for anything, by their space: nearly always there is one."""
    found: dict[int, tuple[Space, list[int]]] = {}
    for i, plan in enumerate(plans):
        if plan.most and plan.space is not None:
            found.setdefault(id(plan.space), (plan.space, []))[1].append(i)
    return list(found.values())


def _joined(parts: list[Keys]) -> tuple[Keys, Offsets]:
    """Keys of many requests in one array."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.uint64), offsets


__all__ = ["Planned", "Planner"]
