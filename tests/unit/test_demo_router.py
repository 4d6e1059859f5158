"""The router of the demo, with workers that are made up: who gets which turn, and deaths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import lightcache
from lightcache.tools.demo.messages import (
    SECRET,
    Answer,
    Holding,
    ModelSpec,
    Ready,
    Turn,
    WorkerConfig,
)
from lightcache.tools.demo.processes import WorkerProcess
from lightcache.tools.demo.report import Show
from lightcache.tools.demo.router import Router


class Made:
    """A worker without a process: keeps what it is sent."""

    def __init__(self, number: int, life: int = 0) -> None:
        self.turns: list[Turn] = []
        self.pid = number
        pipe: Any = self
        self.worker = WorkerProcess(f"worker-{number}", number, life, self, pipe)

    def send(self, turn: Turn) -> None:
        self.turns.append(turn)

    def kill(self) -> None:
        """As of a process."""

    def dies(self) -> tuple[WorkerProcess, None]:
        self.worker.kill()
        return self.worker, None

    def says(self, message: Any) -> tuple[WorkerProcess, Any]:
        return self.worker, message

    def answers(self) -> tuple[WorkerProcess, Any]:
        return self.says(Answer(self.turns[-1], {}, [1, 2]))


class Script:
    """What workers say, in its order."""

    count = 2

    def __init__(self, *said: Any) -> None:
        self.said = list(said)

    def messages(self) -> Iterator[Any]:
        yield self.said.pop(0)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def router_of(script: Any, name: str, closing: ExitStack) -> Router:
    """A router over a cache, after the beginning of a script."""
    config = WorkerConfig(name, ModelSpec(), 1 << 20, 256)
    cache = lightcache.Cache.open(
        config.cache, pages=8, page_bytes=4096, page_tokens=16, fingerprint="x", secret=SECRET
    )
    closing.enter_context(cache)
    return Router(script, config, Show(Console(quiet=True)), closing)


def turn(number: int, conversation: int = 0) -> Turn:
    prompt = np.arange(40, dtype=np.int32) + 100 * conversation
    return Turn(number, conversation, number, prompt, answer_tokens=2)


def test_a_worker_that_dies_before_others_are_ready_is_waited_for(
    segment_name: str, closing: ExitStack
) -> None:
    zero, again, one = Made(0), Made(0, life=1), Made(1)
    ready = Ready()
    script = Script(zero.says(ready), zero.dies(), one.says(ready), again.says(ready))
    router = router_of(script, segment_name, closing)
    assert script.said == []
    assert not router.busy


def test_a_conversation_goes_to_another_worker_and_the_turns_of_a_dead_one_too(
    segment_name: str, closing: ExitStack
) -> None:
    zero, one, again = Made(0), Made(1), Made(0, life=1)
    script = Script(zero.says(Ready()), one.says(Ready()))
    router = router_of(script, segment_name, closing)
    router.ask([turn(0)])
    script.said.append((None, "nothing"))
    router.step()
    first, second = (zero, one) if zero.turns else (one, zero)
    script.said.append(first.answers())
    (answer,) = router.step()
    assert (answer.turn.number, answer.turn.attempts) == (0, 1)
    router.ask([turn(1)])
    script.said.append(second.dies())
    router.step()
    assert [sent.number for sent in second.turns] == [1]
    assert router.busy
    script.said.append((None, "nothing"))
    router.step()
    assert [(sent.number, sent.attempts) for sent in first.turns] == [(0, 1), (1, 2)]
    assert first.turns[-1].worker == first.worker.label
    script.said.append(first.answers())
    router.step()
    assert router.busy, "the dead one has no successor yet"
    again.worker.name = second.worker.name
    script.said.append(again.says(Ready()))
    router.step()
    assert not router.busy


def test_one_turn_at_a_time_is_held_until_a_worker_has_died_of_it(
    segment_name: str, closing: ExitStack
) -> None:
    zero, one = Made(0), Made(1)
    script = Script(zero.says(Ready()), one.says(Ready()))
    router = router_of(script, segment_name, closing)
    router.ask([turn(number, conversation=number) for number in range(4)])
    script.said.append((None, "nothing"))
    router.step(kill=True)
    sent = [*zero.turns, *one.turns]
    assert sorted(each.hold for each in sent) == [False, True]
    held = zero if zero.turns[-1].hold else one
    message = Holding(held.worker.label, held.turns[-1].number, 1, 3)
    script.said += [held.says(message), held.dies()]
    router.step(kill=True)
    router.step(kill=True)
    assert router.kill is not None
    assert (router.kill.turn, router.kill.pages) == (message.turn, 3)
    assert router.kill.recovered_s > 0
