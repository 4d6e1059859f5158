"""How every command speaks: tables for people, JSON for scripts, errors in one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightcache.errors import ConfigError, LightcacheError

OK = 0
BROKEN = 1
FAILED = 2
INTERRUPTED = 130

_PIPE_WIDTH = 200  # nothing is cut off in a file or a pipe

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


class Command(click.Command):
    """A command whose errors are one line on stderr and exit status 2, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly: the reader has seen enough
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (LightcacheError, OSError, MemoryError) as error:
            fail(str(error) or type(error).__name__)
            ctx.exit(FAILED)


def check_writable(option: str, path: str) -> None:
    """Whether a file can be written there: before the work whose result it is to hold.

    Raises:
        ConfigError: a folder, or in one that is not there or cannot be written.
    """
    target = Path(path).resolve()
    if not path or target.is_dir() or not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{option}: expected a file that can be written, found {path!r}")


def fail(message: str) -> None:
    """Print an error; the caller chooses the exit status."""
    click.echo(f"error: {printable(message)}", err=True)


def console(stderr: bool = False) -> Console:
    """Where tables go: as wide as the terminal, wide when there is none."""
    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=None if file.isatty() else _PIPE_WIDTH, highlight=False)


def emit(value: Any) -> None:
    """Print a value as JSON. Only strings can hold a character that a terminal would obey."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(
        "".join(
            char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text
        )
    )


def printable(text: object) -> str:
    """Text from a segment, which anybody may have written: no control character survives."""
    return "".join(
        char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in str(text)
    )


def cell(value: object, style: str = "") -> Text:
    """A value in a table. Never markup: square brackets in a role stay square brackets."""
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no", style=style)
    if isinstance(value, float):
        return Text(f"{value:,.3f}".rstrip("0").rstrip("."), style=style)
    if isinstance(value, int):
        return Text(f"{value:,}", style=style)
    return value if isinstance(value, Text) else Text(printable(value), style=style)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: str = ""
) -> Table | Text:
    """A table; columns named in `right` (separated by blanks) are aligned to the right. Without a
    row the title alone."""
    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        return Text(title, style="bold")
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    numbers = right.split()
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left")
    for line in cells:
        made.add_row(*line)
    return made


def lines(title: str, pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values, one pair a line."""
    made = Table.grid(padding=(0, 2))
    made.title, made.title_justify, made.title_style = title, "left", "bold"
    for name, value in pairs:
        made.add_row(Text(f"  {name}", style="dim"), cell(value))
    return made


def age(seconds: float | None) -> str:
    """A time span for people: "3.2 s", "4 min", "2.5 h", "12 d"."""
    if seconds is None:
        return "-"
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.1f} d"


def percent(part: int, whole: int) -> str:
    """A share for people; "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
