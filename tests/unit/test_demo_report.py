"""The report waits for whom it must, and has turns verified one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.demo_desk import settings_of
from support.demo_turns import hello, served

from lightcache.tools.demo.messages import (
    Finished,
    Lost,
    Mailbox,
    Verified,
    Verify,
)
from lightcache.tools.demo.report import Report
from lightcache.tools.demo.show import Show
from lightcache.tools.demo.summary import sample


class Told:
    """A stage that says what a test wants said, and is not asked for more."""

    def __init__(self, *events: Any) -> None:
        self.said = events

    def events(self) -> Iterator[Any]:
        yield from self.said
        raise AssertionError("the report waits for something that never comes")

    def age(self, worker: int, lives: int) -> float:
        return 1.5


@pytest.fixture
def report(segment_name: str) -> Report:
    settings = settings_of(segment_name)
    return Report(settings, Show(Console(quiet=True), quiet=True))


def test_a_successor_that_dies_before_its_hello_is_one_missing(report: Report) -> None:
    report.stage = Told(  # type: ignore[assignment]
        hello(0, 0),
        hello(1, 0),
        Lost(0, 0, 0.0),
        Lost(0, 1, 0.0),
        Finished(0, 1.0, 2.0),
        hello(0, 2),
    )
    report._watch()
    assert [one.life for one in report.outcome.successors] == [2]
    assert report.outcome.lookup_us == 2.0


def test_one_that_died_while_it_loaded_its_model(report: Report) -> None:
    report.stage = Told(  # type: ignore[assignment]
        hello(1, 0), Lost(0, 0, 0.0), hello(0, 1), Finished(0, 1.0, 2.0)
    )
    report._watch()
    assert report.outcome.successor_s == 1.5


def test_a_successor_is_waited_for(report: Report) -> None:
    report.stage = Told(  # type: ignore[assignment]
        hello(0, 0), hello(1, 0), Lost(0, 0, 0.0), Finished(0, 1.0, 2.0)
    )
    with pytest.raises(AssertionError, match="waits"):
        report._watch()


def test_turns_are_verified_one_by_one(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them would not fit into the ring while the reference loads its model."""
    inbox = Mailbox(report.settings.reference_ring)
    seen: list[int] = []

    def reference() -> Iterator[Any]:
        yield hello(0, 1)  # of no matter here
        while (turn := inbox.receive(0)) is not None:
            assert isinstance(turn, Verify)
            assert inbox.receive(0) is None
            assert (turn.prompt, turn.logprobs) == (59_999, [-0.5])
            seen.append(turn.number)
            yield Verified(turn.number, True, 0.0)
        raise AssertionError("the report waits for something that never comes")

    monkeypatch.setattr(report.stage, "events", reference)
    monkeypatch.setattr(report.stage, "start", lambda role: None)
    report.outcome.turns = [
        served(number, prompt=59_999, tokens=np.zeros(60_000, np.int32)) for number in range(12)
    ]
    with inbox:
        report._compare(sample(report.outcome.turns, 8))
    assert len(seen) == 8
    assert [one.number for one in report.outcome.verified] == seen
    assert report.outcome.wanted_verified == 8
