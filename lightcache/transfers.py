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
5. In doubt. If an interrupt, or an error of the device, comes out of the call that begins the copy,
   nobody knows whether it has begun. The keeper stays in a list of this module until its engine has
   no copy under way at all, which later calls here ask for.

Close engines before caches: closing a cache gives back everything that it holds, and it refuses
(InUse) while an engine keeps views of its pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from lightcache._keeper import Keeper, settle
from lightcache.errors import ConfigError, LeaseLost, TransferFailed
from lightcache.kernels.moves import integers
from lightcache.kernels.transfer import Engine, Move, Transfer
from lightcache.leases import Lease
from lightcache.reservations import Reservation, Shard

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
        settle()
        self._keeper = Keeper(held)
        self.transfer = self._keeper.begin(engine, lambda: getattr(engine, verb)(move, **how))

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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.wait()
        else:
            self.abort()

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
