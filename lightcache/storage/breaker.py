"""What counts as a failure of a storage, and the breaker that counts it."""

from __future__ import annotations

import logging

from lightcache.breaker import Breaker, Clock
from lightcache.storage.protocol import ReadResult, WriteResult

log = logging.getLogger("lightcache.storage")


def storage_breaker(failures: int, retry: float, clock: Clock, what: str = "storage") -> Breaker:
    """One of a storage that messages call `what`."""

    def text(row: int, why: str) -> str:
        return (
            f"{what} is disabled after {row} failures in a row, the last: {why}; it is tried again "
            f"every {retry:g} s"
        )

    works = f"{what} works again and is used from now on"
    return Breaker(failures, retry, clock, text=text, works=works, log=log)


def unread(result: ReadResult) -> str:
    """Why a read counts as a failure of the storage; empty: it does not. A batch of which nothing
    could be read does; absent and corrupt are answers of a storage that works."""
    names = {status.name for status in result.statuses}
    return result.reason or "failed" if "FAILED" in names and "OK" not in names else ""


def unwritten(result: WriteResult) -> str:
    """The same of a write, if nothing of it could be written."""
    names = {status.name for status in result.statuses}
    return result.reason or "failed" if "FAILED" in names and len(names) == 1 else ""


__all__ = ["log", "storage_breaker", "unread", "unwritten"]
