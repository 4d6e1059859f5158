"""Tables of addresses that join a share of a page with an engine's planes, for the copy kernels.

Built once for an engine (or for one transfer, if tensors move), of plain numbers: no device is
needed, so tests run everywhere.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import Cell, Share
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.shm.errors import TransferFailed

# ---- Copiers: many copies between addresses, in one driver call where possible

Addresses = npt.NDArray[np.int64]
CopyLists = list[int]


def merged(
    targets: Addresses, sources: Addresses, sizes: Addresses, *groups: npt.NDArray[Any]
) -> tuple[Addresses, Addresses, Addresses, Addresses]:
    """Merge copies that are contiguous on both sides. Keeps their order.

    Args:
        groups: numbers for each copy; copies that differ in one of them stay apart.

    Returns:
        Targets, sources, sizes, and the first of the copies that each was merged from.
    """
    if len(sizes) < 2:
        return targets, sources, sizes, np.arange(len(sizes))
    breaks = (targets[1:] != targets[:-1] + sizes[:-1]) | (sources[1:] != sources[:-1] + sizes[:-1])
    for group in groups:
        breaks |= group[1:] != group[:-1]
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    if len(starts) == len(sizes):
        return targets, sources, sizes, starts
    return targets[starts], sources[starts], np.add.reduceat(sizes, starts), starts


def cut_at_borders(
    targets: Addresses, sources: Addresses, sizes: Addresses, unit: int
) -> tuple[Addresses, Addresses, Addresses, Addresses]:
    """Cut copies wherever a target crosses a multiple of `unit`. Keeps their order.

    Args:
        sizes: none of them 0.

    Returns:
        Targets, sources, sizes, and the copy that each was cut from.
    """
    first = targets // unit
    counts = (targets + sizes - 1) // unit - first + 1
    owner = np.repeat(np.arange(len(sizes)), counts)
    step = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    border = (first[owner] + step) * unit
    begin = np.maximum(targets[owner], border)
    end = np.minimum(targets[owner] + sizes[owner], border + unit)
    return begin, sources[owner] + begin - targets[owner], end - begin, owner


class Copier(Protocol):
    """Enqueues copies on a stream."""

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]`, in any order.

        Raises:
            TransferFailed: the driver refused.
        """


_TOO_OLD = (
    "cudaErrorCallRequiresNewerDriver",
    "cudaErrorInsufficientDriver",
    "cudaErrorNotSupported",
)
"""What CUDA's runtime answers when the driver under it does not have the call."""


class BatchCopier:
    """Through cuda-bindings: one call for all copies (CUDA 12.8 and newer).

    A driver that is older than the bindings refuses the first such call. From then on this copier
    makes one call for each copy, without a message: only enqueuing takes longer.

    Not thread-safe: an engine calls it under its lock.
    """

    anywhere = True
    """Whether addresses may lie in memory that was never shown to it."""

    def add(self, *tensors: Any) -> None:
        """Register tensors that addresses lie in: not needed here."""

    def __init__(self) -> None:
        """Raises ImportError or AttributeError if the bindings lack the call."""
        from cuda.bindings import runtime

        self._runtime: Any = runtime
        self._copy: Any = runtime.cudaMemcpyAsync
        self._batch: Any = runtime.cudaMemcpyBatchAsync
        self._kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        codes = runtime.cudaError_t
        self._success = codes.cudaSuccess
        self._too_old = {getattr(codes, name) for name in _TOO_OLD if hasattr(codes, name)}
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """See `Copier`."""
        handle = stream.cuda_stream
        if len(sizes) > 1 and self._batch is not None:
            if self._in_one_call(targets, sources, sizes, handle):
                return
            # The driver lacks the call, so no copy is enqueued. A copy that was enqueued would only
            # be made twice, with the same bytes.
            self._batch = None
        for target, source, size in zip(targets, sources, sizes, strict=True):
            error = self._copy(target, source, size, self._kind, handle)[0]
            if error != self._success:
                raise self._refused(f"a copy of {size} bytes", error)

    def _in_one_call(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, handle: int
    ) -> bool:
        """Enqueue all copies; returns False if the driver lacks the call."""
        count = len(sizes)
        try:
            # In C, CUDA 12 has an argument for the index of the failed copy and CUDA 13 has none.
            # Bindings of 12 return it as a second result: arguments and first result are the same
            # in both.
            error = self._batch(targets, sources, sizes, count, self._attributes, [0], 1, handle)[0]
        except RuntimeError as failure:
            # Bindings of 12.8 look up the driver's function themselves, and raise this if it is
            # missing.
            if "cuMemcpyBatchAsync" in str(failure) and "not found" in str(failure):
                return False
            raise
        if error in self._too_old:
            self._runtime.cudaGetLastError()  # else it stays pending for the next caller
            return False
        if error != self._success:
            raise self._refused(f"{count} copies of {sum(sizes)} bytes", error)
        return True

    def _refused(self, what: str, error: Any) -> TransferFailed:
        name = self._runtime.cudaGetErrorName(error)[1]
        advice = "is all host memory registered, and in one registration for each page?"
        if error in self._too_old:
            advice = "it is older than cuda-bindings: update it, or install bindings of its version"
        return TransferFailed(f"the driver refused {what}: {name.decode()}; {advice}")


