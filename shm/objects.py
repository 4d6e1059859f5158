"""One open descriptor of a segment's object: identity, access, byte locks, removal.

The descriptor is never mapped and never duplicated, because its locks must end with the process; a
forked child closes it at once (see `native/process.c`). A name is unlinked only while the object's
life byte is locked and the name still refers to this object.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import stat
import sys
import time
from pathlib import Path

import posix_ipc

from lightcache.shm import _native, folders, layout, names, ofd, owners
from lightcache.shm.codes import check, system_errno
from lightcache.shm.errors import ConfigError, NotReady, PermissionDenied

_RETIRED_OFFSET = layout.SegmentHeader.retired.offset
_LIVING_BYTES = layout.BYTE_SLOTS + layout.SLOTS - layout.BYTE_READERS


_MADV_WIPEONFORK = 18


def _check_kernel() -> None:
    """Raises ConfigError on a kernel that cannot distinguish a forked child from its parent."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        try:
            page.madvise(_MADV_WIPEONFORK)
        except OSError as error:
            raise ConfigError(
                "lightcache needs Linux 4.14 or later, for MADV_WIPEONFORK, by which a forked "
                f"child notices that it is one; found {platform.system()} {platform.release()}, "
                f"which refuses it ({error.strerror}): run this on a newer kernel"
            ) from error


class ForkWord:
    """Distinguishes the process that made it from children that inherited it."""

    def __init__(self) -> None:
        address = _native.quick().lcs_fork_word()
        if not address:
            _check_kernel()
            raise MemoryError("no memory for the page that notices a fork")
        self._word = ctypes.c_uint32.from_address(address)

    @property
    def inherited(self) -> bool:
        """True if this process got the object through a fork."""
        return self._word.value != 1


