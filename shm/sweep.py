"""Removes what is no longer needed: leftovers of dead creators, caches whose clients were all
killed, dependents without their segment, persistent caches beyond their idle limits, and, for a
cache that needs the room, unused ones of its family. Removes only objects of this user, and never
by name alone. What another release has left goes by the same rules."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightcache.shm import clients, layout, names, ofd
from lightcache.shm.errors import LightcacheError
from lightcache.shm.layout import Lifetime
from lightcache.shm.objects import OpenObject, duration, memory_of, unlink
from lightcache.shm.wanted import family_of

_log = logging.getLogger("lightcache")


def remove_leftover(name: str, group: int | None) -> bool:
    """Remove a segment that is retired or not ready, unless a process is working on it. True: look
    at the name again. Does not block.

    Raises:
        PermissionDenied: it is not ours.
    """
    opened = OpenObject.open(name, writable=True)
    if opened is None:
        return True
    with contextlib.closing(opened):
        opened.check_access(group)
        # The lock first, then the header: a creator that has released the lock has stored `ready`.
        if not ofd.try_lock(opened.fd, layout.BYTE_LIFE):
            return False
        header = opened.header()
        if not opened.is_named():
            return True
        if header.is_foreign:
            return False
        if header.retired or not header.ready:
            opened.remove_locked()
        return True


@dataclass(frozen=True)
class Leftover:
    """An object of this user that is not needed."""

    object_name: str
    """Begins with a slash. Removing a segment also removes its dependents."""
    name: str
    """Name of the segment."""
    why: str
    bytes: int
    """Memory that removing it frees, including that of its dependents."""


def leftovers(prefix: str = "") -> list[Leftover]:
    """What `sweep` would remove now. Does not block, and changes nothing."""
    listed = []
    for name in names.segment_names():
        if name.startswith(prefix):
            with contextlib.suppress(LightcacheError, OSError), _unneeded(name) as left:
                if left:
                    opened, why = left
                    listed.append(Leftover(opened.object_name, name, why, opened.memory()))
    for dependent in names.dependents():
        if dependent.segment.startswith(prefix):
            with contextlib.suppress(LightcacheError, OSError):
                if _orphaned(dependent):
                    full, why = dependent.object_name, f"its segment {dependent.segment!r} is gone"
                    listed.append(Leftover(full, dependent.segment, why, memory_of(full)))
    return listed


def sweep(
    spare: str | None = None,
    *,
    prefix: str = "",
    only: Collection[str] | None = None,
    idle: bool = True,
    family: str | None = None,
) -> list[str]:
    """Remove all objects of this user that are not needed. Does not block.

    These are: leftovers of dead creators, segments of lifetime "attached" without a live client,
    retired segments, dependents without their segment, and persistent segments beyond their idle
    limits.

    Args:
        spare: do not remove this segment.
        prefix: only segments whose names begin with it, and their dependents.
        only: only these object names, as from `leftovers`; None: all.
        idle: also remove segments beyond their idle limits.
        family: also remove segments of this family that no process uses.

    Returns:
        The names of the objects removed, each beginning with a slash.
    """
    removed = []
    for name in names.segment_names():
        if name == spare or not name.startswith(prefix):
            continue
        if only is not None and names.object_name(name) not in only:
            continue
        # Errors of other users' objects do not matter here.
        with contextlib.suppress(LightcacheError, OSError), _unneeded(name, family) as left:
            if left and (idle or not left[0].is_idle()):
                left[0].remove_locked()
                removed.append(left[0].object_name)
                if family is not None:
                    _log.info("removed %s to make room: %s", name, left[1])
    for dependent in names.dependents():
        if not dependent.segment.startswith(prefix):
            continue
        if only is not None and dependent.object_name not in only:
            continue
        with contextlib.suppress(LightcacheError, OSError):
            removed += sweep_dependent(dependent)
    return removed


def make_room(
    needed: int,
    room: Callable[[], int],
    spare: str | None = None,
    *,
    family: str | None = None,
    coming: int = 0,
) -> list[str]:
    """Remove what is not needed until there is room: first leftovers of dead processes, then
    persistent segments beyond their idle limits, then the family's, each longest unused first, and
    no more of these than necessary; none if all of them would be too little. Does not block.

    Args:
        needed: bytes.
        room: returns the bytes there are.
        spare: do not remove this segment.
        family: see `give_way`.
        coming: bytes that need not be there yet.

    Returns:
        As `sweep`.
    """
    if room() >= needed:
        return []
    removed = sweep(spare, idle=False)
    if room() + coming + _freed(_may_go(spare, family), None) < needed:
        return removed
    for name in _longest_unused(spare, OpenObject.is_idle):
        if room() >= needed:
            break
        removed += sweep(spare, prefix=name, only=[names.object_name(name)])
    return removed + give_way(needed, room, spare, family)


def most_room(spare: str, family: str | None, folder: Path | None) -> int:
    """Bytes that `make_room` can free in a folder at most; None: in all. Changes nothing."""
    segments, most = set(_may_go(spare, family)), 0
    for each in leftovers():
        if each.object_name == names.object_name(each.name):
            segments.add(each.name)
        elif folder in (None, names.FOLDER):
            most += each.bytes
    return most + _freed(segments - {spare}, folder)


def _freed(segments: Iterable[str], folder: Path | None) -> int:
    """Bytes that come free in a folder if these go, at most."""
    most = 0
    for name in segments:
        with contextlib.suppress(LightcacheError, OSError):
            opened = OpenObject.open(name, writable=False)
            if opened is not None:
                with contextlib.closing(opened):
                    most += opened.freed_in(folder)
    return most


def _may_go(spare: str | None, family: str | None) -> list[str]:
    """Segments beyond their idle limits, and unused ones of the family."""

    def may_go(opened: OpenObject) -> bool:
        of_family = family is not None and family_of(opened.header()) == family
        return opened.is_idle() or (of_family and not opened.is_occupied())

    return _longest_unused(spare, may_go)


def give_way(
    needed: int, room: Callable[[], int], spare: str | None, family: str | None
) -> list[str]:
    """Remove segments of a family that no process uses, longest unused first, until there is room,
    and no more: none after one that gave no room, as where a memory limit of our cgroup does not
    count it. Does not block. Arguments and result as `make_room`; does nothing without a family."""
    removed: list[str] = []
    if family is None or room() >= needed:
        return removed
    for name in _longest_unused(spare, lambda opened: family_of(opened.header()) == family):
        before = room()
        gone = sweep(spare, prefix=name, only=[names.object_name(name)], family=family)
        removed += gone
        if room() >= needed or (gone and room() <= before):
            break
    return removed


@dataclass(frozen=True)
class Relative:
    """A segment of the same family that processes use."""

    name: str
    objects: tuple[str, ...]
    """It and its dependents, as `OpenObject.dependents`."""
    clients: str
    """Who uses it, in a line."""


def relatives(family: str, spare: str) -> list[Relative]:
    """Segments of this user and family, besides `spare`, that processes use at this moment."""
    listed = []
    for name in _longest_unused(spare, lambda opened: family_of(opened.header()) == family):
        with contextlib.suppress(LightcacheError, OSError):
            opened = OpenObject.open(name, writable=True)
            if opened is not None:
                with contextlib.closing(opened):
                    opened.check_access(None)
                    if opened.is_occupied():
                        objects = (opened.object_name, *opened.dependents())
                        listed.append(Relative(name, objects, clients.living(opened)))
    return listed


def _longest_unused(spare: str | None, fits: Callable[[OpenObject], bool]) -> list[str]:
    """Segments, longest unused first."""
    unused = []
    for name in names.segment_names():
        with contextlib.suppress(LightcacheError, OSError):
            opened = None if name == spare else OpenObject.open(name, writable=False)
            if opened is not None:
                with contextlib.closing(opened):
                    if fits(opened):
                        unused.append((opened.unused_ns(), name))
    return [name for _, name in sorted(unused, reverse=True)]


@contextlib.contextmanager
def _unneeded(name: str, family: str | None = None) -> Iterator[tuple[OpenObject, str] | None]:
    """A segment that is not needed, with its life byte held exclusively, and the reason; None: it
    is needed, or being worked on.

    Raises:
        PermissionDenied: it is not ours.
    """
    opened = OpenObject.open(name, writable=True)
    if opened is None:
        yield None
        return
    with contextlib.closing(opened):
        opened.check_access(None)
        if not ofd.try_lock(opened.fd, layout.BYTE_LIFE) or not opened.is_named():
            yield None
            return
        why = _why_unneeded(opened, family)
        yield (opened, why) if why else None


def _why_unneeded(opened: OpenObject, family: str | None) -> str | None:
    header = opened.header()
    if header.is_foreign and not header.is_of_another_release:
        return None
    if not header.ready:
        return "its creator died before finishing"
    if header.retired:
        return "it was replaced or removed, and not all of it went"
    if header.lifetime == Lifetime.ATTACHED and not opened.is_occupied():
        return "all its clients were killed; the next `open` would use it, warm"
    if opened.is_idle():
        unused, limit = (duration(ns / 1e9) for ns in (opened.unused_ns(), header.idle_ns))
        return f"unused for {unused}, and its idle limit is {limit}"
    if family is not None and family_of(header) == family and not opened.is_occupied():
        unused = duration(opened.unused_ns() / 1e9)
        return f"of the family {family!r}, unused for {unused}, and no process uses it"
    return None


def _orphaned(dependent: names.Dependent) -> bool:
    """True if a dependent belongs to no segment. A dependent is made after its segment has its
    UUID, and a UUID never returns. So if the segment is gone or has another UUID, the dependent is
    unowned for good."""
    path = names.FOLDER / dependent.object_name.removeprefix("/")
    if os.stat(path, follow_symlinks=False).st_uid != os.geteuid():
        return False
    opened = OpenObject.open(dependent.segment, writable=False)
    if opened is None:
        return True
    with contextlib.closing(opened):
        return bytes(opened.header().uuid).hex() != dependent.uuid


def sweep_dependent(dependent: names.Dependent) -> list[str]:
    """Remove a dependent of this user whose segment is gone, or was replaced.

    Raises:
        LightcacheError, OSError: cannot tell whether it is needed.
    """
    if not _orphaned(dependent):
        return []
    return [dependent.object_name] if unlink(dependent.object_name) else []
