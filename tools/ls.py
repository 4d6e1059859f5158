"""`lightcache ls`: all segments, without attaching to them."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import click

from lightcache._arguments import format_size
from lightcache.errors import LightcacheError
from lightcache.shm import names, owners, wanted
from lightcache.shm.folders import path_of
from lightcache.shm.layout import SLOTS
from lightcache.shm.listing import SegmentInfo, list_segments
from lightcache.shm.objects import OpenObject
from lightcache.tools.facts import Facts, namespaces_of
from lightcache.tools.image import read_namespaces
from lightcache.tools.output import (
    Command,
    age,
    cell,
    console,
    counted,
    emit,
    json_option,
    namespace_table,
    table,
)


@click.command(cls=Command)
@json_option
def ls(as_json: bool) -> None:
    """List all segments of this machine, of every user.

    Nothing is mapped, locked or attached to. "pool" is a pool's length, "in memory" the memory it
    has so far. "clients" are living ones, and the slots that dead ones have left, of all slots; how
    long a quarantine lasts is in `lightcache dump`. For other users' segments only name, owner and
    size are shown. Namespaces have a table of their own, if a cache has more than the default one,
    or limits for it.
    """
    segments = [describe(info) for info in list_segments()]
    if as_json:
        emit(segments)
    elif not segments:
        click.echo(f"no segments in {names.FOLDER}; `lightcache create` makes one")
    else:
        console().print(_table(segments))
        if spaces := [row for entry in segments for row in _spaces(entry)]:
            console().print(namespace_table(counted(len(spaces), "namespace"), "name", spaces))


def describe(info: SegmentInfo) -> dict[str, Any]:
    """A segment, for JSON."""
    lengths, allocated = _dependents(info)
    pages, independent, eviction, spaces = _index(info)
    return {
        "name": info.name,
        "family": info.family,
        "kind": info.kind or None,
        "state": state_of(info),
        "problem": info.problem,
        "bytes": info.bytes,
        "pages": pages,
        "independent": independent,
        "eviction": eviction,
        "namespaces": spaces,
        "dependents": list(info.dependents),
        "pool_bytes": lengths,
        "pool_allocated_bytes": allocated,
        "lifetime": info.lifetime or None,
        "clients": info.clients if info.seen else None,
        "dead_clients": info.dead_clients if info.seen else None,
        "quarantined_clients": info.quarantined_clients if info.seen else None,
        "slots": SLOTS - 1 if info.seen else None,
        "occupied": info.occupied if info.seen else None,
        "age_s": info.age_s if info.seen else None,
        "uid": None if info.uid < 0 else info.uid,
        "owner": None if info.uid < 0 else owners.user(info.uid),
        "uuid": info.uuid or None,
    }


def state_of(info: SegmentInfo) -> str:
    """The state, in a word or two."""
    if not info.seen:
        return "another user's" if info.uid not in (-1, os.geteuid()) else "unreadable"
    if info.retired:
        return "retired"
    if info.problem:
        return "damaged" if info.ready else _UNFINISHED.get(info.problem, "unreadable")
    return "disabled" if info.disabled else "ready"


_UNFINISHED = {
    "being created": "being created",
    "its creator died before finishing": "dead creator",
}


def _index(info: SegmentInfo) -> tuple[int | None, bool, str | None, list[Facts] | None]:
    """Pages, whether it is independent, and its order of eviction, from the configuration in the
    header; and its namespaces. None: it has no index, or cannot be read."""
    with contextlib.suppress(LightcacheError, OSError):
        segment = OpenObject.open(info.name, writable=False)
        if segment is not None and info.ready:
            with contextlib.closing(segment):
                config = wanted.config_of(segment.header())
                pages, independent = config.get("pages"), config.get("independent", False) is True
                if isinstance(pages, int):
                    eviction = config.get("eviction", "lru")
                    return pages, independent, eviction, _namespaces(segment)
    return None, False, None, None


def _namespaces(segment: OpenObject) -> list[Facts] | None:
    """None: another release has made it, or it is damaged."""
    with contextlib.suppress(LightcacheError, OSError):
        every = namespaces_of(*read_namespaces(segment))
        return [entry for entry in every if entry["state"] != "cleared"]
    return None


def _spaces(entry: dict[str, Any]) -> list[Facts]:
    """Rows of its namespaces; none if it has the default one alone, without limits."""
    spaces: list[Facts] = entry["namespaces"] or []
    plain = [("weights", ""), ("tenant", ""), ("quota_pages", None), ("minimum_pages", None)]
    if len(spaces) == 1 and all(spaces[0][field] == value for field, value in plain):
        return []
    return [{"name": entry["name"], **space} for space in spaces]


def _dependents(info: SegmentInfo) -> tuple[int, int]:
    lengths = allocated = 0
    for full in info.dependents:
        dependent = names.parse_dependent(f"/{path_of(full).name}")
        if dependent is None or dependent.what != "pool":
            continue  # such as token records
        try:
            status = os.stat(path_of(full), follow_symlinks=False)
        except OSError:
            continue  # removed meanwhile
        lengths += status.st_size
        allocated += status.st_blocks * 512
    return lengths, allocated


def _table(rows: list[dict[str, Any]]) -> Any:
    colours = {
        "ready": "green",
        **dict.fromkeys(("disabled", "being created", "another user's"), "yellow"),
    }
    return table(
        f"{counted(len(rows), 'segment')} in {names.FOLDER}",
        (
            *("name", "owner", "holds", "state", "pages", "size", "pool", "in memory", "clients"),
            *("life", "age"),
        ),
        (
            (
                entry["name"],
                entry["owner"],
                f"independent {entry['kind']}" if entry["independent"] else entry["kind"],
                cell(entry["state"], colours.get(entry["state"], "red")),
                entry["pages"],
                format_size(entry["bytes"]) if entry["bytes"] else None,
                _pool(entry),
                format_size(entry["pool_allocated_bytes"]) if entry["pool_bytes"] else None,
                _clients(entry),
                entry["lifetime"],
                age(entry["age_s"]),
            )
            for entry in rows
        ),
        right="pages size pool",
    )


def _pool(entry: dict[str, Any]) -> str | None:
    """Its length, and its folder if that is not the usual one."""
    if not entry["pool_bytes"]:
        return None
    folders = {str(path_of(full).parent) for full in entry["dependents"]} - {str(names.FOLDER)}
    return " in ".join([format_size(entry["pool_bytes"]), *sorted(folders)])


def _clients(entry: dict[str, Any]) -> str | None:
    if entry["clients"] is None:
        return None
    held = entry["quarantined_clients"]
    dead = f" + {entry['dead_clients'] - held} dead" if entry["dead_clients"] > held else ""
    dead += f" + {held} in quarantine" if held else ""
    dead += f" of {entry['slots']}" if entry["clients"] or dead else ""
    readers = " + readers" if entry["occupied"] and not entry["clients"] else ""
    return f"{entry['clients']}{dead}{readers}"
