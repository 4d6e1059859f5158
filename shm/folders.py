"""Folders of a segment's dependents: /dev/shm, or a folder on tmpfs or hugetlbfs.

A segment itself is always in /dev/shm. Its configuration names the folder of its dependents if it
is another one (`FOLDER_ITEM`); this layer reads no other item of it but `FAMILY_ITEM`. The header
is written before a dependent is made, and a dependent is removed before its segment. So an existing
dependent is always named by a segment, even after a kill at any point. A file that no segment names
is not ours to remove: another container may share the folder but not our /dev/shm.

For the same reason a segment whose folder is not visible from here stays, unless its removal is
requested by name: a sweep removes nothing of it, and neither does a last client that fails to
attach.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from lightcache.shm import _native, layout, memory, names, owners
from lightcache.shm.codes import check
from lightcache.shm.errors import CacheCorrupted, ConfigError, NotReady, PermissionDenied
from lightcache.shm.wanted import config_of

FOLDER_ITEM = "pool_path"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_OPEN_OBJECT = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class FolderKind(IntEnum):
    """File systems that the core distinguishes."""

    OTHER = 0
    TMPFS = 1
    HUGETLBFS = 2


def checked_path(path: str | os.PathLike[str]) -> str | None:
    """The path of a folder as stored in a configuration; None: /dev/shm.

    Raises:
        ConfigError: not an absolute path without `..`, no such folder, or a folder on neither tmpfs
            nor hugetlbfs.
    """
    text = os.fspath(path)
    folder = Path(text)
    if not folder.is_absolute() or ".." in folder.parts or "\0" in text or str(folder) == "/":
        raise ConfigError(
            f"pool_path: expected the absolute path of a folder, without '..', found {text!r}"
        )
    if folder == names.FOLDER:
        return None
    try:
        with Folder.open(folder):
            return str(folder)
    except (NotReady, PermissionDenied) as error:
        raise ConfigError(f"pool_path: {error}") from error


class Folder:
    """An open folder. Close it; its objects do not depend on its staying open."""

    def __init__(self, path: Path, fd: int) -> None:
        """For `open`, which closes the descriptor if this fails."""
        self.path = path
        self.fd = fd
        page = ctypes.c_uint64()
        code = _native.quick().lcs_folder_kind(fd, ctypes.byref(page))
        self.kind = FolderKind(check(code, f"look at the file system of {path}"))
        self.page_bytes = page.value
        """Page size of its files. On hugetlbfs lengths are multiples of it."""

    @classmethod
    def open(cls, path: Path = names.FOLDER) -> Folder:
        """Open a folder for its objects.

        Raises:
            NotReady: no such folder.
            PermissionDenied: not accessible, or a symbolic link.
            ConfigError: not in memory: on neither tmpfs nor hugetlbfs.
        """
        try:
            fd = os.open(path, _OPEN_FOLDER)
        except FileNotFoundError:
            raise NotReady(
                f"the folder {path} is not there; make it on a tmpfs or hugetlbfs, or mount that "
                "here, too (containers: the same path in each)"
            ) from None
        except OSError as error:
            raise PermissionDenied(
                f"open the folder {path}: {error.strerror}: {owners.whose(path)}; expected a "
                "folder, not a link, that this user may read"
            ) from error
        try:
            folder = cls(path, fd)
            if path != names.FOLDER and folder.kind is FolderKind.OTHER:
                raise ConfigError(
                    f"{path} is on neither tmpfs nor hugetlbfs, where a pool would be written to "
                    "a disk; see `findmnt -t tmpfs,hugetlbfs`"
                )
        except BaseException:
            os.close(fd)
            raise
        return folder

    def length(self, wanted: int) -> int:
        """Length of an object that holds this many bytes."""
        step = self.page_bytes if self.kind is FolderKind.HUGETLBFS else 1
        return -(-wanted // step) * step

    def room(self) -> memory.FreeMemory:
        """The memory that can still be allocated in it."""
        if self.path == names.FOLDER:
            return memory.available()
        if self.kind is FolderKind.HUGETLBFS:
            return memory.huge_available(self.path, self.page_bytes)
        return memory.available(self.path)

    def room_after(self, coming: memory.Coming) -> memory.FreeMemory:
        """The same, with what will come free."""
        if self.kind is FolderKind.HUGETLBFS:
            return memory.huge_available(self.path, self.page_bytes, coming=coming)
        return memory.available(self.path, coming=coming)

    # ---- objects, by their names with a leading slash

    def make(self, full: str, mode: int) -> int:
        """Make an empty object; returns its descriptor.

        Raises:
            FileExistsError, OSError.
        """
        flags = _OPEN_OBJECT | os.O_RDWR | os.O_CREAT | os.O_EXCL
        return os.open(full.removeprefix("/"), flags, mode, dir_fd=self.fd)

    def open_object(self, full: str, *, writable: bool) -> int | None:
        """A descriptor of an object, or None if there is none.

        Raises:
            PermissionDenied: not accessible, or a symbolic link.
        """
        flags = _OPEN_OBJECT | (os.O_RDWR if writable else os.O_RDONLY)
        try:
            return os.open(full.removeprefix("/"), flags, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PermissionDenied(
                f"open {self.path}{full}: {error.strerror}: {owners.whose(f'{self.path}{full}')}; "
                "expected an object of ours, not a link; find out who made it"
            ) from error

    def life_open(self, full: str, fd: ctypes.c_int) -> None:
        """Open a descriptor for byte locks into `fd`; see the core's `lcs_life_open`."""
        name = full.removeprefix("/").encode()
        code = _native.quick().lcs_life_open_at(self.fd, name, 1, ctypes.byref(fd))
        check(code, f"open {self.path}{full} for its locks")

    def unlink(self, full: str) -> bool:
        """Remove an object; False if there was none.

        Raises:
            PermissionDenied: this user may not.
        """
        try:
            os.unlink(full.removeprefix("/"), dir_fd=self.fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise PermissionDenied(
                f"unlink {self.path}{full}: {error.strerror}: "
                f"{owners.whose(f'{self.path}{full}')}; only its owner can remove it"
            ) from error
        return True

    def may_write(self) -> bool:
        """True if this user may make files in it."""
        return os.access(".", os.W_OK | os.X_OK, dir_fd=self.fd, effective_ids=True)

    def may_unlink(self, owner: int) -> bool:
        """True if mode and sticky bit let this user unlink files of `owner` in it."""
        status = os.fstat(self.fd)
        free = not status.st_mode & stat.S_ISVTX or os.geteuid() in (0, status.st_uid, owner)
        return free and self.may_write()

    def dependents(self, name: str, uuid: str, owner: int) -> list[str]:
        """Names of the dependents of the segment with this UUID: regular files of its owner."""
        dependents = []
        for entry in os.listdir(self.fd):
            parsed = names.parse_dependent(f"/{entry}")
            if parsed and (parsed.segment, parsed.uuid) == (name, uuid):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    kind = os.stat(entry, dir_fd=self.fd, follow_symlinks=False)
                    if stat.S_ISREG(kind.st_mode) and kind.st_uid == owner:
                        dependents.append(parsed.object_name)
        return sorted(dependents)

    # ---- close

    def close(self) -> None:
        """Close it. A second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# ---------------------------------------------------------------- of a segment


def path_in(config: object) -> Path | None:
    """The folder that a configuration names, other than /dev/shm."""
    path = config.get(FOLDER_ITEM) if isinstance(config, dict) else None
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        return None
    return Path(path)


@contextlib.contextmanager
def elsewhere(header: layout.SegmentHeader) -> Iterator[Folder | None]:
    """The folder of a segment's dependents if it is not /dev/shm. None: the header names none, or
    one that is not in memory: a process that can write a header can name any folder.

    Raises:
        NotReady, PermissionDenied: it names a folder that is not visible from here.
    """
    folder = None
    with contextlib.suppress(ConfigError, CacheCorrupted):
        path = path_in(config_of(header))
        folder = Folder.open(path) if path else None
    with folder or contextlib.nullcontext():
        yield folder


def path_of(full: str) -> Path:
    """Path of a dependent from `SegmentInfo.dependents`, which names an object or a path."""
    return names.FOLDER / full[1:] if full.count("/") == 1 else Path(full)
