"""Reservations: pages that this client is about to write, and the status of each key."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout
from lightcache._core import Core
from lightcache.errors import Abandoned, ConfigError, LeaseLost, LightcacheError
from lightcache.layout import Hint, KeyStatus, WhyMissing
from lightcache.leases import (
    HEADER_BYTES,
    REFUSALS,
    Hold,
    Lease,
    Positions,
    Releasable,
    Ticket,
    buffer_for,
    give_ticket,
    parse,
    ticket_done_code,
)
from lightcache.shm.codes import Code, check, error
from lightcache.shm.errors import leave
from lightcache.shm.locking import deadline_ns

if TYPE_CHECKING:
    from lightcache._arguments import Keys, Offsets, Pages
    from lightcache.leases import ClientId
    from lightcache.runs import Run

NOT_ADOPTED = layout.NIL - 1  # the id of a shard's reservation until the core has set it
_WHY = {
    WhyMissing.NONE: "",
    WhyMissing.PINNED: "every page is pinned, kept, being written, guaranteed to others, or a "
    "prefix of such a page",
    WhyMissing.QUOTA: "the namespace is at its quota",
    WhyMissing.RESERVATIONS: "too many reservations are outstanding",
    WhyMissing.CHAIN: "too many keys share a bucket, or another namespace has this key",
    WhyMissing.MEMORY: "there is no memory for more pages, and each that has some is pinned, kept, "
    "being written, guaranteed to others, or a prefix of such a page",
    WhyMissing.HEAD: "the page of the key before them is not cached, or another namespace's or "
    "group's",
    WhyMissing.TEAM: "the rank of the team that began this reservation did not reserve them",
    WhyMissing.WORTH: "they are not worth writing: each page that could go for them is likelier to "
    "be used",
}


@dataclass(frozen=True)
class Team:
    """For `reserve`: a rank among those that write together."""

    number: int
    shard: int
    timeout: float
    """Seconds until ranks can no longer join."""


class Reservation(Releasable):
    """The result of reserving `keys[start:]`. Every key is one of

    - new: a page to be written, pinned; `pages` has them in order, `new` their positions in keys
    - present: already ready, and now pinned; `present_pages` has the pages, `present` the positions
    - busy: another client is writing it; `wait` for it, or continue without it
    - missing: no room; `why` has the reason. All keys after the first missing one are missing or
      present.

    Write the new pages, then `publish`: the pages become ready when every shard is published.
    Leaving the `with` abandons unpublished pages (they are gone at once, and other clients stop
    waiting) and unpins everything. A rank of a team that leaves without having published its shard
    abandons the pages for all ranks; their `publish` raises Abandoned.
    """

    def __init__(
        self,
        core: Core,
        start: int,
        page: Pages,
        status: npt.NDArray[np.uint8],
        progress: layout.ReserveProgress,
    ) -> None:
        """For PageIndex, and for splitting a batch. The core has filled the arrays, or will."""
        self.ended = True  # an interrupt before the last line: nothing to give back
        self._core = core
        self._start = start
        self._page = page
        self._status = status
        self._progress = progress
        self._published: set[int] = set()
        self._ready = False
        self._held: Pages | None = None
        self.own_shard: int | None = int(progress.shard) if progress.team else None
        """Of a team: the shard that this rank writes. None: it is no team's."""
        self.ended = False

    def _where(self, status: KeyStatus) -> Positions:
        return np.flatnonzero(self._status == int(status)) + self._start

    def _pages_of(self, status: KeyStatus) -> Pages:
        pages: Pages = self._page[self._status == int(status)]
        return pages

    @property
    def all_new(self) -> bool:
        """True if every key that was asked for has a new page."""
        created: int = self._progress.made
        return created == len(self._page)

    @property
    def pages(self) -> Pages:
        """The pages to write, int32, in the order of their keys; pinned until the reservation
        ends."""
        if self._progress.made == len(self._page):
            every: Pages = self._page.copy()
            return every
        return self._pages_of(KeyStatus.NEW)

    @property
    def new(self) -> Positions:
        """Positions in `keys` of the new pages."""
        return self._where(KeyStatus.NEW)

    @property
    def present(self) -> Positions:
        """Positions in `keys` (from `start` on) that were already ready."""
        return self._where(KeyStatus.PRESENT)

    @property
    def present_pages(self) -> Pages:
        """The pages of `present`, also pinned."""
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
        """Why there was no room; empty if there was."""
        reason = self.why_missing
        why = _WHY[reason]
        pinned = reason in (WhyMissing.PINNED, WhyMissing.MEMORY)
        kept = self._progress.kept if pinned else 0
        return f"{why} ({kept} are kept)" if kept else why

    @property
    def why_missing(self) -> WhyMissing:
        """The same as a value to compare."""
        return WhyMissing(self._progress.reason)

    @property
    def shards(self) -> int:
        """Number of shards that must be published."""
        return int(self._progress.shards)

    @property
    def joined(self) -> bool:
        """True if another rank of the team has begun it, and owns it."""
        return bool(self._progress.joined)

    def publish(self, shard: int | None = None) -> bool:
        """Declare a shard of all new pages written. Takes no lock; 5 to 10 ns a page for the last
        shard.

        Args:
            shard: its number; None: all that belong to this client and are not yet published; of a
                team the shard that was reserved with.

        Returns:
            True if the pages are ready now: this was the last shard.

        Raises:
            Abandoned: abandoned or cleared before (also if a shard's owner died). Release it, or
                leave the `with`: until then its keys may stay busy for all clients.
            LeaseLost: this shard was published before, or belongs to another client.
            ConfigError: no such shard.
            Detached: closed, or a forked child.
        """
        if self.ended:
            raise Abandoned("publish: this reservation has ended; reserve again and write again")
        if shard is not None:
            shard = _arguments.count(shard, "shard", 0, self.shards - 1)
            if not self._publish_one(shard, self.pages):
                raise LeaseLost(f"publish: shard {shard} belongs to the client that adopted it")
            return self._ready
        pages, ours = self.pages, 0
        own = self.own_shard
        first, end = (0, self._progress.shards) if own is None else (own, own + 1)
        for number in range(first, end):
            if number not in self._published:
                ours += self._publish_one(number, pages)
        if not ours:
            raise LeaseLost("publish: every shard was published before, or adopted by others")
        return self._ready

    def _publish_one(self, shard: int, pages: Pages) -> bool:
        """Returns False if the shard belongs to another client."""
        if self._progress.gen == 0:  # nothing was new
            self._published.add(shard)
            self._ready = True
            return True
        code = self._core.quick.lci_publish(
            self._core.handle,
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
        if code < 0:
            check(code, f"publish shard {shard}")
        self._published.add(shard)
        self._ready = bool(code)
        return True

    def ticket(self, adopters: list[ClientId], *, timeout: float = 60.0) -> Ticket:
        """Let other clients write shards of these pages: a client that adopts the ticket with
        `shard=k` owns shard k.

        Args:
            adopters: the clients that may adopt, each once; see `PageIndex.client_id`.
            timeout: seconds until the ticket can no longer be adopted.

        Raises:
            ConfigError: there is no new page to write, or it is a team's.
            Otherwise as `PageIndex.ticket`.
        """
        if self._progress.team:
            raise ConfigError("ticket: ranks of a team join with `reserve(team=)`, without tickets")
        if not len(self.new):
            raise ConfigError("ticket: this reservation has no new pages, so nothing to hand out")
        return give_ticket(self._core, self.pages, self._progress, adopters, timeout)

    def abandon(self) -> None:
        """Give up the unpublished pages. When this returns, no lookup finds their keys and no
        client waits for them. Unpins everything. Takes the lock. Call it once.

        Raises:
            LeaseLost: already ended.
            LockTimeout: the lock's holder did not release it in time.
        """
        if self.ended:
            raise LeaseLost("abandon: this reservation has ended before")
        self._end()

    def release(self) -> None:
        """Like leaving the `with`: abandon unpublished pages, unpin everything.

        Raises:
            As `abandon`.
        """
        if self.ended:
            raise LeaseLost("release: this reservation has ended before; release it once")
        self._end()

    def _end(self) -> None:
        """Abandon first, while the pins still hold the pages, then unpin. Can be repeated after an
        interrupt at any point."""
        self.give_up()
        code = self._core.quick.lci_unreserve(
            self._core.handle,
            ctypes.byref(self._progress),
            _arguments.address(self._page),
            _arguments.address(self._status),
            len(self._page),
        )
        self.ended = True
        if code not in (Code.OK, Code.FORKED, Code.CLOSED):
            check(code, "unpin a reservation")

    def hold(self) -> Hold:
        """For modules of lightcache that take the pages over."""
        note = partial(setattr, self, "_ready", True)
        return Hold(self._core, self._give_back, self.give_up, self._publish_all, note)

    def _publish_all(self) -> bool:
        """For a copy that has taken over a reservation of one shard, or a team's."""
        if not self._publish_one(self.own_shard or 0, self.pages):
            raise LeaseLost("publish: the reservation's shard was adopted by another client")
        return self._ready

    def give_up(self) -> None:
        """For modules of lightcache: abandon unpublished pages but keep the pins, so that the pages
        are not handed out yet. May be repeated. A rank that has published its shard gives up
        nothing: the others finish."""
        given_up = self.own_shard is None or self.own_shard not in self._published
        if given_up and not self._ready and self._progress.gen:
            # LeaseLost: already ended, since a shard's owner died or the namespace was cleared
            with contextlib.suppress(LeaseLost):
                self._core.abandon(self._progress.rid, self._progress.gen)

    def __repr__(self) -> str:
        return (
            f"<Reservation {len(self.new)} new, {len(self.present)} present, "
            f"{len(self.busy)} busy, {len(self.missing)} missing>"
        )


class ReservationShard(Releasable):
    """One shard of another client's reservation, adopted from a ticket: pages to write, pinned by
    this client. `publish` it, or leave the `with`. An unpublished shard abandons the whole
    reservation, and the ticket's owner learns that it failed."""

    def __init__(
        self,
        core: Core,
        lease: Lease,
        shard: int,
        ticket: bytes,
        rid: ctypes.c_uint32,
        gen: ctypes.c_uint32,
    ) -> None:
        """For `adopt`, before the call that adopts and sets `rid` and `gen`."""
        self.ended = True  # as in Reservation
        self._core = core
        self._lease = lease
        self.shard = shard
        self._ticket = ticket
        self._rid = rid
        self._gen = gen
        self._told = False
        self.ended = False

    @property
    def pages(self) -> Pages:
        """The pages to write, int32, in the order of their keys.

        Raises:
            LeaseLost: already released.
        """
        return self._lease.pages

    def publish(self) -> bool:
        """Publish this shard of all pages. Also reports success to the ticket's owner.

        Returns:
            True if the pages are ready now: this was the last shard.

        Raises:
            As `Reservation.publish`.
        """
        if self.ended:
            raise Abandoned("publish: this shard was released before")
        return self._publish()

    def _publish(self) -> bool:
        code = self._core.quick.lci_publish(
            self._core.handle,
            self._rid.value,
            self._gen.value,
            self.shard,
            _arguments.address_of_any(self.pages),
            len(self.pages),
        )
        if code == Code.STALE:
            raise Abandoned("publish: the reservation was abandoned, cleared, or its owner died")
        check(code, f"publish shard {self.shard}")
        self._told = True
        # It is published even if the ticket was revoked or late, or its owner died.
        ticket_done_code(self._core, self._ticket, True)
        return bool(code)

    def release(self) -> None:
        """Unpin. Releasing an unpublished shard abandons the reservation, which takes the lock.

        Raises:
            LeaseLost: already released.
        """
        if self.ended:
            raise LeaseLost("release: this shard was released before; release it once")
        self._end()

    def hold(self) -> Hold:
        """For modules of lightcache that take the pages over."""
        return Hold(self._core, self._give_back, self._give_up, self._publish)

    def _end(self) -> None:
        """Can be repeated after an interrupt at any point."""
        self._give_up()
        if self._rid.value != layout.NIL:  # else the ticket was a lease's, and the lease is used
            self._lease.close()
        self.ended = True

    def _give_up(self) -> None:
        """Abandon if unpublished but keep the pins, so that the pages are not handed out yet."""
        if not self._told and self._rid.value not in (NOT_ADOPTED, layout.NIL):
            code = ticket_done_code(self._core, self._ticket, False)
            if code not in (Code.OK, Code.STALE, Code.TWICE, Code.FORKED, Code.CLOSED):
                check(code, "tell that a shard failed")
            if not self._core.unusable():
                with contextlib.suppress(LeaseLost):  # already ended
                    self._core.abandon(self._rid.value, self._gen.value)


def adopt(
    core: Core, ticket: bytes, shard: int | None, timeout: float | None
) -> Lease | ReservationShard:
    """See `PageIndex.adopt`."""
    ref = parse(ticket)
    number = layout.SHARDS if shard is None else shard
    _arguments.count(number, "shard", 0, layout.SHARDS)
    size = core.quick.lci_ticket_size(core.handle, ctypes.byref(ref))
    if size < 0:
        _refuse(size)
    buffer = buffer_for(size)
    rid, gen = ctypes.c_uint32(NOT_ADOPTED), ctypes.c_uint32()
    lease = Lease(core, buffer)
    adopted = ReservationShard(core, lease, number, bytes(ticket), rid, gen)
    where = ctypes.addressof(buffer)
    code = core.locked(
        "lci_adopt",
        ctypes.byref(ref),
        number,
        ctypes.c_void_p(where),
        ctypes.c_void_p(where + HEADER_BYTES),
        size,
        ctypes.byref(rid),
        ctypes.byref(gen),
        what="adopt a ticket",
        timeout=timeout,
    )
    if code == Code.RANGE and shard is None:
        raise ConfigError("adopt: this is a reservation's ticket; say which shard you write")
    if code < 0:
        _refuse(code)
    return lease if rid.value == layout.NIL else adopted


def _refuse(code: int) -> None:
    if code in REFUSALS:
        raise LeaseLost(f"adopt: {REFUSALS[Code(code)]}")
    check(code, "adopt a ticket")


def reserve(
    core: Core,
    keys: Keys,
    start: int,
    after: Keys | None,
    shards: int,
    team: Team | None,
    namespace: int,
    independent: bool,
    run: Run,
    admission: bool,
    hint: Hint,
    timeout: float | None,
) -> Reservation:
    """See `PageIndex.reserve`."""
    where, n = _arguments.keys(keys)
    _arguments.count(start, "start", 0, n)
    _arguments.count(shards, "shards", 1, layout.SHARDS)
    page, status = np.full(n - start, -1, np.int32), np.zeros(n - start, np.uint8)
    before = 0  # keys before those of the caller
    if after is not None:
        _arguments.one_key(after, "after")
        before = run.parts if independent else 1  # the core counts the parts of runs from keys[0]
        keys = np.concatenate([after] * before + [keys])
        where = _arguments.keys(keys)[0]
    progress = layout.ReserveProgress(
        shards=shards,
        ns=namespace,
        run=run.parts if independent else 0,
        group=run.group,
        whole=independent and run.group != 0,
        linked=after is not None and not independent,
        admission=admission,
        hint=hint,
    )
    if team is not None:
        progress.team = team.number
        progress.shard = _arguments.count(team.shard, "shard", 0, shards - 1)
        endless = math.isinf(team.timeout)
        progress.join_until = deadline_ns(None if endless else team.timeout)
    reservation = Reservation(core, start, page, status, progress)
    arguments = (
        ctypes.byref(progress),
        where,
        n + before,
        start + before,
        _arguments.address(page),
        _arguments.address(status),
    )
    try:
        code = core.locked("lci_reserve", *arguments, what="reserve", timeout=timeout)
        while code == Code.GROW:
            progress.no_memory = not core.need_memory(int(progress.wanted))
            code = core.locked("lci_reserve", *arguments, what="reserve", timeout=timeout)
        if code < 0:
            check(code, "reserve")
    except BaseException:
        reservation.__exit__(None, None, None)
        raise
    return reservation


# ---- Reservations of several requests, made by one call of the core.

_PROGRESS = np.dtype(layout.ReserveProgress)
_NEW = int(KeyStatus.NEW)


class ReservationBatch:
    """The reservations of several requests, made in one call. Published and released together, or
    split. They are independent: other clients may see some of them before the rest."""

    def __init__(
        self,
        core: Core,
        bounds: Offsets,
        starts: Offsets,
        page: Pages,
        status: npt.NDArray[np.uint8],
        records: bytearray,
    ) -> None:
        """For `reserve_batch`: nothing is reserved yet. `records` has a `ReserveProgress` for each
        request. The core writes into it, `page` and `status`."""
        self.ended = True  # an interrupt before the last line: nothing to give back
        self._core, self._bounds, self._starts = core, bounds, starts
        self._sizes = bounds[1:] - bounds[:-1] - starts
        self._page, self._status = page, status
        self._records = records
        self._progress = np.frombuffer(records, _PROGRESS)
        self._published: list[LightcacheError | None] = []
        self.ended = False

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._starts)

    @property
    def all_new(self) -> bool:
        """True if every key that was asked for has a new page."""
        return int(self._progress["made"].sum()) == len(self._page)

    @property
    def pages(self) -> Pages:
        """The pages to write, int32, request after request; pinned until the batch ends."""
        if self.all_new:
            every: Pages = self._page.copy()
            return every
        pages: Pages = self._page[self._status == _NEW]
        return pages

    def publish(self) -> list[LightcacheError | None]:
        """Declare all shards of all new pages written. Takes no lock. A failure does not stop the
        others: returns for each request None, or the error that `Reservation.publish` would raise.

        Raises:
            Abandoned: released or split before.
            LeaseLost: published before.
            Detached: closed, or a forked child.
        """
        if self.ended:
            raise Abandoned("publish: this batch has ended; reserve again and write again")
        if self._published:
            raise LeaseLost("publish: this batch was published before; do it once")
        self._core.segment.check_usable()
        pages, codes = self.pages, np.zeros(len(self), np.int32)
        code = self._core.quick.lci_publish_many(
            self._core.handle,
            _arguments.address(self._progress),
            len(self),
            _arguments.address(pages),
            _arguments.address(codes),
        )
        check(code, "publish")
        self._published = [None if code >= 0 else _refused(code) for code in codes.tolist()]
        return self._published

    def split(self) -> list[Reservation]:
        """Return a reservation for each request, to be published and released separately. This
        batch is then empty.

        Raises:
            LeaseLost: released, split or published before.
        """
        if self.ended or self._published:
            raise LeaseLost("split: this batch was released, split or published before")
        parts, begin = [], 0
        for i, size in enumerate(self._sizes.tolist()):
            progress = layout.ReserveProgress.from_buffer(self._records, i * _PROGRESS.itemsize)
            page, status = self._page[begin : begin + size], self._status[begin : begin + size]
            parts.append(Reservation(self._core, int(self._starts[i]), page, status, progress))
            begin += size
        self.ended = True  # an interrupt before: both give back, and the core does it once
        return parts

    def release(self) -> None:
        """Abandon unpublished pages, unpin everything. Takes the lock if any page is unpublished.

        Raises:
            LeaseLost: released or split before.
        """
        if self.ended:
            raise LeaseLost("release: this batch was released or split before; release it once")
        self._end()

    def _end(self) -> None:
        """See `Reservation._end`, for each request."""
        for i, failed in enumerate(self._published or [_NEVER] * len(self)):
            if failed is not None and (gen := int(self._progress["gen"][i])):
                with contextlib.suppress(LeaseLost):  # already ended
                    self._core.abandon(int(self._progress["rid"][i]), gen)
        code = self._core.quick.lci_unreserve_many(
            self._core.handle,
            _arguments.address(self._progress),
            _arguments.address(self._bounds),
            _arguments.address(self._starts),
            len(self),
            _arguments.address(self._page),
            _arguments.address(self._status),
        )
        self.ended = True
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
        if not self.ended and not self._core.unusable():
            leave(self._end, error)

    def __del__(self) -> None:
        if not getattr(self, "ended", True) and not self._core.unusable():
            self._end()


