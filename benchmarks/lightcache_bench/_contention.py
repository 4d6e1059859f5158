"""Rows of many processes: throughput, and tails beside a client that is stopped or throttled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightcache.page_index import PageIndex
from lightcache_bench import Row, meets
from lightcache_bench._pool import PROMPT, Helper, keys_of
from lightcache_bench._timing import clocked, interleaved, tails

COUNTS = (1, 2, 4, 8, 16)


def throughput(index: PageIndex, prompts: int, quick: bool) -> Iterator[Row]:
    """9 matches for each reserve + publish, 128 pages a request, by more and more processes."""
    cores = len(os.sched_getaffinity(0))
    for count in COUNTS:
        if count > max(4, cores):
            continue  # would measure the kernel's scheduler
        results = _together(index, prompts, count, 0.5 if quick else 5.0)
        params: dict[str, Any] = {"pages": index.pages, "processes": count, "keys": 128}
        params["cores"] = cores
        params["match_share"] = 0.9
        total = 0.0
        for kind in ("match", "reserve"):
            times = np.concatenate([result[kind] for result in results])
            p50, p99, p999 = tails(times)
            params[kind] = f"p50 {p50:.1f}, p99 {p99:.1f}, p99.9 {p999:.1f} us"
            total += sum(len(result[kind]) / result["seconds"] for result in results)
        yield Row("throughput, match and reserve", params, total, "requests/s")


def _together(index: PageIndex, prompts: int, count: int, seconds: float) -> list[Any]:
    workers = [
        Helper("work", name=index.name, prompts=prompts, request=128, seconds=seconds, seed=i)
        for i in range(count)
    ]
    try:
        for worker in workers:
            worker.answer()
        for worker in workers:
            worker.go_on()
        return [worker.answer() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def tail_rows(index: PageIndex, prompts: int, quick: bool) -> Iterator[Row]:
    """match p99.9 beside a client stopped in a critical section, and beside one that runs 5 % of
    the time, against the same without them. The three take turns."""
    sizes, rounds = (1, 64), 3 if quick else 20
    samples: dict[tuple[int, str], list[Any]] = {}
    for _ in range(rounds):
        for size in sizes:
            for beside in ("nobody", "stopped holder", "throttled worker"):
                found = matches_beside(index, prompts, beside, size, 1000 if quick else 10_000)
                samples.setdefault((size, beside), []).append(found)
    for size in sizes:
        quiet = float(np.median([tails(found)[2] for found in samples[size, "nobody"]]))
        for beside in ("stopped holder", "throttled worker"):
            each = [tails(found)[2] for found in samples[size, beside]]
            value = float(np.median(each))
            params = {
                "pages": index.pages,
                "keys": size,
                "beside": beside,
                "p50": round(tails(np.concatenate(samples[size, beside]))[0], 2),
                "rounds": f"{min(each):.1f}..{max(each):.1f}",
                "baseline_us": round(quiet, 2),
            }
            ratio, target = value / quiet, "<= 1.5"
            met = meets(ratio, target)
            yield Row("match p99.9", params, value, "us", "match p99.9 alone", ratio, target, met)


def matches_beside(index: PageIndex, prompts: int, beside: str, size: int, count: int) -> Any:
    """Microseconds of so many matches of `size` pages beside "nobody", a "stopped holder" of the
    lock, or a "throttled worker"."""
    keys = [keys_of(1000 + i, PROMPT)[:size].copy() for i in range(min(prompts, 16))]
    case = clocked(lambda i: index.match(keys[i % len(keys)]).release())
    helpers: list[Helper] = []
    if beside == "stopped holder":
        helpers = [Helper("hold", name=index.name, stop=True)]
        helpers[0].answer()
    elif beside == "throttled worker":
        work = Helper("work", name=index.name, prompts=prompts, request=128, seconds=1e9, seed=1)
        work.answer()
        work.go_on()
        helpers = [Helper("throttle", pid=work.process.pid, run=0.005, pause=0.095), work]
        helpers[0].answer()
    try:
        interleaved({"match": case}, 100)
        return interleaved({"match": case}, count)["match"]
    finally:
        for helper in helpers:
            if helper.process.poll() is None:
                helper.process.send_signal(signal.SIGCONT)
            helper.kill()
        index.reap()
