"""What a storage backend promises: a place outside of shared memory where pages are kept by key.

Keys alone identify content. A key is a digest of everything that decides what is in a page: it is
seeded with the secret, the fingerprint, the weights version, the tenant, the salt and the adapter
(`lightcache.hashing.KeySpec`), so pages of another tenant, salt or weights version have other
keys, and nothing of that has to be kept beside them. What must be compared besides is the size of
a page: fingerprints are given by people, and two processes that disagree about it must not read
each other's bytes as their own. `StorageSpec` says it, and more, when a backend is opened.

Absent and failed are different things. That a page is not there is an answer, and the request
computes it. That nobody can say is a failure, which is counted, and stops the use of a backend
when it goes on.
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
    """What became of one key of `Storage.read`. But for OK, its buffer is undefined."""

    OK = 0
    ABSENT = 1  # not stored
    FAILED = 2  # could not be read, or not in time
    CORRUPT = 3  # stored, with a wrong checksum or another length


class WriteStatus(IntEnum):
    """What became of one key of `Storage.write`."""

    STORED = 0
    PRESENT = 1  # was stored already; nothing was written
    FAILED = 2  # could not be written, or not in time
    REFUSED = 3  # no room, or not admitted


@dataclass(frozen=True)
class ReadResult:
    """What `Storage.read` has done. Partial results are normal."""

    statuses: tuple[ReadStatus, ...]
    """Of each key, in order."""
    reason: str = ""
    """Of the first key that FAILED or is CORRUPT: what happened, for people."""

    @property
    def prefix(self) -> int:
        """How many keys from the first on are OK."""
        bad = (i for i, each in enumerate(self.statuses) if each is not ReadStatus.OK)
        return next(bad, len(self.statuses))

    def count(self, status: ReadStatus) -> int:
        """How many keys have this status."""
        return self.statuses.count(status)


@dataclass(frozen=True)
class WriteResult:
    """What `Storage.write` has done. Partial results are normal."""

    statuses: tuple[WriteStatus, ...]
    """Of each key, in order."""
    reason: str = ""
    """Of the first key that FAILED or was REFUSED: what happened, for people."""

    @property
    def prefix(self) -> int:
        """How many keys from the first on are stored now."""
        good = (WriteStatus.STORED, WriteStatus.PRESENT)
        bad = (i for i, each in enumerate(self.statuses) if each not in good)
        return next(bad, len(self.statuses))

    def count(self, status: WriteStatus) -> int:
        """How many keys have this status."""
        return self.statuses.count(status)


@dataclass(frozen=True)
class StorageStats:
    """Totals of a backend since it was opened, as its callers saw them; in pages."""

    pages: int
    """Stored now. A backend that others fill too says what it knows."""
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
    """Calls that did not end in the time they were given."""
    evicted: int = 0
    """Pages that the backend let go of to make room for others, as far as it knows."""


@dataclass(frozen=True)
class StorageSpec:
    """Whose pages a backend is opened for. One backend may serve several; each sees its own only.

    Raises:
        ConfigError: `page_bytes` is no size, or what should be a text is none.
    """

    page_bytes: int
    """Of every page. What is stored with another length is CORRUPT."""
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
        """That of a cache.

        Raises:
            ConfigError: it is none.
        """
        from lightcache.cache import Cache  # not above: whoever writes a backend needs no cache

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
    of a pool, which may be given to somebody else in the next instant. A backend that cannot stop
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
    """Whether `write` is to be told which tokens are in each page. A backend that says so takes one
    more argument, `tokens`: `TokenRows`, or None where nobody knows them; they are the caller's, as
    buffers are. It is never given to one that does not, which need not have it. Token ids are the
    prompt in clear: docs/storage.md says what follows."""

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
        cannot be removed on its own: only the digests know of it. Its pages are found no more once
        nobody makes such keys, and make room for others by and by.

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
