"""Metrics of a cache for Prometheus (extra: `pip install lightcache[metrics]`).

    prometheus_client.REGISTRY.register(CacheMetrics(cache, counters))
    prometheus_client.REGISTRY.register(ManagerMetrics(manager))
    prometheus_client.REGISTRY.register(CheckpointMetrics(checkpoints))
    prometheus_client.REGISTRY.register(WindowMetrics(windows))

Only this module imports prometheus_client. docs/guides/metrics.md lists the metrics.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from lightcache.cache import Cache, model_in
from lightcache.errors import ConfigError, LightcacheError, NotInstalled
from lightcache.evictions import BOUNDS, SIZES, Evictions
from lightcache.groups import Rule
from lightcache.manager.blocks import DeviceTier
from lightcache.manager.misses import REASONS
from lightcache.manager.stats import (
    HIT_SHARE,
    LOAD,
    OFFLOAD,
    PLAN,
    STORAGE_READ,
    STORAGE_WAIT,
    STORAGE_WRITE,
    Histogram,
    HistogramCounts,
    ManagerStats,
)
from lightcache.page_index import PageIndex
from lightcache.runs import names_of
from lightcache.shm.clients import ClientInfo
from lightcache.shm.layout import LOCK_OFFSET, LockRecord
from lightcache.snapshot import GroupPages, IndexStats, NamespacePages

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise NotInstalled(
        f"lightcache.metrics needs the package prometheus_client ({error}): "
        "pip install 'lightcache[metrics]'"
    ) from error

if TYPE_CHECKING:  # only hybrid models need these modules
    from lightcache.hybrid.checkpoints import Checkpoints
    from lightcache.hybrid.manager import HybridManager
    from lightcache.manager.manager import KVCacheManager

_K = TypeVar("_K", bound=tuple[str, ...])

# Fields of `ManagerStats` that share a metric with a label; each other field is its own metric.
_TOKENS = {"device": "device_tokens", "host": "host_tokens", "storage": "storage_tokens"}
_MOVED = {"load": "loads", "offload": "offloads"}
_FAILED = {"load": "failed_loads", "offload": "failed_offloads"}
_PAGES = {"load": "loaded_pages", "offload": "offloaded_pages"}
_BYTES = {"load": "loaded_bytes", "offload": "offloaded_bytes"}
_STORED = {"read": "storage_read_bytes", "write": "storage_written_bytes"}
_UNSTORED = {
    "refused": "storage_refused_pages",
    "failed": "storage_failed_pages",
    "skipped": "storage_skipped_pages",
}
_UNWRITTEN = {
    "no_room": "no_room_pages",
    **{
        cause: f"unwritten_{cause}_pages"
        for cause in ("not_worth", "failed", "stale", "refused", "disabled")
    },
}
_MISSED = {reason: f"missed_{reason}" for reason in REASONS}
# Histograms by metric, and by the label that tells those of one metric apart.
_TIMES: Mapping[str, tuple[str, Mapping[tuple[str, ...], Histogram]]] = {
    "lookup_seconds": ("Calls that look prompts up, by their time.", {(): PLAN}),
    "transfer_seconds": (
        "Transfers between host and device that succeeded, by their time.",
        {("load",): LOAD, ("offload",): OFFLOAD},
    ),
    "storage_seconds": (
        "Tasks that read from storage or write to it, by their time.",
        {("read",): STORAGE_READ, ("write",): STORAGE_WRITE},
    ),
    "storage_wait_seconds": ("Requests that waited for storage, by that time.", {(): STORAGE_WAIT}),
    "request_hit_ratio": (
        "Requests by the share of their prompt that was not computed.",
        {(): HIT_SHARE},
    ),
}
# Fields named TIER_evicted_CAUSE.
_EVICTED = {
    (tier, cause): field.name
    for field in fields(ManagerStats)
    for tier, evicted, cause in [field.name.partition("_evicted_")]
    if evicted
}
_LABELLED = frozenset(
    name
    for group in (
        *(_TOKENS, _MOVED, _FAILED, _PAGES, _BYTES, _STORED, _UNSTORED, _UNWRITTEN, _MISSED),
    )
    for name in group.values()
) | frozenset(_EVICTED.values())

# Labelled fields of `CheckpointStats` and `WindowStats`; host hits exclude those of storage.
_TIER_HITS = {"device": "device_hits", "host": "host_hits", "storage": "storage_hits"}
_TIER_LABELLED = frozenset(
    name for group in (_TIER_HITS, _MOVED, _FAILED) for name in group.values()
)

_OWN = frozenset(
    (
        *("cache", "tier", "state", "role", "direction", "part", "cause", "group", "weights"),
        *("tenant", "size", "turns", "gap", "reason", "le"),
    )
)

_HELP = {
    "requests": "Requests taken.",
    "hit_requests": "Requests with any token that need not be computed.",
    "prompt_tokens": "Tokens of all prompts.",
    "below_break_even": "Tokens found on the host but computed: loading so few is slower.",
    "cut_items": "Matches cut back to the start of a multimodal item.",
    "absent_pages": "Pages looked for on the host but not found; failures are not counted here.",
    "storage_absent_pages": "Pages to be stored that the host did not have: part of those skipped.",
    "storage_declined_pages": "Pages not read from storage: computing them is faster.",
    "duplicates": "Device blocks whose content another block had already.",
    "demotions": "Device blocks evicted for low_water or demote, with a copy on the host.",
    "demotions_lost": "Device blocks evicted for low_water or demote, without a copy on the host.",
    "kept_by_match": "Blocks to be demoted that a request used first.",
    "waits": "Requests that waited for another request's prefix.",
    "errors": "Calls that failed and were answered as a miss.",
}

_CHECKPOINTS_HELP = {
    "requests": "Requests of hybrid models taken.",
    "usable_tokens": "Tokens of prompts that need not be computed.",
    "unusable_tokens": "Tokens after the checkpoint whose KV was cached.",
    "donated": "Saved states that became checkpoints.",
    "merged": "Saved states that were checkpoints already.",
    "refused": "Saved states that could not become checkpoints.",
    "bounded": "Checkpoints superseded because their path had too many.",
    "copies": "Copies from a checkpoint to a working slot.",
    "no_room": "Checkpoints not written to the host because there was no room.",
    "demotions": "Checkpoints evicted from the device ahead of need, with a copy on the host.",
    "demotions_lost": "Checkpoints evicted from the device, without a copy on the host.",
    "kept_unwritten": "Checkpoints that stayed on the device because they could not be written.",
    "dropped_tokens": "Tokens of KV evicted after the last checkpoint of their path.",
}

_WINDOWS_HELP = {
    "requests": "Requests of models with windows taken.",
    "usable_tokens": "Tokens of prompts that need not be computed.",
    "unusable_tokens": "Tokens with KV, after these, for which a window lacked pages.",
    "no_room": "Windows that the host had no room for.",
    "unsaved": "Windows that were not written to the host, since their blocks had gone.",
    "demotions": "Blocks that a position needs, written back: freed with a copy on the host.",
    "demotions_lost": "Blocks that a position needs, written back in vain: freed without one.",
    "freed_blocks": "Blocks that running requests gave back, since no later token sees them.",
}


@dataclass(frozen=True)
class IndexReading:
    """What the metrics of an index say."""

    stats: IndexStats
    lock: LockRecord
    clients: tuple[ClientInfo, ...]
    namespaces: tuple[NamespacePages, ...]
    """Those in use: 256 at most."""
    groups: tuple[GroupPages, ...]
    """Empty: the index has no names of groups, and so one group."""
    evictions: Evictions


class Totals(Protocol):
    """A source of the managers' counters, such as `NodeCounters`."""

    def total(self) -> ManagerStats:
        """All counts so far; each only rises."""
        ...

    def histograms(self) -> Mapping[str, HistogramCounts]:
        """All histograms so far, by name; each only rises."""
        ...


