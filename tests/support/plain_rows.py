"""What the row-copy kernel does (kernels/row_copy.py), in numpy: a hundredth of the time that
Triton's interpreter takes. For tests of all but the kernel: test_transfer_engine.py,
test_pages_in_parts.py and test_transfer_engine_layouts.py interpret the kernel itself."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lightcache.kernels.launch import JOB_WORDS, constants
from lightcache.kernels.rows import TABLE_COLUMNS, RowClass

_FIRST = 4096  # the lowest address that a process may have
# Every address of this process. Accesses of 16 bytes need a type that large.
_MEMORY = (ctypes.c_uint8 * ((1 << 47) - 2 * _FIRST)).from_address(_FIRST)
_BYTES = np.frombuffer(_MEMORY, np.uint8)
_TYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def _read(address: int, count: int, kind: Any) -> Any:
    size = np.dtype(kind).itemsize
    return _BYTES[address - _FIRST : address - _FIRST + count * size].view(kind)


class PlainLaunch:
    """See `lightcache.kernels.launch.Launch`; it has ended when it returns."""

    def __init__(self, each: RowClass, table: Any, packed: bool, to_page: bool) -> None:
        self._cells, self._strides = table.numpy().reshape(-1, TABLE_COLUMNS), each.strides
        self._shape = constants(each.shape, packed, to_page)

    def __call__(
        self, first: int, cells: int, jobs: int, n_jobs: int, slots: int, programs: int, stream: int
    ) -> None:
        shape, strides = self._shape, self._strides
        word, heads, row = shape["WORD"], shape["HEADS"], shape["ROW"]
        unit, head, byte = (
            axis.reshape(-1) for axis in np.indices((shape["UNITS"], heads, row // word))
        )
        byte, token = byte * word, unit * shape["UNIT_TOKENS"]
        within = unit * shape["PAGE_UNIT"] + head * row + byte
        width = JOB_WORDS + shape["PARTS"]
        memory = _BYTES[: len(_BYTES) // word * word].view(_TYPES[word])
        for start, begin, end, *parts in _read(jobs, n_jobs * width, np.int64).reshape(-1, width):
            wanted = (token >= begin) & (token < end)
            if not wanted.any():
                continue
            slot = _read(slots + 4 * int(start), int(token[wanted].max()) + 1, np.int32)
            slot = np.where(wanted, slot[np.where(wanted, token, 0)], -1).astype(np.int64)
            wanted &= slot >= 0
            block, among = np.divmod(slot // shape["UNIT_TOKENS"], shape["BLOCK_UNITS"])
            there = block * strides.block + among * strides.unit + head * strides.head + byte
            for base, offset, packed_offset in self._cells[first : first + cells].tolist():
                device = base + there
                host = (packed_offset if shape["PACKED"] else offset) + within
                if shape["PARTS"] == 1:
                    page, copied = host + parts[0], wanted
                else:
                    part = np.array(parts)[np.where(wanted, host // shape["PART_BYTES"], 0)]
                    page, copied = part + host % shape["PART_BYTES"], wanted & (part != 0)
                device, page = device[copied] - _FIRST, page[copied] - _FIRST
                assert not ((device | page) % word).any(), "an access that is not aligned"
                to, source = (page, device) if shape["TO_PAGE"] else (device, page)
                memory[to // word] = memory[source // word]


class PlainLauncher:
    """See `lightcache.kernels.launch.Launcher`."""

    def bind(self, each: RowClass, table: Any, packed: bool, to_page: bool) -> PlainLaunch:
        return PlainLaunch(each, table, packed, to_page)
