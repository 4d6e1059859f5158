"""What a manager counts."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lightcache.cache import Cache
from lightcache.shm import SharedCounters

if TYPE_CHECKING:
    from lightcache.storage.tasks import StorageTask


@dataclass(frozen=True)
class ManagerStats:
    """One process's figures since the manager began, or since `reset`. Tokens unless said
    otherwise."""

    requests: int = 0
    """Taken."""
    hit_requests: int = 0
    """Of these, with any usable token."""
    prompt_tokens: int = 0
    device_tokens: int = 0
    """Reused from the device's blocks."""
    host_tokens: int = 0
    """Reused from host pages."""
    storage_tokens: int = 0
    """Reused from storage."""
    below_break_even: int = 0
    """Found on the host and computed all the same: so few are computed faster than loaded."""
    cut_items: int = 0
    """Matches that were cut back to the start of a multimodal item."""
    loads: int = 0
    """Transfers to the device that were over."""
    loaded_pages: int = 0
    """That these read, some of them only in part."""
    loaded_bytes: int = 0
    """That they moved: of a page that was loaded in part, that part. Of copies that ranks make, all
    ranks' shares together, what several of them load counted once."""
    offloads: int = 0
    offloaded_pages: int = 0
    offloaded_bytes: int = 0
    """As `loaded_bytes`."""
    storage_read_bytes: int = 0
    """Brought by our storage tier's calls, whatever became of the pages."""
    storage_written_bytes: int = 0
    """Stored by them."""
    failed_loads: int = 0
    failed_offloads: int = 0
    absent_pages: int = 0
    """Pages that were looked for on the host and not there; failures are counted apart."""
    no_room_pages: int = 0
    """Pages that were to be written to the host and found no room."""
    duplicates: int = 0
    """Device blocks whose content another one had already."""
    device_evicted_room: int = 0
    """Blocks evicted because `allocate` needed room, or `can_allocate` with `evict`. Like those
    below: whatever other tiers have of them."""
    device_evicted_low_water: int = 0
    """Blocks that made way ahead of need: `ManagerConfig.low_water`."""
    device_evicted_demote: int = 0
    """Blocks evicted by `KVCacheManager.demote`."""
    device_evicted_drop: int = 0
    """Blocks evicted by `drop`."""
    device_evicted_clear: int = 0
    """Blocks whose weights or tenant were cleared."""
    device_evicted_engine: int = 0
    """Blocks that the engine of an attached device evicted or overwrote."""
    host_evicted_room: int = 0
    """Pages evicted because this process needed room: for what it wrote, or read from storage."""
    host_evicted_quota: int = 0
    """Pages that a tenant at its quota gave up for its own new ones."""
    host_evicted_drop: int = 0
    """Pages evicted by `drop`."""
    host_evicted_clear: int = 0
    """Pages whose weights or tenant were cleared, taken away by this process."""
    host_evicted_asked: int = 0
    """Pages evicted by calls of the cache itself: `evict`, `discard`."""
    storage_evicted_room: int = 0
    """Pages that the storage let go of to make room, if it says so."""
    storage_declined_pages: int = 0
    """Pages that our storage tier did not read: computing them is faster."""
    storage_refused_pages: int = 0
    """Pages that were to be stored, and for which the storage, or the queue before it, had no room.
    Of these and of the following two `TierStats` has finer reasons, the log the first of each."""
    storage_failed_pages: int = 0
    """Pages whose write to storage failed, hung, or was broken off."""
    storage_skipped_pages: int = 0
    """Pages that were to be stored and passed over: behind one that was not stored, gone from the
    host before, the storage disabled, or as the tier was told to (`min_tokens`, `seen`)."""
    plan_ns: int = 0
    """Nanoseconds within `plan` and `plan_many`; see also `plan_seconds`. Like those below it never
    falls."""
    load_ns: int = 0
    """Of transfers to the device that went well, from asking for one until a call saw its end;
    those that go on together count each."""
    offload_ns: int = 0
    """The same of transfers to the host."""
    storage_read_ns: int = 0
    """The same of reads from storage for requests, whatever they brought."""
    storage_write_ns: int = 0
    """The same of writes to storage."""
    storage_wait_ns: int = 0
    """For which requests waited for a read from storage: from the first `take` to the one that
    began them."""
    demotions: int = 0
    """Of the blocks that write-back evicted (for room, for low water, by `demote`), those that the
    host had then: written back, or there before."""
    demotions_lost: int = 0
    """The others of these: the host had no room, a copy failed, they filled no page of it, or were
    not to go there: `RequestOptions`."""
    kept_by_match: int = 0
    """Of those to be demoted, blocks that a request came for meanwhile."""
    waits: int = 0
    """Requests that waited for another one's prefix."""
    errors: int = 0
    """Calls that failed and were answered as a miss."""

    @property
    def plan_seconds(self) -> float:
        """Within `plan` and `plan_many`."""
        return self.plan_ns * 1e-9

    @property
    def load_seconds(self) -> float:
        """Of transfers from the host to the device, added up: see `load_ns`."""
        return self.load_ns * 1e-9

    @property
    def offload_seconds(self) -> float:
        """The same to the host."""
        return self.offload_ns * 1e-9

    @property
    def storage_read_seconds(self) -> float:
        """Of reads from storage, added up: see `storage_read_ns`."""
        return self.storage_read_ns * 1e-9

    @property
    def storage_write_seconds(self) -> float:
        """The same of writes."""
        return self.storage_write_ns * 1e-9

    @property
    def storage_wait_seconds(self) -> float:
        """For which requests waited for reads."""
        return self.storage_wait_ns * 1e-9

    @property
    def device_evictions(self) -> int:
        """Blocks that the engine, or we for want of room, evicted: without `drop` and clears."""
        ours = self.device_evicted_room + self.device_evicted_low_water + self.device_evicted_demote
        return ours + self.device_evicted_engine

    @property
    def host_evictions(self) -> int:
        """Pages that this process evicted for want of room, in the pool or in a tenant's quota."""
        return self.host_evicted_room + self.host_evicted_quota

    @property
    def dropped(self) -> int:
        """Blocks and pages evicted by `drop`."""
        return self.device_evicted_drop + self.host_evicted_drop

    @property
    def request_ratio(self) -> float:
        """Requests with any hit of all requests, 0 to 1."""
        return self.hit_requests / self.requests if self.requests else 0.0

    @property
    def hit_ratio(self) -> float:
        """Reused tokens of all prompts' tokens, 0 to 1."""
        reused = self.device_tokens + self.host_tokens + self.storage_tokens
        return reused / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class TierCapacity:
    """Of one tier, in blocks or pages."""

    most: int
    """There are; 0: not known yet."""
    free: int
    """Nothing is in them, and nobody has them."""
    available: int
    """Free, or to be evicted for whoever asks. Advisory."""


