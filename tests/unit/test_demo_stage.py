"""Those who look after a run: deaths are told and replaced, and leaving removes everything."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from support.demo_desk import LEAVES_A_RING, settings_of
from support.demo_turns import hello

from lightcache.shm import SharedRing, list_segments
from lightcache.tools.demo import stage as module
from lightcache.tools.demo.messages import (
    Failed,
    Hello,
    Lost,
    Mailbox,
)
from lightcache.tools.demo.settings import run_name
from lightcache.tools.demo.stage import Actor, RunFailed, Stage

_SLEEP = ("sleep", "600")


class Sleepers(Stage):
    """A stage whose processes only sleep."""

    command: tuple[str, ...] = _SLEEP

    def start(self, role: str, number: int = 0, lives: int = 0) -> Actor:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is buried
        process = subprocess.Popen(self.command, stderr=errors)
        self.actors.append(Actor(role, number, lives, process, errors))
        return self.actors[-1]

    def die(self, worker: int, number: int = signal.SIGKILL) -> None:
        """Kill a worker from outside."""
        actor = next(each for each in self.actors if each.name == f"worker {worker}")
        os.kill(actor.process.pid, number)
        actor.process.wait()


@pytest.fixture
def stage(segment_name: str) -> Iterator[Sleepers]:
    made = Sleepers(settings_of(segment_name))
    with made:
        yield made


def exists(prefix: str) -> bool:
    return any(info.name.startswith(prefix) for info in list_segments())


# ---- deaths


def test_a_dead_worker_is_told_and_replaced(stage: Sleepers) -> None:
    events = stage.events()
    for life in range(3):
        stage.die(1)
        found = next(events)
        assert isinstance(found, Lost)
        assert (found.worker, found.life) == (1, life)
        told = stage.router.receive(0)
        assert (told.worker, told.life) == (1, life)
    assert [(one.name, one.life) for one in stage.actors] == [
        ("the router", 0),
        ("worker 0", 0),
        ("worker 1", 3),
    ]


def test_what_it_said_comes_before_its_death(stage: Sleepers, segment_name: str) -> None:
    with Mailbox(stage.settings.report_ring) as worker:
        worker.send(hello(0, 0))
        stage.die(0)
        events = stage.events()
        assert [type(next(events)) for _ in range(2)] == [Hello, Lost]


def test_one_that_dies_again_and_again(stage: Sleepers) -> None:
    events = stage.events()
    for _ in range(4):
        stage.die(0)
        assert isinstance(next(events), Lost)
    stage.die(0)
    with pytest.raises(RunFailed, match="worker 0 has ended: killed by SIGKILL"):
        next(events)


def test_a_death_by_a_signal_without_a_name(stage: Sleepers) -> None:
    stage.actors[0].process.send_signal(signal.SIGRTMIN + 3)
    stage.actors[0].process.wait()
    number = signal.SIGRTMIN + 3
    with pytest.raises(RunFailed, match=f"the router has ended: killed by signal {number}"):
        next(stage.events())


def test_a_worker_that_ends_by_itself(stage: Sleepers) -> None:
    stage.command = ("sh", "-c", "echo first >&2; echo it cannot be >&2; exit 3")
    stage.start("worker", 7).process.wait()
    with pytest.raises(RunFailed, match="worker 7 has ended: exit status 3; it cannot be"):
        next(stage.events())


def test_somebody_gives_up(stage: Sleepers) -> None:
    with Mailbox(stage.settings.report_ring) as worker:
        worker.send(Failed("worker", "no memory"))
    with pytest.raises(RunFailed, match="worker: no memory"):
        next(stage.events())


def test_silence(stage: Sleepers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker that was stopped, for example."""
    monkeypatch.setattr(module, "_SILENCE", 0.0)
    with pytest.raises(RunFailed, match="nothing was heard"):
        next(stage.events())


def test_the_kill(stage: Sleepers) -> None:
    stage.kill(1, 0)
    found = next(stage.events())
    assert (found.worker, found.life) == (1, 0)


# ---- the end


def test_leaving_ends_and_removes_everything(segment_name: str) -> None:
    with Sleepers(settings_of(segment_name)) as stage:
        actors = list(stage.actors)
        assert exists(segment_name)
    assert all(actor.process.returncode == -signal.SIGTERM for actor in actors)
    assert all(actor.errors.closed for actor in actors)
    assert not exists(segment_name)


def test_a_stopped_process_is_killed(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAVE", 0.0)
    with Sleepers(settings_of(segment_name)) as stage:
        stopped = stage.actors[1].process
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    assert stopped.returncode == -signal.SIGKILL


def test_a_second_signal_interrupts_no_leaving(segment_name: str) -> None:
    """SIGTERM ends a run; while it leaves, neither another one nor Ctrl-C is heard."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    stage = Sleepers(settings_of(segment_name))

    def again() -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), each)

    def interrupted() -> None:
        with stage:
            stage._stack.callback(again)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        interrupted()
    assert caught.value.code == 143
    assert not exists(segment_name)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_no_signal_interrupts_leaving(segment_name: str) -> None:
    """Neither when the run has ended by itself."""

    def interrupt() -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), each)

    with Sleepers(settings_of(segment_name)) as stage:
        stage._stack.callback(interrupt)
    assert not exists(segment_name)


def test_the_handler_itself_is_left_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            module._leave(signal.SIGTERM, None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_while_leaving(segment_name: str, script: Any) -> None:
    """Everything is removed all the same, also what a killed process left."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    stage = Sleepers(settings_of(segment_name))

    def failing() -> None:
        with stage:
            script(LEAVES_A_RING, f"{segment_name}-left", status=-9)
            stage._stack.callback(_raise)

    with pytest.raises(ValueError, match="on the way out"):
        failing()
    assert len(stage.actors) == 3
    assert all(actor.process.returncode is not None for actor in stage.actors)
    assert not exists(segment_name)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def _raise() -> None:
    raise ValueError("on the way out")


def test_an_error_while_starting(segment_name: str) -> None:
    class Broken(Sleepers):
        def start(self, role: str, number: int = 0, lives: int = 0) -> Actor:
            if number:
                raise OSError("no more processes")
            return super().start(role, number, lives)

    stage = Broken(settings_of(segment_name))
    with pytest.raises(OSError, match="no more"):
        stage.__enter__()
    assert [actor.process.returncode for actor in stage.actors] == [-signal.SIGTERM] * 2
    assert not exists(segment_name)


def test_others_are_left_alone(segment_name: str) -> None:
    """One run's end, beside another of the same beginning: its rings are somebody's."""
    other = f"{segment_name}-other"
    with SharedRing.create(f"{other}-report", capacity=1, message_bytes=8):
        with Sleepers(settings_of(segment_name)):
            pass
        assert exists(other)


def test_names_differ_though_the_process_is_the_same() -> None:
    one, other = run_name("demo"), run_name("demo")
    assert one != other
    assert one.startswith(f"demo-{os.getpid()}-")
