"""One transfer on its way to the device: divided into steps, which are then enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightcache.kernels.copies import Addresses
from lightcache.kernels.lanes import Joined, Lane
from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.moves import Batch
from lightcache.kernels.staging import IndexBlock
from lightcache.kernels.steps import Steps
from lightcache.kernels.work import (
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
        self.streams = streams
        self._run = Steps(engine, lane, after)
        self._steps: list[Step] = []
        self._rows: list[Addresses] = []

    @property
    def block(self) -> IndexBlock | None:
        """What must stay until it is over, once it is prepared."""
        return self._run.block

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
            return [self._run.direct_stream]
        whole = whole_pages(batch)
        if bool(whole.all()) and (ends := self._try_copies(part, pages, nbytes)):
            return ends
        if engine.mode == "auto" and part.plan.nbytes < engine.thresholds.direct_page:
            self._direct(part, batch, pages)
            return [self._run.direct_stream]
        return self._stage_or_direct(part, batch, pages, whole)

    def _is_small(self, nbytes: int) -> bool:
        return self.engine.mode == "auto" and nbytes < self.engine.thresholds.direct_total

    def _try_copies(self, part: Joined, pages: Addresses, nbytes: int) -> list[Any]:
        """Copies without a kernel, where they are possible and wanted."""
        engine = self.engine
        least = engine.thresholds.copy_bytes if engine.mode == "auto" else 1
        if engine.mode == "staged" or not engine._copier.anywhere or part.plan.mean_run < least:
            return []
        runs = run_copies(part.plan, self.batch, pages)
        if runs is None or nbytes < least * len(runs[2]):
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
            return [self._run.direct_stream]
        self._staged(part, select(batch, whole), pages[whole])
        return [self._run.direct_stream, self.lane.last]

    def _reserve_rows(self, rows: Addresses) -> int:
        """Room for index rows; the word they begin at."""
        at = self._run.words
        self._rows.append(rows)
        self._run.words += rows.size
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
            run = partial(self._run.direct, part, at + first * JOB_WORDS, count)
            self._steps.append((run, count * nbytes))

    def _staged(self, part: Joined, batch: Batch, pages: Addresses) -> None:
        ring = self.engine._ring(self.lane)
        cuts = part.cuts(ring.slot_bytes)
        staged = stage(cuts, pages, ring)
        at = self._reserve_rows(index_rows(batch, staged.addresses, len(cuts.cells)))
        run = self._run.gather if self.lane.to_page else self._run.scatter
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
            run = partial(self._run.copies, targets[part], sources[part], sizes[part])
            self._steps.append((run, sum(sizes[part])))

    def _write_index(self) -> None:
        steps, slots = self._run, self.batch.slots
        steps.slot_words = (len(slots) + 1) // 2
        block = steps.block = self.engine._blocks.take(steps.words + steps.slot_words)
        at = 0
        for rows in self._rows:
            block.view[at : at + rows.size] = rows.ravel()
            at += rows.size
        store_slots(slots, block.slots[at * 2 : at * 2 + len(slots)])

    def drop(self) -> None:
        """It will not be enqueued."""
        self._steps = []
        block, self._run.block = self._run.block, None
        if block is not None:
            self.engine._blocks.give(block)

    # ---- enqueuing

    def start(self, pacer: Pacer | None) -> None:
        """Enqueue now, or as fast as the rate allows. What fails is told by the transfer; after
        an interrupt it counts as failed, and goes on until what was enqueued is over."""
        try:
            self.transfer.begin(later=pacer is not None)
            self._record_sources()
            if pacer is None:
                for step in self._steps:
                    self._take(step)
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
                self._run.sources.append(self.engine._events.recorded(stream))
        except Exception as error:
            self.transfer.fail(error)

    def _hand_to(self, pacer: Pacer) -> None:
        if self.transfer._error is None:
            for step in self._steps:
                pacer.put(partial(self._run_locked, step), step[1])
        pacer.put(self._end_locked, 0)

    def _take(self, step: Step) -> None:
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
                    self._take(step)
            except Exception as error:
                self.transfer.fail(error)

    def _end(self) -> None:
        """All is enqueued. After a failure what was enqueued must still be waited for."""
        if self.transfer._error is not None:
            lane = self.lane
            streams = [lane.upload, lane.kernel, lane.copy, self._run.direct_stream]
            self.engine._traffic.failed(self.transfer, self.transfer._error, streams)
        sources, self._run.sources = self._run.sources, []
        self.engine._events.give(sources)
        self._steps = []  # they refer to this, and this to the engine: see `TransferEngine.close`
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
