"""The device engine, its kernel interpreted too, against pages packed the slow way, and what it
promises beyond the conformance suite (test_transfer_engine_conformance.py)."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import numpy as np
import pytest
from support.inline_device import InlineDevice
from support.refusals import refused
from support.transfer_cases import (
    CASES,
    check_loaded,
    flat,
    some_slots,
    states,
    whole_blocks,
)

from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.shm.errors import ConfigError, TransferFailed

pytest.importorskip("triton")
PAGES = 6


def engine_of(case, mode="auto", interpreted=False, **more):
    memory = HostPages(np.full((PAGES, case.geometry.page_bytes), 0xCD, np.uint8))
    device = InlineDevice(interpreted)
    made = TransferEngine(
        case.geometry, case.planes, memory, mode=mode, device=device, staging_bytes=1 << 14, **more
    )
    return made, memory, device


@pytest.mark.parametrize("mode", ["auto", "staged", "direct"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_there_and_back(make, mode):
    """`auto` with the kernel in numpy, the others interpreted in turn."""
    case = make("cpu")
    turn = ["staged", "direct"][CASES.index(make) % 2]
    engine, memory, _ = engine_of(case, mode, interpreted=mode == turn)
    tokens = case.geometry.page_tokens
    slots, pages = some_slots(case, 3), [4, 0, 5]
    with engine:
        engine.offload(Move(pages, slots)).wait()
        for number, page in enumerate(pages):
            expected = case.page(slots[number * tokens : (number + 1) * tokens])
            used = case.geometry.used_bytes
            np.testing.assert_array_equal(memory.array[page][:used], expected[:used])
        assert (memory.array[[1, 2, 3]] == 0xCD).all()

        before = case.snapshot()
        case.poison()
        engine.load(Move(pages, slots)).wait()
    check_loaded(case, before, slots)


# ---- parts of pages, many requests, what is left out


@pytest.mark.parametrize("mode", ["auto", "staged", "direct"])
@pytest.mark.parametrize("count", [16, 3])
def test_bytes_of_a_part_of_a_page(mode, count):
    case = flat("cpu")
    engine, _, _ = engine_of(case, mode)
    with engine:
        transfer = engine.offload(Move(np.array([2]), np.arange(count)))
        transfer.wait()
    assert transfer.nbytes == case.geometry.used_bytes * count // 16


# ---- copies without a kernel


def test_equal_bytes_need_no_kernel(monkeypatch):
    case = whole_blocks("cpu")
    engine, memory, device = engine_of(case, "copies")
    monkeypatch.setattr(engine._parts.joined, "launches", None)  # calling it would fail
    slots = some_slots(case, 3, scattered=False)
    with engine:
        engine.offload(Move([4, 0, 5], slots)).wait()
    copies = [entry for entry in device.log if entry[0] == "copy"]
    assert sum(entry[2] for entry in copies) == 3, "one copy a page"
    for number, page in enumerate([4, 0, 5]):
        expected = case.page(slots[number * 16 : (number + 1) * 16])
        np.testing.assert_array_equal(memory.array[page], expected)


def test_copies_go_back_too():
    case = flat("cpu", 1)
    engine, _, device = engine_of(case, "copies")
    slots = np.arange(32, 64)
    with engine:
        engine.offload(Move([4, 0], slots)).wait()
        before = case.snapshot()
        case.poison()
        engine.load(Move([4, 0], slots)).wait()
    check_loaded(case, before, slots)
    assert {entry[0] for entry in device.log if entry[0] == "copy"}


@pytest.mark.parametrize(
    "slots", [np.r_[0:8, 9:17], np.arange(16)[::-1], np.arange(15)], ids=["gap", "back", "part"]
)
def test_copies_refuse_what_does_not_lie_so(slots):
    engine, memory, device = engine_of(flat("cpu", 1), "copies")
    with engine:
        refused(ConfigError, "use 'auto'", engine.offload, Move([0], slots))
        assert (memory.array == 0xCD).all()
        assert not device.log


# ---- windows


def test_windows_hold_their_layers():
    case = flat("cpu")
    engine, _, device = engine_of(case, "staged")
    slots = some_slots(case, 2)
    with engine:
        engine.offload(Move([0, 1], slots)).wait()
        before = case.snapshot()
        case.poison()
        device.running = False
        transfer = engine.load(Move([0, 1], slots), window=2)
        device.log.clear()
        transfer.wait_layer(1, device.current())
        first = [entry[2] for entry in device.log if entry[0] == "wait"]
        device.log.clear()
        transfer.wait_layer(2, device.current())
        second = [entry[2] for entry in device.log if entry[0] == "wait"]
        assert first
        assert second
        assert not set(map(id, first)) & set(map(id, second))
        refused(ConfigError, r"layers are \[0, 1, 2\]", transfer.wait_layer, 3, device.current())
        device.running = True
        transfer.wait()
    check_loaded(case, before, slots)


# ---- waiting and failing


@pytest.mark.parametrize("mode", ["staged", "copies"])
def test_a_failed_copy_is_never_a_success(mode):
    case = flat("cpu", 1)
    engine, _, device = engine_of(case, mode)
    told = []
    with engine:
        device.fail_copies = True
        transfer = engine.offload(Move([0], np.arange(16)), when_done=told.append)
        refused(TransferFailed, "the copy failed", transfer.wait)
        refused(TransferFailed, "", transfer.done)
        refused(TransferFailed, "", transfer.wait_on, device.current())
        assert told == [False]
        device.fail_copies = False
        engine.offload(Move([0], np.arange(16))).wait()


def test_what_was_enqueued_before_a_failure_is_waited_for():
    engine, _, device = engine_of(flat("cpu"), "staged")
    with engine:
        device.fail_copies = True
        device.running = False
        transfer = engine.offload(Move([0], np.arange(16)))
        assert not transfer.done(), "the kernel may still run"
        device.running = True
        refused(TransferFailed, "", transfer.done)


@pytest.mark.parametrize("mode", ["auto", "staged", "copies"])
def test_sources_and_after_are_waited_for(mode):
    case = flat("cpu", 1)
    engine, _, device = engine_of(case, mode)
    own, other = device.event(), device.stream()
    with engine:
        engine.load(Move([0], np.arange(16)), streams=[other], after=[own]).wait()
    waits = [entry[2] for entry in device.log if entry[0] == "wait"]
    assert own in waits
    assert other.name in {event.recorded for event in waits}


def test_steady_state_allocates_nothing():
    case = flat("cpu")
    engine, _, device = engine_of(case, "staged")
    slots = some_slots(case, 3)
    with engine:
        engine.warm()
        engine.offload(Move([0, 1, 2], slots)).wait()
        before = device.allocated, engine._in_flight.blocks.made, engine._in_flight.events.made
        for _ in range(10):
            engine.offload(Move([0, 1, 2], slots)).wait()
            engine.poll()
        assert (
            device.allocated,
            engine._in_flight.blocks.made,
            engine._in_flight.events.made,
        ) == before
        for _ in range(10):
            engine.offload(Move([0, 1, 2], slots))
        assert not engine._in_flight.finished, "nobody polls, and nothing piles up"
        assert len(engine._in_flight.offload.transfers) == 1


@pytest.mark.parametrize("mode", ["auto", "staged", "direct", "copies"])
def test_a_rate_is_kept_and_everything_arrives(mode):
    case = flat("cpu", 1)
    engine, memory, _ = engine_of(case, mode, rate=1e9)
    with engine:
        transfer = engine.offload(Move([0, 1], np.arange(32)))
        transfer.wait(60)
        transfer.wait_on(engine.device.current())
    for page in (0, 1):
        expected = case.page(np.arange(page * 16, page * 16 + 16))
        np.testing.assert_array_equal(memory.array[page], expected)


# ---- bad input, before anything is launched


def test_engines_refuse_what_does_not_fit():
    case = flat("cpu")
    small = HostPages(np.zeros((2, case.geometry.page_bytes - 16), np.uint8))
    with pytest.raises(ConfigError, match="create the cache with page_bytes"):
        TransferEngine(case.geometry, case.planes, small, device=InlineDevice())
    memory = HostPages(np.zeros((2, case.geometry.page_bytes), np.uint8))
    with pytest.raises(ConfigError, match="expected one of auto, staged"):
        TransferEngine(case.geometry, case.planes, memory, device=InlineDevice(), mode="fast")
    with pytest.raises(ConfigError, match="rate: expected"):
        TransferEngine(case.geometry, case.planes, memory, device=InlineDevice(), rate=0)
    with pytest.raises(ConfigError, match="share: expected a Share, found 5"):
        TransferEngine(case.geometry, case.planes, memory, device=InlineDevice(), share=5)
    refused(ConfigError, "HostEngine serves", TransferEngine, case.geometry, case.planes, memory)
    registered = InlineDevice()
    registered.registered = True
    with pytest.raises(ConfigError, match="not registered"):
        TransferEngine(case.geometry, case.planes, memory, device=registered)
    with pytest.raises(ConfigError, match="not among"):
        TransferEngine(states("cpu").geometry, case.planes, memory, device=InlineDevice())
