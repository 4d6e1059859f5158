"""How long a cache lasts: what is persistent says so when its last client leaves, and goes for room
when nobody used it for longer than its idle limit."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from lightcache import Cache, LayoutMismatch, NoSpace
from lightcache.shm import Segment, layout, memory, names, sweep
from lightcache.shm.listing import read_segment
from lightcache.shm.objects import OpenObject
from lightcache.shm.sweep import leftovers, make_room, most_room

SHM = Path("/dev/shm")
HOUR = 3600 * 1_000_000_000
LIKE: dict[str, Any] = {
    "pages": 4,
    "page_bytes": 4096,
    "page_tokens": 4,
    "fingerprint": "test",
    "secret": bytes(16),
}


class Clock:
    """Time, some of which passed while nobody looked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passed = 0
        for name in ("time_ns", "monotonic_ns"):
            real = getattr(time, name)
            patch.setattr(time, name, lambda real=real: real() + self.passed)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make(name: str, **more: Any) -> None:
    """A persistent cache in which nobody lives."""
    Cache.open(name, **LIKE, idle_limit=24 * 3600, **more).close()


def exists(name: str) -> bool:
    return read_segment(name) is not None


def swept(name: str) -> bool:
    return f"/lightcache.{name}" in sweep(prefix=name)


# ---- the limit


def test_a_cache_goes_when_nobody_used_it_for_longer(segment_name: str, clock: Clock) -> None:
    make(segment_name)
    clock.passed = 23 * HOUR
    assert not leftovers(segment_name)
    assert not swept(segment_name)
    clock.passed = 25 * HOUR
    assert [left.why for left in leftovers(segment_name)] == [
        "unused for 25 h, and its idle limit is 24 h"
    ]
    assert not sweep(prefix=segment_name, idle=False)
    assert swept(segment_name)
    assert not [each for each in SHM.iterdir() if segment_name in each.name], "nor its pool"


def test_none_in_which_a_process_lives(segment_name: str, clock: Clock) -> None:
    with Cache.open(segment_name, **LIKE, idle_limit=1e-9) as cache:
        clock.passed = 1000 * HOUR
        assert not swept(segment_name)
        assert cache.check().clean
    assert Segment.unlink(segment_name)


def test_none_in_which_only_a_reader_lives(segment_name: str, clock: Clock) -> None:
    make(segment_name)
    with Cache.attach(segment_name, readonly=True):
        clock.passed = 1000 * HOUR
        assert not swept(segment_name)
    assert swept(segment_name), "a reader leaves no trace of its use"


@pytest.mark.parametrize("limit", [{}, {"lifetime": "persistent"}])
def test_none_without_a_limit(segment_name: str, clock: Clock, limit: dict[str, Any]) -> None:
    with Cache.open(segment_name, **LIKE, **limit):
        clock.passed = 1000 * HOUR
        assert not swept(segment_name)
    assert Segment.unlink(segment_name) is bool(limit)


def touched(cache: Cache) -> None:
    cache.index.segment.mark_used()


def reserved(cache: Cache) -> None:
    cache.reserve(cache.hash_pages(list(range(8)))).release()


def attached(cache: Cache) -> None:
    Cache.attach(cache.name, secret=bytes(16)).close()


USES = {"said": touched, "lock": reserved, "another client": attached}


@pytest.mark.parametrize("use", USES)
def test_the_last_use_counts_also_of_a_killed_client(
    segment_name: str, clock: Clock, use: str
) -> None:
    """The client's own end leaves no word, as SIGKILL does."""
    make(segment_name)
    where = OpenObject.open(segment_name, writable=False)
    assert where is not None
    cache = Cache.attach(segment_name, secret=bytes(16))
    clock.passed = 100 * HOUR
    if use == "lock":  # the core has a clock of its own
        began = time.monotonic_ns() - clock.passed
        reserved(cache)
        assert where.unused_ns() <= time.monotonic_ns() - began
    else:
        USES[use](cache)
        assert where.unused_ns() < HOUR
    where.close()
    cache.close()
    assert Segment.unlink(segment_name)


