"""Slot files: as large as they will ever be from the first day, slots dealt out among them."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from lightcache.errors import StorageError
from lightcache.storage.disk.footers import BLOCK

_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class SlotFiles:
    """The files of one folder. Slot i is number i // files of file i % files: neighbours lie in
    different files, whose locks in the kernel are different ones.

    With direct I/O bytes go between the disk and the caller's memory, without a copy, and leave the
    page cache alone. It needs addresses and lengths that are multiples of a block; whatever is not
    goes through the page cache.
    """

    def __init__(self, folder: Path, files: int, page_bytes: int, *, direct: bool) -> None:
        """Opens them.

        Args:
            direct: try it; where the file system has none, do without.

        Raises:
            StorageError: one is missing, or cannot be opened.
        """
        self.page_bytes = page_bytes
        self.slot_bytes = slot_bytes(page_bytes)
        self._plain: list[int] = []
        self._direct: list[int] = []
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
        """Whether there is direct I/O here."""
        return bool(self._direct)

    def read(self, slot: int, page: memoryview) -> memoryview:
        """Fill a page; returns the footer's block, this thread's until its next call. Blocks.

        Raises:
            OSError: it could not be read.
        """
        block, where = self._block(), self._where(slot)
        got = os.preadv(self._file(slot, page), [page, block], where)
        return self._whole(got, block, "read")

    def write(self, slot: int, page: memoryview, footer: bytes) -> None:
        """Write a page and its footer. Blocks; what the disk's own cache has is not waited for.

        Raises:
            OSError: it could not be written.
        """
        block, where = self._block(), self._where(slot)
        block[-BLOCK:] = footer
        put = os.pwritev(self._file(slot, page), [page, block], where)
        self._whole(put, block, "written")

    def read_footer(self, slot: int) -> bytes:
        """A slot's last block.

        Raises:
            OSError: it could not be read.
        """
        where = self._where(slot) + self.slot_bytes - BLOCK
        return os.pread(self._plain[slot % len(self._plain)], BLOCK, where)

    def erase(self, slot: int) -> None:
        """Overwrite a slot's footer: it describes nothing.

        Raises:
            OSError: it could not be written.
        """
        where = self._where(slot) + self.slot_bytes - BLOCK
        os.pwrite(self._plain[slot % len(self._plain)], bytes(BLOCK), where)

    def _where(self, slot: int) -> int:
        return slot // len(self._plain) * self.slot_bytes

    def _file(self, slot: int, page: memoryview) -> int:
        files = self._direct if self._direct and _aligned(page) else self._plain
        return files[slot % len(files)]

    def _block(self) -> memoryview:
        """Of this thread, at an address that direct I/O takes, as long as a page needs to fill up
        its last block and one more."""
        found: memoryview | None = getattr(self._scratch, "block", None)
        if found is None:
            found = memoryview(mmap.mmap(-1, self.slot_bytes - self.page_bytes))
            self._scratch.block = found
        return found

    def _whole(self, moved: int, block: memoryview, verb: str) -> memoryview:
        if moved != self.slot_bytes:
            raise OSError(errno.EIO, f"{moved} of {self.slot_bytes} bytes were {verb}")
        return block[-BLOCK:]

    def close(self) -> None:
        """Close them; calls that go on end with an error."""
        self._close(self._direct)
        self._close(self._plain)

    def _close(self, files: list[int]) -> None:
        while files:
            os.close(files.pop())


def slot_bytes(page_bytes: int) -> int:
    """Of a page, filled up to whole blocks, and its footer."""
    return -(-page_bytes // BLOCK) * BLOCK + BLOCK


def file_of(folder: Path, number: int) -> Path:
    """Where a slot file stands."""
    return folder / f"slots-{number:03}"


def make_file(path: Path, nbytes: int) -> None:
    """Make a slot file, or let one grow or shrink: with all its blocks on the disk, so that writing
    a slot never finds the disk full.

    Raises:
        OSError: no room. A new file is removed again.
    """
    there = path.exists()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(handle).st_size
        if nbytes > size:
            try:
                os.posix_fallocate(handle, 0, nbytes)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                os.ftruncate(handle, nbytes)  # no blocks ahead here: a full disk shows later
        elif nbytes < size:
            os.ftruncate(handle, nbytes)
    except OSError:
        if not there:
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _aligned(page: memoryview) -> bool:
    address: int = np.frombuffer(page, np.uint8).ctypes.data
    return address % BLOCK == 0


__all__ = ["SlotFiles", "file_of", "make_file", "slot_bytes"]
