"""A folder of slot files, and the index of it that processes share.

A process locks byte 0 of the folder's lock file while it opens or changes the folder. All processes
that use the folder share a lock on byte 1; a process that finds byte 1 free may make a new index.
File locks end with their holder and work across containers; the index in shared memory may not. So
two groups of processes that do not share /dev/shm cannot use one folder at the same time.

The index is named after the folder's device and inode, so a copy of a folder has an index of its
own. A process that uses the folder holds it open, so its inode is not reused meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lightcache._arguments import Keys, Pages
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    InUse,
    LayoutMismatch,
    LockTimeout,
    NotReady,
    StorageError,
)
from lightcache.namespaces import NamespaceState
from lightcache.page_index import MAX_PAGES, PageIndex
from lightcache.shm import Segment, ofd
from lightcache.storage.common import log
from lightcache.storage.disk.slots import (
    NAME,
    NO_PARENT,
    Footer,
    Header,
    SlotFiles,
    make_files,
    new_header,
    read_header,
    signature,
    slot_bytes,
    unpack,
    whole,
    write_header,
)
from lightcache.storage.protocol import StorageSpec

# ---- Making a folder's files, or resizing them


@dataclass(frozen=True)
class Wanted:
    """The size of a folder that the opening process requests."""

    capacity: int | None
    """Bytes; None: unchanged."""
    files: int
    """Number of files of a new folder."""

    def slots(self, page_bytes: int, files: int) -> int | None:
        """The number of slots, at least one for each file; None: unchanged.

        Raises:
            ConfigError: no room for a slot, or more slots than an index can have.
        """
        if self.capacity is None:
            return None
        each = slot_bytes(page_bytes)
        count = self.capacity // each
        if not 1 <= count <= MAX_PAGES:
            raise ConfigError(
                f"capacity: expected room for 1 to {MAX_PAGES} slots of {each} bytes, found "
                f"{self.capacity}"
            )
        return max(count, files)


def first_slots(path: Path, spec: StorageSpec, wanted: Wanted) -> int:
    """The number of slots of a new folder.

    Raises:
        ConfigError: no capacity, or an impossible one.
    """
    slots = wanted.slots(spec.page_bytes, 1)
    if slots is None:
        raise ConfigError(
            f"capacity: {path} is new, and has to know how large it may become; give capacity="
        )
    return slots


def prepared(path: Path, spec: StorageSpec, wanted: Wanted, alone: bool) -> Header:
    """Make the folder's files or resize them; returns the header that they match. The caller holds
    the folder's lock.

    Args:
        alone: no other process uses the folder.

    Raises:
        ConfigError: no capacity for a new folder, or an impossible one.
        LayoutMismatch: the folder is of another version, or has other pages.
        InUse: it would have to be resized while others use it.
        StorageError: no room, or the folder is damaged.
    """
    header = read_header(path)
    if header is None:
        slots = first_slots(path, spec, wanted)
        return _sized(path, new_header(spec, min(wanted.files, slots), slots))
    if header.spec != spec:
        raise LayoutMismatch(
            f"disk: {path} holds pages of {header.spec}, expected {spec}; give another folder"
        )
    slots = wanted.slots(spec.page_bytes, header.files) or header.slots
    if not alone:
        if slots == header.slots:
            return header
        raise InUse(
            f"disk: {path} has {header.slots} slots, expected {slots}; it can be changed when "
            "no process uses it: give the capacity that others have, or none"
        )
    if slots == header.slots and _whole(path, header):
        return header
    return _sized(path, replace(header, slots=slots))


def _whole(path: Path, header: Header) -> bool:
    try:
        good = whole(path, header.files, header.slots, header.page_bytes)
    except OSError as error:
        raise StorageError(f"disk: {error}") from error
    if not good:
        log.warning("disk: %s: slot files are missing or cut short, and are made again", path)
    return good


def _sized(path: Path, header: Header) -> Header:
    """Make the files fit the header, which is written after them: if we die in between, the files
    only have the wrong size, and the next process resizes them. Earlier indexes become invalid."""
    header = replace(header, rebuilt=0)
    try:
        make_files(path, header.files, header.slots, header.page_bytes)
        write_header(path, header)
    except OSError as error:
        needed = header.slots * slot_bytes(header.page_bytes)
        raise StorageError(
            f"disk: {header.slots} slots, {needed} bytes in all, do not fit in {path}: {error}; "
            "give a smaller capacity= or make room"
        ) from error
    return header


# ---- Rebuilding the index from the slots' footers

_THREADS = 16  # a footer is one small read, and a disk needs many at a time
_PART = 64  # slots that a thread reads at a time, as handing them over takes about 30 us


@dataclass(frozen=True)
class Rebuilt:
    """The result of a rebuild, in slots."""

    slots: int
    pages: int
    """Slots with a page that the index knows now."""
    dropped: int
    """Slots with a footer that is damaged, of another slot, or of a page that is in another slot
    too. Slots never written are not counted."""
    unreadable: int
    seconds: float


def rebuild(index: PageIndex, slots: SlotFiles, header: Header) -> Rebuilt:
    """Fill a fresh index with the slots of the header's epoch, in the order they were written.
    Pages are not read: a page's checksum is verified when it is read later."""
    begin = time.monotonic()
    spec, length = bytes.fromhex(header.spec.name), header.page_bytes
    held = index.allocate(index.pages)
    numbers = held.detach()  # a fresh index gives all, in order
    newest: dict[bytes, Footer] = {}
    dropped = unreadable = 0
    for slot, block in _footers(slots, index.pages):
        footer = None if block is None else unpack(block)
        unreadable += block is None
        if footer is None:
            dropped += block is not None and any(block)
            continue
        if (footer.spec, footer.slot, footer.length) != (spec, slot, length):
            dropped += 1
        elif footer.epoch == header.epoch:
            other = newest.get(footer.key)
            dropped += other is not None
            if other is None or other.written < footer.written:
                newest[footer.key] = footer
    _name(index, sorted(newest.values(), key=lambda each: each.written))
    empty = np.ones(len(numbers), bool)
    empty[[footer.slot for footer in newest.values()]] = False
    index.free(np.ascontiguousarray(numbers[empty][::-1]))  # the page freed last is used first
    seconds = time.monotonic() - begin
    return Rebuilt(index.pages, len(newest), dropped, unreadable, seconds)


