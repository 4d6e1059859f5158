"""Figures of storages: each page and each call is counted once, under what callers were told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.stacks import KEYS, flaky, get, put

from lightcache import StorageError
from lightcache.storage import MemoryStorage, Storage, StorageStats
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.stacked import StackedStorage
from lightcache.storage.testing import Fault, FlakyStorage
from lightcache.storage.testing.conformance import SPEC

OK, ABSENT, FAILED, CORRUPT = ReadStatus
STORED, PRESENT, LOST, REFUSED = WriteStatus
TIME = 0.05  # seconds: of calls that are to be late


class Slow(MemoryStorage):
    """Uses up its time in every call, and says so."""

    def _wait(self, timeout: float) -> None:
        threading.Event().wait(timeout)

    def contains(self, keys: Any, *, timeout: float) -> int:
        self._wait(timeout)
        return super().contains(keys, timeout=0.0)

    def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
        self._wait(timeout)
        return super().read(keys, buffers, timeout=0.0)

    def write(self, keys: Any, buffers: Any, *, timeout: float, parent: Any = None) -> Any:
        self._wait(timeout)
        return super().write(keys, buffers, timeout=0.0, parent=parent)

    def delete(self, keys: Any, *, timeout: float) -> int:
        self._wait(timeout)
        return super().delete(keys, timeout=0.0)

    def clear(self, *, timeout: float) -> int:
        self._wait(timeout)
        return super().clear(timeout=0.0)


def nobody() -> FlakyStorage:
    """It refuses every page, and has none."""
    return flaky(script={"write": [Fault("refuse")] * 9})


LATE: dict[str, Callable[[], Storage]] = {
    "a stack's last": lambda: StackedStorage([nobody(), Slow(SPEC)], failures=100),
    "a stack's first": lambda: StackedStorage([Slow(SPEC), nobody()], failures=100),
    "all of a stack": lambda: StackedStorage([Slow(SPEC), Slow(SPEC)], failures=100),
    "behind flaky": lambda: FlakyStorage(Slow(SPEC)),
    "a stack behind flaky": lambda: FlakyStorage(
        StackedStorage([Slow(SPEC), Slow(SPEC)], failures=100)
    ),
    "alone": lambda: Slow(SPEC),
}


@pytest.mark.parametrize("name", LATE)
def test_a_call_that_is_late_is_counted_once(name: str) -> None:
    with LATE[name]() as storage:
        calls: list[Callable[[], Any]] = [
            lambda: storage.contains(KEYS, timeout=TIME),
            lambda: get(storage, timeout=TIME),
            lambda: put(storage, timeout=TIME),
            lambda: storage.delete(KEYS, timeout=TIME),
            lambda: storage.clear(timeout=TIME),
        ]
        for number, call in enumerate(calls, 1):
            try:
                call()
            except StorageError as error:
                assert "timed out" in str(error)  # noqa: PT017
            assert storage.stats().timeouts == number
        found = storage.stats()
        assert (found.reads_failed, found.writes_failed) == (8, 8)
        assert _pages(found) == (8, 8)


@pytest.mark.parametrize("verb", ["contains", "read", "write", "delete", "clear"])
def test_a_last_one_that_does_not_return_is_counted_once(verb: str) -> None:
    last = flaky(range(8), script={verb: [Fault("hang", at=0)]})
    with StackedStorage([nobody(), last], failures=100) as stack:
        if verb == "contains":
            assert stack.contains(KEYS, timeout=TIME) == 0
        elif verb == "read":
            assert get(stack, timeout=TIME).statuses == (FAILED,) * 8
        elif verb == "write":
            assert put(stack, timeout=TIME).statuses == (LOST,) * 8
        else:
            with pytest.raises(StorageError, match=f"^{verb}: timed out: {verb} has not returned"):
                stack.clear(timeout=TIME) if verb == "clear" else stack.delete(KEYS, timeout=TIME)
        assert stack.stats().timeouts == 1


def test_a_late_one_whose_pages_another_has_is_no_late_call() -> None:
    with StackedStorage([Slow(SPEC), MemoryStorage(SPEC)], failures=100) as stack:
        assert put(stack, timeout=1.0).prefix == 8
        assert get(stack, timeout=1.0).prefix == 8
        assert stack.contains(KEYS, timeout=1.0) == 8
        assert stack.stats().timeouts == 0
        assert stack.levels()[0].stats.timeouts == 3


def test_what_waits_for_a_promotion_in_vain_is_late() -> None:
    with StackedStorage([MemoryStorage(SPEC), MemoryStorage(SPEC)]) as stack:
        stack._promoter._writing = True
        with pytest.raises(StorageError, match=r"^delete: timed out.*still being promoted"):
            stack.delete(KEYS, timeout=TIME)
        stack._promoter._writing = False
        assert stack.stats().timeouts == 1


@pytest.mark.parametrize("wrap", ["flaky", "stack", "both"])
def test_pages_are_counted_apart(wrap: str) -> None:
    """Whatever became of a page: under what its caller was told, and nowhere else."""
    inner: Storage = flaky(
        range(6), script={"read": [Fault("corrupt", at=1)], "write": [Fault("fail", at=6)]}
    )
    if wrap != "flaky":
        inner = StackedStorage([nobody(), inner], promote_bytes=0)
    storage = FlakyStorage(inner) if wrap == "both" else inner
    with storage:
        assert get(storage).statuses == (OK, CORRUPT, OK, OK, OK, OK, ABSENT, ABSENT)
        assert put(storage).statuses == (PRESENT,) * 6 + (LOST, STORED)
        found = storage.stats()
        assert (found.reads_ok, found.reads_absent) == (5, 2)
        assert (found.reads_failed, found.reads_corrupt) == (0, 1)
        assert (found.writes_stored, found.writes_present) == (1, 6)
        assert (found.writes_failed, found.writes_refused) == (1, 0)
        assert storage.delete(KEYS, timeout=60.0) == 7
        assert storage.stats().deletes == 7
        assert storage.stats().timeouts == 0


def _pages(found: StorageStats) -> tuple[int, int]:
    """Of all reads and of all writes."""
    reads = found.reads_ok + found.reads_absent + found.reads_failed + found.reads_corrupt
    writes = found.writes_stored + found.writes_present + found.writes_failed
    return reads, writes + found.writes_refused