class TorchCopier:
    """Through torch alone, one call for each copy: for any device that torch calls "cuda"."""

    anywhere = False

    def __init__(self, tensors: list[Any]) -> None:
        """Args:
        tensors: contiguous tensors that addresses lie in; `add` registers more.
        """
        self._tensors: list[tuple[int, int, Any]] = []
        self.add(*tensors)

    def add(self, *tensors: Any) -> None:
        """Register tensors that addresses lie in."""
        import torch

        for tensor in tensors:
            flat = tensor.view(-1).view(torch.uint8)
            self._tensors.append((flat.data_ptr(), flat.data_ptr() + flat.numel(), flat))

    def _find(self, address: int, size: int) -> Any:
        for start, end, tensor in self._tensors:
            if start <= address and address + size <= end:
                return tensor[address - start : address - start + size]
        raise TransferFailed(f"no tensor holds the {size} bytes at address {address:#x}")

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """See `Copier`."""
        import torch

        with torch.cuda.stream(stream):
            for target, source, size in zip(targets, sources, sizes, strict=True):
                self._find(target, size).copy_(self._find(source, size), non_blocking=True)


class HostCopier:
    """In host memory, at once: for tests."""

    anywhere = True

    def add(self, *tensors: Any) -> None:
        """Not needed."""

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """See `Copier`."""
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)


# ---- Plans

Table = npt.NDArray[np.int64]
TABLE_COLUMNS = 3
MOST_SLOTS = (1 << 31) - 1  # slot numbers are int32 on the device
WIDEST = 16  # bytes of a GPU's widest memory access


@dataclass(frozen=True)
class Shape:
    """Compile-time parameters of a kernel: equal for all cells of a class."""

    units: int
    heads: int
    row: int
    """Bytes that lie together on both sides."""
    page_unit: int
    """Bytes between units in a page."""
    block_units: int
    unit_tokens: int
    word: int = WIDEST
    """Bytes of one access, which every address and stride is a multiple of."""
    parts: int = 1
    """Of a page."""
    part_bytes: int = 0
    """0 if there is one part."""

    @property
    def nbytes(self) -> int:
        """Bytes of one cell."""
        return self.units * self.heads * self.row


@dataclass(frozen=True)
class Strides:
    """Launch-time parameters of a kernel: may change as tensors grow."""

    block: int
    unit: int
    head: int


@dataclass(frozen=True)
class RowClass:
    """Cells that one launch can copy: same shape and strides, different addresses."""

    shape: Shape
    strides: Strides
    cells: Table
    """Positions in `Plan.cells`, ascending."""
    table: Table
    """[n, TABLE_COLUMNS]: device address of slot 0; offset in a page; offset when packed."""

    def part(self, first: int, end: int) -> slice:
        """Rows of `table` of the cells `first` to `end` - 1 of the plan."""
        low, high = np.searchsorted(self.cells, (first, end))
        return slice(int(low), int(high))


