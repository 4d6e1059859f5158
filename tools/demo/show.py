"""The turns, as they are answered: a table that grows in a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightcache.tools.demo.messages import Served
from lightcache.tools.output import cell

_AROUND = 8  # lines of a terminal that are not rows of the table
_ALL = 60  # rows that are printed at the end; more than that nobody reads


def milliseconds(seconds: float | None) -> str:
    """For people."""
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def successor(life: int) -> str:
    """What is put behind the number of a worker that took a dead one's place."""
    return "'" * life


def faster(turn: Served) -> str:
    """How many times as fast as from nothing."""
    if turn.baseline_s is None or turn.first_s <= 0:
        return "-"
    return f"{turn.baseline_s / turn.first_s:.1f} x"


class Turns:
    """All turns so far."""

    def __init__(self) -> None:
        """None yet."""
        self.rows: list[Served] = []
        self.tiers: tuple[str, ...] = ("host",)
        self.status = ""

    def add(self, turn: Served) -> None:
        """One more."""
        self.rows.append(turn)
        new = tuple(tier for tier in turn.reused if tier not in self.tiers)
        self.tiers += new

    def table(self, rows: Iterable[Served]) -> Table:
        """Some of them."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("turn", "conversation", "worker", "prompt"):
            table.add_column(name, justify="right")
        for tier in self.tiers:
            table.add_column(f"from {tier}", justify="right", style="green")
        for name in ("first token", "from nothing", "faster"):
            table.add_column(name, justify="right")
        table.add_column("")
        for turn in rows:
            table.add_row(*self._cells(turn))
        return table

    def _cells(self, turn: Served) -> list[Any]:
        worker = f"{turn.worker}{successor(turn.life)}"
        note = "its worker was killed" if turn.attempts > 1 else ""
        return [
            cell(turn.number),
            cell(f"{turn.conversation}.{turn.turn}"),
            cell(worker),
            cell(turn.prompt),
            *(cell(turn.reused.get(tier, 0)) for tier in self.tiers),
            cell(milliseconds(turn.first_s), "bold"),
            cell(milliseconds(turn.baseline_s)),
            cell(faster(turn)),
            cell(note, "yellow"),
        ]

    def line(self, turn: Served) -> str:
        """One of them, without a table."""
        reused = ", ".join(f"{turn.reused.get(tier, 0)} from {tier}" for tier in self.tiers)
        again = f"  (attempt {turn.attempts})" if turn.attempts > 1 else ""
        return (
            f"turn {turn.number:3}  conversation {turn.conversation}.{turn.turn}  worker "
            f"{turn.worker}{successor(turn.life)}  prompt {turn.prompt} tokens, {reused}; first "
            f"token {milliseconds(turn.first_s)}, from nothing {milliseconds(turn.baseline_s)}"
            f"{again}"
        )


class Show:
    """Shows turns and what else happens, on a terminal or in a file."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        """Args:
        quiet: say nothing: what is wanted is JSON.
        """
        self.console, self.quiet = console, quiet
        self.turns = Turns()
        self._live: Live | None = None

    def __enter__(self) -> Show:
        if self.console.is_terminal and not self.quiet:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exception)
            self._live = None

    def add(self, turn: Served) -> None:
        """A turn is over."""
        self.turns.add(turn)
        if self._live is None:
            self.print(self.turns.line(turn))
        self._refresh()

    def status(self, text: str) -> None:
        """What is going on now."""
        self.turns.status = text
        if self._live is None:
            self.print(text)
        self._refresh()

    def say(self, text: str, style: str = "") -> None:
        """Something that stays."""
        self.print(Text(text, style=style))

    def print(self, what: Any) -> None:
        """Print, unless quiet."""
        if not self.quiet:
            self.console.print(what, soft_wrap=True)

    def finish(self) -> None:
        """The whole table, where only its end was seen."""
        live = self._live is not None
        self.__exit__(None, None, None)
        if live:
            self.print(self.turns.table(self.turns.rows[-_ALL:]))

    def _refresh(self) -> None:
        if self._live is not None:
            room = max(3, self.console.height - _AROUND)
            rows = self.turns.rows[-room:]
            self._live.update(Group(self.turns.table(rows), Text(self.turns.status, style="dim")))
