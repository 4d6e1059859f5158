"""Parity with CPU caches beside an engine, rows A6, A8, A12 and A14: moving pages, and their
memory. Devices are CPU memory here, and drivers none; tests/gpu does the like on GPUs."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi.rank_side import GEOMETRIES, cells
from multi.test_ranks import Worker
from support.device_sides import Device, rows
from support.fake_driver import FakeDriver
from support.keys import prompt

from lightcache import Cache, ClientId, Load, NotReady, Offload, Reservation
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.moves import Engine, Move
from lightcache.pool import CHUNK_BYTES
from lightcache.shm import _native

SECRET = bytes(16)
SLOTS = 128
PAGES = 16
TOKENS = 16  # of a page of the pool, in A14
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


def scattered(tokens: int, seed: int, unit: int = 1) -> list[int]:
    """Slots of a request: anywhere on the device, one by one, or by blocks of `unit`."""
    blocks = np.random.default_rng(seed).permutation(SLOTS // unit)
    return [int(slot) for slot in (blocks[:, None] * unit + np.arange(unit)).ravel()[:tokens]]


class Gate:
    """What a copy is `after`; opened by the test."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def synchronize(self) -> None:
        """Until it is opened."""
        assert self.opened.wait(60)


# ---------------------------------------------------------------- A6


def test_a6_a_finished_request_leaves_when_its_copy_is_done(make: Make) -> None:
    """Offloading returns at once and goes on beside whatever is computed; the pages of the request
    are held until the copy is over, and then ready without anybody waiting."""
    cache, gate = make(GEOMETRIES["heads"]), Gate()
    device = Device(GEOMETRIES["heads"].share(), SLOTS)
    engine = cache.engine(GEOMETRIES["heads"], device.planes, threads=1)
    keys = prompt(1, 3)
    with cache.reserve(keys) as new:
        offload = Offload(engine, new, scattered(12, 1), after=[gate])
    assert not offload.done(), "the call returned while the copy goes on"
    assert (cache.peek(keys), cache.check().pins) == (0, 3)
    other = Offload(engine, cache.reserve(prompt(2, 2)), scattered(8, 2))
    assert not other.done(), "one stream: copies are over in turn"
    gate.opened.set()
    other.wait(60)
    assert engine.poll() == 0
    assert offload.done()
    assert other.ready
    assert offload.ready
    assert (cache.peek(keys), cache.check().pins) == (3, 0)
    engine.close()


def join(worker: Worker, cache: Cache, rank: int, ranks: int) -> ClientId:
    """Let a process be a rank."""
    order = {"name": cache.name, "geometry": "heads", "rank": rank, "ranks": ranks}
    return ClientId(*worker("join", **order, seed=rank, writing=True))


def test_a6_ranks_publish_without_a_collective(make: Make) -> None:
    """Each rank's offload is over before the next rank's process has even heard of the request; the
    last one's makes the pages ready."""
    cache, ranks = make(GEOMETRIES["heads"]), 2
    workers = [Worker() for _ in range(ranks)]
    try:
        clients = [join(worker, cache, rank, ranks) for rank, worker in enumerate(workers)]
        keys, slots = prompt(1, 3), scattered(12, 3, 2)
        with cache.reserve(keys, shards=ranks) as new, new.ticket(clients) as ticket:
            for shard, worker in enumerate(workers):
                assert cache.peek(keys) == 0
                assert ticket.poll().verdict is None
                worker("compute", slots=slots)
                worker("adopt", ticket=bytes(ticket).hex(), shard=shard)
                ready, _ = worker("offload", slots=slots, positions=[0, 1, 2])
                assert ready == (shard == ranks - 1)
            assert cache.peek(keys) == 3
            assert ticket.poll().verdict is True
        for worker in workers:
            worker("leave")
    finally:
        for worker in workers:
            worker.end()


# ---------------------------------------------------------------- A8


def compute(share: Any, device: Device, slots: Sequence[int]) -> None:
    """What a rank's model computes for these tokens, put where its slots are."""
    for place, row in cells(share, device, list(slots)):
        device.memory[place] = row


def engine_of(cache: Cache, kind: str, rank: int, ranks: int, seed: int) -> tuple[Device, Engine]:
    """A rank's device, and its engine: one of `ranks` writes what several of them hold alike."""
    geometry = GEOMETRIES[kind]
    device = Device(geometry.share(rank, ranks), SLOTS, seed)
    share = geometry.share(rank, ranks, writing=True)
    return device, cache.engine(geometry, device.planes, share=share, threads=1)


