"""One storage of a stack: when it is asked, for how long, and what becomes of a call that hangs.

The nearest storage of a stack is called in the caller's thread, with the caller's buffers, as if it
stood alone. Those behind it are called in threads of their own, with memory of their own: so a
storage far away that does not come back takes neither the caller's time nor its pages along.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from lightcache.errors import LightcacheError, StorageError
from lightcache.storage.arguments import Clock, Deadline, write_to
from lightcache.storage.breaker import Breaker, log, unread, unwritten
from lightcache.storage.jobs import checked_contains, checked_statuses
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    Storage,
    StorageStats,
    TokenRows,
    WriteResult,
)

Pages = npt.NDArray[np.uint8]
"""Shape (n, page_bytes)."""
R = TypeVar("R")

GRACE = 1.0
"""Seconds behind its time until a call counts as hanging."""
KEPT = 0.9
"""Of the time that we wait for a storage that is called apart, what the storage is told: one that
keeps to it is heard in time."""


@dataclass(frozen=True)
class LevelStats:
    """What a stack knows of one of its storages."""

    name: str
    """Its place and its kind, as messages call it."""
    state: Literal["closed", "open", "half-open"]
    """Of its breaker: open means that it is not asked."""
    hanging: int
    """Calls that have not come back in time, nor since. While there is one it is not asked."""
    promoted: int
    """Pages written to it because they were read from one behind it."""
    stats: StorageStats
    """Its own, of all that this stack asked of it."""


class NotAsked(StorageError):
    """The level is disabled, or hangs."""


class _Call:
    """One that is under way."""

    def __init__(self, what: str, end: float) -> None:
        self.what = what
        self.end = end
        self.late = False
        self.begun = False
        """By its thread, which ends it."""
        self.told = False
        """The breaker was told what became of it."""
        self.over = threading.Event()
        self.error = ""


class Level:
    """A storage, its breaker, and its calls. Any thread may use it."""

    def __init__(
        self, storage: Storage, name: str, breaker: Breaker, clock: Clock, *, apart: bool
    ) -> None:
        """
        Args:
            apart: called in threads of its own. Then no buffer that it gets may be the caller's.
        """
        self.storage = storage
        self.name = name
        self.apart = apart
        self.promoted = 0
        self._breaker = breaker
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()

    # ---- whether it is asked

    @property
    def shut(self) -> bool:
        """Whether a call now would not be made."""
        return self._hanging() > 0 or self._breaker.shut

    def _hanging(self) -> int:
        """Calls that hang. Those that are found out now are told to the breaker."""
        with self._lock:
            found = [one for one in self._calls if not one.late and self._clock() >= one.end]
            for one in found:
                one.late = True
            hanging = sum(one.late for one in self._calls)
        for one in found:
            log.warning("%s hangs in %s; it is not asked until that returns", self.name, one.what)
            self._tell(one, f"{one.what} hangs")
        return hanging

    def _tell(self, call: _Call, error: str) -> None:
        """Tell the breaker, unless it was told of this call before."""
        with self._lock:
            told, call.told = call.told, True
        if told:
            return
        if error:
            self._breaker.failure(error)
        else:
            self._breaker.success()

    # ---- calls: each raises StorageError if there is no answer, with our name in it

    def contains(self, keys: Keys, seconds: float) -> int:
        """See `Storage.contains`."""

        def run(left: float) -> int:
            return checked_contains(self.storage.contains(keys, timeout=left), len(keys))

        keys = keys.copy() if self.apart else keys
        return self._ask("contains", seconds, run, lambda found: "")

    def read(self, keys: Keys, buffers: Sequence[Buffer], seconds: float) -> ReadResult:
        """See `Storage.read`."""

        def run(left: float) -> ReadResult:
            result = self.storage.read(keys, buffers, timeout=left)
            checked_statuses("read", result.statuses, len(keys))
            return result

        return self._ask("read", seconds, run, unread)

    def write(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        parent: Keys | None,
        seconds: float,
        tokens: TokenRows | None = None,
    ) -> WriteResult:
        """See `Storage.write`."""

        def run(left: float) -> WriteResult:
            result = write_to(
                self.storage, keys, buffers, timeout=left, parent=parent, tokens=tokens
            )
            checked_statuses("write", result.statuses, len(keys))
            return result

        return self._ask("write", seconds, run, unwritten)

    def delete(self, keys: Keys, seconds: float) -> int:
        """See `Storage.delete`. Waits for writes under way: see `_behind_writes`."""
        keys = keys.copy() if self.apart else keys
        return self._ask(
            "delete",
            self._behind_writes(seconds),
            lambda left: self.storage.delete(keys, timeout=left),
            lambda n: "",
        )

    def clear(self, seconds: float) -> int:
        """See `Storage.clear`. Waits for writes under way, as `delete`."""
        return self._ask(
            "clear",
            self._behind_writes(seconds),
            lambda left: self.storage.clear(timeout=left),
            lambda n: "",
        )

    def stats(self) -> LevelStats:
        """As they are now."""
        hanging = self._hanging()
        return LevelStats(
            self.name, self._breaker.state, hanging, self.promoted, self.storage.stats()
        )

    def named(self, reason: str) -> str:
        """A reason of the storage's, with our name behind it: "timed out" stays in front."""
        return f"{reason} ({self.name})" if reason else ""

    # ---- how they are made

    def _behind_writes(self, seconds: float) -> float:
        """Wait until those writes have returned that are under way now, and say what is left of the
        time. Of one in a thread of its own whoever asked for it may have gone, and removes now what
        it would bring back. One in its caller's thread has its caller, who has not gone.

        Raises:
            StorageError: one has not returned in this time.
        """
        if not self.apart:
            return seconds
        deadline = Deadline(seconds)
        with self._lock:
            writes = [call for call in self._calls if call.what == "write"]
        for call in writes:
            if not call.over.wait(min(deadline.left, threading.TIMEOUT_MAX)):
                raise StorageError(
                    self.named(f"timed out: a write has not returned in {seconds:g} s; call again")
                )
        return deadline.left

    def _ask(
        self, what: str, seconds: float, run: Callable[[float], R], bad: Callable[[R], str]
    ) -> R:
        if seconds <= 0.0:
            raise StorageError(self.named(f"timed out: no time was left for {what}"))
        if self._hanging():
            raise NotAsked(self.named("a call hangs; it is not asked until that returns"))
        call = _Call(what, self._clock() + seconds + GRACE)
        answers: list[R] = []
        try:  # around the breaker as well: an interrupt may come behind any line
            if not self._breaker.allow():
                raise NotAsked(self._breaker.reason)
            if not self.apart:
                self._carry_out(call, lambda: run(seconds), bad, answers)
            elif not self._wait(call, lambda: run(seconds * KEPT), bad, answers, seconds):
                raise StorageError(
                    self.named(f"timed out: {what} has not returned in {seconds:g} s")
                )
        except Exception:
            raise
        except BaseException:
            if not (self.apart and call.begun):  # else its thread ends it
                self._end(call, "interrupted")
            raise
        if not answers:
            raise StorageError(self.named(call.error))
        return answers[0]

    def _wait(
        self,
        call: _Call,
        run: Callable[[], R],
        bad: Callable[[R], str],
        answers: list[R],
        seconds: float,
    ) -> bool:
        """Make a call in a thread of its own; False: it goes on, and nobody waits for it."""
        with self._lock:  # before the thread does so: whoever removes something waits for it
            self._calls.add(call)
        thread = threading.Thread(
            target=self._carry_out,
            args=(call, run, bad, answers),
            name=f"lightcache-stack-{call.what}",
            daemon=True,  # one that hangs does not keep the process alive
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more threads here
            self._end(call, str(error))
            return True
        if call.over.wait(min(seconds, threading.TIMEOUT_MAX)):
            return True
        self._tell(call, f"{call.what} has not returned in {seconds:g} s")
        return False

    def _carry_out(
        self, call: _Call, run: Callable[[], R], bad: Callable[[R], str], answers: list[R]
    ) -> None:
        error = "interrupted"
        try:
            with self._lock:
                self._calls.add(call)
            call.begun = True
            answer = run()
            error = bad(answer)
            answers.append(answer)
        except Exception as raised:  # a text, as a traceback would keep views of buffers
            error = str(raised) if isinstance(raised, LightcacheError) else repr(raised)
        finally:
            self._end(call, error)

    def _end(self, call: _Call, error: str) -> None:
        call.error = error
        with self._lock:
            self._calls.discard(call)
        self._tell(call, error)
        call.over.set()


def own_memory(pages: int, page_bytes: int) -> Pages:
    """Memory of ours for so many pages. It begins at a page of the machine, as direct I/O wants;
    huge ones where there are some, since touching new memory for the first time is what costs most:
    for 32 MiB 13 ms instead of 42, while copying them takes 9.

    Raises:
        StorageError: there is not so much.
    """
    try:
        made = mmap.mmap(-1, pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as error:
        raise StorageError(f"no memory for {pages} pages of {page_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel that has no huge ones
        made.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(made, np.uint8).reshape(pages, page_bytes)


__all__ = ["GRACE", "KEPT", "Level", "LevelStats", "NotAsked", "Pages", "own_memory"]