def stored_keys(path: Path, spec: StorageSpec) -> Keys:
    """The keys of the pages in a folder's slots, shape (n, 2), for tools: no lock is taken and no
    index made. Reads a block of each slot. Empty: the folder has none of these pages.

    Args:
        path: the folder of this spec.

    Raises:
        StorageError: it cannot be read, or is damaged. LayoutMismatch: it is of another version.
    """
    header = read_header(path)
    if header is None:
        return np.empty((0, 2), np.uint64)
    slots = SlotFiles(path, header.files, header.page_bytes, direct=False)
    with contextlib.closing(slots):
        blocks = [block for _, block in _footers(slots, header.slots) if block]
    found = [footer for footer in map(unpack, blocks) if footer and footer.epoch == header.epoch]
    keys = b"".join(each.key for each in found if each.spec == bytes.fromhex(spec.name))
    return np.frombuffer(keys, "<u8").astype(np.uint64).reshape(-1, 2)


def _footers(slots: SlotFiles, count: int) -> Iterator[tuple[int, bytes | None]]:
    """The footer block of each slot, in order; None: it could not be read."""

    def read(first: int) -> list[bytes | None]:
        return [_footer(slots, slot) for slot in range(first, min(first + _PART, count))]

    with ThreadPoolExecutor(_THREADS) as pool:
        for turn in range(0, count, _PART * _THREADS):
            parts = range(turn, min(turn + _PART * _THREADS, count), _PART)
            for first, blocks in zip(parts, pool.map(read, parts), strict=True):
                yield from enumerate(blocks, first)


def _footer(slots: SlotFiles, slot: int) -> bytes | None:
    try:
        return slots.read_footer(slot)
    except OSError:
        return None


def _name(index: PageIndex, footers: list[Footer]) -> None:
    """Add the pages to the index, the oldest first: a page precedes its children, and counts as
    used before them."""
    known: set[bytes] = set()
    keys, offsets, starts = [], [0], []
    for footer in footers:
        before = footer.parent != NO_PARENT and footer.parent in known
        keys += [footer.parent, footer.key] if before else [footer.key]
        starts.append(int(before))
        offsets.append(len(keys))
        known.add(footer.key)
    if not footers:
        return
    pages: Pages = np.array([footer.slot for footer in footers], np.int32)
    every: Keys = np.frombuffer(b"".join(keys), "<u8").astype(np.uint64).reshape(-1, 2)
    index.name_many(pages, every, np.array(offsets, np.int64), np.array(starts, np.int64))
    index.unpin(pages)


# ---- The folder

LOCK = "lock"
_OPENING, _USING = 0, 1  # bytes of the lock file
_LEAVING = 2.0  # maximum seconds from the end of an index until its process unlocks the folder


@dataclass(frozen=True)
class How:
    """Options for opening a folder; see `DiskStorage`."""

    wanted: Wanted
    direct: bool
    persistent: bool
    timeout: float