@dataclass(frozen=True)
class TierGauges:
    """How things stand now."""

    device: TierCapacity
    """Of an attached device: free are the blocks without a name, and nothing is evicted by us."""
    host: TierCapacity
    running: int
    """Requests that were taken and not released."""
    leaving: int
    """Released, and a copy touches their blocks still."""
    transfers: int
    """That go on."""
    queued: int
    """Transfers that wait for `resume`."""


NAMES = frozenset(each.name for each in fields(ManagerStats))


class Counters(Counter[str]):
    """Counts by the names of `ManagerStats`."""

    def add(self, **counts: int) -> None:
        """Raise some of them."""
        for name, count in counts.items():
            assert name in NAMES, name
            self[name] += count

    def snapshot(self) -> ManagerStats:
        """As they are now."""
        return ManagerStats(**self)


class Recent:
    """What the last requests found. Takes no longer for a long window than for a short one."""

    def __init__(self, most: int) -> None:
        """Nobody was counted.

        Args:
            most: requests of the window.
        """
        self._most = most
        self._each: deque[Counters] = deque()
        self._sum = Counters()

    def add(self, counts: Counters) -> None:
        """One more request; the oldest goes."""
        self._each.append(counts)
        self._sum.update(counts)
        if len(self._each) > self._most:
            self._sum.subtract(self._each.popleft())

    def change(self, counts: Counters, **by: int) -> None:
        """A request that was added found something else in the end."""
        if any(each is counts for each in self._each):
            self._sum.update(by)
        counts.update(by)

    def clear(self) -> None:
        """Begin anew."""
        self._each.clear()
        self._sum.clear()

    def snapshot(self) -> ManagerStats:
        """As they are now: figures of requests alone."""
        return self._sum.snapshot()


