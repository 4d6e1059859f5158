"""Parity with CPU caches beside an engine, rows A8 and A12: moving pages, and their memory.
Devices are CPU memory here, and drivers none; tests/gpu does the like on GPUs."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device_sides import Device
from support.fake_driver import FakeDriver
from support.keys import prompt

from lightcache import Cache, Load, NotReady, Offload
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.moves import Move
from lightcache.kernels.testing import moved_rows
from lightcache.pool import CHUNK_BYTES
from lightcache.shm import _native

SECRET = bytes(16)
PAGES = 16
TOKENS = 16  # of a page of the pool
FINE = PageGeometry(
    [KVGroup.attention("kv", layers=2, heads=2, head_dim=4, dtype_bytes=2, page_tokens=TOKENS)]
)
LARGE = PageGeometry(  # 8 MiB: the first piece that is registered, 32 MiB, has four of them
    [KVGroup.attention("kv", layers=4, heads=8, head_dim=4096, dtype_bytes=2, page_tokens=TOKENS)]
)
Wait = Callable[[Callable[[], bool], str], None]
Make = Callable[..., Cache]


@pytest.fixture
def make(segment_name: str) -> Iterator[Make]:
    """Make the test's cache, for pages of a geometry."""
    made: list[Cache] = []

    def create(geometry: PageGeometry, **more: Any) -> Cache:
        wanted = {
            "pages": PAGES,
            "page_bytes": geometry.page_bytes,
            "page_tokens": geometry.page_tokens,
            "fingerprint": f"model {geometry.fingerprint()}",
            "secret": SECRET,
        }
        made.append(Cache.create(segment_name, **{**wanted, **more}))
        return made[-1]

    yield create
    for cache in made:
        assert cache.check().clean
        assert cache.check().pins == 0
        cache.close()


# ---------------------------------------------------------------- A8


def test_a8_one_kernel_copies_all() -> None:
    """Whatever the heads, the dtype or the direction. The other kernel touches no page."""
    spec = find_spec("lightcache.kernels")
    assert spec
    assert spec.origin
    kernels = [
        (path.name, node.name)
        for path in sorted(Path(spec.origin).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert kernels == [("row_copy.py", "copy_rows"), ("state_copy.py", "copy_states")]


# ---------------------------------------------------------------- A12


def test_a12_huge_pages_interleaved_memory_and_a_bar_for_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is asked for both, for the object before it has any memory; prefaulting says how
    far it is."""
    each = CHUNK_BYTES // 4
    asked: list[tuple[int, bool, int]] = []
    advise = _native.quick().lcs_advise

    def note(base: Any, length: int, huge: bool, node: int) -> int:
        asked.append((length, huge, node))
        return int(advise(base, length, huge, node))

    monkeypatch.setattr(_native.quick(), "lcs_advise", note)
    cache = make(FINE, page_bytes=each, pages=10, huge_pages=True, numa="interleave", grow=False)
    length = 10 * each
    placed, mapped = (length, False, _native.ALL_NODES), (length, True, _native.ALL_NODES)
    assert asked == [placed, mapped]
    told: list[tuple[int, int]] = []
    assert cache.pool.grown == 4
    cache.pool.prefault(threads=1, progress=lambda *now: told.append(now))
    assert told == [(8, 10), (10, 10)]
    assert cache.pool.grown == 10
    maps = Path("/proc/self/numa_maps")
    address = f"{cache.pool.array.ctypes.data:x} "
    lines = maps.read_text().splitlines() if maps.exists() else []
    assert all("interleave" in line for line in lines if line.startswith(address))


def test_a12_threads_share_the_prefaulting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(FINE, page_bytes=CHUNK_BYTES // 4, pages=12, grow=False)
    parts: list[tuple[int, int]] = []
    meeting = threading.Barrier(2)
    populate = cache.pool._populate_part

    def part(start: int, end: int) -> int:
        parts.append((start, end))
        meeting.wait(30)  # broken unless two are at work at once
        return populate(start, end)

    monkeypatch.setattr(cache.pool, "_populate_part", part)
    cache.pool.prefault(threads=2)
    assert sorted(parts) == [(at * CHUNK_BYTES, (at + 1) * CHUNK_BYTES) for at in (1, 2)]


def test_a12_usable_while_it_is_still_pinning(make: Make, wait_until: Wait) -> None:
    """The first pages are registered, and copied, while the driver has yet to register the rest."""
    each, pages = LARGE.page_bytes, 8
    cache, rest = make(LARGE, pages=pages), threading.Event()
    driver = FakeDriver(gates={4 * each: rest})
    told: list[tuple[int, int]] = []
    pinned = cache.pin(
        driver=driver, threads=1, chunk_bytes=4 * each, progress=lambda *now: told.append(now)
    )
    device = Device(LARGE.share(), 2 * TOKENS)
    engine = cache.transfer_engine(LARGE, device.planes, memory=pinned, threads=1)
    try:
        pinned.wait([3], 60)
        assert (pinned.ready, told) == (4, [(4, pages)])
        slots, was = np.arange(2 * TOKENS)[::-1], device.memory.copy()
        with cache.reserve(prompt(1, 2)) as new:
            Offload(engine, new, slots).wait(60)
        device.memory[:] = 0
        load = Load(engine, cache.match(prompt(1, 2)), slots)
        load.wait(60)
        move = Move([0, 1], slots)
        for _, slot in moved_rows(LARGE.share(), device, each, [move]):
            assert (device.memory[slot] == was[slot]).all()
        assert pinned.ready == 4, "nobody waited for the rest"
        with pytest.raises(NotReady, match=f"page 4 is not registered .* 4 of {pages} pages"):
            engine.load(Move([4], slots[:TOKENS]))
    finally:
        rest.set()
    pinned.wait([7], 60)
    engine.load(Move([4], slots[:TOKENS])).wait(60)
    engine.close()
    pinned.wait(timeout=60)
    wait_until(lambda: told == [(4, pages), (pages, pages)], "the bar to be full")


# ---------------------------------------------------------------- A14
