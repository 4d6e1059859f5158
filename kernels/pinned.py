"""Pages that a GPU's driver knows: registered piece by piece, in the background, by threads.

    pinned = cache.pin(device="cuda:0")          # PinnedPages over the cache's pool
    pinned.wait([0])                             # the first pages can be copied
    pinned.wait()                                # all of them

A piece never cuts a page (a copy across two registrations is an invalid argument) and never shares
an OS page with the next (the driver would refuse it). It knows nothing of caches: whoever makes one
says how many pages have memory, and memory that is not there yet is not touched.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.kernels.memory import HostPages
from lightcache.kernels.pieces import OS_PAGE, Piece, Pieces, PinStatistics
from lightcache.kernels.registration import (
    CHUNK_BYTES,
    THREADS,
    Driver,
    Registrations,
    TorchDriver,
)
from lightcache.shm.errors import (
    ConfigError,
    Detached,
    InUse,
    LightcacheError,
    NotReady,
    TransferFailed,
    WaitTimeout,
)

FIRST_BYTES = 32 << 20
"""Of the first registration: a few milliseconds, then pages can be used."""
_LOOK = 0.02  # seconds between two looks at how far the memory has grown


class PinnedPages(HostPages):
    """Host pages that a device may copy from and to, and that kernels may touch at their host
    addresses. Page i can be used once `ready` is beyond it. Threads may share it; a forked child
    has nothing of it."""

    def __init__(
        self,
        array: npt.NDArray[np.uint8],
        *,
        grown: Callable[[], int] | None = None,
        grow: Callable[[], object] | None = None,
        device: str | int | None = None,
        driver: Driver | None = None,
        threads: int = THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        first_bytes: int = FIRST_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Begin to register. Returns at once; loads the GPU driver.

        Args:
            array: see `HostPages`; begins at an OS page, and can be written.
            grown: how many pages have memory, from the first on; None: all of them.
            grow: gives memory to more of them, blocking for a moment; called by a thread of its
                own until all have. None: others do it.
            device: "cuda:0", or its number; None: the current one.
            driver: instead of the device's; for tests.
            threads: that register side by side.
            chunk_bytes, first_bytes: of a registration, and of the first, more or less: rounded
                to whole pages that end with an OS page.
            progress: called with (pages registered, pages) after each piece, by any thread.

        Raises:
            ConfigError: memory that cannot be pinned so, or counts below one, or no such device.
        """
        super().__init__(array)
        for name, number in (("threads", threads), ("chunk_bytes", chunk_bytes)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"{name}: expected a whole number >= 1, found {number!r}")
        if self.address % OS_PAGE or not array.flags.writeable or not self.nbytes:
            raise ConfigError(
                f"page memory: expected some, writable, from the beginning of an OS page, found "
                f"{self.nbytes} bytes at {self.address:#x}, writable {array.flags.writeable}; "
                "use the pool of a cache that is attached for writing"
            )
        steps = (first_bytes, chunk_bytes)
        self._pieces = Pieces(self.address, self.pages, self.page_bytes, steps)
        self._grown = grown or (lambda: self.pages)
        self._grow = grow
        self._progress = progress
        self._registrations = Registrations(driver or TorchDriver(device))
        self._changed = threading.Condition()
        self._users = 0
        self._closing = self._closed = False
        self._error: Exception | None = None
        self._no_memory: Exception | None = None
        self._pid = os.getpid()
        works = [self._register] * threads + ([self._give_memory] if grow else [])
        self._threads = [
            threading.Thread(target=work, name=f"lightcache-pin-{i}", daemon=True)
            for i, work in enumerate(works)
        ]
        for thread in self._threads:
            thread.start()

    # ---- threads

    def _register(self) -> None:
        try:
            self._registrations.driver.enter()
            while (piece := self._next()) is not None:
                self._registrations.add(piece)
                self._done(piece)
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self) -> Piece | None:
        """The next piece that has memory, waiting for one; None: there is nothing left to do."""
        with self._changed:
            while not (self._closing or self._error or self._pieces.all_cut):
                piece = self._pieces.cut(self._grown())
                if piece is not None:
                    return piece
                self._changed.wait(_LOOK)
        return None

    def _done(self, piece: Piece) -> None:
        with self._changed:
            registered = self._pieces.done(piece)
            self._changed.notify_all()
        if self._progress:
            self._progress(registered, self.pages)

    def _give_memory(self) -> None:
        assert self._grow
        try:
            while not (self._closing or self._error) and self._grown() < self.pages:
                self._grow()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._no_memory = error
                self._changed.notify_all()

    # ---- how far it is

    @property
    def ready(self) -> int:
        """Pages that can be used, from the first on."""
        return 0 if self._closed else self._pieces.ready

    @property
    def statistics(self) -> PinStatistics:
        """How much was registered, and how long it took."""
        with self._changed:
            return self._pieces.statistics

    def check(self, pages: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Page numbers as int64, all of them registered.

        Raises:
            ConfigError: not whole numbers, or outside of 0 to pages - 1.
            NotReady: some are not registered yet.
            TransferFailed, NoSpace: some will not be: registering them has failed.
            Detached: closed.
        """
        numbers = super().check(pages)
        if numbers.size and int(numbers.max()) >= self.ready:
            self._raise_if_over(int(numbers.max()) + 1)
            raise NotReady(
                f"page {int(numbers.max())} is not registered with the GPU driver yet: "
                f"{self.ready} of {self.pages} pages are; `wait` for it, or go on without it"
            )
        if self._closing:
            raise Detached("the pinned pages were closed; pin the pool again")
        return numbers

    def wait(
        self,
        pages: Sequence[int] | npt.NDArray[Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Block until pages can be used.

        Args:
            pages: numbers; None: all there are.
            timeout: seconds; None: as long as it takes, and the pool grows.

        Raises:
            WaitTimeout: not in the time allowed.
            Otherwise as `check`.
        """
        numbers = None if pages is None else super().check(pages)
        needed = self.pages if numbers is None else int(numbers.max(initial=-1)) + 1
        end = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self.ready < needed or self._closing:
                self._raise_if_over(needed)
                left = end - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(
                        f"wait for pages to be pinned: {self.ready} of {needed} after {timeout} s "
                        f"({min(self._grown(), self.pages)} have memory); wait longer"
                    )
                self._changed.wait(min(left, 1.0))

    def _raise_if_over(self, needed: int) -> None:
        if self._closing:
            raise Detached("the pinned pages were closed; pin the pool again")
        error = self._error
        if error is None and self._no_memory and self._grown() < needed:
            error = self._no_memory
        if error is not None:
            kind = type(error) if isinstance(error, LightcacheError) else TransferFailed
            raise kind(
                f"{error} ({self.ready} of {self.pages} pages are pinned and can be used)"
            ) from error

    # ---- the end

    def acquire(self) -> None:
        """An engine uses it from now on: `close` refuses until `release`.

        Raises:
            Detached: closed.
        """
        with self._changed:
            if self._closing:
                raise Detached("the pinned pages were closed; pin the pool again")
            self._users += 1

    def release(self) -> None:
        """Undo one `acquire`."""
        with self._changed:
            assert self._users > 0, "released more often than acquired"
            self._users -= 1

    @property
    def closed(self) -> bool:
        """Whether everything has been given back."""
        return self._closed

    def check_closable(self) -> None:
        """Raise InUse while engines use it."""
        if self._users:
            raise InUse(
                f"close the pinned pages: {self._users} engines still use them; close those first"
            )

    def close(self) -> None:
        """Stop registering, unregister everything, and let go of the memory. Blocks: registrations
        under way are waited for. A second call does nothing; a forked child's does nothing.

        Raises:
            InUse: engines use it; nothing was changed.
            TransferFailed: the driver refused, and some memory stays pinned until this process
                ends. It is closed all the same.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._changed:
            self.check_closable()
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        try:
            self._registrations.clear()
        finally:
            self._closed = True
            self.array = np.empty((0, self.page_bytes), np.uint8)

    def __del__(self) -> None:
        if not sys.is_finalizing() and not getattr(self, "_closed", True):
            with contextlib.suppress(LightcacheError):
                self.close()

    def __enter__(self) -> PinnedPages:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PinnedPages {self.ready} of {self.pages} pages of {self.page_bytes} bytes>"


__all__ = ["FIRST_BYTES", "PinStatistics", "PinnedPages"]
