"""The tier's queue: reads before writes, and the writes of one request together."""

from __future__ import annotations

from collections import OrderedDict, deque

from lightcache.storage.jobs import Job


class JobQueue:
    """Not for several threads at once: the tier's lock is held around every call."""

    def __init__(self) -> None:
        """Empty."""
        self._reads: deque[Job] = deque()
        self._writes: OrderedDict[object, deque[Job]] = OrderedDict()

    def put(self, job: Job) -> None:
        """Behind all others; a write behind those of its request."""
        if job.task.kind == "read":
            self._reads.append(job)
        else:
            self._writes.setdefault(job.request, deque()).append(job)

    def put_back(self, job: Job) -> None:
        """A write that was begun: it is next, once no read waits."""
        self._writes.setdefault(job.request, deque()).appendleft(job)
        self._writes.move_to_end(job.request, last=False)

    def pop(self) -> Job | None:
        """What is next; None: nothing."""
        if self._reads:
            return self._reads.popleft()
        if not self._writes:
            return None
        request, jobs = next(iter(self._writes.items()))
        job = jobs.popleft()
        if not jobs:
            del self._writes[request]
        return job

    def remove(self, job: Job) -> bool:
        """Take a job out; False: it is not here."""
        if job in self._reads:
            self._reads.remove(job)
            return True
        jobs = self._writes.get(job.request, deque())
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._writes[job.request]
        return True

    @property
    def reads(self) -> int:
        """Reads that wait."""
        return len(self._reads)

    def jobs(self) -> list[Job]:
        """All that wait, in no order that matters."""
        return [*self._reads, *(job for jobs in self._writes.values() for job in jobs)]


__all__ = ["JobQueue"]
