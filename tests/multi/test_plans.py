"""A scheduler that plans a long queue in every step, while others take every page they can get."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import raw
from multi import pausing, stress_worker
from multi.plan_side import LENGTH, PAGES, PROMPTS, keys, sound

from lightcache import Cache, LeaseLost

TESTS = Path(__file__).parent.parent
REQUESTS = 1_000
STEPS = 40
TAKEN = 25  # requests that run in each step; as many new ones come
RUNNING = 4  # steps


@contextmanager
def side(name: str, *what: object) -> Iterator[Any]:
    """A process of plan_side.py."""
    path = pausing.python_path(TESTS)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", TESTS / "multi" / "plan_side.py", name, *map(str, what)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with stress_worker.create(segment_name, PAGES) as made:
        yield made


def fill(cache: Cache) -> None:
    for prompt in range(PROMPTS // 4):
        wanted = keys(prompt)
        with cache.reserve(wanted) as new:
            serials = np.full((len(new.new), stress_worker.SLICES), prompt, np.uint64)
            stress_worker.words_of(cache)[new.pages] = stress_worker.stamps(
                wanted[new.new], serials
            )
            new.publish()


class Queue:
    """Requests that wait, each for one of the prompts."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.rng = np.random.default_rng(1)
        self.prompts = [keys(prompt) for prompt in range(PROMPTS)]
        self.waiting: dict[int, int] = {}
        self.counted: dict[int, int] = {}
        self.come = 0

    def step(self) -> None:
        """New requests, then a plan of all."""
        while len(self.waiting) < REQUESTS:
            self.waiting[self.come] = int(self.rng.integers(PROMPTS))
            self.come += 1
        asked = np.concatenate([self.prompts[prompt] for prompt in self.waiting.values()])
        offsets = np.arange(0, len(asked) + 1, LENGTH)
        found = self.cache.plan_many(list(self.waiting), asked, offsets).tolist()
        now = dict(zip(self.waiting, found, strict=True))
        for request, pages in self.counted.items():
            assert now.get(request, pages) >= pages, "a plan has shrunk"
        self.counted = now

    def run_some(self) -> list[tuple[Any, int]]:
        """Take the oldest, and cancel as many of the youngest: (lease, prompt)."""
        running = []
        for request in list(self.waiting)[:TAKEN]:
            prompt = self.waiting.pop(request)
            lease = self.cache.take(request)
            assert len(lease) >= self.counted.pop(request), "less than was planned"
            self.look(lease, prompt)
            running.append((lease, prompt))
        for request in list(self.waiting)[-TAKEN * 20 :]:
            assert self.cache.cancel(request)
            del self.waiting[request], self.counted[request]
        return running

    def look(self, lease: Any, prompt: int) -> None:
        """Whether it holds what was asked for."""
        assert sound(self.cache, lease.pages, self.prompts[prompt][: len(lease)])


@pytest.mark.stress
@pytest.mark.slow
def test_no_less_is_taken_than_was_planned(cache: Cache, segment_name: str) -> None:
    fill(cache)
    queue = Queue(cache)
    running: list[list[tuple[Any, int]]] = []
    most = 0
    with side(segment_name, "churn", 1) as one, side(segment_name, "churn", 2) as two:
        assert one.stdout.readline()
        assert two.stdout.readline()
        for _ in range(STEPS):
            queue.step()
            running.append(queue.run_some())
            most = max(most, sum(queue.counted.values()))
            if len(running) > RUNNING:
                for lease, prompt in running.pop(0):
                    queue.look(lease, prompt)
                    lease.release()
            freed, written = map(int, one.stdout.readline().split())
            assert two.stdout.readline()
        assert freed, "nothing was evicted: not much of a test"
        assert written
        assert most, "nothing was planned"
    for lease, _ in itertools.chain.from_iterable(running):
        lease.release()
    for request in queue.waiting:
        assert cache.cancel(request)
    cache.reap()
    assert cache.check().pins == 0
    cache.check().raise_if_broken()
    assert raw.check(raw.copy_of(segment_name)) == []


@pytest.mark.crash
def test_a_killed_planner_leaves_nothing(cache: Cache, segment_name: str) -> None:
    fill(cache)
    with side(segment_name, "plan") as planner:
        planned = int(planner.stdout.readline())
        assert planned
        assert cache.check().pins == planned
        with pytest.raises(LeaseLost):
            cache.take(0)  # of that process alone
        planner.kill()
        planner.wait()
        assert cache.reap() == 1
    assert cache.check().pins == 0
    assert cache.evict(PAGES) > 0
