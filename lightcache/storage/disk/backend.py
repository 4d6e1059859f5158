"""Pages on a local disk, shared by all processes of the machine, kept across restarts."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Pages, parse_size
from lightcache.breaker import CircuitBreaker
from lightcache.errors import (
    Abandoned,
    ConfigError,
    Detached,
    InUse,
    LeaseLost,
    LightcacheError,
    StorageError,
    WaitTimeout,
)
from lightcache.layout import Cause
from lightcache.reservations import Reservation
from lightcache.storage.common import (
    CLOSING,
    Clock,
    Counters,
    Deadline,
    Options,
    Owned,
    check_batch,
    check_parent,
    check_spec,
    checksum,
    log,
)
from lightcache.storage.disk.folder import (
    Folder,
    How,
    Rebuilt,
    Wanted,
    remove_folder,
    stored_keys,
)
from lightcache.storage.disk.slots import MAX_FILES, NO_PARENT, Footer, unpack
from lightcache.storage.executor import READ, WRITE, Executor
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    ReadStatus,
    StorageSpec,
    StorageStats,
    WriteResult,
    WriteStatus,
)

# ---- URLs such as `disk:/mnt/nvme/cache?capacity=1TiB&direct=no`

OPTIONS = ("capacity", "threads", "files", "retry", "direct", "index")


def parse(path: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The given options as arguments of `DiskStorage`.

    Raises:
        ConfigError: no path, an unknown option, or a bad value.
    """
    given = Options("disk", options, OPTIONS)
    if not path:
        raise ConfigError("disk: expected a folder, as in 'disk:/mnt/nvme?capacity=1TiB'")
    if path.startswith("~"):  # else a folder of that name is made in the working directory
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


# ---- Dropping pages for good


@dataclass(frozen=True)
class Dropped:
    """The numbers of pages dropped and kept."""

    gone: int
    kept: int
    """Pages kept because others are reading them."""


def drop(folder: Folder, keys: Keys, slots: Pages | None = None) -> Dropped:
    """Remove pages from the index, then their footers from the disk, so that no rebuild finds them.

    The order matters: once a slot is ours alone, no other process writes it. If we die in between,
    a rebuild may find the page again; a corrupt page is then detected again.

    Args:
        slots: drop a page only if it is still in its slot; None: wherever it is.
    """
    dropped = kept = 0
    for row in range(len(keys)):
        with folder.index.match(keys[row : row + 1]) as lease:
            pages = lease.detach()
        if not len(pages):
            continue
        if slots is not None and pages[0] != slots[row]:  # stored again meanwhile
            folder.index.unpin(pages)
            continue
        try:
            folder.index.unname(pages)
        except LightcacheError as error:
            folder.index.unpin(pages)
            if not isinstance(error, (InUse, LeaseLost)):
                raise
            kept += isinstance(error, InUse)  # LeaseLost: another process cleared it
            continue
        with contextlib.suppress(OSError):  # then only its checksum can reject the page later
            folder.slots.erase(int(pages[0]))
        folder.index.free(pages)
        dropped += 1
    return Dropped(dropped, kept)


# ---- Writing pages to slots

STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT
FAILED, REFUSED = WriteStatus.FAILED, WriteStatus.REFUSED


class _PageWrite:
    """The write of one page."""

    def __init__(
        self, folder: Folder, slot: int, name: bytes, parent: bytes, view: memoryview, written: int
    ) -> None:
        self._folder, self._slot, self._view = folder, slot, view
        self._name, self._parent, self._written = name, parent, written
        self.done = False
        self.error = ""  # as text: an exception would keep the caller's memory alive

    def __call__(self) -> None:
        header = self._folder.header
        footer = Footer(
            spec=self._folder.spec_name,
            epoch=header.epoch,
            slot=self._slot,
            key=self._name,
            parent=self._parent,
            written=self._written,
            length=len(self._view),
            checksum=checksum(self._name, self._view),
        )
        try:
            self._folder.slots.write_slot(self._slot, self._view, footer.pack())
            self.done = True
        except OSError as error:
            self.error = str(error)


