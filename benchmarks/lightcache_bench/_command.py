"""`lightcache bench`: run a benchmark, and print its rows as a table or as JSON."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

import lightcache_bench as frame
from lightcache.errors import ConfigError
from lightcache.layout import EVICTIONS
from lightcache.tools.output import Command, cell, console, emit, fail, json_option, table

TAKES = {
    "trace": ("policy", "manager", "hybrid", "vllm"),
    "only": ("policy", "transfer", "serve", "vllm"),
    "path": ("storage", "serve"),
    "url": ("storage",),
    **dict.fromkeys(
        ("pages", "policies", "seeds", "calls", "eviction", "rate", "admission", "wrong"),
        ("policy",),
    ),
    **dict.fromkeys(
        ("model", "device", "workers", "prefix_tokens", "requests", "pool", "size", "storage"),
        ("serve",),
    ),
}
"""Options that not every benchmark takes, and which do."""


@click.command(cls=Command)
@click.argument("name", required=False)
@click.option("--quick", is_flag=True, help="Few repetitions: to see that it works.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False),
    help="A request trace, for `policy`, `manager`, `hybrid` and `vllm`.",
)
@click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="For `storage` and `serve`: a folder on the disk to measure; else the current one.",
)
@click.option("--url", help="For `storage`: one to measure instead, such as redis://host:6379/0.")
@click.option("--storage", metavar="URL", help="For `serve`: a storage to measure, not a disk.")
@click.option(
    "--only",
    help="Parts to run, such as 2,3, for `transfer`, `serve` and `vllm`; traces, such as "
    "loop,zipf, for `policy`.",
)
@click.option("--pages", help="For `policy`: sizes of caches, such as 1000,3000.")
@click.option("--policies", help="For `policy`: what to compare with, such as lru,arc.")
@click.option(
    "--seeds", type=click.IntRange(1), help="For `policy`: runs, each with another secret."
)
@click.option(
    "--calls", type=click.IntRange(0), help="For `policy`: further calls for each request."
)
@click.option(
    "--eviction", type=click.Choice(EVICTIONS), help="For `policy`: the order of the index."
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="For `policy`: how much faster than its times say a trace is replayed.",
)
@click.option(
    "--admission",
    is_flag=True,
    default=None,
    help="For `policy`: pages that are not worth it are not written.",
)
@click.option(
    "--wrong",
    type=click.FloatRange(0, 1),
    help="For `policy`: requests give hints, of which this share is wrong.",
)
@click.option("--model", help="For `serve`: small, medium, 8b, or a folder with a checkpoint.")
@click.option("--device", help="For `serve`: cpu, cuda, or names with commas between.")
@click.option("--workers", type=click.IntRange(1, 16), help="For `serve`: model workers.")
@click.option("--prefix-tokens", help="For `serve`: lengths of prefixes, such as 4096,16384.")
@click.option("--requests", type=click.IntRange(1), help="For `serve`: how many.")
@click.option("--pool", help="For `serve`: only shared, private or none.")
@click.option("--size", help="For `serve`: host memory in total, such as 16GiB.")
@json_option
def bench(name: str | None, quick: bool, as_json: bool, **given: Any) -> None:
    """Run the benchmark NAME; without one, list them.

    Ratios are against baselines measured in the same run. Nothing fails because something is slow:
    "met" says whether a promise was kept.
    """
    if name is None:
        _list(as_json)
        return
    rows = []
    options = {option: value for option, value in given.items() if value is not None}
    for option in options:
        if name not in TAKES[option]:
            flag = "--" + option.replace("_", "-")
            *others, last = (f"`{each}`" for each in TAKES[option])
            takers = " and ".join([", ".join(others), last] if others else [last])
            do = "do" if len(TAKES[option]) > 1 else "does"
            raise ConfigError(f"bench {name}: takes no {flag}; {takers} {do}")
    for row in frame.load(name).rows(quick, **options):
        rows.append(row)
        if not as_json:
            click.echo(f"{row.name}: {row.value:.4g} {row.unit}", err=True)
    if as_json:
        emit(frame.document(rows))
    else:
        _show(name, rows)


def _list(as_json: bool) -> None:
    if as_json:
        emit({name: frame.summary(name) for name in frame.names()})
        return
    for name in frame.names():
        click.echo(f"{name:<12}{frame.summary(name)}")
    if not frame.names():
        fail("no benchmark is installed")


def _show(name: str, rows: list[frame.Row]) -> None:
    out, machine, versions = console(), frame.machine(), frame.versions()
    out.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {machine['kernel']}"
    )
    out.print(", ".join(f"{package} {found}" for package, found in versions.items() if found))
    columns = ("name", "params", "value", "unit", "against", "ratio", "target", "met")
    out.print(table(f"bench {name}", columns, map(_cells, rows), right="value ratio"))


def _cells(row: frame.Row) -> tuple[object, ...]:
    return (
        row.name,
        " ".join(f"{key}={value}" for key, value in row.params.items()) or None,
        f"{row.value:,.4g}",
        row.unit,
        row.baseline,
        None if row.ratio is None else f"{row.ratio:,.3g}",
        row.target,
        None if row.met is None else _met(row.met),
    )


def _met(met: bool) -> Text:
    return cell(met, "green" if met else "red")
