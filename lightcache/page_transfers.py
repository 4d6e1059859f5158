"""Offload and Load: copies, and the pages that each may touch until it has finished.

A page must not be given to another client while a copy may still read or write it. Reservations,
shards and leases hold pages by pins; a copy continues whatever becomes of the objects of the code
that started it. So the pins belong to the copy, which keeps them exactly as long as it runs:

1. Taking over. `Offload` and `Load` take their reservation, shard or lease before the copy starts.
   For its first owner it has ended: leaving its `with`, releasing or dropping it does nothing more.
   Bad input is refused before anything is copied, and then it is the caller's as before.
2. Holding. A `Keeper` owns the pins. The transfer holds it (`when_done`), and the runner of a
   transfer holds that until the copy has finished: a thread of the host engine, the device engine's
   own list. So nothing that happens to `Offload` or `Load`, garbage collection included, ends the
   pins before the copy.
3. Ending. The keeper is told by `done` and `wait`, and by the `poll` and `close` of its transfer
   engine; one that is polled each step needs no more. It publishes if the copy succeeded and was
   not aborted, abandons otherwise, and then unpins; each may be done twice, so an interrupt in
   between is mended by the next call. If the call itself is lost to an interrupt, the keeper is
   garbage now, with the copy finished, and unpins as it is collected.
4. Giving up. `abort`, an exception that leaves the `with`, or dropping an `Offload` whose copy is
   in flight: the keys are abandoned at once, so no client waits for them; the pages stay pinned,
   doomed and without a key, until the copy has finished. What was dropped is not published although
   its copy may succeed, because its source may have been changed. If the process is killed
   meanwhile, such pages are quarantined like those still being written.
5. Interrupts. The engine is given the keeper with the call that starts the copy, and has it before
   anything is copied. So if an interrupt, or an error of the device, comes out of that call, the
   engine knows whether a copy is in flight (`will_tell`): the pages are the keeper's until that has
   finished, and are not published, or they are the caller's again.

Close transfer engines before caches: closing a cache gives back everything that it holds, and it
refuses (InUse) while a transfer engine keeps views of its pool.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.errors import (
    Abandoned,
    ConfigError,
    LeaseLost,
    LightcacheError,
    TransferFailed,
    WaitTimeout,
)
from lightcache.kernels.moves import Engine, Move, Transfer, integers
from lightcache.leases import Lease, Releasable
from lightcache.reservations import Reservation, ReservationShard
from lightcache.shm.errors import leave

# ---- The owner of the pages of a copy.

_NAP = 1e-3  # seconds between two looks at a copy that was interrupted


class Keeper:
    """Owns a reservation, a shard or leases for as long as a copy may touch their pages. Any thread
    may call it."""

    def __init__(self, *sources: Releasable) -> None:
        """Owns nothing yet.

        Args:
            sources: a reservation, a shard, or the leases of one copy.
        """
        self.owns = False
        """Whether the pages are a copy's, so that they are given back here."""
        self.ended = False
        """Whether they were given back."""
        self.engine: Engine | None = None
        """Of the copy; None: none of ours."""
        self.given_up = False
        """Whether nothing of it is to be published."""
        self._sources = sources
        self._holds = [source.hold() for source in sources]
        self._hold = self._holds[0]
        # Re-entrant: a garbage collection inside of `over` may drop the Offload, which aborts.
        self._lock = threading.RLock()
        self._begun = False
        self._told: bool | None = None
        self._publishing = False
        self._error: LightcacheError | None = None
        self.ready: bool | None = None
        """See `Offload.ready`."""

    def begin(self, engine: Engine, call: Callable[..., Transfer]) -> Transfer:
        """Take the pages over and start the copy; give them back if nothing of it has started.

        Args:
            call: starts it; is given `when_done=`, for the transfer engine.
        """
        self.take(engine)
        try:
            transfer = call(when_done=self.finish)
        except BaseException:
            self.given_up = True  # nothing of it is published
            if self._told is not None:
                self.finish(False)
            elif not self.in_flight():
                self.hand_back()
            raise
        self._begun = True
        if self._told is not None:  # before this, by another thread
            self.finish(self._told)
        return transfer

    @property
    def writes(self) -> bool:
        """Whether the copy writes pages that are to be published."""
        return self._hold.publish is not None

    def in_flight(self) -> bool:
        """Whether its transfer engine has a copy of it in flight, or one whose end it has not told
        us."""
        return self.engine is not None and self.engine.will_tell(self.finish)

    # In both of these an interrupt in the middle leaves two owners, of which the second to end it
    # finds nothing left to end; never none.

    def take(self, engine: Engine | None = None) -> None:
        """Own the pages from now on: the caller's object has ended."""
        self.owns, self.engine = True, engine
        for source in self._sources:
            remember(source, self)
            source.ended = True

    def hand_back(self) -> None:
        """Give the pages back to the caller's object: nothing is copied."""
        for source in self._sources:
            source.ended = False
        self.owns = False

    def finish(self, ok: bool, *, published: bool = False) -> None:
        """The copy has finished: publish or abandon, and unpin. More than once is once. Before the
        call that starts it has returned it is only noted; if an interrupt came out of that call,
        nothing is published.

        Args:
            published: others have made the pages ready; there is nothing to publish or to abandon.

        Raises:
            LockTimeout: could not abandon yet; call again.
        """
        with self._lock:
            if self.ended or not self.owns:
                return
            if not self._begun and self.engine is not None and not self.given_up:
                self._told = ok
                return
            if self._hold.core.unusable():  # closed: given back there, or a forked child
                self._error = self._error or Abandoned("the cache was closed before the copy ended")
            else:
                if published and self._hold.note_published is not None:
                    self._hold.note_published()
                elif ok:
                    self._publish()
                for hold in self._holds:
                    hold.give_back()
            if self.ready is None:
                self.ready = False
            self.ended = True

    def _publish(self) -> None:
        if self.given_up or self._hold.publish is None:
            return
        if self._publishing:
            self._error = self._error or Abandoned(
                "publish: it was interrupted; the pages may be ready or abandoned, match to see"
            )
            return
        self._publishing = True
        try:
            self.ready = self._hold.publish()
        except LightcacheError as error:
            self._error = error

    def abort(self) -> None:
        """Abandon now what is not published; unpin when the copy has finished."""
        with self._lock:
            if self.ended or not self.owns or self._hold.core.unusable():
                return
            self.given_up = True
            if self._hold.give_up is not None:
                self._hold.give_up()

    def check(self) -> None:
        """Raise what went wrong when it finished."""
        if self._error is not None:
            raise self._error

    def __del__(self) -> None:
        """The copy has finished, and the call that would have told so was lost to an interrupt."""
        if getattr(self, "owns", False) and not self.ended:
            self.given_up = True
            self.finish(False)


