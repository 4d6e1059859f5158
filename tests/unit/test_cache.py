"""Cache: arguments, secrets and keys, and a life with its pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import refused
from support.scripts import with_support

from lightcache import Cache, ConfigError, Detached, InUse, OutOfPages

SECRET = b"a secret of tests"
GOOD: dict[str, Any] = {
    "pages": 8,
    "page_bytes": 4096,
    "fingerprint": "model/bf16/16",
    "page_tokens": 16,
    "secret": SECRET,
}
Script = Callable[..., Any]


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with Cache.create(segment_name, **GOOD) as made:
        yield made


TOKENS = np.arange(64)


# ---------------------------------------------------------------- a life


def test_the_public_face(cache: Cache, segment_name: str) -> None:
    keys = cache.hash_pages(TOKENS, salt="tenant-7")
    with cache.match(keys) as hit:
        assert len(hit) == 0
    with cache.reserve(keys) as new:
        for page in new.pages.tolist():
            cache.pool[page][:] = page + 1
        new.publish()
    with Cache.attach(segment_name, readonly=True, secret=SECRET) as router:
        assert router.peek(router.hash_pages(TOKENS, salt="tenant-7")) == 4
        assert router.peek(router.hash_pages(TOKENS)) == 0
        assert router.peek_many(keys, np.array([0, 2, 4])).tolist() == [2, 2]
    with cache.match(keys) as hit:
        assert hit.tokens == 64
        for page in hit.pages.tolist():
            assert (cache.pool[page] == page + 1).all()
    with cache.match_many(keys, np.array([0, 4])) as batch:
        assert batch.counts.tolist() == [4]
    with cache.index.match(keys) as lease, lease.ticket([cache.client_id]) as ticket:
        cache.adopt(bytes(ticket)).release()
        cache.done(bytes(ticket))
    assert cache.wait(keys, timeout=0) == 4
    assert cache.stats().pages == cache.pages == 8
    assert cache.name == segment_name
    assert [c.alive for c in cache.clients()] == [True]
    assert cache.reap() == 0
    assert cache.evict(8) == 4
    cache.clear(cache.namespace("w"))
    assert cache.check().clean
    assert "8 pages of 4096 bytes" in repr(cache)


def test_pages_as_arrays(cache: Cache, segment_name: str) -> None:
    pages = np.arange(4 * cache.page_bytes // 2, dtype=np.float16).reshape(4, 2, -1)
    assert len(cache.get(TOKENS)) == 0
    assert cache.put(TOKENS[:32], pages[:2]) == 2
    assert cache.put(TOKENS, pages) == 2  # the others are there
    with Cache.open(segment_name, **GOOD) as other:
        found = other.get(TOKENS)
        assert (found.view(np.float16).reshape(pages.shape) == pages).all()
        found[:] = 0  # a copy
        assert len(other.get(TOKENS, leave_one=True)) == 3
        assert len(other.get(TOKENS, salt="tenant-7")) == 0
        assert len(other.get(TOKENS, namespace=other.namespace("w"))) == 0
    assert (cache.get(TOKENS).view(np.float16).reshape(pages.shape) == pages).all()
    assert cache.put([], pages[:0]) == 0
    for wrong in (pages[:3], pages[:, :1], pages.astype(np.float32), []):
        with pytest.raises(ConfigError, match="for each of 4 full pages, found"):
            cache.put(TOKENS, wrong)


def test_putting_more_than_there_is_room_for(cache: Cache) -> None:
    pages = np.ones((10, cache.page_bytes), np.uint8)
    with pytest.raises(OutOfPages, match="no room for 2 of 10 pages"):
        cache.put(np.arange(160), pages)
    assert (cache.get(np.arange(160)) == pages[:8]).all()
    assert cache.check().clean


def test_putting_what_another_process_writes(cache: Cache, segment_name: str) -> None:
    pages = np.ones((4, cache.page_bytes), np.uint8)
    with Cache.open(segment_name, **GOOD) as other, other.reserve(other.hash_pages(TOKENS[:16])):
        assert cache.put(TOKENS, pages) == 3
        assert len(cache.get(TOKENS)) == 0


def test_keys_of_a_namespace_are_its_own(cache: Cache) -> None:
    other = cache.namespace("w2", "t")
    assert (cache.hash_pages(TOKENS) != cache.hash_pages(TOKENS, namespace=other)).all()
    hasher = cache.hasher(namespace=other)
    assert (np.asarray(hasher.update(TOKENS)) == cache.hash_pages(TOKENS, namespace=other)).all()
    assert len(cache.hash_pages(TOKENS, leave_one=True)) == 3


def test_what_killed_processes_left_goes_on_warm(segment_name: str, script: Script) -> None:
    script(
        with_support(
            f"""
