"""PageIndex as a whole: making one, order of eviction, check and repair, interrupts, the lock."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.filling import fill
from support.index_view import IndexView
from support.interrupts import interrupt
from support.keys import prompt
from support.refusals import refused

from lightcache import (
    CacheCorrupted,
    ConfigError,
    InUse,
    LayoutMismatch,
    Lease,
    LockTimeout,
    PageIndex,
    WaitTimeout,
)
from lightcache.shm import Segment
from lightcache.shm import layout as shm_layout
from lightcache.shm.layout import SegmentKind


@pytest.fixture
def second(index: PageIndex, segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.attach(segment_name, lock_timeout=0.01) as attached:
        yield attached


# ---------------------------------------------------------------- making one


def test_attach_what_is_none(segment_name: str) -> None:
    with (
        Segment.create(segment_name, 64, kind=SegmentKind.PLAIN),
        pytest.raises((ConfigError, LayoutMismatch)),
    ):
        PageIndex.attach(segment_name)


def test_another_configuration(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=4, config={"model": "a"}) as index:
        with pytest.raises(LayoutMismatch):
            PageIndex.attach(segment_name, config={"model": "b", "pages": 4})
        refused(LayoutMismatch, "", PageIndex.open, segment_name, pages=5, config={"model": "a"})
        with PageIndex.open(segment_name, pages=4, config={"model": "a"}) as other:
            assert other.pages == index.pages == 4
            assert other.name == segment_name


def test_an_index_that_says_two_sizes(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=4) as index:
        root = IndexView(index).geometry.root
        view = index.segment.view(root, 8)
        view[0] = 5
        refused(CacheCorrupted, "index of 4 pages", PageIndex.attach, segment_name)
        view[0] = 4
        view.release()
        del view
        gc.collect()


# ---------------------------------------------------------------- eviction


def test_reserving_evicts_the_least_recently_used(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=16, eviction="lru") as index:
        chains = [fill(index, name, 4) for name in range(4)]
        index.match(chains[0]).release()
        with index.reserve(prompt(9, 5)) as new:
            assert len(new.new) == 5
            assert [index.peek(c) for c in chains] == [4, 0, 3, 4]


# ---------------------------------------------------------------- check and repair


def test_check_names_what_is_broken_and_repair_mends_it(index: PageIndex) -> None:
    have = fill(index, 1, 4)
    view = IndexView(index)
    at = index.segment.address + view.geometry.root
    fields = type(view.root())
    fields.from_address(at).free_count += 1
    report = index.check()
    assert not report.clean
    assert "free stack" in report.message
    refused(CacheCorrupted, "free stack", report.raise_if_broken)
    index.repair()
    report = index.check()
    assert report.clean, report.message
    report.raise_if_broken()
    assert index.peek(have) == 4
    assert (report.free + report.ready, report.pins) == (4, 0)


def test_a_reader_cannot_check_while_the_lock_is_held(index: PageIndex, second: PageIndex) -> None:
    fill(index, 1, 2)
    assert second.core.locked("lci_hold", what="test") == 0
    try:
        with PageIndex.attach(index.name, readonly=True) as reader:
            with pytest.raises(LockTimeout, match="never quiet") as error:
                reader.check()
        assert error.value.__traceback__, "which keeps no view of the segment"
    finally:
        second.core.quick.lci_let_go(second.core.handle)
    assert index.check().quiet


# ---------------------------------------------------------------- the lock


@pytest.fixture
def held_lock(index: PageIndex, second: PageIndex) -> Iterator[PageIndex]:
    """The first client holds the lock; gives the second, which waits 10 ms for it."""
    fill(index, 1, 2)
    assert index.core.locked("lci_hold", what="test") == 0
    yield second
    index.core.quick.lci_let_go(index.core.handle)
    report = index.check()
    assert report.clean
    assert report.pins == 0


def test_lookups_go_on_while_the_lock_is_held(held_lock: PageIndex) -> None:
    assert held_lock.peek(prompt(1, 2)) == 2
    held_lock.match(prompt(1, 2)).release()
    assert held_lock.wait(prompt(1, 2)) == 2


def test_a_lock_that_is_not_given_back_in_time(held_lock: PageIndex) -> None:
    other = held_lock
    for call in (
        lambda: other.reserve(prompt(1, 4)),
        lambda: other.evict(1),
        lambda: other.clear(),
        lambda: other.namespace("new"),
        lambda: other.grow(16),
        lambda: other.check(),
        lambda: other.match(prompt(1, 2)).ticket([other.client_id]),
    ):
        refused(LockTimeout, r"client 1 .* has held the lock", call)
    refused(LockTimeout, "", other.reserve, prompt(1, 4), timeout=0)


def test_a_timeout_says_who_holds_the_lock_for_what_and_since_when(held_lock: PageIndex) -> None:
    holder = held_lock.clients()[0]
    who = rf"client 1 \({holder.role or 'no role'}, pid {holder.pid}\)"
    with pytest.raises(LockTimeout, match=who + r" has held the lock for \d+\.\d{3} s in check;"):
        held_lock.reserve(prompt(1, 4), timeout=0.01)
    where = held_lock.segment.address + shm_layout.LOCK_OFFSET
    lock = shm_layout.LockRecord.from_address(where)
    lock.holder -= 1 << 32  # as a holder leaves it that is stopped before it has said anything
    with pytest.raises(LockTimeout, match=who + " has just taken the lock;"):
        held_lock.reserve(prompt(1, 4), timeout=0.01)


# ---------------------------------------------------------------- Ctrl-C


@contextlib.contextmanager
def alarm_in(seconds: float) -> Iterator[None]:
    """Ctrl-C, as a timer; it may come before the call, which then is not made."""

    def raise_it(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_ends_a_wait(index: PageIndex) -> None:
    with index.reserve(prompt(1, 2)):
        with pytest.raises(KeyboardInterrupt), alarm_in(0.05):
            index.wait(prompt(1, 2))
        index.segment.check_closable()


def test_an_interrupt_ends_waiting_for_the_lock(index: PageIndex, second: PageIndex) -> None:
    fill(index, 1, 2)
    assert index.core.locked("lci_hold", what="test") == 0
    with pytest.raises(KeyboardInterrupt), alarm_in(0.05):
        second.reserve(prompt(1, 4), timeout=60)
    index.core.quick.lci_let_go(index.core.handle)
    second.segment.check_closable()
    assert index.check().pins == 0


Action = Callable[[PageIndex, PageIndex], object]


def look_up(index: PageIndex, other: PageIndex) -> None:
    with index.match(prompt(1, 4)) as lease:
        _ = lease.pages
    with index.match_many(prompt(1, 4), np.array([0, 3, 4])) as batch:
        _ = batch.pages


def split(index: PageIndex, other: PageIndex) -> None:
    left, right = index.match_many(prompt(1, 4), np.array([0, 4, 4])).split()
    left.release()
    right.release()


def write(index: PageIndex, other: PageIndex) -> None:
    with index.reserve(prompt(2, 2), shards=2) as new:
        new.publish(0)
        new.publish()
    index.evict(3)


def give_up(index: PageIndex, other: PageIndex) -> None:
    with index.reserve(prompt(3, 3)):
        pass
    index.reserve(prompt(1, 5)).abandon()


def write_many(index: PageIndex, other: PageIndex) -> None:
    keys = np.concatenate([prompt(4, 2), prompt(5, 2)])
    index.reserve_batch(keys, np.array([0, 2, 4])).release()


def hand_on(index: PageIndex, other: PageIndex) -> None:
    with index.match(prompt(1, 4)) as lease, lease.ticket([other.client_id]) as ticket:
        adopted = other.adopt(bytes(ticket))
        assert isinstance(adopted, Lease)
        with adopted:
            other.done(bytes(ticket))
        ticket.poll()


def share_writing(index: PageIndex, other: PageIndex) -> None:
    with (
        index.reserve(prompt(6, 2), shards=2) as new,
        new.ticket([other.client_id]) as ticket,
        other.adopt(bytes(ticket), shard=1) as shard,
    ):
        assert not isinstance(shard, Lease)
        shard.publish()
        new.publish()


def look_after_it(index: PageIndex, other: PageIndex) -> None:
    index.stats()
    index.check()
    index.reap()
    index.clients()
    index.namespace("w")
    with contextlib.suppress(WaitTimeout):
        index.wait(prompt(1, 4), timeout=0)


def check_closable(index: PageIndex) -> None:
    with contextlib.suppress(InUse):
        index.segment.check_closable()
        return
    gc.collect()
    index.segment.check_closable()


ACTIONS = [look_up, split, write, give_up, write_many, hand_on, share_writing, look_after_it]


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS, ids=lambda a: a.__name__)
def test_an_interrupt_anywhere_leaks_nothing(index: PageIndex, action: Action) -> None:
    interrupted, at = True, 0
    while interrupted:
        index.evict(16)
        fill(index, 1, 4)
        # The other one leaves each time: until then, what a ticket pins for it is no leak.
        with PageIndex.attach(index.name) as other:
            interrupted = interrupt(lambda: action(index, other), at)
            if index.check().pins:
                gc.collect()  # perhaps kept by a cycle that the exception has made
            check_closable(other)
        left = index.check()
        assert left.clean, f"place {at}: {left.message}"
        assert left.pins == 0, f"place {at}: {left.pins} pins leaked"
        check_closable(index)
        at += 1
    assert at > 15, "the places were not seen"
    index.evict(1)
    stats = index.stats()
    assert (stats.reservations, stats.tickets, stats.writing) == (0, 0, 0)


def test_published_pages_count_as_ready_at_once(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8) as index, index.reserve(prompt(1, 3)) as new:
        assert (index.stats().writing, index.stats().ready) == (3, 0)
        new.publish()
        assert (index.stats().writing, index.stats().ready) == (0, 3)


# ---- what can be had


def test_free_counts_what_can_be_had(segment_name: str) -> None:
    """All pages are free and only doomed: they were cleared while a lease pinned them, and that
    has been released. `free` said 0, though the next reserve has them all."""
    with PageIndex.create(segment_name, pages=8) as index:
        index.reserve(prompt(1, 8)).publish()
        lease = index.match(prompt(1, 8))
        index.clear()
        assert (index.stats().free, index.stats().doomed) == (0, 8)
        lease.release()
        assert (index.stats().free, index.stats().doomed) == (8, 0)
        index.use(index.namespace())
        with index.reserve(prompt(2, 8)) as new:
            assert len(new.pages) == 8
            assert index.stats().free == 0
        assert index.stats().free + index.stats().ready == 8


@pytest.mark.parametrize(("timeout", "free"), [(0, 8), (3600, 0)])
def test_pins_of_tickets_count_until_their_deadline(
    segment_name: str, timeout: float, free: int
) -> None:
    """A ticket that nobody adopted in time holds nothing, also while no call has taken its pins
    back: the next that needs room does."""
    with PageIndex.create(segment_name, pages=8) as index:
        index.reserve(prompt(1, 8)).publish()
        with PageIndex.attach(segment_name) as other, index.match(prompt(1, 8)) as lease:
            index.clear()
            ticket = lease.ticket([other.client_id], timeout=timeout)
            lease.release()
            assert (index.stats().free, index.stats().doomed) == (free, 8 - free)
            index.use(index.namespace())
            with index.reserve(prompt(2, 8)) as new:
                assert len(new.pages) == free
            ticket.drop()
        assert index.check().clean
