"""The device engine when something goes wrong: at every step, and at every place of its code."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from support.inline_device import InlineDevice, covered
from support.interrupts import interrupt
from support.refusals import refused
from support.transfer_cases import flat

from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.shm.errors import ConfigError, Detached, LightcacheError, TransferFailed

pytest.importorskip("triton")
CASE = flat("cpu", 1)
SLOTS = np.random.default_rng(2).permutation(96)
KINDS = ("record", "wait", "event", "copy", "launch", "words", "empty", "current", "guard")


@pytest.fixture
def no_collection():
    """Garbage of earlier tests is not found in the middle of this one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Refused(Exception):
    """By the driver."""


class Users(HostPages):
    """Page memory that counts who uses it."""

    users = 0

    def acquire(self):
        self.users += 1

    def release(self):
        self.users -= 1
        assert self.users >= 0


def engine_of(mode="auto", pages=4, **more):
    memory = Users(np.full((pages, CASE.geometry.page_bytes), 0xCD, np.uint8))
    device = InlineDevice()
    more = {"staging_bytes": 1 << 14, **more}
    engine = TransferEngine(CASE.geometry, CASE.planes, memory, mode=mode, device=device, **more)
    return engine, memory, device


def nth(kind, number):
    """A hook that fails at one call of a kind, and what it knows."""
    seen = {"calls": 0}

    def hook(what):
        if what == kind:
            seen["calls"] += 1
            if seen["calls"] == number:
                raise Refused(f"{kind} {number}")

    return hook, seen


def moves_of(mode):
    """Slots that a mode can move."""
    slots = np.arange(32) if mode == "copies" else SLOTS[:32]
    return Move(np.array([2, 0]), slots), slots


def check_pools(engine):
    """Nothing is under way, and every buffer is back."""
    assert engine.poll() == 0
    assert len(engine._in_flight.events._spare) == engine._in_flight.events.made
    assert sum(map(len, engine._in_flight.blocks._spare.values())) == engine._in_flight.blocks.made
    assert (
        len({id(event) for event in engine._in_flight.events._spare})
        == engine._in_flight.events.made
    )


def check_works(engine, memory, mode):
    """The next transfer is right."""
    move, slots = moves_of(mode)
    memory.array[:] = 0xCD
    engine.offload(move).wait()
    np.testing.assert_array_equal(memory.array[2], CASE.page(slots[:16]))
    np.testing.assert_array_equal(memory.array[0], CASE.page(slots[16:]))


def test_one_page_has_a_short_way(monkeypatch):
    engine, memory, _ = engine_of("direct")
    monkeypatch.setattr("lightcache.kernels.engine.Submission", None)  # calling it would fail
    with engine:
        engine.offload(Move(np.array([1]), SLOTS[:16])).wait()
    np.testing.assert_array_equal(memory.array[1], CASE.page(SLOTS[:16]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["staged", "direct", "copies", "page"])
@pytest.mark.parametrize("verb", ["offload", "load"])
def test_whatever_the_driver_refuses(verb, mode, kind):
    """For every call: nothing was begun, or the transfer fails when what was enqueued is over."""
    page, mode = mode == "page", "direct" if mode == "page" else mode
    engine, memory, device = engine_of(mode)
    move = Move(np.array([1]), SLOTS[:16]) if page else moves_of(mode)[0]
    number, failed = 0, 1
    with engine:
        while failed:
            number += 1
            device.hook, seen = nth(kind, number)
            failed = _one_failure(engine, device, verb, move, seen, number)
            device.hook = lambda kind: None
            check_pools(engine)
        check_works(engine, memory, mode)


def _one_failure(engine, device, verb, move, seen, number):
    device.log.clear()
    device.running = False
    transfer, told = None, []
    try:
        how = {"streams": None, "after": [device.event()], "when_done": told.append}
        transfer = getattr(engine, verb)(move, **how)
    except (Refused, LightcacheError):
        assert not any(entry[0] in ("launch", "copy") for entry in device.log)
    if transfer is not None:
        assert covered(device.log, transfer._marks)
        if seen["calls"] < number:
            assert not transfer._error
        if transfer._marks:
            assert engine.poll() == 1
            assert not told
    device.running = True
    if transfer is not None:
        over = None
        try:
            over = transfer.done()
        except TransferFailed:
            over = False
        assert told == [over] == [transfer._error is None]
    return seen["calls"] >= number


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["staged", "direct", "copies"])
def test_an_interrupt_at_every_place(no_collection, mode):
    """Whatever was enqueued is under way until it is over, and nothing is under way for ever."""
    for page in (True, False):
        at, hit = 0, True
        while hit:
            engine, memory, device = engine_of(mode)
            engine.warm()
            move = Move(np.array([1]), np.arange(16)) if page else moves_of(mode)[0]
            device.running = False
            _no_bytes(engine)
            hit = interrupt(lambda: engine.offload(move), at)  # noqa: B023
            device.running = False
            enqueued = [entry for entry in device.log if entry[0] in ("launch", "copy")]
            if enqueued:
                assert engine.poll() == 1, at
                (transfer,) = engine._in_flight.offload.transfers
                assert covered(device.log, transfer._marks), at
                assert hit == (transfer._error is not None) or not transfer._error
            device.running = True
            assert engine.poll() == 0, at
            _none_twice(engine)
            engine.close()
            assert memory.users == 0
            at += 1 if at < 40 else 3
        assert at > 60


