"""What caches of some sizes, with some storages, on some nodes would serve of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightcache.simulation import (
    NEVER,
    ORDERS,
    by_chance,
    by_load,
    by_prefix,
    cached_of,
    hits_of,
    pages_needed,
    simulated,
)
from lightcache.traces import Ints, Trace

GIB = 1 << 30
ROUTINGS = ("random", "load", "prefix")


@dataclass(frozen=True)
class Setup:
    """What all cases share."""

    token_bytes: int
    """Bytes of a token's KV, all layers."""
    tokens_per_s: float
    """Prefill of a node."""
    shared: bool = False
    """Whether the storage is one that all nodes share; else each node has one of its size."""


@dataclass(frozen=True)
class Case:
    """A row. Tokens and bytes are those of the whole trace, on all nodes."""

    nodes: int
    routing: str
    policy: str
    size: int
    """Bytes of a node's cache."""
    storage: int
    """Bytes of the storage; 0: there is none."""
    tokens: int
    """Of all prompts."""
    host_tokens: int
    """Of these, hits in the cache of the node."""
    storage_tokens: int
    """Further hits, read from the storage."""
    saved_s: float
    """Prefill that the hits save, in seconds of a node."""
    loaded: int
    """Bytes that go from the host to devices: the hits."""
    offloaded: int
    """Bytes of computed pages that go from devices to the host: those that are nowhere cached."""
    storage_read: int
    """Bytes."""
    storage_written: int
    """Bytes: each page that the storage does not have, once it is computed."""
    next_gib_tokens: int
    """Further hits of the node's cache, had it one GiB more, with requests on the same nodes."""
    every_tokens: int
    """Further hits, had each node a storage that keeps all."""
    every_shared_tokens: int
    """Further hits, did all nodes share a storage that keeps all."""

    @property
    def hit_tokens(self) -> int:
        """Of host and storage."""
        return self.host_tokens + self.storage_tokens


def footprint(trace: Trace, setup: Setup) -> int:
    """Bytes of all different blocks."""
    return trace.distinct * trace.block_tokens * setup.token_bytes


def default_sizes(trace: Trace, setup: Setup) -> list[int]:
    """Powers of two, the last of which holds everything, and eight before it."""
    page = trace.block_tokens * setup.token_bytes
    last = 1 << (max(footprint(trace, setup), page) - 1).bit_length()
    return [last >> shift for shift in range(8, -1, -1) if last >> shift >= page] or [page]


def cases(
    trace: Trace,
    setup: Setup,
    sizes: Sequence[int],
    storages: Sequence[int],
    nodes: Sequence[int],
    routings: Sequence[str],
    policies: Sequence[str],
) -> Iterator[Case]:
    """All combinations. One node has no routing."""
    study = _Study(trace, setup)
    for count in nodes:
        for routing in routings if count > 1 else ("-",):
            for policy in policies:
                for size in sizes:
                    yield from study.cases(count, routing, policy, size, storages)


class _Study:
    def __init__(self, trace: Trace, setup: Setup) -> None:
        self._trace, self._setup = trace, setup
        self._page = trace.block_tokens * setup.token_bytes
        self._routed: dict[tuple[int, str], tuple[Ints, Ints]] = {}

    def cases(
        self, nodes: int, routing: str, policy: str, size: int, storages: Sequence[int]
    ) -> Iterator[Case]:
        pages = size // self._page
        which, needed = self._placed(nodes, routing, policy, pages)
        cached = self._cached(which, needed, policy, pages)
        more = self._cached(which, needed, policy, (size + GIB) // self._page)
        for storage in storages:
            yield self._case(nodes, routing, policy, size, storage, cached, more, needed)

    def _placed(self, nodes: int, routing: str, policy: str, pages: int) -> tuple[Ints, Ints]:
        """The node of each request, and `pages_needed` there."""
        if (nodes, routing) not in self._routed:
            rate = self._setup.tokens_per_s
            if nodes == 1:
                which = np.zeros(len(self._trace), np.int64)
            elif routing == "random":
                which = by_chance(self._trace, nodes)
            elif routing == "load":
                which = by_load(self._trace, nodes, rate)
            else:  # with other caches the router decides otherwise
                which = by_prefix(self._trace, nodes, rate, ORDERS[policy], pages)
                return which, pages_needed(self._trace, which)
            self._routed[nodes, routing] = which, pages_needed(self._trace, which)
        return self._routed[nodes, routing]

    @cached_property
    def _together(self) -> Ints:
        """`pages_needed` of what all nodes share."""
        return pages_needed(self._trace, np.zeros(len(self._trace), np.int64))

    def _cached(self, which: Ints, needed: Ints, policy: str, pages: int) -> Ints:
        """Blocks of each request that are in the host's cache."""
        if ORDERS[policy].stack:
            return cached_of(self._trace, needed <= pages)
        return simulated(self._trace, which, ORDERS[policy], pages)

    def _case(
        self,
        nodes: int,
        routing: str,
        policy: str,
        size: int,
        storage: int,
        cached: Ints,
        more: Ints,
        needed: Ints,
    ) -> Case:
        trace, page = self._trace, self._page
        stored = (self._together if self._setup.shared else needed) <= storage // page
        anywhere = np.maximum(cached, cached_of(trace, stored))
        host, more, hits = (np.minimum(each, trace.matchable) for each in (cached, more, anywhere))
        best = [np.maximum(hits, hits_of(trace, each < NEVER)) for each in (needed, self._together)]
        found, in_host = int(hits.sum()), int(host.sum())
        tokens = trace.block_tokens
        return Case(
            nodes,
            routing,
            policy,
            size,
            storage,
            int(trace.tokens.sum()),
            in_host * tokens,
            (found - in_host) * tokens,
            found * tokens / self._setup.tokens_per_s,
            found * page,
            (len(trace.blocks) - int(anywhere.sum())) * page,
            (found - in_host) * page,
            int(np.count_nonzero(~stored)) * page if storage else 0,
            int(more.sum() - in_host) * tokens,
            *(int(each.sum() - found) * tokens for each in best),
        )


__all__ = ["GIB", "ROUTINGS", "Case", "Setup", "cases", "default_sizes", "footprint"]
