"""A page's way between a device in vLLM's layouts and the pool, through the connector's halves,
against one copy of the same bytes; and beside a matrix product."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightcache.connectors.vllm.messages import Orders
from lightcache.errors import WaitTimeout
from lightcache.shm import Segment
from lightcache_bench import Row
from lightcache_bench._gpu_beside import product_rows
from lightcache_bench._gpu_device import DIRECTIONS, Gpu
from lightcache_bench._gpu_rates import rate_row
from lightcache_bench._gpu_steps import Product
from lightcache_bench._gpu_window import Feed, Window, windows
from lightcache_bench._timing import Case, interleaved
from lightcache_bench._vllm_device import LAYOUTS, PAGES, Engine
from lightcache_bench._vllm_stand_in import Request

TARGETS = {"256 KiB": ">= 0.85", "2 MiB": ">= 0.97", "8 MiB": ">= 0.97"}
STAMP = 7


class Sizes:
    """Bytes of a repetition, and of one request's part of it."""

    def __init__(self, gpu: Gpu, quick: bool) -> None:
        self.total, self.piece, self.rounds = 4 << 30, 64 << 20, 12
        if quick:
            self.total, self.rounds = 1 << 30, 3
        if not gpu.cuda:
            self.total, self.piece, self.rounds = 32 << 20, 16 << 20, 2


class Ways:
    """An engine whose requests are saved and loaded, repetition after repetition."""

    def __init__(self, gpu: Gpu, name: str, sizes: Sizes, page: str, layout: str) -> None:
        model = PAGES[page]
        self.gpu, self.sizes = gpu, sizes
        self.pages = sizes.piece // model.page_bytes
        self.count = sizes.total // sizes.piece
        self.nbytes = self.count * self.pages * model.page_bytes
        blocks = (self.count + 2) * (self.pages * model.blocks_per_page + 1)
        pages = 2 * self.count * self.pages
        self.engine = Engine(gpu, model, name, blocks=blocks, pages=pages, layout=layout)
        self.turn = 0

    def offload(self, _: int) -> float:
        """GB/s of a repetition: new prompts, until the last page of them is published."""
        self.turn += 1
        engine, merged, requests = self.engine, Orders(), []
        for number in range(self.count):
            request, orders = engine.compute(STAMP, self.pages, f"{self.turn} {number}")
            if self.turn == 1:
                engine.stamp(request, STAMP)
            merged.saves += orders.saves
            requests.append(request)
        self.gpu.synchronize()
        begin = time.perf_counter()
        engine.begin(merged)
        engine.until_saved()
        took = time.perf_counter() - begin
        self._end(requests)
        return self.nbytes / took / 1e9

    def load(self, _: int) -> float:
        """The same for the way back, of what the last offload has saved."""
        engine, merged, requests = self.engine, Orders(), []
        for number in range(self.count):
            request, found, orders = engine.find(STAMP, self.pages, f"{self.turn} {number}")
            if found != request.num_tokens - 1:
                raise WaitTimeout(f"expected {request.num_tokens - 1} tokens, found {found}")
            merged.loads += orders.loads
            requests.append(request)
        self.gpu.synchronize()
        begin = time.perf_counter()
        engine.begin(merged)
        engine.until_loaded({request.request_id for request in requests})
        took = time.perf_counter() - begin
        self._end(requests)
        return self.nbytes / took / 1e9

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.end(request)

    def verify(self) -> None:
        """One repetition each way, over blocks that were overwritten in between.

        Raises:
            TransferFailed: a byte is wrong.
        """
        self.offload(0)
        engine = self.engine
        for number in range(self.count):
            request, found, orders = engine.find(STAMP, self.pages, f"{self.turn} {number}")
            engine.stamp(request, 0)
            self.gpu.synchronize()
            engine.begin(orders)
            engine.until_loaded({request.request_id})
            engine.check(request, found, STAMP)
            engine.end(request)


