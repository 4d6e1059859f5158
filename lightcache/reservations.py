"""Reservations: pages that this client is going to write, and those it found on the way."""

from __future__ import annotations

import contextlib
import ctypes
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout
from lightcache.errors import Abandoned, ConfigError, LeaseLost, LightcacheError
from lightcache.layout import KeyStatus
from lightcache.leases import Borrowed
from lightcache.shm.codes import Code, check, error
from lightcache.shm.errors import leave

if TYPE_CHECKING:
    from lightcache._arguments import Keys, Offsets, Pages
    from lightcache.leases import ClientId, Lease, Ticket
    from lightcache.page_index import PageIndex
NOT_ADOPTED = layout.NIL - 1  # a shard's reservation before the core has named it
_WHY = {
    0: "",
    1: "every page is pinned, kept, being written, guaranteed to another namespace, or a prefix of "
    "such a page",
    2: "the namespace is at its quota",
    3: "too many reservations are outstanding",
    4: "too many keys share a bucket, or another namespace has this key",
    5: "there is no memory for more pages, and each that has some is pinned, kept, being written, "
    "guaranteed to another namespace, or a prefix of such a page",
}
Positions = npt.NDArray[np.int64]


class Reservation(Borrowed):
    """What became of `keys[start:]`. Every key is one of

    - new: a page to be written, pinned; `pages` has them in order, `new` their positions in keys
    - present: ready already, pinned too; `present_pages` at `present`
    - busy: another client is writing it; `wait` for it, or go on without
    - missing: no room; `why` says why. All keys behind the first of these are missing or present.

    Write the new pages, then `publish`: the pages become ready when every shard is published.
    Leaving the `with` abandons what is not published (the pages are gone at once, others stop
    waiting) and unpins everything.
    """

    def __init__(
        self,
        index: PageIndex,
        start: int,
        page: Pages,
        status: npt.NDArray[np.uint8],
        progress: layout.ReserveProgress,
    ) -> None:
        """For PageIndex, and for a batch that is split: what the core has filled, or will."""
        self._done = True  # an interrupt before the last line: nothing to give back
        self._index = index
        self._start = start
        self._page = page
        self._status = status
        self._progress = progress
        self._published: set[int] = set()
        self._ready = False
        self._held: Pages | None = None
        self._done = False

    def _where(self, status: KeyStatus) -> Positions:
        return np.flatnonzero(self._status == int(status)) + self._start

    def _pages_of(self, status: KeyStatus) -> Pages:
        found: Pages = self._page[self._status == int(status)]
        return found

    @property
    def all_new(self) -> bool:
        """Whether every key that was asked for has a new page."""
        made: int = self._progress.made
        return made == len(self._page)

    @property
    def pages(self) -> Pages:
        """The pages to write, int32, in the order of their keys; pinned until the end."""
        if self.all_new:
            every: Pages = self._page.copy()
            return every
        return self._pages_of(KeyStatus.NEW)

    @property
    def new(self) -> Positions:
        """Positions in `keys` of the new pages."""
        return self._where(KeyStatus.NEW)

    @property
    def present(self) -> Positions:
        """Positions in `keys` (from `start` on) that were ready already."""
        return self._where(KeyStatus.PRESENT)

    @property
    def present_pages(self) -> Pages:
        """Their pages, pinned as well."""
        return self._pages_of(KeyStatus.PRESENT)

    @property
    def busy(self) -> Positions:
        """Positions in `keys` that another client is writing."""
        return self._where(KeyStatus.BUSY)

    @property
    def missing(self) -> Positions:
        """Positions in `keys` for which there was no room."""
        return self._where(KeyStatus.NO_ROOM)

    @property
    def why(self) -> str:
        """Why there was no room; empty when there was."""
        why = _WHY.get(self._progress.reason, "unknown")
        kept = self._progress.kept if self._progress.reason in (1, 5) else 0
        return f"{why} ({kept} are kept)" if kept else why

    @property
    def shards(self) -> int:
        """How many shards must be published."""
        return int(self._progress.shards)

    def publish(self, shard: int | None = None) -> bool:
        """Say that a shard of all new pages is written. No lock; 5 to 10 ns a page for the last.

        Args:
            shard: which one; None: all that are ours and not yet published.

        Returns:
            Whether the pages are ready now: this was the last shard.

        Raises:
            Abandoned: abandoned or cleared before (also when a shard's owner died). Release it, or
                leave the `with`: until then its keys may stay busy for all.
            LeaseLost: this shard was published before, or belongs to another client.
            ConfigError: no such shard.
            Detached: closed, or a forked child.
        """
        if self._done:
            raise Abandoned("publish: this reservation has ended; reserve again and write again")
        if shard is not None:
            shard = _arguments.count(shard, "shard", 0, self.shards - 1)
            if not self._publish_one(shard, self.pages):
                raise LeaseLost(f"publish: shard {shard} belongs to the client that adopted it")
            return self._ready
        left = [each for each in range(self.shards) if each not in self._published]
        pages = self.pages
        if not [each for each in left if self._publish_one(each, pages)]:
            raise LeaseLost("publish: every shard was published before, or adopted by others")
        return self._ready

    def _publish_one(self, shard: int, pages: Pages) -> bool:
        """False: it belongs to somebody else."""
        if self._progress.gen == 0:  # nothing was new
            self._published.add(shard)
            self._ready = True
            return True
        code = self._index._quick.lci_publish(
            self._index._handle,
            self._progress.rid,
            self._progress.gen,
            shard,
            _arguments.address(pages),
            len(pages),
        )
        if code == Code.STALE:
            raise Abandoned("publish: this reservation was abandoned or its writer declared dead")
        if code == Code.OWNER:
            return False
        check(code, f"publish shard {shard}")
        self._published.add(shard)
        self._ready = bool(code)
        return True

    def ticket(self, adopters: list[ClientId], *, timeout: float = 60.0) -> Ticket:
        """Let others write shards of these pages: who adopts it with `shard=k` owns shard k.

        Args:
            adopters: who may adopt, each once; see `PageIndex.client_id`.
            timeout: seconds until adopting ends.

        Raises:
            ConfigError: there is no new page to write.
        """
        if not len(self.new):
            raise ConfigError("ticket: this reservation has no new pages, so nothing to hand out")
        return self._index._give_ticket(self.pages, self._progress, adopters, timeout)

    def abandon(self) -> None:
        """Give up what is not published: its keys are gone from every lookup when this returns,
        and whoever waits for them goes on. Unpins everything. Takes the lock; once is enough.

        Raises:
            LeaseLost: ended already.
            LockTimeout: the lock's holder did not give it back in time.
        """
        if self._done:
            raise LeaseLost("abandon: this reservation has ended before")
        self._end()

    def release(self) -> None:
        """The same as leaving the `with`: abandon what is not published, unpin everything."""
        if self._done:
            raise LeaseLost("release: this reservation has ended before; release it once")
        self._end()

    def _end(self) -> None:
        """Abandon first, while our pins keep the pages ours, then unpin; may be called again
        after an interrupt anywhere in between."""
        self._give_up()
        code = self._index._quick.lci_unreserve(
            self._index._handle,
            ctypes.byref(self._progress),
            _arguments.address(self._page),
            _arguments.address(self._status),
            len(self._page),
        )
        self._done = True
        if code not in (Code.OK, Code.FORKED, Code.CLOSED):
            check(code, "unpin a reservation")

    def _give_up(self) -> None:
        """Abandon what is not published, and keep the pins: nobody gets the pages yet."""
        if self._progress.gen and not self._ready:
            # LeaseLost: a shard's owner died or the namespace was cleared, it ended without us
            with contextlib.suppress(LeaseLost):
                self._index._abandon(self._progress.rid, self._progress.gen)

    def __repr__(self) -> str:
        return (
            f"<Reservation {len(self.new)} new, {len(self.present)} present, "
            f"{len(self.busy)} busy, {len(self.missing)} missing>"
        )


