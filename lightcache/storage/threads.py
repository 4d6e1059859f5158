"""The threads of a tier: those that call the storage, and one that notices calls that hang.

A call is overdue when it has not returned `grace` seconds behind its time limit. Its task fails
then, its keys are abandoned, the breaker counts it; the thread is lost until the call returns, and
the pages with it. All others go on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightcache.errors import LightcacheError, StorageError
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.breaker import Breaker, log
from lightcache.storage.jobs import Job, Stopped
from lightcache.storage.queueing import JobQueue
from lightcache.storage.tasks import TaskResult

R = TypeVar("R")
RETRY = 0.5  # seconds until pages that could not be given back (LockTimeout) are tried again


class Call:
    """A call of the backend that is under way."""

    def __init__(self, job: Job, what: str, end: float) -> None:
        """Begins now; overdue from `end` on, by the tier's clock."""
        self.job = job
        self.what = what
        self.end = end
        self.overdue = False


class Crew:
    """Owns the queue and the threads. `changed` guards all of it."""

    def __init__(self, breaker: Breaker, clock: Clock, grace: float) -> None:
        """No threads yet."""
        self.changed = threading.Condition()
        self.queue = JobQueue()
        self.running: set[Job] = set()
        self.holding: set[Job] = set()
        """Over, with pages for `StorageTask.publish`."""
        self.calls: set[Call] = set()
        self.closing = False
        self.tally: Counter[str] = Counter()
        self._owed: list[Job] = []
        """Have something to give back that could not be: tried again."""
        self._returning: list[Job] = []
        """Somebody is about to give back what they have: once for each `let_go` that is to come."""
        self._last: Callable[[], None] = _nothing
        self._breaker = breaker
        self._clock = clock
        self._grace = grace
        self._threads: list[threading.Thread] = []

    def start(self, threads: int) -> None:
        """Begin to work. Daemons: a call that hangs does not keep the process alive."""
        names = [("io", self._work)] * threads + [("watch", self._watch)]
        for name, run in names:
            thread = threading.Thread(target=run, name=f"lightcache-storage-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ---- the threads that call the storage

    def _work(self) -> None:
        while (job := self._next()) is not None:
            while self._step(job) and not self._requeue(job):
                pass

    def _next(self) -> Job | None:
        with self.changed:
            while (job := self.queue.pop()) is None:
                if self.closing:
                    return None
                self.changed.wait()
            self.running.add(job)
        job.task._start()
        return job

    def _requeue(self, job: Job) -> bool:
        """Let reads that wait go before the rest of a write."""
        with self.changed:
            if not self.queue.reads or job._given_up:
                return False
            self.running.discard(job)
            self.queue.put_back(job)
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
        """A job whose call is over ends: what it held goes back, then its waiters are told."""
        with self.changed:
            self._returning.append(job)
        self.let_go(job)
        self.hold(job)
        self.tell(job, reason, failed=failed)
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
            if closing:  # nobody looks at it any more, and `close` has looked already
                self.abandon(job.give_up)
            if job._given_up:  # cancelled by somebody who did not see it among these
                self.unhold(job)
                self.let_go(job)

    def unhold(self, job: Job) -> bool:
        """Nobody publishes it any more: `let_go` follows. Whether it was held. In one hold of the
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

        job.task._end(reason, failed=failed, count=count)

    def add(self, **counts: int) -> None:
        """Add to the totals."""
        with self.changed:
            self.tally.update(counts)

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

    def give_back(self, unwanted: Sequence[Job], owed: Sequence[Job] = ()) -> None:
        """Give up the first, and let go of all, which are among `_returning`. One wait for a lock
        that somebody holds is enough: behind it, the others are owed."""
        free = True
        for job in unwanted:
            job._given_up = True  # also of those whose keys are abandoned later, with their pages
            free = free and self.abandon(job.give_up)
            free = self.let_go(job, later=not free)
        for job in owed:
            free = self.let_go(job, later=not free)

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
        left = job.deadline.left
        if left <= 0.0:
            raise StorageError(job.deadline.reason)
        if not self._breaker.allow():
            raise StorageError(self._breaker.reason)
        call = Call(job, what, self._clock() + left + self._grace)
        with self.changed:
            self.calls.add(call)
            self.changed.notify_all()
        error = ""
        result: R | None = None
        try:
            result = run(left)
            error = bad(result)
        except Exception as raised:  # a text, as a traceback would keep views of the pool
            error = f"{what}: {raised if isinstance(raised, LightcacheError) else repr(raised)}"
        with self.changed:
            self.calls.discard(call)
            late = call.overdue
        if late:
            raise Stopped
        if error:
            self._breaker.failure(error)
        else:
            self._breaker.success()
        job.check()
        if result is None:
            raise StorageError(error)
        return result

    # ---- what hangs, and what waits too long

    def _watch(self) -> None:
        while True:
            self.poll()
            with self.changed:
                if self.closing and not self._busy:
                    break
                self.changed.wait(self._pause())
        try:
            self._last()
        except Exception:  # whoever closes again waits for this thread
            log.exception("what a storage tier had left to do failed")

    def _pause(self) -> float | None:
        """Seconds until something may be overdue; None: whenever something changes."""
        now = self._clock()
        pauses = [call.end - now for call in self.calls if not call.overdue]
        pauses += [job.deadline.left for job in self.queue.jobs()]
        pauses += [job.kept.left for job in self.holding if job.kept is not None]
        pauses += [RETRY] if self._owed else []
        return max(0.001, min(*pauses, threading.TIMEOUT_MAX)) if pauses else None

    def poll(self) -> None:
        """Fail what is overdue, and try again to give back what could not be given back."""
        now = self._clock()
        with self.changed:
            overdue = [call for call in self.calls if not call.overdue and call.end <= now]
            for call in overdue:
                call.overdue = True
            late = [job for job in self.queue.jobs() if job.deadline.passed]
            late = [job for job in late if self.queue.remove(job)]
            self.running.update(late)  # until they are finished: nobody takes us for idle
            owed, self._owed = self._owed, []
            kept = [job for job in self.holding if job.kept is not None and job.kept.passed]
            self.holding.difference_update(kept)
            self._returning += [*kept, *owed]
            self.tally["timeouts"] += len(overdue)
        for call in overdue:
            self._give_up_call(call)
        for job in late:
            self.finish(job, f"{job.deadline.reason}, all of it in the queue", failed=True)
        for job in kept:
            job.task._say("nobody published what was held, so it was given back")
        self.give_back(kept, owed)

    def _give_up_call(self, call: Call) -> None:
        reason = f"{call.job.deadline.reason}; the storage's {call.what} hangs"
        self._breaker.failure(reason)
        self.abandon(call.job.lose)
        self.hold(call.job)
        self.tell(call.job, reason, failed=True)
        call.job.task._settle()

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

    @property
    def stuck(self) -> int:
        """Threads in calls that are overdue."""
        with self.changed:
            return sum(call.overdue for call in self.calls)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs and nothing waits; False: not in these seconds."""
        with self.changed:
            return self.changed.wait_for(
                lambda: not self._busy, min(timeout, threading.TIMEOUT_MAX)
            )

    def leave(self, last: Callable[[], None]) -> bool:
        """Closing, and not waited for any more: the thread that ends last does this, in the end.
        False: everything has ended meanwhile, and it does not."""
        with self.changed:
            busy = self._busy
            if busy:
                self._last = last
            return busy

    @property
    def _busy(self) -> bool:
        held = self.holding or self._owed or self._returning
        return bool(self.running or held or self.queue.jobs())

    @property
    def unreturned(self) -> int:
        """Tasks whose pages nobody wants, and could not be given back yet."""
        with self.changed:
            return len({*self._owed, *self._returning})

    def close(self) -> None:
        """Take nothing more, and give back what is held for `StorageTask.publish`."""
        with self.changed:
            self.closing = True
            held = list(self.holding)
            self.holding.clear()
            self._returning += held
            self.changed.notify_all()
        self.give_back(held)

    def join(self) -> None:
        """Once idle and closing: wait for the threads to end."""
        for thread in self._threads:
            thread.join()


def _nothing() -> None:
    pass


_TALLIED = (
    *("loaded", "stored", "present", "absent", "failed", "corrupt", "refused", "skipped", "busy"),
    *("no_room", "declined"),
)

__all__ = ["Crew"]
