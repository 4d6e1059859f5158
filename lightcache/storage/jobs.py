"""Jobs: the tasks of a tier as its threads run them, and the executor of these threads.

Pages belong to the call of the storage that reads or writes them until that call returns, whatever
becomes of the task: a backend that hangs may still write into them. So giving up has two halves.
Keys are abandoned at once, and nothing waits for them. Pins go when the call has returned, by the
thread that made it.

A call is late when it has not returned `grace` seconds after its time. Its task fails then, its
keys are abandoned, the breaker counts it; the thread is lost until the call returns, and the pages
with it. All others continue. What may wait for a lock, such as giving pages back, is done by these
threads: cancelling a task waits for nothing.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, get_args

import numpy as np

from lightcache import _arguments
from lightcache.breaker import CircuitBreaker
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LightcacheError, StorageError, WaitTimeout
from lightcache.leases import Lease, Positions
from lightcache.namespaces import Namespace
from lightcache.reservations import Reservation
from lightcache.shm.waiting import Condition
from lightcache.storage.arguments import Clock, Deadline, write_to
from lightcache.storage.calls import (
    checked_contains,
    checked_statuses,
    log,
    own_memory,
    unread,
    unwritten,
)
from lightcache.storage.costs import ReadCosts
from lightcache.storage.executor import READ, WRITE, Executor, Late, Work
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    ReadStatus,
    Storage,
    TokenRows,
    WriteResult,
    WriteStatus,
)
from lightcache.storage.tasks import (
    COUNTS,
    BusyPolicy,
    ReadPolicy,
    StorageTask,
    TaskProgress,
    TaskResult,
    TierStats,
    Unstored,
)

R = TypeVar("R")
SLICE = 0.05  # seconds of waiting for others between two looks at whether the job is still wanted
RETRY = 0.5  # seconds until pages that could not be given back (LockTimeout) are tried again


class Stopped(Exception):
    """Unwinds a step whose task was cancelled, or whose call came back too late."""


@dataclass(frozen=True)
class TierOptions:
    """How a tier runs its tasks; see `StorageTier`."""

    threads: int
    group: int
    busy: BusyPolicy
    read_policy: ReadPolicy
    read_seconds: float
    timeout: float
    call_timeout: float
    grace: float
    clock: Clock


class Job(Work):
    """One task's work, and the pages it holds."""

    def __init__(self, executor: JobExecutor, progress: TaskProgress, deadline: Deadline) -> None:
        """Holds nothing."""
        self.executor = executor
        self.progress = progress
        self.task = StorageTask(progress)
        self.deadline = deadline
        self.kind = READ if progress.kind == "read" else WRITE
        self.end = executor.now + deadline.left
        self.request: object = self
        """Jobs of one request stand together in the queue."""
        self.stopping = False
        """Start nothing more; what was done counts."""
        self.given_up = False
        """Cancelled, or its call was late: nothing is published any more."""
        self.kept: Deadline | None = None
        """Of a job that holds pages: until when it waits for `publish`."""
        self.lock = threading.RLock()
        self.accounting = threading.Lock()
        progress.owner = self

    @property
    def pinned(self) -> int:
        """Pages that it pins for a write."""
        return 0

    @property
    def reads(self) -> int:
        """Pages that it may still read."""
        return 0

    @property
    def holds(self) -> bool:
        """Whether it has pages for `publish`."""
        return False

    @property
    def group(self) -> object:
        """See `Work`."""
        return self.request

    def run(self) -> None:
        """See `Work`."""
        self.executor.run_job(self)

    def expire(self, reason: str) -> None:
        """See `Work`."""
        reason = reason or f"{self.deadline.reason}, all of it in the queue"
        self.executor.finish(self, reason, failed=True)

    def step(self) -> bool:
        """Do some of it, in a thread of the executor; whether there is more.

        Raises:
            Stopped: given up.
            LightcacheError: it failed.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises Stopped when given up."""
        if self.given_up:
            raise Stopped

    def give_up(self) -> None:
        """Abandon keys; keep pins. Any thread; more than once is once."""
        with self.lock:
            self.given_up = True
            self.abandon_keys()

    def lose(self) -> None:
        """Its call is late: give up what that has, not what was done before."""
        self.give_up()

    def abandon_keys(self) -> None:
        """Of pages that it was reading."""

    def release(self) -> None:
        """Give back what is not wanted any more, and no call has. More than once is once.

        Raises:
            LockTimeout: not yet; call again.
        """
        raise NotImplementedError

    def account(self, reason: str, *, failed: bool) -> None:
        """Its task ends: count the pages that no call has decided."""

    # ---- what users decide, by way of the task

    def take(self) -> None:
        """See `StorageTask.take`."""
        self.task.wait()

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""
        self.executor.cancel(self)

    def stop(self) -> None:
        """See `StorageTask.stop`."""
        self.stopping = True

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        raise ConfigError("publish: this task holds nothing; prefetch with hold=True")


