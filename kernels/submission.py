"""One transfer on its way to the device: divided into steps, which are then enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightcache.kernels.in_flight import DeviceTransfer, IndexBlock, InFlight, Lane, Pacer, Ring
from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.moves import Batch, Move
from lightcache.kernels.options import Thresholds
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.rows import (
    Addresses,
    CopyLists,
    Plan,
    RowClass,
    cut_at_borders,
    merged,
)
from lightcache.shm.errors import ConfigError

# ---- Dividing a transfer: index rows, chunks of the ring, copies of whole ranges

_LEFT_OUT = np.array(-1)  # numpy takes an array faster than a number


def index_rows(batch: Batch, addresses: Addresses, times: int = 1) -> Addresses:
    """Index rows, `times` for each page of a batch.

    Args:
        addresses: int64 of shape (pages * times, n): of the page, or of each of its parts.

    Returns:
        int64 of shape (pages * times, JOB_WORDS + n).
    """
    rows = np.empty((len(addresses), JOB_WORDS + addresses.shape[1]), np.int64)
    columns: tuple[npt.NDArray[Any], ...] = (batch.start, batch.first, batch.end)
    for column, values in enumerate(columns):
        rows[:, column] = values if times == 1 else np.repeat(values, times)
    rows[:, JOB_WORDS:] = addresses
    return rows


def store_slots(slots: npt.NDArray[Any], room: npt.NDArray[np.int32]) -> None:
    """Write int32 or int64 slots as the kernel reads them. They are below 2**31; a value below the
    int32 range must stay negative, not wrap around to a slot."""
    if slots.dtype == np.int32:
        room[:] = slots
    else:
        room[:] = np.maximum(slots, _LEFT_OUT)


class Cuts:
    """How pages of one plan pass through ring slots of one size: several pages to a slot, or one
    page to several slots, cut between cells."""

    def __init__(self, plan: Plan, slot_bytes: int) -> None:
        """Computed once for a plan and a ring."""
        self.nbytes = plan.nbytes
        self.cells = plan.cuts(slot_bytes)
        self.pages = max(1, slot_bytes // plan.nbytes)
        """Of a slot."""
        self.origins = np.array([plan.packed[first] for first, _ in self.cells], np.int64)
        """Where each cut begins when cells are packed."""
        ranges = [plan.ranges(first, end) for first, end in self.cells]
        offset, packed, sizes = np.array([each for cut in ranges for each in cut], np.int64).T
        pieces = cut_at_borders(offset, packed, sizes, plan.host_page_bytes)
        offset, self.packed, self.sizes, piece = pieces
        """Of each piece: a contiguous range of one cut, in one part of the page."""
        self.part, self.offset = np.divmod(offset, plan.host_page_bytes)
        """Where it is in a page."""
        self.cut_of_piece = np.repeat(np.arange(len(ranges)), [len(cut) for cut in ranges])[piece]


@dataclass(frozen=True)
class Chunk:
    """The bytes that pass through one slot of the ring."""

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
    """For each index row: where cell 0 of its page would be, were it in the slot as well; of shape
    (rows, 1)."""
    host: CopyLists
    staged: CopyLists
    sizes: CopyLists


def addresses_of(batch: Batch, memory: HostPages) -> Addresses:
    """Addresses of the pages of a batch, of shape (n, parts); 0 for a part that is left out."""
    addresses = memory.address + batch.pages * memory.page_bytes
    if batch.pages.shape[1] > 1:
        addresses[batch.pages < 0] = 0
    return addresses


def stage(cuts: Cuts, batch: Batch, memory: HostPages, ring: Ring) -> Staged:
    """Assign slots to pages. Neighbours in a slot that are neighbours in the pool as well are
    copied together."""
    number, each = len(batch.pages), len(cuts.cells)
    row = np.arange(number * each)
    chunk = row // cuts.pages if each == 1 else row
    slots = ring.take(int(chunk[-1]) + 1)
    place = ring.address + slots * ring.slot_bytes
    inside = row % cuts.pages * cuts.nbytes if each == 1 else 0
    addresses = place[chunk] + inside - np.tile(cuts.origins, number)
    row_of = (np.arange(number)[:, None] * each + cuts.cut_of_piece).ravel()
    columns = [
        (addresses_of(batch, memory)[:, cuts.part] + cuts.offset).ravel(),
        addresses[row_of] + np.tile(cuts.packed, number),
        np.tile(cuts.sizes, number),
        chunk[row_of],
        memory.registration(batch.pages)[:, cuts.part].ravel(),
    ]
    columns = _without_holes(batch.pages[:, cuts.part].ravel(), columns)
    host, staged, sizes, first = merged(*columns)
    copies = np.searchsorted(columns[3][first], np.arange(len(slots) + 1)).tolist()
    rows = np.searchsorted(chunk, np.arange(len(slots) + 1)).tolist()
    chunks = [
        Chunk(
            slot,
            0 if each == 1 else at % each,
            (rows[at], rows[at + 1] - rows[at]),
            (copies[at], copies[at + 1]),
        )
        for at, slot in enumerate(slots.tolist())
    ]
    return Staged(chunks, addresses[:, None], host.tolist(), staged.tolist(), sizes.tolist())


def whole_pages(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which pages of a batch have a slot for every token."""
    whole: npt.NDArray[np.bool_] = (batch.first == 0) & (batch.end == batch.page_tokens)
    if whole.any() and int(batch.slots.min()) < 0:
        page_slots = batch.slots[batch.start[whole][:, None] + np.arange(batch.page_tokens)]
        whole[np.flatnonzero(whole)[(page_slots < 0).any(axis=1)]] = False
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
    plan: Plan, batch: Batch, memory: HostPages
) -> tuple[Addresses, Addresses, Addresses] | None:
    """(page addresses, device addresses, sizes) if every page's bytes lie in the same runs on the
    device as in the page, so that no kernel is needed; else None.

    Whole pages only (`whole_pages`). No copy spans pages, but parts of one that are neighbours in
    the pool are copied together."""
    if not plan.runnable or _scattered(plan, batch):
        return None
    slots = batch.slots[batch.start[:, None] + np.arange(batch.page_tokens)].astype(np.int64)
    # First as if all pages were one stretch of memory, then cut to the parts.
    part_bytes, (number, parts) = plan.host_page_bytes, batch.pages.shape
    begins = np.arange(number) * parts * part_bytes
    host, device, sizes = [], [], []
    for row_class in plan.classes:
        shape, strides = row_class.shape, row_class.strides
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
        target = begins[:, None, None] + row_class.table[:, 1, None] + inside
        host.append(target.ravel())
        device.append((place[:, None, :] + row_class.table[:, 0, None]).ravel())
        sizes.append(np.full(target.size, run * shape.row, np.int64))
    order = np.argsort(np.concatenate(host), kind="stable")
    joined = (np.concatenate(values)[order] for values in (host, device, sizes))
    offset, device_all, sizes_all, _ = cut_at_borders(*merged(*joined)[:3], part_bytes)
    part, inside = np.divmod(offset, part_bytes)
    columns = [
        addresses_of(batch, memory).ravel()[part] + inside,
        device_all,
        sizes_all,
        part // parts,
        memory.registration(batch.pages).ravel()[part],
    ]
    return merged(*_without_holes(batch.pages.ravel()[part], columns))[:3]


