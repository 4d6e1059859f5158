"""Two checkers, one of the core and one of ours, look at the same states and at the same damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from checker import raw
from checker.raw import Copy

from lightcache import PageIndex, snapshot
from lightcache.layout import NIL, PageState

PAGES = 40


def keys(seed: int, n: int) -> Any:
    """Keys that fall into two chains."""
    made = np.random.default_rng(seed).integers(0, 1 << 64, (n, 2), np.uint64)
    made[:, 0] -= made[:, 0] % np.uint64(1 << 16) - made[:, 0] % np.uint64(2)
    return made


@pytest.fixture
def rich(segment_name: str) -> Iterator[Any]:
    """A copy of an index in which there is some of everything."""
    with PageIndex.create(segment_name, pages=PAGES, eviction="lru") as index:
        for seed in (1, 2):
            with index.reserve(keys(seed, 6)) as got:
                got.publish()
        assert index.protect(keys(1, 6)[:2]) == 2
        index.namespace("promised", quota_pages=9, minimum_pages=3)
        space = index.namespace("weights", "tenant")
        with index.reserve(keys(3, 4), namespace=space) as got:
            got.publish()
        pinned = index.match(keys(3, 4), namespace=space)
        index.clear(space)  # four doomed pages that are still pinned
        lease = index.match(keys(2, 6))
        ticket = lease.ticket([index.client_id])
        writing = index.reserve(keys(4, 5), shards=2)
        writing.publish(0)
        with index.reserve(keys(7, 3), independent=True) as got:
            got.publish()
        index.reserve(keys(5, 8)).abandon()  # free pages below the mark
        index.reserve(keys(6, 2)).abandon()
        index.evict(1)  # also collects the doomed ones that nobody pins
        assert index.stats().doomed == 4
        numbers = index.allocate(2)
        yield raw.copy_of(segment_name)
        for held in (writing, lease, pinned):
            held.release()
        numbers.free()
        ticket.drop()


def core_says(copy: Any) -> str:
    """The core's finding; empty if it finds nothing."""
    report = snapshot.check_copy(copy.copy(), PAGES, quiet=True)
    return "" if report.clean else report.message


def test_both_find_a_rich_state_sound(rich: Any) -> None:
    assert raw.check(rich.copy()) == []
    assert core_says(rich) == ""


def page(copy: Copy, state: PageState, number: int = 0) -> int:
    """The n-th page of a state."""
    return int(np.flatnonzero((copy.pages["word"] & 0xF) == state)[number])


def independent(copy: Copy, number: int) -> tuple[Any, int]:
    """The words of pages, and the n-th that is independent."""
    words = copy.pages["word"]
    return words, int(np.flatnonzero(words & 0x40)[number])


def list_of(copy: Copy) -> int:
    """A list of the eviction queue that holds something."""
    lists = np.arange(len(copy.heads) - 1)
    return int(lists[copy.heads["next"][:-1] != PAGES + lists][0])


def active(copy: Copy) -> int:
    """The reservation that is being written."""
    return int(np.flatnonzero(copy.reservations["state"] == 1)[0])


def first_chunk(copy: Copy) -> int:
    """Of the reservation that is being written."""
    return int(copy.reservations["pages"]["first"][active(copy)])


def hang_in_a_circle(copy: Copy) -> None:
    """Two pages, each the other's parent and only child, neither in the queue any more: nothing
    else is wrong."""
    root, other = [p for p in range(PAGES) if copy.pages["word"][p] & 0xF == READY][:2]
    assert copy.pages["parent"][other] == root
    copy.pages["parent"][root] = other
    copy.pages["parent_gen"][root] = copy.pages["gen"][other]
    for page in np.flatnonzero(copy.pages["parent"] == other):
        if page != root:
            copy.pages["children"][other] += 1


def put(part: Callable[[Copy], tuple[Any, Any]], change: Callable[[Any], Any]) -> Any:
    """Damage: one word, found by `part` as (array, place), changed by `change`."""

    def damage(copy: Copy) -> None:
        array, place = part(copy)
        array[place] = change(int(array[place]))

    return damage


def of_page(field: str, state: PageState, change: Callable[[int], int], number: int = 0) -> Any:
    """Damage a field of a page of that state."""
    return put(lambda c: (c.pages[field], page(c, state, number)), change)


def of_root(field: str, change: Callable[[int], int]) -> Any:
    """Damage a total."""

    def damage(copy: Copy) -> None:
        copy.root[field] = change(int(copy.root[field]))

    return damage


def up(value: int) -> int:
    return value + 1


