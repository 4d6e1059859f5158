"""Stacks of which one storage fails, hangs or dies: the others go on."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.refusals import refused
from support.stacks import KEYS, Noting, flaky, get, has, noting, put
from support.storing import fill, sound

from lightcache import Cache, StorageError
from lightcache.breaker import CircuitBreaker
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier, TaskState, stacked
from lightcache.storage.executor import Executor
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.stacked import StackedStorage
from lightcache.storage.testing import Fault, FlakyStorage
from lightcache.storage.testing.conformance import SPEC

OK, ABSENT, FAILED, CORRUPT = ReadStatus
STORED, PRESENT, LOST, REFUSED = WriteStatus
DEAD: Any = [Fault("die")]


def dead(which: Any = ()) -> Any:
    """One that has these keys, and fails in every call."""
    return flaky(which, script={"contains": DEAD, "read": DEAD, "write": DEAD})


# ---------------------------------------------------------------- dead


def test_the_upper_is_dead() -> None:
    lower = MemoryStorage(SPEC)
    with StackedStorage([dead(), lower]) as stack:
        assert put(stack).statuses == (STORED,) * 8
        assert stack.contains(KEYS, timeout=60.0) == 8
        assert get(stack).prefix == 8
        assert stack.settle(60.0)
        assert [one.promoted for one in stack.levels()] == [0, 0]


def test_the_lower_is_dead() -> None:
    upper = MemoryStorage(SPEC)
    with StackedStorage([upper, dead()], failures=100) as stack:
        assert put(stack, range(4)).statuses == (STORED,) * 4
        assert stack.contains(KEYS, timeout=60.0) == 4
        result = get(stack)
        assert result.statuses == (OK,) * 4 + (FAILED,) * 4  # nobody knows
        assert "storage 2 of 2" in result.reason


def test_both_are_dead() -> None:
    with StackedStorage([dead(), dead()], failures=100) as stack:
        for call in (
            lambda: put(stack),
            lambda: get(stack),
            lambda: stack.contains(KEYS, timeout=9),
        ):
            refused(StorageError, r"died on purpose|dead on purpose", call)
        found = stack.stats()
        assert (found.reads_failed, found.writes_failed) == (8, 8)


def test_a_dead_one_costs_one_warning_and_then_nothing(caplog: Any, wait_until: Any) -> None:
    now = [0.0]
    upper, lower = MemoryStorage(SPEC), flaky(script={"contains": DEAD})
    put(upper, [0])
    with StackedStorage([upper, lower], failures=2, retry=30.0, clock=lambda: now[0]) as stack:
        for _ in range(6):
            assert stack.contains(KEYS, timeout=60.0) == 1
        assert caplog.text.count("storage 2 of 2, FlakyStorage is disabled after 2 failures") == 1
        lower.revive()
        put(lower.inner, [1])
        assert stack.contains(KEYS, timeout=60.0) == 1  # it is not asked
        assert get(stack, [0, 1]).statuses == (OK, ABSENT)
        assert stack.levels()[1].state == "open"
        now[0] = 30.0
        assert stack.levels()[1].state == "half-open"
        assert stack.contains(KEYS, timeout=60.0) == 1  # it waits for no probe
        wait_until(lambda: stack.levels()[1].state == "closed", "the probe")
        assert stack.contains(KEYS, timeout=60.0) == 2
        assert get(stack, [0, 1]).prefix == 2


def test_all_are_disabled() -> None:
    with StackedStorage([dead(), dead()], failures=1) as stack:
        for _ in range(2):
            refused(StorageError, "", stack.contains, KEYS, timeout=60.0)
        refused(StorageError, "is disabled after 1 failures", get, stack)
        refused(StorageError, "is disabled after 1 failures", put, stack)


def test_an_error_that_is_none_of_ours() -> None:
    class Broken(MemoryStorage):
        def contains(self, keys: Any, *, timeout: float) -> Any:
            raise ZeroDivisionError("oops")

        def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
            return None

        def write(self, *arguments: Any, **how: Any) -> Any:
            raise ZeroDivisionError("oops")

    lower = MemoryStorage(SPEC)
    with StackedStorage([Broken(SPEC), lower]) as stack:
        assert put(stack).prefix == 8
        assert stack.contains(KEYS, timeout=60.0) == 8
        assert get(stack).prefix == 8


# ---------------------------------------------------------------- single pages


def test_pages_that_fail_above_are_read_below() -> None:
    upper = flaky(range(8), script={"read": [Fault("fail", at=2)]})
    lower = MemoryStorage(SPEC)
    put(lower)
    with StackedStorage([upper, lower]) as stack:
        result = get(stack)
        assert (result.prefix, result.reason) == (8, "")
        assert stack.settle(60.0)
        assert upper.inner.stats().writes_present == 0  # it is there: nothing to repair


def test_pages_that_fail_everywhere() -> None:
    upper = flaky(range(8), script={"read": [Fault("corrupt", at=2)]})
    lower = flaky(range(8), script={"read": [Fault("fail", at=0)]})
    with StackedStorage([upper, lower]) as stack:
        result = get(stack)
        assert result.statuses == (OK, OK, FAILED, OK, OK, OK, OK, OK)
        assert result.reason.startswith("corrupt on purpose")


def test_what_one_refuses_or_fails_another_stores() -> None:
    script: Any = {"write": [Fault("refuse"), Fault("fail", at=1), Fault("fail")]}
    for upside_down in (False, True):
        pair = [flaky(script=script), MemoryStorage(SPEC)]
        with StackedStorage(pair[::-1] if upside_down else pair) as stack:
            for turn in range(3):
                result = put(stack, [2 * turn, 2 * turn + 1])
                assert (result.statuses, result.reason) == ((STORED, STORED), "")


def test_what_all_refuse_or_fail() -> None:
    first = flaky(script={"write": [Fault("refuse"), Fault("refuse"), None]})
    second = flaky(script={"write": [Fault("fail", at=0), Fault("refuse"), Fault("fail")]})
    with StackedStorage([first, second]) as stack:
        result = put(stack, [0, 1])
        assert result.statuses == (LOST, STORED)
        assert "refuse on purpose" in result.reason
        assert put(stack, [2, 3]).statuses == (REFUSED, REFUSED)
        assert put(stack, [4, 5]).statuses == (STORED, STORED)


def test_a_piece_that_fails_leaves_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightcache.storage.stacked.PIECE", 4 * 4096)
    fail: Any = [None, Fault("fail")]
    lower = flaky(range(8), script={"read": fail})
    with StackedStorage([MemoryStorage(SPEC), lower], promote_bytes=0) as stack:
        assert get(stack).statuses == (OK,) * 4 + (FAILED,) * 4
    upper = flaky(script={"write": [Fault("refuse")]})
    lower = flaky(script={"write": fail})
    with StackedStorage([upper, lower]) as stack:
        assert put(stack).statuses == (STORED,) * 4 + (LOST,) * 4


def test_pieces_that_were_done_count_though_nobody_else_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightcache.storage.stacked.PIECE", 4 * 4096)
    script: Any = {"read": [None, Fault("fail")], "write": [Fault("refuse"), Fault("fail")]}
    for verb, expected in (
        (get, (OK, OK, ABSENT, ABSENT) + (FAILED,) * 4),
        (put, (REFUSED,) * 4 + (LOST,) * 4),
    ):
        with StackedStorage([dead(), flaky([0, 1, 6], script=script)], failures=1) as stack:
            assert stack.contains(KEYS, timeout=60.0) == 2
            assert stack.levels()[0].state == "open"
            assert verb(stack).statuses == expected


# ---------------------------------------------------------------- deleting


def test_deleting_says_what_failed() -> None:
    fail: Any = [Fault("fail")]
    upper = flaky([0, 1], script={"delete": fail, "clear": fail})
    lower = MemoryStorage(SPEC)
    put(lower, [1, 2])
    with StackedStorage([upper, lower]) as stack:
        with pytest.raises(StorageError, match=r"delete: the storage fails.*storage 1 of 2"):
            stack.delete(KEYS[1:2], timeout=60.0)
        assert has(lower) == [2]
        refused(StorageError, "clear: ", stack.clear, timeout=60.0)
        assert (has(upper), has(lower)) == ([0, 1], [])
        assert stack.clear(timeout=60.0) == 2
        assert has(stack) == []


@pytest.mark.parametrize(
    "remove",
    [lambda stack: stack.delete(KEYS[:1], timeout=60.0), lambda stack: stack.clear(timeout=60.0)],
    ids=["delete", "clear"],
)
def test_removing_asks_a_disabled_storage_too(remove: Any) -> None:
    """Of one whose bytes are flipped on the way: what it keeps would be served when it is back."""
    upper = flaky([0, 1], script={"read": [Fault("fail")]})
    lower = MemoryStorage(SPEC)
    with StackedStorage([upper, lower], failures=1) as stack:
        put(stack)
        assert get(stack).prefix == 8
        assert stack.levels()[0].state == "open"
        assert remove(stack) >= 1
        assert 0 not in (*has(upper.inner), *has(lower))
        assert stack.levels()[0].state == "closed"  # it has answered


@pytest.mark.parametrize("verb", ["delete", "clear"])
def test_a_write_that_comes_late_brings_back_nothing_that_was_removed(
    verb: str, wait_until: Any
) -> None:
    upper, lower = MemoryStorage(SPEC), flaky(script={"write": [Fault("hang", at=0)]})
    with StackedStorage([upper, lower], failures=100) as stack:

        def remove(timeout: float) -> int:
            if verb == "clear":
                return stack.clear(timeout=timeout)
            return stack.delete(KEYS, timeout=timeout)

        while not lower.hanging:  # so short a time may be over before it is asked
            put(stack, timeout=0.2)
        assert len(has(upper)) == 8
        refused(StorageError, f"^{verb}: timed out: a write has not returned", remove, 0.2)
        assert stack.stats().timeouts == 1
        put(upper)
        with ThreadPoolExecutor(1) as pool:
            removing = pool.submit(remove, 60.0)
            wait_until(lambda: not has(upper), "the removing to reach the second one")
            lower.let_go()
            assert removing.result(60.0) == 8
        assert has(stack) == []


# ---------------------------------------------------------------- time


class Timed(Noting):
    """Notes how long its calls may take."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.given: list[float] = []

    def contains(self, keys: Any, *, timeout: float) -> int:
        self.given.append(timeout)
        return super().contains(keys, timeout=timeout)

    def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
        self.given.append(timeout)
        return super().read(keys, buffers, timeout=timeout)

    def write(self, keys: Any, buffers: Any, *, timeout: float, parent: Any = None) -> Any:
        self.given.append(timeout)
        return super().write(keys, buffers, timeout=timeout, parent=parent)