class Plan:
    """A share of a page and the planes that it is copied from and to."""

    def __init__(self, share: Share, planes: DevicePlanes, address: int, page_bytes: int) -> None:
        """Join them.

        Args:
            address: of the pool.
            page_bytes: between its pages; see `check_sides`.

        Raises:
            ConfigError: planes are missing.
        """
        geometry = share.geometry
        self.share = share
        self.host_page_bytes = page_bytes
        """Bytes of a page of the pool, which holds one part."""
        self.cells = share.cells
        self.nbytes = share.nbytes
        """Bytes of a page that move."""
        cell_planes = [planes.find(geometry, cell) for cell in self.cells]
        sizes = [cell.nbytes for cell in self.cells]
        self.packed: Table = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        """Where each cell begins if cells stand one after the other, and the end of the last."""
        self.slots = min(
            (
                plane.slots * cell.plane.unit_tokens
                for plane, cell in zip(cell_planes, self.cells, strict=True)
            ),
            default=MOST_SLOTS,
        )
        """Slots of tokens that every plane has."""
        self.contiguous = all(cell.contiguous for cell in self.cells)
        """Whether pages can be moved by whole ranges, staged in between."""
        self.classes = self._classes(
            cell_planes, math.gcd(WIDEST, address, page_bytes, *self.packed.tolist())
        )
        self.runnable = self.contiguous and all(
            self._runs_together(row_class) for row_class in self.classes
        )
        """Whether neighbouring slots of one block lie in a page as they do on the device."""
        self.mean_run = self.nbytes // max(1, self._runs())
        """Mean bytes of a copy without a kernel, at most."""

    def _classes(self, planes: list[DevicePlane], word: int) -> list[RowClass]:
        kinds: dict[tuple[Shape, Strides], list[tuple[int, int]]] = {}
        for number, (cell, plane) in enumerate(zip(self.cells, planes, strict=True)):
            shape, strides = _shape(cell, plane)
            head = cell.own_head * plane.head_stride
            address = plane.address + cell.row * plane.row_stride + head
            kinds.setdefault((shape, strides), []).append((number, address))
        return [
            self._class(shape, strides, members, word)
            for (shape, strides), members in kinds.items()
        ]

    def _class(
        self, shape: Shape, strides: Strides, members: list[tuple[int, int]], word: int
    ) -> RowClass:
        table = np.array(
            [
                (address, self.cells[number].offset, self.packed[number])
                for number, address in members
            ],
            np.int64,
        )
        numbers = [shape.row, shape.page_unit, *strides.__dict__.values()]
        word = math.gcd(word, *numbers, *(int(value) for value in table.ravel()))
        geometry = self.share.geometry
        shape = replace(shape, word=word)
        if geometry.parts > 1:
            shape = replace(shape, parts=geometry.parts, part_bytes=geometry.part_bytes)
        cells = np.array([number for number, _ in members], np.int64)
        return RowClass(shape, strides, cells, table)

    def _runs(self) -> int:
        """Number of copies for one page with neighbouring slots, with cells that are contiguous on
        both sides merged."""
        tables = [row_class.table for row_class in self.classes]
        if not tables:
            return 0
        table = np.concatenate(tables)
        table = table[np.argsort(table[:, 1])]
        sizes = np.array([cell.nbytes for cell in self.cells], np.int64)
        return len(merged(table[:, 1], table[:, 0], sizes)[2])

    @staticmethod
    def _runs_together(row_class: RowClass) -> bool:
        shape, strides = row_class.shape, row_class.strides
        row = shape.heads * shape.row
        return shape.heads == 1 and (shape.units == 1 or strides.unit == row == shape.page_unit)

    def ranges(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """(offset in the page, offset when packed, length) of the contiguous pieces of some cells,
        whatever parts they are in."""
        pieces: list[list[int]] = []
        for number in range(first, end):
            cell, packed = self.cells[number], int(self.packed[number])
            if pieces and pieces[-1][0] + pieces[-1][2] == cell.offset:
                pieces[-1][2] += cell.nbytes
            else:
                pieces.append([cell.offset, packed, cell.nbytes])
        return [(offset, packed, length) for offset, packed, length in pieces]

    def cuts(self, limit: int, cells: range | None = None) -> list[tuple[int, int]]:
        """(first, end) of runs of cells, each of at most `limit` bytes packed, or of one cell."""
        return list(self._cuts(limit, range(len(self.cells)) if cells is None else cells))

    def _cuts(self, limit: int, cells: range) -> Iterator[tuple[int, int]]:
        first = cells.start
        while first < cells.stop:
            room = int(self.packed[first]) + limit
            end = int(np.searchsorted(self.packed, room, side="right")) - 1
            end = min(max(end, first + 1), cells.stop)
            yield first, end
            first = end


def _shape(cell: Cell, plane: DevicePlane) -> tuple[Shape, Strides]:
    """A cell's rows, merged if heads are contiguous on the device as in the page."""
    block_units, block, unit = plane.spacing
    heads, row, head = cell.heads, cell.plane.row_bytes, plane.head_stride
    if heads == 1 or head == row:
        heads, row, head = 1, heads * row, 0
    shape = Shape(cell.units, heads, row, cell.unit_stride, block_units, cell.plane.unit_tokens)
    return shape, Strides(block, unit, head)
