"""Shared by all backends: checks of arguments, checksums, deadlines, counters, URL options."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import numpy as np
import xxhash

from lightcache import _arguments
from lightcache._arguments import parse_size
from lightcache.errors import ConfigError
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    Storage,
    StorageSpec,
    StorageStats,
    TokenRows,
    WriteResult,
)

KEY_BYTES = 16
Clock = Callable[[], float]


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


def check_tokens(tokens: TokenRows | None, pages: int) -> TokenRows | None:
    """Check token ids, and return them.

    Raises:
        ConfigError: they are neither None nor an array of integers with a row for each page.
    """
    found: Any = tokens
    if found is None:
        return None
    what = type(found).__name__
    if isinstance(found, np.ndarray):
        if found.dtype.kind in "iu" and found.ndim == 2 and len(found) == pages:
            return found
        what = f"{found.dtype} {found.shape}"
    raise ConfigError(f"tokens: expected integers of shape ({pages}, page_tokens), found {what}")


def write_to(
    storage: Storage,
    keys: Keys,
    buffers: Sequence[Buffer],
    *,
    timeout: float,
    parent: Keys | None,
    tokens: TokenRows | None,
) -> WriteResult:
    """Call `storage.write`, with the token ids only if the storage wants them."""
    if storage.wants_tokens:
        write = cast(Any, storage).write
        return cast(
            WriteResult, write(keys, buffers, timeout=timeout, parent=parent, tokens=tokens)
        )
    return storage.write(keys, buffers, timeout=timeout, parent=parent)


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
            names = [name for name in StorageStats.__dataclass_fields__ if name not in _NOW]
            counts = {name: self._counts[name] for name in names}
        return StorageStats(pages=pages, bytes=nbytes, **counts)


_NOW = ("pages", "bytes")
_LATE = "timed out"


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
    "KEY_BYTES",
    "Clock",
    "Counters",
    "Deadline",
    "Options",
    "check_batch",
    "check_keys",
    "check_parent",
    "check_spec",
    "check_tokens",
    "checksum",
    "timed_out",
    "write_to",
]
