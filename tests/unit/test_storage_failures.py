"""StorageTier when pages are bad and calls fail, and when it stops using the storage."""

from __future__ import annotations

from typing import Any

import pytest
from support.storing import KEYS, empty, fill, full, holds, sound, stored

from lightcache import Cache
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier, TaskState
from lightcache.storage.testing import Fault, FlakyStorage
from lightcache.storage.testing.conformance import make_keys

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED

# ---------------------------------------------------------------- bad pages


@pytest.mark.parametrize("at", [0, 1, 3, 7])
@pytest.mark.parametrize("kind", ["fail", "corrupt", "truncate"])
def test_a_bad_page_ends_the_prefix(cache: Cache, kind: Any, at: int) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault(kind, at=at)]})
    with StorageTier(cache, flaky, group=8) as tier:
        task = tier.prefetch(KEYS)
        result = task.wait()
        assert task.state is FINISHED
        assert result.prefix == result.loaded == 8 + at
        assert (result.failed, result.corrupt) == ((1, 0) if kind == "fail" else (0, 1))
        assert result.absent == 0
        assert kind in result.reasons[0]
        assert sound(cache, KEYS) == 8 + at
        assert cache.stats().ready == 8 + at
        assert tier.prefetch(KEYS, 8 + at).wait().prefix == 12 - at


def test_absent_and_failed_are_told_apart(cache: Cache) -> None:
    storage = stored(cache, KEYS[:6])
    flaky = FlakyStorage(storage, script={"read": [Fault("fail", at=4)]})
    with StorageTier(cache, flaky) as tier:
        result = tier.prefetch(KEYS).wait()
        assert (result.absent, result.failed, result.loaded) == (14, 1, 4)
        assert tier.stats().absent == 14
        assert tier.stats().failed == 1


def test_what_vanished_between_asking_and_reading_is_absent(cache: Cache) -> None:
    storage = full(cache)

    class Forgetful(FlakyStorage):
        def contains(self, keys: Any, *, timeout: float) -> int:
            found = super().contains(keys, timeout=timeout)
            storage.delete(KEYS[5:6], timeout=60.0)
            return found

    with StorageTier(cache, Forgetful(storage)) as tier:
        result = tier.prefetch(KEYS).wait()
        assert (result.loaded, result.absent, result.failed) == (5, 1, 0)
        assert sound(cache, KEYS) == 5


def test_writing_stops_at_a_hole(cache: Cache) -> None:
    fill(cache, KEYS)
    script: Any = {"write": [None, Fault("refuse", at=1), Fault("fail", at=0)]}
    storage = empty(cache)
    with StorageTier(cache, FlakyStorage(storage, script=script), group=4) as tier:
        result = tier.write(KEYS).wait()
        assert (result.prefix, result.stored, result.refused, result.skipped) == (5, 7, 1, 12)
        result = tier.write(KEYS).wait()
        assert (result.prefix, result.present, result.failed) == (5, 7, 1)
        result = tier.write(KEYS).wait()
        assert (result.prefix, result.stored) == (20, 12)
    assert holds(storage, KEYS) == 20


# ---------------------------------------------------------------- calls that fail


def test_a_storage_that_dies_in_the_middle_of_a_batch(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("die", at=3)]})
    with StorageTier(cache, flaky, group=8) as tier:
        task = tier.prefetch(KEYS)
        result = task.wait()
        assert task.state is FAILED
        assert (result.prefix, result.loaded) == (8, 8)
        assert "died on purpose behind 3 of 8" in result.reasons[0]
        assert sound(cache, KEYS) == 8
        fill(cache, KEYS[8:10].copy())
        task = tier.write(KEYS[8:10].copy())
        task.wait()
        assert task.state is FAILED
        assert tier.stats().writing == 0


class Odd(MemoryStorage):
    """Does not do what it promises."""

    answers: Any = None

    def contains(self, keys: Any, *, timeout: float) -> Any:
        return self.answers(keys) if "contains" in self.answers.__name__ else len(keys)

    def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
        return self.answers(keys)

    write = read


def raises_contains(keys: Any) -> Any:
    raise ZeroDivisionError("in the backend")


def too_many_contains(keys: Any) -> Any:
    return len(keys) + 1


def none_contains(keys: Any) -> Any:
    return None


def raises(keys: Any) -> Any:
    raise OSError("the medium is gone")


def returns_none(keys: Any) -> Any:
    return None


def returns_less(keys: Any) -> Any:
    from lightcache.storage.protocol import ReadResult, ReadStatus

    return ReadResult((ReadStatus.OK,))


@pytest.mark.parametrize(
    "answers",
    [raises_contains, too_many_contains, none_contains, raises, returns_none, returns_less],
)
def test_a_backend_that_breaks_its_promise(cache: Cache, answers: Any) -> None:
    odd = Odd(StorageSpec.of(cache))
    odd.answers = answers
    with StorageTier(cache, odd, failures=1, threads=1) as tier:
        task = tier.prefetch(KEYS)
        assert task.wait(60.0).prefix == 0
        assert task.state is FAILED
        assert task.result.reasons[0]
        assert cache.stats().ready == 0
        assert tier.stats().state == "open"