def assert_heads(kind: str, rank: int, ranks: int) -> None:
    """Heads go to ranks in runs, in order; fewer heads than ranks to several neighbours each."""
    held: dict[tuple[str, int], set[int]] = {}
    shape: dict[tuple[str, int], int] = {}
    for cell in GEOMETRIES[kind].share(rank, ranks).cells:
        plane = cell.plane.name, cell.layer
        held.setdefault(plane, set()).update(range(cell.head, cell.head + cell.heads))
        shape[plane] = cell.plane.heads
    for plane, heads in shape.items():
        first = rank * heads // ranks
        assert held[plane] == set(range(first, first + max(1, heads // ranks)))


def write(cache: Cache, kind: str, ranks: int, new: Reservation, slots: list[int]) -> int:
    """Every rank offloads its share of the new pages; bytes that were moved."""
    moved, pages, size = 0, new.pages.tolist(), GEOMETRIES[kind].page_tokens
    mine = [slot for at in new.new for slot in slots[at * size : (at + 1) * size]]
    for rank in range(ranks):
        device, engine = engine_of(cache, kind, rank, ranks, rank)
        compute(GEOMETRIES[kind].share(rank, ranks), device, slots)
        transfer = engine.offload(Move(pages, mine))
        transfer.wait(60)
        moved += transfer.nbytes
        new.publish(rank)
        engine.close()
    return moved


def read(cache: Cache, kind: str, ranks: int, pages: int) -> None:
    """A group of another size loads the prompt; every byte of every rank is as computed, and
    nothing beside it is touched."""
    geometry = GEOMETRIES[kind]
    for rank in range(ranks):
        assert_heads(kind, rank, ranks)
        share = geometry.share(rank, ranks)
        device = Device(share, SLOTS, 50 + rank)
        device.memory[:] = 0xEE
        expected = device.memory.copy()
        slots = scattered(pages * geometry.page_tokens, 70 + rank, 2)
        for place, row in cells(share, device, slots):
            expected[place] = row
        engine = cache.engine(geometry, device.planes, share=share, threads=1)
        load = Load(engine, cache.match(prompt(1, pages)), slots)
        load.wait(60)
        assert (device.memory == expected).all()
        engine.close()


@pytest.mark.parametrize(
    ("kind", "writers", "readers"),
    [
        pytest.param("heads", 4, [1, 2, 8], id="head mapping"),
        pytest.param("fewer heads", 4, [1, 2, 8], id="fewer KV heads than ranks, fp8 with scales"),
        pytest.param("latent", 2, [1, 4], id="MLA with an index"),
    ],
)
def test_a8_both_ways_for_every_kind_of_head(
    make: Make, kind: str, writers: int, readers: list[int]
) -> None:
    cache, tokens = make(GEOMETRIES[kind]), GEOMETRIES[kind].page_tokens
    with cache.reserve(prompt(1, 3), shards=writers) as new:
        moved = write(cache, kind, writers, new, scattered(3 * tokens, 5, 2))
        assert moved == 3 * GEOMETRIES[kind].used_bytes, "each byte once, shared heads too"
    for ranks in readers:
        read(cache, kind, ranks, 3)


def test_a8_ready_and_missing_pages_are_skipped(make: Make) -> None:
    """Only the new pages of a reservation move."""
    geometry = GEOMETRIES["heads"]
    cache, size = make(geometry, pages=6), geometry.page_tokens
    with cache.reserve(prompt(1, 2)) as new:
        write(cache, "heads", 1, new, scattered(2 * size, 6, 2))
    before = {page: cache.pool[page].copy() for page in range(2)}
    slots = scattered(7 * size, 6, 2)
    device, engine = engine_of(cache, "heads", 0, 1, 9)
    compute(geometry.share(), device, slots)
    with cache.match(prompt(1, 2)) as ready, cache.reserve(prompt(1, 7)) as new:
        assert (new.present.tolist(), new.missing.tolist()) == ([0, 1], [6])
        offload = Offload(engine, new, slots)
        offload.wait(60)
        assert offload.transfer.nbytes == 4 * geometry.used_bytes
        assert sorted(ready.pages.tolist()) == sorted(before)
        for page, was in before.items():
            assert (cache.pool[page] == was).all()
    engine.close()
    read(cache, "heads", 2, 6)


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
    engine = cache.engine(LARGE, device.planes, memory=pinned, threads=1)
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
        for _, slot in rows(LARGE.share(), device, each, [move]):
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


@pytest.mark.parametrize(
    ("first", "tokens"), [(0, 48), (0, 1), (0, 33), (5, 40), (15, 2), (31, 1), (7, 9)]
)
def test_a14_slots_of_single_tokens_pages_of_many(make: Make, first: int, tokens: int) -> None:
    """A request's tokens lie one by one anywhere on the device, begin and end within a page, and
    some are left out; in the pool they lie in pages of 16."""
    cache = make(FINE)
    share = FINE.share()
    source, target = Device(share, SLOTS, 1), Device(share, SLOTS, 2)
    slots = np.array(scattered(tokens, 11))
    slots[2::5] = -1
    assert tokens == 1 or (np.diff(slots) != 1).any(), "the slots are not in a row"
    pages = [9, 2, 5][: -(-(first + tokens) // TOKENS)]
    cache.pool.array[:] = 0x11
    flat = cache.pool.array.reshape(-1)
    expected = flat.copy()
    away = Move(pages, slots, first)
    for page, slot in rows(share, source, cache.page_bytes, [away]):
        expected[page] = source.memory[slot]
    engine = cache.engine(FINE, source.planes, threads=1)
    engine.offload(away).wait(60)
    assert (flat == expected).all()
    engine.close()
    other = np.where(slots < 0, -1, scattered(tokens, 12))
    back, wanted = Move(pages, other, first), target.memory.copy()
    for page, slot in rows(share, target, cache.page_bytes, [back]):
        wanted[slot] = flat[page]
    engine = cache.engine(FINE, target.planes, threads=1)
    engine.load(back).wait(60)
    assert (target.memory == wanted).all()
    engine.close()
    del flat
