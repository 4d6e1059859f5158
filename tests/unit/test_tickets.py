"""Tickets: pins handed on, one verdict for all, and every way in which adopting is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.filling import pins
from support.index_view import IndexView
from support.keys import prompt
from support.refusals import refused

from lightcache import ClientId, ConfigError, Lease, LeaseLost, NoSpace, OutOfPages, PageIndex
from lightcache.leases import Ticket
from lightcache.reservations import ReservationShard

Script = Callable[..., Any]


@pytest.fixture
def giver(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=8) as made:
        made.reserve(prompt(1, 2)).publish()
        yield made


@pytest.fixture
def taker(giver: PageIndex, segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.attach(segment_name) as attached:
        yield attached


def give(giver: PageIndex, *takers: PageIndex, timeout: float = 3600.0) -> Ticket:
    with giver.match(prompt(1, 2)) as lease:
        return lease.ticket([t.client_id for t in takers], timeout=timeout)


def settle(index: PageIndex) -> None:
    """Let somebody take the lock: tickets end when the next one does."""
    index.evict(1)


def test_a_revoked_ticket_is_nobodys(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=4) as index:
        with PageIndex.attach(segment_name) as other:
            ticket = index.allocate(1).ticket([other.client_id])  # the pages are freed at once
            assert index.stats().doomed == 1
            ticket.revoke()
            refused(LeaseLost, "", other.adopt, bytes(ticket))
            refused(LeaseLost, "before", ticket.revoke)
            index.evict(1)
            assert (index.stats().doomed, index.stats().free) == (0, 4)


@pytest.mark.parametrize(("timeout", "late"), [(0.0, 2), (3600.0, 0)])
def test_check_counts_late_pins_apart(
    giver: PageIndex, taker: PageIndex, timeout: float, late: int
) -> None:
    ticket = give(giver, taker, timeout=timeout)
    with giver.match(prompt(1, 2)):
        report = giver.check()
        assert report.clean
        assert (report.pins, report.late_pins) == (4 - late, late)
    settle(giver)
    assert giver.check().late_pins == 0
    ticket.drop()


def test_a_lease_is_handed_on(giver: PageIndex, taker: PageIndex) -> None:
    with give(giver, taker) as ticket:
        assert pins(giver) == 2, "pinned by the ticket alone"
        assert giver.evict(8) == 0
        assert len(bytes(ticket)) == 16
        assert ticket.poll().verdict is None
        with taker.adopt(bytes(ticket)) as lease:
            assert lease.pages.tolist() == giver.match(prompt(1, 2)).pages.tolist()
            assert pins(giver) == 2, "all have adopted: the taker's pins alone"
            assert ticket.poll().adopted == {taker.client_id.slot}
            taker.done(bytes(ticket))
        assert ticket.poll().verdict is True
    assert pins(giver) == 0
    assert giver.stats().tickets == 0


def test_part_of_a_lease_is_handed_on(giver: PageIndex, taker: PageIndex) -> None:
    have = prompt(2, 5)
    giver.reserve(have).publish()
    with giver.match(have) as lease:
        pages = lease.pages.tolist()
        for start, stop in [(2, None), (1, 3), (0, 0), (5, 5)]:
            with lease.ticket([taker.client_id], start=start, stop=stop) as ticket:
                part = taker.adopt(bytes(ticket))
                assert isinstance(part, Lease)
                assert part.pages.tolist() == pages[start:stop]
                part.release()
                taker.done(bytes(ticket))
        for start, stop in [(-1, None), (6, None), (3, 2), (0, 6)]:
            refused(
                ConfigError,
                "start|stop",
                lease.ticket,
                [taker.client_id],
                start=start,
                stop=stop,
            )
    assert pins(giver) == 0


def test_a_forgotten_ticket_holds_no_record(giver: PageIndex, taker: PageIndex) -> None:
    data = bytes(give(giver, taker))
    assert giver.stats().tickets == 1
    with taker.adopt(data):
        taker.done(data)
    settle(giver)
    assert giver.stats().tickets == 0


def test_an_adopter_that_dies_before_the_ticket_is_given(
    segment_name: str, giver: PageIndex, script: Script
) -> None:
    """Between `clients()` and `ticket()`: an end of what was lent, not a wrong argument."""
    source = (
        "import os, signal, sys\n"
        "from lightcache import PageIndex\n"
        "index = PageIndex.attach(sys.argv[1])\n"
        "print(*index.client_id, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = script(source, segment_name, status=-9).stdout
    dead = ClientId(*map(int, said.split()))
    with giver.match(prompt(1, 2)) as lease, pytest.raises(LeaseLost, match="left or died"):
        lease.ticket([dead])
    assert giver.stats().tickets == 0
    giver.reap()


def test_a_ticket_of_too_many_pages_is_taken_back(giver: PageIndex, taker: PageIndex) -> None:
    page = prompt(1, 1)
    many = np.tile(page, (60_000, 1))
    batch = giver.match_many(many, np.arange(len(many) + 1))
    lease = batch._lease
    refused((NoSpace, OutOfPages), "", lease.ticket, [taker.client_id])
    assert giver.stats().tickets == 0
    assert not IndexView(giver).rows()[0].any()
    batch.release()
    assert pins(giver) == 0


# ---------------------------------------------------------------- of a reservation


def test_a_reservation_is_written_by_others(
    segment_name: str, giver: PageIndex, taker: PageIndex
) -> None:
    with (
        PageIndex.attach(segment_name) as third,
        giver.reserve(prompt(2, 3), shards=2) as new,
        new.ticket([taker.client_id, third.client_id]) as ticket,
    ):
        left = taker.adopt(bytes(ticket), shard=0)
        assert isinstance(left, ReservationShard)
        assert left.pages.tolist() == new.pages.tolist()
        refused(LeaseLost, "adopted by another", third.adopt, bytes(ticket), shard=0)
        refused(LeaseLost, "before", taker.adopt, bytes(ticket), shard=1)
        right = third.adopt(bytes(ticket), shard=1)
        assert isinstance(right, ReservationShard)
        assert not left.publish()
        assert right.publish()
        assert ticket.poll().verdict is True
        left.release()
        right.release()
    assert giver.peek(prompt(2, 3)) == 3
    assert pins(giver) == 0
