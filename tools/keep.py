"""Keeping order: rm, reap, repair, disable, enable, sweep."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import click

from lightcache.errors import ConfigError, LightcacheError
from lightcache.page_index import PageIndex
from lightcache.shm import Segment, SegmentInfo, layout, list_segments, names, wanted
from lightcache.shm import sweep as sweep_all
from lightcache.shm.objects import OpenObject
from lightcache.shm.segment import free_dead_slots
from lightcache.shm.sweep import _sweep_dependent
from lightcache.tools.attaching import group_option_help, guest
from lightcache.tools.image import unknown
from lightcache.tools.output import FAILED, Command, emit, fail, json_option

group_option = click.option("--group", help=group_option_help)


@click.command(cls=Command)
@click.argument("name")
@click.option("--force", is_flag=True, help="Also while clients live in it: they find it retired.")
@group_option
def rm(name: str, force: bool, group: str | None) -> None:
    """Remove the cache NAME and its pool."""
    found = Segment.unlink(name, force=force, group=group)
    # Where the header is damaged, its UUID does not lead to the pool; the pool's name leads to us.
    left = [_sweep_dependent(dependent) for dependent in names.dependents(name)]
    if not found and not any(left):
        raise unknown(name)
    click.echo(f"removed {name}")


@click.command(cls=Command)
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="All of this user's.")
@group_option
@json_option
@click.pass_context
def reap(
    ctx: click.Context, name: str | None, everything: bool, group: str | None, as_json: bool
) -> None:
    """Take back what dead clients of NAME held: pins, half-written pages, tickets, slots.

    Nobody needs this for correctness; whoever wants a slot or waits for a page does the same.
    """
    if (name is None) != everything:
        raise click.UsageError("give a NAME or --all, and not both")
    infos = [_ours(info) for info in list_segments()] if name is None else [name]
    found: list[dict[str, Any]] = []
    for each in filter(None, infos):
        try:
            found.append({"name": each, "dead": _reap(each, group)})
        except (LightcacheError, OSError) as error:
            if name is not None:
                raise
            found.append({"name": each, "dead": None, "error": str(error)})
    failed = [entry for entry in found if "error" in entry]
    if as_json:
        emit(found)
    for entry in found if not as_json else failed:
        if "error" in entry:
            fail(f"{entry['name']}: {entry['error']}")
        else:
            click.echo(f"{entry['name']}: {entry['dead']} dead clients reaped")
    ctx.exit(FAILED if failed else 0)


def _ours(info: SegmentInfo) -> str | None:
    """Somebody else's, an unready and a retired one are passed over."""
    usable = info.ready and not info.retired and info.problem is None
    return info.name if usable and info.uid == os.geteuid() else None


def _reap(name: str, group: str | None) -> int:
    """How many were dead, those in quarantine included."""
    with guest(name) as info:
        if info.kind == "index":
            # With all slots taken, attaching reaps; so the dead are counted before it.
            with PageIndex.attach(name, role="reap", group=group) as index:
                return max(index.reap(), info.dead_clients)
        if info.kind == "plain":
            with Segment.attach(name, group=group) as segment:
                dead = sum(not client.alive for client in segment.clients())
                free_dead_slots(segment)
                return dead
    raise LightcacheError(
        f"{name!r} holds a {info.kind} segment: attach to it as what it is to reap it"
    )


@click.command(cls=Command)
@click.argument("name")
@group_option
def repair(name: str, group: str | None) -> None:
    """Rebuild chains, queue, free list and totals of the cache NAME from its records.

    Reservations wait meanwhile (0.3 s for a million pages), lookups do not. Then it is checked.
    """
    with guest(name), PageIndex.attach(name, role="repair", group=group) as index:
        index.repair()
        report = index.check()
    report.raise_if_broken()
    click.echo(f"{name}: rebuilt; {report.message}")


def _switch(name: str, group: str | None, value: int) -> bool:
    """Store the header's `disabled`; False when it was so before. Takes no slot and no lock."""
    opened = OpenObject.open(name, writable=True)
    if opened is None:
        raise unknown(name)
    with contextlib.closing(opened):
        expected = wanted.want(
            name,
            kind=None,
            payload_bytes=None,
            config=None,
            layout_facts=None,
            lifetime=None,
            group=group,
        )
        opened.check_access(expected.group)
        header = opened.header()
        if not header.ready or header.retired:
            raise ConfigError(f"{name!r} is not in use: see `lightcache ls`")
        wanted.verify_header(header, opened.size(), expected)
        offset = layout.SegmentHeader.disabled.offset
        os.pwrite(opened.fd, value.to_bytes(4, "little"), offset)
        return bool(header.disabled) != bool(value)


@click.command(cls=Command)
@click.argument("name")
@group_option
def disable(name: str, group: str | None) -> None:
    """Make every lookup and reservation in the cache NAME an error, at once and on this node.

    Engines take the error for a miss. What is held stays held, and may be published and released.
    """
    changed = _switch(name, group, 1)
    click.echo(f"{name}: disabled{'' if changed else ' already'}; `lightcache enable` undoes it")


@click.command(cls=Command)
@click.argument("name")
@group_option
def enable(name: str, group: str | None) -> None:
    """Undo `disable`: the cache NAME goes on with everything it had."""
    changed = _switch(name, group, 0)
    click.echo(f"{name}: enabled{'' if changed else ' already'}")


@click.command(cls=Command)
@click.option("--prefix", help="Only what belongs to segments whose names begin so.")
@json_option
def sweep(prefix: str | None, as_json: bool) -> None:
    """Remove everything of this user's that nobody needs.

    That is what creators left that died before finishing, caches of lifetime "attached" in which
    nobody lives any more, retired segments, and pools without their cache.
    """
    if prefix == "":  # as of a variable that is not set: all would go
        raise click.UsageError("--prefix: expected the beginning of a name, found none")
    removed = sweep_all(prefix=prefix or "")
    if as_json:
        emit(removed)
    else:
        for full in removed:
            click.echo(f"removed {full}")
        click.echo(f"{len(removed)} objects removed")