@contextlib.contextmanager
def ways(gpu: Gpu, sizes: Sizes, page: str, layout: str) -> Iterator[Ways]:
    """The cache goes at the end."""
    name = f"bench-vllm-{os.getpid()}-device"
    made = None
    try:
        made = Ways(gpu, name, sizes, page, layout)
        made.verify()
        yield made
    finally:
        if made is not None:
            made.engine.close()
        Segment.unlink(name, force=True)


def one_copy(gpu: Gpu, nbytes: int) -> dict[str, Case]:
    """One copy of so many bytes between the device and memory of the driver, in GB/s."""
    device, host = gpu.random(nbytes), gpu.driver_memory(nbytes)

    def run(to: Any, source: Any) -> float:
        gpu.synchronize()
        begin = time.perf_counter()
        to.copy_(source, non_blocking=True)
        gpu.synchronize()
        return float(nbytes / (time.perf_counter() - begin) / 1e9)

    return {"offload": lambda _: run(host, device), "load": lambda _: run(device, host)}


def rates(gpu: Gpu, quick: bool) -> Iterator[Row]:
    """Each page size and layout, in turns with one copy of the same bytes."""
    sizes = Sizes(gpu, quick)
    for page, target in TARGETS.items():
        for layout in LAYOUTS:
            with ways(gpu, sizes, page, layout) as made:
                copies = one_copy(gpu, made.nbytes)
                cases = {
                    "copy, offload": copies["offload"],
                    "offload": made.offload,
                    "copy, load": copies["load"],
                    "load": made.load,
                }
                interleaved(cases, 1)
                found = interleaved(cases, sizes.rounds)
                del copies, cases
            for way in DIRECTIONS:
                yield rate_row(
                    f"{way}, {page} pages, {layout}",
                    found[way],
                    ("one copy", found[f"copy, {way}"]),
                    target if gpu.cuda else None,
                    bytes=made.nbytes,
                )


class _Pending:
    """A transfer of one request, as a `Feed` wants it."""

    def __init__(self, engine: Engine, request: Request, received: set[str] | None) -> None:
        self._engine, self._request, self._received = engine, request, received
        if received is None:
            engine.end(request)  # its blocks stay until it is saved

    def done(self) -> bool:
        """Whether its last byte is there."""
        identity = self._request.request_id
        ended = self._engine.finish()[0]
        if self._received is None:
            return identity not in self._engine.requests
        self._received |= ended
        if identity not in self._received:
            return False
        self._received.remove(identity)
        self._engine.end(self._request)
        return True

    def wait(self, timeout: float) -> None:
        """Until it is done."""
        end = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > end:
                raise WaitTimeout(f"a transfer had not ended after {timeout:.0f} s")


def beside(gpu: Gpu, quick: bool) -> Iterator[Row]:
    """Loads and offloads of 2 MiB pages beside 8192-cube bf16 products."""
    if not gpu.cuda:
        return
    sizes, step = Sizes(gpu, True), Product(gpu)
    with ways(gpu, sizes, "2 MiB", "LBHNC") as made:
        alone = interleaved({"offload": made.offload, "load": made.load}, 3)
        saved, engine = made.turn, made.engine
        received: set[str] = set()

        def offload(i: int) -> Any:
            request, orders = engine.compute(STAMP, made.pages, f"beside {i} {time.monotonic_ns()}")
            engine.begin(orders)
            return _Pending(engine, request, None)

        def load(i: int) -> Any:
            request, _, orders = engine.find(STAMP, made.pages, f"{saved} {i % made.count}")
            engine.begin(orders)
            return _Pending(engine, request, received)

        piece = made.nbytes // made.count
        feeds: dict[str, Feed | None] = {"alone": None}
        feeds["load"] = Feed(load, piece)
        feeds["offload"] = Feed(offload, piece)
        rounds, count = (2, 10) if quick else (6, 80)
        found: dict[str, list[Window]] = {"alone": [], "load": [], "offload": []}
        # Loads first: what offloads save evicts what is loaded.
        for name in ("load", "offload"):
            both = windows(gpu, step, {"alone": None, name: feeds[name]}, rounds, count)
            found = {**found, name: both[name], "alone": found["alone"] + both["alone"]}
    for name in ("load", "offload"):
        yield from product_rows(name, found, np.asarray(alone[name]), judged=True)
