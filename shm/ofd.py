"""Locks on single bytes of an object, with time limits.

A lock belongs to an open file description: the kernel drops it with the last descriptor, however
the process ends, and it also excludes other descriptions in the same process. The system's blocking
call has no time limit, so waiting means repeated tries, at first every 0.2 ms, later every 10 ms;
Ctrl-C ends it at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from lightcache.shm import _native
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import LockTimeout

_FIRST_SLEEP = 0.0002
_LAST_SLEEP = 0.010


class Pause:
    """Growing sleeps until a deadline, for repeated tries."""

    def __init__(self, timeout: float | None) -> None:
        """`timeout` in seconds from now; None: no limit."""
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._sleep = _FIRST_SLEEP

    def left(self) -> float | None:
        """Seconds that remain, at least 0; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def sleep(self) -> bool:
        """Sleep a little; False, without sleeping, after the deadline."""
        left = self.left()
        if left == 0.0:
            return False
        time.sleep(self._sleep if left is None else min(self._sleep, left))
        self._sleep = min(self._sleep * 2, _LAST_SLEEP)
        return True


def try_lock(fd: int, byte: int, *, exclusive: bool = True) -> bool:
    """Lock the byte unless another lock forbids it. Does not block.

    Raises:
        LightcacheError: the descriptor is closed, or was not opened for locks.
    """
    code = _native.quick().lcs_byte_lock(fd, byte, exclusive)
    return code != Code.BUSY and check(code, "lock a byte of the object") == 0


def lock(fd: int, byte: int, pause: Pause, *, exclusive: bool = True) -> bool:
    """Lock the byte, retrying until the pause's deadline; then return False."""
    while not try_lock(fd, byte, exclusive=exclusive):
        if not pause.sleep():
            return False
    return True


def unlock(fd: int, byte: int) -> None:
    """Unlock the byte; does nothing if it was not locked."""
    check(_native.quick().lcs_byte_unlock(fd, byte), "unlock a byte of the object")


def held(fd: int, byte: int, length: int = 1) -> bool:
    """True if another description than that of `fd` holds a lock in `[byte, byte + length)`."""
    return check(_native.quick().lcs_byte_held(fd, byte, length), "look at a byte's lock") == 1


@contextlib.contextmanager
def locked(
    fd: int, byte: int, *, exclusive: bool = True, timeout: float | None = None
) -> Iterator[None]:
    """Hold the byte for the body of a with statement.

    Raises:
        LockTimeout: another description held it for `timeout` seconds (None: no limit; 0: try
            once).
    """
    pause = Pause(timeout)
    try:
        if not lock(fd, byte, pause, exclusive=exclusive):
            raise LockTimeout(
                f"a byte lock of the segment was held by others for {timeout} s; look with "
                "`lightcache ls` and `lightcache dump` who creates or replaces it"
            )
        yield
    except GeneratorExit:  # an interrupt prevented the statement's end; `fd` may be closed
        _native.quick().lcs_byte_unlock(fd, byte)
        raise
    except BaseException:
        unlock(fd, byte)
        raise
    else:
        unlock(fd, byte)
