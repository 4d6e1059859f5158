"""Other ways of doing a match and a release: in plain Python, as the ancestor did, over LMDB."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import tempfile
from collections import OrderedDict
from typing import Any

import numpy as np

from lightcache._arguments import Keys
from lightcache_bench import _baseline

NIL = 0xFFFFFFFF


def shuffled(pages: int) -> list[int]:
    """Free pages in the order in which an index that has been in use for long hands them out."""
    order: list[int] = np.random.default_rng(4).permutation(pages).tolist()
    return order


class PlainIndex:
    """One process, no sharing: a dict, reference counts, an OrderedDict as LRU list. Keys are
    Python integers that were made beforehand, the dict's best case."""

    def __init__(self, prompts: list[Keys]) -> None:
        self.prompts = [[int(lo) | int(hi) << 64 for lo, hi in keys.tolist()] for keys in prompts]
        self._page: dict[int, int] = {}
        self._used: OrderedDict[int, None] = OrderedDict()
        pages = iter(shuffled(sum(map(len, prompts))))
        for keys in self.prompts:
            for key in keys:
                page = self._page[key] = next(pages)
                self._used[page] = None
        self._count = [0] * len(self._page)

    def match_and_release(self, prompt: int) -> None:
        held = []
        for key in self.prompts[prompt]:
            page = self._page.get(key)
            if page is None:
                break
            self._count[page] += 1
            self._used.move_to_end(page)
            held.append(page)
        for page in held:
            self._count[page] -= 1


class _Record(ctypes.Structure):
    _fields_ = [
        ("lo", ctypes.c_uint64),
        ("hi", ctypes.c_uint64),
        ("next", ctypes.c_uint32),
        ("older", ctypes.c_uint32),
        ("newer", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
    ]


class ChainedIndex:
    """Records of ctypes in shared memory: a chained hash table, a doubly linked list in order of
    use, one lock word taken by compare-and-swap. All in Python but the swap itself."""

    def __init__(self, prompts: list[Keys]) -> None:
        self._swap = _baseline.library().lcb_compare_and_swap
        pages = sum(len(keys) for keys in prompts)
        self._mask = (1 << (2 * pages - 1).bit_length()) - 1
        size = ctypes.sizeof(_Record) * (pages + 1) + 4 * (self._mask + 1) + 64
        memory = mmap.mmap(-1, size)
        self._records = (_Record * (pages + 1)).from_buffer(memory)  # the last: the list's head
        at = ctypes.sizeof(self._records)
        self._heads = (ctypes.c_uint32 * (self._mask + 1)).from_buffer(memory, at)
        at += ctypes.sizeof(self._heads)
        self._lock = ctypes.addressof(ctypes.c_uint32.from_buffer(memory, at))
        ctypes.memset(self._heads, 0xFF, ctypes.sizeof(self._heads))
        self._end = pages
        self._records[pages].older = self._records[pages].newer = pages
        self._prompts = [keys.tolist() for keys in prompts]
        free = iter(shuffled(pages))
        for keys in self._prompts:
            for lo, hi in keys:
                self._insert(next(free), lo, hi)

    def _insert(self, page: int, lo: int, hi: int) -> None:
        record = self._records[page]
        record.lo, record.hi = lo, hi
        record.next = self._heads[lo & self._mask]
        self._heads[lo & self._mask] = page
        self._append(page, record)

    def _append(self, page: int, record: _Record) -> None:
        head = self._records[self._end]
        last = head.older
        record.older, record.newer = last, self._end
        self._records[last].newer = page
        head.older = page

    def _find(self, lo: int, hi: int) -> int:
        page = self._heads[lo & self._mask]
        while page != NIL:
            record = self._records[page]
            if record.lo == lo and record.hi == hi:
                break
            page = record.next
        return int(page)

    def match_and_release(self, prompt: int) -> None:
        held = []
        while not self._swap(self._lock, 0, 1):
            pass
        for lo, hi in self._prompts[prompt]:
            page = self._find(lo, hi)
            if page == NIL:
                break
            record = self._records[page]
            record.count += 1
            self._records[record.older].newer = record.newer
            self._records[record.newer].older = record.older
            self._append(page, record)
            held.append(page)
        self._swap(self._lock, 1, 0)
        while not self._swap(self._lock, 0, 1):
            pass
        for page in held:
            self._records[page].count -= 1
        self._swap(self._lock, 1, 0)


class LmdbIndex:
    """LMDB with synchronous writes off: looks a prompt up in one read transaction. It neither
    pins nor remembers use: what it would add to that is not counted."""

    def __init__(self, prompts: list[Keys]) -> None:
        import lmdb

        self._folder = tempfile.TemporaryDirectory()
        self._env: Any = lmdb.open(self._folder.name, map_size=1 << 30, sync=False)
        self._prompts = [[key.tobytes() for key in keys] for keys in prompts]
        with self._env.begin(write=True) as writing:
            for i, keys in enumerate(self._prompts):
                for k, key in enumerate(keys):
                    writing.put(key, (i * len(keys) + k).to_bytes(4, "little"))

    def match_and_release(self, prompt: int) -> None:
        with self._env.begin() as reading:
            for key in self._prompts[prompt]:
                if reading.get(key) is None:
                    break

    def close(self) -> None:
        self._env.close()
        self._folder.cleanup()


def have_lmdb() -> bool:
    return importlib.util.find_spec("lmdb") is not None
