"""A folder of slot files, and the index of it that processes share.

Byte 0 of the folder's lock file is held while somebody opens or changes it; byte 1 is shared by all
who use it. Who finds nobody there may make a new index. Locks of a file go with its holder's death,
and are seen through containers, which the index in shared memory is not: so two groups of processes
that do not share /dev/shm cannot use one folder at a time.

The index is named after the folder's place, its device and inode: a copy of a folder is another
one. Whoever uses the folder holds it open, so its inode is nobody else's meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lightcache.errors import (
    CacheCorrupted,
    InUse,
    LayoutMismatch,
    LockTimeout,
    NotReady,
    StorageError,
)
from lightcache.namespaces import NamespaceState
from lightcache.page_index import PageIndex
from lightcache.shm import Segment, ofd
from lightcache.storage.breaker import log
from lightcache.storage.disk.header import (
    NAME,
    Header,
    read_header,
    signature,
    write_header,
)
from lightcache.storage.disk.making import Wanted, first_slots, prepared
from lightcache.storage.disk.rebuilding import Rebuilt, rebuild
from lightcache.storage.disk.slots import SlotFiles
from lightcache.storage.protocol import StorageSpec

LOCK = "lock"
_OPENING, _USING = 0, 1  # bytes of the lock file
_LEAVING = 2.0  # seconds between an index's end and its process' letting go of the folder


@dataclass(frozen=True)
class How:
    """How a folder is opened; see `DiskStorage`."""

    wanted: Wanted
    direct: bool
    persistent: bool
    timeout: float


class Folder:
    """Attached to one: its header, its slot files, its index."""

    def __init__(self, path: Path, spec: StorageSpec, how: How) -> None:
        """`path` is that of the folder of this spec."""
        self.path = path
        self.rebuilt: Rebuilt | None = None
        """What the rebuild found, if the index was made here and now."""
        if not _has_header(path):
            first_slots(path, spec, how.wanted)  # before anything is made
        with contextlib.ExitStack() as stack:
            self._place, self._lock = _open(path)
            stack.callback(os.close, self._place)
            stack.callback(os.close, self._lock)
            with self._changing(how.timeout):
                alone = ofd.try_lock(self._lock, _USING)
                self.header = prepared(path, spec, how.wanted, alone)
                self.slots = SlotFiles(path, self.header.files, spec.page_bytes, direct=how.direct)
                stack.callback(self.slots.close)
                self.index = self._attached(alone, "persistent" if how.persistent else "attached")
                stack.callback(self.index.close)
                if not ofd.try_lock(self._lock, _USING, exclusive=False):  # from now on, shared
                    raise InUse(f"disk: {path} is being taken by others; try again")
                self._seen = signature(path)
            stack.pop_all()

    @property
    def index_name(self) -> str:
        """Of the index, in shared memory."""
        return index_name(self._place)

    @contextlib.contextmanager
    def _changing(self, timeout: float) -> Iterator[None]:
        """Nobody else opens or changes the folder meanwhile.

        Raises:
            StorageError: somebody did so for all of the time.
        """
        try:
            with ofd.locked(self._lock, _OPENING, timeout=timeout):
                yield
        except LockTimeout as error:
            raise StorageError(
                f"disk: timed out: somebody was opening or clearing {self.path} for {timeout:g} s"
            ) from error

    # ---- the index

    def _attached(self, alone: bool, lifetime: str) -> PageIndex:
        """That which is there, if it knows all that is on the disk; else a new one. Who leaves
        ends the index first and lets go of the folder then: that is waited for."""
        pause = ofd.Pause(_LEAVING)
        while True:
            try:
                return self._existing()
            except (NotReady, LayoutMismatch, CacheCorrupted) as error:
                why = str(error)
            if alone or ofd.try_lock(self._lock, _USING):
                return self._fresh(lifetime)
            if not pause.sleep():
                raise InUse(
                    f"disk: {self.path} is used by processes whose index is not in this /dev/shm "
                    f"({why}); share /dev/shm between containers, or give each a folder of its own"
                )

    def _existing(self) -> PageIndex:
        header = self.header
        if header.rebuilt != header.index or not header.index:
            raise NotReady(f"{self.path} has no index that knows all of its slots")
        whole = {**_config(header), "pages": header.slots}
        index = PageIndex.attach(self.index_name, config=whole, role="disk", timeout=_LEAVING)
        with contextlib.suppress(LockTimeout):  # it is done again when no slot can be had
            index.reap()  # a process that is started often follows one that was killed
        return index

    def _fresh(self, lifetime: str) -> PageIndex:
        """Nobody uses the folder: what is in shared memory of it can go, tools that look at it or
        not."""
        Segment.unlink(self.index_name, force=True)
        self.header = replace(self.header, index=self.header.index + 1)
        self._keep(self.header)
        index = PageIndex.create(
            self.index_name,
            pages=self.header.slots,
            config=_config(self.header),
            lifetime=lifetime,
            role="disk",
        )
        try:
            found = rebuild(index, self.slots, self.header)
            self.header = replace(self.header, rebuilt=self.header.index)
            self._keep(self.header)
        except BaseException:
            index.close()
            raise
        self.rebuilt = found
        if found.pages or found.dropped or found.unreadable:
            log.info(
                "disk: %s: %d of %d slots hold pages, %d were dropped, %d cannot be read; %.1f s",
                *(self.path, found.pages, found.slots, found.dropped, found.unreadable),
                found.seconds,
            )
        return index

    def _keep(self, header: Header) -> None:
        try:
            write_header(self.path, header)
        except OSError as error:
            raise StorageError(f"disk: {self.path} cannot be written to: {error}") from error

    # ---- in use

    def begin_epoch(self, timeout: float) -> None:
        """What is in the slots now counts no more, for any rebuild to come.

        Raises:
            StorageError: it could not be written; or somebody holds the lock for all of the time.
        """
        with self._changing(timeout):
            found = read_header(self.path)
            if found is None or found.uuid != self.header.uuid:
                raise StorageError(f"disk: {self.path} was removed, or is another one now")
            self.header = replace(found, epoch=found.epoch + 1)
            self._keep(self.header)

    def renewed(self) -> bool:
        """Whether somebody has cleared it: from now on we see what was written since. About a
        microsecond if nobody has."""
        index = self.index
        if index.namespace_state() is NamespaceState.NORMAL:
            return False
        space = index.default_namespace
        index.use(index.namespace(space.weights, space.tenant))
        return True

    def refresh(self) -> str:
        """Whether the folder is the one that we opened. Empty, or what is wrong with it. Some
        microseconds: the header is read if it was replaced.

        Who clears begins an epoch first and clears the index then. So the index is looked at
        before the header: pages of the new index are of the new epoch.
        """
        self.renewed()
        try:
            seen = signature(self.path)
            found = self.header if seen == self._seen else read_header(self.path)
        except (OSError, StorageError, LayoutMismatch) as error:
            return f"{self.path} was removed or unmounted ({error})"
        if found is None or found.uuid != self.header.uuid:
            return f"{self.path} is another one than was opened; close it, and open it again"
        self.header, self._seen = found, seen
        return ""

    def close(self) -> None:
        """Leave. The index stays as long as somebody is attached, or for good if persistent.

        The lock is given back by hand: a forked child has the descriptor too.
        """
        self.index.close()
        self.slots.close()
        ofd.unlock(self._lock, _USING)
        os.close(self._lock)
        os.close(self._place)


def index_name(place: int) -> str:
    """Of the index of a folder that is open under this descriptor."""
    found = os.fstat(place)
    return f"disk-{found.st_dev:x}-{found.st_ino:x}"


def _config(header: Header) -> dict[str, object]:
    return {"folder": header.uuid, "index": header.index}


def _has_header(path: Path) -> bool:
    try:
        return (path / NAME).exists()
    except OSError as error:  # such as a name that is too long
        raise StorageError(f"disk: {error}; give a folder that can be written to") from error


def remove_folder(path: Path) -> None:
    """Remove a folder, its files, and its index, damaged or not.

    Raises:
        InUse: somebody uses it.
        StorageError: it cannot be removed.
    """
    if not path.exists():
        return
    place, lock = _open(path)
    try:
        if not (ofd.try_lock(lock, _OPENING) and ofd.try_lock(lock, _USING)):
            raise InUse(f"disk: {path} is used by others; close them first")
        Segment.unlink(index_name(place), force=True)
        for file in (*path.glob("slots-*"), *path.glob(NAME + "*"), path / LOCK):
            file.unlink(missing_ok=True)
        path.rmdir()
    except OSError as error:
        raise StorageError(f"disk: {error}") from error
    finally:
        os.close(lock)
        os.close(place)


def _open(path: Path) -> tuple[int, int]:
    """The folder itself and its lock file, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return place, os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            os.close(place)
            raise
    except OSError as error:
        raise StorageError(f"disk: {error}; give a folder that can be written to") from error


__all__ = ["Folder", "How", "index_name", "remove_folder"]
