"""StorageTier: what moves pages between a cache's pool and a storage, in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

from lightcache import _arguments
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LayoutMismatch
from lightcache.hashing import Tokens
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.shm.codes import Code, check
from lightcache.storage.admission import SeenKeys
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.breaker import Breaker
from lightcache.storage.costs import ReadCosts
from lightcache.storage.deepest import DeepestJob
from lightcache.storage.jobs import WriteJob
from lightcache.storage.protocol import Keys, Storage, StorageSpec
from lightcache.storage.reading import ReadJob
from lightcache.storage.running import RunningTier
from lightcache.storage.tasks import StorageTask
from lightcache.storage.tiers import ReadPolicy, check_cache, checked_write, token_rows
from lightcache.storage.urls import open_storage

BusyPolicy = Literal["wait", "skip"]


class StorageTier(RunningTier):
    """Writes pages of a cache to a storage and reads them back, in threads of its own.

    Nothing of it makes a request fail: a storage that fails, hangs or dies costs misses, each wait
    has a limit, and after some failures in a row it is left alone for a while. What is read goes
    straight into pages of the pool and is published group by group, with checksums verified by the
    backend; processes of the cache find it as they find any page.

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
        grace: float = 1.0,
        failures: int = 5,
        retry: float = 30.0,
        prefill_tokens_per_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Starts its threads.

        Args:
            storage: opened for pages of this cache's: `StorageSpec.of(cache)`.
            threads: that call the storage. One that hangs keeps one of them.
            min_tokens: of a prompt; shorter ones are not written.
            seen: a page is written when it is offered for this time; 1: at once.
            seen_keys: keys to remember for that.
            read_policy: what `StorageTask.take` does: "wait" until the read is over, "best_effort"
                takes what there is, "deadline" waits until `read_seconds` behind the `prefetch`.
            busy: keys that others are reading or computing are waited for, or skipped.
            group: pages of one call of the storage, of one request, and of one reservation.
            write_pages: most pages that writes may pin, further ones are refused; None: a quarter
                of the pool.
            timeout: seconds that a task may take, from `write` or `prefetch` on.
            grace: seconds behind that until a call that has not returned counts as hanging.
            failures: in a row, after which the storage is not used.
            retry: seconds until it is tried again.
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
            ("grace", grace),
            ("retry", retry),
            ("read_seconds", read_seconds),
        ):
            if Deadline(seconds, clock, name).timeout < 0:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        breaker = Breaker(_arguments.count(failures, "failures", 1, 1 << 30), retry, clock)
        super().__init__(cache, storage, breaker, timeout=timeout, grace=grace, clock=clock)
        self.read_policy = read_policy
        self.read_seconds = read_seconds
        self.busy = busy
        self.group = _arguments.count(group, "group", 1, 1 << 20)
        self._min_tokens = _arguments.count(min_tokens, "min_tokens", 0, 1 << 40)
        if min_tokens and self._page_tokens is None:
            raise ConfigError("min_tokens: this cache was created without page_tokens")
        if prefill_tokens_per_s is not None:
            if self._page_tokens is None:
                raise ConfigError(
                    "prefill_tokens_per_s: this cache was created without page_tokens"
                )
            self._costs = ReadCosts(
                prefill_tokens_per_s, self._page_tokens, self.group, retry, clock
            )
        self._seen = SeenKeys(
            _arguments.count(seen, "seen", 1, 1 << 30),
            _arguments.count(seen_keys, "seen_keys", 1, 1 << 30),
        )
        most = max(1, cache.pages // 4) if write_pages is None else write_pages
        self._write_pages = _arguments.count(most, "write_pages", 0, cache.pages)
        self._threads = _arguments.count(threads, "threads", 1, 256)
        self._crew.start(self._threads)

    @classmethod
    def open(cls, cache: Cache, url: str | Sequence[str], **how: Any) -> StorageTier:
        """A tier with a storage of its own, which it closes when it is closed.

        Args:
            url: of the storage, or of several, the nearest first: see `open_storage`.
            how: as of the constructor.

        Raises:
            ConfigError: no such URL, or an argument out of range.
            StorageError: the storage cannot be opened.
        """
        _writable(cache)
        storage = open_storage(url, spec=StorageSpec.of(cache))
        try:
            made = cls(cache, storage, **how)
        except BaseException:
            storage.close()
            raise
        made._owns = True
        return made

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
        deadline = self._begin(timeout)
        wanted = checked_write(keys, request, lease, tokens)
        rows = None
        if token_ids is not None:
            rows = token_rows(token_ids, len(wanted), self._page_tokens, wanted=self.wants_tokens)
        chosen, reason = self._worth_writing(keys, wanted, tokens)
        if not chosen:
            return self._nothing("write", len(wanted), reason, skipped=len(wanted))
        held = self.cache.match(wanted[:chosen], namespace=namespace)
        pages = len(held)
        try:
            room = self._write_pages - self._pinned()
            if pages == 0 or pages > room:
                held.release()
                skipped = len(wanted) - pages
                full = f"{pages} pages are more than writes may pin just now, {max(0, room)}"
                why = "nothing of it is in the cache" if pages == 0 else full
                return self._nothing("write", len(wanted), why, refused=pages, skipped=skipped)
            task = StorageTask("write", len(wanted), self._page_tokens)
            task._count(skipped=len(wanted) - pages)
            task._say(reason)
            job = WriteJob(self, task, deadline, keys[:pages].copy(), held, rows)
        except BaseException:
            held.__exit__(None, None, None)
            raise
        job.request = job if request is None else request
        return self._submit(job)

    def _worth_writing(self, keys: Keys, wanted: Keys, tokens: int | None) -> tuple[int, str]:
        """How many pages, and why not all."""
        if self._breaker.shut:
            return 0, self._breaker.reason
        have = len(keys) * (self._page_tokens or 0) if tokens is None else tokens
        if have < self._min_tokens:
            return 0, f"a prompt of {have} tokens is not written, {self._min_tokens} are"
        admitted = self._seen.admit(wanted)
        return admitted, "" if admitted == len(wanted) else "not seen often enough to be written"

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
        deadline = self._begin(timeout)
        _arguments.keys(keys)
        _arguments.count(start, "start", 0, len(keys))
        pages = len(keys) - start
        probe = False
        if self._costs is not None and not self._breaker.shut:
            threads = max(1, self._threads - self._crew.stuck)
            verdict = self._costs.decide(pages, self._reads_ahead(), threads)
            if verdict.declined:
                return self._nothing("read", pages, verdict.declined, declined=pages)
            probe = verdict.probe
        return self._fetch(keys, start, namespace, deadline, hold=hold, declinable=not probe)

    def _fetch(
        self,
        keys: Keys,
        start: int,
        namespace: Namespace | None,
        deadline: Deadline | None = None,
        **how: bool,
    ) -> StorageTask:
        """A prefetch that is not declined before it begins."""
        pages = len(keys) - start
        if self._breaker.shut:
            return self._nothing("read", pages, self._breaker.reason, failed=pages)
        task = StorageTask("read", pages, self._page_tokens)
        deadline = self._begin(None) if deadline is None else deadline
        how = {"hold": False, **how}
        return self._submit(ReadJob(self, task, deadline, keys.copy(), start, namespace, **how))

    def prefetch_deepest(
        self,
        keys: Keys,
        *,
        most: int = 512,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """See `BaseTier`."""
        deadline = self._begin(timeout)
        _arguments.keys(keys)
        _arguments.count(most, "most", 0, 1 << 30)
        if self._breaker.shut:
            return self._nothing("read", len(keys), self._breaker.reason, failed=1)
        task = StorageTask("read", len(keys), self._page_tokens)
        return self._submit(DeepestJob(self, task, deadline, keys.copy(), most, namespace))


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


__all__ = ["StorageTier"]
