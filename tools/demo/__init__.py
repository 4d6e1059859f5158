"""`lightcache demo`: a router and workers as processes that share one cache.

Read `router.py` and `worker.py`, which are what an engine has; then `model.py`, the memory of a
device that `worker.py` computes in. `run.py` says what happens in a run.
"""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import click
from rich.console import Console

from lightcache._arguments import parse_size
from lightcache.errors import ConfigError
from lightcache.storage.urls import check_url
from lightcache.tools.demo.conversations import Conversations
from lightcache.tools.demo.messages import DENSE, HYBRID, ModelSpec, WorkerConfig
from lightcache.tools.demo.processes import run_name
from lightcache.tools.demo.report import Outcome, Show
from lightcache.tools.demo.run import Run
from lightcache.tools.output import (
    BROKEN,
    OK,
    Command,
    check_writable,
    console,
    emit,
    json_option,
    save_picture,
)


@click.command(cls=Command, context_settings={"show_default": True})
@click.option("--workers", default=2, type=click.IntRange(1, 16), help="Worker processes.")
@click.option("--users", default=4, type=click.IntRange(1, 64), help="Concurrent conversations.")
@click.option("--turns", default=5, type=click.IntRange(1, 64), help="Turns of each conversation.")
@click.option("--seed", default=0, help="Seed of weights and conversations.")
@click.option(
    "--model",
    metavar="DIR",
    help="A checkpoint instead of random weights; or `hybrid`: random weights of a model with "
    "recurrent states beside its KV.",
)
@click.option("--device", default="cpu", help="Device of all workers: cpu, or cuda:0.")
@click.option("--size", default="32MiB", help="Host memory for pages.")
@click.option(
    "--storage",
    metavar="URL",
    help="The storage of pages, such as disk:/mnt/nvme/x?capacity=2GiB. By default a disk in a "
    "temporary folder.",
)
@click.option("--no-restart", is_flag=True, help="End after the conversations.")
@click.option("--no-kill", is_flag=True, help="Kill no worker.")
@click.option("--svg", metavar="FILE", help="Save a picture of the output.")
@json_option
@click.pass_context
def demo(ctx: click.Context, /, svg: str | None, as_json: bool, **options: Any) -> None:
    """A router and workers, each with a model, serve conversations from one cache.

    Each turn of a conversation goes to another worker. Halfway, a worker is killed in the middle of
    an offload. Then everything ends and starts again with an empty cache, and conversations
    continue with what storage has. Finally the index is checked, and turns are computed again
    from nothing. Exit status 0: all of it held.
    """
    printed = Console(file=io.StringIO()) if as_json else console()
    if svg is not None:
        check_writable("--svg", svg)
        printed = Console(record=True, width=112, force_terminal=True, highlight=False)
    with ExitStack() as stack:
        run = _prepared(SimpleNamespace(**options), printed, stack)
        run.run()
    outcome = run.outcome
    run.show.end(outcome)
    if as_json:
        emit(outcome.facts())
    if svg is not None:
        save_picture(printed, svg, "lightcache demo")
    ctx.exit(BROKEN if outcome.problems() else OK)


def _prepared(asked: SimpleNamespace, printed: Console, stack: ExitStack) -> Run:
    """The run that was asked for, checked before a process is started. The stack removes the
    temporary folder of its storage."""
    check_packages()
    host_bytes = parse_size(asked.size)
    url = asked.storage
    if url is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lightcache-demo-"))
        url = f"disk:{folder}/pages?capacity={2 * host_bytes}"
    check_url(url)
    hybrid = asked.model == "hybrid"
    directory = None if hybrid else asked.model
    if directory is not None and not os.path.isfile(os.path.join(directory, "config.json")):
        raise ConfigError(
            f"--model: expected `hybrid`, or a folder with a config.json, found {directory!r}"
        )
    talk = Conversations(seed=asked.seed, users=asked.users, turns=asked.turns)
    config = WorkerConfig(
        run_name("demo"),
        ModelSpec(HYBRID if hybrid else DENSE, asked.seed, directory, asked.device),
        host_bytes,
        talk.longest,
        url,
        threads=max(1, len(os.sched_getaffinity(0)) // asked.workers),
    )
    restart = not asked.no_restart and not url.startswith("memory:")
    outcome = Outcome(talk.total, wanted_kill=not asked.no_kill, wanted_restart=restart)
    return Run(config, asked.workers, talk, outcome, Show(printed))


def check_packages() -> None:
    """See that the packages of a worker are there.

    Raises:
        ConfigError: some are missing.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}, not installed here: "
            "pip install 'lightcache[demo]'"
        )
