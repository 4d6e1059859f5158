"""What a page index refuses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.keys import prompt
from support.refusals import Table, ended, tried, twice

from lightcache import (
    Abandoned,
    ClientId,
    ConfigError,
    LeaseLost,
    LockTimeout,
    NoSpace,
    OutOfPages,
    PageIndex,
    PermissionDenied,
    WaitTimeout,
)
from lightcache.leases import Ticket

A, B = prompt(1, 2), prompt(2, 2)
TWO = np.array([0, 2])


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    """Of 8 pages; A is ready."""
    with PageIndex.create(segment_name, pages=8) as made:
        made.reserve(A).publish()
        yield made


@pytest.fixture
def other(index: PageIndex) -> Iterator[PageIndex]:
    with PageIndex.attach(index.name, lock_timeout=0.01) as attached:
        yield attached


@pytest.fixture
def reader(index: PageIndex) -> Iterator[PageIndex]:
    with PageIndex.attach(index.name, readonly=True) as attached:
        yield attached


@pytest.fixture
def small(segment_name: str) -> Iterator[PageIndex]:
    """Two of its four pages have memory."""
    with PageIndex.create(f"{segment_name}-small", pages=4, grown=2) as made:
        yield made


@pytest.fixture
def locked(index: PageIndex, other: PageIndex) -> Iterator[PageIndex]:
    """A client that waits 10 ms for the lock, which another one holds."""
    assert index.core.locked("lci_hold", what="test") == 0
    yield other
    index.core.quick.lci_let_go(index.core.handle)


def given(index: PageIndex, *takers: PageIndex) -> bytes:
    """A ticket of A."""
    with index.match(A) as lease:
        return bytes(lease.ticket([one.client_id for one in takers]))


def dropped(index: PageIndex) -> Ticket:
    with index.match(A) as lease:
        ticket = lease.ticket([index.client_id])
    ticket.drop()
    return ticket


def pinned_too_often(index: PageIndex) -> None:
    leases = [index.match(A)]
    while True:
        leases.append(index.match(A))


def published_adopted(index: PageIndex, other: PageIndex) -> None:
    with index.reserve(B, shards=2) as new, new.ticket([other.client_id]) as ticket:
        with other.adopt(bytes(ticket), shard=1):
            new.publish(1)


def published_twice(index: PageIndex) -> None:
    with index.reserve(B, shards=2) as new:
        twice(lambda: new.publish(0))


def published_unknown(index: PageIndex) -> None:
    with index.reserve(B, shards=2) as new:
        new.publish(2)


def published_abandoned(index: PageIndex) -> None:
    new = index.reserve(B)
    new.abandon()
    new.publish()


def in_cleared(index: PageIndex) -> None:
    space = index.namespace("w")
    index.clear(space)
    index.reserve(B, namespace=space)


def key_of_written(index: PageIndex) -> None:
    with index.reserve(B) as new:
        index.keys_of(new.pages)


def pin_dropped(index: PageIndex) -> None:
    with index.match(A) as lease:
        pages, generations = lease.pages.copy(), index.generations(lease.pages)
    index.drop(A)
    index.pin(pages, generations)


def late(index: PageIndex, other: PageIndex) -> None:
    with index.match(A) as lease, lease.ticket([other.client_id], timeout=-1) as ticket:
        other.adopt(bytes(ticket))


def adopt_ended(index: PageIndex, other: PageIndex) -> None:
    with index.match(A) as lease, lease.ticket([other.client_id]) as ticket:
        with other.adopt(bytes(ticket)):
            other.done(bytes(ticket))
    other.adopt(bytes(ticket))


def page_twice(index: PageIndex) -> None:
    with index.match(A) as lease:
        index.discard(np.repeat(lease.pages, 2))


def wait_for_written(index: PageIndex) -> None:
    with index.reserve(B):
        index.wait(B, timeout=0)


def verdict_twice(index: PageIndex, other: PageIndex) -> None:
    ticket = given(index, other)
    other.adopt(ticket).release()
    twice(lambda: other.done(ticket))


def adopt_reserved(index: PageIndex, other: PageIndex, shard: int | None) -> None:
    with index.reserve(B, shards=2) as new, new.ticket([other.client_id]) as ticket:
        other.adopt(bytes(ticket), shard=shard)


def ticket_for(index: PageIndex, *adopters: ClientId) -> None:
    with index.match(A) as lease:
        lease.ticket(list(adopters))


def ticket_of_nothing(index: PageIndex) -> None:
    with index.reserve(A) as new:
        new.ticket([index.client_id])


def too_many_tickets(index: PageIndex) -> None:
    with index.match(A) as lease:
        kept = []
        while True:
            kept.append(lease.ticket([index.client_id]))


def too_many_pages(index: PageIndex) -> None:
    with index.match_many(np.tile(A[:1], (60_000, 1)), np.arange(60_001)) as batch:
        batch._lease.ticket([index.client_id])


def too_many_namespaces(index: PageIndex) -> None:
    for number in range(257):
        index.namespace(f"w{number}")


NO_COUNTS = (-1, 1 << 32, 1.5, "1", True)

TABLE: Table = {
    ("gave keys that are no C-contiguous", ConfigError): [
        (
            "uint64",
            lambda index: index.match(np.zeros((2, 2), np.int64)),
            lambda index: index.protect(np.zeros((2, 2), np.int64)),
        ),
        (r"uint64 \(2, 3\)", lambda index: index.peek(np.zeros((2, 3), np.uint64))),
        ("strided view", lambda index: index.reserve(np.zeros((4, 2), np.uint64)[::2])),
    ],
    ("gave offsets that do not ascend", ConfigError): [
        (
            "offsets",
            lambda index: index.peek_many(A, [0, 1]),
            lambda index: index.match_many(A, np.array([1, 2])),
            lambda index: index.wait_many(A, [0.0, 2.0]),
        )
    ],
    ("gave something else than a `Namespace`", ConfigError): [
        *(
            ("Namespace", call)
            for space in (0, "w1", ("w1", ""), b"")
            for call in (
                lambda index, space=space: index.peek_many(A, TWO, namespace=space),
                lambda index, space=space: index.reserve(A, namespace=space),
                lambda index, space=space: index.clear(space),
                lambda index, space=space: index.peek(A, namespace=space),
                lambda index, space=space: index.match(A, namespace=space),
                lambda index, space=space: index.unprotect(A, namespace=space),
            )
        )
    ],
    ("gave `after` another number", ConfigError): [
        ("one key", lambda index, call=call: getattr(index, call)(B, after=A))
        for call in ("match", "reserve")
    ],
    ("gave `team` without `shard`", ConfigError): [
        ("one was given without", lambda index: index.reserve(B, team=1)),
        ("one was given without", lambda index: index.reserve(B, shard=0)),
        ("team", lambda index: index.reserve(B, team=0, shard=0)),
        ("shard", lambda index: index.reserve(B, team=1, shard=1)),
    ],
    ("gave a ticket of a team's", ConfigError): [
        (
            "without tickets",
            lambda index: index.reserve(B, shards=2, team=1, shard=0).ticket([index.client_id]),
        )
    ],
    ("shortened a lease", ConfigError): [
        ("pages", lambda index, n=n: index.match(A).shorten(n)) for n in (-1, 3)
    ],
    ("gave a ticket of pages that", ConfigError): [
        ("start", lambda index: index.match(A).ticket([index.client_id], start=3)),
        ("stop", lambda index: index.match(A).ticket([index.client_id], stop=3)),
    ],
    ("pinned a page by number", LeaseLost): [
        ("page 3 .* generation 0", lambda index: index.pin([3], [0])),
        ("not ready", pin_dropped),
    ],
    ("gave `pin` a page", ConfigError): [
        *(("0 to 7", lambda index, page=page: index.pin([page], [0])) for page in (8, 1 << 20)),
        ("page numbers", lambda index: index.pin([-1], [0])),
        ("page numbers", lambda index: index.pin([[1]], [0])),
        *(
            ("generations", lambda index, gens=gens: index.pin([1], gens))
            for gens in ([], [1, 2], [0.5], [-1], [1 << 32], 1, np.zeros((1, 1), np.uint32))
        ),
    ],
    ("took so many pages", ConfigError): [("pages", lambda index: index.take("a", pages=-1))],
    ("released a lease, batch, shard", LeaseLost): [
        (
            "released before",
            lambda index: ended(index.match(A)).release(),
            lambda index: ended(index.match_many(A, TWO)).release(),
        ),
        ("ended before", lambda index: ended(index.reserve(B)).release()),
    ],
    ("read `pages` of a released", LeaseLost): [
        ("may hold something else", lambda index: ended(index.match(A)).pages)
    ],
    ("split a batch twice", LeaseLost): [
        (
            "released or split before",
            lambda index: ended(index.match_many(A, TWO)).split(),
            lambda index: twice(index.match_many(A, TWO).split),
        )
    ],
    ("pinned a page more than 65,535", NoSpace): [("65,535", pinned_too_often)],
    ("asked for `tokens`", ConfigError): [("page_tokens", lambda index: index.match(A).tokens)],
    ("waited longer than `timeout`", WaitTimeout): [("2 keys", wait_for_written)],
    ("wrote through a read-only attach", PermissionDenied): [
        (
            "read-only",
            lambda reader: reader.match(A),
            lambda reader: reader.reserve(B),
            lambda reader: reader.evict(1),
            lambda reader: reader.clear(),
            lambda reader: reader.reap(),
            lambda reader: reader.grow(8),
        ),
        ("attached read-only", lambda index, reader: reader.adopt(given(index, index))),
    ],
    ("gave a `start` past the keys", ConfigError): [
        *(("start", lambda index, n=n: index.reserve(A, n)) for n in (-1, 3, 1.0, "0", None, True)),
        *(
            ("shards", lambda index, n=n: index.reserve(A, shards=n))
            for n in (0, -1, 65, 1.0, None)
        ),
    ],
    ("published what was abandoned", Abandoned): [("has ended", published_abandoned)],
    ("published a shard twice", LeaseLost): [("before|twice|already|done", published_twice)],
    ("published a shard that another", LeaseLost): [("adopted", published_adopted)],
    ("published a shard number", ConfigError): [("shard", published_unknown)],
    ("abandoned or released twice", LeaseLost): [
        ("ended before", lambda index: twice(index.reserve(B).abandon))
    ],
    ("reserved in a cleared", Abandoned): [("cleared", in_cleared)],
    ("reserved pages of an index", NoSpace): [("grow", lambda small: small.reserve(prompt(1, 3)))],
    ("another process holds the lock", LockTimeout): [
        ("has held the lock", lambda locked: locked.reserve(B))
    ],
    ("dropped from a `start`", ConfigError): [
        ("start", lambda index: index.drop(A, start=3)),
        ("0 to 4096", lambda index: index.oldest(4097)),
    ],
    ("discarded a lease", LeaseLost): [
        ("released", lambda index: index.discard(ended(index.match(A))))
    ],
    ("discarded, lent, or asked", LeaseLost): [
        ("not pinned", lambda index: index.discard(np.array([7], np.int32))),
        ("page 7 is not pinned", lambda index: index.keys_of(np.array([7], np.int32))),
        ("page 7 is not pinned", lambda index: index.generations(np.array([7], np.int32))),
    ],
    ("asked for the key", LeaseLost): [("key", key_of_written)],
    ("gave no page numbers", ConfigError): [
        ("page numbers as int32", lambda index: index.discard([0.5])),
        ("once", page_twice),
    ],
    ("kept, dropped, listed, discarded or made first", PermissionDenied): [
        (
            "attached read-only",
            lambda reader: reader.protect(A),
            lambda reader: reader.unprotect(A),
            lambda reader: reader.evict_first(A),
            lambda reader: reader.drop(A),
            lambda reader: reader.oldest(1),
            lambda reader: reader.discard(np.array([0], np.int32)),
        )
    ],
    ("adopted a ticket of another cache", LeaseLost): [
        ("another cache", lambda index, small: small.adopt(given(index, index)))
    ],
    ("adopted past its deadline", LeaseLost): [("deadline", late)],
    ("adopted twice from one client", LeaseLost): [
        (
            "by this client before",
            lambda index, other: (lambda one: twice(lambda: other.adopt(one)))(given(index, other)),
        )
    ],
    ("adopted what was given to others", LeaseLost): [
        (
            "adopters",
            lambda index, other: index.adopt(given(index, other)),
            lambda index, other: index.done(given(index, other)),
        )
    ],
    ("adopted or finished a ticket", LeaseLost): [("ended", adopt_ended)],
    ("gave bytes that are no ticket", LeaseLost): [
        *(
            (words, call)
            for one, words in (
                (b"", "has 16 bytes, found 0"),
                (bytes(15), "has 16 bytes, found 15"),
                (bytes(17), "has 16 bytes, found 17"),
                (bytes(16), "another cache"),
                (b"\xff" * 16, "another cache"),
            )
            for call in (
                lambda index, one=one: index.adopt(one),
                lambda index, one=one: index.done(one),
            )
        )
    ],
    ("adopted a reservation's ticket without `shard`", ConfigError): [
        *(
            ("shard|out of range", lambda index, other, n=n: adopt_reserved(index, other, n))
            for n in (None, 2, 63, -1, 65, "0", True)
        )
    ],
    ("told a verdict twice", LeaseLost): [("verdict before", verdict_twice)],
    ("dropped or polled", LeaseLost): [
        ("dropped", lambda index: dropped(index).drop(), lambda index: dropped(index).poll())
    ],
    ("named no adopter", ConfigError): [
        ("at least one client", lambda index: ticket_for(index)),
        ("named twice", lambda index: ticket_for(index, index.client_id, index.client_id)),
        *((f"found {n}", lambda index, n=n: ticket_for(index, ClientId(n, 1))) for n in (0, 64)),
    ],
    ("named an adopter that has left", LeaseLost): [
        *(
            ("has left or died", call)
            for call in (
                lambda index: ticket_for(index, ClientId(63, 1)),
                lambda index, other: ticket_for(
                    index, ClientId(other.client_id.slot, other.client_id.epoch + 1)
                ),
            )
        )
    ],
    ("made a ticket of a reservation", ConfigError): [("no new pages", ticket_of_nothing)],
    ("held too many tickets", OutOfPages): [("ticket", too_many_tickets)],
    ("handed on more pages", OutOfPages): [("too many tickets", too_many_pages)],
    ("gave `clear_tenant` no name", ConfigError): [
        ("tenant", lambda worlds: worlds().manager.clear_tenant(""))
    ],
    ("gave a name longer than 47", ConfigError): [
        *(
            ("47 bytes of UTF-8 without NUL", call)
            for name in ("x" * 48, "é" * 24, "a\0b")
            for call in (
                lambda index, name=name: index.namespace(name),
                lambda index, name=name: index.namespace("w", name),
            )
        )
    ],
    ("gave a quota or a minimum that is no count", ConfigError): [
        *(("quota", lambda index, n=n: index.namespace("w", quota_pages=n)) for n in NO_COUNTS),
        *(("minimum", lambda index, n=n: index.namespace("w", minimum_pages=n)) for n in NO_COUNTS),
    ],
    ("gave `minimums` another form", ConfigError): [
        ("sizes by group", lambda worlds: worlds().cache.set_minimums([("kv", 1)])),
        ("one group", lambda worlds: worlds().cache.set_minimums({"kv": 1})),
    ],
    ("promised a namespace more than its quota", ConfigError): [
        (r"4 pages.*quota of 3", lambda index: index.namespace("w", quota_pages=3, minimum_pages=4))
    ],
    ("opened a 257th namespace", OutOfPages): [("256", too_many_namespaces)],
    ("looked for one that is not there", LeaseLost): [
        ("none", lambda reader: reader.namespace("w"))
    ],
}

test_refused = tried(TABLE)
