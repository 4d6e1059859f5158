"""Dividing a transfer: index rows, chunks that pass through the ring, copies of whole ranges.

Everything for all pages at once, in numpy: what is left for each chunk is a handful of calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.kernels.copies import Addresses, CopyLists, merged
from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.moves import Batch
from lightcache.kernels.rows import Plan
from lightcache.kernels.staging import Ring

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
