"""Leases: pages that this client pins. While one is held, its pages keep their bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout
from lightcache.errors import LeaseLost
from lightcache.layout import KeyStatus
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import leave

if TYPE_CHECKING:
    from weakref import ReferenceType

    from typing_extensions import Self

    from lightcache._arguments import Pages
    from lightcache.page_index import PageIndex
    from lightcache.transfers import Keeper, Saving


# ---- What is taken from an index and given back: once, by name, by leaving a `with`, or with the
# last reference to it.


class Borrowed:
    """Base of `Lease`, `Held`, `Reservation` and `Shard`: how they end.

    An object is made before the call that takes, and holds what the core wrote into its arrays. In
    `__init__` `_done` is to be True, or not there, until there is something to give back; in `_end`
    it is to become True behind the call that gives back, which may be made again. So an interrupt
    at any point leaks nothing, and gives nothing back that is another's.
    """

    __slots__ = ()

    _index: PageIndex
    _done: bool
    """Given back, or never taken."""
    _keeper: ReferenceType[Keeper | Saving]
    """Who has taken it over for a copy, once somebody has."""

    def _end(self) -> None:
        """Give it back. May be called again after an interrupt anywhere in it."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Give it back without a word when there is nothing left to give back: closed, forked."""
        if not self._index._unusable():
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._done:
            if error is None:
                self._let_go()
            else:
                leave(self._let_go, error)

    def __del__(self) -> None:
        # getattr: an interrupt may come before __init__ has set it.
        if not getattr(self, "_done", True) and not self._index._unusable():
            self._let_go()


# ---- Pages without a key, in the hands of this client; and what became of those that were named.

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

    __slots__ = (
        "__weakref__",
        "_done",
        "_freed",
        "_gens",
        "_index",
        "_keeper",
        "_pages",
        "_progress",
    )

    def __init__(self, index: PageIndex, n: int) -> None:
        """For PageIndex: nothing is held yet."""
        self._done = True  # an interrupt before the last line: nothing to give back
        self._index = index
        self._pages: Pages = np.empty(n, np.int32)
        self._gens: npt.NDArray[np.uint32] | None = np.empty(n, np.uint32)
        """None: all of them are to be freed."""
        self._progress = layout.HeldProgress()
        self._freed = layout.HeldProgress()
        self._done = False

    @classmethod
    def attached_to(cls, index: PageIndex, pages: Pages) -> tuple[Held, partial[None]]:
        """The other way round than `detach`, for pages of which none has been named: as
        `Lease.attached_to`."""
        made = cls(index, 0)
        made._done = True
        made._pages, made._gens = pages, None
        made._progress.done = len(pages)
        return made, partial(setattr, made, "_done", False)

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
            None if self._gens is None else _arguments.address(self._gens),
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


# ---- Tickets: pins handed from one client to others, through 16 bytes in the engine's own
# message.

TICKET_BYTES = ctypes.sizeof(layout.TicketRef)