class OpenObject:
    """An object opened for its locks. Close it, or drop it: it closes itself."""

    def __init__(self, name: str) -> None:
        """Opens nothing yet; see `open`. Checks `name`, a segment's name."""
        self.name = name
        self.object_name = names.object_name(name)
        self._fd = ctypes.c_int(-1)
        self._fork_word = ForkWord()
        self.identity = (0, 0)

    @classmethod
    def open(cls, name: str, *, writable: bool) -> OpenObject | None:
        """Open the object of this segment; None if there is none. Does not block.

        Raises:
            PermissionDenied: this user may not open it, or it is a symbolic link.
            ConfigError: the name is not allowed.
        """
        opened = cls(name)
        code = opened.open_for_locks(writable)
        number = system_errno(code)
        if number == errno.ENOENT:
            return None
        if number == errno.ELOOP:
            raise PermissionDenied(
                f"{opened.path} is a symbolic link where a shared memory object was expected; "
                "nothing of ours makes such links: find out who did and remove it"
            )
        if number in (errno.EACCES, errno.EPERM):
            raise PermissionDenied(
                f"open {opened.path} for {'writing' if writable else 'reading'}: "
                f"{owners.whose(opened.path)}; run as its owner, have its owner create it for a "
                "group (group=), or choose another name"
            )
        check(code, f"open {opened.path}")
        status = os.fstat(opened.fd)
        opened.identity = (status.st_dev, status.st_ino)
        return opened

    def open_for_locks(self, writable: bool) -> int:
        """Return the core's code, for `open`. The core writes the descriptor into `_fd` itself, so
        an interrupt in between loses nothing."""
        code: int = _native.quick().lcs_life_open(
            self.object_name.encode(), writable, ctypes.byref(self._fd)
        )
        return code

    @property
    def fd(self) -> int:
        """The descriptor; -1 after `close`."""
        return self._fd.value

    @property
    def inherited(self) -> bool:
        """True if this process is a forked child of the one that opened it."""
        return self._fork_word.inherited

    @property
    def path(self) -> str:
        """Path of the object."""
        return str(names.FOLDER / self.object_name.removeprefix("/"))

    def close(self) -> None:
        """Close it, which drops every lock held through it. Does nothing in a forked child, where
        the number may belong to another file."""
        if self.fd >= 0 and not self.inherited:
            _native.quick().lcs_life_close(ctypes.byref(self._fd))

    def __del__(self) -> None:
        if hasattr(self, "_fork_word") and not sys.is_finalizing():
            self.close()

    def is_named(self) -> bool:
        """True if the name still refers to this object. Stays true while the life byte is locked,
        because unlinking and replacing need that lock."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def size(self) -> int:
        """Bytes of the object at this moment."""
        return os.fstat(self.fd).st_size

    def check_access(self, group: int | None) -> None:
        """Refuse an object that another user may have prepared.

        Args:
            group: also accept an object of this group, of any owner.

        Raises:
            PermissionDenied: not a regular file, several names, writable by all users, or an
                unexpected user or group.
        """
        status = os.fstat(self.fd)
        problem = None
        if not stat.S_ISREG(status.st_mode):
            problem = "a regular file was expected, found another type"
        elif status.st_nlink > 1:
            problem = f"one name was expected, found {status.st_nlink} hard links"
        elif status.st_mode & 0o007:
            problem = f"mode 0600 or 0660 was expected, found {stat.S_IMODE(status.st_mode):04o}"
        elif status.st_uid != os.geteuid() and (group is None or status.st_gid != group):
            problem = (
                f"user {owners.user(os.geteuid())}{'' if group is None else f' or group {group}'} "
                f"was expected to own it, found user {owners.user(status.st_uid)}, group "
                f"{status.st_gid}"
            )
        if problem:
            raise PermissionDenied(
                f"{self.path}: {problem}; run as its owner, name its group (group=), or choose "
                "another segment name"
            )

    def header(self) -> layout.SegmentHeader:
        """A copy of the header at this moment; zeros if the object is too short."""
        data = os.pread(self.fd, ctypes.sizeof(layout.SegmentHeader), 0)
        return layout.SegmentHeader.from_buffer_copy(
            data.ljust(ctypes.sizeof(layout.SegmentHeader), b"\0")
        )

    def client_table(self) -> bytes:
        """A copy of the client table at this moment; zeros if the object is too short."""
        length = layout.SLOTS * ctypes.sizeof(layout.ClientRecord)
        return os.pread(self.fd, length, layout.CLIENTS_OFFSET).ljust(length, b"\0")

    def is_occupied(self) -> bool:
        """True if a process is attached, through any other descriptor. Which bytes the clients of
        another release lock is not known, so there any of them counts."""
        other = self.header().is_of_another_release
        count = layout.USED_BYTES if other else _LIVING_BYTES
        return ofd.held(self.fd, layout.BYTE_READERS, count)

    def may_unlink(self) -> bool:
        """True if this user may unlink it and its dependents: the folders' sticky bits allow it,
        and the folder that it names is visible from here."""
        try:
            with folders.elsewhere(self.header()) as other:
                self._check_unlinkable(other)
        except (NotReady, PermissionDenied):
            return False
        return True

    def _placed(self, folder: folders.Folder) -> list[str]:
        """Its dependents in a folder other than /dev/shm."""
        uuid = bytes(self.header().uuid).hex()
        return folder.dependents(self.name, uuid, os.fstat(self.fd).st_uid)

    def dependents(self) -> list[str]:
        """Its dependents: names of objects, and paths of files in another folder."""
        header = self.header()
        uuid = bytes(header.uuid).hex()
        listed = [dependent.object_name for dependent in names.dependents(self.name, uuid)]
        with (
            contextlib.suppress(NotReady, PermissionDenied),
            folders.elsewhere(header) as other,
        ):
            if other:
                listed += [f"{other.path}{full}" for full in self._placed(other)]
        return listed

    def memory(self) -> int:
        """Bytes of shared memory that it and its dependents use now."""
        return sum(memory_of(full) for full in (self.object_name, *self.dependents()))

    def freed_in(self, folder: Path | None) -> int:
        """Bytes that come free in a folder if it goes, at most: what it uses, and what a folder
        other than /dev/shm may have reserved for its length, as for huge pages. None: in all."""
        freed = 0
        for full in (self.object_name, *self.dependents()):
            parent = folders.path_of(full).parent
            if folder in (None, parent):
                reserved = 0 if parent == names.FOLDER else length_of(full)
                freed += max(memory_of(full), reserved)
        return freed

    def unused_ns(self) -> int:
        """Time since a client last used it: joined, left, took its lock, or called `mark_used`. The
        lock's clock stops during suspension, so its time may be too late, but never too early."""
        data = os.pread(self.fd, ctypes.sizeof(layout.LockRecord), layout.LOCK_OFFSET)
        lock = layout.LockRecord.from_buffer_copy(
            data.ljust(ctypes.sizeof(layout.LockRecord), b"\0")
        )
        header = self.header()
        by_header = max(0, time.time_ns() - int(header.used_ns))
        if header.is_of_another_release:
            return by_header
        by_lock = time.monotonic_ns() - int(lock.since_ns)
        # In another time namespace it may be in the future: then only the header counts.
        return min(by_header, by_lock) if lock.since_ns and by_lock >= 0 else by_header

    def is_idle(self) -> bool:
        """True if it is persistent, has no live client, and was unused for longer than its idle
        limit. Certain only while the life byte is held exclusively."""
        header = self.header()
        return (
            header.lifetime == layout.Lifetime.PERSISTENT
            and header.idle_ns > 0
            and not self.is_occupied()
            and self.unused_ns() > header.idle_ns
        )

    def remove_locked(self, *, unseen: bool = False) -> None:
        """Retire and unlink it with all its dependents. The caller holds the life byte exclusively
        and has checked `is_named`. A process that dies in here leaves it retired but named, and the
        next process that opens it finishes the removal. So the name goes last: dependents in
        another folder than /dev/shm are found only through it.

        Args:
            unseen: also if it names a folder that is not visible from here.

        Raises:
            PermissionDenied: this user may not unlink it; nothing was changed.
            NotReady: the folder that it names is not visible from here; nothing was changed.
        """
        if self.inherited:
            return  # a child forked while its parent held the lock; the child does not hold it
        header = self.header()
        with contextlib.ExitStack() as stack:
            try:
                other = stack.enter_context(folders.elsewhere(header))
            except (NotReady, PermissionDenied) as error:
                if not unseen:
                    raise NotReady(
                        f"remove {self.path}: {error}; or `lightcache rm {self.name}`"
                    ) from error
                other = None
            self._check_unlinkable(other)
            if self.size() >= ctypes.sizeof(layout.SegmentHeader):
                os.pwrite(self.fd, (1).to_bytes(4, "little"), _RETIRED_OFFSET)
            for full in self._placed(other) if other else ():
                assert other
                other.unlink(full)
        for dependent in names.dependents(self.name, bytes(header.uuid).hex()):
            unlink(dependent.object_name)
        unlink(self.object_name)

    def _check_unlinkable(self, other: folders.Folder | None) -> None:
        folder, owner = os.stat(names.FOLDER), os.fstat(self.fd).st_uid
        sticky = folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, owner)
        if sticky or (other and self._placed(other) and not other.may_unlink(owner)):
            raise PermissionDenied(
                f"unlink {self.path}: its owner is user {owners.user(owner)}, this process runs "
                f"as user {owners.user(os.geteuid())}, and the folder (or its pool's) is sticky or "
                "not writable; only its owner can remove it"
            )


def memory_of(full: str) -> int:
    """Bytes of memory that an object uses; 0 if there is none."""
    try:
        return os.stat(folders.path_of(full), follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def length_of(full: str) -> int:
    """Bytes that an object can have; 0 if there is none."""
    try:
        return os.stat(folders.path_of(full), follow_symlinks=False).st_size
    except OSError:
        return 0


def duration(seconds: float) -> str:
    """A duration as text: "24 h", "90 s"."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size < size / 10:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def unlink(full: str) -> bool:
    """Unlink an object by its name; False if there was none."""
    try:
        posix_ipc.unlink_shared_memory(full)
    except posix_ipc.ExistentialError:
        return False
    except posix_ipc.PermissionsError as error:
        path = names.FOLDER / full.removeprefix("/")
        raise PermissionDenied(
            f"unlink {path}: {owners.whose(path)}; only its owner can remove it"
        ) from error
    return True
