"""Streams of the device engine wait for each other: whichever of them is slow, bytes are right.

On threads that stand in for streams, of which one is held up while the others do whatever they
need not wait for. For how long only decides whether a missing wait is seen.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.device_sides import Device
from support.refusals import refused
from support.threaded_device import Gate, ThreadedDevice

from lightcache import WaitTimeout
from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.testing import moved_rows

pytest.importorskip("triton")

DEADLINE = 60.0
HELD = 0.5  # seconds for which a shut gate is seen to hold copies up
PAGES, SLOTS = 12, 64
SHARE = PageGeometry(
    [KVGroup.attention("kv", layers=2, heads=2, head_dim=4, dtype_bytes=2, page_tokens=4)]
).share()


class World:
    """One engine on threads, and what its device and pages hold."""

    def __init__(self, **how: Any) -> None:
        self.threads = ThreadedDevice()
        self.device = Device(SHARE, SLOTS, 5)
        shape = (PAGES, SHARE.geometry.page_bytes)
        self.memory: Any = HostPages(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
        self.memory.ready = PAGES
        self.engine = TransferEngine(
            SHARE.geometry, self.device.planes, self.memory, device=self.threads, **how
        )

    def pairs(self, move: Move) -> list[tuple[slice, slice]]:
        return list(moved_rows(SHARE, self.device, self.memory.page_bytes, [move]))

    def check_offload(self, moves: list[Move]) -> None:
        """In as many calls, one after the other, of which none waits."""
        expected = self.memory.array.copy().reshape(-1)
        for move in moves:
            for page, slot in self.pairs(move):
                expected[page] = self.device.memory[slot]
        for transfer in [self.engine.offload(move) for move in moves]:
            transfer.wait(DEADLINE)
        np.testing.assert_array_equal(self.memory.array.reshape(-1), expected)

    def check_load(self, moves: list[Move]) -> None:
        expected = self.device.memory.copy()
        for move in moves:
            for page, slot in self.pairs(move):
                expected[slot] = self.memory.array.reshape(-1)[page]
        for transfer in [self.engine.load(move) for move in moves]:
            transfer.wait(DEADLINE)
        np.testing.assert_array_equal(self.device.memory, expected)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(**getattr(request, "param", {"mode": "staged", "staging_bytes": 1024}))
    yield made
    made.engine.close()
    made.threads.close()


def moves() -> list[Move]:
    """All pages, in two calls."""
    slots = np.random.default_rng(1).permutation(SLOTS)[: PAGES * 4]
    pages = np.random.default_rng(2).permutation(PAGES)
    return [Move(pages[:7], slots[:28]), Move(pages[7:], slots[28:])]


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["kernel", "copy", "upload"])
@pytest.mark.parametrize("verb", ["offload", "load"])
def test_a_slow_stream(world: World, verb: str, slow: str) -> None:
    """Twelve pages through a ring of four slots, of one page each."""
    lane = world.engine._in_flight.offload if verb == "offload" else world.engine._in_flight.load
    world.engine.warm()
    assert lane.ring is not None
    assert lane.ring.slots == 4
    gate = Gate()
    getattr(lane, slow).wait_event(gate)
    timer = threading.Timer(HELD, gate.open)
    timer.start()
    if verb == "offload":
        world.check_offload(moves())
    else:
        world.check_load(moves())
    timer.join()


HOW = {
    "staged": {"mode": "staged", "staging_bytes": 1024},
    "direct": {"mode": "direct"},
    "paced": {"mode": "staged", "staging_bytes": 1024, "rate": 1e9},
}


@pytest.mark.slow
@pytest.mark.parametrize("world", HOW.values(), ids=HOW.keys(), indirect=True)
@pytest.mark.parametrize("told", ["after", "streams"])
@pytest.mark.parametrize("verb", ["offload", "load"])
def test_nothing_is_written_before_the_gate_opens(world: World, verb: str, told: str) -> None:
    world.engine.warm()
    pages, slots = world.memory.array.copy(), world.device.memory.copy()
    gate, stream = Gate(), world.threads.stream()
    stream.wait_event(gate)
    how: dict[str, Any] = {"after": [gate]} if told == "after" else {"streams": [stream]}
    try:
        transfer = getattr(world.engine, verb)(moves()[0], **how)
        other = getattr(world.engine, "load" if verb == "offload" else "offload")
        refused(WaitTimeout, "", transfer.wait, HELD)
        unchanged = (world.memory.array == pages).all(), (world.device.memory == slots).all()
        assert unchanged == (True, True)
        other(Move([0], slots=[], first=0)).wait(DEADLINE)  # the other direction is not held up
    finally:
        gate.open()
    transfer.wait(DEADLINE)
    assert ((world.memory.array == pages).all(), (world.device.memory == slots).all()) == (
        verb == "load",
        verb == "offload",
    )


@pytest.mark.parametrize("told", ["after", "streams"])
def test_a_load_reads_what_an_offload_is_about_to_write(world: World, told: str) -> None:
    """The offload is held up; the load is told of it, and must not fetch the pages ahead."""
    gate, stream = Gate(), world.threads.stream()
    world.engine._in_flight.offload.copy.wait_event(gate)
    (move, _), there = moves(), np.arange(28)
    expected = world.device.memory.copy()
    for (_, slot), (_, place) in zip(
        world.pairs(move), world.pairs(Move(move.pages, there)), strict=True
    ):
        expected[place] = world.device.memory[slot]
    world.engine.offload(move).wait_on(stream)
    how: dict[str, Any] = {"streams": [stream]}
    if told == "after":
        event = world.threads.event()
        event.record(stream)
        how = {"streams": (), "after": [event]}
    load = world.engine.load(Move(move.pages, there), **how)
    refused(WaitTimeout, "", load.wait, HELD)
    gate.open()
    load.wait(DEADLINE)
    np.testing.assert_array_equal(world.device.memory, expected)
