"""HostPool: pages of any size, growth in chunks, and what goes wrong with the object behind it."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.refusals import refused

from lightcache import Cache, InUse, NoSpace, OutOfPages
from lightcache.pool import CHUNK_BYTES, HostPool
from lightcache.shm import memory
from lightcache.shm.codes import Code
from lightcache.tools import cli

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


def test_growth_in_chunks(make: Make) -> None:
    cache = make(pages=12, page_bytes=CHUNK_BYTES // 4, grow=False)
    assert cache.pool.grown == 4, "the first chunk is there at once"
    assert cache.pool.grow(1) == 5
    assert cache.pool.grow(0) == 5
    seen: list[tuple[int, int]] = []
    cache.pool.prefault(threads=1, progress=lambda have, all_: seen.append((have, all_)))
    assert seen == [(9, 12), (12, 12)]
    assert cache.pool.grow(100, threads=3) == 12


def test_pages_as_a_tensor(make: Make) -> None:
    torch = pytest.importorskip("torch")
    cache = make()
    whole = cache.pool.tensor()
    assert whole.shape == (4, 4096)
    assert whole.dtype == torch.uint8
    whole[2] = 9
    assert (cache.pool[2] == 9).all()
    refused(InUse, "", cache.close)
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


def keys_of(number: int, pages: int = 4) -> Any:
    return np.arange(pages * 2, dtype=np.uint64).reshape(pages, 2) + np.uint64(number << 32)


def fill(cache: Cache, number: int, pages: int = 4) -> None:
    with cache.reserve(keys_of(number, pages)) as new:
        assert len(new.new) == pages
        new.publish()


@pytest.fixture
def full(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Cache, list[int]]:
    """A cache of which 4 of 8 pages have memory and are in use. The system has no more; and a list
    that gets longer whenever it is asked."""
    cache = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    fill(cache, 1)
    asked: list[int] = []
    room = memory.available()

    def available() -> memory.FreeMemory:
        asked.append(1)
        return type(room)(bytes=4096, limit="free in this test")

    monkeypatch.setattr(memory, "available", available)
    return cache, asked


def test_without_memory_calls_evict(full: tuple[Cache, list[int]], segment_name: str) -> None:
    cache, asked = full
    fill(cache, 2)
    assert asked
    assert cache.stats().no_memory_s > 0
    del asked[:]
    with Cache.attach(segment_name, secret=SECRET, grow=False) as other:
        del asked[:]
        fill(other, 3)
        assert not asked, "all clients know that there is none"
        fill(cache, 4)
        assert not asked
        assert other.stats().no_memory_s > 0
    with cache.reserve(keys_of(5, 6)) as new:
        assert (len(new.new), len(new.missing)) == (4, 2)
        assert "no memory" in new.why
    assert cache.check().pins == 0


def test_dump_says_that_there_is_no_memory(full: tuple[Cache, list[int]]) -> None:
    cache, _ = full
    for seconds, stops in ((30, True), (0, False)):
        cache.index.no_memory(seconds)
        said = CliRunner().invoke(cli.group, ["dump", cache.name, "--json"])
        found = json.loads(said.output)
        (line,) = [
            line for line in found["not_working"] + found["hints"] if "have no memory" in line
        ]
        assert (line in found["not_working"]) is stops
        assert ("calls evict instead" in line) is stops
        assert (found["totals"]["no_memory_s"] > 0) is stops


def test_a_batch_without_memory(full: tuple[Cache, list[int]]) -> None:
    cache, _ = full
    both = np.concatenate([keys_of(2, 2), keys_of(3, 2)])
    with cache.index.reserve_batch(both, np.array([0, 2, 4], np.int64)) as new:
        assert new.all_new


def test_allocating_without_memory(full: tuple[Cache, list[int]]) -> None:
    """`can_allocate` and `allocate` agree, before and after anybody has tried."""
    cache, _ = full
    index = cache.index
    for _ in range(2):
        assert not index.can_allocate(8)
        refused(OutOfPages, "4 of 8 pages have no memory", index.allocate, 8)
        assert index.stats().held == 0
        assert index.can_allocate(4)
    assert cache.index.peek(keys_of(1)) == 4, "nothing went for what could not be had"
    with index.allocate(4):
        assert not index.can_allocate(1)
    index.no_memory(0)
    assert not index.can_allocate(5)


def test_allocating_where_memory_is_to_be_had(make: Make) -> None:
    cache = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    assert cache.index.can_allocate(8)
    assert cache.pool.grown == 4, "asking takes none"
    with cache.index.allocate(8):
        assert cache.pool.grown == 8


def test_memory_that_comes_back_is_used(
    full: tuple[Cache, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = full
    fill(cache, 2)
    monkeypatch.undo()
    fill(cache, 3)
    assert cache.pool.grown == 4, "it was said that there is none"
    cache.index.no_memory(0)  # time passes
    fill(cache, 4)
    assert (cache.pool.grown, cache.stats().no_memory_s) == (8, 0)


def test_a_part_of_a_chunk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk finds no room, the pages that are needed do."""
    cache = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    fill(cache, 1)
    room = type(memory.available())(bytes=CHUNK_BYTES // 2, limit="in this test")
    monkeypatch.setattr(memory, "available", lambda: room)
    fill(cache, 2, 2)
    assert cache.pool.grown == 6
    assert cache.peek(keys_of(1)) == 4


def test_growth_that_another_has_stopped_in(make: Make, segment_name: str) -> None:
    """Somebody holds the right to grow and does not get on: calls evict instead of waiting."""
    cache = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    fill(cache, 1)
    with Cache.attach(segment_name, secret=SECRET, grow=False) as other:
        with other.pool._turn(None):
            fill(cache, 2)
        assert cache.pool.grown == 4
        with cache.pool._turn(None):  # another thread of ours
            cache.index.no_memory(0)
            fill(cache, 3)
    assert cache.pool.grown == 4


def test_the_grower_tries_again(
    full: tuple[Cache, list[int]],
    segment_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait_until: Wait,
) -> None:
    cache, _ = full
    waits: list[float] = []
    go_on = threading.Event()

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread().name != "lightcache-grow":
            return real(self, timeout)
        waits.append(timeout or 0.0)
        if len(waits) > 3:
            real(go_on, 60)
        return self.is_set()

    real = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", wait)
    with caplog.at_level(logging.INFO, "lightcache.pool"):
        with Cache.attach(segment_name, secret=SECRET) as other:
            wait_until(lambda: len(waits) > 3, "the grower's tries")
            assert waits[:4] == [0, 1, 2, 4]
            grower = other._grower
            assert grower is not None
            assert isinstance(grower.error, NoSpace)
            assert 0 < cache.stats().no_memory_s <= 4
            monkeypatch.setattr(
                memory, "available", lambda: memory.FreeMemory(1 << 40, "in this test")
            )
            go_on.set()
            wait_until(lambda: cache.pool.grown == 8, "the pool to grow")
            wait_until(lambda: grower.error is None, "that to be known")
    said = [r.getMessage() for r in caplog.records if "calls evict instead" in r.getMessage()]
    assert len(said) == 1
    assert "4 of 8 pages" in said[0]
    assert sum("grows again" in r.getMessage() for r in caplog.records) == 1


def test_a_growth_that_ends_half_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system is full before the chunk is: what has memory is used, and the message speaks
    of memory, not of an address."""
    cache = make(pages=8, page_bytes=CHUNK_BYTES // 4, grow=False)
    real = HostPool._populate_part

    def part(self: HostPool, start: int, end: int) -> int:
        real(self, start, start + cache.page_bytes + 4096)
        return int(Code.SYS) - errno.EFAULT

    monkeypatch.setattr(HostPool, "_populate_part", part)
    with pytest.raises(NoSpace, match="5 of 8 pages") as caught:
        cache.pool.grow(4)
    assert "address" not in str(caught.value)
    assert cache.pool.grown == 5


def test_pools_that_do_not_fit_together(
    make: Make, segment_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunks, listed = [3], os.listdir  # chunks of room
    free = "free in this test"
    # Pools of others in /dev/shm are none of this test's.
    monkeypatch.setattr(os, "listdir", lambda at: [x for x in listed(at) if segment_name in x])
    monkeypatch.setattr(
        memory, "available", lambda: memory.FreeMemory(chunks[0] * CHUNK_BYTES, free)
    )
    first = make(pages=12, page_bytes=CHUNK_BYTES // 4, grow=False)
    assert not caplog.records, "one fits"
    name = f"{segment_name}-2"
    arguments = {"page_bytes": CHUNK_BYTES // 4, "fingerprint": "f", "secret": SECRET}
    with Cache.create(name, pages=12, **arguments, grow=False):
        (said,) = [r.getMessage() for r in caplog.records]
        assert name in said
        assert "2 caches" in said
        assert "free in this test" in said
    caplog.clear()
    chunks[0] = 4
    with Cache.create(name, pages=4, **arguments, grow=False):
        pass
    assert not caplog.records
    assert first.pool.grown == 4


def test_two_pools_in_a_small_folder(tmp_path: Path) -> None:
    """Both open in a /dev/shm that holds one and a half of them, and go on without an error."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to mount a small /dev/shm: apt-get install util-linux")
    path = tmp_path / "two_pools.py"
    path.write_text(TWO_POOLS)
    mount = 'mount -t tmpfs -o size=300m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "mount:" in done.stderr:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "address" not in done.stderr
    warned = done.stderr.count("caches' pools in /dev/shm are to have")
    assert warned == 3, "who opens the second, and who attaches to either"
    assert 1 <= done.stderr.count("calls evict instead") <= 2


