"""Backends against the conformance checks, and against a dict."""

from __future__ import annotations

import signal
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from lightcache import ConfigError, Detached, StorageError
from lightcache.storage import MemoryStorage, Storage, StorageSpec, open_storage
from lightcache.storage.common import Deadline, checksum
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.testing import FlakyStorage
from lightcache.storage.testing.conformance import (
    CHECKS,
    MOST_PAGES,
    PAGE_BYTES,
    SPEC,
    check_forked,
    check_storage,
    make_keys,
    pages_of,
)

FACTORIES: dict[str, Callable[[StorageSpec], Storage]] = {
    "memory": MemoryStorage,
    "bounded": lambda spec: MemoryStorage(spec, pages=MOST_PAGES),
    "flaky": lambda spec: FlakyStorage(MemoryStorage(spec)),
    "url": lambda spec: open_storage("flaky:seed=1:memory:?capacity=1MiB", spec=spec),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", FACTORIES)
def test_conformance(name: str, check: Callable[..., None]) -> None:
    check(FACTORIES[name])


class Absentminded(MemoryStorage):
    """Forgets to look at a page's place in the batch."""

    def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
        return super().read(keys, buffers[::-1], timeout=timeout)


class Everywhere(MemoryStorage):
    """Forgets that a forked child has no part of it."""

    def delete(self, keys: Any, *, timeout: float) -> int:
        return 0


class Waiting(MemoryStorage):
    """Waits in a forked child, for a thread that there is not."""

    def delete(self, keys: Any, *, timeout: float) -> int:
        signal.alarm(1)
        return threading.Event().wait()


@pytest.mark.parametrize(("kind", "found"), [(Everywhere, "delete: expected"), (Waiting, "''")])
def test_conformance_sees_a_child_that_is_not_refused(kind: Any, found: str) -> None:
    refused(AssertionError, found, check_forked, kind)


def test_conformance_names_the_check() -> None:
    check_storage(MemoryStorage)
    with pytest.raises(AssertionError, match=r"check_round_trip: read: key 0 .* other bytes"):
        check_storage(Absentminded)


# ---------------------------------------------------------------- a dict as oracle

POOL = make_keys(12, seed=9)
CONTENT = pages_of(POOL)
Picks = st.lists(st.integers(0, len(POOL) - 1), max_size=6)
Deeds = st.lists(
    st.tuples(st.sampled_from(["write", "read", "contains", "delete", "clear", "damage"]), Picks),
    max_size=25,
)


class Oracle:
    """What MemoryStorage says it does, at length: a dict of what is there, last used last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.there: OrderedDict[int, bool] = OrderedDict()  # False: damaged

    def touch(self, picks: list[int]) -> None:
        for one in reversed(picks):
            if one in self.there:
                self.there.move_to_end(one)

    def write(self, picks: list[int]) -> list[WriteStatus]:
        told = []
        for one in picks:
            if one in self.there:
                told.append(WriteStatus.PRESENT)
                continue
            others = [each for each in self.there if each not in picks]
            if len(self.there) == self.capacity and not others:
                told.append(WriteStatus.REFUSED)
                continue
            if len(self.there) == self.capacity:
                del self.there[others[0]]
            self.there[one] = True
            told.append(WriteStatus.STORED)
        self.touch(picks)
        return told

    def read(self, picks: list[int]) -> list[ReadStatus]:
        self.touch(picks)
        told = []
        names = {None: ReadStatus.ABSENT, True: ReadStatus.OK, False: ReadStatus.CORRUPT}
        found = [self.there.get(one) for one in picks]
        for one, state in zip(picks, found, strict=True):
            told.append(names[state])
            if state is False:
                self.there.pop(one, None)
        return told

    def contains(self, picks: list[int]) -> int:
        n = next((i for i, one in enumerate(picks) if one not in self.there), len(picks))
        self.touch(picks[:n])
        return n


def step(storage: MemoryStorage, oracle: Oracle, deed: str, picks: list[int]) -> None:
    """One deed on both; they must say the same."""
    keys = POOL[picks]
    if deed == "write":
        done = storage.write(keys, list(CONTENT[picks]), timeout=60.0)
        assert list(done.statuses) == oracle.write(picks)
    elif deed == "read":
        into = np.zeros((len(picks), PAGE_BYTES), np.uint8)
        result = storage.read(keys, list(into), timeout=60.0)
        assert list(result.statuses) == oracle.read(picks)
        for i, status in enumerate(result.statuses):
            assert status is not ReadStatus.OK or (into[i] == CONTENT[picks[i]]).all()
    elif deed == "contains":
        assert storage.contains(keys, timeout=60.0) == oracle.contains(picks)
    elif deed == "delete":
        gone = [oracle.there.pop(one, None) for one in picks]
        assert storage.delete(keys, timeout=60.0) == sum(one is not None for one in gone)
    elif deed == "clear":
        assert storage.clear(timeout=60.0) == len(oracle.there)
        oracle.there.clear()
    else:
        for one in set(picks) & {one for one, sound in oracle.there.items() if sound}:
            storage.damage(POOL[one])
            oracle.there[one] = False


@settings(max_examples=150, deadline=None)
@given(deeds=Deeds, capacity=st.integers(0, 8))
def test_memory_does_what_a_dict_would(deeds: list[Any], capacity: int) -> None:
    oracle = Oracle(capacity)
    with MemoryStorage(SPEC, pages=capacity) as storage:
        for deed, picks in deeds:
            step(storage, oracle, deed, picks)
            assert storage.stats().pages == len(oracle.there)


# ---------------------------------------------------------------- memory alone


def put(storage: Storage, keys: Any) -> list[WriteStatus]:
    return list(storage.write(keys, list(pages_of(keys)), timeout=60.0).statuses)


def test_memory_drops_the_end_of_the_oldest_prefix() -> None:
    old, new = make_keys(4, 1), make_keys(2, 2)
    with MemoryStorage(SPEC, capacity=5 * PAGE_BYTES) as storage:
        put(storage, old)
        put(storage, new)
        assert storage.contains(old, timeout=60.0) == 3
        assert put(storage, make_keys(9, 3)).count(WriteStatus.REFUSED) == 4
        assert storage.contains(make_keys(9, 3), timeout=60.0) == 5


@pytest.mark.parametrize("length", [None, 0, PAGE_BYTES - 1])
def test_memory_notices_damage_and_drops_the_page(length: int | None) -> None:
    keys = make_keys(3)
    with MemoryStorage(SPEC) as storage:
        put(storage, keys)
        storage.damage(keys[1], length=length)
        into = np.zeros((3, PAGE_BYTES), np.uint8)
        result = storage.read(keys, list(into), timeout=60.0)
        assert result.statuses == (ReadStatus.OK, ReadStatus.CORRUPT, ReadStatus.OK)
        assert result.prefix == 1
        assert "checksum" in result.reason
        assert storage.contains(keys, timeout=60.0) == 1
        assert storage.stats().reads_corrupt == 1
        assert put(storage, keys)[1] is WriteStatus.STORED
        refused(StorageError, "there is no page", storage.damage, make_keys(1, 5))


def test_a_checksum_is_of_the_key_too() -> None:
    assert checksum(b"a" * 16, b"page") != checksum(b"b" * 16, b"page")
    assert checksum(b"a" * 16, b"page") != checksum(b"a" * 16, b"pagf")


def test_memory_counts_what_came_too_late() -> None:
    keys = make_keys(2)
    with MemoryStorage(SPEC) as storage:
        late = storage.write(keys, list(pages_of(keys)), timeout=0.0)
        assert set(late.statuses) == {WriteStatus.FAILED}
        assert late.reason.startswith("timed out")
        into = list(np.zeros((2, PAGE_BYTES), np.uint8))
        assert storage.read(keys, into, timeout=0.0).count(ReadStatus.FAILED) == 2
        for verb in (storage.contains, storage.delete):
            refused(StorageError, "timed out", verb, keys, timeout=0.0)
        refused(StorageError, "timed out", storage.clear, timeout=0.0)
        found = storage.stats()
        assert (found.timeouts, found.writes_failed, found.reads_failed) == (5, 2, 2)


@pytest.mark.parametrize(
    "how",
    [
        {"pages": 1, "capacity": "1GiB"},
        {"pages": -1},
        {"pages": 1.5},
        {"capacity": "much"},
        {"capacity": 0},
    ],
)
def test_memory_refuses(how: dict[str, Any]) -> None:
    refused(ConfigError, "", MemoryStorage, SPEC, **how)


def test_memory_is_closed_after_a_write_in_flight(
    monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    keys = make_keys(2)
    storage = MemoryStorage(SPEC)
    order: list[str] = []

    def close() -> None:
        storage.close()
        order.append("closed")

    closer = threading.Thread(target=close)

    def writing(*arguments: Any) -> int:
        if closer.ident is None:
            closer.start()
        wait_until(lambda: _refuses(storage), "the storage to be closing")
        order.append("written")
        return checksum(*arguments)

    monkeypatch.setattr("lightcache.storage.memory.checksum", writing)
    assert put(storage, keys) == [WriteStatus.STORED] * 2
    closer.join(60)
    assert order == ["written", "written", "closed"]
    assert storage.stats().pages == 0


def _refuses(storage: MemoryStorage) -> bool:
    try:
        storage.contains(make_keys(1), timeout=0.0)
    except Detached:
        return True
    except StorageError:
        return False
    return False


def test_memory_stores_once_what_two_write_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_keys(1)
    storage = MemoryStorage(SPEC)
    other: list[WriteStatus] = []

    def overtaken(*arguments: Any) -> int:
        monkeypatch.undo()
        other.extend(put(storage, key))
        return checksum(*arguments)

    monkeypatch.setattr("lightcache.storage.memory.checksum", overtaken)
    assert put(storage, key) == [WriteStatus.PRESENT]
    assert other == [WriteStatus.STORED]
    storage.close()


# ---------------------------------------------------------------- specs and deadlines


def test_specs_have_names_of_their_own() -> None:
    specs = [
        StorageSpec(4096),
        StorageSpec(8192),
        StorageSpec(4096, "a"),
        StorageSpec(4096, "", "a"),
    ]
    assert len({spec.name for spec in specs}) == 4
    assert StorageSpec(4096).name == StorageSpec(4096).name
    assert len(specs[0].name) == 16
    for bad in (0, -1, "1", 1.0, True):
        refused(ConfigError, "", StorageSpec, bad)


@pytest.mark.parametrize("timeout", [None, "1", float("nan"), True])
def test_a_timeout_is_a_number(timeout: Any) -> None:
    refused(ConfigError, "timeout", Deadline, timeout)


def test_a_deadline_passes() -> None:
    now = [10.0]
    deadline = Deadline(2, lambda: now[0])
    assert deadline.left == 2.0
    now[0] = 12.0
    assert deadline.passed
    assert deadline.left == 0.0
    assert "2 s" in deadline.reason