class WriteJob(Job):
    """Ready pages of a prompt, written group by group. The first of them are pinned from the
    beginning, as many as writes may pin; of the others each group for as long as it is written."""

    def __init__(
        self,
        executor: JobExecutor,
        progress: TaskProgress,
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
        super().__init__(executor, progress, deadline)
        self._keys = keys
        self._lease = lease
        self._namespace = namespace
        self._tokens = tokens
        self._first_pages: list[int] = lease.pages.tolist()
        self._group: Lease | None = None
        """Of the group that is written, if it is not among the first."""
        self._done: int | None = None
        """Keys from the first on that are stored; None: the storage was not asked yet."""

    @property
    def pinned(self) -> int:
        """See `Job`."""
        group = self._group
        return len(self._first_pages) + (0 if group is None else len(group))

    def step(self) -> bool:
        """See `Job`."""
        if self._done is None:
            self._done = self.executor.contains(self, self._keys)
            self.progress.count(present=self._done)
            self._unpin(self._done)
        else:
            before, self._done = self._done, self._write(self._done)
            if self._done > before:  # a write that advances has its time anew
                self.deadline = Deadline(self.deadline.timeout, self.executor.options.clock)
                self.end = self.executor.now + self.deadline.left
        self.progress.reach(self._done)
        return self._done < len(self._keys) and not self.stopping

    def _write(self, first: int) -> int:
        """Write the next group; the number of keys that are stored now."""
        pinned = len(self._first_pages)
        end = min(
            first + self.executor.options.group, pinned if first < pinned else len(self._keys)
        )
        pages = self._pages(first, end)
        if missing := end - first - len(pages):
            why = "evicted before they were written"
            self.progress.count(skipped=missing)
            self.progress.say(f"{missing} pages were {why}")
            self.executor.unstored("gone", missing, f"they were {why}")
            self.stopping = True
        if not pages:
            return first
        end = first + len(pages)
        keys = self._keys[first:end]
        buffers = [self.executor.cache.pool[page] for page in pages]
        for buffer in buffers:
            buffer.flags.writeable = False
        parent = self._keys[first - 1 : first] if first else None
        tokens = None if self._tokens is None else self._tokens[first:end]
        result = self.executor.write(self, keys, buffers, parent, tokens)
        del buffers
        self._unpin(end)
        counts, prefix = Counter(result.statuses), result.prefix
        failed, refused = counts[WriteStatus.FAILED], counts[WriteStatus.REFUSED]
        self.progress.count(
            stored=counts[WriteStatus.STORED],
            present=counts[WriteStatus.PRESENT],
            failed=failed,
            refused=refused,
        )
        if prefix < len(keys):  # a page after a hole would not be found
            self.progress.say(result.reason)
            self.executor.unstored("failed", failed, result.reason)
            self.executor.unstored("refused", refused, result.reason)
            self.stopping = True
        return first + prefix

    def _pages(self, first: int, end: int) -> list[int]:
        """Of a group, as far as they are still there; pinned."""
        if first < len(self._first_pages):
            return self._first_pages[first:end]
        with self.lock:
            self.check()
            keys = self._keys[first:end]
            self._group = self.executor.cache.match(keys, namespace=self._namespace)
            pages: list[int] = self._group.pages.tolist()
            return pages

    def _unpin(self, end: int) -> None:
        """Pages that are written: the call that had them has returned."""
        with self.lock:
            if self._group is not None:
                self._group.__exit__(None, None, None)
                self._group = None
            if end >= len(self._first_pages):
                self._lease.__exit__(None, None, None)
                self._first_pages = []

    def account(self, reason: str, *, failed: bool) -> None:
        """See `Job`."""
        result = self.task.result
        done = result.stored + result.present + result.failed + result.refused + result.skipped
        if left := result.pages - done:
            self.progress.count(skipped=left)
            why = reason if failed else "one before them could not be stored, or they were stopped"
            self.executor.unstored("ended" if failed else "behind", left, why)

    def release(self) -> None:
        """See `Job`."""
        self._unpin(len(self._keys))


class ReadJob(Job):
    """keys[start:], read as far as they are stored: from a storage straight into pages of the pool,
    and from there into the index.

    A reservation publishes all of its pages or none, so a prefix is read in groups, each with a
    reservation of its own. When a page of a group is bad, the group is abandoned and the good pages
    before it are read once more into a smaller reservation. That is rare, and copying would be a
    second way of filling pages.
    """

    def __init__(
        self,
        executor: JobExecutor,
        progress: TaskProgress,
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
            declinable: it is not read if computing the stored pages is faster.
        """
        super().__init__(executor, progress, deadline)
        self._keys = keys
        self._start = start
        self._namespace = namespace
        self._hold = hold
        self._declinable = declinable
        options = executor.options
        self._soft = Deadline(options.read_seconds, options.clock)
        self._reservation: Reservation | None = None
        self._calling = False
        """The storage has the pages of the reservation."""
        self._held: list[tuple[int, int, Reservation]] = []

    @property
    def reads(self) -> int:
        """See `Job`."""
        return max(0, self.progress.pages - self.progress.prefix)

    def step(self) -> bool:
        """See `Job`. Reads are not interrupted by others."""
        if self.stopping:
            return False
        cache, progress = self.executor.cache, self.progress
        done = max(self._start, cache.peek(self._keys, namespace=self._namespace))
        progress.count(present=done - self._start)
        progress.reach(done - self._start)
        rest = self._keys[done:]
        end = done + (self.executor.contains(self, rest) if len(rest) else 0)
        progress.count(absent=len(self._keys) - end)
        if self._declines(end - done):
            return False
        while done < end and not self.stopping:
            group_end = min(done + self.executor.options.group, end)
            done = self._read_group(done, group_end)
            progress.reach(done - self._start)
            if done < group_end:
                break
        if not self._hold:  # pages that others were to read may not have come
            ready = cache.peek(self._keys, namespace=self._namespace)
            progress.reach(max(0, ready - self._start))
        return False

    def _declines(self, pages: int) -> bool:
        """Fewer than were requested may be stored: then a call costs more than it gains."""
        costs = self.executor.costs
        if costs is None or not self._declinable:
            return False
        why = costs.decide_found(pages).declined
        if why:
            self.progress.count(declined=pages)
            self.progress.say(why)
        return bool(why)

    def _read_group(self, first: int, end: int) -> int:
        """Read keys[first:end]; the number of keys that are ready now, or left to others."""
        loaded = 0
        while first < end:
            self.check()
            reservation = self._reserve(first, end)
            busy = reservation.busy
            if self._hold and len(busy):  # a job that holds pages must not wait for another one
                end = self._leave_busy(busy)
            elif (good := self._read(reservation)) < len(reservation.new):
                end = int(reservation.new[good])
            else:
                end = self._with_room(end, reservation)
                self._publish(first, end, reservation)
                loaded += good
                busy = busy[busy < end]
                self._end_reservation()
                if not len(busy) or self.executor.options.busy == "skip":
                    others = max(0, end - first - loaded - len(busy))
                    self.progress.count(busy=len(busy), present=others)
                    return end
                if not self._wait_for_others(busy):
                    end = self._leave_busy(busy)
            self._end_reservation()
        return end

    def _reserve(self, first: int, end: int) -> Reservation:
        reservation = self.executor.cache.reserve(
            self._keys[:end], first, namespace=self._namespace, timeout=self.deadline.left
        )
        with self.lock:
            self._reservation = reservation
        self.check()  # given up in between: the abandoning has missed it, ending it will not
        return reservation

    def _read(self, reservation: Reservation) -> int:
        """Fill the new pages; how many from the first on are good."""
        pages = reservation.pages.tolist()
        if not pages:
            return 0
        keys, pool = self._keys[reservation.new], self.executor.cache.pool
        self._calling = True
        try:
            result = self.executor.read(self, keys, [pool[page] for page in pages])
        finally:
            self._calling = False
        if (good := result.prefix) < len(pages):
            counts = Counter(result.statuses)
            self.progress.count(
                absent=counts[ReadStatus.ABSENT],
                failed=counts[ReadStatus.FAILED],
                corrupt=counts[ReadStatus.CORRUPT],
            )
            self.progress.say(result.reason)
        return good

    def _with_room(self, end: int, reservation: Reservation) -> int:
        missing = reservation.missing  # no page before these is
        if not len(missing):
            return end
        self.progress.count(no_room=len(missing))
        self.progress.say(f"no room in the cache: {reservation.why}")
        return int(missing[0])

    def _publish(self, first: int, end: int, reservation: Reservation) -> None:
        with self.lock:
            self.check()
            if self._hold:
                self._held.append((first, end, reservation))
                self._reservation = None
            else:
                reservation.publish()
                self.progress.count(loaded=len(reservation.new))

    def _leave_busy(self, busy: Positions) -> int:
        self.progress.count(busy=len(busy))
        self.progress.say(f"{len(busy)} pages are being read or computed by others")
        return int(busy[0])

    def _wait_for_others(self, busy: Positions) -> bool:
        """Wait until they are done with these; False: the time is up, or the job is to stop."""
        keys = self._keys[busy]
        while not (self.deadline.passed or self.stopping):
            self.check()
            limit = min(SLICE, self.deadline.left)
            with contextlib.suppress(WaitTimeout):
                self.executor.cache.wait(keys, timeout=limit, namespace=self._namespace)
                return True
        return False

    # ---- ending it

    def take(self) -> None:
        """See `StorageTask.take`."""
        policy = self.executor.options.read_policy
        if policy == "wait":
            self.task.wait()
        elif policy == "deadline":
            with contextlib.suppress(WaitTimeout):
                self.task.wait(self._soft.left)
        self.stop()

    def abandon_keys(self) -> None:
        """See `Job`."""
        for _, _, reservation in self._held:
            reservation._give_up()
        self.lose()

    def lose(self) -> None:
        """See `Job`."""
        with self.lock:
            if self._reservation is not None:
                self._reservation._give_up()

    def _end_reservation(self) -> None:
        """Abandon the current reservation unless it is published, and unpin."""
        with self.lock:
            if self._reservation is not None:
                self._reservation.__exit__(None, None, None)
                self._reservation = None

    @property
    def holds(self) -> bool:
        """See `Job`."""
        return bool(self._held)

    def release(self) -> None:
        """See `Job`."""
        with self.lock:
            if not self._calling:
                self._end_reservation()
            while self._held and self.given_up:
                self._held[-1][2].__exit__(None, None, None)
                self._held.pop()

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        with self.lock:
            if not self._hold or self.given_up or not self.task.over:
                raise ConfigError(
                    f"publish: expected a prefetch with hold=True that is over, and was neither "
                    f"published nor cancelled before, found {self.task!r}"
                )
            _arguments.count(pages, "pages", 0, self.progress.prefix)
            self.given_up = True  # once
            again = self._publish_held(self._start + pages)
            self.executor.let_go_held(self)
        if again is None:
            return self.executor.ended_task("read", pages)
        keys = self._keys[: self._start + pages]
        return self.executor.fetch(keys, again, self._namespace)  # all agreed on it: not declined

    def _publish_held(self, end: int) -> int | None:
        """Publish groups up to `end`; the start of a group that it cuts in two."""
        try:
            for first, last, reservation in self._held:
                if last <= end:
                    reservation.publish()
                    self.progress.count(loaded=len(reservation.new))
                    self.executor.add(loaded=len(reservation.new))
                elif first < end:
                    return first
        except LightcacheError:
            self.executor.let_go_held(self)
            raise
        return None


class DeepestJob(ReadJob):
    """Of some keys the last that is stored, alone. Storages look up prefixes, and these are none:
    each key is looked up by itself, from the last on."""

    def __init__(
        self,
        executor: JobExecutor,
        progress: TaskProgress,
        deadline: Deadline,
        keys: Keys,
        most: int,
        namespace: Namespace | None,
    ) -> None:
        """Nothing was looked up yet."""
        super().__init__(executor, progress, deadline, keys[:0], 0, namespace, False)
        self._all_keys, self._most = keys, most

    @property
    def reads(self) -> int:
        """See `Job`."""
        return 1

    def step(self) -> bool:
        """See `Job`."""
        keys, progress = self._all_keys, self.progress
        for last in range(len(keys), max(0, len(keys) - self._most), -1):
            self.check()
            if self.stopping or self.deadline.passed:
                break
            key = np.ascontiguousarray(keys[last - 1 : last])
            if self.executor.cache.peek(key, namespace=self._namespace):
                progress.reach(last)
                break
            if self.executor.contains(self, key):
                self._keys = key
                super().step()
                progress.reach(last if progress.prefix else 0)
                break
        return False


# ---- The executor of jobs: a job is its own from `submit` until all that it held was given back.


class JobExecutor(Executor):
    """The threads of a tier, and one that watches them for calls that are late. All state is under
    `changed`."""

    def __init__(
        self,
        cache: Cache,
        storage: Storage,
        breaker: CircuitBreaker,
        options: TierOptions,
        costs: ReadCosts | None,
    ) -> None:
        """No threads yet.

        Args:
            costs: None: reads are never declined, and not measured.
        """
        super().__init__(options.threads, "storage", clock=options.clock)
        self.cache, self.storage, self.breaker = cache, storage, breaker
        self.options, self.costs = options, costs
        self.page_tokens: int | None = cache.index.segment.config.get("page_tokens")
        self.running: set[Job] = set()
        self.holding: set[Job] = set()
        """Ended, with pages for `StorageTask.publish`."""
        self._tally: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._failing: tuple[str, Keys | None] = ("contains", None)
        """The last call, and its first key: a probe repeats it."""
        self._seconds = min(options.call_timeout, options.timeout)
        self._cancelled: list[tuple[Job, Literal["queued", "begun", "held"]]] = []
        """Given up, not yet abandoned; and how far each was: its thread gives back what one that
        was begun has."""
        self._owed: list[Job] = []
        """Have something to give back that could not be: tried again."""
        self._returning: list[Job] = []
        """About to give back what they have: once for each `let_go` that is to come."""
        self._last: Callable[[], None] = _nothing
        self._look = Condition(self.changed.lock)
        self._looks_at = -math.inf
        """When the watching thread looks next; it is woken for what is due earlier."""
        self._watcher = threading.Thread(
            target=self._watch, name="lightcache-storage-watch", daemon=True
        )

    def start(self) -> None:
        """Begin to watch. The other threads start when there is something to do."""
        self._watcher.start()

    # ---- tasks

    def submit_job(self, job: Job) -> StorageTask:
        """Queue a job. If no thread can run it, its task is FAILED."""
        try:
            self.put(job)
        except LightcacheError as error:  # closed meanwhile; or no thread is left for it
            job.progress.count(failed=job.reads)
            self.finish(job, str(error), failed=True)
        return job.task

    def ended_task(
        self, kind: Literal["read", "write"], pages: int, reason: str = "", **counts: int
    ) -> StorageTask:
        """A task that is over before it began."""
        progress = TaskProgress(kind, pages, self.page_tokens)
        progress.count(**counts)
        failed = "failed" in counts
        if not counts:
            progress.reach(pages)
        if not failed:
            progress.say(reason)
        progress.end(reason if failed else "", failed=failed)
        self.add(**counts)
        progress.settle()
        return StorageTask(progress)

    def fetch(
        self,
        keys: Keys,
        start: int,
        namespace: Namespace | None,
        deadline: Deadline | None = None,
        *,
        hold: bool = False,
        declinable: bool = False,
    ) -> StorageTask:
        """A prefetch that is not declined before it begins."""
        pages = len(keys) - start
        if self.breaker.shut:
            return self.ended_task("read", pages, self.breaker.reason, failed=pages)
        progress = TaskProgress("read", pages, self.page_tokens)
        deadline = deadline or Deadline(self.options.timeout, self.options.clock)
        keys = keys.copy()
        return self.submit_job(
            ReadJob(self, progress, deadline, keys, start, namespace, hold, declinable=declinable)
        )

    def reads_ahead(self) -> list[int]:
        """Pages of each read that runs or waits."""
        with self.changed:
            return [pages for job in self._jobs() if (pages := job.reads)]

    def pinned(self) -> int:
        """Pages pinned for writes."""
        with self.changed:
            return sum(job.pinned for job in self._jobs())

    def _jobs(self) -> list[Job]:
        return [*self._queued(), *self.running]

    def _queued(self) -> list[Job]:
        return [work for work in self.queue.all() if isinstance(work, Job)]

    # ---- totals

    def add(self, **counts: int) -> None:
        """Add to the totals."""
        with self.changed:
            self._tally.update(counts)

    def unstored(self, kind: Unstored, pages: int, why: str) -> None:
        """Count pages that should have been stored and were not; log the first of each kind."""
        if not pages:
            return
        with self.changed:
            self._tally.update({"unstored": pages, f"unstored_{kind}": pages})
            first = kind not in self._warned and kind != "disabled"  # the breaker logs that
            self._warned.add(kind)
        if first:
            log.warning(
                "%d pages of a prompt were not stored: %s; `unstored_%s` of the tier's stats counts"
                " such pages, and this is said once",
                *(pages, why, kind),
            )

    def stats(self) -> TierStats:
        """Totals, of one instant."""
        line = (None if self.costs is None else self.costs.figures()) or (None, None)
        with self.changed:
            return TierStats(
                **{name: self._tally[name] for name in _TALLIES},
                queued=len(self._queued()),
                running=len(self.running),
                stuck=self.late,
                writing=self.pinned(),
                state=self.breaker.state,
                read_call_seconds=line[0],
                read_page_seconds=line[1],
            )

    def take_totals(self, names: Sequence[str]) -> Counter[str]:
        """Of these totals, what came since the last call."""
        with self.changed:
            now = Counter({name: self._tally[name] for name in names})
            more, self._taken = now - self._taken, now
            return more

    # ---- running jobs

    def begun(self, work: Work) -> None:
        """See `Executor`."""
        if isinstance(work, Job):
            self.running.add(work)

    def expired(self, works: list[Work]) -> None:
        """See `Executor`: until they are finished the executor is not idle."""
        for work in works:
            self.begun(work)

    def run_job(self, job: Job) -> None:
        """Run a job, in a thread of the executor, until it ends or reads go before it."""
        job.progress.start()
        while self._step(job) and not self._requeue(job):
            pass

    def _requeue(self, job: Job) -> bool:
        """Let reads that wait go before the rest of a write."""
        with self.changed:
            if not self.queue.reads or job.given_up:
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
        except Exception as error:  # ours: those of backends became StorageError
            log.exception("a storage task ended with an error that should not happen")
            reason, failed = repr(error), True
        self.finish(job, reason, failed=failed)
        return False

    def finish(self, job: Job, reason: str, *, failed: bool) -> None:
        """Of a job that no thread has: give back what it held, then tell its waiters."""
        with self.changed:
            self._returning.append(job)
        self._let_go(job)
        self._hold(job)
        self._end_task(job, reason, failed=failed)
        self._finished(job)

    def _finished(self, job: Job) -> None:
        with self.changed:
            self.running.discard(job)
            self._note()
        job.progress.settle()

    def _note(self) -> None:
        """Something has changed; the lock is held. The watching thread is woken only if it has
        something to do: it ends with the last job, gives back, and probes."""
        self.changed.notify_all()
        if self.closing or self._cancelled or self._owed or self.holding:
            self._look.notify()

    def due(self, end: float) -> None:
        """See `Executor`."""
        if end < self._looks_at:
            self._look.notify()

    def _hold(self, job: Job) -> None:
        """Remember that a job has pages for `publish`."""
        if job.holds:
            with self.changed:
                options = self.options
                job.kept = job.kept or Deadline(options.timeout, options.clock)  # from its end on
                self.holding.add(job)
                self._note()
                closing = self.closing
            if closing:  # `close` has looked at these already
                self._abandon(job.give_up)
            if job.given_up:  # cancelled by a thread that did not see it among these
                self.let_go_held(job)

    def let_go_held(self, job: Job) -> None:
        """It is not published any more: give back what it holds. It leaves `holding` in one hold of
        the lock: a thread that asks in between finds that there is something to do."""
        with self.changed:
            self.holding.discard(job)
            self._returning.append(job)
        self._let_go(job)

    def _end_task(self, job: Job, reason: str, *, failed: bool) -> None:
        """End its task, unless that has ended, and add up what it did."""

        def count(result: TaskResult) -> None:
            counts = {name: getattr(result, name) for name in COUNTS}
            self.add(**counts, **{"tasks_failed" if failed else "tasks_finished": 1})

        with job.accounting:  # of two threads that end it, one counts
            if not job.progress.over:
                job.account(reason, failed=failed)
            job.progress.end(reason, failed=failed, count=count)

    # ---- giving up, and giving back

    def cancel(self, job: Job) -> None:
        """Give a job up. Waits for nothing: the watching thread abandons its keys, and gives back
        what no call has."""
        job.given_up = True  # first: a thread that has it now finds that it is given up
        with self.changed:
            queued, held = self.queue.remove(job), job in self.holding
            self.holding.discard(job)
            if queued or held:
                self._returning.append(job)
            begun = job in self.running
            if queued:
                self.running.add(job)  # until it is finished
        if queued:  # before the other thread settles it
            self._end_task(job, "cancelled", failed=True)
        with self.changed:
            if queued or held or begun:
                self._cancelled.append((job, "queued" if queued else "held" if held else "begun"))
            self._note()

    def _let_go(self, job: Job, *, later: bool = False) -> bool:
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
            with self.changed:  # both at once: in between, the executor would seem idle
                self._returning.remove(job)
                if owed:
                    self._owed.append(job)
                self._note()
        return not owed

    def _give_back(self, unwanted: Sequence[Job], owed: Sequence[Job] = ()) -> None:
        """Give up the first, and the jobs that were cancelled; let go of all of `_returning` among
        them. One wait for a lock that is held is enough: then the others are owed."""
        with self.changed:
            cancelled, self._cancelled = self._cancelled, []
            if cancelled:  # nothing else tells of those that have ended by themselves
                self._note()
        free = True
        for job, progress in cancelled:
            if progress == "begun":
                free = free and self._abandon(job.give_up)
        for job in [*unwanted, *(job for job, progress in cancelled if progress != "begun")]:
            job.given_up = True  # also of those whose keys are abandoned later, with their pages
            free = free and self._abandon(job.give_up)
            free = self._let_go(job, later=not free)
        for job in owed:
            free = self._let_go(job, later=not free)
        for job, progress in cancelled:
            if progress == "queued":
                self._finished(job)

    def _abandon(self, give_up: Callable[[], None]) -> bool:
        """`give_up` or `lose` a job; False: keys are abandoned when the job is released."""
        try:
            give_up()
        except LightcacheError as error:
            log.warning("keys of a storage task could not be abandoned yet: %s", error)
            return False
        return True

    # ---- calls of the storage

    def contains(self, job: Job, keys: Keys) -> int:
        """`Storage.contains`; as `call`."""
        self._failing = ("contains", keys[:1])

        def run(left: float) -> tuple[int, str]:
            began = self._clock()
            prefix = checked_contains(self.storage.contains(keys, timeout=left), len(keys))
            if self.costs is not None and job.progress.kind == "read":
                self.costs.note_lookup(len(keys), prefix, self._clock() - began)
            return prefix, ""

        return self.call(job, "contains", run)

    def read(self, job: Job, keys: Keys, buffers: Sequence[Buffer]) -> ReadResult:
        """`Storage.read`; as `call`."""
        self._failing = ("read", keys[:1])

        def run(left: float) -> tuple[ReadResult, str]:
            began = self._clock()
            result = self.storage.read(keys, buffers, timeout=left)
            checked_statuses("read", result.statuses, len(keys))
            good = result.count(ReadStatus.OK)
            self.add(read_bytes=good * self.cache.page_bytes)
            if self.costs is not None:
                self.costs.note_read(good, self._clock() - began)
            return result, unread(result)

        return self.call(job, "read", run)

    def write(
        self,
        job: Job,
        keys: Keys,
        buffers: Sequence[Buffer],
        parent: Keys | None,
        tokens: TokenRows | None,
    ) -> WriteResult:
        """`Storage.write`; as `call`."""

        def run(left: float) -> tuple[WriteResult, str]:
            storage = self.storage
            result = write_to(storage, keys, buffers, timeout=left, parent=parent, tokens=tokens)
            checked_statuses("write", result.statuses, len(keys))
            stored, evicted = result.count(WriteStatus.STORED), 0
            with contextlib.suppress(Exception):  # its figures are no reason to fail a write
                evicted = operator.index(storage.stats().evicted)
            with self.changed:
                self._tally["written_bytes"] += stored * self.cache.page_bytes
                self._tally["evicted"] = max(evicted, self._tally["evicted"])
            return result, unwritten(result)

        return self.call(job, "write", run)

    def call(self, job: Job | None, what: str, run: Callable[[float], tuple[R, str]]) -> R:
        """Call the storage, and tell the breaker the outcome.

        Args:
            job: None: a probe, which no task waits for.
            run: makes the call in the seconds that it is given; returns the result, and why it
                counts as a failure of the storage (empty: it does not).

        Raises:
            Stopped: it came back too late, or the task was cancelled meanwhile.
            StorageError: it was not made (no time, disabled), or raised.
        """
        left = self._seconds
        if job is not None:
            left = min(job.deadline.left, left)
            if left <= 0.0:
                raise StorageError(job.deadline.reason)
            if self.breaker.shut:
                raise StorageError(self.breaker.reason)
        began, error = self._clock(), ""
        whole = began if left >= self._seconds / 2 else None  # it had the time that calls have
        result: R | None = None

        def hangs() -> None:
            reason = f"timed out: not done within {left:g} s; the storage's {what} hangs"
            self.add(timeouts=1)
            self._fail(reason, whole)
            if job is not None:
                self._abandon(job.lose)
                self._hold(job)
                self._end_task(job, reason, failed=True)
                job.progress.settle()

        try:
            result, error = self.here(
                partial(run, left), began + left + self.options.grace, what, hangs
            )
        except Late:
            raise Stopped from None
        except Exception as raised:  # a text, as a traceback would keep views of the pool
            error = f"{what}: {raised if isinstance(raised, LightcacheError) else repr(raised)}"
        if error:
            self._fail(error, whole if self._clock() - began >= left else None)
        else:
            self.breaker.success()
        if job is not None:
            job.check()
        if result is None:
            raise StorageError(error)
        return result

    def _fail(self, error: str, since: float | None = None) -> None:
        """Tell the breaker of a failure; wake the watching thread, which probes."""
        self.breaker.failure(error, since)
        with self.changed:
            self._look.notify()

    def probe(self) -> None:
        """Repeat the last call for its first key, into memory of our own: whether the storage works
        again. No task waits for it."""

        def run(seconds: float) -> tuple[bool, str]:
            what, key = self._failing
            if key is None:
                return True, ""
            deadline, key = Deadline(seconds, self.options.clock), key.copy()
            stored = checked_contains(self.storage.contains(key, timeout=seconds), 1)
            if not stored or what != "read":
                return True, ""
            page = own_memory(1, self.cache.page_bytes)
            return True, unread(self.storage.read(key, [page[0]], timeout=deadline.left))

        with contextlib.suppress(Stopped, StorageError):  # the breaker was told
            self.call(None, "probe", run)
        with self.changed:
            self._note()
            self._look.notify()

    # ---- the watching thread: what hangs, what waits too long, what is to be given back

    def _watch(self) -> None:
        while True:
            self.poll()
            with self.changed:
                if self.closing and not self.busy:
                    break
                pause = self.pause()
                if pause is None or pause > 0.0:
                    self._looks_at = math.inf if pause is None else self._clock() + pause
                    self._look.wait(pause)
                    self._looks_at = -math.inf
        try:
            self._last()
        except Exception:  # a thread that closes again waits for this one
            log.exception("what a storage tier had left to do failed")

    def pause(self) -> float | None:
        """Seconds until there is something to look after; None: whenever something changes."""
        if self._cancelled:
            return 0.0
        pauses = [super().pause(), None if self.closing else self.breaker.wait]
        pauses += [job.kept.left for job in self.holding if job.kept is not None]
        pauses += [RETRY] if self._owed else []
        known = [pause for pause in pauses if pause is not None]
        return max(0.001, min(*known, threading.TIMEOUT_MAX)) if known else None

    def poll(self) -> None:
        """Fail what is late, give back what is to be, and see whether the storage works again."""
        super().poll()
        kept: list[Job] = []
        owed: list[Job] = []
        if self.holding or self._owed:
            with self.changed:
                owed, self._owed = self._owed, []
                kept = [job for job in self.holding if job.kept is not None and job.kept.passed]
                self.holding.difference_update(kept)
                self._returning += [*kept, *owed]
        for job in kept:
            job.progress.say("what was held was not published in time, so it was given back")
        if kept or owed or self._cancelled:
            self._give_back(kept, owed)
        if not self.closing and self.breaker.shut and self.breaker.probe():
            try:
                self.put(_Probe(self))
            except LightcacheError as error:
                self.breaker.failure(str(error))

    # ---- the end

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits, or is to be given back; the lock is held."""
        held = self.holding or self._owed or self._returning or self._cancelled
        return bool(self.running or held or len(self.queue))

    @property
    def unreturned(self) -> int:
        """Tasks whose pages are unwanted, and could not be given back yet."""
        with self.changed:
            return len({*self._owed, *self._returning})

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs and nothing waits; False: not in these seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.busy, min(timeout, threading.TIMEOUT_MAX))

    def end_jobs(self, deadline: Deadline) -> bool:
        """Take nothing more, give back what is held for `StorageTask.publish`, and finish the rest;
        cancel what is left when the time is up. False: a call hangs, or pages cannot be given back.
        """
        with self.changed:
            self.closing = True
            held = list(self.holding)
            self.holding.clear()
            self._returning += held
            self._ready.notify_all()
            self._note()
        self._give_back(held)
        if self.wait_idle(deadline.left):
            return True
        with self.changed:
            left = self._jobs()
        for job in left:
            self.cancel(job)
        self._give_back(())
        return self.wait_idle(self.options.grace)

    def leave(self, last: Callable[[], None]) -> bool:
        """Closing, and not waited for any more: the thread that ends last does this, in the end.
        False: everything has ended meanwhile, and it does not."""
        with self.changed:
            busy = self.busy
            if busy:
                self._last = last
            return busy

    def join(self) -> None:
        """Once idle and closing: wait for the threads to end."""
        self.close(math.inf)
        if self._watcher.ident is not None:
            self._watcher.join()


class _Probe(Work):
    """A call that no task asked for, of a storage that is not used."""

    def __init__(self, executor: JobExecutor) -> None:
        self._executor = executor

    def run(self) -> None:
        self._executor.probe()

    def expire(self, reason: str) -> None:
        self._executor.breaker.failure(reason)


def _nothing() -> None:
    pass


_TALLIES = (
    *(*COUNTS, "tasks_finished", "tasks_failed", "timeouts"),
    *("read_bytes", "written_bytes", "evicted", "skipped_short", "skipped_unseen", "unstored"),
    *(f"unstored_{kind}" for kind in get_args(Unstored)),
)

__all__ = [
    "DeepestJob",
    "Job",
    "JobExecutor",
    "ReadJob",
    "Stopped",
    "TierOptions",
    "WriteJob",
]
