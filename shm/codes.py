"""Result codes of the C core, and their exceptions.

The list equals `enum lc_error` in `shm/native/lc_base.h`; a test compares the two.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from enum import IntEnum

from lightcache.shm import errors


class Code(IntEnum):
    """Below zero: an error. At SYS and below: SYS minus the errno of a failed system call."""

    OK = 0
    FORKED = -1
    CLOSED = -2
    RETIRED = -3
    CORRUPT = -4
    BUSY = -5
    TIMEOUT = -6
    INTR = -7
    FULL = -8
    STALE = -9
    OWNER = -10
    RANGE = -11
    TWICE = -12
    PINS = -13
    CLEARED = -14
    GROW = -15
    READONLY = -16
    DISABLED = -17
    LOST = -18
    MISSING = -19
    SYS = -100


Raised = type[errors.LightcacheError]

# The problem, and what to do. Callers with a better message pass `kinds`, or catch and re-raise.
_MEANING: Mapping[Code, tuple[Raised, str]] = {
    Code.FORKED: (
        errors.Detached,
        "called in a forked child, which is not attached; attach in the child, or use spawn",
    ),
    Code.CLOSED: (errors.Detached, "called after close; attach again"),
    Code.RETIRED: (
        errors.Detached,
        "the segment was replaced or unlinked; close this handle and open again",
    ),
    Code.CORRUPT: (
        errors.CacheCorrupted,
        "a word in the segment cannot be what it says; run `lightcache check`, then `repair`",
    ),
    Code.BUSY: (errors.LockTimeout, "the lock is held by another client; try again"),
    Code.TIMEOUT: (
        errors.WaitTimeout,
        "the time limit passed; wait longer, or see with `lightcache dump` who holds it up",
    ),
    Code.INTR: (errors.LightcacheError, "a signal arrived; call again"),
    Code.FULL: (errors.NoSpace, "no room is left; release or evict something, or make it larger"),
    Code.STALE: (errors.LeaseLost, "what this handle stood for has ended; ask for a new one"),
    Code.OWNER: (errors.LeaseLost, "it belongs to another client; only its owner may do this"),
    Code.RANGE: (errors.ConfigError, "an argument is out of range; see the docstring"),
    Code.TWICE: (errors.LeaseLost, "it was done before; do it once"),
    Code.PINS: (
        errors.NoSpace,
        "one client may pin a page 65,535 times at once; release leases first",
    ),
    Code.CLEARED: (
        errors.Abandoned,
        "its namespace was cleared; use(namespace(...)) opens it again, for pages computed anew",
    ),
    Code.GROW: (errors.NoSpace, "the pool has not grown so far; grow it and call again"),
    Code.READONLY: (errors.PermissionDenied, "attached read-only; attach with readonly=False"),
    Code.DISABLED: (errors.NotReady, "an operator disabled the cache; `lightcache enable` it"),
    Code.LOST: (
        errors.Detached,
        "this client was declared dead and its pins were taken back; close and attach again",
    ),
    Code.MISSING: (errors.LightcacheError, "it is not there; look before asking for it"),
}

_ERRNO: Mapping[int, Raised] = {
    errno.ENOSPC: errors.NoSpace,
    errno.ENOMEM: errors.NoSpace,
    errno.EACCES: errors.PermissionDenied,
    errno.EPERM: errors.PermissionDenied,
    errno.EROFS: errors.PermissionDenied,
}


def system_errno(code: int) -> int:
    """The errno of a failed system call in `code`, else 0."""
    return Code.SYS - code if code <= Code.SYS else 0


def error(
    code: int, what: str, kinds: Mapping[Code, Raised] | None = None
) -> errors.LightcacheError:
    """The exception for a result below zero.

    Args:
        code: as the C core returned it.
        what: the operation, in the caller's words; begins the message.
        kinds: other exception classes for some codes.
    """
    number = system_errno(code)
    if number:
        kind = _ERRNO.get(number, errors.LightcacheError)
        return kind(f"{what}: the system refused it ({os.strerror(number)}, errno {number})")
    try:
        known = Code(code)
    except ValueError:
        return errors.CacheCorrupted(f"{what}: the core returned the unknown code {code}")
    kind, meaning = _MEANING[known]
    return (kinds or {}).get(known, kind)(f"{what}: {meaning}")


def check(code: int, what: str, kinds: Mapping[Code, Raised] | None = None) -> int:
    """Return `code` if it is at least zero, else raise its `error`."""
    if code < 0:
        raise error(code, what, kinds)
    return code
