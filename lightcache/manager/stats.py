"""A manager's counters, histograms and gauges, and the counters of a node."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from lightcache.cache import Cache
from lightcache.shm import SharedCounters
from lightcache.shm.names import counters_name

if TYPE_CHECKING:
    from lightcache.storage.tasks import StorageTask


@dataclass(frozen=True)
class ManagerStats:
    """One process's counts since the manager began, or since `reset_stats`. Tokens unless said
    otherwise."""

    requests: int = 0
    """Requests taken."""
    hit_requests: int = 0
    """Requests taken with any usable token."""
    prompt_tokens: int = 0
    device_tokens: int = 0
    """Reused from the device's blocks."""
    host_tokens: int = 0
    """Reused from host pages."""
    storage_tokens: int = 0
    """Reused from storage."""
    below_break_even: int = 0
    """Found on the host and computed all the same: so few tokens are faster to compute than to
    load."""
    cut_items: int = 0
    """Matches that were cut back to the start of a multimodal item."""
    loads: int = 0
    """Finished transfers to the device."""
    loaded_pages: int = 0
    """Pages that these read, some only in part."""
    loaded_bytes: int = 0
    """Bytes that they moved; of a page loaded in part, that part. For copies by ranks, the sum of
    all ranks' shares; bytes that several ranks load count once."""
    offloads: int = 0
    offloaded_pages: int = 0
    offloaded_bytes: int = 0
    """As `loaded_bytes`."""
    storage_read_bytes: int = 0
    """Read by our storage tier's calls, even if the pages were not used."""
    storage_written_bytes: int = 0
    """Stored by our storage tier's calls."""
    failed_loads: int = 0
    failed_offloads: int = 0
    """Offloads that failed or were cancelled, and failed calls of the host's index for them."""
    absent_pages: int = 0
    """Pages that a lookup on the host missed, without failed lookups."""
    no_room_pages: int = 0
    """Pages that were not written to the host for want of room. As in the next four counters, each
    time that it was tried; the log has the first of each cause, with its reason."""
    unwritten_not_worth_pages: int = 0
    """Pages that were not worth writing to the host, and those behind them:
    `ManagerConfig.admission`. They are not tried again for their request."""
    unwritten_failed_pages: int = 0
    """Pages whose copy to the host failed."""
    unwritten_stale_pages: int = 0
    """Pages that were copied in vain: their reservation was abandoned, or their weights or tenant
    cleared, before they were published."""
    unwritten_refused_pages: int = 0
    """Pages that were not copied because the host's index failed, or its lock did not come."""
    unwritten_disabled_pages: int = 0
    """Pages that were not copied because too many copies had failed: see `TierGauges.offloads`."""
    duplicates: int = 0
    """Device blocks whose content another block had already."""
    device_evicted_room: int = 0
    """Blocks evicted because `allocate` needed room, or `can_allocate` with `evict`. As in the next
    counters, other tiers may have their content."""
    device_evicted_low_water: int = 0
    """Blocks evicted ahead of need: `ManagerConfig.low_water`."""
    device_evicted_demote: int = 0
    """Blocks evicted by `KVCacheManager.demote`."""
    device_evicted_drop: int = 0
    """Blocks evicted by `drop`."""
    device_evicted_clear: int = 0
    """Blocks whose weights or tenant were cleared."""
    device_evicted_engine: int = 0
    """Mirrored blocks that the engine evicted or overwrote."""
    host_evicted_room: int = 0
    """Pages evicted because this process needed room, for what it wrote or read from storage."""
    host_evicted_quota: int = 0
    """Pages that a tenant at its quota gave up for its own new ones."""
    host_evicted_drop: int = 0
    """Pages evicted by `drop`."""
    host_evicted_clear: int = 0
    """Pages of cleared weights or tenants, evicted by this process."""
    host_evicted_asked: int = 0
    """Pages evicted by calls of the cache itself: `evict`, `discard`."""
    storage_evicted_room: int = 0
    """Pages that the storage evicted to make room, if it reports them."""
    storage_declined_pages: int = 0
    """Pages that our storage tier did not read, because computing them is faster."""
    storage_refused_pages: int = 0
    """Pages that were not stored because the storage, or its queue, had no room. `TierStats` has
    finer reasons for these and the next two counters; the log has the first of each."""
    storage_failed_pages: int = 0
    """Pages whose write to storage failed, hung, or was broken off."""
    storage_skipped_pages: int = 0
    """Pages that were skipped instead of stored: after a page that was not stored, evicted from the
    host before, with the storage disabled, or by the tier's `min_tokens` or `seen`."""
    storage_absent_pages: int = 0
    """Part of `storage_skipped_pages`: the host did not have them any more, or never had, when
    they were offered to our storage tier."""
    plan_ns: int = 0
    """Nanoseconds within `plan` and `plan_many`; see also `plan_seconds`. Like the next counters it
    never decreases."""
    load_ns: int = 0
    """Nanoseconds of successful transfers to the device, each from its request until a call saw its
    end; concurrent transfers add up."""
    offload_ns: int = 0
    """The same for transfers to the host."""
    storage_read_ns: int = 0
    """The same for storage reads of requests, successful or not."""
    storage_write_ns: int = 0
    """The same for writes to storage."""
    storage_wait_ns: int = 0
    """Nanoseconds that requests waited for a storage read: from their first `take` to the one that
    began them."""
    demotions: int = 0
    """Blocks that write-back evicted (for room, for low water, by `demote`) and whose content the
    host had then: written back, or there before."""
    demotions_lost: int = 0
    """Blocks that write-back evicted and the host did not have: no room, a failed copy, not a full
    host page, or excluded by `RequestOptions`."""
    kept_by_match: int = 0
    """Blocks that were to be demoted and were kept because a request matched them meanwhile."""
    waits: int = 0
    """Requests that waited for another request's prefix."""
    errors: int = 0
    """Calls that failed and were answered as a miss."""
    missed_short: int = 0
    """Requests without any usable token, since the prompt has no full page before its last token.
    The next counters have the others, by reason; `lightcache.manager.misses` says how it is
    known."""
    missed_never_seen: int = 0
    """The first page is not there, and the index remembers none that went."""
    missed_evicted: int = 0
    """The first page was there, and was evicted."""
    missed_absent: int = 0
    """The first page is not there, and the index does not remember what went: eviction "lru"."""
    missed_other_namespace: int = 0
    """The first page is there under other weights or for another tenant; or the weights were being
    changed, or there was no namespace."""
    missed_unused: int = 0
    """Something was found, and was not used: too little to be worth loading, part of an item, no
    room, or the request did not want it."""
    missed_failed: int = 0
    """The look-up failed, or the manager had disabled itself."""

    @property
    def plan_seconds(self) -> float:
        """Seconds within `plan` and `plan_many`."""
        return self.plan_ns * 1e-9

    @property
    def load_seconds(self) -> float:
        """Seconds of transfers from the host to the device: see `load_ns`."""
        return self.load_ns * 1e-9

    @property
    def offload_seconds(self) -> float:
        """Seconds of transfers to the host: see `offload_ns`."""
        return self.offload_ns * 1e-9

    @property
    def storage_read_seconds(self) -> float:
        """Seconds of reads from storage: see `storage_read_ns`."""
        return self.storage_read_ns * 1e-9

    @property
    def storage_write_seconds(self) -> float:
        """Seconds of writes to storage: see `storage_write_ns`."""
        return self.storage_write_ns * 1e-9

    @property
    def storage_wait_seconds(self) -> float:
        """Seconds that requests waited for reads: see `storage_wait_ns`."""
        return self.storage_wait_ns * 1e-9

    @property
    def device_evictions(self) -> int:
        """Blocks evicted by the engine, or by us for room: without `drop` and clears."""
        ours = self.device_evicted_room + self.device_evicted_low_water + self.device_evicted_demote
        return ours + self.device_evicted_engine

    @property
    def host_evictions(self) -> int:
        """Pages that this process evicted for room, in the pool or in a tenant's quota."""
        return self.host_evicted_room + self.host_evicted_quota

    @property
    def dropped(self) -> int:
        """Blocks and pages evicted by `drop`."""
        return self.device_evicted_drop + self.host_evicted_drop

    @property
    def request_ratio(self) -> float:
        """Share of requests with any hit, 0 to 1."""
        return self.hit_requests / self.requests if self.requests else 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that were reused, 0 to 1."""
        reused = self.device_tokens + self.host_tokens + self.storage_tokens
        return reused / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class TierCapacity:
    """Capacity of one tier, in blocks or pages."""

    most: int
    """In all; 0: not known yet."""
    free: int
    """Empty and unused."""
    available: int
    """Free, or evictable. Advisory."""


@dataclass(frozen=True)
class TierGauges:
    """Current capacity, requests and transfers."""

    device: TierCapacity
    """Of mirrored blocks, those without a name count as free, and we evict none."""
    host: TierCapacity
    running: int
    """Requests taken and not released."""
    leaving: int
    """Released requests whose blocks a copy still touches."""
    transfers: int
    """Transfers in flight."""
    queued: int
    """Transfers that wait for `resume`."""
    offloads: Literal["closed", "open", "half-open"]
    """State of the breaker of copies to the host. Open: `ManagerConfig.failures` in a row have
    failed, and none is made; half-open: one is tried, or may be."""


# ---- Histograms: one counter for each bucket, beside the counter of the sum. So they are kept as
# all counters of the node are: see docs/design/metrics.md.

NS = 1_000_000_000
"""Sums are of whole billionths: of a second, or of a share."""
_DECADES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
SECONDS = tuple(float(f"{step * decade:.6g}") for decade in _DECADES for step in (1, 2.5, 5))
"""Ends of the buckets of times: 10 us to 50 s."""
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Ends of the buckets of shares; the last bucket ends with 1."""


