"""When to stop asking a storage that fails, and when to ask it again."""

from __future__ import annotations

import logging
import threading
from typing import Literal

from lightcache.storage.arguments import Clock
from lightcache.storage.protocol import ReadResult, WriteResult

log = logging.getLogger("lightcache.storage")


class Breaker:
    """Closed, calls go through. After `failures` failures in a row it opens: no call does. `retry`
    seconds later it is half-open: one call goes through as a probe, whose success closes it and
    whose failure opens it for as long again. Any thread may call it."""

    def __init__(self, failures: int, retry: float, clock: Clock, what: str = "storage") -> None:
        """Closed.

        Args:
            what: is disabled: messages call it so.
        """
        self._what = what
        self._most = failures
        self._retry = retry
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened: float | None = None
        self._probing = False
        self._why = ""

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        """As it is now."""
        with self._lock:
            if self._opened is None:
                return "closed"
            waited = self._clock() - self._opened >= self._retry
            return "half-open" if waited or self._probing else "open"

    @property
    def reason(self) -> str:
        """Why calls do not go through, for people."""
        with self._lock:
            return (
                f"{self._what} is disabled after {self._failures} failures in a row, the last: "
                f"{self._why}; it is tried again every {self._retry:g} s"
            )

    @property
    def shut(self) -> bool:
        """Whether a call now would be refused."""
        with self._lock:
            return self._shut()

    def _shut(self) -> bool:
        if self._opened is None:
            return False
        return self._probing or self._clock() - self._opened < self._retry

    def allow(self) -> bool:
        """Whether this call may go through; then tell `success` or `failure` of it, always."""
        with self._lock:
            if self._shut():
                return False
            self._probing = self._opened is not None
            return True

    def success(self) -> None:
        """A call did what it should."""
        with self._lock:
            was, self._opened = self._opened, None
            self._failures, self._probing = 0, False
        if was is not None:
            log.info("%s works again and is used from now on", self._what)

    def failure(self, why: str) -> None:
        """A call did not, or has not come back."""
        with self._lock:
            self._failures += 1
            self._why = why
            opens = self._opened is None and self._failures >= self._most
            if opens or self._probing:
                self._opened, self._probing = self._clock(), False
        if opens:  # once, not with every probe that fails
            log.warning(
                "%s is disabled after %d failures in a row, the last: %s; it is tried again "
                "every %g s",
                self._what,
                self._most,
                why,
                self._retry,
            )


def unread(result: ReadResult) -> str:
    """Why a read counts as a failure of the storage; empty: it does not. A batch of which nothing
    could be read does; absent and corrupt are answers of a storage that works."""
    names = {status.name for status in result.statuses}
    return result.reason or "failed" if "FAILED" in names and "OK" not in names else ""


def unwritten(result: WriteResult) -> str:
    """The same of a write, if nothing of it could be written."""
    names = {status.name for status in result.statuses}
    return result.reason or "failed" if "FAILED" in names and len(names) == 1 else ""


__all__ = ["Breaker", "log", "unread", "unwritten"]
