"""Create, attach, open, replace and unlink segments by name.

Every step that changes the object of a name holds the object's life byte exclusively. It has
checked, under that lock, that the name still refers to this object; otherwise it starts over. A
creator holds the life byte until `ready` is stored, so an object that is "not ready and not locked"
is a dead creator's leftover. An attach holds it shared while it takes the readers' byte, so the
object that it enters cannot be removed meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial

import posix_ipc

from lightcache.shm import _native, clients, layout, names, ofd, owners
from lightcache.shm.creation import Initialise, check_access, check_room, try_create
from lightcache.shm.errors import (
    CacheCorrupted,
    InUse,
    LayoutMismatch,
    LockTimeout,
    NotReady,
    PermissionDenied,
)
from lightcache.shm.hold import Hold
from lightcache.shm.memory import Coming
from lightcache.shm.objects import OpenObject
from lightcache.shm.sweep import remove_leftover
from lightcache.shm.wanted import SegmentSpec, verify_header

Check = Callable[[Coming, int], None]
"""Called with what comes free, and the bytes of the new segment, which it takes first."""
Freed = Callable[[Coming], None]


class Obstacle(Enum):
    """Why a name cannot be attached to at this moment; the value ends a message."""

    MISSING = "there is no such segment; create it, or use open"
    BUSY = "another process is creating, replacing or unlinking it; wait longer"
    DEAD = "its creator died before finishing; open or create removes the leftover"
    RETIRED = "it was retired but not removed; open or create removes the leftover"
    MOVED = "its name changes hands all the time; try again"


# ---------------------------------------------------------------- attach


def attach(wanted: SegmentSpec, *, readonly: bool, timeout: float | None) -> Hold:
    """Attach to an existing segment, waiting for its creator to finish.

    Raises:
        NotReady: no such segment (at once), or not ready within `timeout` seconds.
        LayoutMismatch, CacheCorrupted, PermissionDenied: it differs from what was wanted.
    """
    pause = ofd.Pause(timeout)
    while True:
        result = _try_attach(wanted, readonly=readonly)
        if isinstance(result, Hold):
            return result
        if result is Obstacle.MISSING or not pause.sleep():
            raise NotReady(f"attach to {wanted.name!r}: {result.value} (waited {timeout} s)")


def _try_attach(wanted: SegmentSpec, *, readonly: bool) -> Hold | Obstacle:
    opened = OpenObject.open(wanted.name, writable=not readonly)
    if opened is None:
        return Obstacle.MISSING
    hold = Hold(opened, readonly=readonly)
    try:
        obstacle = _enter(hold, wanted)
        if obstacle is None:
            return hold
    except BaseException:
        hold.discard()
        raise
    hold.discard()
    return obstacle


def _enter(hold: Hold, wanted: SegmentSpec) -> Obstacle | None:
    """Take the readers' byte of a segment that is ready, not retired, and still named."""
    opened = hold.opened
    opened.check_access(wanted.group)
    if not opened.header().ready:
        return _unready(opened)
    try:
        with ofd.locked(opened.fd, layout.BYTE_LIFE, exclusive=False, timeout=0):
            if not opened.is_named():
                return Obstacle.MOVED
            header = opened.header()
            if header.retired and not header.is_foreign:
                return Obstacle.RETIRED
            with _second_description(opened, hold.readonly) as fd:
                if fd is None:
                    return Obstacle.MOVED
                size = os.fstat(fd).st_size
                verify_header(header, size, wanted)
                hold.map(fd, size)
            if not _native.quick().lcs_ready_load(hold.base):
                return Obstacle.BUSY
            if not ofd.try_lock(opened.fd, layout.BYTE_READERS, exclusive=False):
                return Obstacle.BUSY
            return None
    except LockTimeout:
        return Obstacle.BUSY


def _unready(opened: OpenObject) -> Obstacle:
    if ofd.held(opened.fd, layout.BYTE_LIFE):
        return Obstacle.BUSY
    header = opened.header()
    if header.ready or not opened.is_named():
        return Obstacle.MOVED  # its creation has finished, or it was replaced, meanwhile
    if header.is_foreign:
        raise LayoutMismatch(
            f"the segment {opened.name!r}: magic {layout.MAGIC:#x} and version {layout.ABI} were "
            f"expected, found {header.magic:#x} and {header.abi}; another release or program made "
            "it: choose another name, or open with replace=True"
        )
    return Obstacle.DEAD