_NEVER = LightcacheError("not published")


def _refused(code: int) -> LightcacheError:
    if code == Code.STALE:
        return Abandoned("publish: this reservation was abandoned or its writer declared dead")
    return error(code, "publish")


def reserve_batch(
    core: Core,
    keys: Keys,
    offsets: Offsets,
    starts: object,
    shards: int,
    namespace: int,
    independent: bool,
    admission: bool | Sequence[bool],
    hints: Sequence[Hint] | None,
    timeout: float | None,
) -> ReservationBatch:
    """See `PageIndex.reserve_batch`."""
    where, n = _arguments.keys(keys)
    bounds = _arguments.offsets(offsets, n)
    begins = _arguments.starts(starts, bounds)
    _arguments.count(shards, "shards", 1, layout.SHARDS)
    sizes = bounds[1:] - bounds[:-1] - begins
    page = np.full(int(sizes.sum()), -1, np.int32)
    status = np.zeros(len(page), np.uint8)
    records = bytearray(len(begins) * _PROGRESS.itemsize)
    progress = np.frombuffer(records, _PROGRESS)
    progress["shards"] = shards
    progress["ns"] = namespace
    progress["run"] = independent
    progress["admission"] = admission
    if hints is not None:
        progress["hint"] = hints
    batch = ReservationBatch(core, bounds, begins, page, status, records)
    arguments = (
        _arguments.address(progress),
        where,
        _arguments.address(bounds),
        _arguments.address(begins),
        len(begins),
        _arguments.address(page),
        _arguments.address(status),
    )
    try:
        code = core.locked("lci_reserve_many", *arguments, what="reserve", timeout=timeout)
        while code == Code.GROW:
            progress["no_memory"] = not core.need_memory(_pages_wanted(progress, sizes))
            code = core.locked("lci_reserve_many", *arguments, what="reserve", timeout=timeout)
        if code < 0:
            check(code, "reserve")
    except BaseException:
        batch.__exit__(None, None, None)
        raise
    return batch


def _pages_wanted(progress: Any, sizes: Offsets) -> int:
    """Pages without memory that the first unfinished request needs."""
    finished = (progress["pinned"] != 0) & (
        (progress["stopped"] != 0) | (progress["cursor"] >= sizes)
    )
    return int(progress["wanted"][int(np.argmin(finished))])


__all__ = ["ReservationBatch", "reserve_batch"]
