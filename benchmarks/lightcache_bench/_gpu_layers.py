"""Loads by layer against the same load whole: when the first layer is there, and what it costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

import numpy as np

from lightcache import LayerLoads, Lease, PageIndex
from lightcache.errors import TransferFailed
from lightcache.kernels.moves import Move
from lightcache_bench import Row, meets
from lightcache_bench._gpu_interface import TIMEOUT
from lightcache_bench._gpu_rig import Bench, Rig
from lightcache_bench._gpu_shapes import LARGE, SMALL, Shape
from lightcache_bench._timing import Case, interleaved, median, spread

REQUESTS = 4
TARGET = "<= 1.03"
_SHARE = 4  # of a repetition of the other parts: one forward pass loads less


def layer_loads(bench: Bench) -> Iterator[Row]:
    """A pass that loads four requests' pages: whole, and by layer in windows of several sizes."""
    for shape in (LARGE, SMALL[0]):
        with Rig(bench, shape) as rig:
            yield from _rows(bench, shape, rig)


class Batch:
    """The pages of four requests, leased for each load anew."""

    def __init__(self, bench: Bench, shape: Shape, rig: Rig, index: PageIndex) -> None:
        """Pages are those of the index; slots those of the rig's calls."""
        self.rig, self.index, self.gpu = rig, index, bench.gpu
        tokens = shape.geometry.page_tokens
        count = max(1, bench.sizes.total // _SHARE // shape.share.nbytes // REQUESTS)
        count = min(count, index.stats().pages // REQUESTS)
        slots = rig.calls["load"].slots
        self.keys = [
            np.random.default_rng(request).integers(1, 1 << 62, (count, 2)).astype(np.uint64)
            for request in range(REQUESTS)
        ]
        self.slots = [
            slots[request * count * tokens : (request + 1) * count * tokens]
            for request in range(REQUESTS)
        ]
        for keys in self.keys:
            with index.reserve(keys) as new:
                new.publish()
        self.nbytes = REQUESTS * count * shape.share.nbytes
        self.layers = shape.share.layers
        self.stream = self.gpu.torch.cuda.Stream() if self.gpu.cuda else None

    def leases(self) -> list[Lease]:
        """Of each request."""
        return [self.index.match(keys) for keys in self.keys]

    def whole(self) -> None:
        """One transfer, without windows."""
        leases = self.leases()
        moves = [Move(lease.pages, own) for lease, own in zip(leases, self.slots, strict=True)]
        self.rig.engine.load(moves).wait(TIMEOUT)
        for lease in leases:
            lease.release()

    def begin(self, window: int | None) -> LayerLoads:
        """The same, by layer."""
        loads = LayerLoads(self.rig.engine, timeout=TIMEOUT, window=window)
        for request, lease in enumerate(self.leases()):
            loads.add(request, lease, self.slots[request])
        loads.start()
        return loads

    def end(self, loads: LayerLoads) -> None:
        """Wait for all of it."""
        failed = loads.finish()
        if failed:
            raise TransferFailed(f"loads by layer: {failed}")

    def by_layer(self, window: int | None) -> Case:
        """A case: all layers waited for, until the last byte is there."""

        def run(i: int) -> float:
            begin = perf_counter_ns()
            loads = self.begin(window)
            for layer in self.layers:
                loads.wait(layer, self.stream)
            self.end(loads)
            return (perf_counter_ns() - begin) / 1e3

        return run

    def first(self, window: int | None) -> Case:
        """A case: until the first layer is there."""

        def run(i: int) -> float:
            begin = perf_counter_ns()
            loads = self.begin(window)
            loads.wait(self.layers[0], self.stream)
            if self.stream is not None:
                self.stream.synchronize()
            took = (perf_counter_ns() - begin) / 1e3
            self.end(loads)
            return took

        return run

    def waits(self, i: int) -> float:
        """A case: one wait for a layer, of a load in flight on a device, else of one that ended."""
        loads = self.begin(1)
        if self.stream is None:
            self.end(loads)
        begin = perf_counter_ns()
        for layer in self.layers:
            loads.wait(layer, self.stream)
        took = (perf_counter_ns() - begin) / 1e3
        self.end(loads)
        return took / len(self.layers)


def _timed(work: Callable[[], None]) -> Case:
    def run(i: int) -> float:
        begin = perf_counter_ns()
        work()
        return (perf_counter_ns() - begin) / 1e3

    return run


def _rows(bench: Bench, shape: Shape, rig: Rig) -> Iterator[Row]:
    name = f"bench-layers-{os.getpid()}"
    with PageIndex.create(name, pages=rig.memory.pages) as index:
        batch = Batch(bench, shape, rig, index)
        windows: list[int | None] = [None, 1, 2, 4, 8]
        cases: dict[str, Case] = {"whole": _timed(batch.whole)}
        for window in windows:
            cases[f"all/{window}"] = batch.by_layer(window)
            cases[f"first/{window}"] = batch.first(window)
        cases["wait"] = batch.waits
        interleaved(cases, 1)
        found = interleaved(cases, max(3, bench.rounds))
        yield from _judged(shape, batch, found, windows)


def _judged(shape: Shape, batch: Batch, found: Any, windows: list[int | None]) -> Iterator[Row]:
    params: dict[str, Any] = {"bytes": batch.nbytes, "layers": len(batch.layers)}
    whole = found["whole"]
    label = f"one load, {shape.name}"
    yield Row(label, {**params, **spread(whole)}, median(whole), "us")
    for window in windows:
        own = {**params, "window": window or "default"}
        for what, name in (("all", "loads by layer"), ("first", "first layer there")):
            samples = found[f"{what}/{window}"]
            ratio = float(np.median(samples / whole))
            judged = what == "all" and window is None and batch.gpu.cuda
            yield Row(
                f"{name}, {shape.name}",
                {**own, **spread(samples)},
                median(samples),
                "us",
                label,
                ratio,
                TARGET if judged else None,
                meets(ratio, TARGET) if judged else None,
            )
    yield Row(f"a wait for a layer, {shape.name}", spread(found["wait"]), median(found["wait"]))


__all__ = ["layer_loads"]
