"""Prefetching: from a storage straight into pages of the pool, and from there into the index.

A reservation publishes all of its pages or none, so a prefix is read in groups, each with a
reservation of its own. When a page of a group is bad, the group is abandoned and the good pages in
front of it are read once more into a smaller reservation. That is rare, and copying would be a
second way of filling pages.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lightcache import _arguments
from lightcache.errors import ConfigError, LightcacheError, WaitTimeout
from lightcache.namespaces import Namespace
from lightcache.reservations import Positions, Reservation
from lightcache.storage.arguments import Deadline
from lightcache.storage.jobs import Job
from lightcache.storage.protocol import Keys, ReadStatus
from lightcache.storage.tasks import StorageTask

if TYPE_CHECKING:
    from lightcache.storage.worker import StorageTier

SLICE = 0.05  # seconds of waiting for others between two looks at whether we are still wanted


class ReadJob(Job):
    """keys[start:], read as far as they are stored."""

    def __init__(
        self,
        tier: StorageTier,
        task: StorageTask,
        deadline: Deadline,
        keys: Keys,
        start: int,
        namespace: Namespace | None,
        hold: bool,
        *,
        declinable: bool = False,
    ) -> None:
        """Nothing is reserved yet.

        Args:
            declinable: it is not read if computing what is found is faster.
        """
        super().__init__(tier, task, deadline)
        self._keys = keys
        self._start = start
        self._namespace = namespace
        self._hold = hold
        self._declinable = declinable
        self._soft = Deadline(tier.read_seconds, tier.clock)
        self._reservation: Reservation | None = None
        self._calling = False
        """The storage has the pages of the reservation."""
        self._held: list[tuple[int, int, Reservation]] = []

    @property
    def reads(self) -> int:
        """See `Job`."""
        return max(0, self.task._pages - self.task.pages_done)

    def step(self) -> bool:
        """See `Job`. Reads are not interrupted by others."""
        if self.stopping:
            return False
        cache, task = self.tier.cache, self.task
        at = max(self._start, cache.peek(self._keys, namespace=self._namespace))
        task._count(present=at - self._start)
        task._reach(at - self._start)
        rest = self._keys[at:]
        end = at + (self.tier._contains(self, rest) if len(rest) else 0)
        task._count(absent=len(self._keys) - end)
        if self._declines(end - at):
            return False
        while at < end and not self.stopping:
            group_end = min(at + self.tier.group, end)
            at = self._group(at, group_end)
            task._reach(at - self._start)
            if at < group_end:
                break
        if not self._hold:  # pages that others were to bring may not have come
            ready = cache.peek(self._keys, namespace=self._namespace)
            task._reach(max(0, ready - self._start))
        return False

    def _declines(self, pages: int) -> bool:
        """Fewer than were asked for may be stored: then a call costs more than it brings."""
        costs = self.tier._costs
        why = ""
        if costs is not None and self._declinable:
            why = costs.decide_found(pages).declined
        if why:
            self.task._count(declined=pages)
            self.task._say(why)
        return bool(why)

    def _group(self, first: int, end: int) -> int:
        """Read keys[first:end]; up to where everything is there now, or left to somebody else."""
        loaded = 0
        while first < end:
            self.check()
            reservation = self._reserve(first, end)
            busy = reservation.busy
            if self._hold and len(busy):  # who holds pages waits for nobody who may hold some too
                end = self._leave_busy(busy)
            elif (good := self._read(reservation)) < len(reservation.new):
                end = int(reservation.new[good])
            else:
                end = self._with_room(end, reservation)
                self._publish(first, end, reservation)
                loaded += good
                busy = busy[busy < end]
                self._let_go()
                if not len(busy) or self.tier.busy == "skip":
                    self.task._count(busy=len(busy))
                    self.task._count(present=max(0, end - first - loaded - len(busy)))
                    return end
                if not self._others_are_done(busy):
                    end = self._leave_busy(busy)
            self._let_go()
        return end

    def _reserve(self, first: int, end: int) -> Reservation:
        made = self.tier.cache.reserve(
            self._keys[:end], first, namespace=self._namespace, timeout=self.deadline.left
        )
        with self._lock:
            self._reservation = made
        self.check()  # given up in between: the abandoning has missed it, leaving will not
        return made

    def _read(self, reservation: Reservation) -> int:
        """Fill the new pages; how many from the first on are good."""
        pages = reservation.pages.tolist()
        if not pages:
            return 0
        keys = self._keys[reservation.new]
        self._calling = True
        try:
            result = self.tier._read(self, keys, [self.tier.cache.pool[page] for page in pages])
        finally:
            self._calling = False
        self.task._count(
            absent=result.count(ReadStatus.ABSENT),
            failed=result.count(ReadStatus.FAILED),
            corrupt=result.count(ReadStatus.CORRUPT),
        )
        self.task._say(result.reason)
        return result.prefix

    def _with_room(self, end: int, reservation: Reservation) -> int:
        missing = reservation.missing  # no page in front of these is
        if not len(missing):
            return end
        self.task._count(no_room=len(missing))
        self.task._say(f"no room in the cache: {reservation.why}")
        return int(missing[0])

    def _publish(self, first: int, end: int, reservation: Reservation) -> None:
        with self._lock:
            self.check()
            if self._hold:
                self._held.append((first, end, reservation))
                self._reservation = None
            else:
                reservation.publish()
                self.task._count(loaded=len(reservation.new))

    def _leave_busy(self, busy: Positions) -> int:
        self.task._count(busy=len(busy))
        self.task._say(f"{len(busy)} pages are being read or computed by somebody else")
        return int(busy[0])

    def _others_are_done(self, busy: Positions) -> bool:
        """Wait for them; False: our time is up, or we are to stop."""
        keys = self._keys[busy]
        while not (self.deadline.passed or self.stopping):
            self.check()
            try:
                limit = min(SLICE, self.deadline.left)
                self.tier.cache.wait(keys, timeout=limit, namespace=self._namespace)
            except WaitTimeout:
                continue
            return True
        return False

    # ---- ending it

    def take(self) -> None:
        """See `StorageTask.take`."""
        policy = self.tier.read_policy
        if policy == "wait":
            self.task.wait()
        elif policy == "deadline":
            with contextlib.suppress(WaitTimeout):
                self.task.wait(self._soft.left)
        self.stop()

    def _abandon(self) -> None:
        for reservation in self._all():
            reservation._give_up()

    def _all(self) -> list[Reservation]:
        held = [reservation for _, _, reservation in self._held]
        return [*held, self._reservation] if self._reservation is not None else held

    def _let_go(self) -> None:
        """Of the current reservation: abandon it unless it is published, unpin."""
        with self._lock:
            if self._reservation is not None:
                self._reservation.__exit__(None, None, None)
                self._reservation = None

    def lose(self) -> None:
        """See `Job`."""
        with self._lock:
            if self._reservation is not None:
                self._reservation._give_up()

    @property
    def holds(self) -> bool:
        """See `Job`."""
        return bool(self._held)

    def release(self) -> None:
        """See `Job`."""
        with self._lock:
            if not self._calling:
                self._let_go()
            while self._held and self._given_up:
                self._held[-1][2].__exit__(None, None, None)
                self._held.pop()

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        with self._lock:
            if not self._hold or self._given_up or not self.task.over:
                raise ConfigError(
                    f"publish: expected a prefetch with hold=True that is over, and was neither "
                    f"published nor cancelled before, found {self.task!r}"
                )
            _arguments.count(pages, "pages", 0, self.task.pages_done)
            self._given_up = True  # once
            again = self._publish_held(self._start + pages)
            self.tier._let_go(self)
        if again is None:
            return self.tier._nothing("read", pages)
        keys = self._keys[: self._start + pages]
        return self.tier._fetch(keys, again, self._namespace)  # all agreed on it: not declined

    def _publish_held(self, end: int) -> int | None:
        """Publish groups up to `end`; where a group begins that it cuts in two."""
        try:
            for first, last, reservation in self._held:
                if last <= end:
                    reservation.publish()
                    self.task._count(loaded=len(reservation.new))
                    self.tier._tally(loaded=len(reservation.new))
                elif first < end:
                    return first
        except LightcacheError:
            self.tier._let_go(self)
            raise
        return None


__all__ = ["ReadJob"]
