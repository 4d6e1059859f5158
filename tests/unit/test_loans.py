"""Pinning by page number and generation, and loans that are given back by page number."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from support.interrupts import interrupt, interrupt_call
from support.keys import prompt
from support.refusals import refused

from lightcache import (
    ConfigError,
    Detached,
    GiveBack,
    InUse,
    LeaseLost,
    Loans,
    OutOfPages,
    PageIndex,
    PermissionDenied,
)
from lightcache.shm import SharedRing

PAGES = 16
A, B = prompt(1, 6), prompt(2, 6)


def fill(index: PageIndex, *prompts: object) -> None:
    for keys in prompts:
        with index.reserve(keys) as new:  # type: ignore[arg-type]
            new.publish()


@dataclass
class Pair:
    """A taker and a worker in one process, with the ring of both."""

    taker: PageIndex
    worker: PageIndex
    rings: tuple[SharedRing, SharedRing]
    loans: Loans
    gives: GiveBack

    def lend(self, keys: object = A) -> tuple[int, np.ndarray]:
        """A loan of a prompt; the taker's own lease is released."""
        with self.taker.match(keys) as lease:  # type: ignore[arg-type]
            return self.loans.lend(lease.pages), lease.pages.copy()

    def pins(self) -> int:
        return self.taker.check().pins


def open_ring(name: str, capacity: int = 8, message_bytes: int = 24) -> SharedRing:
    """Four pages in a message."""
    return SharedRing.open(f"{name}-ring", capacity=capacity, message_bytes=message_bytes)


@pytest.fixture
def pair(segment_name: str) -> Iterator[Pair]:
    with (
        PageIndex.create(segment_name, pages=PAGES) as taker,
        PageIndex.attach(segment_name) as worker,
        open_ring(segment_name) as ours,
        open_ring(segment_name) as theirs,
    ):
        fill(taker, A, B)
        with Loans(taker, ours, worker.client_id) as loans:
            yield Pair(taker, worker, (ours, theirs), loans, GiveBack(theirs))
        assert not taker.core.lenders
        assert taker.check().pins == 0
        taker.check().raise_if_broken()
        ours.check()


# ---- pin


def test_a_worker_pins_what_it_was_told(pair: Pair) -> None:
    taker, worker = pair.taker, pair.worker
    with taker.match(A) as lease:
        pages, generations = lease.pages.copy(), taker.generations(lease.pages)
    assert generations.dtype == np.uint32
    with worker.pin(pages[::-1], generations[::-1].tolist()) as pinned:
        assert pinned.pages.tolist() == pages[::-1].tolist()
        assert taker.evict(PAGES) == len(B)
        assert worker.keys_of(pages).tolist() == A.tolist()
        assert worker.generations(pages).tolist() == generations.tolist()
    assert taker.evict(PAGES) == len(A)
    assert len(worker.pin(np.zeros(0, np.int32), [])) == 0
    me = next(client for client in taker.clients() if client.slot == worker.client_id.slot)
    assert (me.hit_pages, me.missed_pages) == (0, 0)


def test_pages_that_were_used_again_are_refused(pair: Pair) -> None:
    taker, worker = pair.taker, pair.worker
    with taker.match(A) as lease:
        pages, generations = lease.pages.copy(), taker.generations(lease.pages)
    wrong = generations.copy()
    wrong[2] += 2
    refused(LeaseLost, rf"page {pages[2]} \(number 2 of 6\)", worker.pin, pages, wrong)
    assert taker.drop(A, start=4) == 2
    refused(LeaseLost, "number 4 of 6", worker.pin, pages, generations)
    fill(taker, prompt(3, 6))  # all of them are in use
    refused(LeaseLost, "number 4 of 6", worker.pin, pages, generations)
    worker.pin(pages[:4], generations[:4]).release()
    taker.clear()
    refused(LeaseLost, "number 0 of 4", worker.pin, pages[:4], generations[:4])
    assert pair.pins() == 0


# ---- loans


