"""Output of all commands: tables for people, JSON for scripts, errors in one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lightcache._arguments import format_size
from lightcache.errors import ConfigError, LightcacheError

# ---- Progress bar


@contextlib.contextmanager
def bar(
    text: str, total: int, done: int = 0, *, quiet: bool = False
) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar while the body runs. Yields a function to call with (done, total), from any
    thread; None if standard error is no terminal, or `quiet`."""
    out = console(stderr=True)
    if quiet or not out.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=out, transient=True) as progress:
        task = progress.add_task(text, total=total, completed=done)
        yield lambda done, _: progress.update(task, completed=done)


# ---- Commands


OK = 0
BROKEN = 1
FAILED = 2
INTERRUPTED = 130
UNREAD = 141  # as a shell says of what SIGPIPE has ended

_PIPE_WIDTH = 200  # nothing is cut off in a file or a pipe

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


class Command(click.Command):
    """A command whose errors are one line on stderr and exit status 2, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has seen enough, and nothing is broken
            hush()
            ctx.exit(UNREAD)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (LightcacheError, OSError, MemoryError) as error:
            fail(str(error) or type(error).__name__)
            ctx.exit(FAILED)


def hush() -> None:
    """Nothing is printed any more: what is still in a buffer would fail again when Python ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


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


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Not the end of the process with status 1, which would say that something is broken."""
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """Where tables go: as wide as the terminal, wide when there is none."""
    file: TextIO | None = sys.stderr if stderr else sys.stdout
    if file is None:  # it was closed before we began
        return Console(file=io.StringIO(), quiet=True)
    return _Console(file=file, width=None if file.isatty() else _PIPE_WIDTH, highlight=False)


def save_picture(printed: Console, path: str, title: str) -> None:
    """Write what a recording console has printed as an SVG. It names no fonts from elsewhere."""
    drawn = printed.export_svg(title=title)
    Path(path).write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


def emit(value: Any) -> None:
    """Print a value as JSON, control characters escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(
        "".join(
            char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text
        )
    )


def printable(text: object) -> str:
    """Text from a segment, which another program may have written, control characters escaped."""
    return "".join(
        char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in str(text)
    )


def without_passwords(text: str) -> str:
    """A URL, or a text with URLs in it, without the names and passwords that it may have. As a
    password may have any character, all goes up to the last "@", which may be one of a path."""
    return re.sub(r"//.*@", "//...@", text, flags=re.DOTALL)


def cell(value: object, style: str = "") -> Text:
    """A value in a table. Never markup: square brackets are printed as they are."""
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
) -> RenderableType:
    """A table; columns named in `right` (separated by blanks) are aligned to the right. Without
    rows only the title. On a terminal too narrow for it, rows are printed one below the other."""
    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        return Text(title, style="bold")
    return _Fitting(title, columns, cells, right.split())


class _Fitting:
    """A table that cuts no word, on a terminal of any width."""

    def __init__(
        self, title: str, columns: Sequence[str], cells: list[list[Text]], right: list[str]
    ) -> None:
        self._title, self._columns, self._cells, self._right = title, columns, cells, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        if widths:
            yield self._whole(widths)
            return
        yield Text(self._title, style="bold")
        for row in self._cells:
            yield lines("", zip(self._columns, row, strict=True))  # "": a line between them

    def _widths(self, most: int) -> list[int]:
        """Widths of the columns, without separators; empty: they do not fit."""
        columns = [
            [Text(name), *cells]
            for name, cells in zip(self._columns, zip(*self._cells, strict=True), strict=True)
        ]
        widths = [max(cell.cell_len for cell in column) for column in columns]
        least = [max(map(_longest, column)) for column in columns]
        room = most - 3 * len(widths) - 1  # a line in front of each, a blank at both sides
        if sum(least) > room:
            return []
        while sum(widths) > room:
            spare = [wide - narrow for wide, narrow in zip(widths, least, strict=True)]
            widths[spare.index(max(spare))] -= 1
        return widths

    def _whole(self, widths: list[int]) -> Table:
        table = Table(title_justify="left", title_style="bold", header_style="bold")
        table.title = self._title
        for name, width in zip(self._columns, widths, strict=True):
            table.add_column(name, justify="right" if name in self._right else "left", width=width)
        for line in self._cells:
            table.add_row(*line)
        return table


def _longest(text: Text) -> int:
    return max((cell_len(word) for word in text.plain.split()), default=0)


def lines(title: str, pairs: Iterable[tuple[str, object]]) -> RenderableType:
    """Names and values, one pair a line, below a title of any length."""
    table = Table.grid(padding=(0, 2))
    for name, value in pairs:
        table.add_row(Text(f"  {name}", style="dim"), cell(value))
    return Group(Text(title, style="bold"), table)


def namespace_table(title: str, first: str, rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Namespaces as `lightcache.tools.facts.namespaces_of` describes them. `first`: the name of the
    column in front of them."""
    names = (first, "weights", "tenant", "state")
    return table(
        title,
        (*names, "pages", "size", "quota", "minimum"),
        (
            (
                *(entry[name] for name in names),
                entry["pages"],
                *(_size_of(entry, what) for what in ("", "quota_", "minimum_")),
            )
            for entry in rows
        ),
        right="namespace pages size quota minimum",
    )


def _size_of(entry: Mapping[str, Any], what: str) -> str | None:
    """Bytes; of an index that does not know how large its pages are, pages."""
    size, pages = entry[f"{what}bytes"], entry[f"{what}pages"]
    if size is not None:
        return format_size(size)
    return None if pages is None or not what else f"{pages:,} pages"


def age(seconds: float | None) -> str:
    """A time span for people: "3.2 s", "4 min", "2.5 h", "12 d"."""
    if seconds is None:
        return "-"
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.1f} d"


def counted(number: int, what: str) -> str:
    """So many of it: "1 segment", "2 segments"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def percent(part: int, whole: int) -> str:
    """A share for people; "-" if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
