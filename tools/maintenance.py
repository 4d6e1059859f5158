"""Maintenance: rm, reap, repair, disable, enable, sweep."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import click

from lightcache._arguments import format_size
from lightcache.errors import ConfigError, LightcacheError
from lightcache.page_index import PageIndex
from lightcache.shm import Segment, layout, names, owners, wanted
from lightcache.shm.layout import SegmentKind
from lightcache.shm.listing import SegmentInfo, list_segments, read_segment
from lightcache.shm.log_parts import free_dead_readers
from lightcache.shm.objects import OpenObject
from lightcache.shm.segment import free_dead_slots
from lightcache.shm.sweep import Leftover, leftovers, sweep_dependent
from lightcache.shm.sweep import sweep as sweep_all
from lightcache.tools.image import group_option_help, guest, name_argument, unknown
from lightcache.tools.output import FAILED, Command, counted, emit, fail, json_option, printable

group_option = click.option("--group", help=group_option_help)


@click.command(cls=Command)
@name_argument()
@click.option("--force", is_flag=True, help="Also while clients are attached: their calls fail.")
@group_option
def rm(name: str, force: bool, group: str | None) -> None:
    """Remove the cache NAME, its pool and its counters."""
    info = read_segment(name)
    removed = Segment.unlink(name, force=force, group=group)
    # If the header is damaged, its UUID does not name the pool, but the pool's name names us.
    left = [sweep_dependent(dependent) for dependent in names.dependents(name)]
    if removed and info is not None and info.uuid:
        # Those that are in use or another user's stay; no other cache has counters of this name.
        with contextlib.suppress(LightcacheError):
            Segment.unlink(names.counters_name(name, info.uuid), force=force, group=group)
    if not removed and not any(left):
        raise unknown(name)
    click.echo(f"removed {name}")


@click.command(cls=Command)
@name_argument(required=False)
@click.option("--all", "everything", is_flag=True, help="All segments of this user.")
@group_option
@json_option
@click.pass_context
def reap(
    ctx: click.Context, name: str | None, everything: bool, group: str | None, as_json: bool
) -> None:
    """Release what dead clients of NAME held: pins, half-written pages, tickets, slots.

    Correctness does not need it: a process that needs a slot or waits for a page does the same.
    """
    if (name is None) != everything:
        raise click.UsageError("give a NAME or --all, and not both")
    infos = [_ours(info) for info in list_segments()] if name is None else [name]
    reaped: list[dict[str, Any]] = []
    for each in filter(None, infos):
        try:
            reaped.append({"name": each, "dead": _reap(each, group)})
        except (LightcacheError, OSError) as error:
            if name is not None:
                raise
            reaped.append({"name": each, "dead": None, "error": str(error)})
    failed = [entry for entry in reaped if "error" in entry]
    if as_json:
        emit(reaped)
    for entry in reaped if not as_json else failed:
        if "error" in entry:
            fail(f"{entry['name']}: {entry['error']}")
        else:
            click.echo(f"{entry['name']}: {entry['dead']} dead clients reaped")
    ctx.exit(FAILED if failed else 0)


def _ours(info: SegmentInfo) -> str | None:
    """The name; None for segments of other users, unready and retired ones."""
    usable = info.ready and not info.retired and info.problem is None
    return info.name if usable and info.uid == os.geteuid() else None


def _reap(name: str, group: str | None) -> int:
    """The number of dead clients, including those in quarantine."""
    with guest(name) as info:
        if info.kind == "index":
            # If all slots are taken, attaching reaps; so count the dead first.
            with PageIndex.attach(name, role="reap", group=group) as index:
                return max(index.reap(), info.dead_clients)
        with Segment.attach(name, group=group) as segment:
            dead = sum(not client.alive for client in segment.clients())
            (free_dead_readers if segment.kind is SegmentKind.LOG else free_dead_slots)(segment)
            return dead


@click.command(cls=Command)
@name_argument()
@group_option
def repair(name: str, group: str | None) -> None:
    """Rebuild chains, queue, free list and totals of the cache NAME from its records, and check it.

    Reservations wait meanwhile (0.3 s for a million pages), lookups do not.
    """
    with guest(name), PageIndex.attach(name, role="repair", group=group) as index:
        index.repair()
        report = index.check()
    report.raise_if_broken()
    click.echo(f"{name}: rebuilt; {report.message}")


def _switch(name: str, group: str | None, value: int) -> bool:
    """Store the header's `disabled`; False if it had this value before. Takes no slot, no lock."""
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
@name_argument()
@group_option
def disable(name: str, group: str | None) -> None:
    """Make every lookup and reservation in the cache NAME fail, immediately, on this node.

    Engines treat the error as a miss. Held pages stay held; they can be published and released.
    """
    changed = _switch(name, group, 1)
    already = "" if changed else " already"
    click.echo(f"{name}: disabled{already}; `lightcache enable {name}` undoes it")


@click.command(cls=Command)
@name_argument()
@group_option
def enable(name: str, group: str | None) -> None:
    """Undo `disable`: the cache NAME works again, with all its pages."""
    changed = _switch(name, group, 0)
    click.echo(f"{name}: enabled{'' if changed else ' already'}")


@click.command(cls=Command)
@click.option("--prefix", help="Only segments whose names begin with it, and their objects.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def sweep(ctx: click.Context, prefix: str | None, yes: bool, as_json: bool) -> None:
    """Remove all unused objects of this user: list them, and ask.

    These are segments whose creators died before finishing, persistent caches that no process used
    for longer than their idle limit, caches of lifetime "attached" without a live client, retired
    segments, and pools without their cache. With --json, or without a terminal, it only lists them
    unless --yes is given.
    """
    if prefix == "":  # as of an unset variable: everything would be removed
        raise click.UsageError("--prefix: expected the beginning of a name, found none")
    unneeded = leftovers(prefix or "")
    if not as_json:
        _list_leftovers(unneeded, prefix or "")
    agreed = bool(unneeded) and (yes or (not as_json and _agreed(len(unneeded))))
    removed = sweep_all(only={leftover.object_name for leftover in unneeded}) if agreed else []
    if as_json:
        emit(
            [
                {**asdict(leftover), "removed": leftover.object_name in removed}
                for leftover in unneeded
            ]
        )
        return
    if agreed or not unneeded:
        click.echo(f"{counted(len(removed), 'object')} removed")
    for leftover in unneeded:
        if agreed and leftover.object_name not in removed:
            click.echo(
                f"left {leftover.object_name}: it is used now, or another process removed it"
            )
    if unneeded and not agreed:
        click.echo("nothing was removed; `lightcache sweep --yes` removes without asking", err=True)
        ctx.exit(FAILED)


def _list_leftovers(listed: list[Leftover], prefix: str) -> None:
    for leftover in listed:
        click.echo(
            f"{leftover.object_name} ({format_size(leftover.bytes)}): {printable(leftover.why)}"
        )
    others = Counter(
        info.uid
        for info in list_segments()
        if info.uid not in (-1, os.geteuid()) and info.name.startswith(prefix)
    )
    if others:
        whose = ", ".join(f"{count} of user {owners.user(uid)}" for uid, count in others.items())
        click.echo(f"not listed: {whose}; their owners, or root as these users, sweep them")


def _agreed(count: int) -> bool:
    """Ask. False without a terminal."""
    if not sys.stdin.isatty():
        return False
    objects = "this object" if count == 1 else f"these {count} objects"
    return click.confirm(f"remove {objects}?", default=False)
