"""Pages that lie in several pages of the host: their sizes, refusals, and every byte of them."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import numpy as np
import pytest
import torch
from support.inline_device import InlineDevice
from support.refusals import refused
from support.transfer_cases import (
    CASES,
    blocks_hnd,
    check_parts,
    flat,
    in_parts,
    some_slots,
    states,
    whole_blocks,
)

from lightcache import Cache, ConfigError, LayoutMismatch
from lightcache.hybrid.opening import state_layout
from lightcache.kernels import layouts
from lightcache.kernels.geometry import (
    MOST_PADDING,
    KVGroup,
    PageGeometry,
    Plane,
    fitting_page_tokens,
)
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.layouts import Shard
from lightcache.kernels.moves import Move
from lightcache.kernels.options import Thresholds
from lightcache.kernels.pinned import HostPages
from lightcache.manager.opening import EngineKV
from lightcache.page_transfers import Load, Offload
from lightcache.runs import Run

# ---- the format

STATE = KVGroup.state("s", layers=2, parts=[Plane("conv", 50), Plane("ssm", 450)])


def kv(tokens=16):
    """4096 bytes for 16 tokens."""
    return KVGroup.attention(
        "kv", layers=2, heads=2, head_dim=16, dtype_bytes=2, page_tokens=tokens
    )


def test_sizes():
    whole, cut = PageGeometry([STATE]), PageGeometry([STATE], part_bytes=304)
    assert (whole.parts, whole.part_bytes) == (1, whole.page_bytes)
    assert whole.used_bytes == cut.used_bytes == 1000
    assert (cut.parts, cut.part_bytes, cut.page_bytes) == (4, 304, 1216)
    assert cut.padding == 216 / 1216
    assert [cell.offset for cell in cut.share().cells] == [0, 50, 500, 550]
    assert PageGeometry([STATE], part_bytes=1008).parts == 1


def test_other_parts_are_another_format():
    """Parts of other sizes are other bytes in each host page, also where the sum is the same."""
    cuts = [PageGeometry([STATE], part_bytes=size) for size in (256, 512, 1024)]
    assert len({cut.page_bytes for cut in cuts}) == 1
    assert len(set(cuts)) == len({cut.fingerprint() for cut in cuts}) == 3
    assert cuts[2] == PageGeometry([STATE], align=1024), "one part is a page as ever"
    assert cuts[2].fingerprint() == PageGeometry([STATE], align=1024).fingerprint()


def test_page_tokens_that_fit():
    """A state of 9,000 bytes in pages of 4096 for 16 tokens: a quarter of the third is used."""
    state = PageGeometry([KVGroup.state("s", layers=1, parts=[Plane("ssm", 9000)])])
    today = PageGeometry([kv()])
    assert today.page_bytes == 4096
    assert PageGeometry(state.groups, part_bytes=4096).padding > MOST_PADDING
    found = fitting_page_tokens(today, [state])
    expected = []
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        part = PageGeometry([kv(tokens)]).page_bytes
        if PageGeometry(state.groups, part_bytes=part).padding <= MOST_PADDING:
            expected.append(tokens)
    assert sorted(found) == expected
    assert found[0] == 4, "1,024 bytes, of which nine are 216 too many"
    assert fitting_page_tokens(today, [])[0] == 16, "today's, if it fits"


def test_page_tokens_keep_units_whole():
    block = KVGroup.opaque("o", layers=1, row_bytes=64, page_tokens=16, unit_tokens=8)
    assert min(fitting_page_tokens(PageGeometry([block]), [])) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part_bytes": 1000}, "part_bytes: expected a multiple of 16, found 1000"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"part_bytes": 1024.0}, "part_bytes"),
        ({"part_bytes": 1024, "align": 4096}, "expected align or part_bytes, found both"),
    ],
)
def test_geometries_that_are_refused(options, message):
    refused(ConfigError, message, PageGeometry, [STATE], **options)


# ---- how pages are moved here

WAYS = {
    "staged": {"mode": "staged", "staging_bytes": 1 << 14},
    "staged in small slots": {"mode": "staged", "staging_bytes": 512},
    "direct": {"mode": "direct"},
    "auto": {"mode": "auto", "calibration": Thresholds(0, 0, 1)},
}


def places_of(case, pages, others=3):
    """Host pages for the parts of some pages, in no order, and how many pages the host has."""
    count = pages * case.geometry.parts
    order = np.random.default_rng(5).permutation(count + others)
    return order[:count].reshape(pages, case.geometry.parts), count + others


def device_engine(case, memory, interpreted=False, **options):
    from lightcache.kernels.engine import TransferEngine

    device = InlineDevice(interpreted)
    return TransferEngine(case.geometry, case.planes, memory, device=device, **options)


def stamped(case, host_pages):
    shape = (host_pages, case.geometry.part_bytes)
    return HostPages(np.random.default_rng(6).integers(0, 256, shape, np.uint8))


# ---- moves, memory


@pytest.mark.parametrize("way", ["host", *WAYS])
def test_parts_that_are_left_out(way):
    """Keep their bytes, in any mode; a page of which all parts are left out is nothing."""
    pytest.importorskip("triton")
    case = in_parts(states("cpu"), 160)
    places, host_pages = places_of(case, 3)
    memory = stamped(case, host_pages)
    expected, move = memory.array.copy(), places.copy()
    move[0, ::2] = move[1, 3:] = move[2] = -1
    for page, slot in ((0, 5), (1, 2)):
        whole = case.page([slot])
        for part, host in enumerate(move[page]):
            end = min(160, case.geometry.used_bytes - part * 160)
            if host >= 0:
                expected[host, :end] = whole[part * 160 :][:end]
    with (
        HostEngine(case.geometry, case.planes, memory)
        if way == "host"
        else device_engine(case, memory, way == "direct", **WAYS[way])
    ) as engine:
        engine.offload(Move(move.ravel(), [5, 2, 7])).wait(60)
        np.testing.assert_array_equal(memory.array, expected)
        before = case.snapshot()
        refused(
            ConfigError, "part 0 of page 0 has no host page", engine.load,
            Move(move.ravel(), [0, 1, 2]),
        )  # fmt: skip
        engine.load(Move(move.ravel(), [0, 1, 2], skip=np.ones(3, bool))).wait(60)
        assert all(torch.equal(view, before[key]) for key, view in case.snapshot().items())


def test_the_copy_engine_alone_leaves_parts_out():
    pytest.importorskip("triton")
    case = in_parts(whole_blocks("cpu"), 1024)
    memory = stamped(case, 12)
    expected, whole = memory.array.copy(), case.page(np.arange(16))
    expected[[7, 3]] = whole.reshape(6, 1024)[[1, 4]]
    with device_engine(case, memory, mode="copies") as engine:
        engine.offload(Move([-1, 7, -1, -1, 3, -1], np.arange(16))).wait(60)
        engine.offload(Move([-1] * 6, np.arange(16))).wait(60)
    np.testing.assert_array_equal(memory.array, expected)


def test_moves_that_are_refused():
    case = in_parts(states("cpu"), 256)
    memory = HostPages(np.zeros((16, 256), np.uint8))
    parts = case.geometry.parts
    assert parts > 2
    with HostEngine(case.geometry, case.planes, memory) as engine:
        for pages in (range(parts - 1), range(parts + 1)):
            message = f"expected {parts} pages of the host .* found {len(pages)} in all"
            refused(ConfigError, message, engine.offload, Move(pages, [0]))
        refused(ConfigError, "1 pages have 1 tokens", engine.load, Move(range(parts), [0, 1]))
        skip = np.zeros(parts, bool)
        refused(ConfigError, r"shape \(1,\)", engine.load, Move(range(parts), [0], skip=skip))
        refused(ConfigError, "expected 0 to 15", engine.load, Move([*range(1, parts), 16], [0]))
    assert not memory.array.any()


def test_one_host_page_is_no_page():
    """Not even on the short way of a single page."""
    pytest.importorskip("triton")
    case = in_parts(states("cpu"), 256)
    memory = HostPages(np.zeros((16, 256), np.uint8))
    with device_engine(case, memory, mode="direct") as engine:
        move = Move(np.array([0]), np.array([0]))
        refused(ConfigError, "found 1 in all", engine.offload, move)
    assert not memory.array.any()


@pytest.mark.parametrize("size", [128, 272, 512])
def test_memory_with_other_pages(size):
    case = in_parts(states("cpu"), 256)
    memory = HostPages(np.zeros((16, size), np.uint8))
    message = f"parts of 256 bytes, expected the {size} .* part_bytes={size}"
    refused(ConfigError, message, HostEngine, case.geometry, case.planes, memory)


# ---- every byte, both ways


@pytest.mark.parametrize("way", ["host", *WAYS])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_there_and_back(make, way):
    """In three parts or so, whose borders fall into rows. The kernel meets parts when it reads and
    writes directly: there it is interpreted, for every second case."""
    if way != "host":
        pytest.importorskip("triton")
    case = make("cpu")
    case = in_parts(case, case.geometry.used_bytes // 3 // 16 * 16 + 16)
    assert case.geometry.parts == 3
    interpreted = way == "direct" and CASES.index(make) % 2 == 0
    places, host_pages = places_of(case, 2)
    memory = stamped(case, host_pages)
    with (
        HostEngine(case.geometry, case.planes, memory)
        if way == "host"
        else device_engine(case, memory, interpreted, **WAYS[way])
    ) as engine:
        check_parts(engine, memory, case, places, some_slots(case, 2))


@pytest.mark.parametrize("part_bytes", [16, 48, 80, 512, 1008])
@pytest.mark.parametrize("way", ["host", "staged", "direct"])
def test_states_in_parts_of_any_size(way, part_bytes):
    pytest.importorskip("triton")
    case = in_parts(states("cpu"), part_bytes)
    places, host_pages = places_of(case, 3)
    memory = stamped(case, host_pages)
    with (
        HostEngine(case.geometry, case.planes, memory)
        if way == "host"
        else device_engine(case, memory, part_bytes == 80, mode=way, staging_bytes=4096)
    ) as engine:
        check_parts(engine, memory, case, places, some_slots(case, 3))


def test_pages_one_by_one(monkeypatch):
    """As under a rate limit, where each launch begins at another page."""
    pytest.importorskip("triton")
    monkeypatch.setattr("lightcache.kernels.submission.PIECE_BYTES", 1)
    case = in_parts(states("cpu"), 512)
    places, host_pages = places_of(case, 3)
    memory = stamped(case, host_pages)
    with device_engine(case, memory, mode="direct", rate=1e9) as engine:
        check_parts(engine, memory, case, places, some_slots(case, 3))
        assert sum(entry[0] == "launch" for entry in engine.device.log) > 2 * 3


class Registered(HostPages):
    """Three pages at a time."""

    def registration(self, pages):
        return pages // 3


# Two states of four whole parts.
@pytest.mark.parametrize(
    ("kind", "pages", "copies"),
    [
        (HostPages, [7, 6, 5, 4, 3, 2, 1, 0], 8),
        (HostPages, [0, 1, 2, 3, 8, 9, 6, 7], 3),
        (HostPages, range(8), 1),
        (Registered, range(8), 3),
        (Registered, [2, 3, 1, 4, 5, 6, 7, 8], 5),
    ],
)
def test_a_copy_for_each_stretch_of_parts(kind, pages, copies):
    """The copy engine is asked for each part once, not for each layer or head; neighbours in the
    pool are one copy, if the driver knows them as one."""
    pytest.importorskip("triton")
    case = in_parts(states("cpu"), 208)
    assert (case.geometry.parts, case.geometry.padding) == (4, 0)
    memory = kind(stamped(case, 10).array)
    places = np.array(pages).reshape(2, 4)
    with device_engine(case, memory, mode="staged") as engine:
        engine.offload(Move(places.ravel(), [0, 5])).wait(60)
        made = [entry[2] for entry in engine.device.log if entry[0] == "copy"]
        assert made == [1, copies], "the index, and the parts"
        check_parts(engine, memory, case, places, np.array([0, 5]))


@pytest.mark.parametrize(
    ("kind", "copies"), [(HostPages, 2), (Registered, 4)], ids=["one", "threes"]
)
def test_stretches_for_the_copy_engine_alone(kind, copies):
    """Never from one page to the next: pages are paced one by one."""
    pytest.importorskip("triton")
    case = in_parts(whole_blocks("cpu"), 2048)
    assert (case.geometry.parts, case.geometry.padding) == (3, 0)
    memory = kind(stamped(case, 7).array)
    places = np.arange(1, 7).reshape(2, 3)
    with device_engine(case, memory, mode="copies") as engine:
        engine.offload(Move(places.ravel(), np.arange(32))).wait(60)
        made = [entry[2] for entry in engine.device.log if entry[0] == "copy"]
        assert sum(made) == copies
        check_parts(engine, memory, case, places, np.arange(32))


@pytest.mark.parametrize("part_bytes", [1024, 1040])
def test_the_copy_engine_alone(part_bytes):
    pytest.importorskip("triton")
    case = in_parts(whole_blocks("cpu"), part_bytes)
    places, host_pages = places_of(case, 2)
    memory = stamped(case, host_pages)
    slots = some_slots(case, 2, scattered=False)
    with device_engine(case, memory, mode="copies") as engine:
        check_parts(engine, memory, case, places, slots)
        assert not any(entry[0] == "launch" for entry in engine.device.log)


@pytest.mark.parametrize("make", [flat, blocks_hnd])
@pytest.mark.parametrize("way", ["host", *WAYS])
def test_what_is_left_out_stays(make, way):
    """A page that begins after its first token, one with a hole, and one that is skipped: rows that
    are left out keep their bytes, in whatever part they are."""
    pytest.importorskip("triton")
    case = make("cpu")
    case = in_parts(case, 208)
    places, host_pages = places_of(case, 3)
    memory = stamped(case, host_pages)
    before = memory.array.copy()
    slots = some_slots(case, 3)[2:]
    slots[20] = -1
    move = Move(places.ravel(), slots, 2, np.array([False, False, True]))
    kept = np.zeros((3, case.geometry.page_bytes), bool)
    wanted = np.zeros((3, case.geometry.page_bytes), np.uint8)
    mask = _rows_of(case.geometry)
    for page, tokens in enumerate(np.concatenate([[-1, -1], slots]).reshape(3, -1)[:2]):
        wanted[page] = case.page(np.maximum(tokens, 0))
        kept[page] = np.isin(mask, np.flatnonzero(tokens >= 0))
    rows, width = places.ravel(), case.geometry.part_bytes
    expected = before.copy()
    expected[rows] = np.where(kept.reshape(-1, width), wanted.reshape(-1, width), before[rows])
    with (
        HostEngine(case.geometry, case.planes, memory)
        if way == "host"
        else device_engine(case, memory, way == "direct", **WAYS[way])
    ) as engine:
        engine.offload(move).wait(60)
    np.testing.assert_array_equal(memory.array, expected)


@pytest.mark.parametrize("way", ["host", "staged", "direct"])
def test_a_page_ends_where_its_slots_end(way):
    """Three tokens, and after their slots those of another request."""
    pytest.importorskip("triton")
    case = flat("cpu")
    memory = stamped(case, 6)
    expected = memory.array.copy()
    short = np.isin(_rows_of(case.geometry), [0, 1, 2])
    expected[2] = np.where(short, case.page(np.r_[0:3, np.full(13, 0)]), expected[2])
    expected[4] = case.page(np.arange(32, 48))
    with (
        HostEngine(case.geometry, case.planes, memory)
        if way == "host"
        else device_engine(case, memory, True, **WAYS[way])
    ) as engine:
        engine.offload([Move([2], np.arange(3)), Move([4], np.arange(32, 48))]).wait(60)
    np.testing.assert_array_equal(memory.array, expected)


def _rows_of(geometry):
    """The token of each byte of a page, -1: padding."""
    tokens = np.full(geometry.page_bytes, -1)
    for cell in geometry.share().cells:
        size = cell.heads * cell.plane.row_bytes
        for unit in range(cell.units):
            tokens[cell.offset + unit * cell.unit_stride :][:size] = unit
    return tokens


# ---- one cache for KV pages and states

TOKENS, STATES, PAGES = 64, 8, 40


def kv_of_an_engine():
    raw = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 256, (2, TOKENS, 2, 32), dtype=torch.uint8, generator=raw)
    group = KVGroup.attention(
        "kv", layers=2, heads=2, head_dim=32, dtype_bytes=1, page_tokens=16, content="single"
    )
    geometry = PageGeometry([group])
    return tensor, geometry, layouts.attention(Shard(geometry), "kv", tensor, axes="lthc")


def states_of_an_engine():
    raw = torch.Generator().manual_seed(2)
    return {
        name: [
            torch.randint(0, 256, (STATES, size), dtype=torch.uint8, generator=raw)
            for _ in range(3)
        ]
        for name, size in (("conv", 600), ("ssm", 2900))
    }


def test_one_cache_for_kv_and_states(segment_name):
    """Pages of 2 KiB for KV, six of them for a state, in one pool; each is read back."""
    tensor, geometry, planes = kv_of_an_engine()
    tensors = states_of_an_engine()
    layout = state_layout(tensors)
    cut = PageGeometry(layout.geometry.groups, part_bytes=geometry.page_bytes)
    how = {"secret": b"a secret of tests"}
    with (
        EngineKV(
            Cache.create(
                segment_name,
                pages=PAGES,
                page_bytes=geometry.page_bytes,
                page_tokens=16,
                fingerprint=f"m {geometry.fingerprint()} {cut.fingerprint()}",
                **how,
            ),
            geometry,
            planes,
        ) as kv,
        EngineKV(Cache.attach(segment_name, **how), cut, layout.planes) as states,
    ):
        assert (geometry.page_bytes, cut.parts) == (2048, 6)
        kept = tensor.clone(), {name: torch.stack(each) for name, each in tensors.items()}
        keys = kv.cache.hash_pages(range(48))
        kv.offload(keys, np.arange(48)).wait()
        run = Run(1, cut.parts)
        parts = run.keys(keys[:2])
        new = states.cache.index.reserve(parts, independent=True, run=run)
        refused(ConfigError, "hold tokens 0 to 1, found 1 slots", Offload, states.engine, new, [3])
        offload = Offload(states.engine, new, [3, 1])
        assert offload.nbytes == 2 * cut.used_bytes
        offload.wait()
        tensor.zero_()
        for each in tensors.values():
            for layer in each:
                layer.zero_()
        load = Load(states.engine, states.cache.match(parts), [6, 7])
        assert load.tokens == 2
        load.wait()
        kv.load(keys, np.arange(48)).wait()
        assert torch.equal(tensor[:, :48], kept[0][:, :48])
        for name, each in tensors.items():
            found = torch.stack(each)
            assert torch.equal(found[:, [6, 7]], kept[1][name][:, [3, 1]])
            assert not found[:, :6].any()


def test_a_writer_that_finds_some_parts_writes_the_others(segment_name):
    tensors = states_of_an_engine()
    layout = state_layout(tensors)
    cut = PageGeometry(layout.geometry.groups, part_bytes=2048)
    how = {"pages": 20, "page_tokens": 16, "secret": b"a secret of tests"}
    name = f"m {cut.fingerprint()}"
    cache = Cache.create(segment_name, page_bytes=2048, fingerprint=name, **how)
    with EngineKV(cache, cut, layout.planes) as states:
        parts = cache.hash_pages(range(2 * cut.parts * 16))
        with cache.reserve(parts[:4]) as first:
            cache.pool.array[first.pages] = 0x11
            first.publish()
        Offload(states.engine, cache.reserve(parts), [3, 1]).wait()
        with cache.match(parts) as lease:
            pages = cache.pool.array[lease.pages].copy().reshape(2, -1)
    for page, slot, begin in ((pages[0], 3, 4 * 2048), (pages[1], 1, 0)):
        whole = np.concatenate(
            [tensors[part][layer][slot].numpy() for layer in range(3) for part in tensors]
        )
        assert (page[:begin] == 0x11).all()
        assert (page[begin : cut.used_bytes] == whole[begin:]).all()


def test_caches_with_other_pages(segment_name):
    tensors = states_of_an_engine()
    layout = state_layout(tensors)
    cut = PageGeometry(layout.geometry.groups, part_bytes=2048)
    how = {"pages": 8, "secret": b"a secret of tests"}
    with Cache.create(
        segment_name, page_bytes=4096, fingerprint=f"m {cut.fingerprint()}", **how
    ) as cache:
        message = "pages of 4096 bytes .* the geometry of 2048 .* part_bytes=4096"
        refused(LayoutMismatch, message, EngineKV, cache, cut, layout.planes)
