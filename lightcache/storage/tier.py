"""Tiers move pages between a cache's pool and a storage, in the background.

`StorageTier` runs tasks in threads of this process; `service.StorageClient` sends them to the
storage service.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from lightcache import _arguments
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached, LayoutMismatch, LightcacheError
from lightcache.groups import Rule
from lightcache.hashing import Tokens
from lightcache.layout import GROUPS
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.prompt import TokenIds
from lightcache.runs import PLAIN, Run
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import leave
from lightcache.storage.common import Clock, Deadline, check_keys, log, storage_breaker
from lightcache.storage.costs import ReadCosts
from lightcache.storage.jobs import (
    Groups,
    JobExecutor,
    LastReady,
    LastReadyJob,
    TierOptions,
    WriteJob,
)
from lightcache.storage.protocol import Keys, Storage, StorageSpec
from lightcache.storage.tasks import (
    TAKEN,
    StorageTask,
    TaskProgress,
    TierStats,
)
from lightcache.storage.urls import open_storage

T = TypeVar("T", bound="BaseTier")
STATES: Groups = ((Rule.point(), PLAIN),)
"""Each page is of use alone."""
MOST_STEP = 1 << 15
Call = Literal["write", "prefetch", "prefetch_last_ready"]


class BaseTier(ABC):
    """Moves pages between a cache's pool and a storage, in the background. It never fails a
    request. Close it before the cache.

    The calls that make tasks check their arguments, once. A subclass implements `_deadline_of` and
    `_start`, which they lead to, and `stats`, `take_figures` and `close`.
    """

    cache: Cache
    _page_tokens: int | None

    def write(
        self,
        keys: Keys,
        request: object = None,
        *,
        lease: Lease | None = None,
        tokens: int | None = None,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """Store the pages of a prompt that the cache has and the storage lacks. Does not block.
        The tier pins the pages until they are written, so the caller's lease may end at once. It
        pins at most `write_pages` of all queued writes; further pages are pinned when their turn
        comes, and may be evicted before.

        Args:
            keys: the keys of the prompt's pages from the first on; the longest ready prefix is
                written.
            request: the request they belong to, any hashable. Writes of one request are adjacent
                in the queue, and no call of the storage has pages of two requests.
            lease: the caller's lease on pages of these keys; no other pages are written.
            tokens: tokens of the whole prompt, for `min_tokens`; None: those of its keys.
            timeout: seconds; None: the tier's.

        Raises:
            ConfigError: bad keys, or a lease of more pages than there are keys.
            Detached: the tier or the cache was closed.
            NotReady: of a `StorageTier`: an operator disabled the cache. The task of a
                `StorageClient` is FAILED.
        """
        deadline = self._deadline_of(timeout, namespace)
        wanted = checked_write(keys, request, lease, tokens)
        if tokens is None:
            tokens = len(keys) * (self._page_tokens or 0)
        how = {"request": request, "tokens": tokens}
        return self._start("write", wanted, namespace, deadline, **how)

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
        started. Hashes in this call. For the other arguments see `Cache.hash_pages`.

        Raises:
            ConfigError: bad token ids, salt, LoRA id or extra digests, another type of namespace,
                or a cache without page_tokens.
            Otherwise as `write`.
        """
        keys = self.cache.hash_pages(tokens, salt=salt, lora=lora, extra=extra, namespace=namespace)
        return self.write(keys, request, tokens=len(tokens), namespace=namespace, timeout=timeout)

    def prefetch(
        self,
        keys: Keys,
        start: int = 0,
        *,
        namespace: Namespace | None = None,
        hold: bool = False,
        timeout: float | None = None,
        tokens: Tokens | None = None,
    ) -> StorageTask:
        """Read the stored prefix of keys[start:] into the cache. Does not block. Each page becomes
        ready for all processes once it is read, and is not pinned: match when the task has ended.
        A tier with `prefill_tokens_per_s` declines pages that are faster to compute than to read.

        Args:
            keys: the whole chain from its root, as for `Cache.reserve`.
            start: the first key that the cache lacks, usually `len(lease)`.
            hold: make no page ready until `StorageTask.publish`; `cancel` frees the pages. For
                ranks that agree on how many pages all of them could read. Until then other
                processes see these keys as being written, for at most the tier's `timeout` after
                the end of the task. Only one process of a cache does this. `StorageClient` refuses
                it.
            timeout: seconds; None: the tier's.
            tokens: see `Cache.reserve`. A `StorageClient` ignores them.

        Raises:
            ConfigError: bad keys or tokens, or a start beyond the keys.
            Detached: the tier or the cache was closed.
        """
        deadline = self._deadline_of(timeout, namespace)
        _arguments.keys(keys)
        _arguments.count(start, "start", 0, len(keys))
        rows = self.cache.token_rows(tokens, len(keys), namespace)
        how = {"start": start, "hold": hold, "rows": rows}
        return self._start("prefetch", keys, namespace, deadline, **how)

    def prefetch_last_ready(
        self,
        keys: Keys,
        *,
        groups: Groups = STATES,
        start: int = 0,
        step: int = 1,
        most: int = 512,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """Read the last position of a sequence that is stored whole into the cache: the pages that
        the rule of each group needs there, as far as the cache lacks them. By default the last
        stored page alone, for pages that are usable without those before them. Does not block. The
        search stops at a position of which the cache has all. When the task has ended,
        `StorageTask.pages_done` is the number of keys up to that position; 0: there is none, or a
        part of it could not be read.

        Args:
            keys: those of the sequence, from its beginning.
            groups: the rule of each group, and how its pages lie in the cache: `write` them by
                `run.keys`.
            start: positions up to this one are of no use.
            step: positions are multiples of so many pages, and what they need begins at one.
            most: maximum number of lookups of the storage.
            timeout: seconds; None: the tier's.

        Raises:
            ConfigError: bad keys or groups, a start beyond the keys, or a step below 1.
            Detached: the tier or the cache was closed.
        """
        deadline = self._deadline_of(timeout, namespace)
        _arguments.keys(keys)
        _arguments.count(start, "start", 0, len(keys))
        _arguments.count(step, "step", 1, MOST_STEP)
        _arguments.count(most, "most", 0, 1 << 30)
        how = {"groups": checked_groups(groups), "start": start, "step": step, "most": most}
        return self._start("prefetch_last_ready", keys, namespace, deadline, **how)

    @abstractmethod
    def _deadline_of(self, timeout: float | None, namespace: Namespace | None) -> Deadline:
        """The deadline of a new task. Raises Detached if the tier or the cache was closed."""

    @abstractmethod
    def _start(
        self,
        call: Call,
        keys: Keys,
        namespace: Namespace | None,
        deadline: Deadline,
        **how: Any,
    ) -> StorageTask:
        """Begin a task.

        Args:
            call: the public method. The keys of a `write` are those of its lease.
            how: the method's other arguments.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Returns the totals."""

    @abstractmethod
    def take_figures(self) -> Counter[str]:
        """Returns the increase of the totals `TAKEN` since the last call."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> bool:
        """Free pages held for `StorageTask.publish`, finish queued tasks, cancel those that remain.
        May be called again.

        Args:
            timeout: seconds for finishing; 0: cancel at once.

        Returns:
            True if everything has ended.
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
        ConfigError: bad keys, `lease` is not a Lease or has more pages than there are keys, the
            request is not hashable, or `tokens` is not a count.
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


def checked_groups(groups: Any) -> Groups:
    """The groups of a `BaseTier.prefetch_last_ready`.

    Raises:
        ConfigError: none, more than a model has, or no pairs of a rule and a run.
    """
    listed = list(groups) if isinstance(groups, (list, tuple)) else []
    kinds = [tuple(map(type, each)) if isinstance(each, tuple) else each for each in listed]
    if not 0 < len(listed) <= GROUPS or any(kind != (Rule, Run) for kind in kinds):
        raise ConfigError(
            f"groups: expected 1 to {GROUPS} pairs of a Rule and a Run, found {groups!r}"
        )
    return listed


def check_cache(cache: Cache) -> None:
    """Refuse a cache that no tier can use.

    Raises:
        ConfigError: it is not a Cache.
        Detached: the cache is closed.
    """
    given: Any = cache
    if not isinstance(given, Cache):
        raise ConfigError(f"cache: expected a Cache, found {cache!r}; see Cache.open")
    cache.index.segment.check_usable()


class SeenKeys:
    """Counts how often keys were offered. Bounded: the keys unseen for longest go first."""

    def __init__(self, times: int, most: int) -> None:
        """
        Args:
            times: a key is admitted when it is offered the `times`-th time; 1: at once.
            most: maximum number of keys to remember.
        """
        self.times = times
        self._most = most
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def admit(self, keys: Keys) -> int:
        """Count these keys. Returns the number of leading keys that are admitted: after a refused
        key, none is, as it would not be found."""
        names = check_keys(keys)
        with self._lock:
            # From the last to the first, so that the end of a prompt is forgotten first.
            for name in reversed(names):
                self._seen[name] = self._seen.pop(name, 0) + 1
            admitted = (self._seen[name] >= self.times for name in names)
            prefix = next((i for i, good in enumerate(admitted) if not good), len(names))
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return prefix


class StorageTier(BaseTier):
    """Writes pages of a cache to a storage and reads them back, in threads of its own.

    It never fails a request: a storage that fails, hangs or dies costs misses. Each wait has a
    limit, and after some failures in a row the storage is not used for a while. Pages are read
    straight into the pool and published group by group. The backend verifies checksums; processes
    of the cache match these pages like any other.

    Close it before the cache. It does not own the cache, and owns the storage only if `open` made
    the tier. It cannot be used in a forked child.
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
        """Starts the thread that watches for late calls; others start when they are needed.

        Args:
            storage: a storage opened with this cache's spec, `StorageSpec.of(cache)`.
            threads: number of threads that call the storage at a time. A hanging one is replaced,
                up to eight; when all hang, tasks are refused until one of them returns.
            min_tokens: shorter prompts are not written.
            seen: a page is written when it is offered the `seen`-th time; 1: at once.
            seen_keys: number of keys to remember for `seen`.
            group: pages in one call of the storage, all of one request, and in one reservation.
            write_pages: pages that queued writes may pin. Further pages are pinned in addition, a
                group at a time, when their turn comes. None: a quarter of the pool; 0: nothing is
                written.
            timeout: seconds that a task may take, from `write` or `prefetch` on. A write has this
                time again after each group that it stores.
            call_timeout: seconds that one call of the storage may take, within `timeout`.
            grace: seconds after that until a call that has not returned counts as hanging.
            failures: number of failures in a row after which the storage is not used. One call that
                used up its time is enough if no other succeeded meanwhile.
            retry: seconds until the tier tries the storage again, with a call of its own that no
                task waits for.
            prefill_tokens_per_s: the model's prefill speed. A prefetch that would take longer than
                computing its pages, going by past reads, is declined; every `retry` seconds one of
                these is read anyway, to measure again. None: all are read.
            clock: in seconds; for tests.

        Raises:
            ConfigError: an argument is out of range, or the cache has no page_tokens and
                `min_tokens` or `prefill_tokens_per_s` is given.
            LayoutMismatch: the storage was opened for pages of another size or fingerprint.
            Detached: the cache was closed.
            PermissionDenied: the cache is attached read-only.
        """
        _writable(cache)
        _fitting(cache, storage)
        for name, seconds in (
            ("timeout", timeout),
            ("call_timeout", call_timeout),
            ("grace", grace),
            ("retry", retry),
        ):
            if Deadline(seconds, clock, name).timeout < 0:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        count = _arguments.count
        page_tokens = cache.index.segment.config.get("page_tokens")
        self._page_tokens = page_tokens
        for name, tokens in (
            ("min_tokens", min_tokens or None),
            ("prefill_tokens_per_s", prefill_tokens_per_s),
        ):
            if tokens is not None and page_tokens is None:
                raise ConfigError(f"{name}: this cache was created without page_tokens")
        self.options = TierOptions(
            threads=count(threads, "threads", 1, 256),
            group=count(group, "group", 1, 1 << 20),
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
        """Whether closing the tier closes the storage."""
        self._owning = threading.Lock()
        self._executor = JobExecutor(cache, storage, breaker, self.options, costs)
        self._executor.start_watching()

    @classmethod
    def open(cls, cache: Cache, url: str | Sequence[str], **how: Any) -> StorageTier:
        """Open a tier with a storage of its own, which is closed with the tier.

        Args:
            url: the storage's URL, or two, the nearer first: see `open_storage`.
            how: arguments of the constructor.

        Raises:
            ConfigError: a bad URL, or an argument is out of range.
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

    def _deadline_of(self, timeout: float | None, namespace: Namespace | None) -> Deadline:
        if self._executor.closing:
            raise Detached("this storage tier was closed; make another one")
        self.cache.index.segment.check_usable()
        return Deadline(self.options.timeout if timeout is None else timeout, self.options.clock)

    def _start(
        self,
        call: Call,
        keys: Keys,
        namespace: Namespace | None,
        deadline: Deadline,
        **how: Any,
    ) -> StorageTask:
        if call == "write":
            return self._write(keys, namespace, deadline, **how)
        if call == "prefetch":
            return self._prefetch(keys, namespace, deadline, **how)
        return self._prefetch_last_ready(keys, namespace, deadline, LastReady(**how))

    # ---- writing

    def _write(
        self,
        keys: Keys,
        namespace: Namespace | None,
        deadline: Deadline,
        request: object,
        tokens: int,
    ) -> StorageTask:
        executor = self._executor
        chosen, reason = self._worth_writing(keys, tokens)
        if not chosen:
            return executor.ended_task("write", len(keys), reason, skipped=len(keys))
        room = max(0, self._write_pages - executor.pinned())
        lease = self.cache.match(keys[: min(chosen, room)], namespace=namespace)
        try:
            pages = len(lease)
            if pages == min(chosen, room) < chosen:  # pages beyond those pinned may be ready too
                pages += self.cache.peek(keys[pages:chosen], namespace=namespace)
            if pages < chosen:
                absent = "the cache did not have them: evicted since, or never written to it"
                executor.count_unstored("absent", chosen - pages, absent)
                reason = reason or f"{chosen - pages} pages were not stored: {absent}"
            if not pages or not self._write_pages:
                lease.release()
                skipped = len(keys) - pages
                why = "writes may pin no pages" if pages else "nothing of it is in the cache"
                executor.count_unstored("refused", pages, why)
                counts = {"refused": pages, "skipped": skipped}
                return executor.ended_task("write", len(keys), why, **counts)
            progress = TaskProgress("write", len(keys), self._page_tokens)
            if pages < len(keys):
                progress.count(skipped=len(keys) - pages)
                progress.add_reason(reason)
            own = keys[:pages].copy()
            job = WriteJob(executor, progress, deadline, own, lease, namespace)
        except BaseException:
            lease.__exit__(None, None, None)
            raise
        job.group = request  # jobs of one request are adjacent in the queue
        return executor.submit_job(job)

    def _worth_writing(self, wanted: Keys, prompt: int) -> tuple[int, str]:
        """The number of pages to write, and why not all."""
        executor = self._executor
        if executor.breaker.shut:
            reason = executor.breaker.reason
            executor.count_unstored("disabled", len(wanted), reason)
            return 0, reason
        if prompt < self._min_tokens:
            executor.add(skipped_short=len(wanted))
            return 0, f"a prompt of {prompt} tokens is not written, {self._min_tokens} are"
        admitted = len(wanted) if self._seen.times == 1 else self._seen.admit(wanted)
        if admitted == len(wanted):
            return admitted, ""
        executor.add(skipped_unseen=len(wanted) - admitted)
        return admitted, "not seen often enough to be written"

    # ---- reading

    def _prefetch(
        self,
        keys: Keys,
        namespace: Namespace | None,
        deadline: Deadline,
        start: int,
        hold: bool,
        rows: TokenIds | None,
    ) -> StorageTask:
        executor = self._executor
        probe = False
        if executor.costs is not None and not executor.breaker.shut:
            pages = len(keys) - start
            verdict = executor.costs.decide(pages, executor.reads_ahead(), self.options.threads)
            if verdict.declined:
                return executor.ended_task("read", pages, verdict.declined, declined=pages)
            probe = verdict.probe
        how = {"hold": hold, "declinable": not probe}
        return executor.fetch(keys, start, namespace, deadline, rows, **how)

    def _prefetch_last_ready(
        self,
        keys: Keys,
        namespace: Namespace | None,
        deadline: Deadline,
        wanted: LastReady,
    ) -> StorageTask:
        executor, pages = self._executor, len(keys) - wanted.start
        if executor.breaker.shut:
            return executor.ended_task("read", pages, executor.breaker.reason, failed=1)
        progress, own = TaskProgress("read", pages, self._page_tokens), keys.copy()
        return executor.submit_job(
            LastReadyJob(executor, progress, deadline, own, wanted, namespace)
        )

    def failed_task(
        self, kind: Literal["read", "write"], pages: int, error: LightcacheError
    ) -> StorageTask:
        """A task of this tier that failed before it started; for the storage service."""
        return self._executor.ended_task(kind, pages, str(error), failed=pages)

    # ---- inspection, closing

    def poll(self) -> None:
        """Look for overdue calls and tasks now. A thread also does so, by the real time."""
        self._executor.poll()

    def stats(self) -> TierStats:
        """See `BaseTier`."""
        return self._executor.stats()

    def take_figures(self) -> Counter[str]:
        """See `BaseTier`."""
        return self._executor.take_totals(TAKEN)

    def close(self, timeout: float = 10.0) -> bool:
        """Free pages held for `StorageTask.publish`, finish queued tasks, cancel those that remain.
        May be called again.

        Args:
            timeout: seconds for finishing; 0: cancel at once.

        Returns:
            True if everything has ended. False: a call of the storage hangs, or another process
            holds the cache's lock, so that pages cannot be given back. They stay pinned until the
            call returns or the lock is free; until then the cache cannot be closed (InUse), and
            `stats` counts these tasks as running. Afterwards the pages are given back, the threads
            end, and a storage that the tier owns is closed. Call again to wait for that.

        Raises:
            ConfigError: `timeout` is not a number.
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
        """Close the storage once, if the tier owns it. No call of it may be in flight."""
        with self._owning:
            if self.owns_storage:
                self.storage.close()
                self.owns_storage = False  # after it: an interrupted close is repeated

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


__all__ = ["BaseTier", "Call", "StorageTier", "check_cache", "checked_write"]
