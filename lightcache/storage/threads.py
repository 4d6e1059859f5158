"""The threads of a tier: an executor of its jobs, and a thread that looks after them.

A call is late when it has not returned `grace` seconds after its time. Its task fails then, its
keys are abandoned, the breaker counts it; the thread is lost until the call returns, and the pages
with it. All others go on. What may wait for a lock, such as giving pages back, is done by these
threads: cancelling a task waits for nothing.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from lightcache import _arguments
from lightcache.breaker import Breaker
from lightcache.errors import ConfigError, LightcacheError, StorageError, WaitTimeout
from lightcache.leases import Lease, Positions
from lightcache.namespaces import Namespace
from lightcache.reservations import Reservation
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.breaker import log
from lightcache.storage.executor import READ, WRITE, Executor, Exhausted, Late, Work
from lightcache.storage.protocol import Keys, ReadStatus, TokenRows, WriteStatus
from lightcache.storage.tiers import StorageTask, TaskResult, Unstored

if TYPE_CHECKING:
    from lightcache.storage.worker import StorageTier


# ---- What the tier's threads carry out, a step at a time: the side of a task that holds pages.
#
# Pages belong to the storage's call that reads or writes them until that call returns, whatever
# becomes of the task: a backend that hangs may still write into them. So giving up has two
# halves. Keys are abandoned at once, and nobody waits for them. Pins go when the call has
# returned, by the thread that made it.


class Stopped(Exception):
    """Unwinds a step whose task was cancelled, or whose call came back too late."""


class Job(Work):
    """One task's work and what it holds."""

    def __init__(self, tier: StorageTier, task: StorageTask, deadline: Deadline) -> None:
        """Nothing is held."""
        self.tier = tier
        self.task = task
        self.deadline = deadline
        self.kind = READ if task.kind == "read" else WRITE
        self.end = tier.clock() + deadline.left
        self.request: object = self
        """Jobs of one request stand together in the queue."""
        self.stopping = False
        """Begin nothing more; what was done counts."""
        self.kept: Deadline | None = None
        """Of a job that holds pages: until when it waits for `publish`."""
        self._lock = threading.RLock()
        self.accounting = threading.Lock()
        self._given_up = False
        task._job = self

    @property
    def pinned(self) -> int:
        """Pages that it pins for a write."""
        return 0

    @property
    def reads(self) -> int:
        """Pages that it may still read."""
        return 0

    @property
    def group(self) -> object:
        """See `Work`."""
        return self.request

    def run(self) -> None:
        """See `Work`."""
        self.tier._crew.turn(self)

    def expire(self, reason: str) -> None:
        """See `Work`."""
        reason = reason or f"{self.deadline.reason}, all of it in the queue"
        self.tier._crew.finish(self, reason, failed=True)

    def step(self) -> bool:
        """Do some of it, in a thread of the tier; whether there is more.

        Raises:
            Stopped: given up.
            LightcacheError: broken off.
        """
        raise NotImplementedError

    def give_up(self) -> None:
        """Abandon keys; keep pins. Any thread; more than once is once."""
        with self._lock:
            self._given_up = True
            self._abandon()

    def lose(self) -> None:
        """Its call is overdue: what that has is given up, what was done before is not."""
        self.give_up()

    def _abandon(self) -> None:
        pass

    @property
    def holds(self) -> bool:
        """Whether it has pages for `publish`."""
        return False

    def release(self) -> None:
        """Give back what is not wanted any more, and no call has. More than once is once.

        Raises:
            LockTimeout: not yet; call again.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises Stopped when given up."""
        if self._given_up:
            raise Stopped

    def account(self, reason: str, *, failed: bool) -> None:
        """Its task ends: count the pages of which nothing was said."""

    def take(self) -> None:
        """See `StorageTask.take`."""
        self.task.wait()

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""
        self.tier._crew.cancel(self)

    def stop(self) -> None:
        """See `StorageTask`."""
        self.stopping = True

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        raise ConfigError("publish: this task holds nothing; prefetch with hold=True")


