"""Jobs: the tasks of a tier as its threads run them, and the executor of these threads.

Pages belong to the storage call that reads or writes them until it returns, even if the task has
ended: a hanging backend may still write into them. So a job is given up in two halves. Its keys are
abandoned at once, and nothing waits for them. Its pins are released after the call has returned, by
the thread that made the call.

A call is late when it has not returned `grace` seconds after its time. Then its task fails, its
keys are abandoned and the breaker counts a failure. The thread and the pages are lost until the
call returns; all others continue. Work that may wait for a lock, such as giving pages back, is done
by these threads, so cancelling a task never waits.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, get_args

import numpy as np

from lightcache import _arguments
from lightcache.breaker import CircuitBreaker
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LightcacheError, StorageError, WaitTimeout
from lightcache.groups import Rule
from lightcache.leases import Lease, Positions
from lightcache.namespaces import Namespace
from lightcache.notices import Notices
from lightcache.prompt import TokenIds
from lightcache.reservations import Reservation
from lightcache.runs import PLAIN, Run
from lightcache.storage.common import (
    Clock,
    Deadline,
    checked_contains,
    checked_statuses,
    log,
    own_memory,
    why_unread,
    why_unwritten,
)
from lightcache.storage.costs import ReadCosts
from lightcache.storage.executor import READ, WRITE, Executor, Late, Work
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    ReadStatus,
    Storage,
    WriteResult,
    WriteStatus,
)
from lightcache.storage.tasks import (
    COUNTS,
    StorageTask,
    TaskProgress,
    TierStats,
    Unstored,
)

R = TypeVar("R")
Groups = Sequence[tuple[Rule, Run]]
"""The groups of a model: what a position needs of each, and how its pages lie in the cache."""
SLICE = 0.05  # seconds between checks for cancellation while waiting for other processes
RETRY = 0.5  # seconds between attempts to give back pages after a LockTimeout


class Stopped(Exception):
    """Unwinds a step whose task was cancelled or whose call returned late."""


@dataclass(frozen=True)
class LastReady:
    """What `BaseTier.prefetch_last_ready` looks for."""

    groups: Groups
    start: int
    step: int
    most: int


@dataclass(frozen=True)
class TierOptions:
    """How a tier runs its tasks; see `StorageTier`."""

    threads: int
    group: int
    timeout: float
    call_timeout: float
    grace: float
    clock: Clock


class Job(Work):
    """The work of one task, and the pages it holds."""

    def __init__(self, executor: JobExecutor, progress: TaskProgress, deadline: Deadline) -> None:
        """Holds nothing."""
        self.executor = executor
        self.progress = progress
        self.task = StorageTask(progress)
        self.deadline = deadline
        self.kind = READ if progress.kind == "read" else WRITE
        self.end = executor.now + deadline.left
        self.stopping = False
        """Start nothing more; pages done so far count."""
        self.given_up = False
        """Cancelled, or its call was late: publish nothing more."""
        self.held: list[tuple[int, int, Reservation]] = []
        """Groups of pages for `publish`."""
        self.publish_by: Deadline | None = None
        """The deadline for `publish`, for a job that holds pages."""
        self.lock = threading.RLock()
        self.accounting = threading.Lock()
        progress.owner = self

    @property
    def pinned(self) -> int:
        """The number of pages that it pins for a write."""
        return 0

    @property
    def reads(self) -> int:
        """The number of pages that it may still read."""
        return 0

    def run(self) -> None:
        """Run until it ends, or is put back into the queue as reads are waiting; see `Work`."""
        self.progress.start()
        reason, failed = "", False
        try:
            self.check()
            while self.step():
                if self.executor.put_back(self):
                    return
                self.check()
        except Stopped:
            reason, failed = "cancelled", True
        except LightcacheError as error:
            reason, failed = str(error), True
        except Exception as error:  # our own bug: errors of backends became StorageError
            log.exception("a storage task ended with an error that should not happen")
            reason, failed = repr(error), True
        self.executor.finish(self, reason, failed=failed)

    def expire(self, reason: str) -> None:
        """See `Work`."""
        reason = reason or f"{self.deadline.reason}, all of it in the queue"
        self.executor.finish(self, reason, failed=True)

    def step(self) -> bool:
        """Do a part of the job, in a thread of the executor. Returns True if more is left.

        Raises:
            Stopped: the job was given up.
            LightcacheError: the job failed.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise Stopped if the job was given up."""
        if self.given_up:
            raise Stopped

    def give_up(self) -> None:
        """Abandon the keys and keep the pins. Any thread may call it, and repeat it."""
        with self.lock:
            self.given_up = True
            self.abandon_keys()

    def abandon_call(self) -> None:
        """Its call is late: give up the pages of that call; pages done before stay."""
        self.give_up()

    def abandon_keys(self) -> None:
        """Abandon the keys of pages that it was reading."""

    def release(self) -> None:
        """Give back pages that are not needed any more and in no call. May be repeated.

        Raises:
            LockTimeout: it could not yet; call again.
        """
        raise NotImplementedError

    def account(self, reason: str, *, failed: bool) -> None:
        """When its task ends: count the pages without an outcome."""

    # ---- the methods of its task

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
    """Writes ready pages of a prompt, group by group. The first ones are pinned from the start, as
    many as writes may pin; each later group is pinned while it is written."""

    def __init__(
        self,
        executor: JobExecutor,
        progress: TaskProgress,
        deadline: Deadline,
        keys: Keys,
        lease: Lease,
        namespace: Namespace | None,
    ) -> None:
        """Takes over the lease.

        Args:
            keys: keys of pages that were ready a moment ago.
            lease: a lease on the first of them.
        """
        super().__init__(executor, progress, deadline)
        self._keys = keys
        self._lease = lease
        self._namespace = namespace
        self._first_pages: list[int] = lease.pages.tolist()
        self._group_lease: Lease | None = None
        """The lease on the group being written, if `_lease` does not cover it."""
        self._done: int | None = None
        """The number of leading keys that are stored; None: the storage was not asked yet."""

    @property
    def pinned(self) -> int:
        """See `Job`."""
        leased = self._group_lease
        return len(self._first_pages) + (0 if leased is None else len(leased))

    def step(self) -> bool:
        """See `Job`."""
        if self._done is None:
            self._done = self.executor.contains(self, self._keys)
            if self._done:
                self.progress.count(present=self._done)
                self._unpin(self._done)
        else:
            before, self._done = self._done, self._write(self._done)
            if before < self._done < len(self._keys):  # a write that advances gets its time again
                self.deadline = Deadline(self.deadline.timeout, self.executor.options.clock)
                self.end = self.executor.now + self.deadline.left
        self.progress.set_prefix(self._done)
        return self._done < len(self._keys) and not self.stopping

    def _write(self, first: int) -> int:
        """Write the next group. Returns the number of leading keys that are stored now."""
        pinned = len(self._first_pages)
        end = min(
            first + self.executor.options.group, pinned if first < pinned else len(self._keys)
        )
        pages = self._pages(first, end)
        if missing := end - first - len(pages):
            why = "evicted before they were written"
            self.progress.count(skipped=missing)
            self.progress.add_reason(f"{missing} pages were {why}")
            self.executor.count_unstored("gone", missing, f"they were {why}")
            self.stopping = True
        if not pages:
            return first
        end = first + len(pages)
        keys = self._keys[first:end]
        rows = self.executor.cache.pool.array.view()
        rows.flags.writeable = False
        buffers = list(map(rows.__getitem__, pages))
        del rows
        parent = self._keys[first - 1 : first] if first else None
        result = self.executor.write(self, keys, buffers, parent)
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
            self.progress.add_reason(result.reason)
            self.executor.count_unstored("failed", failed, result.reason)
            self.executor.count_unstored("refused", refused, result.reason)
            self.stopping = True
        return first + prefix

    def _pages(self, first: int, end: int) -> list[int]:
        """The pages of a group that are still in the cache, pinned."""
        if first < len(self._first_pages):
            return self._first_pages[first:end]
        with self.lock:
            self.check()
            keys = self._keys[first:end]
            self._group_lease = self.executor.cache.match(keys, namespace=self._namespace)
            pages: list[int] = self._group_lease.pages.tolist()
            return pages

    def _unpin(self, end: int) -> None:
        """Unpin written pages, once their call has returned."""
        with self.lock:
            if self._group_lease is not None:
                self._group_lease.close()
                self._group_lease = None
            if end >= len(self._first_pages):
                self._lease.close()
                self._first_pages = []

    def account(self, reason: str, *, failed: bool) -> None:
        """See `Job`."""
        progress = self.progress
        if left := progress.pages - progress.counts.total():
            self.progress.count(skipped=left)
            why = reason if failed else "one before them could not be stored, or they were stopped"
            self.executor.count_unstored("ended" if failed else "unreachable", left, why)

    def release(self) -> None:
        """See `Job`."""
        self._unpin(len(self._keys))


class ReadJob(Job):
    """Reads the stored prefix of keys[start:] straight into pages of the pool, and publishes them.

    A reservation publishes all of its pages or none, so a prefix is read in groups, each with its
    own reservation. If a page of a group is bad, the group is abandoned, and the good pages before
    it are read again into a smaller reservation. That is rare, and copying them would be a second
    way to fill pages.
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
        rows: TokenIds | None = None,
        declinable: bool = False,
        *,
        run: Run = PLAIN,
    ) -> None:
        """Reserves nothing yet.

        Args:
            rows: token ids of the page of each key; None: they are not noted.
            declinable: do not read if computing the stored pages is faster.
            run: of the keys, which are all parts of some pages, one page after the other.
        """
        super().__init__(executor, progress, deadline)
        self._keys = keys
        self._start = start
        self._namespace = namespace
        self._hold = hold
        self._rows = rows
        self._declinable = declinable
        self._run = run
        self._reservation: Reservation | None = None
        self._calling = False
        """Whether a call of the storage has the pages of the reservation."""

    @property
    def reads(self) -> int:
        """See `Job`."""
        return max(0, self.progress.pages - self.progress.prefix)

    def step(self) -> bool:
        """See `Job`. Does the whole read in one step."""
        if not self.stopping:
            self._fill(self.progress.set_prefix)
        return False

    def _fill(self, tell: Callable[[int], None]) -> int:
        """Read keys[start:], as far as they are stored. Returns how many of them are ready.

        Args:
            tell: called with that number while it rises.
        """
        cache, progress = self.executor.cache, self.progress
        done = max(self._start, cache.peek(self._keys, namespace=self._namespace))
        progress.count(present=done - self._start)
        tell(done - self._start)
        rest = self._keys[done:]
        end = done + (self.executor.contains(self, rest) if len(rest) else 0)
        progress.count(absent=len(self._keys) - end)
        if self._declines(end - done):
            return done - self._start
        while done < end and not self.stopping:
            group_end = min(done + self.executor.options.group, end)
            done = self._read_group(done, group_end)
            tell(done - self._start)
            if done < group_end:
                break
        if not self._hold:  # pages that other readers were loading may not have become ready
            done = max(self._start, cache.peek(self._keys, namespace=self._namespace))
            tell(done - self._start)
        return done - self._start

    def _declines(self, pages: int) -> bool:
        """Decline if a read does not pay: fewer pages than requested may be stored."""
        costs = self.executor.costs
        if costs is None or not self._declinable:
            return False
        why = costs.decide_found(pages).declined
        if why:
            self.progress.count(declined=pages)
            self.progress.add_reason(why)
        return bool(why)

    def _read_group(self, first: int, end: int) -> int:
        """Read keys[first:end]. Returns the position up to which pages are ready or left to other
        readers."""
        loaded = 0
        while first < end:
            self.check()
            reservation = self._reserve(first, end)
            busy = reservation.busy
            if self._hold and len(busy):  # a job that holds pages must not wait for another job
                end = self._leave_busy(busy)
            elif (good := self._read(reservation)) < len(reservation.new):
                end = int(reservation.new[good])
            else:
                end = self._with_room(end, reservation)
                self._publish(first, end, reservation)
                loaded += good
                busy = busy[busy < end]
                self._end_reservation()
                if not len(busy):
                    self.progress.count(present=max(0, end - first - loaded))
                    return end
                if not self._wait_for_others(busy):
                    end = self._leave_busy(busy)
            self._end_reservation()
        return end

    def _reserve(self, first: int, end: int) -> Reservation:
        reservation = self.executor.cache.reserve(
            self._keys[:end],
            first,
            independent=True if self._run.group else None,
            run=self._run,
            namespace=self._namespace,
            timeout=self.deadline.left,
        )
        with self.lock:
            self._reservation = reservation
        if self._rows is not None:
            self.executor.cache.note_tokens(reservation, self._keys, self._rows)
        self.check()  # if given up meanwhile, `give_up` missed the reservation; the end frees it
        return reservation

    def _read(self, reservation: Reservation) -> int:
        """Fill the new pages. Returns the number of leading good ones."""
        pages = reservation.pages.tolist()
        if not pages:
            return 0
        keys = self._keys[reservation.new]
        self._calling = True
        try:
            buffers = list(map(self.executor.cache.pool.array.__getitem__, pages))
            result = self.executor.read(self, keys, buffers)
        finally:
            self._calling = False
        if (good := result.prefix) < len(pages):
            counts = Counter(result.statuses)
            self.progress.count(
                absent=counts[ReadStatus.ABSENT],
                failed=counts[ReadStatus.FAILED],
                corrupt=counts[ReadStatus.CORRUPT],
            )
            self.progress.add_reason(result.reason)
        return good

    def _with_room(self, end: int, reservation: Reservation) -> int:
        missing = reservation.missing  # ascending: all pages before the first are there
        if not len(missing):
            return end
        self.progress.count(no_room=len(missing))
        self.progress.add_reason(f"no room in the cache: {reservation.why}")
        return int(missing[0])

    def _publish(self, first: int, end: int, reservation: Reservation) -> None:
        with self.lock:
            self.check()
            if self._hold:
                self.held.append((first, end, reservation))
                self._reservation = None
            else:
                reservation.publish()
                self.progress.count(loaded=len(reservation.new))

    def _leave_busy(self, busy: Positions) -> int:
        self.progress.count(busy=len(busy))
        self.progress.add_reason(f"{len(busy)} pages are being read or computed by others")
        return int(busy[0])

    def _wait_for_others(self, busy: Positions) -> bool:
        """Wait until other readers are done with these; False: the time is up, or the job is
        stopping."""
        keys = self._keys[busy]
        while not (self.deadline.passed or self.stopping):
            self.check()
            limit = min(SLICE, self.deadline.left)
            with contextlib.suppress(WaitTimeout):
                self.executor.cache.wait(keys, timeout=limit, namespace=self._namespace)
                return True
        return False

    # ---- control

    def abandon_keys(self) -> None:
        """See `Job`."""
        for _, _, reservation in self.held:
            reservation.give_up()
        self.abandon_call()

    def abandon_call(self) -> None:
        """See `Job`."""
        with self.lock:
            if self._reservation is not None:
                self._reservation.give_up()

    def _end_reservation(self) -> None:
        """Abandon the current reservation unless it is published, and unpin."""
        with self.lock:
            if self._reservation is not None:
                self._reservation.close()
                self._reservation = None

    def release(self) -> None:
        """See `Job`."""
        with self.lock:
            if not self._calling:
                self._end_reservation()
            while self.held and self.given_up:
                self.held[-1][2].close()
                self.held.pop()

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        with self.lock:
            if not self._hold or self.given_up or not self.task.ended:
                raise ConfigError(
                    f"publish: expected a finished prefetch with hold=True that was neither "
                    f"published nor cancelled before, found {self.task!r}"
                )
            _arguments.count(pages, "pages", 0, self.progress.prefix)
            self.given_up = True  # once
            again = self._publish_held(self._start + pages)
            self.executor.give_back_held(self)
        if again is None:
            return self.executor.ended_task("read", pages)
        keys = self._keys[: self._start + pages]
        rows = None if self._rows is None else self._rows[: self._start + pages]
        # All agreed on it: not declined.
        return self.executor.fetch(keys, again, self._namespace, None, rows)

    def _publish_held(self, end: int) -> int | None:
        """Publish whole groups up to `end`. Returns the start of the group that `end` splits; None:
        it splits none."""
        try:
            for first, last, reservation in self.held:
                if last <= end:
                    reservation.publish()
                    self.progress.count(loaded=len(reservation.new))
                    self.executor.add(loaded=len(reservation.new))
                elif first < end:
                    return first
        except LightcacheError:
            self.executor.give_back_held(self)
            raise
        return None