READY, WRITING, FREE, DOOMED, HELD = (
    PageState.READY,
    PageState.WRITING,
    PageState.FREE,
    PageState.DOOMED,
    PageState.HELD,
)
DAMAGES: dict[str, Any] = {
    "a bucket lost its chain": put(lambda c: (c.buckets, 0), lambda _: NIL),
    "a bucket leads outside": put(lambda c: (c.buckets, 0), lambda _: PAGES),
    "a bucket leads to another's page": put(lambda c: (c.buckets, 7), lambda _: 0),
    "a chain goes round": put(lambda c: (c.pages["next"], page(c, READY)), lambda _: 0),
    "a key of another chain": of_page("lo", READY, lambda v: v ^ 4),
    "an odd generation": of_page("gen", READY, up),
    "ready became free": of_page("word", READY, lambda _: 0),
    "ready became evicting": of_page("word", READY, lambda v: v + 1),
    "a state that is none": of_page("word", READY, lambda v: v | 0xF),
    "writing lost its reservation": of_page("word", WRITING, lambda v: v & 0xFFFF),
    "held by nobody": of_page("word", HELD, lambda word: word & 0xF),
    "held by a slot that there is not": of_page("word", HELD, lambda _: 5 | 64 << 8),
    "held by one who does not pin it": of_page("word", HELD, lambda _: 5 | 7 << 8),
    "held, with a flag": of_page("word", HELD, lambda word: word | 0x10),
    "held became free": of_page("word", HELD, lambda _: 0),
    "free became held": of_page("word", FREE, lambda _: 5 | 1 << 8),
    "the count of held pages": of_root("held", up),
    "free became doomed": of_page("word", FREE, lambda _: 4),
    "doomed became free": of_page("word", DOOMED, lambda _: 0),
    "another namespace": of_page("word", READY, lambda v: v | 0x700),
    "one child too many": of_page("children", READY, up),
    "a parent lost": put(lambda c: (c.pages["parent"], page(c, READY, 1)), lambda _: NIL),
    "a list's head": put(lambda c: (c.heads["next"], list_of(c)), lambda _: 0),
    "a list's end": put(lambda c: (c.heads["prev"], list_of(c)), lambda _: PAGES),
    "the doomed list's head": put(lambda c: (c.heads["next"], -1), lambda _: PAGES + 512),
    "an occupied bit": put(lambda c: (c.root["occupied"], 5), lambda v: v ^ 2),
    "the free stack's head": of_root("free_head", lambda _: NIL),
    "the free stack's length": of_root("free_count", up),
    "the mark of used pages": of_root("fresh", up),
    "memory for more pages than there are": of_root("grown", lambda _: PAGES + 1),
    "the count of named pages": of_root("named", up),
    "the count of pages being written": of_root("writing", lambda _: 0),
    "the count of doomed pages": of_root("doomed", up),
    "the count of queued pages": of_root("queued", up),
    "the count of reservations": of_root("res_used", up),
    "the count of tickets": of_root("ticket_used", up),
    "the count of chunks": of_root("chunk_used", up),
    "a reservation without shards": put(
        lambda c: (c.reservations["shards"], active(c)), lambda _: 0
    ),
    "a reservation that ended unseen": put(
        lambda c: (c.reservations["state"], active(c)), lambda _: 0
    ),
    "a reservation's list": put(
        lambda c: (c.reservations["pages"]["count"], active(c)), lambda v: v - 1
    ),
    "a ticket's list": put(lambda c: (c.tickets["pages"]["first"], 0), lambda _: NIL),
    "a pin of a ticket lost": put(lambda c: (c.rows[0], page(c, READY, 7)), lambda _: 0),
    "a pin of nobody": put(lambda c: (c.rows[9], page(c, READY)), lambda _: 1),
    "a pin without its bit": of_page("pins", READY, lambda _: 0, 7),
    "a pin of a free page": put(lambda c: (c.rows[1], page(c, FREE)), lambda _: 1),
    "a namespace's pages": put(lambda c: (c.spaces["pages"], 0), up),
    "a group's pages": put(lambda c: (c.root["group"]["pages"], 0), up),
    "a page of another group": of_page("word", READY, lambda v: v | 1 << 27, 5),
    "a group promised more than there is": put(
        lambda c: (c.root["group"]["minimum"], 4), lambda _: PAGES - 2
    ),
    "writing became ready": of_page("word", WRITING, lambda v: v + 1),
    "a repair under way": of_root("repairing", lambda _: 1),
    "a tick that is to come": of_page("used", READY, lambda v: v + (1 << 40)),
    "a free page with a flag": of_page("word", FREE, lambda _: 0x10),
    "pages that hang on each other": lambda c: hang_in_a_circle(c),
    "the queue's present": put(lambda c: (c.root["now"], 0), lambda _: 63),
    "the stack of free reservations": of_root("res_head", lambda _: NIL),
    "a free reservation that is in use": put(
        lambda c: (c.reservations["next_free"], int(c.root["res_head"])), lambda _: 0
    ),
    "the mark of used reservations": of_root("res_fresh", lambda _: 0),
    "a reservation of nobody": put(lambda c: (c.reservations["owner"], active(c)), lambda _: 64),
    "a state of a reservation": put(lambda c: (c.reservations["state"], active(c)), lambda _: 3),
    "a reservation of another namespace": put(
        lambda c: (c.reservations["ns"], active(c)), lambda v: v ^ 1
    ),
    "a reservation's last chunk": put(
        lambda c: (c.reservations["pages"]["last"], active(c)), lambda _: NIL
    ),
    "a page that is listed twice": put(
        lambda c: (c.chunks["page"][first_chunk(c)], 1), lambda v: v - 1
    ),
    "a shard of another generation": put(
        lambda c: (c.reservations["shard"][active(c)], 0), lambda v: v + 256
    ),
    "a dead shard": put(
        lambda c: (c.reservations["shard"][active(c)], 1), lambda v: v & ~0xC0 | 0x80
    ),
    "an end that nobody was told of": put(
        lambda c: (c.reservations["shard"][active(c)], 1), lambda v: v | 0x40
    ),
    "the end of a reservation that is none": put(
        lambda c: (c.root["completed"], 15), lambda _: 1 << 63
    ),
    "a chunk that is free and in use": of_root("chunk_head", lambda _: 0),
    "a state of a ticket": put(lambda c: (c.tickets["state"], 0), lambda _: 4),
    "a ticket of more pages than there are": put(
        lambda c: (c.tickets["total"], 0), lambda _: 0x7FFFFFFF
    ),
    "a ticket of no reservation": put(lambda c: (c.tickets["reservation"], 0), lambda _: 65),
    "a ticket adopted unasked": put(lambda c: (c.tickets["adopted"][0], 1), lambda _: 4),
    "a state of a namespace": put(lambda c: (c.spaces["state"], 9), lambda _: 4),
    "a namespace being cleared": put(lambda c: (c.spaces["state"], 0), lambda _: 2),
    "a namespace with pages is closed": put(lambda c: (c.spaces["state"], 0), lambda _: 3),
    "the count of kept pages": of_root("kept", up),
    "kept no more": of_page("word", READY, lambda v: v & ~0x20),
    "kept and in the queue": of_page("word", READY, lambda v: v | 0x20, -1),
    "kept and being written": of_page("word", WRITING, lambda v: v | 0x20),
    "kept and doomed": of_page("word", DOOMED, lambda v: v | 0x20),
    "independent no more": put(lambda c: independent(c, 0), lambda v: v & ~0x40),
    "the last independent no more": put(lambda c: independent(c, -1), lambda v: v & ~0x40),
    "an independent page hangs on a prefix": of_page("word", READY, lambda v: v | 0x40, 1),
    "independent and doomed": of_page("word", DOOMED, lambda v: v | 0x40),
    "more promised than there is": put(lambda c: (c.spaces["minimum"], 0), lambda _: PAGES - 2),
    "more promised than the quota": put(lambda c: (c.spaces["minimum"], 1), lambda _: 10),
    "a log that nobody left": put(lambda c: (c.lock["log_count"], 0), up),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_both_find_damage(rich: Any, what: str) -> None:
    copy = Copy(rich.copy())
    DAMAGES[what](copy)
    assert (copy.whole != rich).any(), "nothing was damaged"
    assert raw.check(copy.whole.copy()), "the checker in Python found nothing"
    assert core_says(copy.whole), "the core found nothing"


def test_undoing_agrees(rich: Any) -> None:
    """A log of both kinds is undone alike by the core and by us."""
    copy = Copy(rich.copy())
    words = copy.whole.view(np.uint32)
    word = int(copy.place.page) // 4 + 9
    link, other = word + 1, word + 16
    soft = 0x80000000
    entries = [  # a link twice; a state swapped; a state that another has changed since
        (link, int(words[link])),
        (link, 5),
        (soft | word, int(words[word])),
        (77, 0),
        (soft | other, int(words[other]) + 1),
        (88, 0),
    ]
    for i, (tag, old) in enumerate(entries):
        copy.log[i] = tag | old << 32
    copy.lock["word"] = 1  # whoever left a log left the lock
    copy.lock["log_count"] = len(entries)
    words[link], words[word] = 12345, 77
    theirs = copy.whole.copy()
    snapshot.check_copy(theirs, PAGES, quiet=True)
    copy.undo()
    assert (copy.whole == theirs).all()
    copy.log[: len(entries)] = Copy(rich).log[: len(entries)]
    copy.lock["word"] = 0
    assert (copy.whole == rich).all()


@pytest.mark.slow
def test_a_million_pages(segment_name: str) -> None:
    """Large indexes are checked too, in seconds."""
    with PageIndex.create(segment_name, pages=1_000_000, eviction="lru") as index:
        for seed in range(4):
            with index.reserve(keys_far(seed, 25_000)) as got:
                got.publish()
        index.evict(30_000)
        copy = raw.copy_of(segment_name)
        assert raw.check(copy) == []


def keys_far(seed: int, n: int) -> Any:
    """Keys that fall everywhere."""
    return np.random.default_rng(seed).integers(0, 1 << 64, (n, 2), np.uint64)
