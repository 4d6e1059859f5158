"""`lightcache demo`: a router and model workers as processes that share one cache."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from lightcache.errors import ConfigError
from lightcache.tools.output import BROKEN, OK, Command, check_writable, console, emit, json_option

_SVG_WIDTH = 112
_KEPT = 4  # caches of former requests that a worker keeps, so that there is something to route by


@click.command(cls=Command)
@click.option(
    "--workers", default=2, show_default=True, type=click.IntRange(1, 16), help="Model workers."
)
@click.option(
    "--users",
    default=4,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Conversations at once.",
)
@click.option(
    "--turns", default=5, show_default=True, type=click.IntRange(1, 64), help="Turns of each."
)
@click.option(
    "--seed", default=0, show_default=True, help="Of the weights and of the conversations."
)
@click.option(
    "--model",
    "directory",
    metavar="DIR",
    help="A checkpoint instead of random weights; or `hybrid`, for random weights of a model with "
    "recurrent states beside its keys and values.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, or such as cuda:0.")
@click.option("--size", default="32MiB", show_default=True, help="Host memory for pages.")
@click.option(
    "--storage",
    metavar="URL",
    help="Where each worker writes pages when a request ends, and reads back what the host does "
    "not have, such as disk:/mnt/nvme/x?capacity=2GiB. By default a disk in a temporary folder, "
    "which is removed in the end; `none`: no storage. Of memory: each worker has its own, which "
    "ends with it.",
)
@click.option(
    "--no-restart",
    is_flag=True,
    help="Leave out the end: everything ends, begins anew with the same storage, and goes on with "
    "some conversations. There is none without storage, and none with memory:.",
)
@click.option(
    "--page-tokens",
    default=16,
    show_default=True,
    type=click.IntRange(1, 256),
    help="Tokens of a page.",
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Requests of a trace in Mooncake's format instead of conversations.",
)
@click.option(
    "--scale", default=1 / 32, show_default=True, help="What the trace's lengths are multiplied by."
)
@click.option(
    "--requests",
    default=24,
    show_default=True,
    type=click.IntRange(1),
    help="How many of the trace.",
)
@click.option(
    "--routing",
    default="another",
    show_default=True,
    type=click.Choice(["another", "random", "prefix"]),
    help="Who gets a turn: never the worker of the turn before, any, or who has most of it cached.",
)
@click.option(
    "--kill/--no-kill",
    default=True,
    show_default=True,
    help="Kill a worker in the middle of an offload.",
)
@click.option("--svg", metavar="FILE", help="Save a picture of the output.")
@json_option
@click.pass_context
def demo(ctx: click.Context, /, svg: str | None, as_json: bool, **asked: Any) -> None:
    """A router and model workers serve conversations out of one cache.

    Each turn of a conversation goes to another worker, unless --routing says otherwise. Halfway, a
    worker is killed in the middle of an offload. Then everything ends, begins anew with an empty
    cache, and conversations go on from what storage has. At the end the cache is checked, and some
    turns are computed again from nothing. Exit status 0: all of it held.
    """
    from lightcache.tools.demo.show import Show

    if svg is not None:
        check_writable("--svg", svg)
    out = console()
    outcome = _run(Show(out, quiet=as_json), **asked)
    problems = outcome.problems()
    if as_json:
        emit(outcome.facts())
    else:
        out.print()
        for line in outcome.lines():
            out.print(line, soft_wrap=True)
        for problem in problems:
            out.print(f"it did not hold: {problem}", style="red", markup=False, soft_wrap=True)
        if not problems:
            out.print("All of it held.", style="bold green")
    if svg is not None:
        _picture(svg, outcome)
    ctx.exit(BROKEN if problems else OK)


def _run(show: Any, *, storage: str | None, no_restart: bool, **asked: Any) -> Any:
    """The run, in a temporary folder if something is to be found again."""
    from lightcache.tools.demo.report import Report
    from lightcache.tools.demo.scratch import scratch
    from lightcache.tools.demo.stage import terminable
    from lightcache.tools.demo.urls import NONE, checked, outlives

    url = None if storage in (None, NONE) else checked(storage)
    settings = _settings(**asked, storage=url)
    if no_restart or storage == NONE or (url is not None and not outlives(url)):
        return Report(settings, show).run()
    with terminable(), scratch() as folder:
        if url is None:
            caches = 2 if settings.model.hybrid else 1  # each has a half of the memory then
            settings = replace(settings, storage=folder.storage(settings.size // caches))
        return Report(settings, show, folder).run()


def _settings(
    *,
    directory: str | None,
    device: str,
    seed: int,
    size: str,
    storage: str | None,
    workers: int,
    users: int,
    turns: int,
    trace: str | None,
    scale: float,
    requests: int,
    page_tokens: int,
    routing: str,
    kill: bool,
) -> Any:
    """What is asked for, checked before any process is started."""
    from lightcache._arguments import parse_size
    from lightcache.shm.sweep import sweep
    from lightcache.tools.demo import machine, models
    from lightcache.tools.demo.settings import Settings, run_name

    hybrid = directory == models.HYBRID
    if hybrid and routing == "prefix":
        raise ConfigError(
            "--model hybrid: expected another --routing than prefix, which goes by what workers "
            "keep on their devices: without a manager they keep nothing there"
        )
    choice = models.ModelChoice(
        directory=os.path.abspath(directory) if directory and not hybrid else None,
        size=models.HYBRID if hybrid else "small",
        seed=seed,
        device=device,
        dtype="float32",
    )
    facts = models.preflight(choice)
    nbytes = parse_size(size)
    sweep(prefix="demo-")  # what demos left whose every process was killed: it may be in the way
    machine.preflight(nbytes)
    if trace is not None:
        workload: dict[str, Any] = {
            "kind": "trace",
            "path": os.path.abspath(trace),
            "scale": scale,
            "limit": requests,
        }
    else:
        workload = {
            "kind": "conversations",
            "users": users,
            "turns": turns,
            "system_tokens": 384,
            "message_tokens": 48,
            "answer_tokens": 16,
        }
    settings = Settings(
        run=run_name("demo"),
        parent=os.getpid(),
        model=choice,
        workload={**workload, "seed": seed, "vocabulary": facts.vocabulary},
        size=nbytes,
        page_tokens=page_tokens,
        workers=workers,
        devices=(device,),
        threads=max(1, len(os.sched_getaffinity(0)) // workers),
        routing=routing,  # type: ignore[arg-type]
        storage=storage,
        kept=_KEPT if routing == "prefix" else 0,  # elsewhere all that is reused was shared
        seed=seed,
    )
    total = settings.make_workload().total  # whatever is wrong with it is said now
    return replace(settings, hold_at=total // 2) if kill else settings


def _picture(path: str, outcome: Any) -> None:
    """The last screen of a run as SVG."""
    from lightcache.tools.demo.show import Turns

    picture = Console(record=True, width=_SVG_WIDTH, file=io.StringIO(), force_terminal=True)
    turns = Turns()
    for turn in (*outcome.turns, *outcome.again):
        turns.add(turn)
    picture.print(turns.table(turns.rows))
    picture.print()
    summary = Table.grid(Column(style="bold"), Column(), padding=(0, 2))
    for name, text in outcome.pairs():
        summary.add_row(name, text)
    picture.print(summary)
    if not outcome.problems():
        picture.print("All of it held.", style="bold green")
    drawn = picture.export_svg(title="make demo")
    # No fonts from elsewhere: any monospaced one will do.
    Path(path).write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))