class Histogram:
    """What is observed, in buckets. A value is in the first bucket whose end it does not exceed."""

    def __init__(self, name: str, total: str, bounds: tuple[float, ...]) -> None:
        """Counts nothing: it only says where to count.

        Args:
            name: of the buckets' counters, NAME_le_0 and so on.
            total: name of the counter of the sum.
            bounds: ends of the buckets, rising; one more has no end.
        """
        self.name, self.total, self.bounds = name, total, bounds
        self._ends = [round(bound * NS) for bound in bounds]
        self.buckets = tuple(f"{name}_le_{i}" for i in range(len(bounds) + 1))

    @property
    def counters(self) -> str:
        """The buckets' counters, as `SharedCounters` takes their names."""
        return f"{self.name}_le[{len(self.buckets)}]"

    def of(self, value: int) -> dict[str, int]:
        """What one observation adds to the counters.

        Args:
            value: in billionths; less than 0 counts as 0.
        """
        return {self.buckets[bisect_left(self._ends, value)]: 1, self.total: max(0, value)}

    def read(self, totals: Mapping[str, int]) -> HistogramCounts:
        """What the counters say; one that is not there is 0."""
        counts = tuple(totals.get(name, 0) for name in self.buckets)
        return HistogramCounts(self.bounds, counts, totals.get(self.total, 0) / NS)


