"""`lightcache bench`: run a benchmark, and print its rows as a table or as JSON."""

from __future__ import annotations

import click
from rich.text import Text

from lightcache.errors import ConfigError
from lightcache.tools import bench as frame
from lightcache.tools.output import Command, cell, console, emit, fail, json_option, table

TAKES = {"trace": "policy", "only": "transfer"}
"""Options that one benchmark takes, and which."""


@click.command(cls=Command)
@click.argument("name", required=False)
@click.option("--quick", is_flag=True, help="Few repetitions: to see that it works.")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False), help="A request trace, for `policy`."
)
@click.option("--only", help="Parts to run, such as 2,3, for `transfer`.")
@json_option
def bench(
    name: str | None, quick: bool, trace: str | None, only: str | None, as_json: bool
) -> None:
    """Run the benchmark NAME; without one, list them.

    Ratios are against baselines measured in the same run. Nothing fails because something is slow:
    "met" says whether a promise was kept.
    """
    if name is None:
        _list(as_json)
        return
    rows = []
    options = {}
    for option, given in (("trace", trace), ("only", only)):
        if given is None:
            continue
        if name != TAKES[option]:
            raise ConfigError(f"bench {name}: takes no --{option}; `{TAKES[option]}` does")
        options[option] = given
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
