"""Clients that are stopped by SIGSTOP where it hurts most, and what the others can do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checker import raw
from multi import stress_worker
from multi.stopped_side import LENGTH, keys, write
from multi.stopping import Clients, hook_library

from lightcache import Cache

pytestmark = [pytest.mark.crash, pytest.mark.slow]

PAGES = 16
OLD, NEW, OTHER = 1, 2, 3  # prompts: there before, of the one that is stopped, of the others
LOCKED, KEY_WRITTEN, LINKED, COMMIT, UNLOCK, MEND = 13, 7, 8, 14, 15, 18  # LC_AT_* of lc_base.h
COUNTED, FENCED, WALKING = 1, 2, 12


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of gates."""
    return hook_library(tmp_path_factory.mktemp("hook"))


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    """One prompt is in it."""
    with stress_worker.create(segment_name, PAGES) as made:
        with made.reserve(keys(OLD)) as new:
            write(made, new.pages, OLD)
            new.publish()
        yield made


@pytest.fixture
def client(cache: Cache, hook: Path, tmp_path: Path) -> Iterator[Clients]:
    """`client(role)` starts one more."""
    made = Clients(cache.name, hook, tmp_path)
    try:
        yield made
    finally:
        made.kill()


def all_is_well(cache: Cache) -> None:
    """Everybody has left or died: nothing is held, nothing is damaged, every page can be had."""
    cache.reap()
    assert [one.role for one in cache.clients()] == ["parent"]
    assert cache.check().pins == 0
    fresh = np.random.default_rng(7).integers(0, 1 << 64, (PAGES, 2), np.uint64)
    with cache.reserve(fresh) as everything:
        assert sorted(everything.pages) == list(range(PAGES)), everything.why
    cache.check().raise_if_broken()
    assert raw.check(raw.copy_of(cache.name)) == []


def test_a_stopped_reaper_does_not_make_its_dead_look_alive(cache: Cache, client: Clients) -> None:
    """The victim has gone from /proc, as it has from the first where PID namespaces differ: only
    its byte says that it is dead, and a reaper who stands in the middle must not hold that."""
    victim, reaper = client("victim"), client("reaper")
    victim.stop_at(COMMIT, 1, f"reserve {NEW}")
    victim.kill()
    reaper.stop_at(MEND, 1, "reap")
    with cache.reserve(keys(OTHER), timeout=5.0) as made:
        assert len(made.pages) == LENGTH
    assert cache.reap() == 0, "two reapers at one slot"
    reaper.go_on()
    assert reaper.answer() == 1
    client.end()
    all_is_well(cache)
