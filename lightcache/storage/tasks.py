"""StorageTask: a transfer between a cache and a storage that runs in the background."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from lightcache.errors import ConfigError, Detached, WaitTimeout
from lightcache.shm.waiting import Condition
from lightcache.storage.arguments import Deadline


class TaskState(Enum):
    """The state of a task."""

    NOT_STARTED = "not started"
    RUNNING = "running"
    FINISHED = "finished"
    """It ran to its end. Pages that failed one by one are in the result."""
    FAILED = "failed"
    """It ended early: a call failed or did not return, its time was up, it was cancelled, or the
    storage is disabled. What was done before stays, and is in the result."""


@dataclass(frozen=True)
class TaskResult:
    """What a task has done so far, in pages; final when the task is over."""

    pages: int
    """Requested."""
    prefix: int
    """Of these, from the first on: ready in the cache (prefetch), or stored (write)."""
    loaded: int
    """Read from the storage and ready in the cache now."""
    stored: int
    """Written to the storage."""
    present: int
    """Present before: in the cache (prefetch), in the storage (write)."""
    absent: int
    """Of a prefetch: not stored, or after a page that is not. The request computes them."""
    failed: int
    """Could not be read or written."""
    corrupt: int
    """Stored, with a wrong checksum or length."""
    refused: int
    """Of a write: the storage has no room, or the queue has none."""
    skipped: int
    """Of a write: prompt too short, not seen often enough, evicted before, or after a page that
    could not be stored."""
    busy: int
    """Of a prefetch: another process or thread is reading or computing them."""
    no_room: int
    """Of a prefetch: the cache had no page for them."""
    declined: int
    """Of a prefetch: computing them is faster than reading them. See `prefill_tokens_per_s` of
    StorageTier; `reasons` has both figures."""
    reasons: tuple[str, ...]
    """What went wrong, each reason once, in order."""


COUNTS = tuple(
    name for name in TaskResult.__dataclass_fields__ if name not in ("pages", "prefix", "reasons")
)
_OVER = (TaskState.FINISHED, TaskState.FAILED)


class TaskOwner(Protocol):
    """The object that executes a task, as far as the task uses it."""

    def take(self) -> None:
        """See `StorageTask.take`."""

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""

    def stop(self) -> None:
        """Start nothing more; what was done counts."""

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        ...


class TaskProgress:
    """The state of a task: its owner writes it, its `StorageTask` reads it. For any thread."""

    def __init__(self, kind: Literal["read", "write"], pages: int, page_tokens: int | None) -> None:
        """Not started."""
        self.kind, self.pages, self.page_tokens = kind, pages, page_tokens
        self.owner: TaskOwner | None = None
        """None: nothing is left to decide about the task."""
        self.changed = Condition()
        self.state = TaskState.NOT_STARTED
        self.counts: Counter[str] = Counter()
        self.prefix = 0
        self.reasons: list[str] = []
        self.settled = False
        """Over, and counted in the tier's totals."""
        self.process = os.getpid()
        self.began, self.ended = time.monotonic(), 0.0
        self._observer: Callable[[], None] | None = None

    @property
    def over(self) -> bool:
        """Whether it is FINISHED or FAILED. No lock: a state is never left once it is over."""
        return self.state in _OVER

    @property
    def result(self) -> TaskResult:
        """What was done so far, of one instant."""
        with self.changed:
            counts = {name: self.counts[name] for name in COUNTS}
            return TaskResult(
                pages=self.pages, prefix=self.prefix, reasons=tuple(self.reasons), **counts
            )

    # ---- written by the owner

    def start(self) -> None:
        """A thread works on it."""
        with self.changed:
            if self.state is TaskState.NOT_STARTED:
                self.state = TaskState.RUNNING
        self._notify()

    def count(self, **pages: int) -> None:
        """Add to the counts of the result."""
        with self.changed:
            self.counts.update(pages)

    def reach(self, prefix: int) -> None:
        """So many pages from the first on are done."""
        if prefix != self.prefix:
            with self.changed:
                self.prefix = prefix
            self._notify()

    def say(self, reason: str) -> None:
        """Add a reason, once; an empty one is none."""
        if reason:
            with self.changed:
                if reason not in self.reasons:
                    self.reasons.append(reason)

    def end(
        self,
        reason: str = "",
        *,
        failed: bool,
        count: Callable[[TaskResult], None] | None = None,
    ) -> bool:
        """End the task; False: it had ended before. `count` receives the result first: a thread
        that waits for the end then finds it in the tier's totals."""
        with self.changed:
            if self.over:
                return False
            self.say(reason)
            if count is not None:
                count(self.result)
            self.ended = time.monotonic()
            self.state = TaskState.FAILED if failed else TaskState.FINISHED
            self.changed.notify_all()
            return True

    def become(
        self, state: TaskState, prefix: int, counts: Mapping[str, int], reasons: Sequence[str]
    ) -> None:
        """Take over the state that another process reports. Nothing changes after the end."""
        with self.changed:
            if not self.over:
                self.ended = time.monotonic() if state in _OVER else 0.0
                self.state, self.prefix = state, prefix
                self.counts = Counter(counts)
                self.reasons = list(reasons)
                self.changed.notify_all()

    def settle(self) -> None:
        """Its end is counted in the tier's totals."""
        self.settled = True
        self._notify()

    def watch(self, observer: Callable[[], None]) -> None:
        """Call this when the task starts, advances and is settled; and now. It is called in the
        tier's threads, with no lock held, and must not block."""
        self._observer = observer
        observer()

    def _notify(self) -> None:
        if self._observer is not None:
            self._observer()


