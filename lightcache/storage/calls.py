"""Calls of a backend: `close` waits for calls in flight, and a forked child's calls are refused.

A forked child has a backend's memory but none of its threads. It has the locks in the state they
had, and shares sockets and files with its parent. So a backend opened before the fork belongs to
the parent: in the child every call except `stats` raises Detached before it takes a lock.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import operator
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightcache.breaker import CircuitBreaker, Clock
from lightcache.errors import Detached, StorageError
from lightcache.shm.errors import leave
from lightcache.shm.waiting import Condition
from lightcache.storage.protocol import ReadResult, Storage, WriteResult

CLOSING = 10.0  # seconds that `close` waits for calls


class Calls:
    """Counts the calls in flight."""

    def __init__(self) -> None:
        """Open, and owned by this process."""
        self._state = Condition()
        self._process = os.getpid()
        self._under_way = 0
        self._closed = False
        self._released = False

    @property
    def ours(self) -> bool:
        """True if this process opened it."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise Detached if it was closed, or opened by the process that forked us."""
        if not self.ours:
            raise Detached("this storage belongs to the process that forked us; open it here")
        if self._closed:
            raise Detached("this storage was closed; open it again")

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Wrap a call: nothing is closed meanwhile.

        Raises:
            Detached: see `check`.
        """
        self.check()  # before the lock: it may have been held at a fork, or be held by `end`
        entered = 0
        try:  # around the count as well: an interrupt may come after any line
            with self._state:
                self.check()
                self._under_way, entered = self._under_way + 1, 1
            yield
        finally:
            interrupt: KeyboardInterrupt | None = None
            while entered:
                try:
                    with self._state:
                        self._under_way, entered = self._under_way - entered, 0
                        self._state.notify_all()
                except KeyboardInterrupt as found:
                    interrupt = found
            if interrupt is not None:
                raise interrupt

    def end(self, release: Callable[[], None]) -> None:
        """Refuse further calls, wait for those in flight, then call `release` once. If it raises,
        call again.

        Raises:
            StorageError: a call hangs; call again.
            Detached: in a forked child.
        """
        if not self.ours:
            self.check()
        with self._state:
            self._closed = True
            if not self._state.wait_for(lambda: not self._under_way, CLOSING):
                raise StorageError(
                    f"close: {self._under_way} calls have not returned; close it again"
                )
            if not self._released:
                release()
                self._released = True


class Owned(Storage):
    """A storage that belongs to the process that opened it."""

    _calls: Calls

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._calls.ours:  # leaving the statement does nothing in a forked child
            leave(self.close, error)


# ---- Helpers for callers of a storage: memory, checked results, the breaker

log = logging.getLogger("lightcache.storage")


def own_memory(pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate memory for `pages` pages. It is page-aligned, as direct I/O requires, and uses huge
    pages if available, since the first touch of new memory costs most: 13 ms instead of 42 for
    32 MiB, while copying them takes 9.

    Raises:
        StorageError: not enough memory.
    """
    try:
        made = mmap.mmap(-1, pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as error:
        raise StorageError(f"no memory for {pages} pages of {page_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        made.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(made, np.uint8).reshape(pages, page_bytes)


def checked_contains(result: object, keys: int) -> int:
    """Check the result of `Storage.contains`.

    Raises:
        StorageError: it is not a count of these keys.
    """
    try:
        count = operator.index(cast(Any, result))
    except TypeError:
        count = -1
    if not 0 <= count <= keys:
        raise StorageError(
            f"contains: expected a count of {keys} keys, the backend returned {result!r}; see "
            "lightcache.storage.testing"
        )
    return int(count)


def checked_statuses(what: str, statuses: object, keys: int) -> None:
    """Check the statuses returned by `Storage.read` or `write`.

    Raises:
        StorageError: there is not one status for each key.
    """
    if not isinstance(statuses, tuple) or len(statuses) != keys:
        raise StorageError(
            f"{what}: expected a tuple of {keys} statuses, the backend returned {statuses!r}; see "
            "lightcache.storage.testing"
        )


def storage_breaker(
    failures: int, retry: float, clock: Clock, what: str = "storage"
) -> CircuitBreaker:
    """A circuit breaker for a storage that messages call `what`."""

    def text(row: int, why: str) -> str:
        return (
            f"{what} is disabled after {row} failures in a row, the last: {why}; it is tried again "
            f"every {retry:g} s"
        )

    works = f"{what} works again and is used from now on"
    return CircuitBreaker(failures, retry, clock, text=text, works=works, log=log)


def unread(result: ReadResult) -> str:
    """Why a read counts as a failure of the storage; empty: it does not. A batch with FAILED pages
    and none OK does; absent and corrupt alone are answers of a working storage."""
    names = {status.name for status in result.statuses}
    return result.reason or "failed" if "FAILED" in names and "OK" not in names else ""


def unwritten(result: WriteResult) -> str:
    """Why a write counts as a failure of the storage: all of its pages FAILED; empty: it does
    not."""
    names = {status.name for status in result.statuses}
    return result.reason or "failed" if "FAILED" in names and len(names) == 1 else ""


__all__ = [
    "CLOSING",
    "Calls",
    "Owned",
    "checked_contains",
    "checked_statuses",
    "log",
    "own_memory",
    "storage_breaker",
    "unread",
    "unwritten",
]
