"""Processes that are killed while they use a disk: whatever is found again is right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from multi import pausing
from multi.disk_side import POINTS, PROMPT, SLOTS, prompt
from support.disks import CORRUPT, OK, PRESENT, STORED, disk, got, indexes, put

from lightcache.storage.disk import DiskStorage
from lightcache.storage.testing.conformance import make_keys

pytestmark = [pytest.mark.crash]

TESTS = Path(__file__).parent.parent
LIVES = [6, pytest.param(24, marks=pytest.mark.slow)]  # of a folder, one after the other


@contextmanager
def doomed(where: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of `disk_side`, killed in the end."""
    program = TESTS / "multi" / "disk_side.py"
    child = subprocess.Popen(
        [sys.executable, "-W", "error", str(program), str(where), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS)},
    )
    assert child.stdout
    try:
        yield child
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def lines(child: subprocess.Popen[str], until: str = "", most: int = 1 << 30) -> list[str]:
    """What it says, up to a word, or so many."""
    assert child.stdout
    said: list[str] = []
    while len(said) < most and (not said or said[-1] != until):
        line = child.stdout.readline()
        assert line, f"it ended by itself, behind {said[-3:]}"
        said.append(line.strip())
    return said


def machine_stops(where: Path) -> None:
    """Nothing is left in shared memory."""
    for index in indexes(where):
        index.unlink()


def sound(storage: DiskStorage, seed: int, end: int, first: int = 0) -> int:
    """All that is found of these prompts is right; how many pages. Corrupt ones go at once."""
    count = 0
    for number in range(max(first, 0), end):
        statuses = got(storage, prompt(seed, number))
        count += statuses.count(OK)
        if CORRUPT in statuses:
            assert CORRUPT not in got(storage, prompt(seed, number))
    report = storage._index.check()
    report.raise_if_broken()
    assert report.pins == report.writing == 0
    return count


def usable(storage: DiskStorage, seed: int) -> None:
    """Every slot can be written."""
    for first in range(0, SLOTS, PROMPT):
        assert STORED in put(storage, prompt(seed, 90_000 + first))
    assert storage.stats().pages == SLOTS


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True], ids=["process", "machine"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_between_two_steps(where: Path, point: str, stops: bool) -> None:
    with doomed(where, 1, point, POINTS[point]) as child:
        done = len(lines(child, "stopped")) - 1
    if stops:
        machine_stops(where)
    with disk(where, SLOTS) as storage:
        assert (storage.rebuilt is not None) is stops
        kept = sound(storage, 1, done + 2)
        assert kept > 0 or "epoch" in point
        usable(storage, 1)


@pytest.mark.parametrize("point", ["rebuilding", "rebuilt"])
def test_killed_in_a_rebuild(where: Path, point: str) -> None:
    with disk(where, SLOTS) as storage:
        for number in range(4):
            put(storage, prompt(2, number))
    with doomed(where, 2, point, 1 if point == "rebuilt" else 9) as child:
        lines(child, "stopped")
    with disk(where, SLOTS) as storage:
        assert storage.rebuilt is not None
        assert storage.rebuilt.pages == 4 * PROMPT
        assert sound(storage, 2, 4) == 4 * PROMPT
        usable(storage, 2)


@pytest.mark.slow
@pytest.mark.parametrize("lives", LIVES)
def test_killed_at_random_instants(where: Path, lives: int) -> None:
    """Again and again, the folder going on from one life to the next; each second time the machine
    stops as well."""
    random = np.random.default_rng(int(os.environ.get("LIGHTCACHE_TEST_SEED", "7")))
    for life in range(lives):
        with doomed(where, life) as child:
            done = len(lines(child, most=int(random.integers(1, 12))))
            child.kill()
            assert child.stdout
            done += len(child.stdout.read().split())  # it may have gone on for long
        if life % 2:
            machine_stops(where)
        with disk(where, SLOTS) as storage:
            assert (storage.rebuilt is not None) is bool(life % 2)
            assert sound(storage, life, done + 2, done - 10) > 0
            assert storage.stats().pages > 0
    machine_stops(where)


def test_others_go_on_with_what_the_dead_one_was_writing(where: Path) -> None:
    with disk(where, SLOTS) as storage:
        keys = prompt(3, 1)
        with doomed(where, 3, "half a page", 7) as child:  # the first of its second prompt
            lines(child, "stopped")
            assert got(storage, prompt(3, 0)) == [OK] * PROMPT
            late = storage.write(keys[:1], [bytes(4096)], timeout=0.05)
            assert late.reason.startswith("timed out")  # it is busy there
        assert put(storage, keys) == [STORED] * PROMPT
        assert got(storage, keys) == [OK] * PROMPT
        assert storage._index.check().pins == 0


def test_slots_of_the_dead_are_taken_when_there_are_no_others(where: Path) -> None:
    with disk(where, SLOTS) as storage:
        with doomed(where, 5, "half a page", 7) as child:
            lines(child, "stopped")
        assert storage._index.stats().writing == PROMPT // 2
        keys = make_keys(SLOTS, 77)
        assert put(storage, keys) == [STORED] * SLOTS
        assert storage._index.check().pins == 0


def test_what_one_writes_others_find(where: Path) -> None:
    """At once, and while the writer lives."""
    with disk(where, SLOTS) as storage:
        with doomed(where, 4, "behind publishing", 12) as child:
            assert len(lines(child, "stopped")) == 6  # of the sixth prompt it has not told yet
            for number in range(6):
                assert got(storage, prompt(4, number)) == [OK] * PROMPT
                assert put(storage, prompt(4, number)) == [PRESENT] * PROMPT
            assert storage.stats().pages == 6 * PROMPT


@pytest.mark.slow
def test_several_write_and_read_at_once(where: Path) -> None:
    with disk(where, SLOTS) as storage, doomed(where, 5) as one, doomed(where, 5) as other:
        for line in lines(one, most=20) + lines(other, most=20):
            assert CORRUPT not in got(storage, prompt(5, int(line)))
            assert set(put(storage, prompt(5, int(line)))) <= {PRESENT, STORED}
            assert CORRUPT not in got(storage, prompt(5, int(line)))