class Saving:
    """A copy of pages that stay the caller's, as a transfer engine knows it."""

    owns, ended = True, False

    def __init__(self, engine: Engine) -> None:
        """Not started."""
        self.engine = engine
        self.given_up = False

    def finish(self, ok: bool) -> None:
        """The copy has finished; there is nothing to give back."""

    def in_flight(self) -> bool:
        """As `Keeper.in_flight`."""
        return self.engine.will_tell(self.finish)


class Interrupted:
    """A copy that a transfer engine has started although the call that starts it has raised. See
    `TransferHandle`."""

    def __init__(self, keeper: Keeper | Saving) -> None:
        """Nothing of it will be published."""
        self._keeper = keeper
        keeper.given_up = True

    def done(self) -> bool:
        """See `TransferHandle`.

        Raises:
            TransferFailed: it has finished. What it has moved does not count.
        """
        if self._keeper.engine is not None:
            self._keeper.engine.poll()
        if self._keeper.in_flight():
            return False
        self._keeper.finish(False)
        raise TransferFailed("it was interrupted while it was started; it does not count")

    def wait(self, timeout: float | None = None) -> None:
        """See `TransferHandle`."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if end is not None and time.monotonic() >= end:
                raise WaitTimeout(f"a copy is in flight after {timeout} s; wait again")
            time.sleep(_NAP)


_KEEPERS: weakref.WeakKeyDictionary[Releasable, weakref.ReferenceType[Keeper | Saving]]
_KEEPERS = weakref.WeakKeyDictionary()


def remember(source: Releasable, keeper: Keeper | Saving) -> None:
    """Let `begun_with` find the copy that has these pages, as long as it lasts."""
    _KEEPERS[source] = weakref.ref(keeper)


def begun_with(source: Releasable) -> Interrupted | None:
    """The copy of these pages that a transfer engine has started, though the call that starts it
    has raised. None: there is none, or it has finished."""
    reference = _KEEPERS.get(source)
    keeper = None if reference is None else reference()
    if keeper is None or not keeper.owns or keeper.ended:
        return None
    return Interrupted(keeper)


# ---- Offload and Load.

Slots = Sequence[int] | npt.NDArray[Any]


class _InFlight:
    """What Offload and Load have in common."""

    page_count: int
    """Pages, or parts of pages, that it touches."""
    begun_ns: int
    """`time.perf_counter_ns()` when it was begun."""
    transfer: Transfer
    """The copy: `wait_on(stream)`, `wait_layer(layer, stream)`, `nbytes`."""

    @property
    def nbytes(self) -> int:
        """Bytes that it moves: of the transfer engine's share, and of the tokens that are not left
        out."""
        return self.transfer.nbytes

    def _begin(self, engine: Engine, source: Releasable, call: Callable[..., Transfer]) -> None:
        self._keeper = Keeper(source)
        self.begun_ns = time.perf_counter_ns()
        self.transfer = self._keeper.begin(engine, call)

    def done(self) -> bool:
        """Whether the copy has finished, and its pages are given back. Does not block; publishing
        takes no lock, abandoning does.

        Raises:
            TransferFailed: the copy failed.
            Abandoned: of an offload: it was in vain, see `Reservation.publish`.
            LockTimeout: something could not be given back yet; call again.
        """
        try:
            finished = self.transfer.done()
        except TransferFailed:
            self._keeper.finish(False)
            raise
        if finished:
            self._keeper.finish(True)
            self._keeper.check()
        return finished

    def wait(self, timeout: float | None = None) -> None:
        """Block until the copy has finished, and give back its pages.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            WaitTimeout: it is in flight; wait again.
            Otherwise as `done`.
        """
        try:
            self.transfer.wait(timeout)
        except TransferFailed:
            self._keeper.finish(False)
            raise
        self._keeper.finish(True)
        self._keeper.check()


class Offload(_InFlight):
    """Copies the new pages of a reservation from the device, and publishes them when that is done.

        offload = Offload(engine, cache.reserve(keys, len(hit)), slots)
        ...
        engine.poll()                  # each step: publishes finished copies

    Keep it until it is `done`: a dropped one is aborted. Device slots may be used again when it is
    done, aborted or not. As a context manager: leaving waits, leaving by an exception aborts.
    """

    def __init__(
        self,
        engine: Engine,
        held: Reservation | ReservationShard,
        slots: Slots,
        *,
        positions: Sequence[int] | npt.NDArray[np.int64] | None = None,
        page_tokens: int | None = None,
        **how: Any,
    ) -> None:
        """Begin it. Takes `held` over; if this raises ConfigError, nothing was begun and `held` is
        the caller's still.

        Args:
            engine: of this rank; for a shard, one whose share is that shard.
            held: a reservation of one shard, or an adopted shard. With a geometry in parts, its
                pages are parts; a page of which some were there gets the others.
            slots: device slots of the whole prompt, from its first token on, int32 or int64. Only
                those of new pages are read, and there none is negative.
            positions: of the pages (or parts) in the prompt's keys; None: a reservation's own
                `new`, or for a shard that `slots` are those of its pages alone, all parts new.
            page_tokens: None: as the transfer engine's geometry says.
            how: for `engine.offload`: streams, after, window, planes.

        Raises:
            ConfigError: slots that do not cover the pages, several shards in one reservation, or
                whatever the transfer engine refuses.
            LeaseLost: `held` has ended before.
        """
        tokens = _page_tokens(engine, page_tokens)
        _check_kind(held, (Reservation, ReservationShard))
        if held.ended:
            raise LeaseLost("offload: this reservation has ended before; reserve again")
        if isinstance(held, Reservation) and held.shards != 1 and held.own_shard is None:
            raise ConfigError(
                f"offload: this reservation has {held.shards} shards; give its ticket to those who "
                "write them (it may be ourselves), and offload the adopted shard"
            )
        pages = held.pages
        if positions is None and isinstance(held, Reservation):
            positions = held.new
        slots, parts = integers(slots, "slots"), engine.geometry.parts
        if parts > 1 and positions is not None:
            pages, positions = _by_page(pages, integers(positions, "positions"), parts)
        count = len(pages) // parts  # `Move` refuses a remainder
        move = Move(pages, _slots_of(count, positions, slots, tokens))
        self.page_count = len(pages)
        self._begin(engine, held, partial(engine.offload, move, **how))

    @property
    def ready(self) -> bool | None:
        """Whether the pages were made ready by this: False if other shards are still missing, or
        if it failed or was aborted; None while the copy is in flight."""
        return self._keeper.ready

    def abort(self) -> None:
        """Give up: the keys are abandoned when this returns. The copy continues, and holds the
        pages until it has finished; `wait` and `done` then tell when the device slots may be used
        again. Does nothing if it was published before.

        Raises:
            LockTimeout: the keys could not be abandoned yet; call again.
        """
        self._keeper.abort()

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.wait()
        else:
            leave(self.abort, error)

    def __del__(self) -> None:
        keeper = getattr(self, "_keeper", None)  # an interrupt may come before it was set
        if keeper is not None:
            keeper.abort()


class Load(_InFlight):
    """Copies the pages of a lease to the device, and holds the lease until that is done.

        load = Load(engine, cache.match(keys), slots, after=[event])
        load.transfer.wait_on(stream)

    It may be dropped: the lease goes with the copy. As a context manager: leaving waits, unless an
    exception does.
    """

    def __init__(
        self,
        engine: Engine,
        lease: Lease,
        slots: Slots,
        *,
        first: int = 0,
        skip: npt.NDArray[np.bool_] | None = None,
        **how: Any,
    ) -> None:
        """Begin it. Takes the lease over; if this raises ConfigError, nothing was begun and the
        lease is the caller's still.

        Args:
            slots, first, skip: see `Move`: `slots[i]` is the place of token `first + i` of the
                lease's pages. What the device has already is left out by `first`, by a negative
                slot or by `skip`.
            how: for `engine.load`: streams, after, window, planes.

        Raises:
            ConfigError: whatever the transfer engine refuses.
            LeaseLost: released before.
        """
        _check_kind(lease, (Lease,))
        move = Move(lease.pages, slots, first, skip)
        self.page_count = len(lease.pages)
        geometry = engine.geometry
        self.tokens: int = len(lease.pages) // geometry.parts * geometry.page_tokens
        """Tokens of the lease's pages: so many of the prompt need not be computed."""
        self._begin(engine, lease, partial(engine.load, move, **how))

    def __enter__(self) -> Load:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.wait()


