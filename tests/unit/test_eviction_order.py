"""The order of eviction is the creator's choice, and both orders keep what they promise."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.index_view import IndexView
from support.keys import prompt

from lightcache import Cache, PageIndex
from lightcache.errors import ConfigError, LayoutMismatch
from lightcache.layout import EVICTIONS, PageRecord
from lightcache.page_index import geometry

PAGES = 96
ORDERS = pytest.mark.parametrize("eviction", EVICTIONS)


def put(index: PageIndex, name: int, pages: int = 1) -> None:
    with index.reserve(prompt(name, pages)) as new:
        assert len(new.new) == pages
        new.publish()


@ORDERS
def test_it_is_kept_in_the_segment(segment_name: str, eviction: str) -> None:
    with PageIndex.create(segment_name, pages=8, eviction=eviction) as made:
        assert made.eviction == eviction
        assert made.segment.nbytes == geometry(8, eviction).end
        with PageIndex.attach(segment_name) as attached:
            assert attached.eviction == eviction
            assert EVICTIONS[int(IndexView(attached).root().eviction)] == eviction
        assert made.stats().eviction == eviction
        other = EVICTIONS[1 - EVICTIONS.index(eviction)]
        with pytest.raises(LayoutMismatch) as refused:
            PageIndex.open(segment_name, pages=8, eviction=other)
        assert f'eviction: expected "{other}", found "{eviction}"; use what it was' in str(
            refused.value
        )


@ORDERS
def test_who_says_none_takes_what_is_there(segment_name: str, eviction: str) -> None:
    config = {"model": "m"}
    with PageIndex.create(segment_name, pages=8, eviction=eviction, config=config):
        with PageIndex.open(segment_name, pages=8, config=config) as opened:
            assert opened.eviction == eviction
        with PageIndex.attach(segment_name, config={"pages": 8, **config}) as attached:
            assert attached.eviction == eviction
        for wrong in ({}, {"model": "n"}, {**config, "more": 1}):
            with pytest.raises(LayoutMismatch, match="m"):
                PageIndex.open(segment_name, pages=8, config=wrong)
        with pytest.raises(LayoutMismatch, match="pages: expected 9, found 8; use"):
            PageIndex.open(segment_name, pages=9, config=config)
    with PageIndex.open(f"{segment_name}-new", pages=8) as new:
        assert new.eviction == "hz"


def test_of_a_default_name_an_existing_cache_keeps_its_order(
    segment_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it keeps its size."""
    own = {"page_bytes": 4096, "fingerprint": "f", "secret_file": tmp_path / "secret"}
    with Cache.open(model=segment_name, pages=4, **own) as made:
        with Cache.open(model=segment_name, pages=4, eviction="lru", **own) as opened:
            assert opened.index.eviction == "hz"
        assert '"lru" was asked for' in caplog.text
        assert f"lightcache rm {made.name}" in caplog.text


def test_a_cache_takes_what_is_there(segment_name: str, tmp_path: Path) -> None:
    own = {"pages": 4, "page_bytes": 4096, "fingerprint": "f", "secret_file": tmp_path / "secret"}
    with Cache.create(segment_name, page_tokens=1, eviction="hz", **own) as made:
        assert made.index.eviction == "hz"
        with Cache.open(segment_name, **own) as opened, Cache.attach(segment_name) as attached:
            assert opened.index.eviction == attached.index.eviction == "hz"
        with pytest.raises(LayoutMismatch, match="eviction") as refused:
            Cache.open(segment_name, eviction="lru", **own)
        assert "bytes" not in str(refused.value)


@ORDERS
@pytest.mark.parametrize("seed", range(4))
def test_what_is_listed_is_what_goes(segment_name: str, eviction: str, seed: int) -> None:
    """Prompts of a page, used at random; nothing is used meanwhile."""
    chance = random.Random(seed)
    with PageIndex.create(segment_name, pages=PAGES, eviction=eviction) as index:
        if eviction == "hz":  # the unit of ages: no page is older after a few calls
            at = index.segment.address + geometry(PAGES, "hz").advice
            ctypes.c_uint32.from_address(at).value = 20
        for name in range(PAGES):
            put(index, name)
        for _ in range(200):
            index.match(prompt(chance.randrange(PAGES), 1)).release()
        index.repair()  # every page lies where its word says
        with index.oldest(PAGES) as found:
            listed = [bytes(key) for key in found.keys]
        assert len(listed) == PAGES
        gone: list[bytes] = []
        while index.evict(1):
            left = [key for key in found.keys if bytes(key) not in gone]
            gone += [bytes(key) for key in left if index.peek(key[None]) == 0]
        assert gone == listed
        assert index.check().clean


