"""Pages that a scheduler lends to a worker and gets back by number, while either is killed and
others take every page they can get."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import raw
from multi import pausing, stress_worker
from multi.loans_side import AHEAD, lend, open_ring, serve
from multi.plan_side import PAGES, PROMPTS
from multi.test_plans import fill, side

from lightcache import Cache, ClientId, GiveBack, Loans
from lightcache.shm import SharedRing

pytestmark = [pytest.mark.slow, pytest.mark.crash]
TESTS = Path(__file__).parent.parent
ROUNDS = 3
LOANS = 80  # more than AHEAD


@contextmanager
def other(*what: object) -> Iterator[Any]:
    """A process of loans_side.py."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", TESTS / "multi" / "loans_side.py", *map(str, what)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS), "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    """With another process that evicts and writes without pause."""
    with ExitStack() as stack:
        made = stack.enter_context(stress_worker.create(segment_name, PAGES))
        fill(made)
        churn = stack.enter_context(side(segment_name, "churn", 1))
        assert churn.stdout.readline()
        yield made


@pytest.fixture
def ring(segment_name: str) -> Iterator[SharedRing]:
    with open_ring(f"{segment_name}-ring") as opened:
        yield opened
        opened.check()


def pins_of(cache: Cache, slot: int) -> int:
    """Pins in the row of a client. Others may be pinning just now."""
    places, index = cache.index.core.places, cache.index
    row = index.segment.address + places.rows + 2 * places.row_stride * slot
    return int(np.array((ctypes.c_uint16 * index.pages).from_address(row)).sum())


def test_workers_are_killed(cache: Cache, ring: SharedRing, segment_name: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(ROUNDS):
        with other(segment_name, ring.segment.name, "worker") as worker:
            me = ClientId(*map(int, worker.stdout.readline().split()))
            with Loans(cache.index, ring, me) as loans:
                heard = killed_after = int(rng.integers(LOANS))
                for count in range(LOANS):
                    message = lend(cache, loans, int(rng.integers(PROMPTS)))
                    worker.stdin.write(json.dumps(message) + "\n")
                    worker.stdin.flush()
                    if count >= 8 and heard:  # it is killed in the middle of some loan
                        assert worker.stdout.readline() == "sound\n"  # lent, so not refused
                        heard -= 1
                    if count >= killed_after:
                        break
                while not lend(cache, loans, int(rng.integers(PROMPTS)))[2]:
                    pass  # the churn had evicted that prompt
                worker.kill()
                worker.wait()
                assert loans.collect()
                assert (len(loans), loans.pages) == (0, 0)
                assert pins_of(cache, cache.index.client_id.slot) == 0
        cache.reap()
        assert pins_of(cache, me.slot) == 0


def test_takers_are_killed(cache: Cache, ring: SharedRing, segment_name: str) -> None:
    rng = np.random.default_rng(6)
    gives = GiveBack(ring)
    answers: dict[str, int] = {"sound": 0, "refused": 0}
    for seed in range(ROUNDS):
        where = (segment_name, ring.segment.name, "taker", *cache.index.client_id, seed)
        with other(*where) as taker:
            killed_after = int(rng.integers(AHEAD, LOANS))
            for _ in range(killed_after):
                loan = json.loads(taker.stdout.readline())
                if loan:
                    assert serve(cache, gives, loan) == "sound"  # it lives, and lends them
                    answers["sound"] += 1
                taker.stdin.write("\n")
                taker.stdin.flush()
            taker.kill()
            taker.wait()
            cache.reap()
            for line in taker.stdout.read().splitlines():
                try:
                    loan = json.loads(line)
                except ValueError:
                    continue  # the last, cut short
                if loan:
                    answers[serve(cache, gives, loan)] += 1  # KeyError: wrong bytes
        assert pins_of(cache, cache.index.client_id.slot) == 0
        assert all(client.role != "taker" for client in cache.index.clients())
    assert answers["sound"]
    gives.flush()


def test_nothing_is_left_when_all_have_gone(segment_name: str) -> None:
    with stress_worker.create(segment_name, PAGES) as cache, ExitStack() as stack:
        fill(cache)
        name = f"{segment_name}-ring"
        worker = stack.enter_context(other(segment_name, name, "worker"))
        me = worker.stdout.readline().split()
        taker = stack.enter_context(other(segment_name, name, "taker", *me, 1))
        for _ in range(AHEAD):
            worker.stdin.write(taker.stdout.readline())
        worker.stdin.flush()
        assert worker.stdout.readline() == "sound\n"
        for process in (worker, taker):
            process.kill()
            process.wait()
        cache.reap()
        assert cache.check().pins == 0
        cache.check().raise_if_broken()
        assert raw.check(raw.copy_of(segment_name)) == []
        # Both were killed, so the ring is there still; a new pair continues with it.
        worker = stack.enter_context(other(segment_name, name, "worker"))
        slot, epoch = map(int, worker.stdout.readline().split())
        with open_ring(name) as ring, Loans(cache.index, ring, ClientId(slot, epoch)) as loans:
            worker.stdin.write(json.dumps(lend(cache, loans, 0)) + "\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "sound\n"
            while loans.pages:
                loans.collect()
            ring.check()
        assert cache.check().pins == 0
    open_ring(name).close()  # the last that leaves removes it
