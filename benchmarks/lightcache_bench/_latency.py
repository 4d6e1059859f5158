"""Rows of single calls: peek, match and release, reserve and publish, a scheduler's queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from lightcache._arguments import Generations, Keys, Pages
from lightcache.groups import Group, GroupSet, Rule
from lightcache.loans import GiveBack, Loans
from lightcache.page_index import PageIndex, geometry
from lightcache.shm import SharedRing
from lightcache_bench import Row, _baseline, _others, meets
from lightcache_bench._pool import PROMPT, keys_of
from lightcache_bench._timing import Case, clocked, clocked_cpu, interleaved, median, spread

BARE = "bare C loop, one random bucket and one random record a key"


def against(
    name: str,
    params: dict[str, Any],
    ours: Any,
    baseline: str,
    theirs: Any,
    target: str | None,
) -> Row:
    """A row whose ratio is ours divided by theirs."""
    ratio = median(ours) / median(theirs)
    shown = {**params, **spread(ours), "baseline_us": round(median(theirs), 2)}
    met = meets(ratio, target) if target else None
    return Row(name, shown, median(ours), "us", baseline, ratio, target, met)


def faster(name: str, params: dict[str, Any], other: Any, ours: Any, target: str | None) -> Row:
    """A row of another way of doing it: the ratio says how many times faster we are."""
    ratio = median(other) / median(ours)
    shown = {**params, **spread(other), "ours_us": round(median(ours), 2)}
    met = meets(ratio, target) if target else None
    return Row(name, shown, median(other), "us", "match + release", ratio, target, met)


def lookups(index: PageIndex, prompts: int, quick: bool) -> Iterator[Row]:
    """peek, match + release and the bare loop; hot (one prompt again and again) and cold (all of
    them in turn)."""
    known = [keys_of(1000 + i, PROMPT) for i in range(prompts)]
    buckets = geometry(index.pages).buckets
    try:
        probe = _baseline.Probe(index.pages, buckets, known)
    except _baseline.Unavailable as error:
        yield Row("lookups", {"pages": index.pages, "skipped": str(error)}, 0.0)
        return
    for state in ("hot", "cold"):
        # Hot: the one in the middle, neither first nor last in its chains.
        pick = [prompts // 2] if state == "hot" else list(range(prompts))
        found = interleaved(_lookup_cases(index, known, probe, pick), *_turns(pick, quick))
        params = {"pages": index.pages, "keys": PROMPT, "state": state}
        bare = found.pop("bare")
        yield Row("bare C loop", {**params, **spread(bare)}, median(bare))
        for name, target in (("peek", "<= 2.5"), ("match + release", "<= 8")):
            yield against(name, params, found[name], BARE, bare, target)


def _lookup_cases(
    index: PageIndex, known: list[Any], probe: _baseline.Probe, pick: list[int]
) -> dict[str, Case]:
    def peek(i: int) -> None:
        assert index.peek(known[pick[i % len(pick)]]) == PROMPT

    def match(i: int) -> None:
        index.match(known[pick[i % len(pick)]]).release()

    return {"bare": probe.case(pick), "peek": clocked(peek), "match + release": clocked(match)}


def _turns(pick: list[int], quick: bool) -> tuple[int, int]:
    """Rounds, and repetitions in one: hot ones in small groups, cold ones a whole turn each."""
    if len(pick) == 1:
        return (20, 10) if quick else (200, 10)
    return (3 if quick else 12), len(pick) * max(1, 50 // len(pick))


def groups(index: PageIndex, prompts: int, quick: bool) -> Iterator[Row]:
    """match + release of one prompt, hot, by a model's groups: of one, and of three with an index
    each (all before, the last 64 pages, the last page). Against `PageIndex.match`."""
    known = keys_of(1000 + prompts // 2, PROMPT)
    name, tokens = f"{index.name}-groups", 16
    with (
        PageIndex.create(f"{name}-w", pages=2 * PROMPT, independent=True) as windows,
        PageIndex.create(f"{name}-s", pages=2 * PROMPT, independent=True) as states,
    ):
        for each in (windows, states):
            with each.reserve(known) as made:
                made.publish()
        prefix = Group("prefix", Rule.prefix(), index)
        window = Group("window", Rule.window(64 * tokens), windows)
        one = GroupSet([prefix], page_tokens=tokens)
        three = GroupSet([prefix, window, Group("state", Rule.point(), states)], page_tokens=tokens)
        found = interleaved(
            {
                "plain": clocked(lambda _: index.match(known).release()),
                "one": clocked(lambda _: one.match(known).release()),
                "three": clocked(lambda _: three.match(known).release()),
            },
            *_turns([0], quick),
        )
    params = {"pages": index.pages, "keys": PROMPT, "state": "hot"}
    plain = found["plain"]
    for which, target in (("one", "<= 1.05"), ("three", "<= 3")):
        name = f"match + release, groups: {which}"
        yield against(name, params, found[which], "match + release of a page index", plain, target)


def one_page(index: PageIndex, quick: bool) -> Iterator[Row]:
    """match + release of one page, against two calls of as many arguments that do nothing."""
    try:
        empty = _baseline.library()
    except _baseline.Unavailable as error:
        yield Row("match + release, one page", {"skipped": str(error)}, 0.0)
        return
    keys = keys_of(1000, PROMPT)[:1].copy()
    room = np.zeros(4, np.uint32)
    handle, at, to = index.core.handle, keys.ctypes.data, room.ctypes.data
    calls = 50  # in one sample: the clock costs as much as a call

    def nothing(_: int) -> None:
        for _ in range(calls):
            empty.lcb_empty5(handle, at, 1, 0, to)
            empty.lcb_empty2(handle, to)

    def match(_: int) -> None:
        for _ in range(calls):
            index.match(keys).release()

    cases = {"empty": clocked(nothing), "match": clocked(match)}
    found = interleaved(cases, 100 if quick else 1000)
    yield against(
        "match + release, one page",
        {"pages": index.pages, "keys": 1, "state": "hot"},
        found["match"] / calls,
        "two empty ctypes calls (PyDLL) of 5 and 2 arguments",
        found["empty"] / calls,
        "<= 5",
    )


def by_number(index: PageIndex, quick: bool) -> Iterator[Row]:
    """pin + release of pages whose numbers and generations were told, against match + release of
    the same; and a loan: lend, give back (as a whole, or page by page) and collect. Hot."""
    opened = partial(SharedRing.open, f"{index.name}.ring", capacity=1024, message_bytes=256)
    with (
        PageIndex.attach(index.name) as worker,
        opened() as ours,
        opened() as theirs,
        Loans(index, ours, worker.client_id) as loans,
    ):
        gives = GiveBack(theirs)
        for n in (1, 256):
            keys = keys_of(1000, PROMPT)[:n].copy()
            with index.match(keys) as lease:
                pages, generations = lease.pages.copy(), index.generations(lease.pages)
                yield from _by_number(index, worker, loans, gives, keys, pages, generations, quick)


def _by_number(
    index: PageIndex,
    worker: PageIndex,
    loans: Loans,
    gives: GiveBack,
    keys: Keys,
    pages: Pages,
    generations: Generations,
    quick: bool,
) -> Iterator[Row]:
    def whole(_: int) -> None:
        gives.put(loans.lend(pages))
        loans.collect()

    def by_page(_: int) -> None:
        gives.put(loans.lend(pages), pages)
        loans.collect()

    cases = {
        "match": clocked(lambda _: index.match(keys).release()),
        "pin": clocked(lambda _: worker.pin(pages, generations).release()),
        "whole": clocked(whole),
        "page": clocked(by_page),
    }
    found = interleaved(cases, 300 if quick else 5000)
    params = {"pages": index.pages, "keys": len(pages), "state": "hot"}
    baseline = "match + release of the same"
    yield against("pin + release by number", params, found["pin"], baseline, found["match"], None)
    for case, name in (("whole", "as a whole"), ("page", "page by page")):
        shown = {**params, **spread(found[case])}
        yield Row(f"lend, give back {name}, collect", shown, median(found[case]))


def alternatives(index: PageIndex, prompts: int, quick: bool) -> Iterator[Row]:
    """The same work in plain Python, in the ancestor's way, and over LMDB, with as many pages of
    the same prompts. Processor time, see `clocked_cpu`."""
    known = [keys_of(1000 + i, PROMPT) for i in range(prompts)]
    others: dict[str, tuple[Any, str | None]] = {
        "plain Python index in one process": (_others.PlainIndex(known), ">= 10")
    }
    try:
        chained = _others.ChainedIndex(known)
        others["ctypes records, chained dict, list, lock, in Python"] = (chained, ">= 100")
    except _baseline.Unavailable:
        pass
    if _others.have_lmdb():
        others["LMDB, lookups only"] = (_others.LmdbIndex(known), None)
    for state in ("hot", "cold"):
        pick = [prompts // 2] if state == "hot" else list(range(prompts))
        cases = {
            name: _turning(other.match_and_release, pick) for name, (other, _) in others.items()
        }
        cases["ours"] = _turning(lambda prompt: index.match(known[prompt]).release(), pick)
        found = interleaved(cases, 3 if quick else 6, max(20, len(pick)))
        params: dict[str, Any] = {"pages": index.pages, "keys": PROMPT, "prompts": len(pick)}
        params |= {"state": state, "clock": "processor time"}
        for name, (_, target) in others.items():
            yield faster(name, params, found[name], found["ours"], target)


def _turning(work: Callable[[int], None], pick: list[int]) -> Case:
    return clocked_cpu(lambda i: work(pick[i % len(pick)]))


def reserving(index: PageIndex, quick: bool) -> Iterator[Row]:
    """reserve + publish of a prompt into a pool that is full, so that as much is evicted."""
    seeds = iter(range(5_000_000, 6_000_000))
    fresh = [keys_of(next(seeds), PROMPT) for _ in range(20 if quick else 100)]
    while index.stats().free >= PROMPT:
        with index.reserve(keys_of(next(seeds), PROMPT)) as made:
            made.publish()
    held: list[Any] = []

    def reserve(i: int) -> None:
        made = index.reserve(fresh[i])
        made.publish()
        held.append(made)

    case, samples = clocked(reserve), []
    for i in range(len(fresh)):
        samples.append(case(i))
        held.pop().release()
    target = "<= 150" if index.pages <= 20_000 else "<= 400"
    params = {"pages": index.pages, "keys": PROMPT, **spread(samples)}
    yield Row(
        "reserve + publish, evicting as many",
        params,
        median(samples),
        target=f"{target} us",
        met=meets(median(samples), target),
    )


def beside_doomed(index: PageIndex, quick: bool) -> Iterator[Row]:
    """reserve + publish of a few keys into a full pool, of which so many pages are doomed and
    pinned, by a lease over a namespace that was cleared. Against the same with none of them."""
    seeds = iter(range(6_000_000, 9_000_000))
    numbers, sizes = (0, 300, 10_000), (4, 16, 128)
    samples: dict[tuple[int, int], list[float]] = {(d, n): [] for d in numbers for n in sizes}
    for _ in range(3 if quick else 8):
        for doomed in numbers:
            with _doomed(index, doomed, next(seeds)):
                while free := min(index.stats().free, PROMPT):
                    with index.reserve(keys_of(next(seeds), free)) as made:
                        made.publish()
                for keys in sizes:
                    samples[doomed, keys] += _reserves(index, keys, seeds, 40 if quick else 100)
    for (doomed, keys), found in samples.items():
        if doomed:
            params = {"pages": index.pages, "keys": keys, "doomed": doomed}
            name, none = "reserve + publish, some doomed and pinned", "the same, none doomed"
            yield against(name, params, found, none, samples[0, keys], "<= 1.25")


@contextmanager
def _doomed(index: PageIndex, pages: int, seed: int) -> Iterator[None]:
    """So many pages of a cleared namespace, leased for the body of a with statement."""
    if not pages:
        yield
        return
    space = index.namespace(tenant="doomed")
    keys = keys_of(seed, pages)
    with index.reserve(keys, namespace=space) as made:
        made.publish()
    with index.match(keys, namespace=space):
        index.clear(space)
        yield


def _reserves(index: PageIndex, keys: int, seeds: Iterator[int], times: int) -> list[float]:
    def reserve(i: int) -> None:
        with index.reserve(fresh[i]) as made:
            made.publish()

    fresh = [keys_of(next(seeds), keys) for _ in range(times)]
    case = clocked(reserve)
    return [case(i) for i in range(times)]


def queue(index: PageIndex, prompts: int, quick: bool) -> Iterator[Row]:
    """What a scheduler asks at every step: 1,000 requests of 128 pages, peeked in one call."""
    requests, each = 1000, 128
    parts = [
        keys_of(1000 + i % prompts, PROMPT)[(i * each) % (PROMPT - each) :][:each]
        for i in range(requests)
    ]
    first = [keys_of(1000 + i % prompts, PROMPT)[:each] for i in range(requests)]
    offsets = np.arange(0, (requests + 1) * each, each)
    cases = {
        "from the middle of prompts": np.concatenate(parts),
        "beginnings of prompts": np.concatenate(first),
    }
    for name, keys in cases.items():
        found = interleaved(
            {"peek": clocked(lambda _, k=keys: index.peek_many(k, offsets))},  # type: ignore[misc]
            5 if quick else 40,
        )["peek"]
        params = {"pages": index.pages, "requests": requests, "keys": each, "which": name}
        yield Row("peek of a queue", {**params, **spread(found)}, median(found))
