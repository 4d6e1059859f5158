"""The pool of a cache, pinned for a GPU: once in a process, given back when the cache closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightcache import _arguments
from lightcache.errors import InUse
from lightcache.pool import CHUNK_BYTES, MAX_THREADS, HostPool
from lightcache.shm.codes import Code, check

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.kernels.registration import Driver


class PoolPin:
    """What `Cache.pin` has made, if anything."""

    def __init__(self, pool: HostPool) -> None:
        """Nothing is pinned, and no driver loaded."""
        self._pool = pool
        self._pinned: PinnedPages | None = None
        self.lent: object = None
        """Under which the pool counts the memory that is pinned; see `HostPool.lend`."""

    def make(
        self,
        device: str | int | None,
        driver: Driver | None,
        threads: int,
        chunk_bytes: int | None,
        grow_threads: int,
        progress: Callable[[int, int], None] | None,
    ) -> PinnedPages:
        """See `Cache.pin`."""
        from lightcache.kernels.pinned import PinnedPages
        from lightcache.kernels.registration import CHUNK_BYTES as PIECE_BYTES

        _arguments.count(grow_threads, "grow_threads", 0, MAX_THREADS)
        if self._pool.readonly:
            check(Code.READONLY, "pin the pool")
        if self._pinned is not None and not self._pinned.closed:
            raise InUse("pin the pool: it is pinned already in this process; use that, or close it")
        self.lent = object()
        self._pinned = PinnedPages(
            self._pool.lend(self.lent),
            grown=lambda: self._pool.grown,
            grow=(lambda: self._grow(grow_threads)) if grow_threads else None,
            device=device,
            driver=driver,
            threads=threads,
            chunk_bytes=PIECE_BYTES if chunk_bytes is None else chunk_bytes,
            progress=progress,
        )
        return self._pinned

    def _grow(self, threads: int) -> int:
        return self._pool.grow(
            max(1, threads * CHUNK_BYTES // self._pool.page_bytes), threads=threads
        )

    def close(self) -> None:
        """Unregister what is pinned.

        Raises:
            InUse: engines use it, or somebody else has views of the pool; nothing was changed.
        """
        self._pool.check_closable(besides=self.lent)
        if self._pinned is not None:
            self._pinned.close()


__all__ = ["PoolPin"]
