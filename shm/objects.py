"""One open description of a segment's object: identity, access, byte locks, removal.

The descriptor in here is never mapped and never duplicated, because its locks must end with the
process; a forked child closes it at once (see `native/process.c`). A name is only ever unlinked
while the object's life byte is locked and the name has been seen to lead to this very object.
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

import posix_ipc

from lightcache.shm import _native, folders, layout, names, ofd, owners
from lightcache.shm.codes import check, system_errno
from lightcache.shm.errors import ConfigError, NotReady, PermissionDenied

_RETIRED_OFFSET = layout.SegmentHeader.retired.offset
_LIVING_BYTES = layout.BYTE_SLOTS + layout.SLOTS - layout.BYTE_READERS


_MADV_WIPEONFORK = 18


def _check_kernel() -> None:
    """Raises ConfigError on a kernel that cannot tell a forked child from its parent."""
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
    """Tells the process that made it from children that inherited it."""

    def __init__(self) -> None:
        address = _native.quick().lcs_fork_word()
        if not address:
            _check_kernel()
            raise MemoryError("no memory for the page that notices a fork")
        self._word = ctypes.c_uint32.from_address(address)

    @property
    def inherited(self) -> bool:
        """Whether this object came here through a fork."""
        return self._word.value != 1


class OpenObject:
    """An object opened for its locks. Close it, or let it go: it closes itself."""

    def __init__(self, name: str) -> None:
        """Nothing is open yet; see `open`. `name` is a segment's name, checked here."""
        self.name = name
        self.object_name = names.object_name(name)
        self._fd = ctypes.c_int(-1)
        self._fork_word = ForkWord()
        self.identity = (0, 0)

    @classmethod
    def open(cls, name: str, *, writable: bool) -> OpenObject | None:
        """Open the object of this segment; None when there is none. Does not block.

        Raises:
            PermissionDenied: this user may not, or a symbolic link stands in its place.
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
        found = os.fstat(opened.fd)
        opened.identity = (found.st_dev, found.st_ino)
        return opened

    def open_for_locks(self, writable: bool) -> int:
        """For `open`: the core's code. It writes the descriptor into `_fd` itself: an interrupt in
        between loses nothing."""
        code: int = _native.quick().lcs_life_open(
            self.object_name.encode(), writable, ctypes.byref(self._fd)
        )
        return code

    @property
    def fd(self) -> int:
        """The descriptor; -1 once closed."""
        return self._fd.value

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that opened it."""
        return self._fork_word.inherited

    @property
    def path(self) -> str:
        """Where the object lies."""
        return str(names.FOLDER / self.object_name.removeprefix("/"))

    def close(self) -> None:
        """Close, and so drop every lock held through it. Does nothing in a forked child, where
        the number may mean something else by now."""
        if self.fd >= 0 and not self.inherited:
            _native.quick().lcs_life_close(ctypes.byref(self._fd))

    def __del__(self) -> None:
        if hasattr(self, "_fork_word") and not sys.is_finalizing():
            self.close()

    def is_named(self) -> bool:
        """Whether the name still leads to this object. Stays true while the life byte is locked,
        because nobody unlinks or replaces without that lock."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def size(self) -> int:
        """Bytes of the object at this moment."""
        return os.fstat(self.fd).st_size

    def check_access(self, group: int | None) -> None:
        """Refuse what somebody else may have prepared.

        Args:
            group: also accept an object of this group's, whoever owns it.

        Raises:
            PermissionDenied: not a regular file, of several names, writable by everybody, or of a
                user or group other than expected.
        """
        found = os.fstat(self.fd)
        problem = None
        if not stat.S_ISREG(found.st_mode):
            problem = "a regular file was expected, found another type"
        elif found.st_nlink > 1:
            problem = f"one name was expected, found {found.st_nlink} hard links"
        elif found.st_mode & 0o007:
            problem = f"mode 0600 or 0660 was expected, found {stat.S_IMODE(found.st_mode):04o}"
        elif found.st_uid != os.geteuid() and (group is None or found.st_gid != group):
            problem = (
                f"user {owners.user(os.geteuid())}{'' if group is None else f' or group {group}'} "
                f"was expected to own it, found user {owners.user(found.st_uid)}, group "
                f"{found.st_gid}"
            )
        if problem:
            raise PermissionDenied(
                f"{self.path}: {problem}; run as its owner, name its group (group=), or choose "
                "another segment name"
            )

    def header(self) -> layout.SegmentHeader:
        """A copy of the header as it is now; zeros where the object is too short."""
        data = os.pread(self.fd, ctypes.sizeof(layout.SegmentHeader), 0)
        return layout.SegmentHeader.from_buffer_copy(
            data.ljust(ctypes.sizeof(layout.SegmentHeader), b"\0")
        )

    def client_table(self) -> bytes:
        """A copy of the client table as it is now; zeros where the object is too short."""
        length = layout.SLOTS * ctypes.sizeof(layout.ClientRecord)
        return os.pread(self.fd, length, layout.CLIENTS_OFFSET).ljust(length, b"\0")

    def is_occupied(self) -> bool:
        """Whether anybody is attached, through any description but this one."""
        return ofd.held(self.fd, layout.BYTE_READERS, _LIVING_BYTES)

    def may_unlink(self) -> bool:
        """Whether this user may unlink it and what depends on it: the folders' sticky bits let us,
        and the folder that it names can be seen from here."""
        try:
            with folders.elsewhere(self.header()) as other:
                self._check_unlinkable(other)
        except (NotReady, PermissionDenied):
            return False
        return True

    def _placed(self, folder: folders.Folder) -> list[str]:
        """What depends on it in another folder than /dev/shm."""
        uuid = bytes(self.header().uuid).hex()
        return folder.dependents(self.name, uuid, os.fstat(self.fd).st_uid)

    def dependents(self) -> list[str]:
        """What ends with it: names of objects, and paths of what lies in another folder."""
        header = self.header()
        uuid = bytes(header.uuid).hex()
        found = [dependent.object_name for dependent in names.dependents(self.name, uuid)]
        with (
            contextlib.suppress(NotReady, PermissionDenied),
            folders.elsewhere(header) as other,
        ):
            if other:
                found += [f"{other.path}{full}" for full in self._placed(other)]
        return found

    def memory(self) -> int:
        """Bytes of shared memory that it and its dependents take now."""
        return sum(memory_of(full) for full in (self.object_name, *self.dependents()))

    def unused_ns(self) -> int:
        """How long ago a client was last seen to use it: joined, left, took its lock, or said so.
        The lock has a clock without suspension: what it says is too late by that, never too early.
        """
        found = os.pread(self.fd, ctypes.sizeof(layout.LockRecord), layout.LOCK_OFFSET)
        lock = layout.LockRecord.from_buffer_copy(
            found.ljust(ctypes.sizeof(layout.LockRecord), b"\0")
        )
        by_header = max(0, time.time_ns() - int(self.header().used_ns))
        by_lock = time.monotonic_ns() - int(lock.since_ns)
        # Of another time namespace it may lie ahead: then only the header counts.
        return min(by_header, by_lock) if lock.since_ns and by_lock >= 0 else by_header

    def is_idle(self) -> bool:
        """Whether it is persistent, nobody lives in it, and nobody used it for longer than its idle
        limit. Sure while the life byte is held exclusively."""
        header = self.header()
        return (
            header.lifetime == layout.Lifetime.PERSISTENT
            and header.idle_ns > 0
            and not self.is_occupied()
            and self.unused_ns() > header.idle_ns
        )

    def remove_locked(self, *, unseen: bool = False) -> None:
        """Retire and unlink it with all that depends on it. The caller holds the life byte
        exclusively and has seen `is_named`. Dying in here leaves it retired but named: the next
        who opens it finishes. So the name goes last: what lies in another folder than /dev/shm is
        found through it alone.

        Args:
            unseen: also where a folder is named that cannot be seen from here.

        Raises:
            PermissionDenied: this user may not unlink it; then nothing was changed.
            NotReady: the folder named cannot be seen from here; nothing was changed.
        """
        if self.inherited:
            return  # a child forked by what its parent does under the lock, which it has not got
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
    """Bytes of memory that an object takes; 0 when there is none."""
    try:
        return os.stat(folders.path_of(full), follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def duration(seconds: float) -> str:
    """For people: "24 h", "90 s"."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size < size / 10:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def unlink(full: str) -> bool:
    """Unlink an object by its name; False when there was none."""
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