def _check_kind(held: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(held, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"expected a {names}, found {type(held).__name__}")


def _page_tokens(engine: Any, given: int | None) -> int:
    tokens: int = engine.geometry.page_tokens if given is None else given
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"page_tokens: expected a whole number >= 1, found {tokens!r}")
    return tokens


def _by_page(
    numbers: npt.NDArray[Any], positions: npt.NDArray[Any], parts: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Host pages of all parts of the pages that some parts belong to, -1 for the others; and the
    positions of these pages."""
    if len(positions) != len(numbers):
        raise ConfigError(f"positions: expected {len(numbers)}, one a part, found {len(positions)}")
    own, row = np.unique(positions // parts, return_inverse=True)
    pages = np.full((len(own), parts), -1, np.int64)
    pages[row, positions % parts] = numbers
    return pages.ravel(), own


def _slots_of(pages: int, positions: Any, slots: npt.NDArray[Any], tokens: int) -> npt.NDArray[Any]:
    """Slots of some pages of a prompt, one page after the other."""
    if positions is None:
        if len(slots) != pages * tokens:
            raise ConfigError(
                f"slots: expected the {pages * tokens} of the shard's {pages} pages, found "
                f"{len(slots)}; or give positions= and the slots of the whole prompt"
            )
        rows = slots
    else:
        where = integers(positions, "positions")
        if len(where) != pages:
            raise ConfigError(f"positions: expected {pages}, one a page, found {len(where)}")
        if not pages:
            return slots[:0]
        low, high = int(where.min()), int(where.max()) + 1
        if low < 0 or high * tokens > len(slots):
            raise ConfigError(
                f"slots: the pages at positions {low} to {high - 1} hold tokens {low * tokens} to "
                f"{high * tokens - 1}, found {len(slots)} slots; give those of the whole prompt"
            )
        rows = slots[: high * tokens].reshape(high, tokens)[where].reshape(-1)
    if len(rows) and int(rows.min()) < 0:
        raise ConfigError(
            "slots: a token of a page to be written has a negative slot, so the page would not be "
            "whole; reserve only pages whose tokens are all on the device"
        )
    return rows


__all__ = ["Load", "Offload"]