class WriteJob(Job):
    """Ready pages of a prompt, written group by group. The first of them are pinned from the
    beginning, as many as writes may pin; of the others each group for as long as it is written."""

    def __init__(
        self,
        tier: StorageTier,
        task: StorageTask,
        deadline: Deadline,
        keys: Keys,
        lease: Lease,
        namespace: Namespace | None,
        tokens: TokenRows | None,
    ) -> None:
        """Owns the lease.

        Args:
            keys: of pages that were ready just now.
            lease: of the first of them.
            tokens: of these pages and perhaps of more after them.
        """
        super().__init__(tier, task, deadline)
        self._keys = keys
        self._lease = lease
        self._namespace = namespace
        self._tokens = tokens
        self._first_pages: list[int] = lease.pages.tolist()
        self._group: Lease | None = None
        """Of the group that is written, if it is not among the first."""
        self._at: int | None = None  # None: not asked yet what is stored

    @property
    def pinned(self) -> int:
        """See `Job`."""
        group = self._group
        return len(self._first_pages) + (0 if group is None else len(group))

    def step(self) -> bool:
        """See `Job`."""
        if self._at is None:
            self._at = self.tier._contains(self, self._keys)
            self.task._count(present=self._at)
            self._let_go(self._at)
        else:
            before, self._at = self._at, self._write(self._at)
            if self._at > before:  # what gets on has its time anew
                self.deadline = Deadline(self.deadline.timeout, self.tier.clock)
                self.end = self.tier.clock() + self.deadline.left
        self.task._reach(self._at)
        return self._at < len(self._keys) and not self.stopping

    def _write(self, first: int) -> int:
        """Write the next group; up to where everything is stored now."""
        pinned = len(self._first_pages)
        end = min(first + self.tier.group, pinned if first < pinned else len(self._keys))
        pages = self._pages(first, end)
        if len(pages) < end - first:
            self._lose_pages("gone", end - first - len(pages), "evicted before they were written")
            self.stopping = True
        if not pages:
            return first
        end = first + len(pages)
        keys = self._keys[first:end]
        buffers = [self.tier.cache.pool[page] for page in pages]
        for buffer in buffers:
            buffer.flags.writeable = False
        parent = self._keys[first - 1 : first] if first else None
        tokens = None if self._tokens is None else self._tokens[first:end]
        result = self.tier._write(self, keys, buffers, parent, tokens)
        del buffers
        self._let_go(end)
        failed, refused = result.count(WriteStatus.FAILED), result.count(WriteStatus.REFUSED)
        self.task._count(
            stored=result.count(WriteStatus.STORED),
            present=result.count(WriteStatus.PRESENT),
            failed=failed,
            refused=refused,
        )
        self.task._say(result.reason)
        self.tier._unstored("failed", failed, result.reason)
        self.tier._unstored("refused", refused, result.reason)
        if result.prefix < len(keys):  # what lies behind a hole would not be found
            self.stopping = True
        return first + result.prefix

    def _pages(self, first: int, end: int) -> list[int]:
        """Of a group, as far as they are still there; pinned."""
        if first < len(self._first_pages):
            return self._first_pages[first:end]
        with self._lock:
            self.check()
            self._group = self.tier.cache.match(self._keys[first:end], namespace=self._namespace)
            pages: list[int] = self._group.pages.tolist()
            return pages

    def _let_go(self, end: int) -> None:
        """Of what is written: the call that had it has returned."""
        with self._lock:
            if self._group is not None:
                self._group.__exit__(None, None, None)
                self._group = None
            if end >= len(self._first_pages):
                self._lease.__exit__(None, None, None)
                self._first_pages = []

    def _lose_pages(self, kind: Unstored, pages: int, why: str) -> None:
        self.task._count(skipped=pages)
        self.task._say(f"{pages} pages were {why}")
        self.tier._unstored(kind, pages, f"they were {why}")

    def account(self, reason: str, *, failed: bool) -> None:
        """See `Job`."""
        found = self.task.result
        done = found.stored + found.present + found.failed + found.refused + found.skipped
        if left := found.pages - done:
            self.task._count(skipped=left)
            why = reason if failed else "one before them could not be stored, or they were stopped"
            self.tier._unstored("ended" if failed else "behind", left, why)

    def release(self) -> None:
        """See `Job`."""
        with self._lock:
            if self._group is not None:
                self._group.__exit__(None, None, None)
                self._group = None
            self._lease.__exit__(None, None, None)
            self._first_pages = []


