"""Removing what the dead left: leftovers of creators, caches whose clients were all killed, and
dependents whose segment is gone. Only what belongs to this user, and never by name alone."""

from __future__ import annotations

import contextlib
import os

from lightcache.shm import layout, names, ofd
from lightcache.shm.errors import LightcacheError
from lightcache.shm.layout import Lifetime
from lightcache.shm.objects import OpenObject, unlink
from lightcache.shm.wanted import is_foreign


def remove_leftover(name: str, group: int | None) -> bool:
    """Remove a segment that is not ready or retired, unless somebody is at work on it. True: look
    at the name again. Does not block.

    Raises:
        PermissionDenied: it is not ours.
    """
    opened = OpenObject.open(name, writable=True)
    if opened is None:
        return True
    with contextlib.closing(opened):
        opened.check_access(group)
        # The lock first, the header after: a creator that we lock out has stored `ready`.
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


def sweep(spare: str | None = None, *, prefix: str = "") -> list[str]:
    """Remove everything of this user's that nobody needs. Does not block.

    That is: what a creator left that died before finishing, segments of lifetime "attached" in
    which nobody lives any more, retired ones, and dependents without their segment.

    Args:
        spare: leave this segment alone.
        prefix: only segments whose names begin so, and what belongs to them.

    Returns:
        The names of the objects removed, each beginning with a slash.
    """
    removed = []
    for name in names.segment_names():
        if name == spare or not name.startswith(prefix):
            continue
        # Whatever is wrong with somebody else's object is no matter of ours.
        with contextlib.suppress(LightcacheError, OSError):
            removed += _sweep_segment(name)
    for dependent in names.dependents():
        if not dependent.segment.startswith(prefix):
            continue
        with contextlib.suppress(LightcacheError, OSError):
            removed += _sweep_dependent(dependent)
    return removed


def _sweep_segment(name: str) -> list[str]:
    opened = OpenObject.open(name, writable=True)
    if opened is None:
        return []
    with contextlib.closing(opened):
        opened.check_access(None)
        if not ofd.try_lock(opened.fd, layout.BYTE_LIFE) or not opened.is_named():
            return []
        header = opened.header()
        unfinished = not header.ready or header.retired
        left = header.lifetime == Lifetime.ATTACHED and not opened.is_occupied()
        if is_foreign(header) or not (unfinished or left):
            return []
        opened.remove_locked()
        return [opened.object_name]


def _sweep_dependent(dependent: names.Dependent) -> list[str]:
    """A dependent is made after its segment has its UUID, and a UUID never returns: if the segment
    has another one now, or is gone, the dependent is nobody's for ever."""
    path = names.FOLDER / dependent.object_name.removeprefix("/")
    if os.stat(path, follow_symlinks=False).st_uid != os.geteuid():
        return []
    opened = OpenObject.open(dependent.segment, writable=False)
    if opened is not None:
        with contextlib.closing(opened):
            if bytes(opened.header().uuid).hex() == dependent.uuid:
                return []
    return [dependent.object_name] if unlink(dependent.object_name) else []
