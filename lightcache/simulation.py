"""What caches of other sizes would have served of a trace: simulated, no page is moved.

A node has a cache of so many pages, one block each. A block hits if all blocks before it hit, and
only a block without cached children is evicted. A request uses its blocks from the last to the
first, so a root is always younger than what hangs on it: LRU obeys both rules by itself, and is
a stack algorithm (Mattson et al., Evaluation techniques for storage hierarchies, 1970). One pass
gives, for every block of every request, the smallest cache in which it hits: 1 + the other blocks
that the node used since.

*An order of eviction is added* in `ORDERS`. One that is no stack algorithm is simulated, size by
size: "hz" by the index itself, with its clock set to the times of the trace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightcache._arguments import Keys
from lightcache.page_index import PageIndex
from lightcache.router import mixed
from lightcache.traces import Ints, Trace

NEVER = np.iinfo(np.int64).max
"""Pages in which a block hits that was not used before."""
HOST_WEIGHT = 0.1
"""Cost of a token from the cache, to a router by prefix, in tokens of prefill."""
_SEED = 1


# ---- orders of eviction


class NodeCache(Protocol):
    """The cache of a node."""

    def use(self, blocks: Sequence[int], seconds: float) -> list[int]:
        """A request's blocks, from the root on, become cached, so long after the first request.
        Returns those that are evicted."""

    def cached(self, blocks: Sequence[int]) -> int:
        """How many of a request's blocks are cached, from the root on."""

    def close(self) -> None:
        """Give up what it holds."""


class LRU:
    """Least recently used."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._used: OrderedDict[int, None] = OrderedDict()

    def use(self, blocks: Sequence[int], seconds: float) -> list[int]:
        """See `NodeCache`."""
        used = self._used
        for block in reversed(blocks):
            used[block] = None
            used.move_to_end(block)
        return [used.popitem(last=False)[0] for _ in range(len(used) - self._pages)]

    def cached(self, blocks: Sequence[int]) -> int:
        """See `NodeCache`."""
        return sum(1 for _ in itertools.takewhile(self._used.__contains__, blocks))

    def close(self) -> None:
        """See `NodeCache`."""


class HZ:
    """The order "hz", by an index in shared memory: 330 bytes a page, and 1.3 MB at least. A
    request matches its blocks, then reserves and publishes what it did not find, as an engine does.
    """

    _numbers = itertools.count()

    def __init__(self, pages: int) -> None:
        """Raises: NoSpace: shared memory has no room for the index."""
        name = f"replay-{os.getpid()}-{next(self._numbers)}"
        self._index = PageIndex.create(name, pages=pages, eviction="hz", role="replay")
        self._block_of: dict[int, int] = {}
        """By page."""

    def use(self, blocks: Sequence[int], seconds: float) -> list[int]:
        """See `NodeCache`."""
        keys, gone = _keys(blocks), []
        self._index.set_clock(1 + seconds)
        with self._index.match(keys) as lease:
            if len(lease) < len(keys):
                with self._index.reserve(keys, len(lease)) as new:
                    new.publish()
                    gone += [blocks[at] for at in new.missing.tolist()]  # never came to be
                    for page, at in zip(new.pages.tolist(), new.new.tolist(), strict=True):
                        if page in self._block_of:  # it went to make room for this one
                            gone.append(self._block_of[page])
                        self._block_of[page] = blocks[at]
        return gone

    def cached(self, blocks: Sequence[int]) -> int:
        """See `NodeCache`."""
        return self._index.peek(_keys(blocks))

    def close(self) -> None:
        """See `NodeCache`."""
        self._index.close()


def _keys(blocks: Sequence[int]) -> Keys:
    """Keys that look random: both words of a block's number, mixed as by SplitMix64."""
    x = (2 * np.array(blocks, np.uint64)[:, None] + np.arange(1, 3, dtype=np.uint64)) * _STEP
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.ascontiguousarray(x ^ (x >> np.uint64(31)))


_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Order:
    """Of eviction."""

    cache: Callable[[int], NodeCache]
    """Makes one of so many pages."""
    stack: bool = False
    """Whether `pages_needed` tells what it serves."""


ORDERS = {"lru": Order(LRU, stack=True), "hz": Order(HZ)}


# ---- one pass for all sizes


def pages_needed(trace: Trace, nodes: Ints) -> Ints:
    """The fewest pages of a node's cache, in the order LRU, with which each of `trace.blocks` is
    there when its request comes. Of a request's blocks each needs more than the one before it.

    Args:
        nodes: of each request.
    """
    request = np.repeat(np.arange(len(trace)), trace.lengths)
    # Uses in time, node after node; of a request from its last block to its first.
    order = np.lexsort((-np.arange(len(request)), request, nodes[request]))
    before = _last_use(trace.blocks[order] + nodes[request[order]] * trace.distinct)
    begins = np.flatnonzero(np.diff(request[order], prepend=-1))
    begin = np.repeat(begins, np.diff(begins, append=len(order)))
    # Of the uses since, those of a block that was used before again are no other block.
    needed = begin - before - _larger_before(before)
    needed[before < 0] = NEVER
    found = np.empty_like(needed)
    found[order] = needed
    return found


def _last_use(used: Ints) -> Ints:
    """Of each use, where the same block was used before; -1: nowhere."""
    order = np.argsort(used, kind="stable")
    again = used[order][1:] == used[order][:-1]
    before = np.full(len(used), -1, np.int64)
    before[order[1:][again]] = order[:-1][again]
    return before


