"""LayerLoads: a layer is there when its wait returns, and no wait raises or hangs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.interrupts import interrupt, interrupt_call
from support.layered import GEOMETRIES, KINDS, TOKENS, LayeredWorld, layered
from support.refusals import refused

from lightcache import ConfigError, Detached, LayerLoads, LeaseLost, TransferFailed, WaitTimeout
from lightcache.kernels.moves import Move


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Callable[..., LayeredWorld]]:
    made: list[LayeredWorld] = []

    def make(*arguments: Any, **how: Any) -> LayeredWorld:
        made.append(LayeredWorld(f"{segment_name}-{len(made)}", *arguments, **how))
        return made[-1]

    yield make
    for world in made:
        world.close()


def added(world: LayeredWorld, loads: LayerLoads, sizes: tuple[int, ...] = (3, 2)) -> list[Move]:
    """Requests "0", "1", ... of so many pages; returns what moves."""
    moves = []
    for number, pages in enumerate(sizes):
        lease, slots = world.lease(number, pages), world.slots(pages, number)
        moves.append(Move(lease.pages.tolist(), slots))
        loads.add(str(number), lease, slots)
    world.poison()
    return moves


# ---- bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_layer_is_there_when_its_wait_returns(
    worlds: Any, wait_until: Any, kind: str, geometry: str
) -> None:
    """Every later layer is held up until the layer before it was seen on the device."""
    world = worlds(kind, GEOMETRIES[geometry])
    layers = world.share.layers
    world.shut(*layers)
    loads = LayerLoads(world.engine, window=1)
    moves = added(world, loads)
    seen: dict[int, bool] = {}
    begun: list[int] = []
    loads.start()

    def forward() -> None:
        for layer in layers:
            begun.append(layer)
            loads.wait(layer)
            world.model(lambda layer=layer: seen.update({layer: world.there([layer], moves)}))

    model = threading.Thread(target=forward)
    model.start()
    for number, layer in enumerate(layers):
        wait_until(lambda number=number: len(seen) == number < len(begun), f"layer {layer}")
        assert not loads.done()
        world.open(layer)
    model.join(60)
    assert loads.finish() == {}
    world.synchronize()
    assert seen == dict.fromkeys(layers, True)
    assert world.pins() == 0
    assert loads.done()


@pytest.mark.parametrize("kind", ["staged", "direct"])
def test_no_thread_waits_for_a_device(worlds: Any, kind: str) -> None:
    world = worlds(kind)
    world.shut(2)
    loads = LayerLoads(world.engine, window=1)
    moves, seen = added(world, loads), []
    loads.start()
    for layer in world.share.layers:
        loads.wait(layer)
        world.model(lambda layer=layer: seen.append(world.there([layer], moves)))
    assert len(seen) <= 2, "the model saw a layer that was held up"
    assert not loads.done()
    world.open()
    world.synchronize()
    assert seen == [True] * 4
    assert loads.finish() == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "staged"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_its_shard(worlds: Any, kind: str, rank: int) -> None:
    world = worlds(kind, rank=rank, ranks=2)
    loads = LayerLoads(world.engine, window=1)
    moves = added(world, loads)
    loads.start()
    for layer in world.share.layers:
        loads.wait(layer)
        world.model(lambda layer=layer: None if world.there([layer], moves) else 1 / 0)
    assert loads.finish() == {}
    world.synchronize()
    assert world.there(world.share.layers, moves)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("kind", ["host", "staged, paced"])
def test_windows(worlds: Any, kind: str, window: int | None) -> None:
    """Of any size; a layer that does not move waits for all of them."""
    world = worlds(kind)
    loads = LayerLoads(world.engine, window=window)
    moves = added(world, loads)
    loads.start()
    loads.wait(17)
    seen: list[bool] = []
    world.model(lambda: seen.append(world.there(world.share.layers, moves)))
    world.synchronize()
    assert seen == [True]
    assert loads.finish() == {}


def test_windows_have_some_bytes(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds()
    found: list[Any] = []
    load = world.engine.load
    monkeypatch.setattr(
        world.engine, "load", lambda *a, **how: found.append(how["window"]) or load(*a, **how)
    )
    layer = 5 * world.share.nbytes // 4  # bytes of a layer, of five pages
    for nbytes in (1, layer, layer + 1, 3 * layer, 4 * layer):
        monkeypatch.setattr("lightcache.layer_loads.WINDOW_BYTES", nbytes)
        loads = LayerLoads(world.engine)
        added(world, loads)
        loads.start()
        assert loads.finish() == {}
    assert found == [1, 1, 2, None, None]


@pytest.mark.parametrize("kind", ["host", "staged"])
def test_first_and_skip(worlds: Any, kind: str) -> None:
    world = worlds(kind)
    lease, slots = world.lease(1, 3), world.slots(3)
    move = Move(lease.pages.tolist(), slots[2:], 2, np.array([False, True, False]))
    world.poison()
    before = world.device.memory.copy()
    loads = LayerLoads(world.engine, window=1)
    loads.add("a", lease, slots[2:], first=2, skip=move.skip)
    loads.start()
    for layer in world.share.layers:
        loads.wait(layer)
    assert loads.finish() == {}
    assert world.there(world.share.layers, [move])
    skipped = Move(move.pages, np.concatenate([slots[:2], slots[TOKENS : 2 * TOKENS]]))
    for _, slot in world.rows(world.share.layers, [skipped]):
        assert (world.device.memory[slot] == before[slot]).all()


@pytest.mark.parametrize("kind", ["host", pytest.param("staged", marks=pytest.mark.slow)])
def test_many_batches_in_two_threads(worlds: Any, kind: str) -> None:
    world = worlds(kind)
    wrong: list[object] = []
    rounds = 20 if kind == "host" else 3

    def passes(part: int) -> None:
        lease = world.cache.match(keys[part])
        move = Move(lease.pages.tolist(), world.slots(3, part))
        lease.release()
        for _ in range(rounds):
            loads = LayerLoads(world.engine, window=1)
            loads.add(part, world.cache.match(keys[part]), move.slots)
            loads.start()
            for layer in world.share.layers:
                loads.wait(layer)
            failed = loads.finish()
            if failed or not world.there(world.share.layers, [move]):
                wrong.append(failed)
            for _, slot in world.rows(world.share.layers, [move]):
                world.device.memory[slot] = part

    keys = [world.fill(number, 3) for number in range(2)]
    threads = [threading.Thread(target=passes, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert world.pins() == 0


# ---- failures


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_in_the_middle(worlds: Any, kind: str) -> None:
    world = worlds(kind)
    world.failing = 2
    loads = LayerLoads(world.engine, window=1)
    added(world, loads)
    loads.start()
    for layer in (*world.share.layers, 17):
        loads.wait(layer)
    failed = loads.finish()
    assert set(failed) == {"0", "1"}
    assert all(isinstance(error, TransferFailed) for error in failed.values())
    assert loads.finish() == failed
    assert not loads.in_flight
    assert world.pins() == 0


@pytest.mark.parametrize("kind", ["host", "staged"])
def test_what_is_wrong_with_one_costs_that_one(worlds: Any, kind: str) -> None:
    world = worlds(kind)
    loads = LayerLoads(world.engine, window=1)
    moves = added(world, loads)
    lost = world.lease(7, 1)
    loads.add("lost", lost, world.slots(1, 2))
    loads.add("slots", world.lease(8, 1), world.slots(1, 2) + 10**6)
    loads.add("floats", world.lease(9, 1), world.slots(1, 2) + 0.5)
    gone = world.lease(10, 1)
    gone.release()
    loads.add("gone", gone, world.slots(1, 2))
    lost.release()
    loads.start()
    for layer in world.share.layers:
        loads.wait(layer)
        world.model(lambda layer=layer: None if world.there([layer], moves) else 1 / 0)
    failed = loads.finish()
    kinds = {request: type(error) for request, error in failed.items()}
    assert kinds == {
        "lost": LeaseLost,
        "gone": LeaseLost,
        "slots": ConfigError,
        "floats": ConfigError,
    }
    world.synchronize()
    assert world.pins() == 0


def test_a_closed_engine_fails_every_load(worlds: Any) -> None:
    world = worlds()
    loads = LayerLoads(world.engine)
    added(world, loads)
    world.engine.close()
    loads.start()
    loads.wait(0)
    assert {type(error) for error in loads.finish().values()} == {Detached}
    assert world.pins() == 0


class Raising:
    """An engine whose load has begun when it raises."""

    def __init__(self, engine: Any, error: BaseException) -> None:
        self.engine, self.error = engine, error
        self.geometry, self.share = engine.geometry, engine.share
        self.will_tell, self.poll = engine.will_tell, engine.poll

    def load(self, *arguments: Any, **how: Any) -> Any:
        self.engine.load(*arguments, **how)
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_copies_of_a_load_that_raised_are_waited_for(worlds: Any, error: BaseException) -> None:
    world = worlds()
    world.shut(1)
    loads = LayerLoads(Raising(world.engine, error), window=1)
    added(world, loads)
    if isinstance(error, Exception):
        loads.start()
    else:
        with pytest.raises(KeyboardInterrupt):
            loads.start()
    loads.wait(0)
    assert loads.in_flight
    assert world.pins() == 5, "pages under a copy"
    world.open()
    assert set(loads.finish()) == {"0", "1"}
    assert not loads.in_flight
    assert world.pins() == 0


@pytest.mark.parametrize("kind", ["host", "staged", "staged, paced"])
def test_a_deadline(worlds: Any, wait_until: Any, kind: str) -> None:
    """Waits return; what is late has failed, and holds pages and slots until its copies end."""
    world = worlds(kind)
    world.shut(1, 2)
    loads = LayerLoads(world.engine, window=1, timeout=0.05)
    moves = added(world, loads)
    loads.start()
    for layer in world.share.layers:
        loads.wait(layer)
    failed = loads.finish()
    assert {type(error) for error in failed.values()} == {WaitTimeout}
    assert loads.done()
    assert loads.in_flight
    assert world.pins() == 5
    world.open()
    wait_until(lambda: not loads.in_flight, "the late copies")
    assert world.pins() == 0
    world.synchronize()
    assert world.there(world.share.layers, moves)
    assert loads.finish() == failed, "what a layer was computed without has failed for good"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "staged"])
def test_closing_with_copies_in_flight(worlds: Any, kind: str) -> None:
    world = worlds(kind)
    world.shut(1)
    loads = LayerLoads(world.engine, window=1)
    moves = added(world, loads)
    loads.start()
    closing = threading.Thread(target=world.engine.close)
    closing.start()
    world.open()
    for layer in world.share.layers:
        loads.wait(layer)
    assert loads.finish() == {}
    closing.join(60)
    world.synchronize()
    assert world.there(world.share.layers, moves)
    assert world.pins() == 0


def test_a_dropped_batch_gives_everything_back(worlds: Any, wait_until: Any) -> None:
    world = worlds()
    loads = LayerLoads(world.engine)
    added(world, loads)
    assert world.pins() == 5
    del loads
    gc.collect()
    assert world.pins() == 0
    world.shut(0)
    loads = LayerLoads(world.engine)
    added(world, loads)
    loads.start()
    del loads
    gc.collect()
    assert world.pins() == 5, "pages under a copy"
    world.open()
    wait_until(lambda: world.engine.poll() == 0, "the copies")
    assert world.pins() == 0


# ---- interrupts


def test_an_interrupted_wait_can_be_repeated(worlds: Any) -> None:
    world = worlds()
    world.shut(2)
    loads = LayerLoads(world.engine, window=1)
    moves = added(world, loads)
    loads.start()
    loads.wait(0)
    opener = threading.Thread(target=world.open)
    for at in (0, 3, 9):
        assert interrupt(lambda: loads.wait(0), at)
    opener.start()
    for layer in world.share.layers:
        loads.wait(layer)
    opener.join()
    assert loads.finish() == {}
    assert world.there(world.share.layers, moves)


@pytest.mark.slow
def test_interrupts_anywhere(segment_name: str, wait_until: Any) -> None:
    """In `start`, `wait` or `finish`: nothing stays pinned, and a request whose bytes are not there
    has failed."""
    with layered(segment_name) as world:
        keys, at, more = [world.fill(number, 2) for number in range(2)], 0, True
        while more:
            loads, moves = LayerLoads(world.engine, window=1), {}
            for part in range(2):
                lease, slots = world.cache.match(keys[part]), world.slots(2, part)
                moves[part] = Move(lease.pages.tolist(), slots)
                loads.add(part, lease, slots)
            world.poison()

            def forward(loads: LayerLoads = loads) -> None:
                loads.start()
                for layer in world.share.layers:
                    loads.wait(layer)
                loads.finish()

            more = interrupt_call(forward, at)
            try:
                failed = loads.finish()
            except ConfigError:  # interrupted before it was started
                failed = dict.fromkeys(moves, LeaseLost(""))
            for part, move in moves.items():
                assert part in failed or world.there(world.share.layers, [move]), at
            del loads, forward, lease
            wait_until(lambda: world.engine.poll() == 0, "the copies")
            gc.collect()
            assert world.pins() == 0, at
            at += 1
        assert at > 50


# ---- input


def test_input(worlds: Any) -> None:
    world = worlds()
    for wrong in (-1, float("nan"), float("inf"), "1", None, True):
        refused(ConfigError, "timeout", LayerLoads, world.engine, timeout=wrong)
    for wrong in (0, -1, 1.0, "1", True):
        refused(ConfigError, "window", LayerLoads, world.engine, window=wrong)
    loads = LayerLoads(world.engine)
    for call in (lambda: loads.wait(0), loads.done, loads.finish):
        refused(ConfigError, "call start first", call)
    lease = world.lease(1, 1)
    refused(ConfigError, "expected a Lease", loads.add, "a", 17, world.slots(1))
    loads.add("a", lease, world.slots(1))
    other = world.lease(2, 1)
    refused(ConfigError, "here already", loads.add, "a", other, world.slots(1))
    assert not other.ended
    assert len(loads) == 1
    assert loads.cancel("a")
    assert lease.ended
    assert not loads.cancel("a")
    assert len(loads) == 0
    loads.start()
    refused(ConfigError, "started before", loads.start)
    refused(ConfigError, "were started", loads.add, "b", other, world.slots(1))
    assert not loads.cancel("b")
    loads.wait(0)
    assert loads.done()
    assert loads.finish() == {}
    other.release()
