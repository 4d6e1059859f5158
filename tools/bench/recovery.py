"""Deaths: how soon they are seen, what the next call pays, taking back, repair.

A victim is killed with SIGKILL while it makes room; only deaths that fell into a critical section
count (the lock says so: its log had to be undone or its owner replaced).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightcache.page_index import PageIndex
from lightcache.shm import layout
from lightcache.tools.bench import Row, _pool, meets
from lightcache.tools.bench._pool import Helper
from lightcache.tools.bench._timing import median, spread

MIB = 1 << 20


def rows(quick: bool) -> Iterator[Row]:
    """See `Benchmark.rows`."""
    pages = 20_000 if quick else 1_000_000
    with _pool.pool(pages, 2) as index:
        yield from deaths_in_the_lock(index, quick)
        yield from visibility(index, quick)
        yield reaping(index, quick)
        yield repairing(index, quick)


def _lock(index: PageIndex) -> layout.LockRecord:
    at = index.segment.address + layout.LOCK_OFFSET
    return layout.LockRecord.from_buffer_copy(
        ctypes.string_at(at, ctypes.sizeof(layout.LockRecord))
    )


def _until_dead(index: PageIndex, pid: int) -> float:
    """Seconds until the client with this pid counts as dead."""
    begin = time.perf_counter()
    while any(client.alive and client.pid == pid for client in index.clients()):
        pass
    return time.perf_counter() - begin


def deaths_in_the_lock(index: PageIndex, quick: bool) -> Iterator[Row]:
    """The next call that takes the lock, from the death being visible on."""
    wanted, tries = (3 if quick else 30), 0
    times: list[float] = []
    words: list[int] = []
    rng = np.random.default_rng(5)
    while len(times) < wanted and tries < 40 * wanted:
        tries += 1
        with Helper("reserve", name=index.name, touched=0, pins=0) as victim:
            victim.answer()
            time.sleep(rng.uniform(0.0, 0.01))
            victim.kill()
            _until_dead(index, victim.process.pid)
            before, held = _lock(index), _lock(index).word != 0
            begin = time.perf_counter_ns()
            index.grow(index.pages)
            took = (time.perf_counter_ns() - begin) / 1e3
            if held:
                times.append(took)
                words.append(_lock(index).undone_words - before.undone_words)
            index.reap()
    if not times:
        yield Row("lock taken over", {"deaths": tries, "in the lock": 0}, 0.0)
        return
    params: dict[str, Any] = {"pages": index.pages, "deaths": tries, "in_the_lock": len(times)}
    params |= {**spread(times), "worst": round(max(times), 1), "words_undone": max(words)}
    yield Row("lock taken over, its holder visibly dead", params, median(times))


def visibility(index: PageIndex, quick: bool) -> Iterator[Row]:
    """From the signal to the moment when others see the death: the kernel frees its memory
    first."""
    for touched in (0, 64) if quick else (0, 256, 1024):
        times: list[float] = []
        for _ in range(3 if quick else 7):
            with Helper("sleep", name=index.name, touched=touched * MIB, pins=0) as victim:
                victim.answer()
                begin = time.perf_counter()
                victim.process.kill()
                _until_dead(index, victim.process.pid)
                times.append((time.perf_counter() - begin) * 1e3)
                victim.kill()
            index.reap()
        params: dict[str, Any] = {"touched_MiB": touched, **spread(times)}
        yield Row("death visible", params, median(times), "ms")


def reaping(index: PageIndex, quick: bool) -> Row:
    """Take back a client that pinned a prompt and was writing 64 pages."""
    times: list[float] = []
    for _ in range(3 if quick else 15):
        with Helper("sleep", name=index.name, touched=0, pins=2000) as victim:
            victim.answer()
            victim.kill()
            begin = time.perf_counter()
            dead = index.reap()
            times.append((time.perf_counter() - begin) * 1e3)
            assert dead == 1, dead
    params = {"pages": index.pages, "clients": 1, **spread(times)}
    met = meets(median(times), "<= 50")
    return Row("reap", params, median(times), "ms", target="<= 50 ms", met=met)


def repairing(index: PageIndex, quick: bool) -> Row:
    """Rebuild everything derived while another process looks up without pause."""
    arguments: dict[str, Any] = {"name": index.name, "prompts": 2, "request": 64}
    times: list[float] = []
    with Helper("look", **arguments, seed=os.getpid()) as reader:
        reader.answer()
        for _ in range(2 if quick else 7):
            begin = time.perf_counter()
            index.repair()
            times.append((time.perf_counter() - begin) * 1e3)
        reader.go_on()
        seen = reader.answer()
    index.check()
    params = {"pages": index.pages, **spread(times), **seen}
    met = meets(median(times), "<= 500")
    return Row("repair, lookups going on", params, median(times), "ms", target="<= 500 ms", met=met)
