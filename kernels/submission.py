"""One transfer on its way to the device: divided into steps, which are then enqueued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.moves import Batch
from lightcache.kernels.rows import Addresses, CopyLists, Plan, RowClass, merged
from lightcache.shm.errors import ConfigError

if TYPE_CHECKING:
    from lightcache.kernels.engine import DeviceTransfer, Pacer, TransferEngine


# ---- Buffers of the transfer engine: the staging ring, and index buffers that are used again.

_FIRST_WORDS = 1 << 13  # 64 KiB: 1 GiB in pages of 8 MiB needs half of it


class Ring:
    """Slots of device memory through which pages pass, one after the other, in order."""

    def __init__(self, device: Any, slots: int, slot_bytes: int) -> None:
        """Allocates at once."""
        self.slots, self.slot_bytes = slots, slot_bytes
        self.memory: torch.Tensor = device.empty(slots * slot_bytes)
        self.address = int(self.memory.data_ptr())
        self.ready = [device.event() for _ in range(slots)]
        """Recorded when a slot has been filled."""
        self.free = [device.event() for _ in range(slots)]
        """Recorded when a slot has been emptied. Waiting before the first time waits for nothing:
        that is what an event means that was never recorded."""
        self._next = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next slots, in turn. Whoever fills one waits for `free` first."""
        slots = (self._next + np.arange(count)) % self.slots
        self._next = (self._next + count) % self.slots
        return slots


class IndexBlock:
    """One pair of buffers: jobs and slots of a transfer, in pinned memory and on the device."""

    def __init__(self, device: Any, words: int) -> None:
        """Allocates at once."""
        self.words = words
        self.host, self.device = device.words(words)
        self.view: npt.NDArray[np.int64] = self.host.numpy()
        self.slots = self.view.view(np.int32)
        self.host_address = int(self.host.data_ptr())
        self.device_address = int(self.device.data_ptr())


class IndexBlocks:
    """Blocks that are not in use, by size. Steady state allocates nothing."""

    def __init__(self, device: Any, copier: Any) -> None:
        """Nothing is allocated yet."""
        self._device = device
        self._copier = copier
        self._spare: dict[int, list[IndexBlock]] = {}
        self.made = 0
        """Blocks there are in all."""

    def take(self, words: int) -> IndexBlock:
        """A block of at least so many words."""
        size = max(_FIRST_WORDS, 1 << (words - 1).bit_length())
        spare = self._spare.setdefault(size, [])
        if spare:
            return spare.pop()
        block = IndexBlock(self._device, size)
        self._copier.add(block.host, block.device)
        self.made += 1
        return block

    def give(self, block: IndexBlock) -> None:
        """Give one back that no kernel reads any more."""
        self._spare.setdefault(block.words, []).append(block)

    def clear(self) -> None:
        """Let go of those that are not in use."""
        self._spare.clear()


class Events:
    """Events that are not in use."""

    def __init__(self, device: Any) -> None:
        """Nothing is made yet."""
        self._device = device
        self._spare: list[Any] = []
        self.made = 0
        """Events there are in all."""

    def recorded(self, stream: Any) -> Any:
        """An event, recorded on a stream."""
        if not self._spare:
            self._spare.append(self._device.event())
            self.made += 1
        event = self._spare[-1]
        event.record(stream)  # it stays spare if this fails
        return self._spare.pop()

    def give(self, events: list[Any]) -> None:
        """Give back events that nobody waits for any more."""
        self._spare += events


# ---- Dividing a transfer: index rows, chunks that pass through the ring, copies of whole ranges.
#
# Everything for all pages at once, in numpy: what is left for each chunk is a handful of calls.

_LEFT_OUT = np.array(-1)  # numpy takes an array faster than a number


def index_rows(batch: Batch, addresses: Addresses, times: int = 1) -> Addresses:
    """Index rows, int64 of shape (pages * times, JOB_WORDS), `times` for each page of a batch."""
    rows = np.empty((len(addresses), JOB_WORDS), np.int64)
    columns: tuple[npt.NDArray[Any], ...] = (batch.start, batch.first, batch.end)
    for column, values in enumerate(columns, 1):
        rows[:, column] = values if times == 1 else np.repeat(values, times)
    rows[:, 0] = addresses
    return rows


def store_slots(slots: npt.NDArray[Any], room: npt.NDArray[np.int32]) -> None:
    """Slots, int32 or int64, as the kernel reads them. Checked to be below 2**31; what is far below
    zero must stay negative, not become some slot."""
    if slots.dtype == np.int32:
        room[:] = slots
    else:
        room[:] = np.maximum(slots, _LEFT_OUT)


