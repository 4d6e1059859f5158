"""Checks arguments and turns them into addresses for C, at the least cost.

`(c_char * 1).from_buffer(array)` is the cheapest address of a writable array that keeps the array
alive (0.2 us; `array.ctypes` takes a microsecond and more).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError
from lightcache.layout import Hint

# ---- Hints.


def hint(value: Any) -> Hint:
    """A hint, also given as its number.

    Raises:
        ConfigError: it is none.
    """
    try:
        return Hint(value)
    except ValueError:
        known = ", ".join(f"Hint.{each.name}" for each in Hint)
        raise ConfigError(f"hint: expected one of {known}, found {value!r}") from None


# ---- Sizes as text.

_UNITS = {
    "": 1,
    "b": 1,
    **{unit + "ib": 1024 ** (i + 1) for i, unit in enumerate("kmgtpe")},
    **{unit + "b": 1000 ** (i + 1) for i, unit in enumerate("kmgtpe")},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, what: str = "size", *, zero: bool = False) -> int:
    """Bytes from a count of bytes or a text such as "64GiB", "1.5 TiB", "500MB".

    Args:
        zero: whether zero is a size as well.

    Raises:
        ConfigError: not a size, or not above zero.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if not match or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"{what}: expected bytes or a size such as '64GiB' (KiB MiB GiB TiB PiB EiB, or KB "
                f"MB GB TB PB EB by thousands), found {size!r}"
            )
        number = float(match[1]) * _UNITS[match[2].lower()]
        if number >= 2**62:
            raise ConfigError(f"{what}: expected less than 4 EiB, found {size[:40]!r}")
        size = int(number)
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigError(f"{what}: expected an integer or a text, found {size!r}")
    if size < (0 if zero else 1):
        least = "zero bytes or more" if zero else "more than zero bytes"
        raise ConfigError(f"{what}: expected {least}, found {size}")
    return size


