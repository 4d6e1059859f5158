"""Two processes meet at every ordered store: one stands at a pause point while the other runs its
whole operation (or as far as it gets before it needs the lock), then the first goes on.

For each pair every point that the paused side passes is tried, at each passing: all keys are in one
chain, so the third reader's step is the first that stands on the page it looks for. Either side is
the paused one.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import raw
from multi import pausing
from multi.race_side import N, keys

from lightcache import PageIndex

TESTS = Path(__file__).parent.parent
PAGES = 8
MINE, OTHER = 1, 2  # seeds of the run that both care for, and of one in the same chain
PIN = (1, 2, 11, 12)  # points of lc_base.h
WALK = (11, 12)
EVICT = (13, 17, 3, 4, 5, 14, 15)
TAKE = (13, 17, 3, 4, 5, 6, 7, 8, 14, 15)
PUBLISH = (9, 10)
UNDER_LOCK = {3, 4, 5, 6, 7, 8, 13, 14, 15, 17}
DEADLINE = 60.0

# Of N keys in one chain a lookup guesses all but the deepest, so it walks once: N guesses and the N
# records of the walk are looked at (12), a head is loaded once (11).
PASSINGS = {5: N, 6: N, 7: N, 8: N, 10: N, 11: 1, 12: 2 * N, 14: 2, 17: N}

# paused side, its points, other side
RACES = [
    ("match", PIN, "evict"),
    ("evict", EVICT, "match"),
    ("match", PIN, "reserve"),
    ("reserve", TAKE, "match"),
    ("match", PIN, "clear"),
    ("clear", (13, 14, 15), "match"),
    ("peek", WALK, "reserve"),
    ("reserve", TAKE, "peek"),
    ("publish", PUBLISH, "peek"),
    ("peek", WALK, "publish"),
    ("publish", PUBLISH, "match"),
    ("publish", PUBLISH, "clear"),
    ("clear", (13, 14, 15), "publish"),
    ("abandon", (13, 14, 15), "peek"),
    ("abandon", (13, 14, 15), "match"),
    ("peek", WALK, "abandon"),
]


def passings(first: str, point: int, second: str) -> int:
    """How often it passes there. What is not ready yet ends a lookup at its first key."""
    most = PASSINGS.get(point, 1)
    if first == "peek" and second in ("publish", "abandon"):
        return min(most, 1 if point == 11 else N)
    return most


CASES = [
    pytest.param(first, point, occurrence, second, id=f"{first}-{point}.{occurrence}-{second}")
    for first, points, second in RACES
    for point in points
    for occurrence in range(1, passings(first, point, second) + 1)
]


class Side:
    """A process of race_side.py."""

    def __init__(
        self, name: str, hook: Path, gate: Path, point: int, passing: int, what: str
    ) -> None:
        """Start it; it attaches and says `ready`."""
        self.what = what
        seed = OTHER if what == "reserve" else MINE
        program = TESTS / "multi" / "race_side.py"
        arguments = (name, hook, gate, point, passing, what, seed)
        path = pausing.python_path(TESTS)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(program), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        )

    def line(self) -> str:
        """Its next line."""
        assert self.process.stdout
        text = self.process.stdout.readline().strip()
        assert text, f"{self.what} ended with {self.process.wait()}"
        return text

    def go(self) -> None:
        """Begin."""
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def got(self) -> Any:
        """Its result; blocks until it is done."""
        return json.loads(self.line())

    def end(self) -> None:
        """Let go of what it holds and leave."""
        self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0

    def kill(self) -> None:
        """If it is still there."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of gates."""
    if pausing.missing():
        pytest.skip(pausing.missing())
    return pausing.compile_hook(tmp_path_factory.mktemp("hook"))


def fill(index: PageIndex, first: str, second: str) -> None:
    """Our run is there before, ready, unless somebody is about to publish or abandon it."""
    if {"publish", "abandon"} & {first, second}:
        return
    with index.reserve(keys(MINE)) as got:
        got.publish()


def judge(index: PageIndex, results: dict[str, Any]) -> None:
    """What must be true whoever came first; both still hold what they got."""
    first, second = results.get("match"), results.get("reserve")
    if first and second:
        assert not set(first["pages"]) & set(second["pages"]), "one page for two"
    if first:
        rows = raw.Copy(raw.copy_of(index.name)).rows
        assert rows[:, first["pages"]].any(axis=0).all(), "a matched page is not pinned"
    if first and "evict" in results:
        assert len(first["pages"]) + results["evict"]["evicted"] <= N
    if first and "clear" not in results:
        assert index.peek(keys(MINE)[: len(first["pages"])]) == len(first["pages"])
    if "publish" in results and "clear" not in results:
        assert results["publish"]["ready"]
        assert index.peek(keys(MINE)) == N
    if "abandon" in results or "clear" in results:
        assert index.peek(keys(MINE)) == 0
    if "abandon" in results:
        assert not results.get("match", {}).get("pages")
        assert not results.get("peek", {}).get("found")


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize(("first", "point", "occurrence", "second"), CASES)
def test_race(
    first: str,
    point: int,
    occurrence: int,
    second: str,
    hook: Path,
    segment_name: str,
    tmp_path: Path,
) -> None:
    gate_path = tmp_path / "gate"
    gate_path.write_bytes(bytes(16))
    gate = np.memmap(gate_path, np.uint32, "r+")
    sides: list[Side] = []
    pages = N if "reserve" in (first, second) else PAGES
    with PageIndex.create(segment_name, pages=pages) as index:
        fill(index, first, second)
        try:
            paused = Side(segment_name, hook, gate_path, point, occurrence, first)
            sides.append(paused)
            other = Side(segment_name, hook, gate_path, 0, 0, second)
            sides.append(other)
            assert [side.line() for side in sides] == ["ready", "ready"]
            paused.go()
            reached = stands(gate, paused)
            assert reached, "it does not pass this point so often: take it off the list"
            other.go()
            # One that needs the lock which the paused one holds can only end behind it.
            blocked = reached and point in UNDER_LOCK and second not in ("match", "peek", "publish")
            results = {} if blocked else {second: other.got()}
            gate[1] = 1
            results[first] = paused.got()
            if blocked:
                results[second] = other.got()
            judge(index, results)
            index.check().raise_if_broken()
            for side in sides:
                side.end()
            assert index.check().pins == 0
            assert raw.check(raw.copy_of(segment_name)) == []
        finally:
            for side in sides:
                side.kill()


def stands(gate: Any, paused: Side) -> bool:
    """Wait until it stands at its point; False: it never passed it, and is done."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if gate[0]:
            return True
        if select.select([paused.process.stdout], [], [], 0.001)[0]:
            return bool(gate[0])
    pytest.fail("the paused side neither stands nor ends")
    return False
