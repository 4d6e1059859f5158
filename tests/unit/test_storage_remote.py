"""What storages beyond one machine have in common, over a dict that stands for the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.interrupts import interrupt
from support.refusals import refused

from lightcache import Detached, StorageError
from lightcache.storage import StorageSpec
from lightcache.storage.common import Deadline
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.remote.base import (
    TRAILER_BYTES,
    Read,
    RemoteStorage,
    Wrote,
    judge_page,
    make_trailer,
)
from lightcache.storage.testing.conformance import CHECKS, PAGE_BYTES, SPEC, make_keys, pages_of

KEYS = make_keys(6)
PAGES = list(pages_of(KEYS))
TIMEOUT = 60.0


class DictStorage(RemoteStorage):
    """Values in a dict, which two of them may share."""

    scheme = "dict"
    asking = 3

    def __init__(self, spec: StorageSpec, values: dict[str, Any] | None = None) -> None:
        super().__init__(spec)
        self.values: dict[str, Any] = {} if values is None else values
        self.asked: list[int] = []
        self.sent: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.error: Callable[[Deadline], None] = lambda deadline: None

    def _exists(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        self.asked.append(len(names))
        self.error(deadline)
        return [self.object_name(name) in self.values for name in names]

    def _fetch(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Read]:
        self.error(deadline)
        found: list[Read] = []
        for name, view in zip(names, views, strict=True):
            value = self.values.get(self.object_name(name))
            if value is None:
                found.append((ReadStatus.ABSENT, ""))
                continue
            page, beside = value
            view[: len(page)] = page
            found.append(judge_page(name, view, beside))
        return found

    def _put(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Wrote]:
        self.sent.append(len(names))
        self.arrived.set()
        assert self.gate.wait(TIMEOUT)
        self.error(deadline)
        for name, view in zip(names, views, strict=True):
            self.values[self.object_name(name)] = bytes(view), make_trailer(name, view)
        return [(WriteStatus.STORED, "")] * len(names)

    def _remove(self, names: Sequence[bytes], deadline: Deadline) -> int:
        self.error(deadline)
        gone = [self.values.pop(self.object_name(name), None) for name in names]
        return sum(value is not None for value in gone)

    def _remove_all(self, deadline: Deadline) -> int:
        self.error(deadline)
        gone = len(self.values)
        self.values.clear()
        return gone

    def _release(self) -> None:
        self.values = {}


def write(storage: RemoteStorage, keys: Any = KEYS, pages: Any = PAGES) -> Any:
    return storage.write(keys, pages[: len(keys)], timeout=TIMEOUT)


def read(storage: RemoteStorage, keys: Any = KEYS) -> tuple[Any, Any]:
    into = np.zeros((len(keys), PAGE_BYTES), np.uint8)
    return storage.read(keys, list(into), timeout=TIMEOUT), into


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[..., None]) -> None:
    check(DictStorage)


def test_a_trailer_is_of_its_key_its_bytes_and_its_length() -> None:
    key, other = b"k" * 16, b"l" * 16
    page = bytes(range(256))
    made = make_trailer(key, page)
    assert len(made) == TRAILER_BYTES
    assert judge_page(key, page, made) == (ReadStatus.OK, "")
    for name, data, beside, why in (
        (other, page, made, "another checksum"),
        (key, bytes(256), made, "another checksum"),
        (key, page[:-1], made, "stored with 256 bytes"),
        (key, page, made[:-1], "a trailer of 23 bytes"),
        (key, page, b"x" * 24, "by something else"),
        (key, page, b"", "a trailer of 0 bytes"),
    ):
        status, reason = judge_page(name, data, beside)
        assert status is ReadStatus.CORRUPT
        assert why in reason


def test_a_corrupt_page_is_removed_and_stored_anew() -> None:
    with DictStorage(SPEC) as storage:
        write(storage)
        name = storage.object_name(KEYS[2].astype("<u8").tobytes())
        storage.values[name] = (bytes(PAGE_BYTES), storage.values[name][1])
        result, _ = read(storage)
        assert result.statuses[2] is ReadStatus.CORRUPT
        assert result.prefix == 2
        assert "checksum" in result.reason
        assert name not in storage.values
        assert write(storage).count(WriteStatus.STORED) == 1
        assert read(storage)[0].prefix == 6
        assert storage.stats().reads_corrupt == 1


def test_behind_the_first_absent_key_no_batch_is_asked() -> None:
    with DictStorage(SPEC) as storage:
        keys = make_keys(12)
        storage.write(keys[:4], list(pages_of(keys[:4])), timeout=TIMEOUT)
        storage.asked.clear()
        assert storage.contains(keys, timeout=TIMEOUT) == 4
        assert storage.asked == [3, 3]


def test_specs_do_not_see_each_other() -> None:
    values: dict[str, Any] = {}
    with DictStorage(SPEC, values) as ours, DictStorage(StorageSpec(PAGE_BYTES, "b"), values) as b:
        write(ours)
        assert ours.contains(KEYS, timeout=TIMEOUT) == 6
        assert b.contains(KEYS, timeout=TIMEOUT) == 0


def test_two_threads_send_a_page_once() -> None:
    with DictStorage(SPEC) as storage:
        storage.gate.clear()
        results: list[Any] = []
        first = threading.Thread(target=lambda: results.append(write(storage)))
        first.start()
        assert storage.arrived.wait(TIMEOUT)
        second = threading.Thread(target=lambda: results.append(write(storage)))
        second.start()
        storage.gate.set()
        for thread in (first, second):
            thread.join(TIMEOUT)
        assert sorted(result.count(WriteStatus.STORED) for result in results) == [0, 6]
        assert [result.prefix for result in results] == [6, 6]
        assert storage.sent == [6]


def test_who_waited_for_a_thread_that_failed_sends_the_page_itself() -> None:
    with DictStorage(SPEC) as storage:
        storage.gate.clear()
        failed: list[str] = []

        def fail(deadline: Deadline) -> None:
            if threading.current_thread() is first and storage.gate.is_set():
                raise OSError("no route")

        storage.error = fail

        def attempt() -> None:
            try:
                write(storage)
            except StorageError as error:
                failed.append(str(error))

        first = threading.Thread(target=attempt)
        first.start()
        assert storage.arrived.wait(TIMEOUT)
        results: list[Any] = []
        second = threading.Thread(target=lambda: results.append(write(storage)))
        second.start()
        storage.gate.set()
        for thread in (first, second):
            thread.join(TIMEOUT)
        assert failed == ["dict: no route"]
        assert results[0].prefix == 6


def test_who_waits_for_another_thread_does_so_within_its_time() -> None:
    with DictStorage(SPEC) as storage:
        storage.gate.clear()
        first = threading.Thread(target=lambda: write(storage))
        first.start()
        assert storage.arrived.wait(TIMEOUT)
        late = storage.write(KEYS, PAGES, timeout=0.01)
        assert late.statuses == (WriteStatus.FAILED,) * 6
        assert late.reason.startswith("timed out")
        storage.gate.set()
        first.join(TIMEOUT)
        assert write(storage).count(WriteStatus.PRESENT) == 6


def test_what_a_client_raises_is_a_storage_error_and_counted() -> None:
    def fail(deadline: Deadline) -> None:
        raise OSError("no route")

    with DictStorage(SPEC) as storage:
        storage.error = fail
        for call in (
            lambda: storage.contains(KEYS, timeout=TIMEOUT),
            lambda: read(storage),
            lambda: write(storage),
            lambda: storage.delete(KEYS, timeout=TIMEOUT),
            lambda: storage.clear(timeout=TIMEOUT),
        ):
            refused(StorageError, "dict: no route", call)
        found = storage.stats()
        assert (found.reads_failed, found.writes_failed, found.timeouts) == (6, 6, 0)


def test_what_a_client_raises_behind_the_time_is_that_time_was_up() -> None:
    asked = 0

    def late(deadline: Deadline) -> None:
        nonlocal asked
        asked += 1
        while not deadline.passed:
            threading.Event().wait(deadline.left)
        raise OSError("no answer")

    with DictStorage(SPEC) as storage:
        storage.error = late
        into = list(np.zeros((6, PAGE_BYTES), np.uint8))
        while not asked:  # so short a time may be over before the client is asked
            wrote = storage.write(KEYS, PAGES, timeout=0.01)
        while asked < 2:
            got = storage.read(KEYS, into, timeout=0.01)
        for statuses, reason, failed in (
            (wrote.statuses, wrote.reason, WriteStatus.FAILED),
            (got.statuses, got.reason, ReadStatus.FAILED),
        ):
            assert statuses == (failed,) * 6
            assert reason.startswith("timed out")
            assert "no answer" in reason
        while asked < 3:
            with pytest.raises(StorageError, match="timed out") as found:
                storage.contains(KEYS, timeout=0.01)
        assert "no answer" in str(found.value)
        assert storage.stats().timeouts >= 3


def test_what_is_there_is_said_though_the_others_fail() -> None:
    def fail() -> None:
        raise OSError("no route")

    with DictStorage(SPEC) as storage:
        write(storage, KEYS[:2])
        storage.error = lambda deadline: fail() if len(storage.sent) == 2 else None
        result = write(storage)
        assert result.statuses == (WriteStatus.PRESENT,) * 2 + (WriteStatus.FAILED,) * 4
        assert result.reason == "dict: no route"
        figures = storage.stats()
        assert (figures.writes_stored, figures.writes_present, figures.writes_failed) == (2, 2, 4)


def test_close_waits_for_calls() -> None:
    storage = DictStorage(SPEC)
    storage.gate.clear()
    results: list[Any] = []
    writer = threading.Thread(target=lambda: results.append(write(storage)))
    writer.start()
    assert storage.arrived.wait(TIMEOUT)
    closer = threading.Thread(target=storage.close)
    closer.start()
    storage.gate.set()
    for thread in (writer, closer):
        thread.join(TIMEOUT)
    assert results[0].prefix == 6
    refused(Detached, "", storage.contains, KEYS, timeout=TIMEOUT)


def test_a_forked_child_cannot_use_it_and_does_not_close_it() -> None:
    with DictStorage(SPEC) as storage:
        write(storage)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                storage.contains(KEYS, timeout=TIMEOUT)
            except Detached:
                with storage:
                    status = 0
            os._exit(status if storage.values else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert storage.contains(KEYS, timeout=TIMEOUT) == 6


@pytest.mark.parametrize("verb", ["contains", "read", "write", "delete"])
def test_an_interrupt_at_any_place_leaves_nothing(verb: str) -> None:
    calls: dict[str, Callable[[RemoteStorage], object]] = {
        "contains": lambda storage: storage.contains(KEYS, timeout=TIMEOUT),
        "read": read,
        "write": write,
        "delete": lambda storage: storage.delete(KEYS, timeout=TIMEOUT),
    }
    at, more = 0, True
    while more:
        with DictStorage(SPEC) as storage:
            more = interrupt(lambda storage=storage: calls[verb](storage), at)  # type: ignore[misc]
            assert storage._calls._under_way == 0, f"at {at}"
            assert write(storage).prefix == 6, f"at {at}"
        at += 1
    assert at > 20
