"""Independent pages, evicted while they have children; and lookup of each key by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.index_view import IndexView
from support.keys import keys, prompt
from support.refusals import refused

from lightcache import Cache, ConfigError, Detached, LayoutMismatch, PageIndex, layout
from lightcache._arguments import Keys
from lightcache.layout import PageState
from lightcache.namespaces import Namespace
from lightcache.tools import cli

PAGES = 8
CACHE: dict[str, Any] = {
    "pages": 4,
    "page_bytes": 4096,
    "fingerprint": "states",
    "secret": b"a secret of tests",
}


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=PAGES, independent=True) as made:
        yield made
        report = made.check()
        assert report.clean, report.message


def put(index: PageIndex, path: Keys, i: int, namespace: Namespace | None = None) -> None:
    """A checkpoint under key i: hung on that of key i - 1, which alone counts as used."""
    with index.reserve(path[max(0, i - 1) : i + 1], min(i, 1), namespace=namespace) as new:
        assert new.publish()


def put_all(index: PageIndex, path: Keys) -> None:
    for i in range(len(path)):
        put(index, path, i)


# ---- what goes


def test_repair_makes_the_queue_anew(index: PageIndex) -> None:
    path = prompt(1, 5)
    put_all(index, path)
    assert index.drop(path[:2], start=1) == 1
    at = index.segment.address + IndexView(index).geometry.root
    layout.RootRecord.from_address(at).queued = 1
    assert index.check().invariant == 14
    index.repair()
    assert index.stats().evictable == 4
    assert index.children(path).tolist() == [0, -1, 1, 1, 0]


# ---- looking up each key for itself


def test_last_ready(index: PageIndex) -> None:
    path = prompt(1, 40)
    put_all(index, path[:3])
    assert index.last_ready(path) == 3
    assert index.drop(path[:2], start=1) == 1
    assert index.last_ready(path) == 3
    assert index.last_ready(path[:2]) == 1
    assert index.last_ready(path[3:]) == 0
    assert index.last_ready(path[:0]) == 0
    with index.match(path[2:3]) as lease:
        assert len(lease) == 1
    every = np.concatenate([path, path[:2], path[:0], path[3:]])
    found = index.last_ready_many(every, [0, 40, 42, 42, 79])
    assert found.tolist() == [3, 1, 0, 0]
    assert found.dtype == np.int32


def test_children_tell_where_prompts_part(index: PageIndex) -> None:
    for end in (5, 6, 7):
        put_all(index, keys(1, 2)) if end == 5 else None
        put(index, keys(1, 2, end), 2)
    assert index.children(keys(1, 2, 5)).tolist() == [1, 3, 0]
    assert index.children(keys(1, 2, 5)).dtype == np.int32
    index.drop(keys(1, 2, 6), start=2)
    assert index.children(keys(1, 2, 5)).tolist() == [1, 2, 0]


def test_a_reader_looks_too(index: PageIndex) -> None:
    path = prompt(1, 2)
    put_all(index, path)
    with PageIndex.attach(index.name, readonly=True) as reader:
        assert reader.independent
        assert reader.last_ready(path) == 2
        assert reader.last_ready_many(path, [0, 1, 2]).tolist() == [1, 1]
        assert reader.children(path).tolist() == [1, 0]


def test_bad_arguments(index: PageIndex) -> None:
    for call in (index.last_ready, index.children):
        refused(ConfigError, "uint64", call, np.zeros((2, 2), np.int64))
    refused(ConfigError, "offsets", index.last_ready_many, prompt(1, 2), [0, 1])


def test_closed(segment_name: str) -> None:
    index = PageIndex.create(segment_name, pages=PAGES, independent=True)
    index.close()
    for call in (index.last_ready, index.children):
        refused(Detached, "", call, prompt(1, 2))
    refused(Detached, "", index.last_ready_many, prompt(1, 2), [0, 2])


# ---- the default


def test_independent_is_part_of_the_configuration(index: PageIndex) -> None:
    name = index.name
    assert index.independent
    for call in (
        lambda: PageIndex.open(name, pages=PAGES),
        lambda: PageIndex.open(name, pages=PAGES, independent=False),
        lambda: PageIndex.attach(name, independent=False),
    ):
        refused(LayoutMismatch, "independent", call)
    for flat in (None, True):
        with PageIndex.attach(name, independent=flat) as other:
            assert other.independent
    with PageIndex.open(name, pages=PAGES, independent=True) as other:
        assert other.independent
    assert len(index.clients()) == 1


def test_an_index_that_is_not_independent(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=PAGES):
        with pytest.raises(LayoutMismatch, match="independent"):
            PageIndex.open(segment_name, pages=PAGES, independent=True)
        with pytest.raises(LayoutMismatch, match="expected True, found False"):
            PageIndex.attach(segment_name, independent=True)
        with PageIndex.attach(segment_name, independent=False) as other:
            assert not other.independent
    with pytest.raises(ConfigError, match="independent="):
        PageIndex.create(segment_name, pages=PAGES, config={"independent": True})


# ---- the flag of a page


def kinds(index: PageIndex) -> dict[tuple[int, int], bool]:
    """Whether the page of each key is independent."""
    pages = IndexView(index).pages()
    return {page.key: page.independent for page in pages if page.state is PageState.READY}


def test_the_index_says_only_what_its_calls_do_by_default(segment_name: str) -> None:
    """Every call that makes pages, told and untold."""
    for default in (False, True):
        with PageIndex.create(segment_name, pages=PAGES * 4, independent=default) as index:
            for seed, told in enumerate((None, False, True)):
                expected = default if told is None else told
                chain, many, named = (prompt(10 * seed + i, 2) for i in range(3))
                with index.reserve(chain, independent=told) as new:
                    new.publish()
                for new in index.reserve_batch(many, [0, 1, 2], independent=told).split():
                    new.publish()
                    new.release()
                held = index.allocate(2)
                index.name_pages(held.pages, named, independent=told)
                index.unpin(held.pages)
                for key in (*chain.tolist(), *many.tolist(), *named.tolist()):
                    assert kinds(index)[tuple(key)] is expected
            assert index.check().clean


def test_both_kinds_in_one_index(segment_name: str) -> None:
    """A prefix goes from its end; what is independent goes by its last use, and holds back no page
    of a prefix that it comes behind."""
    with PageIndex.create(segment_name, pages=PAGES, eviction="lru") as index:
        path = prompt(1, 6)
        with index.reserve(path[:3]) as new:
            new.publish()
        with index.reserve(path, 3, independent=True) as new:
            new.publish()
        assert list(kinds(index).values()) == [False] * 3 + [True] * 3
        assert index.children(path).tolist() == [1, 1, 0, 1, 1, 0]
        index.match(path[5:]).release()
        assert index.evict(1) == 1
        assert index.children(path).tolist() == [1, 0, -1, 1, 1, 0]
        assert index.stats().evictable == 1 + 3
        assert index.evict(2) == 2
        assert index.children(path).tolist() == [1, 0, -1, -1, -1, 0]
        assert index.evict(2) == 2
        assert index.children(path).tolist() == [-1, -1, -1, -1, -1, 0]
        assert index.check().clean


def test_a_cache_passes_it_on(segment_name: str) -> None:
    with Cache.create(segment_name, **CACHE) as cache:
        with cache.reserve(prompt(1, 2), independent=True) as new:
            assert new.publish()
        assert all(kinds(cache.index).values())


def test_dump_shows_the_flags(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=PAGES) as index:
        for seed, independent in enumerate((False, True)):
            with index.reserve(prompt(seed, 1), independent=independent) as new:
                new.publish()
        index.protect(prompt(0, 1))
        shown = CliRunner().invoke(cli.group, ["dump", segment_name, "--pages", "--json"])
        pages = json.loads(shown.output)["pages"]["pages"]
        assert [page["independent"] for page in pages] == [False, True]
        assert [page["kept"] for page in pages] == [True, False]
        table = CliRunner(env={"COLUMNS": "200"}).invoke(
            cli.group, ["dump", segment_name, "--pages"]
        )
        flags = [line.split("│")[-2].strip() for line in table.output.splitlines() if "│" in line]
        assert flags == ["kept", "independent"]


# ---- the default of a cache


def test_a_cache_may_be_independent(segment_name: str) -> None:
    with Cache.create(segment_name, **CACHE, independent=True) as cache:
        assert cache.index.independent
        named = {**CACHE, "independent": False}
        refused(LayoutMismatch, "independent", Cache.open, segment_name, **named)
        with pytest.raises(LayoutMismatch, match="independent"):
            Cache.attach(segment_name, secret=CACHE["secret"], independent=False)
        for given in ({}, {"independent": True}):
            with Cache.open(segment_name, **CACHE, **given) as other:
                assert other.index.independent


def test_tools_say_so(segment_name: str) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli.group, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    for flat in (True, False):
        with Cache.create(segment_name, **CACHE, independent=flat):
            (entry,) = [e for e in json.loads(run("ls", "--json")) if e["name"] == segment_name]
            assert entry["independent"] is flat
            (line,) = [line for line in run("ls").splitlines() if segment_name in line]
            assert ("independent index" in line) is flat
            assert json.loads(run("dump", segment_name, "--json"))["segment"]["independent"] is flat
            assert (", independent" in run("dump", segment_name)) is flat
            run("check", segment_name)