def _without_holes(pages: Addresses, columns: list[Any]) -> list[Any]:
    """The columns without the copies of parts that are left out, whose page is negative."""
    kept = pages >= 0
    return columns if kept.all() else [column[kept] for column in columns]


def _scattered(plan: Plan, batch: Batch) -> bool:
    """Whether the first page alone shows that rows are scattered: a quick answer for most
    transfers."""
    unit = plan.classes[0].shape.unit_tokens
    head = batch.slots[int(batch.start[0]) :][: batch.page_tokens : unit]
    return len(head) > 1 and plan.classes[0].shape.block_units == 1 and head[1] != head[0] + unit


# ---- A plan on its device

RING_SLOTS = 4
PACKED_PROGRAMS = 2  # for each multiprocessor, of a kernel that only moves bytes on the device
SLOT_ALIGN = 256  # fast for the copy engine, and a multiple of every word


class Joined:
    """A plan with its tables on the device and its kernels. Kept while transfers use it."""

    def __init__(self, plan: Plan, device: Any, launcher: Any) -> None:
        """Copies the tables; blocks until they are there."""
        self.plan = plan
        self._launcher = launcher
        self._tables = [
            torch.from_numpy(row_class.table).to(device.name) for row_class in plan.classes
        ]
        self._launches: dict[tuple[bool, bool], list[tuple[RowClass, Any]]] = {}
        self._parts: dict[tuple[int, int], list[slice]] = {}
        self._cuts: dict[int, Cuts] = {}

    def launches(self, packed: bool, to_page: bool) -> list[tuple[RowClass, Any]]:
        """A launch for each class. Compiles each kernel on first use."""
        bound = self._launches.get((packed, to_page))
        if bound is None:
            bound = [
                (row_class, self._launcher.bind(row_class, table, packed, to_page))
                for row_class, table in zip(self.plan.classes, self._tables, strict=True)
            ]
            self._launches[packed, to_page] = bound
        return bound

    def parts(self, cells: tuple[int, int]) -> list[slice]:
        """For each class, its cells among `cells[0]` to `cells[1] - 1`."""
        slices = self._parts.get(cells)
        if slices is None:
            slices = self._parts[cells] = [
                row_class.part(*cells) for row_class in self.plan.classes
            ]
        return slices

    def cuts(self, slot_bytes: int) -> Cuts:
        """How its pages pass through slots of `slot_bytes`."""
        if slot_bytes not in self._cuts:
            self._cuts[slot_bytes] = Cuts(self.plan, slot_bytes)
        return self._cuts[slot_bytes]


