"""Slot files of fixed size, their header, and the footers of their slots."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import xxhash

from lightcache.errors import LayoutMismatch, StorageError
from lightcache.page_index import MAX_PAGES
from lightcache.storage.protocol import StorageSpec

# ---- The footer after each page
#
# A slot is a page and a block with its footer, written to the disk in one write. If the machine
# stops in between, the page and the footer may be from different writes. The checksum, which
# covers the key as well, detects that when the page is read.

BLOCK = 4096
"""Unit of direct I/O: offsets, lengths and addresses are multiples of it."""
_MAGIC = b"LCSLOT01"
_FIELDS = struct.Struct("<8s8sQQ16s16sQQQ")
_OWN = struct.Struct("<Q")
NO_PARENT = bytes(16)


@dataclass(frozen=True)
class Footer:
    """The description of a slot's contents."""

    spec: bytes
    """8 bytes: `StorageSpec.name`. A page of another model or size is ignored."""
    epoch: int
    """The folder's epoch; pages of earlier epochs were cleared."""
    slot: int
    key: bytes
    parent: bytes
    """The key of the page before, or NO_PARENT: for the order of eviction."""
    written: int
    """Time of the write in ns: after a rebuild, the page written last is evicted last."""
    length: int
    checksum: int
    """Of key and page, see `lightcache.storage.common.checksum`."""

    def pack(self) -> bytes:
        """Its BLOCK bytes on the disk."""
        fields = (_MAGIC, self.spec, self.epoch, self.slot, self.key, self.parent)
        head = _FIELDS.pack(*fields, self.written, self.length, self.checksum)
        return (head + _OWN.pack(xxhash.xxh3_64_intdigest(head))).ljust(BLOCK, b"\0")


def unpack(block: bytes | memoryview) -> Footer | None:
    """The footer in a block; None: there is none, or it is damaged."""
    head = bytes(block[: _FIELDS.size])
    own = bytes(block[_FIELDS.size : _FIELDS.size + _OWN.size])
    if len(own) < _OWN.size or head[: len(_MAGIC)] != _MAGIC:
        return None
    if _OWN.unpack(own)[0] != xxhash.xxh3_64_intdigest(head):
        return None
    _, spec, epoch, slot, key, parent, written, length, checksum = _FIELDS.unpack(head)
    return Footer(spec, epoch, slot, key, parent, written, length, checksum)


# ---- The header of a folder of slot files

VERSION = 1
NAME = "header.json"
MAX_FILES = 1000


@dataclass(frozen=True)
class Header:
    """The state shared by all processes that use a folder. Written under the folder's lock, whole
    or not at all."""

    version: int
    uuid: str
    """Identifies the folder for good; the index in shared memory names it."""
    page_bytes: int
    fingerprint: str
    algorithm: str
    files: int
    slots: int
    epoch: int
    """Clearing begins a new epoch; slots of earlier epochs count as empty. The first epoch is
    random: if a header is lost, the next one ignores all old slots, cleared ones included."""
    index: int = 0
    """Number of indexes begun. The index in shared memory has its number; an older index does not
    know later pages."""
    rebuilt: int = 0
    """The number of the last index that knows all slots."""

    @property
    def spec(self) -> StorageSpec:
        """The spec of its pages."""
        return StorageSpec(self.page_bytes, self.fingerprint, self.algorithm)

    @property
    def possible(self) -> bool:
        """True if its numbers are in range."""
        counted = 0 <= self.epoch < 1 << 63 and 0 <= self.rebuilt <= self.index < 1 << 63
        sized = 1 <= self.files <= MAX_FILES and 1 <= self.slots <= MAX_PAGES
        return counted and sized and self.page_bytes > 0


def new_header(spec: StorageSpec, files: int, slots: int) -> Header:
    """The header of a new folder."""
    uuid, epoch = secrets.token_hex(8), secrets.randbits(62)
    whose = (spec.page_bytes, spec.fingerprint, spec.algorithm)
    return Header(VERSION, uuid, *whose, files, slots, epoch)