def _larger_before(values: Ints) -> Ints:
    """Of each value, how many before it are larger: a merge sort that counts. Equal values count
    as they come."""
    counts = np.zeros(len(values), np.int64)
    order, top, width = np.arange(len(values)), len(values) + 1, 1
    while width < len(values):
        order = order[np.argsort(order // (2 * width) * top + values[order] + 1, kind="stable")]
        lefts = np.cumsum(order // width % 2 == 0)
        right = order // width % 2 == 1
        counts[order[right]] += (order[right] // (2 * width) + 1) * width - lefts[right]
        width *= 2
    return counts


# ---- hits


def cached_of(trace: Trace, there: NDArray[np.bool_]) -> Ints:
    """Blocks of each request that are cached when it comes.

    Args:
        there: of `trace.blocks`, as compared with `pages_needed`: of a request those from its root.
    """
    sums = np.concatenate([[0], np.cumsum(there)])
    cached: Ints = sums[trace.ends] - sums[trace.ends - trace.lengths]
    return cached


def hits_of(trace: Trace, there: NDArray[np.bool_]) -> Ints:
    """Of `cached_of` those that hit: the last token of a prompt is computed, cached or not."""
    return np.minimum(cached_of(trace, there), trace.matchable)


def simulated(trace: Trace, nodes: Ints, order: Order, pages: int) -> Ints:
    """`cached_of`, one request after the other; for any order.

    Raises:
        What the order's cache raises.
    """
    caches: dict[int, NodeCache] = {}
    cached = np.zeros(len(trace), np.int64)
    requests = zip(_paths(trace), nodes.tolist(), _since(trace), strict=True)
    with contextlib.ExitStack() as stack:
        for number, (path, node, seconds) in enumerate(requests):
            if node not in caches:
                caches[node] = order.cache(pages)
                stack.callback(caches[node].close)
            cached[number] = caches[node].cached(path)
            caches[node].use(path, seconds)
    return cached


def _since(trace: Trace) -> list[float]:
    """Seconds of each request after the first."""
    seconds: list[float] = (trace.seconds - trace.seconds[0]).tolist()
    return seconds


def _paths(trace: Trace) -> list[list[int]]:
    blocks = trace.blocks.tolist()
    begins = (trace.ends - trace.lengths).tolist()
    return [blocks[i:j] for i, j in zip(begins, trace.ends.tolist(), strict=True)]


# ---- routing: which node a request goes to


def by_chance(trace: Trace, nodes: int) -> Ints:
    """Any node."""
    return np.random.default_rng(_SEED).integers(0, nodes, len(trace))


def by_load(trace: Trace, nodes: int, tokens_per_s: float) -> Ints:
    """The node with the fewest tokens of prompts waiting. A node computes so many a second; what
    its cache saves is not known to such a router."""
    found = np.zeros(len(trace), np.int64)
    waiting, last = np.zeros(nodes), 0.0
    for number, (at, tokens) in enumerate(
        zip(trace.seconds.tolist(), trace.tokens.tolist(), strict=True)
    ):
        waiting = np.maximum(waiting - (at - last) * tokens_per_s, 0)
        last = at
        found[number] = _least(waiting, number)
        waiting[found[number]] += tokens
    return found


def by_prefix(trace: Trace, nodes: int, tokens_per_s: float, order: Order, pages: int) -> Ints:
    """The node with the least cost, as `lightcache.Router` has it: tokens to compute, a tenth of
    those to load, and the tokens that wait there. Depends on what the caches hold.

    Raises:
        What the order's cache raises.
    """
    with contextlib.ExitStack() as stack:
        caches: list[NodeCache] = []
        for _ in range(nodes):
            caches.append(order.cache(pages))
            stack.callback(caches[-1].close)
        return _by_prefix(trace, tokens_per_s, caches)


def _by_prefix(trace: Trace, tokens_per_s: float, caches: Sequence[NodeCache]) -> Ints:
    nodes, since = len(caches), _since(trace)
    found = np.zeros(len(trace), np.int64)
    waiting, last = np.zeros(nodes), 0.0
    holders: list[set[int]] = [set() for _ in range(trace.distinct)]
    times, lengths = trace.seconds.tolist(), trace.tokens.tolist()
    for number, (path, most) in enumerate(
        zip(_paths(trace), trace.matchable.tolist(), strict=True)
    ):
        waiting = np.maximum(waiting - (times[number] - last) * tokens_per_s, 0)
        last = times[number]
        depth = np.zeros(nodes)
        for count, block in enumerate(path[:most], 1):
            if not holders[block]:
                break
            depth[list(holders[block])] = count
        cached = depth * trace.block_tokens
        node = _least(waiting - (1 - HOST_WEIGHT) * cached, path[0] if path else number)
        found[number] = node
        waiting[node] += lengths[number] - cached[node]
        gone = caches[node].use(path, since[number])
        for block in path:
            holders[block].add(node)
        for block in gone:
            holders[block].discard(node)
    return found


def _least(costs: NDArray[np.float64], key: int) -> int:
    """The node of the least cost; among equals the one that a key decides."""
    equal = np.flatnonzero(costs == costs.min())
    return int(equal[mixed(key + 1) % len(equal)])


__all__ = [
    "HZ",
    "LRU",
    "NEVER",
    "ORDERS",
    "NodeCache",
    "Order",
    "by_chance",
    "by_load",
    "by_prefix",
    "cached_of",
    "hits_of",
    "pages_needed",
    "simulated",
]
