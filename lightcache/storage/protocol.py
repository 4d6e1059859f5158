"""The contract of a storage backend, which keeps pages by key outside of shared memory.

Keys alone identify content. A key is a digest of everything that determines a page: it is seeded
with the secret, the fingerprint, the weights version, the tenant, the salt and the adapter
(`lightcache.hashing.KeySpec`). Pages of another tenant, salt or weights version therefore have
other keys, and none of those fields is stored beside a page. The page size is compared as well:
people choose fingerprints, and two processes that disagree about the size must not read each
other's bytes. A backend is opened with a `StorageSpec`, which has the size.

Absent and failed differ. Absent is an answer: the request computes the page. A backend that cannot
tell has failed; failures are counted, and repeated failures disable the backend.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError
from lightcache.shm.errors import leave

if TYPE_CHECKING:
    from lightcache.cache import Cache

Keys: TypeAlias = npt.NDArray[np.uint64]  # shape (n, 2), C-contiguous: as made by hash_pages
Buffer: TypeAlias = "npt.NDArray[np.uint8] | memoryview"  # one page, contiguous, of single bytes
TokenRows: TypeAlias = npt.NDArray[np.integer[Any]]
"""Token ids, shape (n, page_tokens): a row for each page."""
T = TypeVar("T", bound="Storage")


class ReadStatus(IntEnum):
    """The outcome for one key of `Storage.read`. Unless it is OK, its buffer is undefined."""

    OK = 0
    ABSENT = 1  # not stored
    FAILED = 2  # could not be read, or not in time
    CORRUPT = 3  # stored, with a wrong checksum or another length


class WriteStatus(IntEnum):
    """The outcome for one key of `Storage.write`."""

    STORED = 0
    PRESENT = 1  # was stored already; nothing was written
    FAILED = 2  # could not be written, or not in time
    REFUSED = 3  # no room, or not admitted


@dataclass(frozen=True)
class ReadResult:
    """The result of `Storage.read`. Partial results are normal."""

    statuses: tuple[ReadStatus, ...]
    """One for each key, in order."""
    reason: str = ""
    """Why the first FAILED or CORRUPT key was not read; for people."""

    @property
    def prefix(self) -> int:
        """The number of leading keys that are OK."""
        for i, status in enumerate(self.statuses):
            if status is not ReadStatus.OK:
                return i
        return len(self.statuses)

    def count(self, status: ReadStatus) -> int:
        """How many keys have this status."""
        return self.statuses.count(status)


@dataclass(frozen=True)
class WriteResult:
    """The result of `Storage.write`. Partial results are normal."""

    statuses: tuple[WriteStatus, ...]
    """One for each key, in order."""
    reason: str = ""
    """Why the first FAILED or REFUSED key was not stored; for people."""

    @property
    def prefix(self) -> int:
        """The number of leading keys that are stored now."""
        for i, status in enumerate(self.statuses):
            if status not in (WriteStatus.STORED, WriteStatus.PRESENT):
                return i
        return len(self.statuses)

    def count(self, status: WriteStatus) -> int:
        """How many keys have this status."""
        return self.statuses.count(status)


@dataclass(frozen=True)
class StorageStats:
    """Totals of a backend since it was opened, in pages, as its callers saw them."""

    pages: int
    """Stored now. A backend that others also fill may not know all of them."""
    bytes: int
    """The bytes of these pages."""
    reads_ok: int
    reads_absent: int
    reads_failed: int
    reads_corrupt: int
    writes_stored: int
    writes_present: int
    writes_failed: int
    writes_refused: int
    deletes: int
    """Pages removed by `delete` and `clear`; evicted pages are not counted here."""
    timeouts: int
    """Calls that did not end in time."""
    evicted: int = 0
    """Pages that the backend evicted to make room for others, as far as it knows."""


@dataclass(frozen=True)
class StorageSpec:
    """The kind of pages that a backend is opened for. One backend may serve several specs; each
    spec sees only its own pages.

    Raises:
        ConfigError: `page_bytes` is not a positive integer, or another field is not a string.
    """

    page_bytes: int
    """The size of every page. A page stored with another length is CORRUPT."""
    fingerprint: str = ""
    """The cache's fingerprint: model, KV dtype, geometry."""
    algorithm: str = ""
    """The algorithm that makes the keys."""

    def __post_init__(self) -> None:
        if type(self.page_bytes) is not int or self.page_bytes <= 0:
            raise ConfigError(
                f"page_bytes: expected bytes of a page, 1 or more, found {self.page_bytes!r}"
            )
        for name in ("fingerprint", "algorithm"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}: expected a text, found {getattr(self, name)!r}")

    @classmethod
    def of(cls, cache: Cache) -> StorageSpec:
        """The spec of a cache's pages.

        Raises:
            ConfigError: `cache` is not a Cache.
        """
        from lightcache.cache import Cache  # not above: a backend needs no cache

        given: Any = cache
        if not isinstance(given, Cache):
            raise ConfigError(f"cache: expected a Cache, found {cache!r}; see Cache.open")
        algorithm = str(cache.index.segment.config["algorithm"])
        return cls(cache.page_bytes, cache.fingerprint, algorithm)

    @property
    def name(self) -> str:
        """16 hexadecimal digits that identify the spec, for folder names, key prefixes and such."""
        fields = (str(self.page_bytes), self.fingerprint, self.algorithm)
        encoded = [text.encode("utf-8", "surrogatepass") for text in fields]
        block = b"".join(len(each).to_bytes(8, "little") + each for each in encoded)
        return hashlib.blake2b(block, digest_size=8, person=b"lightcache store").hexdigest()


