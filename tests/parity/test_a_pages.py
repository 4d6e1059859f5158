"""Parity with CPU caches beside an engine, rows A1 to A5: pages, keys, lookups, allocation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.keys import array, chain, prompt
from support.scripts import with_support

from lightcache import Cache, NoSpace, PageIndex, hashing, pool, shm
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.shm.layout import LOCK_OFFSET, LockRecord

SECRET = b"a secret of tests"
Script = Callable[..., Any]


def geometry_of(tokens: int) -> PageGeometry:
    """Of a model of two layers."""
    shape = {"layers": 2, "heads": 2, "head_dim": 8, "dtype_bytes": 2, "page_tokens": tokens}
    return PageGeometry([KVGroup.attention("kv", **shape)])


def create(name: str, geometry: PageGeometry, **capacity: Any) -> Cache:
    """A cache for pages of this geometry."""
    return Cache.create(
        name,
        page_bytes=geometry.page_bytes,
        page_tokens=geometry.page_tokens,
        fingerprint=f"model {geometry.fingerprint()}",
        secret=SECRET,
        **capacity,
    )


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    """Of 12 pages."""
    with PageIndex.create(segment_name, pages=12, role="test") as made:
        yield made


def put(index: PageIndex, name: int, pages: int) -> Any:
    """Publish the pages of a prompt; its keys."""
    keys = prompt(name, pages)
    with index.reserve(keys) as new:
        assert not len(new.missing)
        new.publish()
    return keys


# ---------------------------------------------------------------- A1


@pytest.mark.parametrize("tokens", [1, 3, 16, 528, 800, 3584, 16384])
def test_a1_page_pool_of_a_given_size(segment_name: str, tokens: int) -> None:
    """A page has any number of tokens; how many there are follows from size and geometry."""
    geometry = geometry_of(tokens)
    size = 5 * geometry.page_bytes + geometry.page_bytes - 1
    with create(segment_name, geometry, size=size) as cache:
        assert cache.pages == 5
        assert cache.page_bytes == geometry.page_bytes >= geometry.used_bytes
        assert geometry.used_bytes == tokens * 2 * 2 * 2 * 8 * 2, "layers, K and V, heads, bytes"
        assert cache.pool.array.shape == (5, geometry.page_bytes)
        keys = cache.hash_pages(np.arange(2 * tokens))
        assert len(keys) == 2
        with cache.reserve(keys) as new:
            for page in new.pages.tolist():
                cache.pool[page][:] = page + 1
            new.publish()
        with cache.match(keys) as hit:
            assert hit.tokens == 2 * tokens
            assert all((cache.pool[page] == page + 1).all() for page in hit.pages.tolist())


def test_a1_sizes_as_people_write_them(segment_name: str) -> None:
    geometry = geometry_of(16)
    for size, pages in (("1MiB", 512), (1 << 20, 512), ("0.5 MiB", 256), ("1MB", 488)):
        with create(segment_name, geometry, size=size) as cache:
            assert cache.pages == pages


def test_a1_a_pool_that_does_not_fit_is_refused_before_its_memory_is_touched(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[Any] = []
    monkeypatch.setattr(pool, "_furnish", lambda *given: touched.append(given))
    geometry, folder = geometry_of(16384), os.statvfs("/dev/shm")
    size = 2 * folder.f_frsize * folder.f_blocks
    with pytest.raises(NoSpace, match=r"the pool needs .* found .*smaller"):
        create(segment_name, geometry, size=size)
    assert not touched
    assert not [path for path in Path("/dev/shm").iterdir() if segment_name in path.name]


# ---------------------------------------------------------------- A2


def test_a2_any_process_queries_list_dict_and_lock(segment_name: str, script: Script) -> None:
    """The status of pages in a list and a dict; another process reads and changes both."""
    with (
        shm.SharedList.create(f"{segment_name}-l", nodes=8, lists=2) as lru,
        shm.SharedDict.create(f"{segment_name}-d", capacity=8) as pages,
    ):
        for page in range(4):
            lru.push_back(page, 0)
            pages[page << 64 | page] = page
        script(
            """
import sys
from lightcache import shm
name = sys.argv[1]
with shm.SharedList.attach(name + "-l") as lru, shm.SharedDict.attach(name + "-d") as d:
    assert list(lru.snapshot(0)) == [0, 1, 2, 3]
    assert d.get(2 << 64 | 2) == 2 and d.get(9) is None
    lru.move_back(0, 1)
    assert d.pop(0) == 0
