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
from lightcache.storage.common import Deadline


class TaskState(Enum):
    """The state of a task."""

    NOT_STARTED = "not started"
    RUNNING = "running"
    FINISHED = "finished"
    """It ran to its end. The result counts pages that failed individually."""
    FAILED = "failed"
    """It ended early: a call failed or did not return, its time was up, it was cancelled, or the
    storage is disabled. Pages done before stay done, and the result counts them."""


@dataclass(frozen=True)
class TaskResult:
    """The progress of a task, in pages; final when the task has ended."""

    pages: int
    """Requested."""
    prefix: int
    """Leading pages that are ready in the cache (prefetch) or stored (write)."""
    loaded: int
    """Read from the storage and ready in the cache now."""
    stored: int
    """Written to the storage."""
    present: int
    """Already present: in the cache (prefetch), in the storage (write)."""
    absent: int
    """Prefetch: not stored, or after a page that is not. The request computes them."""
    failed: int
    """Could not be read or written."""
    corrupt: int
    """Stored, with a wrong checksum or length."""
    refused: int
    """Write: the storage or the queue has no room."""
    skipped: int
    """Write: prompt too short, not seen often enough, evicted before, or after a page that could
    not be stored."""
    busy: int
    """Prefetch: another process or thread is reading or computing them."""
    no_room: int
    """Prefetch: the cache had no free page for them."""
    declined: int
    """Prefetch: computing them is faster than reading them. See `prefill_tokens_per_s` of
    StorageTier; `reasons` has both figures."""
    reasons: tuple[str, ...]
    """Distinct reasons of failures, in order."""


COUNTS = tuple(
    name for name in TaskResult.__dataclass_fields__ if name not in ("pages", "prefix", "reasons")
)
_ENDED = (TaskState.FINISHED, TaskState.FAILED)


class TaskOwner(Protocol):
    """The object that executes a task, as the task sees it."""

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""

    def stop(self) -> None:
        """Start nothing more; pages done so far count."""

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        ...


class TaskProgress:
    """The state of a task: its owner writes it, its `StorageTask` reads it. Thread-safe."""

    def __init__(self, kind: Literal["read", "write"], pages: int, page_tokens: int | None) -> None:
        """Not started."""
        self.kind, self.pages, self.page_tokens = kind, pages, page_tokens
        self.owner: TaskOwner | None = None
        """None: the task needs no decision any more."""
        self.changed = Condition()
        self.state = TaskState.NOT_STARTED
        self.counts: Counter[str] = Counter()
        self.prefix = 0
        self.reasons: list[str] = []
        self.settled = False
        """The task has ended, and the tier's totals count it."""
        self.process = os.getpid()
        self.began_at, self.ended_at = time.monotonic(), 0.0
        self._observer: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        """True if it is FINISHED or FAILED. Takes no lock, as neither state ever changes."""
        return self.state in _ENDED

    @property
    def result(self) -> TaskResult:
        """A consistent snapshot of the progress."""
        with self.changed:
            counts = {name: self.counts[name] for name in COUNTS}
            return TaskResult(
                pages=self.pages, prefix=self.prefix, reasons=tuple(self.reasons), **counts
            )

    # ---- written by the owner

    def start(self) -> None:
        """A thread has begun to work on it."""
        with self.changed:
            if self.state is TaskState.NOT_STARTED:
                self.state = TaskState.RUNNING

    def count(self, **pages: int) -> None:
        """Add to the counts of the result."""
        with self.changed:
            self.counts.update(pages)

    def set_prefix(self, prefix: int) -> None:
        """Set the number of leading pages that are done."""
        if prefix != self.prefix:
            with self.changed:
                self.prefix = prefix

    def add_reason(self, reason: str) -> None:
        """Add a reason, if it is not empty and new."""
        if reason:
            with self.changed:
                if reason not in self.reasons:
                    self.reasons.append(reason)

    def end(
        self,
        reason: str = "",
        *,
        failed: bool,
        count: Callable[[Mapping[str, int]], None] | None = None,
    ) -> bool:
        """End the task; False: it had ended before. `count` receives the counts of the result
        before waiters wake, so they find the task in the tier's totals."""
        with self.changed:
            if self.state in _ENDED:
                return False
            if reason:
                self.add_reason(reason)
            if count is not None:
                count(self.counts)
            self.ended_at = time.monotonic()
            self.state = TaskState.FAILED if failed else TaskState.FINISHED
            self.changed.notify_all()
            return True

    def replace(
        self, state: TaskState, prefix: int, counts: Mapping[str, int], reasons: Sequence[str]
    ) -> None:
        """Take over the state that another process reports, unless the task has ended."""
        with self.changed:
            if not self.ended:
                self.ended_at = time.monotonic() if state in _ENDED else 0.0
                self.state, self.prefix = state, prefix
                self.counts = Counter(counts)
                self.reasons = list(reasons)
                self.changed.notify_all()

    def settle(self) -> None:
        """The tier's totals count its end now."""
        self.settled = True
        if self._observer is not None:
            self._observer()

    def watch(self, observer: Callable[[], None]) -> None:
        """Call `observer` when the task is settled; now, if it is. It runs in the tier's threads,
        without a lock, may be called twice, and must not block."""
        self._observer = observer
        if self.settled:
            observer()


