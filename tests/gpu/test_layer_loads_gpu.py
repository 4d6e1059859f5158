"""Loads by layer and offloads in order on one GPU: the model's stream waits, and no thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu.place import DEADLINE, place
from gpu.ranks import LAYERS, PAGES, SLOTS, TOKENS, Model, Worker, computed, create, wrong_bytes
from support.keys import prompt

from lightcache import (
    Cache,
    ConfigError,
    LayerLoads,
    LeaseLost,
    LightcacheError,
    Offload,
    OffloadQueue,
    TransferFailed,
    WaitTimeout,
)
from lightcache.kernels import submission

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STAND_IN = True
MODES = ["staged", "direct", "auto"]


@pytest.fixture
def where() -> Iterator[Any]:
    made = place()
    yield made
    made.close()


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with create(segment_name) as made:
        yield made
        report = made.check()
        assert report.clean, report.message
        assert report.pins == 0


def until(condition: Any, what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE} s for: {what}"
        time.sleep(0.001)


class Pass:
    """Forward passes of a model: what each layer sees of two requests, on the model's stream."""

    def __init__(self, where: Any, cache: Cache, mode: str, **how: Any) -> None:
        """Two prompts are in the cache, of three pages and of two; all kernels were run once."""
        self.where, self.cache, self.how = where, cache, {"window": 1, **how}
        self.model = Model(where, cache, mode=mode)
        self.model.warm()
        slots = np.random.default_rng(1).permutation(SLOTS)
        self.slots = {1: slots[: 3 * TOKENS].tolist(), 2: slots[100 : 100 + 2 * TOKENS].tolist()}
        for name, own in self.slots.items():
            self.model.compute(name, own)
            where.synchronize()
            keys = prompt(name, len(own) // TOKENS)
            Offload(self.model.engine, cache.reserve(keys), own).wait(DEADLINE)
        self.seen = [[torch.zeros_like(tensor) for tensor in half] for half in self.model.tensors]
        self.reset()
        loads = self.begin()
        self.forward(loads)
        assert loads.finish() == {}
        where.synchronize()
        assert self.right() == [True] * LAYERS

    def reset(self) -> None:
        """Overwrite every slot. Waits for the device: call it while no gate is shut."""
        self.model.forget()
        for tensor in [*self.seen[0], *self.seen[1]]:
            tensor.zero_()
        self.where.synchronize()

    def begin(self, *, timeout: float = DEADLINE, start: bool = True, **how: Any) -> LayerLoads:
        """Start to load both prompts. Waits for nothing."""
        loads = LayerLoads(self.model.engine, timeout=timeout, **self.how)
        for name, own in self.slots.items():
            loads.add(name, self.cache.match(prompt(name, len(own) // TOKENS)), own)
        if start:
            loads.start(streams=[self.where.compute], **how)
        return loads

    def forward(self, loads: LayerLoads, stream: Any = None) -> None:
        """Launch a pass: each layer waits, works for a moment, and notes what it sees."""
        stream = self.where.compute if stream is None else stream
        for layer in range(LAYERS):
            loads.wait(layer, stream)
            for seen, half in zip(self.seen, self.model.tensors, strict=True):
                self.where.launch(
                    lambda seen=seen, half=half, layer=layer: seen[layer].copy_(half[layer]), stream
                )
            self.where.nap(stream)

    def right(self) -> list[bool]:
        """For each layer, whether it saw both prompts."""
        found = []
        for layer in range(LAYERS):
            ok = True
            for plane, half in enumerate(self.seen):
                values = half[layer].cpu().numpy()
                for name, own in self.slots.items():
                    ok &= bool((values[own] == computed(layer, plane, len(own), name)).all())
            found.append(ok)
        return found

    def close(self) -> None:
        self.where.synchronize()
        self.model.close()


@pytest.fixture
def passes(where: Any, cache: Cache) -> Iterator[Any]:
    made: list[Pass] = []

    def make(mode: str = "auto", **how: Any) -> Pass:
        made.append(Pass(where, cache, mode, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---- loads by layer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [1, 2, None])
def test_layers_are_there_for_the_model(passes: Any, mode: str, window: int | None) -> None:
    made = passes(mode, window=window)
    for _ in range(5):
        made.reset()
        loads = made.begin()
        made.forward(loads)
        assert loads.finish() == {}
        assert loads.done()
        made.where.synchronize()
        assert made.right() == [True] * LAYERS


@pytest.mark.parametrize("mode", MODES)
def test_no_thread_waits(passes: Any, mode: str) -> None:
    """The loads come after work of the device that has not ended: a whole pass is launched, and
    only its stream waits."""
    made = passes(mode)
    made.reset()
    gate = made.where.gate()
    try:
        loads = made.begin(after=[gate.event])
        made.forward(loads)
        end = made.where.mark()
        assert not end.query(), "the pass ended while its loads were held up"
        assert not loads.done()
        assert loads.in_flight
    finally:
        gate.open()
    assert loads.finish() == {}
    made.where.synchronize()
    assert end.query()
    assert made.right() == [True] * LAYERS


def test_a_deadline(passes: Any, cache: Cache) -> None:
    made = passes()
    made.reset()
    gate = made.where.gate()
    try:
        loads = made.begin(timeout=0.05, after=[gate.event])
        made.forward(loads)
        failed = loads.finish()
        assert {type(error) for error in failed.values()} == {WaitTimeout}
        assert loads.done()
        assert loads.in_flight
        assert cache.check().pins == 5
    finally:
        gate.open()
    until(lambda: not loads.in_flight, "the late copies")
    assert cache.check().pins == 0
    assert loads.finish() == failed
    made.where.synchronize()


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_a_failure_in_the_middle(
    passes: Any, cache: Cache, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = passes(mode)
    step = "direct" if mode == "direct" else "scatter"
    real, calls = getattr(submission.Steps, step), []

    def second_fails(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the second launch was refused")
        real(*arguments)

    made.reset()
    monkeypatch.setattr(submission.Steps, step, second_fails)
    loads = made.begin()
    made.forward(loads)
    failed = loads.finish()
    assert {type(error) for error in failed.values()} == {TransferFailed}
    assert set(failed) == {1, 2}
    assert not loads.in_flight
    assert cache.check().pins == 0
    monkeypatch.undo()
    made.reset()
    loads = made.begin()
    made.forward(loads)
    assert loads.finish() == {}
    made.where.synchronize()
    assert made.right() == [True] * LAYERS


def test_what_is_wrong_with_one_costs_that_one(passes: Any, cache: Cache) -> None:
    made = passes()
    made.reset()
    loads = made.begin(start=False)
    lost = cache.match(prompt(1, 1))
    loads.add("lost", lost, list(range(TOKENS)))
    loads.add("slots", cache.match(prompt(2, 1)), [SLOTS + 8] * TOKENS)
    lost.release()
    loads.start(streams=[made.where.compute])
    made.forward(loads)
    kinds = {request: type(error) for request, error in loads.finish().items()}
    assert kinds == {"lost": LeaseLost, "slots": ConfigError}
    made.where.synchronize()
    assert made.right() == [True] * LAYERS


def test_paced_copies_overlap(where: Any, cache: Cache) -> None:
    """Under a rate limit the thread waits for a layer's copies to be enqueued, not for all."""
    made = Pass(where, cache, "direct")
    memory = made.model.memory
    made.model.engine.close()
    geometry, planes = made.model.engine.geometry, made.model.engine._keep
    made.model.engine = where.engine(
        cache, geometry, planes, memory, mode="direct", rate=float(geometry.page_bytes * 50)
    )
    made.reset()
    loads = made.begin()  # a tenth of a second for all of it
    made.forward(loads)
    assert loads.finish() == {}
    made.where.synchronize()
    assert made.right() == [True] * LAYERS
    made.close()


def test_many_batches_in_two_threads(where: Any, cache: Cache) -> None:
    made = Pass(where, cache, "auto")
    wrong: list[object] = []

    def run(name: int) -> None:
        where.make_current()
        stream, own = where.stream(), made.slots[name]
        tensors = [tensor for half in made.model.tensors for tensor in half]
        index = torch.tensor(own, device=tensors[0].device)
        for _ in range(10):
            loads = LayerLoads(made.model.engine, window=1, timeout=DEADLINE)
            loads.add(name, cache.match(prompt(name, len(own) // TOKENS)), own)
            loads.start(streams=[stream])
            found: list[Any] = []

            def note(half: Any, layer: int, found: list[Any] = found) -> None:
                found.append(half[layer][index])

            for layer in range(LAYERS):
                loads.wait(layer, stream)
                for half in made.model.tensors:
                    where.launch(partial(note, half, layer), stream)
            for tensor in tensors:  # after the pass: what the next one loads was not there before
                where.launch(lambda tensor=tensor: tensor.index_fill_(0, index, 7), stream)
            failed = loads.finish()
            stream.synchronize()
            for at, values in enumerate(found):
                right = computed(at // 2, at % 2, len(own), name)
                if failed or not (values.cpu().numpy() == right).all():
                    wrong.append((name, at, failed))

    threads = [threading.Thread(target=run, args=(name,)) for name in made.slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not wrong
    made.close()


# ---- offloads in order


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_offloads_complete_though_nothing_polls(passes: Any, cache: Cache, mode: str) -> None:
    """And in the order of `submit`: the first is held up, the second cannot begin."""
    made = passes(mode)
    queue, engine, slots = OffloadQueue(), made.model.engine, made.slots[1]
    made.model.compute(5, slots)
    made.where.synchronize()
    gate = made.where.gate()

    def offload(name: int, tokens: list[int], **how: Any) -> Offload:
        return Offload(engine, cache.reserve(prompt(name, 3)), tokens, **how)

    try:
        queue.submit(lambda: offload(5, slots, after=[gate.event]), "held up")
        queue.submit(lambda: offload(6, slots[:-1]), "refused")
        queue.submit(lambda: offload(7, slots), "free")
        assert queue.completed() == 0
        assert cache.peek(prompt(5, 3)) == 0
    finally:
        gate.open()
    assert queue.wait(DEADLINE)
    assert queue.completed() == 3
    results = [queue.pop() for _ in range(3)]
    assert [result.tag for result in results] == ["held up", "refused", "free"]
    assert [type(result.error) for result in results] == [type(None), ConfigError, type(None)]
    for name in (5, 7):
        with cache.match(prompt(name, 3)) as hit:
            assert len(hit) == 3
            assert wrong_bytes(cache, 5, hit.pages.tolist()) == 0
    assert queue.close(DEADLINE)


def test_a_queue_closes_in_time(passes: Any, cache: Cache) -> None:
    made = passes()
    queue, slots = OffloadQueue(), made.slots[1]
    gate = made.where.gate()
    try:
        reserve = cache.reserve(prompt(5, 3))
        queue.submit(lambda: Offload(made.model.engine, reserve, slots, after=[gate.event]))
        assert not queue.close(0.05)
        assert isinstance(queue.pop().error, WaitTimeout)
        assert cache.wait(prompt(5, 3), timeout=DEADLINE) == 0, "nobody waits for its keys"
        assert cache.check().pins == 3
    finally:
        gate.open()
    until(lambda: queue.close(0), "the copy")
    assert cache.check().pins == 0


# ---- a death


def test_a_worker_killed_with_both_in_flight(cache: Cache, tmp_path: Path, where: Any) -> None:
    made = Pass(where, cache, "auto")
    made.close()
    victim = Worker(tmp_path, 0)
    try:
        victim("hello")
        victim("join", name=cache.name, rank=0, ranks=1, mode="auto", writing=False)
        assert victim("layers", prompt=1, pages=3, slots=made.slots[1]) == [False, 0]
        assert cache.check().pins == 6, "three of a load, three of an offload"
    finally:
        victim.kill()

    def offered() -> bool:
        cache.reap()
        try:
            with cache.reserve(prompt(99, PAGES)) as new:
                return len(new.new) == PAGES
        except LightcacheError:
            return False

    until(offered, f"all pages; clients: {cache.clients()}")
