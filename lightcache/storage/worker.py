"""StorageTier: what moves pages between a cache's pool and a storage, in the background."""

from __future__ import annotations

import contextlib
import math
import operator
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from lightcache import _arguments
from lightcache.breaker import Breaker
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached, LayoutMismatch, LightcacheError
from lightcache.hashing import Tokens
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.shm.codes import Code, check
from lightcache.storage.arguments import Clock, Deadline, write_to
from lightcache.storage.breaker import log, storage_breaker, unread, unwritten
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    ReadStatus,
    Storage,
    StorageSpec,
    TokenRows,
    WriteResult,
    WriteStatus,
)
from lightcache.storage.stacked import own_memory
from lightcache.storage.threads import (
    Crew,
    DeepestJob,
    Job,
    ReadJob,
    WriteJob,
    checked_contains,
    checked_statuses,
)
from lightcache.storage.tiers import (
    TAKEN,
    BaseTier,
    ReadPolicy,
    SeenKeys,
    StorageTask,
    TierStats,
    Unstored,
    check_cache,
    checked_write,
    token_rows,
)
from lightcache.storage.urls import open_storage

# ---- When computing pages is faster than reading them from a storage, by what reading has taken.

_KEPT = 0.9
"""Of what an older measurement counts, with each newer one: the last ten make two thirds."""
_APART = 0.1
"""Of a call's pages: how far sizes must lie apart before overhead and rate are told apart."""


@dataclass(frozen=True)
class Verdict:
    """Whether pages are read."""

    declined: str = ""
    """Why they are not, with both figures; empty: they are."""
    probe: bool = False
    """They are read to find out whether that takes as long still."""