@dataclass(frozen=True)
class HistogramCounts:
    """What a histogram has counted. The sum may have an observation that no bucket has yet, or lack
    one, of a process that is counting it, or was killed then."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Within each of `bounds`, and above the last."""
    total: float
    """Sum of all values: seconds, or shares."""


PLAN = Histogram("plan", "plan_ns", SECONDS)
"""Times of calls that look prompts up."""
LOAD = Histogram("load", "load_ns", SECONDS)
"""Times of transfers to the device, that succeeded."""
OFFLOAD = Histogram("offload", "offload_ns", SECONDS)
"""The same of transfers to the host."""
STORAGE_READ = Histogram("storage_read", "storage_read_ns", SECONDS)
"""Times of reads from storage."""
STORAGE_WRITE = Histogram("storage_write", "storage_write_ns", SECONDS)
"""Times of writes to storage."""
STORAGE_WAIT = Histogram("storage_wait", "storage_wait_ns", SECONDS)
"""Times that requests waited for a read from storage."""
HIT_SHARE = Histogram("hit_share", "hit_share_e9", SHARES)
"""Of each request, the share of its prompt that need not be computed."""
HISTOGRAMS = (PLAN, LOAD, OFFLOAD, STORAGE_READ, STORAGE_WRITE, STORAGE_WAIT, HIT_SHARE)


# ---- Counters of a manager

_STATS = tuple(each.name for each in fields(ManagerStats))
STORAGE = {
    "read_bytes": "storage_read_bytes",
    "written_bytes": "storage_written_bytes",
    "evicted": "storage_evicted_room",
    "declined": "storage_declined_pages",
    "unstored_absent": "storage_absent_pages",
}
"""Figures of `BaseTier.take_figures`, as counted here."""
_SUMS = tuple(each.total for each in HISTOGRAMS if each.total not in _STATS)
NAMES = frozenset(_STATS) | {name for each in HISTOGRAMS for name in (each.total, *each.buckets)}


class Counters(Counter[str]):
    """Counts by the names of `ManagerStats`, and of histograms."""

    def add(self, **counts: int) -> None:
        """Increase these counts."""
        for name, count in counts.items():
            assert name in NAMES, name
            self[name] += count

    def snapshot(self) -> ManagerStats:
        """The present counts, without histograms."""
        return ManagerStats(**{name: self[name] for name in _STATS if name in self})


class Recent:
    """Sum of the counts of the last requests. Its cost does not depend on the window."""

    def __init__(self, most: int) -> None:
        """No request was counted.

        Args:
            most: requests of the window.
        """
        self._most = most
        self._each: deque[Counters] = deque()
        self._sum = Counters()

    def add(self, counts: Counters) -> None:
        """Add a request; the oldest leaves the window."""
        self._each.append(counts)
        self._sum.update(counts)
        if len(self._each) > self._most:
            self._sum.subtract(self._each.popleft())

    def change(self, counts: Counters, **by: int) -> None:
        """Change the counts of a request that was added."""
        if any(known is counts for known in self._each):
            self._sum.update(by)
        counts.update(by)

    def clear(self) -> None:
        """Forget all requests."""
        self._each.clear()
        self._sum.clear()

    def snapshot(self) -> ManagerStats:
        """The present sum: counts of requests alone."""
        return self._sum.snapshot()


