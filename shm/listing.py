"""Lists segments without attaching, locking or mapping."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace

from lightcache.shm import clients, layout, names, ofd
from lightcache.shm.errors import LightcacheError
from lightcache.shm.layout import Lifetime, SegmentHeader, SegmentKind
from lightcache.shm.objects import OpenObject
from lightcache.shm.wanted import family_of


@dataclass(frozen=True)
class SegmentInfo:
    """A segment as it was a moment ago. If `problem` is set, only `name` is certain."""

    name: str
    problem: str | None = None  # why it could not be read, or what is wrong with it
    seen: bool = True  # False: it could not be opened; then clients, age and so on are unknown
    bytes: int = 0
    kind: str = ""
    ready: bool = False
    retired: bool = False
    disabled: bool = False
    lifetime: str = ""
    idle_limit_s: float = 0.0  # a persistent one unused for longer may go for room; 0: never
    unused_s: float = 0.0  # since a client was last seen to use it
    uuid: str = ""
    uid: int = -1
    creator_pid: int = 0  # in the creator's PID namespace
    age_s: float = 0.0  # since its creation, by the wall clock
    clients: int = 0  # living ones that have a slot
    dead_clients: int = 0  # not yet reaped, or in quarantine
    quarantined_clients: int = 0  # of the dead
    occupied: bool = False  # also by readers and by those that have not joined
    dependents: tuple[str, ...] = ()
    """Its dependents, such as its pool: objects, or paths in another folder."""
    family: str | None = None  # the model of which it is the default cache


def list_segments() -> list[SegmentInfo]:
    """All segments of this machine with our prefix, by name. Does not block."""
    listed = []
    for name in names.segment_names():
        info = read_segment(name)
        if info is not None:
            listed.append(info)
    return listed


def of_family(family: str) -> list[SegmentInfo]:
    """The segments of a family, of any release. Does not block."""
    return [info for info in list_segments() if info.family == family]


def read_segment(name: str) -> SegmentInfo | None:
    """One segment, or None if it does not exist.

    Raises:
        ConfigError: the name is not allowed.
    """
    names.object_name(name)
    try:
        opened = OpenObject.open(name, writable=False)
        if opened is None:
            return None
        with contextlib.closing(opened):
            return _read(opened)
    except (LightcacheError, OSError) as error:
        return _unseen(name, str(error))


def _unseen(name: str, problem: str) -> SegmentInfo:
    """Owner and size of an object that we may not open, from its folder."""
    info = SegmentInfo(name, problem=problem, seen=False)
    with contextlib.suppress(OSError):
        path = names.FOLDER / names.object_name(name).removeprefix("/")
        status = os.stat(path, follow_symlinks=False)
        dependents = tuple(dependent.object_name for dependent in names.dependents(name))
        return replace(info, bytes=status.st_size, uid=status.st_uid, dependents=dependents)
    return info


def _read(opened: OpenObject) -> SegmentInfo:
    header = opened.header()
    status = os.fstat(opened.fd)
    family = None
    with contextlib.suppress(LightcacheError):
        family = family_of(header)
    if header.is_foreign:
        return SegmentInfo(
            opened.name,
            problem=f"magic {header.magic:#x}, version {header.abi}: made by another release",
            bytes=status.st_size,
            uid=status.st_uid,
            family=family,
        )
    table = clients.read_table(opened.client_table(), opened.fd)
    uuid = bytes(header.uuid).hex()
    return SegmentInfo(
        opened.name,
        problem=_problem(opened, header, status.st_size),
        bytes=status.st_size,
        kind=_name(SegmentKind, header.kind),
        ready=bool(header.ready),
        retired=bool(header.retired),
        disabled=bool(header.disabled),
        lifetime=_name(Lifetime, header.lifetime),
        idle_limit_s=header.idle_ns / 1e9,
        unused_s=opened.unused_ns() / 1e9 if header.used_ns else 0.0,
        uuid=uuid,
        uid=status.st_uid,
        creator_pid=header.creator_pid,
        age_s=max(0, time.time_ns() - header.created_ns) / 1e9 if header.created_ns else 0.0,
        clients=sum(client.alive for client in table),
        dead_clients=sum(not client.alive for client in table),
        quarantined_clients=sum(client.quarantine_s is not None for client in table),
        occupied=opened.is_occupied(),
        dependents=tuple(opened.dependents()),
        family=family,
    )


def _problem(opened: OpenObject, header: SegmentHeader, size: int) -> str | None:
    if not header.ready:
        at_work = ofd.held(opened.fd, layout.BYTE_LIFE)
        return "being created" if at_work else "its creator died before finishing"
    if header.bytes != size:
        return f"truncated: {header.bytes} bytes were expected, found {size}"
    return "retired" if header.retired else None


def _name(enum: type[SegmentKind] | type[Lifetime], value: int) -> str:
    try:
        return enum(value).name.lower()
    except ValueError:
        return f"unknown ({value})"