class ReadCosts:
    """Reading n pages in c calls takes `lookup + c * overhead + n * page` seconds, computing them
    `n * page_tokens / prefill_tokens_per_s`. All of the first are decaying averages of what calls
    of the storage took; overhead and page are those of the straight line that fits them best. As
    long as all calls bring about the same number of pages nobody can tell these two apart: all of
    it counts as the pages' then, and a small read goes through, which tells them apart.

    A storage that is declined is not measured either. So when nothing was measured for `retry`
    seconds the next one that would be declined is read as a probe, and what is measured then takes
    the place of all before: if that was fast, those that follow are read, and correct it.

    Any thread may use it.
    """

    def __init__(
        self, prefill_tokens_per_s: float, page_tokens: int, group: int, retry: float, clock: Clock
    ) -> None:
        """Nothing is measured yet, so nothing is declined.

        Args:
            prefill_tokens_per_s: what the model computes.
            group: pages of one call, at most.
            retry: seconds.

        Raises:
            ConfigError: no such number.
        """
        self._page_seconds = page_tokens / _positive(prefill_tokens_per_s)
        self._group = group
        self._retry = retry
        self._clock = clock
        self._lock = threading.Lock()
        self._reads = np.zeros(5)  # weight, pages, seconds, pages * pages, pages * seconds
        self._lookups = np.zeros(2)  # weight, seconds
        self._found = np.zeros(2)  # pages that were looked for, and stored
        self._tried = clock()
        self._renew = False

    # ---- what was measured

    def note_read(self, pages: int, seconds: float) -> None:
        """A call has brought so many pages; of one that brought none nothing is learned."""
        if pages <= 0:
            return
        with self._lock:
            kept = 0.0 if self._renew else _KEPT
            new = np.array([1.0, pages, seconds, pages * pages, pages * seconds])
            self._reads = self._reads * kept + new
            self._renew = False
            self._tried = self._clock()

    def note_lookup(self, pages: int, found: int, seconds: float) -> None:
        """A call has said how many of so many pages are stored."""
        with self._lock:
            self._lookups = self._lookups * _KEPT + np.array([1.0, seconds])
            self._found = self._found * _KEPT + np.array([pages, found])

    def figures(self) -> tuple[float, float] | None:
        """Seconds of a call beside its pages, and of a page; None: nothing was measured yet."""
        with self._lock:
            return self._line()

    def _line(self) -> tuple[float, float] | None:
        weight, pages, seconds, squares, products = (float(each) for each in self._reads)
        if weight == 0.0:
            return None
        mean, each = pages / weight, seconds / weight
        spread = squares / weight - mean * mean
        if spread <= (_APART * mean) ** 2:
            return 0.0, each / mean
        slope = max(0.0, (products / weight - mean * each) / spread)
        overhead = each - slope * mean
        return (overhead, slope) if overhead >= 0.0 else (0.0, each / mean)

    # ---- what follows from it

    def decide(self, pages: int, ahead: Sequence[int], threads: int) -> Verdict:
        """Before pages are looked for.

        Args:
            ahead: pages of each read that is in front of this one, as they were asked for.
            threads: that carry them out; with fewer reads ahead nobody waits.
        """
        with self._lock:
            line = self._line()
            if line is None or pages <= 0:
                return Verdict()
            lookup = float(self._lookups[1] / max(1.0, self._lookups[0]))
            share = float(self._found[1] / max(1.0, self._found[0]))
            wait = 0.0
            if len(ahead) >= threads:  # of those in front, what is usually there
                busy = sum(lookup + self._seconds(line, math.ceil(n * share)) for n in ahead)
                wait = busy / threads
            return self._verdict(pages, wait + lookup + self._seconds(line, pages), wait)

    def decide_found(self, pages: int) -> Verdict:
        """When it is known that so many are stored, and nothing is waited for any more."""
        with self._lock:
            line = self._line()
            if line is None or pages <= 0:
                return Verdict()
            return self._verdict(pages, self._seconds(line, pages), 0.0)

    def _seconds(self, line: tuple[float, float], pages: int) -> float:
        return -(-pages // self._group) * line[0] + pages * line[1]

    def _verdict(self, pages: int, reading: float, wait: float) -> Verdict:
        computing = pages * self._page_seconds
        if reading <= computing:
            return Verdict()
        now = self._clock()
        if now - self._tried >= self._retry:
            self._tried, self._renew = now, True
            return Verdict(probe=True)
        behind = f", {wait:.3g} s of it behind others" if wait else ""
        return Verdict(
            f"declined: reading {pages} pages would take {reading:.3g} s{behind}, computing them "
            f"{computing:.3g} s"
        )


def _positive(value: Any) -> float:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not 0.0 < float(value) < math.inf:
        raise ConfigError(
            f"prefill_tokens_per_s: expected a finite number above 0, found {value!r}"
        )
    return float(value)


# ---- The lower half of a tier: its queue and threads, its calls of the storage, figures, the
# end.


class RunningTier(BaseTier):
    """A tier without its calls: see `StorageTier`."""

    def __init__(
        self,
        cache: Cache,
        storage: Storage,
        breaker: Breaker,
        *,
        threads: int,
        timeout: float,
        call_timeout: float,
        grace: float,
        clock: Clock,
    ) -> None:
        """No threads yet."""
        self.cache = cache
        self.storage = storage
        self._owns = False
        """Whether the storage is to be closed with us."""
        self._owning = threading.Lock()
        self.timeout = timeout
        self.clock = clock
        self._grace = grace
        self._breaker = breaker
        self._page_tokens: int | None = cache.index.segment.config.get("page_tokens")
        self._crew = Crew(
            threads,
            breaker,
            clock,
            seconds=min(call_timeout, timeout),
            grace=grace,
            probe=self._find_out,
        )
        self._failing: tuple[str, Keys | None] = ("contains", None)
        """What was asked last, of which pages: what a probe asks once more."""
        self._costs: ReadCosts | None = None
        """None: reads are never declined, and not measured."""
        self._taken: Counter[str] = Counter()
        self._warned: set[str] = set()

    @property
    def wants_tokens(self) -> bool:
        """See `BaseTier`."""
        return self.storage.wants_tokens

    # ---- its threads

    def _begin(self, timeout: float | None) -> Deadline:
        if self._crew.closing:
            raise Detached("this storage tier was closed; make another one")
        self.cache.index.segment.check_usable()
        return Deadline(self.timeout if timeout is None else timeout, self.clock)

    def _submit(self, job: Job) -> StorageTask:
        try:
            self._crew.put(job)
        except LightcacheError as error:  # closed meanwhile; or no thread is left for it
            job.task._count(failed=job.reads)
            self._crew.finish(job, str(error), failed=True)
        return job.task

    def _nothing(
        self, kind: Literal["read", "write"], pages: int, reason: str = "", **counts: int
    ) -> StorageTask:
        """A task that is over before it began."""
        task = StorageTask(kind, pages, self._page_tokens)
        task._count(**counts)
        if "failed" in counts:
            task._end(reason, failed=True)
        else:
            task._say(reason)
            task._reach(0 if counts else pages)
            task._end(failed=False)
        self._tally(**counts)
        task._settle()
        return task

    def _pinned(self) -> int:
        with self._crew.changed:
            return sum(job.pinned for job in self._jobs())

    def _jobs(self) -> list[Job]:
        return [*self._crew.queued(), *self._crew.running]

    def _tally(self, **counts: int) -> None:
        self._crew.add(**counts)

    def _unstored(self, kind: Unstored, pages: int, why: str) -> None:
        """Count pages that should have been stored, and were not; the first of a kind is logged."""
        if not pages:
            return
        self._tally(unstored=pages, **{f"unstored_{kind}": pages})
        with self._crew.changed:
            first = kind not in self._warned and kind != "disabled"  # of that the breaker told
            self._warned.add(kind)
        if first:
            log.warning(
                "%d pages of a prompt were not stored: %s; `unstored_%s` of the tier's stats counts"
                " such pages, and this is said once",
                *(pages, why, kind),
            )

    def _let_go(self, job: Job) -> None:
        self._crew.unhold(job)
        self._crew.let_go(job)

    def _reads_ahead(self) -> list[int]:
        """Pages of each read that runs or waits."""
        with self._crew.changed:
            jobs = self._jobs()
        # Outside of the lock: a task that ends takes its own lock, and then this one.
        return [pages for job in jobs if (pages := job.reads)]

    # ---- calls of the storage, in its threads

    def _contains(self, job: Job, keys: Keys) -> int:
        self._failing = ("contains", keys[:1])

        def run(left: float) -> int:
            begun = self.clock()
            found = checked_contains(self.storage.contains(keys, timeout=left), len(keys))
            if self._costs is not None and job.task.kind == "read":
                self._costs.note_lookup(len(keys), found, self.clock() - begun)
            return found

        return self._crew.call(job, "contains", run, lambda found: "")

    def _read(self, job: Job, keys: Keys, buffers: Sequence[Buffer]) -> ReadResult:
        self._failing = ("read", keys[:1])

        def run(left: float) -> ReadResult:
            begun = self.clock()
            result = self.storage.read(keys, buffers, timeout=left)
            checked_statuses("read", result.statuses, len(keys))
            good = result.count(ReadStatus.OK)
            self._tally(read_bytes=good * self.cache.page_bytes)
            if self._costs is not None:
                self._costs.note_read(good, self.clock() - begun)
            return result

        return self._crew.call(job, "read", run, unread)

    def _write(
        self,
        job: Job,
        keys: Keys,
        buffers: Sequence[Buffer],
        parent: Keys | None,
        tokens: TokenRows | None,
    ) -> WriteResult:
        def run(left: float) -> WriteResult:
            result = write_to(
                self.storage, keys, buffers, timeout=left, parent=parent, tokens=tokens
            )
            checked_statuses("write", result.statuses, len(keys))
            self._tally(written_bytes=result.count(WriteStatus.STORED) * self.cache.page_bytes)
            self._note_evicted()
            return result

        return self._crew.call(job, "write", run, unwritten)

    def _find_out(self, seconds: float) -> str:
        """Whether the storage works, by asking once more for the page that was asked for last, into
        memory of our own. Empty, or why it does not."""
        what, key = self._failing
        if key is None:
            return ""
        deadline = Deadline(seconds, self.clock)
        key = key.copy()
        if checked_contains(self.storage.contains(key, timeout=seconds), 1) and what == "read":
            page = own_memory(1, self.cache.page_bytes)
            return unread(self.storage.read(key, [page[0]], timeout=deadline.left))
        return ""

    def _note_evicted(self) -> None:
        """Ask the storage, in the thread that has written: nobody else waits if it takes long."""
        with contextlib.suppress(Exception):  # its figures are no reason to call a write failed
            found = max(0, operator.index(self.storage.stats().evicted))
            with self._crew.changed:
                self._crew.tally["evicted"] = max(found, self._crew.tally["evicted"])

    # ---- looking at it, and the end

    def poll(self) -> None:
        """Look now for what is overdue. A thread does so by itself, by the real time."""
        self._crew.poll()

    def stats(self) -> TierStats:
        """Totals."""
        crew = self._crew
        line = (None if self._costs is None else self._costs.figures()) or (None, None)
        with crew.changed:
            tally = {name: crew.tally[name] for name in _TALLIES}
            return TierStats(
                **tally,
                queued=len(crew.queued()),
                running=len(crew.running),
                stuck=crew.late,
                writing=sum(job.pinned for job in self._jobs()),
                state=self._breaker.state,
                read_call_seconds=line[0],
                read_page_seconds=line[1],
            )

    def _take_figures(self) -> Counter[str]:
        """See `BaseTier`."""
        with self._crew.changed:
            now = Counter({name: self._crew.tally[name] for name in TAKEN})
            more, self._taken = now - self._taken, now
            return more

    def close(self, timeout: float = 10.0) -> bool:
        """Give back what is held for `StorageTask.publish`, finish what is queued, cancel what is
        left then. May be called again.

        Args:
            timeout: seconds for finishing; 0: cancel at once.

        Returns:
            Whether everything has ended. False: a call of the storage hangs, or somebody holds the
            cache's lock, so that pages cannot be given back; they stay pinned until it returns, or
            that is over, and until then the cache cannot be closed (InUse). The rest is done then:
            pages go back, threads end, and a storage of our own is closed. Call again to wait for
            that; until then `stats` has the tasks of such calls as running.

        Raises:
            ConfigError: `timeout` is no number.
        """
        deadline = Deadline(timeout, what="timeout")  # refused before anything is closed
        self._crew.begin_closing()
        if not self._crew.wait_idle(deadline.left):
            with self._crew.changed:
                left = self._jobs()
            for job in left:
                self._crew.cancel(job)
            self._crew.end_cancelled()
            if not self._crew.wait_idle(self._grace) and self._crew.leave(self._close_storage):
                self._warn_of_what_is_left()
                return False
        self._crew.join()
        self._close_storage()
        return True

    def _warn_of_what_is_left(self) -> None:
        calls, unreturned = len(self._crew.calls), self._crew.unreturned
        still_open = ", and the storage open" if self._owns else ""
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
                "somebody holds the cache's lock; that is tried again, and they stay pinned until "
                "then%s",
                unreturned,
                still_open,
            )

    def _close_storage(self) -> None:
        """If it is ours; once no call of it is under way. Once, if it was not interrupted."""
        with self._owning:
            if self._owns:
                self.storage.close()
                self._owns = False  # behind it: a close that was interrupted is made again

    def __repr__(self) -> str:
        return f"<StorageTier of {self.cache.name!r}, {self._breaker.state}>"


