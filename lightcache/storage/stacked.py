"""Two storages as one: a fast and small near one, and a slow and large far one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from lightcache import _arguments
from lightcache.breaker import CircuitBreaker
from lightcache.errors import ConfigError, LightcacheError, StorageError
from lightcache.shm.waiting import Condition
from lightcache.storage.common import (
    Clock,
    Counters,
    Deadline,
    Options,
    Owned,
    check_batch,
    check_keys,
    check_parent,
    checked_contains,
    checked_statuses,
    log,
    own_memory,
    storage_breaker,
    timed_out,
    why_unread,
    why_unwritten,
)
from lightcache.storage.executor import Call, Executor, Late
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    ReadStatus,
    Storage,
    StorageSpec,
    StorageStats,
    WriteResult,
    WriteStatus,
)

# ---- One level of a stack
#
# The near level is called in the caller's thread with the caller's buffers, as if it were alone.
# The far level is called in threads of its own with memory of its own, so a far storage that does
# not return holds up neither the caller nor the caller's pages.

Pages = npt.NDArray[np.uint8]
"""Shape (n, page_bytes)."""
R = TypeVar("R")
CALLS = 16
"""Maximum number of calls of one storage at a time."""
PROBE = 5.0
"""Seconds that a probe of a disabled storage may take."""
GRACE = 1.0
"""Seconds after its time until a call counts as hanging."""
KEPT = 0.9
"""The fraction of the wait for a far storage that is passed to the storage as its timeout, so that
its answer arrives in time."""


@dataclass(frozen=True)
class LevelStats:
    """The state of one storage of a stack."""

    name: str
    """Its position and kind, as in messages."""
    state: Literal["closed", "open", "half-open"]
    """The state of its breaker; open: it is not asked."""
    hanging: int
    """Late calls that have not returned yet. While there is one, the storage is not asked."""
    promoted: int
    """Pages written to it after they were read from the far storage."""
    stats: StorageStats
    """The storage's own, for all calls of this stack."""


class NotAsked(StorageError):
    """The level is disabled, or a call of it hangs."""