# ---- State shared by the submissions of one engine


class EngineParts:
    """State that an engine and its submissions share; the engine makes it once."""

    def __init__(
        self,
        in_flight: InFlight,
        memory: HostPages,
        copier: Any,
        joined: Joined,
        *,
        mode: str,
        thresholds: Thresholds,
        programs: int,
        staging_bytes: int,
    ) -> None:
        """Join them.

        Args:
            joined: the engine's share and planes.
            programs: most programs of a kernel that accesses host memory directly.
            staging_bytes: device memory, for each direction in use.
        """
        self.in_flight, self.memory, self.copier, self.joined = in_flight, memory, copier, joined
        self.device = in_flight.device
        self.mode, self.thresholds, self.programs = mode, thresholds, programs
        self.packed_programs = PACKED_PROGRAMS * self.device.processors
        self._staging_bytes = staging_bytes
        self.page_tokens = joined.plan.share.geometry.page_tokens
        small = mode == "auto" and joined.plan.nbytes < thresholds.direct_total
        units = {row_class.shape.unit_tokens for row_class in joined.plan.classes}
        unpaced = in_flight.pacer is None
        single = joined.plan.share.geometry.parts == 1
        self.quick = (small or mode == "direct") and unpaced and units == {1} and single
        """Whether a request of one page always goes directly, token by token: `submit_page`."""

    def ring(self, lane: Lane) -> Ring:
        """The lane's ring, whose slots have room for every cell of the share. It never changes:
        steps that wait for the pacer use it, and so do enqueued ones."""
        if lane.ring is None:
            largest = max((cell.nbytes for cell in self.joined.plan.cells), default=1)
            slot_bytes = (
                -(-max(self._staging_bytes // RING_SLOTS, largest) // SLOT_ALIGN) * SLOT_ALIGN
            )
            slots = max(2, min(RING_SLOTS, self._staging_bytes // slot_bytes))
            ring = Ring(self.device, slots, slot_bytes)
            self.copier.add(ring.memory)
            lane.ring = ring
        return lane.ring


# ---- Steps: launches, copies, and the events they wait for


class Steps:
    """Steps of one transfer, run in order with the engine's lock held."""

    def __init__(self, parts: EngineParts, lane: Lane, after: list[Any]) -> None:
        """Nothing is enqueued yet.

        Args:
            after: events to wait for, besides `sources`.
        """
        self.parts, self.lane, self.after = parts, lane, after
        self.direct_stream = lane.next_direct()
        self.block: IndexBlock | None = None
        """Index rows, followed by slots."""
        self.words = 0
        """Of the rows."""
        self.slot_words = 0
        self.sources: list[Any] = []
        """Events of our own, given back when all is enqueued: what waits for them keeps what they
        were when it began to."""
        self._waited: set[int] = set()
        self._uploaded = False

    def _wait(self, stream: Any) -> None:
        """Let one of the engine's streams wait for this transfer's events, once."""
        if id(stream) not in self._waited:
            self._waited.add(id(stream))
            for event in [*self.sources, *self.after]:
                stream.wait_event(event)

    def direct(self, part: Joined, word: int, count: int) -> None:
        """Pages of `count` index rows, those from word `word` on, without staging."""
        assert self.block is not None
        self._wait(self.direct_stream)
        slots = self.block.host_address + self.words * 8
        jobs = self.block.host_address + word * 8
        programs, stream = self.parts.programs, self.direct_stream.cuda_stream
        for row_class, launch in part.launches(False, self.lane.to_page):
            launch(0, len(row_class.cells), jobs, count, slots, programs, stream)

    def _run_packed(self, part: Joined, cells: tuple[int, int], chunk: Chunk, word: int) -> None:
        """The kernel of a chunk, on the kernel stream."""
        assert self.block is not None
        slots = self.block.device_address + self.words * 8
        jobs = self.block.device_address + (word + chunk.rows[0] * (JOB_WORDS + 1)) * 8
        programs, stream = self.parts.packed_programs, self.lane.kernel_handle
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
        word: int,
    ) -> None:
        """A chunk from device slots to the ring, then to its pages."""
        kernel, copy = self.lane.kernel, self.lane.copy
        self._wait(kernel)
        self._upload()
        kernel.wait_event(ring.free[chunk.slot])
        self._run_packed(part, cells, chunk, word)
        ring.ready[chunk.slot].record(kernel)
        copy.wait_event(ring.ready[chunk.slot])
        own = slice(*chunk.copies)
        self.parts.copier(staged.host[own], staged.staged[own], staged.sizes[own], copy)
        ring.free[chunk.slot].record(copy)

    def scatter(
        self,
        ring: Ring,
        part: Joined,
        cells: tuple[int, int],
        staged: Staged,
        chunk: Chunk,
        word: int,
    ) -> None:
        """A chunk from its pages to the ring, then to device slots."""
        kernel, copy = self.lane.kernel, self.lane.copy
        self._wait(copy)  # for writers of the pages; users of the slots come after it as well
        copy.wait_event(ring.free[chunk.slot])
        own = slice(*chunk.copies)
        targets, sources, sizes = staged.staged[own], staged.host[own], staged.sizes[own]
        # On its own stream the index would wait for copies already enqueued; in its own call it
        # would make the copy engine pause.
        if not self._uploaded:
            for listed, value in zip((targets, sources, sizes), self._index_copy(), strict=True):
                listed.insert(0, value)
        self.parts.copier(targets, sources, sizes, copy)
        ring.ready[chunk.slot].record(copy)
        kernel.wait_event(ring.ready[chunk.slot])
        self._run_packed(part, cells, chunk, word)
        ring.free[chunk.slot].record(kernel)

    def copies(self, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        """Copies between pages and device slots, without a kernel."""
        self._wait(self.lane.copy)
        self.parts.copier(targets, sources, sizes, self.lane.copy)

    def _index_copy(self) -> tuple[int, int, int]:
        """Target, source and bytes of the one copy of the index, which the caller makes now: it
        crosses the bus once, not once for each row of cells."""
        assert self.block is not None
        self._uploaded = True
        nbytes = (self.words + self.slot_words) * 8
        return self.block.device_address, self.block.host_address, nbytes

    def _upload(self) -> None:
        """Copy the index of an offload, on its own stream, where nothing is queued before it."""
        if not self._uploaded:
            target, source, nbytes = self._index_copy()
            self.parts.copier([target], [source], [nbytes], self.lane.upload)
            event = self.parts.in_flight.events.recorded(self.lane.upload)
            self.sources.append(event)  # given back with them
            self.lane.kernel.wait_event(event)


# ---- One submission

PIECE_BYTES = 8 << 20  # a piece of a paced transfer
CALL_BYTES = (4 << 20, 16 << 20, 64 << 20)
"""Of the calls of one transfer, the last for all that follow: the first is short, so that the copy
engine begins, and each later one is prepared while it works."""
Step = tuple[Callable[[], None], int]
"""Something to enqueue, and the bytes that it moves."""


class Submission:
    """One transfer: first all of it is prepared, then enqueued."""

    def __init__(
        self,
        parts: EngineParts,
        lane: Lane,
        transfer: DeviceTransfer,
        batch: Batch,
        streams: list[Any],
        after: list[Any],
    ) -> None:
        """For `TransferEngine`, which holds its lock."""
        self.parts, self.lane, self.transfer, self.batch = parts, lane, transfer, batch
        self.streams = streams
        self._run = Steps(parts, lane, after)
        self._steps: list[Step] = []
        self._rows: list[Addresses] = []

    @property
    def block(self) -> IndexBlock | None:
        """The index block to keep until the transfer has finished, once it is prepared."""
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
        """Add the steps of one part; returns the streams that end them."""
        shared, batch = self.parts, self.batch
        nbytes = part.plan.nbytes * len(batch.pages)
        if not nbytes:
            return []
        scattered = shared.mode != "copies" and not part.plan.contiguous
        if shared.mode == "direct" or scattered or self._is_small(nbytes):
            self._direct(part, batch)
            return [self._run.direct_stream]
        whole = whole_pages(batch)
        if bool(whole.all()) and (ends := self._try_copies(part, nbytes)):
            return ends
        if shared.mode == "auto" and part.plan.nbytes < shared.thresholds.direct_page:
            self._direct(part, batch)
            return [self._run.direct_stream]
        return self._stage_or_direct(part, batch, whole)

    def _is_small(self, nbytes: int) -> bool:
        return self.parts.mode == "auto" and nbytes < self.parts.thresholds.direct_total

    def _try_copies(self, part: Joined, nbytes: int) -> list[Any]:
        """Add copies without a kernel, if possible and wanted."""
        shared = self.parts
        least = shared.thresholds.copy_bytes if shared.mode == "auto" else 1
        if shared.mode == "staged" or not shared.copier.anywhere or part.plan.mean_run < least:
            return []
        runs = run_copies(part.plan, self.batch, shared.memory)
        if runs is None or nbytes < least * len(runs[2]):
            return []
        self._copies(runs)
        return [self.lane.copy]

    def _stage_or_direct(self, part: Joined, batch: Batch, whole: Any) -> list[Any]:
        if self.parts.mode == "copies":
            raise ConfigError(
                "mode='copies': device bytes do not lie as page bytes do (scattered slots, another "
                "order of heads and tokens, parts of pages), or cuda-bindings is missing; use "
                "'auto'"
            )
        if not self.lane.to_page or whole.all():
            self._staged(part, batch)
            return [self.lane.last]
        # Partial pages are written row by row: a whole copy would overwrite their other tokens.
        self._direct(part, select(batch, ~whole))
        if not whole.any():
            return [self._run.direct_stream]
        self._staged(part, select(batch, whole))
        return [self._run.direct_stream, self.lane.last]

    def _reserve_rows(self, rows: Addresses) -> int:
        """Reserve room for index rows; returns the word at which they begin."""
        word = self._run.words
        self._rows.append(rows)
        self._run.words += rows.size
        return word

    def _pieces(self, number: int, nbytes: int) -> range:
        """Where pieces of a paced transfer begin; without a rate there is one piece."""
        if self.parts.in_flight.pacer is None:
            return range(0, number, number)
        return range(0, number, max(1, PIECE_BYTES * number // nbytes))

    def _direct(self, part: Joined, batch: Batch) -> None:
        rows = index_rows(batch, addresses_of(batch, self.parts.memory))
        word = self._reserve_rows(rows)
        nbytes = part.plan.nbytes
        pieces = self._pieces(len(rows), nbytes * len(rows))
        for first in pieces:
            count = min(pieces.step, len(rows) - first)
            run = partial(self._run.direct, part, word + first * rows.shape[1], count)
            self._steps.append((run, count * nbytes))

    def _staged(self, part: Joined, batch: Batch) -> None:
        ring = self.parts.ring(self.lane)
        cuts = part.cuts(ring.slot_bytes)
        staged = stage(cuts, batch, self.parts.memory, ring)
        word = self._reserve_rows(index_rows(batch, staged.addresses, len(cuts.cells)))
        run = self._run.gather if self.lane.to_page else self._run.scatter
        chunk_bytes = sum(staged.sizes) // len(staged.chunks)
        for chunk in staged.chunks:
            cells = cuts.cells[chunk.cut]
            self._steps.append((partial(run, ring, part, cells, staged, chunk, word), chunk_bytes))

    def _copies(self, runs: tuple[Addresses, Addresses, Addresses]) -> None:
        host, device, sizes = (run.tolist() for run in runs)
        targets, sources = (host, device) if self.lane.to_page else (device, host)
        calls = (PIECE_BYTES,) if self.parts.in_flight.pacer else CALL_BYTES
        first, number, total = 0, 0, max(1, sum(sizes))
        while first < len(sizes):
            step = max(1, calls[min(number, len(calls) - 1)] * len(sizes) // total)
            part = slice(first, first + step)
            run = partial(self._run.copies, targets[part], sources[part], sizes[part])
            self._steps.append((run, sum(sizes[part])))
            first, number = first + step, number + 1

    def _write_index(self) -> None:
        steps, slots = self._run, self.batch.slots
        steps.slot_words = (len(slots) + 1) // 2
        block = steps.block = self.parts.in_flight.blocks.take(steps.words + steps.slot_words)
        word = 0
        for rows in self._rows:
            block.view[word : word + rows.size] = rows.ravel()
            word += rows.size
        store_slots(slots, block.slots[word * 2 : word * 2 + len(slots)])

    def drop(self) -> None:
        """Drop a submission that will not be enqueued."""
        self._steps = []
        block, self._run.block = self._run.block, None
        if block is not None:
            self.parts.in_flight.blocks.give(block)

    # ---- enqueuing

    def start(self) -> None:
        """Enqueue now, or as fast as the rate allows. The transfer reports failures. After an
        interrupt it counts as failed, and stays in flight until all that was enqueued has
        finished."""
        pacer = self.parts.in_flight.pacer
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
            else:  # steps submitted already are left out
                pacer.put(self._end_locked, 0)
            raise

    def _record_sources(self) -> None:
        try:
            for stream in self.streams:
                self._run.sources.append(self.parts.in_flight.events.recorded(stream))
        except Exception as error:
            self.transfer.fail(error)

    def _hand_to(self, pacer: Pacer) -> None:
        if self.transfer.error is None:
            for step in self._steps:
                pacer.put(partial(self._run_locked, step), step[1])
        pacer.put(self._end_locked, 0)

    def _take(self, step: Step) -> None:
        if self.transfer.error is None:
            try:
                step[0]()
            except Exception as error:
                self.transfer.fail(error)

    def _run_locked(self, step: Step) -> None:
        """Run a step in the pacer's thread, which no error may end."""
        with self.parts.in_flight.lock:
            try:
                with self.parts.device.guard():
                    self._take(step)
            except Exception as error:
                self.transfer.fail(error)

    def _end(self) -> None:
        """Enqueuing has ended. After a failure, enqueued copies must still be waited for."""
        if self.transfer.error is not None:
            lane = self.lane
            streams = [lane.upload, lane.kernel, lane.copy, self._run.direct_stream]
            self.parts.in_flight.failed(self.transfer, self.transfer.error, streams)
        sources, self._run.sources = self._run.sources, []
        self.parts.in_flight.events.give(sources)
        self._steps = []  # they refer to this, and this to the engine: see `TransferEngine.close`
        self.transfer.enqueued()

    def _end_locked(self) -> None:
        with self.parts.in_flight.lock:
            try:
                with self.parts.device.guard():
                    self._end()
            except Exception as error:
                self.transfer.fail(error)
                self._end()

    def _mark(self, streams: list[Any], layers: Sequence[int] | None) -> None:
        events = []
        for stream in streams:
            events.append(self.parts.in_flight.events.recorded(stream))
            self.transfer.mark(events[-1])
        if layers is not None:
            self.transfer.mark_layers(events, layers)


# ---- One small page: the most common request while decoding

_SLOT_TYPES = (np.dtype(np.int32), np.dtype(np.int64))


def submit_page(
    parts: EngineParts,
    lane: Lane,
    move: Move,
    streams: list[Any],
    after: list[Any],
    when_done: Callable[[bool], None] | None,
) -> DeviceTransfer | None:
    """Do the work of a `Submission` in a third of the time: read or write the page directly. None:
    the transfer is more than one page, or has an error that a `Submission` reports."""
    page = _page_of(move, parts)
    if page is None:
        return None
    in_flight, slots, first, memory = parts.in_flight, move.slots, move.first, parts.memory
    assert isinstance(slots, np.ndarray)
    in_flight.recycle(lane)
    words = JOB_WORDS + 1
    block = in_flight.blocks.take(words + len(slots))
    view, stream = block.view, lane.next_direct()
    view[0], view[1], view[2] = -first, first, first + len(slots)
    view[3] = memory.address + page * memory.page_bytes
    store_slots(slots, block.slots[2 * words : 2 * words + len(slots)])
    nbytes = parts.joined.plan.nbytes * len(slots) // parts.page_tokens
    transfer = DeviceTransfer(in_flight, nbytes, when_done)
    transfer.uses(block, None)
    sources: list[Any] = []
    try:
        lane.transfers.append(transfer)
        transfer.begin()
        for source in streams:
            sources.append(in_flight.events.recorded(source))
            stream.wait_event(sources[-1])
        for event in after:
            stream.wait_event(event)
        _launch(parts, lane, block.host_address, stream)
        transfer.mark(in_flight.events.recorded(stream))
        transfer.enqueued()
    except BaseException as error:
        in_flight.failed(transfer, error, [stream])
        transfer.enqueued()
        if not isinstance(error, Exception):
            raise
    in_flight.events.give(sources)
    return transfer


def _page_of(move: Move, parts: EngineParts) -> int | None:
    pages, slots, first, memory = move.pages, move.slots, move.first, parts.memory
    if type(pages) is not np.ndarray or type(slots) is not np.ndarray or move.skip is not None:
        return None
    if pages.shape != (1,) or slots.ndim != 1 or pages.dtype.kind not in "iu":
        return None
    page, count = int(pages[0]), len(slots)
    if not 0 <= page < getattr(memory, "ready", memory.pages) or type(first) is not int:
        return None
    if not (count and 0 <= first <= parts.page_tokens - count):
        return None
    if slots.dtype not in _SLOT_TYPES or slots.max() >= parts.joined.plan.slots:
        return None
    return page


def _launch(parts: EngineParts, lane: Lane, jobs: int, stream: Any) -> None:
    programs, slots, handle = parts.programs, jobs + (JOB_WORDS + 1) * 8, stream.cuda_stream
    for row_class, launch in parts.joined.launches(False, lane.to_page):
        launch(0, len(row_class.cells), jobs, 1, slots, programs, handle)
