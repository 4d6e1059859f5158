"""Leases and lookups: what they give, what they refuse, and that nothing is lost on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.filling import fill
from support.index_view import IndexView
from support.keys import keys, prompt
from support.refusals import refused
from support.scripts import with_support

from lightcache import ConfigError, Detached, LeaseLost, NoSpace, PageIndex
from lightcache.layout import EVICTIONS

Script = Callable[..., Any]


def pins(index: PageIndex) -> int:
    report = index.check()
    assert report.clean, report.message
    assert report.quiet
    return report.pins


# ---------------------------------------------------------------- what they give


def test_a_match_pins_the_longest_ready_prefix(index: PageIndex) -> None:
    have = fill(index, 1, 3)
    wanted = prompt(1, 5)
    assert index.peek(wanted) == 3
    with index.match(wanted) as lease:
        assert len(lease) == 3
        assert lease.pages.dtype == np.int32
        assert not lease.pages.flags.writeable
        assert lease.pages.tolist() == index.match(have).pages.tolist()
        assert pins(index) == 3
    assert pins(index) == 0
    assert len(lease) == 0
    assert "released" in repr(lease)


def test_pinned_pages_are_not_evicted(index: PageIndex) -> None:
    have = fill(index, 1, 16)
    with index.match(have[:4]):
        assert index.evict(16) == 12
        assert index.peek(have) == 4
    assert index.evict(16) == 4


def test_a_shortened_lease_keeps_its_first_pages(index: PageIndex) -> None:
    have = fill(index, 1, 8)
    with index.match(have) as lease:
        before = lease.pages
        lease.shorten(8)
        assert pins(index) == 8
        lease.shorten(3)
        assert lease.pages.tolist() == before[:3].tolist()
        assert (len(lease), pins(index)) == (3, 3)
        assert index.evict(16) == 5
        refused(ConfigError, "pages", lease.shorten, 4)
        refused(ConfigError, "pages", lease.shorten, -1)
        assert pins(index) == 3  # a refusal unpins nothing
        lease.shorten(0)
        assert (len(lease), lease.pages.tolist()) == (0, [])
    assert pins(index) == 0
    refused(LeaseLost, "released before", lease.shorten, 0)


def test_uncounted_lookups_are_no_hits(index: PageIndex) -> None:
    have = fill(index, 1, 4)
    space = np.concatenate([have, prompt(2, 2)])
    bounds = np.array([0, 4, 6])
    index.match(have, count=False).release()
    index.match_many(space, bounds, count=False).release()
    (client,) = index.clients()
    assert (client.lookups, client.hit_pages, client.missed_pages) == (3, 0, 0)
    index.match(have).release()
    index.match_many(space, bounds).release()
    (client,) = index.clients()
    assert (client.lookups, client.hit_pages, client.missed_pages) == (6, 8, 2)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_uncounted_lookups_age_as_others_with_lru(segment_name: str, eviction: str) -> None:
    """With "hz" they do once they are said to be uses."""
    with PageIndex.create(segment_name, pages=16, eviction=eviction) as index:
        have, later = fill(index, 1, 4), fill(index, 3, 4)
        with index.match(have, count=False) as lease:
            if eviction == "hz":
                lease.count_use()
        index.evict(4)
        assert (index.peek(have), index.peek(later)) == (4, 0)


def test_what_is_detached_is_unpinned_by_its_pages(index: PageIndex) -> None:
    have = fill(index, 1, 4)
    with index.match(have[:3]) as lease:
        pages = lease.detach()
        assert len(lease) == 0
    assert pages.dtype == np.int32
    assert len(pages) == 3
    assert pins(index) == 3  # leaving the with, or losing the lease, releases nothing
    for call in (lease.release, lease.detach, lambda: lease.pages):
        refused(LeaseLost, "", call)
    index.unpin(pages[:1])
    index.unname(pages[2:])
    assert index.peek(have) == 2
    index.free(pages[2:])
    index.unpin(pages[1:2])
    assert pins(index) == 0
    with index.match(prompt(9, 2)) as nothing:
        assert nothing.detach().tolist() == []


def test_a_batch_splits_into_leases_of_their_own(index: PageIndex) -> None:
    first, second = fill(index, 1, 2), fill(index, 2, 3)
    batch = index.match_many(np.concatenate([first, second]), np.array([0, 2, 5]))
    left, right = batch.split()
    assert pins(index) == 5
    left.release()
    assert pins(index) == 3
    assert len(right) == 3
    for call in (batch.split, batch.release, lambda: batch.pages):
        refused(LeaseLost, "", call)
    right.release()
    assert pins(index) == 0


def test_wait_many_gives_ready_prefixes(index: PageIndex) -> None:
    have = fill(index, 1, 2)
    asked = np.concatenate([have, prompt(2, 1)])
    assert index.wait_many(asked, np.array([0, 2, 3]), timeout=0).tolist() == [2, 0]


def test_tokens_need_a_page_size(index: PageIndex, segment_name: str) -> None:
    fill(index, 1, 2)
    with index.match(prompt(1, 2)) as lease, pytest.raises(ConfigError, match="page_tokens"):
        _ = lease.tokens
    config = {"page_tokens": 16}
    with PageIndex.create(segment_name + "t", pages=4, config=config) as other:
        fill(other, 1, 2)
        with other.match(prompt(1, 2)) as lease:
            assert lease.tokens == 32


# ---------------------------------------------------------------- what they refuse


def test_releasing_twice(index: PageIndex) -> None:
    fill(index, 1, 2)
    for lease in (index.match(prompt(1, 2)), index.match(keys())):
        lease.release()
        refused(LeaseLost, "released before", lease.release)
        with pytest.raises(LeaseLost):
            _ = lease.pages
    with index.match(prompt(1, 2)) as lease:
        lease.release()
    batch = index.match_many(prompt(1, 2), np.array([0, 2]))
    batch.release()
    refused(LeaseLost, "", batch.release)
    assert pins(index) == 0


def test_more_pins_than_a_row_counts(index: PageIndex) -> None:
    have = fill(index, 1, 2)
    many = np.tile(have[:1], (65_533, 1))
    held = index.match_many(many, np.arange(len(many) + 1))
    pair = index.match(have)
    last = index.match(have[:1])
    assert pins(index) == 65_533 + 2 + 1
    before = IndexView(index).rows().copy()
    for call in (
        lambda: index.match(have),
        lambda: index.match_many(have[::-1].copy(), np.array([0, 1, 2])),
        lambda: index.reserve(have),
    ):
        refused(NoSpace, "65,535", call)
        assert (IndexView(index).rows() == before).all(), "nothing was pinned"
    last.release()
    index.match(have).release()
    pair.release()
    held.release()
    assert pins(index) == 0


def test_use_after_close(segment_name: str) -> None:
    keeper = PageIndex.create(segment_name, pages=4)
    index = PageIndex.attach(segment_name)
    have = fill(index, 1, 2)
    lease = index.match(have)
    batch = index.match_many(have, np.array([0, 1, 2]))
    index.close()
    index.close()
    for call in (
        lambda: index.peek(have),
        lambda: index.peek_many(have, np.array([0, 2])),
        lambda: index.match(have),
        lambda: index.match_many(have, np.array([0, 2])),
        lambda: index.reserve(have),
        lambda: index.wait(have),
        lambda: index.evict(1),
        lambda: index.namespace("w"),
        index.clear,
        index.reap,
        index.check,
        index.repair,
        index.stats,
        index.clients,
        lambda: index.grow(1),
        lease.release,
        batch.release,
    ):
        refused(Detached, "", call)
    assert pins(keeper) == 0
    assert "closed" in repr(index)
    keeper.close()


def test_a_replaced_cache_is_detached(segment_name: str) -> None:
    index = PageIndex.create(segment_name, pages=4)
    have = fill(index, 1, 2)
    lease = index.match(have)
    assert type(index.segment).unlink(segment_name, force=True)
    other = PageIndex.create(segment_name, pages=4)
    for call in (
        lambda: index.peek(have),
        lambda: index.match(have),
        lambda: index.reserve(have),
        lambda: index.wait(have),
        lambda: index.evict(1),
        index.stats,
    ):
        refused(Detached, "replaced", call)
    lease.release()  # giving back is no use, but no error either
    index.close()
    assert other.peek(have) == 0
    other.close()


# ---------------------------------------------------------------- nothing is lost


def test_a_dropped_lease_releases(index: PageIndex) -> None:
    have = fill(index, 1, 2)
    lease = index.match(have)
    assert pins(index) == 2
    del lease
    assert pins(index) == 0


def test_a_lease_in_a_cycle_with_its_index_goes_quietly(
    script: Script, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The collector ends index and lease in an order of its own. Freed memory is overwritten here,
    # so that whoever still uses it does not get away with it.
    monkeypatch.setenv("MALLOC_PERTURB_", "165")
    done = script(
        with_support(
            """
