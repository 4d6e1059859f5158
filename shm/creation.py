"""Makes a new segment: the object, its memory, its header, and finally `ready`.

A creator that dies in here leaves an object that is not ready and whose life byte is free; `sweep`
and later creators recognise it by that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import posix_ipc

from lightcache.shm import _native, layout, memory, names, ofd, owners
from lightcache.shm.codes import Code, check, system_errno
from lightcache.shm.errors import CacheCorrupted, LightcacheError, NoSpace, PermissionDenied
from lightcache.shm.hold import Hold
from lightcache.shm.objects import ForkWord, OpenObject
from lightcache.shm.sweep import make_room, most_room, remove_leftover, sweep
from lightcache.shm.wanted import FAMILY_ITEM, SegmentSpec, fill_header

_AT_ONCE = 64 << 20
"""Bytes of one call that no signal ends: about 20 ms to allocate them, 0.2 s to collapse them."""
_COLLAPSE_NS = 1_000_000_000  # then the rest stays in small pages: others wait for `ready`
_PLAIN_MODE = 0o600
_GROUP_MODE = 0o660

Initialise = Callable[[Hold], None]


def try_create(wanted: SegmentSpec, initialise: Initialise, pause: ofd.Pause) -> Hold | None:
    """None: the name exists, or another process removed the object before we had locked it."""
    full = names.object_name(wanted.name)
    ForkWord()  # raises on a kernel that is too old, before there is an object
    try:
        created = posix_ipc.SharedMemory(full, posix_ipc.O_CREX, mode=_PLAIN_MODE)
    except posix_ipc.ExistentialError:
        return None
    except posix_ipc.PermissionsError as error:
        path = names.FOLDER / full.removeprefix("/")
        raise PermissionDenied(f"create {path}: {owners.whose(path)}") from error
    except OSError as error:
        kind = NoSpace if error.errno == errno.ENOSPC else LightcacheError
        raise kind(f"create {full}: {error}") from error
    try:
        os.fchmod(created.fd, _PLAIN_MODE)  # the umask may have narrowed it
        return _lock_and_build(created.fd, wanted, initialise, pause)
    except BaseException:
        with contextlib.suppress(LightcacheError):
            remove_leftover(wanted.name, wanted.group)
        raise
    finally:
        created.close_fd()


def _lock_and_build(
    fd: int, wanted: SegmentSpec, initialise: Initialise, pause: ofd.Pause
) -> Hold | None:
    """Until we hold the life byte, another process may take the new object for a dead creator's
    leftover and remove it. Then there is nothing to undo: start over."""
    opened = OpenObject.open(wanted.name, writable=True)
    if opened is None:
        return None
    hold = Hold(opened, readonly=False)
    try:
        status = os.fstat(fd)
        if (
            opened.identity != (status.st_dev, status.st_ino)
            or not ofd.lock(opened.fd, layout.BYTE_LIFE, pause)
            or not opened.is_named()
        ):
            hold.discard()
            return None
        _build_or_remove(hold, fd, wanted, initialise)
        ofd.unlock(opened.fd, layout.BYTE_LIFE)
    except BaseException:
        hold.discard()
        raise
    return hold


def _build_or_remove(hold: Hold, fd: int, wanted: SegmentSpec, initialise: Initialise) -> None:
    try:
        _set_access(fd, wanted)
        _check_room(wanted)
        _allocate(fd, wanted)
        hold.map(fd, wanted.total_bytes)
        _collapse(hold)
        fill_header(hold.base, wanted)
        initialise(hold)
        if not ofd.try_lock(hold.opened.fd, layout.BYTE_READERS, exclusive=False):
            raise CacheCorrupted(
                f"create {wanted.name!r}: the readers' byte is locked exclusively, which nothing "
                "of ours does; find out with /proc/locks who has the object open"
            )
        _native.quick().lcs_ready_store(hold.base)
    except BaseException:
        hold.opened.remove_locked()
        raise


def _collapse(hold: Hold) -> None:
    """Ask for huge pages: advice, so the first refusal ends it without an error, as does time."""
    end = time.monotonic_ns() + _COLLAPSE_NS
    for begin in range(0, hold.bytes, _AT_ONCE):
        step = min(_AT_ONCE, hold.bytes - begin)
        refused = _native.blocking().lcs_collapse(hold.base + begin, step) != Code.OK
        if refused or time.monotonic_ns() >= end:
            break


def _set_access(fd: int, wanted: SegmentSpec) -> None:
    if wanted.group is None:
        return
    try:
        os.fchown(fd, -1, wanted.group)
        os.fchmod(fd, _GROUP_MODE)
    except OSError as error:
        raise _no_access(wanted, str(error)) from error


def _no_access(wanted: SegmentSpec, why: str) -> PermissionDenied:
    return PermissionDenied(
        f"create {wanted.name!r} for group {wanted.group}: {why}; a user can only give it to "
        "a group that the user is in"
    )


def check_access(wanted: SegmentSpec) -> None:
    """Refuse a segment whose group this user cannot give it to, before it is created.

    Raises:
        PermissionDenied
    """
    if wanted.group is None:
        return
    fd = os.memfd_create("lightcache-group")
    try:
        os.fchown(fd, -1, wanted.group)
    except OSError as error:
        raise _no_access(wanted, str(error)) from error
    finally:
        os.close(fd)


def check_room(wanted: SegmentSpec, freed: memory.Coming) -> None:
    """Refuse a segment for which nothing makes room, before it is created.

    Args:
        freed: what comes free before.

    Raises:
        NoSpace
    """

    def coming(folder: Path | None) -> int:
        return freed(folder) + most_room(wanted.name, _family(wanted), folder)

    if memory.available(coming=coming).bytes < wanted.total_bytes:
        raise _no_space(wanted, 0)


def _family(wanted: SegmentSpec) -> str | None:
    family: str | None = json.loads(wanted.config or "{}").get(FAMILY_ITEM)
    return family


def _no_space(wanted: SegmentSpec, needed: int) -> NoSpace:
    room = memory.available()
    return NoSpace(
        f"the segment {wanted.name!r} needs {wanted.total_bytes} bytes"
        f"{f', {needed} of them still missing' if needed else ''}, and {room.bytes} bytes are "
        f"{room.limit}; ask for less, remove unused caches (`lightcache ls`, `lightcache rm`), "
        "or enlarge /dev/shm"
    )


def _check_room(wanted: SegmentSpec) -> None:
    def room() -> int:
        return memory.available().bytes

    make_room(wanted.total_bytes, room, spare=wanted.name, family=_family(wanted))
    if room() < wanted.total_bytes:
        raise _no_space(wanted, 0)


def _allocate(fd: int, wanted: SegmentSpec) -> None:
    """Give the object all its memory now, so that writing into it never causes a SIGBUS."""
    done, swept = 0, False
    while done < wanted.total_bytes:
        step = min(_AT_ONCE, wanted.total_bytes - done)
        code = _native.blocking().lcs_fallocate(fd, done, step)
        if code == Code.OK:
            done += step
        elif system_errno(code) in (errno.ENOSPC, errno.ENOMEM):
            if swept:
                raise _no_space(wanted, wanted.total_bytes - done)
            sweep(spare=wanted.name)
            swept = True
        elif code != Code.INTR:
            check(code, f"allocate {wanted.total_bytes} bytes for the segment {wanted.name!r}")
