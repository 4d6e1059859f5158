"""What a tier is to those who use one, whoever carries its tasks out: `StorageTier` in threads of
this process, `StorageClient` through a process of its own.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from lightcache import _arguments
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached, WaitTimeout
from lightcache.hashing import Tokens, pack_tokens
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.shm.errors import leave
from lightcache.shm.waiting import Condition
from lightcache.storage.arguments import Deadline, check_keys
from lightcache.storage.protocol import Keys, TokenRows

# ---- StorageTask: a transfer between a cache and a storage that somebody else carries out.


class TaskState(Enum):
    """How far a task has come."""

    NOT_STARTED = "not started"
    RUNNING = "running"
    FINISHED = "finished"
    """It ran to its end. Pages that failed one by one are in the result."""
    FAILED = "failed"
    """It was broken off: a call failed or did not come back, its time was up, it was cancelled,
    the storage is disabled. What was done before that is in the result, and stays."""


@dataclass(frozen=True)
class TaskResult:
    """What a task has done so far, in pages; final when it is over."""

    pages: int
    """Asked for."""
    prefix: int
    """Of these, from the first on: ready in the cache (prefetch), or stored (write)."""
    loaded: int
    """Read from the storage and ready in the cache now."""
    stored: int
    """Written to the storage."""
    present: int
    """Were there already: in the cache (prefetch), in the storage (write)."""
    absent: int
    """Of a prefetch: not stored, or behind one that is not. The request computes them."""
    failed: int
    """Could not be read or written."""
    corrupt: int
    """Stored, but not as they should be."""
    refused: int
    """Of a write: the storage has no room, or the queue has none."""
    skipped: int
    """Of a write: prompt too short, not seen often enough, evicted before, or behind a page that
    could not be stored."""
    busy: int
    """Of a prefetch: somebody else is reading or computing them."""
    no_room: int
    """Of a prefetch: the cache had no page for them."""
    declined: int
    """Of a prefetch: computing them is faster than reading them. See `prefill_tokens_per_s` of
    StorageTier; `reasons` has both figures."""
    reasons: tuple[str, ...]
    """What went wrong, each once, in order."""


COUNTS = tuple(
    name for name in TaskResult.__dataclass_fields__ if name not in ("pages", "prefix", "reasons")
)


class Carrier(Protocol):
    """Who carries a task out, as far as the task knows."""

    def take(self) -> None:
        """See `StorageTask.take`."""

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""

    def stop(self) -> None:
        """Begin nothing more; what was done counts."""

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        ...


class StorageTask:
    """What `StorageTier.write` and `prefetch` return. Any thread may use it; no forked child, which
    may look at it, and is refused (Detached) whatever waits for it or decides about it."""

    def __init__(self, kind: Literal["read", "write"], pages: int, page_tokens: int | None) -> None:
        """For StorageTier."""
        self.kind = kind
        self._pages = pages
        self._page_tokens = page_tokens
        self._changed = Condition()
        self._state = TaskState.NOT_STARTED
        self._counts: Counter[str] = Counter()
        self._prefix = 0
        self._reasons: list[str] = []
        self._pid = os.getpid()
        self._job: Carrier | None = None
        self._observer: Callable[[], None] | None = None
        self._settled = False
        """It is over, and the tier has counted what it did."""
        self._begun, self._ended = time.monotonic(), 0.0

    # ---- looking at it

    @property
    def state(self) -> TaskState:
        """How far it has come."""
        with self._changed:
            return self._state

    @property
    def over(self) -> bool:
        """Whether it is FINISHED or FAILED."""
        return self.state in _OVER

    @property
    def seconds(self) -> float:
        """From when it was asked for until it was over; 0 while it is not."""
        return max(0.0, self._ended - self._begun) if self._ended else 0.0

    @property
    def pages_done(self) -> int:
        """The same as `result.prefix`."""
        with self._changed:
            return self._prefix

    @property
    def tokens(self) -> int:
        """Tokens in these pages.

        Raises:
            ConfigError: the cache was not told its `page_tokens`.
        """
        if self._page_tokens is None:
            raise ConfigError("tokens: this cache was created without page_tokens")
        return self.pages_done * self._page_tokens

    @property
    def result(self) -> TaskResult:
        """What it has done so far."""
        with self._changed:
            counts = {name: self._counts[name] for name in COUNTS}
            return TaskResult(
                pages=self._pages, prefix=self._prefix, reasons=tuple(self._reasons), **counts
            )

    def wait(self, timeout: float | None = None) -> TaskResult:
        """Block until it is over.

        Args:
            timeout: seconds; None: as long as it may take, which the tier bounds.

        Raises:
            ConfigError: `timeout` is no number.
            WaitTimeout: it is not over; it goes on.
            Detached: called in a forked child.
        """
        self._check_process()
        left = None  # a nan would be waited for without sleeping, and without an end
        if timeout is not None:
            left = min(Deadline(timeout).timeout, threading.TIMEOUT_MAX)
        with self._changed:
            if not self._changed.wait_for(lambda: self._state in _OVER, left):
                raise WaitTimeout(
                    f"wait: after {timeout} s the {self.kind} of {self._pages} pages is not over; "
                    "wait longer, or cancel it"
                )
        return self.result

    # ---- deciding about it

    def take(self) -> TaskResult:
        """What an engine calls when it wants to run the request: waits as the tier's `read_policy`
        says, lets the task begin nothing more, and returns what there is. Pages whose read is
        under way still become ready, later."""
        self._check_process()
        if self._job is not None:
            self._job.take()
        return self.result

    def stop(self) -> TaskResult:
        """Let it begin nothing more, and return what there is. Never waits, whatever the read
        policy: for a scheduler's step. Pages whose read is in flight become ready later."""
        self._check_process()
        if self._job is not None:
            self._job.stop()
        return self.result

    def cancel(self) -> None:
        """Give up: what is queued is never begun, what runs ends behind the storage's current call.
        Keys that were being read are abandoned at once; pages go back when that call returns, and
        `wait` says when. Of what is over, with `hold`: gives the pages back. Else does nothing.
        """
        self._check_process()
        if self._job is not None:
            self._job.cancel()

    def publish(self, pages: int) -> StorageTask:
        """Of a `prefetch` with `hold`: make the first pages ready and give the rest back, unused.

        Args:
            pages: at most `result.prefix`; usually the least that all ranks could read.

        Returns:
            A task that is over, or one that reads a few pages again: when `pages` ends inside of a
            group. Wait for it before matching.

        Raises:
            ConfigError: not such a task, not finished, published before, or more than it has.
            Abandoned: the namespace was cleared meanwhile; everything was given back.
            Detached: called in a forked child.
        """
        self._check_process()
        if self._job is None:
            if self.kind == "read" and type(pages) is int and pages == 0:
                return self  # declined, or the storage is disabled: what others agreed on is none
            raise ConfigError("publish: this task holds nothing; prefetch with hold=True")
        return self._job.publish(pages)

    def _check_process(self) -> None:
        """Before any lock: at the fork another thread may have had it."""
        if os.getpid() != self._pid:
            raise Detached(
                "this storage task belongs to the process that forked us, which carries it out; "
                "ask for what is needed with a tier or client made here"
            )

    # ---- for the tier

    def _start(self) -> None:
        with self._changed:
            if self._state is TaskState.NOT_STARTED:
                self._state = TaskState.RUNNING
        self._notify()

    def _count(self, **pages: int) -> None:
        with self._changed:
            self._counts.update(pages)

    def _reach(self, prefix: int) -> None:
        with self._changed:
            self._prefix = prefix
        self._notify()

    def _say(self, reason: str) -> None:
        with self._changed:
            if reason and reason not in self._reasons:
                self._reasons.append(reason)

    def _end(
        self,
        reason: str = "",
        *,
        failed: bool,
        count: Callable[[TaskResult], None] | None = None,
    ) -> bool:
        """False: it was over before. Else `count` is told the result first: who waits for the end
        finds it in the tier's figures."""
        self._say("" if self.over else reason)
        with self._changed:
            if self._state in _OVER:
                return False
            if count is not None:
                count(self.result)
            self._ended = time.monotonic()
            self._state = TaskState.FAILED if failed else TaskState.FINISHED
            self._changed.notify_all()
            return True

    def _become(
        self, state: TaskState, prefix: int, counts: Mapping[str, int], reasons: Sequence[str]
    ) -> None:
        """What somebody else says of it. Nothing changes behind its end."""
        with self._changed:
            if self._state not in _OVER:
                self._ended = time.monotonic() if state in _OVER else 0.0
                self._state, self._prefix = state, prefix
                self._counts = Counter(counts)
                self._reasons = list(reasons)
                self._changed.notify_all()

    def _watch(self, observer: Callable[[], None]) -> None:
        """Call this when it starts, gets on, and is settled; and now. It is called in the tier's
        threads, with no lock held, and does not block."""
        self._observer = observer
        observer()

    def _settle(self) -> None:
        self._settled = True
        self._notify()

    def _notify(self) -> None:
        if self._observer is not None:
            self._observer()

    def __repr__(self) -> str:
        return f"<StorageTask {self.kind} {self.pages_done}/{self._pages} {self.state.value}>"