def test_a_loan_keeps_its_pages_until_it_is_given_back(pair: Pair) -> None:
    number, pages = pair.lend()
    assert 0 <= number < 1 << 63
    assert (len(pair.loans), pair.loans.pages, pair.pins()) == (1, 6, 6)
    assert pair.taker.evict(PAGES) == len(B)
    pair.gives.put(number)
    assert pair.loans.pages == 6  # nothing hears it yet
    assert pair.loans.collect() == 6
    assert (len(pair.loans), pair.loans.ignored, pair.pins()) == (0, 0, 0)
    assert pair.taker.evict(PAGES) == len(pages)


def test_a_loan_is_given_back_page_by_page(pair: Pair) -> None:
    number, pages = pair.lend()
    pair.gives.put(number, pages[[4, 0]])
    assert pair.loans.collect() == 2
    pair.gives.put(number, pages[:0])  # none: not all
    assert pair.loans.collect() == 0
    pair.gives.put(number, pages[1:4])
    pair.gives.put(number, pages[5:])
    assert pair.loans.collect() == 4
    assert (len(pair.loans), pair.loans.ignored) == (0, 0)
    number, pages = pair.lend()
    pair.gives.put(number, pages)  # in two messages
    assert len(pair.rings[0]) == 2
    assert pair.loans.collect() == 6
    number, pages = pair.lend()
    pair.gives.put(number, pages[3:4])
    pair.gives.put(number)  # the rest
    assert pair.loans.collect() == 6


def test_no_pin_of_another_loan_or_lease_is_given_back(pair: Pair) -> None:
    first, pages = pair.lend()
    second, _ = pair.lend()
    with pair.taker.match(A), pair.taker.match(B) as other:
        for _ in range(3):
            pair.gives.put(first, pages[:2])  # twice too often
        assert pair.loans.collect() == 2
        assert pair.loans.ignored == 4
        pair.gives.put(first, other.pages[:1])  # pinned, and not of this loan
        pair.gives.put(first, np.array([-1, PAGES, 2**31 - 1], np.int32))
        assert pair.loans.collect() == 0
        assert pair.loans.ignored == 8
        pair.gives.put(first)
        pair.gives.put(first)
        pair.gives.put(first, pages)
        pair.gives.put(second - 2)
        assert pair.loans.collect() == 4
        assert pair.loans.ignored == 8 + 1 + 6 + 1
        assert (len(pair.loans), pair.loans.pages) == (1, 6)
        assert pair.pins() == 3 * 6
    pair.gives.put(second)
    assert pair.loans.collect() == 6


@pytest.mark.parametrize("message", [b"", b"1234567", b"123456789", b"x" * 24, b"\xff" * 8])
def test_messages_that_are_none_of_ours_are_ignored(pair: Pair, message: bytes) -> None:
    number, pages = pair.lend()
    with_page = number.to_bytes(8, "little") + pages[:1].tobytes()
    pair.rings[1].push_many([message, with_page, with_page[:10], message])
    assert pair.loans.collect() == 1
    assert pair.loans.ignored >= 3
    assert pair.loans.pages == 5


