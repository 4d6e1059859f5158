"""Pages without a key in an index: allocating them, giving them names, taking those away."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache import _arguments, layout
from lightcache._arguments import Keys, Offsets, Pages
from lightcache.attached import Attached
from lightcache.errors import ConfigError, InUse, LeaseLost, OutOfPages
from lightcache.held import Held, Named
from lightcache.shm.codes import Code, check

if TYPE_CHECKING:
    from lightcache.namespaces import Namespace
    from lightcache.tickets import ClientId, Ticket

MERGE = 1


class HeldPages(Attached):
    """Part of `PageIndex`: see there.

    For an index whose pages are a device's blocks, of which a running request needs some before
    their content has a key, and gives them one when they are full. Such a page is HELD: in no
    lookup, never evicted, of this client alone; it comes back when the client dies or leaves.
    """

    def allocate(self, n: int, *, timeout: float | None = None) -> Held:
        """n pages without a key: all, or none. Evicts as `reserve` does. Takes the lock, for at
        most 256 pages at a time; 0.1 us a page that is free. `allocate(index.pages)` of a fresh
        index gives them in order, 0 to pages - 1: for an engine that numbers its blocks itself.

        Args:
            n: how many, at most all pages of the index.
            timeout: seconds to wait for the lock; None: the handle's `lock_timeout`.

        Raises:
            OutOfPages: so many cannot be had: says how many are free. Nothing is held.
            NoSpace: pages have no memory behind them yet; `grow`. Nothing is held.
            LockTimeout: says who holds the lock. Nothing is held.
            ConfigError: n is out of range.
            NotReady: an operator disabled the cache.
            PermissionDenied, Detached.
        """
        _arguments.count(n, "n", 0, self.pages)
        held = Held(self._whole, n)
        arguments = (
            ctypes.byref(held._progress),
            _arguments.address(held._pages),
            _arguments.address(held._gens),
            n,
        )
        try:
            code = self._locked("lci_allocate", *arguments, what="allocate", timeout=timeout)
            while code == Code.GROW:
                self._whole._need_memory(int(held._progress.wanted))
                code = self._locked("lci_allocate", *arguments, what="allocate", timeout=timeout)
            if code == Code.FULL:
                raise OutOfPages(self._too_many(n))
            check(code, "allocate")
        except BaseException:
            held.__exit__(None, None, None)
            raise
        return held

    def _too_many(self, n: int) -> str:
        now = self._whole.stats()
        return (
            f"allocate: {n} pages were asked for, {now.free} are free, and of {now.ready} ready "
            "ones not enough can be evicted: they are pinned, or prefixes of pinned ones "
            f"({now.held} are held, {now.writing} being written); free or unpin some"
        )

    def can_allocate(self, n: int) -> bool:
        """Whether `allocate(n)` would succeed now: free pages, and ready ones that we do not pin.
        Advice: pins of other clients are not looked at, and others allocate meanwhile. No lock;
        when the totals alone do not tell, 1 to 2 ns a page of the index.

        Raises:
            ConfigError: n is below 0.
            Detached.
        """
        _arguments.count(n, "n", 0, layout.NIL)
        return bool(check(self._quick.lci_may_allocate(self._handle, n), "can_allocate"))

    # ---- names

    def name_pages(
        self,
        pages: Pages,
        keys: Keys,
        start: int = 0,
        *,
        merge: bool = True,
        namespace: Namespace | None = None,
        into: Named | None = None,
        timeout: float | None = None,
    ) -> Named:
        """Give pages that we hold their keys: pages[i] holds what keys[start + i] stands for. From
        then on lookups find them; our pin of each stays until `unpin`. Their content must be
        complete before.

        Args:
            pages: len(keys) - start pages that we hold.
            keys: of the whole chain from its root: the page of the key before is the parent.
            start: first key to be given.
            merge: where another page stands under a key already, free ours.
            into: an empty `Named(len(pages))`, which after an error says how far this came; the
                same call with it goes on there.
            timeout: seconds to wait for the lock; None: the handle's `lock_timeout`.

        Raises:
            LeaseLost: one of the pages is not held by us, or stands twice among them; it says
                which. Those before it may have been named: see `into`.
            ConfigError: not as many pages as keys.
            Abandoned: the namespace was cleared.
            LockTimeout, PermissionDenied, Detached.
        """
        _, n = _arguments.keys(keys)
        begin = _arguments.count(start, "start", 0, n)
        return self.name_many(
            pages,
            keys,
            np.array((0, n), np.int64),
            np.array((begin,), np.int64),
            merge=merge,
            namespace=namespace,
            into=into,
            timeout=timeout,
        )

    def name_many(
        self,
        pages: Pages,
        keys: Keys,
        offsets: Offsets,
        starts: Any = None,
        *,
        merge: bool = True,
        namespace: Namespace | None = None,
        into: Named | None = None,
        timeout: float | None = None,
    ) -> Named:
        """`name_pages` for many requests in one call. Request i has the keys
        [offsets[i], offsets[i+1]), and names its pages by those from `starts[i]` on, counted from
        its first; `pages` are those of one request behind another. About 0.1 us a page."""
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        begins = _starts(starts, len(bounds) - 1)
        held = _arguments.pages(pages)
        wanted = n - int(begins.sum())
        sizes = bounds[1:] - bounds[:-1]
        if len(held) != wanted or (begins < 0).any() or (begins > sizes).any():
            raise ConfigError(
                f"name: expected starts within each request, and a page for each key behind them "
                f"({wanted}), found {len(held)} pages"
            )
        named = Named(wanted) if into is None else into
        if len(named) != wanted:
            raise ConfigError(f"into: expected room for {wanted} pages, found {len(named)}")
        progress = named._progress
        progress.ns = self._whole._ref(namespace)
        progress.flags = MERGE if merge else 0
        code = self._locked(
            "lci_name",
            ctypes.byref(progress),
            where,
            _arguments.address(bounds),
            _arguments.address(begins),
            len(begins),
            _arguments.address(held),
            len(held),
            _arguments.address(named.pages),
            _arguments.address(named.status),
            what="name",
            timeout=timeout,
        )
        self._check_pages(code, "name", held, progress, "is not held by this client")
        return named

    def unname(self, pages: Pages, *, timeout: float | None = None) -> None:
        """Take the names of ready pages that we pin and nobody else: they are held again, with
        their content, and no lookup finds them. What hung on them stays, without a parent. Takes
        the lock; about 0.1 us a page.

        A page that only a lease of ours pins must not be unnamed: its release would leave it
        without a pin.

        Raises:
            InUse: another client pins one of them, or a ticket does; it says which.
            LeaseLost: one of them is not ready, or not pinned by us; it says which.
            ConfigError, LockTimeout, PermissionDenied, Detached.
        """
        held = _arguments.pages(pages)
        progress = layout.HeldProgress()
        code = self._locked(
            "lci_unname",
            ctypes.byref(progress),
            _arguments.address(held),
            len(held),
            what="unname",
            timeout=timeout,
        )
        if code == Code.PINS:
            which = f"{held[progress.refused]} (number {progress.refused} of {len(held)})"
            raise InUse(
                f"unname: page {which} is pinned by another client; {progress.done} before it were "
                "unnamed; try again when it has been released"
            )
        self._check_pages(code, "unname", held, progress, "is not ready, or not pinned by us")

    # ---- giving back

    def free(self, pages: Pages, *, timeout: float | None = None) -> None:
        """Give back pages that we hold. Those that others pin (through a ticket) are doomed, and
        go when they are released. Takes the lock; about 0.1 us a page.

        Raises:
            LeaseLost: one of them is not held by us, or stands twice among them; it says which.
            ConfigError, LockTimeout, PermissionDenied, Detached.
        """
        held = _arguments.pages(pages)
        progress = layout.HeldProgress()
        code = self._locked(
            "lci_free_held",
            ctypes.byref(progress),
            _arguments.address(held),
            None,
            len(held),
            what="free pages",
            timeout=timeout,
        )
        self._check_pages(code, "free", held, progress, "is not held by this client")

    def unpin(self, pages: Pages) -> None:
        """Release one pin of each page: of pages that were named, and whose numbers we kept. No
        lock, does not block; a page may stand there more than once.

        Raises:
            LeaseLost: one of them is not pinned by us, or has no key and no other pin (`free`
                it); it says which. Nothing was released.
            ConfigError, PermissionDenied, Detached.
        """
        held = _arguments.pages(pages)
        refused = ctypes.c_uint32()
        code = self._quick.lci_unpin(
            self._handle, _arguments.address(held), len(held), ctypes.byref(refused)
        )
        if code == Code.OWNER:
            raise LeaseLost(
                f"unpin: page {held[refused.value]} (number {refused.value} of {len(held)}) is not "
                "pinned by this client, or it has no key: free it; nothing was released"
            )
        check(code, "unpin")

    def ticket(self, pages: Pages, adopters: list[ClientId], *, timeout: float = 60.0) -> Ticket:
        """A ticket of pages that we pin, held or named: who adopts it gets a `Lease`. If we free a
        page meanwhile, it stays until the adopters have released it. See `Ticket`.

        Args:
            adopters: who may adopt, each once; see `client_id`.
            timeout: seconds until adopting ends.

        Raises:
            LeaseLost: one of the pages is not pinned by us.
            OutOfPages: too many tickets are outstanding.
            ConfigError, LockTimeout, PermissionDenied, Detached.
        """
        return self._whole._give_ticket(_arguments.pages(pages), None, adopters, timeout)

    def _check_pages(
        self, code: int, what: str, pages: Pages, progress: layout.HeldProgress, why: str
    ) -> None:
        if code == Code.OWNER:
            at = int(progress.refused)
            raise LeaseLost(
                f"{what}: page {pages[at]} (number {at} of {len(pages)}) {why}, or stands twice "
                f"among them; the first {progress.done} were done; pass each page of yours once"
            )
        check(code, what)


def _starts(starts: Any, requests: int) -> Offsets:
    if starts is None:
        return np.zeros(requests, np.int64)
    found = np.asarray(starts)
    if found.shape != (requests,) or (requests and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"starts: expected {requests} integers, found {found.dtype} {found.shape}"
        )
    return np.ascontiguousarray(found, np.int64)


__all__ = ["HeldPages"]
