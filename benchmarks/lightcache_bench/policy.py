"""Which pages stay: prefix hits of our eviction order on traces, against other orders in process.

Requests go through a real index one after the other: each matches its blocks, reserves and
publishes what was not found, and releases all. A block hits if all blocks before it hit. The same
requests go through simulations of other orders (`_policies`) of the same size, and of Belady's,
which knows what comes. Traces (`_traces`) are a file's, alone and beside a tenant's bursts, and
generated ones.

- *blocks hit*: the index, against the best of the others. It has each request's own pages pinned
  while it writes, which the others do not.
- *hits kept beside bursts*: hits of a trace beside a tenant whose requests never come again,
  in percent of its hits alone in a cache of the same size.
- *shortfall to the best*: points by which hits are below those of the best order, over all
  generated traces and sizes.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightcache.errors import ConfigError
from lightcache.layout import Hint
from lightcache.page_index import PageIndex
from lightcache_bench import Row, _traces, meets
from lightcache_bench._policies import BOUND, POLICIES
from lightcache_bench._pool import keys_of
from lightcache_bench._traces import BURSTS, Trace

PAGES = (1_000, 3_000)
"""Of caches for generated traces."""
FILE_PAGES = (*PAGES, 10_000, 30_000, 100_000)
QUICK = 1_000
"""Requests."""
CORE = "this index"
MEAN, WORST = "<= 0.3", "<= 1.3"
"""Shortfall, in points."""


@dataclass(frozen=True)
class Replay:
    """How the requests go through the index."""

    seeds: int = 1
    """Runs, each with other keys, as if the cache had another secret."""
    calls: int = 0
    """Further calls of the core for each request, each a match that finds nothing."""
    eviction: str = "lru"
    """The order of the index: see `PageIndex.create`."""
    rate: float = 1.0
    """How much faster than the times of the trace the index takes the requests to come. Its clock
    is made of these times, whatever the replay takes."""
    admission: bool = False
    """Pages that are not worth writing are not: see `PageIndex.reserve`."""
    wrong: float | None = None
    """Each request hints whether blocks come again that it is the first to bring; this share of
    the hints is wrong. None: there are no hints."""


Shares = dict[tuple[str, int], float]
"""Blocks that one order of eviction hits, in percent, by trace and pages."""


def rows(
    quick: bool,
    trace: str | Path | None = None,
    only: str | None = None,
    pages: str | None = None,
    policies: str | None = None,
    seeds: int = 1,
    calls: int = 0,
    eviction: str = "lru",
    rate: float = 1.0,
    admission: bool = False,
    wrong: float | None = None,
) -> Iterator[Row]:
    """See `Benchmark.rows`.

    Args:
        quick: only the first 1,000 requests of each trace, not counting bursts, and the two small
            caches.
        trace: the file; None: only generated traces.
        only: names of traces, with commas between; None: all.
        pages: sizes of caches, such as "1000,3000".
        policies: orders to compare with, by their names; None: all.
        seeds: runs through the index.
        calls, eviction, rate, admission, wrong: see `Replay`.

    Raises:
        ConfigError: a name or a size that is none; a trace that cannot be read, or is empty.
    """
    makers = _traces.makers(None if trace is None else Path(trace))
    only_names = _names(only, makers, "only")
    chosen = [name for name in makers if name in only_names]  # alone before beside bursts
    compared = _names(policies, POLICIES, "policies")
    sizes = None if pages is None else _sizes(pages)
    replay = Replay(seeds, calls, eviction, rate, admission, wrong)
    measured: dict[str, Shares] = {name: {} for name in (CORE, *compared)}
    for name in chosen:
        requests = Trace.of(name, makers[name]())
        if quick:
            requests = requests.first(QUICK)
        default = FILE_PAGES if name not in _traces.PATTERNS else PAGES
        for size in sizes or (default[:2] if quick else default):
            yield _compared(requests, size, replay, measured)
            if name.endswith(BURSTS) and name.removesuffix(BURSTS) in chosen:
                yield _kept(requests, size, measured)
    yield from _shortfalls(measured)


def _names(given: str | None, known: Collection[str], option: str) -> list[str]:
    names = list(known) if given is None else given.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"policy: --{option}: expected some of {', '.join(known)}, found {name!r}"
            )
    return names


def _sizes(given: str) -> list[int]:
    sizes = [int(each) if each.isascii() and each.isdigit() else 0 for each in given.split(",")]
    if min(sizes) < 1:
        raise ConfigError(f"policy: --pages: expected sizes such as 1000,3000, found {given!r}")
    return sizes


# ---- one trace, one size


def _compared(trace: Trace, pages: int, replay: Replay, measured: dict[str, Shares]) -> Row:
    case = trace.name, pages
    for name, order in POLICIES.items():
        if name in measured:
            policy = order(trace, pages)
            measured[name][case] = _percent(trace, policy.request)
    shares, written = [], 0
    for seed in range(replay.seeds):
        with Core(trace, pages, seed, replay) as core:
            shares.append(_percent(trace, core.request))
            written += core.written
    ours = measured[CORE][case] = statistics.fmean(shares)
    others = {name: each[case] for name, each in measured.items() if name != CORE}
    params = {"pages": pages, "requests": len(trace.requests), **_rounded(others)}
    params["written"] = round(written / replay.seeds)
    if replay.seeds > 1:
        params |= {"seeds": replay.seeds, "deviation": round(statistics.stdev(shares), 2)}
    best = max((share, name) for name, share in {**others, BOUND: -1.0}.items())
    name = f"{trace.name}: blocks hit"
    if best[1] == BOUND:
        return Row(name, params, ours, "%")
    return Row(name, params, ours, "%", best[1], ours / best[0] if best[0] else None)


def _percent(trace: Trace, request: Callable[[Sequence[int]], int]) -> float:
    """Blocks that the requests hit of which hits count, in percent."""
    hits = total = 0
    for blocks, counted in zip(trace.requests, trace.counted, strict=True):
        found = request(blocks)
        if counted:
            hits += found
            total += len(blocks)
    return 100 * hits / max(1, total)


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(share, 2) for name, share in shares.items()}


class Core:
    """An index of its own, through which requests go."""

    def __init__(self, trace: Trace, pages: int, seed: int, replay: Replay) -> None:
        self.written = 0
        """Pages that were reserved and published."""
        self._index = PageIndex.create(
            f"bench-policy-{os.getpid()}", pages=pages, eviction=replay.eviction, role="bench"
        )
        self._seconds, self._rate = iter(trace.seconds), replay.rate
        self._admission = replay.admission
        self._hints = iter(_hints(trace, replay.wrong, seed))
        self._keys = keys_of(seed, len(trace.parents))
        self._absent = keys_of(seed + (1 << 32), replay.calls)[:, None]

    def request(self, blocks: Sequence[int]) -> int:
        """Match, reserve what was not found, publish, release. Returns the blocks that hit."""
        index, keys = self._index, self._keys[list(blocks)]
        index.set_clock(1 + next(self._seconds) / self._rate)
        hint = next(self._hints)
        for absent in self._absent:
            index.match(absent).release()
        with index.match(keys) as lease:
            hits = len(lease)
            if hits < len(keys):
                with index.reserve(keys, hits, admission=self._admission, hint=hint) as made:
                    if len(made.new):
                        made.publish()
                        self.written += len(made.new)
        return hits

    def __enter__(self) -> Core:
        return self

    def __exit__(self, *exception: object) -> None:
        self._index.close()


def _hints(trace: Trace, wrong: float | None, seed: int) -> list[Hint]:
    """Of each request: whether any block that it is the first to bring comes again."""
    if wrong is None:
        return [Hint.NONE] * len(trace.requests)
    draws = np.random.default_rng(seed).random(len(trace.requests)) < wrong
    first: dict[int, int] = {}
    again: set[int] = set()
    for number, blocks in enumerate(trace.requests):
        for block in blocks:
            if first.setdefault(block, number) != number:
                again.add(first[block])
    return [
        Hint.CONTINUES if (number in again) != draw else Hint.ENDS
        for number, draw in enumerate(draws.tolist())
    ]


# ---- over several


def _kept(trace: Trace, pages: int, measured: dict[str, Shares]) -> Row:
    """Of a trace with bursts: against the same without them, which was measured before."""
    alone = trace.name.removesuffix(BURSTS)
    kept = {}
    for name, each in measured.items():
        before = each[alone, pages]
        kept[name] = 100 * each[trace.name, pages] / before if before else math.nan
    ours = kept.pop(CORE)
    return Row(f"{alone}: hits kept beside bursts", {"pages": pages, **_rounded(kept)}, ours, "%")


def _shortfalls(measured: dict[str, Shares]) -> Iterator[Row]:
    """Of each order, its mean and its worst case. Where no order hits, nothing is compared."""
    others = [each for name, each in measured.items() if name not in (CORE, BOUND)]
    cases = [case for case in measured[CORE] if case[0] in _traces.PATTERNS]
    if not others:
        return
    best = {case: max(each[case] for each in others) for case in cases}
    cases = [case for case in cases if best[case]]
    if not cases:
        return
    for name, each in measured.items():
        if name == BOUND:
            continue
        worst, (trace, pages) = max((best[case] - each[case], case) for case in cases)
        worst = max(0.0, worst)
        mean = statistics.fmean(max(0.0, best[case] - each[case]) for case in cases)
        params = {"of": name, "cases": len(cases), "worst": round(worst, 2)}
        params["in"] = f"{trace}, {pages:,} pages"
        mean_name, worst_name = (f"shortfall to the best, {what}" for what in ("mean", "worst"))
        if name != CORE:
            yield Row(mean_name, params, mean, "points")
            continue
        for what, value, target in ((mean_name, mean, MEAN), (worst_name, worst, WORST)):
            yield Row(what, params, value, "points", target=target, met=meets(value, target))
