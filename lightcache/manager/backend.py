"""Transfer backends: what moves a manager's bytes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.kernels.moves import Engine, Move
from lightcache.leases import Allocation, Lease, Releasable
from lightcache.page_transfers import Load, Offload, Saving, begun_with, remember
from lightcache.reservations import Reservation, ReservationShard
from lightcache.shm.errors import TransferFailed

Slots = npt.NDArray[np.int64]


class TransferHandle(Protocol):
    """A copy in flight. It holds its host pages until it has finished. A handle may have `nbytes`,
    the bytes that it moves; without it they are computed from the tokens. It may have `transfer`,
    an object with `wait_on(stream)`; without it `LoadHandle.wait_on` blocks the calling thread
    until the copy has finished."""

    def done(self) -> bool:
        """Whether the copy has finished. Does not block.

        Raises:
            TransferFailed, Abandoned: it has finished, and failed. Any other exception means the
            same: so raise none while bytes may still move.
        """

    def wait(self, timeout: float | None = None) -> None:
        """Block until the copy has finished. Raises as `done`, and WaitTimeout."""


class TransferBackend(Protocol):
    """Moves pages between the host pool and the device. `load` and `offload` take over the lease or
    reservation, unless they raise: then nothing is being moved, and the caller gives it back.

    Any exception that is none of our errors also fails the copy and is raised once, by the
    manager's next `poll` or `close`. A transfer backend may have `slots`, the number of slots
    (tokens) of the device: more blocks than that are refused.

    An interrupt may also come out of these calls. A transfer backend that may have begun a copy by
    then has a method `begun(held)`, which returns the `TransferHandle` of the copy of these pages,
    or None. Without this method any exception means that nothing is being moved."""

    @property
    def shards(self) -> int:
        """Parts of every page that are written separately, one for each rank. Pages to offload are
        reserved with this number of shards."""

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """Host to device: `slots[i]` is the slot of token `first + i` of the lease's pages; -1
        skips the token."""

    def offload(self, new: Reservation, slots: Slots) -> TransferHandle:
        """Device to host: publishes the reservation's new pages when they are written. `slots` has
        the slots of all tokens of the reserved keys, from the first one."""

    def save(self, held: Allocation, slots: Slots) -> TransferHandle:
        """Device to pages without a key, which stay the caller's and must be held until the copy
        has finished: `slots[i]` is the slot of token i. There may be fewer slots than the pages
        have tokens."""


class RanksLost(TransferFailed):
    """A copy failed because ranks have died. Start others, and `RankCoordinator.replace` them.

    It says nothing of the engine: the manager's circuit breaker of copies does not count it, so
    pages are written again as soon as the ranks are replaced.
    """


class RankBackend(Protocol):
    """Moves one rank's share of every page, on messages of the coordinator. `load` and `offload`
    take over what they are given, unless they raise."""

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """As `TransferBackend.load`."""

    def offload(
        self, new: ReservationShard, slots: Slots, *, positions: Slots | None = None
    ) -> TransferHandle:
        """Device to host: publishes the shard when it is written, and releases it if that fails.
        `slots` has the slots of its pages alone, in order. `positions` is given only if pages in
        parts are to be written of which some parts were there: where those of the shard lie among
        all parts of the pages of `slots`."""

    def save(self, held: Lease, slots: Slots) -> TransferHandle:
        """As `TransferBackend.save`."""


class EngineBackend:
    """Transfers by a transfer engine of this process (`Cache.transfer_engine`). Also a
    `RankBackend`."""

    shards = 1

    def __init__(self, engine: Engine, **how: Any) -> None:
        """Args:
        engine: the caller closes it, before the cache and after the manager.
        how: options of every transfer, such as `window=`.
        """
        self.engine = engine
        self._how = how
        self.slots: int | None = None if "planes" in how else getattr(engine, "slots", None)
        """Tokens that the device has room for; None: not known."""

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """See `TransferBackend`. Does not wait; the compute stream has to: `LoadHandle.wait_on`.

        Raises:
            LeaseLost: the lease was released before.
            Otherwise as `Engine.load`.
        """
        return Load(self.engine, lease, slots, first=first, **self._how)

    def offload(
        self,
        new: Reservation | ReservationShard,
        slots: Slots,
        *,
        positions: Slots | None = None,
    ) -> TransferHandle:
        """See `TransferBackend`, and `RankBackend`.

        Raises:
            ConfigError: slots that do not cover the new pages, a negative one among theirs, or a
                reservation of several shards; and as `Engine.offload`.
            LeaseLost: the reservation or shard has ended before.
            Otherwise as `Engine.offload`.
        """
        return Offload(self.engine, new, slots, positions=positions, **self._how)

    def save(self, held: Allocation | Lease, slots: Slots) -> TransferHandle:
        """See `TransferBackend`.

        Raises:
            LeaseLost: the pages are not held any more.
            Otherwise as `Engine.offload`.
        """
        saving = Saving(self.engine)
        remember(held, saving)
        move = Move(held.pages, slots)
        return self.engine.offload(move, when_done=saving.finish, **self._how)

    def begun(self, held: Releasable) -> TransferHandle | None:
        """See `TransferBackend`."""
        return begun_with(held)


class _Finished:
    """A finished copy."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        del timeout


class NullBackend:
    """Moves nothing and reports success: for managers without a host, and simulations."""

    shards = 1

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """See `TransferBackend`."""
        del slots, first
        lease.release()
        return _Finished()

    def offload(self, new: Reservation, slots: Slots) -> TransferHandle:
        """See `TransferBackend`."""
        del slots
        with new:
            new.publish()
        return _Finished()

    def save(self, held: Allocation, slots: Slots) -> TransferHandle:
        """See `TransferBackend`."""
        del held, slots
        return _Finished()


__all__ = [
    "EngineBackend",
    "NullBackend",
    "RankBackend",
    "RanksLost",
    "Slots",
    "TransferBackend",
    "TransferHandle",
]