class Cuts:
    """How pages of one plan pass through slots of some size: several pages to a slot, or a page
    to several, cut between cells."""

    def __init__(self, plan: Plan, slot_bytes: int) -> None:
        """Computed once for a plan and a ring."""
        self.nbytes = plan.nbytes
        self.cells = plan.cuts(slot_bytes)
        self.pages = max(1, slot_bytes // plan.nbytes)
        """Of a slot."""
        self.origins = np.array([plan.packed[first] for first, _ in self.cells], np.int64)
        """Where each cut begins when cells are packed."""
        pieces = [plan.ranges(first, end) for first, end in self.cells]
        self.pieces = np.array([piece for cut in pieces for piece in cut], np.int64)
        """[n, 3]: offset in the page, offset packed, bytes of each contiguous range."""
        self.cut_of_piece = np.repeat(np.arange(len(pieces)), [len(cut) for cut in pieces])


@dataclass(frozen=True)
class Chunk:
    """What passes through one slot of the ring."""

    slot: int
    cut: int
    rows: tuple[int, int]
    """First index row, and how many."""
    copies: tuple[int, int]
    """First and end of its copies."""


@dataclass(frozen=True)
class Staged:
    """Pages on their way through a ring."""

    chunks: list[Chunk]
    addresses: Addresses
    """For each index row: where cell 0 of its page would be, were it in the slot as well."""
    host: CopyLists
    staged: CopyLists
    sizes: CopyLists


def stage(cuts: Cuts, pages: Addresses, ring: Ring) -> Staged:
    """Assign slots to pages.

    Args:
        pages: their addresses in the pool.
    """
    number, parts = len(pages), len(cuts.cells)
    row = np.arange(number * parts)
    chunk = row // cuts.pages if parts == 1 else row
    slots = ring.take(int(chunk[-1]) + 1)
    place = ring.address + slots * ring.slot_bytes
    inside = row % cuts.pages * cuts.nbytes if parts == 1 else 0
    addresses = place[chunk] + inside - np.tile(cuts.origins, number)
    host = (pages[:, None] + cuts.pieces[:, 0]).ravel()
    row_of = (np.arange(number)[:, None] * parts + cuts.cut_of_piece).ravel()
    staged = addresses[row_of] + np.tile(cuts.pieces[:, 1], number)
    sizes = np.tile(cuts.pieces[:, 2], number)
    host, staged, sizes, row_of = merged(host, staged, sizes, row_of)
    copies = np.searchsorted(chunk[row_of], np.arange(len(slots) + 1)).tolist()
    rows = np.searchsorted(chunk, np.arange(len(slots) + 1)).tolist()
    chunks = [
        Chunk(
            slot,
            0 if parts == 1 else at % parts,
            (rows[at], rows[at + 1] - rows[at]),
            (copies[at], copies[at + 1]),
        )
        for at, slot in enumerate(slots.tolist())
    ]
    return Staged(chunks, addresses, host.tolist(), staged.tolist(), sizes.tolist())


def whole_pages(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which pages of a batch are given with a slot for every token."""
    whole: npt.NDArray[np.bool_] = (batch.first == 0) & (batch.end == batch.page_tokens)
    if whole.any() and int(batch.slots.min()) < 0:
        found = batch.slots[batch.start[whole][:, None] + np.arange(batch.page_tokens)]
        whole[np.flatnonzero(whole)[(found < 0).any(axis=1)]] = False
    return whole


def select(batch: Batch, chosen: npt.NDArray[np.bool_]) -> Batch:
    """Some pages of a batch; the slots stay."""
    return Batch(
        batch.pages[chosen],
        batch.start[chosen],
        batch.first[chosen],
        batch.end[chosen],
        batch.slots,
        (int(chosen.sum()),),
        batch.page_tokens,
    )


def run_copies(
    plan: Plan, batch: Batch, pages: Addresses
) -> tuple[Addresses, Addresses, Addresses] | None:
    """(page addresses, device addresses, sizes) where every page's bytes lie on the device in
    runs as they do in the page, so that no kernel is needed; None where they do not.

    Whole pages only (`whole_pages`). No copy spans pages: they may be registered apart.
    """
    if not plan.runnable or _scattered(plan, batch):
        return None
    slots = batch.slots[batch.start[:, None] + np.arange(batch.page_tokens)].astype(np.int64)
    host, device, sizes, owner = [], [], [], []
    for each in plan.classes:
        shape, strides = each.shape, each.strides
        leading = slots[:, :: shape.unit_tokens] // shape.unit_tokens
        run = shape.units
        if shape.block_units > 1:
            run = int(np.gcd(run, shape.block_units))
        runs = leading.reshape(len(leading), -1, run)
        if (np.diff(runs, axis=2) != 1).any():
            return None
        begin = runs[:, :, 0]
        if shape.block_units > 1 and (begin % shape.block_units + run > shape.block_units).any():
            return None
        block = begin // shape.block_units * strides.block
        place = block + begin % shape.block_units * strides.unit
        inside = np.arange(runs.shape[1]) * run * shape.page_unit
        target = pages[:, None, None] + each.table[:, 1, None] + inside
        host.append(target.ravel())
        device.append((place[:, None, :] + each.table[:, 0, None]).ravel())
        sizes.append(np.full(target.size, run * shape.row, np.int64))
        owner.append(np.repeat(np.arange(len(pages)), target.size // len(pages)))
    order = np.argsort(np.concatenate(host), kind="stable")
    page = np.concatenate(owner)[order]
    host_all, device_all, sizes_all, _ = merged(
        np.concatenate(host)[order],
        np.concatenate(device)[order],
        np.concatenate(sizes)[order],
        page,
    )
    return host_all, device_all, sizes_all


def _scattered(plan: Plan, batch: Batch) -> bool:
    """Whether a look at the first page shows it: what most transfers are, found out at once."""
    unit = plan.classes[0].shape.unit_tokens
    head = batch.slots[int(batch.start[0]) :][: batch.page_tokens : unit]
    return len(head) > 1 and plan.classes[0].shape.block_units == 1 and head[1] != head[0] + unit


# ---- What submissions of one engine share: joined plans, and the streams of each direction.


class Joined:
    """A plan with its tables on the device and its kernels. Kept while transfers use it."""

    def __init__(self, plan: Plan, device: Any, launcher: Any) -> None:
        """Copies the tables; blocks until they are there."""
        self.plan = plan
        self._launcher = launcher
        self._tables = [torch.from_numpy(each.table).to(device.name) for each in plan.classes]
        self._launches: dict[tuple[bool, bool], list[tuple[RowClass, Any]]] = {}
        self._parts: dict[tuple[int, int], list[slice]] = {}
        self._cuts: dict[int, Cuts] = {}

    def launches(self, packed: bool, to_page: bool) -> list[tuple[RowClass, Any]]:
        """A launch for each class. Compiles what was not asked for before."""
        found = self._launches.get((packed, to_page))
        if found is None:
            found = [
                (each, self._launcher.bind(each, table, packed, to_page))
                for each, table in zip(self.plan.classes, self._tables, strict=True)
            ]
            self._launches[packed, to_page] = found
        return found

    def parts(self, cells: tuple[int, int]) -> list[slice]:
        """For each class, which of its cells are among `cells[0]` to `cells[1] - 1`."""
        found = self._parts.get(cells)
        if found is None:
            found = self._parts[cells] = [each.part(*cells) for each in self.plan.classes]
        return found

    def cuts(self, slot_bytes: int) -> Cuts:
        """How its pages pass through slots of a size."""
        if slot_bytes not in self._cuts:
            self._cuts[slot_bytes] = Cuts(self.plan, slot_bytes)
        return self._cuts[slot_bytes]


class Lane:
    """One direction: its streams, and its ring once something is staged."""

    def __init__(self, device: Any, to_page: bool) -> None:
        """Nothing is allocated yet.

        Args:
            to_page: whether it offloads.
        """
        self.to_page = to_page
        self.kernel, self.copy = device.stream(), device.stream()
        # The index of a load goes with its first pages: on another stream it would wait for those
        # of the transfers before it.
        self.upload = device.stream() if to_page else self.copy
        self.kernel_handle = int(self.kernel.cuda_stream)
        self.directs = deque((device.stream(), device.stream()))
        """Two: while the last programs of one kernel wait for the bus, the next one begins."""
        self.ring: Ring | None = None
        self.going: deque[DeviceTransfer] = deque()
        """Transfers that may go on, oldest first."""

    def next_direct(self) -> Any:
        """The stream for the next direct transfer."""
        self.directs.rotate()
        return self.directs[0]

    @property
    def last(self) -> Any:
        """The stream that ends a staged transfer."""
        return self.copy if self.to_page else self.kernel


# ---- What a transfer enqueues, step by step: launches, copies, and what they wait for.


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


# ---- One transfer on its way to the device: divided into steps, which are then enqueued.

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
