"""Leases: pages that this client pins. While one is held, its pages keep their bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache import _arguments, layout
from lightcache._borrowed import Borrowed
from lightcache.errors import LeaseLost
from lightcache.shm.codes import Code, check

if TYPE_CHECKING:
    from lightcache._arguments import Pages
    from lightcache.page_index import PageIndex
    from lightcache.tickets import ClientId, Ticket

HEADER_BYTES = ctypes.sizeof(layout.LeaseHeader)
# A lease's buffer: held, capacity, pages, generations. Few types, as ctypes keeps each. The first
# that is large enough for `capacity` stands at the number of bits of `capacity - 1`.
_BUFFERS = tuple(ctypes.c_uint32 * (2 + (2 << bits)) for bits in range(32))


class Lease(Borrowed):
    """Pinned pages, in the order of the keys that were asked for. Leave its `with`, or release it.

    The object is made before the call that pins, and holds what the core wrote into its buffer: an
    interrupt at any point leaks nothing, and dropping the last reference releases too.
    """

    __slots__ = ("__weakref__", "_buffer", "_done", "_index", "_pages")

    def __init__(self, index: PageIndex, capacity: int) -> None:
        """For PageIndex: an empty lease with room for `capacity` pages and their generations."""
        self._index = index
        self._buffer = _BUFFERS[(capacity - 1).bit_length()]()
        self._pages: Pages | None = None
        self._done = False  # last: an interrupt before it leaves nothing to release

    @property
    def pages(self) -> Pages:
        """The pages, int32 of shape (n,), read-only.

        Raises:
            LeaseLost: released already.
        """
        if self._done:
            raise LeaseLost("this lease was released, its pages may hold something else by now")
        if self._pages is None:
            pages = np.frombuffer(
                memoryview(self._buffer).cast("B"), np.int32, len(self), HEADER_BYTES
            )
            pages.flags.writeable = False
            self._pages = pages
        return self._pages

    def __len__(self) -> int:
        """Number of pages; 0 after release."""
        return int(self._buffer[0])

    @property
    def tokens(self) -> int:
        """Tokens in these pages.

        Raises:
            ConfigError: the cache was not told its `page_tokens`.
        """
        return len(self) * self._index.page_tokens

    def release(self) -> None:
        """Unpin. Does not block, takes no lock; 1 to 2 ns a page.

        Raises:
            LeaseLost: released already.
            Detached: closed, or a forked child.
        """
        if self._done:
            raise LeaseLost("this lease was released before; release it once")
        # In this order an interrupt in between costs nothing: releasing again releases nothing.
        code = self._index._release(self._index._handle, self._buffer)
        self._done = True
        if code != 0:
            check(code, "release a lease")

    def detach(self) -> Pages:
        """The pages, int32, whose pins are the caller's from now on: `PageIndex.unpin` gives them
        up, `PageIndex.unname` takes their names. This object has nothing left to release.

        Raises:
            LeaseLost: released already.
        """
        if self._done:
            raise LeaseLost("this lease was released before; there is nothing to detach")
        pages: Pages = self.pages.copy()
        self._done = True
        self._buffer[0] = 0
        return pages

    def ticket(self, adopters: list[ClientId], *, timeout: float = 60.0) -> Ticket:
        """Pin the same pages for others, who `adopt` the ticket's 16 bytes. See `Ticket`.

        Args:
            adopters: who may adopt, each once; see `PageIndex.client_id`.
            timeout: seconds until adopting ends.
        """
        return self._index._give_ticket(self.pages, None, adopters, timeout)

    def _let_go(self) -> None:
        """As `Borrowed`, in one call: the core says whether there is anything left to release."""
        code = self._index._release(self._index._handle, self._buffer)
        self._done = True
        if code not in (Code.OK, Code.FORKED, Code.CLOSED):
            check(code, "release a lease")

    def __repr__(self) -> str:
        return f"<Lease {'released' if self._done else f'{len(self)} pages'}>"


class LeaseBatch:
    """The leases of many requests, matched in one call. Released together, or split."""

    def __init__(self, lease: Lease, counts: Pages) -> None:
        """For PageIndex."""
        self._lease = lease
        self.counts = counts
        """Pages of each request, int32 of shape (requests,)."""

    @property
    def pages(self) -> Pages:
        """All pages, one request behind the other."""
        return self._lease.pages

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.counts)

    def __getitem__(self, request: int) -> Pages:
        """The pages of one request."""
        ends = np.cumsum(self.counts)
        return self.pages[ends[request] - self.counts[request] : ends[request]]

    def __iter__(self) -> Iterator[Pages]:
        return (self[i] for i in range(len(self)))

    def split(self) -> list[Lease]:
        """One lease for each request, each to be released on its own; this batch is empty then.

        Raises:
            LeaseLost: released already.
        """
        if self._lease._done:
            raise LeaseLost("split: this batch was released or split before")
        index = self._lease._index
        parts = [Lease(index, int(count)) for count in self.counts]
        places = (ctypes.c_void_p * len(parts))(*(ctypes.addressof(p._buffer) for p in parts))
        # All pins change hands in one call: before it the batch holds them, after it the parts do.
        code = index._quick.lci_split(
            self._lease._buffer, places, _arguments.address(self.counts), len(parts)
        )
        check(code, "split a batch")
        self._lease._done = True
        return parts

    def release(self) -> None:
        """Release all of them. Raises LeaseLost when that was done before."""
        self._lease.release()

    def __enter__(self) -> LeaseBatch:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._lease.__exit__(None, None, None)


__all__ = ["Lease", "LeaseBatch"]