def _no_bytes(engine):
    """Launches are logged, and that is all: the interpreter is slow while it is traced."""
    for to_page in (True, False):
        for packed in (True, False):
            launches = engine._parts.joined.launches(packed, to_page)
            launches[:] = [(each, _Logged(engine.device)) for each, _ in launches]


class _Logged:
    def __init__(self, device):
        self.device = device

    def __call__(self, *numbers):
        self.device.log.append(("launch", f"stream{numbers[-1]}", None))


def test_an_interrupted_paced_transfer_ends(no_collection):
    at, hit = 0, True
    while hit:
        engine, memory, _ = engine_of("staged", rate=1e12)
        engine.warm()
        _no_bytes(engine)
        hit = interrupt(lambda: engine.offload(moves_of("staged")[0]), at)  # noqa: B023
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), at
        assert engine.poll() == 0
        assert memory.users == 0
        _none_twice(engine)
        at += 2
    assert at > 60


def _none_twice(engine):
    spare = engine._in_flight.events._spare
    assert len({id(event) for event in spare}) == len(spare), "two would record the same event"


# ---- calls


def test_close_goes_on_when_a_call_raises():
    engine, memory, device = engine_of("copies")

    def bad(ok):
        raise Refused("busy")

    device.running = False
    engine.offload(Move([0], np.arange(16)), when_done=bad)
    refused(Refused, "", engine.close)
    assert memory.users == 0
    engine.close()


def test_an_interrupt_in_a_call_leaves_the_others_to_the_next_poll():
    engine, memory, device = engine_of("copies")
    told = []

    def ctrl_c(ok):
        raise KeyboardInterrupt

    device.running = False
    for at, call in enumerate((ctrl_c, told.append)):
        engine.offload(Move([at], np.arange(16)), when_done=call)
    device.running = True
    refused(KeyboardInterrupt, "", engine.poll)
    assert not told
    engine.close()
    assert told == [True]
    assert memory.users == 0


def test_calls_may_use_the_engine_and_close_it():
    engine, memory, device = engine_of("copies")
    told = []

    def again(ok):
        engine.offload(Move([1], np.arange(16))).wait()
        engine.poll()
        engine.close()
        told.append(memory.users)

    device.running = False
    engine.offload(Move([0], np.arange(16)), when_done=again)
    device.running = True
    engine.poll()
    assert told == [0]
    refused(Detached, "", engine.offload, [])


def test_calls_are_made_once_each_by_many_threads():
    engine, _, device = engine_of("copies")
    lock, told, errors = threading.Lock(), [], []
    with engine:
        for turn in range(60):
            device.running = False

            def note(ok, turn=turn):
                with lock:
                    told.append(turn)

            transfer = engine.offload(Move([0], np.arange(16)), when_done=note)
            start = threading.Barrier(4)

            def ask(transfer=transfer, start=start):
                try:
                    start.wait(60)
                    transfer.wait(60)
                    engine.poll()
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            start.wait(60)
            device.running = True
            for thread in threads:
                thread.join(60)
            assert not errors
        assert engine.poll() == 0
        assert told == list(range(60))
        check_pools(engine)