""",
            segment_name,
        )
        assert [list(lru.snapshot(which)) for which in range(2)] == [[1, 2, 3], [0]]
        assert sorted(value for _, value in pages.items()) == [1, 2, 3]
        lru.check()
        pages.check()


def test_a2_any_process_queries_the_index(index: PageIndex, script: Script) -> None:
    put(index, 1, 4)
    with index.reserve(prompt(2, 2)):
        script(
            with_support(
                """
import numpy as np
from lightcache import PageIndex
from support.keys import prompt
with PageIndex.attach(sys.argv[1], readonly=True) as reader:
    found = reader.stats()
    assert (found.ready, found.writing, found.free) == (4, 2, 6), found
    keys = np.concatenate([prompt(1, 6), prompt(2, 2), prompt(3, 1)])
    assert reader.peek_many(keys, np.array([0, 6, 8, 9])).tolist() == [4, 0, 0]
"""
            ),
            index.name,
        )


class Counted:
    """The core's calls, counted."""

    def __init__(self, library: Any) -> None:
        self._library, self.calls = library, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._library, name)

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            return call(*arguments)

        return counted


def takings(index: PageIndex) -> int:
    """How often the lock was taken."""
    return int(LockRecord.from_address(index.segment.address + LOCK_OFFSET).acquisitions)


def test_a2_a_batch_is_one_call_of_the_core(
    index: PageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking up takes no lock at all, and reserving takes it once, for all pages of a batch."""
    for name in range(3):
        put(index, name, 3)
    keys = np.concatenate([prompt(name, 3) for name in range(3)])
    counted = Counted(index.core.quick)
    monkeypatch.setattr(index.core, "quick", counted)
    before = takings(index)
    assert index.peek_many(keys, np.array([0, 3, 6, 9])).tolist() == [3, 3, 3]
    assert counted.calls == 1
    batch = index.match_many(keys, np.array([0, 3, 6, 9]))
    assert batch.counts.tolist() == [3, 3, 3]
    assert counted.calls == 2
    batch.release()
    assert takings(index) == before
    with index.reserve(prompt(9, 12)) as new:
        assert len(new.new) == 12, "all else was evicted for it"
        assert takings(index) == before + 1


# ---------------------------------------------------------------- A3


def test_a3_one_conversion_one_pass(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens become an array once, and each of them is hashed once, whatever the length."""
    converted: list[int] = []
    hashed: list[int] = []
    canonical, digest = hashing._canonical, hashing._digest_rows

    def convert(tokens: Any) -> Any:
        converted.append(len(tokens))
        return canonical(tokens)

    def rows(state: Any, given: list[bytes]) -> Any:
        hashed.append(sum(map(len, given)))
        return digest(state, given)

    with create(segment_name, geometry_of(16), pages=4) as cache:
        monkeypatch.setattr(hashing, "_canonical", convert)
        monkeypatch.setattr(hashing, "_digest_rows", rows)
        cache.hash_pages(list(range(1000)), leave_one=True)
    assert converted == [1000]
    assert hashed == [62 * 16 * 4], "the 62 full pages, four bytes a token"


# ---------------------------------------------------------------- A5


def test_a5_a_prefix_is_never_evicted_before_its_suffix(index: PageIndex) -> None:
    """Of three prompts with a common prefix, used in any order, one page after the other goes: what
    is left always is whole prefixes."""
    paths = [(1, 2, 3, 4), (1, 2, 5, 6), (1, 7, 8)]
    for path in paths:
        with index.reserve(array(chain(path))) as new:
            new.publish()
    index.match(array(chain(paths[0]))[:1]).release()  # the root last: its use alone is fresh
    index.match(array(chain(paths[1]))).release()
    nodes = {path[: i + 1] for path in paths for i in range(len(path))}
    assert index.stats().ready == len(nodes) == 8
    for left in range(7, -1, -1):
        assert index.evict(1) == 1
        reachable = {path[: i + 1] for path in paths for i in range(index.peek(array(chain(path))))}
        assert len(reachable) == index.stats().ready == left, "a page without its prefix was left"
        if left:
            assert (1,) in reachable, "the root goes last"