class ClientId(NamedTuple):
    """Names one attach of one process: a slot and the epoch it was taken in. Sent as two ints."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class TicketStatus:
    """Where a ticket stands. Sets of client slots."""

    adopters: frozenset[int]
    adopted: frozenset[int]
    done: frozenset[int]
    failed: frozenset[int]
    """Said so, died, or (once the deadline has passed) never adopted."""
    late: bool
    """The deadline has passed: nobody adopts any more."""

    @property
    def verdict(self) -> bool | None:
        """One for all: True when all are done, False when one has failed, None while open."""
        if self.failed:
            return False
        return True if self.done == self.adopters else None


def slots(mask: int) -> frozenset[int]:
    """The set bits of a 64-bit mask."""
    return frozenset(slot for slot in range(64) if mask >> slot & 1)


class Ticket:
    """Held by its giver. Its pages stay pinned until every adopter has adopted or died or the
    deadline has passed, whether the giver lives or not. Drop it when its verdict is known."""

    def __init__(self, index: PageIndex, ref: layout.TicketRef) -> None:
        """For `Lease.ticket` and `Reservation.ticket`."""
        self._dropped = True  # as in Reservation
        self._index = index
        self._ref = ref
        self._dropped = False

    def __bytes__(self) -> bytes:
        """The 16 bytes that travel."""
        return bytes(self._ref)

    def poll(self) -> TicketStatus:
        """Where it stands. No lock, does not block.

        Raises:
            LeaseLost: dropped before.
            Detached: closed, or a forked child.
        """
        if self._dropped:
            raise LeaseLost("poll: this ticket was dropped")
        found = layout.TicketStatusRecord()
        code = self._index._quick.lci_ticket_poll(
            self._index._handle, ctypes.byref(self._ref), ctypes.byref(found)
        )
        check(code, "poll a ticket")
        failed = found.failed
        if found.late:
            failed |= found.adopters & ~found.adopted
        return TicketStatus(
            adopters=slots(found.adopters),
            adopted=slots(found.adopted),
            done=slots(found.done),
            failed=slots(failed),
            late=bool(found.late),
        )

    def drop(self) -> None:
        """The giver needs it no more; who has adopted goes on. Takes the lock; once.

        Raises:
            LeaseLost: dropped before.
        """
        self._drop("lci_ticket_drop")

    def revoke(self) -> None:
        """Drop it, and let nobody adopt it from this instant on: what it pins is free as soon as
        those have let go who did. For a ticket that was never sent, or whose purpose has failed.
        Takes the lock; once.

        Raises:
            LeaseLost: dropped or revoked before.
        """
        self._drop("lci_ticket_revoke")

    def _drop(self, call: str) -> None:
        if self._dropped:
            raise LeaseLost("drop: this ticket was dropped before")
        code = self._index._locked(call, ctypes.byref(self._ref), what="drop a ticket")
        if code not in (Code.OWNER, Code.STALE):  # an interrupt came after the drop: it is done
            check(code, "drop a ticket")
        self._dropped = True

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._dropped and not self._index._unusable():
            leave(self.drop, error)

    def __del__(self) -> None:
        """Nobody can ask for its verdict any more. Adopters go on, and pins last as promised."""
        if not getattr(self, "_dropped", True) and self._ref.gen and not self._index._unusable():
            self.drop()


def parse(ticket: bytes) -> layout.TicketRef:
    """The 16 bytes of a ticket, checked for their length only."""
    if len(ticket) != TICKET_BYTES:
        raise LeaseLost(f"a ticket has {TICKET_BYTES} bytes, found {len(ticket)}")
    return layout.TicketRef.from_buffer_copy(ticket)


REFUSALS = {
    Code.MISSING: "it is a ticket of another cache; attach to that one, or check the message",
    Code.STALE: "it has ended: dropped, or all its adopters are done",
    Code.OWNER: "this client is not among its adopters, or its shard was adopted by another",
    Code.TWICE: "it was adopted by this client before, or the shard was",
    Code.TIMEOUT: "its deadline has passed, or the giver's side declared this client failed",
}


# ---- Leases: pages that this client pins. While one is held, its pages keep their bytes.

HEADER_BYTES = ctypes.sizeof(layout.LeaseHeader)

# A lease's buffer: held, capacity, pages, generations. Few types, as ctypes keeps each. The first
# that is large enough for `capacity` stands at the number of bits of `capacity - 1`.
_BUFFERS = tuple(ctypes.c_uint32 * (2 + (2 << bits)) for bits in range(32))


class Lease(Borrowed):
    """Pinned pages, in the order of the keys that were asked for. Leave its `with`, or release it.

    The object is made before the call that pins, and holds what the core wrote into its buffer: an
    interrupt at any point leaks nothing, and dropping the last reference releases too.
    """

    __slots__ = ("__weakref__", "_buffer", "_done", "_index", "_keeper", "_pages")

    def __init__(self, index: PageIndex, capacity: int) -> None:
        """For PageIndex: an empty lease with room for `capacity` pages and their generations."""
        self._index = index
        self._buffer = _BUFFERS[(capacity - 1).bit_length()]()
        self._pages: Pages | None = None
        self._done = False  # last: an interrupt before it leaves nothing to release

    @classmethod
    def attached_to(cls, index: PageIndex, pages: Pages) -> tuple[Lease, partial[None]]:
        """The other way round than `detach`: a lease of pages of which one pin each is the
        caller's. It is empty until the call that is returned with it is made: `together` with
        whatever says that the pins are the caller's no more."""
        made = cls(index, len(pages))
        words = np.frombuffer(memoryview(made._buffer).cast("B"), np.int32)
        words[2 : 2 + len(pages)] = pages
        words[1] = len(pages)
        return made, partial(made._buffer.__setitem__, 0, len(pages))

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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lease.__exit__(None, error, None)


__all__ = ["Borrowed", "Held", "Lease", "LeaseBatch", "Named"]