class Shard(Borrowed):
    """One shard of somebody's reservation, adopted from a ticket: pages to write, pinned in our
    own name. `publish` it, or leave the `with`: then nobody can publish it any more, so the whole
    reservation is abandoned, and the giver told that it failed."""

    def __init__(self, index: PageIndex, lease: Lease, shard: int, ticket: bytes) -> None:
        """For PageIndex.adopt, before anything is adopted."""
        self._done = True  # as in Reservation
        self._index = index
        self._lease = lease
        self.shard = shard
        self._rid = ctypes.c_uint32(NOT_ADOPTED)
        self._gen = ctypes.c_uint32()
        self._ticket = ticket
        self._told = False
        self._done = False

    @property
    def pages(self) -> Pages:
        """The pages to write, int32, in the order of their keys.

        Raises:
            LeaseLost: released already.
        """
        return self._lease.pages

    def publish(self) -> bool:
        """Say that our shard of all pages is written; also gives the ticket's verdict.

        Returns:
            Whether the pages are ready now: this was the last shard.

        Raises:
            As `Reservation.publish`.
        """
        if self._done:
            raise Abandoned("publish: this shard was released before")
        return self._publish()

    def _publish(self) -> bool:
        code = self._index._quick.lci_publish(
            self._index._handle,
            self._rid.value,
            self._gen.value,
            self.shard,
            _arguments.address(self.pages),
            len(self.pages),
        )
        if code == Code.STALE:
            raise Abandoned("publish: the reservation was abandoned, cleared, or its owner died")
        check(code, f"publish shard {self.shard}")
        self._told = True
        # It is published, whatever became of the ticket: revoked, late, or its giver died.
        self._index._ticket_done_code(self._ticket, True)
        return bool(code)

    def release(self) -> None:
        """Unpin. A shard that was not published abandons the reservation, which takes the lock.

        Raises:
            LeaseLost: released already.
        """
        if self._done:
            raise LeaseLost("release: this shard was released before; release it once")
        self._end()

    def _end(self) -> None:
        """May be called again after an interrupt anywhere in between."""
        self._give_up()
        self._lease._let_go()
        self._done = True

    def _give_up(self) -> None:
        """Abandon if it is not published, and keep the pins: nobody gets the pages yet."""
        if not self._told and self._rid.value != NOT_ADOPTED:
            code = self._index._ticket_done_code(self._ticket, False)
            if code not in (Code.OK, Code.STALE, Code.TWICE, Code.FORKED, Code.CLOSED):
                check(code, "tell that a shard failed")
            if self._rid.value != layout.NIL and not self._index._unusable():
                with contextlib.suppress(LeaseLost):  # it has ended in another way
                    self._index._abandon(self._rid.value, self._gen.value)