@contextlib.contextmanager
def _second_description(opened: OpenObject, readonly: bool) -> Iterator[int | None]:
    """A descriptor to map, because the one with the locks must never be mapped. None: the name now
    refers to another object."""
    try:
        second = posix_ipc.SharedMemory(opened.object_name, read_only=readonly)
    except posix_ipc.ExistentialError:
        yield None
        return
    except posix_ipc.PermissionsError as error:
        path = names.FOLDER / opened.object_name.removeprefix("/")
        raise PermissionDenied(f"open {path}: {owners.whose(path)}") from error
    try:
        status = os.fstat(second.fd)
        yield second.fd if (status.st_dev, status.st_ino) == opened.identity else None
    finally:
        second.close_fd()


# ---------------------------------------------------------------- create


def create(wanted: SegmentSpec, initialise: Initialise, *, timeout: float | None) -> Hold:
    """Create a segment that does not exist; a dead creator's leftover is removed first.

    Raises:
        InUse: the name exists.
        NotReady: another process was creating it for all of `timeout` seconds.
        NoSpace: it does not fit, even after sweeping leftovers.
        PermissionDenied: the leftover, or the group, is not ours.
    """
    pause = ofd.Pause(timeout)
    while True:
        created = try_create(wanted, initialise, pause)
        if created is not None:
            return created
        opened = OpenObject.open(wanted.name, writable=False)
        if opened is None:
            continue
        with contextlib.closing(opened):
            opened.check_access(wanted.group)
            header = opened.header()
        if header.ready and not header.retired:
            raise InUse(
                f"create {wanted.name!r}: it exists; attach or open to use it, or remove it first: "
                f"`lightcache rm {wanted.name}`"
            )
        if not remove_leftover(wanted.name, wanted.group) and not pause.sleep():
            raise NotReady(f"create {wanted.name!r}: {Obstacle.BUSY.value} (waited {timeout} s)")


# ---------------------------------------------------------------- open, unlink


def open_or_create(
    wanted: SegmentSpec,
    initialise: Initialise,
    *,
    replace: Check | None,
    timeout: float | None,
) -> Hold:
    """Attach to an equal segment or create it.

    Args:
        replace: None: keep one that differs. Else called before it is removed; raises if the new
            one cannot be made.

    Raises:
        LayoutMismatch, CacheCorrupted: the existing one differs, and `replace` is None.
        InUse: it differs, `replace` is given, and it has a live client.
        Otherwise as `attach` and `create`.
    """
    pause = ofd.Pause(timeout)
    while True:
        try:
            result: Hold | Obstacle | None = _try_attach(wanted, readonly=False)
        except (LayoutMismatch, CacheCorrupted):
            if replace is None:
                raise
            check = partial(_check_replacement, wanted, replace)
            unlink(wanted.name, wanted.group, force=False, timeout=pause.left(), check=check)
            continue
        if result is Obstacle.MISSING:
            result = try_create(wanted, initialise, pause)
        if isinstance(result, Hold):
            return result
        leftover = result in (Obstacle.DEAD, Obstacle.RETIRED)
        if leftover and remove_leftover(wanted.name, wanted.group):
            continue
        if not pause.sleep():
            reason = (result or Obstacle.MOVED).value
            raise NotReady(f"open {wanted.name!r}: {reason} (waited {timeout} s)")


def _check_replacement(wanted: SegmentSpec, check: Check, freed: Coming) -> None:
    check_access(wanted)
    check_room(wanted, freed)
    check(freed, wanted.total_bytes)


def unlink(
    name: str,
    group: int | None,
    *,
    force: bool,
    timeout: float | None,
    check: Freed | None = None,
) -> bool:
    """Retire a segment and remove its name and dependents; False if there is none.

    Args:
        check: called before anything is removed, with what comes free; may refuse.

    Raises:
        InUse: it has a live client and `force` is False.
        PermissionDenied: it is not ours.
        LockTimeout: another process was creating or changing it all the time.
    """
    opened = OpenObject.open(name, writable=True)
    if opened is None:
        return False
    with contextlib.closing(opened):
        opened.check_access(group)
        with ofd.locked(opened.fd, layout.BYTE_LIFE, timeout=timeout):
            if not opened.is_named():
                return False
            if not force and opened.is_occupied():
                raise InUse(
                    f"unlink {name!r}: a client is attached ({clients.living(opened)}); let them "
                    "close it first, or take it from them: `lightcache rm --force`"
                )
            if check is not None:
                check(opened.freed_in)
            opened.remove_locked(unseen=True)
            return True