import gc
from support.keys import prompt
from lightcache import PageIndex
class Engine: pass
keeper = PageIndex.create(sys.argv[1], pages=8)
for _ in range(3):
    engine = Engine()
    engine.me = engine
    engine.index = PageIndex.attach(sys.argv[1])
    with engine.index.reserve(prompt(1, 2)) as new:
        if len(new.new):
            new.publish()
    engine.lease = engine.index.match(prompt(1, 2))
    engine.new = engine.index.reserve(prompt(2, 2))
    engine.ticket = engine.lease.ticket([keeper.client_id])
    engine.adopted = engine.index.adopt(
        bytes(engine.new.ticket([engine.index.client_id])), shard=0)
    del engine, new
    gc.collect()
    keeper.reap()
    assert len(keeper.clients()) == 1
    assert keeper.check().clean
keeper.close()
"""
        ),
        segment_name,
    )
    assert done.stderr == ""


def test_an_interpreter_may_end_with_everything_held(
    script: Script, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_PERTURB_", "165")
    done = script(
        with_support(
            """
import ctypes, sys
from support.keys import prompt
from lightcache import PageIndex
index = PageIndex.create(sys.argv[1], pages=8)
with index.reserve(prompt(1, 2)) as new:
    new.publish()
lease = index.match(prompt(1, 2))
batch = index.match_many(prompt(1, 2), __import__("numpy").array([0, 2]))
new = index.reserve(prompt(2, 2))
ticket = lease.ticket([index.client_id])
adopted = index.adopt(bytes(ticket))
"""
        ),
        segment_name,
    )
    assert done.stderr == ""


def test_close_gives_back_what_is_held(segment_name: str) -> None:
    keeper = PageIndex.create(segment_name, pages=8)
    index = PageIndex.attach(segment_name)
    have = fill(index, 1, 2)
    held = [
        index.match(have),
        index.reserve(prompt(2, 3)),
        index.match(have).ticket([keeper.client_id]),
    ]
    assert pins(keeper) == 2 + 3 + 2
    index.close()
    assert pins(keeper) == 2  # the ticket's: it outlives its giver
    lease = keeper.adopt(bytes(held[2]))
    assert pins(keeper) == 2
    lease.release()
    assert keeper.stats().writing == 0
    assert keeper.peek(prompt(2, 3)) == 0
    assert pins(keeper) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held.clear()
    keeper.close()


def test_close_with_live_views_changes_nothing(segment_name: str) -> None:
    from lightcache import InUse

    index = PageIndex.create(segment_name, pages=4)
    have = fill(index, 1, 2)
    lease = index.match(have)
    view = index.segment.view(0, 8)
    refused(InUse, "views", index.close)
    assert pins(index) == 2
    assert index.evict(4) == 0, "the lease must still hold its pages"
    lease.release()
    del view
    index.close()


def test_a_forked_child_is_not_attached(script: Script, segment_name: str) -> None:
    done = script(
        with_support(
            """