KILLED = """
import os, signal, sys
from lightcache import Cache
cache = Cache.attach(sys.argv[1], secret=bytes(16))
cache.index.segment.mark_used()
print("in", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_last_client(segment_name: str, clock: Clock, script: Callable[..., Any]) -> None:
    make(segment_name)
    done = script(KILLED, segment_name, status=None)
    assert done.returncode == -signal.SIGKILL
    assert not swept(segment_name), "it stays, warm"
    clock.passed = 23 * HOUR
    assert not swept(segment_name)
    clock.passed = 25 * HOUR
    assert swept(segment_name)


# ---- room


def test_no_more_go_than_it_takes_the_longest_unused_first(segment_name: str, clock: Clock) -> None:
    every = [f"{segment_name}-{age}" for age in ("b", "c", "a", "d")]
    for name in every:
        make(name)
        clock.passed += HOUR
    with Cache.attach(every[0], secret=bytes(16)):
        clock.passed += 26 * HOUR
        removed = make_room(1, lambda: not exists(every[2]))
        assert [name for name in removed if segment_name in name] == [
            names.object_name(name) for name in every[1:3]
        ]
        assert exists(every[3])
    assert Segment.unlink(every[0])
    assert Segment.unlink(every[3])


def rooms(patch: pytest.MonkeyPatch, in_the_way: str) -> None:
    """There is room for nothing until that cache has gone."""
    real = memory.available

    def available(*arguments: Any, **more: Any) -> memory.FreeMemory:
        if exists(in_the_way):
            return memory.FreeMemory(100, "left")
        return real(*arguments, **more)

    patch.setattr(memory, "available", available)


def test_an_open_that_needs_the_room_removes_it(
    segment_name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = f"{segment_name}-old", f"{segment_name}-new"
    make(old)
    rooms(monkeypatch, old)
    refused(NoSpace, "", Cache.open, new, **LIKE)
    assert exists(old), "it was used today"
    clock.passed = 25 * HOUR
    with Cache.open(new, **LIKE) as cache:
        assert not exists(old)
        assert cache.check().clean


def test_an_open_that_has_room_leaves_it(segment_name: str, clock: Clock) -> None:
    old, new = f"{segment_name}-old", f"{segment_name}-new"
    make(old)
    clock.passed = 1000 * HOUR
    Cache.open(new, **LIKE).close()
    assert exists(old)
    with Cache.open(old, **LIKE):  # and whoever opens it finds it, used now
        pass
    assert not swept(old)
    assert Segment.unlink(old)


def test_what_may_go_is_counted_once(segment_name: str, clock: Clock) -> None:
    """An idle cache, also one that is of the family; and a pool without its segment, also one that
    was of the name that is spared."""
    old, new = f"{segment_name}-old", f"{segment_name}-new"
    before = most_room(new, None, None)
    make(old)
    clock.passed = 1000 * HOUR
    opened = OpenObject.open(old, writable=False)
    assert opened is not None
    with contextlib.closing(opened):
        bytes_of_it = opened.memory()
        assert opened.freed_in(None) == opened.freed_in(names.FOLDER) == bytes_of_it
        assert opened.freed_in(Path("/elsewhere")) == 0
        (pool,) = opened.dependents()
    assert most_room(new, None, None) == before + bytes_of_it
    assert most_room(old, None, None) == before, "it is spared"
    os.unlink(opened.path)
    pool_bytes = (SHM / pool[1:]).stat().st_blocks * 512
    assert pool_bytes > 0
    assert most_room(old, None, None) == most_room(old, None, SHM) == before + pool_bytes
    assert most_room(old, None, Path("/elsewhere")) == 0
    assert sweep(prefix=old) == [pool]


def test_caches_of_others_outlive_these_tests(clock: Clock) -> None:
    """By the clocks above, every cache of this user's is idle."""
    name = f"others-{secrets.token_hex(8)}"
    make(name)
    try:
        clock.passed = 25 * HOUR
        make_room(1, lambda: 0)
        assert exists(name)
    finally:
        Segment.unlink(name)


# ---- arguments


def test_a_limit_alone_makes_a_new_one_persistent(segment_name: str) -> None:
    with Cache.open(segment_name, **LIKE) as cache:
        with Cache.open(segment_name, **LIKE, idle_limit=5) as other:
            assert other.index.segment.lifetime is layout.Lifetime.ATTACHED, "it has one"
        with pytest.raises(LayoutMismatch, match="lifetime"):
            Cache.open(segment_name, **LIKE, lifetime="persistent", idle_limit=5)
        assert cache.check().clean
    with Cache.open(segment_name, **LIKE, idle_limit=0.5) as cache:
        assert cache.index.segment.lifetime is layout.Lifetime.PERSISTENT
        assert cache.index.segment.header().idle_ns == 500_000_000
    assert Segment.unlink(segment_name)


# ---- the last one leaves


def test_the_last_to_leave_says_what_stays(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightcache")
    first = Cache.open(segment_name, **LIKE, idle_limit=90)
    second = Cache.open(segment_name, **LIKE)
    first.close()
    assert not caplog.records
    second.close()
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert line.getMessage().startswith(f"{segment_name} stays in shared memory, ")
    assert "MiB, for the next process (after 90 s without use" in line.getMessage()
    assert f"`lightcache rm {segment_name}`" in line.getMessage()
    assert Segment.unlink(segment_name)


def test_what_was_asked_for_is_said_quietly(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightcache")
    Cache.open(segment_name, **LIKE, lifetime="persistent").close()
    Cache.open(f"{segment_name}-a", **LIKE).close()
    assert [(line.levelname, segment_name in line.getMessage()) for line in caplog.records] == [
        ("INFO", True)
    ]
    assert Segment.unlink(segment_name)


def test_a_process_that_ends_without_closing_says_it(
    segment_name: str, script: Callable[..., Any]
) -> None:
    source = f"cache = Cache.open({segment_name!r}, idle_limit=60, **{LIKE})"
    done = script(f"from lightcache import Cache\n{source}")
    assert done.stderr.count(f"lightcache rm {segment_name}") == 1
    assert exists(segment_name)
    assert os.path.exists(SHM / f"lightcache.{segment_name}")
    assert Segment.unlink(segment_name)
