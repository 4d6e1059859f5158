"""Transfer backends: how a manager has bytes moved, by an engine of this process or not at all."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.kernels.moves import Engine, Move
from lightcache.leases import Allocation, Lease, Releasable
from lightcache.reservations import Reservation, ReservationShard
from lightcache.transfers import Load, Offload, Saving, begun_with, remember

Slots = npt.NDArray[np.int64]


class TransferHandle(Protocol):
    """A copy under way that holds its host pages until it is over. One that knows how many bytes it
    moves says so as `nbytes`; of others that is reckoned from their tokens."""

    def done(self) -> bool:
        """Whether it is over. Does not block.

        Raises:
            TransferFailed, Abandoned: it is over, and failed. Any other exception says the same: so
            raise none while bytes may still move.
        """

    def wait(self, timeout: float | None = None) -> None:
        """Until it is over; as `done`, and WaitTimeout."""


class TransferBackend(Protocol):
    """Moves pages between the host pool and the device. What `load` and `offload` are given is
    their own from then on, unless they raise: then nothing is being moved, and it is given back.

    An exception that is none of our errors fails the copy as ours do, and comes out of the
    manager's next `poll`, or its `close`, once. A transfer backend that knows how many slots
    (tokens) the device has says so as `slots`: more blocks than that are refused.

    An interrupt may come out of these calls as well. A transfer backend that may have begun a copy
    then has a method `begun(held)`, which returns the `TransferHandle` of the copy of these pages,
    None if there is none. One without it says with whatever it raises that nothing is being
    moved."""

    @property
    def shards(self) -> int:
        """Parts of every page that are written apart, one for each rank: what is to be offloaded
        is reserved with so many."""

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """Host to device: `slots[i]` is the place of token `first + i` of the lease's pages, -1
        leaves the token out."""

    def offload(self, new: Reservation, slots: Slots) -> TransferHandle:
        """Device to host: publishes the reservation's new pages when they are written. `slots` are
        those of all tokens of the keys that were reserved, from the first of these on."""

    def save(self, held: Allocation, slots: Slots) -> TransferHandle:
        """Device to pages without a key, which stay the caller's and must be held until it is
        over: `slots[i]` is the place of their token i. There may be fewer than the pages hold."""


class RankBackend(Protocol):
    """How one rank moves its share of every page, on orders. What `load` and `offload` are given
    is their own from then on, unless they raise."""

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """As `TransferBackend.load`."""

    def offload(self, new: ReservationShard, slots: Slots) -> TransferHandle:
        """Device to host: publishes the shard when it is written, and releases it if that fails.
        `slots` are those of its pages alone, one behind the other."""

    def save(self, held: Lease, slots: Slots) -> TransferHandle:
        """As `TransferBackend.save`."""


class EngineBackend:
    """An engine of this process: `Cache.engine`. It is a `RankBackend` as well."""

    shards = 1

    def __init__(self, engine: Engine, **how: Any) -> None:
        """Args:
        engine: it is the caller's to close, before the cache and after the manager.
        how: for every transfer, such as `window=`.
        """
        self.engine = engine
        self._how = how
        self.slots: int | None = None if "planes" in how else getattr(engine, "slots", None)
        """Tokens that the device has room for; None: not known."""

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """See `TransferBackend`. Waits for nothing; the stream that computes has to:
        `LoadHandle.wait_on`."""
        return Load(self.engine, lease, slots, first=first, **self._how)

    def offload(self, new: Reservation | ReservationShard, slots: Slots) -> TransferHandle:
        """See `TransferBackend`, and `RankBackend`."""
        return Offload(self.engine, new, slots, **self._how)

    def save(self, held: Allocation | Lease, slots: Slots) -> TransferHandle:
        """See `TransferBackend`."""
        saving = Saving(self.engine)
        remember(held, saving)
        move = Move(held.pages, slots)
        return self.engine.offload(move, when_done=saving.over, **self._how)

    def begun(self, held: Releasable) -> TransferHandle | None:
        """See `TransferBackend`."""
        return begun_with(held)


class _Over:
    """A copy that took no time."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        del timeout


class NullBackend:
    """Moves nothing and says it did: for a scheduler's own measurements, and for simulations."""

    shards = 1

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """See `TransferBackend`."""
        del slots, first
        lease.release()
        return _Over()

    def offload(self, new: Reservation, slots: Slots) -> TransferHandle:
        """See `TransferBackend`."""
        del slots
        with new:
            new.publish()
        return _Over()

    def save(self, held: Allocation, slots: Slots) -> TransferHandle:
        """See `TransferBackend`."""
        del held, slots
        return _Over()


__all__ = [
    "EngineBackend",
    "NullBackend",
    "RankBackend",
    "Slots",
    "TransferBackend",
    "TransferHandle",
]