class _WriteCall:
    """The keys of a call, and their statuses."""

    def __init__(
        self, keys: Keys, names: list[bytes], views: list[memoryview], parent: Keys | None
    ) -> None:
        self.keys, self.names, self.views = keys, names, views
        self.statuses: list[WriteStatus | None] = [None] * len(names)
        self.rest = len(names)
        """How many positions have no status."""
        self.reason = ""
        self.late = False
        self.before = check_parent(parent) or NO_PARENT
        self.chain, self.start = keys, 0
        if parent is not None:
            self.chain, self.start = np.concatenate([parent, keys]), 1

    def set(
        self, status: WriteStatus, positions: Sequence[int] | None = None, reason: str = ""
    ) -> None:
        """Set the status of these positions, None: of all, where there is none yet."""
        for at in range(len(self.statuses)) if positions is None else positions:
            if self.statuses[at] is None:
                self.statuses[at] = status
                self.rest -= 1
                self.reason = self.reason or reason

    @property
    def done(self) -> bool:
        """True if any page is stored."""
        return STORED in self.statuses or PRESENT in self.statuses


class Writer:
    """Reserves slots, fills and publishes them: all new pages of a turn or none."""

    def __init__(self, folder: Folder, executor: Executor, health: CircuitBreaker) -> None:
        """Writes nothing yet.

        Args:
            health: opens at the first error, since a full or read-only disk stays so for a while.
                Reads continue. A write is its probe.
        """
        self._folder, self._executor, self.health = folder, executor, health

    def write(
        self,
        keys: Keys,
        names: list[bytes],
        views: list[memoryview],
        parent: Keys | None,
        deadline: Deadline,
    ) -> tuple[WriteResult, bool]:
        """See `Storage.write`. Also returns whether the time was up."""
        call, probing = _WriteCall(keys, names, views, parent), False
        try:
            while call.rest:
                shut = self.health.shut
                if shut:
                    tried = probing and self.health.state == "half-open"
                    probing = tried or self.health.probe()
                if deadline.passed:
                    call.set(FAILED, reason=deadline.reason)
                    call.late = True
                elif shut and not probing:
                    call.set(REFUSED, reason=self.health.reason)
                elif wrong := self._folder.refresh():
                    call.set(REFUSED, reason=self._report_failure(wrong))
                else:
                    try:
                        self._write_new(call, deadline)
                    except Abandoned:  # cleared by another process: repeat in the new epoch
                        continue
                    except (ConfigError, Detached):
                        raise
                    except LightcacheError as error:  # pages of earlier turns stay stored
                        if not call.done:
                            raise
                        call.set(FAILED, reason=f"disk: {error}")
        finally:
            if probing:
                self.health.leave()  # a probe with nothing to write has no outcome
        return WriteResult(cast(Any, tuple(call.statuses)), call.reason), call.late

    def _report_failure(self, why: str) -> str:
        """Report a failed write to the breaker; returns the reason."""
        self.health.failure(why)
        return self.health.reason

    def _write_new(self, call: _WriteCall, deadline: Deadline) -> None:
        """Write the new pages, and wait for those that others are writing."""
        start = call.start
        index = self._folder.index
        with index.reserve(call.chain, start, timeout=deadline.left) as reservation:
            if reservation.all_new:
                self._fill_slots(call, range(len(call.names)), reservation, deadline)
                return
            call.set(PRESENT, (reservation.present - start).tolist())
            missing = (reservation.missing - start).tolist()
            if missing and not index.reap():  # dead processes may hold slots: then try again
                call.set(REFUSED, missing, f"refused: no slot could be had: {reservation.why}")
            busy = reservation.busy
            ours = (reservation.new - start).tolist()
            if ours:
                self._fill_slots(call, ours, reservation, deadline)
        if len(busy):
            with contextlib.suppress(WaitTimeout):  # the next turn reports that the time is up
                index.wait(np.ascontiguousarray(call.chain[busy]), timeout=deadline.left)

    def _fill_slots(
        self, call: _WriteCall, ours: Sequence[int], reservation: Reservation, deadline: Deadline
    ) -> None:
        now, work = time.time_ns(), []
        for at, slot in zip(ours, reservation.pages.tolist(), strict=True):
            parent = call.names[at - 1] if at else call.before
            name, view = call.names[at], call.views[at]
            work.append(_PageWrite(self._folder, slot, name, parent, view, now + at))
        self._executor.run(work, WRITE, deadline)
        error, done = "", True
        for page in work:
            error, done = error or page.error, done and page.done
        if error:
            call.set(FAILED, ours, self._report_failure(error))
        elif not done:
            call.set(FAILED, ours, deadline.reason)
            call.late = True
        else:
            reservation.publish()
            self.health.success()
            call.set(STORED, ours)


# ---- Reading pages from slots


@dataclass(frozen=True)
class Read:
    """The outcome of a read."""

    result: ReadResult
    bad: list[int]
    """Positions of pages that are corrupt or cannot be read: they must be dropped, or they could
    never be stored again."""
    late: bool


