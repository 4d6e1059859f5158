"""Shared by all backends, and by the tiers that call them: checks of arguments and results,
checksums, deadlines, counters, calls in flight, URL options."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import operator
import os
import re
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from lightcache import _arguments
from lightcache._arguments import parse_size
from lightcache.breaker import CircuitBreaker, Clock
from lightcache.errors import ConfigError, Detached, StorageError
from lightcache.shm.errors import leave
from lightcache.shm.waiting import Condition
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

KEY_BYTES = 16
log = logging.getLogger("lightcache.storage")


def check_keys(keys: Keys) -> list[bytes]:
    """The keys as bytes, 16 each: low word, then high word, little-endian.

    Raises:
        ConfigError: not a C-contiguous uint64 array of shape (n, 2).
    """
    _arguments.keys(keys)
    whole = keys.astype("<u8", copy=False).tobytes()
    return [whole[begin : begin + KEY_BYTES] for begin in range(0, len(whole), KEY_BYTES)]


def check_batch(
    keys: Keys, buffers: Sequence[Buffer], page_bytes: int, *, writable: bool
) -> tuple[list[bytes], list[memoryview]]:
    """Keys as bytes, and buffers as memoryviews of single bytes, one for each key.

    Raises:
        ConfigError: bad keys, see `check_keys`; a wrong number of buffers; or a buffer of another
            size, not contiguous, not of single bytes, or read-only although `writable`.
    """
    names = check_keys(keys)
    if not hasattr(buffers, "__len__"):
        raise ConfigError(
            f"buffers: expected a list of one for each of {len(names)} keys, found "
            f"{type(buffers).__name__}"
        )
    if len(buffers) != len(names):
        raise ConfigError(f"buffers: expected one for each of {len(names)}, found {len(buffers)}")
    return names, [_view(i, buffer, page_bytes, writable) for i, buffer in enumerate(buffers)]


def _view(number: int, buffer: Buffer, page_bytes: int, writable: bool) -> memoryview:
    try:
        view = memoryview(cast(Any, buffer))  # Python 3.10 has no type for buffers
        found = f"{view.nbytes} bytes, format {view.format!r}, {view.ndim} dimensions"
    except TypeError:
        found = type(buffer).__name__
    else:
        flat = view.ndim == 1 and view.itemsize == 1 and view.c_contiguous
        if flat and view.nbytes == page_bytes:
            if not (writable and view.readonly):
                return view if view.format == "B" else view.cast("B")
            found = "one that is read-only"
        elif not view.c_contiguous:
            found += ", not contiguous"
    raise ConfigError(
        f"buffers: expected contiguous {'writable ' if writable else ''}bytes, {page_bytes} of "
        f"them, for key {number}, found {found}"
    )


def check_spec(spec: StorageSpec) -> None:
    """Check a spec.

    Raises:
        ConfigError: it is not a StorageSpec.
    """
    found: Any = spec
    if not isinstance(found, StorageSpec):
        raise ConfigError(
            f"spec: expected a StorageSpec, found {spec!r}; give StorageSpec.of(cache)"
        )


def check_parent(parent: Keys | None) -> bytes | None:
    """The parent key of a batch, as bytes.

    Raises:
        ConfigError: it is neither None nor one key.
    """
    found: Any = parent
    if found is None:
        return None
    if not isinstance(found, np.ndarray) or found.shape != (1, 2) or found.dtype != np.uint64:
        raise ConfigError(f"parent: expected one key, uint64 of shape (1, 2), found {found!r}")
    return check_keys(np.ascontiguousarray(found))[0]


def checksum(key: bytes, page: Buffer | bytes) -> int:
    """xxh3-64 of a key and the bytes of its page, so that a page stored under the wrong key is
    detected as well. It guards against accidents, not against attackers."""
    state = xxhash.xxh3_64(key)
    state.update(cast(Any, page))
    return int(state.intdigest())


class Deadline:
    """The end of the time of one call."""

    def __init__(
        self, timeout: float, clock: Clock = time.monotonic, what: str = "timeout"
    ) -> None:
        """Its time begins now.

        Args:
            timeout: seconds.
            what: the argument's name in errors.

        Raises:
            ConfigError: `timeout` is not a number.
        """
        found: Any = timeout
        if isinstance(found, (bool, np.bool_)) or not isinstance(found, Real):
            raise ConfigError(f"{what}: expected seconds, found {found!r}")
        try:
            self.timeout: float = float(found)
        except OverflowError:  # an integer beyond all floats
            raise ConfigError(f"{what}: expected seconds, found too many of them") from None
        if self.timeout != self.timeout:
            raise ConfigError(f"{what}: expected seconds, found a number that is none (nan)")
        self._clock = clock
        self._end = clock() + self.timeout

    @property
    def left(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self._end - self._clock())

    @property
    def passed(self) -> bool:
        """True if the time is up."""
        return self._clock() >= self._end

    @property
    def reason(self) -> str:
        """The reason for a key that was not done by then."""
        return f"{_LATE}: not done within {self.timeout:g} s"


def timed_out(said: str, what: str = "") -> bool:
    """True if a reason, or the error of a call, says that the time was up.

    Args:
        what: the call's name, with which its errors may begin.
    """
    return said.startswith((_LATE, f"{what}: {_LATE}"))


class Counters:
    """Totals of a backend, counted by any thread."""

    def __init__(self) -> None:
        """All zero."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def read(self, result: ReadResult, *, timed_out: bool = False) -> ReadResult:
        """Count a result; returns it."""
        with self._lock:
            for status, keys in Counter(result.statuses).items():
                self._counts[f"reads_{status.name.lower()}"] += keys
            self._counts["timeouts"] += timed_out
        return result

    def write(self, result: WriteResult, *, timed_out: bool = False) -> WriteResult:
        """Count a result; returns it."""
        with self._lock:
            for status, keys in Counter(result.statuses).items():
                self._counts[f"writes_{status.name.lower()}"] += keys
            self._counts["timeouts"] += timed_out
        return result

    def failed(self, which: str, keys: int, *, timed_out: bool = False) -> None:
        """Count the keys of a "reads" or "writes" call that raised."""
        with self._lock:
            self._counts[f"{which}_failed"] += keys
            self._counts["timeouts"] += timed_out

    def deleted(self, pages: int) -> int:
        """Count removed pages; returns their number."""
        with self._lock:
            self._counts["deletes"] += pages
        return pages

    def evicted(self, pages: int = 1) -> None:
        """Count evicted pages."""
        with self._lock:
            self._counts["evicted"] += pages

    def timed_out(self, really: bool = True) -> None:
        """Count a call that raised because its time was up, if `really`."""
        with self._lock:
            self._counts["timeouts"] += really

    def snapshot(self, pages: int, nbytes: int) -> StorageStats:
        """A consistent snapshot of all counters."""
        with self._lock:
            counts = dict(zip(_COUNTED, map(self._counts.__getitem__, _COUNTED), strict=True))
        return StorageStats(pages=pages, bytes=nbytes, **counts)


