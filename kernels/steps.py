"""What a transfer enqueues, step by step: launches, copies, and what they wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightcache.kernels.lanes import Joined, Lane
from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.staging import IndexBlock, Ring
from lightcache.kernels.work import Chunk, Staged

if TYPE_CHECKING:
    from lightcache.kernels.engine import TransferEngine


class Steps:
    """Steps of one transfer, which are run in order, with the engine's lock held."""

    def __init__(self, engine: TransferEngine, lane: Lane, after: list[Any]) -> None:
        """Nothing is enqueued yet.

        Args:
            after: events to wait for, beside `sources`.
        """
        self.engine, self.lane, self.after = engine, lane, after
        self.direct_stream = lane.next_direct()
        self.block: IndexBlock | None = None
        """Index rows, and slots behind them."""
        self.words = 0
        """Of the rows."""
        self.slot_words = 0
        self.sources: list[Any] = []
        """Events of our own, given back when all is enqueued: what waits for them keeps what they
        were when it began to."""
        self._waited: set[int] = set()
        self._uploaded = False

    def _wait(self, stream: Any) -> None:
        """Let a stream of ours wait for what this transfer waits for, once."""
        if id(stream) not in self._waited:
            self._waited.add(id(stream))
            for event in [*self.sources, *self.after]:
                stream.wait_event(event)

    def direct(self, part: Joined, at: int, count: int) -> None:
        """Pages of `count` index rows, those from word `at` on, without staging."""
        assert self.block is not None
        self._wait(self.direct_stream)
        slots = self.block.host_address + self.words * 8
        jobs = self.block.host_address + at * 8
        programs, stream = self.engine.programs, self.direct_stream.cuda_stream
        for each, launch in part.launches(False, self.lane.to_page):
            launch(0, len(each.cells), jobs, count, slots, programs, stream)

    def _run_packed(self, part: Joined, cells: tuple[int, int], chunk: Chunk, at: int) -> None:
        """The kernel of a chunk, on the kernel stream."""
        assert self.block is not None
        slots = self.block.device_address + self.words * 8
        jobs = self.block.device_address + (at + chunk.rows[0] * JOB_WORDS) * 8
        programs, stream = self.engine.packed_programs, self.lane.kernel_handle
        launches = part.launches(True, self.lane.to_page)
        for (_, launch), rows in zip(launches, part.parts(cells), strict=True):
            number = rows.stop - rows.start
            if number:
                launch(rows.start, number, jobs, chunk.rows[1], slots, programs, stream)

    def gather(
        self,
        ring: Ring,
        part: Joined,
        cells: tuple[int, int],
        staged: Staged,
        chunk: Chunk,
        at: int,
    ) -> None:
        """A chunk from device slots to the ring, then to its pages."""
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

    def scatter(
        self,
        ring: Ring,
        part: Joined,
        cells: tuple[int, int],
        staged: Staged,
        chunk: Chunk,
        at: int,
    ) -> None:
        """A chunk from its pages to the ring, then to device slots."""
        kernel, copy = self.lane.kernel, self.lane.copy
        self._wait(copy)  # for who writes the pages; whoever uses the slots is behind it as well
        copy.wait_event(ring.free[chunk.slot])
        own = slice(*chunk.copies)
        targets, sources, sizes = staged.staged[own], staged.host[own], staged.sizes[own]
        # On a stream of its own the index would wait for copies already enqueued; in a call of its
        # own it would cost the copy engine a pause.
        if not self._uploaded:
            for each, value in zip((targets, sources, sizes), self._index_copy(), strict=True):
                each.insert(0, value)
        self.engine._copier(targets, sources, sizes, copy)
        ring.ready[chunk.slot].record(copy)
        kernel.wait_event(ring.ready[chunk.slot])
        self._run_packed(part, cells, chunk, at)
        ring.free[chunk.slot].record(kernel)

    def copies(self, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        """Copies between pages and device slots, without a kernel."""
        self._wait(self.lane.copy)
        self.engine._copier(targets, sources, sizes, self.lane.copy)

    def _index_copy(self) -> tuple[int, int, int]:
        """Target, source and bytes of the one copy of the index, which its caller now makes: over
        the bus once, not once for each row of cells."""
        assert self.block is not None
        self._uploaded = True
        nbytes = (self.words + self.slot_words) * 8
        return self.block.device_address, self.block.host_address, nbytes

    def _upload(self) -> None:
        """The index of an offload, on a stream of its own: nothing is ahead of it there."""
        if not self._uploaded:
            target, source, nbytes = self._index_copy()
            self.engine._copier([target], [source], [nbytes], self.lane.upload)
            event = self.engine._events.recorded(self.lane.upload)
            self.sources.append(event)  # given back with them
            self.lane.kernel.wait_event(event)
