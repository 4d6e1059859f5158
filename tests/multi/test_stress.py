"""Eight processes do everything at random for a while; somebody would see any page that is wrong.

LIGHTCACHE_STRESS_SECONDS: how long, over all sizes (30). LIGHTCACHE_TEST_SEED: other chances.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import raw
from multi import stress_worker
from multi.stress_worker import Board, Orders

from lightcache import Cache

SECONDS = float(os.environ.get("LIGHTCACHE_STRESS_SECONDS", "30"))
SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "1"))
WORKERS = 8
ROUNDS = 3
CAPACITIES = (4, 16, 64, 20_000)


@dataclass
class Crew:
    """The workers, as their parent sees them."""

    processes: list[Any]
    pipes: list[Connection]

    def answers(self) -> list[Any]:
        """One from each; a worker that failed says how."""
        found = []
        for number, pipe in enumerate(self.pipes):
            try:
                answer = pipe.recv()
            except EOFError:
                answer = f"worker {number} died"
            if isinstance(answer, str) and answer != "ready":
                pytest.fail(answer)
            found.append(answer)
        return found

    def order(self, what: str, argument: float = 0.0) -> list[Any]:
        """Tell all, hear all."""
        for pipe in self.pipes:
            pipe.send((what, argument))
        return self.answers()


@contextmanager
def crew(name: str, pages: int, board: Path, seed: int) -> Iterator[Crew]:
    """Workers that have attached; whatever happens, none outlives the test."""
    context = multiprocessing.get_context("spawn")
    made = Crew([], [])
    try:
        for number in range(WORKERS):
            ours, theirs = context.Pipe()
            orders = Orders(name, board, WORKERS, pages, number, seed * 1000 + number)
            process = context.Process(target=stress_worker.spawned, args=(orders, theirs))
            process.start()
            theirs.close()
            made.processes.append(process)
            made.pipes.append(ours)
        made.answers()
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.join()


def both_clean(cache: Cache) -> None:
    """The core's check and ours agree that all is well, now that nobody does anything."""
    assert raw.check(raw.copy_of(cache.name)) == []
    report = cache.check()
    assert report.quiet
    report.raise_if_broken()


def pins_by_role(cache: Cache) -> dict[str, Any]:
    """What the segment says each client pins."""
    copy = raw.Copy(raw.copy_of(cache.name))
    rows = copy.rows
    return {client.role: rows[client.slot] for client in cache.clients()}


def hand_out_everything(cache: Cache) -> None:
    """Every page can be reserved again. A first attempt also ends what was left to others."""
    chance = np.random.default_rng(7)
    keys = chance.integers(0, 1 << 64, (cache.pages, 2), np.uint64)
    with cache.reserve(keys) as everything:
        assert sorted(everything.pages) == list(range(cache.pages)), everything.why


def missing(counts: list[dict[str, int]]) -> list[str]:
    """What has not happened yet: on a busy machine there is less in the same time."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    print(dict(total))
    wanted = ("matched", "published", "abandoned", "evicted", "clears", "tickets", "teams")
    return [what for what in wanted if not total[what]]


def no_tickets(cache: Cache) -> bool:
    """Whoever reserves ends tickets whose time is over."""
    with cache.reserve(np.array([[1, 2]], np.uint64)):
        return cache.stats().tickets == 0


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(120 + 2 * SECONDS)
@pytest.mark.parametrize("pages", CAPACITIES)
def test_everything_at_random(
    pages: int, segment_name: str, tmp_path: Path, wait_until: Any
) -> None:
    path = tmp_path / "board"
    board = Board(path, WORKERS, pages)
    with (
        stress_worker.create(segment_name, pages) as cache,
        crew(segment_name, pages, path, SEED + pages) as workers,
    ):
        rounds, counts = 0, list[dict[str, int]]()
        while rounds < ROUNDS or missing(counts):
            rounds += 1
            counts = workers.order("run", SECONDS / len(CAPACITIES) / ROUNDS)
            pins = pins_by_role(cache)
            for number in range(WORKERS):
                assert (pins[f"worker {number}"] == board.holds[number]).all()
            both_clean(cache)
            workers.order("release")
            wait_until(lambda: no_tickets(cache), "the last ticket's deadline")
            assert cache.check().pins == 0
            both_clean(cache)
        workers.order("leave")
        hand_out_everything(cache)
        assert cache.check().pins == 0
        both_clean(cache)