class StorageTask:
    """A transfer begun by `StorageTier.write` or `prefetch`. Any thread may use it. A forked child
    may inspect it; calls that wait for it or change it raise Detached there."""

    def __init__(self, progress: TaskProgress) -> None:
        """For tiers."""
        self.progress = progress
        """For the owner of the task."""

    # ---- inspection

    @property
    def kind(self) -> Literal["read", "write"]:
        """ "read": a prefetch."""
        return self.progress.kind

    @property
    def state(self) -> TaskState:
        """Its state."""
        return self.progress.state

    @property
    def ended(self) -> bool:
        """True if it is FINISHED or FAILED."""
        return self.progress.ended

    @property
    def seconds(self) -> float:
        """Seconds from the request to the end of the task; 0 before the end."""
        ended = self.progress.ended_at
        return max(0.0, ended - self.progress.began_at) if ended else 0.0

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
        """Its progress so far."""
        return self.progress.result

    def wait(self, timeout: float | None = None) -> TaskResult:
        """Block until the task has ended.

        Args:
            timeout: seconds; None: no limit but the tier's own.

        Raises:
            ConfigError: `timeout` is not a number.
            WaitTimeout: the task has not ended; it continues.
            Detached: called in a forked child.
        """
        self._check_process()
        left = None  # Deadline refuses nan, which would spin forever
        if timeout is not None:
            left = min(Deadline(timeout).timeout, threading.TIMEOUT_MAX)
        progress = self.progress
        with progress.changed:
            if not progress.changed.wait_for(lambda: progress.ended, left):
                raise WaitTimeout(
                    f"wait: after {timeout} s the {self.kind} of {progress.pages} pages has not "
                    "ended; wait longer, or cancel it"
                )
        return progress.result

    # ---- control

    def stop(self) -> TaskResult:
        """Start nothing more, and return the result so far. Does not wait: call it when the
        request runs with what was read. Pages whose read is in flight become ready later."""
        self._check_process()
        if self.progress.owner is not None:
            self.progress.owner.stop()
        return self.result

    def cancel(self) -> None:
        """Cancel the task. A queued task never starts; a running one ends after the storage's
        current call. Keys that were being read are abandoned at once; their pages are freed when
        that call returns. For an ended task with `hold`, frees the pages. Does nothing for other
        ended tasks."""
        self._check_process()
        if self.progress.owner is not None:
            self.progress.owner.cancel()

    def publish(self, pages: int) -> StorageTask:
        """Make the first pages of a `prefetch` with `hold` ready, and free the rest.

        Args:
            pages: at most `result.prefix`; usually the minimum over all ranks.

        Returns:
            A task that has ended or, if `pages` ends inside a group, one that reads the start of
            that group again. Wait for it before matching.

        Raises:
            ConfigError: the task was not a prefetch with `hold`, has not ended, was published
                before, or has fewer pages.
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
                "here, so it would never end; make what you need with a tier or client of this "
                "process"
            )

    def __repr__(self) -> str:
        done = f"{self.pages_done}/{self.progress.pages}"
        return f"<StorageTask {self.kind} {done} {self.state.value}>"


# ---- Policies, statistics

Unstored = Literal["failed", "refused", "absent", "gone", "unreachable", "disabled", "ended"]
"""Why pages that should have been stored were not; see `TierStats`."""


@dataclass(frozen=True)
class TierStats:
    """Totals of a tier since it was made, in pages unless stated otherwise. See `TaskResult`."""

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
    """In tasks, as are the following three."""
    tasks_failed: int
    queued: int
    running: int
    timeouts: int
    """Calls of the storage that did not return in time."""
    stuck: int
    """Timed-out calls that have not returned yet: each keeps a thread and its pages."""
    writing: int
    """Pages pinned for writes."""
    read_bytes: int
    """Bytes read by calls of the storage, late ones included, whether or not the pages were
    used."""
    written_bytes: int
    """Bytes stored by the storage."""
    evicted: int
    """Pages that the storage evicted to make room, as of our last write; see `StorageStats`."""
    state: Literal["closed", "open", "half-open"]
    """The breaker's state; open: the storage is not used."""
    read_call_seconds: float | None = None
    """Measured fixed cost of a reading call; None: not measured."""
    read_page_seconds: float | None = None
    """Measured cost of each page of a reading call; None: not measured."""
    skipped_short: int = 0
    """Part of `skipped`: pages of prompts with fewer tokens than `min_tokens`."""
    skipped_unseen: int = 0
    """Part of `skipped`: not offered `seen` times yet."""
    unstored: int = 0
    """Pages that were offered and worth writing, but not stored; the next seven count them by
    cause. The first of each cause is logged, but for `absent`."""
    unstored_failed: int = 0
    """The storage could not write them."""
    unstored_refused: int = 0
    """The storage had no room, or `write_pages` is 0."""
    unstored_absent: int = 0
    """The cache did not have them when they were offered: they were evicted, or never written."""
    unstored_gone: int = 0
    """They were evicted after they were offered, before their turn."""
    unstored_unreachable: int = 0
    """A page before them could not be stored, so they would not be found."""
    unstored_disabled: int = 0
    """The storage was disabled after failures."""
    unstored_ended: int = 0
    """The task ended early: its time was up, it was cancelled, or a call failed."""


TAKEN = ("read_bytes", "written_bytes", "evicted", "declined", "unstored_absent")
"""Totals that `BaseTier.take_figures` returns."""

__all__ = [
    "COUNTS",
    "TAKEN",
    "StorageTask",
    "TaskOwner",
    "TaskProgress",
    "TaskResult",
    "TaskState",
    "TierStats",
    "Unstored",
]
