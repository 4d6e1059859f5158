"""What other processes do during a benchmark: `python -m lightcache_bench._roles ROLE JSON`.

A role prints a line of JSON when it is ready (or has a result) and ends when its stdin does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lightcache import layout
from lightcache.page_index import PageIndex, geometry
from lightcache.shm import layout as shm_layout
from lightcache_bench import _pool


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


def fill(name: str, pages: int, prompts: int) -> None:
    """Create a pool and fill it."""
    with PageIndex.create(name, pages=pages, role="bench: maker") as index:
        if prompts:
            _pool.fill(index, prompts)
        tell("ready")
        sys.stdin.read()


def hold(name: str, stop: bool, touched: int = 0) -> None:
    """Touch some memory, take the lock and keep it; stopped, if asked for."""
    with PageIndex.attach(name, role="bench: holder") as index:
        memory = np.ones(touched, np.uint8)
        index.core.locked("lci_hold", what="hold the lock")
        tell("ready")
        if stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        sys.stdin.read()
        index.core.quick.lci_let_go(index.core.handle)
        del memory


def fill_log(name: str, touched: int, pins: int) -> None:
    """Take the lock and note as many stores as the log holds, of words all over the index; then
    wait to be killed. What undoing them stores is what stands there already."""
    with PageIndex.attach(name, role="bench: victim") as index:
        index.core.locked("lci_hold", what="hold the lock")
        base, count = index.segment.address, shm_layout.LOG_ENTRIES
        size, pages = ctypes.sizeof(layout.PageRecord), geometry(index.pages).page
        chosen = np.random.default_rng(os.getpid()).integers(0, index.pages, count)
        words = (pages + chosen * size + layout.PageRecord.parent.offset) // 4
        everything = np.ctypeslib.as_array(
            (ctypes.c_uint32 * (index.segment.nbytes // 4)).from_address(base)
        )
        log = np.ctypeslib.as_array(
            (ctypes.c_uint64 * count).from_address(base + shm_layout.LOG_OFFSET)
        )
        log[:] = words.astype(np.uint64) | everything[words].astype(np.uint64) << np.uint64(32)
        shm_layout.LockRecord.from_address(base + shm_layout.LOCK_OFFSET).log_count = count
        tell("ready")
        sys.stdin.read()


def work(name: str, prompts: int, request: int, seconds: float, seed: int) -> None:
    """Match 9 times out of 10, reserve and publish the 10th; tell the times in microseconds."""
    with PageIndex.attach(name, role="bench: worker") as index:
        known = [_pool.keys_of(1000 + i, _pool.PROMPT)[:request].copy() for i in range(prompts)]
        tell("ready")
        sys.stdin.readline()
        tell(_work(index, known, seconds, seed))
        sys.stdin.read()


def _work(index: PageIndex, known: list[Any], seconds: float, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(known), 1 << 16).tolist()
    times: dict[str, list[float]] = {"match": [], "reserve": []}
    begin, i = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        i += 1
        if i % 10:
            at = time.perf_counter_ns()
            index.match(known[picks[i % len(picks)]]).release()
            times["match"].append((time.perf_counter_ns() - at) / 1e3)
            continue
        keys = rng.integers(0, 2**64, known[0].shape, dtype=np.uint64)
        at = time.perf_counter_ns()
        with index.reserve(keys) as made:
            made.publish()
        times["reserve"].append((time.perf_counter_ns() - at) / 1e3)
    return {**times, "seconds": time.perf_counter() - begin}


def reserve(name: str, touched: int, pins: int) -> None:
    """Pin some pages, touch some memory, then reserve and evict until killed."""
    with PageIndex.attach(name, role="bench: victim") as index:
        memory = np.ones(touched, np.uint8)
        lease = index.match(_pool.keys_of(1000, _pool.PROMPT)[:pins])
        tell("ready")
        for i in range(1 << 62):
            with index.reserve(_pool.keys_of(10_000_000 + os.getpid() * 10_000 + i, 256)) as made:
                made.publish()
        del memory, lease


def sleep(name: str, touched: int, pins: int) -> None:
    """Pin some pages and reserve others, touch some memory, then wait to be killed."""
    with PageIndex.attach(name, role="bench: victim") as index:
        memory = np.ones(touched, np.uint8)
        lease = index.match(_pool.keys_of(1000, _pool.PROMPT)[:pins])
        made = index.reserve(_pool.keys_of(os.getpid(), 64))
        tell("ready")
        sys.stdin.read()
        made.release()
        lease.release()
        del memory


def look(name: str, prompts: int, request: int, seed: int) -> None:
    """Peek until stdin ends; at every line tell how many peeks there were since the last, how many
    missed, and their speed."""
    with PageIndex.attach(name, role="bench: reader") as index:
        known = [_pool.keys_of(1000 + i, _pool.PROMPT)[:request].copy() for i in range(prompts)]
        tell("ready")
        os.set_blocking(sys.stdin.fileno(), False)
        times: list[float] = []
        missed, i, told = 0, seed, None
        while told != b"":
            for _ in range(100):
                i += 1
                begin = time.perf_counter_ns()
                missed += index.peek(known[i % prompts]) < request
                times.append((time.perf_counter_ns() - begin) / 1e3)
            told = sys.stdin.buffer.read(1)
            if told:
                p50, p999 = np.percentile(times, [50, 99.9]).round(2).tolist()
                tell({"lookups": len(times), "missed": missed, "p50": p50, "p99.9": p999})
                times, missed = [], 0


def throttle(pid: int, run: float, pause: float) -> None:
    """Stop and continue a process by turns."""
    tell("ready")
    os.set_blocking(sys.stdin.fileno(), False)
    while sys.stdin.buffer.read(1) is None:
        os.kill(pid, signal.SIGCONT)
        time.sleep(run)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(pause)
    os.kill(pid, signal.SIGCONT)


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role for role in (fill, hold, fill_log, work, reserve, sleep, look, throttle)
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
