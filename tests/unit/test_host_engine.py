"""The host engine: every byte against a plain loop, and what it promises beyond the conformance
suite (test_transfer_engine_conformance.py)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.device_sides import Device
from support.refusals import refused

from lightcache import ConfigError, Detached, TransferFailed, WaitTimeout
from lightcache.kernels import host_engine
from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.moves import Move, flatten
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.kernels.testing import Bytes, PlacedPages, moved_rows, random_moves

SLOTS = 64
PAGES = 6
attention = KVGroup.attention
GEOMETRIES = {
    "bf16": PageGeometry(
        [attention("kv", layers=3, heads=4, head_dim=4, dtype_bytes=2, page_tokens=8)]
    ),
    "head groups": PageGeometry(
        [
            attention(
                "kv", layers=2, heads=4, head_dim=4, dtype_bytes=2, page_tokens=4, head_groups=2
            )
        ]
    ),
    "scales, packed": PageGeometry(
        [
            attention(
                "kv", layers=2, heads=2, head_dim=8, dtype_bytes=1, page_tokens=4,
                content="packed", scale_bytes=3,
            )
        ]
    ),
    "opaque blocks beside": PageGeometry(
        [
            attention("kv", layers=2, heads=2, head_dim=4, dtype_bytes=2, page_tokens=8),
            KVGroup.opaque("index", layers=[1, 5], row_bytes=33, page_tokens=8, unit_tokens=4),
        ]
    ),
    "state": PageGeometry(
        [
            KVGroup.state(
                "ssm",
                layers=2,
                parts=[Plane("conv", 6, 4, rows=3), Plane("rec", 40, 4)],
                head_groups=2,
            )
        ]
    ),
    "long rows": PageGeometry(
        [attention("kv", layers=1, heads=2, head_dim=4100, dtype_bytes=2, page_tokens=4)]
    ),
    "odd rows": PageGeometry([KVGroup.opaque("o", layers=3, row_bytes=7, page_tokens=16)]),
}  # fmt: skip
GEOMETRIES |= {
    f"{kind}, parts of {part_bytes}": PageGeometry(GEOMETRIES[kind].groups, part_bytes=part_bytes)
    for kind, part_bytes in [
        ("state", 16),  # less than a row
        ("state", 96),  # a border in both parts of the state
        ("state", 480),  # one page is less than a part
        ("bf16", 208),  # whole rows of a cell in one part, and a row cut in two
        ("opaque blocks beside", 112),
        ("long rows", 4096),
        ("odd rows", 16),  # a row that ends a byte after its part
    ]
}


def pages_of(geometry: PageGeometry) -> HostPages:
    shape = (PAGES, geometry.page_bytes)
    return HostPages(np.random.default_rng(1).integers(0, 256, shape, np.uint8))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_every_byte_both_ways(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_engine, "HELP_BYTES", 1)
    rng = random.Random(f"{kind} {seed}")
    geometry = GEOMETRIES[kind]
    ranks = rng.choice([1, 2]) if geometry.head_groups in (1, 2) else 1
    share = geometry.share(rng.randrange(ranks), ranks, writing=rng.random() < 0.5)
    device = Device(share, SLOTS, seed)
    host = PlacedPages(geometry, PAGES, seed, rng.choice([0, 5]) if geometry.parts == 1 else 0)
    pages, others = host.pages(), host.pages()
    memory = HostPages(host.memory(pages))
    moves = random_moves(rng, geometry, PAGES, SLOTS)
    pairs, moves = list(moved_rows(share, device, host.page_bytes, moves)), host.moves(moves)
    window = rng.choice([None, 1, 2])
    with HostEngine(
        geometry, device.planes, memory, share=share, threads=rng.choice([1, 3])
    ) as engine:
        for page, slot in pairs:
            pages.reshape(-1)[page] = device.memory[slot]
        before = device.memory.copy()
        transfer = engine.offload(moves, window=window)
        assert transfer.nbytes == sum(page.stop - page.start for page, _ in pairs)
        transfer.wait(60)
        assert (memory.array == host.memory(pages)).all(), "pages"
        assert (device.memory == before).all(), "an offload wrote to the device"

        memory.array[...] = host.memory(others)
        for page, slot in pairs:
            before[slot] = others.reshape(-1)[page]
        engine.load(moves, window=window).wait(60)
        assert (device.memory == before).all(), "device"
        assert (memory.array == host.memory(others)).all(), "a load wrote to the pages"


def test_neighbours_in_different_blocks_are_no_run() -> None:
    """Slots 0, 1 and 6, 7 of blocks of 4: within their blocks they are 0, 1, 2, 3."""
    geometry, row = GEOMETRIES["long rows"], 2 * 4100 * 2
    memory, device = (
        pages_of(geometry),
        np.random.default_rng(2).integers(0, 256, 32 * row, np.uint8),
    )
    base = int(device.ctypes.data)
    planes = {
        ("kv", 0, name): DevicePlane(base + at * row, 2 * row, 8, 4, 16 * row, row // 2)
        for at, name in enumerate("kv")
    }  # [block][unit][k, v], and blocks twice as far apart as they are large
    with HostEngine(geometry, DevicePlanes(planes, keep=device), memory) as engine:
        engine.offload(Move([3], [0, 1, 6, 7])).wait(60)
    for at, slot in enumerate((0, 1, 6, 7)):
        place = (slot // 4 * 8 + slot % 4) * 2
        for plane in range(2):
            found = memory.array[3].reshape(-1)[(plane * 4 + at) * row :][:row]
            assert (found == device[(place + plane) * row :][:row]).all()


class Gate:
    """An event of somebody else, which the test opens; counts who waits."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached, self.opened, self.error = threading.Event(), threading.Event(), error

    def synchronize(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        if self.error:
            raise self.error


class Sides:
    """A small engine with all there is to it."""

    def __init__(self, **how: Any) -> None:
        self.geometry = GEOMETRIES["bf16"]
        self.device = Device(self.geometry.share(), SLOTS, 5)
        self.memory = pages_of(self.geometry)
        self.engine = HostEngine(self.geometry, self.device.planes, self.memory, **how)

    def expected(self, *moves: Move) -> Bytes:
        flat = self.memory.array.copy().reshape(-1)
        for page, slot in moved_rows(
            self.geometry.share(), self.device, self.memory.page_bytes, moves
        ):
            flat[page] = self.device.memory[slot]
        return flat.reshape(self.memory.array.shape)


@pytest.fixture
def sides() -> Iterator[Sides]:
    made = Sides()
    yield made
    made.engine.close()


MOVE = Move([2], np.arange(8))


def test_nothing_moves_before_what_it_is_after(sides: Sides) -> None:
    before, gate, stream = sides.memory.array.copy(), Gate(), Gate()
    stream.opened.set()
    transfer = sides.engine.offload(MOVE, streams=[stream], after=[gate])
    assert gate.reached.wait(60)
    assert stream.reached.is_set()
    assert not transfer.done()
    refused(WaitTimeout, "", transfer.wait, 0)
    assert (sides.memory.array == before).all()
    expected = sides.expected(MOVE)
    gate.opened.set()
    transfer.wait(60)
    assert (sides.memory.array == expected).all()


def test_one_direction_goes_in_order_and_the_other_does_not_wait(sides: Sides) -> None:
    gate = Gate()
    first = sides.engine.offload(Move([0], np.arange(8)), after=[gate])
    second = sides.engine.offload(Move([0], np.arange(8, 16)))
    assert gate.reached.wait(60)
    sides.engine.load(Move([5], np.arange(40, 48))).wait(60)
    assert not second.done()
    gate.opened.set()
    second.wait(60)
    assert first.done()
    expected = sides.expected(Move([0], np.arange(8, 16)))
    assert (sides.memory.array == expected).all()


def test_a_transfer_is_something_to_be_after(sides: Sides) -> None:
    gate, called = Gate(), []
    first = sides.engine.offload(Move([0], np.arange(8)), after=[gate], when_done=called.append)
    second = sides.engine.load(Move([0], np.arange(8, 16)), after=[first])
    assert gate.reached.wait(60)
    gate.opened.set()
    second.wait(60)
    assert called == [], "the engine's threads make no calls of ours"
    assert first.done()
    assert called == [True]
    k = sides.device.memory
    for low, high in zip(
        moved_rows(
            sides.geometry.share(), sides.device, sides.memory.page_bytes, [Move([0], range(8))]
        ),
        moved_rows(
            sides.geometry.share(), sides.device, sides.memory.page_bytes, [Move([0], range(8, 16))]
        ),
        strict=True,
    ):
        assert (k[low[1]] == k[high[1]]).all()


def test_a_failed_one(sides: Sides) -> None:
    before, gate, called = sides.memory.array.copy(), Gate(RuntimeError("no such stream")), []
    transfer = sides.engine.offload(MOVE, after=[gate], window=1, when_done=called.append)
    gate.opened.set()
    for wait in (transfer.wait, transfer.done, transfer.wait_on, lambda: transfer.wait_layer(0)):
        with pytest.raises(TransferFailed, match="no such stream") as failed:
            wait()
        assert isinstance(failed.value.__cause__, RuntimeError)
    assert called == [False]
    assert (sides.memory.array == before).all()
    assert sides.engine.poll() == 0
    sides.engine.offload(MOVE).wait(60)


def test_a_failed_copy(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightcache.kernels.host_engine import Index

    whole = Index._indexed
    told = iter(range(1000))

    def breaks(self: Index, *arguments: Any) -> None:
        if next(told) == 3:
            raise MemoryError("here")
        whole(self, *arguments)

    monkeypatch.setattr(Index, "_indexed", breaks)
    refused(TransferFailed, "here", sides.engine.offload(MOVE).wait, 60)


def test_windows_are_done_one_by_one(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightcache.kernels.host_engine import Index, RowSeries

    whole, gate = Index._indexed, Gate()

    def slow(self: Index, series: RowSeries, *arguments: Any) -> None:
        if series.layer == 2:
            gate.synchronize()
        whole(self, series, *arguments)

    monkeypatch.setattr(Index, "_indexed", slow)
    expected = sides.expected(MOVE)
    transfer = sides.engine.offload(MOVE, window=1)
    transfer.wait_layer(0)
    transfer.wait_layer(1)
    assert gate.reached.wait(60)
    assert not transfer.done()
    for page, _ in moved_rows(
        sides.geometry.share(layers=[0, 1]), sides.device, sides.memory.page_bytes, [MOVE]
    ):
        assert (sides.memory.array.reshape(-1)[page] == expected.reshape(-1)[page]).all()
    gate.opened.set()
    transfer.wait_layer(2)
    assert (sides.memory.array == expected).all()
    transfer.wait(60)
    refused(ConfigError, "layer", transfer.wait_layer, 3)


def test_a_transfer_that_comes_as_the_engine_closes(sides: Sides) -> None:
    for line in sides.engine._queue._lines:
        line.shutdown()
    refused(Detached, "no transfers any more", sides.engine.offload, MOVE)
    assert sides.engine.poll() == 0


def test_one_that_an_interrupt_left_behind_is_begun(sides: Sides) -> None:
    expected = sides.expected(MOVE)
    transfer = sides.engine.offload(Move([0], []))
    transfer.wait(60)
    left = type(transfer)(
        True,
        sides.engine._usable().windows(
            flatten(MOVE, sides.geometry, sides.memory), sides.engine.share, None, True
        ),
        (),
        None,
    )
    sides.engine._queue.open.append(left)
    while sides.engine.poll():
        left.wait(60)
    assert (sides.memory.array == expected).all()


def test_a_dropped_engine_finishes() -> None:
    sides, gate = Sides(), Gate()
    expected = sides.expected(MOVE)
    transfer = sides.engine.offload(MOVE, after=[gate])
    del sides.engine
    gate.opened.set()
    transfer.wait(60)
    assert (sides.memory.array == expected).all()


def test_a_limited_rate_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(host_engine, "time", clock)
    sides = Sides(rate=1000.0, threads=1)
    expected = sides.expected(MOVE)
    transfer = sides.engine.offload(MOVE)
    transfer.wait(60)
    last = min(size for size in [transfer.nbytes // 6])
    assert sum(slept) == pytest.approx((transfer.nbytes - last) / 1000.0)
    assert (sides.memory.array == expected).all()
    now[0] += 1e6  # rest earns nothing
    before = len(slept)
    sides.engine.offload(MOVE).wait(60)
    assert len(slept) > before
    sides.engine.close()


def test_transfers_that_nobody_asks_for_are_forgotten(sides: Sides) -> None:
    for _ in range(300):
        sides.engine.offload(MOVE).synchronize()
    assert len(sides.engine._queue.open) <= 1
    called: list[bool] = []
    kept = sides.engine.offload(MOVE, when_done=called.append)
    kept.synchronize()
    del kept
    sides.engine.offload(MOVE).synchronize()
    assert sides.engine.poll() == 0
    assert called == [True], "but those whose end somebody waits for"


def test_helpers_copy_and_a_failure_waits_for_them(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that has failed is over only when no thread copies for it any more."""
    from lightcache.kernels.host_engine import Index

    monkeypatch.setattr(host_engine, "HELP_BYTES", 1)
    whole, gate, others = Index._indexed, Gate(), threading.Event()

    def one_breaks(self: Index, *arguments: Any) -> None:
        if not others.is_set():  # the first to come
            others.set()
            gate.synchronize()
            whole(self, *arguments)
            return
        assert gate.reached.wait(60)
        raise MemoryError("here")

    monkeypatch.setattr(Index, "_indexed", one_breaks)
    transfer = sides.engine.offload(MOVE)
    assert gate.reached.wait(60)
    refused(WaitTimeout, "", transfer.wait, 0.2)
    gate.opened.set()
    refused(TransferFailed, "here", transfer.wait, 60)


def test_a_load_does_not_wait_for_threads_that_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightcache.kernels.host_engine import Index

    monkeypatch.setattr(host_engine, "HELP_BYTES", 1)
    whole, gate, sides = Index._indexed, Gate(), Sides(threads=3)

    def held_up(self: Index, series: Any, rows: slice, to_host: bool) -> None:
        if to_host:
            gate.synchronize()
        whole(self, series, rows, to_host)

    monkeypatch.setattr(Index, "_indexed", held_up)
    offload = sides.engine.offload(MOVE)
    assert gate.reached.wait(60)
    sides.engine.load(Move([5], np.arange(40, 48))).wait(60)
    assert not offload.done()
    gate.opened.set()
    sides.engine.close()


def test_a_share_without_layers(sides: Sides) -> None:
    share = sides.geometry.share(layers=[])
    with HostEngine(sides.geometry, sides.device.planes, sides.memory, share=share) as engine:
        engine.offload(MOVE).wait(60)


@pytest.mark.parametrize(
    ("moves", "how", "why"),
    [
        (Move([2], np.arange(8) + SLOTS - 7), {}, f"slots: expected 0 to {SLOTS - 1}"),
        (Move([2], np.arange(8.0)), {}, "slots"),
        (Move([PAGES], np.arange(8)), {}, "another cache"),
        (MOVE, {"window": 0}, "window"),
        (MOVE, {"after": [17]}, "after"),
        (MOVE, {"after": 17}, "after"),
        (MOVE, {"streams": ["s"]}, "after"),
        (MOVE, {"planes": 17}, "planes"),
        (MOVE, {"planes": DevicePlanes({})}, "layer 0"),
    ],
)
def test_bad_input_moves_nothing(sides: Sides, moves: Any, how: Any, why: str) -> None:
    pages, device = sides.memory.array.copy(), sides.device.memory.copy()
    for call in (sides.engine.offload, sides.engine.load):
        refused(ConfigError, why, call, [MOVE, moves], **how)
    assert sides.engine.poll() == 0
    assert (sides.memory.array == pages).all()
    assert (sides.device.memory == device).all()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"threads": 0}, "threads"),
        ({"threads": True}, "threads"),
        ({"rate": 0}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"share": GEOMETRIES["state"].share()}, "share"),
    ],
)
def test_an_engine_that_is_none(how: Any, why: str) -> None:
    refused(ConfigError, why, Sides, **how)


def test_sides_that_do_not_fit(sides: Sides) -> None:
    small = HostPages(np.zeros((PAGES, 16), np.uint8))
    refused(ConfigError, "page_bytes", HostEngine, sides.geometry, sides.device.planes, small)
    with pytest.raises(ConfigError, match="TransferEngine"):
        HostEngine(sides.geometry, DevicePlanes({}, device="cuda:0"), sides.memory)
    partial = DevicePlanes({("kv", 0, "k"): DevicePlane(64, 8, 8)})
    refused(ConfigError, "layer 0", HostEngine, sides.geometry, partial, sides.memory)


def test_memory_that_is_read_only(sides: Sides) -> None:
    array = sides.memory.array.copy()
    array.flags.writeable = False
    with HostEngine(sides.geometry, sides.device.planes, HostPages(array)) as engine:
        engine.load(MOVE).wait(60)
        refused(ConfigError, "read-only", engine.offload, MOVE)


NUMPY_ALONE = """
import sys
import numpy as np
from lightcache import Cache
from lightcache.kernels import KVGroup, Move, PageGeometry, Shard, layouts
from lightcache.kernels.testing import Bytes, PlacedPages, moved_rows

class Refused:
    def find_spec(self, name, *rest):
        assert name.partition(".")[0] not in ("torch", "triton"), name

sys.meta_path.insert(0, Refused())
geometry = PageGeometry(
    [KVGroup.attention("kv", layers=2, heads=2, head_dim=3, dtype_bytes=2, page_tokens=8)]
)
name = f"numpy {geometry.fingerprint()}"
sizes = {"page_bytes": geometry.page_bytes, "page_tokens": 8, "pages": 4}
kv = [np.random.default_rng(0).integers(0, 9, (2, 6, 8, 2, 3)).astype(np.uint16) for _ in range(2)]
before = np.array(kv)
with Cache.open(sys.argv[1], fingerprint=name, secret=bytes(16), **sizes) as cache:
    with cache.transfer_engine(geometry, layouts.vllm(Shard(geometry), "kv", kv)) as engine:
        engine.offload(Move(np.arange(2), np.arange(8, 24))).wait()
        for tensor in kv:
            tensor[:] = 0
        engine.load(Move(np.arange(2), np.arange(8, 24))).wait()
assert (np.array(kv)[:, :, 1:3] == before[:, :, 1:3]).all()
assert not np.array(kv)[:, :, 3:].any()
"""


def test_a_host_engine_of_arrays_needs_no_torch(
    segment_name: str, script: Callable[..., Any]
) -> None:
    script(NUMPY_ALONE, segment_name)
