"""Pages on a disk of this machine, shared by all its processes, found again after a restart."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Pages, parse_size
from lightcache.breaker import CircuitBreaker
from lightcache.errors import ConfigError, Detached, InUse, LeaseLost, LightcacheError, StorageError
from lightcache.layout import Cause
from lightcache.storage.arguments import Clock, Counters, Deadline, Options, check_batch, check_spec
from lightcache.storage.calls import CLOSING, Calls, Owned, log
from lightcache.storage.disk.folder import Folder, How, Rebuilt, Wanted, remove_folder
from lightcache.storage.disk.reading import Writer, read_pages
from lightcache.storage.disk.slots import MAX_FILES
from lightcache.storage.executor import Executor
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    StorageSpec,
    StorageStats,
    WriteResult,
)

# ---- What a URL such as `disk:/mnt/nvme/cache?capacity=1TiB&direct=no` says.

OPTIONS = ("capacity", "threads", "files", "retry", "direct", "index")


def parse(path: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `DiskStorage`: those that are said.

    Raises:
        ConfigError: no path, an option that there is not, or a value that is none.
    """
    given = Options("disk", options, OPTIONS)
    if not path:
        raise ConfigError("disk: expected a folder, as in 'disk:/mnt/nvme?capacity=1TiB'")
    if path.startswith("~"):  # else a folder of that name is made, where the process happens to be
        raise ConfigError(
            f"disk: expected a folder, found {path!r}: no shell has replaced the '~'; write the "
            "folder out, as in 'disk:/home/me/pages'"
        )
    found: dict[str, Any] = {
        "direct": given.choice("direct", ("yes", "no")) == "yes",
        "persistent": given.choice("index", ("drop", "keep")) == "keep",
    }
    if "capacity" in given:
        found["capacity"] = given.size("capacity")
    if "threads" in given:
        found["threads"] = given.count("threads", 0, high=256)
    if "files" in given:
        found["files"] = given.count("files", 0, high=MAX_FILES)
    if "retry" in given:
        found["retry"] = given.seconds("retry", 0.0)
    return found


# ---- Dropping pages, for good.


@dataclass(frozen=True)
class Dropped:
    """How many pages were dropped, and how many were not."""

    gone: int
    kept: int
    """Others read them just now."""


def drop(folder: Folder, keys: Keys, slots: Pages | None = None) -> Dropped:
    """Take pages from the index, then their footers from the disk, so that no rebuild finds them.

    In this order: a slot that is ours alone is not written by others. If we die in between, a
    rebuild may find the page again; what was corrupt is found out again then.

    Args:
        slots: a page only counts if it still stands there; None: wherever it stands.
    """
    gone = kept = 0
    for row in range(len(keys)):
        with folder.index.match(keys[row : row + 1]) as lease:
            pages = lease.detach()
        if not len(pages):
            continue
        if slots is not None and pages[0] != slots[row]:  # stored anew meanwhile
            folder.index.unpin(pages)
            continue
        try:
            folder.index.unname(pages)
        except LightcacheError as error:
            folder.index.unpin(pages)
            if not isinstance(error, (InUse, LeaseLost)):
                raise
            kept += isinstance(error, InUse)  # LeaseLost: others have cleared it
            continue
        with contextlib.suppress(OSError):  # then its checksum is all that speaks against it
            folder.slots.erase(int(pages[0]))
        folder.index.free(pages)
        gone += 1
    return Dropped(gone, kept)


# ---- Pages on a disk of this machine, shared by all its processes, found again after a restart.


