"""Compiling the row-copy kernel once for each shape, and launching it cheaply.

Triton's own call looks at every argument again: 27 us on the host of an H200, where launching what
it compiled takes half of that, and a transfer of one small page should be over in 50. So the
compiled kernel is launched the way Triton's call does in the end, with plain addresses.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache.kernels.row_copy import copy_rows
from lightcache.kernels.rows import TABLE_COLUMNS, RowClass, Shape

if TYPE_CHECKING:
    import torch

TILE = 1024  # 16 KiB of 16-byte accesses for 256 threads: four in flight for each
WARPS = 8
_LARGE = 1 << 40  # makes Triton give a number 64 bits
JOB_WORDS = 3  # start in slots, first token, end token; the addresses of the page's parts follow


def constants(shape: Shape, packed: bool, to_page: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    parts, part_bytes = (1, 0) if packed else (shape.parts, shape.part_bytes)
    return {
        "UNITS": shape.units,
        "HEADS": shape.heads,
        "ROW": shape.row,
        "PAGE_UNIT": shape.page_unit,
        "BLOCK_UNITS": shape.block_units,
        "UNIT_TOKENS": shape.unit_tokens,
        "WORD": shape.word,
        "TILE": TILE,
        "PACKED": packed,
        "TO_PAGE": to_page,
        "PARTS": parts,
        "PART_BYTES": part_bytes,
    }


class Launch:
    """One compiled kernel and the cells that it copies."""

    def __init__(self, kernel: Any, values: tuple[Any, ...], each: RowClass, table: Any) -> None:
        """For `Launcher`."""
        self._run, self._function = kernel.run, kernel.function
        self._metadata = kernel.packed_metadata
        self._keep = kernel, table
        self._table = int(table.data_ptr())
        strides = each.strides
        self._tail = (strides.block, strides.unit, strides.head, *values)
        self._words = each.shape.nbytes // each.shape.word

    def __call__(
        self, first: int, cells: int, jobs: int, n_jobs: int, slots: int, programs: int, stream: int
    ) -> None:
        """Launch. The device must be the current one.

        Args:
            first, cells: which of its cells.
            jobs, n_jobs: address of index rows, and how many.
            slots: address of int32 slots.
            programs: how many at most.
            stream: the driver's handle of a stream.
        """
        tiles = -(-cells * self._words // TILE) * n_jobs
        # No metadata and no hooks: what profilers attach to Triton's own call.
        self._run(
            min(programs, tiles),
            1,
            1,
            stream,
            self._function,
            self._metadata,
            None,
            None,
            None,
            self._table + first * 8 * TABLE_COLUMNS,
            jobs,
            slots,
            cells,
            n_jobs,
            *self._tail,
        )


class Launcher:
    """Compiles for one device. Each shape when it is first asked for: about a second, or
    milliseconds where Triton has it on disk."""

    def __init__(self) -> None:
        """Nothing is compiled yet."""
        self._kernels: dict[tuple[Shape, bool, bool], Any] = {}

    def bind(self, row_class: RowClass, table: torch.Tensor, packed: bool, to_page: bool) -> Launch:
        """A launch for the cells of a class; the device must be the current one.

        Args:
            table: `each.table` on the device.
            packed: whether pages are staged, cells one after the other.
            to_page: the direction.
        """
        values = constants(row_class.shape, packed, to_page)
        kernel = self._kernels.get((row_class.shape, packed, to_page))
        if kernel is None:
            kernel = self._kernels[row_class.shape, packed, to_page] = _compiled(values)
        return Launch(kernel, tuple(values.values()), row_class, table)


def _compiled(values: dict[str, Any]) -> Any:
    import torch

    return copy_rows.warmup(
        torch.int64,
        torch.int64,
        torch.int32,
        2,
        2,
        _LARGE,
        _LARGE,
        _LARGE,
        **values,
        num_warps=WARPS,
        grid=(1,),
    )


class InterpretedLaunch:
    """The same through Triton's interpreter, in the memory of the host: for tests."""

    def __init__(self, each: RowClass, table: torch.Tensor, packed: bool, to_page: bool) -> None:
        """See `Launcher.bind`."""
        self._table, self._strides = table, each.strides
        self._values = constants(each.shape, packed, to_page)

    def __call__(
        self, first: int, cells: int, jobs: int, n_jobs: int, slots: int, programs: int, stream: int
    ) -> None:
        """See `Launch`. Over when it returns."""
        width = JOB_WORDS + self._values["PARTS"]
        rows = _words_at(jobs, n_jobs * width)
        tokens = int((rows[0::width] + rows[2::width]).max())
        copy_rows[(min(programs, 3),)](
            self._table[first:],
            rows,
            _words_at(slots, (tokens + 1) // 2).view(dtype=_int32()),
            cells,
            n_jobs,
            self._strides.block,
            self._strides.unit,
            self._strides.head,
            **self._values,
        )


class InterpretedLauncher:
    """Makes them."""

    def bind(
        self, each: RowClass, table: torch.Tensor, packed: bool, to_page: bool
    ) -> InterpretedLaunch:
        """See `Launcher.bind`."""
        return InterpretedLaunch(each, table, packed, to_page)


def _words_at(address: int, count: int) -> torch.Tensor:
    import torch

    words: Any = (ctypes.c_int64 * count).from_address(address)
    return torch.from_numpy(np.frombuffer(words, np.int64))


def _int32() -> Any:
    import torch

    return torch.int32