class StorageTask:
    """What `StorageTier.write` and `prefetch` return. Any thread may use it. A forked child may
    look at it, and gets Detached from every call that waits for it or decides about it."""

    def __init__(self, progress: TaskProgress) -> None:
        """For tiers."""
        self.progress = progress
        """For the owner of the task."""

    # ---- looking at it

    @property
    def kind(self) -> Literal["read", "write"]:
        """ "read": a prefetch."""
        return self.progress.kind

    @property
    def state(self) -> TaskState:
        """Its state."""
        return self.progress.state

    @property
    def over(self) -> bool:
        """Whether it is FINISHED or FAILED."""
        return self.progress.over

    @property
    def seconds(self) -> float:
        """From the request until the task was over; 0 while it is not."""
        ended = self.progress.ended
        return max(0.0, ended - self.progress.began) if ended else 0.0

    @property
    def pages_done(self) -> int:
        """The same as `result.prefix`."""
        return self.progress.prefix

    @property
    def tokens(self) -> int:
        """Tokens in these pages.

        Raises:
            ConfigError: the cache has no `page_tokens`.
        """
        if self.progress.page_tokens is None:
            raise ConfigError("tokens: this cache was created without page_tokens")
        return self.pages_done * self.progress.page_tokens

    @property
    def result(self) -> TaskResult:
        """What it has done so far."""
        return self.progress.result

    def wait(self, timeout: float | None = None) -> TaskResult:
        """Block until it is over.

        Args:
            timeout: seconds; None: as long as it may take, which the tier bounds.

        Raises:
            ConfigError: `timeout` is no number.
            WaitTimeout: it is not over, and still runs.
            Detached: called in a forked child.
        """
        self._check_process()
        left = None  # a nan would be waited for without sleeping, and without an end
        if timeout is not None:
            left = min(Deadline(timeout).timeout, threading.TIMEOUT_MAX)
        progress = self.progress
        with progress.changed:
            if not progress.changed.wait_for(lambda: progress.over, left):
                raise WaitTimeout(
                    f"wait: after {timeout} s the {self.kind} of {progress.pages} pages is not "
                    "over; wait longer, or cancel it"
                )
        return progress.result

    # ---- deciding about it

    def take(self) -> TaskResult:
        """Call this before the request runs: waits as the tier's `read_policy` says, lets the task
        start nothing more, and returns what there is. Pages whose read is in flight become ready
        later."""
        self._check_process()
        if self.progress.owner is not None:
            self.progress.owner.take()
        return self.result

    def stop(self) -> TaskResult:
        """Let it start nothing more, and return what there is. Never waits, whatever the read
        policy: for a scheduler's step. Pages whose read is in flight become ready later."""
        self._check_process()
        if self.progress.owner is not None:
            self.progress.owner.stop()
        return self.result

    def cancel(self) -> None:
        """Give up: a queued task never starts, a running one ends after the storage's current
        call. Keys that were being read are abandoned at once; pages are freed when that call
        returns, and `wait` tells when. Of a task that is over, with `hold`: frees the pages. Does
        nothing otherwise."""
        self._check_process()
        if self.progress.owner is not None:
            self.progress.owner.cancel()

    def publish(self, pages: int) -> StorageTask:
        """Of a `prefetch` with `hold`: make the first pages ready and free the rest, unused.

        Args:
            pages: at most `result.prefix`; usually the least that all ranks could read.

        Returns:
            A task that is over, or one that reads a few pages again: when `pages` ends inside of a
            group. Wait for it before matching.

        Raises:
            ConfigError: not such a task, not finished, published before, or more than it has.
            Abandoned: the namespace was cleared meanwhile; all pages were freed.
            Detached: called in a forked child.
        """
        self._check_process()
        if self.progress.owner is None:
            if self.kind == "read" and type(pages) is int and pages == 0:
                return self  # declined, or the storage is disabled: the ranks agreed on no page
            raise ConfigError("publish: this task holds nothing; prefetch with hold=True")
        return self.progress.owner.publish(pages)

    def _check_process(self) -> None:
        if self.progress.process != os.getpid():
            raise Detached(
                "this storage task belongs to the process that forked us: its threads are not "
                "here, so it would never be over; what is needed is made with a tier or client "
                "of this process"
            )

    def __repr__(self) -> str:
        done = f"{self.pages_done}/{self.progress.pages}"
        return f"<StorageTask {self.kind} {done} {self.state.value}>"


