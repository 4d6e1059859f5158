"""Offload and Load: a copy, and the pages that it may touch until it is over.

A page must not be given to anybody else while a copy may still read or write it. Reservations,
shards and leases hold pages by pins; a copy goes on whatever becomes of the objects of the one who
began it. So the pins belong to the copy, and this is why they are kept exactly as long:

1. Taking over. `Offload` and `Load` take their reservation, shard or lease before the copy begins.
   To its first owner it has ended: leaving its `with`, releasing or dropping it does nothing more.
   Bad input is refused before anything is copied, and then it is the caller's as before.
2. Holding. A `_Keeper` owns the pins. The transfer holds it (`when_done`), and whoever runs a
   transfer holds that until the copy is over: a thread of the host engine, the device engine's own
   list. So nothing that happens to `Offload` or `Load`, garbage collection included, ends the pins
   before the copy.
3. Ending. The keeper is told from `done` and `wait`, and from the engine's `poll` and `close`; an
   engine that is polled each step needs no more. It publishes if the copy succeeded and nobody gave
   up, abandons otherwise, and then unpins; each may be done twice, so an interrupt in between is
   mended by the next call. If the call itself is lost to an interrupt, the keeper is garbage now,
   with the copy over, and unpins as it goes.
4. Giving up. `abort`, an exception that leaves the `with`, or dropping an `Offload` whose copy goes
   on: the keys are abandoned at once, so nobody waits for them; the pages stay pinned, doomed and
   without a key, until the copy is over. What was dropped is not published although its copy may
   succeed, because nobody said that its source was left alone. If the process is killed meanwhile,
   such pages are quarantined like those still being written.
5. Interrupts. The engine is given the keeper with the call that begins the copy, and has it before
   anything is copied. So if an interrupt, or an error of the device, comes out of that call, the
   engine says whether a copy goes on (`will_tell`): the pages are the keeper's until that is over,
   and are not published, or they are the caller's again.

Close engines before caches: closing a cache gives back everything that it holds, and it refuses
(InUse) while an engine keeps views of its pool.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

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
from lightcache.leases import Borrowed, Lease
from lightcache.reservations import Reservation, Shard
from lightcache.shm.errors import leave

# ---- Who holds the pages of a copy: see `lightcache.transfers`, which says why.

_NAP = 1e-3  # seconds between two looks at a copy that was interrupted


class Keeper:
    """Owns a reservation, shard or lease for as long as a copy may touch its pages. Any thread may
    call it."""

    def __init__(self, held: Reservation | Shard | Lease) -> None:
        """Owns nothing yet."""
        self._owns = False
        self._ended = False
        self._held = held
        self._writes = not isinstance(held, Lease)
        # Re-entrant: a garbage collection inside of `over` may drop the Offload, which aborts.
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._begun = False
        self._told: bool | None = None
        self._given_up = False
        self._publishing = False
        self._error: LightcacheError | None = None
        self.ready: bool | None = None
        """See `Offload.ready`."""

    def begin(self, engine: Engine, call: Callable[..., Transfer]) -> Transfer:
        """Take the pages over and begin the copy; give them back if nothing of it has begun.

        Args:
            call: begins it; is given `when_done=`, for the engine.
        """
        self._take(engine)
        try:
            transfer = call(when_done=self.over)
        except BaseException:
            self._given_up = True  # nothing of it is published
            if self._told is not None:
                self.over(False)
            elif not self.goes_on():
                self._hand_back()
            raise
        self._begun = True
        if self._told is not None:  # before this, by another thread
            self.over(self._told)
        return transfer

    def goes_on(self) -> bool:
        """Whether its engine has a copy of it that is not over, or of which we were not told."""
        return self._engine is not None and self._engine.will_tell(self.over)

    # In both of these an interrupt in the middle leaves two owners, of whom the second to end it
    # finds nothing left to end; never none.

    def _take(self, engine: Engine | None = None) -> None:
        self._owns, self._engine = True, engine
        self._held._keeper = weakref.ref(self)
        self._held._done = True

    def _hand_back(self) -> None:
        self._held._done = False
        self._owns = False

    def over(self, ok: bool) -> None:
        """The copy is over: publish or abandon, and unpin. More than once is once. While the call
        that begins it has not returned it is noted; if an interrupt came out of that, nothing is
        published.

        Raises:
            LockTimeout: could not abandon yet; call again.
        """
        with self._lock:
            if self._ended or not self._owns:
                return
            if not self._begun and self._engine is not None and not self._given_up:
                self._told = ok
                return
            if self._held._index._unusable():  # closed: given back there, or a forked child
                self._error = self._error or Abandoned("the cache was closed before the copy ended")
            else:
                if self._writes:
                    self._publish(ok)
                self._end()
            if self.ready is None:
                self.ready = False
            self._ended = True

    def _publish(self, ok: bool) -> None:
        if self._given_up or not ok:
            return
        if self._publishing:
            self._error = self._error or Abandoned(
                "publish: it was interrupted; the pages may be ready or abandoned, match to see"
            )
            return
        self._publishing = True
        try:
            self.ready = self._publish_held()
        except LightcacheError as error:
            self._error = error

    def _publish_held(self) -> bool:
        held = self._held
        if isinstance(held, Shard):
            return held._publish()
        assert isinstance(held, Reservation)
        if not held._publish_one(0, held.pages):
            raise LeaseLost("publish: the reservation's shard was adopted by another client")
        return held._ready

    def _end(self) -> None:
        if isinstance(self._held, Lease):
            self._held._let_go()
        else:
            self._held._end()

    def abort(self) -> None:
        """Abandon now what is not published; unpin when the copy is over."""
        with self._lock:
            if self._ended or not self._owns or self._held._index._unusable():
                return
            self._given_up = True
            if not isinstance(self._held, Lease):
                self._held._give_up()

    def check(self) -> None:
        """Raise what went wrong when it was over."""
        if self._error is not None:
            raise self._error

    def __del__(self) -> None:
        """The copy is over, and the call that would have said so was lost to an interrupt."""
        if getattr(self, "_owns", False) and not self._ended:
            self._given_up = True
            self.over(False)


class Saving:
    """A copy of pages that stay the caller's, as an engine knows it."""

    _owns, _ended = True, False

    def __init__(self, engine: Engine) -> None:
        """Not begun."""
        self._engine = engine
        self._given_up = False

    def over(self, ok: bool) -> None:
        """The copy is over; nothing is to be given back."""

    def goes_on(self) -> bool:
        """As `Keeper.goes_on`."""
        return self._engine.will_tell(self.over)


