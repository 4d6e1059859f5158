"""Compiling the row-copy kernel once for each shape, and launching it cheaply.

Triton's own call looks at every argument again (27 us on an H200's host, where launching what it
compiled takes 5 to 13); a transfer of one small page should be over in 50.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightcache.kernels.row_copy import copy_rows
from lightcache.kernels.rows import RowClass, Shape

if TYPE_CHECKING:
    import torch

TILE = 1024  # 16 KiB of 16-byte accesses for 256 threads: four in flight for each
WARPS = 8
_LARGE = 1 << 40  # makes Triton give a number 64 bits


def constants(shape: Shape, packed: bool, to_page: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    words = shape.nbytes // shape.word
    return {
        "UNITS": shape.units,
        "HEADS": shape.heads,
        "ROW": shape.row,
        "PAGE_UNIT": shape.page_unit,
        "BLOCK_UNITS": shape.block_units,
        "UNIT_TOKENS": shape.unit_tokens,
        "WORD": shape.word,
        "TILE": min(TILE, max(128, 1 << (words - 1).bit_length())),
        "PACKED": packed,
        "TO_PAGE": to_page,
    }


class Tables:
    """The tables of a plan's classes where kernels can read them."""

    def __init__(self, classes: list[RowClass], device: str) -> None:
        """Copies them to the device; blocks until they are there."""
        import torch

        self.tables = [torch.from_numpy(each.table).to(device) for each in classes]
        self.addresses = [int(table.data_ptr()) for table in self.tables]


class Launcher:
    """Launches compiled kernels of one device with plain addresses."""

    def __init__(self) -> None:
        """Nothing is compiled yet; each shape is when it is first launched, or by `compiled`."""
        self._kernels: dict[tuple[Shape, bool, bool], tuple[Any, tuple[Any, ...]]] = {}

    def compiled(self, shape: Shape, packed: bool, to_page: bool) -> tuple[Any, tuple[Any, ...]]:
        """The kernel for a shape and its constants. Compiles at the first call: about a second,
        or milliseconds where Triton has it on disk."""
        found = self._kernels.get((shape, packed, to_page))
        if found is None:
            import torch

            values = constants(shape, packed, to_page)
            kernel = copy_rows.warmup(
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
            found = kernel, tuple(values.values())
            self._kernels[shape, packed, to_page] = found
        return found

    def __call__(
        self,
        each: RowClass,
        tables: tuple[Tables, int],
        part: slice,
        jobs: tuple[torch.Tensor, int, int],
        slots: tuple[torch.Tensor, int],
        packed: bool,
        to_page: bool,
        programs: int,
        stream: Any,
    ) -> None:
        """Launch on a stream; the device must be the current one.

        Args:
            tables: all tables, and which of them.
            part: its rows to copy.
            jobs: int64 buffer, the first word, number of jobs.
            slots: int64 buffer that holds int32 slots from this word on.
            programs: how many at most.
        """
        kernel, values = self.compiled(each.shape, packed, to_page)
        cells = part.stop - part.start
        tiles = -(-(each.shape.nbytes // each.shape.word) // values[7])
        kernel[(min(programs, jobs[2] * cells * tiles), 1, 1)](
            tables[0].addresses[tables[1]] + part.start * 24,
            jobs[0].data_ptr() + jobs[1] * 8,
            slots[0].data_ptr() + slots[1] * 8,
            cells,
            jobs[2],
            each.strides.block,
            each.strides.unit,
            each.strides.head,
            *values,
            stream=stream.cuda_stream,
        )


class InterpretedLauncher(Launcher):
    """The same through Triton's interpreter, in the memory of the host: for tests."""

    def compiled(self, shape: Shape, packed: bool, to_page: bool) -> tuple[Any, tuple[Any, ...]]:
        """Nothing to compile."""
        return None, ()

    def __call__(
        self,
        each: RowClass,
        tables: tuple[Tables, int],
        part: slice,
        jobs: tuple[torch.Tensor, int, int],
        slots: tuple[torch.Tensor, int],
        packed: bool,
        to_page: bool,
        programs: int,
        stream: Any,
    ) -> None:
        """As `Launcher`; over when it returns."""
        import torch

        copy_rows[(min(programs, 3),)](
            tables[0].tables[tables[1]][part],
            jobs[0][jobs[1] :],
            slots[0][slots[1] :].view(torch.int32),
            part.stop - part.start,
            jobs[2],
            each.strides.block,
            each.strides.unit,
            each.strides.head,
            **constants(each.shape, packed, to_page),
        )
