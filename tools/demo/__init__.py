"""`lightcache demo`: a router and workers as processes that share one cache."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, TypeVar

import click
from rich.console import Console

from lightcache.errors import ConfigError
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

F = TypeVar("F", bound=Callable[..., Any])


def _number(name: str, default: int, most: int, text: str) -> Callable[[F], F]:
    kind = click.IntRange(1, most)
    return click.option(name, default=default, show_default=True, type=kind, help=text)


@click.command(cls=Command)
@_number("--workers", 2, 16, "Worker processes.")
@_number("--users", 4, 64, "Concurrent conversations.")
@_number("--turns", 5, 64, "Turns of each conversation.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights and conversations.")
@click.option(
    "--model",
    metavar="DIR",
    help="A checkpoint instead of random weights; or `hybrid`: random weights of a model with "
    "recurrent states beside its KV.",
)
@click.option(
    "--device", default="cpu", show_default=True, help="Device of all workers: cpu, or cuda:0."
)
@click.option("--size", default="32MiB", show_default=True, help="Host memory for pages.")
@click.option(
    "--storage",
    metavar="URL",
    help="The storage of pages, such as disk:/mnt/nvme/x?capacity=2GiB. By default a disk in a "
    "temporary folder; `none`: no storage, and no restart.",
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
    from lightcache.tools.demo.report import Show
    from lightcache.tools.demo.run import run

    if svg is not None:
        check_writable("--svg", svg)
    printed = Console(file=io.StringIO()) if as_json else console()
    if svg is not None:
        printed = Console(record=True, width=112, force_terminal=True, highlight=False)
    show = Show(printed)
    with ExitStack() as stack:
        outcome = run(_plan(stack, SimpleNamespace(**options)), show)
    show.end(outcome)
    if as_json:
        emit(outcome.facts())
    if svg is not None:
        save_picture(printed, svg, "lightcache demo")
    ctx.exit(BROKEN if outcome.problems() else OK)


def _plan(stack: ExitStack, asked: SimpleNamespace) -> Any:
    """What was asked for, checked before a process is started.

    Args:
        stack: removes the temporary folder of the storage.
    """
    from lightcache._arguments import parse_size
    from lightcache.tools.demo.conversations import Conversations
    from lightcache.tools.demo.messages import DENSE, HYBRID, ModelSpec, WorkerConfig
    from lightcache.tools.demo.run import Plan, run_name

    check_packages()
    host_bytes = parse_size(asked.size)
    url = _storage(asked.storage, host_bytes, stack)
    hybrid = asked.model == "hybrid"
    directory = None if hybrid else asked.model
    if directory is not None and not os.path.isfile(os.path.join(directory, "config.json")):
        raise ConfigError(
            f"--model: expected `hybrid`, or a folder with a config.json, found {directory!r}"
        )
    spec = ModelSpec(HYBRID if hybrid else DENSE, asked.seed, directory, asked.device)
    talk = Conversations(seed=asked.seed, users=asked.users, turns=asked.turns)
    threads = max(1, len(os.sched_getaffinity(0)) // asked.workers)
    config = WorkerConfig(run_name("demo"), spec, host_bytes, talk.longest, url, threads=threads)
    lasting = url is not None and not url.startswith("memory:")
    restart = lasting and not asked.no_restart
    return Plan(config, talk, asked.workers, kill=not asked.no_kill, restart=restart)


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


def _storage(storage: str | None, host_bytes: int, stack: ExitStack) -> str | None:
    """URL of the storage; by default of a disk with twice the host's memory."""
    from lightcache.storage.urls import check_url

    if storage == "none":
        return None
    if storage is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lightcache-demo-"))
        return f"disk:{folder}/pages?capacity={2 * host_bytes}"
    check_url(storage)
    return storage
