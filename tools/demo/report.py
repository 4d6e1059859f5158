"""What a run has shown: a line for each turn, a summary, and what did not hold."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightcache.snapshot import CheckReport
from lightcache.tools.demo.conversations import Turn
from lightcache.tools.demo.messages import Answer

_TOLERANCE = 1e-4  # between log-probabilities in float32
_ROW = "{:>4} {:>12} {:>6} {:>6} {:>9} {:>12} {:>11} {:>12} {:>8}  {}"
_HEAD = "turn,conversation,worker,prompt,from host,from storage,first token,from nothing,faster,"


@dataclass(frozen=True)
class Served:
    """A turn that was answered."""

    turn: Turn
    answer: Answer
    worker: str  # its number, and one ' for each life before
    attempts: int


@dataclass(frozen=True)
class Kill:
    """A worker that was killed in the middle of an offload."""

    worker: str
    turn: int
    copied_pages: int
    pages: int
    doomed_pages: int  # pages that it was writing, which have no key any more
    recovered_s: float  # from the signal until its pages could be used again


class Figures:
    """What some turns add up to."""

    def __init__(self, turns: Sequence[Served]) -> None:
        answers = [served.answer for served in turns]
        reusing = [answer for answer in answers if answer.reused]
        self.turns, self.reusing = len(turns), len(reusing)
        self.prompt_tokens = sum(len(served.turn.prompt) for served in turns)
        self.hit_tokens: Counter[str] = sum((Counter(a.reused) for a in answers), Counter())
        self.first_s = statistics.median([answer.first_s for answer in reusing] or [0.0])
        """Of turns that reused tokens, the median."""
        self.alone_s = statistics.median([answer.alone_s or 0.0 for answer in reusing] or [0.0])
        """Of the same turns: the first token from nothing."""


@dataclass
class Outcome:
    """What happened in a run, and what should have."""

    wanted_turns: int
    wanted_kill: bool
    wanted_restart: bool
    turns: list[Served] = field(default_factory=list)
    again: list[Served] = field(default_factory=list)  # turns after the restart
    wanted_again: int = 0
    kill: Kill | None = None
    checks: list[CheckReport] = field(default_factory=list)
    """Of each cache, before and after the restart."""
    compared: dict[int, tuple[bool, float]] = field(default_factory=dict)
    """Turns that were computed again: whether the answer was equal, and the largest difference
    between log-probabilities."""
    left: list[str] = field(default_factory=list)  # segments in shared memory after the end
    seconds: float = 0.0

    @property
    def reusing(self) -> list[Served]:
        """The turns that reused tokens."""
        return [served for served in (*self.turns, *self.again) if served.answer.reused]

    def problems(self) -> list[str]:
        """What did not hold, in one line each."""
        problems = [f"check: {check.message}" for check in self.checks if not check.clean]
        for subject, wanted, found in (
            ("answers", self.wanted_turns, len(self.turns)),
            ("answers after the restart", self.wanted_again, len(self.again)),
        ):
            if found != wanted:
                problems.append(f"expected {wanted} {subject}, found {found}")
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
        first = next((served for served in self.again if served.attempts == 1), None)
        if first is not None and first is self.again[0] and first.answer.reused.get("host"):
            problems.append("the first turn after the restart found tokens in an empty cache")
        if missing := [s.turn.number for s in self.reusing if s.turn.number not in self.compared]:
            problems.append(f"turns {missing} were not computed again")
        for number, (equal, difference) in self.compared.items():
            if not (equal and difference <= _TOLERANCE):
                found_tokens = "equal" if equal else "differ"
                problems.append(
                    f"turn {number} is not what an uncached run gives: tokens {found_tokens}, "
                    f"log-probabilities by {difference:.1e}"
                )
        return problems + [f"{name} was not removed" for name in self.left]

    @property
    def difference(self) -> float | None:
        """The largest between log-probabilities, nan above all; None: nothing was compared."""
        differences = [difference for _, difference in self.compared.values()]
        return max(differences, key=lambda value: (math.isnan(value), value), default=None)

    def pairs(self) -> dict[str, str]:
        """The summary for people."""
        of = Figures(self.turns)
        tiers = ", ".join(
            f"{tokens:,} ({tokens / max(1, of.prompt_tokens):.0%}) came from the {tier} tier"
            for tier, tokens in of.hit_tokens.items()
        )
        pairs = {
            "turns": f"{of.turns} answered in {self.seconds:.0f} s",
            "prompt tokens": f"{of.prompt_tokens:,}, of which {tiers or 'none was reused'}",
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
            of, first = Figures(self.again), self.again[0].answer
            pairs["restart"] = (
                f"everything ended and began anew with an empty cache: of {of.prompt_tokens:,} "
                f"prompt tokens {of.hit_tokens['storage']:,} came from storage and "
                f"{of.hit_tokens['host']:,} from the host, where they had been read to; the first "
                f"of {of.turns} turns had its first token after {milliseconds(first.first_s)}, "
                f"{milliseconds(first.alone_s)} from nothing"
            )
        clean = "clean" if all(check.clean for check in self.checks) else "broken"
        pairs["check"] = f"{clean}: {len(self.checks)} checks, the last: {self.checks[-1].message}"
        pairs["equal"] = (
            f"{sum(equal for equal, _ in self.compared.values())} of {len(self.compared)} turns "
            "that reused tokens have the answer of a fresh process without a cache; "
            f"log-probabilities within {self.difference or 0:.1e}"
        )
        return pairs

    def facts(self) -> dict[str, Any]:
        """The summary for scripts."""
        difference = self.difference
        return {
            **vars(Figures(self.turns)),
            "killed": None if self.kill is None else vars(self.kill),
            "restart": vars(Figures(self.again)) if self.wanted_restart else None,
            "checks": [check.message for check in self.checks],
            "compared": len(self.compared),
            "largest_difference": difference if math.isfinite(difference or 0) else None,
            "seconds": self.seconds,
            "problems": self.problems(),
        }


def milliseconds(seconds: float | None) -> str:
    """A time for people."""
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"


class Show:
    """Prints the progress of a run."""

    def __init__(self, console: Console) -> None:
        self._console, self._head = console, _HEAD

    def add(self, served: Served) -> None:
        """A turn was answered."""
        if self._head:
            self.say(_ROW.format(*self._head.split(",")), "bold")
            self._head = ""
        turn, answer = served.turn, served.answer
        row = _ROW.format(
            turn.number,
            f"{turn.conversation}.{turn.turn}",
            served.worker,
            len(turn.prompt),
            answer.reused.get("host", 0),
            answer.reused.get("storage", 0),
            milliseconds(answer.first_s),
            milliseconds(answer.alone_s),
            f"{(answer.alone_s or 0.0) / answer.first_s:.1f} x",
            "asked again" if served.attempts > 1 else "",
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
