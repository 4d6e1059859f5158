"""A process that is killed while a storage writes into pages of the pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from multi import pausing
from multi.storing_side import SEED
from support.storing import fill, make_cache, nothing_is_held, sound, stored

from lightcache import Cache
from lightcache.storage import StorageTier
from lightcache.storage.testing.conformance import make_keys

pytestmark = [pytest.mark.crash]

TESTS = Path(__file__).parent.parent
PAGES, GROUP = 12, 4
KEYS = make_keys(PAGES, SEED)


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    """With nothing in it."""
    with make_cache(segment_name, pages=16) as made:
        yield made
        nothing_is_held(made)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 1, GROUP])
@pytest.mark.parametrize("waiting", [True, False])
def test_killed_in_the_middle_of_a_read(cache: Cache, bad: int, waiting: bool) -> None:
    program = TESTS / "multi" / "storing_side.py"
    arguments = [cache.name, str(PAGES), str(GROUP), str(bad)]
    child = subprocess.Popen(
        [sys.executable, "-W", "error", str(program), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS)},
    )
    try:
        assert child.stdout
        assert child.stdout.readline().strip() == "hanging"
        assert sound(cache, KEYS) == GROUP
        assert cache.stats().writing == GROUP
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        if waiting:  # who waits for its keys takes back what it held
            assert cache.wait(KEYS, timeout=60.0) == GROUP
        else:
            assert cache.reap() == 1
    finally:
        child.kill()
        child.wait()
        assert child.stdout
        child.stdout.close()
    assert cache.check().clean
    assert cache.check().pins == 0
    assert sound(cache, KEYS) == GROUP  # what was published is good, of the rest nothing is left
    fill(cache, make_keys(12, SEED + 1))  # its doomed pages are collected: there is room for these
    assert sound(cache, make_keys(12, SEED + 1)) == 12
    with StorageTier(cache, stored(cache, KEYS), group=GROUP) as tier:
        assert tier.prefetch(KEYS).wait(60.0).prefix == PAGES
    assert sound(cache, KEYS) == PAGES