def format_size(size: int) -> str:
    """A count of bytes as text: "64.0 GiB"."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{size} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


# ---- Arguments of calls of the core.

Keys = npt.NDArray[np.uint64]  # shape (n, 2): low and high word of each page's digest
Offsets = npt.NDArray[np.int64]  # shape (requests + 1,): request i is keys[offsets[i]:offsets[i+1]]
Pages = npt.NDArray[np.int32]  # shape (n,): page numbers
Generations = npt.NDArray[np.uint32]  # shape (n,): of each page
_U64 = np.dtype(np.uint64)
_I64 = np.dtype(np.int64)
_I32 = np.dtype(np.int32)
_U32 = np.dtype(np.uint32)
_Bytes0 = ctypes.c_char * 0
_MAX_KEYS = 1 << 30


address: Callable[[Any], Any] = _Bytes0.from_buffer
"""Returns an object that ctypes passes as the address of an array's data, valid while it lives. For
a writable array: one that was made here, or that `offsets`, `starts` or `pages` returned."""


def address_of_any(array: Any) -> Any:
    """As `address`, also for an array that may be read-only."""
    try:
        return _Bytes0.from_buffer(array)
    except TypeError:  # read-only: the core does not write to it
        return ctypes.c_void_p(array.ctypes.data)


def keys(array: Any) -> tuple[Any, int]:
    """(address, n) of page keys.

    Raises:
        ConfigError: not a C-contiguous uint64 array of shape (n, 2).
    """
    try:
        n, words = array.shape
        if words == 2 and array.dtype is _U64:
            return _Bytes0.from_buffer(array), n
    except (AttributeError, TypeError, ValueError):
        pass  # `_keys_slowly` raises the error
    return _keys_slowly(array)


def _keys_slowly(array: Any) -> tuple[Any, int]:
    if not isinstance(array, np.ndarray):
        raise ConfigError(
            f"keys: expected a uint64 array of shape (n, 2), found {type(array).__name__}; "
            "make it with hash_pages"
        )
    if array.dtype != _U64 or array.ndim != 2 or array.shape[1] != 2:
        raise ConfigError(
            f"keys: expected a uint64 array of shape (n, 2), found {array.dtype} "
            f"{array.shape}; make it with hash_pages"
        )
    if not array.flags.c_contiguous:
        raise ConfigError(
            "keys: expected a C-contiguous array, found a strided view; pass "
            "numpy.ascontiguousarray(keys)"
        )
    if len(array) > _MAX_KEYS:
        raise ConfigError(f"keys: {len(array)} are more than a call takes ({_MAX_KEYS})")
    return address_of_any(array), len(array)


def one_key(array: Any, what: str) -> Any:
    """The address of a single page key.

    Raises:
        ConfigError: not a C-contiguous uint64 array of shape (1, 2).
    """
    where, n = keys(array)
    if n != 1:
        raise ConfigError(f"{what}: expected one key, of shape (1, 2), found {n}; pass keys[i:i+1]")
    return where


def offsets(array: Any, key_count: int) -> Offsets:
    """Check the offsets of many requests: ascending from 0 to the number of keys. Read-only ones
    are copied.

    Raises:
        ConfigError: wrong shape or dtype, or not ascending, or not ending at the last key.
    """
    try:
        bounds = np.ascontiguousarray(array)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"offsets: expected int64 of shape (requests + 1,): {error}") from None
    if bounds.ndim != 1 or len(bounds) < 1 or bounds.dtype.kind not in "iu":
        raise ConfigError(
            "offsets: expected integers of shape (requests + 1,), found "
            f"{bounds.dtype} {bounds.shape}"
        )
    bounds = bounds.astype(_I64, copy=False)
    if bounds[0] != 0 or bounds[-1] != key_count or (bounds[1:] < bounds[:-1]).any():
        raise ConfigError(
            f"offsets: expected to ascend from 0 to the number of keys ({key_count}), found "
            f"{bounds[0]} to {bounds[-1]}"
            + (", descending in between" if (np.diff(bounds) < 0).any() else "")
        )
    return bounds if bounds.flags.writeable else bounds.copy()


def starts(array: Any, bounds: Offsets) -> Offsets:
    """Check the first key of each request, counted from the request's own first; None: 0 for all.
    Read-only ones are copied.

    Args:
        bounds: the checked offsets of the requests.

    Raises:
        ConfigError: wrong shape or dtype, or outside the keys of a request.
    """
    requests = len(bounds) - 1
    if array is None:
        return np.zeros(requests, np.int64)
    numbers = np.asarray(array)
    if numbers.shape != (requests,) or (requests and numbers.dtype.kind not in "iu"):
        raise ConfigError(
            f"starts: expected {requests} integers, found {numbers.dtype} {numbers.shape}"
        )
    begins = np.ascontiguousarray(numbers, np.int64)
    if requests and (begins.min() < 0 or (begins > bounds[1:] - bounds[:-1]).any()):
        raise ConfigError(
            "starts: expected starts within the keys of each request, found "
            f"{begins.tolist()[:8]} for {np.diff(bounds).tolist()[:8]} keys"
        )
    return begins if begins.flags.writeable else begins.copy()


def pages(array: Any) -> Pages:
    """Check page numbers: C-contiguous int32 of shape (n,). Other integers are converted, read-only
    arrays copied.

    Raises:
        ConfigError: not integers of one dimension, or out of range.
    """
    if isinstance(array, np.ndarray) and array.dtype is _I32 and array.ndim == 1:
        return array if array.flags.carray else array.copy()
    numbers = np.asarray(array)
    if numbers.size == 0 and numbers.ndim == 1:
        return np.empty(0, np.int32)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ConfigError(
            f"pages: expected page numbers, int32 of shape (n,), found {numbers.dtype} "
            f"{numbers.shape}"
        )
    if numbers.min() < 0 or numbers.max() >= 1 << 31:
        raise ConfigError(f"pages: expected page numbers, found {numbers.min()} to {numbers.max()}")
    return numbers.astype(np.int32)


def generations(array: Any, n: int) -> Generations:
    """Check the generations of n pages: C-contiguous uint32 of shape (n,). Other integers are
    converted, read-only arrays copied.

    Raises:
        ConfigError: not so many integers below 2^32.
    """
    if isinstance(array, np.ndarray) and array.dtype is _U32 and array.shape == (n,):
        return array if array.flags.carray else array.copy()
    numbers = np.asarray(array)
    if numbers.shape != (n,) or (n and numbers.dtype.kind not in "iu"):
        raise ConfigError(
            f"generations: expected one for each of {n} pages, found {numbers.dtype} "
            f"{numbers.shape}; send what `PageIndex.generations` returned"
        )
    if n and (numbers.min() < 0 or numbers.max() >= 1 << 32):
        raise ConfigError(
            f"generations: expected 0 to {(1 << 32) - 1}, found {numbers.min()} to {numbers.max()}"
        )
    return numbers.astype(np.uint32)


def count(value: Any, what: str, low: int, high: int) -> int:
    """Check that a value is an integer within [low, high].

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f"{what}: expected an integer, found {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{what}: expected {low} to {high}, found {value}")
    return int(value)