def checked_contains(found: object, keys: int) -> int:
    """What `Storage.contains` returned.

    Raises:
        StorageError: no count of these keys.
    """
    try:
        count = operator.index(cast(Any, found))
    except TypeError:
        count = -1
    if not 0 <= count <= keys:
        raise StorageError(
            f"contains: expected a count of {keys} keys, the backend returned {found!r}; see "
            "lightcache.storage.conformance"
        )
    return int(count)


def checked_statuses(what: str, statuses: object, keys: int) -> None:
    """What `Storage.read` or `write` returned.

    Raises:
        StorageError: not one status for each key.
    """
    if not isinstance(statuses, tuple) or len(statuses) != keys:
        raise StorageError(
            f"{what}: expected a tuple of {keys} statuses, the backend returned {statuses!r}; see "
            "lightcache.storage.conformance"
        )


# ---- Prefetching: from a storage straight into pages of the pool, and from there into the index.
#
# A reservation publishes all of its pages or none, so a prefix is read in groups, each with a
# reservation of its own. When a page of a group is bad, the group is abandoned and the good pages
# in front of it are read once more into a smaller reservation. That is rare, and copying would be
# a second way of filling pages.

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


# ---- Prefetching one page of many: the last that is stored, whatever of those before it is.


class DeepestJob(ReadJob):
    """Of some keys the last that is stored, alone. Storages know of prefixes, and these are none:
    each key is asked for by itself, from the end."""

    def __init__(
        self,
        tier: StorageTier,
        task: StorageTask,
        deadline: Deadline,
        keys: Keys,
        most: int,
        namespace: Namespace | None,
    ) -> None:
        """Nothing was asked yet."""
        super().__init__(tier, task, deadline, keys[:0], 0, namespace, False)
        self._every, self._most = keys, most

    @property
    def reads(self) -> int:
        """See `Job`."""
        return 1

    def step(self) -> bool:
        """See `Job`."""
        for last in range(len(self._every), max(0, len(self._every) - self._most), -1):
            self.check()
            if self.stopping or self.deadline.passed:
                break
            key = np.ascontiguousarray(self._every[last - 1 : last])
            if self.tier.cache.peek(key, namespace=self._namespace):
                self.task._reach(last)
                break
            if self.tier._contains(self, key):
                self._keys = key
                super().step()
                self.task._reach(last if self.task.pages_done else 0)
                break
        return False


# ---- The threads of a tier: an executor of its jobs, and a thread that looks after them.
#
# A call is late when it has not returned `grace` seconds after its time. Its task fails then, its
# keys are abandoned, the breaker counts it; the thread is lost until the call returns, and the
# pages with it. All others go on. What may wait for a lock, such as giving pages back, is done by
# these threads: cancelling a task waits for nothing.

R = TypeVar("R")
RETRY = 0.5  # seconds until pages that could not be given back (LockTimeout) are tried again


