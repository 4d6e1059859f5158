"""KVCacheManager: device, host and storage as one prefix cache, for a scheduler."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from lightcache._arguments import Keys, Pages, count
from lightcache._together import assign, together
from lightcache.cache import Cache
from lightcache.errors import (
    Abandoned,
    ConfigError,
    InUse,
    LeaseLost,
    LightcacheError,
    LockTimeout,
    OutOfPages,
    WaitTimeout,
)
from lightcache.hashing import Tokens
from lightcache.layout import MAX_PAGES
from lightcache.leases import Allocation, Lease
from lightcache.manager.backend import NullBackend, TransferBackend
from lightcache.manager.blocks import (
    DeviceTier,
    ManagedBlocks,
    MirroredBlocks,
    capacity_of,
    numbers_of,
)
from lightcache.manager.frees import PendingFrees
from lightcache.manager.limits import nothing, seconds_of
from lightcache.manager.load import LoadHandle, begin_load, no_load
from lightcache.manager.lookup import PendingRequest, PrefixLookup, begin_when_read
from lightcache.manager.misses import Absences
from lightcache.manager.naming import NOTHING, FullBlocks
from lightcache.manager.offload import Offloader
from lightcache.manager.request import (
    ANY,
    DEVICE_ALONE,
    HELD,
    LEASED,
    TIERS,
    CacheScope,
    Chain,
    Delivery,
    ManagerConfig,
    MissReason,
    NoChain,
    PrefixMatch,
    Prompt,
    Request,
    RequestOptions,
    WritePolicy,
    check_commits,
    check_hashable,
    check_table,
)
from lightcache.manager.state import ManagerState, check_blocks, check_parts, storage_of
from lightcache.manager.stats import HIT_SHARE, NS, PLAN, Counters, ManagerStats, TierGauges
from lightcache.manager.weights import WeightsState, open_keys
from lightcache.manager.write_back import KVWriteBack, when_there_is_room
from lightcache.shm.errors import leave
from lightcache.shm.locking import Hurried

if TYPE_CHECKING:
    from lightcache.costs import Costs
    from lightcache.manager.stats import NodeCounters
    from lightcache.storage.tasks import StorageTask
    from lightcache.storage.tier import BaseTier

_log = logging.getLogger("lightcache.manager")
_owed = attrgetter("owed")  # `any(map(_owed, ...))` makes no Python call
_MISSED = {
    MissReason.DISABLED: "failed",
    MissReason.WEIGHTS: "other_namespace",
    MissReason.OPTIONS: "unused",
    MissReason.LOAD_SKIPPED: "unused",
}
TELL = 0.5
"""Seconds between two updates of the node's counters."""


