"""StorageTask: a transfer between a cache and a storage that somebody else carries out."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from lightcache.errors import ConfigError, Detached, WaitTimeout
from lightcache.storage.arguments import Deadline


class TaskState(Enum):
    """How far a task has come."""

    NOT_STARTED = "not started"
    RUNNING = "running"
    FINISHED = "finished"
    """It ran to its end. Pages that failed one by one are in the result."""
    FAILED = "failed"
    """It was broken off: a call failed or did not come back, its time was up, it was cancelled,
    the storage is disabled. What was done before that is in the result, and stays."""


@dataclass(frozen=True)
class TaskResult:
    """What a task has done so far, in pages; final when it is over."""

    pages: int
    """Asked for."""
    prefix: int
    """Of these, from the first on: ready in the cache (prefetch), or stored (write)."""
    loaded: int
    """Read from the storage and ready in the cache now."""
    stored: int
    """Written to the storage."""
    present: int
    """Were there already: in the cache (prefetch), in the storage (write)."""
    absent: int
    """Of a prefetch: not stored, or behind one that is not. The request computes them."""
    failed: int
    """Could not be read or written."""
    corrupt: int
    """Stored, but not as they should be."""
    refused: int
    """Of a write: the storage has no room, or the queue has none."""
    skipped: int
    """Of a write: prompt too short, not seen often enough, evicted before, or behind a page that
    could not be stored."""
    busy: int
    """Of a prefetch: somebody else is reading or computing them."""
    no_room: int
    """Of a prefetch: the cache had no page for them."""
    declined: int
    """Of a prefetch: computing them is faster than reading them. See `prefill_tokens_per_s` of
    StorageTier; `reasons` has both figures."""
    reasons: tuple[str, ...]
    """What went wrong, each once, in order."""


COUNTS = tuple(
    name for name in TaskResult.__dataclass_fields__ if name not in ("pages", "prefix", "reasons")
)


class Carrier(Protocol):
    """Who carries a task out, as far as the task knows."""

    def take(self) -> None:
        """See `StorageTask.take`."""

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""

    def stop(self) -> None:
        """Begin nothing more; what was done counts."""

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        ...


class StorageTask:
    """What `StorageTier.write` and `prefetch` return. Any thread may use it; no forked child, which
    may look at it, and is refused (Detached) whatever waits for it or decides about it."""

    def __init__(self, kind: Literal["read", "write"], pages: int, page_tokens: int | None) -> None:
        """For StorageTier."""
        self.kind = kind
        self._pages = pages
        self._page_tokens = page_tokens
        self._changed = threading.Condition()
        self._state = TaskState.NOT_STARTED
        self._counts: Counter[str] = Counter()
        self._prefix = 0
        self._reasons: list[str] = []
        self._pid = os.getpid()
        self._job: Carrier | None = None
        self._observer: Callable[[], None] | None = None
        self._settled = False
        """It is over, and the tier has counted what it did."""

    # ---- looking at it

    @property
    def state(self) -> TaskState:
        """How far it has come."""
        with self._changed:
            return self._state

    @property
    def over(self) -> bool:
        """Whether it is FINISHED or FAILED."""
        return self.state in _OVER

    @property
    def pages_done(self) -> int:
        """The same as `result.prefix`."""
        with self._changed:
            return self._prefix

    @property
    def tokens(self) -> int:
        """Tokens in these pages.

        Raises:
            ConfigError: the cache was not told its `page_tokens`.
        """
        if self._page_tokens is None:
            raise ConfigError("tokens: this cache was created without page_tokens")
        return self.pages_done * self._page_tokens

    @property
    def result(self) -> TaskResult:
        """What it has done so far."""
        with self._changed:
            counts = {name: self._counts[name] for name in COUNTS}
            return TaskResult(
                pages=self._pages, prefix=self._prefix, reasons=tuple(self._reasons), **counts
            )

    def wait(self, timeout: float | None = None) -> TaskResult:
        """Block until it is over.

        Args:
            timeout: seconds; None: as long as it may take, which the tier bounds.

        Raises:
            ConfigError: `timeout` is no number.
            WaitTimeout: it is not over; it goes on.
            Detached: called in a forked child.
        """
        self._check_process()
        left = None  # a nan would be waited for without sleeping, and without an end
        if timeout is not None:
            left = min(Deadline(timeout).timeout, threading.TIMEOUT_MAX)
        with self._changed:
            if not self._changed.wait_for(lambda: self._state in _OVER, left):
                raise WaitTimeout(
                    f"wait: after {timeout} s the {self.kind} of {self._pages} pages is not over; "
                    "wait longer, or cancel it"
                )
        return self.result

    # ---- deciding about it

    def take(self) -> TaskResult:
        """What an engine calls when it wants to run the request: waits as the tier's `read_policy`
        says, lets the task begin nothing more, and returns what there is. Pages whose read is
        under way still become ready, later."""
        self._check_process()
        if self._job is not None:
            self._job.take()
        return self.result

    def cancel(self) -> None:
        """Give up: what is queued is never begun, what runs ends behind the storage's current call.
        Keys that were being read are abandoned at once; pages go back when that call returns, and
        `wait` says when. Of what is over, with `hold`: gives the pages back. Else does nothing.
        """
        self._check_process()
        if self._job is not None:
            self._job.cancel()

    def publish(self, pages: int) -> StorageTask:
        """Of a `prefetch` with `hold`: make the first pages ready and give the rest back, unused.

        Args:
            pages: at most `result.prefix`; usually the least that all ranks could read.

        Returns:
            A task that is over, or one that reads a few pages again: when `pages` ends inside of a
            group. Wait for it before matching.

        Raises:
            ConfigError: not such a task, not finished, published before, or more than it has.
            Abandoned: the namespace was cleared meanwhile; everything was given back.
            Detached: called in a forked child.
        """
        self._check_process()
        if self._job is None:
            if self.kind == "read" and type(pages) is int and pages == 0:
                return self  # declined, or the storage is disabled: what others agreed on is none
            raise ConfigError("publish: this task holds nothing; prefetch with hold=True")
        return self._job.publish(pages)

    def _check_process(self) -> None:
        """Before any lock: at the fork another thread may have had it."""
        if os.getpid() != self._pid:
            raise Detached(
                "this storage task belongs to the process that forked us, which carries it out; "
                "ask for what is needed with a tier or client made here"
            )

    # ---- for the tier

    def _start(self) -> None:
        with self._changed:
            if self._state is TaskState.NOT_STARTED:
                self._state = TaskState.RUNNING
        self._notify()

    def _count(self, **pages: int) -> None:
        with self._changed:
            self._counts.update(pages)

    def _reach(self, prefix: int) -> None:
        with self._changed:
            self._prefix = prefix
        self._notify()

    def _say(self, reason: str) -> None:
        with self._changed:
            if reason and reason not in self._reasons:
                self._reasons.append(reason)

    def _end(
        self,
        reason: str = "",
        *,
        failed: bool,
        count: Callable[[TaskResult], None] | None = None,
    ) -> bool:
        """False: it was over before. Else `count` is told the result first: who waits for the end
        finds it in the tier's figures."""
        self._say("" if self.over else reason)
        with self._changed:
            if self._state in _OVER:
                return False
            if count is not None:
                count(self.result)
            self._state = TaskState.FAILED if failed else TaskState.FINISHED
            self._changed.notify_all()
            return True

    def _become(
        self, state: TaskState, prefix: int, counts: Mapping[str, int], reasons: Sequence[str]
    ) -> None:
        """What somebody else says of it. Nothing changes behind its end."""
        with self._changed:
            if self._state not in _OVER:
                self._state, self._prefix = state, prefix
                self._counts = Counter(counts)
                self._reasons = list(reasons)
                self._changed.notify_all()

    def _stop(self) -> None:
        """Let it begin nothing more."""
        self._check_process()
        if self._job is not None:
            self._job.stop()

    def _watch(self, observer: Callable[[], None]) -> None:
        """Call this when it starts, gets on, and is settled; and now. It is called in the tier's
        threads, with no lock held, and does not block."""
        self._observer = observer
        observer()

    def _settle(self) -> None:
        self._settled = True
        self._notify()

    def _notify(self) -> None:
        if self._observer is not None:
            self._observer()

    def __repr__(self) -> str:
        return f"<StorageTask {self.kind} {self.pages_done}/{self._pages} {self.state.value}>"


_OVER = (TaskState.FINISHED, TaskState.FAILED)

__all__ = ["COUNTS", "Carrier", "StorageTask", "TaskResult", "TaskState"]
