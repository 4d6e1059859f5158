"""A bar for what takes a while, where somebody looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lightcache.tools.output import console


@contextlib.contextmanager
def bar(
    what: str, total: int, done: int = 0, *, quiet: bool = False
) -> Iterator[Callable[[int, int], None] | None]:
    """For the time of the body: what to call with (done, total), by any thread. None where nobody
    looks: standard error is no terminal, or `quiet`."""
    out = console(stderr=True)
    if quiet or not out.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=out, transient=True) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda done, _: progress.update(task, completed=done)