@ORDERS
def test_a_full_cache_goes_on(segment_name: str, eviction: str) -> None:
    """With pins, protected pages, a quota and two handles; learning on the way."""
    chance = random.Random(5)
    with (
        PageIndex.create(segment_name, pages=PAGES, eviction=eviction) as index,
        PageIndex.attach(segment_name) as other,
    ):
        space = other.namespace(tenant="t", quota_pages=20)
        for i in range(600):
            put(index, i, 1 + i % 5)
            lease = other.match(prompt(chance.randrange(max(0, i - 30), i + 1), 5))
            with other.reserve(prompt(10_000 + i, 2), namespace=space) as new:
                new.publish()
            if i % 100 == 99:
                assert index.check().clean
                other.protect(prompt(i, 1))
            lease.release()
        index.evict(PAGES)
        assert index.stats().free == PAGES - index.stats().kept > 80


def test_a_scan_leaves_what_is_used_again(segment_name: str) -> None:
    """The same traffic in both orders: favourites among prompts that never return."""
    hits = {}
    for eviction in EVICTIONS:
        chance = random.Random(1)
        with PageIndex.create(f"{segment_name}-{eviction}", pages=200, eviction=eviction) as index:
            hits[eviction] = 0
            for i in range(6000):
                index.set_clock(1 + i / 10)
                name = chance.randrange(150) if i % 4 == 0 else 1000 + i
                with index.match(prompt(name, 1)) as found:
                    hits[eviction] += len(found)
                    if not len(found):
                        put(index, name)
    assert hits["hz"] > 1.5 * hits["lru"]


def test_dump_and_ls_say_it(run: Callable[..., Any], segment_name: str, tmp_path: Path) -> None:
    options = ("--page-bytes", 4096, "--fingerprint", "f", "--secret-file", tmp_path / "s")
    run("create", segment_name, "--pages", 3, *options, "--page-tokens", 1, "--eviction", "hz")
    assert json.loads(run("dump", segment_name, "--json").stdout)["segment"]["eviction"] == "hz"
    assert "least likely to be used again" in run("dump", segment_name).stdout
    entries = json.loads(run("ls", "--json").stdout)
    assert '"eviction": "hz"' in json.dumps(entries)
    assert "every invariant holds" in run("check", segment_name).stdout
    run("rm", segment_name)


def test_a_plan_is_a_hit_when_it_is_taken(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8, eviction="hz") as index:
        put(index, 1, 2)
        with index.match(prompt(1, 2)) as lease:
            at = index.segment.address + geometry(8).page + 64 * int(lease.pages[0])
        page = PageRecord.from_address(at)
        hits = [page.used >> 9 & 127]
        for _ in range(5):
            index.plan("a", prompt(1, 2))
        hits.append(page.used >> 9 & 127)
        index.take("a").release()
        hits.append(page.used >> 9 & 127)
        assert hits == [1, 1, 2]


def test_what_a_plan_does_not_give_is_not_hit(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8, eviction="hz") as index:
        put(index, 1, 2)
        with index.match(prompt(1, 2)) as lease:
            begin = index.segment.address + geometry(8).page
            pages = [PageRecord.from_address(begin + 64 * int(page)) for page in lease.pages]

        def hits() -> list[int]:
            return [page.used >> 9 & 127 for page in pages]

        index.plan("a", prompt(1, 2))
        assert index.cancel("a")
        assert hits() == [1, 1]
        index.plan("a", prompt(1, 2), timeout=0)
        assert not index.cancel("a")  # it has expired
        assert hits() == [1, 1]
        index.plan("a", prompt(1, 2))
        index.take("a", pages=1).release()
        assert hits() == [2, 1]


def test_what_a_plan_comes_after_is_used_when_it_is_taken(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8, eviction="hz") as index:
        put(index, 1, 3)
        keys = prompt(1, 3)
        with index.match(keys) as lease:
            at = index.segment.address + geometry(8).page + 64 * int(lease.pages[0])
        page = PageRecord.from_address(at)
        before = page.used
        for _ in range(3):
            assert index.plan("a", keys[1:], after=keys[:1]) == 2
        assert page.used == before
        with pytest.raises(ConfigError, match="after"):
            index.plan("a", keys[1:], after=keys)
        index.take("a").release()
        assert page.used >> 16 > before >> 16
        assert page.used & 0xFFFF == before & 0xFFFF  # no hit


def test_a_clock_that_is_too_far(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8, eviction="hz") as index:
        index.set_clock(5e8)
        put(index, 1)
        index.set_clock(None)
        assert index.evict(1) == 1
        with pytest.raises(ConfigError, match="up to 5e8"):
            index.set_clock(5.1e8)
