"""Other ways of moving scattered pages, which an engine might choose instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightcache.errors import TransferFailed
from lightcache.kernels.moves import Transfer
from lightcache_bench import Row
from lightcache_bench._gpu_beside import beside_both
from lightcache_bench._gpu_copies import CHUNK, PAGE, BatchedCopies, Copied, Copies
from lightcache_bench._gpu_device import DIRECTIONS
from lightcache_bench._gpu_rates import compared, plain, rate_row
from lightcache_bench._gpu_rig import Bench, verified
from lightcache_bench._gpu_shapes import LARGE

PROGRAMS = (8, 16, 32, 64, 132)


class Indexed:
    """Scattered tokens by `index_select` into a staging tensor and a copy of it, or the reverse
    with `index_copy_`; one page after the other on one stream for each direction. One tensor holds
    all layers, which spares it a call for each."""

    def __init__(self, bench: Bench) -> None:
        """Prepare indices and staging memory; no token and no page is in both directions."""
        self.gpu = gpu = bench.gpu
        torch, tokens = gpu.torch, LARGE.geometry.page_tokens
        planes = 2 * len(LARGE.geometry.layers)
        width = PAGE // planes // tokens // 2
        values = bench.device_memory.view(torch.int16)  # as wide as bf16, and equal to itself
        slots = values.numel() // planes // width
        self._tokens = values.view(planes, slots, width)
        self.piece, count = PAGE, bench.sizes.total // PAGE
        self.nbytes = count * PAGE
        order = torch.from_numpy(np.random.default_rng(5).permutation(slots)).to(gpu.device)
        self.streams = {direction: gpu.stream() for direction in DIRECTIONS}
        self._staging, self.pages = {}, {}
        for part, direction in enumerate(DIRECTIONS):
            self._staging[direction] = torch.empty(
                (planes, tokens, width), dtype=torch.int16, device=gpu.device
            )
            host = bench.once(
                f"driver memory, {direction}", lambda: gpu.driver_memory(bench.sizes.total)
            )
            chosen = order[part * count * tokens : (part + 1) * count * tokens]
            self.pages[direction] = [
                (
                    host[i * PAGE : (i + 1) * PAGE].view(torch.int16),
                    chosen[i * tokens : (i + 1) * tokens],
                )
                for i in range(count)
            ]
        gpu.synchronize()

    def run(self, direction: str) -> None:
        """See `TransferBackend.run`."""
        for i in range(len(self.pages[direction])):
            moved = self.submit(direction, i)
        moved.wait()

    def submit(self, direction: str, i: int) -> Transfer:
        """See `TransferBackend.submit`."""
        pages, stream = self.pages[direction], self.streams[direction]
        page, chosen = pages[i % len(pages)]
        staging = self._staging[direction]
        with self.gpu.on(stream):
            if direction == "offload":
                self.gpu.torch.index_select(self._tokens, 1, chosen, out=staging)
                page.copy_(staging.view(-1), non_blocking=True)
            else:
                staging.view(-1).copy_(page, non_blocking=True)
                self._tokens.index_copy_(1, chosen, staging)
        return Copied(self.gpu, stream, self.piece)

    def verify(self) -> None:
        """Poison the destinations, move, and compare every byte; each direction once.

        Raises:
            TransferFailed: a byte is wrong.
        """
        for direction in DIRECTIONS:
            for page, chosen in self.pages[direction]:
                if direction == "offload":
                    page.fill_(0x5A5A)
                else:
                    self._tokens.index_fill_(1, chosen, 0x5A5A)
            self.gpu.synchronize()
            self.run(direction)
            self.gpu.synchronize()
            for page, chosen in self.pages[direction]:
                rows = self._tokens.index_select(1, chosen).view(-1).cpu()
                if not self.gpu.torch.equal(rows, page):
                    raise TransferFailed(f"index_select, {direction}: a page differs")


def alternatives(bench: Bench) -> Iterator[Row]:
    """Copy calls by chunk, batched driver calls, `index_select`, and a kernel alone."""
    kinds: tuple[tuple[str, Any], ...] = (
        ("one copy call a 128 KiB chunk", lambda: Copies(bench, CHUNK)),
        ("one batched driver call, 128 KiB chunks", lambda: BatchedCopies(bench, CHUNK)),
        ("one batched driver call, whole pages", lambda: BatchedCopies(bench, PAGE)),
        ("index_select and a copy", lambda: Indexed(bench)),
    )
    for name, make in kinds:
        try:
            backend = make()
            backend.verify()
            yield from _rows(bench, name, backend)
        except Exception as error:
            yield failed(name, error)
    for programs in PROGRAMS:
        name = f"kernel alone, {programs} programs"
        try:
            yield from _kernel_alone(bench, name, programs)
        except Exception as error:
            yield failed(name, error)


def failed(name: str, error: BaseException) -> Row:
    """What stands in the table instead of a figure."""
    return Row(name, {"failed": f"{type(error).__name__}: {error}"}, float("nan"), "")


def _rows(bench: Bench, name: str, backend: Any) -> Iterator[Row]:
    found = compared(bench, {"copy engine": plain(bench), name: backend}, DIRECTIONS)
    for what in DIRECTIONS:
        against = f"copy engine, {what}", found["copy engine", what]
        params = {"bytes": backend.nbytes}
        yield rate_row(f"{what}, {name}", found[name, what], against, None, **params)


def _kernel_alone(bench: Bench, name: str, programs: int) -> Iterator[Row]:
    """A kernel that reads and writes host memory itself, on so many multiprocessors."""
    with verified(bench, LARGE, mode="direct", programs=programs) as rig:
        yield from _rows(bench, name, rig)
        yield from beside_both(bench, {f"{way}, {name}": (rig, way) for way in DIRECTIONS})