class Level:
    """A storage, its breaker, and its calls. Any thread may use it."""

    def __init__(
        self, storage: Storage, name: str, breaker: CircuitBreaker, clock: Clock, *, apart: bool
    ) -> None:
        """
        Args:
            apart: it is called in threads of its own. Then it must not get the caller's buffers.
        """
        self.storage = storage
        self.name = name
        self.apart = apart
        self.promoted = 0
        self._breaker = breaker
        self._executor = Executor(CALLS, "stack", clock=clock)
        self._writes: list[Call[Any]] = []
        self._key: Keys | None = None  # the last key asked for; a probe uses it

    # ---- availability

    @property
    def shut(self) -> bool:
        """True if a call would be refused now. Starts a probe if one is due."""
        if self._hanging():
            return True
        try:  # around the breaker as well: an interrupt may come after any line
            if self._breaker.probe():
                self._executor.submit(
                    self._find_out,
                    PROBE + GRACE,
                    what="probe",
                    late=self._probe_hangs,
                )
        except LightcacheError as error:
            self._breaker.failure(str(error))
        except BaseException:
            self._breaker.leave()
            raise
        return self._breaker.shut

    def _hanging(self) -> int:
        """The number of calls that hang."""
        self._executor.poll()
        return self._executor.late

    def _probe_hangs(self) -> None:
        self._breaker.failure("the probe has not returned")

    def _find_out(self) -> None:
        """Probe whether the storage answers, in a thread of its own: no call waits for it."""
        try:
            if self._key is not None:
                checked_contains(self.storage.contains(self._key, timeout=PROBE), 1)
        except Exception as error:
            self._breaker.failure(str(error))
        else:
            self._breaker.success()

    # ---- calls: each raises StorageError, with the level's name, if there is no answer

    def contains(self, keys: Keys, seconds: float) -> int:
        """See `Storage.contains`."""

        def run(left: float) -> int:
            return checked_contains(self.storage.contains(keys, timeout=left), len(keys))

        keys = keys.copy() if self.apart else keys
        self._key = keys[:1].copy()
        return self._ask("contains", seconds, run, lambda found: "")

    def read(self, keys: Keys, buffers: Sequence[Buffer], seconds: float) -> ReadResult:
        """See `Storage.read`."""
        self._key = keys[:1].copy()

        def run(left: float) -> ReadResult:
            result = self.storage.read(keys, buffers, timeout=left)
            checked_statuses("read", result.statuses, len(keys))
            return result

        return self._ask("read", seconds, run, why_unread)

    def write(
        self, keys: Keys, buffers: Sequence[Buffer], parent: Keys | None, seconds: float
    ) -> WriteResult:
        """See `Storage.write`."""

        def run(left: float) -> WriteResult:
            self._key = keys[:1].copy()
            result = self.storage.write(keys, buffers, timeout=left, parent=parent)
            checked_statuses("write", result.statuses, len(keys))
            return result

        return self._ask("write", seconds, run, why_unwritten)

    def delete(self, keys: Keys, seconds: float) -> int:
        """See `Storage.delete`. Waits for writes in flight: see `_after_writes`."""
        keys = keys.copy() if self.apart else keys
        return self._ask(
            "delete",
            self._after_writes(seconds),
            lambda left: self.storage.delete(keys, timeout=left),
            lambda n: "",
            though_shut=True,
        )

    def clear(self, seconds: float) -> int:
        """See `Storage.clear`. Waits for writes in flight, as `delete`."""
        return self._ask(
            "clear",
            self._after_writes(seconds),
            lambda left: self.storage.clear(timeout=left),
            lambda n: "",
            though_shut=True,
        )

    def stats(self) -> LevelStats:
        """The current state."""
        hanging = self._hanging()
        return LevelStats(
            self.name, self._breaker.state, hanging, self.promoted, self.storage.stats()
        )

    def named(self, reason: str) -> str:
        """A reason of the storage with our name appended; it keeps its "timed out" prefix."""
        return f"{reason} ({self.name})" if reason else ""

    # ---- making calls

    def _after_writes(self, seconds: float) -> float:
        """Wait for the writes in flight; returns the seconds left. A caller may have timed out on a
        write that runs in a thread of its own, and such a write would bring removed pages back. A
        write in its caller's thread is waited for anyway.

        Raises:
            StorageError: one has not returned in this time.
        """
        if not self.apart:
            return seconds
        deadline = Deadline(seconds)
        for call in list(self._writes):
            if not call.wait(deadline):
                raise StorageError(
                    self.named(f"timed out: a write has not returned in {seconds:g} s; call again")
                )
        return deadline.left

    def _ask(
        self,
        what: str,
        seconds: float,
        run: Callable[[float], R],
        bad: Callable[[R], str],
        *,
        though_shut: bool = False,
    ) -> R:
        if seconds <= 0.0:
            raise StorageError(self.named(f"timed out: no time was left for {what}"))
        if self._hanging():
            raise NotAsked(self.named("a call hangs; it is not asked until it returns"))
        # A breaker is for calls that can do without the storage. A removal cannot: it is tried.
        if self.shut and not though_shut:
            raise NotAsked(self._breaker.reason)
        try:
            answer = self._answer(what, seconds, run)
            error = bad(answer)
        except Late:
            raise StorageError(self.named(f"timed out: {what} has come back late")) from None
        except Exception as raised:  # keep only its text: a traceback keeps views of buffers
            error = str(raised) if isinstance(raised, LightcacheError) else repr(raised)
            self._breaker.failure(error)
            raise StorageError(self.named(error)) from None
        if error:
            self._breaker.failure(error)
        else:
            self._breaker.success()
        return answer

    def _answer(self, what: str, seconds: float, run: Callable[[float], R]) -> R:
        def hangs() -> None:
            log.warning("%s hangs in %s; it is not asked until that returns", self.name, what)
            if not self.apart:  # else the breaker was told when the wait ended
                self._breaker.failure(f"{what} hangs")

        if not self.apart:
            end = self._executor.now + seconds + GRACE
            return self._executor.call_here(lambda: run(seconds), end, what, hangs)
        call = self._executor.submit(
            lambda: run(seconds * KEPT), seconds + GRACE, what=what, late=hangs
        )
        if what == "write":  # removals wait for it
            self._writes = [*(each for each in self._writes if not each.ended), call]
        try:
            if not call.wait(Deadline(seconds)):
                raise StorageError(f"timed out: {what} has not returned in {seconds:g} s")
            return call.result()
        finally:
            call.leave()

    def close(self) -> None:
        """Close the storage, even if calls of it hang."""
        self._executor.close(0.0)
        self.storage.close()