class LastReadyJob(ReadJob):
    """Reads the last position that is stored whole: the pages that each group needs there. Storages
    look up prefixes, and these pages are not one: so the storage is asked for what a position
    needs, from the last position on. A page in parts is stored when its last part is, which is
    written last."""

    def __init__(
        self,
        executor: JobExecutor,
        progress: TaskProgress,
        deadline: Deadline,
        keys: Keys,
        wanted: LastReady,
        namespace: Namespace | None,
    ) -> None:
        """Looks nothing up yet."""
        super().__init__(executor, progress, deadline, keys[:0], 0, namespace, False)
        self._all_keys, self._groups = keys, wanted.groups
        self._after, self._position_step = wanted.start, wanted.step
        self._lookups = wanted.most
        """Lookups of the storage that are left."""
        self._stored = [(0, 0)] * len(wanted.groups)
        """Pages that the last lookup found, by group."""
        self._absent: list[tuple[Run, int, int, int]] = []
        """Pages that the cache lacks at a position: how they lie, the first page that their group
        needs, and their range."""

    @property
    def reads(self) -> int:
        """See `Job`."""
        return 1

    def step(self) -> bool:
        """See `Job`."""
        step = self._position_step
        position = len(self._all_keys) // step * step
        while position > self._after and not (self.stopping or self.deadline.passed):
            lacking = self._first_lacking(position)
            if lacking is None:
                if self._lookups < 0:
                    break
                if self._read_absent():
                    self.progress.set_prefix(position)
                    break
                lacking = position - 1  # a part could not be read
            position = lacking // step * step
        return False

    def _first_lacking(self, position: int) -> int | None:
        """The first page that a position needs, and neither cache nor storage has; None: there is
        none, or no lookup is left. No position after that page up to this one can be used: what a
        position needs begins no earlier than what those before it need."""
        cache, step, self._absent = self.executor.cache, self._position_step, []
        tokens = step * (self.executor.page_tokens or 1)
        for number, (rule, run) in enumerate(self._groups):
            first = page = rule.first(position // step, tokens) * step
            while page < position:
                parts = run.keys(self._keys_of(page, position))
                page += cache.peek(parts, namespace=self._namespace) // run.parts
                if page == position:
                    break
                begin, end = self._stored[number]
                if not begin <= page < end:
                    self._lookups -= 1
                    if self._lookups < 0:
                        return None
                    self.check()
                    last = run.last(self._keys_of(page, position))
                    begin, end = page, page + self.executor.contains(self, last)
                    self._stored[number] = begin, end
                if page == end:
                    return page
                self._absent.append((run, first, page, min(end, position)))
                page = min(end, position)
        return None

    def _read_absent(self) -> bool:
        """Read what the cache lacks at the position looked up last. False: not all of it came."""
        for run, first, begin, end in self._absent:
            self._run, self._keys = run, run.keys(self._keys_of(first, end))
            self._start = (begin - first) * run.parts
            if self._fill(_untold) < len(self._keys) - self._start:
                return False
        return True

    def _keys_of(self, begin: int, end: int) -> Keys:
        return np.ascontiguousarray(self._all_keys[begin:end])


def _untold(pages: int) -> None:
    """Tells no one: a part of a position is of no use."""


# ---- The executor of jobs. It has a job from `submit_job` until all pages are given back.


class JobExecutor(Executor):
    """The threads of a tier, and a watching thread that looks for late calls. All state is under
    `changed`."""

    def __init__(
        self,
        cache: Cache,
        storage: Storage,
        breaker: CircuitBreaker,
        options: TierOptions,
        costs: ReadCosts | None,
    ) -> None:
        """Starts no thread yet.

        Args:
            costs: None: reads are neither measured nor declined.
        """
        super().__init__(options.threads, "storage", clock=options.clock)
        self.cache, self.storage, self.breaker = cache, storage, breaker
        self.options, self.costs = options, costs
        self.page_tokens: int | None = cache.index.segment.config.get("page_tokens")
        self.running: set[Job] = set()
        self.holding: set[Job] = set()
        """Ended jobs with pages for `StorageTask.publish`."""
        self._tally: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._notices = Notices(log)
        self._last_asked: tuple[str, Keys | None] = ("contains", None)
        """The last lookup or read, and its first key; a probe repeats it."""
        self._seconds = min(options.call_timeout, options.timeout)
        self._cancelled: list[tuple[Job, Literal["queued", "begun", "held"]]] = []
        """Jobs given up but not yet abandoned, with their progress. A begun job's own thread gives
        its pages back."""
        self._owed: list[Job] = []
        """Jobs whose pages could not be given back; tried again."""
        self._returning: list[Job] = []
        """Jobs about to give pages back, once for each coming `_let_go`."""
        self._last: Callable[[], None] = _nothing
        self._watcher = threading.Thread(
            target=self._watch, name="lightcache-storage-watch", daemon=True
        )

    def start_watching(self) -> None:
        """Start the watching thread. The other threads start when there is work."""
        self._watcher.start()

    # ---- tasks

    def submit_job(self, job: Job) -> StorageTask:
        """Queue a job. If no thread can run it, its task is FAILED."""
        try:
            self.put(job)
        except LightcacheError as error:  # closed meanwhile, or no thread is left for it
            job.progress.count(failed=job.reads)
            self.finish(job, str(error), failed=True)
        return job.task

    def ended_task(
        self, kind: Literal["read", "write"], pages: int, reason: str = "", **counts: int
    ) -> StorageTask:
        """A task that ended before it started."""
        progress = TaskProgress(kind, pages, self.page_tokens)
        progress.count(**counts)
        failed = "failed" in counts
        if not counts:
            progress.set_prefix(pages)
        if not failed:
            progress.add_reason(reason)
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
        rows: TokenIds | None = None,
        *,
        hold: bool = False,
        declinable: bool = False,
    ) -> StorageTask:
        """Queue a prefetch. It is refused only if the storage is disabled."""
        pages = len(keys) - start
        if self.breaker.shut:
            return self.ended_task("read", pages, self.breaker.reason, failed=pages)
        progress = TaskProgress("read", pages, self.page_tokens)
        deadline = deadline or Deadline(self.options.timeout, self.options.clock)
        keys = keys.copy()
        job = ReadJob(self, progress, deadline, keys, start, namespace, hold, rows, declinable)
        return self.submit_job(job)

    def reads_ahead(self) -> list[int]:
        """The pages left to read of each running or queued read."""
        with self.changed:
            return [pages for job in self._jobs() if (pages := job.reads)]

    def pinned(self) -> int:
        """The number of pages pinned for writes."""
        pages = 0
        with self.changed:
            for job in self._jobs():
                pages += job.pinned
        return pages

    def _jobs(self) -> list[Job]:
        """The queued and the running jobs; the lock is held."""
        queued = [work for work in self.queue.all() if isinstance(work, Job)]
        return [*queued, *self.running]

    # ---- totals

    def add(self, **counts: int) -> None:
        """Add to the totals."""
        with self.changed:
            self._tally.update(counts)

    def count_unstored(self, kind: Unstored, pages: int, why: str) -> None:
        """Count pages that should have been stored and were not; log the first of each kind, but
        for `absent`, which a pool that is full or a worker that died explains: counts tell it."""
        if not pages:
            return
        with self.changed:
            self._tally.update({"unstored": pages, f"unstored_{kind}": pages})
        if kind not in ("disabled", "absent"):  # the breaker logs the first
            self._notices.first(
                kind,
                "%d pages of a prompt were not stored: %s; `unstored_%s` of the tier's stats counts"
                " such pages, and this is said once",
                *(pages, why, kind),
            )

    def stats(self) -> TierStats:
        """A consistent snapshot of the totals."""
        line = (None if self.costs is None else self.costs.figures()) or (None, None)
        with self.changed:
            return TierStats(
                **{name: self._tally[name] for name in _TALLIES},
                queued=len(self._jobs()) - len(self.running),
                running=len(self.running),
                stuck=self.late,
                writing=self.pinned(),
                state=self.breaker.state,
                read_call_seconds=line[0],
                read_page_seconds=line[1],
            )

    def take_totals(self, names: Sequence[str]) -> Counter[str]:
        """The increase of these totals since the last call."""
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
        """See `Executor`. They count as running until they are finished."""
        for work in works:
            self.begun(work)

    def put_back(self, job: Job) -> bool:
        """Put a running write back into the queue if reads are waiting; False: it runs on."""
        with self.changed:
            if not self.queue.reads or job.given_up:
                return False
            self.running.discard(job)
            self.put(job, back=True)
            return True

    def finish(self, job: Job, reason: str, *, failed: bool) -> None:
        """Finish a job that is in no thread: give back its pages, then tell its waiters."""
        with self.changed:
            self._returning.append(job)
        self._let_go(job)
        if job.held:
            self._hold(job)
        self._end_task(job, reason, failed=failed)
        self._finished(job)

    def _finished(self, job: Job) -> None:
        with self.changed:
            self.running.discard(job)
            self._notify()
        job.progress.settle()

    def _notify(self) -> None:
        """Notify of a change; the lock is held. Wakes the watching thread only if it may have work:
        to give pages back, or to end with the last job."""
        self.changed.notify_all()
        if self.closing or self._cancelled or self._owed or self.holding:
            self._look.notify()

    def _hold(self, job: Job) -> None:
        """Remember that a job has pages for `publish`."""
        with self.changed:
            options = self.options
            job.publish_by = job.publish_by or Deadline(
                options.timeout, options.clock
            )  # from its end on
            self.holding.add(job)
            self._notify()
            closing = self.closing
        if closing:  # `close` has looked at these already
            self._abandon(job.give_up)
        if job.given_up:  # cancelled by a thread that did not see it among these
            self.give_back_held(job)

    def give_back_held(self, job: Job) -> None:
        """Give back the pages of a job that will not be published any more. It moves from `holding`
        to `_returning` under one hold of the lock, so that the executor never seems idle."""
        with self.changed:
            self.holding.discard(job)
            self._returning.append(job)
        self._let_go(job)

    def _end_task(self, job: Job, reason: str, *, failed: bool) -> None:
        """End its task, unless it has ended, and add its counts to the totals."""

        def count(pages: Mapping[str, int]) -> None:
            with self.changed:
                self._tally.update(pages)
                self._tally["tasks_failed" if failed else "tasks_finished"] += 1

        with job.accounting:  # if two threads end it, only one counts
            if not job.progress.ended:
                job.account(reason, failed=failed)
            job.progress.end(reason, failed=failed, count=count)

    # ---- giving up, and giving back

    def cancel(self, job: Job) -> None:
        """Give a job up, without waiting: the watching thread abandons its keys, and gives back
        pages that are in no call."""
        job.given_up = True  # first: a thread that runs it now sees that
        with self.changed:
            queued, held = self.queue.remove(job), job in self.holding
            self.holding.discard(job)
            if queued or held:
                self._returning.append(job)
            begun = job in self.running
            if queued:
                self.running.add(job)  # until it is finished
        if queued:  # before the watching thread settles it
            self._end_task(job, "cancelled", failed=True)
        with self.changed:
            if queued or held or begun:
                self._cancelled.append((job, "queued" if queued else "held" if held else "begun"))
            self._notify()

    def _let_go(self, job: Job, *, later: bool = False) -> bool:
        """Give back the pages of a job of `_returning`; if that fails, the job becomes owed.

        Args:
            later: do not try now.

        Returns:
            True if they were given back.
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
            with self.changed:  # both at once: in between the executor would seem idle
                self._returning.remove(job)
                if owed:
                    self._owed.append(job)
                self._notify()
        return not owed

    def _give_back(self, unwanted: Sequence[Job], owed: Sequence[Job] = ()) -> None:
        """Give up the `unwanted` jobs and the cancelled ones, and give back the pages of those in
        `_returning`. After the first failure to get the cache's lock, the other jobs become owed
        without a try."""
        with self.changed:
            cancelled, self._cancelled = self._cancelled, []
            if cancelled:  # the only notification for jobs that ended by themselves
                self._notify()
        free = True
        for job, progress in cancelled:
            if progress == "begun":
                free = free and self._abandon(job.give_up)
        for job in [*unwanted, *(job for job, progress in cancelled if progress != "begun")]:
            job.given_up = True  # also if their keys are abandoned later, with their pages
            free = free and self._abandon(job.give_up)
            free = self._let_go(job, later=not free)
        for job in owed:
            free = self._let_go(job, later=not free)
        for job, progress in cancelled:
            if progress == "queued":
                self._finished(job)

    def _abandon(self, give_up: Callable[[], None]) -> bool:
        """Call `give_up` or `abandon_call` of a job; False: keys are abandoned when the job is
        released."""
        try:
            give_up()
        except LightcacheError as error:
            log.warning("keys of a storage task could not be abandoned yet: %s", error)
            return False
        return True

    # ---- calls of the storage

    def contains(self, job: Job, keys: Keys) -> int:
        """`Storage.contains`, made by `call`."""
        self._last_asked = ("contains", keys[:1])

        def run(left: float) -> tuple[int, str]:
            began = self._clock()
            prefix = checked_contains(self.storage.contains(keys, timeout=left), len(keys))
            if self.costs is not None and job.progress.kind == "read":
                self.costs.note_lookup(len(keys), prefix, self._clock() - began)
            return prefix, ""

        return self.call(job, "contains", run)

    def read(self, job: Job, keys: Keys, buffers: Sequence[Buffer]) -> ReadResult:
        """`Storage.read`, made by `call`."""
        self._last_asked = ("read", keys[:1])

        def run(left: float) -> tuple[ReadResult, str]:
            began = self._clock()
            result = self.storage.read(keys, buffers, timeout=left)
            checked_statuses("read", result.statuses, len(keys))
            good = result.count(ReadStatus.OK)
            self.add(read_bytes=good * self.cache.page_bytes)
            if self.costs is not None:
                self.costs.note_read(good, self._clock() - began)
            return result, why_unread(result)

        return self.call(job, "read", run)

    def write(
        self, job: Job, keys: Keys, buffers: Sequence[Buffer], parent: Keys | None
    ) -> WriteResult:
        """`Storage.write`, made by `call`."""

        def run(left: float) -> tuple[WriteResult, str]:
            storage = self.storage
            result = storage.write(keys, buffers, timeout=left, parent=parent)
            checked_statuses("write", result.statuses, len(keys))
            stored, evicted = result.count(WriteStatus.STORED), 0
            with contextlib.suppress(Exception):  # a write does not fail because of statistics
                evicted = operator.index(storage.stats().evicted)
            with self.changed:
                self._tally["written_bytes"] += stored * self.cache.page_bytes
                self._tally["evicted"] = max(evicted, self._tally["evicted"])
            return result, why_unwritten(result)

        return self.call(job, "write", run)

    def call(self, job: Job | None, what: str, run: Callable[[float], tuple[R, str]]) -> R:
        """Call the storage, and tell the breaker the outcome.

        Args:
            job: None: a probe, which no task waits for.
            run: makes the call within the given seconds; returns the result, and the reason why it
                counts as a failure of the storage (empty: success).

        Raises:
            Stopped: the call returned late, or the task was cancelled meanwhile.
            StorageError: the call was not made (no time, disabled), or it raised.
        """
        left = self._seconds if job is None else self._seconds_for(job)
        began, error = self._clock(), ""
        whole = began if left >= self._seconds / 2 else None  # None: it had too little time
        late = partial(self._call_hangs, job, what, left, whole)
        result: R | None = None
        try:
            result, error = self.call_here(
                partial(run, left), began + left + self.options.grace, what, late
            )
        except Late:
            raise Stopped from None
        except Exception as raised:  # keep only its text: a traceback keeps views of the pool
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

    def _seconds_for(self, job: Job) -> float:
        """The seconds that a call for this job may take.

        Raises:
            StorageError: its time is up, or the breaker is open.
        """
        left = min(job.deadline.left, self._seconds)
        if left <= 0.0:
            raise StorageError(job.deadline.reason)
        if self.breaker.shut:
            raise StorageError(self.breaker.reason)
        return left

    def _call_hangs(self, job: Job | None, what: str, left: float, since: float | None) -> None:
        """A call was found late: tell the breaker, and end its task, whose pages stay with the
        call. In the thread that found it."""
        reason = f"timed out: not done within {left:g} s; the storage's {what} hangs"
        self.add(timeouts=1)
        self._fail(reason, since)
        if job is not None:
            self._abandon(job.abandon_call)
            if job.held:
                self._hold(job)
            self._end_task(job, reason, failed=True)
            job.progress.settle()

    def _fail(self, error: str, since: float | None = None) -> None:
        """Tell the breaker of a failure, and wake the watching thread, which probes."""
        self.breaker.failure(error, since)
        with self.changed:
            self._look.notify()

    def probe(self) -> None:
        """Test whether the storage works again: repeat the last call for its first key, into memory
        of our own. No task waits for it."""

        def run(seconds: float) -> tuple[bool, str]:
            what, key = self._last_asked
            if key is None:
                return True, ""
            deadline, key = Deadline(seconds, self.options.clock), key.copy()
            stored = checked_contains(self.storage.contains(key, timeout=seconds), 1)
            if not stored or what != "read":
                return True, ""
            page = own_memory(1, self.cache.page_bytes)
            return True, why_unread(self.storage.read(key, [page[0]], timeout=deadline.left))

        with contextlib.suppress(Stopped, StorageError):  # the breaker was told
            self.call(None, "probe", run)
        with self.changed:
            self._notify()
            self._look.notify()

    # ---- the watching thread: late calls, expired work, pages to give back

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
        except Exception:  # log it: a second `close` waits for this thread
            log.exception("what a storage tier had left to do failed")

    def pause(self) -> float | None:
        """Seconds until the next thing to do; None: nothing until something changes."""
        if self._cancelled:
            return 0.0
        pauses = [super().pause(), None if self.closing else self.breaker.wait]
        pauses += [job.publish_by.left for job in self.holding if job.publish_by is not None]
        pauses += [RETRY] if self._owed else []
        known = [pause for pause in pauses if pause is not None]
        return max(0.001, min(*known, threading.TIMEOUT_MAX)) if known else None

    def poll(self) -> None:
        """Fail late calls and expired work, give pages back, and start a probe if one is due."""
        super().poll()
        kept: list[Job] = []
        owed: list[Job] = []
        if self.holding or self._owed:
            with self.changed:
                owed, self._owed = self._owed, []
                kept = [
                    job
                    for job in self.holding
                    if job.publish_by is not None and job.publish_by.passed
                ]
                self.holding.difference_update(kept)
                self._returning += [*kept, *owed]
        for job in kept:
            job.progress.add_reason("what was held was not published in time, so it was given back")
        if kept or owed or self._cancelled:
            self._give_back(kept, owed)
        if not self.closing and self.breaker.shut and self.breaker.probe():
            try:
                self.put(_Probe(self))
            except LightcacheError as error:
                self.breaker.failure(str(error))

    # ---- closing

    @property
    def busy(self) -> bool:
        """True if a job is running, queued, or has pages to give back; the lock is held."""
        held = self.holding or self._owed or self._returning or self._cancelled
        return bool(self.running or held or len(self.queue))

    @property
    def unreturned(self) -> int:
        """The number of tasks whose pages could not be given back yet."""
        with self.changed:
            return len({*self._owed, *self._returning})

    def wait_idle(self, timeout: float) -> bool:
        """Wait until the executor is not busy; False: the time is up."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.busy, min(timeout, threading.TIMEOUT_MAX))

    def end_jobs(self, deadline: Deadline) -> bool:
        """Accept no more jobs, give back pages held for `StorageTask.publish`, finish the rest, and
        cancel the jobs left when the time is up. False: a call hangs, or pages cannot be given
        back."""
        with self.changed:
            self.closing = True
            held = list(self.holding)
            self.holding.clear()
            self._returning += held
            self._ready.notify_all()
            self._notify()
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
        """Have the watching thread call `last` once everything has ended. False: everything has
        ended already, and it will not."""
        with self.changed:
            busy = self.busy
            if busy:
                self._last = last
            return busy

    def join(self) -> None:
        """Wait for the threads to end, once closing and idle."""
        self.close(math.inf)
        if self._watcher.ident is not None:
            self._watcher.join()


class _Probe(Work):
    """A call that tests a disabled storage, for no task."""

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
    "Job",
    "JobExecutor",
    "LastReady",
    "LastReadyJob",
    "ReadJob",
    "Stopped",
    "TierOptions",
    "WriteJob",
]
