"""What all managers of a node have counted, those that are gone included."""

from __future__ import annotations

from dataclasses import fields

from lightcache.cache import Cache
from lightcache.manager.statistics import ManagerStats
from lightcache.shm import SharedCounters

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

    def __exit__(self, *exception: object) -> None:
        self._counters.__exit__(*exception)


__all__ = ["NodeCounters"]