def test_what_was_told_by_waiting_does_not_pile_up():
    engine, _, device = engine_of("copies")
    with engine:
        for _ in range(20):
            device.running = True
            transfers = [engine.offload(Move([at], np.arange(16))) for at in range(3)]
            for transfer in transfers:
                transfer._calls.append(lambda ok: None)  # as if it had been over a moment later
            engine.offload(Move([0], np.arange(16)))
            for transfer in transfers:
                transfer.wait()
        assert len(engine._in_flight.finished) <= 6


# ---- engines that are dropped


def test_a_dropped_engine_waits_for_its_copies(no_collection):
    engine, memory, device = engine_of("copies")
    told = []
    device.running = False
    transfer = engine.offload(
        Move([0], np.arange(16)), when_done=lambda ok: told.append((ok, device.running))
    )
    gone = weakref.ref(engine)
    del engine
    assert gone() is None
    assert told == [(True, True)], "it was waited for, and then told"
    assert memory.users == 0
    assert transfer.done()


class Pins:
    """What is held for a copy, as `lightcache.page_transfers` does."""

    def __init__(self, order):
        self.order = order

    def __del__(self):
        self.order.append("gone")

    def over(self, ok):
        self.order.append(ok)


def test_what_a_transfer_holds_outlives_garbage(no_collection):
    """Engine, transfer and pins in one cycle: the call still comes before the pins go."""
    order = []

    def leave():
        engine, _, device = engine_of("copies")
        device.running = False
        pins, cycle = Pins(order), []
        transfer = engine.offload(Move([0], np.arange(16)), when_done=pins.over)
        cycle += [cycle, engine, transfer, pins]

    leave()
    assert not order, "only a collection finds it"
    gc.collect()
    gc.collect()
    assert order == [True, "gone"]


def test_a_dropped_paced_engine_lets_its_thread_go(no_collection):
    engine, memory, _ = engine_of("copies", rate=1e9)
    thread = engine._in_flight.pacer._thread
    engine.offload(Move([0], np.arange(16))).wait(60)
    engine.offload(Move([0], np.arange(16)))
    del engine
    thread.join(60)
    assert not thread.is_alive()
    assert memory.users == 0


def test_a_forked_child_has_nothing_of_it(monkeypatch):
    engine, memory, device = engine_of("copies")
    device.running = False
    engine.offload(Move([0], np.arange(16)))
    parent = os.getpid()
    with monkeypatch.context() as child:
        child.setattr("lightcache.kernels.in_flight.os.getpid", lambda: parent + 1)
        for call in (lambda: engine.load([]), engine.poll, engine.warm):
            refused(Detached, "parent process", call)
        engine.close()
        assert not device.running, "a child waits for nothing"
    assert memory.users == 1
    engine.close()
    assert memory.users == 0


def test_a_captured_stream_elsewhere_is_no_failure():
    engine, _, device = engine_of("copies")
    with engine:
        transfer = engine.offload(Move([0], np.arange(16)))

        def capturing(kind):
            if kind == "query":
                raise RuntimeError("operation not permitted when stream is capturing")

        device.hook = capturing
        assert not transfer.done()
        assert engine.poll() == 1
        device.hook = lambda kind: None
        assert transfer.done()


def test_a_lost_device_ends_transfers():
    engine, memory, device = engine_of("copies")
    transfer = engine.offload(Move([0], np.arange(16)))

    def lost(kind):
        if kind in ("query", "synchronize", "record", "wait"):
            raise RuntimeError("an illegal memory access was encountered")

    device.hook = lost
    refused(TransferFailed, "illegal", transfer.wait)
    refused(TransferFailed, "", engine.offload(Move([0], np.arange(16))).wait)
    engine.close()
    assert memory.users == 0


@pytest.mark.parametrize("window", [None, 1])
def test_no_stream_waits_for_what_has_failed(window):
    engine, _, device = engine_of("copies")
    device.fail_copies = True
    with engine:
        transfer = engine.offload(Move([0], np.arange(16)), window=window)
        stream, before = device.stream(), len(device.log)
        for wait in (transfer.wait_on, lambda at: transfer.wait_layer(0, at)):
            refused(TransferFailed, "the copy failed", wait, stream)
        assert len(device.log) == before


# ---- making one


