"""RankWorker: a rank that carries out the orders and decisions of its coordinator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from lightcache.cache import Cache
from lightcache.errors import Abandoned, ConfigError, LightcacheError, LockTimeout, WaitTimeout
from lightcache.kernels.moves import Engine
from lightcache.leases import Lease
from lightcache.manager.backend import EngineBackend, RankBackend, TransferHandle
from lightcache.manager.ranks.messages import (
    Decisions,
    Joiner,
    Kind,
    Message,
    Order,
    check_entries,
    decode,
)
from lightcache.reservations import ReservationShard
from lightcache.shm import SharedLog

_NAP = 0.001  # seconds that a read waits while copies are in flight: their verdicts are urgent


class _Copy:
    """One order that this rank has begun."""

    def __init__(self, order: Order, held: Lease | None, moving: TransferHandle) -> None:
        self.order, self.moving = order, moving
        self.held = held
        """The lease of a save, which its transfer backend does not release."""


class RankWorker:
    """One rank's end of a `RankCoordinator`'s log. It matches and decides nothing: it copies its
    share of the ordered pages, in order, and receives the decisions of every step. A failed copy is
    a verdict for the coordinator and raises nothing here: `failures` counts them, `last_error` has
    the last error.

    For one thread. Call `step` for each step of the engine; call `poll` while the engine computes
    to give verdicts sooner.
    """

    def __init__(
        self,
        log: SharedLog,
        cache: Cache,
        backend: RankBackend | Engine,
        rank: int,
        *,
        groups: Mapping[int, RankBackend | Engine] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller closes log, cache and transfer backend, after `close`.

        Args:
            log: attached as a reader.
            cache: the host cache, attached with role f"rank {rank}".
            backend: makes the copies: a transfer engine with this rank's share
                (`Cache.transfer_engine`), or a `RankBackend`.
            rank: number of this rank and its shard.
            groups: the same of the other groups of the cache, by number: see
                `RankCoordinator.group`. None: there are none.
            clock: in seconds.

        Raises:
            ConfigError: the log's entries are too short.
        """
        check_entries(log)
        self.log, self.cache, self.rank = log, cache, rank
        self._backends = {
            group: cast(RankBackend, each) if hasattr(each, "save") else EngineBackend(each)
            for group, each in {**(groups or {}), 0: backend}.items()
        }
        self._clock = clock
        self._joiner = Joiner()
        self._waiting: deque[Order] = deque()
        """Orders not adopted yet, because the cache's lock did not come in time."""
        self._running: list[_Copy] = []
        self.failures = 0
        """Number of failed copies of this rank."""
        self.loaded_bytes = self.offloaded_bytes = 0
        """Bytes that this rank's copies have moved, of its share alone; the manager's counters add
        up all ranks. Counted if the handles have `nbytes`: `TransferHandle`."""
        self.last_error: Exception | None = None
        """Why the last copy failed, or an order could not be adopted."""

    @property
    def in_flight(self) -> int:
        """Number of ordered, unfinished copies, as of the last poll."""
        return len(self._running) + len(self._waiting)

    def ready(self, timeout: float | None = None) -> None:
        """Report that this rank can copy: its memory is registered, its engine exists. Blocks until
        the scheduler's startup message (`wait_for_ranks`); earlier messages are for other ranks and
        are skipped. A rank that never calls this gets no orders. Join the log late, after
        registering the memory: a reader that does not read blocks the log's writer.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            WaitTimeout: no startup message yet; call again.
            Abandoned: the scheduler is dead.
        """
        end = self._end(timeout)
        while True:
            complete, message = self._message(self.log.read(self._left(end)))
            if complete and message is None:
                return

    def step(self, timeout: float | None = None) -> Decisions:
        """The decisions of the coordinator's next step. Blocks until they are in the log. Begins
        every copy that was ordered before them, without waiting for it to finish.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            WaitTimeout: no decisions yet; ordered copies continue. Call again.
            Abandoned: the coordinator has left or was killed; our copies have finished and their
                pages are given back. Call again when another one has attached as the log's writer.
            LayoutMismatch, CacheCorrupted: the log was written by another release, or not by a
                coordinator.
        """
        end = self._end(timeout)
        while True:
            busy = self.poll() > 0
            try:
                entry = self.log.read(self._nap(end) if busy else self._left(end))
            except WaitTimeout:
                if not busy or self._left(end) == 0:
                    raise
                continue
            except Abandoned:
                self._waiting.clear()
                self.drain(self._left(end))
                self._refuse_orphans()
                raise
            complete, message = self._message(entry)
            if isinstance(message, Decisions):
                return message
            if complete and message is not None:
                self._waiting.append(message)

    def poll(self) -> int:
        """Begin waiting orders, notice finished copies, give the verdicts. Returns `in_flight`.
        Blocks only for the cache's lock, which adopting takes."""
        while self._waiting and self._begin(self._waiting[0]):
            self._waiting.popleft()
        for copy in list(self._running):
            self._look(copy)
        return self.in_flight

    def drain(self, timeout: float | None = None) -> None:
        """Block until no copy of ours is in flight.

        Raises:
            WaitTimeout: one is; the blocks it touches are not free yet.
        """
        end = self._end(timeout)
        while self.poll():
            for copy in list(self._running):
                self._wait(copy, self._left(end))
            if self.in_flight and self._left(end) == 0:
                raise WaitTimeout(
                    f"rank {self.rank}: {self.in_flight} copies are in flight after {timeout} s; "
                    "wait again"
                )

    def close(self, timeout: float | None = 10.0) -> None:
        """Wait for our copies. Later orders are not adopted, and fail."""
        self._waiting.clear()
        self.drain(timeout)

    # ---- Reading the log

    def _message(self, entry: bytes) -> tuple[bool, Message]:
        """(whether a message ended with this entry, the message)."""
        whole = self._joiner.take(entry)
        return (False, None) if whole is None else (True, decode(whole))

    def _end(self, timeout: float | None) -> float | None:
        return None if timeout is None else self._clock() + timeout

    def _left(self, end: float | None) -> float | None:
        return None if end is None else max(0.0, end - self._clock())

    def _nap(self, end: float | None) -> float:
        left = self._left(end)
        return _NAP if left is None else min(_NAP, left)

    # ---- Copying

    def _begin(self, order: Order) -> bool:
        """Adopt the order's pages and begin the copy. False: the lock did not come; try again."""
        shard = self.rank if order.kind is Kind.OFFLOAD else None
        try:
            held = self.cache.adopt(order.ticket, shard=shard)
        except LockTimeout:
            return False
        except LightcacheError as error:
            # The ticket has ended, or is for another client: there is no verdict to give.
            self.last_error = error
            return True
        try:
            self._running.append(self._moving(order, held))
        except Exception as error:  # of a driver, say: the coordinator needs the verdict
            self._failed(error)
            held.close()  # for a shard this gives the verdict too
            if isinstance(held, Lease):
                self._tell(order, False)
        return True

    def _moving(self, order: Order, held: Lease | ReservationShard) -> _Copy:
        backend = self._backends.get(order.group)
        if backend is None:
            raise ConfigError(
                f"rank {self.rank}: expected a transfer backend for group {order.group}, which the "
                f"coordinator has, found {sorted(self._backends)}; give groups={{...}}"
            )
        if isinstance(held, ReservationShard):
            how = {} if order.positions is None else {"positions": np.array(order.positions)}
            return _Copy(order, None, backend.offload(held, order.slots, **how))
        if order.kind is Kind.SAVE:
            return _Copy(order, held, backend.save(held, order.slots))
        return _Copy(order, None, backend.load(held, order.slots, order.first))

    def _look(self, copy: _Copy) -> None:
        ok = True
        try:
            if not copy.moving.done():
                return
        except LockTimeout:
            return  # its pages could not be given back yet; `done` tries again
        except Exception as error:
            self._failed(error)
            ok = False
        self._running.remove(copy)
        if ok:
            self._count(copy)
        if copy.held is not None:
            copy.held.close()
        if copy.order.kind is not Kind.OFFLOAD:  # a shard gives its verdict when it is published
            self._tell(copy.order, ok)

    def _count(self, copy: _Copy) -> None:
        moved: int = getattr(copy.moving, "nbytes", 0)
        if copy.order.kind is Kind.LOAD:
            self.loaded_bytes += moved
        else:
            self.offloaded_bytes += moved

    def _wait(self, copy: _Copy, timeout: float | None) -> None:
        try:
            copy.moving.wait(timeout)
        except WaitTimeout:
            return
        except Exception:
            return  # `_look` gets the error again, and counts it

    def _refuse_orphans(self) -> None:
        """Refuse tickets of a dead coordinator that have no order in the log, which was read to its
        end. Otherwise their pages stay pinned until the deadline."""
        try:
            self.cache.index.refuse_orphans()
        except LightcacheError as error:  # the pages are released at the deadline
            self.last_error = error

    def _tell(self, order: Order, ok: bool) -> None:
        try:
            self.cache.done(order.ticket, ok)
        except LightcacheError as error:  # no process waits for the verdict any more
            self.last_error = error

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = error


__all__ = ["RankWorker"]