_TALLIES = (
    *("loaded", "stored", "present", "absent", "failed", "corrupt", "refused", "skipped", "busy"),
    *("no_room", "declined", "tasks_finished", "tasks_failed", "timeouts"),
    *("read_bytes", "written_bytes", "evicted", "skipped_short", "skipped_unseen", "unstored"),
    *(f"unstored_{kind}" for kind in get_args(Unstored)),
)


# ---- StorageTier: what moves pages between a cache's pool and a storage, in the background.

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
                takes what there is, "deadline" waits until `read_seconds` behind the `prefetch`.
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
        breaker = storage_breaker(_arguments.count(failures, "failures", 1, 1 << 30), retry, clock)
        super().__init__(
            cache,
            storage,
            breaker,
            threads=_arguments.count(threads, "threads", 1, 256),
            timeout=timeout,
            call_timeout=call_timeout,
            grace=grace,
            clock=clock,
        )
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
        self._threads = threads
        self._crew.start()

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
        room = max(0, self._write_pages - self._pinned())
        held = self.cache.match(wanted[: min(chosen, room)], namespace=namespace)
        try:
            pages = len(held)
            if pages == min(chosen, room) < chosen:  # more than may be pinned, or just as many
                pages += self.cache.peek(wanted[pages:chosen], namespace=namespace)
            if not pages or not self._write_pages:
                held.release()
                skipped = len(wanted) - pages
                why = "writes may pin no pages" if pages else "nothing of it is in the cache"
                self._unstored("refused", pages, why)
                return self._nothing("write", len(wanted), why, refused=pages, skipped=skipped)
            task = StorageTask("write", len(wanted), self._page_tokens)
            task._count(skipped=len(wanted) - pages)
            task._say(reason)
            job = WriteJob(self, task, deadline, keys[:pages].copy(), held, namespace, rows)
        except BaseException:
            held.__exit__(None, None, None)
            raise
        job.request = job if request is None else request
        return self._submit(job)

    def _worth_writing(self, keys: Keys, wanted: Keys, tokens: int | None) -> tuple[int, str]:
        """How many pages, and why not all."""
        if self._breaker.shut:
            self._unstored("disabled", len(wanted), self._breaker.reason)
            return 0, self._breaker.reason
        have = len(keys) * (self._page_tokens or 0) if tokens is None else tokens
        if have < self._min_tokens:
            self._tally(skipped_short=len(wanted))
            return 0, f"a prompt of {have} tokens is not written, {self._min_tokens} are"
        admitted = self._seen.admit(wanted)
        self._tally(skipped_unseen=len(wanted) - admitted)
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
            threads = self._threads
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


__all__ = ["ReadCosts", "RunningTier", "StorageTier", "TierStats", "Verdict"]
