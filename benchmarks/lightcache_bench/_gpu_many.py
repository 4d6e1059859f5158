"""Several devices at once, a process each, on one pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightcache.shm import memory
from lightcache_bench import Row
from lightcache_bench._gpu_device import devices
from lightcache_bench._gpu_pinning import new_cache
from lightcache_bench._gpu_rates import rate_row
from lightcache_bench._gpu_rig import FULL, QUICK, Bench, Sizes
from lightcache_bench._pool import Helper


def several_devices(bench: Bench) -> Iterator[Row]:
    """All devices offload at once, each to pages of its own, against as many plain copy engines at
    once. Nothing where there is one device."""
    names = [f"cuda:{i}" for i in range(devices())]
    if len(names) < 2:
        return
    sizes = QUICK if bench.quick else FULL
    room = memory.available()
    if room.bytes < len(names) * sizes.host * 9 // 8:
        params = {"skipped": f"{room.bytes >> 30} GiB {room.limit}"}
        yield Row(f"offload from {len(names)} devices at once", params, float("nan"), "")
        return
    yield at_once(names, sizes, 2 if bench.quick else 5)


def at_once(names: list[str], sizes: Sizes, rounds: int, seconds: float = 1.0) -> Row:
    """The sum over these devices; by the copy engine and by ours in turn, some seconds each. The
    first of both is not counted."""
    sums: dict[str, list[float]] = {"copy engine": [], "engine": []}
    common: dict[str, Any] = {"total": sizes.total, "memory": sizes.device, "parts": len(names)}
    common["seconds"] = seconds
    with new_cache(len(names) * sizes.host) as cache, contextlib.ExitStack() as stack:
        cache.pool.prefault()
        common["name"] = cache.name
        helpers = [
            stack.enter_context(
                Helper("move", module="_gpu_roles", part=part, device=device, **common)
            )
            for part, device in enumerate(names)
        ]
        for helper in helpers:
            helper.answer()
        for turn in range(rounds + 1):
            for found in sums.values():
                for helper in helpers:
                    helper.go_on()
                each = [helper.answer() for helper in helpers]
                if turn:
                    found.append(sum(one["bytes"] / one["seconds"] for one in each) / 1e9)
    against = f"{len(names)} copy engines at once", sums["copy engine"]
    return rate_row(f"offload from {len(names)} devices at once", sums["engine"], against, None)