# ---- What all managers of a node have counted, those that are gone included.

_NAMES = tuple(each.name for each in fields(ManagerStats))


class NodeCounters:
    """The figures of `ManagerStats`, counted by every process that uses one cache and kept beside
    it, in the segment `NAME.counters`. They last as long as somebody is attached to them; a
    process that is killed takes nothing of what it had counted with it.

    Close them, or use a with statement; before or after the cache, as you like.
    """

    def __init__(self, counters: SharedCounters) -> None:
        """For `open`."""
        self._counters = counters

    @classmethod
    def open(cls, cache: Cache) -> NodeCounters:
        """Attach to a cache's counters, or make them; for the group that the cache is for. Through
        a cache that is attached read-only they can only be read.

        Raises:
            NotReady: the cache is read-only, and nobody has made the counters yet.
            LayoutMismatch: another release's managers are counting, by other names.
            InUse: all 63 slots are taken.
            ConfigError: the cache's name is too long for one more word.
            CacheCorrupted, NoSpace, PermissionDenied, Detached.
        """
        name, access = f"{cache.name}.counters", cache.index.segment.stat()
        group = access.st_gid if access.st_mode & 0o060 else None
        if cache.index.readonly:
            return cls(SharedCounters.attach(name, readonly=True, group=group))
        return cls(SharedCounters.open(name, names=_NAMES, lifetime="attached", group=group))

    def add(self, /, **counts: int) -> None:
        """Raise some of them; see `SharedCounters.add`."""
        self._counters.add(**counts)

    def own(self) -> ManagerStats:
        """What was counted through this object. No lock."""
        return ManagerStats(**self._counters.own())

    def total(self) -> ManagerStats:
        """What everybody has counted, the dead included; see `SharedCounters.total`. No lock."""
        return ManagerStats(**self._counters.total())

    def close(self) -> None:
        """Leave. What we counted stays, as long as anybody else is attached."""
        self._counters.close()

    def __enter__(self) -> NodeCounters:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._counters.__exit__(kind, error, trace)


# ---- What was asked of storage.

_MANY = 64  # tasks, of which it is worth looking which are over


class Tasks:
    """What was asked of storage, until it is over: then it is counted. The manager's lock is around
    every call."""

    def __init__(self, counts: Counters) -> None:
        """Nothing was asked."""
        self._counts = counts
        self._going: list[StorageTask] = []
        self._many = _MANY

    def add(self, task: StorageTask) -> None:
        """One was begun."""
        self._going.append(task)
        if len(self._going) >= self._many:
            self.settle()
            self._many = max(_MANY, 2 * len(self._going))

    def settle(self) -> None:
        """Count those that are over."""
        every, self._going = self._going, []
        for task in every:
            if not task.over:
                self._going.append(task)
            elif task.kind == "read":
                self._counts.add(storage_read_ns=int(task.seconds * 1e9))
            else:
                self._written(task)

    def _written(self, task: StorageTask) -> None:
        self._counts.add(storage_write_ns=int(task.seconds * 1e9))
        result = task.result
        lost = {"refused": result.refused, "failed": result.failed, "skipped": result.skipped}
        if task.state.name == "FAILED":  # the rest of what was broken off
            lost["failed"] += max(
                0, result.pages - result.stored - result.present - sum(lost.values())
            )
        for cause, pages in lost.items():
            if pages:
                self._counts.add(**{f"storage_{cause}_pages": pages})


__all__ = [
    "Counters",
    "ManagerStats",
    "NodeCounters",
    "Recent",
    "Tasks",
    "TierCapacity",
    "TierGauges",
]
