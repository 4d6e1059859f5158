"""Memory of the storage's own, through which pages pass on their way to the store and back.

The store's client gives up waiting for a transfer after a time of its own and leaves the transfer
running: its bytes may come after the call has returned. So it never learns of a caller's buffer.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError
from lightcache.storage.arguments import Deadline
from lightcache.storage.remote import trailer

_ALIGNED = 64  # bytes: a slot begins on a cache line of its own


class Staging:
    """Slots, each for a page with its trailer behind it. Any thread may take and give back."""

    def __init__(self, nbytes: int, page_bytes: int) -> None:
        """Maps the memory.

        Raises:
            ConfigError: it is too small for one page.
        """
        self.page_bytes = page_bytes
        self.value_bytes = page_bytes + trailer.BYTES
        self._stride = -(-self.value_bytes // _ALIGNED) * _ALIGNED
        self.slots = nbytes // self._stride
        if not self.slots:
            raise ConfigError(
                f"mooncake: buffer: expected {self._stride} bytes or more, a page and what stands "
                f"beside it, found {nbytes}"
            )
        self._memory = np.frombuffer(mmap.mmap(-1, self.slots * self._stride), np.uint8)
        self._changed = threading.Condition()
        self._free = list(range(self.slots))
        self._lost = 0

    @property
    def address(self) -> int:
        """Of the first byte."""
        return int(self._memory.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self._memory.nbytes

    @property
    def lost(self) -> int:
        """Slots into which the store may write at any time."""
        with self._changed:
            return self._lost

    def take(self, most: int, deadline: Deadline | None) -> list[int]:
        """Up to so many slots, at least one; none if none is free. With a deadline: waits."""
        with self._changed:
            if deadline is not None:
                left = min(deadline.left, threading.TIMEOUT_MAX)
                self._changed.wait_for(lambda: self._free or self._lost == self.slots, left)
            taken = self._free[-most:]  # those used last: they are in the processor's caches
            del self._free[-most:]
            return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Nobody touches them any more."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def lose(self, slots: Sequence[int]) -> None:
        """The store may still touch them, and nobody can say until when."""
        with self._changed:
            self._lost += len(slots)
            self._changed.notify_all()

    def addresses(self, slots: Iterable[int]) -> list[int]:
        """Where each begins."""
        return [self.address + slot * self._stride for slot in slots]

    def fill(self, slot: int, key: bytes, page: memoryview) -> None:
        """Copy a page in, and its trailer."""
        there = self._whole(slot)
        np.copyto(there[: self.page_bytes], np.frombuffer(page, np.uint8))
        there[self.page_bytes :] = np.frombuffer(trailer.make(key, page), np.uint8)

    def empty(self, slot: int, page: memoryview) -> bytes:
        """Copy a page out. Returns the trailer; what is judged by it is the copy, which nobody else
        can change."""
        there = self._whole(slot)
        np.copyto(np.frombuffer(page, np.uint8), there[: self.page_bytes])
        return there[self.page_bytes :].tobytes()

    def _whole(self, slot: int) -> npt.NDArray[np.uint8]:
        first = slot * self._stride
        return self._memory[first : first + self.value_bytes]


__all__ = ["Staging"]
