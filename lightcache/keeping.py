"""What an engine decides itself about pages of an index: to keep some for good, to let a branch go,
and to write back what eviction would take next before it is gone."""

from __future__ import annotations

import ctypes
from types import TracebackType

import numpy as np

from lightcache import _arguments, layout
from lightcache._arguments import Keys, Pages
from lightcache.attached import Attached
from lightcache.errors import ConfigError, LeaseLost
from lightcache.leases import HEADER_BYTES, Lease
from lightcache.namespaces import Namespace
from lightcache.shm.codes import Code, check

MAX_OLDEST = 4096


class ColdLease(Lease):
    """A lease that `PageIndex.oldest` has made. It knows how often each page had been matched."""

    __slots__ = ()

    @property
    def _hits(self) -> Pages:
        """Hits of each page when it was listed."""
        words = np.frombuffer(memoryview(self._buffer).cast("B"), np.int32)
        start = HEADER_BYTES // 4 + int(self._buffer[1])
        return words[start : start + len(self)]


class Oldest:
    """Pages that eviction would take next, pinned: the next first, and each before its parent.

    Copy them elsewhere, then `PageIndex.discard` this; or `release` it, and they stay.
    """

    def __init__(self, lease: Lease, keys: Keys, parents: Pages) -> None:
        """For PageIndex: as the core wrote it, with room for as many as were asked for."""
        self.lease = lease
        """The pins. Whoever does not discard releases it (or leaves its `with`)."""
        self.keys: Keys = keys[: len(lease)].copy()
        """Their keys, uint64 of shape (n, 2)."""
        self.parent: Pages = _positions(lease.pages, parents[: len(lease)])
        """Where in this list the page of the prefix before it is, int32 of shape (n,); -1: it is
        not in the list, or there is none."""

    @property
    def pages(self) -> Pages:
        """The pages, int32 of shape (n,), read-only.

        Raises:
            LeaseLost: released or discarded already.
        """
        return self.lease.pages

    def __len__(self) -> int:
        """Number of pages; 0 after release."""
        return len(self.lease)

    def release(self) -> None:
        """Unpin; they stay in the cache. As `Lease.release`."""
        self.lease.release()

    def __enter__(self) -> Oldest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lease.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<Oldest {len(self)} pages>"


def _positions(pages: Pages, parents: Pages) -> Pages:
    """Position in `pages` of each parent; -1: none."""
    if not len(pages):
        return np.zeros(0, np.int32)
    order = np.argsort(pages)
    at = np.searchsorted(pages, parents, sorter=order).clip(max=len(pages) - 1)
    found = order[at]
    positions: Pages = np.where(pages[found] == parents, found, -1).astype(np.int32)
    return positions


class _Discarding:
    """Pins on their way out: whatever ends the call gives back what is left of them."""

    def __init__(self, index: Attached, pages: Pages) -> None:
        self._index = index
        self.pages = pages
        self.done = np.zeros(len(pages), np.uint8)
        self.order = np.argsort(pages).astype(np.uint32)
        self.progress = layout.DiscardProgress()

    def end(self) -> None:
        """May be called again after an interrupt anywhere in it."""
        if self._index._unusable():
            return
        code = self._index._quick.lci_discard_end(
            self._index._handle,
            ctypes.byref(self.progress),
            _arguments.address(self.pages),
            _arguments.address(self.done),
            len(self.pages),
        )
        if code not in (Code.OK, Code.FORKED, Code.CLOSED):
            check(code, "give back what was not discarded")

    def __del__(self) -> None:
        if getattr(self, "progress", None) is not None and self.progress.taken:
            self.end()


