"""Run as a program: a storm. Processes use a cache as hard as they can, and one of them is killed
(with --stops: stopped or killed) every 50 ms at random, in two PID namespaces; nothing is lost.

    cd tests && python multi/storm.py [--pages 64] [--seconds 15] [--stops] [--help]

Every few kills all are frozen wherever they are, and a copy of the segment, with the lock's log
undone, must pass both checkers. At checkpoints, and at the end, half of the processes leave and the
others are killed: then nothing may be pinned, every page and every slot can be had, both checkers
are content. Every fourth process says that it has a device, so its death ends in quarantine.
Contents of pages are verified by all who pin them (stress_worker.py).

Prints what it counted as JSON; a failure ends it with a traceback and status 1. Needs numpy, and
for deaths that certainly fall into critical sections a C compiler and the libraries with pause
points (`make pause`; LIGHTCACHE_TEST_BUILD names their folder).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from checker import raw
from multi import pausing, stress_worker
from multi.storm_nest import Plan
from multi.stress_worker import TALLY, Board

from lightcache import Cache, PageIndex, snapshot
from lightcache.shm import layout as shm_layout

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
OTHERS = shm_layout.SLOTS - 2  # clients that find a slot beside the parent
SLICE = 1.0  # seconds between two frozen checks
DEADLINE = 120.0  # a watchdog, nothing is measured

Counts = dict[str, Any]


def forbidden() -> str:
    """Why no PID namespace can be made here; empty if it can."""
    try:
        done = subprocess.run((*APART, "true"), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unshare is not installed"
    return "" if done.returncode == 0 else done.stderr.strip()


class Nest:
    """A process of storm_nest.py."""

    def __init__(self, plan: Plan, before: tuple[str, ...]) -> None:
        """Start it."""
        program = str(Path(__file__).with_name("storm_nest.py"))
        tests = Path(__file__).parent.parent
        self.process = subprocess.Popen(
            [*before, sys.executable, "-W", "error", program, json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": pausing.python_path(tests),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )

    def tell(self, order: str) -> None:
        """An order; `hear` its answer."""
        assert self.process.stdin
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def hear(self) -> Counts:
        """What it counted so far, when it has done what it was told."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"a nest ended with status {self.process.wait()}; see above")
        counted: Counts = json.loads(line)
        return counted


class Storm:
    """A cache, and nests of processes that use it."""

    def __init__(self, cache: Cache, plans: list[tuple[Plan, tuple[str, ...]]]) -> None:
        """The nests are started, their workers are not."""
        self.cache = cache
        self.board = Board(Path(plans[0][0].board), plans[0][0].workers, cache.pages)
        self.stops = plans[0][0].stops
        self.nests = [Nest(*plan) for plan in plans]
        self.frozen_checks = self.quiet_checks = 0

    def all(self, order: str) -> Counts:
        """Tell all nests, hear all: the sums of what they counted."""
        for nest in self.nests:
            nest.tell(order)
        total: Counter[str] = Counter()
        for nest in self.nests:
            total.update(nest.hear())
        return dict(total)

    def rage(self, seconds: float, inside: int) -> None:
        """For so long, and until so many have fallen while they held the lock."""
        left, what = seconds, "stops inside" if self.stops else "kills inside"
        while left > 0 or self.all("counts")[what] < inside:
            self.all(f"run {min(SLICE, left) if left > 0 else SLICE}")
            left -= SLICE
            self.all("freeze")
            copy = raw.copy_of(self.cache.name)
            self.all("thaw")
            self.check_copy(copy)

    def check_copy(self, copy: Any) -> None:
        """The next holder of the lock would find all sound."""
        found = raw.check(copy.copy(), quiet=False)
        core = snapshot.check_copy(copy, self.cache.pages, quiet=False)
        assert not found, found
        assert core.clean, core.message
        self.frozen_checks += 1

    def calm_down(self) -> None:
        """Everybody leaves or dies; what they held is taken back, all of it."""
        self.all("end")
        wait_until(self.nobody_is_left, "the end of the last quarantine")
        take_back(self.cache)
        self.quiet_checks += 1

    def nobody_is_left(self) -> bool:
        """Take back from the dead, as far as they are not in quarantine."""
        self.cache.reap()
        return [client.role for client in self.cache.clients()] == ["parent"]

    def counted(self) -> Counts:
        """Everything that happened; to be asked when it is calm."""
        copy = raw.Copy(raw.copy_of(self.cache.name))
        happened = self.all("counts")
        # A slot's epoch is raised when it is taken and when it is given or taken back.
        lives = int(copy.clients["epoch"].sum()) // 2
        return {
            "pages": self.cache.pages,
            **happened,
            "reaps": lives - happened["left"] - OTHERS * self.quiet_checks,
            "recoveries": int(copy.lock["recoveries"][0]),
            "words undone": int(copy.lock["undone_words"][0]),
            **dict(zip(TALLY, self.board.tally.sum(axis=0).tolist(), strict=True)),
            "frozen checks": self.frozen_checks,
            "quiet checks": self.quiet_checks,
        }

    def end(self) -> None:
        """No process outlives it."""
        for nest in self.nests:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                nest.process.communicate(timeout=10)
            nest.process.kill()
            nest.process.wait()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Ask again and again."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE} s for: {what}"
        time.sleep(0.001)