def test_one_leaves_half_of_the_time_to_those_behind() -> None:
    upper, lower = Timed(SPEC), Timed(SPEC)
    with StackedStorage([upper, lower]) as stack:
        for call in (
            lambda: stack.contains(KEYS, timeout=1000.0),
            lambda: get(stack, timeout=1000.0),
            lambda: put(stack, timeout=1000.0),
        ):
            call()
            assert 400.0 < upper.given.pop() <= 500.0
            assert 500.0 < lower.given.pop() <= 900.0


def test_without_time_nobody_is_asked() -> None:
    stack, upper, lower = noting(failures=1)
    with stack:
        for level in stack._levels:
            with pytest.raises(StorageError, match=r"timed out: no time was left for contains"):
                level.contains(KEYS, 0.0)
        assert upper.calls == lower.calls == []
        assert [one.state for one in stack.levels()] == ["closed", "closed"]


class Slow(MemoryStorage):
    """Uses up its time, and says so."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.never = threading.Event()

    def contains(self, keys: Any, *, timeout: float) -> int:
        self.never.wait(timeout)
        raise StorageError("timed out: slow")

    def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
        self.never.wait(timeout)
        return super().read(keys, buffers, timeout=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_one_that_uses_up_its_time(place: int) -> None:
    pair: list[Any] = [MemoryStorage(SPEC)]
    put(pair[0], range(4))
    pair.insert(place, Slow(SPEC))
    with StackedStorage(pair, failures=100) as stack:
        assert stack.contains(KEYS, timeout=1.0) == 4
        result = get(stack, timeout=1.0)
        assert result.statuses == (OK,) * 4 + (FAILED,) * 4
        assert result.reason.startswith("timed out")


def test_a_lower_that_hangs_keeps_neither_the_caller_nor_its_pages(
    caplog: Any, wait_until: Any
) -> None:
    """It is not asked until its call returns; what that brings late reaches nobody."""
    now = [0.0]
    upper = Timed(SPEC)
    put(upper, range(4))
    hang: Any = [Fault("hang", at=0)]
    lower = flaky(range(8), script={"read": hang})
    with StackedStorage([upper, lower], failures=100, clock=lambda: now[0]) as stack:
        result = get(stack, timeout=1.0)
        assert result.statuses == (OK,) * 4 + (FAILED,) * 4
        assert "timed out: read has not returned" in result.reason
        assert lower.hanging == 1
        now[0] = 1.0 + stacked.GRACE
        assert stack.contains(KEYS, timeout=60.0) == 4
        assert upper.given[-1] > 50.0  # all of the time: nobody behind it is asked
        assert stack.levels()[1].hanging == 1
        assert get(stack).statuses == (OK,) * 4 + (ABSENT,) * 4
        assert caplog.text.count("storage 2 of 2, FlakyStorage hangs in read") == 1
        lower.let_go()
        wait_until(lambda: not stack.levels()[1].hanging, "the call that hung to return")
        assert stack.contains(KEYS, timeout=60.0) == 8
        assert get(stack).prefix == 8


@pytest.mark.parametrize("verb", ["contains", "write", "delete"])
def test_every_call_of_a_lower_has_a_limit(verb: str) -> None:
    hang: Any = {verb: [Fault("hang", at=0)]}
    lower = flaky(range(8), script=hang)
    with StackedStorage([MemoryStorage(SPEC), lower], failures=100) as stack:
        if verb == "contains":
            assert stack.contains(KEYS, timeout=1.0) == 0
        elif verb == "write":
            assert put(stack, timeout=1.0).statuses == (STORED,) * 8
        else:
            with pytest.raises(StorageError, match="timed out: delete has not returned"):
                stack.delete(KEYS, timeout=1.0)
        assert lower.hanging == 1


def test_an_upper_that_hangs_is_left_alone_by_later_calls() -> None:
    now = [0.0]
    upper = flaky(script={"read": [Fault("hang", at=0)]})
    lower = MemoryStorage(SPEC)
    put(lower)
    with StackedStorage([upper, lower], clock=lambda: now[0]) as stack:
        first = threading.Thread(target=get, args=(stack,))
        first.start()
        assert upper.wait_hanging()
        now[0] = 60.0 + stacked.GRACE
        assert stack.contains(KEYS, timeout=60.0) == 8
        assert get(stack).prefix == 8
        assert stack.levels()[0].hanging == 1
        assert stack.levels()[0].promoted == 0
        upper.let_go()
        first.join(60.0)
        assert stack.levels()[0].hanging == 0
        assert get(stack).prefix == 8
        assert stack.settle(60.0)
        assert stack.levels()[0].promoted == 8


def test_no_thread_for_a_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stack, _, lower = noting(upper=[0], lower=[0, 1])
    with stack:
        monkeypatch.setattr(threading.Thread, "start", none)
        assert stack.contains(KEYS, timeout=60.0) == 1
        monkeypatch.undo()
        assert stack.contains(KEYS, timeout=60.0) == 2
        assert [what for what, _ in lower.calls] == ["contains"]


def test_no_memory_for_a_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: Any, **how: Any) -> Any:
        raise OSError("Cannot allocate memory")

    stack, _, lower = noting(upper=[0], lower=[0, 1])
    with stack:
        monkeypatch.setattr("lightcache.storage.common.mmap.mmap", none)
        result = get(stack, [0, 1])
        assert result.statuses == (OK, FAILED)
        assert "no memory for 1 pages" in result.reason
        assert put(stack, [2]).statuses == (STORED,)
        monkeypatch.undo()
        assert (get(stack, [0, 1]).prefix, has(lower)) == (2, [0, 1])


INTERRUPTED: dict[str, Any] = {
    "the breaker has said yes": (CircuitBreaker, "probe", True),
    "in front of the probe": (Executor, "submit", False),
    "in front of the call": (stacked.Level, "_answer", False),
    "in front of the thread's start": (threading.Thread, "start", False),
    "behind the thread's start": (threading.Thread, "start", True),
}


@pytest.mark.parametrize("place", INTERRUPTED)
@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_leaves_neither_a_call_nor_a_probe(
    place: str, number: int, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    """Of a storage that is just being tried again: else nobody would ever ask it again."""
    now = [0.0]
    owner, name, behind = INTERRUPTED[place]
    stack, upper, lower = noting(lower=[0], failures=1, clock=lambda: now[0])
    with stack:
        level = stack._levels[number]
        level._breaker.failure("tests")
        now[0] = 30.0
        real = getattr(owner, name)
        main = threading.main_thread()

        def interrupted(which: Any, *given: Any, **how: Any) -> Any:
            if threading.current_thread() is main and (
                which in (level, level._breaker, level._executor)
                or isinstance(which, threading.Thread)
            ):
                if behind:
                    real(which, *given, **how)
                raise KeyboardInterrupt
            return real(which, *given, **how)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                stack.contains(KEYS, timeout=60.0)
        wait_until(
            lambda: level._breaker.state == "closed" or level._breaker.wait is not None,
            "the probe, if one was begun",
        )
        now[0] = 90.0
        wait_until(lambda: not level.shut, "the probe")
        assert stack.contains(KEYS, timeout=60.0) == 1
        assert level._breaker.state == "closed"
        assert [upper, lower][number].calls[-1][0] == "contains"
        assert level.stats().hanging == 0


# ---------------------------------------------------------------- under a tier


def test_a_tier_over_a_stack(cache: Cache) -> None:
    spec = StorageSpec.of(cache)
    upper, lower = MemoryStorage(spec, pages=3), MemoryStorage(spec)
    fill(cache, KEYS)
    with StackedStorage([upper, lower]) as stack, StorageTier(cache, stack, group=3) as tier:
        assert tier.write(KEYS).wait(60.0).stored == 8
        assert cache.evict(96) == 8
        assert tier.prefetch(KEYS).wait(60.0).loaded == 8
        assert sound(cache, KEYS) == 8


def test_a_lower_that_dies_leaves_the_tier_alone(cache: Cache) -> None:
    spec = StorageSpec.of(cache)
    upper, lower = MemoryStorage(spec), MemoryStorage(spec)
    fill(cache, KEYS)
    flaky_one = FlakyStorage(lower, script={"contains": [None, Fault("die")]})
    with StackedStorage([upper, flaky_one]) as stack, StorageTier(cache, stack, failures=4) as tier:
        assert tier.write(KEYS[:6]).wait(60.0).stored == 6
        cache.evict(96)
        for _ in range(8):
            task = tier.prefetch(KEYS)
            assert (task.wait(60.0).prefix, task.state) == (6, TaskState.FINISHED)
        assert tier.stats().state == "closed"
        assert stack.levels()[1].state == "open"
