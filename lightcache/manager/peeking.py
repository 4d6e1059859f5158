"""Peeking: what a plan would find, without references."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from lightcache.manager.asking import Asked, AskedMany
from lightcache.manager.lookups import peeked
from lightcache.manager.matches import PrefixMatch
from lightcache.manager.planned import Planned, Waiting, by_space

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


def peek(manager: KVCacheManager, many: AskedMany) -> list[PrefixMatch]:
    """See `KVCacheManager.peek_many`."""
    planner, now = manager._planner, time.monotonic()
    plans: list[Waiting] = []
    each = zip(many.prompts, many.wishes, many.limits, strict=True)
    for request, asks in zip(many.requests, each, strict=True):
        asked = Asked(*asks)
        space = manager._weights.space_or_none(asked.prompt.tenant)
        plans.append((request, planner.made(asked, space, now)))
    _on_device(manager, plans, many.given)
    _on_host(manager, plans)
    return [_match(manager, plan) for _, plan in plans]


def peek_behind(manager: KVCacheManager, request: Hashable, limit: int | None) -> PrefixMatch:
    """What is there for a request that was planned just now with a lower limit: only what lies
    behind that is looked at. Not for an engine that said itself what its device has."""
    planner, block, tokens = manager._planner, manager.device.block_tokens, manager.page_tokens
    known = planner.planned(request)
    plan = planner.made(known.asked.up_to(limit), known.space, known.since)
    space, index = plan.space, manager.device.index
    if space is None or not plan.most:
        return _match(manager, plan)
    plan.device, plan.host_pages = known.device, known.host_pages
    if known.blocks < plan.blocks and known.device == known.blocks * block and index is not None:
        more = plan.device_keys[known.blocks :]
        plan.device += index.peek(more, namespace=space.device) * block
        if plan.device > known.device:
            plan.host_pages = 0
    plan.host_first = plan.device // tokens
    end = plan.host_first + plan.host_pages
    if known.pages <= end < plan.pages:
        plan.host_pages += manager.host.index.peek(plan.host_keys[end:], namespace=space.host)
    if known.match is not None and known.matched == (plan.device, plan.host_pages):
        return known.match
    return _match(manager, plan)


def _on_device(manager: KVCacheManager, plans: list[Waiting], given: Sequence[int] | None) -> None:
    block, index = manager.device.block_tokens, manager.device.index
    if given is not None:
        for (_, plan), tokens in zip(plans, given, strict=True):
            plan.device = min(tokens, plan.most) // block * block
        return
    for space, members in by_space(plans):
        if space.device is None or index is None:
            continue
        counts = peeked(index, [plan.device_keys for _, plan in members], space.device)
        for (_, plan), blocks in zip(members, counts, strict=True):
            plan.device = blocks * block


def _on_host(manager: KVCacheManager, plans: list[Waiting]) -> None:
    tokens = manager.page_tokens
    for space, members in by_space(plans):
        parts = []
        for _, plan in members:
            plan.host_first = plan.device // tokens
            parts.append(plan.host_keys[plan.host_first :])
        counts = peeked(manager.host.index, parts, space.host)
        for (_, plan), pages in zip(members, counts, strict=True):
            plan.host_pages = pages


def _match(manager: KVCacheManager, plan: Planned) -> PrefixMatch:
    end = (plan.host_first + plan.host_pages) * manager.page_tokens if plan.host_pages else 0
    host = max(0, end - plan.device)
    usable, why, cut = manager._planner.usable.of(plan, plan.device, plan.device + host)
    return PrefixMatch(len(plan.asked.prompt), plan.device, host, 0, usable, why, cut)


__all__ = ["peek", "peek_behind"]