def empty_reservation(
    index: PageIndex, n: int, start: int, shards: int, namespace: int
) -> Reservation:
    """Of keys [start, n), before anything is reserved."""
    page, status = np.full(n - start, -1, np.int32), np.zeros(n - start, np.uint8)
    progress = layout.ReserveProgress(shards=shards, ns=namespace)
    return Reservation(index, start, page, status, progress)


def reserve_arguments(reservation: Reservation, where: Any, n: int) -> tuple[object, ...]:
    """What lci_reserve takes between the handle and (wait, deadline); `where` are the n keys."""
    return (
        ctypes.byref(reservation._progress),
        where,
        n,
        reservation._start,
        _arguments.address(reservation._page),
        _arguments.address(reservation._status),
    )


# ---- ReservationBatch: reservations of several requests, made by one call of the core.

_PROGRESS = np.dtype(layout.ReserveProgress)
_NEW = int(KeyStatus.NEW)


class ReservationBatch:
    """The reservations of several requests, made in one call. Published and released together, or
    split. Each is one of its own: others may see some of them and not the rest."""

    def __init__(
        self, index: PageIndex, bounds: Offsets, starts: Offsets, shards: int, namespace: int
    ) -> None:
        """For PageIndex: nothing is reserved yet. The arguments are sound."""
        self._done = True  # an interrupt before the last line: nothing to give back
        self._index, self._bounds, self._starts = index, bounds, starts
        self._sizes = bounds[1:] - bounds[:-1] - starts
        total = int(self._sizes.sum())
        self._page = np.full(total, -1, np.int32)
        self._status = np.zeros(total, np.uint8)
        self._records = bytearray(len(starts) * _PROGRESS.itemsize)
        self._progress = np.frombuffer(self._records, _PROGRESS)
        self._progress["shards"] = shards
        self._progress["ns"] = namespace
        self._published: list[LightcacheError | None] = []
        self._done = False

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._starts)

    @property
    def all_new(self) -> bool:
        """Whether every key that was asked for has a new page."""
        return int(self._progress["made"].sum()) == len(self._page)

    @property
    def pages(self) -> Pages:
        """The pages to write, int32, one request's behind the other's; pinned until the end."""
        if self.all_new:
            every: Pages = self._page.copy()
            return every
        found: Pages = self._page[self._status == _NEW]
        return found

    def publish(self) -> list[LightcacheError | None]:
        """Say that all shards of all new pages are written. No lock. One that fails holds up no
        other: for each request None, or what `Reservation.publish` would have raised.

        Raises:
            Abandoned: released or split before.
            LeaseLost: published before.
            Detached: closed, or a forked child.
        """
        if self._done:
            raise Abandoned("publish: this batch has ended; reserve again and write again")
        if self._published:
            raise LeaseLost("publish: this batch was published before; do it once")
        self._index._segment.check_usable()
        pages, codes = self.pages, np.zeros(len(self), np.int32)
        code = self._index._quick.lci_publish_many(
            self._index._handle,
            _arguments.address(self._progress),
            len(self),
            _arguments.address(pages),
            _arguments.address(codes),
        )
        check(code, "publish")
        self._published = [None if code >= 0 else _refused(code) for code in codes.tolist()]
        return self._published

    def split(self) -> list[Reservation]:
        """A reservation for each request, each to be published and released on its own; this batch
        is empty then.

        Raises:
            LeaseLost: released, split or published before.
        """
        if self._done or self._published:
            raise LeaseLost("split: this batch was released, split or published before")
        parts, at = [], 0
        for i, size in enumerate(self._sizes.tolist()):
            progress = layout.ReserveProgress.from_buffer(self._records, i * _PROGRESS.itemsize)
            page, status = self._page[at : at + size], self._status[at : at + size]
            parts.append(Reservation(self._index, int(self._starts[i]), page, status, progress))
            at += size
        self._done = True  # an interrupt before: both give back, and the core does it once
        return parts

    def release(self) -> None:
        """Abandon what is not published, unpin everything. Takes the lock if anything is not.

        Raises:
            LeaseLost: released or split before.
        """
        if self._done:
            raise LeaseLost("release: this batch was released or split before; release it once")
        self._end()

    def _end(self) -> None:
        """As `Reservation._end`, for each."""
        for i, failed in enumerate(self._published or [_NEVER] * len(self)):
            if failed is not None and (gen := int(self._progress["gen"][i])):
                with contextlib.suppress(LeaseLost):  # it has ended in another way
                    self._index._abandon(int(self._progress["rid"][i]), gen)
        code = self._index._quick.lci_unreserve_many(
            self._index._handle,
            _arguments.address(self._progress),
            _arguments.address(self._bounds),
            _arguments.address(self._starts),
            len(self),
            _arguments.address(self._page),
            _arguments.address(self._status),
        )
        self._done = True
        if code not in (Code.OK, Code.FORKED, Code.CLOSED):
            check(code, "unpin a batch of reservations")

    def __enter__(self) -> ReservationBatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._done and not self._index._unusable():
            leave(self._end, error)

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and not self._index._unusable():
            self._end()

    def _wanted(self) -> int:
        """Pages without memory that the first request that is not through wants."""
        at = self._progress
        through = (at["pinned"] != 0) & ((at["stopped"] != 0) | (at["cursor"] >= self._sizes))
        return int(at["wanted"][int(np.argmin(through))])


