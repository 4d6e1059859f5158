"""Movers: how a manager has bytes moved, by an engine of this process or not at all."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.kernels.transfer import Engine
from lightcache.leases import Lease
from lightcache.reservations import Reservation
from lightcache.transfers import Load, Offload

Slots = npt.NDArray[np.int64]


class Moving(Protocol):
    """A copy under way that holds its host pages until it is over."""

    def done(self) -> bool:
        """Whether it is over. Does not block.

        Raises:
            TransferFailed, Abandoned: it is over, and failed.
        """

    def wait(self, timeout: float | None = None) -> None:
        """Until it is over; as `done`, and WaitTimeout."""


class Mover(Protocol):
    """Moves pages between the host pool and the device. What it is given is its own from then on,
    unless it raises."""

    def load(self, lease: Lease, slots: Slots, first: int) -> Moving:
        """Host to device: `slots[i]` is the place of token `first + i` of the lease's pages, -1
        leaves the token out."""

    def offload(self, new: Reservation, slots: Slots) -> Moving:
        """Device to host: publishes the reservation's new pages when they are written. `slots` are
        those of all tokens of the keys that were reserved, from the first of these on."""


class EngineMover:
    """An engine of this process: `Cache.engine`."""

    def __init__(self, engine: Engine, **how: Any) -> None:
        """Args:
        engine: it is the caller's to close, before the cache and after the manager.
        how: for every transfer, such as `window=`.
        """
        self.engine = engine
        self._how = how

    def load(self, lease: Lease, slots: Slots, first: int) -> Moving:
        """See `Mover`. Waits for nothing; the stream that computes has to: `Fetch.wait_on`."""
        return Load(self.engine, lease, slots, first=first, **self._how)

    def offload(self, new: Reservation, slots: Slots) -> Moving:
        """See `Mover`."""
        return Offload(self.engine, new, slots, **self._how)


class _Over:
    """A copy that took no time."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        del timeout


class NullMover:
    """Moves nothing and says it did: for a scheduler's own measurements, and for simulations."""

    def load(self, lease: Lease, slots: Slots, first: int) -> Moving:
        """See `Mover`."""
        del slots, first
        lease.release()
        return _Over()

    def offload(self, new: Reservation, slots: Slots) -> Moving:
        """See `Mover`."""
        del slots
        with new:
            new.publish()
        return _Over()


__all__ = ["EngineMover", "Mover", "Moving", "NullMover"]