class Interrupted:
    """A copy whose call has raised, with an engine that has begun it all the same. See `Moving`."""

    def __init__(self, keeper: Keeper | Saving) -> None:
        """Nothing of it will be published."""
        self._keeper = keeper
        keeper._given_up = True

    def done(self) -> bool:
        """See `Moving`.

        Raises:
            TransferFailed: it is over. What it has moved does not count.
        """
        keeper, engine = self._keeper, self._keeper._engine
        if engine is not None:
            engine.poll()
        if keeper.goes_on():
            return False
        keeper.over(False)
        raise TransferFailed("it was interrupted while it was begun; it does not count")

    def wait(self, timeout: float | None = None) -> None:
        """See `Moving`."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if end is not None and time.monotonic() >= end:
                raise WaitTimeout(f"a copy goes on after {timeout} s; wait again")
            time.sleep(_NAP)


def begun_with(held: Borrowed) -> Interrupted | None:
    """What an engine has begun with these pages, though the call that begins it has raised. None:
    nothing, or it is over."""
    reference = getattr(held, "_keeper", None)
    keeper = None if reference is None else reference()
    if keeper is None or not keeper._owns or keeper._ended:
        return None
    return Interrupted(keeper)


# ---- Offload and Load: a copy, and the pages that it may touch until it is over.
#
# A page must not be given to anybody else while a copy may still read or write it. Reservations,
# shards and leases hold pages by pins; a copy goes on whatever becomes of the objects of the one
# who began it. So the pins belong to the copy, and this is why they are kept exactly as long:
#
# 1. Taking over. `Offload` and `Load` take their reservation, shard or lease before the copy
#    begins. To its first owner it has ended: leaving its `with`, releasing or dropping it does
#    nothing more. Bad input is refused before anything is copied, and then it is the caller's as
#    before.
# 2. Holding. A `_Keeper` owns the pins. The transfer holds it (`when_done`), and whoever runs a
#    transfer holds that until the copy is over: a thread of the host engine, the device engine's
#    own list. So nothing that happens to `Offload` or `Load`, garbage collection included, ends
#    the pins before the copy.
# 3. Ending. The keeper is told from `done` and `wait`, and from the engine's `poll` and `close`;
#    an engine that is polled each step needs no more. It publishes if the copy succeeded and
#    nobody gave up, abandons otherwise, and then unpins; each may be done twice, so an interrupt
#    in between is mended by the next call. If the call itself is lost to an interrupt, the keeper
#    is garbage now, with the copy over, and unpins as it goes.
# 4. Giving up. `abort`, an exception that leaves the `with`, or dropping an `Offload` whose copy
#    goes on: the keys are abandoned at once, so nobody waits for them; the pages stay pinned,
#    doomed and without a key, until the copy is over. What was dropped is not published although
#    its copy may succeed, because nobody said that its source was left alone. If the process is
#    killed meanwhile, such pages are quarantined like those still being written.
# 5. Interrupts. The engine is given the keeper with the call that begins the copy, and has it
#    before anything is copied. So if an interrupt, or an error of the device, comes out of that
#    call, the engine says whether a copy goes on (`will_tell`): the pages are the keeper's until
#    that is over, and are not published, or they are the caller's again.
#
# Close engines before caches: closing a cache gives back everything that it holds, and it refuses
# (InUse) while an engine keeps views of its pool.

Slots = Sequence[int] | npt.NDArray[Any]
Held = TypeVar("Held", Reservation | Shard, Lease)


class _InFlight(Generic[Held]):
    """What Offload and Load have in common."""

    transfer: Transfer
    """The copy: `wait_on(stream)`, `wait_layer(layer, stream)`, `nbytes`."""

    @property
    def nbytes(self) -> int:
        """Bytes that it moves: of the engine's share, and of the tokens that are not left out."""
        return self.transfer.nbytes

    def _begin(self, engine: Engine, held: Held, verb: str, move: Move, how: Any) -> None:
        self._keeper = Keeper(held)
        self.transfer = self._keeper.begin(engine, partial(getattr(engine, verb), move, **how))

    def done(self) -> bool:
        """Whether the copy is over, and what it held given back. Does not block; publishing takes
        no lock, abandoning does.

        Raises:
            TransferFailed: the copy failed.
            Abandoned: of an offload: it was in vain, see `Reservation.publish`.
            LockTimeout: something could not be given back yet; call again.
        """
        try:
            over = self.transfer.done()
        except TransferFailed:
            self._keeper.over(False)
            raise
        if over:
            self._keeper.over(True)
            self._keeper.check()
        return over

    def wait(self, timeout: float | None = None) -> None:
        """Block until the copy is over, and give back what it held.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            WaitTimeout: it goes on; wait again.
            Otherwise as `done`.
        """
        try:
            self.transfer.wait(timeout)
        except TransferFailed:
            self._keeper.over(False)
            raise
        self._keeper.over(True)
        self._keeper.check()