import gc, os, sys
import numpy as np
from support.keys import prompt
from lightcache import Detached, PageIndex
index = PageIndex.create(sys.argv[1], pages=8)
a = prompt(1, 2)
with index.reserve(a) as new:
    new.publish()
lease = index.match(a)
batch = index.match_many(a, np.array([0, 2]))
new = index.reserve(prompt(2, 2))
ticket = lease.ticket([index.client_id])
child = os.fork()
if child == 0:
    calls = [
        lambda: index.peek(a), lambda: index.match(a), lambda: index.reserve(a),
        lambda: index.wait(a), lambda: index.evict(1), lambda: index.clear(),
        lambda: index.reap(), lambda: index.check(), lambda: index.stats(),
        lambda: index.namespace("x"), lambda: index.adopt(bytes(ticket)),
        lambda: index.done(bytes(ticket)), lambda: lease.ticket([(1, 1)]),
        ticket.poll, ticket.drop, new.publish, new.abandon, lease.release,
        batch.release, index.close,
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except Detached:
            continue
        print("no Detached from call", number, flush=True)
        os._exit(1)
    with index, lease, new, ticket:
        pass
    del calls, call, index, lease, batch, new, ticket
    gc.collect()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
report = index.check()
assert report.clean and report.pins == 2 + 2 + 2 + 2, report
assert index.peek(a) == 2
assert len(lease) == 2
new.publish()
for each in (lease, batch, new):
    each.release()
ticket.drop()
index.close()
"""
        ),
        segment_name,
    )
    assert done.stderr == ""
