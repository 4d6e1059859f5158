"""Reservations of several requests in one call of the core."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support.filling import pins
from support.keys import prompt
from support.refusals import refused

from lightcache import Abandoned, ConfigError, LeaseLost, LockTimeout, NoSpace, PageIndex, layout
from lightcache._arguments import Keys

TWO = np.array([0, 4, 9])


PAGES = 32


def two() -> Keys:
    return np.concatenate([prompt(1, 4), prompt(2, 5)])


def test_all_are_published_and_given_back_in_one_call(index: PageIndex) -> None:
    with index.reserve_batch(two(), TWO, [0, 2]) as batch:
        assert (len(batch), batch.all_new, len(batch.pages)) == (2, True, 7)
        assert index.stats().writing == 7
        assert batch.publish() == [None, None]
        assert (index.peek(prompt(1, 4)), index.stats().ready) == (4, 7)
        refused(LeaseLost, "before", batch.publish)
        refused(LeaseLost, "split", batch.split)
        assert pins(index) == 7
    assert pins(index) == 0


def test_what_is_there_is_pinned_and_not_written_again(index: PageIndex) -> None:
    with index.reserve(prompt(2, 3)) as got:
        got.publish()
    with index.reserve_batch(two(), TWO) as batch:
        assert not batch.all_new
        assert len(batch.pages) == 6
        assert pins(index) == 9
        assert batch.publish() == [None, None]
    assert (index.peek(prompt(2, 5)), pins(index)) == (5, 0)


def test_a_key_of_two_requests_is_written_by_the_first(index: PageIndex) -> None:
    keys = np.concatenate([prompt(1, 3), prompt(1, 4)])
    first, second = index.reserve_batch(keys, np.array([0, 3, 7])).split()
    assert (first.new.tolist(), second.busy.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert second.new.tolist() == [3]
    first.publish()
    second.publish()
    assert index.peek(prompt(1, 4)) == 4
    first.release()
    second.release()
    assert pins(index) == 0


def test_what_is_left_unpublished_is_abandoned(index: PageIndex) -> None:
    with index.reserve_batch(two(), TWO):
        assert index.stats().writing == 9
    assert (index.stats().writing, index.stats().ready, pins(index)) == (0, 0, 0)
    batch = index.reserve_batch(two(), TWO)
    del batch
    gc.collect()
    assert (index.stats().writing, pins(index)) == (0, 0)


def test_one_that_has_ended_holds_up_no_other(index: PageIndex) -> None:
    space = index.namespace("w")
    with index.reserve_batch(two(), TWO, namespace=space) as batch:
        gone = batch._progress[0]
        index.core.abandon(int(gone["rid"]), int(gone["gen"]))
        failed, fine = batch.publish()
        assert isinstance(failed, Abandoned)
        assert fine is None
    assert (index.peek(prompt(1, 4), namespace=space), pins(index)) == (0, 0)
    assert index.peek(prompt(2, 5), namespace=space) == 5
    with index.reserve_batch(two() ^ np.uint64(1), TWO, namespace=space) as batch:
        index.clear(space)
        assert all(isinstance(each, Abandoned) for each in batch.publish())
    assert pins(index) == 0


def test_every_shard_of_all_is_published(index: PageIndex) -> None:
    with index.reserve_batch(two(), TWO, shards=3) as batch:
        assert batch.publish() == [None, None]
    assert index.stats().ready == 9


def test_the_parts_of_a_split_batch_are_on_their_own(index: PageIndex) -> None:
    batch = index.reserve_batch(two(), TWO, [1, 0], shards=2)
    first, second = batch.split()
    assert (first.new.tolist(), second.new.tolist()) == ([1, 2, 3], [0, 1, 2, 3, 4])
    for call in (batch.split, batch.release):
        refused(LeaseLost, "split", call)
    refused(Abandoned, "", batch.publish)
    del batch
    gc.collect()
    assert not second.publish(1)
    assert second.publish()
    second.release()
    assert pins(index) == 3, "the first's"
    first.abandon()
    assert (pins(index), index.stats().ready) == (0, 5)


def test_no_requests(index: PageIndex) -> None:
    with index.reserve_batch(prompt(1, 0), np.array([0])) as batch:
        assert (len(batch), batch.publish()) == (0, [])


@pytest.mark.parametrize(
    "starts", [[0], [0, 6], [-1, 0], [0.0, 1.0], "ab", [[0], [0]]], ids=lambda x: repr(x)
)
def test_starts_that_are_none(index: PageIndex, starts: object) -> None:
    refused(ConfigError, "starts", index.reserve_batch, two(), TWO, starts)
    assert (pins(index), index.stats().writing) == (0, 0)


@pytest.mark.parametrize("shards", [0, -1, layout.SHARDS + 1, 1.0, None])
def test_shards_out_of_range(index: PageIndex, shards: int) -> None:
    refused(ConfigError, "shards", index.reserve_batch, two(), TWO, shards=shards)


def test_on_an_error_all_is_given_back(index: PageIndex) -> None:
    space = index.namespace("w")
    index.clear(space)
    refused(Abandoned, "", index.reserve_batch, two(), TWO, namespace=space)
    assert (pins(index), index.stats().writing) == (0, 0)


def test_a_lock_that_somebody_has(index: PageIndex, segment_name: str) -> None:
    with PageIndex.attach(segment_name, role="holder") as other:
        other.core.locked("lci_hold", what="hold")
        refused(LockTimeout, "holder", index.reserve_batch, two(), TWO, timeout=0.01)
        other.core.quick.lci_let_go(other.core.handle)
    with index.reserve_batch(two(), TWO) as batch:
        assert batch.all_new


def test_memory_that_is_not_there_yet(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with PageIndex.create(segment_name, pages=32, grown=6) as index:
        refused(NoSpace, "3 more", index.reserve_batch, two(), TWO)
        assert (index.stats().writing, pins(index)) == (0, 0)
        asked: list[int] = []

        def grow(wanted: int) -> bool:
            asked.append(wanted)
            index.grow(32)
            return True

        monkeypatch.setattr(index.core, "need_memory", grow)
        with index.reserve_batch(two(), TWO) as batch:
            assert batch.all_new
        assert len(asked) == 1
