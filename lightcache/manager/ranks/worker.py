"""Follower: a rank that does what its leader decided."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import cast

from lightcache.cache import Cache
from lightcache.errors import Abandoned, LightcacheError, LockTimeout, WaitTimeout
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

_NAP = 0.001  # seconds that a read waits while copies go on, whose verdicts others wait for


class _Copy:
    """One order that this rank has begun."""

    def __init__(self, order: Order, held: Lease | None, moving: TransferHandle) -> None:
        self.order, self.moving = order, moving
        self.held = held
        """Of a save: its transfer backend leaves it to us."""


class RankWorker:
    """One rank's end of a `RankCoordinator`'s log. It matches nothing and decides nothing: it
    copies its share of the pages that it is handed, in the order in which that was ordered, and is
    told what every step decided. A copy of it that fails is a verdict that its leader reads, and
    no error
    here: `failures` counts them, `last_error` has the last.

    For one thread. Call `step` for each step of the engine; while that computes, `poll` gives
    verdicts sooner.
    """

    def __init__(
        self,
        log: SharedLog,
        cache: Cache,
        backend: RankBackend | Engine,
        rank: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Log, cache and transfer backend stay the caller's to close, after `close`.

        Args:
            log: attached as a reader.
            cache: the host cache, attached with role f"rank {rank}".
            backend: what copies: an engine whose share is this rank's (`Cache.engine`), or a
                `RankBackend`.
            rank: number of our shard.
            clock: in seconds.

        Raises:
            ConfigError: the log's entries are too short.
        """
        check_entries(log)
        self.log, self.cache, self.rank = log, cache, rank
        engine = backend if not hasattr(backend, "save") else None
        self._backend = cast(RankBackend, backend) if engine is None else EngineBackend(engine)
        self._clock = clock
        self._joiner = Joiner()
        self._waiting: deque[Order] = deque()
        """Not adopted yet: somebody held the cache's lock for too long."""
        self._going: list[_Copy] = []
        self.failures = 0
        """Copies of this rank that failed."""
        self.loaded_bytes = self.offloaded_bytes = 0
        """That copies of this rank have moved, of its share alone; the manager's figures are those
        of all ranks together. Counted where the transfer backend says how many:
        `TransferHandle`."""
        self.last_error: Exception | None = None
        """Why the last of them did, or why an order was not for us."""

    @property
    def in_flight(self) -> int:
        """Copies ordered and not over, as far as was looked."""
        return len(self._going) + len(self._waiting)

    def ready(self, timeout: float | None = None) -> None:
        """Say that this rank may be ordered to copy: its memory is registered, its engine stands.
        Blocks until the scheduler has called the roll (`wait_for_ranks`); what was told to others
        before that is not ours. Nobody is told in any other way, so a rank that never calls this
        is never ordered anything. Join the log late, when the memory is registered: a reader that
        does not read stops its writer.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            WaitTimeout: no scheduler has called; call again.
            Abandoned: the scheduler is dead.
        """
        end = self._end(timeout)
        while True:
            found, message = self._message(self.log.read(self._left(end)))
            if found and message is None:
                return

    def step(self, timeout: float | None = None) -> Decisions:
        """What the leader's next step decided. Begins every copy that was ordered before it; does
        not wait for them. Blocks until the leader has told.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            WaitTimeout: it has not; what was ordered goes on. Call again.
            Abandoned: the leader has left or was killed, and our copies are over and given back.
                When another one has attached as the log's writer, `step` goes on.
            LayoutMismatch, CacheCorrupted: what is in the log is not for this release, or not a
                leader's.
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
                self._refuse_the_rest()
                raise
            found, message = self._message(entry)
            if isinstance(message, Decisions):
                return message
            if found and message is not None:
                self._waiting.append(message)

    def poll(self) -> int:
        """Begin what waits, notice what is over, give the verdicts. Returns copies that go on.
        Does not block but for the cache's lock, which adopting takes."""
        while self._waiting and self._begin(self._waiting[0]):
            self._waiting.popleft()
        for copy in list(self._going):
            self._look(copy)
        return self.in_flight

    def drain(self, timeout: float | None = None) -> None:
        """Until no copy of ours goes on. Blocks.

        Raises:
            WaitTimeout: one does; the blocks it touches are not free yet.
        """
        end = self._end(timeout)
        while self.poll():
            for copy in list(self._going):
                self._wait(copy, self._left(end))
            if self.in_flight and self._left(end) == 0:
                raise WaitTimeout(
                    f"rank {self.rank}: {self.in_flight} copies go on after {timeout} s; wait again"
                )

    def close(self, timeout: float | None = 10.0) -> None:
        """Wait for our copies. Orders that come later find nobody, and fail."""
        self._waiting.clear()
        self.drain(timeout)

    # ---- reading

    def _message(self, entry: bytes) -> tuple[bool, Message]:
        """(whether one ended with this entry, it)."""
        whole = self._joiner.take(entry)
        return (False, None) if whole is None else (True, decode(whole))

    def _end(self, timeout: float | None) -> float | None:
        return None if timeout is None else self._clock() + timeout

    def _left(self, end: float | None) -> float | None:
        return None if end is None else max(0.0, end - self._clock())

    def _nap(self, end: float | None) -> float:
        left = self._left(end)
        return _NAP if left is None else min(_NAP, left)

    # ---- copying

    def _begin(self, order: Order) -> bool:
        """Adopt and begin. False: the lock was held for too long, later again."""
        shard = self.rank if order.kind is Kind.OFFLOAD else None
        try:
            held = self.cache.adopt(order.ticket, shard=shard)
        except LockTimeout:
            return False
        except LightcacheError as error:
            # Ended before we came, or ordered of somebody else: there is no verdict to give.
            self.last_error = error
            return True
        try:
            self._going.append(self._moving(order, held))
        except Exception as error:  # whatever a driver may raise: the leader has to be told
            self._failed(error)
            held.close()  # a shard tells as well
            if isinstance(held, Lease):
                self._tell(order, False)
        return True

    def _moving(self, order: Order, held: Lease | ReservationShard) -> _Copy:
        if isinstance(held, ReservationShard):
            return _Copy(order, None, self._backend.offload(held, order.slots))
        if order.kind is Kind.SAVE:
            return _Copy(order, held, self._backend.save(held, order.slots))
        return _Copy(order, None, self._backend.load(held, order.slots, order.first))

    def _look(self, copy: _Copy) -> None:
        ok = True
        try:
            if not copy.moving.done():
                return
        except LockTimeout:
            return  # it could not be given back yet; `done` tries again
        except Exception as error:
            self._failed(error)
            ok = False
        self._going.remove(copy)
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
            return  # `_look` hears of it again, and counts it

    def _refuse_the_rest(self) -> None:
        """The leader is gone, and all that it wrote was read: what else it handed out, between a
        ticket and its order, comes no more. Without us its pages stay pinned until the deadline."""
        try:
            self.cache.index.refuse_orphans()
        except LightcacheError as error:  # then they go at the deadline
            self.last_error = error

    def _tell(self, order: Order, ok: bool) -> None:
        try:
            self.cache.done(order.ticket, ok)
        except LightcacheError as error:  # nobody waits for it any more
            self.last_error = error

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = error


__all__ = ["RankWorker"]
