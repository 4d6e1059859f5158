"""Reservations: what becomes of each key, shards, giving up; and writers that were killed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.filling import pins
from support.index_view import IndexView
from support.keys import array, chain, prompt
from support.refusals import refused
from support.scripts import TESTS

from lightcache import Abandoned, ConfigError, LeaseLost, NoSpace, PageIndex
from lightcache.layout import PageState, ReservationRecord
from lightcache.page_index import geometry
from lightcache.shm.layout import ClientState

Wait = Callable[[Callable[[], bool], str], None]


PAGES = 8


@pytest.fixture
def second(index: PageIndex, segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.attach(segment_name) as attached:
        yield attached


# ---------------------------------------------------------------- what becomes of each key


def test_new_present_busy_and_missing(index: PageIndex, second: PageIndex) -> None:
    with index.reserve(prompt(1, 2)) as new:
        assert new.new.tolist() == [0, 1]
        assert index.peek(prompt(1, 2)) == 0
        assert new.publish()
    assert index.peek(prompt(1, 2)) == 2
    busy = index.reserve(prompt(1, 4), 2)
    assert busy.new.tolist() == [2, 3]
    got = second.reserve(prompt(1, 16))
    assert got.present.tolist() == [0, 1]
    assert got.busy.tolist() == [2, 3]
    assert got.new.tolist() == [4, 5, 6, 7]
    assert got.missing.tolist() == list(range(8, 16))
    assert "pinned" in got.why
    assert "4 new, 2 present, 2 busy, 8 missing" in repr(got)
    assert len(set(got.pages.tolist() + got.present_pages.tolist())) == 6
    got.release()
    busy.release()
    assert pins(index) == 0
    assert index.peek(prompt(1, 16)) == 2


def test_nothing_to_reserve(index: PageIndex) -> None:
    for start in (0, 2):
        with index.reserve(prompt(1, start), start) as got:
            assert got.pages.tolist() == []
            assert got.why == ""
            assert got.publish(), "nothing is left to be written"


def test_a_key_that_stands_twice_gets_one_page(index: PageIndex) -> None:
    one = prompt(1, 2)
    with index.reserve(np.concatenate([one, one])) as got:
        assert got.new.tolist() == [0, 1]
        assert got.busy.tolist() == [2, 3]
        assert pins(index) == 2
        got.publish()
    assert index.wait(one, timeout=0) == 2
    assert pins(index) == 0


def test_more_keys_than_a_batch(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=1000) as index:
        with index.reserve(prompt(1, 600)) as got:
            assert len(set(got.pages.tolist())) == 600
            got.publish()
        assert index.peek(prompt(1, 700)) == 600


def test_own_chain_is_not_evicted(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=4) as index:
        index.reserve(prompt(1, 4)).publish()
        with index.reserve(prompt(1, 6), 4) as got:
            assert len(got.missing) == 2, "its prefix was used as room, which nobody pins"
        assert index.peek(prompt(1, 4)) == 4


def test_own_chain_is_not_evicted_for_a_quota(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=16) as index:
        space = index.namespace("w", quota_pages=4)
        index.reserve(prompt(1, 4), namespace=space).publish()
        with index.reserve(prompt(1, 6), 4, namespace=space) as got:
            assert len(got.missing) == 2
        assert index.peek(prompt(1, 4), namespace=space) == 4


def test_own_chain_is_not_evicted_for_a_bucket(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=40) as index:
        meeting = array(chain([7] * 33, bucket=5))
        index.reserve(meeting[:32]).publish()
        with index.reserve(meeting, 32) as got:
            assert len(got.missing) == 1
        assert index.peek(meeting) == 32


def test_a_full_chain_has_no_room(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=40) as index:
        meeting = [array(chain([n], bucket=5)) for n in range(34)]
        held = [index.reserve(each) for each in meeting[:32]]
        got = index.reserve(meeting[32])
        assert got.missing.tolist() == [0]
        assert "bucket" in got.why
        held[7].publish()
        held[7].release()
        with index.reserve(meeting[33]) as again:
            assert again.new.tolist() == [0], "one page of the chain could go"
        assert index.check().clean
        for each in (*held[:7], *held[8:], got):
            each.release()


# ---------------------------------------------------------------- arguments


def test_reserve_batch_gives_all_back_on_an_error(index: PageIndex) -> None:
    asked = np.concatenate([prompt(1, 2), prompt(2, 2)])
    refused(ConfigError, "starts", index.reserve_batch, asked, np.array([0, 2, 4]), [0])
    refused(ConfigError, "start", index.reserve_batch, asked, np.array([0, 2, 4]), [0, 3])
    assert pins(index) == 0
    assert index.stats().writing == 0
    first, last = index.reserve_batch(asked, np.array([0, 2, 4]), [1, 0]).split()
    assert (first.new.tolist(), last.new.tolist()) == ([1], [0, 1])
    first.release()
    last.release()


# ---------------------------------------------------------------- publishing


def test_shards_are_published_one_by_one(index: PageIndex) -> None:
    with index.reserve(prompt(1, 2), shards=3) as got:
        assert not got.publish(1)
        for wrong in (-1, 3, True, "0"):
            refused(ConfigError, "shard", got.publish, wrong)
        refused(LeaseLost, r"twice|before|already|done", got.publish, 1)
        assert index.peek(prompt(1, 2)) == 0
        assert got.publish(), "the two that are left"
        refused(LeaseLost, "", got.publish)
    assert index.peek(prompt(1, 2)) == 2


def test_publishing_what_was_cleared(index: PageIndex) -> None:
    space = index.namespace("w1")
    got = index.reserve(prompt(1, 2), namespace=space)
    index.clear(space)
    refused(Abandoned, "cleared", got.publish)
    assert pins(index) == 2, "its writer may still be writing"
    got.release()
    assert pins(index) == 0
    refused(Abandoned, "cleared", index.reserve, prompt(1, 2), namespace=space)


def test_shards_of_others(index: PageIndex, second: PageIndex) -> None:
    got = index.reserve(prompt(1, 2), shards=3)
    ticket = got.ticket([second.client_id])
    shard = second.adopt(bytes(ticket), shard=1)
    refused(LeaseLost, "adopted", got.publish, 1)
    assert not got.publish(), "its own two are, the adopted one is not"
    refused(LeaseLost, "adopted", got.publish)
    assert shard.publish()
    assert index.peek(prompt(1, 2)) == 2
    refused(LeaseLost, "", shard.publish)
    shard.release()
    refused(LeaseLost, "", shard.release)
    refused(Abandoned, "", shard.publish)
    got.release()
    ticket.drop()
    assert pins(index) == 0


# ---------------------------------------------------------------- limits


def test_too_many_reservations(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=1100) as index:
        held = [index.reserve(prompt(n, 1)) for n in range(1025)]
        made = [len(each.new) for each in held]
        assert sum(made) >= 512, "each takes a record and a chunk of page numbers"
        assert made == sorted(made, reverse=True)
        assert held[-1].missing.tolist() == [0]
        assert "reservations" in held[-1].why
        for each in held:
            each.release()
        assert pins(index) == 0
        assert index.stats().reservations == 0


def test_memory_that_is_not_there_yet(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8, grown=2) as index:
        refused(NoSpace, "grow", index.reserve, prompt(1, 3))
        assert pins(index) == 0
        assert index.stats().writing == 0
        index.grow(3)
        with index.reserve(prompt(1, 3)) as got:
            assert len(got.new) == 3
        index.grow(2)
        assert index.stats().grown == 3, "memory is not taken back"
        for wrong in (-1, 9, None):
            refused(ConfigError, "pages", index.grow, wrong)


# ---------------------------------------------------------------- writers that were killed


@pytest.fixture
def kill_holder(index: PageIndex, segment_name: str) -> Callable[[bool], int]:
    """Let a client hold 2 pages and write 3, kill it, return its slot."""

    def kill(device: bool) -> int:
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
                "import runpy; runpy.run_module('support.doomed_clients', run_name='__main__')",
                segment_name,
                "device" if device else "none",
            ],
            stdout=subprocess.PIPE,
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"holding\n"
            [slot] = [c.slot for c in index.clients() if c.role == "doomed"]
            child.kill()
        return slot

    return kill


def test_a_killed_writer_gives_its_pages_back(
    index: PageIndex, kill_holder: Callable[[bool], int]
) -> None:
    slot = kill_holder(False)
    assert pins(index) == 5
    assert index.reap() == 1
    assert pins(index) == 0
    assert slot not in [c.slot for c in index.clients()]
    assert index.peek(prompt(1, 2)) == 2, "what was published stays"
    with index.reserve(prompt(3, 6)) as got:
        assert len(got.new) == 6
    assert index.reap() == 0


def test_looking_ahead_counts_what_living_clients_write(
    index: PageIndex, kill_holder: Callable[[bool], int]
) -> None:
    with index.reserve(prompt(1, 3)) as made:
        made.publish()
    with index.reserve(prompt(1, 5)) as writing:
        assert index.peek_ahead(prompt(1, 6)) == 5
        assert index.peek_ahead(prompt(1, 2)) == 2
        assert index.peek_ahead(prompt(1, 6), namespace=index.namespace("other")) == 0
        assert index.peek(prompt(1, 6)) == 3
        writing.abandon()
    assert index.peek_ahead(prompt(1, 6)) == 3
    kill_holder(False)  # nothing takes its pages back
    assert index.stats().writing == 3
    assert index.peek_ahead(prompt(2, 3)) == 0


def test_waiting_takes_back_from_a_killed_writer(
    index: PageIndex, kill_holder: Callable[[bool], int]
) -> None:
    kill_holder(False)
    assert index.wait(prompt(2, 3), timeout=60) == 0
    assert pins(index) == 0


def test_pages_of_a_killed_device_client_stay_in_quarantine(
    index: PageIndex, kill_holder: Callable[[bool], int], wait_until: Wait
) -> None:
    slot = kill_holder(True)
    view = IndexView(index)
    record = view.client(slot)
    # As if it had lived in another PID namespace, where its end cannot be seen: then the end of
    # quarantine is a matter of time, and here the time is ours to set.
    record.pidns += 1
    assert index.reap() == 1
    assert record.state == ClientState.QUARANTINE
    writing = [n for n, p in enumerate(view.pages()) if p.state is PageState.DOOMED]
    assert len(writing) == 3
    assert view.rows()[slot].nonzero()[0].tolist() == writing, "only what it was writing"
    assert pins(index) == 3
    record.quarantine_until_ns = 1 << 62
    assert index.reap() == 1
    index.evict(8)
    with index.reserve(prompt(3, 8)) as got:
        assert len(got.new) == 5
        assert not set(got.pages.tolist()) & set(writing)
    record.quarantine_until_ns = 1
    assert index.reap() == 1
    assert record.state == ClientState.FREE
    assert pins(index) == 0
    with index.reserve(prompt(3, 8)) as got:
        assert len(got.new) == 8
    assert index.reap() == 0


def test_quarantine_ends_when_the_client_is_seen_to_be_gone(
    index: PageIndex, kill_holder: Callable[[bool], int], wait_until: Wait
) -> None:
    kill_holder(True)
    wait_until(lambda: index.reap() == 0, "the end of quarantine")
    assert pins(index) == 0
    with index.reserve(prompt(3, 8)) as got:
        assert len(got.new) == 8


# ---------------------------------------------------------------- told of an end that is undone


def shard_word(index: PageIndex, rid: int, shard: int) -> memoryview:
    """A shard's word in the segment."""
    size = ctypes.sizeof(ReservationRecord)
    at = geometry(index.pages).reservation + rid * size + ReservationRecord.shard.offset
    return index.segment.view(at + 4 * shard, 4).cast("I")


@pytest.mark.parametrize("adopted", [False, True])
def test_who_is_told_that_it_has_ended_abandons_whatever_is_undone(
    index: PageIndex, second: PageIndex, adopted: bool
) -> None:
    """Abandoning marks the shards and is undone if its process dies before it commits: the shard
    is pending again, in the name of a publisher that was told that all has ended."""
    giver = index.reserve(prompt(1, 4), shards=2)
    if adopted:
        ticket = giver.ticket([second.client_id])
        shard = second.adopt(bytes(ticket), shard=1)
    publish = shard.publish if adopted else lambda: giver.publish(1)
    with shard_word(index, giver._progress.rid, 1) as word:
        pending = word[0]
        word[0] = pending | 0x80  # LCI_SHARD_DEAD
        refused(Abandoned, "", publish)
        word[0] = pending
    assert giver.publish(0) is False
    (shard if adopted else giver).release()
    assert index.stats().reservations == 0
    with second.reserve(prompt(1, 4)) as again:
        assert not len(again.busy)
    if adopted:
        giver.release()
