"""The executor of storages: ends of calls, lost threads, and what is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.refusals import refused

from lightcache import Detached, StorageError
from lightcache.breaker import CircuitBreaker
from lightcache.storage.common import Deadline
from lightcache.storage.executor import READ, WRITE, Call, Executor, Exhausted, Late, Work

Wait = Callable[[Callable[[], bool], str], None]
LONG = 60.0


class Hanging:
    """Calls that return when they are let go; how many have begun."""

    def __init__(self) -> None:
        self.began, self.gate = threading.Semaphore(0), threading.Event()

    def __call__(self) -> int:
        self.began.release()
        assert self.gate.wait(LONG)
        return 7

    def wait_begun(self, calls: int = 1) -> None:
        for _ in range(calls):
            assert self.began.acquire(timeout=LONG)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.gate.set()


def executor(threads: int = 1, **how: Any) -> tuple[Executor, list[float]]:
    """One whose time passes when it is told to."""
    now = [0.0]
    return Executor(threads, "test", clock=lambda: now[0], **how), now


def test_a_call_and_its_answer() -> None:
    made, _ = executor()
    assert made.ask(lambda: 3, Deadline(LONG)) == 3
    refused(ValueError, "on purpose", made.ask, lambda: int("on purpose"), Deadline(LONG))
    assert made.close(LONG)
    refused(Detached, "", made.submit, lambda: 3, LONG)


def test_a_lost_thread_is_replaced(hanging: Hanging) -> None:
    made, now = executor(spare=2)
    late: list[str] = []
    lost = [made.submit(hanging, 10.0, late=lambda: late.append("late"))]
    hanging.wait_begun()
    next_one = made.submit(lambda: 1, 60.0)
    assert not next_one.ended  # its one thread is busy, and in time
    now[0] = 10.0
    made.poll()
    assert next_one.wait(Deadline(LONG))
    assert (made.lost, late) == (1, ["late"])
    lost.append(made.submit(hanging, 10.0))
    hanging.wait_begun()
    now[0] = 20.0
    made.poll()
    assert made.ask(lambda: 2, Deadline(LONG)) == 2  # by the last spare one
    made.submit(hanging, 10.0)
    hanging.wait_begun()
    waiting = made.submit(lambda: 3, 60.0)
    now[0] = 30.0
    made.poll()
    refused(Exhausted, "3 calls have not come back, and no thread is left", waiting.result)
    refused(Exhausted, "", made.submit, lambda: 4, LONG)
    refused(Exhausted, "", made.run, [lambda: None], READ, Deadline(LONG))
    assert isinstance(Exhausted(""), StorageError)
    hanging.gate.set()
    assert all(call.wait(Deadline(LONG)) for call in lost)


def test_threads_that_come_back_are_not_kept(hanging: Hanging, wait_until: Wait) -> None:
    made, now = executor(2)
    calls = [made.submit(hanging, 10.0) for _ in range(2)]
    hanging.wait_begun(2)
    now[0] = 10.0
    made.poll()
    more = [made.submit(hanging, 10.0) for _ in range(2)]
    hanging.wait_begun(2)
    assert len(made.threads) == 4
    hanging.gate.set()
    for call in (*calls, *more):
        assert call.wait(Deadline(LONG))
    wait_until(lambda: len(made.threads) == 2, "the threads that are too many")
    assert made.lost == 0
    assert made.close(LONG)


def test_what_waits_too_long_is_not_begun(hanging: Hanging) -> None:
    made, now = executor(spare=0)
    made.submit(hanging, 60.0)
    hanging.wait_begun()
    begun: list[int] = []
    call = made.submit(lambda: begun.append(1), 5.0)
    now[0] = 5.0
    made.poll()
    assert call.ended
    refused(StorageError, "not begun in time", call.result)
    hanging.gate.set()
    assert made.close(LONG)
    assert begun == []


def test_reads_before_writes_and_a_group_together(hanging: Hanging) -> None:
    order: list[str] = []

    class Noted(Work):
        def __init__(self, kind: int, name: str) -> None:
            self.kind, self.name = kind, name

        @property
        def group(self) -> object:
            return self.name[0]

        def run(self) -> None:
            order.append(self.name)

    made, _ = executor()
    made.submit(hanging, LONG)
    hanging.wait_begun()
    for kind, name in ((WRITE, "a1"), (WRITE, "b1"), (WRITE, "a2"), (READ, "r1"), (READ, "s1")):
        made.put(Noted(kind, name))
    hanging.gate.set()
    assert made.close(LONG)
    assert order == ["r1", "s1", "a1", "a2", "b1"]


def test_who_leaves_a_call_has_it_given_back_when_it_returns(hanging: Hanging) -> None:
    made, _ = executor()
    given: list[str] = []
    running = made.submit(hanging, LONG, after=lambda: given.append("running"))
    hanging.wait_begun()
    queued: Call[int] = made.submit(lambda: 1, LONG, after=lambda: given.append("queued"))
    queued.leave()
    running.leave()
    running.leave()
    assert given == ["queued"]
    hanging.gate.set()
    assert made.close(LONG)
    assert given == ["queued", "running"]


def test_a_call_in_the_callers_thread(hanging: Hanging) -> None:
    made, now = executor()
    told: list[str] = []
    assert made.call_here(lambda: 5, 1.0) == 5

    def slow() -> int:
        now[0] = 2.0
        made.poll()
        assert (made.late, made.lost) == (1, 0)  # the thread is none of the executor's
        return 5

    refused(Late, "", made.call_here, slow, 1.0, "slow", lambda: told.append("late"))
    assert (told, made.late) == (["late"], 0)


def test_no_thread_is_started_before_there_is_work() -> None:
    before = set(threading.enumerate())
    made, _ = executor(8)
    assert not set(threading.enumerate()) - before
    made.ask(lambda: 1, Deadline(LONG))
    made.ask(lambda: 1, Deadline(LONG))
    assert len(made.threads) == 1  # who is idle takes it
    assert made.close(LONG)


def test_a_forked_child_has_no_threads(hanging: Hanging) -> None:
    made, _ = executor()
    assert made.ask(lambda: 1, Deadline(LONG)) == 1
    child = os.fork()
    if not child:
        try:
            made.submit(lambda: 1, LONG)
        except Detached:
            os._exit(3 if made.close(0.0) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert made.close(LONG)


# ---------------------------------------------------------------- the breaker


def breaker(failures: int = 3) -> tuple[CircuitBreaker, list[float]]:
    now = [0.0]
    return CircuitBreaker(
        failures, 30.0, lambda: now[0], text=lambda row, why: f"{row}: {why}"
    ), now


def test_failures_in_a_row_open_it() -> None:
    made, _ = breaker()
    for _ in range(2):
        assert not made.failure("no")
        assert not made.failure("no")
        made.success()
    assert (made.state, made.reason) == ("closed", "")
    assert [made.failure("no") for _ in range(4)] == [False, False, True, False]
    assert (made.state, made.shut) == ("open", True)
    made.reset()
    assert made.state == "closed"


@pytest.mark.parametrize("silent", [True, False])
def test_one_call_that_used_up_its_time_opens_it_if_nothing_came_back(silent: bool) -> None:
    made, now = breaker(100)
    now[0] = 10.0
    made.success()
    now[0] = 20.0
    if not silent:
        made.success()
    assert made.failure("hangs", since=11.0) is silent


def test_a_probe_is_one_callers_when_it_is_due() -> None:
    made, now = breaker(1)
    made.failure("no")
    assert made.wait == 30.0
    assert not made.probe()
    now[0] = 30.0
    assert (made.state, made.wait, made.shut) == ("half-open", 0.0, True)
    assert made.probe()
    assert (made.probe(), made.wait) == (False, None)
    made.failure("still")
    assert (made.state, made.wait) == ("open", 30.0)
    now[0] = 60.0
    assert made.probe()
    made.leave()
    assert made.probe()
    made.success()
    assert (made.state, made.shut) == ("closed", False)