def test_a_failed_construction_holds_nothing(monkeypatch):
    memory = Users(np.zeros((2, CASE.geometry.page_bytes), np.uint8))
    for target in ("in_flight.Pacer", "engine.weakref.finalize"):
        with monkeypatch.context() as broken:
            broken.setattr(f"lightcache.kernels.{target}", _refuse)
            with pytest.raises(Refused):
                TransferEngine(CASE.geometry, CASE.planes, memory, device=InlineDevice(), rate=1e9)
        assert memory.users == 0
    before = set(threading.enumerate())
    memory.acquire = lambda: _refuse()
    with pytest.raises(Refused):
        TransferEngine(CASE.geometry, CASE.planes, memory, device=InlineDevice(), rate=1e9)
    assert not set(threading.enumerate()) - before


def _refuse(*arguments, **more):
    raise Refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("rate", value) for value in (0, -1, float("nan"), float("inf"), "1", True)],
        *[("staging_bytes", value) for value in (0, -1, "1", 1.5)],
        *[("programs", value) for value in (0, -1, "1")],
        ("mode", None),
        ("planes", "cuda:0"),
    ],
)
def test_bad_options(name, value):
    memory = Users(np.zeros((2, CASE.geometry.page_bytes), np.uint8))
    options = {"planes": CASE.planes, name: value}
    with pytest.raises(ConfigError, match=f"{name}: expected"):
        TransferEngine(CASE.geometry, memory=memory, device=InlineDevice(), **options)
    assert memory.users == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"window": value}, "layers of a window: expected") for value in (0, -1, "2", [1], 1.0)],
        ({"streams": 5}, "streams: expected"),
        ({"streams": [5]}, "streams: expected"),
        ({"streams": "ab"}, "streams: expected"),
        ({"after": 5}, "after: expected"),
        ({"after": [5]}, "after: expected"),
        ({"after": None}, "after: expected"),
        ({"planes": 5}, "planes: expected"),
    ],
)
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_bad_arguments_enqueue_nothing(mode, options, message):
    engine, _, device = engine_of(mode)
    move = Move(np.array([0]), np.arange(16))
    with engine:
        engine.load(move, window=1).wait()
        device.log.clear()
        refused(ConfigError, message, engine.load, move, **options)
        assert not device.log
        check_pools(engine)


def test_a_transfer_is_no_event_and_other_devices_have_streams_of_their_own():
    engine, _, device = engine_of("direct")
    move = Move(np.array([0]), np.arange(16))
    device.index = 0
    other = device.stream()
    other.device_index = 1
    with engine:
        transfer = engine.offload(move)
        refused(ConfigError, "wait_on", engine.load, move, after=[transfer])
        refused(ConfigError, "one of device 1", engine.load, move, streams=[other])


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_captured_current_stream_is_refused(mode):
    engine, _, device = engine_of(mode)

    def captured(kind):
        if kind == "current":
            raise ConfigError("a transfer cannot be captured")

    device.hook = captured
    with engine:
        refused(ConfigError, "captured", engine.load, Move(np.array([0]), np.arange(16)))
        assert not device.log


@pytest.mark.parametrize("wild", [-(1 << 32) + 5, -(1 << 63), -2])
@pytest.mark.parametrize("pages", [1, 2])
def test_slots_below_zero_are_left_out_however_far(pages, wild):
    engine, memory, _ = engine_of("direct")
    slots = np.arange(16 * pages)
    slots[3] = wild
    before = CASE.snapshot()
    with engine:
        engine.load(Move(np.arange(pages), slots)).wait()
    try:
        for key, view in CASE.snapshot().items():
            assert torch.equal(view[3], before[key][3])
            assert torch.equal(view[5 + 16 * pages :], before[key][5 + 16 * pages :])
            assert (view[4] == 0xCD).all()
        for number in (1 << 31, 1 << 32, (1 << 63) - 1):
            slots[3] = number
            with engine_of("direct")[0] as other, pytest.raises(ConfigError, match="slots: exp"):
                other.load(Move(np.arange(pages), slots))
    finally:
        for key, view in CASE.views.items():
            view.copy_(before[key])
    assert (memory.array == 0xCD).all()


def test_a_refusal_while_preparing_gives_the_index_back(monkeypatch):
    engine, _, _ = engine_of("staged")
    monkeypatch.setattr("lightcache.kernels.submission.store_slots", _refuse)
    with engine:
        refused(Refused, "", engine.offload, moves_of("staged")[0])
        check_pools(engine)