class DiskStorage(Owned):
    """Slot files in a folder, made as large as they may become when it is opened first. Each slot
    holds a page and says what it is; an index in shared memory says which slot has which page, and
    is made anew from the slots when there is none. All processes that open the folder share both:
    63 at most.

    A lookup is one of the index: no system call. A page is read or written by one system call
    between the disk and the page's own memory, where the file system has direct I/O. When all slots
    are taken, the least recently used pages go, from the ends of prefixes.

    Nothing is waited for until the disk has it for good: if the machine stops, the last pages may
    be lost or damaged, and are found out when they are read, by their checksums.

    What was evicted, or written by a call that failed, still stands in its slot until another page
    does, so a rebuild may find it again, deleted or not. What was cleared no rebuild finds.
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
            capacity: bytes of disk, as a number or "1TiB"; None: what it has. It can be
                changed while no process uses the folder: slots after a smaller one are forgotten.
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
            InUse: it is used with another capacity, by processes with another /dev/shm, or by 63.
            NoSpace: no room for the index in /dev/shm: 206 bytes a slot.
            StorageError: it cannot be made, or has not so much room.
        """
        self.spec = spec
        _arguments.count(threads, "threads", 1, 256)
        _arguments.count(files, "files", 1, MAX_FILES)
        for name, seconds, most in (("retry", retry, 1e9), ("timeout", timeout, math.inf)):
            if not 0 <= Deadline(seconds, what=name).timeout <= most:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        wanted = Wanted(None if capacity is None else parse_size(capacity, "capacity"), files)
        where = _place(path, spec)
        self._folder = Folder(where, spec, How(wanted, direct, persistent, timeout))
        self._index, self._counters = self._folder.index, Counters()
        try:
            self._lanes = Executor(threads, "disk")
            self._lanes.start()
        except RuntimeError as error:  # no more threads here
            self._folder.close()
            raise StorageError(f"disk: {error}; give fewer threads=") from error
        self._writer = Writer(self._folder, self._lanes, _health(f"disk {path}", retry, clock))
        self._calls = Calls()

    @classmethod
    def open(cls, path: str, options: Mapping[str, str], spec: StorageSpec) -> DiskStorage:
        """As in `disk:/mnt/nvme/cache?capacity=1TiB&threads=8&direct=no&index=keep`."""
        return cls(path, spec, **parse(path, options))

    @staticmethod
    def remove(path: str | Path, spec: StorageSpec) -> None:
        """Remove what is stored of a spec, and its index. Harmless if there is nothing.

        Raises:
            ConfigError: no path.
            InUse: a process uses it.
            StorageError: it cannot be removed.
        """
        remove_folder(_place(path, spec))

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
        """What was found in the slots, if this process made the index; None: it was there."""
        return self._folder.rebuilt

    @property
    def index_name(self) -> str:
        """Of the index in shared memory: for `lightcache dump`."""
        return self._index.name

    @property
    def write_trouble(self) -> str:
        """Why nothing is written just now; empty: it is."""
        return self._writer.health.reason

    # ---- calls

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`. Takes no lock; 5 ns a key while the index is in the processor's
        cache."""
        if not (type(timeout) is float and timeout > 0.0):
            self._in_time("contains", Deadline(timeout))
        try:
            found = self._index.peek(keys)
            if not found and len(keys) and self._folder.renewed():
                found = self._index.peek(keys)
        except Detached as error:
            raise self._gone(error) from error
        return found

    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """See `Storage.read`. A page that the disk does not give any more is FAILED, and dropped
        as a corrupt one is: else it could never be stored anew."""
        names, views = check_batch(keys, buffers, self.spec.page_bytes, writable=True)
        deadline = Deadline(timeout)
        with self._call() as lanes:
            self._folder.renewed()
            # Each key by itself: pages after holes are wanted, too.
            held = self._index.match_many(keys, np.arange(len(keys) + 1))
            try:
                slots = np.full(len(keys), -1, np.int32)
                slots[held.counts > 0] = held.pages
                found = read_pages(
                    self._folder, lanes, keys, names, slots.tolist(), views, deadline
                )
            finally:
                held.release()
            if found.bad:
                with contextlib.suppress(LightcacheError):  # the next read of them tries again
                    drop(self._folder, keys[found.bad], slots[found.bad])
        return self._counters.read(found.result, timed_out=found.late)

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
            self._folder.renewed()
            dropped = drop(self._folder, keys)
        self._counters.deleted(dropped.gone)
        if dropped.kept:
            raise StorageError(
                f"delete: {dropped.kept} of {len(keys)} pages are being read, and stay; call again"
            )
        return dropped.gone

    def clear(self, *, timeout: float) -> int:
        """See `Storage.clear`."""
        deadline = Deadline(timeout)
        with self._call():
            self._in_time("clear", deadline)
            self._folder.begin_epoch(deadline.left)
            self._folder.renewed()
            gone = self._index.stats().ready
            self._index.clear()
        return self._counters.deleted(gone)

    def stats(self) -> StorageStats:
        """See `Storage.stats`: pages are those of all processes."""
        causes = self._index.core.take_evicted()
        self._counters.evicted(causes[Cause.ROOM] + causes[Cause.QUOTA])
        try:
            pages = self._index.stats().ready
        except Detached:  # closed, or in a forked child
            pages = 0
        return self._counters.snapshot(pages, pages * self.spec.page_bytes)

    def _in_time(self, what: str, deadline: Deadline) -> None:
        if deadline.passed:
            self._calls.check()
            self._counters.timed_out()
            raise StorageError(f"{what}: {deadline.reason}; give it more time")

    # ---- the end

    def _gone(self, error: Detached) -> LightcacheError:
        """What to raise when the index says that we are not attached."""
        try:
            self._calls.check()
        except Detached as ours:
            return ours
        return StorageError(f"disk: its index was removed ({error}); close it, and open it again")

    @contextlib.contextmanager
    def _call(self) -> Iterator[Executor]:
        """Around everything that uses the folder: it is not closed meanwhile."""
        with self._calls.one():
            try:
                yield self._lanes
            except (ConfigError, StorageError):
                raise
            except Detached as error:
                raise self._gone(error) from error
            except LightcacheError as error:
                raise StorageError(f"disk: {error}") from error

    def close(self) -> None:
        """See `Storage.close`. Waits up to 10 s for calls of other threads.

        Raises:
            StorageError: a call hangs; call again.
            LockTimeout: the index's lock was held for long; call again.
            Detached: in a forked child.
        """
        self._calls.end(self._release)

    def _release(self) -> None:
        self._lanes.close(CLOSING)
        self._folder.close()


def _health(what: str, retry: float, clock: Clock) -> CircuitBreaker:
    """Whether a disk is written to just now."""

    def text(errors: int, why: str) -> str:
        return (
            f"{what}: {why}; it is written to again when that is over, and tried every {retry:g} s;"
            " what is on it is still read"
        )

    return CircuitBreaker(1, retry, clock, text=text, works=f"{what} is written to again", log=log)


def _place(path: str | Path, spec: StorageSpec) -> Path:
    """The folder of a spec."""
    check_spec(spec)
    found: Any = path
    if not isinstance(found, (str, Path)) or str(path) == "" or "\0" in str(path):
        raise ConfigError(f"path: expected a folder, as in '/mnt/nvme/cache', found {path!r}")
    return Path(path) / f"lightcache-{spec.name}"


__all__ = ["OPTIONS", "DiskStorage", "Dropped", "drop", "parse"]