class _PageRead:
    """The read of one page."""

    def __init__(self, folder: Folder, name: bytes, slot: int, view: memoryview) -> None:
        self._folder, self._name, self._slot, self._view = folder, name, slot, view
        self.status: ReadStatus | None = None  # None: not begun in time
        self.why = ""
        self.unreadable = False

    def __call__(self) -> None:
        try:
            self.status, self.why = self._read()
        except OSError as error:
            self.status, self.why = ReadStatus.FAILED, f"disk: slot {self._slot}: {error}"
            self.unreadable = True

    def _read(self) -> tuple[ReadStatus, str]:
        footer = unpack(self._folder.slots.read_slot(self._slot, self._view))
        if footer is None:
            return ReadStatus.CORRUPT, f"corrupt: slot {self._slot} does not say what it holds"
        if footer.key != self._name or footer.checksum != checksum(self._name, self._view):
            return ReadStatus.CORRUPT, f"corrupt: the checksum of page {self._name.hex()} is wrong"
        return ReadStatus.OK, ""


def read_pages(
    folder: Folder,
    executor: Executor,
    keys: Keys,
    names: Sequence[bytes],
    slots: Sequence[int],
    views: Sequence[memoryview],
    deadline: Deadline,
) -> Read:
    """Read pages that are pinned; slot -1: the page is absent."""
    every = zip(names, slots, views, strict=True)
    work = [None if slot < 0 else _PageRead(folder, name, slot, view) for name, slot, view in every]
    executor.run([page for page in work if page is not None], READ, deadline)
    statuses, bad, reason, late = [], [], "", False
    for at, page in enumerate(work):
        status = ReadStatus.ABSENT if page is None else page.status
        why = "" if page is None else page.why
        if status is None:
            status, why, late = ReadStatus.FAILED, deadline.reason, True
        if status is ReadStatus.CORRUPT and not folder.index.peek(keys[at : at + 1]):
            status, why = ReadStatus.ABSENT, ""  # another thread deleted it while we read it
        if status is ReadStatus.CORRUPT or (page is not None and page.unreadable):
            bad.append(at)
        statuses.append(status)
        reason = reason or why
    return Read(ReadResult(tuple(statuses), reason), bad, late)


# ---- The storage


