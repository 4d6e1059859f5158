"""What a storage backend promises: a place outside of shared memory where pages are kept by key.

Keys alone identify content. A key is a digest of everything that decides what is in a page: it is
seeded with the secret, the fingerprint, the weights version, the tenant, the salt and the adapter
(`lightcache.hashing.KeySpec`), so pages of another tenant, salt or weights version have other
keys, and none of that is stored beside them. The size of a page must be compared as well:
fingerprints are chosen by people, and two processes that disagree about the size must not read each
other's bytes. `StorageSpec` has it, and more, when a backend is opened.

Absent and failed are different things. Absent is an answer, and the request computes the page. Not
being able to tell is a failure, which is counted; repeated failures disable a backend.
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
    """Of each key, in order."""
    reason: str = ""
    """Of the first key that FAILED or is CORRUPT: what happened, for people."""

    @property
    def prefix(self) -> int:
        """How many keys from the first on are OK."""
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
    """Of each key, in order."""
    reason: str = ""
    """Of the first key that FAILED or was REFUSED: what happened, for people."""

    @property
    def prefix(self) -> int:
        """How many keys from the first on are stored now."""
        for i, status in enumerate(self.statuses):
            if status not in (WriteStatus.STORED, WriteStatus.PRESENT):
                return i
        return len(self.statuses)

    def count(self, status: WriteStatus) -> int:
        """How many keys have this status."""
        return self.statuses.count(status)


@dataclass(frozen=True)
class StorageStats:
    """Totals of a backend since it was opened, as its callers saw them; in pages."""

    pages: int
    """Stored now, as far as a backend that others also fill knows."""
    bytes: int
    """Of these pages."""
    reads_ok: int
    reads_absent: int
    reads_failed: int
    reads_corrupt: int
    writes_stored: int
    writes_present: int
    writes_failed: int
    writes_refused: int
    deletes: int
    """Pages removed by `delete` and `clear`; not those that made room for others."""
    timeouts: int
    """Calls that did not end in their time."""
    evicted: int = 0
    """Pages that the backend evicted to make room for others, as far as it knows."""


@dataclass(frozen=True)
class StorageSpec:
    """The pages that a backend is opened for. One backend may serve several specs; each sees its
    own pages only.

    Raises:
        ConfigError: `page_bytes` is no size, or another field is no text.
    """

    page_bytes: int
    """Of every page. A page stored with another length is CORRUPT."""
    fingerprint: str = ""
    """Of the cache: model, KV dtype, geometry."""
    algorithm: str = ""
    """Of the keys."""

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
        """The spec of a cache.

        Raises:
            ConfigError: it is no Cache.
        """
        from lightcache.cache import Cache  # not above: a backend needs no cache

        given: Any = cache
        if not isinstance(given, Cache):
            raise ConfigError(f"cache: expected a Cache, found {cache!r}; see Cache.open")
        algorithm = str(cache.index.segment.config["algorithm"])
        return cls(cache.page_bytes, cache.fingerprint, algorithm)

    @property
    def name(self) -> str:
        """16 hexadecimal digits that tell specs apart: for folders, prefixes of keys, and so on."""
        fields = (str(self.page_bytes), self.fingerprint, self.algorithm)
        encoded = [text.encode("utf-8", "surrogatepass") for text in fields]
        block = b"".join(len(each).to_bytes(8, "little") + each for each in encoded)
        return hashlib.blake2b(block, digest_size=8, person=b"lightcache store").hexdigest()


class Storage(ABC):
    """A backend. Subclass it; `lightcache.storage.testing.conformance` tests what stands here.

    Every call takes a batch, blocks, and may be made from several threads at once. `timeout` is in
    seconds and for the whole batch: what is not done by then is FAILED with a reason that begins
    with "timed out", and `contains`, `delete` and `clear` raise StorageError. Zero or less: the
    time is up already.

    **When a call has returned, or raised, the backend touches its buffers no more.** They are pages
    of a pool, which may be given to another request in the next instant. A backend that cannot stop
    what it has begun waits for it, or moves bytes through memory of its own; late is bad, wrong is
    worse. Until the call returns, the caller keeps the pages.

    Keys are uint64 of shape (n, 2). Buffers are one for each key, of exactly `spec.page_bytes`
    bytes, contiguous; those of `read` are writable, and pages go straight there. Either is refused
    with ConfigError before anything is done; `lightcache.storage.arguments.check_batch` does that.

    After `close` every call but `close` and `stats` raises Detached. In a forked child every call
    but `stats` does, and leaving the `with` statement does nothing: see `calls.Owned`.
    """

    spec: StorageSpec
    """What it was opened for."""
    wants_tokens: bool = False
    """Whether `write` is to be given the tokens of each page. Then it takes one more
    argument, `tokens`: `TokenRows`, or None where they are not known; they are the caller's, as
    buffers are. A backend that does not want them is never given the argument, and need not have
    it. Token ids are the prompt in clear: docs/storage.md says what follows."""

    @abstractmethod
    def contains(self, keys: Keys, *, timeout: float) -> int:
        """How many keys from the first on are stored. A promise about nothing: a page may be gone
        by the time it is read.

        Raises:
            StorageError: it could not be found out. Absent is no failure.
        """

    @abstractmethod
    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """Fill the buffers with the pages of these keys. The checksum is verified for each; a page
        that is found CORRUPT is dropped, so that it can be stored anew.

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
        """Store pages. One that is stored already is not written again, since equal keys mean equal
        content. A page is either found whole by every later call, or not at all.

        Args:
            parent: one key, shape (1, 2): of the page in front of the first one, which was written
                before; None: there is none. For the order of eviction alone: in front of a prefix
                goes what hangs on it. A backend may pass over it.

        Raises:
            StorageError: the backend could do nothing that it knows of.
        """

    @abstractmethod
    def delete(self, keys: Keys, *, timeout: float) -> int:
        """Remove pages; those that are not stored do not matter. Returns how many were.

        Raises:
            StorageError: some may still be there.
        """

    @abstractmethod
    def clear(self, *, timeout: float) -> int:
        """Remove all pages of this spec. Returns how many there were. A weights version or tenant
        cannot be removed on its own: only the digests depend on it. Its pages are not found once
        such keys are no longer made, and make room for others over time.

        Raises:
            StorageError: some may still be there.
        """

    @abstractmethod
    def stats(self) -> StorageStats:
        """Totals. Does not block on the medium."""

    @abstractmethod
    def close(self) -> None:
        """Leave. What is stored stays, where the medium keeps it. A second call does nothing."""

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
    "TokenRows",
    "WriteResult",
    "WriteStatus",
]
