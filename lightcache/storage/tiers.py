"""What a tier is to those who use one, whoever carries its tasks out: `StorageTier` in threads of
this process, `StorageClient` through a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from lightcache import _arguments
from lightcache.cache import Cache
from lightcache.errors import ConfigError
from lightcache.hashing import Tokens, pack_tokens
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.storage.protocol import Keys, TokenRows
from lightcache.storage.tasks import StorageTask

T = TypeVar("T", bound="BaseTier")
ReadPolicy = Literal["wait", "best_effort", "deadline"]


@dataclass(frozen=True)
class TierStats:
    """Totals of a tier since it was made; in pages unless said otherwise. See `TaskResult`."""

    loaded: int
    stored: int
    present: int
    absent: int
    failed: int
    corrupt: int
    refused: int
    skipped: int
    busy: int
    no_room: int
    declined: int
    tasks_finished: int
    """Tasks, as are the following three."""
    tasks_failed: int
    queued: int
    running: int
    timeouts: int
    """Calls of the storage that did not return in time."""
    stuck: int
    """Of these, such as have not returned yet: each keeps a thread, and its pages."""
    writing: int
    """Pages pinned for writes."""
    read_bytes: int
    """That calls of the storage brought, whatever became of the pages; of late ones, too."""
    written_bytes: int
    """That it has stored."""
    evicted: int
    """Pages that the storage let go of to make room, as of our last write; see `StorageStats`."""
    state: Literal["closed", "open", "half-open"]
    """Of the breaker: open means that the storage is not used."""
    read_call_seconds: float | None = None
    """That a call which reads takes beside its pages, as measured; None: nothing was, or nobody
    asked for it. So is the next one."""
    read_page_seconds: float | None = None
    """That each page adds."""


class BaseTier(ABC):
    """Moves pages between a cache's pool and a storage, in the background. Nothing of it makes a
    request fail. Close it before the cache."""

    cache: Cache

    @property
    def wants_tokens(self) -> bool:
        """Whether token ids that `write` is given reach the storage, which wants them."""
        return False

    @abstractmethod
    def write(
        self,
        keys: Keys,
        request: object = None,
        *,
        lease: Lease | None = None,
        tokens: int | None = None,
        token_ids: Tokens | None = None,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """Store what the cache has of a prompt, and the storage has not. Does not block. The pages
        are pinned in our own name until they are written; whose lease they are may end at once.

        Args:
            keys: of the prompt's pages from its first on; the longest ready prefix is written.
            request: whose pages they are, anything hashable: writes of one request stand together
                in the queue, and no call of the storage has pages of two.
            lease: pages of these keys that the caller holds: no more than these are written.
            tokens: of the whole prompt, for `min_tokens`; None: those of its keys.
            token_ids: of the prompt from its first on, for a storage that wants them (see
                `wants_tokens`); to others they are not given. None: nobody knows them.
            timeout: seconds; None: the tier's.

        Raises:
            ConfigError: bad keys, a lease of more pages than there are keys, or token ids that
                are none, fewer than the pages have, or of a cache without page_tokens.
            Detached: the tier or the cache was closed.
        """

    def write_tokens(
        self,
        tokens: Tokens,
        request: object = None,
        *,
        salt: str | bytes = b"",
        lora: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """`write` for who has neither keys nor lease, as when a request ends that another process
        began: from its tokens alone. For the rest see `Cache.hash_pages`."""
        keys = self.cache.hash_pages(tokens, salt=salt, lora=lora, extra=extra, namespace=namespace)
        return self.write(
            keys,
            request,
            tokens=len(tokens),
            token_ids=tokens if self.wants_tokens else None,
            namespace=namespace,
            timeout=timeout,
        )

    @abstractmethod
    def prefetch(
        self,
        keys: Keys,
        start: int = 0,
        *,
        namespace: Namespace | None = None,
        hold: bool = False,
        timeout: float | None = None,
    ) -> StorageTask:
        """Read keys[start:] into the cache, as far as they are stored. Does not block. What is read
        is ready for everybody as it comes, and nobody pins it: match when the task is over. What
        would take longer to read than to compute is declined, where a tier was told to.

        Args:
            keys: of the whole chain from its root, as for `Cache.reserve`.
            start: first key that the cache does not have, usually `len(lease)`.
            hold: make nothing ready: `StorageTask.publish` does that, or `cancel` gives the pages
                back. For ranks that agree on how many pages all of them could read. Until then
                others see these keys as being written, but for no longer than the tier's `timeout`
                behind the end of the task. One process of each cache does this.
            timeout: seconds; None: the tier's.

        Raises:
            ConfigError: bad keys, or a start behind them.
            Detached: the tier or the cache was closed.
        """

    @abstractmethod
    def prefetch_deepest(
        self,
        keys: Keys,
        *,
        most: int = 512,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """Read the last of these keys that is stored into the cache, and no other: for pages that
        are worth something without those before them, as checkpoints of recurrent state are. Does
        not block. Stops at one that the cache has. `StorageTask.pages_done` is how many keys end
        with it, when the task is over; 0: none is stored.

        Args:
            most: keys to ask for, from the last on; the storage is asked for each by itself.
            timeout: seconds; None: the tier's.

        Raises:
            ConfigError: bad keys.
            Detached: the tier or the cache was closed.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Totals."""

    @abstractmethod
    def _take_figures(self) -> Counter[str]:
        """Of `TAKEN`, what came since this was asked last: so nothing is counted twice, whoever
        asks."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> bool:
        """Give back what is held for `StorageTask.publish`, finish what is queued, cancel what is
        left then. May be called again.

        Args:
            timeout: seconds for finishing; 0: cancel at once.

        Returns:
            Whether everything has ended.
        """

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


