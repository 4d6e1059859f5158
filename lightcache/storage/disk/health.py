"""Whether a disk is written to just now."""

from __future__ import annotations

import threading

from lightcache.storage.arguments import Clock
from lightcache.storage.breaker import log


class Health:
    """Writing stops at its first error, since a disk that is full or read-only stays so for a
    while, and what is on it can be read all the same. Every `retry` seconds one call tries it."""

    def __init__(self, what: str, retry: float, clock: Clock) -> None:
        """All is well.

        Args:
            what: the disk, in messages.
        """
        self._what, self._retry, self._clock = what, retry, clock
        self._lock = threading.Lock()
        self._why = ""
        self._again = 0.0

    @property
    def reason(self) -> str:
        """Why nothing is written, for people; empty: it is."""
        with self._lock:
            return self._why

    def allow(self) -> str:
        """Empty: write, and tell `well` or `ill` of it. Else why not."""
        with self._lock:
            if not self._why:
                return ""
            if self._clock() < self._again:
                return self._why
            self._again = self._clock() + self._retry  # others wait for what comes of this one
            return ""

    def well(self) -> None:
        """Something was written."""
        with self._lock:
            was, self._why = self._why, ""
        if was:
            log.info("%s is written to again", self._what)

    def ill(self, why: str) -> str:
        """Something could not be written. What to say of it."""
        with self._lock:
            was = self._why
            self._why = f"{self._what}: {why}; it is written to again when that is over, and tried "
            self._why += f"every {self._retry:g} s; what is on it is still read"
            self._again = self._clock() + self._retry
            said = self._why
        if not was:  # once, not with every try that fails
            log.warning("%s", said)
        return said


__all__ = ["Health"]
