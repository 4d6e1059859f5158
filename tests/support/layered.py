"""A cache and an engine of any kind, whose copies of a layer can be held up, or fail."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import contextlib
import gc
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.device_sides import Device
from support.keys import prompt

from lightcache import Cache, Lease
from lightcache.kernels import host_engine
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.host_engine import HostEngine, Index
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.testing import moved_rows

DEADLINE = 60.0
TOKENS, SLOTS, PAGES = 4, 256, 24
HEADS = {"heads": 2, "head_dim": 4, "dtype_bytes": 2, "page_tokens": TOKENS}
GEOMETRIES = {
    "keys and values": PageGeometry([KVGroup.attention("kv", layers=4, **HEADS, head_groups=2)]),
    "latent": PageGeometry(
        [KVGroup.opaque("kv", layers=range(3), row_bytes=48, page_tokens=TOKENS)]
    ),
    "groups of layers": PageGeometry(
        [
            KVGroup.attention("full", layers=[0, 3], **HEADS),
            KVGroup.opaque("index", layers=[1, 3, 4], row_bytes=33, page_tokens=TOKENS),
        ]
    ),
}
KINDS = ["host", "staged", "direct", "staged, paced"]


class LayeredWorld:
    """A cache, planes in a buffer, and an engine between them.

    `gates[layer]` holds the copies of a layer up until it is set; `failing` is a layer whose copies
    fail.
    """

    def __init__(
        self,
        name: str,
        kind: str = "host",
        geometry: PageGeometry = GEOMETRIES["keys and values"],
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.geometry, self.kind = geometry, kind
        self.cache = Cache.create(
            name,
            pages=PAGES,
            page_bytes=geometry.page_bytes,
            page_tokens=TOKENS,
            fingerprint=f"model {geometry.fingerprint()}",
            secret=bytes(16),
        )
        self.share = geometry.share(rank, ranks)
        self.device = Device(self.share, SLOTS, 3)
        self.gates: dict[int, threading.Event] = {}
        self.failing: int | None = None
        self._patches = pytest.MonkeyPatch()
        self._threads: Any = None
        self.engine: Any = self._host() if kind == "host" else self._on_device()

    # ---- engines

    def _host(self) -> HostEngine:
        world, pieces = self, Index.pieces

        def held(index: Index, series: Any, to_host: bool) -> Iterator[tuple[int, Any]]:
            for size, copy in pieces(index, series, to_host):

                def run(copy: Any = copy) -> None:
                    world.reach(series.layer)
                    copy()

                yield size, run

        self._patches.setattr(host_engine.Index, "pieces", held)
        memory = HostPages(self.cache.pool.array)
        return HostEngine(self.geometry, self.device.planes, memory, share=self.share, threads=2)

    def _on_device(self) -> Any:
        pytest.importorskip("triton")
        from support.threaded_device import Launcher, ThreadedDevice

        from lightcache.kernels.engine import TransferEngine

        world = self

        class HeldLauncher(Launcher):
            def bind(self, each: Any, *what: Any) -> Callable[..., None]:
                launch, layer = super().bind(each, *what), world.layer_at(int(each.table[0, 0]))

                def held(*arguments: Any) -> None:
                    if layer == world.failing:
                        raise RuntimeError(f"the launch of layer {layer} was refused")
                    gate = world.gates.get(layer)
                    if gate is not None:
                        self._device.streams[arguments[-1]].put(world.opened(gate))
                    launch(*arguments)

                return held

        class HeldDevice(ThreadedDevice):
            def launcher(self) -> Launcher:
                return HeldLauncher(self)

        memory: Any = HostPages(self.cache.pool.array)
        memory.ready = len(memory.array)
        mode, _, paced = self.kind.partition(", ")
        self._threads = HeldDevice(seed=1)
        return TransferEngine(
            self.geometry,
            self.device.planes,
            memory,
            share=self.share,
            mode=mode,
            staging_bytes=1 << 12,
            rate=1e9 if paced else None,
            device=self._threads,
        )

    def layer_at(self, address: int) -> int:
        """The layer of the plane that has this address."""
        planes = sorted((plane.address, key[1]) for key, plane in self.device.planes.planes.items())
        return planes[bisect_right(planes, (address, 1 << 30)) - 1][1]

    @staticmethod
    def opened(gate: threading.Event) -> Callable[[], None]:
        """A wait for a gate."""

        def wait() -> None:
            assert gate.wait(DEADLINE), "a gate was forgotten"

        return wait

    def reach(self, layer: int) -> None:
        """A thread of the host engine is about to copy a piece of a layer."""
        gate = self.gates.get(layer)
        if gate is not None:
            self.opened(gate)()
        if layer == self.failing:
            raise RuntimeError(f"a copy of layer {layer} failed")

    # ---- gates

    def shut(self, *layers: int) -> None:
        """Hold up the copies of these layers."""
        self.gates.update((layer, threading.Event()) for layer in layers)

    def open(self, *layers: int) -> None:
        """Let them happen; none named: all."""
        for layer in layers or list(self.gates):
            self.gates[layer].set()

    # ---- pages and bytes

    def fill(self, number: int, pages: int) -> Any:
        """Ready pages of random bytes; returns their keys."""
        keys = prompt(number, pages)
        with self.cache.reserve(keys) as new:
            shape = len(new.pages), self.cache.page_bytes
            self.cache.pool.array[new.pages] = np.random.default_rng(number).integers(0, 256, shape)
            new.publish()
        return keys

    def lease(self, number: int, pages: int) -> Lease:
        """A lease of such pages."""
        lease = self.cache.match(self.fill(number, pages))
        assert len(lease) == pages
        return lease

    def slots(self, pages: int, part: int = 0) -> Any:
        """Scattered slots, others for each part."""
        every = np.random.default_rng(5).permutation(SLOTS).reshape(4, -1)
        return every[part][: pages * TOKENS]

    def rows(self, layers: Any, moves: list[Move]) -> list[tuple[slice, slice]]:
        """Where bytes of these layers lie, in the pool and in the planes."""
        share = self.share.window(layers)
        return list(moved_rows(share, self.device, self.cache.page_bytes, moves))

    def there(self, layers: Any, moves: list[Move]) -> bool:
        """Whether the device has the pages' bytes of these layers."""
        flat = self.cache.pool.array.reshape(-1)
        rows = self.rows(layers, moves)
        assert rows
        return all((flat[page] == self.device.memory[slot]).all() for page, slot in rows)

    def poison(self) -> None:
        """Set every byte of the planes."""
        self.device.memory[...] = 0x5E

    def model(self, work: Callable[[], None]) -> None:
        """Run a kernel of the model: on its stream, or at once."""
        if self._threads is None:
            work()
        else:
            self._threads.current().put(work)

    def synchronize(self) -> None:
        """Wait for the model."""
        if self._threads is not None:
            self._threads.current().synchronize()

    def pins(self) -> int:
        """Of this client."""
        report = self.cache.check()
        assert report.clean, report.message
        return int(report.pins)

    def close(self) -> None:
        """Open everything, and check that nothing is left."""
        self.open()
        self.engine.close()
        self._patches.undo()
        if self._threads is not None:
            self._threads.close()
        self.engine = None  # it has views of the pool
        gc.collect()
        assert self.pins() == 0
        assert self.cache.stats().writing == 0
        self.cache.close()


@contextlib.contextmanager
def layered(name: str, *arguments: Any, **how: Any) -> Iterator[LayeredWorld]:
    """A world for a while."""
    world = LayeredWorld(name, *arguments, **how)
    try:
        yield world
    finally:
        world.close()