_COUNTED = [name for name in StorageStats.__dataclass_fields__ if name not in ("pages", "bytes")]
_LATE = "timed out"


# ---- Calls: `close` waits for calls in flight, and a forked child's calls are refused
#
# A forked child has a backend's memory but none of its threads. It has the locks in the state they
# had, and shares sockets and files with its parent. So a backend opened before the fork belongs to
# the parent: in the child every call except `stats` raises Detached before it takes a lock.

CLOSING = 10.0  # seconds that `close` waits for calls


class Calls:
    """Counts the calls in flight."""

    def __init__(self) -> None:
        """Open, and owned by this process."""
        self._state = Condition()
        self._process = os.getpid()
        self._under_way = 0
        self._closed = False
        self._released = False

    @property
    def ours(self) -> bool:
        """True if this process opened it."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise Detached if it was closed, or opened by the process that forked us."""
        if self._process != os.getpid():
            raise Detached("this storage belongs to the process that forked us; open it here")
        if self._closed:
            raise Detached("this storage was closed; open it again")

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Wrap a call: nothing is closed meanwhile.

        Raises:
            Detached: see `check`.
        """
        self.check()  # before the lock: it may have been held at a fork, or be held by `end`
        entered = 0
        try:  # around the count as well: an interrupt may come after any line
            with self._state:
                if self._closed:
                    self.check()
                self._under_way, entered = self._under_way + 1, 1
            yield
        finally:
            interrupt: KeyboardInterrupt | None = None
            while entered:
                try:
                    with self._state:
                        self._under_way, entered = self._under_way - entered, 0
                        self._state.notify_all()
                except KeyboardInterrupt as found:
                    interrupt = found
            if interrupt is not None:
                raise interrupt

    def end(self, release: Callable[[], None]) -> None:
        """Refuse further calls, wait for those in flight, then call `release` once. If it raises,
        call again.

        Raises:
            StorageError: a call hangs; call again.
            Detached: in a forked child.
        """
        if not self.ours:
            self.check()
        with self._state:
            self._closed = True
            if not self._state.wait_for(lambda: not self._under_way, CLOSING):
                raise StorageError(
                    f"close: {self._under_way} calls have not returned; close it again"
                )
            if not self._released:
                release()
                self._released = True


class Owned(Storage):
    """A storage that belongs to the process that opened it, and that is closed when no call is in
    flight: wrap each call in `self._calls.one()`."""

    def __init__(self) -> None:
        """Open. For subclasses."""
        self._calls = Calls()

    @abstractmethod
    def _release(self) -> None:
        """Give back what it has. No call is in flight, and none will follow. Called again if it
        raised."""

    def close(self) -> None:
        """See `Storage.close`. Waits up to 10 s for calls of other threads.

        Raises:
            StorageError: a call hangs, or something could not be given back; call again.
            Detached: in a forked child.
        """
        self._calls.end(self._release)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._calls.ours:  # leaving the statement does nothing in a forked child
            leave(self.close, error)


# ---- Helpers for callers of a storage: memory, checked results, the breaker


def own_memory(pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate memory for `pages` pages. It is page-aligned, as direct I/O requires, and uses huge
    pages if available, since the first touch of new memory costs most: 13 ms instead of 42 for
    32 MiB, while copying them takes 9.

    Raises:
        StorageError: not enough memory.
    """
    try:
        made = mmap.mmap(-1, pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as error:
        raise StorageError(f"no memory for {pages} pages of {page_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        made.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(made, np.uint8).reshape(pages, page_bytes)


def checked_contains(result: object, keys: int) -> int:
    """Check the result of `Storage.contains`.

    Raises:
        StorageError: it is not a count of these keys.
    """
    try:
        count = operator.index(cast(Any, result))
    except TypeError:
        count = -1
    if not 0 <= count <= keys:
        raise StorageError(
            f"contains: expected a count of {keys} keys, the backend returned {result!r}; see "
            "lightcache.storage.testing"
        )
    return int(count)


def checked_statuses(what: str, statuses: object, keys: int) -> None:
    """Check the statuses returned by `Storage.read` or `write`.

    Raises:
        StorageError: there is not one status for each key.
    """
    if not isinstance(statuses, tuple) or len(statuses) != keys:
        raise StorageError(
            f"{what}: expected a tuple of {keys} statuses, the backend returned {statuses!r}; see "
            "lightcache.storage.testing"
        )


def storage_breaker(
    failures: int, retry: float, clock: Clock, what: str = "storage"
) -> CircuitBreaker:
    """A circuit breaker for a storage that messages call `what`."""

    def text(row: int, why: str) -> str:
        return (
            f"{what} is disabled after {row} failures in a row, the last: {why}; it is tried again "
            f"every {retry:g} s"
        )

    works = f"{what} works again and is used from now on"
    return CircuitBreaker(failures, retry, clock, text=text, works=works, log=log)


def why_unread(result: ReadResult) -> str:
    """Why a read counts as a failure of the storage; empty: it does not. A batch with FAILED pages
    and none OK does; absent and corrupt alone are answers of a working storage."""
    failed, good = result.count(ReadStatus.FAILED), result.count(ReadStatus.OK)
    return result.reason or "failed" if failed and not good else ""


def why_unwritten(result: WriteResult) -> str:
    """Why a write counts as a failure of the storage: all of its pages FAILED; empty: it does
    not."""
    failed = result.count(WriteStatus.FAILED)
    return result.reason or "failed" if failed and failed == len(result.statuses) else ""


# ---- The options of a storage's URL

_INTEGER = re.compile("[+-]?[0-9]+")


class Options:
    """The options of one URL, each looked up by name. Unknown options are refused."""

    def __init__(self, scheme: str, values: Mapping[str, str], known: Sequence[str]) -> None:
        """
        Args:
            scheme: the URL's scheme, for errors.
            known: the names of all options.

        Raises:
            ConfigError: an unknown option, or one without a value.
        """
        if unknown := sorted(set(values) - set(known)):
            expected = ", ".join(known) or "no options"
            raise ConfigError(f"{scheme}: expected {expected}, found {', '.join(unknown)}")
        if empty := [name for name, text in values.items() if not text]:
            name = empty[0]
            raise ConfigError(
                f"{scheme}: {name}: expected a value, found none; leave '{name}=' out"
            )
        self._scheme, self._given = scheme, values

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str, default: str = "") -> str:
        """The text as given."""
        return self._given.get(name, default)

    def count(self, name: str, default: int, low: int = 1, high: int = 1 << 30) -> int:
        """An integer in a range.

        Raises:
            ConfigError: not an integer, or out of range.
        """
        text = self._given.get(name, str(default))
        if not _INTEGER.fullmatch(text):
            raise ConfigError(f"{self._scheme}: {name}: expected a number, found {text[:40]!r}")
        if not (len(text) < 20 and low <= int(text) <= high):
            raise ConfigError(
                f"{self._scheme}: {name}: expected a number from {low} to {high}, found "
                f"{text[:40]!r}"
            )
        return int(text)

    def chance(self, name: str) -> float:
        """A probability; 0 if not given.

        Raises:
            ConfigError: not a number from 0 to 1.
        """
        text = self._given.get(name, "0")
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not 0.0 <= found <= 1.0:
            raise ConfigError(
                f"{self._scheme}: {name}: expected a number from 0 to 1, found {text!r}"
            )
        return found

    def seconds(self, name: str, default: float, low: float = 0.0) -> float:
        """Seconds, finite.

        Raises:
            ConfigError: not a finite number, or less than `low`.
        """
        text = self._given.get(name, str(default))
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not low <= found < math.inf:
            raise ConfigError(
                f"{self._scheme}: {name}: expected seconds, {low:g} or more, found {text!r}"
            )
        return found

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of the choices; the first if not given.

        Raises:
            ConfigError: another value.
        """
        text = self._given.get(name, choices[0])
        if text not in choices:
            raise ConfigError(
                f"{self._scheme}: {name}: expected {' or '.join(choices)}, found {text!r}"
            )
        return text

    def size(self, name: str, default: int | None = None) -> int | None:
        """Bytes, from text such as "1TiB".

        Raises:
            ConfigError: not a size.
        """
        if name not in self._given:
            return default
        return parse_size(self._given[name], f"{self._scheme}: {name}")


__all__ = [
    "CLOSING",
    "KEY_BYTES",
    "Calls",
    "Clock",
    "Counters",
    "Deadline",
    "Options",
    "Owned",
    "check_batch",
    "check_keys",
    "check_parent",
    "check_spec",
    "checked_contains",
    "checked_statuses",
    "checksum",
    "log",
    "own_memory",
    "storage_breaker",
    "timed_out",
    "why_unread",
    "why_unwritten",
]