# ---- Promotion: pages read from the far level are written to the near one in the background
#
# The reader does not wait. Pages are queued in memory of the stack, in a bounded number of bytes;
# pages that do not fit are not promoted until they are read again.
#
# Deleted pages must not come back: a page may have been read before it was deleted, and still be
# queued here. So a deletion empties the queue and waits for the page being written. It begins a new
# generation before it starts and another one after it, and `put` refuses pages whose read began in
# an earlier generation.


@dataclass(frozen=True)
class Promotion:
    """Consecutive pages of a prefix."""

    keys: Keys
    pages: Pages
    parent: Keys | None
    bytes: int
    """The size of the buffer that `pages` is a view of, which is kept until they are written."""


class Promoter:
    """A queue and the thread that writes it, started with the first promotion."""

    def __init__(self, level: Level, most_bytes: int, seconds: float) -> None:
        """
        Args:
            level: the level that pages are promoted to.
            most_bytes: maximum bytes of pages queued or being written; 0: nothing is promoted.
            seconds: time limit for writing one promotion.
        """
        self.level = level
        self.most_bytes = most_bytes
        self._seconds = seconds
        self._changed = Condition()
        self._queue: deque[Promotion] = deque()
        self._bytes = 0
        self._writing = False
        self._paused = 0
        self._generation = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def generation(self) -> int:
        """Fetch it before a read of the storage, and pass it to `put`."""
        with self._changed:
            return self._generation

    def put(self, promotion: Promotion, generation: int) -> bool:
        """Queue pages; False: they are not promoted. Does not block."""
        with self._changed:
            full = self._bytes + promotion.bytes > self.most_bytes
            if full or generation != self._generation or self._closing or self.level.shut:
                return False
            if not self._works():
                return False
            self._queue.append(promotion)
            self._bytes += promotion.bytes
            self._changed.notify_all()
        return True

    def _works(self) -> bool:
        """Start the thread if there is none; False: that failed. The thread is assigned before it
        starts, so that an interrupt cannot lead to two."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._work, name="lightcache-stack-promote", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # the system starts no more threads
                self._thread = None
                return False
        return True

    def settle(self, timeout: float) -> bool:
        """Wait until all promotions are done; False: the time is up.

        Raises:
            ConfigError: `timeout` is not a number.
        """
        seconds = min(Deadline(timeout).left, threading.TIMEOUT_MAX)
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._writing), seconds)

    @contextlib.contextmanager
    def paused(self, deadline: Deadline) -> Iterator[None]:
        """Promote nothing meanwhile; pages read before or meanwhile are not promoted later either.

        Raises:
            StorageError: the page being written is not done by the deadline.
        """
        entered = 0
        try:  # around the count as well: an interrupt may come after any line
            with self._changed:
                self._paused, entered = self._paused + 1, 1
                self._begin_generation()
                quiet = self._changed.wait_for(
                    lambda: not self._writing, min(deadline.left, threading.TIMEOUT_MAX)
                )
            if not quiet:
                raise StorageError(f"{deadline.reason}; a page is still being promoted, call again")
            yield
        finally:
            with self._changed:
                self._paused -= entered
                self._begin_generation()

    def _begin_generation(self) -> None:
        self._generation += 1
        self._bytes -= sum(promotion.bytes for promotion in self._queue)
        self._queue.clear()
        self._changed.notify_all()

    def stop(self) -> None:
        """Start nothing more."""
        with self._changed:
            self._closing = True
            self._begin_generation()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end, after `stop`; False: it still writes."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    # ---- the thread

    def _work(self) -> None:
        while (promotion := self._next()) is not None:
            try:
                self._write(promotion)
            finally:
                with self._changed:
                    self._writing = False
                    self._bytes -= promotion.bytes
                    self._changed.notify_all()

    def _next(self) -> Promotion | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (self._queue and not self._paused))
            if self._closing:
                return None
            self._writing = True
            return self._queue.popleft()

    def _write(self, promotion: Promotion) -> None:
        keys, pages = promotion.keys, list(promotion.pages)
        try:
            result = self.level.write(keys, pages, promotion.parent, self._seconds)
        except LightcacheError as error:  # the breaker was told, and warns
            log.debug("%d pages were not promoted: %s", len(keys), error)
            return
        self.level.promoted += result.count(WriteStatus.STORED)


# ---- One call of a stack
#
# The near level gets half of the time if the far one can be asked, and the far one gets all that is
# left. A near level that uses up its time leaves as much to the far one.

PIECE = 64 << 20
"""Bytes of our own memory that one call uses at a time; a larger page is a piece by itself."""


def share(levels: Sequence[Level], number: int, deadline: Deadline) -> Deadline:
    """The deadline for a call of one level."""
    more = any(not level.shut for level in levels[number + 1 :])
    return Deadline(deadline.left / 2 if more else deadline.left)


class Asking:
    """A `contains`: the number of leading keys that any level has."""

    def __init__(self, levels: Sequence[Level], keys: Keys, deadline: Deadline) -> None:
        """Asks no level yet."""
        self._levels = levels
        self._keys = keys
        self._deadline = deadline
        self._late = False
        self.late = False
        """A level timed out, so the answer may be too small."""

    def run(self) -> int:
        """Ask each level, starting at the first key that no level has confirmed. A level that fails
        counts as empty.

        Raises:
            StorageError: all levels failed.
        """
        position = answers = 0
        keys, deadline = self._keys, self._deadline
        without = [-1] * len(self._levels)  # for each level, the last key that it reported absent
        why = ""
        while position < len(keys):
            before = position
            for number, level in enumerate(self._levels):
                if without[number] >= position or position == len(keys):
                    continue
                try:
                    position += level.contains(
                        keys[position:], share(self._levels, number, deadline).left
                    )
                    answers += 1
                    without[number] = position
                except StorageError as error:
                    why = why or str(error)
                    self._late |= timed_out(str(error), "contains")
                    without[number] = len(keys)
            if position == before:
                break
        self.late = self._late and position < len(keys)
        if len(keys) and not answers:
            raise StorageError(why)
        return position


class Reading:
    """A `read`: takes each page from the nearest level that has it."""

    def __init__(
        self, levels: Sequence[Level], keys: Keys, views: list[memoryview], deadline: Deadline
    ) -> None:
        """Reads nothing yet."""
        self._levels = levels
        self._keys = keys
        self._views = views
        self._deadline = deadline
        self._statuses = [ReadStatus.ABSENT] * len(keys)
        self._lacking: set[int] = set()
        """Keys that the near level lacks or has corrupt; they are promoted."""
        self._reason = ""
        self._answered = False
        self._heard: set[int] = set()
        """Keys for which the current level has returned a status."""
        self._late = False
        self.late = False
        """A level timed out, so pages are missing."""

    def run(self, promoter: Promoter) -> ReadResult:
        """Ask each level for the pages still missing.

        Raises:
            StorageError: all levels failed.
        """
        generation = promoter.generation
        for number, level in enumerate(self._levels):
            missing = [i for i, status in enumerate(self._statuses) if status is not ReadStatus.OK]
            if not missing:
                break
            if self._deadline.passed:
                self._too_late(missing)
                break
            self._heard.clear()
            limit = share(self._levels, number, self._deadline)
            try:
                if not level.apart:
                    self._near(level, missing, limit)
                else:
                    for promotion in self._far(level, missing, limit):
                        promoter.put(promotion, generation)
            except StorageError as error:
                self._say(str(error))
                if not isinstance(error, NotAsked):
                    left = [i for i in missing if i not in self._heard]
                    self._note(left, [ReadStatus.FAILED] * len(left))
        self.late = self.late or (self._late and ReadStatus.FAILED in self._statuses)
        if not self._answered and len(self._keys):
            raise StorageError(self._reason)
        bad = {ReadStatus.FAILED, ReadStatus.CORRUPT} & set(self._statuses)
        return ReadResult(tuple(self._statuses), self._reason if bad else "")

    def _too_late(self, missing: list[int]) -> None:
        """The time is up before all levels were asked for these: fail them."""
        self.late = True
        self._answered = True
        for i in missing:
            if self._statuses[i] is ReadStatus.ABSENT:
                self._statuses[i] = ReadStatus.FAILED
        self._reason = self._reason or self._deadline.reason

    def _near(self, level: Level, missing: list[int], limit: Deadline) -> None:
        """Read into the caller's buffers."""
        keys = self._keys if len(missing) == len(self._keys) else self._keys[missing]
        result = level.read(keys, [self._views[i] for i in missing], limit.left)
        self._take(level, missing, result)

    def _far(self, level: Level, missing: list[int], limit: Deadline) -> Iterator[Promotion]:
        """Read into memory of our own, copy the good pages, and yield those to promote."""
        for piece in pieces(missing, len(self._views[0])):
            pages = own_memory(len(piece), len(self._views[0]))
            result = level.read(self._keys[piece], list(pages), limit.left)
            for row, i, status in zip(pages, piece, result.statuses, strict=True):
                if status is ReadStatus.OK:
                    self._views[i][:] = row.data
            self._take(level, piece, result)
            rows = [
                row
                for row, (i, status) in enumerate(zip(piece, result.statuses, strict=True))
                if status is ReadStatus.OK and i in self._lacking
            ]
            yield from self._promotions(piece, pages, rows)

    def _promotions(self, piece: list[int], pages: Pages, rows: list[int]) -> Iterator[Promotion]:
        """One promotion for each run of keys without a gap, in which each key is the parent of the
        next."""
        first = 0
        for end in range(1, len(rows) + 1):
            if end < len(rows) and piece[rows[end]] == piece[rows[end - 1]] + 1:
                continue
            begin, stop = rows[first], rows[end - 1] + 1
            key = piece[begin]
            keys = self._keys[key : key + stop - begin].copy()
            parent = self._keys[key - 1 : key].copy() if key else None
            yield Promotion(keys, pages[begin:stop], parent, pages.nbytes)
            first = end

    def _take(self, level: Level, which: list[int], result: ReadResult) -> None:
        self._answered = True
        self._note(which, result.statuses)
        self._say(level.named(result.reason))

    def _say(self, reason: str) -> None:
        self._late |= timed_out(reason)
        self._reason = self._reason or reason

    def _note(self, which: list[int], statuses: Sequence[ReadStatus]) -> None:
        """Merge the statuses of a level. ABSENT never replaces FAILED or CORRUPT."""
        self._heard.update(which)
        for i, status in zip(which, statuses, strict=True):
            if status in (ReadStatus.ABSENT, ReadStatus.CORRUPT):
                self._lacking.add(i)
            if status is not ReadStatus.ABSENT:
                self._statuses[i] = status


