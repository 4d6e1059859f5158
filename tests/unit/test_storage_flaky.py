"""Every way in which FlakyStorage fails; and URLs, which are made of it."""

from __future__ import annotations

import threading
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from support.refusals import refused

from lightcache import ConfigError, Detached, StorageError
from lightcache.storage import MemoryStorage, StorageSpec, open_storage, register, urls
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.testing import Fault, FlakyStorage, Rates
from lightcache.storage.testing.conformance import PAGE_BYTES, SPEC, make_keys, pages_of
from lightcache.storage.urls import schemes

OK, ABSENT, FAILED, CORRUPT = ReadStatus
KEYS = make_keys(6)
PAGES = pages_of(KEYS)


class Time:
    """Passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def flaky(**how: Any) -> FlakyStorage:
    """With all pages stored, before anything goes wrong."""
    inner = MemoryStorage(SPEC)
    inner.write(KEYS, list(PAGES), timeout=60.0)
    return FlakyStorage(inner, **how)


def read(storage: FlakyStorage, timeout: float = 60.0) -> tuple[Any, Any]:
    into = np.zeros((6, PAGE_BYTES), np.uint8)
    return storage.read(KEYS, list(into), timeout=timeout), into


def put(storage: FlakyStorage, timeout: float = 60.0) -> Any:
    return storage.write(KEYS, list(PAGES), timeout=timeout)


@pytest.mark.parametrize(
    ("kind", "status"), [("fail", FAILED), ("corrupt", CORRUPT), ("truncate", CORRUPT)]
)
def test_a_read_of_one_key_goes_wrong(kind: Any, status: ReadStatus) -> None:
    with flaky(script={"read": [Fault(kind, at=2)]}) as storage:
        result, into = read(storage)
        assert result.statuses == (OK, OK, status, OK, OK, OK)
        assert result.prefix == 2
        assert kind in result.reason
        assert [bool((a == b).all()) for a, b in zip(into, PAGES, strict=True)] == [
            i != 2 for i in range(6)
        ]
        assert read(storage)[0].prefix == 6  # the script has ended
        found = storage.stats()
        assert (found.reads_ok, found.reads_failed + found.reads_corrupt) == (11, 1)


def test_what_is_absent_cannot_be_corrupt() -> None:
    inner = MemoryStorage(SPEC)
    with FlakyStorage(inner, script={"read": [Fault("corrupt"), Fault("fail", at=1)]}) as storage:
        assert read(storage)[0].statuses == (ABSENT,) * 6
        assert read(storage)[0].statuses == (ABSENT, FAILED, *(ABSENT,) * 4)


def test_a_write_of_one_key_goes_wrong() -> None:
    script = {"write": [Fault("fail", at=1), Fault("refuse", at=1), Fault("refuse"), None]}
    with FlakyStorage(MemoryStorage(SPEC), script=script) as storage:  # type: ignore[arg-type]
        first = put(storage)
        assert first.statuses[:3] == (WriteStatus.STORED, WriteStatus.FAILED, WriteStatus.STORED)
        assert first.prefix == 1
        assert "fail" in first.reason
        assert storage.contains(KEYS, timeout=60.0) == 1
        again = put(storage)
        assert again.statuses[:2] == (WriteStatus.PRESENT, WriteStatus.REFUSED)
        assert put(storage).count(WriteStatus.REFUSED) == 6
        assert put(storage).prefix == 6


def test_a_parent_is_passed_on() -> None:
    """Of a write that is done in two parts, each has its own."""
    told: list[Any] = []

    class Noting(MemoryStorage):
        def write(self, *arguments: Any, parent: Any = None, **how: Any) -> Any:
            told.append(None if parent is None else parent.tolist())
            return super().write(*arguments, **how)

    before = make_keys(1, 7)
    with FlakyStorage(Noting(SPEC), script={"write": [Fault("hang", at=3)]}) as storage:
        how: Any = {"timeout": 60.0, "parent": before}
        thread = threading.Thread(target=storage.write, args=(KEYS, list(PAGES)), kwargs=how)
        thread.start()
        assert storage.wait_hanging()
        storage.let_go()
        thread.join()
    assert told == [before.tolist(), KEYS[2:3].tolist()]


def test_whole_calls_fail() -> None:
    fail: Any = [Fault("fail")]
    with flaky(script=dict.fromkeys(["contains", "read", "write", "delete", "clear"], fail)) as one:
        calls = [
            lambda: one.contains(KEYS, timeout=60.0),
            lambda: read(one),
            lambda: put(one),
            lambda: one.delete(KEYS, timeout=60.0),
            lambda: one.clear(timeout=60.0),
        ]
        for call in calls:
            refused(StorageError, "on purpose", call)
        assert one.stats().reads_failed == one.stats().writes_failed == 6
        assert one.contains(KEYS, timeout=60.0) == 6


def test_a_delay_that_is_short_enough_and_one_that_is_not() -> None:
    time = Time()
    slow = Fault("delay", seconds=3.0)
    script: Any = {"read": [slow, slow], "write": [slow], "contains": [slow, slow]}
    with flaky(script=script, sleep=time.sleep, clock=lambda: time.now) as storage:
        assert read(storage, timeout=5.0)[0].prefix == 6
        late = read(storage, timeout=2.0)[0]
        assert late.statuses == (FAILED,) * 6
        assert late.reason.startswith("timed out")
        assert put(storage, timeout=1.0).reason.startswith("timed out")
        assert storage.contains(KEYS, timeout=5.0) == 6
        refused(StorageError, "timed out", storage.contains, KEYS, timeout=1.0)
        assert time.slept == [3.0, 2.0, 1.0, 3.0, 1.0]
        assert storage.stats().timeouts == 3


def test_it_hangs_until_it_is_let_go_and_then_goes_on_late() -> None:
    time = Time()
    with flaky(script={"read": [Fault("hang", at=2)]}, clock=lambda: time.now) as storage:
        into = np.zeros((6, PAGE_BYTES), np.uint8)
        results: list[Any] = []
        thread = threading.Thread(
            target=lambda: results.append(storage.read(KEYS, list(into), timeout=1.0))
        )
        thread.start()
        assert storage.wait_hanging()
        assert storage.hanging == 1
        assert (into[:2] == PAGES[:2]).all()
        assert not into[2:].any()
        time.now += 50.0
        storage.let_go()
        thread.join()
        assert results[0].prefix == 6
        assert (into == PAGES).all()


def test_it_dies_in_the_middle_of_a_batch() -> None:
    with flaky(script={"read": [Fault("die", at=3)]}) as storage:
        into = np.zeros((6, PAGE_BYTES), np.uint8)
        refused(StorageError, "behind 3 of 6", storage.read, KEYS, list(into), timeout=60.0)
        assert (into[:3] == PAGES[:3]).all()
        assert not into[3:].any()
        refused(StorageError, "dead", storage.contains, KEYS, timeout=60.0)
        storage.revive()
        assert storage.contains(KEYS, timeout=60.0) == 6


def test_dying_in_a_write_stores_what_came_before() -> None:
    with FlakyStorage(MemoryStorage(SPEC), script={"write": [Fault("die", at=4)]}) as storage:
        refused(StorageError, "", put, storage)
        assert storage.inner.contains(KEYS, timeout=60.0) == 4
        assert storage.stats().writes_failed == 6


def test_chance_is_the_same_for_the_same_seed() -> None:
    def run(seed: int) -> list[Any]:
        rates = Rates(read_fail=0.2, corrupt=0.2, truncate=0.1)
        with flaky(rates=rates, seed=seed) as storage:
            return [read(storage)[0].statuses for _ in range(20)]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert {status for result in run(3) for status in result} == {OK, FAILED, CORRUPT}


def test_each_rate_does_what_it_says() -> None:
    everything = {
        "contains_fail": lambda one: one.contains(KEYS, timeout=60.0),
        "delete_fail": lambda one: one.delete(KEYS, timeout=60.0),
        "die": put,
    }
    for name, call in everything.items():
        with flaky(rates=Rates(**{name: 1.0})) as storage, pytest.raises(StorageError):
            call(storage)
    for name, status in (("refuse", WriteStatus.REFUSED), ("write_fail", WriteStatus.FAILED)):
        with FlakyStorage(MemoryStorage(SPEC), rates=Rates(**{name: 1.0})) as storage:
            assert put(storage).statuses == (status,) * 6
    time = Time()
    with flaky(rates=Rates(delay=0.5), sleep=time.sleep, clock=lambda: time.now) as storage:
        assert read(storage)[0].prefix == 6
        assert time.slept == [0.5]
    with flaky(rates=Rates(hang=1.0)) as storage:
        storage.let_go()
        assert read(storage)[0].prefix == 6


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault("explode"),  # type: ignore[arg-type]
        lambda: Fault("fail", at=-1),
        lambda: Rates(corrupt=1.5),
        lambda: Rates(delay=-1.0),
        lambda: flaky(script={"open": []}),
    ],
)
def test_nonsense_is_refused(make: Any) -> None:
    refused(ConfigError, "", make)


def test_closing_closes_what_is_behind_it() -> None:
    storage = flaky()
    storage.close()
    refused(Detached, "", storage.inner.contains, KEYS, timeout=60.0)


# ---------------------------------------------------------------- URLs


def test_urls() -> None:
    with open_storage("memory:", page_bytes=PAGE_BYTES) as plain:
        assert isinstance(plain, MemoryStorage)
        assert plain.spec == StorageSpec(PAGE_BYTES)
    with open_storage("memory:?capacity=1GiB", page_bytes=1 << 20) as sized:
        assert sized.capacity == 1024  # type: ignore[attr-defined]
    with open_storage("flaky:read_fail=0.25,corrupt=0.01,seed=3:memory:?pages=7", spec=SPEC) as one:
        assert isinstance(one, FlakyStorage)
        assert one._planner.rates == Rates(read_fail=0.25, corrupt=0.01)
        assert one.spec == SPEC
        assert one.inner.capacity == 7  # type: ignore[attr-defined]
    with open_storage("flaky::flaky:seed=2:memory:", spec=SPEC) as nested:
        assert isinstance(nested.inner, FlakyStorage)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("tape:", r"\['disk', 'flaky', 'memory', .*'redis', .*\], found 'tape'; others"),
        ("memory", "such as 'memory:'"),
        ("memory:/somewhere", "'memory:\\?options'"),
        ("memory:?size=3", "memory: expected capacity, pages, found size"),
        ("memory:?pages=many", "pages: expected a number"),
        ("memory:?pages", "name=value"),
        ("memory:?pages=1&pages=2", "each option once"),
        ("memory:?pages=1&capacity=1GiB", "once"),
        ("flaky:", "the URL of another storage"),
        ("flaky:seed=1", "the URL of another storage"),
        ("flaky:sometimes=1:memory:", "flaky: expected .*, found sometimes"),
        (
            "flaky:read_fail=often:memory:",
            "read_fail: expected a number from 0 to 1, found 'often'",
        ),
        ("flaky:read_fail=2:memory:", "0 to 1"),
        ("flaky:seed=1:tape:", "found 'tape'"),
    ],
)
def test_bad_urls(url: str, message: str) -> None:
    refused(ConfigError, message, open_storage, url, spec=SPEC)


def test_the_size_is_given_once() -> None:
    refused(ConfigError, "once", open_storage, "memory:")
    refused(ConfigError, "once", open_storage, "memory:", page_bytes=1, spec=SPEC)


def test_registering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_openers", dict(urls._openers))
    seen: list[str] = []

    def opener(rest: str, spec: StorageSpec) -> MemoryStorage:
        seen.append(rest)
        return MemoryStorage(spec)

    register("mine", opener)
    assert "mine" in schemes()
    open_storage("flaky:seed=1:mine://host/a?b=c", spec=SPEC).close()
    assert seen == ["//host/a?b=c"]
    refused(ConfigError, "registered already", register, "mine", opener)
    refused(ConfigError, "small letter", register, "Mine", opener)


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("theirs", "lightcache.storage.urls:_open_memory", "lightcache.storage"),
        EntryPoint("broken", "no_such_package:opener", "lightcache.storage"),
    ]

    def found(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "lightcache.storage"
        return [point for point in points if name in (None, point.name)]

    monkeypatch.setattr(urls, "entry_points", found)
    ours = ("disk", "flaky", "memory", "service", "stack", *urls.REMOTE)
    assert schemes() == sorted(("broken", "theirs", *ours))
    with open_storage("theirs:?pages=3", spec=SPEC) as storage:
        assert storage.capacity == 3  # type: ignore[attr-defined]
    refused(StorageError, "no_such_package", open_storage, "broken:", spec=SPEC)