def take_back(cache: Cache) -> None:
    """Nobody else lives: nothing is held, nothing is damaged, every page and slot can be had."""

    def no_tickets() -> bool:
        with cache.reserve(np.array([[1, 2]], np.uint64)):
            return cache.stats().tickets == 0

    wait_until(no_tickets, "the last ticket's deadline")
    both_clean(cache)
    assert cache.check().pins == 0
    keys = np.random.default_rng(7).integers(0, 1 << 64, (cache.pages, 2), np.uint64)
    with cache.reserve(keys) as everything:
        assert sorted(everything.pages) == list(range(cache.pages)), everything.why
    stats = cache.stats()
    assert (stats.ready, stats.writing, stats.reservations) == (0, 0, 0), stats
    with contextlib.ExitStack() as others:
        for _ in range(OTHERS):
            others.enter_context(PageIndex.attach(cache.name))
        slots = [client.slot for client in cache.clients() if client.alive]
        assert sorted(slots) == list(range(1, shm_layout.SLOTS))
    both_clean(cache)


def both_clean(cache: Cache) -> None:
    """The core's check and ours agree that all is well, now that nobody does anything."""
    report = cache.check()
    report.raise_if_broken()
    assert report.quiet
    found = raw.check(raw.copy_of(cache.name))
    assert not found, found


def plans(
    options: argparse.Namespace, name: str, folder: Path
) -> list[tuple[Plan, tuple[str, ...]]]:
    """Two nests, the second in a PID namespace of its own where that can be."""
    hook = "" if pausing.missing() else str(pausing.compile_hook(folder))
    half = options.processes // 2
    return [
        (
            Plan(
                name=name,
                board=str(folder / "board"),
                workers=2 * half,
                pages=options.pages,
                first=first,
                count=half,
                seed=options.seed + options.pages + first,
                every=2 * options.every,
                stops=options.stops,
                hook=hook,
            ),
            before,
        )
        for first, before in ((0, ()), (half, () if forbidden() else APART))
    ]


@contextlib.contextmanager
def storm(options: argparse.Namespace) -> Iterator[Storm]:
    """One, about to begin."""
    name = options.name or f"storm-{secrets.token_hex(4)}"
    with (
        tempfile.TemporaryDirectory() as folder,
        stress_worker.create(name, options.pages) as cache,
    ):
        made = Storm(cache, plans(options, name, Path(folder)))
        try:
            yield made
        finally:
            made.end()


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--pages", type=int, default=64, help="of the cache (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15, help="at least (%(default)s)")
    parser.add_argument("--processes", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--every", type=float, default=0.05, help="seconds (%(default)s)")
    parser.add_argument("--stops", action="store_true", help="SIGSTOP, and SIGKILL now and then")
    parser.add_argument(
        "--inside", type=int, default=0, help="deaths (with --stops: stops) in the lock, at least"
    )
    parser.add_argument("--checkpoints", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--until",
        nargs="*",
        default=(),
        help="figures: further checkpoints until none of them is 0",
    )
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--name", default="", help="of the segment; made up if not given")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """See above."""
    options = parse(arguments)
    if pausing.missing():
        options.inside = 0  # only by chance
    with storm(options) as raging:
        for number in itertools.count(1):
            raging.rage(
                options.seconds / options.checkpoints,
                options.inside * min(number, options.checkpoints) // options.checkpoints,
            )
            raging.calm_down()
            counted = raging.counted()
            if number >= options.checkpoints and all(counted[name] for name in options.until):
                break
    counted["one PID namespace because"] = forbidden()
    counted["no pause points because"] = pausing.missing()
    print(json.dumps(counted), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
