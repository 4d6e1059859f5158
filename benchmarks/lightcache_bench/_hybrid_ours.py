"""Requests through a `HybridManager`, one at a time, without bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightcache.cache import Cache
from lightcache.hybrid import Checkpoints, Grid, HybridManager
from lightcache.hybrid.copiers import ArrayCopier
from lightcache.hybrid.opening import create_slots
from lightcache.manager import (
    KVCacheManager,
    ManagedBlocks,
    ManagerConfig,
    NullBackend,
    Prompt,
    RequestOptions,
)
from lightcache.runs import PLAIN, Run
from lightcache_bench._hybrid_traffic import Visit

_BESIDE = 2
"""Slots of the request that runs, for its own state and for what it saves: not of the budget."""


@dataclass(frozen=True)
class Room:
    """Of a tier that is divided."""

    states: int
    pages: int


@dataclass(frozen=True)
class Pool:
    """Of a host that is not."""

    pages: int
    parts: int
    """Pages that a state takes."""


def hit_tokens(
    visits: Sequence[Visit],
    grid: Grid,
    device: Room,
    host: Room | Pool | None = None,
    *,
    chunk: int,
) -> int:
    """Tokens of prompts that need not be computed.

    Args:
        grid: blocks and pages of one size.
        chunk: tokens of a pass of prefill.
    """
    with ExitStack() as stack:
        hybrid = _opened(stack, grid, device, host)
        options = RequestOptions(
            tiers=frozenset({"device"} if host is None else {"device", "host"})
        )
        for number, visit in enumerate(visits):
            _run(hybrid, number, visit, chunk, options)
        return hybrid.stats().usable_tokens


def _opened(stack: ExitStack, grid: Grid, device: Room, host: Room | Pool | None) -> HybridManager:
    name = f"bench-hybrid-{os.getpid()}"
    slots = create_slots(f"{name}.slots", device.states + _BESIDE)
    stack.callback(slots.close)
    blocks = ManagedBlocks(
        f"{name}.device", block_tokens=grid.block_tokens, blocks=device.pages + 1, eviction="lru"
    )
    stack.callback(blocks.close)
    backend = NullBackend()
    pages = 1 if host is None else host.pages  # a manager always has a host: nobody writes to this
    kv = stack.enter_context(_cache(f"{name}.kv", pages, grid.page_tokens, independent=False))
    states, run = None, PLAIN
    if isinstance(host, Pool):
        states, run = kv, Run(1, host.parts)
    elif host is not None:
        states = stack.enter_context(_cache(f"{name}.states", host.states, 1, independent=True))
    manager = stack.enter_context(
        KVCacheManager(kv, blocks, backend, config=ManagerConfig(min_load_tokens=0))
    )
    copier = ArrayCopier(np.zeros((device.states + _BESIDE, 0), np.uint8))
    checkpoints = Checkpoints(slots, states, backend, copier, run=run)
    stack.callback(checkpoints.close)
    hybrid = HybridManager(manager, checkpoints, grid)
    stack.callback(hybrid.close)
    return hybrid


def _cache(name: str, pages: int, page_tokens: int, *, independent: bool) -> Cache:
    return Cache.create(
        name,
        pages=pages,
        page_bytes=64,
        page_tokens=page_tokens,
        fingerprint="bench",
        secret=b"a secret of benchmarks",
        role="bench",
        independent=independent,
        eviction="lru",
    )


def _run(
    hybrid: HybridManager, number: int, visit: Visit, chunk: int, options: RequestOptions
) -> None:
    """A request's way: found, prefilled by chunks, answered, over."""
    prompt = len(visit.prompt)
    hybrid.plan(number, Prompt(visit.prompt), options=options)
    at = hybrid.take(number, wait=True).usable
    hybrid.allocate(number, prompt)
    hybrid.restore([number])
    hybrid.load(number)
    while at < prompt:
        plan = hybrid.save_plan(number, at, min(at + chunk, prompt))
        _pass(hybrid, number, plan.position, plan.end)
        at = plan.end
    interval = hybrid.grid.interval
    total = prompt + len(visit.answer)
    while at < total:  # as far as the next position at which decoding saves
        end = min(total, (at // interval + 1) * interval)
        fresh = visit.answer[at - prompt : end - prompt]
        _pass(hybrid, number, None if end % interval else end, end, fresh)
        at = end
    hybrid.release(number, at=total)
    hybrid.poll()


def _pass(
    hybrid: HybridManager,
    number: int,
    position: int | None,
    end: int,
    fresh: npt.NDArray[np.int64] | None = None,
) -> None:
    """Tokens up to `end` are computed, and the state at a position on the way or there is saved."""
    hybrid.allocate(number, end)
    saved = False
    if position is not None and position < end:
        saved = hybrid.saving(number, position) is not None
    hybrid_saves = position == end
    if hybrid_saves:
        (saved,) = hybrid.save([number], [end])
    hybrid.commit(number, end, new_tokens=fresh)
    if saved and position is not None:
        hybrid.saved(number, position)


__all__ = ["Pool", "Room", "hit_tokens"]