class Writing:
    """A `write`: passes every page to every level."""

    def __init__(
        self,
        levels: Sequence[Level],
        keys: Keys,
        views: list[memoryview],
        parent: Keys | None,
        deadline: Deadline,
    ) -> None:
        """Writes nothing yet."""
        self._levels = levels
        self._keys = keys
        self._views = views
        self._parent = parent
        self._deadline = deadline
        self._statuses: list[WriteStatus | None] = [None] * len(keys)
        self._reason = ""
        self._late = False
        self.late = False
        """A level timed out, so pages are not stored."""

    def run(self) -> WriteResult:
        """Write the pages to each level.

        Raises:
            StorageError: all levels failed.
        """
        answered = False
        for number, level in enumerate(self._levels):
            if self._deadline.passed:
                self._too_late()
                answered = True
                break
            limit = share(self._levels, number, self._deadline)
            done = 0  # keys for which this level has returned a status
            try:
                for piece in self._pieces(level):
                    self._write(level, piece, limit)
                    answered, done = True, piece.stop
            except StorageError as error:
                self._say(str(error))
                if not isinstance(error, NotAsked):
                    left = range(done, len(self._keys))
                    self._note(left, [WriteStatus.FAILED] * len(left))
        statuses = tuple(
            WriteStatus.FAILED if status is None else status for status in self._statuses
        )
        self.late = self.late or (self._late and WriteStatus.FAILED in statuses)
        if not answered and len(self._keys):
            raise StorageError(self._reason)
        bad = {WriteStatus.FAILED, WriteStatus.REFUSED} & set(statuses)
        return WriteResult(statuses, self._reason if bad else "")

    def _pieces(self, level: Level) -> Iterator[range]:
        if level.apart:
            for piece in pieces(range(len(self._keys)), len(self._views[0]) if self._views else 1):
                yield range(piece[0], piece[-1] + 1)
        else:
            yield range(len(self._keys))

    def _write(self, level: Level, piece: range, limit: Deadline) -> None:
        chosen = slice(piece.start, piece.stop)
        parent = self._keys[piece.start - 1 : piece.start] if piece.start else self._parent
        views, keys = self._views[chosen], self._keys[chosen]
        if not level.apart:
            result = level.write(keys, views, parent, limit.left)
        else:
            pages = own_memory(len(views), len(views[0]))
            for row, view in zip(pages, views, strict=True):
                row[:] = view
            parent = None if parent is None else parent.copy()
            result = level.write(keys.copy(), list(pages), parent, limit.left)
        self._note(piece, result.statuses)
        self._say(level.named(result.reason))

    def _say(self, reason: str) -> None:
        self._late |= timed_out(reason)
        self._reason = self._reason or reason

    def _note(self, which: range, statuses: Sequence[WriteStatus]) -> None:
        """Merge the statuses of a level: that of the last level that has the page; if none has it,
        FAILED replaces REFUSED."""
        has = (WriteStatus.STORED, WriteStatus.PRESENT)
        for i, status in zip(which, statuses, strict=True):
            before = self._statuses[i]
            worse = before is None or (before not in has and status is WriteStatus.FAILED)
            if status in has or worse:
                self._statuses[i] = status

    def _too_late(self) -> None:
        self.late = None in self._statuses or WriteStatus.REFUSED in self._statuses
        self._note(range(len(self._keys)), [WriteStatus.FAILED] * len(self._keys))
        self._reason = self._reason or self._deadline.reason


