"""The lower half of a tier: its queue and threads, its calls of the storage, figures, the end."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from lightcache.cache import Cache
from lightcache.errors import Detached
from lightcache.storage.arguments import Clock, Deadline, write_to
from lightcache.storage.breaker import Breaker, log, unread, unwritten
from lightcache.storage.costs import ReadCosts
from lightcache.storage.jobs import Job, checked_contains, checked_statuses
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
from lightcache.storage.tasks import StorageTask
from lightcache.storage.threads import Crew
from lightcache.storage.tiers import TAKEN, BaseTier, TierStats


class RunningTier(BaseTier):
    """A tier without its calls: see `StorageTier`."""

    def __init__(
        self,
        cache: Cache,
        storage: Storage,
        breaker: Breaker,
        *,
        timeout: float,
        grace: float,
        clock: Clock,
    ) -> None:
        """No threads yet."""
        self.cache = cache
        self.storage = storage
        self._owns = False
        """Whether the storage is to be closed with us."""
        self._owning = threading.Lock()
        self.timeout = timeout
        self.clock = clock
        self._grace = grace
        self._breaker = breaker
        self._page_tokens: int | None = cache.index.segment.config.get("page_tokens")
        self._crew = Crew(breaker, clock, grace)
        self._costs: ReadCosts | None = None
        """None: reads are never declined, and not measured."""
        self._taken: Counter[str] = Counter()

    @property
    def wants_tokens(self) -> bool:
        """See `BaseTier`."""
        return self.storage.wants_tokens

    # ---- its threads

    def _begin(self, timeout: float | None) -> Deadline:
        if self._crew.closing:
            raise Detached("this storage tier was closed; make another one")
        self.cache.index.segment.check_usable()
        return Deadline(self.timeout if timeout is None else timeout, self.clock)

    def _submit(self, job: Job) -> StorageTask:
        with self._crew.changed:
            if not self._crew.closing:
                self._crew.queue.put(job)
                self._crew.changed.notify_all()
                return job.task
        self._crew.finish(job, "the tier was closed", failed=True)
        return job.task

    def _nothing(
        self, kind: Literal["read", "write"], pages: int, reason: str = "", **counts: int
    ) -> StorageTask:
        """A task that is over before it began."""
        task = StorageTask(kind, pages, self._page_tokens)
        task._count(**counts)
        if "failed" in counts:
            task._end(reason, failed=True)
        else:
            task._say(reason)
            task._reach(0 if counts else pages)
            task._end(failed=False)
        self._tally(**counts)
        task._settle()
        return task

    def _pinned(self) -> int:
        with self._crew.changed:
            return sum(job.pinned for job in self._jobs())

    def _jobs(self) -> list[Job]:
        return [*self._crew.queue.jobs(), *self._crew.running]

    def _tally(self, **counts: int) -> None:
        self._crew.add(**counts)

    def _let_go(self, job: Job) -> None:
        self._crew.unhold(job)
        self._crew.let_go(job)

    def _cancel(self, job: Job) -> None:
        self._crew.abandon(job.give_up)  # first: whoever has it now finds that it is given up
        with self._crew.changed:
            queued = self._crew.queue.remove(job)
            if queued:
                self._crew.running.add(job)
            held = job in self._crew.holding
            if held:
                self._crew.unhold(job)
        if held:
            self._crew.let_go(job)
        if queued:
            self._crew.finish(job, "cancelled", failed=True)

    def _reads_ahead(self) -> list[int]:
        """Pages of each read that runs or waits."""
        with self._crew.changed:
            jobs = self._jobs()
        # Outside of the lock: a task that ends takes its own lock, and then this one.
        return [pages for job in jobs if (pages := job.reads)]

    # ---- calls of the storage, in its threads

    def _contains(self, job: Job, keys: Keys) -> int:
        def run(left: float) -> int:
            begun = self.clock()
            found = checked_contains(self.storage.contains(keys, timeout=left), len(keys))
            if self._costs is not None and job.task.kind == "read":
                self._costs.note_lookup(len(keys), found, self.clock() - begun)
            return found

        return self._crew.call(job, "contains", run, lambda found: "")

    def _read(self, job: Job, keys: Keys, buffers: Sequence[Buffer]) -> ReadResult:
        def run(left: float) -> ReadResult:
            begun = self.clock()
            result = self.storage.read(keys, buffers, timeout=left)
            checked_statuses("read", result.statuses, len(keys))
            good = result.count(ReadStatus.OK)
            self._tally(read_bytes=good * self.cache.page_bytes)
            if self._costs is not None:
                self._costs.note_read(good, self.clock() - begun)
            return result

        return self._crew.call(job, "read", run, unread)

    def _write(
        self,
        job: Job,
        keys: Keys,
        buffers: Sequence[Buffer],
        parent: Keys | None,
        tokens: TokenRows | None,
    ) -> WriteResult:
        def run(left: float) -> WriteResult:
            result = write_to(
                self.storage, keys, buffers, timeout=left, parent=parent, tokens=tokens
            )
            checked_statuses("write", result.statuses, len(keys))
            self._tally(written_bytes=result.count(WriteStatus.STORED) * self.cache.page_bytes)
            self._note_evicted()
            return result

        return self._crew.call(job, "write", run, unwritten)

    def _note_evicted(self) -> None:
        """Ask the storage, in the thread that has written: nobody else waits if it takes long."""
        with contextlib.suppress(Exception):  # its figures are no reason to call a write failed
            found = max(0, operator.index(self.storage.stats().evicted))
            with self._crew.changed:
                self._crew.tally["evicted"] = max(found, self._crew.tally["evicted"])

    # ---- looking at it, and the end

    def poll(self) -> None:
        """Look now for what is overdue. A thread does so by itself, by the real time."""
        self._crew.poll()

    def stats(self) -> TierStats:
        """Totals."""
        crew = self._crew
        line = (None if self._costs is None else self._costs.figures()) or (None, None)
        with crew.changed:
            tally = {name: crew.tally[name] for name in _TALLIES}
            return TierStats(
                **tally,
                queued=len(crew.queue.jobs()),
                running=len(crew.running),
                stuck=sum(call.overdue for call in crew.calls),
                writing=sum(job.pinned for job in self._jobs()),
                state=self._breaker.state,
                read_call_seconds=line[0],
                read_page_seconds=line[1],
            )

    def _take_figures(self) -> Counter[str]:
        """See `BaseTier`."""
        with self._crew.changed:
            now = Counter({name: self._crew.tally[name] for name in TAKEN})
            more, self._taken = now - self._taken, now
            return more

    def close(self, timeout: float = 10.0) -> bool:
        """Give back what is held for `StorageTask.publish`, finish what is queued, cancel what is
        left then. May be called again.

        Args:
            timeout: seconds for finishing; 0: cancel at once.

        Returns:
            Whether everything has ended. False: a call of the storage hangs, or somebody holds the
            cache's lock, so that pages cannot be given back; they stay pinned until it returns, or
            that is over, and until then the cache cannot be closed (InUse). The rest is done then:
            pages go back, threads end, and a storage of our own is closed. Call again to wait for
            that; until then `stats` has the tasks of such calls as running.

        Raises:
            ConfigError: `timeout` is no number.
        """
        deadline = Deadline(timeout, what="timeout")  # refused before anything is closed
        self._crew.close()
        if not self._crew.wait_idle(deadline.left):
            with self._crew.changed:
                left = self._jobs()
            for job in left:
                self._cancel(job)
            if not self._crew.wait_idle(self._grace) and self._crew.leave(self._close_storage):
                self._warn_of_what_is_left()
                return False
        self._crew.join()
        self._close_storage()
        return True

    def _warn_of_what_is_left(self) -> None:
        calls, unreturned = len(self._crew.calls), self._crew.unreturned
        still_open = ", and the storage open" if self._owns else ""
        if calls or not unreturned:
            log.warning(
                "the storage tier was closed while %d calls of the storage hang; pages stay "
                "pinned until they return%s",
                calls,
                still_open,
            )
        else:
            log.warning(
                "the storage tier was closed while pages of %d tasks could not be given back, as "
                "somebody holds the cache's lock; that is tried again, and they stay pinned until "
                "then%s",
                unreturned,
                still_open,
            )

    def _close_storage(self) -> None:
        """If it is ours; once no call of it is under way. Once, if it was not interrupted."""
        with self._owning:
            if self._owns:
                self.storage.close()
                self._owns = False  # behind it: a close that was interrupted is made again

    def __repr__(self) -> str:
        return f"<StorageTier of {self.cache.name!r}, {self._breaker.state}>"


_TALLIES = (
    *("loaded", "stored", "present", "absent", "failed", "corrupt", "refused", "skipped", "busy"),
    *("no_room", "declined", "tasks_finished", "tasks_failed", "timeouts"),
    *("read_bytes", "written_bytes", "evicted"),
)

__all__ = ["RunningTier", "TierStats"]