def test_a_cleared_namespace_ends_a_prefetch(cache: Cache) -> None:
    space = cache.namespace("v1")

    class Clearing(FlakyStorage):
        def read(self, *arguments: Any, timeout: float) -> Any:
            cache.clear(space)
            return super().read(*arguments, timeout=timeout)

    with StorageTier(cache, Clearing(full(cache)), group=4) as tier:
        task = tier.prefetch(KEYS, namespace=space)
        result = task.wait()
        assert task.state is FAILED
        assert result.loaded == 0
        assert sound(cache, KEYS, namespace=space) == 0


def test_a_cache_that_is_full(cache: Cache) -> None:
    fill(cache, make_keys(90, seed=5))
    with cache.match(make_keys(90, seed=5)) as lease:
        assert len(lease) == 90
        with StorageTier(cache, full(cache), group=4) as tier:
            task = tier.prefetch(KEYS)
            result = task.wait()
            assert task.state is FINISHED
            assert (result.loaded, result.no_room, result.prefix) == (6, 2, 6)
            assert "no room" in result.reasons[0]
    assert sound(cache, KEYS) == 6


# ---------------------------------------------------------------- the breaker


def test_a_storage_that_goes_on_failing_is_left_alone(
    cache: Cache, caplog: Any, wait_until: Any
) -> None:
    now = [0.0]
    fill(cache, KEYS[:2])
    flaky = FlakyStorage(full(cache), script={"contains": [Fault("fail")] * 4})
    how: Any = {"failures": 3, "retry": 30.0, "timeout": 60.0, "clock": lambda: now[0]}
    with StorageTier(cache, flaky, **how) as tier:
        for _ in range(3):
            assert tier.stats().state == "closed"
            tier.prefetch(KEYS, 2).wait(60.0)
        assert tier.stats().state == "open"
        task = tier.prefetch(KEYS, 2)
        assert task.state is FAILED
        assert "disabled after 3 failures" in task.result.reasons[0]
        assert task.result.failed == 18
        result = tier.write(KEYS[:2]).wait(0.0)
        assert "disabled" in result.reasons[0]
        assert cache.check().pins == 0
        now[0] = 30.0
        assert tier.stats().state == "half-open"
        assert tier.prefetch(KEYS, 2).ended  # the probe is no request's
        tier.poll()
        wait_until(lambda: tier.stats().state == "open", "the probe, which fails")
        now[0] = 59.0
        tier.poll()
        assert tier.prefetch(KEYS, 2).ended
        now[0] = 60.0
        tier.poll()
        wait_until(lambda: tier.stats().state == "closed", "the probe")
        assert tier.prefetch(KEYS, 2).wait(60.0).loaded == 18
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "storage is disabled after 3 failures" in warnings[0].getMessage()


def test_failures_count_in_a_row(cache: Cache) -> None:
    fail = Fault("fail")
    flaky = FlakyStorage(empty(cache), script={"contains": [fail, fail, None, fail, fail, fail]})
    with StorageTier(cache, flaky, failures=3) as tier:
        for _ in range(5):
            tier.prefetch(KEYS).wait(60.0)
            assert tier.stats().state == "closed"
        tier.prefetch(KEYS).wait(60.0)
        assert tier.stats().state == "open"


def test_one_probe_at_a_time_and_a_hanging_one_fails(cache: Cache, wait_until: Any) -> None:
    now = [0.0]
    script: Any = {"contains": [Fault("fail"), Fault("hang")]}
    flaky = FlakyStorage(full(cache), script=script)
    how: Any = {"failures": 1, "retry": 5.0, "timeout": 10.0, "grace": 0.0}
    with StorageTier(cache, flaky, **how, clock=lambda: now[0]) as tier:
        tier.prefetch(KEYS).wait(60.0)
        now[0] = 5.0
        tier.poll()
        assert flaky.wait_hanging()
        assert tier.stats().state == "half-open"
        assert tier.prefetch(KEYS).state is FAILED
        now[0] = 15.0
        tier.poll()
        assert tier.stats().state == "open"
        assert tier.stats().stuck == 1
        flaky.let_go()
        wait_until(lambda: tier.stats().stuck == 0, "the probe to come back")
        assert tier.stats().state == "open"  # too late to count
        now[0] = 20.0
        tier.poll()
        wait_until(lambda: tier.stats().state == "closed", "the probe")
        assert tier.prefetch(KEYS).wait(60.0).loaded == 20


def test_pages_that_fail_one_by_one_are_no_failure_of_the_storage(cache: Cache) -> None:
    script: Any = {"read": [Fault("fail", at=1), None, *[Fault("corrupt", at=0)] * 3]}
    with StorageTier(cache, FlakyStorage(full(cache), script=script), failures=1) as tier:
        tier.prefetch(KEYS).wait(60.0)
        for _ in range(2):
            tier.prefetch(KEYS, 1).wait(60.0)
        assert tier.stats().state == "closed"
    all_fail: Any = {"read": [Fault("delay", seconds=60.0)]}
    now = [0.0]
    how: Any = {"clock": lambda: now[0]}
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    slow = FlakyStorage(full(cache), script=all_fail, sleep=sleep, **how)
    with StorageTier(cache, slow, failures=1, timeout=10.0, grace=60.0, **how) as tier:
        result = tier.prefetch(KEYS, 1).wait(60.0)
        assert result.failed == 16
        assert result.reasons[0].startswith("timed out")
        assert tier.stats().state == "open"