def pieces(numbers: Sequence[int], page_bytes: int) -> Iterator[list[int]]:
    """Split page numbers into pieces of at most `PIECE` bytes."""
    most = max(1, PIECE // page_bytes)
    for first in range(0, len(numbers), most):
        yield list(numbers[first : first + most])


# ---- The storage

_CLOSING = 10.0  # seconds that `close` waits for the page being promoted


class StackedStorage(Owned):
    """Two storages, the nearer first. Every page is written to both. A page is read from the near
    storage if it is there; otherwise it is read from the far one, and then written to the near one
    in the background.

    A storage that fails, hangs or refuses loses only the pages that it alone has: each storage has
    its own breaker and a share of a call's time. The near one is called in the caller's thread with
    the caller's buffers, at the cost it has alone. The far one is called in threads of its own with
    up to 64 MiB (or one page) of our memory for a call, so if it does not return, it keeps neither
    the caller nor the caller's pages.

    The near storage gets pages that it missed while it was not asked when they are read from the
    far one or written again. Pages that it evicts are not moved: the far one has them already.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        *,
        names: Sequence[str] | None = None,
        promote_bytes: int = 256 << 20,
        promote_seconds: float = 5.0,
        failures: int = 3,
        retry: float = 30.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Takes over the storages, and closes them.

        Args:
            storages: two, the nearer first, opened for the same spec; or one, if the other is
                missing.
            names: for messages; None: the names of their classes.
            promote_bytes: maximum bytes of pages queued for the near storage; further pages are not
                promoted. 0: none is.
            promote_seconds: time limit for writing the promoted pages of one read; `delete`,
                `clear` and `close` wait for it.
            failures: number of failures of one storage in a row after which it is not asked. Fewer
                than a tier's, so that one failing storage does not disable the whole stack.
            retry: seconds until it is tried again.
            clock: in seconds, for breakers and hanging calls; for tests.

        Raises:
            ConfigError: no storage, more than two, or different specs; or an argument is out of
                range.
        """
        _fitting(storages)
        self.spec = storages[0].spec
        for name, seconds in (("retry", retry), ("promote_seconds", promote_seconds)):
            if Deadline(seconds, clock, name).timeout < 0:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        _arguments.count(failures, "failures", 1, 1 << 30)
        kinds = names or [type(storage).__name__ for storage in storages]
        if len(kinds) != len(storages):
            raise ConfigError(f"names: expected {len(storages)}, one a storage, found {len(kinds)}")
        self._levels: list[Level] = []
        for number, (storage, kind) in enumerate(zip(storages, kinds, strict=True), 1):
            name = f"storage {number} of {len(storages)}, {kind}"
            breaker = storage_breaker(failures, retry, clock, name)
            self._levels.append(Level(storage, name, breaker, clock, apart=number > 1))
        most = _arguments.count(promote_bytes, "promote_bytes", 0, 1 << 50)
        self._promoter = Promoter(self._levels[0], most, promote_seconds)
        self._counters = Counters()
        super().__init__()

    # ---- the protocol

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`. The prefix may be spread over both storages. A storage that fails
        or is not asked counts as empty."""
        check_keys(keys)
        asking = Asking(self._levels, keys, self._begin("contains", timeout))
        try:
            return asking.run()
        except StorageError:
            self._calls.check()
            raise
        finally:
            self._counters.timed_out(asking.late)

    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """See `Storage.read`. A page that neither has is CORRUPT or FAILED if a storage that was
        asked says so, else ABSENT."""
        _, views = check_batch(keys, buffers, self.spec.page_bytes, writable=True)
        self._calls.check()
        deadline = Deadline(timeout)
        if deadline.passed:
            late = ReadResult((ReadStatus.FAILED,) * len(keys), deadline.reason)
            return self._counters.read(late, timed_out=True)
        reading = Reading(self._levels, keys, views, deadline)
        try:
            result = reading.run(self._promoter)
        except StorageError:
            self._calls.check()
            self._counters.failed("reads", len(keys), timed_out=reading.late)
            raise
        return self._counters.read(result, timed_out=reading.late)

    def write(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        timeout: float,
        parent: Keys | None = None,
    ) -> WriteResult:
        """See `Storage.write`. A page is stored if one storage has it; the last such storage says
        whether it is STORED or PRESENT. A page that neither has is FAILED if a storage that was
        asked says so, else REFUSED."""
        _, views = check_batch(keys, buffers, self.spec.page_bytes, writable=False)
        check_parent(parent)
        self._calls.check()
        deadline = Deadline(timeout)
        if deadline.passed:
            late = WriteResult((WriteStatus.FAILED,) * len(keys), deadline.reason)
            return self._counters.write(late, timed_out=True)
        writing = Writing(self._levels, keys, views, parent, deadline)
        try:
            result = writing.run()
        except StorageError:
            self._calls.check()
            self._counters.failed("writes", len(keys), timed_out=writing.late)
            raise
        return self._counters.write(result, timed_out=writing.late)

    def delete(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.delete`. Deletes from both. Returns the larger of the two counts, as their
        overlap is unknown."""
        check_keys(keys)
        return self._remove("delete", timeout, lambda level, left: level.delete(keys, left))

    def clear(self, *, timeout: float) -> int:
        """See `Storage.clear`; the count is as in `delete`."""
        return self._remove("clear", timeout, lambda level, left: level.clear(left))

    def stats(self) -> StorageStats:
        """See `Storage.stats`, as callers saw them. Pages and bytes are those of the storage with
        the most pages; `evicted` is the far one's."""
        levels = self.levels()
        most = max((level.stats for level in levels), key=lambda stats: stats.pages)
        ours = self._counters.snapshot(most.pages, most.bytes)
        return replace(ours, evicted=levels[-1].stats.evicted)

    def _release(self) -> None:
        self._promoter.stop()
        error: Exception | None = None
        for level in self._levels:
            try:
                level.close()
            except Exception as raised:
                error = error or raised
                log.warning("%s could not be closed: %s", level.name, raised)
        if not self._promoter.join(_CLOSING):
            log.warning("a stack of storages was closed while a page is being promoted")
        if error is not None:
            raise StorageError(f"close: {error}; close it again") from error

    # ---- beyond the protocol

    def levels(self) -> tuple[LevelStats, ...]:
        """The state of each storage, the nearer first."""
        return tuple(level.stats() for level in self._levels)

    def settle(self, timeout: float) -> bool:
        """Wait until all promotions are done; False: the time is up."""
        return self._promoter.settle(timeout)

    # ---- internal

    def _begin(self, what: str, timeout: float) -> Deadline:
        self._calls.check()
        deadline = Deadline(timeout)
        if deadline.passed:
            self._counters.timed_out()
            raise StorageError(f"{what}: {deadline.reason}; give it more time")
        return deadline

    def _remove(self, what: str, timeout: float, remove: Any) -> int:
        """Remove from both levels and from the promotion queue."""
        deadline = self._begin(what, timeout)
        removed = 0
        errors: list[str] = []
        try:
            with self._promoter.paused(deadline):
                for number, level in enumerate(self._levels):
                    try:
                        left = share(self._levels, number, deadline).left
                        removed = max(removed, remove(level, left))
                    except StorageError as error:
                        errors.append(str(error).removeprefix(f"{what}: "))
        except StorageError as error:  # no level was asked
            errors.append(str(error))
        self._calls.check()
        self._counters.deleted(removed)
        self._counters.timed_out(any(timed_out(each) for each in errors))
        if errors:
            raise StorageError(f"{what}: {'; '.join(errors)}; what is there is still found")
        return removed


def _fitting(storages: Sequence[Storage]) -> None:
    given: Any = storages
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"storages: expected a list of them, found {storages!r}")
    wrong = [storage for storage in given if not isinstance(storage, Storage)]
    if wrong:
        raise ConfigError(f"storages: expected each a Storage, found {wrong[0]!r}; open them first")
    if not 1 <= len(storages) <= 2:
        raise ConfigError(
            f"storages: expected two, the nearer first, found {len(storages)}; a stack has two "
            "levels: leave the others out"
        )
    if len(storages) == 2 and storages[0] is storages[1]:
        raise ConfigError("storages: expected each once, found one twice")
    near, far = storages[0].spec, storages[-1].spec
    if far != near:
        raise ConfigError(
            f"storages: expected all to be opened for {near}, found storage 2 for {far}"
        )


