"""HostPool: pages of any size, growth in chunks, and what goes wrong with the object behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightcache import (
    Cache,
    CacheCorrupted,
    ConfigError,
    Detached,
    InUse,
    LightcacheError,
    NoSpace,
    NotReady,
    PermissionDenied,
)
from lightcache.pool import CHUNK_BYTES
from lightcache.shm import memory

SECRET = b"a secret of tests"
Make = Callable[..., Cache]
Wait = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def make(segment_name: str) -> Iterator[Make]:
    made: list[Cache] = []

    def create(**changed: Any) -> Cache:
        arguments = {"pages": 4, "page_bytes": 4096, "fingerprint": "f", "secret": SECRET}
        made.append(Cache.create(segment_name, **{**arguments, **changed}))
        return made[-1]

    yield create
    for cache in made:
        cache.close()


def pool_path(cache: Cache) -> Path:
    return Path("/dev/shm") / cache.index.segment.dependent_name("pool").removeprefix("/")


@pytest.mark.parametrize("page_bytes", [1, 7, 4095, 4096, 5000, 73 * 1024 + 1])
def test_pages_of_any_size(make: Make, segment_name: str, page_bytes: int) -> None:
    cache = make(pages=5, page_bytes=page_bytes)
    assert len(cache.pool) == 5
    for page in range(5):
        assert cache.pool[page].shape == (page_bytes,)
        assert not cache.pool[page].any(), "a new page is zero"
        cache.pool[page][:] = page + 1
    with Cache.attach(segment_name, secret=SECRET) as other:
        assert other.pool.array.shape == (5, page_bytes)
        assert (other.pool.array == np.arange(1, 6, dtype=np.uint8)[:, None]).all()


@pytest.mark.parametrize("page", [-1, 4, 1.0, "0", None, True, slice(0, 1)])
def test_pages_that_are_none(make: Make, page: Any) -> None:
    cache = make()
    with pytest.raises(ConfigError, match="page"):
        cache.pool[page]


def test_growth_in_chunks(make: Make) -> None:
    cache = make(pages=12, page_bytes=CHUNK_BYTES // 4, grow=False)
    assert cache.pool.grown == 4, "the first chunk is there at once"
    assert cache.pool.grow(1) == 5
    assert cache.pool.grow(0) == 5
    seen: list[tuple[int, int]] = []
    cache.pool.prefault(threads=1, progress=lambda have, all_: seen.append((have, all_)))
    assert seen == [(9, 12), (12, 12)]
    assert cache.pool.grow(100, threads=3) == 12


@pytest.mark.parametrize("wrong", [-1, 1.5, None, "1", True])
def test_growth_by_no_number(make: Make, wrong: Any) -> None:
    cache = make()
    with pytest.raises(ConfigError, match="pages"):
        cache.pool.grow(wrong)
    for threads in (0, wrong):
        with pytest.raises(ConfigError, match="threads"):
            cache.pool.grow(1, threads=threads)


def test_a_closed_pool_does_not_grow(segment_name: str, make: Make) -> None:
    keeper = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    cache = Cache.attach(keeper.name, secret=SECRET, grow=False)
    cache.close()
    for call in (lambda: cache.pool.grow(1), cache.pool.prefault):
        with pytest.raises(Detached):
            call()


def test_pages_as_a_tensor(make: Make) -> None:
    torch = pytest.importorskip("torch")
    cache = make()
    whole = cache.pool.tensor()
    assert whole.shape == (4, 4096)
    assert whole.dtype == torch.uint8
    whole[2] = 9
    assert (cache.pool[2] == 9).all()
    with pytest.raises(InUse):
        cache.close()
    del whole


def test_reserving_grows_what_is_needed(make: Make) -> None:
    cache = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    keys = np.arange(16, dtype=np.uint64).reshape(8, 2)
    with cache.reserve(keys) as got:
        assert len(got.new) == 8
    assert cache.pool.grown == 8


def test_the_pool_grows_by_itself(make: Make, segment_name: str, wait_until: Wait) -> None:
    cache = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    with Cache.attach(segment_name, secret=SECRET) as other:
        wait_until(lambda: cache.pool.grown == 8, "another client's growth")
        assert other.pool.grown == 8


def test_no_room_to_grow(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    room = memory.available()
    monkeypatch.setattr(memory, "available", lambda: type(room)(bytes=4096, limit="in this test"))
    for call in (
        lambda: cache.pool.grow(1),
        cache.pool.prefault,
        lambda: cache.reserve(np.arange(16, dtype=np.uint64).reshape(8, 2)),
    ):
        with pytest.raises(NoSpace, match="4 of 8 pages"):
            call()
    assert cache.check().pins == 0
    assert cache.pool.grow(0) == 4


def test_no_room_to_create(make: Make, segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightcache import pool_object

    def full(*_: object) -> None:
        raise NoSpace("full")

    monkeypatch.setattr(pool_object, "_allocate", full)
    with pytest.raises(NoSpace):
        make()
    assert not [p for p in Path("/dev/shm").iterdir() if segment_name in p.name]


def damaged(cache: Cache, error: type[LightcacheError]) -> None:
    before = len(cache.clients())
    with pytest.raises(error):
        Cache.attach(cache.name, secret=SECRET)
    assert len(cache.clients()) == before, "who was refused has left"


def test_a_pool_that_is_gone(make: Make) -> None:
    cache = make()
    pool_path(cache).unlink()
    damaged(cache, NotReady)


def test_a_pool_of_another_length(make: Make) -> None:
    cache = make()
    os.truncate(pool_path(cache), 8192 * 4)
    damaged(cache, CacheCorrupted)
    os.truncate(pool_path(cache), 4096 * 4)


def test_a_pool_with_two_names(make: Make) -> None:
    cache = make()
    path = pool_path(cache)
    other = path.with_name(path.name + "-link")
    other.hardlink_to(path)
    damaged(cache, PermissionDenied)
    other.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
def test_a_pool_of_another_user(make: Make) -> None:
    cache = make()
    os.chown(pool_path(cache), 65534, -1)
    damaged(cache, PermissionDenied)
    os.chown(pool_path(cache), 0, -1)