class KVCacheManager:
    """The prefix cache of one scheduler: one for each engine, or for each data-parallel rank. All
    managers of a node share the host cache.

    The calls for a request: `plan` while it waits, as often as you like; `take`; `allocate` (owned
    devices); `load`; `commit` as tokens are computed; `release`. Call `poll` each step. Several
    threads may call; no call waits for a copy unless its docstring says so.
    """

    def __init__(
        self,
        host: Cache | None,
        device: DeviceTier,
        backend: TransferBackend | None = None,
        *,
        config: ManagerConfig | None = None,
        costs: Costs | None = None,
        storage: BaseTier | str | Sequence[str] | None = None,
        weights: str = "",
        counters: NodeCounters | None = None,
    ) -> None:
        """The caller closes the parts it gives, after the manager; `close` closes what was opened
        here.

        Args:
            host: the node's cache; its `page_tokens` is a multiple or a divisor of the device's
                block. None: no host cache, and nothing is moved. The manager then opens
                "DEVICE.keys", a cache of one page, for its keys.
            device: `ManagedBlocks` or `MirroredBlocks`.
            backend: moves bytes between host and device; None without a host cache.
            costs: `lightcache.costs.Costs`: decides whether few pages are worth loading; None:
                always load.
            storage: a `StorageTier` or `StorageClient` of the same cache; or a URL, or several, as
                "disk:/mnt/nvme/cache?capacity=1TiB", opened here and closed by `close`, or
                "service:", the storage service of the host cache; None: none.
            weights: version of the weights that are being served.
            counters: the node's counters, to which ours are added; None: they stay our own.

        Raises:
            ConfigError: page sizes that do not fit each other, more blocks than the transfer
                engine's planes hold, or a part of the wrong type.
            StorageError: the storage cannot be opened.
            OutOfPages, LockTimeout, Detached: as `PageIndex.namespace`, for the weights.
            Otherwise, without a host cache, as `Cache.open`.
        """
        self.config = ManagerConfig() if config is None else config
        check_parts(host, device, backend, self.config, storage)
        check_blocks(backend, device.blocks, device.block_tokens)
        self.tiers = TIERS if host is not None else DEVICE_ALONE
        """Tiers that requests may read from and be written to."""
        self._own_host = open_keys(device) if host is None else None
        host = host or self._own_host
        assert host is not None
        self.host, self.device = host, device
        self.page_tokens = host.index.page_tokens
        big, small = sorted((self.page_tokens, device.block_tokens), reverse=True)
        if big % small:
            raise ConfigError(
                f"page sizes: expected one a multiple of the other, found host pages of "
                f"{self.page_tokens} tokens and device blocks of {device.block_tokens}"
            )
        self._storage = storage_of(host, storage)
        self._own_storage = None if self._storage is storage else self._storage
        self.state = state = ManagerState(
            host,
            device,
            NullBackend() if backend is None else backend,
            self.config,
            self._storage,
            self.tiers,
            weights,
            self._let_go,
        )
        """State shared by the manager's parts, and by a manager that is built on this one."""
        self.lookup = PrefixLookup(state, costs)
        """Also for a manager that is built on this one."""
        self.offloader = Offloader(state)
        self._counters, self._added, self._add_at = counters, Counters(), 0.0
        self._counting = True
        self._absences = Absences(host)
        self._write_back = KVWriteBack(state, self.offloader)
        self._full_blocks = FullBlocks(state, self._write_back)
        self._frees = PendingFrees(state, self.offloader, self._full_blocks)

    @property
    def backend(self) -> TransferBackend:
        """The transfer backend; a `NullBackend` without a host cache."""
        return self.state.backend

    # ---- Lookup

    def plan(
        self,
        request: Hashable,
        prompt: Prompt,
        *,
        options: RequestOptions = ANY,
        limit: int | None = None,
        device_tokens: int | None = None,
    ) -> PrefixMatch:
        """Find the longest cached prefix over all tiers and pin it tentatively. Until the plan
        expires `take` yields no less; later it yields what is there then. Planning again is cheap
        and replaces the plan. Reading starts now for what only storage has: `pending`.

        Args:
            request: its id, any hashable.
            limit: most tokens to reuse: for prompt log-probabilities from there on, for example, or
                for draft layers.
            device_tokens: mirrored blocks: tokens that the engine found; None: look in the mirror.

        Raises:
            ConfigError: a wrong argument; says which.
            Detached: the manager is closed.
        """
        with self.state.lock:
            batch = self.lookup.batch_of_one(request, prompt, options, limit, device_tokens)
            begun = time.perf_counter_ns()
            (match,) = self.lookup.plan(batch)
            self.state.counts.add(**PLAN.of(time.perf_counter_ns() - begun))
            return match

    def plan_many(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        *,
        options: Sequence[RequestOptions] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[PrefixMatch]:
        """`plan` for a whole queue in one call. A refused call changes nothing.

        Raises:
            ConfigError: a wrong argument, or lists of different lengths; says which.
            Detached: the manager is closed.
        """
        with self.state.lock:
            batch = self.lookup.batch(requests, prompts, options, limits, device_tokens)
            begun = time.perf_counter_ns()
            matches = self.lookup.plan(batch)
            self.state.counts.add(**PLAN.of(time.perf_counter_ns() - begun))
            return matches

    def peek_many(
        self,
        prompts: Sequence[Prompt],
        *,
        options: Sequence[RequestOptions] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[PrefixMatch]:
        """What `plan_many` would find on the device and the host now. Nothing is pinned, counted as
        used, or asked of storage, so a later plan may find less. Arguments and errors as
        `plan_many`; a closed manager answers too."""
        with self.state.lock:
            return self.lookup.peek(prompts, options, limits, device_tokens)

    def cancel(self, request: Hashable) -> None:
        """Forget a plan. Does nothing if there is none.

        Raises:
            ConfigError: the request's id is not hashable.
        """
        check_hashable([request], "cancel")
        with self.state.lock:
            self.lookup.cancel(request)

    @overload
    def take(self, request: Hashable, *, wait: Literal[True]) -> PrefixMatch: ...

    @overload
    def take(self, request: Hashable, *, wait: bool = False) -> PrefixMatch | None: ...

    def take(self, request: Hashable, *, wait: bool = False) -> PrefixMatch | None:
        """Begin a request. It owns what was planned for it, and what has become ready since.

        Returns None, "not yet", while storage is being read for the request: call again in the next
        step. The wait, counted from the first call, is limited to the time that computing what the
        read may bring would take, at the pace of earlier requests; 1 s while no pace is known. Then
        the request begins with what is there; the read continues, for later requests.

        Args:
            wait: block until the read has finished or its time is up: never returns None.

        Raises:
            LeaseLost: the request was not planned, or was cancelled; plan it first.
            ConfigError: the request runs already.
        """
        return begin_when_read(
            self.state.lock,
            partial(self.check_take, request),
            partial(self.lookup.reading, request),
            partial(self._begin, request),
            self.state.fail_open,
            wait,
        )

    def begin(self, request: Hashable) -> PrefixMatch:
        """`take` without waiting for a storage read; for a manager that is built on this one, under
        the lock. Raises as `take`."""
        self.check_take(request)
        return self._begin(request)

    def check_take(self, request: Hashable) -> None:
        """Check, for `take`, that a request does not run yet.

        Raises:
            ConfigError: it runs already, or its id is not hashable.
        """
        check_hashable([request], "take")
        if request in self.state.requests:
            raise ConfigError(f"take: the request {request!r} runs already; release it first")

    def _begin(self, request: Hashable) -> PrefixMatch:
        if self.lookup.failed(request):  # the failure is counted already
            running = self._without_cache(request)
        else:
            running = self.state.fail_open.run(
                partial(self._taken, request), partial(self._without_cache, request)
            )
        running.begun = time.monotonic()
        self.state.requests[request] = running
        running.counted = self._counted(running)
        self.state.counts.add(**running.counted)
        self.state.recent.add(running.counted)
        return running.match

    def _without_cache(self, request: Hashable) -> Request:
        """A request whose plan failed: it runs without the cache."""
        prompt = self.lookup.prompt_of(request)
        match = PrefixMatch(len(prompt), why=MissReason.DISABLED)
        return Request(request, prompt, ANY, None, match, NoChain(), NoChain(), known=len(prompt))

    def _taken(self, request: Hashable) -> Request:
        plan, match, hit, host = self.lookup.take(request)
        try:
            running = self._new_request(plan, match, hit, host)
        except BaseException:
            for lease in (hit, host):
                if lease is not None:
                    lease.close()
            self.lookup.missed(request, plan.request.prompt)  # it may still run without the cache
            raise
        self.lookup.computes(running)
        return running

    def _new_request(
        self, plan: PendingRequest, match: PrefixMatch, hit: Lease | None, host: Lease | None
    ) -> Request:
        """A request that owns the device blocks and host pages that were planned for it."""
        (prompt, options, _), space, first = plan.request, plan.space, plan.host_first
        if space is None:
            chain = NoChain()
            return Request(plan.id, prompt, ANY, None, match, chain, chain, known=len(prompt))
        device_chain = host_chain = Chain(prompt, space.device_spec)
        if space.host_spec is not space.device_spec:
            host_chain = Chain(prompt, space.host_spec)
        running = Request(
            plan.id,
            prompt,
            options,
            space,
            match,
            device_chain,
            host_chain,
            hit,
            host,
            first,
            known=len(prompt),
        )
        if self.host.token_records is not None and prompt.told_tokens is not None:
            running.generated = bytearray()
        blocks = min(match.device, match.usable) // self.device.block_tokens
        if hit is not None:
            running.table = hit.pages[:blocks].copy()
            running.kind = bytearray([LEASED]) * blocks
        running.named = blocks
        if first:  # else nothing needs to be hashed yet
            running.written = self.host.peek(host_chain.keys[:first], namespace=space.host)
        if running.written == first and host is not None:
            running.written += len(host)
        return running

    def _counted(self, running: Request) -> Counters:
        match = running.match
        from_host = min(max(0, match.usable - match.device), match.host)
        counted = Counters(
            requests=1,
            hit_requests=int(match.usable > 0),
            prompt_tokens=match.tokens,
            device_tokens=min(match.device, match.usable),
            host_tokens=from_host,
            storage_tokens=max(0, match.usable - match.device - from_host),
            below_break_even=match.host if match.why is MissReason.BREAK_EVEN else 0,
            cut_items=int(match.why is MissReason.ITEM),
            **HIT_SHARE.of(match.usable * NS // max(1, match.tokens)),
        )
        if not match.usable:
            counted.add(**{f"missed_{self._missed(running)}": 1})
        return counted

    def _missed(self, running: Request) -> str:
        """Why a request has no usable token: one of `misses.REASONS`."""
        match, space = running.match, running.space
        if match.why in _MISSED:
            return _MISSED[match.why]
        if match.found:
            return "unused"
        if space is None:
            return "other_namespace"
        if match.tokens <= self.page_tokens:
            return "short"
        try:
            return self._absences.of_prompt(running.prompt, space.host)
        except LightcacheError:  # of the cache: the request runs without it
            return "failed"

    # ---- Running requests

    def allocate(self, request: Hashable, tokens: int, *, timeout: float | None = 0.0) -> Pages:
        """Managed blocks: grow the request's table to `tokens` tokens and the decode reserve.
        Returns the whole table, int32.

        With `WritePolicy.BACK` named blocks are written to the host before they are evicted. The
        write runs in the background, so there may be no room yet: `poll` and call again, or wait.

        Args:
            tokens: of the request in all, not only new ones.
            timeout: seconds that the call may block while blocks are written back; None: until they
                are written.

        Raises:
            OutOfPages: not enough blocks, or not yet. Nothing changed; preempt a request, or wait,
                or `skip_load` what the host has and ask for fewer.
            ConfigError: no number of tokens, or of seconds; or the blocks are mirrored.
            LeaseLost: no such request.
        """
        limit, running = seconds_of(timeout), self._write_back.running
        with self.state.lock:  # nearly always all there is to do
            try:
                return self._allocated(request, tokens)
            except OutOfPages:
                if limit == 0 or not running():
                    raise
        allocated = partial(self._allocated, request, tokens)
        return when_there_is_room(self.state.lock, allocated, running, limit)

    def _allocated(self, request: Hashable, tokens: int) -> Pages:
        device, running = self._owned("allocate"), self.request(request)
        needed = -(-count(tokens, "tokens", 0, 1 << 62) // device.block_tokens)
        missing = needed + self.config.reserve_blocks - len(running.table)
        if missing <= 0:
            return running.table
        try:
            with Hurried(self.config.time_limit):
                fresh = self._fresh_blocks(device, missing)
        except (OutOfPages, LockTimeout) as error:
            if 0 < needed <= len(running.table):
                return running.table  # within the reserve
            if isinstance(error, LockTimeout):
                raise OutOfPages(f"allocate: not now; ask in the next step: {error}") from error
            raise
        table = np.concatenate([running.table, fresh.pages])
        kind = running.kind + bytes([HELD]) * len(fresh)
        # From here on the request owns the blocks; until then `fresh` gives them back.
        assign((running, running, fresh), ("table", "kind", "ended"), (table, kind, True))
        return running.table

    def _fresh_blocks(self, device: ManagedBlocks, missing: int) -> Allocation:
        if self.config.write is not WritePolicy.BACK or device.index is None:
            return device.hold(missing)
        return self._write_back.hold(missing)

    def can_allocate(self, blocks: int, *, evict: bool = False) -> bool:
        """Managed blocks: whether so many blocks are available now. Advisory unless `evict`.

        Args:
            evict: free them now, in the order of eviction; their KV is dropped. With
                `WritePolicy.BACK` it is written to the host first: returns False meanwhile.

        Raises:
            ConfigError: no number of blocks, or the blocks are mirrored.
        """
        with self.state.lock:
            device = self._owned("can_allocate")
            back = self.config.write is WritePolicy.BACK and device.index is not None
            if evict and back and device.can_allocate(blocks):
                free = self._write_back.make_room(blocks)
                if free < blocks and self._write_back.blocks:
                    return False
            try:
                with Hurried(self.config.time_limit):
                    return device.can_allocate(blocks, evict=evict)
            except LockTimeout:
                return False

    def skip_load(self, request: Hashable) -> PrefixMatch:
        """Call this instead of `load` when there are no blocks to load into: the host pages are
        given back, the device's part stays, the rest is to be computed. Returns the new match.

        Raises:
            ConfigError: the request was loaded already.
            LeaseLost: no such request.
        """
        with self.state.lock:
            running = self.request(request)
            if running.loaded or running.loading is not None:
                raise ConfigError(
                    f"skip_load {request!r}: it was loaded already; release it instead"
                )
            running.let_go_of_host()
            usable = self.lookup.usable.without_host(running.prompt, running.match)
            if usable == running.match.usable:
                return running.match
            running.match = replace(running.match, usable=usable, why=MissReason.LOAD_SKIPPED)
            change = self._counted(running)
            change.subtract(running.counted)
            self.state.counts.update(change)
            self.state.recent.change(running.counted, **change)
            return running.match

    def load(self, request: Hashable, table: Pages | None = None) -> LoadHandle:
        """Copy the host pages that were found to the device. Returns at once.

        Args:
            table: mirrored blocks: the request's blocks, for `match.usable` tokens at least.

        Raises:
            ConfigError: the table is too short, or no table of blocks.
            LeaseLost: no such request.
        """
        with self.state.lock:
            running = self.request(request)
            before = running.table
            if table is not None:
                running.table = check_table(self.device, running, table, running.match.usable)
            try:
                without = self.lookup.usable.without_host(running.prompt, running.match)
                return self.state.fail_open.run(
                    partial(begin_load, self.state, running, without),
                    partial(no_load, running, without),
                )
            except ConfigError:
                running.table = before
                raise

    def commit(
        self,
        request: Hashable,
        total: int,
        *,
        new_tokens: Tokens | None = None,
        table: Pages | None = None,
    ) -> Mapping[int, int]:
        """Report that the KV of the first `total` tokens is on the device. Full blocks get names
        and are written to the host by the write policy.

        Args:
            total: tokens computed and accepted, without those that speculation may take back.
            new_tokens: ids of the tokens generated since the last call.
            table: mirrored blocks: the request's blocks.

        Returns:
            Blocks to exchange in the table, position -> block: managed blocks only, where another
            block has the same content already. The old block is given back.

        Raises:
            ConfigError: a wrong argument; says which, and nothing was changed.
            LeaseLost: no such request.
        """
        delivery, new = Delivery(), None if new_tokens is None else [new_tokens]
        tables = None if table is None else [table]
        changed = self._commit([request], [total], new, tables, delivery)
        delivery.done = True  # no call: no interrupt comes between this and the return
        return changed[0]

    def commit_many(
        self,
        requests: Sequence[Hashable],
        totals: Sequence[int],
        new_tokens: Sequence[Tokens | None] | None = None,
        tables: Sequence[Pages] | None = None,
    ) -> list[Mapping[int, int]]:
        """`commit` for a batch of different requests in one call. All arguments are checked first:
        a refused call changes nothing.

        Raises:
            ConfigError: a wrong argument, or lists of different lengths; says which.
            LeaseLost: no such request.
        """
        delivery = Delivery()
        changed = self._commit(requests, totals, new_tokens, tables, delivery)
        delivery.done = True  # no call: no interrupt comes between this and the return
        return changed

    def _commit(
        self,
        requests: Sequence[Hashable],
        totals: Sequence[int],
        new_tokens: Sequence[Tokens | None] | None,
        tables: Sequence[Pages] | None,
        delivery: Delivery,
    ) -> list[Mapping[int, int]]:
        """See `commit_many`. Until the delivery is done, later calls return exchanged blocks
        again."""
        with self.state.lock:
            self._full_blocks.settle()
            known = self.state.requests
            try:
                running = [known.get(request) or self.request(request) for request in requests]
            except TypeError:
                check_hashable(requests, "commit")
                raise
            for each in running:
                if each.loading is not None and each.is_loading:
                    self.state.transfers.poll()
                    break
            packed, tables = check_commits(self.device, running, totals, new_tokens, tables)
            for each, total, fresh in zip(running, totals, packed, strict=True):
                each.note(total, fresh)
                if each.begun and total >= len(each.prompt.tokens):
                    self._prompt_computed(each)
            if tables is not None:
                for each, table in zip(running, tables, strict=True):
                    each.table = table
            self.state.fail_open.run(partial(self._name_and_offload, running), nothing)
            # Includes blocks exchanged before an error, or in a call that an interrupt ended.
            if not any(map(_owed, running)):  # nearly always
                return [NOTHING] * len(running)
            return [NOTHING if each.owed is None else each.owed.by(delivery) for each in running]

    def _prompt_computed(self, running: Request) -> None:
        """Note how long computing the prompt took, unless some of it was loaded."""
        begun, running.begun = running.begun, 0.0
        if running.match.load <= 0:
            computed = len(running.prompt.tokens) - running.match.usable
            self.state.pace.note(computed, time.monotonic() - begun)

    def _name_and_offload(self, running: list[Request]) -> None:
        self._full_blocks.cache_blocks(running)
        self.offloader.write_due(running)

    def release(self, request: Hashable, *, publish: bool = True, wait: bool = False) -> None:
        """End a request. Its blocks are freed when no copy touches them any more; named blocks stay
        cached. Does nothing if there is no such request (a clear may have ended it).

        Args:
            publish: False: an abort; pages that are not written yet are not written.
            wait: block until its copies have finished.

        Raises:
            WaitTimeout: with `wait`, transfers are paused, and one of its copies waits for them.
            ConfigError: the request's id is not hashable.
        """
        self.release_many([request], publish=publish)
        if wait:
            self._frees.wait(request)

    def release_many(self, requests: Sequence[Hashable], *, publish: bool = True) -> None:
        """`release` for several, without waiting.

        Raises:
            ConfigError: a request's id is not hashable.
        """
        with self.state.lock:
            check_hashable(requests, "release")
            self._full_blocks.settle()
            ended = self._end(requests, publish)
            try:
                if publish and ended:
                    self.state.fail_open.run(partial(self._name_and_offload_rest, ended), nothing)
            finally:
                self._frees.poll(ended)

    def _end(self, requests: Sequence[Hashable], publish: bool) -> list[Request]:
        """Move the running ones of these requests to the pending frees: all of them or, after an
        interrupt, none."""
        running = self.state.requests
        ended = [running[each] for each in dict.fromkeys(requests) if each in running]
        for each in ended:
            self.lookup.computed(each)
            each.aborted = not publish
        together(
            partial(self._frees.extend, ended),
            partial(deque, map(running.pop, [each.id for each in ended]), 0),
        )
        for request in requests:
            self.lookup.cancel(request)
        return ended

    def _name_and_offload_rest(self, ended: list[Request]) -> None:
        late = [
            request for request in ended if request.loading is not None or request.sound is not None
        ]
        if late:  # perhaps a load was in flight at the last commit
            self.state.transfers.poll()
            self._full_blocks.cache_blocks(late)
        self.offloader.write_rest(ended)

    # ---- For a manager that is built on this one, under the lock

    def request(self, request: Hashable) -> Request:
        """A request between `take` and `release`.

        Raises:
            LeaseLost: no such request.
        """
        self._full_blocks.settle()
        try:
            running = self.state.requests.get(request)
        except TypeError:
            check_hashable([request], "request")
            raise
        if running is None:
            raise LeaseLost(f"there is no running request {request!r}; plan and take it first")
        return running

    def has_ended(self, running: Request) -> bool:
        """Whether a request has ended, and no copy touches its blocks any more."""
        return self.state.requests.get(running.id) is not running and running not in self._frees

    def untake(self, request: Hashable) -> Request:
        """Undo `take`: give back the request's KV and do not count it.

        Raises:
            LeaseLost: no such request.
        """
        running = self.request(request)
        self.release(request, publish=False)
        back = {name: -count for name, count in running.counted.items()}
        self.state.counts.update(back)
        self.state.recent.change(running.counted, **back)
        return running

    def drop_keys(
        self, space: CacheScope, host_keys: Keys, device_keys: Keys, start: int
    ) -> Mapping[str, int]:
        """`drop` of a sequence, by all of its keys. Returns the tokens dropped, by tier."""
        device, pages, blocks = self.device, 0, 0
        first = -(-start // self.page_tokens)
        if first < len(host_keys):
            pages = self.host.index.drop(host_keys, start=first, namespace=space.host)
        first = -(-start // device.block_tokens)
        if device.owned and device.index is not None and first < len(device_keys):
            blocks = device.index.drop(device_keys, start=first, namespace=space.device)
        return {"host": pages * self.page_tokens, "device": blocks * device.block_tokens}

    def needs_host(self, call: str) -> None:
        """Raises ConfigError without a host cache."""
        if self._own_host is not None:
            raise ConfigError(
                f"{call}: expected a manager with a host cache, found one of a device alone; pages "
                "travel through the host"
            )

    # ---- Close
    def close(self, timeout: float | None = 10.0) -> None:
        """Wait for the copies and give back everything. The caches stay the caller's. Every later
        `plan` raises Detached. Does nothing when the manager is closed already. A storage that was
        opened here is written to until then; pages that it does not have by then are counted, and
        their number is logged.

        Args:
            timeout: seconds for all of this; None: no limit.

        Raises:
            WaitTimeout: a copy is still in flight, or a call of a storage that was opened here;
                call again.
            ConfigError: no number of seconds; nothing was closed.
            As `poll`, when all of this is done.
        """
        timeout = seconds_of(timeout)
        end = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
        with self.state.lock:
            self.state.closed = True
            self.release_many(list(self.state.requests), publish=False)
            self.lookup.close()
            self._write_back.close()
            self.state.transfers.paused = False
            self.state.transfers.poll()
        self.state.transfers.wait(None, timeout)
        self._frees.poll()
        with self.state.lock:
            self._write_back.poll()
            self._add_to_node()
        if self._own_storage is not None:  # pages of ended requests are all on the host now
            try:
                self._close_storage(self._own_storage, end)
            finally:
                with self.state.lock:
                    self._add_to_node()  # counts what was written just now
        if self._own_host is not None:
            self._own_host.close()
        with self.state.lock:
            self.state.transfers.foreign.raise_first()

    def _close_storage(self, storage: BaseTier, end: float) -> None:
        """Let a storage write until `end`, then close it; log how many pages it did not get.

        Raises:
            WaitTimeout: a call of it has not returned.
        """
        before = storage.stats().unstored
        ended = storage.close(max(0.0, end - time.monotonic()))
        if lost := storage.stats().unstored - before:
            _log.warning(
                "close: %d pages were not written to the storage in time; `storage_failed_pages`, "
                "`storage_refused_pages` and `storage_skipped_pages` of the manager's stats count "
                "such pages, and a larger close(timeout=) lets it finish",
                lost,
            )
        if not ended:
            raise WaitTimeout(
                "close: calls of the storage have not returned, or another process holds the lock "
                "of the host cache; pages stay pinned until then, and the host cache cannot be "
                "closed; call again"
            )

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)

    def _let_go(self) -> None:
        """The manager has disabled itself: drop the pins that are not needed."""
        self.lookup.let_go()
        for running in self.state.requests.values():
            running.let_go_of_host()

    def _owned(self, call: str) -> ManagedBlocks:
        if not isinstance(self.device, ManagedBlocks):
            raise ConfigError(f"{call}: the engine allocates the blocks of MirroredBlocks")
        return self.device

    # ---- Polling and device blocks

    def poll(self) -> int:
        """Call each step: notice finished transfers, begin queued ones, free the blocks of ended
        requests, and complete what an interrupt left. Returns the number of transfers in flight.
        Does not block.

        Raises:
            Any exception that is none of our errors and that a transfer backend has raised since
            the last call, in any call: raised once, when all of this is done. The first of several
            is raised; the others are logged. The same goes for what a storage raised when a
            request or a plan ended.
        """
        with self.state.lock:
            going = self.state.transfers.poll()
            self._frees.poll()
            self._write_back.poll()
            self._write_back.keep_free(self.config.kept_free)
            if self._counters is not None and time.monotonic() >= self._add_at:
                self._add_to_node()
            self.state.transfers.foreign.raise_first()
            return going

    def in_flight(self, blocks: Pages | Sequence[int] | None = None) -> Any:
        """Which of these device blocks a copy reads or writes: bool of their shape; False for what
        is no block, as the -1 that pads a table. None: the number of transfers, as `poll`.

        Raises:
            ConfigError: no block numbers.
        """
        with self.state.lock:
            self.state.transfers.poll()
            if blocks is None:
                return self.state.transfers.in_flight
            return self.state.transfers.busy(numbers_of(blocks))

    def wait_blocks(
        self, blocks: Pages | Sequence[int] | None = None, timeout: float | None = None
    ) -> None:
        """Block until no copy touches these blocks (None: any block). Call it before they are used
        for something else, as when a request is preempted or aborted.

        Raises:
            WaitTimeout: a copy still touches one.
            ConfigError: no number of seconds, or no block numbers.
        """
        self.state.transfers.wait(
            None if blocks is None else numbers_of(blocks).reshape(-1), timeout
        )
        self._frees.poll()

    def evicted(self, blocks: Pages | Sequence[int]) -> int:
        """Mirrored blocks: the engine has evicted these blocks, or is about to overwrite them.
        Returns how many had a name.

        Raises:
            ConfigError: the blocks are managed, or no block numbers.
            LockTimeout: some of them may still have their names; call again with the same blocks.
        """
        with self.state.lock:
            if not isinstance(self.device, MirroredBlocks):
                raise ConfigError("evicted: ManagedBlocks evict by themselves; see `drop`")
            return self.device.evicted(numbers_of(blocks))

    def evicting(self, blocks: Pages | Sequence[int]) -> int:
        """Mirrored blocks, with write-back: the engine is going to evict these blocks. Begins to
        write their content to the host; report them as `evicted` when `wait_blocks` or `in_flight`
        says that no copy touches them. Returns how many pages are being written.

        Raises:
            ConfigError: no block numbers.
        """
        with self.state.lock:
            index = self.device.index
            if index is None or not isinstance(self.device, MirroredBlocks):
                return 0
            named = self.device.named(numbers_of(blocks))
            return self._write_back.evicting(named, index.keys_of(named))

    def set_blocks(self, blocks: int) -> None:
        """Set the number of device blocks, once the engine knows it or has changed it. The device's
        index begins empty and plans are forgotten; the host keeps its pages.

        Raises:
            InUse: a request runs, or a copy is in flight; release it, and wait for it.
            ConfigError: not 1 to 40 million, or more than the transfer engine's planes hold.
        """
        with self.state.lock:
            self.state.transfers.poll()
            self._frees.poll()
            self._write_back.poll()
            copies = self.state.transfers.in_flight + self.state.transfers.queued
            if self.state.requests or len(self._frees) or copies:
                raise InUse(
                    f"set_blocks: {len(self.state.requests)} requests run, and {copies} copies are "
                    "in flight or wait; release, resume, and wait for them first"
                )
            count(blocks, "blocks", 1, MAX_PAGES)  # checked before anything is forgotten
            check_blocks(self.backend, blocks, self.device.block_tokens)
            self.lookup.close()
            self._write_back.close()
            self.device.set_blocks(blocks)

    # ---- Prefixes, independent of running requests

    def protect(self, prompt: Prompt) -> Mapping[str, int]:
        """Protect every cached page and block of a prompt, on the host and in managed blocks, from
        eviction until `unprotect` or a weights update. Returns the tokens protected, by tier.

        Raises:
            Detached: the manager is closed.
            LockTimeout: as `PageIndex.protect`.
        """
        with self.state.lock:
            self.state.check_open("protect")
            return self._set_kept(prompt, True)

    def unprotect(self, prompt: Prompt) -> Mapping[str, int]:
        """Undo `protect`. Returns the tokens that were protected, by tier.

        Raises:
            Detached, LockTimeout: as `PageIndex.unprotect`.
        """
        with self.state.lock:
            return self._set_kept(prompt, False)

    def _set_kept(self, prompt: Prompt, kept: bool) -> dict[str, int]:
        space = self.state.weights.scope_of(prompt.tenant)
        if space is None:
            return {"host": 0, "device": 0}
        host, device = self.host.index, self.device
        verb, blocks = host.protect if kept else host.unprotect, 0
        pages = verb(prompt.keys(space.host_spec), namespace=space.host)
        if device.owned and device.index is not None:
            verb = device.index.protect if kept else device.index.unprotect
            blocks = verb(prompt.keys(space.device_spec), namespace=space.device)
        return {"host": pages * self.page_tokens, "device": blocks * device.block_tokens}

    def drop(self, prompt: Prompt, start: int = 0) -> Mapping[str, int]:
        """Evict a prompt's pages now, from the end back to token `start`, unless another request
        uses them. Returns the tokens dropped, by tier.

        Raises:
            ConfigError: `start` is negative.
            Detached, LockTimeout: as `PageIndex.drop`.
        """
        with self.state.lock:
            if start < 0:
                raise ConfigError(f"start: expected a token's position, found {start}")
            space = self.state.weights.scope_of(prompt.tenant)
            if space is None:
                return {"host": 0, "device": 0}
            keys = prompt.keys(space.host_spec), prompt.keys(space.device_spec)
            return self.drop_keys(space, *keys, start)

    def prefetch(self, prompt: Prompt) -> StorageTask:
        """Begin to read a prompt's pages from storage to the host, before a request needs them.
        Returns the task.

        Raises:
            ConfigError: the manager has no storage.
            Abandoned: the weights are being changed, or were cleared.
            Detached: the tier, or the host cache, is closed.
        """
        with self.state.lock:
            space, storage = self.scope_to_prefetch(prompt), self._storage
            assert storage is not None
            keys = prompt.keys(space.host_spec)
            first = self.host.peek(keys, namespace=space.host)
            tokens = prompt.told_tokens
            return storage.prefetch(keys, first, namespace=space.host, tokens=tokens)

    def scope_to_prefetch(self, prompt: Prompt) -> CacheScope:
        """The namespaces of a prompt that is to be read from storage. Raises as `prefetch`."""
        if self._storage is None:
            raise ConfigError("prefetch: the manager has no storage; make it with storage=")
        space = self.state.weights.scope_of(prompt.tenant)
        if space is None:
            raise Abandoned(
                "prefetch: the weights are being changed; ask again after finish_update"
            )
        return space

    def demote(self, blocks: int) -> int:
        """Managed blocks: begin to write back so many blocks, in the order of eviction, and free
        them. Returns how many are being written.

        Raises:
            ConfigError: no number of blocks.
            LockTimeout: of the device's index; nothing was begun.
        """
        with self.state.lock:
            return self._write_back.demote(count(blocks, "blocks", -(1 << 62), 1 << 62), "demote")

    # ---- Weights
    @property
    def weights_state(self) -> WeightsState:
        """Whether the served version is valid, or was cleared by this or another process.

        Raises:
            Detached: the host cache is closed.
        """
        with self.state.lock:
            return self.state.weights.state()

    def begin_update(self, timeout: float | None = None, *, wait: bool = True) -> None:
        """Begin a change of weights. From this instant nothing of the present version is found or
        published, in any process or tier; processes on another version keep theirs. Running
        requests continue and publish nothing; release them as usual.

        Args:
            wait: for transfers in flight; False: they finish without effect.
            timeout: seconds to wait.

        Raises:
            WaitTimeout: some transfers are still in flight; the update has begun all the same.
            LockTimeout: this manager finds nothing any more, not everything is cleared; call again.
            ConfigError: no number of seconds; nothing was begun.
        """
        timeout = seconds_of(timeout)
        with self.state.lock:
            self.state.weights.begin()
        if wait:
            self.state.wait(timeout)

    def finish_update(self, version: str) -> None:
        """Serve this version from now on.

        Raises:
            ConfigError: no update was begun, or `begin_update` did not finish: call that first.
            OutOfPages, LockTimeout: as `PageIndex.namespace`; the update continues, call again.
        """
        with self.state.lock:
            self.state.weights.finish(version)

    def clear_tenant(self, tenant: str) -> bool:
        """Clear a tenant. From this instant nothing of it is found or published, in any process or
        tier; other devices give back its blocks at their next lookup. Its next request begins
        empty. Its running requests continue and publish nothing.

        Returns:
            False: nothing was cleared, because the weights are being changed or were cleared.

        Raises:
            ConfigError: an empty name.
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        with self.state.lock:
            return self.state.weights.clear_tenant(tenant)

    # ---- Transfers and statistics
    def pause(self, timeout: float | None = None) -> None:
        """Begin no transfer until `resume`, and wait for those in flight.

        Raises:
            WaitTimeout: some are still in flight; the manager is paused.
            ConfigError: no number of seconds; the manager is not paused.
        """
        timeout = seconds_of(timeout)
        with self.state.lock:
            for tracker in self.state.trackers:
                tracker.paused = True
        self.state.wait(timeout)

    def resume(self) -> None:
        """Begin transfers again, those queued meanwhile first."""
        with self.state.lock:
            for tracker in self.state.trackers:
                tracker.paused = False
                tracker.poll()

    @property
    def disabled(self) -> bool:
        """Whether the manager has stopped using the cache, after too many errors."""
        return self.state.fail_open.disabled

    def enable(self) -> None:
        """Use the cache again, and make copies to the host again if they were disabled."""
        self.state.fail_open.enable()
        self.offloader.breaker.reset()

    def stats(self) -> ManagerStats:
        """This process's counters."""
        with self.state.lock:
            self.state.gather()
            return self.state.counts.snapshot()

    def node_stats(self) -> ManagerStats:
        """The counters of all managers of the node, closed ones included. Those of other managers
        are half a second old, or as of their last step.

        Raises:
            ConfigError: the manager was made without counters.
            Detached: the counters were closed or removed.
        """
        if self._counters is None:
            raise ConfigError("node_stats: make the manager with counters=NodeCounters.open(cache)")
        with self.state.lock:
            self._add_to_node()
        return self._counters.total()

    def reset_stats(self) -> ManagerStats:
        """Return the counters and set them to zero."""
        with self.state.lock:
            self.state.gather()
            stats = self.state.counts.snapshot()
            self._add_to_node()  # the node's total continues
            self.state.counts.clear()
            self._added.clear()
            self.state.recent.clear()
            return stats

    def recent_stats(self) -> ManagerStats:
        """What the last `config.window` requests asked for and found; other counters are 0."""
        with self.state.lock:
            return self.state.recent.snapshot()

    def gauges(self) -> TierGauges:
        """Current room in each tier, requests and transfers. Takes no lock of another process.

        Raises:
            Detached: the host cache is closed.
        """
        with self.state.lock:
            return TierGauges(
                device=self.device.room(),
                host=capacity_of(self.host.index),
                running=len(self.state.requests),
                leaving=len(self._frees),
                transfers=sum([tracker.in_flight for tracker in self.state.trackers]),
                queued=sum([tracker.queued for tracker in self.state.trackers]),
                offloads=self.offloader.breaker.state,
            )

    def _add_to_node(self) -> None:
        """Add what was counted since the last call to the node's counters."""
        self._add_at = time.monotonic() + TELL
        self.state.gather()
        more = {name: n - self._added[name] for name, n in self.state.counts.items()}
        more = {name: n for name, n in more.items() if n > 0}
        if self._counters is not None and self._counting and more:
            self._added.update(more)
            try:
                self._counters.add(**more)
            except LightcacheError as error:  # of the counters: the cache works on without them
                self._counting = False
                _log.warning("the manager does not count for the node any more: %s", error)


__all__ = ["KVCacheManager"]
