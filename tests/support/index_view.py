"""What stands in an index's segment, read beside the core: records, pin rows, queue and clock.

For one process that is at rest; nothing here is consistent while somebody else works.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import PageIndex, layout
from lightcache.layout import PageState
from lightcache.page_index import geometry
from lightcache.shm import layout as shm_layout


@dataclass(frozen=True)
class PageView:
    """One page record, taken apart."""

    key: tuple[int, int]
    state: PageState
    namespace: int
    gen: int
    tick: int
    parent: int
    parent_gen: int
    children: int
    kept: bool
    independent: bool
    group: int
    hits: int


class IndexView:
    """Reads, and where a test plays a crash or damage, writes, the raw words of an index."""

    def __init__(self, index: PageIndex) -> None:
        self._index = index
        self.geometry = geometry(index.pages)

    def _read(self, offset: int, kind: type[Any]) -> Any:
        at = self._index.segment.address + offset
        return kind.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(kind)))

    def root(self) -> layout.RootRecord:
        """The index's totals."""
        found: layout.RootRecord = self._read(self.geometry.root, layout.RootRecord)
        return found

    def raw_root(self) -> layout.RootRecord:
        """The root's record, in place: what is stored to its fields is stored there."""
        return layout.RootRecord.from_address(self._index.segment.address + self.geometry.root)

    @property
    def clock(self) -> int:
        """The last tick given out."""
        return int(self.root().clock)

    @property
    def queue_now(self) -> int:
        """The eviction queue's present."""
        low, high = self.root().now
        return int(high) << 32 | int(low)

    def pages(self) -> list[PageView]:
        """All page records."""
        records = self._read(self.geometry.page, layout.PageRecord * self._index.pages)
        return [
            PageView(
                key=(r.lo, r.hi),
                state=PageState(r.word & layout.STATE_MASK),
                namespace=r.word >> layout.NAMESPACE_SHIFT & 0xFF,
                gen=r.gen,
                tick=r.used >> 16,
                parent=r.parent,
                parent_gen=r.parent_gen,
                children=r.children,
                kept=bool(r.word & layout.KEPT),
                independent=bool(r.word & layout.INDEPENDENT),
                group=r.word >> layout.GROUP_SHIFT,
                hits=r.used & 0xFFFF,
            )
            for r in records
        ]

    def goes_first(self) -> set[tuple[int, int]]:
        """Keys of the ready pages that count as used before all others: what `evict_first` has
        changed and no process has used since, and what eviction has come to otherwise."""
        now = self.queue_now
        return {p.key for p in self.pages() if p.state is PageState.READY and p.tick <= now}

    def rows(self) -> npt.NDArray[np.uint16]:
        """Pin counts, one row for each slot: shape (64, pages)."""
        stride = self.geometry.row_stride
        at = self._index.segment.address + self.geometry.rows
        raw = ctypes.string_at(at, shm_layout.SLOTS * stride * 2)
        return np.frombuffer(raw, np.uint16).reshape(-1, stride)[:, : self._index.pages]

    def client(self, slot: int) -> Any:
        """The client record of a slot, in place: what is stored to its fields is stored there."""
        size = ctypes.sizeof(shm_layout.ClientRecord)
        at = self._index.segment.address + shm_layout.CLIENTS_OFFSET + slot * size
        return shm_layout.ClientRecord.from_address(at)
