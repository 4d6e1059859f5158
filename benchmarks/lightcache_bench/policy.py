"""Which pages stay: prefix hits of our eviction order on a trace, against exact LRU.

The trace is a JSONL file whose lines have `hash_ids`, the blocks of a request's prompt from its
root on (the public Mooncake traces are so). For each request the longest ready prefix counts as
hit; then the rest is reserved and published.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import ConfigError
from lightcache.page_index import PageIndex
from lightcache_bench import Row

CAPACITIES = (1_000, 3_000, 10_000, 30_000)


def rows(quick: bool, trace: str | Path | None = None) -> Iterator[Row]:
    """See `Benchmark.rows`.

    Args:
        quick: only the first 1,000 requests and the two small capacities.
        trace: the file.

    Raises:
        ConfigError: no trace was given, or it cannot be read.
    """
    if trace is None:
        raise ConfigError("policy: needs a trace; give --trace FILE (JSONL with hash_ids)")
    requests = read(Path(trace))[: 1000 if quick else None]
    for pages in CAPACITIES[:2] if quick else CAPACITIES:
        exact, ours = exact_lru(requests, pages), index_hits(requests, pages)
        params = {"pages": pages, "requests": len(requests), "exact_lru": round(exact, 2)}
        yield Row("prefix hits", params, ours, "%", "exact LRU", ours / exact if exact else None)


def read(path: Path) -> list[list[int]]:
    """The blocks of each request.

    Raises:
        ConfigError: no such file, or lines of another form.
    """
    try:
        with path.open() as lines:
            return [list(map(int, json.loads(line)["hash_ids"])) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"policy: {path} is no trace with hash_ids: {error}") from error


def exact_lru(requests: list[list[int]], pages: int) -> float:
    """Percentage of blocks hit by an exact LRU in which a prefix is always younger than what
    hangs on it, and a request longer than the cache keeps its beginning."""
    used: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for blocks in requests:
        total += len(blocks)
        hit = next((i for i, block in enumerate(blocks) if block not in used), len(blocks))
        hits += hit
        for block in reversed(blocks[:pages]):  # the root last: youngest
            used[block] = None
            used.move_to_end(block)
        while len(used) > pages:
            used.popitem(last=False)
    return 100 * hits / max(1, total)


def _keys(blocks: list[int]) -> Keys:
    """Keys of blocks: hash_ids name the whole prefix, so each is a key by itself."""
    lo = np.asarray(blocks, np.uint64)
    mixed = (lo + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return np.ascontiguousarray(np.stack([mixed ^ (mixed >> np.uint64(32)), lo], axis=1))


def index_hits(requests: list[list[int]], pages: int) -> float:
    """The same of an index with so many pages."""
    hits = total = 0
    with PageIndex.create(f"bench-policy-{os.getpid()}", pages=pages, role="bench") as index:
        for blocks in requests:
            keys = _keys(blocks)
            total += len(blocks)
            with index.match(keys) as lease:
                hits += len(lease)
                with index.reserve(keys, len(lease)) as made:
                    if len(made.pages):
                        made.publish()
    return 100 * hits / max(1, total)
