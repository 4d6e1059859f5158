"""The base of storages beyond one machine: a subclass only moves values by name."""

from __future__ import annotations

import contextlib
import struct
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from lightcache.errors import ConfigError, Detached, LightcacheError, StorageError
from lightcache.shm.waiting import Condition
from lightcache.storage.common import (
    Counters,
    Deadline,
    Owned,
    check_batch,
    check_keys,
    check_parent,
    checksum,
    timed_out,
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

# ---- Claims on keys being written: two threads of a process do not send one page twice

_LOOK = 0.5  # seconds between checks for claims whose call ended without `give_back`


class Owner:
    """A call. Its claims end when nothing refers to it any more, even if an interrupt came before
    `give_back`."""

    __slots__ = ("__weakref__",)


class Claims:
    """A key belongs to one call from `take` to `give_back`."""

    def __init__(self) -> None:
        """No key is claimed."""
        self._changed = Condition()
        self._taken: dict[bytes, weakref.ref[Owner]] = {}

    def take(self, names: Sequence[bytes], owner: Owner) -> list[bytes]:
        """Claim the keys that no other call writes; returns them, each once."""
        with self._changed:
            mine = [name for name in dict.fromkeys(names) if self._free(name)]
            self._taken.update(dict.fromkeys(mine, weakref.ref(owner)))
            return mine

    def give_back(self, owner: Owner) -> None:
        """End the owner's claims, whether its pages were written or not."""
        with self._changed:
            for name in [name for name, its in self._taken.items() if its() in (owner, None)]:
                del self._taken[name]
            self._changed.notify_all()

    def wait(self, names: Sequence[bytes], deadline: Deadline) -> bool:
        """Wait until no call writes any of them; False: not in time. A waiting call holds no
        claims, so calls cannot deadlock."""
        with self._changed:
            while not all(map(self._free, names)):
                if deadline.passed:
                    return False
                self._changed.wait(min(deadline.left, _LOOK))
            return True

    def _free(self, name: bytes) -> bool:
        its = self._taken.get(name)
        return its is None or its() is None


# ---- The trailer stored with a page, which verifies it: others can write to the store

MAGIC = b"lcp1"
_TRAILER = struct.Struct("<4sIQQ")  # magic, zero, bytes of the page, xxh3-64 of key and page
TRAILER_BYTES = _TRAILER.size


def make_trailer(key: bytes, page: memoryview | bytes) -> bytes:
    """The trailer of a page, 24 bytes."""
    return _TRAILER.pack(MAGIC, 0, len(page), checksum(key, page))


def judge_page(key: bytes, page: memoryview | bytes, trailer: bytes) -> tuple[ReadStatus, str]:
    """Verify a fetched page against its key and trailer: OK or CORRUPT, and why."""
    what = f"corrupt: page {key.hex()}"
    if len(trailer) != TRAILER_BYTES:
        return (
            ReadStatus.CORRUPT,
            f"{what} has a trailer of {len(trailer)} bytes, not {TRAILER_BYTES}",
        )
    magic, zero, length, expected = _TRAILER.unpack(trailer)
    if magic != MAGIC or zero:
        return ReadStatus.CORRUPT, f"{what} was stored by something else: {trailer[:8]!r}"
    if length != len(page):
        return ReadStatus.CORRUPT, f"{what} was stored with {length} bytes"
    if checksum(key, page) != expected:
        return ReadStatus.CORRUPT, f"{what} has another checksum than was stored with it"
    return ReadStatus.OK, ""


# ---- The base class

Read = tuple[ReadStatus, str]
"""The status of a key, and the reason if it is FAILED or CORRUPT."""
Wrote = tuple[WriteStatus, str]
"""The status of a key, and the reason if it is FAILED or REFUSED."""


class RemoteStorage(Owned):
    """Pages as values of a store that many machines share.

    A value's name consists of the spec's name and the key. A trailer (`make_trailer`) is stored
    with the page, and verifies every read. The store decides how long it keeps a value.

    The methods that a subclass implements take keys of 16 bytes, block no longer than `deadline`,
    and never touch the views after they have returned. Any exception becomes a StorageError.
    `_fetch` and `_put` raise only if no key has a status; otherwise keys without one are FAILED.

    Timeouts are counted by their text: the reason of a key that was not done in time begins with
    `Deadline.reason`.
    """

    scheme: str
    """The scheme of its URLs, for errors."""
    asking = 4096
    """Keys in one call of `_exists`; no call is made after the first absent key."""

    def __init__(self, spec: StorageSpec) -> None:
        """For subclasses. Connects to nothing: call it first, and set `scheme`."""
        super().__init__()
        self.spec = spec
        self._prefix = f"lightcache/{spec.name}/"  # computed once: the name is a digest
        self._counters = Counters()
        self._claims = Claims()

    # ---- for subclasses

    @abstractmethod
    def _exists(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """For each key, whether it is stored. Raises if it cannot tell for one of them."""

    @abstractmethod
    def _fetch(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Read]:
        """Fill the views, and verify each by its trailer (`judge_page`). A name may occur twice.
        The reason of a key that is FAILED because the time was up begins with `deadline.reason`."""

    @abstractmethod
    def _put(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Wrote]:
        """Store pages, each whole or not at all, with its trailer (`make_trailer`). The names are
        distinct and were absent a moment ago. PRESENT: another process was faster. The reason of a
        key that is FAILED because the time was up begins with `deadline.reason`."""

    @abstractmethod
    def _remove(self, names: Sequence[bytes], deadline: Deadline) -> int:
        """Remove values. Returns the number removed. Raises if some may still be stored."""

    @abstractmethod
    def _remove_all(self, deadline: Deadline) -> int:
        """Remove all values of this spec. Returns the number removed. Raises as `_remove`."""

    def object_name(self, name: bytes) -> str:
        """The name of a page in the store."""
        return self._prefix + name.hex()

    # ---- calls

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`."""
        names = check_keys(keys)
        with self._call("contains", Deadline(timeout)) as deadline:
            for first in range(0, len(names), self.asking):
                present = self._exists(names[first : first + self.asking], deadline)
                if not all(present):
                    return first + present.index(False)
        return len(names)

    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """See `Storage.read`."""
        names, views = check_batch(keys, buffers, self.spec.page_bytes, writable=True)
        deadline = Deadline(timeout)
        with self._call():
            try:
                found = self._fetch_in_time(names, views, deadline)
            except Exception:
                self._counters.failed("reads", len(names))
                raise
            corrupt = [
                name
                for name, (status, _) in zip(names, found, strict=True)
                if status is ReadStatus.CORRUPT
            ]
            if corrupt:
                with contextlib.suppress(Exception):  # the next read tries again
                    self._remove(corrupt, deadline)
        reason = next((why for _, why in found if why), "")
        late = any(timed_out(why) for _, why in found)
        result = ReadResult(tuple(status for status, _ in found), reason)
        return self._counters.read(result, timed_out=late)

    def write(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        timeout: float,
        parent: Keys | None = None,
    ) -> WriteResult:
        """See `Storage.write`."""
        check_parent(parent)  # otherwise unused: the store decides what to evict
        names, views = check_batch(keys, buffers, self.spec.page_bytes, writable=False)
        deadline = Deadline(timeout)
        with self._call():
            try:
                found = self._write_each(dict(zip(names, views, strict=True)), deadline)
            except Exception:
                self._counters.failed("writes", len(names))
                raise
        statuses: list[WriteStatus] = []
        for name in names:
            status, why = found[name]
            statuses.append(status)
            if status is WriteStatus.STORED:
                found[name] = WriteStatus.PRESENT, why  # for the same key again
        reason = next((found[name][1] for name in names if found[name][1]), "")
        late = any(timed_out(why) for _, why in found.values())
        return self._counters.write(WriteResult(tuple(statuses), reason), timed_out=late)

    def _fetch_in_time(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Read]:
        if deadline.passed:
            return [(ReadStatus.FAILED, deadline.reason)] * len(names)
        try:
            return self._fetch(names, views, deadline)
        except Exception as error:
            if deadline.left:
                raise
            return [(ReadStatus.FAILED, f"{deadline.reason}: {error}")] * len(names)

    def _write_each(self, views: dict[bytes, memoryview], deadline: Deadline) -> dict[bytes, Wrote]:
        results: dict[bytes, Wrote] = {}
        while len(results) < len(views):
            left, owner = [name for name in views if name not in results], Owner()
            try:
                mine = self._claims.take(left, owner)
                if mine and not deadline.passed:
                    results.update(self._write_some(mine, views, deadline, not results))
            finally:
                self._claims.give_back(owner)
            ours = set(mine)
            others = [name for name in left if name not in ours]
            if deadline.passed or not self._claims.wait(others, deadline):
                failed = WriteStatus.FAILED, deadline.reason
                return {name: results.get(name, failed) for name in views}
        return results

    def _write_some(
        self,
        names: Sequence[bytes],
        views: dict[bytes, memoryview],
        deadline: Deadline,
        first: bool,
    ) -> dict[bytes, Wrote]:
        """Write pages. After the first round, an error only fails these pages."""
        try:
            return self._write_mine(names, views, deadline)
        except Exception as error:
            if first:
                raise
            return dict.fromkeys(names, (WriteStatus.FAILED, self._said(error)))

    def _write_mine(
        self, names: Sequence[bytes], views: dict[bytes, memoryview], deadline: Deadline
    ) -> dict[bytes, Wrote]:
        results: dict[bytes, Wrote] = {}
        try:
            present = self._exists(names, deadline)
            known = [name for name, known in zip(names, present, strict=True) if known]
            results.update(dict.fromkeys(known, (WriteStatus.PRESENT, "")))
            absent = [name for name in names if name not in results]
            if absent:
                wrote = self._put(absent, [views[name] for name in absent], deadline)
                results.update(zip(absent, wrote, strict=True))
            return results
        except Exception as error:
            if deadline.left and not results:
                raise
            why = self._said(error) if deadline.left else f"{deadline.reason}: {error}"
            failed = WriteStatus.FAILED, why
            return {name: results.get(name, failed) for name in names}

    def delete(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.delete`."""
        names = list(dict.fromkeys(check_keys(keys)))
        with self._call("delete", Deadline(timeout)) as deadline:
            return self._counters.deleted(self._remove(names, deadline) if names else 0)

    def clear(self, *, timeout: float) -> int:
        """See `Storage.clear`."""
        with self._call("clear", Deadline(timeout)) as deadline:
            return self._counters.deleted(self._remove_all(deadline))

    def stats(self) -> StorageStats:
        """See `Storage.stats`. Pages are those stored and not deleted by this object; the store may
        have evicted some, and may have pages of other processes."""
        stats = self._counters.snapshot(0, 0)
        pages = max(0, stats.writes_stored - stats.deletes)
        return self._counters.snapshot(pages, pages * self.spec.page_bytes)

    # ---- around calls

    @contextlib.contextmanager
    def _call(self, what: str = "", deadline: Deadline | None = None) -> Iterator[Deadline]:
        """Wrap every use of the store. With `what`, the deadline must not have passed.

        Raises:
            StorageError: it has passed, or the store's client raised an error.
        """
        deadline = deadline or Deadline(0.0)
        with self._calls.one():
            try:
                if what and deadline.passed:
                    raise StorageError("nothing was asked")
                yield deadline
            except (ConfigError, Detached):
                raise
            except Exception as error:
                if what and deadline.passed:
                    self._counters.timed_out()
                    raise StorageError(
                        f"{what}: {deadline.reason}; give it more time: {error}"
                    ) from error
                if isinstance(error, StorageError):
                    raise
                raise StorageError(self._said(error)) from error

    def _said(self, error: Exception) -> str:
        """The text of an error; the scheme is added unless it is one of ours."""
        return str(error) if isinstance(error, LightcacheError) else f"{self.scheme}: {error}"


__all__ = [
    "TRAILER_BYTES",
    "Claims",
    "Owner",
    "Read",
    "RemoteStorage",
    "Wrote",
    "judge_page",
    "make_trailer",
]