TWO_POOLS = """
import time
import numpy as np
from lightcache import Cache

def pages(number, n):
    return np.arange(2 * n, dtype=np.uint64).reshape(n, 2) + np.uint64(number << 32)

each = {"size": "200MiB", "page_bytes": "64KiB", "fingerprint": "f", "secret": b"a secret of tests"}
made = [Cache.open(name, **each, grow=False) for name in "ab"]  # none has begun to grow
with Cache.attach("a") as a, Cache.attach("b") as b:
    for cache in made:
        cache.close()
    end = time.monotonic() + 60
    while not all(cache._grower.error or cache.pool.grown == 3200 for cache in (a, b)):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert a.pool.grown + b.pool.grown < 6400
    for number in range(40):
        for cache in (a, b):
            with cache.reserve(pages(number, 200)) as new:
                assert len(new.new) == 200, new
                cache.pool[new.pages[-1]][:] = number
                new.publish()
    for cache in (a, b):
        index = cache.index
        for n in (8, index.stats().grown, index.stats().grown + 1, 3200):
            might = index.can_allocate(n)
            try:
                with index.allocate(n):
                    pass
            except Exception as error:
                assert not might, (n, error)
            else:
                assert might, n
        cache.check().raise_if_broken()
    print(a.pool.grown, b.pool.grown)
"""


def test_no_room_to_create(make: Make, segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightcache import pool

    def full(*_: object) -> None:
        raise NoSpace("full")

    monkeypatch.setattr(pool, "_allocate", full)
    refused(NoSpace, "", make)
    assert not [p for p in Path("/dev/shm").iterdir() if segment_name in p.name]