# ---- URLs: `stack:?promote=64MiB|disk:/mnt/nvme/cache|s3://bucket/prefix`

OPTIONS = ("promote", "failures", "retry", "missing")
_EXAMPLE = "'stack:disk:/mnt/nvme/cache|s3://bucket/prefix'"


def split(parts: Sequence[str]) -> tuple[str, list[str]]:
    """The options, without their question mark, and the URLs between the bars.

    Raises:
        ConfigError: not exactly two URLs, or one of them is not a URL.
    """
    for part in parts:
        if not isinstance(part, str):
            raise ConfigError(f"storage: expected URLs in a list, found {part!r}")
    query = parts[0][1:] if parts and parts[0].startswith("?") else ""
    urls = list(parts[1:] if query or parts[:1] == ["?"] else parts)
    if len(urls) != 2:
        raise ConfigError(
            f"stack: expected two URLs, the nearer first and with | between them, as in "
            f"{_EXAMPLE}, found {len(urls)}; in a shell put them in quotes, in a password '|' is "
            "written %7C"
        )
    for number, url in enumerate(urls, 1):
        if ":" not in url:
            raise ConfigError(  # it may be the end of a password, so it is not shown
                f"stack: expected URLs as in {_EXAMPLE}, found none as {number}.; in a password "
                "'|' is written %7C"
            )
        if url.startswith("stack:"):
            raise ConfigError(f"stack: found a stack in a stack, as {number}.; name its storages")
    return query, urls


