"""Removes what is no longer needed: leftovers of dead creators, caches whose clients were all
killed, dependents without their segment, and persistent caches beyond their idle limits. Removes
only objects of this user, and never by name alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from lightcache.shm import layout, names, ofd
from lightcache.shm.errors import LightcacheError
from lightcache.shm.layout import Lifetime
from lightcache.shm.objects import OpenObject, duration, memory_of, unlink
from lightcache.shm.wanted import is_foreign


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
        if is_foreign(header):
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
        with contextlib.suppress(LightcacheError, OSError), _unneeded(name) as left:
            if left and (idle or not left[0].is_idle()):
                left[0].remove_locked()
                removed.append(left[0].object_name)
    for dependent in names.dependents():
        if not dependent.segment.startswith(prefix):
            continue
        if only is not None and dependent.object_name not in only:
            continue
        with contextlib.suppress(LightcacheError, OSError):
            removed += sweep_dependent(dependent)
    return removed


def make_room(enough: Callable[[], bool], spare: str | None = None) -> list[str]:
    """Remove what is not needed until there is room: first leftovers of dead processes, then
    persistent segments beyond their idle limits, longest unused first, and no more of these than
    necessary. Does not block.

    Args:
        enough: returns True if there is room.
        spare: do not remove this segment.

    Returns:
        As `sweep`.
    """
    if enough():
        return []
    removed = sweep(spare, idle=False)
    for name in _longest_idle(spare):
        if enough():
            break
        removed += sweep(spare, prefix=name, only=[names.object_name(name)])
    return removed


def _longest_idle(spare: str | None) -> list[str]:
    """Segments beyond their idle limits, longest unused first."""
    idle = []
    for name in names.segment_names():
        with contextlib.suppress(LightcacheError, OSError):
            opened = None if name == spare else OpenObject.open(name, writable=False)
            if opened is not None:
                with contextlib.closing(opened):
                    if opened.is_idle():
                        idle.append((opened.unused_ns(), name))
    return [name for _, name in sorted(idle, reverse=True)]


@contextlib.contextmanager
def _unneeded(name: str) -> Iterator[tuple[OpenObject, str] | None]:
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
        why = _why_unneeded(opened)
        yield (opened, why) if why else None


def _why_unneeded(opened: OpenObject) -> str | None:
    header = opened.header()
    if is_foreign(header):
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
