"""What a demo reports: its figures, and each thing that did not hold, without any process."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click.testing
import numpy as np
import pytest

from lightcache.snapshot import CheckReport
from lightcache.tools import cli
from lightcache.tools.demo.conversations import Conversations
from lightcache.tools.demo.messages import Answer, Holding, Turn
from lightcache.tools.demo.report import Outcome

CLEAN = CheckReport(True, "every invariant holds", 0, 0, 1, 0, 0, 0, 0, 0, 0, True, 0)


def answer(number: int, attempts: int = 1, **reused: int) -> Answer:
    """Of a turn of 100 tokens."""
    turn = Turn(number, 0, number, np.zeros(100, np.int32), 2, attempts=attempts)
    tiers = {tier: tokens for tier, tokens in reused.items() if tokens}
    return Answer(turn, tiers, [0, 0], [0.0, 0.0], times=[0.1, 0.2], alone_s=0.5)


def held() -> Outcome:
    """An outcome in which all of it held."""
    return Outcome(
        wanted=4,
        wanted_kill=True,
        wanted_restart=True,
        turns=[answer(0), answer(1, attempts=2, host=64)],
        again=[answer(2, storage=80), answer(3, host=32, storage=16)],
        kill=Holding("1", 1, 1, 2, 2, 0.05),
        checks=[CLEAN, CLEAN],
        compared={1: (True, 1e-5), 2: (True, 2e-5), 3: (True, 0.0)},
    )


def test_an_outcome_that_held() -> None:
    outcome = held()
    assert outcome.problems() == []
    pairs = outcome.pairs()
    assert pairs["prompt tokens"] == "200: 64 (32%) from the host"
    assert "5.0 times as fast" in pairs["first token"]
    assert pairs["killed"].startswith(
        "worker 1, with 1 of 2 pages of turn 1 copied: 2 pages doomed"
    )
    assert pairs["restart"].endswith("96 (48%) from the storage, 32 (16%) from the host")
    assert pairs["check"].startswith("clean: 2 checks")
    assert pairs["equal"].startswith("3 of 3 turns")
    facts = json.loads(json.dumps(outcome.facts()))
    assert (facts["hit_tokens"], facts["restart"]["hit_tokens"]["storage"]) == ({"host": 64}, 96)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"turns": [answer(1, host=64)]}, "expected 4 answers, found 3"),
        ({"turns": [answer(0), answer(1)]}, "no turn reused anything"),
        ({"kill": None}, "no worker was killed"),
        ({"kill": Holding("1", 1, 1, 2, 0, 0.05)}, "the killed worker left no doomed page"),
        ({"again": [answer(2, storage=80)]}, "expected 4 answers, found 3"),
        ({"again": [answer(2), answer(3)]}, "nothing came from storage after the restart"),
        ({"again": [answer(2, host=1), answer(3, storage=16)]}, "found tokens in an empty cache"),
        ({"checks": [CLEAN, replace(CLEAN, clean=False, message="page 3")]}, "check: page 3"),
        ({"compared": {1: (True, 0.0)}}, "turns [2, 3] were not computed again"),
        ({"compared": {n: (n != 2, 0.0) for n in (1, 2, 3)}}, "turn 2 is not what"),
        ({"compared": {n: (True, 1e-3 * (n == 3)) for n in (1, 2, 3)}}, "turn 3 is not what"),
        ({"compared": {n: (True, float("nan") if n == 1 else 0.0) for n in (1, 2, 3)}}, "by nan"),
        ({"left": ["demo-1-kv"]}, "demo-1-kv was not removed"),
    ],
)
def test_what_did_not_hold(changes: dict[str, Any], said: str) -> None:
    (problem,) = replace(held(), **changes).problems()
    assert said in problem
    json.dumps(replace(held(), **changes).facts(), allow_nan=False)


@pytest.mark.parametrize("outcome", [held(), replace(held(), left=["demo-1-kv"])])
def test_the_exit_status_says_whether_all_of_it_held(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from lightcache.tools.demo.run import Run

    asked: list[Run] = []

    def run(self: Run) -> None:
        asked.append(replace(self))
        self.outcome = outcome

    monkeypatch.setattr(Run, "run", run)
    for arguments in ([], ["--json"]):
        result = click.testing.CliRunner().invoke(cli.group, ["demo", *arguments])
        assert result.exit_code == len(outcome.left), result.output
    assert ("All of it held" in result.output) is False
    assert (asked[0].workers, asked[0].outcome.wanted_kill) == (2, True)
    assert asked[0].outcome.wanted_restart
    assert str(asked[0].config.storage).startswith("disk:")


def test_conversations() -> None:
    """The next prompt goes on from the answer; after a restart, those that were asked last."""
    talk = Conversations(seed=1, users=3, turns=4, system_tokens=10, message_tokens=8)
    turns, asked = talk.begin(), []
    tokens = np.full(16, 7, np.int32)
    while turns:
        turn = turns.pop(0)
        asked.append(turn)
        turns += talk.answered(turn, tokens.tolist())
    assert len(asked) == talk.total == 3 * 4
    of = {(turn.conversation, turn.turn): turn.prompt for turn in asked}
    said = np.concatenate([of[0, 1], tokens])
    assert (of[0, 2][: len(said)] == said).all()
    assert (of[1, 0][:10] == of[0, 0][:10]).all(), "the system prompt"
    more = talk.resume(2)
    assert [(turn.conversation, turn.turn) for turn in more] == [(1, 4), (2, 4)]
    assert max(len(turn.prompt) + turn.answer_tokens for turn in [*asked, *more]) <= talk.longest
