"""The device engine at its limits: nothing to move, large cells, parts of head groups, a rate."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.inline_device import InlineDevice, covered, ordered
from support.refusals import refused
from support.transfer_cases import Builder, _kv, flat, opaque_blocks

from lightcache.kernels import in_flight
from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.geometry import KVGroup
from lightcache.kernels.in_flight import Pacer
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.shm.errors import ConfigError, WaitTimeout

pytest.importorskip("triton")


def engine_of(case, mode="auto", pages=4, **more):
    memory = HostPages(np.full((pages, case.geometry.page_bytes), 0xCD, np.uint8))
    device = InlineDevice()
    more = {"staging_bytes": 1 << 14, **more}
    made = TransferEngine(case.geometry, case.planes, memory, mode=mode, device=device, **more)
    return made, memory, device


@pytest.mark.parametrize("mode", ["auto", "staged", "direct", "copies"])
@pytest.mark.parametrize("rate", [None, 1e9])
def test_a_share_without_cells_is_over_at_once(mode, rate):
    """A rank that has nothing to write still takes part."""
    case = flat("cpu")
    engine, memory, device = engine_of(
        case, mode, share=case.geometry.share().window([]), rate=rate
    )
    told = []
    with engine:
        engine.warm()
        for window in (None, 1):
            for verb in (engine.offload, engine.load):
                move = Move(np.array([1]), np.arange(16))
                transfer = verb(move, window=window, when_done=told.append)
                transfer.wait(60)
                transfer.wait_on(device.current())
                assert transfer.nbytes == 0
        refused(ConfigError, "slots: expected", engine.offload, Move([1], np.full(16, 1 << 31)))
        refused(ConfigError, "pages: expected", engine.offload, Move([4], np.arange(16)))
        assert engine.poll() == 0
    assert told == [True] * 4
    assert device.allocated <= 4, "no staging memory"
    assert not [entry for entry in device.log if entry[0] in ("launch", "copy")]
    assert (memory.array == 0xCD).all()


@pytest.mark.parametrize("staging", [1, 100, 1 << 14])
@pytest.mark.parametrize("window", [None, 1])
def test_cells_larger_than_the_staging_memory(staging, window):
    """The ring has room for the largest cell of any window, from the first one on."""
    build = Builder()
    groups = []
    for name, layer, dim in (("small", 0, 8), ("large", 1, 200)):
        build.add((name, layer, "kv"), build.tensor((96, 1, dim), torch.bfloat16))
        groups.append(
            KVGroup.attention(
                name,
                layers=[layer],
                heads=1,
                head_dim=dim,
                dtype_bytes=2,
                page_tokens=16,
                content="single",
            )
        )
    case = build.case(groups)
    engine, memory, device = engine_of(case, "staged", staging_bytes=staging)
    slots = np.random.default_rng(0).permutation(96)[:48]
    with engine:
        transfer = engine.offload(Move([2, 0, 3], slots), window=window)
        assert covered(device.log, transfer._marks)
        transfer.wait()
        ring = engine._in_flight.offload.ring
        for _ in range(3):
            engine.offload(Move([2, 0, 3], slots), window=1).wait()
        assert engine._in_flight.offload.ring is ring, (
            "a second one would free memory that is in use"
        )
        assert ring.slots >= 2
        for number, page in enumerate([2, 0, 3]):
            expected = case.page(slots[number * 16 : (number + 1) * 16])
            np.testing.assert_array_equal(memory.array[page], expected)
        before = case.snapshot()
        case.poison()
        engine.load(Move([2, 0, 3], slots), window=window).wait()
        for key, view in case.snapshot().items():
            assert torch.equal(view[slots], before[key][slots])


def _part_of_head_group(case):
    """One rank of two, where all heads are in one head group: its bytes do not touch."""
    share = case.geometry.share(rank=0, ranks=2)
    assert not all(cell.contiguous for cell in share.cells)
    return share


@pytest.mark.parametrize("mode", ["auto", "staged", "direct"])
@pytest.mark.parametrize("window", [None, 2])
def test_parts_of_head_groups(mode, window):
    case = flat("cpu", 1)
    half = Builder()
    for key, view in case.views.items():  # what rank 0 has: the first two heads
        half.add(key, view[:, 0, :2].contiguous().view(torch.bfloat16))
        half.tensors.append(half.views[key])
    planes = half.case([_kv(head_groups=1)]).planes
    memory = HostPages(np.full((4, case.geometry.page_bytes), 0xCD, np.uint8))
    share = _part_of_head_group(case)
    slots = np.random.default_rng(0).permutation(96)[:32]
    with TransferEngine(
        case.geometry, planes, memory, share=share, mode=mode, device=InlineDevice()
    ) as engine:
        engine.offload(Move([2, 0], slots), window=window).wait()
    for number, page in enumerate([2, 0]):
        expected = case.page(slots[number * 16 : (number + 1) * 16]).reshape(6, 16, 4, 16)
        found = memory.array[page].reshape(6, 16, 4, 16)
        np.testing.assert_array_equal(found[:, :, :2], expected[:, :, :2])
        assert (found[:, :, 2:] == 0xCD).all()


def test_copies_cannot_move_parts_of_head_groups():
    case = flat("cpu", 1)
    engine, _, device = engine_of(case, "copies", share=_part_of_head_group(case))
    with engine:
        refused(ConfigError, "use 'auto'", engine.offload, Move([0, 1], np.arange(32)))
        assert not device.log


@pytest.mark.parametrize("mode", ["auto", "staged", "direct"])
@pytest.mark.parametrize(("first", "count"), [(0, 12), (8, 8), (8, 24), (0, 9), (16, 16)])
def test_parts_of_pages_with_units_of_several_tokens(mode, first, count):
    """A unit that begins among the tokens moves whole."""
    case = opaque_blocks("cpu")
    engine, memory, _ = engine_of(case, mode)
    starts = np.array([5, 2, 9, 0]) * 8
    slots = (starts[:, None] + np.arange(8)).ravel()
    with engine:
        engine.offload(Move([1, 3], slots[first : first + count], first=first)).wait()
    for number, page in enumerate([1, 3]):
        expected = case.page(slots[number * 16 : (number + 1) * 16]).reshape(2, 2, 1056)
        found = memory.array[page].reshape(2, 2, 1056)
        for unit in range(2):
            token = number * 16 + unit * 8
            if first <= token < first + count:
                np.testing.assert_array_equal(found[:, unit], expected[:, unit])
            else:
                assert (found[:, unit] == 0xCD).all()


@pytest.mark.parametrize("mode", ["auto", "staged", "direct", "copies"])
@pytest.mark.parametrize("verb", ["offload", "load"])
def test_events_tell_of_all_that_was_enqueued(verb, mode):
    """Whole pages, a part of one, windows: the index, the ring and the pages are in use no more
    when the events are over."""
    case = flat("cpu", 1)
    engine, _, device = engine_of(case, mode, staging_bytes=2048)
    moves = [
        (Move(np.array([1]), np.arange(16)), None),
        (Move([1, 0, 3], np.arange(48)), None),
        (Move([1, 0], np.arange(32)), 1),
    ]
    if mode != "copies":
        moves.append((Move([1, 0, 3], np.random.default_rng(0).permutation(96)[:37], 3), 2))
    with engine:
        for move, window in moves:
            device.log.clear()
            device.running = False
            transfer = getattr(engine, verb)(move, window=window)
            assert covered(device.log, transfer._marks)
            for _, events in transfer._windows:
                assert events
            device.running = True
            transfer.wait()


@pytest.mark.parametrize("verb", ["offload", "load"])
def test_a_slot_of_the_ring_is_filled_after_it_was_emptied(verb):
    case = flat("cpu", 1)
    engine, _, device = engine_of(case, "staged", staging_bytes=2048)
    slots = np.random.default_rng(0).permutation(96)[:32]
    with engine:
        for _ in range(2):
            getattr(engine, verb)(Move([1, 0], slots))
        lane = engine._in_flight.offload if verb == "offload" else engine._in_flight.load
        work, _ = ordered(device.log)
        launches = [n for n, (kind, _, _) in enumerate(work) if kind == "launch"]
        # The copy before a launch fills its slot, or the one behind it empties it: the upload of
        # the index, once a transfer, is neither.
        if verb == "offload":
            fills, empties = launches, [n + 1 for n in launches]
        else:
            fills, empties = [n - 1 for n in launches], launches
        assert len(fills) > 3 * lane.ring.slots
        for fill, empty in zip(fills, empties, strict=True):
            first, last = sorted((fill, empty))
            assert first in work[last][2], "nothing is taken out before it is there"
        for fill, empty in zip(fills[lane.ring.slots :], empties, strict=False):
            assert empty in work[fill][2], "what is in it would be lost"


# ---- a rate


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self, end):
        self.now, self.end = Fraction(0), end
        self.over = threading.Event()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


def test_a_rate_is_exact(monkeypatch):
    clock = Clock(0)
    monkeypatch.setattr(in_flight, "time", clock)
    pacer, ran, over = Pacer(Fraction(100)), [], threading.Event()
    for number, nbytes in enumerate((50, 0, 100, 10, 0)):
        pacer.put(lambda number=number: ran.append((number, clock.now)), nbytes)
    pacer.put(over.set, 0)
    assert over.wait(60)
    half, more = Fraction(1, 2), Fraction(3, 2)
    assert ran == [(0, 0), (1, 0), (2, half), (3, more), (4, more)]
    clock.now += 100  # idle: what was not used is not made up for
    ran.clear()
    pacer.put(lambda: ran.append(clock.now), 100)
    pacer.put(lambda: ran.append(clock.now), 100)
    pacer.close()
    assert ran == [more + 100, more + 101]


def test_a_paced_transfer_is_under_way_until_all_is_enqueued(monkeypatch):
    case = flat("cpu", 1)
    engine, memory, device = engine_of(case, "copies", rate=1e9)
    hold, told = threading.Event(), []
    engine._in_flight.pacer.put(lambda: hold.wait(60), 0)
    transfer = engine.offload(Move([0, 1], np.arange(32)), when_done=told.append)
    assert not transfer.done()
    assert engine.poll() == 1
    refused(WaitTimeout, "", transfer.wait, 0)
    refused(WaitTimeout, "", transfer.wait, -1)
    assert not [entry for entry in device.log if entry[0] == "copy"]
    waiter = threading.Thread(target=transfer.wait_on, args=[device.current()])
    waiter.start()
    closer = threading.Thread(target=engine.close)
    closer.start()
    hold.set()
    for thread in (waiter, closer):
        thread.join(60)
        assert not thread.is_alive()
    assert told == [True]
    np.testing.assert_array_equal(memory.array[1], case.page(np.arange(16, 32)))


def test_a_paced_failure_ends_the_transfer_and_nothing_else():
    case = flat("cpu", 1)
    engine, memory, device = engine_of(case, "copies", rate=1e12)
    with engine:
        for kind in ("copy", "guard", "wait", "record"):
            hold = threading.Event()
            engine._in_flight.pacer.put(lambda hold=hold: hold.wait(60), 0)
            transfer = engine.offload(Move([0, 1], np.arange(32)))

            def refuse(what, kind=kind):
                if what == kind and threading.current_thread() is engine._in_flight.pacer._thread:
                    raise RuntimeError(f"{kind} refused")

            device.hook = refuse
            hold.set()
            refused(Exception, f"{kind} refused", transfer.wait, 60)
            device.hook = lambda kind: None
            assert engine.poll() == 0
        engine.offload(Move([0, 1], np.arange(32))).wait(60)
    np.testing.assert_array_equal(memory.array[1], case.page(np.arange(16, 32)))