class Crew(Executor):
    """Owns jobs from their beginning until what they held was given back, all under `changed`."""

    def __init__(
        self,
        threads: int,
        breaker: Breaker,
        clock: Clock,
        *,
        seconds: float,
        grace: float,
        probe: Callable[[float], str],
    ) -> None:
        """No threads yet.

        Args:
            seconds: that a call is given, at most.
            grace: seconds after that until it is late.
            probe: finds out whether the storage works, in so many seconds; empty: it does.
        """
        super().__init__(threads, "storage", clock=clock)
        self.running: set[Job] = set()
        self.holding: set[Job] = set()
        """Ended, with pages for `StorageTask.publish`."""
        self.tally: Counter[str] = Counter()
        self._cancelled: list[tuple[Job, Literal["queued", "begun", "held"]]] = []
        """Given up, not yet abandoned; and how far each was: one that was begun, its thread gives
        back."""
        self._owed: list[Job] = []
        """Have something to give back that could not be: tried again."""
        self._returning: list[Job] = []
        """About to give back what they have: once for each `let_go` that is to come."""
        self._last: Callable[[], None] = _nothing
        self._breaker = breaker
        self._seconds = seconds
        self._grace = grace
        self._probe = _Probe(self, probe)
        self._watcher = threading.Thread(
            target=self._watch, name="lightcache-storage-watch", daemon=True
        )

    def start(self) -> None:
        """Begin to look. The others are started when there is something to do."""
        self._watcher.start()

    # ---- the threads that call the storage

    def begun(self, work: Work) -> None:
        """See `Executor`."""
        if isinstance(work, Job):
            self.running.add(work)

    def expired(self, works: list[Work]) -> None:
        """See `Executor`: until they are finished the crew is not idle."""
        for work in works:
            self.begun(work)

    def queued(self) -> list[Job]:
        """Jobs that wait."""
        return [work for work in self.queue.all() if isinstance(work, Job)]

    def turn(self, job: Job) -> None:
        """Do a job, in a thread of the crew, until it ends or reads go before it."""
        job.task._start()
        while self._step(job) and not self._requeue(job):
            pass

    def _requeue(self, job: Job) -> bool:
        """Let reads that wait go before the rest of a write."""
        with self.changed:
            if not self.queue.reads or job._given_up:
                return False
            self.running.discard(job)
            self.put(job, back=True)
            return True

    def _step(self, job: Job) -> bool:
        reason, failed = "", False
        try:
            job.check()
            if job.step():
                return True
        except Stopped:
            reason, failed = "cancelled", True
        except LightcacheError as error:
            reason, failed = str(error), True
        except Exception as error:  # ours, then: those of backends became StorageError
            log.exception("a storage task ended with an error that should not happen")
            reason, failed = repr(error), True
        self.finish(job, reason, failed=failed)
        return False

    def finish(self, job: Job, reason: str, *, failed: bool) -> None:
        """A job that no thread has: what it held goes back, then its waiters are told."""
        with self.changed:
            self._returning.append(job)
        self.let_go(job)
        self.hold(job)
        self.tell(job, reason, failed=failed)
        self._finished(job)

    def _finished(self, job: Job) -> None:
        with self.changed:
            self.running.discard(job)
            self.changed.notify_all()
        job.task._settle()

    def hold(self, job: Job) -> None:
        """Remember that a job has pages for `publish`."""
        if job.holds:
            with self.changed:
                job.kept = job.kept or Deadline(job.tier.timeout, self._clock)  # once: from its end
                self.holding.add(job)
                self.changed.notify_all()
                closing = self.closing
            if closing:  # `close` has looked at these already
                self.abandon(job.give_up)
            if job._given_up:  # cancelled by somebody who did not see it among these
                self.unhold(job)
                self.let_go(job)

    def unhold(self, job: Job) -> bool:
        """It is not published any more: `let_go` follows. Whether it was held. In one hold of the
        lock: whoever asks in between finds that there is something to do."""
        with self.changed:
            held = job in self.holding
            self.holding.discard(job)
            self._returning.append(job)
            return held

    def tell(self, job: Job, reason: str, *, failed: bool) -> None:
        """End its task, unless that has ended, and add up what it did."""

        def count(found: TaskResult) -> None:
            counts = {name: getattr(found, name) for name in _TALLIED}
            self.add(**counts, **{"tasks_failed" if failed else "tasks_finished": 1})

        with job.accounting:  # of two that tell, one counts
            if not job.task.over:
                job.account(reason, failed=failed)
            job.task._end(reason, failed=failed, count=count)

    def add(self, **counts: int) -> None:
        """Add to the totals."""
        with self.changed:
            self.tally.update(counts)

    # ---- giving up, and giving back

    def cancel(self, job: Job) -> None:
        """Give a job up. Waits for nothing: the looking thread abandons its keys, and gives back
        what no call has."""
        job._given_up = True  # first: a thread that has it now finds that it is given up
        with self.changed:
            queued, held = self.queue.remove(job), job in self.holding
            self.holding.discard(job)
            if queued or held:
                self._returning.append(job)
            begun = job in self.running
            if queued:
                self.running.add(job)  # until it is finished
        if queued:  # before the other thread settles it
            self.tell(job, "cancelled", failed=True)
        with self.changed:
            if queued or held or begun:
                self._cancelled.append((job, "queued" if queued else "held" if held else "begun"))
            self.changed.notify_all()

    def let_go(self, job: Job, *, later: bool = False) -> bool:
        """Give back what a job of `_returning` holds; later, if that cannot be done now.

        Args:
            later: do not try now.

        Returns:
            Whether it was given back.
        """
        owed = later
        try:
            if not later:
                job.release()
        except LightcacheError as error:
            log.warning("pages of a storage task could not be given back yet: %s", error)
            owed = True
        except (KeyboardInterrupt, SystemExit):
            owed = True
            raise
        finally:
            with self.changed:  # both at once: in between, nobody would be busy with it
                self._returning.remove(job)
                if owed:
                    self._owed.append(job)
                self.changed.notify_all()
        return not owed

    def give_back(
        self, unwanted: Sequence[Job], owed: Sequence[Job] = (), begun: Sequence[Job] = ()
    ) -> None:
        """Give up the first and those that were begun, and let go of all but the latter, which are
        among `_returning`. One wait for a lock that is held is enough: then others are owed."""
        free = True
        for job in begun:
            free = free and self.abandon(job.give_up)
        for job in unwanted:
            job._given_up = True  # also of those whose keys are abandoned later, with their pages
            free = free and self.abandon(job.give_up)
            free = self.let_go(job, later=not free)
        for job in owed:
            free = self.let_go(job, later=not free)

    def end_cancelled(self, unwanted: Sequence[Job] = (), owed: Sequence[Job] = ()) -> None:
        """Do for jobs that were cancelled what may wait for a lock, and `give_back` these."""
        with self.changed:
            given_up, self._cancelled = self._cancelled, []
            if given_up:  # of those that have ended by themselves nothing else says it
                self.changed.notify_all()
        begun = [job for job, how_far in given_up if how_far == "begun"]
        others = [job for job, how_far in given_up if how_far != "begun"]
        self.give_back([*unwanted, *others], owed, begun)
        for job, how_far in given_up:
            if how_far == "queued":
                self._finished(job)

    # ---- calls

    def call(self, job: Job, what: str, run: Callable[[float], R], bad: Callable[[R], str]) -> R:
        """Call the backend.

        Args:
            run: makes the call; it is given the seconds that are left.
            bad: why its result counts as a failure; empty: it does not.

        Raises:
            Stopped: it came back too late, or the task was cancelled meanwhile.
            StorageError: it was not made (no time, disabled), or raised.
        """
        left = min(job.deadline.left, self._seconds)
        if left <= 0.0:
            raise StorageError(job.deadline.reason)
        if self._breaker.shut:
            raise StorageError(self._breaker.reason)
        try:
            result = self._called(left, what, run, bad, lambda why: self._give_up_call(job, why))
        finally:
            job.check()
        return result

    def _called(
        self,
        left: float,
        what: str,
        run: Callable[[float], R],
        bad: Callable[[R], str],
        late: Callable[[str], None],
    ) -> R:
        """Make a call, and tell the breaker what came of it."""
        began, error = self._clock(), ""
        whole = began if left >= self._seconds / 2 else None  # it had the time that calls have
        result: R | None = None

        def hangs() -> None:
            reason = f"timed out: not done within {left:g} s; the storage's {what} hangs"
            self.add(timeouts=1)
            self._breaker.failure(reason, whole)
            late(reason)

        try:
            result = self.here(lambda: run(left), began + left + self._grace, what, hangs)
            error = bad(result)
        except Late:
            raise Stopped from None
        except Exception as raised:  # a text, as a traceback would keep views of the pool
            error = f"{what}: {raised if isinstance(raised, LightcacheError) else repr(raised)}"
        if error:
            self._breaker.failure(error, whole if self._clock() - began >= left else None)
        else:
            self._breaker.success()
        if result is None:
            raise StorageError(error)
        return result

    def _give_up_call(self, job: Job, reason: str) -> None:
        self.abandon(job.lose)
        self.hold(job)
        self.tell(job, reason, failed=True)
        job.task._settle()

    # ---- what hangs, and what waits too long

    def _watch(self) -> None:
        while True:
            self.poll()
            with self.changed:
                if self.closing and not self.busy:
                    break
                pause = self.pause()
                if pause is None or pause > 0.0:
                    self.changed.wait(pause)
        try:
            self._last()
        except Exception:  # whoever closes again waits for this thread
            log.exception("what a storage tier had left to do failed")

    def pause(self) -> float | None:
        """Seconds until there is something to look after; None: whenever something changes."""
        if self._cancelled:
            return 0.0
        pauses = [super().pause(), None if self.closing else self._breaker.wait]
        pauses += [job.kept.left for job in self.holding if job.kept is not None]
        pauses += [RETRY] if self._owed else []
        found = [each for each in pauses if each is not None]
        return max(0.001, min(*found, threading.TIMEOUT_MAX)) if found else None

    def poll(self) -> None:
        """Fail what is late, give back what is to be, and see whether the storage works again."""
        super().poll()
        with self.changed:
            owed, self._owed = self._owed, []
            kept = [job for job in self.holding if job.kept is not None and job.kept.passed]
            self.holding.difference_update(kept)
            self._returning += [*kept, *owed]
        for job in kept:
            job.task._say("nobody published what was held, so it was given back")
        self.end_cancelled(kept, owed)
        if not self.closing and self._breaker.probe():
            try:
                self.put(self._probe)
            except LightcacheError as error:
                self._breaker.failure(str(error))

    def probe(self, find_out: Callable[[float], str]) -> None:
        """See whether the storage works, with memory of our own: nobody waits for it."""
        with contextlib.suppress(Stopped, StorageError):  # the breaker was told
            self._called(self._seconds, "probe", find_out, lambda found: found, lambda why: None)
        with self.changed:
            self.changed.notify_all()

    def abandon(self, how: Callable[[], None]) -> bool:
        """`give_up` or `lose` a job. What cannot be abandoned now is when it is released. Whether
        it could be."""
        try:
            how()
        except LightcacheError as error:
            log.warning("keys of a storage task could not be abandoned yet: %s", error)
            return False
        return True

    # ---- the end

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs and nothing waits; False: not in these seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.busy, min(timeout, threading.TIMEOUT_MAX))

    def leave(self, last: Callable[[], None]) -> bool:
        """Closing, and not waited for any more: the thread that ends last does this, in the end.
        False: everything has ended meanwhile, and it does not."""
        with self.changed:
            busy = self.busy
            if busy:
                self._last = last
            return busy

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits, or is to be given back; the lock is held."""
        held = self.holding or self._owed or self._returning or self._cancelled
        return bool(self.running or held or self.queue.all())

    @property
    def unreturned(self) -> int:
        """Tasks whose pages nobody wants, and could not be given back yet."""
        with self.changed:
            return len({*self._owed, *self._returning})

    def begin_closing(self) -> None:
        """Take nothing more, and give back what is held for `StorageTask.publish`."""
        with self.changed:
            self.closing = True
            held = list(self.holding)
            self.holding.clear()
            self._returning += held
            self._ready.notify_all()
            self.changed.notify_all()
        self.give_back(held)

    def join(self) -> None:
        """Once idle and closing: wait for the threads to end."""
        self.close(math.inf)
        if self._watcher.ident is not None:
            self._watcher.join()


class _Probe(Work):
    """A call that nobody asked for, of a storage that is left alone."""

    def __init__(self, crew: Crew, find_out: Callable[[float], str]) -> None:
        self._crew, self._find_out = crew, find_out

    def run(self) -> None:
        self._crew.probe(self._find_out)

    def expire(self, reason: str) -> None:
        self._crew._breaker.failure(reason)


def _nothing() -> None:
    pass


_TALLIED = (
    *("loaded", "stored", "present", "absent", "failed", "corrupt", "refused", "skipped", "busy"),
    *("no_room", "declined"),
)


__all__ = [
    "Crew",
    "DeepestJob",
    "Exhausted",
    "Job",
    "ReadJob",
    "Stopped",
    "WriteJob",
    "checked_contains",
    "checked_statuses",
]