def _check_labels(labels: Mapping[str, str] | None) -> None:
    reserved = _OWN & (labels or {}).keys()
    if reserved:
        raise ConfigError(
            f"labels: {', '.join(sorted(reserved))} are the metrics' own; choose other names"
        )


class _Buckets(NamedTuple):
    """Ends of buckets, their counts and one above, and the sum of what was counted, if it is
    known."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float | None = None


class _Labelled:
    """Metrics that share some labels."""

    def __init__(self, cache: str, model: str, labels: Mapping[str, str] | None) -> None:
        _check_labels(labels)
        self._labels = {"cache": cache, "model_name": model, **(labels or {})}

    def _gauge(self, name: str, text: str, values: Mapping[_K, float], *labels: str) -> Metric:
        """A gauge of `values`, which are keyed by the values of `labels`."""
        metric = GaugeMetricFamily(f"lightcache_{name}", text, labels=[*self._labels, *labels])
        for more, value in values.items():
            metric.add_metric([*self._labels.values(), *more], value)
        return metric

    def _counter(self, name: str, text: str, values: Mapping[_K, float], *labels: str) -> Metric:
        """Like `_gauge`, for a counter; appends `_total` to the name."""
        metric = CounterMetricFamily(f"lightcache_{name}", text, labels=[*self._labels, *labels])
        for more, value in values.items():
            metric.add_metric([*self._labels.values(), *more], value)
        return metric

    def _histogram(
        self, name: str, text: str, values: Mapping[_K, _Buckets], *labels: str
    ) -> Metric:
        """The counts within each of the bounds, and above."""
        metric = HistogramMetricFamily(f"lightcache_{name}", text, labels=[*self._labels, *labels])
        for more, (bounds, counts, total) in values.items():
            ends = (*map(str, bounds), "+Inf")
            buckets = list(zip(ends, map(float, accumulate(counts)), strict=True))
            metric.add_metric([*self._labels.values(), *more], buckets, total)
        return metric


Counted = tuple[ManagerStats, Mapping[str, HistogramCounts]]
"""What managers have counted."""


class CachePage(_Labelled):
    """The metrics of one cache, of what its caller has read."""

    def __init__(self, cache: str, config: Mapping[str, Any], labels: Mapping[str, str] | None):
        """Reads nothing.

        Args:
            config: of the cache's index.
            labels: see `CacheMetrics`.

        Raises:
            ConfigError: a label that the metrics define themselves.
        """
        super().__init__(cache, model_in(config), labels)
        self._page_bytes = int(config.get("page_bytes") or 0)

    def of(
        self, read: Mapping[str, IndexReading | None], *counted: Counted | None
    ) -> Iterator[Metric]:
        """All metrics, without the parts that could not be read.

        Args:
            read: the host's index and the device's by tier; None: it could not be read.
            counted: by managers; none: there are no counters. None: they could not be read.
        """
        up = {(tier,): float(reading is not None) for tier, reading in read.items()}
        for each in counted:
            up["counters",] = float(each is not None)
        yield self._gauge("up", "Whether this part could be read.", up, "part")
        tiers = {tier: reading for tier, reading in read.items() if reading is not None}
        if tiers:
            yield from self._pages(tiers)
            yield from self._locks(tiers)
            yield self._clients(tiers)
            yield from self._evictions(tiers)
        if (host := read["host"]) is not None:
            yield from self._namespaces(host.namespaces)
            if host.groups:
                yield from self._groups(host.groups)
        for each in counted:
            if each is not None:
                yield from self._figures(each[0])
                yield from self._histograms(each[1])

    # ---- the indexes of host and device

    def _clients(self, tiers: Mapping[str, IndexReading]) -> Metric:
        clients = Counter(
            (tier, client.role, _life(client))
            for tier, reading in tiers.items()
            for client in reading.clients
        )
        text = "Processes that have a slot: alive, dead and not yet reaped, or in quarantine."
        return self._gauge("clients", text, clients, "tier", "role", "state")

    def _pages(self, tiers: Mapping[str, IndexReading]) -> Iterator[Metric]:
        stats = {tier: reading.stats for tier, reading in tiers.items()}
        states = {
            (tier, state): float(number)
            for tier, totals in stats.items()
            for state, number in (
                ("free", totals.free),
                ("writing", totals.writing),
                ("ready", totals.ready),
                ("doomed", totals.doomed),
                ("ungrown", totals.pages - totals.grown),
            )
        }
        yield self._gauge(
            "pages", "Pages by state; ungrown: no memory yet.", states, "tier", "state"
        )
        for name, field, text in (
            ("capacity_pages", "pages", "Pages there can be."),
            ("evictable_pages", "evictable", "Ready pages without children."),
            ("reservations", "reservations", "Reservations that have not ended."),
            ("tickets", "tickets", "Tickets that have not ended."),
        ):
            values = {(tier,): float(getattr(totals, field)) for tier, totals in stats.items()}
            yield self._gauge(name, text, values, "tier")
        counts = {tier: totals for tier, totals in stats.items() if totals.eviction == "lru"}
        if counts:  # with "hz" the clock is a time
            clocks = {(tier,): float(totals.clock) for tier, totals in counts.items()}
            yield self._counter("uses", "Matches and reservations.", clocks, "tier")
        size = {(): float(self._page_bytes)}
        yield self._gauge("page_bytes", "Bytes of a page of the host.", size)

    def _groups(self, groups: tuple[GroupPages, ...]) -> Iterator[Metric]:
        size = self._page_bytes
        for name, field, unit, text in (
            ("group_pages", "pages", 1, "Pages of the host, ready or being written, by KV group."),
            ("group_bytes", "pages", size, "The same in bytes."),
            (
                "group_minimum_bytes",
                "minimum_pages",
                size,
                "Bytes safe from other groups; 0: none.",
            ),
        ):
            values = {(group.name,): float(getattr(group, field) * unit) for group in groups}
            yield self._gauge(name, text, values, "group")

    def _namespaces(self, spaces: tuple[NamespacePages, ...]) -> Iterator[Metric]:
        for name, field, text in (
            ("namespace_bytes", "pages", "Bytes of the host's pages, by weights and tenant."),
            ("namespace_quota_bytes", "quota_pages", "Most bytes of a namespace, where limited."),
            ("namespace_minimum_bytes", "minimum_pages", "Bytes safe from other namespaces."),
        ):
            counts = ((each, getattr(each, field)) for each in spaces)
            values = {
                (each.weights, each.tenant): float(pages * self._page_bytes)
                for each, pages in counts
                if pages is not None
            }
            yield self._gauge(name, text, values, "weights", "tenant")

    def _locks(self, tiers: Mapping[str, IndexReading]) -> Iterator[Metric]:
        locks = {tier: reading.lock for tier, reading in tiers.items()}
        for name, field, unit, text in (
            ("lock_takings", "acquisitions", 1, "Times that the lock was taken."),
            ("lock_waits", "contended", 1, "Takings that had to wait."),
            ("lock_wait_seconds", "wait_ns", 1e-9, "Time spent waiting for the lock."),
            ("lock_hold_seconds", "hold_ns", 1e-9, "Time that the lock was held."),
            ("lock_recoveries", "recoveries", 1, "Times that a dead holder's work was undone."),
            ("lock_undone_words", "undone_words", 1, "Stores of dead holders that were undone."),
        ):
            values = {(tier,): getattr(lock, field) * unit for tier, lock in locks.items()}
            yield self._counter(name, text, values, "tier")
        longest = {(tier,): lock.hold_max_ns * 1e-9 for tier, lock in locks.items()}
        yield self._gauge(
            "lock_hold_max_seconds", "Longest time that the lock was held.", longest, "tier"
        )

    def _evictions(self, tiers: Mapping[str, IndexReading]) -> Iterator[Metric]:
        gone = {
            (tier, cause.name.lower()): float(pages)
            for tier, reading in tiers.items()
            for cause, pages in reading.evictions.pages.items()
        }
        text = "Pages that went from an index, by cause, whichever process made them go."
        yield self._counter("evicted_pages", text, gone, "tier", "cause")
        samples = {
            tier: reading.evictions.sample
            for tier, reading in tiers.items()
            if reading.evictions.sample is not None
        }
        if not samples:
            return
        for name, field, text in (
            ("eviction_idle_seconds", "idle_at_eviction_s", "Evicted pages by time unused."),
            ("eviction_age_seconds", "age_at_eviction_s", "Evicted pages by age."),
            ("hit_idle_seconds", "idle_at_hit_s", "Hits by the time since the use before."),
        ):
            spans = {
                (tier,): _Buckets(BOUNDS, getattr(sample, field))
                for tier, sample in samples.items()
            }
            yield self._histogram(name, text, spans, "tier")
        hits = {
            (tier, *of): float(n)
            for tier, sample in samples.items()
            for of, n in sample.hits.items()
        }
        text = "Hits of pages in the sample, by class."
        yield self._counter("sampled_hits", text, hits, "tier", "turns", "gap")
        named = {(tier,): float(sample.named) for tier, sample in samples.items()}
        yield self._counter("sampled_named_pages", "New pages in the sample.", named, "tier")
        returned = {
            (tier, f"{size:g}"): float(sample.returned[size])
            for tier, sample in samples.items()
            for size in SIZES
        }
        text = "Of these, hits of a cache of so many times the pages."
        yield self._counter("sampled_returned_pages", text, returned, "tier", "size")

    # ---- the managers' counters

    def _figures(self, totals: ManagerStats) -> Iterator[Metric]:
        def values_of(names: Mapping[str, str]) -> dict[tuple[str, ...], float]:
            return {(label,): float(getattr(totals, name)) for label, name in names.items()}

        hits = "Tokens that were not computed, by the tier that had them."
        yield self._counter("hit_tokens", hits, values_of(_TOKENS), "tier")
        moved = "Transfers between host and device that succeeded."
        yield self._counter("transfers", moved, values_of(_MOVED), "direction")
        yield self._counter(
            "failed_transfers", "Transfers that failed.", values_of(_FAILED), "direction"
        )
        yield self._counter("transferred_pages", "Pages moved.", values_of(_PAGES), "direction")
        text = "Bytes moved between host and device."
        yield self._counter("transferred_bytes", text, values_of(_BYTES), "direction")
        text = "Bytes of pages read from storage and written to it."
        yield self._counter("storage_bytes", text, values_of(_STORED), "direction")
        text = "Pages that were not written to storage, by cause."
        yield self._counter("unstored_pages", text, values_of(_UNSTORED), "cause")
        text = "Pages that were not written to the host, by cause, each time that it was tried."
        yield self._counter("unwritten_pages", text, values_of(_UNWRITTEN), "cause")
        text = "Requests of whose prompt nothing was used, by reason."
        yield self._counter("missed_requests", text, values_of(_MISSED), "reason")
        evicted = {labels: float(getattr(totals, name)) for labels, name in _EVICTED.items()}
        text = "Evicted blocks of the device, pages of the host and of storage, by cause."
        yield self._counter("evictions", text, evicted, "tier", "cause")
        for name in (field.name for field in fields(totals)):
            if name not in _LABELLED and not name.endswith("_ns"):
                text = _HELP.get(name, f"The managers' {name.replace('_', ' ')}.")
                yield self._counter(name, text, {(): float(getattr(totals, name))})

    def _histograms(self, counted: Mapping[str, HistogramCounts]) -> Iterator[Metric]:
        for name, (text, histograms) in _TIMES.items():
            read = {labels: counted[each.name] for labels, each in histograms.items()}
            values = {
                labels: _Buckets(each.bounds, each.counts, each.total)
                for labels, each in read.items()
            }
            yield self._histogram(name, text, values, *("direction" for _ in next(iter(values))))


class CacheMetrics(CachePage, Collector):
    """A collector for a registry of prometheus_client. One for each registry and cache.

    A scrape takes no lock of the cache and never waits for another process. If the cache is closed
    or was replaced, `lightcache_up` is 0, and the scrape still succeeds.
    """

    def __init__(
        self,
        cache: Cache,
        counters: Totals | None = None,
        device: DeviceTier | PageIndex | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            cache: a read-only handle is enough.
            counters: the managers' counters; None: not served.
            device: the device whose blocks are served with tier "device"; None: none.
            labels: for every metric, in addition to `cache`, the cache's name, and `model_name`,
                the model that it was created for, which they may replace.

        Raises:
            ConfigError: a label that the metrics define themselves.
        """
        super().__init__(cache.name, cache.index.segment.config, labels)
        self._cache, self._counters, self._device = cache, counters, device

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment, without the parts that cannot be read."""
        read = {"host": _read(self._cache.index)}
        device = self._device.index if isinstance(self._device, DeviceTier) else self._device
        if device is not None:
            read["device"] = _read(device)
        return self.of(read, *(self._counted(each) for each in (self._counters,) if each))

    @staticmethod
    def _counted(counters: Totals) -> Counted | None:
        with contextlib.suppress(LightcacheError):
            return counters.total(), counters.histograms()
        return None


class ManagerMetrics(_Labelled, Collector):
    """A collector for the circuit breakers of one manager. They belong to this process: each
    process that has a manager serves its own. A scrape takes no lock that a call of the manager
    holds. The manager may be closed."""

    def __init__(self, manager: KVCacheManager, labels: Mapping[str, str] | None = None) -> None:
        """Reads nothing yet.

        Args:
            labels: for every metric, in addition to `cache`: the name of the host cache.

        Raises:
            ConfigError: a label that the metrics define themselves.
        """
        host = manager.host
        super().__init__(host.name, model_in(host.index.segment.config), labels)
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment."""
        shut = {
            ("calls",): self._manager.disabled,
            ("offloads",): self._manager.offloader.breaker.shut,
        }
        text = "Whether calls of the cache, or copies to the host, are disabled after failures."
        yield self._gauge("disabled", text, shut, "part")