TAKEN = ("read_bytes", "written_bytes", "evicted", "declined")


def checked_write(keys: Keys, request: object, lease: Lease | None, tokens: int | None) -> Keys:
    """The arguments of a `BaseTier.write`; which of the keys are wanted.

    Raises:
        ConfigError: bad keys, what is no lease, more leased pages than keys, a request that is not
            hashable, tokens that are no count.
    """
    _arguments.keys(keys)
    if tokens is not None:
        _arguments.count(tokens, "tokens", 0, 1 << 62)
    leased: Any = lease
    if leased is not None and not isinstance(leased, Lease):
        raise ConfigError(f"lease: expected a Lease, found {lease!r}; give what match returned")
    if lease is not None and len(lease) > len(keys):
        raise ConfigError(
            f"lease: expected at most {len(keys)} pages, one for each key, found {len(lease)}; "
            "give the keys that were matched"
        )
    try:
        hash(request)
    except TypeError:
        raise ConfigError(f"request: expected something hashable, found {request!r}") from None
    return keys if lease is None else keys[: len(lease)]


def check_cache(cache: Cache) -> None:
    """Refuse what no tier can use.

    Raises:
        ConfigError: not a Cache.
        Detached: it is closed.
    """
    given: Any = cache
    if not isinstance(given, Cache):
        raise ConfigError(f"cache: expected a Cache, found {cache!r}; see Cache.open")
    cache.index.segment.check_usable()


def token_rows(
    token_ids: Tokens, pages: int, page_tokens: int | None, *, wanted: bool
) -> TokenRows | None:
    """The token ids of a `BaseTier.write` page by page, in memory of ours; None: the storage does
    not want them.

    Raises:
        ConfigError: see `BaseTier.write`; fewer than the pages have also when nobody wants them.
    """
    if page_tokens is None:
        raise ConfigError("token_ids: this cache was created without page_tokens")
    found: Any = token_ids
    count = len(found) if hasattr(found, "__len__") else 0
    least = pages * page_tokens
    if count < least:
        raise ConfigError(
            f"token_ids: expected those of the prompt, {least} or more for {pages} pages, "
            f"found {count if hasattr(found, '__len__') else repr(found)}"
        )
    if not wanted:
        return None
    packed = np.frombuffer(pack_tokens(found), "<u4")[:least]
    return packed.astype(np.uint32, copy=False).reshape(pages, page_tokens)


__all__ = [
    "TAKEN",
    "BaseTier",
    "ReadPolicy",
    "TierStats",
    "check_cache",
    "checked_write",
    "token_rows",
]