class Storage(ABC):
    """A storage backend. Subclass it; `lightcache.storage.testing.conformance` tests this contract.

    Calls block, and may be made from several threads at once. `timeout` is in
    seconds, for the whole batch. Pages not done by then are FAILED with a reason that begins with
    "timed out"; `contains`, `delete` and `clear` raise StorageError instead. With a timeout of zero
    or less, the time is already up.

    **After a call has returned or raised, the backend never touches its buffers again.** They are
    pages of a pool, which may be given to another request at once. A backend that cannot stop an
    operation waits for it, or moves bytes through memory of its own: late is bad, wrong is worse.
    The caller keeps the pages until the call returns.

    Keys are uint64 of shape (n, 2). There is one buffer for each key, contiguous, of exactly
    `spec.page_bytes` bytes. Buffers of `read` are writable, and pages are read straight into them.
    Bad keys or buffers raise ConfigError before anything is done
    (`lightcache.storage.common.check_batch`).

    After `close`, every call except `close` and `stats` raises Detached. In a forked child, every
    call except `stats` does, and leaving the `with` statement does nothing:
    `lightcache.storage.common.Owned` does both.
    """

    spec: StorageSpec
    """The spec that it was opened with."""

    @abstractmethod
    def contains(self, keys: Keys, *, timeout: float) -> int:
        """The number of leading keys that are stored. It guarantees nothing: a page may be evicted
        before it is read.

        Raises:
            StorageError: the backend could not tell. Absent is not a failure.
        """

    @abstractmethod
    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """Read the pages of these keys into the buffers, also those after an absent one. Each
        page's checksum is verified; a CORRUPT page is dropped, so that it can be stored again.

        Raises:
            StorageError: the backend could do nothing; all buffers are undefined.
        """

    @abstractmethod
    def write(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        timeout: float,
        parent: Keys | None = None,
    ) -> WriteResult:
        """Store pages. A page that is already stored is not written again, since equal keys mean
        equal content; so a key that stands twice in a batch is STORED once, then PRESENT. Later
        calls find a page whole or not at all.

        Args:
            parent: the key of the page before the first one, shape (1, 2), written earlier; None:
                the first page has no parent. Used only to order eviction: a page is evicted after
                its children. A backend may ignore it.

        Raises:
            StorageError: the backend stored nothing, as far as it knows.
        """

    @abstractmethod
    def delete(self, keys: Keys, *, timeout: float) -> int:
        """Remove pages; keys that are not stored are ignored. Returns the number of pages removed.

        Raises:
            StorageError: some pages may still be stored.
        """

    @abstractmethod
    def clear(self, *, timeout: float) -> int:
        """Remove all pages of this spec. Returns the number of pages removed. A weights version or
        tenant cannot be removed on its own, as only the digests depend on it. Once its keys are no
        longer made, its pages are not found any more and are evicted over time.

        Raises:
            StorageError: some pages may still be stored.
        """

    @abstractmethod
    def stats(self) -> StorageStats:
        """Returns the totals. Does not block on the medium."""

    @abstractmethod
    def close(self) -> None:
        """Close. Stored pages stay if the medium keeps them. A second call does nothing. Waits for
        calls of other threads, for a limited time (`lightcache.storage.common.Calls.end`).

        Raises:
            StorageError: a call has not returned, or something could not be closed; call again.
            Detached: in a forked child.
            Otherwise what the backend documents.
        """

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave(self.close, error)


__all__ = [
    "Buffer",
    "Keys",
    "ReadResult",
    "ReadStatus",
    "Storage",
    "StorageSpec",
    "StorageStats",
    "WriteResult",
    "WriteStatus",
]
