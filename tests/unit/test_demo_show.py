"""Turns as they are answered: lines in a file, a table in a terminal, nothing when quiet."""

from __future__ import annotations

import io

from rich.console import Console
from support.demo_turns import served

from lightcache.tools.demo.show import Show, Turns, faster, milliseconds, successor


def test_a_line() -> None:
    turns = Turns()
    assert turns.line(served(3)) == (
        "turn   3  conversation 1.1  worker 1  prompt 100 tokens, 64 from host; "
        "first token 10 ms, from nothing 50 ms"
    )
    last = turns.line(served(12, attempts=2, life=2, baseline_s=None))
    assert last.endswith(
        "worker 0''  prompt 100 tokens, 64 from host; first token 10 ms, from nothing -  "
        "(attempt 2)"
    )


def test_a_new_tier_is_a_column() -> None:
    turns = Turns()
    turns.add(served(0))
    turns.add(served(1, reused={"host": 3, "disk": 1}))
    assert turns.tiers == ("host", "disk")
    assert "64 from host, 0 from disk" in turns.line(turns.rows[0])
    assert [column.header for column in turns.table(turns.rows).columns].count("from disk") == 1


def test_small_words() -> None:
    assert milliseconds(None) == "-"
    assert milliseconds(1.5) == "1,500 ms"
    assert [successor(life) for life in range(3)] == ["", "'", "''"]
    assert faster(served(0)) == "5.0 x"
    assert faster(served(0, baseline_s=None)) == faster(served(0, first_s=0.0)) == "-"


def shown(quiet: bool, terminal: bool, turns: int = 2) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=120, height=25, force_terminal=terminal, color_system=None, highlight=False
    )
    with Show(console, quiet=quiet) as show:
        show.status("starting")
        show.add(served(0))
        show.say("killing it [red]", "yellow")
        for number in range(1, turns - 1):
            show.add(served(number))
        show.add(served(turns - 1, attempts=2))
        show.finish()
    return out.getvalue()


def test_plain_lines() -> None:
    lines = shown(quiet=False, terminal=False).splitlines()
    assert lines == [
        "starting",
        Turns().line(served(0)),
        "killing it [red]",
        Turns().line(served(1, attempts=2)),
    ]


def test_quiet() -> None:
    assert shown(quiet=True, terminal=False) == ""
    assert shown(quiet=True, terminal=True) == ""


def test_a_terminal_ends_with_the_whole_table() -> None:
    said = shown(quiet=False, terminal=True, turns=40)
    assert "killing it [red]" in said
    rows = said.rpartition("from nothing")[2].splitlines()[1:]
    assert len(rows) == 40, "more than the terminal has lines"
    assert "its worker was killed" in rows[-1]
    assert "64" in rows[0]