def parse(options: Mapping[str, str]) -> dict[str, Any]:
    """The given options as arguments of `open_stack` and `StackedStorage`.

    Raises:
        ConfigError: an unknown option or a bad value.
    """
    given = Options("stack", options, OPTIONS)
    found: dict[str, Any] = {"skip": given.choice("missing", ("raise", "skip")) == "skip"}
    if "promote" in given:
        nothing = given.text("promote") in ("no", "0")
        found["promote_bytes"] = 0 if nothing else given.size("promote")
    if "failures" in given:
        found["failures"] = given.count("failures", 0)
    if "retry" in given:
        found["retry"] = given.seconds("retry", 0.0)
    return found


def open_stack(
    urls: Sequence[str],
    spec: StorageSpec,
    open_one: Callable[[str, StorageSpec], Storage],
    *,
    skip: bool = False,
    **how: Any,
) -> StackedStorage:
    """Open both; if one cannot be opened, close the other again.

    Args:
        skip: leave out a storage that cannot be opened, for the life of the stack, with a warning;
            for any reason except a wrong URL.
        how: arguments of `StackedStorage`.

    Raises:
        ConfigError: a URL is wrong.
        StorageError: one cannot be opened; the message says which. With `skip`: none can.
    """
    opened: list[Storage] = []
    names: list[str] = []
    first: Exception | None = None
    why = ""
    try:
        for number, url in enumerate(urls, 1):
            name = f"{number} of {len(urls)}, {url.partition(':')[0]}:"
            try:
                opened.append(open_one(url, spec))
                names.append(f"{url.partition(':')[0]}:")
            except ConfigError as wrong:
                raise ConfigError(f"stack, storage {name} {wrong}") from wrong
            except Exception as raised:  # a registered opener may raise anything
                message = str(raised) if isinstance(raised, LightcacheError) else repr(raised)
                first, why = first or raised, why or message
                if not skip:
                    raise StorageError(
                        f"stack: storage {name} cannot be opened: {message}; repair it, leave it "
                        "out, or begin with 'stack:?missing=skip|'"
                    ) from raised
                log.warning("storage %s cannot be opened and is left out: %s", name, message)
        if not opened:
            raise StorageError(f"stack: none of {len(urls)} can be opened: {why}") from first
        return StackedStorage(opened, names=names, **how)
    except BaseException:
        for storage in opened:
            with contextlib.suppress(Exception):  # the first error is the one to report
                storage.close()
        raise


__all__ = [
    "GRACE",
    "KEPT",
    "OPTIONS",
    "PIECE",
    "Asking",
    "Level",
    "LevelStats",
    "NotAsked",
    "Pages",
    "Promoter",
    "Promotion",
    "Reading",
    "StackedStorage",
    "Writing",
    "open_stack",
    "parse",
    "pieces",
    "share",
    "split",
]