class DiskStorage(Owned):
    """Pages in slot files of a folder, which are made at full size when it is first opened. A slot
    holds a page and a footer that describes it. An index in shared memory maps keys to slots; if
    there is none, it is rebuilt from the footers. All processes that open the folder share both, 63
    at most.

    A lookup only reads the index, without a system call. A page is read or written in one system
    call, straight between the disk and the page's memory if the file system has direct I/O. When
    all slots are taken, the least recently used pages are evicted, from the ends of prefixes.

    Writes do not wait until the disk has them for good: if the machine stops, the last pages may be
    lost or damaged. Their checksums detect that when they are read.

    A page that was evicted, or written by a call that failed, stays in its slot until another page
    replaces it, so a rebuild may find it again, even if it was deleted. A rebuild never finds
    cleared pages.
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
        """Open a folder, or make one. Blocks: the disk space of a new folder is allocated, and
        rebuilding the index reads one block of each slot.

        Args:
            path: the folder; each spec has a folder of its own in it.
            capacity: bytes of disk, as a number or "1TiB"; None: unchanged. It can be changed while
                no process uses the folder; slots beyond a smaller capacity are dropped.
            threads: number of threads that read and write.
            files: number of files of a new folder, over which slots are spread.
            direct: bypass the page cache if possible.
            persistent: the index stays in shared memory after the last process has closed; else the
                next process rebuilds it.
            retry: seconds until a disk that failed to be written is tried again.
            timeout: seconds to wait for other processes that are opening the folder.

        Raises:
            ConfigError: an argument is out of range, or no capacity for a new folder.
            LayoutMismatch: the folder was made by another version.
            InUse: it is used with another capacity, by processes with another /dev/shm, or by 63
                processes.
            NoSpace: no room for the index in /dev/shm, 206 bytes a slot.
            StorageError: the folder cannot be made, or there is not enough room.
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
            self._executor = Executor(threads, "disk")
            self._executor.start()
        except RuntimeError as error:  # the system starts no more threads
            self._folder.close()
            raise StorageError(f"disk: {error}; give fewer threads=") from error
        self._writer = Writer(self._folder, self._executor, _health(f"disk {path}", retry, clock))
        super().__init__()

    @classmethod
    def open(cls, path: str, options: Mapping[str, str], spec: StorageSpec) -> DiskStorage:
        """Open with the options of a URL such as
        `disk:/mnt/nvme/cache?capacity=1TiB&threads=8&direct=no&index=keep`."""
        return cls(path, spec, **parse(path, options))

    @staticmethod
    def remove(path: str | Path, spec: StorageSpec) -> None:
        """Remove all pages of a spec, and its index. Does nothing if there are none.

        Raises:
            ConfigError: no path.
            InUse: a process uses it.
            StorageError: it cannot be removed.
        """
        remove_folder(_place(path, spec))

    # ---- properties

    @property
    def slots(self) -> int:
        """The number of pages that it can hold."""
        return self._index.pages

    @property
    def direct(self) -> bool:
        """True if transfers bypass the page cache."""
        return self._folder.slots.direct

    @property
    def rebuilt(self) -> Rebuilt | None:
        """The result of the rebuild, if this process made the index; None: it existed."""
        return self._folder.rebuilt

    @property
    def index_name(self) -> str:
        """The name of the index in shared memory, for `lightcache dump`."""
        return self._index.name

    @property
    def write_trouble(self) -> str:
        """Why writes are refused at present; empty: they are not."""
        return self._writer.health.reason

    # ---- calls

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`. Takes no lock, and 5 ns a key if the index is in the processor's
        cache."""
        if not (type(timeout) is float and timeout > 0.0):
            self._in_time("contains", Deadline(timeout))
        try:
            count = self._index.peek(keys)
            if not count and len(keys) and self._folder.renewed():
                count = self._index.peek(keys)
        except Detached as error:
            raise self._gone(error) from error
        return count

    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """See `Storage.read`. A page that the disk cannot read is FAILED, and dropped like a
        corrupt one; otherwise it could never be stored again."""
        names, views = check_batch(keys, buffers, self.spec.page_bytes, writable=True)
        deadline = Deadline(timeout)
        with self._call() as executor:
            self._folder.renewed()
            # Each key by itself, to find pages after absent ones too.
            held = self._index.match_many(keys, np.arange(len(keys) + 1))
            try:
                slots = np.full(len(keys), -1, np.int32)
                slots[held.counts > 0] = held.pages
                found = read_pages(
                    self._folder, executor, keys, names, slots.tolist(), views, deadline
                )
            finally:
                held.release()
            if found.bad:
                with contextlib.suppress(LightcacheError):  # the next read tries again
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
            removed = self._index.stats().ready
            self._index.clear()
        return self._counters.deleted(removed)

    def stats(self) -> StorageStats:
        """See `Storage.stats`. Pages are those of all processes."""
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

    # ---- closing

    def _gone(self, error: Detached) -> LightcacheError:
        """The error to raise when the index says that we are not attached."""
        try:
            self._calls.check()
        except Detached as ours:
            return ours
        return StorageError(f"disk: its index was removed ({error}); close it, and open it again")

    @contextlib.contextmanager
    def _call(self) -> Iterator[Executor]:
        """Wrap every use of the folder: it is not closed meanwhile."""
        with self._calls.one():
            try:
                yield self._executor
            except (ConfigError, StorageError):
                raise
            except Detached as error:
                raise self._gone(error) from error
            except LightcacheError as error:
                raise StorageError(f"disk: {error}") from error

    def _release(self) -> None:
        self._executor.close(CLOSING)
        self._folder.close()


def _health(what: str, retry: float, clock: Clock) -> CircuitBreaker:
    """A circuit breaker for writes to a disk."""

    def text(errors: int, why: str) -> str:
        return (
            f"{what}: {why}; it is tried every {retry:g} s, and written to again when that "
            "succeeds; its pages are still read"
        )

    return CircuitBreaker(1, retry, clock, text=text, works=f"{what} is written to again", log=log)


def stored(path: str | Path, spec: StorageSpec) -> Keys:
    """The keys of all pages of a spec that a folder has, as far as they are on the disk: see
    `lightcache.storage.disk.folder.stored_keys`. The folder may be in use.

    Raises:
        ConfigError: no path, or no folder. Otherwise as there.
    """
    place = _place(path, spec)
    if not Path(path).is_dir():
        raise ConfigError(f"disk: expected a folder, found {str(path)!r}, which is none")
    return stored_keys(place, spec)


def _place(path: str | Path, spec: StorageSpec) -> Path:
    """The folder of a spec."""
    check_spec(spec)
    found: Any = path
    if not isinstance(found, (str, Path)) or str(path) == "" or "\0" in str(path):
        raise ConfigError(f"path: expected a folder, as in '/mnt/nvme/cache', found {path!r}")
    return Path(path) / f"lightcache-{spec.name}"


__all__ = ["OPTIONS", "DiskStorage", "Dropped", "drop", "parse", "stored"]
