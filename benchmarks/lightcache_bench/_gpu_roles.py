"""What other processes do with a device: `python -m lightcache_bench._gpu_roles ROLE JSON`.

As those of `_roles`: a line of JSON when ready, or for a result; the end when stdin ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from lightcache import Cache
from lightcache_bench._gpu_copies import Copies
from lightcache_bench._gpu_device import Bytes, Gpu
from lightcache_bench._gpu_interface import give_back, usable_pages
from lightcache_bench._gpu_pinning import SECRET
from lightcache_bench._gpu_rig import Bench, Sizes, TransferBackend, verified
from lightcache_bench._gpu_shapes import LARGE
from lightcache_bench._roles import tell


def register(name: str, part: int, parts: int, device: str) -> None:
    """Register a pool twice, then a part of it, each when told to."""
    with Cache.attach(name, role="bench", secret=SECRET, device=True, grow=False) as cache:
        gpu = Gpu(device)
        gpu.random(4096)
        gpu.synchronize()
        share = cache.pool.pages // parts
        tell("ready")
        for chosen in (slice(None), slice(None), slice(part * share, (part + 1) * share)):
            sys.stdin.readline()
            tell(_register(gpu, cache.pool.array[chosen]))
        sys.stdin.read()


def _register(gpu: Gpu, array: Bytes) -> dict[str, Any]:
    begin = time.monotonic()
    pages = usable_pages(gpu, array)
    end = time.monotonic()
    give_back(pages)
    return {"begin": begin, "end": end, "bytes": array.nbytes}


def move(
    name: str, device: str, part: int, parts: int, total: int, memory: int, seconds: float
) -> None:
    """One device among several: at every line offload for a while, by the plain copy engine and by
    the engine in turn, to pages of its own in the one pool."""
    with Cache.attach(name, role="bench", secret=SECRET, device=True, grow=False) as cache:
        gpu = Gpu(device)
        share = cache.pool.pages // parts
        own = range(part * share, (part + 1) * share)
        gpu.fill(cache.pool.array[own.start : own.stop].reshape(-1))
        sizes = Sizes(total, memory, cache.pool.nbytes, rounds=1)
        _move(Bench(gpu, False, sizes, cache.pool.array.reshape(-1)), own, seconds)


def _move(bench: Bench, own: range, seconds: float) -> None:
    with contextlib.closing(bench), verified(bench, LARGE, pages=own) as rig:
        copies = Copies(bench)
        copies.verify()
        tell("ready")
        backends: tuple[TransferBackend, ...] = (copies, rig)
        for turn in itertools.count():
            if not sys.stdin.readline():
                return
            tell(_offloaded(backends[turn % 2], seconds))


def _offloaded(backend: TransferBackend, seconds: float) -> dict[str, Any]:
    begin, moved = time.monotonic(), 0
    while (end := time.monotonic()) - begin < seconds:
        backend.run("offload")
        moved += backend.nbytes
    return {"seconds": end - begin, "bytes": moved}


ROLES: dict[str, Callable[..., None]] = {role.__name__: role for role in (register, move)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
