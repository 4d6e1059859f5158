"""Engines that are killed and started again and again never run out of slots.

LIGHTCACHE_RESTARTS: how often each of eight is (40; a soak: 100); a third of that in namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from multi.restart_side import PAGE_BYTES, PAGES

from lightcache import Cache, PageIndex
from lightcache.shm.layout import SLOTS

TESTS = Path(__file__).parents[1]
OTHERS = SLOTS - 1 - 1 - 2 * 8 - 4
ROUNDS = int(os.environ.get("LIGHTCACHE_RESTARTS", "40"))
LIMIT = 300.0 * max(1, ROUNDS // 40)  # seconds; a watchdog, nothing is measured
Wait = Callable[[Callable[[], bool], str], None]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(("where", "rounds"), [("here", ROUNDS), ("apart", ROUNDS // 3)])
def test_eight_engines_are_restarted(
    segment_name: str, wait_until: Wait, where: str, rounds: int
) -> None:
    """Apart: in PID namespaces of their own, where each quarantine takes its full time. Others have
    so many slots that two restarts use up the rest."""
    form = {"pages": PAGES, "page_bytes": PAGE_BYTES, "fingerprint": "x"}
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(Cache.create(segment_name, **form))
        for _ in range(OTHERS):
            stack.enter_context(PageIndex.attach(segment_name))
        done = subprocess.run(
            [sys.executable, "-m", "multi.restart_side", segment_name, "8", str(rounds), where],
            cwd=TESTS,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "")
        wait_until(lambda: cache.reap() == 0, "the end of the last quarantine")
        assert cache.check().clean
        assert len(cache.clients()) == 1 + OTHERS
