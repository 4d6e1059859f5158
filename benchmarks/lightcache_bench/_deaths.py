"""Rows of deaths: the lock taken over from the dead, and how soon a death is seen.

A death counts as visible when the kernel has dropped the dead client's byte; within one PID
namespace a holder of the lock is seen dead before that, by its thread's flag in /proc.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightcache.page_index import PageIndex
from lightcache.shm import layout
from lightcache_bench import Row, meets
from lightcache_bench._pool import Helper
from lightcache_bench._timing import median, spread

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
TARGET = "<= 1 ms"
GIB = 1 << 30


def lock_of(index: PageIndex) -> layout.LockRecord:
    """A copy of the lock's record."""
    at = index.segment.address + layout.LOCK_OFFSET
    return layout.LockRecord.from_buffer_copy(
        ctypes.string_at(at, ctypes.sizeof(layout.LockRecord))
    )


def _until_dead(index: PageIndex, pid: int) -> None:
    while any(client.alive and client.pid == pid for client in index.clients()):
        pass


def _take_over(index: PageIndex, victim: Helper) -> tuple[float, int] | None:
    """Kill it when it is seen to hold the lock; then the milliseconds of the next call that takes
    the lock, from the death being visible on, and the stores that it undid. None: it had given the
    lock back before it died."""
    while lock_of(index).word == 0:
        pass
    victim.kill()
    _until_dead(index, victim.process.pid)
    before = lock_of(index)
    begin = time.perf_counter_ns()
    index.grow(index.pages)
    took = (time.perf_counter_ns() - begin) / 1e6
    index.reap()
    if before.word == 0:
        return None
    return took, lock_of(index).undone_words - before.undone_words


def taken_over(index: PageIndex, quick: bool) -> Iterator[Row]:
    """Some victims are killed while they reserve and evict; others with as many entries in the log
    as it holds, of words all over the index."""
    wanted = 3 if quick else 10
    for role, name in (("reserve", "at a random instruction"), ("fill_log", "with a full log")):
        found: list[tuple[float, int]] = []
        deaths = 0
        while len(found) < wanted and deaths < 10 * wanted:
            deaths += 1
            with Helper(role, name=index.name, touched=0, pins=0) as victim:
                victim.answer()
                took = _take_over(index, victim)
            found += [took] if took else []
        yield _taken_over(index.pages, name, deaths, found)


def _taken_over(pages: int, death: str, deaths: int, found: list[tuple[float, int]]) -> Row:
    params: dict[str, Any] = {"pages": pages, "death": death, "deaths": deaths}
    params["in_the_lock"] = len(found)
    if not found:
        return Row("lock taken over", params, 0.0, "ms", target=TARGET)
    times, words = zip(*found, strict=True)
    params |= {**spread(times), "worst": round(max(times), 3), "most_words_undone": max(words)}
    value = median(times)
    met = meets(value, TARGET)
    return Row("lock taken over", params, value, "ms", target=TARGET, met=met)


# ---- how soon a death is seen


def visibility(index: PageIndex, quick: bool) -> Iterator[Row]:
    """From the signal until a waiter has the lock of the dead: the kernel frees the memory of the
    dead before it drops the byte. A waiter looks every 5 ms."""
    sizes = (0.0, 0.0625) if quick else (0.0, 0.25, 1.0, 4.0)
    for before, namespaces in (((), 1), (APART, 2)):
        refused = _refused(before)
        for size in sizes:
            params: dict[str, Any] = {"touched_GiB": size, "pid_namespaces": namespaces}
            if refused or size * GIB > _available() / 2:
                params["skipped"] = refused or "less than twice as much memory is free"
                yield Row("death in the lock, until a waiter has it", params, 0.0, "ms")
                continue
            repeats = 2 if quick else 7 if size < 1 else 3
            times = [_seen(index, int(size * GIB), before) for _ in range(repeats)]
            params |= {**spread(times), "worst": round(max(times), 1)}
            yield Row("death in the lock, until a waiter has it", params, median(times), "ms")


def _seen(index: PageIndex, touched: int, before: tuple[str, ...]) -> float:
    with Helper("hold", name=index.name, stop=False, touched=touched, before=before) as victim:
        victim.answer()
        pid = _child_of(victim.process.pid) if before else victim.process.pid
        begin = time.perf_counter_ns()
        os.kill(pid, signal.SIGKILL)
        index.grow(index.pages)
        took = (time.perf_counter_ns() - begin) / 1e6
        victim.kill()
    while index.reap():
        pass
    return took


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _refused(before: tuple[str, ...]) -> str:
    """Why a process cannot be started so; empty if it can."""
    if not before:
        return ""
    try:
        done = subprocess.run((*before, "true"), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"{before[0]} is not installed"
    return "" if done.returncode == 0 else done.stderr.strip()


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