class Keeping(Attached):
    """Part of `PageIndex`: see there."""

    def keep(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Keep the longest ready prefix for good: whoever lives or dies, it is never evicted until
        `unkeep`, `clear` of its namespace, or a `repair` that finds it damaged. Returns its length
        in pages, those kept before included.

        Nothing bounds what may be kept: a pool that is kept whole takes in nothing more. Takes the
        lock, for 256 pages at a time; about 20 ns a page. After an error the beginning may be kept.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            LockTimeout, PermissionDenied, Detached.
        """
        return int(self._walk_keys(keys, namespace, True).cursor)

    def unkeep(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Let those of the keys be evicted again that are kept, wherever in the chain. Returns how
        many were. A prefix that several prompts share is then not kept for the others either, but
        stays as long as what hangs on it. As `keep` otherwise."""
        return int(self._walk_keys(keys, namespace, False).pages)

    def _walk_keys(
        self, keys: Keys, namespace: Namespace | None, keep: bool
    ) -> layout.WalkProgress:
        where, n = _arguments.keys(keys)
        progress = layout.WalkProgress()
        ref, what = self._whole._ref(namespace), "keep" if keep else "unkeep"
        code = self._locked("lci_keep", where, n, ref, keep, ctypes.byref(progress), what=what)
        check(code, what)
        return progress

    def drop(self, keys: Keys, *, start: int = 0, namespace: Namespace | None = None) -> int:
        """Evict the branch of `keys[start:]` now, from its end upward: as far as pages can go.
        Stops at the first that is pinned, kept, being written, or has something else hanging on it.
        Keys at the end whose pages are gone already are passed over. Returns how many pages went.
        In a flat index what hangs on a page holds nothing up.

        Takes the lock, for 256 pages at a time; about 50 ns a page. A namespace's `minimum` does
        not count here.

        Raises:
            ConfigError: keys of another shape, dtype or layout; start out of range.
            LockTimeout: what has gone is gone.
            PermissionDenied, Detached.
        """
        where, n = _arguments.keys(keys)
        _arguments.count(start, "start", 0, n)
        progress = layout.WalkProgress()
        ref = self._whole._ref(namespace)
        code = self._locked("lci_drop", where, n, start, ref, ctypes.byref(progress), what="drop")
        check(code, "drop")
        return int(progress.pages)

    def oldest(self, n: int, *, keep_order: bool = True) -> Oldest:
        """Pin the up to n pages that eviction would take next, for a caller that writes them back
        to another tier: ends of prefixes, least recently used first, and a parent behind its last
        child when it was used together with it, as eviction goes on. A parent that was used later
        is listed when its children are gone: call again after `discard`. What is pinned, kept or
        promised to a namespace is left out, and counts as just used, as when eviction meets it. Of
        a flat index pages are listed in the order of their last use, whatever hangs on what.

        Takes the lock, for 256 pages of work at a time; 100 to 250 ns a page.

        Args:
            n: 0 to 4,096.
            keep_order: they stay the next to go. False: they count as just used, should they stay.

        Raises:
            ConfigError: n out of range.
            LockTimeout: nothing is held.
            NoSpace: one of the pages is pinned 65,535 times by this client; nothing is held.
            PermissionDenied, Detached.
        """
        _arguments.count(n, "n", 0, MAX_OLDEST)
        lease = ColdLease(self._whole, n)
        keys, parents = np.zeros((n, 2), np.uint64), np.zeros(n, np.int32)
        progress = layout.OldestProgress(want=n, keep_order=bool(keep_order))
        try:
            code = self._locked(
                "lci_oldest",
                ctypes.byref(progress),
                lease._buffer,
                _arguments.address(keys),
                _arguments.address(parents),
                what="list the oldest",
            )
            check(code, "oldest")
            return Oldest(lease, keys, parents)
        except BaseException:
            lease.__exit__(None, None, None)
            raise

    def discard(self, pages: Oldest | Lease | Pages) -> int:
        """Give up our pins of these pages and evict exactly these, from the ends of prefixes
        upward. Stay: those that somebody else pins, that were matched since `oldest` listed them,
        that are kept, and on which something else hangs (which in a flat index is no reason).
        Returns how many went.

        Takes the lock, for 256 pages at a time; about 250 ns a page. A namespace's `minimum` does
        not count here. In whatever order they stand, all are looked at.

        Args:
            pages: what `oldest` returned, or its lease; another lease; or page numbers (int32),
                each once, of which one pin each is given up. A lease is released by this.

        Raises:
            LeaseLost: a lease that was released, or a page that we do not pin. Nothing was done.
            ConfigError: not page numbers of this index, or one of them twice. Nothing was done.
            LockTimeout: our pins are given up; some may have gone.
            PermissionDenied, Detached.
        """
        lease = pages.lease if isinstance(pages, Oldest) else pages
        held = lease if isinstance(lease, Lease) else None
        if held is not None and held._index is not self:
            raise ConfigError("discard: this lease is of another index")
        numbers = _numbers(held.pages if held is not None else pages, "discard")
        if len(np.unique(numbers)) != len(numbers):
            raise ConfigError("discard: a page is named twice; name each once")
        hits = held._hits.copy() if isinstance(held, ColdLease) else None
        going = _Discarding(self, numbers)
        try:
            code = self._locked(
                "lci_discard",
                ctypes.byref(going.progress),
                held._buffer if held is not None else None,
                _arguments.address(numbers),
                None if hits is None else _arguments.address(hits),
                _arguments.address(going.order),
                _arguments.address(going.done),
                len(numbers),
                what="discard",
            )
        finally:
            going.end()
            if held is not None and going.progress.taken:
                held._done = True
        self._refuse_pages(code, numbers, "discard", -1)
        return int(going.progress.freed)

    def keys_of(self, pages: Pages) -> Keys:
        """The keys of ready pages that we pin, uint64 of shape (n, 2). No lock; about 20 ns a page.

        Raises:
            LeaseLost: one of them is not pinned by this client, or has no key: it is being
                written, or was cleared meanwhile.
            ConfigError: not page numbers of this index (int32).
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        numbers = _numbers(pages, "keys_of")
        keys, bad = np.zeros((len(numbers), 2), np.uint64), ctypes.c_uint32()
        code = self._quick.lci_keys_of(
            self._handle,
            _arguments.address(numbers),
            len(numbers),
            _arguments.address(keys),
            ctypes.byref(bad),
        )
        self._refuse_pages(code, numbers, "keys_of", bad.value)
        return keys

    def _refuse_pages(self, code: int, pages: Pages, what: str, bad: int) -> None:
        which = f"page {pages[bad]}" if 0 <= bad < len(pages) else "one of the pages"
        if code == Code.OWNER:
            raise LeaseLost(
                f"{what}: {which} is not pinned by this client; match or adopt it first"
            )
        if code == Code.STALE:
            raise LeaseLost(f"{what}: {which} has no key; it is being written, or was cleared")
        if code == Code.TWICE:
            raise LeaseLost(f"{what}: this lease was released before")
        if code == Code.RANGE:
            raise ConfigError(f"{what}: expected pages 0 to {self.pages - 1}, found others")
        check(code, what)


def _numbers(pages: object, what: str) -> Pages:
    """A copy of page numbers.

    Raises:
        ConfigError: not int32 of one dimension.
    """
    if not isinstance(pages, np.ndarray) or pages.dtype != np.int32 or pages.ndim != 1:
        raise ConfigError(f"{what}: expected page numbers as int32 of shape (n,), found {pages!r}")
    copied: Pages = pages.copy()
    return copied


__all__ = ["MAX_OLDEST", "ColdLease", "Keeping", "Oldest"]