import os, signal
from lightcache import Cache
cache = Cache.open(sys.argv[1], **{GOOD!r})
with cache.reserve(cache.hash_pages(list(range(64)))) as new:
    new.publish()
lease = cache.match(cache.hash_pages(list(range(64))))
os.kill(os.getpid(), signal.SIGKILL)
"""
        ),
        segment_name,
        status=-9,
    )
    with Cache.open(segment_name, **GOOD) as cache:
        assert cache.peek(cache.hash_pages(TOKENS)) == 4
        cache.reap()
        assert cache.check().pins == 0


# ---------------------------------------------------------------- arguments


def test_capacity_as_size(segment_name: str) -> None:
    with Cache.create(
        segment_name, **{**GOOD, "pages": None, "size": "70000", "page_bytes": "16KiB"}
    ) as cache:
        assert cache.pages == 4


# ---------------------------------------------------------------- attaching


def test_keys_made_with_another_secret_can_be_looked_up(cache: Cache, segment_name: str) -> None:
    with Cache.attach(segment_name, secret=b"another secret, as long") as other:
        assert other.peek(cache.hash_pages(TOKENS)) == 0


def test_the_secret_of_a_file(
    segment_name: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    source = with_support(
        """
import sys
from lightcache import Cache
with Cache.create(sys.argv[1], pages=4, page_bytes=64, page_tokens=2, fingerprint="f") as cache:
    print(cache.hash_pages([1, 2, 3]).tolist())
"""
    )
    assert script(source, segment_name).stdout == script(source, segment_name).stdout
    [path] = [p for p in tmp_path.rglob("*") if p.is_file() and p.name == "secret"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_page_tokens_said_once(segment_name: str, cache: Cache) -> None:
    assert len(cache.hash_pages(TOKENS, 16)) == 4
    with Cache.create(segment_name + "n", **{**GOOD, "page_tokens": None}) as other:
        assert len(other.hash_pages(TOKENS, 32)) == 2


# ---------------------------------------------------------------- the end


def test_closing_with_live_views_changes_nothing(segment_name: str) -> None:
    cache = Cache.create(segment_name, **GOOD)
    keys = cache.hash_pages(TOKENS)
    cache.reserve(keys).publish()
    lease = cache.match(keys)
    for view in (cache.pool[0], cache.pool.array):
        refused(InUse, "views", cache.close)
        part = view[..., :3]
        del view
        refused(InUse, "views", cache.close)
        del part
    inner = cache.index.segment.view(0, 8)
    refused(InUse, "", cache.close)
    assert cache.evict(8) == 0, "the lease holds"
    assert cache.check().pins == 4
    del inner
    lease.release()
    cache.close()
    cache.close()
    gc.collect()
    for call in (
        lambda: cache.peek(keys),
        lambda: cache.match(keys),
        lambda: cache.pool[0],
        lambda: cache.pool.array,
        lambda: cache.pool.grown,
    ):
        refused(Detached, "", call)


def test_a_forked_child_leaves_the_statement_quietly(segment_name: str, script: Script) -> None:
    done = script(
        with_support(
            f"""
import os
from lightcache import Cache, Detached
with Cache.create(sys.argv[1], **{GOOD!r}) as cache:
    view = cache.pool[1]
    del view
    child = os.fork()
    if child == 0:
        for call in (lambda: cache.pool[0], lambda: cache.pool.array, cache.close,
                     lambda: cache.stats()):
            try:
                call()
            except Detached:
                continue
            os._exit(1)
        with cache:
            pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    cache.pool[1][:] = 7
"""
        ),
        segment_name,
    )
    assert done.stderr == ""
