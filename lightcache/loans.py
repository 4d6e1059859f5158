"""Loans: pages that one process keeps pinned for another, which gives them back by page number.

An engine's scheduler takes pages and its worker copies them. The worker is told page numbers and
generations in the engine's own message, pins the pages for itself while it copies
(`PageIndex.pin`), and puts a message into the ring of the two processes when it is done.
docs/design/joining.md, section 33, has the protocol, and says when a ticket is better.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import secrets
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from lightcache import _arguments
from lightcache.errors import ConfigError, InUse, LeaseLost, LightcacheError, LockTimeout
from lightcache.shm import SharedRing
from lightcache.shm.clients import describe
from lightcache.shm.codes import check
from lightcache.shm.layout import RING_BATCH, RING_HOLD
from lightcache.shm.locking import Hurried

if TYPE_CHECKING:
    from lightcache._arguments import Pages
    from lightcache._core import Lender
    from lightcache.leases import ClientId, Hold
    from lightcache.page_index import PageIndex

PATIENCE = 0.001
"""Seconds that a call waits for the ring's lock. A message takes its holder a microsecond."""
_NUMBER, _PAGE = 8, 4  # bytes of a loan's number, and of a page's
_NONE = 0xFFFFFFFF  # length of a message that is not there


def _check_ring(ring: SharedRing) -> None:
    if ring.message_bytes < _NUMBER + _PAGE:
        raise ConfigError(
            f"ring: expected messages of at least {_NUMBER + _PAGE} bytes, found "
            f"{ring.message_bytes}; 256 are enough for 62 pages in one"
        )
    living = [client for client in ring.segment.clients() if client.alive]
    if len(living) > 2:
        raise InUse(
            f"ring: expected one taker and one worker in {ring.segment.name!r}, found "
            f"{describe(living)}; open a ring for each pair"
        )


