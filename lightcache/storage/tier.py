"""Tiers: what moves pages between a cache's pool and a storage, in the background.

`StorageTier` runs tasks in threads of this process, `service.StorageClient` through the service.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from lightcache import _arguments
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached, LayoutMismatch, LightcacheError
from lightcache.hashing import Tokens, pack_tokens
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import leave
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.calls import log, storage_breaker
from lightcache.storage.costs import ReadCosts, SeenKeys
from lightcache.storage.jobs import DeepestJob, JobExecutor, TierOptions, WriteJob
from lightcache.storage.protocol import Keys, Storage, StorageSpec, TokenRows
from lightcache.storage.tasks import (
    TAKEN,
    BusyPolicy,
    ReadPolicy,
    StorageTask,
    TaskProgress,
    TierStats,
)
from lightcache.storage.urls import open_storage

T = TypeVar("T", bound="BaseTier")


class BaseTier(ABC):
    """Moves pages between a cache's pool and a storage, in the background. It never makes a request
    fail. Close it before the cache."""

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
        """Store the pages of a prompt that the cache has and the storage has not. Does not block.
        The tier pins the pages itself until they are written, the first `write_pages` of all writes
        that wait; the caller's lease may end at once. Further pages are pinned when it is their
        turn, and may be evicted before.

        Args:
            keys: of the prompt's pages from its first on; the longest ready prefix is written.
            request: the request they belong to, anything hashable: writes of one request stand
                together in the queue, and no call of the storage has pages of two.
            lease: pages of these keys that the caller holds: no more than these are written.
            tokens: of the whole prompt, for `min_tokens`; None: those of its keys.
            token_ids: of the prompt from its first on, for a storage that wants them (see
                `wants_tokens`); to others they are not given. None: not known.
            timeout: seconds; None: the tier's.

        Raises:
            ConfigError: bad keys, a lease of more pages than there are keys, or bad token ids:
                fewer than the pages have, or of a cache without page_tokens.
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
        """Like `write`, but derives the keys from token ids: for a request that another process
        started. For the other arguments see `Cache.hash_pages`."""
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
        """Read keys[start:] into the cache, as far as they are stored. Does not block. Each page is
        ready for all processes when it has been read, and is not pinned: match when the task is
        over. A tier with `prefill_tokens_per_s` declines what is faster to compute than to read.

        Args:
            keys: of the whole chain from its root, as for `Cache.reserve`.
            start: first key that the cache does not have, usually `len(lease)`.
            hold: make nothing ready: `StorageTask.publish` does that, or `cancel` frees the pages.
                For ranks that agree on how many pages all of them could read. Until then others see
                these keys as being written, but for no longer than the tier's `timeout` after the
                end of the task. One process of each cache does this. `StorageClient` refuses it.
            timeout: seconds; None: the tier's.

        Raises:
            ConfigError: bad keys, or a start after them.
            Detached: the tier or the cache was closed.
        """

    @abstractmethod
    def prefetch_last_ready(
        self,
        keys: Keys,
        *,
        most: int = 512,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """Read the last of these keys that is stored into the cache, and no other: for pages that
        are usable without those before them, such as checkpoints of recurrent state. Does not
        block. Stops at a key that the cache has. When the task is over, `StorageTask.pages_done` is
        the number of keys up to and including that key; 0: none is stored.

        Args:
            most: keys to look up, from the last on; each is a call of the storage.
            timeout: seconds; None: the tier's.

        Raises:
            ConfigError: bad keys.
            Detached: the tier or the cache was closed.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Totals."""

    @abstractmethod
    def take_figures(self) -> Counter[str]:
        """Of the totals `TAKEN`, what came since the last call: each figure is given away once."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> bool:
        """Free what is held for `StorageTask.publish`, finish what is queued, cancel what is left
        then. May be called again.

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
        leave(self.close, error)


def checked_write(keys: Keys, request: object, lease: Lease | None, tokens: int | None) -> Keys:
    """Check the arguments of a `BaseTier.write`; returns the keys to be written.

    Raises:
        ConfigError: bad keys, no lease, more leased pages than keys, a request that is not
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
    """Refuse a cache that no tier can use.

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
        ConfigError: see `BaseTier.write`; checked also when the storage does not want them.
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


class StorageTier(BaseTier):
    """Writes pages of a cache to a storage and reads them back, in threads of its own.

    A request never fails because of it: a storage that fails, hangs or dies costs misses, each wait
    has a limit, and after some failures in a row the storage is not used for a while. Pages are
    read straight into the pool and published group by group, with checksums verified by the
    backend; processes of the cache match them as they match any page.

    Close it before the cache. It owns neither of the two, unless `open` made it. Not for forked
    children.
    """

    def __init__(
        self,
        cache: Cache,
        storage: Storage,
        *,
        threads: int = 2,
        min_tokens: int = 0,
        seen: int = 1,
        seen_keys: int = 1 << 16,
        read_policy: ReadPolicy = "wait",
        read_seconds: float = 1.0,
        busy: BusyPolicy = "wait",
        group: int = 16,
        write_pages: int | None = None,
        timeout: float = 30.0,
        call_timeout: float = 15.0,
        grace: float = 1.0,
        failures: int = 5,
        retry: float = 30.0,
        prefill_tokens_per_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Starts its threads.

        Args:
            storage: opened for pages of this cache's: `StorageSpec.of(cache)`.
            threads: that call the storage at a time. One that hangs is replaced, until eight are
                lost; then tasks are refused until one of them returns.
            min_tokens: of a prompt; shorter ones are not written.
            seen: a page is written when it is offered for this time; 1: at once.
            seen_keys: keys to remember for that.
            read_policy: what `StorageTask.take` does: "wait" until the read is over, "best_effort"
                takes what there is, "deadline" waits until `read_seconds` after the `prefetch`.
            busy: keys that others are reading or computing are waited for, or skipped.
            group: pages of one call of the storage, of one request, and of one reservation.
            write_pages: pages that waiting writes may pin; further ones, of long prompts and of
                many, are pinned a group at a time when it is their turn, in addition. None: a
                quarter of the pool; 0: nothing is written.
            timeout: seconds that a task may take, from `write` or `prefetch` on; of a write, that
                it may take until the next of its groups is stored.
            call_timeout: of these, seconds that one call of the storage may take.
            grace: seconds after that until a call that has not returned counts as hanging.
            failures: in a row, after which the storage is not used. One call that used up its
                time is enough if no other succeeded meanwhile.
            retry: seconds until it is tried again: by a call of the tier's own, for which no task
                waits.
            prefill_tokens_per_s: what the model computes. A prefetch that would take longer than
                computing its pages, by what reads have taken so far, is declined; every `retry`
                seconds one of those is read all the same, to see whether it still would. None: all
                are read.
            clock: in seconds; for tests.

        Raises:
            ConfigError: an argument out of range; `min_tokens` or `prefill_tokens_per_s` for a
                cache without page_tokens.
            LayoutMismatch: the storage was opened for pages of another size or fingerprint.
            Detached: the cache was closed.
            PermissionDenied: the cache is attached read-only.
        """
        _writable(cache)
        _fitting(cache, storage)
        for name, value, choices in (
            ("read_policy", read_policy, get_args(ReadPolicy)),
            ("busy", busy, get_args(BusyPolicy)),
        ):
            if value not in choices:
                raise ConfigError(f"{name}: expected one of {choices}, found {value!r}")
        for name, seconds in (
            ("timeout", timeout),
            ("call_timeout", call_timeout),
            ("grace", grace),
            ("retry", retry),
            ("read_seconds", read_seconds),
        ):
            if Deadline(seconds, clock, name).timeout < 0:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        count = _arguments.count
        page_tokens: int | None = cache.index.segment.config.get("page_tokens")
        for name, tokens in (
            ("min_tokens", min_tokens or None),
            ("prefill_tokens_per_s", prefill_tokens_per_s),
        ):
            if tokens is not None and page_tokens is None:
                raise ConfigError(f"{name}: this cache was created without page_tokens")
        self.options = TierOptions(
            threads=count(threads, "threads", 1, 256),
            group=count(group, "group", 1, 1 << 20),
            busy=busy,
            read_policy=read_policy,
            read_seconds=read_seconds,
            timeout=timeout,
            call_timeout=call_timeout,
            grace=grace,
            clock=clock,
        )
        costs = None
        if prefill_tokens_per_s is not None:
            assert page_tokens is not None
            costs = ReadCosts(prefill_tokens_per_s, page_tokens, group, retry, clock)
        self._min_tokens = count(min_tokens, "min_tokens", 0, 1 << 40)
        self._seen = SeenKeys(
            count(seen, "seen", 1, 1 << 30), count(seen_keys, "seen_keys", 1, 1 << 30)
        )
        most = max(1, cache.pages // 4) if write_pages is None else write_pages
        self._write_pages = count(most, "write_pages", 0, cache.pages)
        breaker = storage_breaker(count(failures, "failures", 1, 1 << 30), retry, clock)
        self.cache = cache
        self.storage = storage
        self.owns_storage = False
        """Whether the storage is closed together with the tier."""
        self._owning = threading.Lock()
        self._executor = JobExecutor(cache, storage, breaker, self.options, costs)
        self._executor.start()

    @classmethod
    def open(cls, cache: Cache, url: str | Sequence[str], **how: Any) -> StorageTier:
        """A tier with a storage of its own, which it closes when it is closed.

        Args:
            url: of the storage, or of two, the nearer first: see `open_storage`.
            how: as of the constructor.

        Raises:
            ConfigError: no such URL, or an argument out of range.
            StorageError: the storage cannot be opened.
        """
        _writable(cache)
        storage = open_storage(url, spec=StorageSpec.of(cache))
        try:
            tier = cls(cache, storage, **how)
        except BaseException:
            storage.close()
            raise
        tier.owns_storage = True
        return tier

    @property
    def wants_tokens(self) -> bool:
        """See `BaseTier`."""
        return self.storage.wants_tokens

    def _begin(self, timeout: float | None) -> Deadline:
        if self._executor.closing:
            raise Detached("this storage tier was closed; make another one")
        self.cache.index.segment.check_usable()
        return Deadline(self.options.timeout if timeout is None else timeout, self.options.clock)

    # ---- writing

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
        """See `BaseTier`."""
        executor, deadline = self._executor, self._begin(timeout)
        wanted = checked_write(keys, request, lease, tokens)
        page_tokens, rows = executor.page_tokens, None
        if token_ids is not None:
            rows = token_rows(token_ids, len(wanted), page_tokens, wanted=self.wants_tokens)
        chosen, reason = self._worth_writing(keys, wanted, tokens)
        if not chosen:
            return executor.ended_task("write", len(wanted), reason, skipped=len(wanted))
        room = max(0, self._write_pages - executor.pinned())
        lease = self.cache.match(wanted[: min(chosen, room)], namespace=namespace)
        try:
            pages = len(lease)
            if pages == min(chosen, room) < chosen:  # more than may be pinned, or just as many
                pages += self.cache.peek(wanted[pages:chosen], namespace=namespace)
            if not pages or not self._write_pages:
                lease.release()
                skipped = len(wanted) - pages
                why = "writes may pin no pages" if pages else "nothing of it is in the cache"
                executor.unstored("refused", pages, why)
                counts = {"refused": pages, "skipped": skipped}
                return executor.ended_task("write", len(wanted), why, **counts)
            progress = TaskProgress("write", len(wanted), page_tokens)
            progress.count(skipped=len(wanted) - pages)
            progress.say(reason)
            own = keys[:pages].copy()
            job = WriteJob(executor, progress, deadline, own, lease, namespace, rows)
        except BaseException:
            lease.__exit__(None, None, None)
            raise
        job.request = job if request is None else request
        return executor.submit_job(job)

    def _worth_writing(self, keys: Keys, wanted: Keys, tokens: int | None) -> tuple[int, str]:
        """How many pages, and why not all."""
        executor = self._executor
        if executor.breaker.shut:
            reason = executor.breaker.reason
            executor.unstored("disabled", len(wanted), reason)
            return 0, reason
        prompt = len(keys) * (executor.page_tokens or 0) if tokens is None else tokens
        if prompt < self._min_tokens:
            executor.add(skipped_short=len(wanted))
            return 0, f"a prompt of {prompt} tokens is not written, {self._min_tokens} are"
        admitted = self._seen.admit(wanted)
        if admitted == len(wanted):
            return admitted, ""
        executor.add(skipped_unseen=len(wanted) - admitted)
        return admitted, "not seen often enough to be written"

    # ---- reading

    def prefetch(
        self,
        keys: Keys,
        start: int = 0,
        *,
        namespace: Namespace | None = None,
        hold: bool = False,
        timeout: float | None = None,
    ) -> StorageTask:
        """See `BaseTier`."""
        executor, deadline = self._executor, self._begin(timeout)
        _arguments.keys(keys)
        _arguments.count(start, "start", 0, len(keys))
        probe = False
        if executor.costs is not None and not executor.breaker.shut:
            pages = len(keys) - start
            verdict = executor.costs.decide(pages, executor.reads_ahead(), self.options.threads)
            if verdict.declined:
                return executor.ended_task("read", pages, verdict.declined, declined=pages)
            probe = verdict.probe
        return executor.fetch(keys, start, namespace, deadline, hold=hold, declinable=not probe)

    def prefetch_last_ready(
        self,
        keys: Keys,
        *,
        most: int = 512,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """See `BaseTier`."""
        executor, deadline = self._executor, self._begin(timeout)
        _arguments.keys(keys)
        _arguments.count(most, "most", 0, 1 << 30)
        if executor.breaker.shut:
            return executor.ended_task("read", len(keys), executor.breaker.reason, failed=1)
        progress = TaskProgress("read", len(keys), executor.page_tokens)
        own = keys.copy()
        return executor.submit_job(DeepestJob(executor, progress, deadline, own, most, namespace))

    def failed_task(
        self, kind: Literal["read", "write"], pages: int, error: LightcacheError
    ) -> StorageTask:
        """For the storage service: a task of this tier that failed before it began."""
        return self._executor.ended_task(kind, pages, str(error), failed=pages)

    # ---- looking at it, and the end

    def poll(self) -> None:
        """Look now for what is overdue. A thread does so by itself, by the real time."""
        self._executor.poll()

    def stats(self) -> TierStats:
        """Totals."""
        return self._executor.stats()

    def take_figures(self) -> Counter[str]:
        """See `BaseTier`."""
        return self._executor.take_totals(TAKEN)

    def close(self, timeout: float = 10.0) -> bool:
        """Give back what is held for `StorageTask.publish`, finish what is queued, cancel what is
        left then. May be called again.

        Args:
            timeout: seconds for finishing; 0: cancel at once.

        Returns:
            Whether everything has ended. False: a call of the storage hangs, or another process
            holds the cache's lock, so that pages cannot be given back; they stay pinned until it
            returns, or gives the lock back, and until then the cache cannot be closed (InUse). The
            rest is done then: pages go back, threads end, and a storage of our own is closed. Call
            again to wait for that; until then `stats` has the tasks of such calls as running.

        Raises:
            ConfigError: `timeout` is no number.
        """
        executor, deadline = self._executor, Deadline(timeout, what="timeout")
        if not executor.end_jobs(deadline) and executor.leave(self._close_storage):
            self._warn_of_what_is_left()
            return False
        executor.join()
        self._close_storage()
        return True

    def _warn_of_what_is_left(self) -> None:
        calls, unreturned = len(self._executor.calls), self._executor.unreturned
        still_open = ", and the storage open" if self.owns_storage else ""
        if calls or not unreturned:
            log.warning(
                "the storage tier was closed while %d calls of the storage hang; pages stay "
                "pinned until they return%s",
                calls,
                still_open,
            )
        else:
            log.warning(
                "the storage tier was closed while pages of %d tasks could not be given back, as "
                "another process holds the cache's lock; that is tried again, and they stay pinned "
                "until then%s",
                unreturned,
                still_open,
            )

    def _close_storage(self) -> None:
        """If it is ours; once no call of it is in flight. Once, if it was not interrupted."""
        with self._owning:
            if self.owns_storage:
                self.storage.close()
                self.owns_storage = False  # after it: a close that was interrupted is made again

    def __repr__(self) -> str:
        return f"<StorageTier of {self.cache.name!r}, {self._executor.breaker.state}>"


def _writable(cache: Cache) -> None:
    check_cache(cache)
    if cache.index.readonly:
        check(Code.READONLY, "use a storage tier")


def _fitting(cache: Cache, storage: Storage) -> None:
    found: Any = storage
    if not isinstance(found, Storage):
        raise ConfigError(f"storage: expected a Storage, found {storage!r}; see open_storage")
    spec = storage.spec
    if spec.page_bytes != cache.page_bytes or spec.fingerprint not in ("", cache.fingerprint):
        raise LayoutMismatch(
            f"the cache {cache.name!r} has pages of {cache.page_bytes} bytes for "
            f"{cache.fingerprint!r}, the storage was opened for {spec}; open it with "
            "spec=StorageSpec.of(cache)"
        )


__all__ = ["BaseTier", "StorageTier", "check_cache", "checked_write", "token_rows"]
