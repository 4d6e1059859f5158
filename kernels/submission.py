"""One transfer on its way to the device: divided into steps, which are then enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightcache.kernels.copies import Addresses
from lightcache.kernels.lanes import Joined, Lane
from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.moves import Batch
from lightcache.kernels.staging import IndexBlock, Ring
from lightcache.kernels.work import (
    Chunk,
    Staged,
    index_rows,
    run_copies,
    select,
    stage,
    store_slots,
    whole_pages,
)
from lightcache.shm.errors import ConfigError

if TYPE_CHECKING:
    from lightcache.kernels.device_transfer import DeviceTransfer
    from lightcache.kernels.engine import TransferEngine
    from lightcache.kernels.pacing import Pacer

PIECE_BYTES = 8 << 20  # of a paced transfer
CALL_BYTES = 32 << 20  # copied in one call: the copy engine works while the next is prepared
Step = tuple[Callable[[], None], int]
"""Something to enqueue, and the bytes that it moves."""


class Submission:
    """One transfer on its way to the device: first all of it is prepared, then enqueued."""

    def __init__(
        self,
        engine: TransferEngine,
        lane: Lane,
        transfer: DeviceTransfer,
        batch: Batch,
        streams: list[Any],
        after: list[Any],
    ) -> None:
        """For `TransferEngine`, which holds its lock."""
        self.engine, self.lane, self.transfer, self.batch = engine, lane, transfer, batch
        self.streams, self.after = streams, after
        self.block: IndexBlock | None = None
        self._direct_stream = lane.next_direct()
        self._steps: list[Step] = []
        self._rows: list[Addresses] = []
        self._words = 0
        self._slot_words = (len(batch.slots) + 1) // 2
        self._waited: set[int] = set()
        self._uploaded = False
        self._sources: list[Any] = []

    # ---- preparing: nothing reaches the device

    def prepare(self, parts: list[Joined], *, windowed: bool) -> None:
        """Divide the work into steps and write the index rows."""
        if not len(self.batch.pages):
            return
        for part in parts:
            ends = self._divide(part)
            layers = part.plan.share.layers if windowed else None
            self._steps.append((partial(self._mark, ends, layers), 0))
        if self._rows:
            self._write_index()

    def _divide(self, part: Joined) -> list[Any]:
        """Steps of one part; the streams that end them."""
        engine, batch = self.engine, self.batch
        pages = engine.memory.address + batch.pages * engine.memory.page_bytes
        nbytes = part.plan.nbytes * len(pages)
        if not nbytes:
            return []
        scattered = engine.mode != "copies" and not part.plan.contiguous
        if engine.mode == "direct" or scattered or self._is_small(nbytes):
            self._direct(part, batch, pages)
            return [self._direct_stream]
        whole = whole_pages(batch)
        if bool(whole.all()) and (ends := self._try_copies(part, pages, nbytes)):
            return ends
        if engine.mode == "auto" and part.plan.nbytes < engine.thresholds.direct_page:
            self._direct(part, batch, pages)
            return [self._direct_stream]
        return self._stage_or_direct(part, batch, pages, whole)

    def _is_small(self, nbytes: int) -> bool:
        return self.engine.mode == "auto" and nbytes < self.engine.thresholds.direct_total

    def _try_copies(self, part: Joined, pages: Addresses, nbytes: int) -> list[Any]:
        """Copies without a kernel, where they are possible and wanted."""
        engine = self.engine
        runs = None
        if engine.mode in ("auto", "copies") and engine._copier.anywhere:
            runs = run_copies(part.plan, self.batch, pages)
        if runs is None or (
            engine.mode == "auto" and nbytes < engine.thresholds.copy_bytes * len(runs[2])
        ):
            return []
        self._copies(runs)
        return [self.lane.copy]

    def _stage_or_direct(
        self, part: Joined, batch: Batch, pages: Addresses, whole: Any
    ) -> list[Any]:
        if self.engine.mode == "copies":
            raise ConfigError(
                "mode='copies': device bytes do not lie as page bytes do (scattered slots, another "
                "order of heads and tokens, parts of pages), or cuda-bindings is missing; use "
                "'auto'"
            )
        if not self.lane.to_page or whole.all():
            self._staged(part, batch, pages)
            return [self.lane.last]
        # Parts of pages are written by rows: a whole copy would overwrite their other tokens.
        self._direct(part, select(batch, ~whole), pages[~whole])
        if not whole.any():
            return [self._direct_stream]
        self._staged(part, select(batch, whole), pages[whole])
        return [self._direct_stream, self.lane.last]

    def _reserve_rows(self, rows: Addresses) -> int:
        """Room for index rows; the word they begin at."""
        at = self._words
        self._rows.append(rows)
        self._words += rows.size
        return at

    def _pieces(self, number: int, nbytes: int) -> range:
        """Where pieces of a paced transfer begin; all is one piece without a rate."""
        if self.engine._pacer is None:
            return range(0, number, number)
        return range(0, number, max(1, PIECE_BYTES * number // nbytes))

    def _direct(self, part: Joined, batch: Batch, pages: Addresses) -> None:
        at = self._reserve_rows(index_rows(batch, pages))
        nbytes = part.plan.nbytes
        pieces = self._pieces(len(pages), nbytes * len(pages))
        for first in pieces:
            count = min(pieces.step, len(pages) - first)
            run = partial(self._run_direct, part, at + first * JOB_WORDS, count)
            self._steps.append((run, count * nbytes))

    def _staged(self, part: Joined, batch: Batch, pages: Addresses) -> None:
        ring = self.engine._ring(self.lane)
        cuts = part.cuts(ring.slot_bytes)
        staged = stage(cuts, pages, ring)
        at = self._reserve_rows(index_rows(batch, staged.addresses, len(cuts.cells)))
        run = self._run_gather if self.lane.to_page else self._run_scatter
        each = sum(staged.sizes) // len(staged.chunks)
        for chunk in staged.chunks:
            cells = cuts.cells[chunk.cut]
            self._steps.append((partial(run, ring, part, cells, staged, chunk, at), each))

    def _copies(self, runs: tuple[Addresses, Addresses, Addresses]) -> None:
        host, device, sizes = (each.tolist() for each in runs)
        targets, sources = (host, device) if self.lane.to_page else (device, host)
        each = PIECE_BYTES if self.engine._pacer else CALL_BYTES
        step = max(1, each * len(sizes) // sum(sizes))
        for at in range(0, len(sizes), step):
            part = slice(at, at + step)
            run = partial(self._run_copies, targets[part], sources[part], sizes[part])
            self._steps.append((run, sum(sizes[part])))

    def _write_index(self) -> None:
        block = self.block = self.engine._blocks.take(self._words + self._slot_words)
        at = 0
        for rows in self._rows:
            block.view[at : at + rows.size] = rows.ravel()
            at += rows.size
        store_slots(self.batch.slots, block.slots[at * 2 : at * 2 + len(self.batch.slots)])

    def drop(self) -> None:
        """It will not be enqueued."""
        if self.block is not None:
            self.engine._blocks.give(self.block)
            self.block = None

    # ---- enqueuing

    def start(self, pacer: Pacer | None) -> None:
        """Enqueue now, or as fast as the rate allows. What fails is told by the transfer; after
        an interrupt it counts as failed, and goes on until what was enqueued is over."""
        try:
            self.transfer.begin(later=pacer is not None)
            self._record_sources()
            if pacer is None:
                for step in self._steps:
                    self._run(step)
                self._end()
            else:
                self._hand_to(pacer)
        except BaseException as error:
            self.transfer.fail(error)
            if pacer is None:
                self._end()
            else:  # steps that it has already are left out
                pacer.put(self._end_locked, 0)
            raise

    def _record_sources(self) -> None:
        try:
            for stream in self.streams:
                self._sources.append(self.engine._events.recorded(stream))
        except Exception as error:
            self.transfer.fail(error)

    def _hand_to(self, pacer: Pacer) -> None:
        if self.transfer._error is None:
            for step in self._steps:
                pacer.put(partial(self._run_locked, step), step[1])
        pacer.put(self._end_locked, 0)

    def _run(self, step: Step) -> None:
        if self.transfer._error is None:
            try:
                step[0]()
            except Exception as error:
                self.transfer.fail(error)

    def _run_locked(self, step: Step) -> None:
        """In the pacer's thread, which nothing must end."""
        with self.engine._lock:
            try:
                with self.engine.device.guard():
                    self._run(step)
            except Exception as error:
                self.transfer.fail(error)

    def _end(self) -> None:
        """All is enqueued. After a failure what was enqueued must still be waited for."""
        if self.transfer._error is not None:
            lane = self.lane
            streams = [lane.upload, lane.kernel, lane.copy, self._direct_stream]
            self.engine._traffic.failed(self.transfer, self.transfer._error, streams)
        sources, self._sources = self._sources, []
        self.engine._events.give(sources)
        self.transfer.enqueued()

    def _end_locked(self) -> None:
        with self.engine._lock:
            try:
                with self.engine.device.guard():
                    self._end()
            except Exception as error:
                self.transfer.fail(error)
                self._end()

    def _mark(self, streams: list[Any], layers: Sequence[int] | None) -> None:
        events = []
        for stream in streams:
            events.append(self.engine._events.recorded(stream))
            self.transfer.mark(events[-1])
        if layers is not None:
            self.transfer.mark_layers(events, layers)

    def _wait(self, stream: Any) -> None:
        """Let a stream of ours wait for what this transfer waits for, once."""
        if id(stream) not in self._waited:
            self._waited.add(id(stream))
            for event in [*self._sources, *self.after]:
                stream.wait_event(event)

    def _run_direct(self, part: Joined, at: int, count: int) -> None:
        assert self.block is not None
        self._wait(self._direct_stream)
        slots = self.block.host_address + self._words * 8
        jobs = self.block.host_address + at * 8
        programs, stream = self.engine.programs, self._direct_stream.cuda_stream
        for each, launch in part.launches(False, self.lane.to_page):
            launch(0, len(each.cells), jobs, count, slots, programs, stream)

    def _run_packed(self, part: Joined, cells: tuple[int, int], chunk: Chunk, at: int) -> None:
        """The kernel of a chunk, on the kernel stream."""
        assert self.block is not None
        slots = self.block.device_address + self._words * 8
        jobs = self.block.device_address + (at + chunk.rows[0] * JOB_WORDS) * 8
        programs, stream = self.engine.packed_programs, self.lane.kernel_handle
        launches = part.launches(True, self.lane.to_page)
        for (_, launch), rows in zip(launches, part.parts(cells), strict=True):
            number = rows.stop - rows.start
            if number:
                launch(rows.start, number, jobs, chunk.rows[1], slots, programs, stream)

    def _run_gather(
        self,
        ring: Ring,
        part: Joined,
        cells: tuple[int, int],
        staged: Staged,
        chunk: Chunk,
        at: int,
    ) -> None:
        kernel, copy = self.lane.kernel, self.lane.copy
        self._wait(kernel)
        self._upload()
        kernel.wait_event(ring.free[chunk.slot])
        self._run_packed(part, cells, chunk, at)
        ring.ready[chunk.slot].record(kernel)
        copy.wait_event(ring.ready[chunk.slot])
        own = slice(*chunk.copies)
        self.engine._copier(staged.host[own], staged.staged[own], staged.sizes[own], copy)
        ring.free[chunk.slot].record(copy)

    def _run_scatter(
        self,
        ring: Ring,
        part: Joined,
        cells: tuple[int, int],
        staged: Staged,
        chunk: Chunk,
        at: int,
    ) -> None:
        kernel, copy = self.lane.kernel, self.lane.copy
        self._upload()
        copy.wait_event(ring.free[chunk.slot])
        own = slice(*chunk.copies)
        self.engine._copier(staged.staged[own], staged.host[own], staged.sizes[own], copy)
        ring.ready[chunk.slot].record(copy)
        self._wait(kernel)  # the staging area is ours: only writing the slots has to wait
        kernel.wait_event(ring.ready[chunk.slot])
        self._run_packed(part, cells, chunk, at)
        ring.free[chunk.slot].record(kernel)

    def _run_copies(self, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        self._wait(self.lane.copy)
        self.engine._copier(targets, sources, sizes, self.lane.copy)

    def _upload(self) -> None:
        """The index to the device: over the bus once, not once for each row of cells."""
        assert self.block is not None
        if not self._uploaded:
            self._uploaded = True
            lane, block = self.lane, self.block
            nbytes = (self._words + self._slot_words) * 8
            self.engine._copier([block.device_address], [block.host_address], [nbytes], lane.upload)
            if lane.upload is not lane.copy:
                event = self.engine._events.recorded(lane.upload)
                self._sources.append(event)  # given back with them
                lane.kernel.wait_event(event)
