"""The object behind a HostPool: where it lies, how it is made, and what it must look like.

In /dev/shm, or in the folder that the cache's configuration names. It is made after the header that
names it and before the segment is ready, and removed before the segment's name: `shm/folders.py`
says why nothing of it can be left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterator

from lightcache.errors import CacheCorrupted, LightcacheError, NoSpace, NotReady, PermissionDenied
from lightcache.placement import Numa, advised_node
from lightcache.shm import Segment, memory
from lightcache.shm import _native as shm_native
from lightcache.shm.codes import Code, check
from lightcache.shm.folders import Folder
from lightcache.sizes import format_size


def pool_name(segment: Segment) -> str:
    """Of the object, with a slash in front."""
    return segment.dependent_name("pool")


def make_object(segment: Segment, total: int, first: int, numa: Numa = None) -> None:
    """Make the pool object of an index that is being created: `total` bytes long, `first` of them
    with memory. Called before anybody can attach. When it fails, what it has made goes with the
    segment, which its creator then removes.

    Raises:
        NoSpace: fewer bytes are available than the pool will have.
        PermissionDenied: no object may be made where it is to lie.
    """
    with segment.folder() as folder:
        length = folder.length(total)
        room = folder.room()
        if length > room.bytes:
            raise NoSpace(
                f"the pool needs {format_size(length)} ({length} bytes), found "
                f"{format_size(room.bytes)} {room.limit}; choose a smaller size, remove old caches "
                "(`lightcache ls`, `lightcache rm`), or enlarge it"
            )
        mode = 0o660 if segment.stat().st_mode & 0o060 else 0o600
        name = pool_name(segment)
        try:
            fd = folder.make(name, mode)
        except OSError as error:
            kind = PermissionDenied if isinstance(error, PermissionError) else LightcacheError
            raise kind(
                f"make the pool {folder.path}{name}: {error.strerror}; see who may write there"
            ) from error
        try:
            _furnish(fd, segment, folder, mode, (length, first), numa)
        finally:
            os.close(fd)


def _furnish(
    fd: int, segment: Segment, folder: Folder, mode: int, sizes: tuple[int, int], numa: Numa
) -> None:
    owner, (length, first) = segment.stat(), sizes
    if os.fstat(fd).st_gid != owner.st_gid:
        os.fchown(fd, -1, owner.st_gid)
    os.fchmod(fd, mode)  # the umask may have narrowed it
    os.ftruncate(fd, length)
    if numa is not None:
        _place(fd, length, numa)
    _allocate(fd, 0, first, folder)


def _place(fd: int, length: int, numa: Numa) -> None:
    """The policy stays with the object: also memory that another process gives it later, and the
    first chunk, obey it. Advice: where the kernel refuses it, memory comes as it comes."""
    node = advised_node(numa)
    base, quick = ctypes.c_void_p(), shm_native.quick()
    check(quick.lcs_map(fd, length, True, ctypes.byref(base)), "map the pool to place its memory")
    quick.lcs_advise(base, length, False, node)
    quick.lcs_unmap(base, length)


def _allocate(fd: int, offset: int, length: int, folder: Folder) -> None:
    code = Code.INTR
    while code == Code.INTR:
        code = shm_native.blocking().lcs_fallocate(fd, offset, length)
    if code < 0:
        room = folder.room()
        check(
            code,
            f"allocate {length} bytes of the pool ({format_size(room.bytes)} {room.limit})",
        )


def room_of(segment: Segment) -> memory.Room:
    """What may still be allocated where a segment's pool lies."""
    with segment.folder() as folder:
        return folder.room()


@contextlib.contextmanager
def opened(segment: Segment, nbytes: int) -> Iterator[tuple[Folder, int, int]]:
    """The folder, a descriptor to map through, and the object's length.

    Raises:
        NotReady: the object, or its folder, is gone or not mounted here.
        CacheCorrupted: it has another length than a pool of `nbytes`.
        PermissionDenied: its owner, mode or links are not what they should be.
    """
    with segment.folder() as folder:
        name = pool_name(segment)
        fd = folder.open_object(name, writable=not segment.readonly)
        if fd is None:
            raise NotReady(
                f"the pool {folder.path}{name} of {segment.name!r} is gone; remove the cache with "
                "`lightcache rm` and create it anew (another container: mount the same folder)"
            )
        try:
            length = folder.length(nbytes)
            _check(fd, segment, f"{folder.path}{name}", length)
            yield folder, fd, length
        finally:
            os.close(fd)


def _check(fd: int, segment: Segment, path: str, length: int) -> None:
    found, owner = os.fstat(fd), segment.stat()
    regular = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    if not regular or found.st_uid != owner.st_uid or found.st_mode & 0o007:
        raise PermissionDenied(
            f"the pool {path}: expected one regular file of user {owner.st_uid}, mode 0600 or "
            f"0660, found user {found.st_uid}, {found.st_nlink} links, mode "
            f"{stat.S_IMODE(found.st_mode):04o}; remove it and create the cache anew"
        )
    if found.st_size != length:
        raise CacheCorrupted(
            f"the pool {path}: expected {length} bytes, found {found.st_size}; remove the cache "
            "with `lightcache rm` and create it anew"
        )


__all__ = ["make_object", "opened", "pool_name", "room_of"]
