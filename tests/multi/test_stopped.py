"""Clients that are stopped by SIGSTOP where it hurts most, and what the others can do meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import raw
from click.testing import CliRunner
from multi import stress_worker
from multi.stopped_side import LENGTH, keys, sound, write
from multi.stopping import Client, Clients, hook_library

from lightcache import Cache, LockTimeout
from lightcache.shm import layout as shm_layout
from lightcache.tools import cli

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


def put(cache: Cache, prompt: int) -> list[int]:
    """Write and publish a prompt that nobody pins then; its pages."""
    with cache.reserve(keys(prompt)) as new:
        write(cache, new.pages, prompt)
        assert new.publish()
        return list(new.pages)


def blamed(holder: Client, cache: Cache) -> str:
    """How an error names a client."""
    slot = next(one.slot for one in cache.clients() if one.pid == holder.pid)
    return rf"client {slot} \({holder.role}, pid {holder.pid}\) has held the lock for [0-9.]+ s"


def dumped(cache: Cache) -> Any:
    """What `lightcache dump` says of the holder of the lock."""
    result = CliRunner().invoke(cli.group, ["dump", cache.name, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["lock"]["holder"]


def lookups_go_on(cache: Cache) -> None:
    """Of what is there, and not of what the stopped one is about to make."""
    assert cache.peek(keys(OLD)) == LENGTH
    assert cache.peek(keys(NEW)) == 0
    with cache.match(keys(OLD)) as lease:
        assert sound(cache, lease.pages, OLD)
        assert len(lease) == LENGTH


# ---- in the lock


@pytest.mark.parametrize("point", [LOCKED, KEY_WRITTEN, LINKED, COMMIT, UNLOCK])
def test_a_stopped_holder_blocks_allocations_only(
    point: int, cache: Cache, client: Clients
) -> None:
    mine = cache.reserve(keys(OTHER))  # published below, while the lock is held
    write(cache, mine.pages, OTHER)
    holder = client("holder")
    holder.stop_at(point, 1, f"reserve {NEW}")
    with pytest.raises(LockTimeout, match=blamed(holder, cache) + " in reserve;"):
        cache.reserve(keys(4), timeout=0.05)
    lookups_go_on(cache)
    assert mine.publish()
    assert cache.peek(keys(OTHER)) == LENGTH
    who = dumped(cache)
    assert (who["pid"], who["role"], who["process"]) == (holder.pid, "holder", "stopped")
    assert who["operation"] == "reserve"
    assert who["held_s"] > 0
    holder.go_on()
    made = holder.answer()
    assert made["ready"]
    assert sound(cache, made["pages"], NEW)
    assert cache.peek(keys(NEW)) == LENGTH
    mine.release()
    client.end()
    all_is_well(cache)


@pytest.mark.parametrize("point", [LOCKED, KEY_WRITTEN, LINKED, COMMIT, UNLOCK])
def test_a_holder_killed_while_stopped(point: int, cache: Cache, client: Clients) -> None:
    holder = client("holder")
    holder.stop_at(point, 1, f"reserve {NEW}")
    lookups_go_on(cache)
    holder.kill()
    with cache.reserve(keys(OTHER)) as made:
        assert len(made.pages) == LENGTH
    assert cache.peek(keys(OLD)) == LENGTH
    assert cache.peek(keys(NEW)) == 0
    all_is_well(cache)


def waits(cache: Cache) -> bool:
    """Whether somebody sleeps on the lock."""
    at = shm_layout.LOCK_OFFSET
    word = raw.copy_of(cache.name)[at : at + 4].view(np.uint32)[0]
    return bool(word & shm_layout.LOCK_WAITERS)


def test_waiters_of_a_stopped_holder_give_up_and_are_killed(
    cache: Cache, client: Clients, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    holder, patient, impatient = client("holder"), client("patient"), client("impatient")
    holder.stop_at(COMMIT, 1, f"reserve {NEW}")
    patient.send(f"reserve {OTHER}")
    wait_until(lambda: waits(cache), "the patient one sleeps on the lock")
    said = impatient.ask(f"give_up {OTHER} 50")
    assert re.match("reserve: " + blamed(holder, cache) + " in reserve;", said)
    patient.kill()
    impatient.send(f"reserve {OTHER}")
    impatient.kill()
    lookups_go_on(cache)
    holder.go_on()
    made = holder.answer()
    assert made["ready"]
    assert sound(cache, made["pages"], NEW)
    put(cache, OTHER)  # whoever was to be woken is dead: nobody else waits for that
    client.end()
    all_is_well(cache)


# ---- without the lock


@pytest.mark.parametrize("point", [COUNTED, FENCED])
def test_pins_of_a_match_that_is_stopped_hold(point: int, cache: Cache, client: Clients) -> None:
    """The pins are counted and not yet confirmed: eviction has to respect them."""
    matcher = client("matcher")
    matcher.stop_at(point, 1, f"match {OLD}")
    assert cache.evict(PAGES) == 0
    fresh = np.random.default_rng(7).integers(0, 1 << 64, (PAGES, 2), np.uint64)
    with cache.reserve(fresh) as others:
        assert len(others.pages) == PAGES - LENGTH
        matcher.go_on()
        assert matcher.answer() == {"pages": [0, 1, 2, 3], "sound": True}
        assert not {0, 1, 2, 3} & set(others.pages.tolist())
    client.end()
    all_is_well(cache)


def test_a_match_stopped_before_it_pins_gets_no_page_of_others(
    cache: Cache, client: Clients
) -> None:
    """Everything that it saw is evicted and used again before it goes on."""
    matcher = client("matcher")
    matcher.stop_at(WALKING, 1, f"match {OLD}")
    assert cache.evict(PAGES) == LENGTH
    for prompt in range(10, 10 + PAGES // LENGTH):
        put(cache, prompt)
    matcher.go_on()
    assert matcher.answer()["pages"] == []
    client.end()
    all_is_well(cache)


@pytest.mark.parametrize("point", [COUNTED, FENCED])
def test_a_match_killed_while_stopped(point: int, cache: Cache, client: Clients) -> None:
    """Its counts go with it."""
    matcher = client("matcher")
    matcher.stop_at(point, 1, f"match {OLD}")
    matcher.kill()
    assert cache.evict(PAGES) == LENGTH  # a call that needs pages takes back what the dead held
    assert cache.reap() == 0
    all_is_well(cache)


# ---- while it takes back from the dead


@pytest.mark.parametrize("how", ["reap", "reap_as_guest"])
def test_a_stopped_reaper_does_not_make_its_dead_look_alive(
    how: str, cache: Cache, client: Clients
) -> None:
    """The victim has gone from /proc, as it has from the first where PID namespaces differ: only
    its byte says that it is dead, and a reaper who stands in the middle must not hold that; or,
    acting as the dead one, it must have raised the slot's epoch before."""
    victim, reaper = client("victim"), client("reaper")
    victim.stop_at(COMMIT, 1, f"reserve {NEW}")
    victim.kill()
    reaper.stop_at(MEND, 1, how)
    with cache.reserve(keys(OTHER), timeout=5.0) as made:
        assert len(made.pages) == LENGTH
    assert cache.reap() == 0, "two reapers at one slot"
    reaper.go_on()
    assert reaper.answer() == {"reap": 1, "reap_as_guest": None}[how]
    client.end()
    all_is_well(cache)
