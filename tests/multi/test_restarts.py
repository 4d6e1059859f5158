"""Engines that are killed and started again and again never run out of slots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from multi.restart_side import PAGE_BYTES, PAGES

from lightcache import Cache

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
Wait = Callable[[Callable[[], bool], str], None]


@pytest.mark.parametrize(("where", "rounds"), [("here", 40), ("apart", 12)])
def test_eight_engines_are_restarted(
    segment_name: str, wait_until: Wait, where: str, rounds: int
) -> None:
    """Apart: in PID namespaces of their own, where each quarantine takes its full time. The figures
    are more than there are slots, many times."""
    with Cache.create(segment_name, pages=PAGES, page_bytes=PAGE_BYTES, fingerprint="x") as cache:
        done = subprocess.run(
            [sys.executable, "-m", "multi.restart_side", segment_name, "8", str(rounds), where],
            cwd=TESTS,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=110,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "")
        wait_until(lambda: cache.reap() == 0, "the end of the last quarantine")
        assert cache.check().clean
        assert len(cache.clients()) == 1