class Loans:
    """The loans of this process, the taker, to one worker. Close it, or leave its `with`, to unpin
    all that the worker has not given back; dropping the last reference does so too.

    `PageIndex.plan`, `plan_many`, `reserve`, `reserve_batch`, `allocate`, `can_allocate` and
    `evict` begin with what was given back; call `collect` in a process that makes none of them.
    Threads may share it. An interrupt at any point loses no message and leaves no page pinned.
    """

    def __init__(self, index: PageIndex, ring: SharedRing, worker: ClientId) -> None:
        """No loans yet. For several workers make several, each with a ring of its own.

        Args:
            index: the index whose pages are lent.
            ring: `SharedRing.open(name, capacity=1024, message_bytes=256)` in both processes takes
                270 KiB. Closing it is the caller's, after this.
            worker: the worker's `PageIndex.client_id`, by which its death is seen.

        Raises:
            ConfigError: the ring's messages are too short.
            InUse: the ring has other clients than a taker and a worker.
        """
        _check_ring(ring)
        self.ignored = 0
        """Page numbers and loans that were given back and not out: wrong ones, those given back
        before, or loans of an earlier taker. An interrupt may count a message twice."""
        self._index, self._ring, self._worker = index, ring, worker
        self._lock = threading.RLock()  # re-entrant: a signal's handler may collect
        self._lent: dict[int, Hold] = {}
        self._numbers = itertools.count(secrets.randbits(62))
        # Messages are popped into this memory and stay there until they were worked off.
        room = max(ring.message_bytes, min(RING_BATCH * ring.message_bytes, RING_HOLD))
        self._out = (ctypes.c_char * room)()
        self._lengths = (ctypes.c_uint32 * RING_BATCH)(*itertools.repeat(_NONE, RING_BATCH))
        self._data = memoryview(self._out).cast("B")
        lenders = index.core.lenders
        self._reference: weakref.ref[Lender] = weakref.ref(self, lenders.discard)
        lenders.add(self._reference)

    def lend(self, pages: Pages) -> int:
        """Pin these pages once more, for the worker. The caller's own lease stays as it is. Begins
        with `collect`. Takes no lock but the ring's; about 10 us, and 10 ns a page.

        Args:
            pages: pages that this client pins: of a lease.

        Returns:
            The number of the loan, below 2^63, for the engine's message.

        Raises:
            LeaseLost: the worker has left the index, or a page is not pinned by this client, or
                its namespace was cleared. Nothing was lent.
            NoSpace: one of the pages is pinned 65,535 times by this client.
            ConfigError, NotReady, PermissionDenied, Detached.
        """
        number = next(self._numbers)
        try:
            with self._lock:
                self.collect()
                if not self._index.segment.lives(*self._worker):
                    raise LeaseLost(
                        f"lend: the worker, client {self._worker.slot} of epoch "
                        f"{self._worker.epoch}, has left or died; make Loans for its successor"
                    )
                loan = self._index.pin(pages, self._index.generations(pages))
                self._lent[number] = loan.hold()
        except BaseException:  # the caller does not learn the number
            self._lent.pop(number, None)
            raise
        return number

    def collect(self) -> int:
        """Unpin what the worker has given back; all, if it has left the index or died. Takes the
        ring's lock if something is in the ring, and leaves it for the next call if another holds
        the lock for a millisecond. About 4 us, and 1 to 2 us for each message.

        Returns:
            The number of pages unpinned.

        Raises:
            Detached: the index or the ring was closed or removed, or a forked child.
            CacheCorrupted: the ring is damaged.
        """
        with self._lock:
            pages = self._collect()
            if self._lent and not self._index.segment.lives(*self._worker):
                pages += self._end_all()
            return pages

    def collect_quietly(self) -> None:
        """For the calls of the index that begin with it: `collect`, but for the worker's death, and
        without its errors."""
        if self._lent:
            with contextlib.suppress(LightcacheError), self._lock:
                self._collect()

    def _collect(self) -> int:
        pages = self._settle()  # what an interrupt has left
        for _ in range(self._ring.capacity):  # what a worker adds meanwhile is for the next call
            if not len(self._ring):
                break
            try:
                with Hurried(PATIENCE):
                    self._ring.pop_into(self._out, self._lengths)
            except LockTimeout:
                break
            pages += self._settle()
        return pages

    def _settle(self) -> int:
        """Work off the messages that were popped. Doing it once more changes nothing."""
        pages = begin = 0
        for length in self._lengths:
            if length == _NONE:
                break
            pages += self._give_back(self._data[begin : begin + length])
            begin += length
        if self._lengths[0] != _NONE:
            ctypes.memset(self._lengths, 0xFF, ctypes.sizeof(self._lengths))
        return pages

    def _give_back(self, message: memoryview) -> int:
        known = len(message) >= _NUMBER and not len(message) % _PAGE
        number = int.from_bytes(message[:_NUMBER], "little")
        loan = self._lent.get(number) if known else None
        named = max(1, (len(message) - _NUMBER) // _PAGE)
        if loan is None:
            self.ignored += named
            return 0
        held = int(loan.buffer[0])
        if len(message) == _NUMBER:
            loan.give_back()
            self._lent.pop(number, None)
            return held
        core = self._index.core
        code = core.quick.lci_release_pages(
            core.handle, loan.buffer, bytes(message[_NUMBER:]), named
        )
        pages = check(code, "give back")
        self.ignored += named - pages
        if pages == held:
            self._lent.pop(number, None)
        return pages

    def _end_all(self) -> int:
        pages = 0
        for number, loan in list(self._lent.items()):
            pages += int(loan.buffer[0])
            loan.give_back()
            self._lent.pop(number, None)
        return pages

    def __len__(self) -> int:
        """Number of loans of which pages are out, as of the last `collect`."""
        return len(self._lent)

    @property
    def pages(self) -> int:
        """Pages that are out, as of the last `collect`. A page of two loans counts twice."""
        return sum(int(loan.buffer[0]) for loan in list(self._lent.values()))

    def close(self) -> None:
        """Unpin everything that is lent. What the worker gives back later is ignored by the next
        `Loans` of this ring. A second call does nothing."""
        with self._lock:
            self._end_all()
            self._index.core.lenders.discard(self._reference)

    def __enter__(self) -> Loans:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Loans to client {self._worker.slot}: {self.pages} pages in {len(self)} loans>"


class GiveBack:
    """The worker's side of a ring: says which pages of which loan it is done with. Never waits for
    the taker. Threads may share it; a call may be repeated after an interrupt."""

    def __init__(self, ring: SharedRing) -> None:
        """For the ring that the taker's `Loans` have.

        Raises:
            ConfigError, InUse: as `Loans`.
        """
        _check_ring(ring)
        self._ring = ring
        self._lock = threading.RLock()
        self._most = (ring.message_bytes - _NUMBER) // _PAGE
        self._numbers = itertools.count()
        self._waiting: dict[int, bytes] = {}

    def put(self, number: int, pages: Pages | None = None) -> None:
        """Give these pages of a loan back. What does not fit into the ring, or finds its lock taken
        for a millisecond, waits in this object for the next `put` or `flush`. About 6 us, and 1 us
        for each message: each 62 pages, with those of 256 bytes.

        Args:
            number: of the loan, as `Loans.lend` returned it.
            pages: some of the loan's pages, in its order at best. None: all that are still out.
                The taker ignores and counts what is not out.

        Raises:
            ConfigError: no number of a loan, or no page numbers. Nothing was given back.
            Detached: the ring was closed or removed, or a forked child.
            CacheCorrupted: the ring is damaged.
        """
        head = _arguments.count(number, "number", 0, (1 << 63) - 1).to_bytes(_NUMBER, "little")
        messages = [head]
        if pages is not None:
            numbers = _arguments.pages(pages)
            parts = range(0, len(numbers), self._most)
            messages = [head + numbers[i : i + self._most].tobytes() for i in parts]
        self._waiting.update(zip(self._numbers, messages, strict=False))
        self.flush()

    def flush(self) -> int:
        """Put what waits in this object into the ring, as far as there is room. For a worker's idle
        step, and before it closes the ring. Returns the messages that still wait.

        Raises:
            Detached, CacheCorrupted: as `put`.
        """
        with self._lock, contextlib.suppress(LockTimeout), Hurried(PATIENCE):
            while self._waiting:
                some = list(itertools.islice(self._waiting.items(), RING_BATCH))
                pushed = self._ring.push_many([message for _, message in some])
                if not pushed:
                    break
                # An interrupt before this pushes them again: the taker ignores that.
                numbers = [number for number, _ in some[:pushed]]
                deque(map(self._waiting.pop, numbers, itertools.repeat(None)), maxlen=0)
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"<GiveBack through {self._ring.segment.name!r}: {len(self._waiting)} waiting>"


__all__ = ["GiveBack", "Loans"]
