"""KVCacheManager: device, host and storage as one prefix cache, for a scheduler."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lightcache._arguments import Pages
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LeaseLost
from lightcache.hashing import Tokens
from lightcache.manager.allocating import allocate, make_room
from lightcache.manager.checks import (
    check_commits,
    check_hashable,
    check_parts,
    check_table,
)
from lightcache.manager.demoting import Demotion
from lightcache.manager.device import DeviceTier
from lightcache.manager.extension import Extension
from lightcache.manager.fetching import Fetch, begin_fetch, no_fetch
from lightcache.manager.finding import Finding
from lightcache.manager.guard import Guard, nothing
from lightcache.manager.limits import seconds_of
from lightcache.manager.matches import ManagerConfig, PrefixMatch, Why, WritePolicy
from lightcache.manager.movers import Mover
from lightcache.manager.naming import NOTHING, name_blocks
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.planning import Planner
from lightcache.manager.releasing import Leaving
from lightcache.manager.requests import Request
from lightcache.manager.spaces import Spaces
from lightcache.manager.statistics import Figures, Recent
from lightcache.manager.storing import storage_of
from lightcache.manager.traffic import Traffic
from lightcache.manager.weights import Look, Weights
from lightcache.manager.writing import Writer

if TYPE_CHECKING:
    from lightcache.costs import Costs
    from lightcache.manager.counters import NodeCounters
    from lightcache.storage.tiers import BaseTier


class KVCacheManager(Finding):
    """What a scheduler holds. One for each engine, or for each data-parallel rank of one; all of a
    node share the host cache.

    A request's way: `plan` it while it waits, as often as you like; `take` it; `allocate` (owned
    devices); `fetch` what is to be loaded; `commit` as tokens are computed; `release`. Call `poll`
    each step. Calls may come from several threads; none waits for bytes unless it says so.
    """

    def __init__(
        self,
        host: Cache,
        device: DeviceTier,
        mover: Mover,
        *,
        config: ManagerConfig | None = None,
        costs: Costs | None = None,
        storage: BaseTier | str | Sequence[str] | None = None,
        weights: str = "",
        counters: NodeCounters | None = None,
    ) -> None:
        """Everything stays the caller's to close, after the manager, but for what it opens.

        Args:
            host: the node's cache; its `page_tokens` must be a multiple of the device's block, or a
                part of it.
            device: `OwnedDevice` or `AttachedDevice`.
            mover: who moves bytes between the two.
            costs: `lightcache.costs.Costs`: whether so few pages are worth loading; None: always.
            storage: a `StorageTier` or `StorageClient` of the same cache; or a URL, or several, as
                "disk:/mnt/nvme/cache?capacity=1TiB", opened here and closed by `close`; None: none.
            weights: version of the weights that are being served.
            counters: of the node, which our figures are added to; None: they stay our own.

        Raises:
            ConfigError: page sizes that do not fit each other, or something else than it says.
            StorageError: the storage cannot be opened.
        """
        self.config = ManagerConfig() if config is None else config
        check_parts(host, device, self.config)
        self.host, self.device, self.mover = host, device, mover
        self.page_tokens = host.index.page_tokens
        big, small = sorted((self.page_tokens, device.block_tokens), reverse=True)
        if big % small:
            raise ConfigError(
                f"page sizes: expected one a multiple of the other, found host pages of "
                f"{self.page_tokens} tokens and device blocks of {device.block_tokens}"
            )
        self._lock = threading.RLock()
        self._figures = Figures()
        self._counters, self._told, self._tell_at = counters, Figures(), 0.0
        self._recent = Recent(self.config.window)
        self._guard = Guard(self.config.failures, self._figures, self._let_go)
        self._traffic = Traffic(self._lock)
        self._spaces = Spaces(host, device, weights)
        self._weights = Weights(self)
        self._storage = storage_of(host, storage)
        self._own_storage = None if self._storage is storage else self._storage
        self._planner = Planner(self, costs, self._storage)
        self._requests: dict[Hashable, Request] = {}
        self._writer = Writer(self)
        self._leaving = Leaving(self)
        self._demotion = Demotion(self)
        self._closed = False
        self.extension = Extension(self)
        """For what is built on a manager."""

    # ---- running

    def allocate(self, request: Hashable, tokens: int, *, timeout: float | None = 0.0) -> Pages:
        """Owned devices: blocks for so many tokens in all, and the decode reserve. Returns the
        whole table, int32.

        With `WritePolicy.BACK` named blocks that have to make room are written to the host first.
        That goes on beside you, so there may be no room yet: `poll`, and ask again, or wait here.

        Args:
            timeout: seconds that it may block while blocks are being written back; None: as long
                as that takes.

        Raises:
            OutOfPages: so many cannot be had, or not yet. Nothing changed; preempt somebody, or
                wait, or `forgo` what the host has and ask for fewer.
            ConfigError: no number of tokens, or of seconds.
            LeaseLost: no such request.
        """
        return allocate(self, request, tokens, timeout)

    def can_allocate(self, blocks: int, *, evict: bool = False) -> bool:
        """Owned devices: whether so many blocks could be had now. Advisory unless `evict`.

        Args:
            evict: free them now, those unused for longest first; what they held is dropped. With
                `WritePolicy.BACK` it is written to the host first: False while that goes on.
        """
        with self._lock:
            device = self._owned("can_allocate")
            back = self.config.write is WritePolicy.BACK and device.index is not None
            if evict and back and device.can_allocate(blocks):
                free = make_room(self, device, blocks)
                if free < blocks and self._demotion.going:
                    return False
            return device.can_allocate(blocks, evict=evict)

    def forgo(self, request: Hashable) -> PrefixMatch:
        """Instead of `fetch`, when there is no room for what it would bring: the host's pages go
        back, the device's part stays, the rest is computed. Returns what is usable now.

        Raises:
            ConfigError: it was fetched already.
            LeaseLost: no such request.
        """
        with self._lock:
            one = self._request(request)
            if one.fetched:
                raise ConfigError(f"forgo {request!r}: it was fetched already; release it instead")
            one.let_go_of_host()
            usable = self._planner.without_host(one.prompt, one.match)
            if usable == one.match.usable:
                return one.match
            one.match = replace(one.match, usable=usable, why=Why.FORGONE)
            found = self._counted(one.match)
            found.subtract(one.counted)
            self._figures.update(found)
            self._recent.change(one.counted, **found)
            return one.match

    def fetch(self, request: Hashable, table: Pages | None = None) -> Fetch:
        """Bring what was found on the host to the device. Returns at once.

        Args:
            table: attached devices: the request's blocks, for `match.usable` tokens at least.

        Raises:
            ConfigError: the table is too short, or no table of blocks.
            LeaseLost: no such request.
        """
        with self._lock:
            one = self._request(request)
            before = one.table
            if table is not None:
                one.table = check_table(self.device, one, table, one.match.usable)
            try:
                return self._guard.run(lambda: begin_fetch(self, one), lambda: no_fetch(self, one))
            except ConfigError:
                one.table = before
                raise

    def commit(
        self,
        request: Hashable,
        total: int,
        *,
        new_tokens: Tokens | None = None,
        table: Pages | None = None,
    ) -> Mapping[int, int]:
        """The KV of the first `total` tokens is on the device: full blocks get their names, and go
        to the host by the write policy.

        Args:
            total: computed and accepted. Never those that speculation may take back.
            new_tokens: ids of what was generated since the last call.
            table: attached devices: the request's blocks.

        Returns:
            Blocks to exchange in the table: position -> block. Owned devices only, where another
            block holds the same already; the old one is given back.
        """
        tables = None if table is None else [table]
        return self.commit_many([request], [total], [new_tokens], tables)[0]

    def commit_many(
        self,
        requests: Sequence[Hashable],
        totals: Sequence[int],
        new_tokens: Sequence[Tokens | None] | None = None,
        tables: Sequence[Pages] | None = None,
    ) -> list[Mapping[int, int]]:
        """`commit` for a whole batch in one call, of different requests. All of it is looked at
        first: a refused call changes nothing.

        Raises:
            ConfigError: something is wrong with one of them, or they are not as many; says which.
            LeaseLost: no such request.
        """
        with self._lock:
            known = self._requests
            try:
                running = [known.get(request) or self._request(request) for request in requests]
            except TypeError:
                check_hashable(requests, "commit")
                raise
            if any(one.loading is not None and one.is_loading for one in running):
                self._traffic.poll()
            packed, tables = check_commits(self.device, running, totals, new_tokens, tables)
            for one, total, fresh in zip(running, totals, packed, strict=True):
                one.note(total, fresh)
            if tables is not None:
                for one, table in zip(running, tables, strict=True):
                    one.table = table
            changed: list[Mapping[int, int]] = [NOTHING] * len(running)
            self._guard.run(lambda: self._committed(running, changed), nothing)
            return changed  # of what was exchanged before an error, too

    def _committed(self, running: list[Request], changed: list[Mapping[int, int]]) -> None:
        look = Look(self._weights)
        name_blocks(self, running, look, changed)
        self._writer.due(running, look)

    def release(self, request: Hashable, *, publish: bool = True, wait: bool = False) -> None:
        """End a request. Its blocks are free when no copy touches them any more; named ones stay to
        be found. Harmless if there is no such request (it may have ended by a clear).

        Args:
            publish: False: an abort; what is not written yet is not written.
            wait: block until its copies are over.
        """
        self.release_many([request], publish=publish)
        if wait:
            self._leaving.wait(request)

    def release_many(self, requests: Sequence[Hashable], *, publish: bool = True) -> None:
        """`release` for several."""
        with self._lock:
            check_hashable(requests, "release")
            ended: list[Request] = []
            try:
                for request in requests:
                    self._end(request, publish, ended)
                if publish and ended:
                    self._guard.run(partial(self._publish_rest, ended), nothing)
            finally:
                self._leaving.add(ended)

    def _end(self, request: Hashable, publish: bool, ended: list[Request]) -> None:
        one = self._requests.pop(request, None)
        if one is not None:
            ended.append(one)
            one.stored = publish
            self._planner.computed(one)
        self._planner.cancel(request)

    def _publish_rest(self, ended: list[Request]) -> None:
        look = Look(self._weights)
        late = [one for one in ended if one.loading is not None or one.sound is not None]
        if late:  # perhaps it was going on at the last commit
            self._traffic.poll()
            name_blocks(self, late, look, [NOTHING] * len(late))
        self._writer.rest(ended, look)

    # ---- the end

    def close(self, timeout: float | None = 10.0) -> None:
        """Wait for the copies, give back everything. The caches stay the caller's. Nothing is
        planned any more, and so nothing runs. Harmless when that was done before.

        Raises:
            WaitTimeout: a copy goes on; call again.
            ConfigError: no number of seconds; nothing was closed.
            As `poll`, when all of this is done.
        """
        timeout = seconds_of(timeout)
        with self._lock:
            self._closed = True
            self.release_many(list(self._requests), publish=False)
            self._planner.close()
            self._demotion.close()
            self._traffic.paused = False
            self._traffic.poll()
        self._traffic.wait(None, timeout)
        self._leaving.poll()
        with self._lock:
            self._demotion.poll()
            self._tell()
        if self._own_storage is not None:  # what ended requests have to be written is written
            self._own_storage.close()
            with self._lock:
                self._tell()  # of what was written just now
        with self._lock:
            self._traffic.foreign.tell()

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- for the parts

    def _request(self, request: Hashable) -> Request:
        try:
            found = self._requests.get(request)
        except TypeError:
            check_hashable([request], "request")
            raise
        if found is None:
            raise LeaseLost(f"there is no running request {request!r}; plan and take it first")
        return found

    def _let_go(self) -> None:
        """We are disabled: what is pinned and not needed goes."""
        self._planner.let_go()
        for one in self._requests.values():
            one.let_go_of_host()

    def _owned(self, what: str) -> OwnedDevice:
        if not isinstance(self.device, OwnedDevice):
            raise ConfigError(f"{what}: the engine owns the blocks of an attached device")
        return self.device


__all__ = ["KVCacheManager"]
