"""Beginning: what a plan becomes when its request is taken."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from lightcache.leases import Lease
from lightcache.manager.matches import ANY, PrefixMatch
from lightcache.manager.planned import Planned
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import LEASED, Chain, NoChain, Request

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


def without_cache(request: Hashable, prompt: Prompt, miss: PrefixMatch) -> Request:
    """A request of which nothing is found or published."""
    nothing = NoChain()
    return Request(request, prompt, ANY, None, miss, nothing, nothing, known=len(prompt))


def begin_request(
    manager: KVCacheManager,
    request: Hashable,
    planned: Planned,
    match: PrefixMatch,
    hit: Lease | None,
    host: Lease | None,
) -> Request:
    """A request that holds what was planned for it: device blocks and host pages are its own."""
    (prompt, wishes, _), space = planned.asked, planned.space
    if space is None:
        return without_cache(request, prompt, match)
    device_chain = Chain(prompt, space.device_spec)
    same = space.host_spec is space.device_spec
    made = Request(
        request,
        prompt,
        wishes,
        space,
        match,
        device_chain,
        device_chain if same else Chain(prompt, space.host_spec),
        hit,
        host,
        planned.host_first,
        known=len(prompt),
    )
    storage = manager._storage
    if storage is not None and storage.wants_tokens:
        stored = wishes.write and "storage" in wishes.tiers
        made.said = bytearray() if stored else None
    blocks = min(match.device, match.usable) // manager.device.block_tokens
    if hit is not None:
        made.table = hit.pages[:blocks].copy()
        made.kind = bytearray([LEASED]) * blocks
    made.named = blocks
    if planned.host_first:  # else nothing of it need be hashed yet
        before = made.host_chain.keys[: planned.host_first]
        made.written = manager.host.peek(before, namespace=space.host)
    if made.written == planned.host_first and host is not None:
        made.written += len(host)
    return made


__all__ = ["begin_request", "without_cache"]
