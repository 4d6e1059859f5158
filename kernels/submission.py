"""One transfer on its way to the device: divided into steps, which are then enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache.kernels.copies import Addresses
from lightcache.kernels.lanes import Joined, Lane
from lightcache.kernels.moves import Batch
from lightcache.kernels.rows import Plan
from lightcache.kernels.staging import IndexBlock, Ring
from lightcache.kernels.work import (
    JOB_WORDS,
    Chunk,
    chunks,
    jobs,
    run_copies,
    select,
    staged_addresses,
    whole_copies,
    whole_pages,
)
from lightcache.shm.errors import ConfigError

if TYPE_CHECKING:
    from lightcache.kernels.device_transfer import DeviceTransfer
    from lightcache.kernels.engine import TransferEngine
    from lightcache.kernels.pacing import Pacer

PIECE_BYTES = 8 << 20  # of a paced transfer


@dataclass(frozen=True)
class _Step:
    """Something to enqueue, and the bytes that it moves."""

    run: Callable[[], None]
    nbytes: int = 0


class Submission:
    """One transfer on its way to the device: first everything is prepared, then enqueued."""

    def __init__(
        self,
        engine: TransferEngine,
        lane: Lane,
        transfer: DeviceTransfer,
        batch: Batch,
        streams: list[Any],
        after: list[Any],
    ) -> None:
        self.engine, self.lane, self.transfer, self.batch = engine, lane, transfer, batch
        self.streams, self.after = streams, after
        self.block: IndexBlock | None = None
        self.steps: list[_Step] = []
        self._rows: list[Addresses] = []
        self._words = 0
        self._waited: set[int] = set()
        self._upload = False
        self._sources: list[Any] = []

    # ---- preparing: nothing reaches the device

    def prepare(self, parts: list[Joined], *, windowed: bool) -> None:
        """Divide the work into steps and write the index rows."""
        if not len(self.batch.pages):
            return
        for part in parts:
            ends = self._divide(part)
            layers = part.plan.share.layers if windowed else None
            self.steps.append(_Step(partial(self._mark, ends, layers)))
        if self._rows:
            self._write_index()

    def _divide(self, part: Joined) -> list[Any]:
        """Steps of one part; the streams that end them."""
        engine, plan, batch = self.engine, part.plan, self.batch
        pages = engine.memory.address + batch.pages * engine.memory.page_bytes
        nbytes = plan.nbytes * len(pages)
        if not nbytes:
            return []
        missing = bool((batch.slots < 0).any())
        whole = whole_pages(batch, missing)
        mode, runs = self._choose(plan, nbytes, bool(whole.all()), pages)
        if mode == "copies" and runs is not None:
            self._copies(runs)
            return [self.lane.copy]
        if mode == "direct" or not (whole.any() or not self.lane.to_page):
            self._direct(part, batch, pages)
            return [self.lane.direct]
        if not self.lane.to_page or whole.all():
            self._staged(part, batch, pages)
            return [self.lane.last]
        # Parts of pages are written by rows: a whole copy would overwrite their other tokens.
        self._direct(part, select(batch, ~whole), pages[~whole])
        self._staged(part, select(batch, whole), pages[whole])
        return [self.lane.direct, self.lane.last]

    def _choose(
        self, plan: Plan, nbytes: int, whole: bool, pages: Addresses
    ) -> tuple[str, tuple[Addresses, Addresses, Addresses] | None]:
        """The way to go, and the copies if it is "copies"."""
        engine = self.engine
        limits = engine.thresholds
        runs = None
        if engine.mode == "auto" and nbytes < limits.direct_total:
            return "direct", None
        if engine.mode in ("auto", "copies") and whole and engine._copier.anywhere:
            runs = run_copies(plan, self.batch, pages)
        if engine.mode == "copies":
            if runs is None:
                raise ConfigError(
                    "mode='copies': device bytes do not lie as page bytes do (scattered slots, "
                    "another order of heads and tokens, parts of pages), or cuda-bindings is "
                    "missing; use 'auto'"
                )
            return "copies", runs
        if engine.mode == "direct" or not plan.contiguous:
            return "direct", None
        if engine.mode == "staged":
            return "staged", None
        if runs is not None and nbytes >= limits.copy_bytes * len(runs[2]):
            return "copies", runs
        return ("direct" if plan.nbytes < limits.direct_page else "staged"), None

    def _reserve_rows(self, rows: Addresses) -> int:
        """Room for index rows; the word they begin at."""
        at = self._words
        self._rows.append(rows)
        self._words += rows.size
        return at

    def _direct(self, part: Joined, batch: Batch, pages: Addresses) -> None:
        at = self._reserve_rows(jobs(batch, slice(None), pages))
        step = len(pages)
        if self.engine._pacer:
            step = max(1, PIECE_BYTES // part.plan.nbytes)
        for first in range(0, len(pages), step):
            count = min(step, len(pages) - first)
            place = (at + first * JOB_WORDS, count)
            self.steps.append(
                _Step(partial(self._run_direct, part, place), count * part.plan.nbytes)
            )

    def _staged(self, part: Joined, batch: Batch, pages: Addresses) -> None:
        ring = self.engine._ring(self.lane, part.plan)
        self._upload = True
        for chunk in chunks(part.plan, len(pages), ring):
            chosen = slice(*chunk.pages)
            staged = staged_addresses(part.plan, chunk)
            at = self._reserve_rows(jobs(batch, chosen, staged))
            copies = whole_copies(part.plan, chunk, staged, pages[chosen])
            run = self._run_gather if self.lane.to_page else self._run_scatter
            self.steps.append(
                _Step(
                    partial(run, ring, part, chunk, at, copies),
                    int(copies[2].sum()),
                )
            )

    def _copies(self, runs: tuple[Addresses, Addresses, Addresses]) -> None:
        host, device, sizes = runs
        step = len(sizes)
        if self.engine._pacer:
            step = max(1, PIECE_BYTES // max(1, int(sizes.mean())))
        for at in range(0, len(sizes), step):
            piece = slice(at, at + step)
            self.steps.append(
                _Step(
                    partial(self._run_copies, host[piece], device[piece], sizes[piece]),
                    int(sizes[piece].sum()),
                )
            )

    def _write_index(self) -> None:
        slots = self.batch.slots
        block = self.block = self.engine._blocks.take(self._words + (len(slots) + 1) // 2)
        at = 0
        for rows in self._rows:
            block.view[at : at + rows.size] = rows.ravel()
            at += rows.size
        block.write_slots(at, slots)

    # ---- enqueuing

    def start(self, pacer: Pacer | None) -> None:
        """Enqueue now, or as fast as the rate allows."""
        try:
            events = self.engine._events
            self._sources = [events.recorded(stream) for stream in self.streams]
        except Exception as error:
            self.transfer.fail(error)
            self.steps = []
        if pacer is None:
            for step in self.steps:
                if not self._run(step):
                    break
            self._end()
        else:
            for step in self.steps:
                pacer.put(partial(self._run_locked, step), step.nbytes)
            pacer.put(self._end_locked, 0)

    def _run(self, step: _Step) -> bool:
        if self.transfer._error is not None:
            return False
        try:
            step.run()
        except Exception as error:
            self.transfer.fail(error)
            return False
        return True

    def _run_locked(self, step: _Step) -> None:
        with self.engine._lock, self.engine.device.guard():
            self._run(step)

    def _end(self) -> None:
        """All is enqueued. After a failure what was enqueued must still be waited for."""
        if self.transfer._error is not None:
            for stream in (self.lane.kernel, self.lane.copy, self.lane.direct):
                try:
                    self.transfer.mark(self.engine._events.recorded(stream), None)
                except Exception as error:
                    self.transfer.fail(error)
        self.engine._events.give(self._sources)
        self.transfer.enqueued()

    def _end_locked(self) -> None:
        with self.engine._lock, self.engine.device.guard():
            self._end()

    def _mark(self, streams: list[Any], layers: Sequence[int] | None) -> None:
        for stream in streams:
            self.transfer.mark(self.engine._events.recorded(stream), layers)

    def _wait(self, stream: Any) -> None:
        """Let a stream of ours wait for what this transfer waits for, once."""
        if id(stream) not in self._waited:
            self._waited.add(id(stream))
            for event in [*self._sources, *self.after]:
                stream.wait_event(event)

    def _run_direct(self, part: Joined, place: tuple[int, int]) -> None:
        assert self.block is not None
        stream = self.lane.direct
        self._wait(stream)
        self._launch(part, (0, len(part.plan.cells)), place, self.block.host, False, stream)

    def _run_gather(
        self, ring: Ring, part: Joined, chunk: Chunk, at: int, copies: tuple[Addresses, ...]
    ) -> None:
        kernel, copy = self.lane.kernel, self.lane.copy
        self._wait(kernel)
        device = self._uploaded(kernel)
        kernel.wait_event(ring.free[chunk.slot])
        place = (at, chunk.pages[1] - chunk.pages[0])
        self._launch(part, chunk.cells, place, device, True, kernel)
        ring.ready[chunk.slot].record(kernel)
        copy.wait_event(ring.ready[chunk.slot])
        host, staged, sizes = copies
        self.engine._copier(host, staged, sizes, copy)
        ring.free[chunk.slot].record(copy)

    def _run_scatter(
        self, ring: Ring, part: Joined, chunk: Chunk, at: int, copies: tuple[Addresses, ...]
    ) -> None:
        kernel, copy = self.lane.kernel, self.lane.copy
        device = self._uploaded(kernel)
        copy.wait_event(ring.free[chunk.slot])
        host, staged, sizes = copies
        self.engine._copier(staged, host, sizes, copy)
        ring.ready[chunk.slot].record(copy)
        self._wait(kernel)  # the staging area is ours: only writing the slots has to wait
        kernel.wait_event(ring.ready[chunk.slot])
        place = (at, chunk.pages[1] - chunk.pages[0])
        self._launch(part, chunk.cells, place, device, True, kernel)
        ring.free[chunk.slot].record(kernel)

    def _run_copies(self, host: Addresses, device: Addresses, sizes: Addresses) -> None:
        stream = self.lane.copy
        self._wait(stream)
        if self.lane.to_page:
            self.engine._copier(host, device, sizes, stream)
        else:
            self.engine._copier(device, host, sizes, stream)

    def _uploaded(self, stream: Any) -> Any:
        """The index on the device: over the bus once, not once for each row of cells."""
        assert self.block is not None
        if self._upload:
            self._upload = False
            words = np.array([(self._words + (len(self.batch.slots) + 1) // 2) * 8], np.int64)
            target = np.array([self.block.device.data_ptr()], np.int64)
            source = np.array([self.block.host.data_ptr()], np.int64)
            self.engine._copier(target, source, words, stream)
        return self.block.device

    def _launch(
        self,
        part: Joined,
        cells: tuple[int, int],
        place: tuple[int, int],
        index: Any,
        packed: bool,
        stream: Any,
    ) -> None:
        engine = self.engine
        programs = 2 * engine.device.processors if packed else engine.programs
        for number, each in enumerate(part.plan.classes):
            rows = each.part(*cells)
            if rows.start < rows.stop:
                engine._launch(
                    each,
                    (part.tables, number),
                    rows,
                    (index, *place),
                    (index, self._words),
                    packed,
                    self.lane.to_page,
                    programs,
                    stream,
                )
