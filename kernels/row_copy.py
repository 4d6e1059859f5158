"""The row-copy kernel: rows of bytes between device planes and pages, wherever they lie.

One kernel serves gathering into staging pages, scattering from them, and reading or writing pinned
host memory directly: only the addresses differ. Inspired by the paged-copy kernels of LightLLM and
vLLM; addresses come from tables, so that layers, planes and pages need no common base.
"""

from __future__ import annotations

import triton
import triton.language as tl

# One compiled kernel serves all numbers and addresses: it is launched without asking again.
_NUMBERS = ("n_cells", "n_jobs", "block_stride", "unit_stride", "head_stride")
_TABLES = ("cells", "jobs", "slots")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TABLES)
def copy_rows(
    cells,  # int64 [n_cells, 3]: device address of slot 0; offset in a page; offset when packed
    # int64 [n_jobs, 3 + PARTS]: start in slots, first token, end token, address of each part or 0
    jobs,
    slots,  # int32: token t of a job has slots[start + t]; a negative one is left out
    n_cells,
    n_jobs,
    block_stride,  # bytes between blocks of slots on the device
    unit_stride,  # bytes between slots of a block
    head_stride,  # bytes between heads of a slot
    UNITS: tl.constexpr,  # of a page
    HEADS: tl.constexpr,
    ROW: tl.constexpr,  # bytes of a row
    PAGE_UNIT: tl.constexpr,  # bytes between units in a page
    BLOCK_UNITS: tl.constexpr,  # slots of a block on the device
    UNIT_TOKENS: tl.constexpr,  # a unit takes the slot of its first token
    WORD: tl.constexpr,  # bytes of an access: 16, 8, 4, 2, 1
    TILE: tl.constexpr,  # accesses of a program at a time, a power of two
    PACKED: tl.constexpr,  # which offset of a cell counts
    TO_PAGE: tl.constexpr,
    PARTS: tl.constexpr,  # of a page
    PART_BYTES: tl.constexpr,  # a multiple of WORD, so that no access crosses a border
):
    NARROW: tl.constexpr = tl.int16 if WORD == 2 else tl.int8
    ELEMENT: tl.constexpr = tl.int64 if WORD >= 8 else (tl.int32 if WORD == 4 else NARROW)
    LANES: tl.constexpr = 2 if WORD == 16 else 1
    ROW_WORDS: tl.constexpr = ROW // WORD
    WORDS: tl.constexpr = UNITS * HEADS * ROW_WORDS
    # Tiles run over the cells of a job, so that small cells fill them as well as large ones.
    words = n_cells.to(tl.int64) * WORDS
    tiles = ((words + TILE - 1) // TILE).to(tl.int32)
    lanes = tl.arange(0, LANES)[None, :]
    steps = tl.arange(0, TILE)
    for item in range(tl.program_id(0), n_jobs * tiles, tl.num_programs(0)):
        job = jobs + (item // tiles).to(tl.int64) * (3 + PARTS)
        start = tl.load(job)
        first = tl.load(job + 1)
        end = tl.load(job + 2)
        at = (item % tiles).to(tl.int64) * TILE + steps
        cell = (at // WORDS).to(tl.int32)
        word = (at % WORDS).to(tl.int32)
        row = word // ROW_WORDS
        byte = (word % ROW_WORDS) * WORD
        unit = row // HEADS
        head = row % HEADS
        token = unit * UNIT_TOKENS
        wanted = (cell < n_cells) & (token >= first) & (token < end)
        base = tl.load(cells + cell * 3, mask=wanted, other=0)
        offset = tl.load(cells + cell * 3 + (2 if PACKED else 1), mask=wanted, other=0)
        slot = tl.load(slots + start + token, mask=wanted, other=-1)
        wanted = wanted & (slot >= 0)
        slot = slot // UNIT_TOKENS
        device = (
            base
            + (slot // BLOCK_UNITS).to(tl.int64) * block_stride
            + (slot % BLOCK_UNITS).to(tl.int64) * unit_stride
            + head.to(tl.int64) * head_stride
            + byte
        )
        host = offset + unit.to(tl.int64) * PAGE_UNIT + head * ROW + byte
        if PARTS == 1:
            host += tl.load(job + 3)
        else:
            part = tl.load(job + 3 + host // PART_BYTES, mask=wanted, other=0)
            wanted = wanted & (part != 0)
            host = part + host % PART_BYTES
        # What the compiler cannot see behind a table of addresses: each pair is one 16-byte access.
        device = tl.multiple_of(device.to(tl.pointer_type(ELEMENT)), WORD)[:, None] + lanes
        host = tl.multiple_of(host.to(tl.pointer_type(ELEMENT)), WORD)[:, None] + lanes
        if TO_PAGE:
            tl.store(host, tl.load(device, mask=wanted[:, None]), mask=wanted[:, None])
        else:
            tl.store(device, tl.load(host, mask=wanted[:, None]), mask=wanted[:, None])
