"""Peeking: what a plan would find, without references."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightcache.manager.matches import ANY, PrefixMatch, Wishes
from lightcache.manager.planned import Planned, Waiting, by_space, joined
from lightcache.manager.prompts import Prompt

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


def peek(
    manager: KVCacheManager,
    prompts: Sequence[Prompt],
    wishes: Sequence[Wishes] | None,
    limits: Sequence[int | None] | None,
    device_tokens: Sequence[int] | None,
) -> list[PrefixMatch]:
    """See `KVCacheManager.peek_many`."""
    planner, now = manager._planner, time.monotonic()
    plans: list[Waiting] = []
    for i, prompt in enumerate(prompts):
        wish = wishes[i] if wishes is not None else ANY
        limit = limits[i] if limits is not None else None
        space = manager._weights.space_of(prompt.tenant)
        plans.append((i, planner.asked(prompt, space, wish, limit, now)))
    _on_device(manager, plans, device_tokens)
    _on_host(manager, plans)
    return [_match(manager, plan) for _, plan in plans]


def _on_device(manager: KVCacheManager, plans: list[Waiting], given: Sequence[int] | None) -> None:
    block, index = manager.device.block_tokens, manager.device.index
    if given is not None:
        for (_, plan), tokens in zip(plans, given, strict=True):
            plan.device = min(tokens, plan.most) // block * block
        return
    for space, members in by_space(plans):
        if space.device is None or index is None:
            continue
        keys, offsets = joined([plan.device_keys for _, plan in members])
        counts = index.peek_many(keys, offsets, namespace=space.device)
        for (_, plan), blocks in zip(members, counts.tolist(), strict=True):
            plan.device = blocks * block


def _on_host(manager: KVCacheManager, plans: list[Waiting]) -> None:
    tokens = manager.page_tokens
    for space, members in by_space(plans):
        parts = []
        for _, plan in members:
            plan.host_first = plan.device // tokens
            parts.append(plan.host_keys[plan.host_first :])
        keys, offsets = joined(parts)
        counts = manager.host.index.peek_many(keys, offsets, namespace=space.host)
        for (_, plan), pages in zip(members, counts.tolist(), strict=True):
            plan.host_pages = pages


def _match(manager: KVCacheManager, plan: Planned) -> PrefixMatch:
    end = (plan.host_first + plan.host_pages) * manager.page_tokens if plan.host_pages else 0
    host = max(0, end - plan.device)
    usable, why, cut = manager._planner.usable.of(plan, plan.device, plan.device + host)
    return PrefixMatch(len(plan.prompt), plan.device, host, 0, usable, why, cut)


__all__ = ["peek"]