class _GroupedMetrics(_Labelled, Collector):
    """Counters of one manager of a model with groups, whose metrics begin with a word of its own.
    Hits are labelled with the tier, transfers with the direction."""

    word = ""
    help: Mapping[str, str] = {}

    def __init__(
        self, index: PageIndex, labels: Mapping[str, str] | None, stats: Callable[[], object]
    ) -> None:
        super().__init__(index.name, model_in(index.segment.config), labels)
        self._stats = stats
        self._most: dict[str, int] = {}

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment."""
        word, stats = self.word, self._stats()
        totals = self._risen(
            {name: value for name, value in vars(stats).items() if isinstance(value, int)}
        )
        from_host = totals["host_hits"] - totals["storage_hits"]
        hits = {(tier,): float(totals[name]) for tier, name in _TIER_HITS.items()}
        text = f"Hits of {word}s, by the tier that had them."
        yield self._counter(f"{word}_hits", text, hits | {("host",): float(from_host)}, "tier")
        for name, names, text in (
            ("transfers", _MOVED, f"{word.capitalize()}s moved between host and device."),
            ("failed_transfers", _FAILED, f"Transfers of {word}s that failed."),
        ):
            values = {(direction,): float(totals[key]) for direction, key in names.items()}
            yield self._counter(f"{word}_{name}", text, values, "direction")
        for name in totals.keys() - _TIER_LABELLED:
            text = self.help.get(name, f"The {word}s' {name.replace('_', ' ')}.")
            yield self._counter(f"{word}_{name}", text, {(): float(totals[name])})

    def _risen(self, totals: Mapping[str, int]) -> dict[str, int]:
        """The highest value so far of each counter. A request that restarts lowers some counts, and
        Prometheus would take a lower value for a restarted counter."""
        for name, value in totals.items():
            self._most[name] = max(self._most.get(name, 0), value)
        return {name: self._most[name] for name in totals}


class CheckpointMetrics(_GroupedMetrics):
    """A collector for the checkpoint counters of a hybrid model. The counters belong to this
    process: each process that has `Checkpoints` serves its own. A scrape takes the checkpoints'
    lock, which is never held while bytes move. The checkpoints may be closed."""

    word, help = "checkpoint", _CHECKPOINTS_HELP

    def __init__(self, checkpoints: Checkpoints, labels: Mapping[str, str] | None = None) -> None:
        """Reads nothing yet.

        Args:
            checkpoints: of a `HybridManager`, or standalone.
            labels: for every metric, in addition to `cache`: the name of the states' host cache, or
                of the slots' index if there is no host cache.

        Raises:
            ConfigError: a label that the metrics define themselves.
        """
        host = checkpoints.host
        where = checkpoints.slots if host is None else host.index
        assert where is not None
        super().__init__(where, labels, checkpoints.stats)


class WindowMetrics(_GroupedMetrics):
    """A collector for the counters of the windows of a `HybridManager`, also by group: what each
    had, and how much was computed since it had no more. The counters belong to this process: each
    that has a manager serves its own. A scrape takes the manager's lock. The manager may be
    closed."""

    word, help = "window", _WINDOWS_HELP

    def __init__(self, hybrid: HybridManager, labels: Mapping[str, str] | None = None) -> None:
        """Reads nothing yet.

        Args:
            labels: for every metric, in addition to `cache`: the name of the host cache.

        Raises:
            ConfigError: a label that the metrics define themselves.
        """
        host = hybrid.manager.host
        super().__init__(host.index, labels, hybrid.window_stats)
        names = names_of(host.index.segment.config)
        numbers = {each.rule.name: each.run.group for each in hybrid.windows}
        numbers[Rule.point().name] = hybrid.checkpoints.run.group
        groups = hybrid.window_stats().groups
        rules = [rule for rule in groups if rule not in numbers or numbers[rule]]
        self._names = {rule: names[n] for rule in rules if (n := numbers.get(rule, 0)) < len(names)}
        """Those of the cache's groups, as in the metrics of `CacheMetrics`."""

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment."""
        yield from super().collect()
        stats: Any = self._stats()
        counts = self._risen(
            {
                f"{self._names.get(rule, rule)}:{name}": value
                for rule, hits in stats.groups.items()
                for name, value in vars(hits).items()
            }
        )
        groups = [self._names.get(rule, rule) for rule in stats.groups]
        tokens = {
            (group, tier): float(counts[f"{group}:{name}"])
            for group in groups
            for tier, name in _TOKENS.items()
        }
        for group in groups:
            tokens[group, "host"] -= tokens[group, "storage"]
        text = "Tokens that were found, by group and the tier that had them."
        yield self._counter("group_hit_tokens", text, tokens, "group", "tier")
        for name, text in (
            ("limited_requests", "Requests that continued from no deeper position."),
            ("limited_tokens", "Tokens computed since a group had no deeper position."),
        ):
            limited = {(group,): float(counts[f"{group}:{name}"]) for group in groups}
            yield self._counter(f"group_{name}", text, limited, "group")


def _read(index: PageIndex) -> IndexReading | None:
    """Metrics of an index, each of some instant of the call; None: closed, replaced or damaged."""
    with contextlib.suppress(LightcacheError), index.segment.busy():
        where = index.segment.address + LOCK_OFFSET
        lock = LockRecord.from_buffer_copy(ctypes.string_at(where, ctypes.sizeof(LockRecord)))
        groups = index.groups() if names_of(index.segment.config) else ()
        every = index.namespace_counts()
        spaces = tuple(each for each in every if each.state == "normal")
        clients = tuple(index.clients())
        return IndexReading(index.stats(), lock, clients, spaces, groups, index.evictions())
    return None


def _life(client: ClientInfo) -> str:
    return {"living": "alive", "in quarantine": "quarantine"}.get(client.life, client.life)


__all__ = [
    "CacheMetrics",
    "CachePage",
    "CheckpointMetrics",
    "Counted",
    "IndexReading",
    "ManagerMetrics",
    "Totals",
    "WindowMetrics",
]
