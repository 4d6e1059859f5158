"""Pages kept in the memory of this process: for tests, and as the example of a backend."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightcache import _arguments
from lightcache._arguments import parse_size
from lightcache.errors import ConfigError, StorageError
from lightcache.storage.common import (
    Counters,
    Deadline,
    Options,
    Owned,
    check_batch,
    check_keys,
    check_parent,
    checksum,
)
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

_MOST = 1 << 40


@dataclass(frozen=True)
class _Page:
    data: bytes
    checksum: int


class MemoryStorage(Owned):
    """A bounded dict of pages that evicts the least recently used. It ends with the process, and no
    other process sees it.

    The lock is held for lookups, but never while copying a page or computing its checksum. A batch
    is marked as used from its last key to its first, so that the end of a prefix is evicted first.
    """

    def __init__(
        self,
        spec: StorageSpec,
        *,
        pages: int | None = None,
        capacity: int | str | None = None,
    ) -> None:
        """Empty.

        Args:
            pages: maximum number of pages; or
            capacity: maximum bytes of pages, as a number or "1GiB"; neither: no bound.

        Raises:
            ConfigError: both bounds, a bad one, or one without room for a page.
        """
        if pages is not None and capacity is not None:
            raise ConfigError("give the bound of the memory once: pages= or capacity=")
        if capacity is not None:
            room = parse_size(capacity, "capacity")
            pages = room // spec.page_bytes
            if not pages:
                raise ConfigError(
                    f"memory: capacity: expected {spec.page_bytes} bytes or more, those of a page, "
                    f"found {room}"
                )
        super().__init__()
        self.spec = spec
        self.capacity = _MOST if pages is None else _arguments.count(pages, "pages", 0, _MOST)
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()  # least recently used first
        self._counters = Counters()

    @classmethod
    def open(cls, options: Mapping[str, str], spec: StorageSpec) -> MemoryStorage:
        """Open with the options of a URL: `memory:?capacity=1GiB`, `memory:?pages=1000`.

        Raises:
            ConfigError: an unknown option, a bad value, or both bounds.
        """
        given = Options("memory", options, ("capacity", "pages"))
        return cls(
            spec,
            pages=given.count("pages", 0, 0, _MOST) if "pages" in given else None,
            capacity=given.size("capacity"),
        )

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`."""
        names = check_keys(keys)
        with self._call("contains", timeout), self._lock:
            count = next((i for i, name in enumerate(names) if name not in self._pages), len(names))
            self._touch(names[:count])
        return count

    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """See `Storage.read`."""
        names, views = check_batch(keys, buffers, self.spec.page_bytes, writable=True)
        deadline = Deadline(timeout)
        statuses: list[ReadStatus] = []
        reason = ""
        with self._calls.one():
            with self._lock:
                pages = [self._pages.get(name) for name in names]
                self._touch([name for name in names if name in self._pages])
            for name, view, page in zip(names, views, pages, strict=True):
                status, why = self._read_one(name, view, page, deadline)
                statuses.append(status)
                reason = reason or why
        late = ReadStatus.FAILED in statuses
        return self._counters.read(ReadResult(tuple(statuses), reason), timed_out=late)

    def _read_one(
        self, name: bytes, view: memoryview, page: _Page | None, deadline: Deadline
    ) -> tuple[ReadStatus, str]:
        if deadline.passed:
            return ReadStatus.FAILED, deadline.reason
        if page is None:
            return ReadStatus.ABSENT, ""
        if len(page.data) == len(view):
            view[:] = page.data
            if checksum(name, view) == page.checksum:
                return ReadStatus.OK, ""
        with self._lock:
            if self._pages.get(name) is page:
                del self._pages[name]
        return ReadStatus.CORRUPT, f"corrupt: the checksum of page {name.hex()} is wrong"

    def write(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        timeout: float,
        parent: Keys | None = None,
    ) -> WriteResult:
        """See `Storage.write`."""
        check_parent(parent)  # otherwise unused: eviction is by last use
        names, views = check_batch(keys, buffers, self.spec.page_bytes, writable=False)
        deadline = Deadline(timeout)
        batch = set(names)
        statuses: list[WriteStatus] = []
        reason = ""
        with self._calls.one():
            for name, view in zip(names, views, strict=True):
                if deadline.passed:
                    statuses.append(WriteStatus.FAILED)
                    reason = reason or deadline.reason
                    continue
                statuses.append(self._write_one(name, view, batch))
                if statuses[-1] is WriteStatus.REFUSED:
                    reason = reason or f"refused: {self.capacity} pages are the most it may have"
            with self._lock:
                self._touch([name for name in names if name in self._pages])
        late = WriteStatus.FAILED in statuses
        return self._counters.write(WriteResult(tuple(statuses), reason), timed_out=late)

    def _write_one(self, name: bytes, view: memoryview, batch: set[bytes]) -> WriteStatus:
        with self._lock:
            if name in self._pages:
                return WriteStatus.PRESENT
        data = bytes(view)
        page = _Page(data, checksum(name, data))
        with self._lock:
            if name in self._pages:  # another thread was faster
                return WriteStatus.PRESENT
            while len(self._pages) >= self.capacity:
                # A batch never evicts its own beginning, without which the rest is not found.
                victim = next((each for each in self._pages if each not in batch), None)
                if victim is None:
                    return WriteStatus.REFUSED
                del self._pages[victim]
                self._counters.evicted()
            self._pages[name] = page
        return WriteStatus.STORED

    def delete(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.delete`."""
        names = check_keys(keys)
        with self._call("delete", timeout), self._lock:
            removed = sum(self._pages.pop(name, None) is not None for name in names)
        return self._counters.deleted(removed)

    def clear(self, *, timeout: float) -> int:
        """See `Storage.clear`."""
        with self._call("clear", timeout), self._lock:
            removed = len(self._pages)
            self._pages.clear()
        return self._counters.deleted(removed)

    def stats(self) -> StorageStats:
        """See `Storage.stats`."""
        pages = len(self._pages)
        return self._counters.snapshot(pages, pages * self.spec.page_bytes)

    def _release(self) -> None:
        with self._lock:
            self._pages.clear()

    def damage(self, key: Keys, *, length: int | None = None) -> None:
        """For tests: change the first byte of a stored page, and cut it to `length` bytes.

        Args:
            key: one key, of shape (2,) or (1, 2).

        Raises:
            StorageError: the page is not stored.
        """
        (name,) = check_keys(key.reshape(1, 2))
        with self._lock:
            page = self._pages.get(name)
            if page is None:
                raise StorageError(f"damage: there is no page {name.hex()}; store it first")
            data = bytearray(page.data)
            data[0] ^= 1
            self._pages[name] = _Page(bytes(data[:length]), page.checksum)

    def _touch(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self._pages.move_to_end(name)

    @contextlib.contextmanager
    def _call(self, what: str, timeout: float) -> Iterator[None]:
        """Wrap a call that does all or nothing.

        Raises:
            StorageError: it has no time.
        """
        deadline = Deadline(timeout)
        with self._calls.one():
            if deadline.passed:
                self._counters.timed_out()
                raise StorageError(f"{what}: {deadline.reason}; give it more time")
            yield


__all__ = ["MemoryStorage"]
