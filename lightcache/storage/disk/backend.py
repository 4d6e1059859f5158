"""Pages on a disk of this machine, shared by all its processes, found again after a restart."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from lightcache import _arguments
from lightcache.errors import (
    Abandoned,
    ConfigError,
    Detached,
    InUse,
    LeaseLost,
    LockTimeout,
    StorageError,
)
from lightcache.leases import LeaseBatch
from lightcache.sizes import parse_size
from lightcache.storage.arguments import Clock, Counters, Deadline, check_batch
from lightcache.storage.disk.folder import Folder, remove_folder
from lightcache.storage.disk.health import Health
from lightcache.storage.disk.lanes import Lanes
from lightcache.storage.disk.reading import read_pages
from lightcache.storage.disk.rebuilding import Rebuilt
from lightcache.storage.disk.writing import Writer
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    Storage,
    StorageSpec,
    StorageStats,
    WriteResult,
)

_OPTIONS = {"capacity", "threads", "files", "direct", "index", "retry"}
_CLOSING = 10.0  # seconds that `close` waits for calls


class DiskStorage(Storage):
    """Slot files in a folder, made as large as they may become when it is opened first. Each slot
    holds a page and says what it is; an index in shared memory says which slot has which page, and
    is made anew from the slots when there is none. All processes that open the folder share both.

    A lookup is one of the index: no system call. A page is read or written by one system call
    between the disk and the page's own memory, where the file system has direct I/O. When all slots
    are taken, pages that nobody has used for longest go, from the ends of prefixes.

    Nothing is waited for until the disk has it for good: if the machine stops, the last pages may
    be lost or damaged, and are found out when they are read, by their checksums.
    """

    def __init__(
        self,
        path: str | Path,
        spec: StorageSpec,
        *,
        capacity: int | str | None = None,
        threads: int = 8,
        files: int = 4,
        direct: bool = True,
        persistent: bool = False,
        retry: float = 30.0,
        timeout: float = 60.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Open a folder, or make one. Blocks: a new one gets its blocks on the disk; and where the
        index has to be made, a block of each slot is read.

        Args:
            path: of a folder; pages of each spec have a folder in it.
            capacity: bytes of disk, as a number or "1TiB"; None: what it has. Of a folder that
                nobody uses it can be changed: what lies behind a smaller one is forgotten.
            threads: that read and write.
            files: to which slots are dealt; of a new folder.
            direct: past the page cache, where that is possible.
            persistent: the index stays in shared memory when the last process has left; else it is
                made anew by the next one.
            retry: seconds until a disk that could not be written is tried again.
            timeout: seconds to wait for others that are opening it.

        Raises:
            ConfigError: an argument out of range, or no capacity for a new folder.
            LayoutMismatch: it was made by another version.
            InUse: it is used with another capacity, or by processes with another /dev/shm.
            StorageError: it cannot be made, or has not so much room.
        """
        self.spec = spec
        _arguments.count(threads, "threads", 1, 256)
        _arguments.count(files, "files", 1, 1000)
        where = Path(path) / f"lightcache-{spec.name}"
        wanted = None if capacity is None else parse_size(capacity, "capacity")
        self._folder = Folder(
            where,
            spec,
            wanted,
            files=files,
            direct=direct,
            persistent=persistent,
            timeout=timeout,
        )
        self._index, self._counters = self._folder.index, Counters()
        self._lanes: Lanes | None = Lanes(threads)
        self._writer = Writer(self._folder, self._lanes, Health(f"disk {path}", retry, clock))
        self._state = threading.Condition()
        self._calls = 0
        self._closed = False

    @classmethod
    def open(cls, path: str, options: Mapping[str, str], spec: StorageSpec) -> DiskStorage:
        """As in `disk:/mnt/nvme/cache?capacity=1TiB&threads=8&direct=no&index=keep`."""
        if unknown := set(options) - _OPTIONS:
            raise ConfigError(f"disk: expected {sorted(_OPTIONS)}, found {sorted(unknown)}")
        if not path:
            raise ConfigError("disk: expected a folder, as in 'disk:/mnt/nvme?capacity=1TiB'")
        numbers: dict[str, int] = {}
        try:
            for name in {"threads", "files"} & set(options):
                numbers[name] = int(options[name])
            retry = float(options.get("retry", "30"))
        except ValueError as error:
            raise ConfigError(f"disk: expected numbers for threads, files, retry: {error}") from None
        for name, choices in (("direct", ("yes", "no")), ("index", ("keep", "drop"))):
            if options.get(name, choices[0]) not in choices:
                raise ConfigError(f"{name}: expected one of {choices}, found {options[name]!r}")
        return cls(
            path,
            spec,
            capacity=options.get("capacity"),
            direct=options.get("direct") != "no",
            persistent=options.get("index") == "keep",
            retry=retry,
            **numbers,
        )

    @staticmethod
    def remove(path: str | Path, spec: StorageSpec) -> None:
        """Remove what is stored of a spec, and its index. Harmless if there is nothing.

        Raises:
            InUse: somebody uses it.
            StorageError: it cannot be removed.
        """
        remove_folder(Path(path) / f"lightcache-{spec.name}")

    # ---- what it is

    @property
    def slots(self) -> int:
        """Pages that it may hold."""
        return self._index.pages

    @property
    def direct(self) -> bool:
        """Whether bytes go past the page cache."""
        return self._folder.slots.direct

    @property
    def rebuilt(self) -> Rebuilt | None:
        """What was found in the slots, if the index was made by this process; None: it was there."""
        return self._folder.rebuilt

    @property
    def index_name(self) -> str:
        """Of the index in shared memory: for `lightcache dump`."""
        return self._folder.header.index_name

    @property
    def write_trouble(self) -> str:
        """Why nothing is written just now; empty: it is."""
        return self._writer.health.reason

    # ---- calls

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`. Some 5 ns a key."""
        deadline = Deadline(timeout)
        with self._call():
            self._in_time("contains", deadline)
            found = self._index.peek(keys)
            if not found and len(keys) and self._folder.renewed():
                found = self._index.peek(keys)
            return found

    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """See `Storage.read`."""
        names, views = check_batch(keys, buffers, self.spec.page_bytes, writable=True)
        deadline = Deadline(timeout)
        with self._call():
            self._folder.renewed()
            held = self._pinned(keys)
            try:
                pages = [int(each[0]) if len(each) else None for each in held]
                assert self._lanes is not None
                found = read_pages(self._folder, self._lanes, names, pages, views, deadline)
            finally:
                held.release()
            self._drop(keys[found.bad])
        return self._counters.read(found.result, timed_out=found.late)

    def _pinned(self, keys: Keys) -> LeaseBatch:
        """Each key by itself: pages are wanted behind holes, too."""
        return self._index.match_many(keys, np.arange(len(keys) + 1))

    def write(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        timeout: float,
        parent: Keys | None = None,
    ) -> WriteResult:
        """See `Storage.write`."""
        names, views = check_batch(keys, buffers, self.spec.page_bytes, writable=False)
        deadline = Deadline(timeout)
        with self._call():
            result, late = self._writer.write(keys, names, views, parent, deadline)
        return self._counters.write(result, timed_out=late)

    def delete(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.delete`."""
        _arguments.keys(keys)
        deadline = Deadline(timeout)
        with self._call():
            self._in_time("delete", deadline)
            gone, kept = self._drop(keys)
            if kept:
                raise StorageError(
                    f"delete: {kept} of {len(keys)} pages are being read, and stay; call again"
                )
        return self._counters.deleted(gone)

    def _drop(self, keys: Keys) -> tuple[int, int]:
        """Forget these pages, here and for any rebuild; how many went, and how many could not,
        since others read them."""
        gone = kept = 0
        for row in range(len(keys)):
            with self._index.match(np.ascontiguousarray(keys[row : row + 1])) as lease:
                pages = lease.detach()
            if not len(pages):
                continue
            try:
                self._index.unname(pages)
            except InUse:
                self._index.unpin(pages)
                kept += 1
                continue
            except LeaseLost:  # others have cleared it
                self._index.unpin(pages)
                continue
            with contextlib.suppress(OSError):  # then its checksum is all that speaks against it
                self._folder.slots.erase(int(pages[0]))
            self._index.free(pages)
            gone += 1
        return gone, kept

    def clear(self, *, timeout: float) -> int:
        """See `Storage.clear`."""
        deadline = Deadline(timeout)
        with self._call():
            self._in_time("clear", deadline)
            self._folder.begin_epoch(deadline.left)
            gone = self._index.stats().ready
            self._index.clear()
        return self._counters.deleted(gone)

    def stats(self) -> StorageStats:
        """See `Storage.stats`: pages are those of all processes."""
        if self._closed:
            return self._counters.snapshot(0, 0)
        self._counters.evicted(sum(self._index._take_evicted().values()))
        pages = self._index.stats().ready
        return self._counters.snapshot(pages, pages * self.spec.page_bytes)

    def _in_time(self, what: str, deadline: Deadline) -> None:
        if deadline.passed:
            self._counters.timed_out()
            raise StorageError(f"{what}: {deadline.reason}; give it more time")

    # ---- the end

    def _usable(self) -> None:
        if self._closed:
            raise Detached("this storage was closed; open it again")

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Around everything that uses the folder: it is not closed meanwhile."""
        with self._state:
            self._usable()
            self._calls += 1
        try:
            yield
        except (LockTimeout, Abandoned) as error:
            raise StorageError(f"disk: {error}") from error
        finally:
            with self._state:
                self._calls -= 1
                self._state.notify_all()

    def close(self) -> None:
        """See `Storage.close`. Waits up to 10 s for calls of other threads.

        Raises:
            StorageError: a call hangs; call again.
        """
        with self._state:
            self._closed = True
            if not self._state.wait_for(lambda: not self._calls, _CLOSING):
                raise StorageError(f"close: {self._calls} calls have not returned; close it again")
            lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()
            self._folder.close()


__all__ = ["DiskStorage"]