# ---- What a tier reports of all its tasks.

ReadPolicy = Literal["wait", "best_effort", "deadline"]
BusyPolicy = Literal["wait", "skip"]
Unstored = Literal["failed", "refused", "gone", "behind", "disabled", "ended"]
"""Why pages that should have been stored were not; see `TierStats`."""


@dataclass(frozen=True)
class TierStats:
    """Totals of a tier since it was made; in pages unless said otherwise. See `TaskResult`."""

    loaded: int
    stored: int
    present: int
    absent: int
    failed: int
    corrupt: int
    refused: int
    skipped: int
    busy: int
    no_room: int
    declined: int
    tasks_finished: int
    """Tasks, as are the following three."""
    tasks_failed: int
    queued: int
    running: int
    timeouts: int
    """Calls of the storage that did not return in time."""
    stuck: int
    """Of these, calls that have not returned yet: each keeps a thread, and its pages."""
    writing: int
    """Pages pinned for writes."""
    read_bytes: int
    """That calls of the storage have read, whatever became of the pages; late ones included."""
    written_bytes: int
    """That the storage has stored."""
    evicted: int
    """Pages that the storage evicted to make room, as of our last write; see `StorageStats`."""
    state: Literal["closed", "open", "half-open"]
    """Of the breaker: open means that the storage is not used."""
    read_call_seconds: float | None = None
    """That a reading call takes beside its pages, as measured; None: not measured. So is the next
    one."""
    read_page_seconds: float | None = None
    """That each page adds."""
    skipped_short: int = 0
    """Of `skipped`: of prompts with fewer tokens than `min_tokens`."""
    skipped_unseen: int = 0
    """Of `skipped`: not offered `seen` times yet."""
    unstored: int = 0
    """Pages that were offered, worth writing, and not stored; the following say why. The first of
    each kind is logged."""
    unstored_failed: int = 0
    """The storage could not write them."""
    unstored_refused: int = 0
    """The storage had no room, or `write_pages` is 0."""
    unstored_gone: int = 0
    """Evicted before it was their turn."""
    unstored_behind: int = 0
    """After one that could not be stored: they would not be found."""
    unstored_disabled: int = 0
    """The storage was not used, since it failed."""
    unstored_ended: int = 0
    """The task ended early: its time was up, it was cancelled, or a call failed."""


TAKEN = ("read_bytes", "written_bytes", "evicted", "declined")
"""Totals that `BaseTier.take_figures` gives away."""

__all__ = [
    "COUNTS",
    "TAKEN",
    "BusyPolicy",
    "ReadPolicy",
    "StorageTask",
    "TaskOwner",
    "TaskProgress",
    "TaskResult",
    "TaskState",
    "TierStats",
    "Unstored",
]