CALLS: dict[str, Callable[[PageIndex], object]] = {
    "plan": lambda index: index.plan("a", B[:0]),
    "plan_many": lambda index: index.plan_many([], B[:0], np.zeros(1, np.int64)),
    "reserve": lambda index: index.reserve(B[:0]).release(),
    "reserve_batch": lambda index: index.reserve_batch(B[:0], np.zeros(1, np.int64)).release(),
    "allocate": lambda index: index.allocate(0).free(),
    "can_allocate": lambda index: index.can_allocate(0),
    "evict": lambda index: index.evict(0),
    "lend": lambda index: None,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_begin_with_what_was_given_back(pair: Pair, name: str) -> None:
    number, _ = pair.lend()
    pair.gives.put(number)
    if name == "lend":
        pair.loans.lend(np.zeros(0, np.int32))
    CALLS[name](pair.taker)
    assert pair.loans.pages == 0
    assert pair.pins() == 0


def test_room_is_made_of_what_was_given_back(pair: Pair) -> None:
    first, _ = pair.lend(A)
    pair.lend(B)
    refused(OutOfPages, "pinned", pair.taker.allocate, 8)
    pair.gives.put(first)
    with pair.taker.allocate(8) as held:
        assert len(held) == 8


def test_a_full_ring_delays_nothing_but_the_pages(pair: Pair) -> None:
    numbers = [pair.lend()[0] for _ in range(20)]
    for number in numbers:
        pair.gives.put(number)
    assert len(pair.rings[0]) == 8
    assert pair.gives.flush() == 12
    assert "12 waiting" in repr(pair.gives)
    assert pair.loans.collect() == 8 * 6
    assert pair.gives.flush() == 4
    assert pair.taker.evict(PAGES) == len(B)  # collects
    assert pair.gives.flush() == 0
    assert pair.loans.collect() == 4 * 6
    assert pair.loans.ignored == 0


def test_a_ring_whose_lock_is_held_delays_nothing_but_the_pages(pair: Pair) -> None:
    ours, theirs = pair.rings
    numbers = [pair.lend()[0] for _ in range(3)]
    pair.gives.put(numbers[0])
    quick = ours._calls.quick
    for holder, waiter in ((ours, "worker"), (theirs, "taker")):
        assert quick.lcs_robust_take(holder.segment.attachment, 0, 1, (1 << 63) - 1) >= 0
        if waiter == "worker":
            pair.gives.put(numbers[1])
            assert pair.gives.flush() == 1
        else:
            assert pair.loans.collect() == 0
            assert pair.taker.can_allocate(1)
        assert quick.lcs_robust_drop(holder.segment.attachment) >= 0
    pair.gives.put(numbers[2])
    assert pair.loans.collect() == 3 * 6


def test_a_worker_that_leaves_gives_everything_back(pair: Pair) -> None:
    number, pages = pair.lend()
    pair.lend(B)
    pair.gives.put(number, pages[:1])
    pair.worker.close()
    refused(LeaseLost, "has left or died", pair.loans.lend, np.zeros(0, np.int32))
    assert (len(pair.loans), pair.loans.ignored, pair.pins()) == (0, 0, 0)
    with PageIndex.attach(pair.taker.name) as successor, pair.loans:
        with Loans(pair.taker, pair.rings[0], successor.client_id) as loans:
            pair.gives.put(number)  # of the former worker
            with pair.taker.match(A) as lease:
                pair.gives.put(loans.lend(lease.pages))
            assert loans.collect() == 6
            assert loans.ignored == 1


def test_messages_for_a_former_taker_are_ignored(pair: Pair) -> None:
    number, _ = pair.lend()
    pair.loans.close()
    pair.loans.close()
    assert pair.pins() == 0
    pair.gives.put(number)
    with Loans(pair.taker, pair.rings[0], pair.worker.client_id) as loans:
        with pair.taker.match(A) as lease:
            loans.lend(lease.pages)
        assert loans.collect() == 0
        assert (loans.ignored, loans.pages) == (1, 6)


def test_dropping_the_last_reference_gives_everything_back(pair: Pair) -> None:
    loans = Loans(pair.taker, pair.rings[0], pair.worker.client_id)
    with pair.taker.match(A) as lease:
        loans.lend(lease.pages)
    assert len(pair.taker.core.lenders) == 2
    del loans
    gc.collect()
    assert pair.pins() == 0
    assert len(pair.taker.core.lenders) == 1


def test_after_the_index_is_closed(pair: Pair) -> None:
    index = PageIndex.attach(pair.taker.name)
    loans = Loans(index, pair.rings[0], pair.worker.client_id)
    with index.match(A) as lease:
        pair.gives.put(loans.lend(lease.pages), lease.pages[:1])
        loans.lend(lease.pages)
    index.close()
    assert pair.pins() == 0
    refused(Detached, "close", loans.lend, np.zeros(0, np.int32))
    loans.close()


def test_what_a_closed_ring_says(pair: Pair) -> None:
    number, _ = pair.lend()
    for_these = open_ring(f"{pair.taker.name}-other"), open_ring(f"{pair.taker.name}-other")
    with Loans(pair.taker, for_these[0], pair.worker.client_id) as loans:
        gives = GiveBack(for_these[1])
        with pair.taker.match(B) as lease:
            loans.lend(lease.pages)
        for_these[1].close()
        refused(Detached, "close", gives.put, number)
        for_these[0].close()
        refused(Detached, "close", loans.collect)
        assert pair.taker.evict(PAGES) == 0  # is not disturbed by it


def test_a_third_process_is_refused(pair: Pair) -> None:
    with open_ring(pair.taker.name):
        refused(InUse, "a ring for each pair", GiveBack, pair.rings[1])
        refused(InUse, "pid", Loans, pair.taker, pair.rings[0], pair.worker.client_id)
    GiveBack(pair.rings[1])


def test_arguments(pair: Pair, segment_name: str) -> None:
    taker = pair.taker
    with SharedRing.create(f"{segment_name}-s", capacity=1, message_bytes=11) as short:
        refused(ConfigError, "at least 12 bytes", GiveBack, short)
    for number in (-1, 1 << 63, 1.0, None):
        refused(ConfigError, "number", pair.gives.put, number)
    refused(ConfigError, "page numbers", pair.gives.put, 1, [0.5])
    refused(LeaseLost, "not pinned", pair.loans.lend, np.zeros(1, np.int32))
    refused(ConfigError, "int32", pair.loans.lend, [1])
    with PageIndex.attach(taker.name, readonly=True) as reader:
        refused(PermissionDenied, "read-only", reader.pin, [0], [0])
        refused(PermissionDenied, "read-only", reader.generations, np.zeros(1, np.int32))
    assert len(pair.loans) == 0


# ---- interrupts


def interrupted(pair: Pair, what: str, how: Callable[..., bool], at: int) -> bool:
    """One call, interrupted at one place, and what its caller does then. False: it has fewer."""
    kept, pages = pair.lend(B)
    number, ours = pair.lend()
    generations = pair.taker.generations(ours)
    lent: list[int] = []
    more_loans = Loans(pair.taker, pair.rings[0], pair.worker.client_id)
    if what == "close":
        with pair.taker.match(A) as lease:
            more_loans.lend(lease.pages)
            more_loans.lend(lease.pages)
    elif what in ("collect", "plan"):
        pair.gives.put(number, ours[:3])
        pair.gives.put(number)
    actions: dict[str, Callable[[], object]] = {
        "lend": lambda: lent.append(pair.loans.lend(pages)),
        "put": lambda: pair.gives.put(number),
        "pages": lambda: pair.gives.put(number, ours),
        "collect": pair.loans.collect,
        "pin": lambda: pair.worker.pin(ours, generations).release(),
        "plan": lambda: pair.taker.plan("a", B[:0]),
        "close": more_loans.close,
    }
    more = how(actions[what], at)
    if what in ("put", "pages") and more:
        actions[what]()
    elif what not in ("put", "pages", "collect", "plan"):
        pair.gives.put(number)
    for one in lent:
        pair.gives.put(one)
    more_loans.close()
    pair.loans.collect()
    assert pair.loans.pages == len(B), f"at place {at}"
    assert pair.pins() == len(B), f"at place {at}"
    assert len(pair.rings[0]) == 0
    pair.gives.put(kept)
    assert pair.loans.collect() == len(B)
    return more


@pytest.mark.parametrize("how", [interrupt_call, interrupt], ids=["calls", "signals"])
@pytest.mark.parametrize("what", ["lend", "put", "pages", "collect", "pin", "plan", "close"])
def test_an_interrupt_anywhere(pair: Pair, what: str, how: Callable[..., bool]) -> None:
    """Nothing stays out, and no other loan goes."""
    at = 0
    while interrupted(pair, what, how, at):
        at += 1
    assert at > 5
