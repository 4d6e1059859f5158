"""Reads that take longer than computing: measured, declined, and tried again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.refusals import refused
from support.storing import KEYS, PAGE_TOKENS, Recorder, make_cache, sound, store

from lightcache import Cache, ConfigError
from lightcache.storage import StorageSpec, StorageTier, TaskState
from lightcache.storage.costs import ReadCosts

SPEED = 16 * PAGE_TOKENS  # tokens a second: a page takes a sixteenth of one


class Measured(Recorder):
    """Takes as long as it says, by a clock of its own."""

    def __init__(self, spec: StorageSpec, *, call: float, page: float, lookup: float = 0.0) -> None:
        super().__init__(spec)
        self.now, self.call, self.page, self.lookup = 0.0, call, page, lookup

    def contains(self, keys: Any, *, timeout: float) -> int:
        self.now += self.lookup
        return super().contains(keys, timeout=timeout)

    def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
        self.now += self.call + len(keys) * self.page
        return super().read(keys, buffers, timeout=timeout)


def measured(cache: Cache, **how: float) -> Measured:
    """One that has KEYS."""
    made = Measured(StorageSpec.of(cache), **{"call": 0.0, "page": 0.0, **how})
    store(made, KEYS)
    made.calls.clear()
    return made


def tier_of(cache: Cache, storage: Measured, **how: Any) -> StorageTier:
    given = {"prefill_tokens_per_s": SPEED, "timeout": 1e6, "group": 4, "retry": 30.0, **how}
    return StorageTier(cache, storage, clock=lambda: storage.now, **given)


def reads(storage: Recorder) -> list[int]:
    """Pages of each call."""
    return [n for what, n in storage.calls if what == "read"]


# ---------------------------------------------------------------- what is measured


def costs(**how: Any) -> ReadCosts:
    given = {"page_tokens": 16, "group": 4, "retry": 30.0, "clock": lambda: 0.0, **how}
    return ReadCosts(SPEED, **given)


def test_overhead_and_rate_are_told_apart() -> None:
    made = costs()
    assert made.figures() is None
    assert made.decide(1, [], 1).declined == ""
    for pages in (1, 4, 2, 4):
        made.note_read(pages, 0.5 + 0.25 * pages)
    assert made.figures() == pytest.approx((0.5, 0.25))


def test_calls_of_one_size_count_by_the_page() -> None:
    made = costs()
    for _ in range(5):
        made.note_read(4, 2.0)
    assert made.figures() == pytest.approx((0.0, 0.5))


def test_a_line_that_would_be_below_nothing() -> None:
    made = costs()
    made.note_read(1, 0.0)
    made.note_read(4, 8.0)
    overhead, page = made.figures() or (-1.0, -1.0)
    assert overhead == 0.0
    assert page == pytest.approx(8.0 / 4.9)  # by the page, the newer call counting for more
    falling = costs()
    falling.note_read(1, 8.0)
    falling.note_read(4, 1.0)
    assert falling.figures() == pytest.approx((7.2 / 1.9 + 1.0 / 1.9, 0.0))


def test_older_reads_count_less() -> None:
    made = costs()
    made.note_read(1, 100.0)
    for _ in range(50):
        made.note_read(1, 1.0)
    overhead, page = made.figures() or (0.0, 0.0)
    assert 1.0 < overhead + page < 2.0


def test_a_read_that_brought_nothing_teaches_nothing() -> None:
    made = costs()
    made.note_read(0, 100.0)
    assert made.figures() is None


def test_the_wait_behind_others_counts() -> None:
    made = costs()
    made.note_read(1, 0.0625)  # as long as computing it
    assert made.decide(4, [], 2).declined == ""
    made.note_lookup(10, 10, 0.0)
    assert made.decide(4, [9], 2).declined == ""  # a thread is free
    told = made.decide(4, [8, 8], 2).declined
    assert "reading 4 pages would take 0.75 s, 0.5 s of it behind others" in told
    assert "computing them 0.25 s" in told
    made.note_lookup(10**9, 0, 0.0)  # what is in front of us finds nothing, as a rule
    assert "0.0625 s of it" in made.decide(4, [8, 8], 2).declined


def test_lookups_count() -> None:
    made = costs()
    made.note_read(1, 0.03)
    made.note_lookup(4, 4, 0.1)
    assert made.decide(3, [], 1).declined != ""
    assert made.decide(4, [], 1).declined == ""
    assert made.decide_found(3).declined == ""  # it is over then


def test_no_pages_are_never_declined() -> None:
    made = costs()
    made.note_read(1, 100.0)
    made.note_lookup(1, 1, 1.0)
    assert made.decide(0, [], 1).declined == made.decide_found(0).declined == ""


# ---------------------------------------------------------------- in a tier


def test_a_storage_that_is_slower_than_computing(cache: Cache) -> None:
    storage = measured(cache, page=1.0)
    with tier_of(cache, storage) as tier:
        assert tier.prefetch(KEYS[:4].copy()).wait(60.0).loaded == 4  # nothing was measured yet
        task = tier.prefetch(KEYS, 4)
        assert task.ended
        assert task.state is TaskState.FINISHED
        result = task.result
        assert (result.declined, result.absent, result.failed, result.prefix) == (16, 0, 0, 0)
        assert result.reasons == ("declined: reading 16 pages would take 16 s, computing them 1 s",)
        found = tier.stats()
        assert (found.declined, found.loaded, found.tasks_finished) == (16, 4, 1)
        assert (found.read_call_seconds, found.read_page_seconds) == (0.0, 1.0)
        assert task.publish(0) is task
        refused(ConfigError, "", task.publish, 1)
    assert reads(storage) == [4]


def test_a_storage_that_is_faster_than_computing(cache: Cache) -> None:
    storage = measured(cache, page=0.01)
    with tier_of(cache, storage) as tier:
        for start, end in ((0, 4), (4, 8), (8, 20)):
            assert tier.prefetch(KEYS[:end].copy(), start).wait(60.0).declined == 0
        assert tier.stats().declined == 0
    assert sound(cache, KEYS) == 20


def test_few_pages_of_a_storage_far_away(cache: Cache) -> None:
    """A call takes a quarter of a second beside its pages: four pages are worth it, one is not."""
    storage = measured(cache, call=0.2, page=0.01)
    with tier_of(cache, storage) as tier:
        assert tier.prefetch(KEYS[:5].copy()).wait(60.0).loaded == 5  # of 4 and of 1
        assert tier.prefetch(KEYS[:6].copy(), 5).wait(60.0).declined == 1
        assert tier.prefetch(KEYS[:9].copy(), 5).wait(60.0).loaded == 4
        # Of more that were asked for only one is there: known behind the lookup.
        storage.delete(KEYS[10:], timeout=60.0)
        task = tier.prefetch(KEYS[:17].copy(), 9)
        result = task.wait(60.0)
        assert (result.declined, result.absent, result.prefix) == (1, 7, 0)
        assert "computing them 0.0625 s" in result.reasons[0]
        assert tier.stats().declined == 2
    assert reads(storage) == [4, 1, 4]


def test_a_declined_storage_is_tried_now_and_then(cache: Cache) -> None:
    storage = measured(cache, page=1.0)
    with tier_of(cache, storage) as tier:
        tier.prefetch(KEYS[:1].copy()).wait(60.0)
        storage.now = 30.0
        assert tier.prefetch(KEYS[:2].copy(), 1).wait(60.0).declined == 1
        storage.now = 31.0  # 30 s behind the last that was measured
        assert tier.prefetch(KEYS[:3].copy(), 1).wait(60.0).loaded == 2  # it is as slow as before
        assert tier.prefetch(KEYS[:4].copy(), 3).wait(60.0).declined == 1
        storage.page = 0.001
        storage.now += 29.0
        assert tier.prefetch(KEYS[:4].copy(), 3).wait(60.0).declined == 1
        storage.now += 1.0
        assert tier.prefetch(KEYS[:4].copy(), 3).wait(60.0).loaded == 1  # it was, and is not
        assert tier.prefetch(KEYS, 4).wait(60.0).loaded == 16
        assert tier.stats().read_page_seconds == pytest.approx(0.001)
    assert reads(storage)[:3] == [1, 2, 1]


def test_only_one_probe_at_a_time(cache: Cache) -> None:
    storage = measured(cache, page=1.0)
    with tier_of(cache, storage) as tier:
        tier.prefetch(KEYS[:1].copy()).wait(60.0)
        storage.now = 1000.0
        storage.closed_gate_for = "contains"
        storage.gate.clear()
        probe = tier.prefetch(KEYS, 1)
        assert storage.arrived.acquire(timeout=60.0)
        assert tier.prefetch(KEYS[:4].copy(), 1).wait(60.0).declined == 3
        storage.gate.set()
        assert probe.wait(60.0).loaded == 19


def test_reads_ahead_are_those_of_the_tier(cache: Cache) -> None:
    """Computing takes a bit longer than reading, and less than waiting for a read before."""
    storage = measured(cache, page=0.05)
    with tier_of(cache, storage, threads=1) as tier:
        assert tier.prefetch(KEYS[:2].copy()).wait(60.0).loaded == 2
        storage.closed_gate_for = "read"
        storage.gate.clear()
        first = tier.prefetch(KEYS[:14].copy(), 2)
        assert storage.arrived.acquire(timeout=60.0)
        told = tier.prefetch(KEYS, 14).wait(60.0)
        assert told.declined == 6
        assert "reading 6 pages would take 0.9 s, 0.6 s of it behind others" in told.reasons[0]
        storage.gate.set()
        assert first.wait(60.0).loaded == 12
        assert tier.prefetch(KEYS, 14).wait(60.0).loaded == 6


def test_what_ranks_agreed_on_is_read(cache: Cache) -> None:
    """A group that `publish` cuts in two is read again, whatever that takes."""
    storage = measured(cache, page=1.0)
    with tier_of(cache, storage) as tier:
        task = tier.prefetch(KEYS[:4].copy(), hold=True)
        assert task.wait(60.0).prefix == 4
        assert task.publish(2).wait(60.0).loaded == 2
        assert sound(cache, KEYS) == 2


def test_without_a_rate_nothing_is_declined(cache: Cache) -> None:
    storage = measured(cache, page=1000.0)
    with tier_of(cache, storage, prefill_tokens_per_s=None) as tier:
        for end in (4, 20):
            assert tier.prefetch(KEYS[:end].copy()).wait(60.0).declined == 0
        found = tier.stats()
        assert (found.read_call_seconds, found.read_page_seconds) == (None, None)
    assert sound(cache, KEYS) == 20


def test_the_deepest_page_is_read_whatever_it_takes(cache: Cache) -> None:
    storage = measured(cache, page=1000.0)
    with tier_of(cache, storage) as tier:
        tier.prefetch(KEYS[:1].copy()).wait(60.0)
        assert tier.prefetch_last_ready(KEYS[:9].copy()).wait(60.0).loaded == 1


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, "12000", True])
def test_a_rate_is_a_number_above_nothing(cache: Cache, rate: Any) -> None:
    storage = measured(cache)
    with pytest.raises(ConfigError, match=r"prefill_tokens_per_s: expected a finite number"):
        tier_of(cache, storage, prefill_tokens_per_s=rate)


def test_a_rate_needs_tokens(segment_name: str) -> None:
    with make_cache(segment_name, page_tokens=None) as plain:
        storage = Recorder(StorageSpec.of(plain))
        with pytest.raises(ConfigError, match=r"prefill_tokens_per_s.*without page_tokens"):
            StorageTier(plain, storage, prefill_tokens_per_s=np.float64(1e4))
