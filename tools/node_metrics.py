"""NodeMetrics: all caches of a machine as one collector of Prometheus.

Each scrape opens and reads what is there, and keeps nothing: a reader that stayed attached would
keep caches that their last client has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lightcache import layout
from lightcache.errors import LightcacheError, NotReady
from lightcache.evictions import evictions_of
from lightcache.manager.stats import histograms_of, stats_of
from lightcache.metrics import CachePage, Counted, IndexReading
from lightcache.runs import names_of
from lightcache.shm import clients, names
from lightcache.shm import layout as shm_layout
from lightcache.shm.layout import LockRecord
from lightcache.shm.objects import OpenObject
from lightcache.snapshot import NAMESPACE_TABLE_BYTES, IndexStats, groups_of, namespaces_of
from lightcache.tools.facts import counted
from lightcache.tools.image import caches_of, read_any, verify_index

_HEAD_BYTES = shm_layout.LOCK_OFFSET + ctypes.sizeof(LockRecord)


class NodeMetrics(Collector):
    """A collector for all caches of this machine, or for some, each as `CacheMetrics` shows it,
    with the counters of its managers. One for each registry. Takes no slot and no lock, and maps
    nothing; some milliseconds a cache."""

    def __init__(
        self, caches: Sequence[str] | None = None, labels: Mapping[str, str] | None = None
    ) -> None:
        """Reads nothing yet.

        Args:
            caches: their names, or models, whose default caches are meant, each there or not; None:
                all that there are.
            labels: see `CacheMetrics`.

        Raises:
            ConfigError: a label that the metrics define themselves.
        """
        CachePage("", {}, labels)  # checks them
        self._wanted = None if caches is None else tuple(caches)
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment. A cache that is absent or cannot be read has `up` alone."""
        families: dict[str, Metric] = {}
        for name in self._names():
            for metric in self._of(name):
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples += metric.samples
        return iter(families.values())

    def _names(self) -> Iterable[str]:
        """Looked up at each scrape: an upgrade gives a model another cache."""
        if self._wanted is None:
            return names.segment_names()
        return dict.fromkeys(name for one in self._wanted for name in caches_of(one) or [one])

    def _of(self, name: str) -> Iterator[Metric]:
        read: _Read | None = None
        with contextlib.suppress(LightcacheError, OSError, ValueError):
            read = _Read(name)
        if read is not None and read.is_cache:
            page = CachePage(name, read.config, self._labels)
            return page.of({"host": read.index}, *_counted(name, read.uuid))
        if self._wanted is None:
            return iter(())
        return CachePage(name, {}, self._labels).of({"host": None})


class _Read:
    """One reading of an index.

    Raises:
        LightcacheError, OSError, ValueError: it is not there, is of another kind or release, or is
            damaged.
    """

    def __init__(self, name: str) -> None:
        opened = OpenObject.open(name, writable=False)
        if opened is None:
            raise NotReady(f"there is no segment {name!r}")
        with contextlib.closing(opened):
            self.config, place = verify_index(opened)
            header = opened.header()
            self.uuid = bytes(header.uuid).hex()
            self.is_cache = isinstance(self.config.get("page_bytes"), int)
            """Else it is an index of device blocks, which an engine serves."""
            self.index = None if header.retired else self._read(opened, place)

    def _read(self, opened: OpenObject, place: layout.Geometry) -> IndexReading:
        head = _part(opened, _HEAD_BYTES, 0)
        table = head[shm_layout.CLIENTS_OFFSET : shm_layout.LOCK_OFFSET]
        root = layout.RootRecord.from_buffer_copy(
            _part(opened, ctypes.sizeof(layout.RootRecord), place.root)
        )
        learnt = None
        if place.advice != place.end:
            size = ctypes.sizeof(layout.LearntRecord)
            learnt = layout.LearntRecord.from_buffer_copy(_part(opened, size, place.advice))
        spaces = namespaces_of(_part(opened, NAMESPACE_TABLE_BYTES, place.namespaces))
        pages = [group.pages for group in root.group]
        minimums = [group.minimum for group in root.group]
        return IndexReading(
            stats=_stats(root, place.pages, _uncollected(opened, place, root)),
            lock=LockRecord.from_buffer_copy(head, shm_layout.LOCK_OFFSET),
            clients=tuple(clients.read_table(table, opened.fd)),
            namespaces=tuple(space for space in spaces if space.state == "normal"),
            groups=groups_of(pages, minimums, self.config) if names_of(self.config) else (),
            evictions=evictions_of(root, learnt),
        )


def _part(opened: OpenObject, nbytes: int, offset: int) -> bytes:
    data = os.pread(opened.fd, nbytes, offset)
    if len(data) < nbytes:
        raise ValueError("it was truncated")
    return data


def _uncollected(opened: OpenObject, place: layout.Geometry, root: layout.RootRecord) -> int:
    """Pages that were published since the lock was last taken: the root has them as being
    written."""
    pages, size = 0, ctypes.sizeof(layout.ReservationRecord)
    for number in (64 * i + bit for i in range(16) for bit in _bits(root.completed[i])):
        if number < place.reservations:
            data = _part(opened, size, place.reservation + number * size)
            record = layout.ReservationRecord.from_buffer_copy(data)
            pages += record.pages.count if record.state else 0
    return pages


def _bits(word: int) -> Iterator[int]:
    return (bit for bit in range(64) if word >> bit & 1)


def _stats(root: layout.RootRecord, pages: int, published: int) -> IndexStats:
    """Totals as the root has them, so those that are doomed include those without a pin."""
    writing = max(0, root.writing - published)
    return IndexStats(
        pages=pages,
        grown=root.grown,
        free=max(0, root.free_count + root.grown - min(root.fresh, root.grown)),
        writing=writing,
        ready=max(0, root.named - writing),
        doomed=root.doomed,
        held=root.held,
        evictable=root.queued,
        reservations=root.res_used,
        tickets=root.ticket_used,
        kept=root.kept,
        clock=root.clock,
        eviction=layout.EVICTIONS[bool(root.eviction)],
    )


def _counted(name: str, uuid: str) -> tuple[Counted, ...]:
    """What managers of the cache have counted; none: no process counts."""
    with contextlib.suppress(LightcacheError, OSError, ValueError):
        counts = counted(read_any(names.counters_name(name, uuid)))
        return ((stats_of(counts), histograms_of(counts)),) if counts else ()
    return ()


__all__ = ["NodeMetrics"]
