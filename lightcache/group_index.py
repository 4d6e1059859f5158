"""The pages of one group in an index that others share: found, reserved and dropped by the keys of
its own pages, whatever parts they lie in."""

from __future__ import annotations

from collections.abc import Hashable

from lightcache._arguments import Keys, Offsets, Pages
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.reservations import Reservation
from lightcache.runs import Run


class GroupIndex:
    """Calls of a `PageIndex` for the pages of a group that are of use without those before them.
    All keys are those of the group's pages; leases and reservations have the parts of each page,
    one after the other. Errors as of the call of the same name."""

    def __init__(self, index: PageIndex, run: Run) -> None:
        """Args:
        index: the caller closes it.
        run: how the group's pages lie there.
        """
        self.index, self.run = index, run

    def peek(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """How many of the pages, from the first on, are there with all their parts."""
        return self.index.peek(self.run.keys(keys), namespace=namespace) // self.run.parts

    def last_ready(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """The number of keys up to and including the last whose page is there with all its parts;
        0: none is."""
        last, end = self.run.last(keys), len(keys)
        while end := self.index.last_ready(last[:end], namespace=namespace):
            if self.peek(keys[end - 1 : end], namespace=namespace):
                break
            end -= 1  # a part before the last is missing
        return end

    def last_ready_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """`last_ready` for many requests, int32 of shape (requests,)."""
        found = self.index.last_ready_many(self.run.last(keys), offsets, namespace=namespace)
        for i, (low, end) in enumerate(zip(offsets, found, strict=False)):
            if end and not self.peek(keys[low + end - 1 : low + end], namespace=namespace):
                found[i] = self.last_ready(keys[low : low + end - 1], namespace=namespace)
        return found

    def children(self, keys: Keys, *, namespace: Namespace | None = None) -> Pages:
        """What hangs on each page, -1 for one that is not there; int32 of shape (n,)."""
        return self.index.children(self.run.last(keys), namespace=namespace)

    def plan(
        self,
        request: Hashable,
        key: Keys,
        *,
        namespace: Namespace | None = None,
        timeout: float,
        frozen: bool = False,
    ) -> bool:
        """Pin one page for a waiting request. False: it is not there, and nothing is pinned."""
        del frozen  # the keys of parts are ours
        parts = self.run.keys(key)
        name = self._name(request)
        found = self.index.plan(name, parts, namespace=namespace, timeout=timeout, frozen=True)
        if found < len(parts):
            self.index.cancel(name)
        return found == len(parts)

    def take(self, request: Hashable) -> Lease:
        """The planned page as a lease; empty if it was cleared meanwhile."""
        return self.index.take(self._name(request))

    def cancel(self, request: Hashable) -> bool:
        """Drop the plan. False: there is none."""
        return self.index.cancel(self._name(request))

    def _name(self, request: Hashable) -> Hashable:
        """Of its plan: others plan in the same index for the same requests."""
        return self.run.group, request

    def reserve(
        self,
        keys: Keys,
        start: int,
        *,
        shards: int,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> Reservation:
        """Reserve the pages of `keys[start:]`: all parts of them that are not there, or none."""
        return self.index.reserve(
            self.run.keys(keys),
            start * self.run.parts,
            shards=shards,
            independent=True,
            run=self.run,
            namespace=namespace,
            timeout=timeout,
        )

    def protect(self, key: Keys, *, namespace: Namespace | None = None) -> int:
        """Protect one page from eviction. Returns how many are protected: 0 or 1."""
        return self.index.protect(self.run.keys(key), namespace=namespace) // self.run.parts

    def unprotect(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Unprotect pages. Returns how many were protected."""
        parts = self.index.unprotect(self.run.keys(keys), namespace=namespace)
        return -(-parts // self.run.parts)

    def evict_first(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Make pages the first to be evicted. Returns how many were changed."""
        parts = self.index.evict_first(self.run.keys(keys), namespace=namespace)
        return -(-parts // self.run.parts)

    def drop(self, key: Keys, *, namespace: Namespace | None = None) -> int:
        """Evict one page. Returns how many went: 0 or 1."""
        return -(-self.index.drop(self.run.keys(key), namespace=namespace) // self.run.parts)


__all__ = ["GroupIndex"]
