"""An engine of one release or configuration, in a process of its own: it opens the default cache of
its model, and serves prompts whose pages it checks byte by byte."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from lightcache import Cache, page_index
from lightcache.shm import layout, memory, names

PAGES, PAGE_BYTES, PAGE_TOKENS = 64, 1 << 16, 4
ROOM = PAGES * PAGE_BYTES * 5 // 4  # of /dev/shm: for one pool, and a quarter of another
PROMPTS, LENGTH = 24, 4 * PAGE_TOKENS


def pools(model: str) -> list[Any]:
    """What the pools of a model's caches are."""
    return [
        path
        for path in names.FOLDER.iterdir()
        if f".{model}-" in path.name and "~pool" in path.name
    ]


def limit_room(model: str) -> None:
    """Pools alone are counted; indexes are small."""

    def available() -> memory.FreeMemory:
        used = sum(path.stat().st_blocks * 512 for path in pools(model))
        return memory.FreeMemory(ROOM - used + (1 << 20), "free in a test")

    memory.available = available  # type: ignore[assignment]
    objects = names._objects  # a full /dev/shm is swept; only what is ours may go
    names._objects = lambda: [full for full in objects() if model in full]


def serve(cache: Cache, release: str, draw: np.random.Generator) -> tuple[int, int]:
    """Serve a prompt. Returns pages found, and bytes found that are not this release's."""
    prompt = int(draw.integers(PROMPTS))
    tokens = np.arange(LENGTH) + prompt * 1000
    keys = cache.hash_pages(tokens)
    mark = sum(map(ord, release)) % 251
    stamps = (prompt * 7 + np.arange(len(keys)) + mark).astype(np.uint8)
    with cache.match(keys) as hit:
        found = len(hit)
        wrong = int((cache.pool.array[hit.pages] != stamps[:found, None]).sum())
    with cache.reserve(keys, found) as new:
        cache.pool.array[new.pages] = stamps[new.new, None]
        new.publish()
    return found, wrong


def main(model: str, release: str, facts: str, abi: str) -> None:
    """Answer each line, a number of prompts, with pages found and wrong bytes.

    Args:
        facts: in place of a structure's layout that has changed.
        abi: the release's number.
    """
    limit_room(model)
    ours = page_index._facts()
    page_index._facts = lambda: ours + facts  # type: ignore[assignment]
    layout.ABI = int(abi)
    with Cache.open(
        model=model,
        size=PAGES * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        page_tokens=PAGE_TOKENS,
        fingerprint=release,
        secret=bytes(16),
        lifetime="persistent",
        role=release,
    ) as cache:
        print(cache.name, flush=True)
        draw = np.random.default_rng(len(cache.clients()))
        for line in sys.stdin:
            served = np.array([serve(cache, release + facts + abi, draw) for _ in range(int(line))])
            print(*served.sum(0), flush=True)


if __name__ == "__main__":
    for module in ("cache", "pool"):
        sys.modules[f"lightcache.{module}"].CHUNK_BYTES = PAGE_BYTES
    main(*sys.argv[1:])
