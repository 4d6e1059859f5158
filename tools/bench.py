"""`lightcache bench`: the benchmarks, a package of their own that is installed beside this one."""

from __future__ import annotations

import importlib
import importlib.util

import click

from lightcache.errors import ConfigError
from lightcache.tools.output import Command


@click.command(name="bench", cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def missing(arguments: tuple[str, ...]) -> None:
    """Run a benchmark: from the package lightcache_bench, which is not installed."""
    del arguments
    raise ConfigError(
        "bench: expected the package lightcache_bench, found none; the wheel has no benchmarks: "
        "clone the repository, and type `pip install ./benchmarks` there"
    )


def installed() -> click.Command:
    """The benchmarks' own command; where they are not installed, one that says how to get them."""
    if importlib.util.find_spec("lightcache_bench") is None:
        return missing
    command = importlib.import_module("lightcache_bench._command").bench
    assert isinstance(command, click.Command)
    return command


bench = installed()