class Folder:
    """An open folder: its header, slot files and index."""

    def __init__(self, path: Path, spec: StorageSpec, how: How) -> None:
        """`path` is the folder of this spec."""
        self.path = path
        self.spec_name = bytes.fromhex(spec.name)
        """The spec in every footer; a digest, computed once."""
        self.rebuilt: Rebuilt | None = None
        """The result of the rebuild, if this process made the index."""
        if not _has_header(path):
            first_slots(path, spec, how.wanted)  # check it before anything is made
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
                if not ofd.try_lock(self._lock, _USING, exclusive=False):  # shared from now on
                    raise InUse(f"disk: {path} is being taken by others; try again")
                self._seen = signature(path)
            stack.pop_all()

    @property
    def index_name(self) -> str:
        """The name of the index in shared memory."""
        return index_name(self._place)

    @contextlib.contextmanager
    def _changing(self, timeout: float) -> Iterator[None]:
        """Keep other processes from opening or changing the folder.

        Raises:
            StorageError: another process did so for all of the time.
        """
        try:
            with ofd.locked(self._lock, _OPENING, timeout=timeout):
                yield
        except LockTimeout as error:
            raise StorageError(
                f"disk: timed out: another process was opening or clearing {self.path} for "
                f"{timeout:g} s"
            ) from error

    # ---- the index

    def _attached(self, alone: bool, lifetime: str) -> PageIndex:
        """The existing index if it knows all pages on the disk, else a new one. A leaving process
        ends the index before it unlocks the folder; this waits for that."""
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
        with contextlib.suppress(LockTimeout):  # it is repeated when no slot is free
            index.reap()  # the process before this one may have been killed
        return index

    def _fresh(self, lifetime: str) -> PageIndex:
        """A new index. No process uses the folder, so an old index is unlinked, even if tools are
        attached to it."""
        Segment.unlink(self.index_name, force=True)
        self.header = replace(self.header, index=self.header.index + 1)
        self._keep(self.header)
        index = PageIndex.create(
            self.index_name,
            pages=self.header.slots,
            config=_config(self.header),
            lifetime=lifetime,
            eviction="lru",  # what goes on disk is written behind what a host has learned
            role="disk",
        )
        try:
            rebuilt = rebuild(index, self.slots, self.header)
            self.header = replace(self.header, rebuilt=self.header.index)
            self._keep(self.header)
        except BaseException:
            index.close()
            raise
        self.rebuilt = rebuilt
        if rebuilt.pages or rebuilt.dropped or rebuilt.unreadable:
            log.info(
                "disk: %s: %d of %d slots hold pages, %d were dropped, %d cannot be read; %.1f s",
                *(self.path, rebuilt.pages, rebuilt.slots, rebuilt.dropped, rebuilt.unreadable),
                rebuilt.seconds,
            )
        return index

    def _keep(self, header: Header) -> None:
        try:
            write_header(self.path, header)
        except OSError as error:
            raise StorageError(f"disk: {self.path} cannot be written to: {error}") from error

    # ---- use

    def begin_epoch(self, timeout: float) -> None:
        """Begin a new epoch: later rebuilds ignore the current contents of the slots.

        Raises:
            StorageError: the header could not be written, or another process held the lock for all
                of the time.
        """
        with self._changing(timeout):
            header = read_header(self.path)
            if header is None or header.uuid != self.header.uuid:
                raise StorageError(f"disk: {self.path} was removed, or is another one now")
            self.header = replace(header, epoch=header.epoch + 1)
            self._keep(self.header)

    def renewed(self) -> bool:
        """True if another process cleared the index; then switch to the pages written since. Takes
        about a microsecond if it was not cleared."""
        index = self.index
        if index.namespace_state() is NamespaceState.NORMAL:
            return False
        space = index.default_namespace
        index.use(index.namespace(space.weights, space.tenant))
        return True

    def refresh(self) -> str:
        """Check that the folder is still the one that we opened. Returns the problem, or an empty
        string. Takes a few microseconds, more if the header was replaced and is read again.

        A clearing process begins the epoch first and clears the index afterwards. So this looks at
        the index before the header: pages of the new index get the new epoch.
        """
        self.renewed()
        try:
            seen = signature(self.path)
            header = self.header if seen == self._seen else read_header(self.path)
        except (OSError, StorageError, LayoutMismatch) as error:
            return f"{self.path} was removed or unmounted ({error})"
        if header is None or header.uuid != self.header.uuid:
            return f"{self.path} is another one than was opened; close it, and open it again"
        self.header, self._seen = header, seen
        return ""

    def close(self) -> None:
        """Close. The index stays while a process is attached, or for good if persistent.

        The lock is released explicitly, as a forked child may have the descriptor too.
        """
        self.index.close()
        self.slots.close()
        ofd.unlock(self._lock, _USING)
        os.close(self._lock)
        os.close(self._place)


def index_name(place: int) -> str:
    """The name of the index of a folder, by its open descriptor."""
    status = os.fstat(place)
    return f"disk-{status.st_dev:x}-{status.st_ino:x}"


def _config(header: Header) -> dict[str, object]:
    return {"folder": header.uuid, "index": header.index}


def _has_header(path: Path) -> bool:
    try:
        return (path / NAME).exists()
    except OSError as error:  # such as a name too long
        raise StorageError(f"disk: {error}; give a folder that can be written to") from error


def remove_folder(path: Path) -> None:
    """Remove a folder, its files and its index, damaged or not.

    Raises:
        InUse: a process uses it.
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
    """Descriptors of the folder and its lock file, both made if missing."""
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


__all__ = [
    "Folder",
    "How",
    "Rebuilt",
    "Wanted",
    "first_slots",
    "index_name",
    "prepared",
    "rebuild",
    "remove_folder",
    "stored_keys",
]