_OVER = (TaskState.FINISHED, TaskState.FAILED)


# ---- Which pages are worth writing: those of prompts that come again.


class SeenKeys:
    """Counts how often keys were offered. Bounded: the longest unseen are forgotten first."""

    def __init__(self, times: int, most: int) -> None:
        """
        Args:
            times: a key is admitted when it is offered for this time; 1: at once.
            most: keys to remember.
        """
        self._times = times
        self._most = most
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def admit(self, keys: Keys) -> int:
        """Count these keys; how many from the first on are admitted. Behind a key that is not, none
        is: it would not be found."""
        if self._times <= 1:
            return len(keys)
        names = check_keys(keys)
        with self._lock:
            # From the last to the first, so that of a prompt the end is forgotten first.
            for name in reversed(names):
                self._seen[name] = self._seen.pop(name, 0) + 1
            admitted = (self._seen[name] >= self._times for name in names)
            prefix = next((i for i, good in enumerate(admitted) if not good), len(names))
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return prefix


# ---- What a tier is to those who use one, whoever carries its tasks out: `StorageTier` in
# threads of this process, `StorageClient` through a process of its own.

T = TypeVar("T", bound="BaseTier")
ReadPolicy = Literal["wait", "best_effort", "deadline"]
Unstored = Literal["failed", "refused", "gone", "behind", "disabled", "ended"]
"""Why pages that should have been stored were not; see `TierStats`."""


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
    skipped_short: int = 0
    """Of `skipped`: of prompts with fewer tokens than `min_tokens`."""
    skipped_unseen: int = 0
    """Of `skipped`: not offered `seen` times yet."""
    unstored: int = 0
    """Pages that were offered, worth writing, and not stored; the following say why. The first of
    each kind is logged."""
    unstored_failed: int = 0
    """The storage could not write them."""
    unstored_refused: int = 0
    """The storage had no room, or `write_pages` is 0."""
    unstored_gone: int = 0
    """Evicted before it was their turn."""
    unstored_behind: int = 0
    """After one that could not be stored: they would not be found."""
    unstored_disabled: int = 0
    """The storage was not used, since it failed."""
    unstored_ended: int = 0
    """The task ended before: its time was up, it was cancelled, or a call failed."""


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
        are pinned in our own name until they are written, the first `write_pages` of all writes
        that wait; whose lease they are may end at once. Further ones are pinned when it is their
        turn, and may be evicted before.

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
        leave(self.close, error)


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
    "COUNTS",
    "TAKEN",
    "BaseTier",
    "Carrier",
    "ReadPolicy",
    "SeenKeys",
    "StorageTask",
    "TaskResult",
    "TaskState",
    "TierStats",
    "Unstored",
    "check_cache",
    "checked_write",
    "token_rows",
]