_NEVER = LightcacheError("not published")


def _refused(code: int) -> LightcacheError:
    if code == Code.STALE:
        return Abandoned("publish: this reservation was abandoned or its writer declared dead")
    return error(code, "publish")


def reserve_batch(
    index: PageIndex,
    keys: Keys,
    offsets: Offsets,
    starts: object,
    shards: int,
    namespace: int,
    timeout: float | None,
) -> ReservationBatch:
    """See `PageIndex.reserve_batch`."""
    where, n = _arguments.keys(keys)
    bounds = _arguments.offsets(offsets, n)
    begins = _starts(starts, bounds)
    _arguments.count(shards, "shards", 1, layout.SHARDS)
    batch = ReservationBatch(index, bounds, begins, shards, namespace)
    arguments = (
        _arguments.address(batch._progress),
        where,
        _arguments.address(bounds),
        _arguments.address(begins),
        len(batch),
        _arguments.address(batch._page),
        _arguments.address(batch._status),
    )
    try:
        code = index._locked("lci_reserve_many", *arguments, what="reserve", timeout=timeout)
        while code == Code.GROW:
            batch._progress["no_memory"] = not index._need_memory(batch._wanted())
            code = index._locked("lci_reserve_many", *arguments, what="reserve", timeout=timeout)
        check(code, "reserve")
    except BaseException:
        batch.__exit__(None, None, None)
        raise
    return batch


def _starts(starts: object, bounds: Offsets) -> npt.NDArray[np.int64]:
    """The first key to reserve of each request, checked."""
    requests = len(bounds) - 1
    if starts is None:
        return np.zeros(requests, np.int64)
    found = np.asarray(starts)
    if found.shape != (requests,) or (requests and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"starts: expected {requests} integers, found {found.dtype} {found.shape}"
        )
    begins = np.ascontiguousarray(found, np.int64)
    if requests and (begins.min() < 0 or (begins > bounds[1:] - bounds[:-1]).any()):
        raise ConfigError(
            "starts: expected each to lie within the keys of its request, found "
            f"{begins.tolist()[:8]} for {np.diff(bounds).tolist()[:8]} keys"
        )
    return begins


__all__ = ["ReservationBatch", "reserve_batch"]
