"""Pages without a key, in the hands of this client; and what became of those that were named."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout
from lightcache._borrowed import Borrowed
from lightcache.errors import LeaseLost
from lightcache.layout import KeyStatus
from lightcache.shm.codes import Code, check

if TYPE_CHECKING:
    from lightcache._arguments import Pages
    from lightcache.page_index import PageIndex
    from lightcache.tickets import ClientId, Ticket

Positions = npt.NDArray[np.int64]
Statuses = npt.NDArray[np.uint8]


class Held(Borrowed):
    """Pages that this client has allocated: no lookup finds them, nobody evicts them.

    Leaving its `with`, or dropping the last reference, frees those that have not been named since:
    a page that `PageIndex.name_pages` gave a key is the caller's to `unpin`. `detach` it to keep
    numbers instead of this object.

    It is made before the call that allocates, and holds what the core wrote into its arrays: an
    interrupt at any point leaks nothing.
    """

    __slots__ = ("__weakref__", "_done", "_freed", "_gens", "_index", "_pages", "_progress")

    def __init__(self, index: PageIndex, n: int) -> None:
        """For PageIndex: nothing is held yet."""
        self._done = True  # an interrupt before the last line: nothing to give back
        self._index = index
        self._pages: Pages = np.empty(n, np.int32)
        self._gens = np.empty(n, np.uint32)
        self._progress = layout.HeldProgress()
        self._freed = layout.HeldProgress()
        self._done = False

    @property
    def pages(self) -> Pages:
        """The pages, int32 of shape (n,), in no order that means anything.

        Raises:
            LeaseLost: freed or detached already.
        """
        if self._done:
            raise LeaseLost(
                "pages: these were freed or detached, and may be somebody else's by now"
            )
        return self._pages

    def __len__(self) -> int:
        """Number of pages; 0 after `free` and `detach`."""
        return 0 if self._done else len(self._pages)

    def detach(self) -> Pages:
        """The pages, for a caller who keeps their numbers: it `free`s what it does not name, and
        leaving the `with` does nothing any more.

        Raises:
            LeaseLost: freed or detached already.
        """
        pages = self.pages
        self._done = True
        return pages

    def free(self) -> None:
        """Give back the pages that have not been named since they were allocated. What others pin
        (through a ticket) goes when they have released it. Takes the lock; once is enough.

        Raises:
            LeaseLost: freed or detached already.
            LockTimeout: the lock's holder did not give it back in time; call again.
            Detached: closed, or a forked child.
        """
        if self._done:
            raise LeaseLost("free: these pages were freed or detached before")
        check(self._free(), "free pages")
        self._done = True

    def ticket(self, adopters: list[ClientId], *, timeout: float = 60.0) -> Ticket:
        """Pin the same pages for others, who `adopt` the ticket's 16 bytes. See `Ticket`.

        Args:
            adopters: who may adopt, each once; see `PageIndex.client_id`.
            timeout: seconds until adopting ends.

        Raises:
            LeaseLost: freed or detached already.
            ConfigError: an adopter is not attached, or named twice.
            OutOfPages: too many tickets are outstanding.
            LockTimeout, Detached.
        """
        return self._index.ticket(self.pages, adopters, timeout=timeout)

    def _free(self) -> int:
        """May be called again after an interrupt: goes on where it was."""
        code: int = self._index._locked(
            "lci_free_held",
            ctypes.byref(self._freed),
            _arguments.address(self._pages),
            _arguments.address(self._gens),
            self._progress.done,
            what="free pages",
        )
        return code

    def _end(self) -> None:
        code = self._free()
        self._done = True
        if code not in (Code.OK, Code.FORKED, Code.CLOSED, Code.RETIRED):
            check(code, "free pages")

    def __repr__(self) -> str:
        return f"<Held {'over' if self._done else f'{len(self)} pages'}>"


class Named:
    """What became of pages that were to be named. Entry i is

    - NEW: our page, which stands under its key now
    - PRESENT: another page stands there, which we pin from now on; ours is free when merging
    - BUSY: another client is writing that key; our page is held as before
    - NO_ROOM: the namespace is at its quota, too many keys share a bucket, or another namespace has
      this key; our page is held as before
    - UNKNOWN: the call ended with an error before it came so far

    One pin of each page in `pages` is the caller's, who `unpin`s, `unname`s or `free`s it.
    """

    __slots__ = ("_progress", "pages", "status")

    def __init__(self, n: int) -> None:
        """An empty one, for `PageIndex.name_pages`. Made by the caller and given as `into=`, it
        says after an error how far the call had come."""
        self.pages: Pages = np.full(n, -1, np.int32)
        """The page that stands for each key, int32; where there is no room, or another client is
        writing, our own."""
        self.status: Statuses = np.zeros(n, np.uint8)
        """`KeyStatus` of each, uint8."""
        self._progress = layout.HeldProgress()

    def __len__(self) -> int:
        """Number of pages that were to be named."""
        return len(self.pages)

    def where(self, status: KeyStatus) -> Positions:
        """Positions of the pages with this status."""
        return np.flatnonzero(self.status == status)

    @property
    def settled(self) -> int:
        """How many have been looked at: all, unless the call raised."""
        return int(self._progress.done)

    def __repr__(self) -> str:
        count = np.bincount(self.status, minlength=5)
        return (
            f"<Named {count[KeyStatus.NEW]} new, {count[KeyStatus.PRESENT]} present, "
            f"{count[KeyStatus.BUSY]} busy, {count[KeyStatus.NO_ROOM]} without room>"
        )


__all__ = ["Held", "Named"]