# ---- Counters of a node

_NAMES = (*_STATS, *_SUMS, *(each.counters for each in HISTOGRAMS))


class NodeCounters:
    """The counts of `ManagerStats` and of histograms, summed over all processes that use one cache,
    in a segment
    beside it, `shm.names.counters_name`. They last until the last process leaves; the counts of a
    killed process stay. A cache that was removed and created again begins at zero.

    Close them, or use a with statement, before or after the cache is closed.
    """

    def __init__(self, counters: SharedCounters) -> None:
        """For `open`."""
        self._counters = counters

    @classmethod
    def open(cls, cache: Cache) -> NodeCounters:
        """Attach to a cache's counters, or create them for the cache's group. With a cache that is
        attached read-only they can only be read.

        Raises:
            NotReady: the cache is read-only, and the counters do not exist yet.
            LayoutMismatch: managers of another release are counting, under other names.
            InUse: all 63 slots are taken.
            ConfigError: the cache's name has more than 154 characters.
            CacheCorrupted, NoSpace, PermissionDenied, Detached.
        """
        segment = cache.index.segment
        name, access = counters_name(cache.name, segment.uuid), segment.stat()
        group = access.st_gid if access.st_mode & 0o060 else None
        if cache.index.readonly:
            return cls(SharedCounters.attach(name, readonly=True, group=group))
        return cls(SharedCounters.open(name, names=_NAMES, lifetime="attached", group=group))

    def add(self, /, **counts: int) -> None:
        """Increase these counts; see `SharedCounters.add`."""
        self._counters.add(**counts)

    def own(self) -> ManagerStats:
        """The counts added through this object. Takes no lock."""
        return stats_of(self._counters.own())

    def total(self) -> ManagerStats:
        """The counts of all processes, dead ones included; see `SharedCounters.total`. Takes no
        lock."""
        return stats_of(self._counters.total())

    def histograms(self) -> dict[str, HistogramCounts]:
        """Those of all processes, by the names in `HISTOGRAMS`. As `total`."""
        return histograms_of(self._counters.total())

    def close(self) -> None:
        """Leave. Our counts stay while another process is attached."""
        self._counters.close()

    def __enter__(self) -> NodeCounters:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._counters.__exit__(kind, error, trace)


def stats_of(counts: Mapping[str, int]) -> ManagerStats:
    """The counts of managers among those of `NodeCounters`; one that is not there is 0."""
    return ManagerStats(**{name: counts.get(name, 0) for name in _STATS})


def histograms_of(counts: Mapping[str, int]) -> dict[str, HistogramCounts]:
    """The histograms among the counts of `NodeCounters`."""
    return {each.name: each.read(counts) for each in HISTOGRAMS}


# ---- Storage tasks

_MANY = 64  # tasks from which looking for finished ones is worth its cost


class Tasks:
    """Storage tasks in flight; each is counted when it has finished. The manager's lock is around
    every call."""

    def __init__(self, counts: Counters) -> None:
        """No task yet."""
        self._counts = counts
        self._going: list[StorageTask] = []
        self._many = _MANY

    def add(self, task: StorageTask) -> None:
        """Add a task that was begun."""
        self._going.append(task)
        if len(self._going) >= self._many:
            self.settle()
            self._many = max(_MANY, 2 * len(self._going))

    def settle(self) -> None:
        """Count and forget finished tasks."""
        every, self._going = self._going, []
        for task in every:
            if not task.ended:
                self._going.append(task)
            elif task.kind == "read":
                self._counts.add(**STORAGE_READ.of(int(task.seconds * 1e9)))
            else:
                self._written(task)

    def _written(self, task: StorageTask) -> None:
        self._counts.add(**STORAGE_WRITE.of(int(task.seconds * 1e9)))
        result = task.result
        lost = {"refused": result.refused, "failed": result.failed, "skipped": result.skipped}
        if task.state.name == "FAILED":  # the remaining pages of a broken-off write
            lost["failed"] += max(
                0, result.pages - result.stored - result.present - sum(lost.values())
            )
        for cause, pages in lost.items():
            if pages:
                self._counts.add(**{f"storage_{cause}_pages": pages})


__all__ = [
    "STORAGE",
    "Counters",
    "HistogramCounts",
    "ManagerStats",
    "NodeCounters",
    "Recent",
    "Tasks",
    "TierCapacity",
    "TierGauges",
    "histograms_of",
    "stats_of",
]