def read_header(folder: Path) -> Header | None:
    """Read the header; None: there is none.

    Raises:
        StorageError: it cannot be read, or is damaged.
        LayoutMismatch: it is of another version.
    """
    try:
        text = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"disk: {error}") from error
    try:
        values = json.loads(text)
        check = values.pop("check", None)  # older releases wrote none
        if check not in (None, _check(values)):
            raise ValueError("some of it was changed")
        version = values["version"]
        if type(version) is int and version == VERSION:
            kinds = {each.name: {"int": int, "str": str}[str(each.type)] for each in fields(Header)}
            known = {name: type(value) for name, value in values.items()} == kinds
            if known and (header := Header(**values)).possible:
                return header
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        version = None
    if type(version) is int and version != VERSION:
        raise LayoutMismatch(
            f"disk: {folder} was made by another version of lightcache: expected {VERSION}, found "
            f"{version}; remove the folder, or give another"
        )
    raise StorageError(
        f"disk: {folder / NAME} is damaged; remove the folder (what it holds is only a cache)"
    )


def _check(found: dict[str, object]) -> str:
    """A digest of a header, which detects damage."""
    text = json.dumps(found, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def signature(folder: Path) -> tuple[int, int, int]:
    """Identifies the header's file: it changes when the header is replaced.

    Raises:
        OSError: there is no such file.
    """
    status = os.stat(folder / NAME)
    return status.st_dev, status.st_ino, status.st_mtime_ns


def write_header(folder: Path, header: Header) -> None:
    """Replace the header, and wait until the disk has it.

    Raises:
        OSError: it could not be replaced; the old one stays.
    """
    fresh = folder / (NAME + ".new")
    with open(fresh, "w", encoding="utf-8") as file:
        values = asdict(header)
        json.dump({**values, "check": _check(values)}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, folder / NAME)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- Slot files: allocated at full size when they are made

_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class SlotFiles:
    """The files of one folder. Slot i is number i // files of file i % files: neighbours are in
    different files, which have different locks in the kernel.

    With direct I/O, bytes move between the disk and the caller's memory without a copy, bypassing
    the page cache. It requires addresses and lengths that are multiples of a block. Other transfers
    go through the page cache, and the kernel is told to drop those pages, as the pool is the cache.
    Only with `direct=False` do pages stay in the page cache.
    """

    def __init__(self, folder: Path, files: int, page_bytes: int, *, direct: bool) -> None:
        """Opens them.

        Args:
            direct: use direct I/O if the file system has it.

        Raises:
            StorageError: a file is missing or cannot be opened.
        """
        self.page_bytes = page_bytes
        self.slot_bytes = slot_bytes(page_bytes)
        self._plain: list[int] = []
        self._direct: list[int] = []
        self._passing = direct  # drop from the page cache what went through it
        try:
            for number in range(files):
                self._plain.append(os.open(file_of(folder, number), os.O_RDWR | os.O_CLOEXEC))
            if direct and page_bytes % BLOCK == 0:
                self._open_direct(folder, files)
        except OSError as error:
            self.close()
            raise StorageError(f"disk: {error}; was the folder removed?") from error
        self._scratch = threading.local()

    def _open_direct(self, folder: Path, files: int) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
        try:
            for number in range(files):
                self._direct.append(os.open(file_of(folder, number), flags))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._close(self._direct)

    @property
    def direct(self) -> bool:
        """True if direct I/O is in use."""
        return bool(self._direct)

    def read_slot(self, slot: int, page: memoryview) -> memoryview:
        """Read a page; returns the footer block, valid until this thread's next call. Blocks.

        Raises:
            OSError: it could not be read.
        """
        block = self._block()
        self._transfer_slot(os.preadv, slot, page, block)
        return block[-BLOCK:]

    def write_slot(self, slot: int, page: memoryview, footer: bytes) -> None:
        """Write a page and its footer. Blocks, but does not wait for the disk's own cache.

        Raises:
            OSError: it could not be written.
        """
        block = self._block()
        block[-BLOCK:] = footer
        self._transfer_slot(os.pwritev, slot, page, block)

    def _transfer_slot(
        self,
        call: Callable[[int, list[memoryview], int], int],
        slot: int,
        page: memoryview,
        block: memoryview,
    ) -> None:
        """Read or write a whole slot in one call of the system."""
        number, place = slot % len(self._plain), slot // len(self._plain) * self.slot_bytes
        direct = self._direct and _aligned(page)
        file = self._direct[number] if direct else self._plain[number]
        moved = call(file, [page, block], place)
        if self._passing and not direct:
            os.posix_fadvise(file, place, self.slot_bytes, os.POSIX_FADV_DONTNEED)
        if moved != self.slot_bytes:
            verb = "read" if call is os.preadv else "written"
            raise OSError(errno.EIO, f"{moved} of {self.slot_bytes} bytes were {verb}")

    def read_footer(self, slot: int) -> bytes:
        """A slot's last block; empty: the file ends before it.

        Raises:
            OSError: it could not be read.
        """
        block = self._block()[-BLOCK:]
        got = os.preadv(self._file(slot, block), [block], self._end(slot) - BLOCK)
        return bytes(block[:got])

    def erase(self, slot: int) -> None:
        """Overwrite a slot's footer, which empties the slot for a rebuild.

        Raises:
            OSError: it could not be written.
        """
        block = self._block()[-BLOCK:]
        block[:] = bytes(BLOCK)
        os.pwritev(self._file(slot, block), [block], self._end(slot) - BLOCK)

    def _end(self, slot: int) -> int:
        return (slot // len(self._plain) + 1) * self.slot_bytes

    def _file(self, slot: int, memory: memoryview) -> int:
        files = self._direct if self._direct and _aligned(memory) else self._plain
        return files[slot % len(files)]

    def _block(self) -> memoryview:
        """This thread's buffer, aligned for direct I/O: the padding of a page's last block, and one
        block for the footer."""
        block: memoryview | None = getattr(self._scratch, "block", None)
        if block is None:
            block = memoryview(mmap.mmap(-1, self.slot_bytes - self.page_bytes))
            self._scratch.block = block
        return block

    def close(self) -> None:
        """Close them; calls in flight end with an error."""
        self._close(self._direct)
        self._close(self._plain)

    def _close(self, files: list[int]) -> None:
        while files:
            os.close(files.pop())


def slot_bytes(page_bytes: int) -> int:
    """The bytes of a slot: a page padded to whole blocks, and its footer."""
    return -(-page_bytes // BLOCK) * BLOCK + BLOCK


def file_of(folder: Path, number: int) -> Path:
    """The path of a slot file."""
    return folder / f"slots-{number:03}"


def file_bytes(number: int, files: int, slots: int, page_bytes: int) -> int:
    """The bytes of slot file `number`, if `slots` slots are spread over `files` files."""
    return (slots + files - 1 - number) // files * slot_bytes(page_bytes)


def whole(folder: Path, files: int, slots: int, page_bytes: int) -> bool:
    """True if all slot files exist and are at least as long as they should be.

    Raises:
        OSError: they cannot be inspected.
    """
    for number in range(files):
        path = file_of(folder, number)
        wanted = file_bytes(number, files, slots, page_bytes)
        if not path.exists() or path.stat().st_size < wanted:
            return False
    return True


def make_files(folder: Path, files: int, slots: int, page_bytes: int) -> None:
    """Make slot files, or resize them. All blocks are allocated, so that writing a slot never finds
    the disk full.

    Raises:
        OSError: no room; added space is given back.
    """
    before: list[tuple[Path, int | None]] = []
    try:
        for number in range(files):
            path = file_of(folder, number)
            before.append((path, path.stat().st_size if path.exists() else None))
            _make_file(path, file_bytes(number, files, slots, page_bytes))
    except OSError:
        for path, size in before:
            with contextlib.suppress(OSError):
                if size is None:
                    path.unlink()
                elif path.stat().st_size > size:
                    os.truncate(path, size)
        raise


def _make_file(path: Path, nbytes: int) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(handle).st_size
        if nbytes > size:
            try:
                os.posix_fallocate(handle, 0, nbytes)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                os.ftruncate(handle, nbytes)  # no allocation in advance: a full disk shows later
        elif nbytes < size:
            os.ftruncate(handle, nbytes)
    finally:
        os.close(handle)


def _aligned(memory: memoryview) -> bool:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address % BLOCK == 0


__all__ = [
    "BLOCK",
    "NAME",
    "NO_PARENT",
    "Footer",
    "Header",
    "SlotFiles",
    "file_bytes",
    "file_of",
    "make_files",
    "new_header",
    "read_header",
    "signature",
    "slot_bytes",
    "unpack",
    "whole",
    "write_header",
]
