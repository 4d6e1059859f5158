"""Processes match groups in three indexes while others publish and evict there, and are killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from multi import groups_side
from multi.groups_side import COUNTS, PAGES, RULES, WORKERS

from lightcache import PageIndex

KILLS = int(os.environ.get("LIGHTCACHE_GROUP_KILLS", "12"))
TURNS = 40  # of a worker before it is killed
DEADLINE = 60.0

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180)]


class Workers:
    """Four of them, each started again when it was killed."""

    def __init__(self, name: str, folder: Path) -> None:
        (folder / "board").write_bytes(bytes(WORKERS * len(COUNTS) * 8))
        for group in RULES:
            (folder / group).write_bytes(bytes(PAGES * 16))
        self.board = groups_side.board(folder)
        self.arguments = [name, str(folder)]
        self.running = [self.start(number) for number in range(WORKERS)]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-W", "error", groups_side.__file__]
        return subprocess.Popen(
            [*program, *self.arguments, str(number)],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    def kill(self, number: int) -> None:
        """In the middle of whatever it does, some turns after its start."""
        begun, end = int(self.board[number, 0]), time.monotonic() + DEADLINE
        worker = self.running[number]
        while self.board[number, 0] < begun + TURNS:
            assert worker.poll() is None, f"worker {number} failed, see above"
            assert time.monotonic() < end, f"worker {number} does not go on"
            time.sleep(0.001)
        worker.kill()
        worker.wait()

    def end(self) -> None:
        for worker in self.running:
            worker.kill()
            worker.wait()


@pytest.mark.slow
def test_kills(segment_name: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        indexes = [
            stack.enter_context(
                PageIndex.create(
                    f"{segment_name}-{group}", pages=PAGES, independent=rule.name != "prefix"
                )
            )
            for group, rule in RULES.items()
        ]
        workers = Workers(segment_name, tmp_path)
        stack.callback(workers.end)
        for turn in range(KILLS):
            workers.kill(turn % WORKERS)
            workers.running[turn % WORKERS] = workers.start(turn % WORKERS)
            indexes[turn % len(indexes)].reap()
        workers.end()
        for index in indexes:
            index.reap()
            report = index.check()
            report.raise_if_broken()
            assert report.pins == 0
            everything = np.random.default_rng(7).integers(0, 1 << 64, (PAGES, 2), np.uint64)
            with index.reserve(everything) as made:
                assert sorted(made.pages) == list(range(PAGES)), made.why
        assert (workers.board.sum(axis=0) > KILLS).all(), workers.board.tolist()