class Offload(_InFlight["Reservation | Shard"]):
    """Copies the new pages of a reservation from the device, and publishes them when that is done.

        offload = Offload(engine, cache.reserve(keys, len(hit)), slots)
        ...
        engine.poll()                  # each step: publishes what is over

    Keep it until it is `done`: a dropped one is aborted. Device slots may be used again when it is
    done, aborted or not. As a context manager: leaving waits, leaving by an exception aborts.
    """

    def __init__(
        self,
        engine: Engine,
        held: Reservation | Shard,
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
            held: a reservation of one shard, or an adopted shard.
            slots: device slots of the whole prompt, from its first token on, int32 or int64. Only
                those of new pages are read, and there none is negative.
            positions: of the pages in the prompt's keys; None: a reservation's own `new`, or for a
                shard that `slots` are those of its pages alone.
            page_tokens: None: as the engine's geometry says.
            how: for `engine.offload`: streams, after, window, planes.

        Raises:
            ConfigError: slots that do not cover the pages, several shards in one reservation, or
                whatever the engine refuses.
            LeaseLost: `held` has ended before.
        """
        tokens = _page_tokens(engine, page_tokens)
        _check_kind(held, (Reservation, Shard))
        if held._done:
            raise LeaseLost("offload: this reservation has ended before; reserve again")
        if isinstance(held, Reservation) and held.shards != 1:
            raise ConfigError(
                f"offload: this reservation has {held.shards} shards; give its ticket to those who "
                "write them (it may be ourselves), and offload the adopted shard"
            )
        pages = held.pages
        if positions is None and isinstance(held, Reservation):
            positions = held.new
        move = Move(pages, _slots_of(len(pages), positions, integers(slots, "slots"), tokens))
        self._begin(engine, held, "offload", move, how)

    @property
    def ready(self) -> bool | None:
        """Whether the pages were made ready by this: False if other shards are still missing, or
        if it failed or was aborted; None while the copy goes on."""
        return self._keeper.ready

    def abort(self) -> None:
        """Give up: the keys are abandoned when this returns. The copy goes on, and holds the pages
        until it is over; `wait` and `done` then tell when the device slots may be used again. Does
        nothing if it was published before.

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


class Load(_InFlight[Lease]):
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
            ConfigError: whatever the engine refuses.
            LeaseLost: released before.
        """
        _check_kind(lease, (Lease,))
        move = Move(lease.pages, slots, first, skip)
        self.tokens: int = len(lease) * engine.geometry.page_tokens
        """Tokens of the lease's pages: so many of the prompt need not be computed."""
        self._begin(engine, lease, "load", move, how)

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


def _slots_of(pages: int, positions: Any, slots: npt.NDArray[Any], tokens: int) -> npt.NDArray[Any]:
    """Slots of some pages of a prompt, one page behind the other."""
    if positions is None:
        if len(slots) != pages * tokens:
            raise ConfigError(
                f"slots: expected the {pages * tokens} of the shard's {pages} pages, found "
                f"{len(slots)}; or give positions= and the slots of the whole prompt"
            )
        found = slots
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
        found = slots[: high * tokens].reshape(high, tokens)[where].reshape(-1)
    if len(found) and int(found.min()) < 0:
        raise ConfigError(
            "slots: a token of a page to be written has a negative slot, so the page would not be "
            "whole; reserve only pages whose tokens are all on the device"
        )
    return found


__all__ = ["Load", "Offload"]
