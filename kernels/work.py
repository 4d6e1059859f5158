"""What a device transfer consists of: chunks, and the index rows that kernels find them by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightcache.kernels.copies import Addresses, merged
from lightcache.kernels.moves import Batch
from lightcache.kernels.rows import Plan
from lightcache.kernels.staging import Ring

JOB_WORDS = 4  # page address, start in slots, first token, end token


@dataclass(frozen=True)
class Chunk:
    """Some cells of some pages, which pass through one slot of the ring."""

    cells: tuple[int, int]
    pages: tuple[int, int]
    slot: int
    address: int
    """Of the slot."""


def jobs(batch: Batch, pages: slice, addresses: Addresses) -> npt.NDArray[np.int64]:
    """Index rows of some pages of a batch, int64 of shape (n, JOB_WORDS)."""
    rows = np.empty((len(addresses), JOB_WORDS), np.int64)
    rows[:, 0] = addresses
    rows[:, 1] = batch.start[pages]
    rows[:, 2] = batch.first[pages]
    rows[:, 3] = batch.end[pages]
    return rows


def chunks(plan: Plan, pages: int, ring: Ring) -> list[Chunk]:
    """Cut pages so that each chunk fits a slot: several pages to a slot, or a page to several."""
    if plan.nbytes <= ring.slot_bytes:
        each = ring.slot_bytes // plan.nbytes
        cells = (0, len(plan.cells))
        return [
            Chunk(cells, (at, min(pages, at + each)), *ring.take()) for at in range(0, pages, each)
        ]
    cuts = plan.cuts(ring.slot_bytes)
    return [Chunk(cells, (page, page + 1), *ring.take()) for page in range(pages) for cells in cuts]


def staged_addresses(plan: Plan, chunk: Chunk) -> Addresses:
    """For each page of a chunk: where its cell 0 would be, were it packed in the slot as well."""
    first, end = (int(plan.packed[cell]) for cell in chunk.cells)
    number = chunk.pages[1] - chunk.pages[0]
    return chunk.address - first + np.arange(number, dtype=np.int64) * (end - first)


def whole_copies(
    plan: Plan, chunk: Chunk, staged: Addresses, pages: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """(page addresses, staged addresses, sizes) of the copies between a slot and its pages.

    Args:
        staged: of `staged_addresses`.
        pages: addresses of the pages in the pool.
    """
    pieces = np.array(plan.ranges(*chunk.cells), np.int64)
    host = (pages[:, None] + pieces[:, 0]).ravel()
    slot = (staged[:, None] + pieces[:, 1]).ravel()
    return merged(host, slot, np.tile(pieces[:, 2], len(pages)))


def whole_pages(batch: Batch, slots_missing: bool) -> npt.NDArray[np.bool_]:
    """Which pages of a batch are given with a slot for every token."""
    whole = (batch.first == 0) & (batch.end == batch.page_tokens)
    if slots_missing and whole.any():
        tokens = np.arange(batch.page_tokens)
        found = batch.slots[batch.start[whole][:, None] + tokens]
        whole[np.flatnonzero(whole)[(found < 0).any(axis=1)]] = False
    result: npt.NDArray[np.bool_] = whole
    return result


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

    Whole pages only (`whole_pages`).
    """
    if not plan.runnable:
        return None
    tokens = batch.page_tokens
    slots = batch.slots[batch.start[:, None] + np.arange(tokens)].astype(np.int64)
    host, device, sizes = [], [], []
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
    return _in_order(np.concatenate(host), np.concatenate(device), np.concatenate(sizes))


def _in_order(
    host: Addresses, device: Addresses, sizes: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Merged as far as they touch. Pages keep their order, cells of a page are sorted."""
    order = np.argsort(host, kind="stable")
    return merged(host[order], device[order], sizes[order])
