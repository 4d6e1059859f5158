"""What a run has shown: a line for each turn, a summary, and what did not hold."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightcache.snapshot import CheckReport
from lightcache.tools.demo.messages import Answer, Holding

_TOLERANCE = 1e-4  # between log-probabilities in float32
_ROW = "{:>4} {:>12} {:>6} {:>6} {:>9} {:>12} {:>11} {:>12} {:>8}  {}"
_HEAD = "turn,conversation,worker,prompt,from host,from storage,first token,from nothing,faster,"


class Figures:
    """What some turns add up to."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        reusing = [answer for answer in answers if answer.reused]
        self.turns, self.reusing = len(answers), len(reusing)
        self.prompt_tokens = sum(len(answer.turn.prompt) for answer in answers)
        self.hit_tokens: Counter[str] = sum((Counter(a.reused) for a in answers), Counter())
        # Medians of turns that reused tokens: the first token with the cache, and from nothing.
        self.first_s = statistics.median([answer.times[0] for answer in reusing] or [0.0])
        self.alone_s = statistics.median([answer.alone_s for answer in reusing] or [0.0])

    def found(self) -> str:
        """What was reused of the prompts."""
        tiers = ", ".join(
            f"{tokens:,} ({tokens / self.prompt_tokens:.0%}) from the {tier}"
            for tier, tokens in self.hit_tokens.items()
        )
        return tiers or "none was reused"


@dataclass
class Outcome:
    """What happened in a run, and what should have."""

    wanted: int  # answers in all
    wanted_kill: bool
    wanted_restart: bool
    turns: list[Answer] = field(default_factory=list)
    again: list[Answer] = field(default_factory=list)  # turns after the restart
    kill: Holding | None = None
    checks: list[CheckReport] = field(default_factory=list)  # before and after the restart
    compared: dict[int, tuple[bool, float]] = field(default_factory=dict)
    """Turns that were computed again: whether the answer was equal, and the largest difference
    between log-probabilities."""
    left: list[str] = field(default_factory=list)  # segments in shared memory after the end

    @property
    def reusing(self) -> list[Answer]:
        """The turns that reused tokens."""
        return [answer for answer in (*self.turns, *self.again) if answer.reused]

    def problems(self) -> list[str]:
        """What did not hold, in one line each."""
        problems = [f"check: {check.message}" for check in self.checks if not check.clean]
        if (answers := len(self.turns) + len(self.again)) != self.wanted:
            problems.append(f"expected {self.wanted} answers, found {answers}")
        if not Figures(self.turns).reusing:
            problems.append("no turn reused anything; give a larger --size")
        if self.wanted_kill and self.kill is None:
            problems.append("no worker was killed: no turn wrote pages; give a larger --size")
        if self.kill is not None and not self.kill.doomed_pages:
            problems.append("the killed worker left no doomed page")
        if self.wanted_restart and not Figures(self.again).hit_tokens["storage"]:
            problems.append(
                "nothing came from storage after the restart; give the storage more room, or leave "
                "the restart out (--no-restart)"
            )
        if any(a.turn.attempts == 1 and a.reused.get("host") for a in self.again[:1]):
            problems.append("the first turn after the restart found tokens in an empty cache")
        if missing := [a.turn.number for a in self.reusing if a.turn.number not in self.compared]:
            problems.append(f"turns {missing} were not computed again")
        for number, (equal, difference) in self.compared.items():
            if not (equal and difference <= _TOLERANCE):
                problems.append(
                    f"turn {number} is not what an uncached run gives: tokens "
                    f"{'equal' if equal else 'differ'}, log-probabilities by {difference:.1e}"
                )
        return problems + [f"{name} was not removed" for name in self.left]

    @property
    def difference(self) -> float:
        """The largest between log-probabilities, nan above all; 0: nothing was compared."""
        return float(np.max([difference for _, difference in self.compared.values()] or [0.0]))

    def pairs(self) -> dict[str, str]:
        """The summary for people."""
        of, compared = Figures(self.turns), self.compared.values()
        pairs = {
            "turns": f"{of.turns} answered",
            "prompt tokens": f"{of.prompt_tokens:,}: {of.found()}",
            "first token": f"{milliseconds(of.first_s)} with the cache, {milliseconds(of.alone_s)} "
            f"from nothing: {of.alone_s / (of.first_s or 1):.1f} times as fast (medians of "
            f"{of.reusing} turns that reused tokens)",
        }
        if (kill := self.kill) is not None:
            pairs["killed"] = (
                f"worker {kill.worker}, with {kill.copied_pages} of {kill.pages} pages of turn "
                f"{kill.turn} copied: {kill.doomed_pages} pages doomed, usable again "
                f"{milliseconds(kill.recovered_s)} after the signal"
            )
        if self.again:
            of = Figures(self.again)
            pairs["restart"] = f"{of.prompt_tokens:,} prompt tokens, empty cache: {of.found()}"
        clean = "clean" if all(check.clean for check in self.checks) else "broken"
        pairs["check"] = f"{clean}: {len(self.checks)} checks, the last: {self.checks[-1].message}"
        pairs["equal"] = (
            f"{sum(equal for equal, _ in compared)} of {len(compared)} turns that reused tokens "
            "have the answer of a fresh process without a cache; log-probabilities within "
            f"{self.difference:.1e}"
        )
        return pairs

    def facts(self) -> dict[str, Any]:
        """The summary for scripts."""
        return {
            **vars(Figures(self.turns)),
            "killed": None if self.kill is None else vars(self.kill),
            "restart": vars(Figures(self.again)) if self.wanted_restart else None,
            "checks": [check.message for check in self.checks],
            "compared": len(self.compared),
            "largest_difference": self.difference if np.isfinite(self.difference) else None,
            "problems": self.problems(),
        }


def milliseconds(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1e3:,.0f} ms"


class Show:
    """Prints the progress of a run."""

    def __init__(self, console: Console) -> None:
        self._console, self._head = console, _HEAD

    def add(self, answer: Answer) -> None:
        """A turn was answered."""
        if self._head:
            self.say(_ROW.format(*self._head.split(",")), "bold")
            self._head = ""
        turn, first_s = answer.turn, answer.times[0]
        row = _ROW.format(
            turn.number,
            f"{turn.conversation}.{turn.turn}",
            turn.worker,
            len(turn.prompt),
            answer.reused.get("host", 0),
            answer.reused.get("storage", 0),
            milliseconds(first_s),
            milliseconds(answer.alone_s),
            f"{answer.alone_s / first_s:.1f} x",
            "asked again" if turn.attempts > 1 else "",
        )
        self.say(row, "green" if answer.reused else "")

    def say(self, text: str, style: str = "dim") -> None:
        """What happens now."""
        self._console.print(Text(text.rstrip(), style), soft_wrap=True)

    def end(self, outcome: Outcome) -> None:
        """The summary, and what did not hold."""
        summary = Table.grid(Column(style="bold"), Column(), padding=(0, 2))
        for name, text in outcome.pairs().items():
            summary.add_row(name, Text(text))
        self._console.print()
        self._console.print(summary)
        for problem in outcome.problems():
            self.say(f"it did not hold: {problem}", "red")
        if not outcome.problems():
            self.say("All of it held.", "bold green")
