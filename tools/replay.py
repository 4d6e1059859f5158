"""`lightcache replay`: what caches of other sizes would serve of a trace, as a table and a page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import RenderableType

from lightcache import traces
from lightcache._arguments import format_size, parse_size
from lightcache.errors import ConfigError
from lightcache.simulation import ORDERS
from lightcache.tools import replay_report
from lightcache.tools.output import Command, check_writable, console, emit, json_option, table
from lightcache.tools.replay_report import sizing
from lightcache.tools.sizing import ROUTINGS, Case, Setup, cases, default_sizes
from lightcache.tools.vllm_config import Unknown, element_bytes, find_model, shape_of

MOST_NODES = 1000
LLAMA = "128KiB"
"""Of a token: Llama 3 8B with 16 bits."""


@click.command(cls=Command)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--size", help='Memory of a node\'s cache, such as "64GiB,1TiB"; default: to all.')
@click.option("--storage", help='A storage behind it, such as "0,4TiB"; default: none.')
@click.option("--shared", is_flag=True, help="The storage is one for all nodes.")
@click.option("--nodes", default="1", show_default=True, help="1 to 1,000, such as 1,8,100.")
@click.option("--routing", help=f"Some of {','.join(ROUTINGS)}; default: all.")
@click.option("--policy", default="lru", show_default=True,
              help=f"Order of eviction, some of {','.join(ORDERS)}.")  # fmt: skip
@click.option("--model", help="Folder with a config.json, or that file: bytes of a token's KV; or")
@click.option("--token-bytes", help=f"these bytes; default: {LLAMA}.")
@click.option("--block-tokens", type=click.IntRange(1, 1 << 20),
              help=f"Of a trace that does not say it; default: {traces.BLOCK_TOKENS}.")  # fmt: skip
@click.option("--prefill-tokens-per-s", "speed", type=float, default=10_000.0, show_default=True,
              help="Of a node: for the time saved, and for routers' loads.")  # fmt: skip
@click.option("--report", metavar="FILE", help="Write a page of HTML there, with plots.")
@json_option
def replay(
    trace: Path,
    size: str | None,
    storage: str | None,
    shared: bool,
    nodes: str,
    routing: str | None,
    policy: str,
    model: str | None,
    token_bytes: str | None,
    block_tokens: int | None,
    speed: float,
    report: str | None,
    as_json: bool,
) -> None:
    """What caches of other sizes would serve of TRACE, a file of requests.

    Prints hits, prefill saved and bytes moved, and what the next GiB and the next tier bring. No
    cache is touched.
    """
    if report is not None:
        _check_new(report)
    if not 0 < speed < math.inf:
        raise ConfigError(f"--prefill-tokens-per-s: expected a number above 0, found {speed}")
    setup = Setup(_token_bytes(model, token_bytes), speed, shared)
    counts, routings = _counts(nodes), _names(routing, ROUTINGS, "--routing")
    policies = _names(policy, list(ORDERS), "--policy")
    storages = _sizes(storage or "0", "--storage", zero=True)
    sizes = None if size is None else _sizes(size, "--size")
    requests = traces.read(trace, block_tokens)
    _check_sizes(sizes or (), requests, setup)
    sizes = sizes or default_sizes(requests, setup)
    rows = list(cases(requests, setup, sizes, storages, counts, routings, policies))
    if as_json:
        emit([{**asdict(row), "hit_tokens": row.hit_tokens} for row in rows])
    else:
        console().print(_table(trace.name, rows))
        for line in sizing(requests, setup, rows):
            click.echo(line)
    if report is not None:
        _write_new(report, replay_report.page(trace.name, requests, setup, rows))
        click.echo(f"wrote {report}", err=True)


# ---- what was given


def _check_new(path: str) -> None:
    if os.path.lexists(path):
        raise ConfigError(f"--report: {path} exists; give another name, or remove it")
    check_writable("--report", path)


def _write_new(path: str, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)


def _token_bytes(model: str | None, given: str | None) -> int:
    if model is None:
        return parse_size(given or LLAMA, "--token-bytes")
    if given is not None:
        raise click.UsageError("give --model or --token-bytes; not both")
    model, config = find_model(model)
    if config is None:
        raise ConfigError(f"--model: {model} is not on this machine; give --token-bytes")
    try:
        shape = shape_of(config)
    except Unknown as error:
        raise ConfigError(f"--model: {error}; give --token-bytes") from error
    return shape.token_bytes(element_bytes(config, "auto"))


def _names(given: str | None, known: Sequence[str], option: str) -> list[str]:
    names = list(known) if given is None else given.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: expected some of {','.join(known)}, found {name!r}")
    return list(dict.fromkeys(names))


def _sizes(given: str, option: str, zero: bool = False) -> list[int]:
    return sorted({parse_size(each.strip(), option, zero=zero) for each in given.split(",")})


def _counts(given: str) -> list[int]:
    counts = [int(each) if each.isascii() and each.isdigit() else 0 for each in given.split(",")]
    if not all(1 <= count <= MOST_NODES for count in counts):
        raise ConfigError(f"--nodes: expected numbers of 1 to {MOST_NODES}, found {given!r}")
    return sorted(set(counts))


def _check_sizes(sizes: Sequence[int], trace: traces.Trace, setup: Setup) -> None:
    page = trace.block_tokens * setup.token_bytes
    if sizes and sizes[0] < page:
        raise ConfigError(
            f"--size: expected at least a block of {trace.block_tokens} tokens, "
            f"{format_size(page)}, found {format_size(sizes[0])}"
        )


# ---- the table


def _table(name: str, rows: Sequence[Case]) -> RenderableType:
    """Only columns that say something of these rows."""
    columns = replay_report.columns(rows)
    text = ("routing", "policy")
    right = [title for title, _ in columns if title not in text]
    body = [[cell(row) for _, cell in columns] for row in rows]
    return table(name, [title for title, _ in columns], body, right=" ".join(right))
