"""Workers are killed at random instructions while the others go on, and nothing is lost.

LIGHTCACHE_KILLS_INSIDE: how many must have died inside a critical section (20; a soak: 1,000).
LIGHTCACHE_KILL_SECONDS: how long at least, over all sizes (16). LIGHTCACHE_TEST_SEED.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import raw
from multi import pausing, stress_worker
from multi.stress_worker import Board

from lightcache import Cache

INSIDE = int(os.environ.get("LIGHTCACHE_KILLS_INSIDE", "20"))
SECONDS = float(os.environ.get("LIGHTCACHE_KILL_SECONDS", "16"))
SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "1"))
CAPACITIES = (4, 16, 64, 20_000)
TESTS = Path(__file__).parent.parent
LIMIT = 120 + 3 * SECONDS + INSIDE  # seconds; a watchdog, nothing is measured


def race(
    name: str,
    board: Path,
    workers: int,
    pages: int,
    first: int,
    count: int,
    seconds: float,
    inside: int,
    checks: bool,
    hook: Path | None,
    before: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    """Start a killer and its workers."""
    program = TESTS / "multi" / "kill_race.py"
    numbers = (
        workers,
        pages,
        SEED + pages + first,
        first,
        count,
        seconds,
        inside,
        int(checks),
        hook or "-",
    )
    return subprocess.Popen(
        [
            *before,
            sys.executable,
            "-W",
            "error",
            str(program),
            name,
            str(board),
            *map(str, numbers),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS), "OPENBLAS_NUM_THREADS": "1"},
    )


def result(running: subprocess.Popen[str]) -> dict[str, int]:
    """What it counted; or how it failed."""
    try:
        out, errors = running.communicate(timeout=LIMIT - 30)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # the workers hold the pipes too
        out, errors = running.communicate()
        pytest.fail(f"the race did not end\n{out}\n{errors}")
    assert running.returncode == 0, f"{out}\n{errors}"
    counted: dict[str, int] = json.loads(out)
    return counted


def take_back(cache: Cache, wait_until: Callable[[Callable[[], bool], str], None]) -> None:
    """After everybody died or left: nothing is held, nothing is damaged, every page can be had."""
    cache.reap()
    assert [client.role for client in cache.clients()] == ["parent"]

    def no_tickets() -> bool:
        with cache.reserve(np.array([[1, 2]], np.uint64)):
            return cache.stats().tickets == 0

    wait_until(no_tickets, "the last ticket's deadline")
    report = cache.check()
    report.raise_if_broken()
    assert report.quiet
    assert report.pins == 0
    assert raw.check(raw.copy_of(cache.name)) == []
    chance = np.random.default_rng(7)
    keys = chance.integers(0, 1 << 64, (cache.pages, 2), np.uint64)
    with cache.reserve(keys) as everything:
        assert sorted(everything.pages) == list(range(cache.pages)), everything.why
    stats = cache.stats()
    assert (stats.ready, stats.writing, stats.reservations) == (0, 0, 0)
    cache.check().raise_if_broken()
    assert raw.check(raw.copy_of(cache.name)) == []


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes workers die while they hold the lock."""
    if pausing.missing():
        pytest.skip(pausing.missing())
    return pausing.compile_hook(tmp_path_factory.mktemp("hook"))


def kill_and_check(
    name: str, pages: int, board: Path, inside: int, hook: Path | None, wait_until: Any
) -> None:
    """One killer with six workers, for its share of the time."""
    workers, seconds = 6, SECONDS / len(CAPACITIES) / 2
    Board(board, workers, pages)
    with stress_worker.create(name, pages) as cache:
        running = race(
            name, board, workers, pages, 0, workers, seconds, inside, checks=True, hook=hook
        )
        counted = result(running)
        lock = raw.Copy(raw.copy_of(name)).lock[0]
        print(pages, counted, "recoveries", lock["recoveries"], "words", lock["undone_words"])
        assert counted["inside"] >= inside
        take_back(cache, wait_until)


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("pages", CAPACITIES)
def test_kills_inside_the_lock(
    pages: int, segment_name: str, tmp_path: Path, hook: Path, wait_until: Any
) -> None:
    inside = -(-INSIDE // len(CAPACITIES))
    kill_and_check(segment_name, pages, tmp_path / "board", inside, hook, wait_until)


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("pages", CAPACITIES)
def test_kills_anywhere(pages: int, segment_name: str, tmp_path: Path, wait_until: Any) -> None:
    kill_and_check(segment_name, pages, tmp_path / "board", 0, None, wait_until)


def namespaces_work() -> str:
    """Why no PID namespace can be made here; empty if it can."""
    command = ("unshare", "--pid", "--fork", "--mount-proc", "true")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return "unshare is not installed"
    return "" if done.returncode == 0 else f"unshare: {done.stderr.strip()}"


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_kills_across_pid_namespaces(
    segment_name: str, tmp_path: Path, hook: Path, wait_until: Any
) -> None:
    """Two containers, as it were: in each the same numbers name other processes."""
    reason = namespaces_work()
    if reason:
        pytest.skip(reason)
    pages, each, board = 64, 3, tmp_path / "board"
    Board(board, 3 * each, pages)
    apart = ("unshare", "--pid", "--fork", "--mount-proc")
    share = SECONDS / len(CAPACITIES)
    inside = max(1, INSIDE // 8)
    with stress_worker.create(segment_name, pages) as cache:
        running = [
            race(
                segment_name,
                board,
                3 * each,
                pages,
                i * each,
                each,
                share,
                inside,
                False,
                hook,
                before,
            )
            for i, before in enumerate(((), apart, apart))
        ]
        counted = [result(one) for one in running]
        print(counted)
        assert all(one["inside"] >= inside for one in counted)
        take_back(cache, wait_until)
