"""HostPool: the pages themselves, in a shared memory object of their own beside the index.

The object has its full length from the beginning, and no memory: that comes in chunks, behind a
mark in the index (`grown`), so that the first pages can be used at once and a full /dev/shm is an
error instead of a signal. Whoever is attached for writing carries on for one that died.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache import _arguments
from lightcache.errors import InUse, LightcacheError, NoSpace
from lightcache.placement import Numa, advised_node, check_numa
from lightcache.pool_object import opened, room_of
from lightcache.shm import Segment, ofd
from lightcache.shm import _native as shm_native
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import Code, check, system_errno
from lightcache.shm.folders import FolderKind
from lightcache.shm.objects import ForkWord
from lightcache.sizes import format_size

if TYPE_CHECKING:
    import torch

    from lightcache.page_index import PageIndex

CHUNK_BYTES = 64 << 20  # about 30 ms of zeroing: short enough to take turns with others
MAX_GROWTH = 1 << 62  # more than there is left means all of it
MAX_THREADS = 256
Bytes = npt.NDArray[np.uint8]


class HostPool:
    """An attach of this process to the pages of a cache: `pool[page]` is one page's bytes.

    Hold a page (`match`, `reserve`, `adopt`) while you touch it. Views keep the pool mapped: drop
    them before `close`.
    """

    def __init__(
        self,
        index: PageIndex,
        page_bytes: int,
        *,
        huge_pages: bool = False,
        numa: Numa = None,
    ) -> None:
        """Map the pool of an attached index.

        Args:
            index: whose pages these are; read-only if it is.
            page_bytes: of one page, any size.
            huge_pages: ask for transparent huge pages.
            numa: where memory that it gets from now on should be: "interleave" over all memory
                nodes; on one as long as there is room, by its number or as that of a GPU
                ("gpu:0"); None: as whoever made it said. Both are advice.

        Raises:
            NotReady: the pool object is gone, or its folder is not mounted here.
            CacheCorrupted: it has another length.
            PermissionDenied: its owner, mode or links are not what they should be.
            ConfigError: `numa` cannot be meant.
        """
        check_numa(numa)
        self.pages = index.pages
        self.page_bytes = page_bytes
        self.nbytes = self.pages * page_bytes
        self._index = index
        self._base = ctypes.c_void_p()
        self._fd = ctypes.c_int(-1)
        self._fork_word = ForkWord()
        self._growing = threading.Lock()
        self._window: weakref.ref[Any] | None = None
        self._users: set[object] = set()
        self._mapped = 0
        self._reserved = False
        self._map(index.segment, huge_pages, numa)

    def _map(self, segment: Segment, huge: bool, numa: Numa) -> None:
        quick = shm_native.quick()
        with opened(segment, self.nbytes) as (folder, fd, length):
            check(
                quick.lcs_map(fd, length, not segment.readonly, ctypes.byref(self._base)),
                f"map the pool ({format_size(length)})",
            )
            self._mapped = length
            # Mapping a file of huge pages sets all of them aside: nobody else can take them.
            self._reserved = folder.kind is FolderKind.HUGETLBFS
            try:
                if huge or numa is not None:
                    quick.lcs_advise(self._base, length, huge, advised_node(numa))
                if not segment.readonly:
                    folder.life_open(segment.dependent_name("pool"), self._fd)
            except BaseException:
                self._unmap()
                raise

    def _unmap(self) -> None:
        address, self._base.value = self._base.value, None
        if address:
            shm_native.quick().lcs_unmap(address, self._mapped)

    # ---- memory

    def _live_window(self) -> Any:
        """A ctypes array over the pool that every view made of it keeps alive."""
        window = self._window() if self._window else None
        if window is None:
            window = self._new_window(object())
            self._window = weakref.ref(window)
        return window

    def _new_window(self, token: object) -> Any:
        self._index.segment.check_usable()
        if not self._base.value:
            check(Code.CLOSED, "use the pool")
        window = (ctypes.c_uint8 * self.nbytes).from_address(self._base.value or 0)
        self._users.add(token)
        weakref.finalize(window, self._users.discard, token).atexit = False
        window.owner = self  # type: ignore[attr-defined]
        return window

    def lend(self, token: object) -> Bytes:
        """All pages as `array` has them, but counted under `token`: for one who can be told to let
        go of them, as `Cache.close` tells what `Cache.pin` made. A token is used once."""
        flat = np.frombuffer(memoryview(self._new_window(token)).cast("B"), np.uint8)
        return flat.reshape(self.pages, self.page_bytes)

    def _view(self) -> memoryview:
        view = memoryview(self._live_window()).cast("B")
        return view.toreadonly() if self._index.readonly else view

    def __getitem__(self, page: int) -> Bytes:
        """The bytes of one page: uint8 of shape (page_bytes,), no copy.

        Raises:
            ConfigError: no such page.
            Detached: closed, replaced, or a forked child.
        """
        number = _arguments.count(page, "page", 0, self.pages - 1)
        self._index.segment.check_usable()
        return np.frombuffer(self._view(), np.uint8, self.page_bytes, number * self.page_bytes)

    @property
    def readonly(self) -> bool:
        """Whether it is mapped so that nothing can be written."""
        return self._index.readonly

    def __len__(self) -> int:
        """Number of pages."""
        return self.pages

    @property
    def array(self) -> Bytes:
        """All pages: uint8 of shape (pages, page_bytes), no copy. Touch only pages that you hold:
        beyond `grown` there is no memory, and a full /dev/shm makes touching it fatal."""
        return np.frombuffer(self._view(), np.uint8).reshape(self.pages, self.page_bytes)

    def tensor(self) -> torch.Tensor:
        """The same as a torch tensor on the CPU. Imports torch."""
        import torch

        flat = torch.frombuffer(self._view(), dtype=torch.uint8)
        return flat.reshape(self.pages, self.page_bytes)

    # ---- growth

    @property
    def grown(self) -> int:
        """Pages that have memory. The others are not handed out yet."""
        return self._index.stats().grown

    def grow(self, pages: int, *, threads: int = 1) -> int:
        """Give memory to `pages` more pages, together with whoever else does so. Blocks.

        Args:
            threads: that zero the memory side by side; about 2 GB/s each.

        Returns:
            Pages that have memory now.

        Raises:
            NoSpace: /dev/shm or the memory limit is full; what has grown stays.
            ConfigError: no count of pages or threads.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        _arguments.count(pages, "pages", 0, MAX_GROWTH)
        _arguments.count(threads, "threads", 1, MAX_THREADS)
        self._index.segment.check_usable()
        if self._index.readonly:
            check(Code.READONLY, "grow the pool")
        with self._growing, ofd.locked(self._fd.value, shm_layout.BYTE_GROW):
            have = self.grown
            target = min(self.pages, have + pages)
            if target <= have:
                return have
            start, end = have * self.page_bytes, target * self.page_bytes
            room = room_of(self._index.segment)
            if end - start > room.bytes and not self._reserved:
                raise NoSpace(
                    f"the pool was to grow by {format_size(end - start)}, found "
                    f"{format_size(room.bytes)} {room.limit}; {have} of {self.pages} pages can be "
                    "used"
                )
            self._populate(start, end, threads)
            self._index.grow(target)
            return target

    def _populate(self, start: int, end: int, threads: int) -> None:
        from concurrent.futures import ThreadPoolExecutor  # 20 ms that importing us need not cost

        share = max(1 << 21, -(-(end - start) // max(1, threads)) + 4095 & ~4095)
        parts = [(at, min(end, at + share)) for at in range(start, end, share)]
        with self._index.segment.busy(), ThreadPoolExecutor(len(parts)) as workers:
            codes = list(workers.map(lambda part: self._populate_part(*part), parts))
        for code in codes:
            if code < 0 and system_errno(code):
                raise NoSpace(
                    f"the pool could not grow ({os.strerror(system_errno(code) or 0)}); "
                    f"{format_size(room_of(self._index.segment).bytes)} are free"
                )
            check(code, "grow the pool")

    def _populate_part(self, start: int, end: int) -> int:
        assert self._base.value
        code: int = Code.INTR
        while code == Code.INTR:
            code = shm_native.blocking().lcs_populate(self._base.value, start, end - start)
        return code

    def prefault(
        self,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Grow to the full size, chunk by chunk, while others use what there is already.

        Args:
            threads: None: one for each processor, at most 8.
            progress: called with (pages that have memory, pages) after each chunk.

        Raises:
            NoSpace: see `grow`.
        """
        workers = threads or min(8, os.cpu_count() or 1)
        step = max(1, workers * CHUNK_BYTES // self.page_bytes)
        have = self.grown
        while have < self.pages:
            have = self.grow(step, threads=workers)
            if progress:
                progress(have, self.pages)

    # ---- the end

    def check_closable(self, besides: object = None) -> None:
        """Raise InUse while views live, but for those lent under `besides`."""
        if self._users - {besides}:
            raise InUse(
                f"close the pool of {self._index.name!r}: views of it are still in use; drop the "
                "arrays and tensors made of it first"
            )

    def close(self) -> None:
        """Unmap. A second call does nothing.

        Raises:
            InUse: views live.
        """
        if self._fork_word.inherited:  # nothing is mapped here, and the number is not ours
            return
        self.check_closable()
        shm_native.quick().lcs_life_close(ctypes.byref(self._fd))
        self._unmap()


class Grower:
    """A background thread that grows a pool to its size, and ends with it."""

    def __init__(self, pool: HostPool) -> None:
        """Starts at once."""
        self._stop = threading.Event()
        self.error: LightcacheError | None = None
        """Why growth ended early; what had grown can be used."""
        self._thread = threading.Thread(
            target=self._run, args=(pool,), name="lightcache-grow", daemon=True
        )
        self._thread.start()

    def _run(self, pool: HostPool) -> None:
        step = max(1, CHUNK_BYTES // pool.page_bytes)
        try:
            while not self._stop.is_set() and pool.grow(step) < pool.pages:
                pass
        except LightcacheError as error:
            self.error = error

    def stop(self) -> None:
        """End after the chunk at hand, and wait for that."""
        self._stop.set()
        self._thread.join()


__all__ = ["Grower", "HostPool"]
