"""A folder of slot files, and the index of it that processes share.

Byte 0 of the folder's lock file is held while somebody opens or changes it; byte 1 is shared by all
who use it. Who finds nobody there may make a new index. Locks of a file go with its holder's death,
and are seen through containers, which the index in shared memory is not: so two groups of processes
that do not share /dev/shm cannot use one folder at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lightcache.errors import (
    ConfigError,
    InUse,
    LayoutMismatch,
    LightcacheError,
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
    new_header,
    read_header,
    signature,
    write_header,
)
from lightcache.storage.disk.rebuilding import Rebuilt, rebuild
from lightcache.storage.disk.slots import SlotFiles, file_of, make_file, slot_bytes
from lightcache.storage.protocol import StorageSpec

LOCK = "lock"
_OPENING, _USING = 0, 1  # bytes of the lock file


class Folder:
    """Attached to one: its header, its slot files, its index."""

    def __init__(
        self,
        path: Path,
        spec: StorageSpec,
        capacity: int | None,
        *,
        files: int,
        direct: bool,
        persistent: bool,
        timeout: float,
    ) -> None:
        """See `DiskStorage`. `path` is that of the folder of this spec."""
        self.path = path
        self.rebuilt: Rebuilt | None = None
        """What the rebuild found, if the index was made here and now."""
        with contextlib.ExitStack() as stack:
            self._lock = _open_lock(path)
            stack.callback(os.close, self._lock)
            with self.changing(timeout):
                alone = ofd.try_lock(self._lock, _USING)
                self.header = self._made(spec, capacity, files, alone)
                self.slots = SlotFiles(path, self.header.files, spec.page_bytes, direct=direct)
                stack.callback(self.slots.close)
                lifetime = "persistent" if persistent else "attached"
                self.index = self._attached(alone, lifetime, timeout)
                stack.callback(self.index.close)
                if not ofd.try_lock(self._lock, _USING, exclusive=False):  # from now on, shared
                    raise InUse(f"disk: {path} is being taken by others; try again")
                self._seen = signature(path)
            stack.pop_all()

    @contextlib.contextmanager
    def changing(self, timeout: float) -> Iterator[None]:
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

    # ---- the files

    def _made(self, spec: StorageSpec, capacity: int | None, files: int, alone: bool) -> Header:
        found = read_header(self.path)
        wanted = None if capacity is None else capacity // slot_bytes(spec.page_bytes)
        if wanted == 0:
            raise ConfigError(
                f"capacity: expected room for a slot of {slot_bytes(spec.page_bytes)} bytes or "
                f"more, found {capacity}"
            )
        if found is None:
            if wanted is None:
                raise ConfigError(
                    f"capacity: {self.path} is new, and has to know how large it may become; give "
                    "capacity="
                )
            return self._sized(new_header(spec, min(files, wanted), wanted))
        if found.spec != spec:
            raise LayoutMismatch(f"disk: {self.path} holds pages of {found.spec}, expected {spec}")
        if wanted is None or wanted == found.slots:
            return found
        if not alone:
            raise InUse(
                f"disk: {self.path} has {found.slots} slots, expected {wanted}; it can be changed "
                "when nobody uses it: give the capacity that others have, or none"
            )
        return self._sized(replace(found, slots=max(wanted, found.files)))

    def _sized(self, header: Header) -> Header:
        """Make the files fit. A header stands behind its files: if we die first, they are no more
        than too large."""
        nbytes = -(-header.slots // header.files) * slot_bytes(header.page_bytes)
        try:
            for number in range(header.files):
                make_file(file_of(self.path, number), nbytes)
            write_header(self.path, replace(header, rebuilt=0))
        except OSError as error:
            raise StorageError(
                f"disk: {header.slots} slots, {header.files * nbytes} bytes in all, do not fit in "
                f"{self.path}: {error}; give a smaller capacity= or make room"
            ) from error
        return replace(header, rebuilt=0)

    # ---- the index

    def _attached(self, alone: bool, lifetime: str, timeout: float) -> PageIndex:
        """That which is there, if it knows all that is on the disk; else a new one."""
        header = self.header
        with contextlib.suppress(NotReady, LayoutMismatch):
            if header.rebuilt == header.index:
                return PageIndex.attach(
                    header.index_name,
                    config={"index": header.index},
                    role="disk",
                    timeout=timeout,
                )
        if not alone:
            raise InUse(
                f"disk: {self.path} is used by processes whose index, {header.index_name}, is not "
                "in this /dev/shm; share /dev/shm between containers, or give each a folder of its "
                "own"
            )
        return self._fresh(lifetime)

    def _fresh(self, lifetime: str) -> PageIndex:
        """Nobody uses the folder: what is in shared memory of it can go."""
        name = self.header.index_name
        Segment.unlink(name)
        self.header = replace(self.header, index=self.header.index + 1)
        self._keep(self.header)
        index = PageIndex.create(
            name,
            pages=self.header.slots,
            config={"index": self.header.index},
            lifetime=lifetime,
            role="disk",
        )
        try:
            spec = bytes.fromhex(self.header.spec.name)
            length, epoch = self.header.page_bytes, self.header.epoch
            self.rebuilt = found = rebuild(index, self.slots, spec, epoch, length)
            self.header = replace(self.header, rebuilt=self.header.index)
            self._keep(self.header)
        except BaseException:
            index.close()
            raise
        if found.pages or found.dropped or found.unreadable:
            log.info(
                "disk: %s: %d of %d slots hold pages, %d were dropped, %d could not be read; %.1f s",
                *(self.path, found.pages, found.slots, found.dropped, found.unreadable),
                found.seconds,
            )
        return index

    def _keep(self, header: Header) -> None:
        try:
            write_header(self.path, header)
        except OSError as error:
            raise StorageError(f"disk: {self.path} cannot be written to: {error}") from error

    def begin_epoch(self, timeout: float) -> None:
        """What is in the slots now counts no more, for any rebuild to come.

        Raises:
            StorageError: it could not be written; or somebody holds the lock for all of the time.
        """
        with self.changing(timeout):
            found = read_header(self.path)
            if found is None or found.uuid != self.header.uuid:
                raise StorageError(f"disk: {self.path} was removed, or is another one now")
            self.header = replace(found, epoch=found.epoch + 1)
            self._keep(self.header)

    def renewed(self) -> bool:
        """Whether somebody has cleared it: from now on we see what was written since. Less than a
        microsecond if nobody has."""
        index = self.index
        if index.namespace_state() is not NamespaceState.CLEARED:
            return False
        space = index.default_namespace
        index.use(index.namespace(space.weights, space.tenant))
        return True

    def refresh(self) -> str:
        """Whether the folder is the one that we opened. Empty, or what is wrong with it. Somebody
        may have begun another epoch. Some microseconds: the header is read if it was replaced."""
        try:
            seen = signature(self.path)
            found = self.header if seen == self._seen else read_header(self.path)
        except (OSError, StorageError, LayoutMismatch) as error:
            return f"{self.path} was removed or unmounted ({error})"
        if found is None or found.uuid != self.header.uuid:
            return f"{self.path} is another one than was opened"
        self.header, self._seen = found, seen
        self.renewed()
        return ""

    def close(self) -> None:
        """Leave. The index stays as long as somebody is attached, or for good if persistent."""
        self.index.close()
        self.slots.close()
        os.close(self._lock)


def remove_folder(path: Path) -> None:
    """Remove a folder, its files, and its index.

    Raises:
        InUse: somebody uses it.
        StorageError: it cannot be removed.
    """
    header = read_header(path)
    if header is None:
        return
    lock = _open_lock(path)
    try:
        if not ofd.try_lock(lock, _USING):
            raise InUse(f"disk: {path} is used by others; close them first")
        with contextlib.suppress(LightcacheError):
            Segment.unlink(header.index_name)
        for number in range(header.files):
            file_of(path, number).unlink(missing_ok=True)
        (path / NAME).unlink(missing_ok=True)
        (path / LOCK).unlink(missing_ok=True)
        path.rmdir()
    except OSError as error:
        raise StorageError(f"disk: {error}") from error
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"disk: {error}; give a folder that can be written to") from error


__all__ = ["Folder", "remove_folder"]
