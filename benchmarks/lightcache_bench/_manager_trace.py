"""A trace through a manager, beside an exact LRU of each tier."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from lightcache.cache import Cache
from lightcache.manager import KVCacheManager, ManagedBlocks, ManagerConfig, NullBackend, Prompt
from lightcache_bench import Row, meets

CAPACITIES = (1_000, 3_000, 10_000, 30_000)
TOKENS = 512
"""Of a block of the public traces."""
DEVICE = 512
"""Blocks of the device: a quarter of a million tokens."""
WITHIN = 0.01


def replay(requests: list[list[int]], pages: int) -> Iterator[Row]:
    """One capacity of the host. Every request runs alone: planned, taken, computed, released."""
    device = min(DEVICE, pages // 2)
    prompts = [Prompt(tokens_of(blocks[: device - 1])) for blocks in requests]
    total = sum(len(prompt) // SCALE for prompt in prompts)
    begin = time.perf_counter()
    ours = _ours(prompts, pages, device)
    seconds = time.perf_counter() - begin
    exact = _exact([blocks[: device - 1] for blocks in requests], pages, device)
    params = {"host_pages": pages, "device_blocks": device, "requests": len(requests)}
    yield Row("trace: requests", params, len(requests) / seconds, "requests/s")
    for tier in ("device", "host", "both"):
        mine, other = 100 * ours[tier] / total, 100 * exact[tier] / total
        ratio = mine / other if other else 1.0
        target = f"within {WITHIN:.0%}" if tier == "both" else None
        yield Row(
            f"trace: hit tokens, {tier}",
            {"host_pages": pages, "exact": round(other, 3)},
            mine,
            "%",
            "exact LRU",
            ratio,
            target,
            None if target is None else meets(abs(ratio - 1), f"<= {WITHIN}"),
        )


SCALE = 2
"""Tokens that stand for a block here: hashing all 512 would be most of the time."""


def tokens_of(blocks: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A block's id in two tokens, and one more, which is left to compute."""
    ids = np.asarray(blocks, np.int64)
    return np.append(np.stack([ids >> 16, ids & 0xFFFF], axis=1).reshape(-1), 0)


def _ours(prompts: list[Prompt], pages: int, device: int) -> dict[str, int]:
    name = f"bench-trace-{os.getpid()}"
    with ExitStack() as stack:
        cache = stack.enter_context(
            Cache.create(
                name,
                pages=pages,
                page_bytes=64,
                page_tokens=SCALE,
                fingerprint="bench",
                secret=b"a secret of benchmarks",
                role="bench",
            )
        )
        cache.pool.prefault()
        tier = ManagedBlocks(f"{name}.device", block_tokens=SCALE, blocks=device + 1)
        stack.callback(tier.close)
        config = ManagerConfig(min_load_tokens=0)
        manager = stack.enter_context(KVCacheManager(cache, tier, NullBackend(), config=config))
        for number, prompt in enumerate(prompts):
            manager.plan(number, prompt)
            manager.take(number)
            manager.allocate(number, len(prompt))
            manager.load(number)
            manager.commit(number, len(prompt))
            manager.release(number)
        found = manager.stats()
        on_device, host = found.device_tokens // SCALE, found.host_tokens // SCALE
        return {"device": on_device, "host": host, "both": on_device + host}


def _exact(requests: list[list[int]], pages: int, device: int) -> dict[str, int]:
    """Both tiers inclusive, LRU by whole requests; the root of each is its youngest block."""
    tiers: list[tuple[OrderedDict[int, None], int]] = [
        (OrderedDict(), device),
        (OrderedDict(), pages),
    ]
    found = {"device": 0, "host": 0}
    for blocks in requests:
        at = 0
        for tier, (used, _) in zip(("device", "host"), tiers, strict=True):
            while at < len(blocks) and blocks[at] in used:
                at += 1
                found[tier] += 1
        for used, size in tiers:
            for block in reversed(blocks):
                used[block] = None
                used.move_to_end(block)
            while len(used) > size:
                used.popitem(last=False)
    return {**found, "both": found["device"] + found["host"]}
