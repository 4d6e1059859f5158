"""KVCacheManager: device, host and storage as one prefix cache, for a scheduler."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from lightcache._arguments import Pages, count
from lightcache._together import assign, together
from lightcache.cache import Cache
from lightcache.errors import (
    Abandoned,
    ConfigError,
    InUse,
    LeaseLost,
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
from lightcache.manager.lookup import PendingRequest, PrefixLookup, wait_for_read
from lightcache.manager.offload import NOTHING, FullBlocks, Offloader, WriteBack
from lightcache.manager.request import (
    ANY,
    DEVICE_ALONE,
    HELD,
    LEASED,
    TIERS,
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
from lightcache.manager.state import ManagerState
from lightcache.manager.stats import Counters, ManagerStats, TierGauges
from lightcache.manager.weights import CheckedSpaces, WeightsState, open_keys
from lightcache.shm.errors import leave
from lightcache.shm.locking import Hurried

if TYPE_CHECKING:
    from lightcache.costs import Costs
    from lightcache.manager.stats import NodeCounters
    from lightcache.storage.tasks import StorageTask
    from lightcache.storage.tier import BaseTier

TELL = 0.5
"""Seconds between two times at which our figures are added to the node's counters."""


# ---- The parts that a manager is given.


def check_parts(host: Any, device: Any, backend: Any, config: Any, storage: Any) -> None:
    """Check the parts of a manager.

    Raises:
        ConfigError: a part of another type; a host cache without a transfer backend; a storage
            without a host cache.
    """
    for name, part, kinds in (
        ("host", host, (Cache, NoneType)),
        ("device", device, (DeviceTier,)),
        ("config", config, (ManagerConfig,)),
    ):
        if not isinstance(part, kinds):
            expected = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name}: expected a {expected}, found {part!r}")
    if host is not None and backend is None:
        raise ConfigError(
            "backend: expected one, such as EngineBackend(engine), found None; only a manager "
            "without a host cache moves nothing"
        )
    if host is None and storage is not None:
        raise ConfigError(
            f"storage: expected None without a host cache, found {storage!r}; storage is read into "
            "and written from host pages, so give a host cache, of a few pages at least"
        )


def check_blocks(backend: Any, blocks: int, block_tokens: int) -> None:
    """Check the number of device blocks, if their transfer backend knows how many there can be.

    Raises:
        ConfigError: more than the device has room for.
    """
    slots = getattr(backend, "slots", None)
    if slots is not None and blocks * block_tokens > slots:
        raise ConfigError(
            f"blocks: {blocks} blocks of {block_tokens} tokens are {blocks * block_tokens} slots, "
            f"and the planes of the transfer backend's engine hold {slots}; give at most "
            f"{slots // block_tokens} blocks, or describe all of the device's memory"
        )


def storage_of(host: Cache, storage: BaseTier | str | Sequence[str] | None) -> BaseTier | None:
    """The tier; opened here, with a storage of its own, if it is a URL or several.

    Raises:
        ConfigError: neither, a tier of another cache, or no such URL.
        StorageError: the storage cannot be opened.
    """
    if storage is None:
        return None
    from lightcache.storage.tier import (
        BaseTier,  # not needed without a storage
        StorageTier,
    )

    if isinstance(storage, (str, list, tuple)):
        return StorageTier.open(host, storage)
    tier: Any = storage
    if not isinstance(tier, BaseTier):
        raise ConfigError(
            "storage: expected a StorageTier, a StorageClient, or a URL such as "
            f"'disk:/mnt/nvme/cache?capacity=1TiB', found {storage!r}"
        )
    if tier.cache.index.segment.uuid != host.index.segment.uuid:
        raise ConfigError(
            f"storage: expected a tier of the host cache {host.name!r}, found one of "
            f"{tier.cache.name!r}"
        )
    return tier


# ---- The manager.


class KVCacheManager:
    """What a scheduler holds. One for each engine, or for each data-parallel rank of one; all of a
    node share the host cache.

    A request's way: `plan` it while it waits, as often as you like; `take` it; `allocate` (owned
    devices); `load` what is to be loaded; `commit` as tokens are computed; `release`. Call `poll`
    each step. Calls may come from several threads; none waits for bytes unless it says so.
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
        """Everything stays the caller's to close, after the manager, but for what it opens.

        Args:
            host: the node's cache; its `page_tokens` must be a multiple of the device's block, or a
                part of it. None: the device alone, without a host cache. Nothing is moved then.
                Keys are those of a cache of one page, "DEVICE.keys", which the manager opens.
            device: `ManagedBlocks` or `MirroredBlocks`.
            backend: moves bytes between the two; None where there is no host cache.
            costs: `lightcache.costs.Costs`: whether so few pages are worth loading; None: always.
            storage: a `StorageTier` or `StorageClient` of the same cache; or a URL, or several, as
                "disk:/mnt/nvme/cache?capacity=1TiB", opened here and closed by `close`; None: none.
            weights: version of the weights that are being served.
            counters: of the node, which our figures are added to; None: they stay our own.

        Raises:
            ConfigError: page sizes that do not fit each other, more blocks than the engine's planes
                hold, or something else than it says.
            StorageError: the storage cannot be opened.
        """
        self.config = ManagerConfig() if config is None else config
        check_parts(host, device, backend, self.config, storage)
        check_blocks(backend, device.blocks, device.block_tokens)
        self.tiers = TIERS if host is not None else DEVICE_ALONE
        """Where requests may be read from and written to at most."""
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
        """Shared by its parts; for them, and for a manager that is built on this one."""
        self.lookup = PrefixLookup(state, costs)
        """For a manager that is built on this one, as `offloader`."""
        self.offloader = Offloader(state)
        self._lock, self._guard, self._traffic = state.lock, state.guard, state.traffic
        self._counts, self._recent = state.counts, state.recent
        self._weights, self._requests = state.weights, state.requests
        self._counters, self._told, self._tell_at = counters, Counters(), 0.0
        self._write_back = WriteBack(state, self.offloader)
        self._full_blocks = FullBlocks(state, self._write_back)
        self._frees = PendingFrees(state, self.offloader, self._full_blocks)

    @property
    def backend(self) -> TransferBackend:
        """What moves the bytes; moves none where there is no host cache."""
        return self.state.backend

    # ---- finding

    def plan(
        self,
        request: Hashable,
        prompt: Prompt,
        *,
        options: RequestOptions = ANY,
        limit: int | None = None,
        device_tokens: int | None = None,
    ) -> PrefixMatch:
        """The longest prefix over all tiers, pinned tentatively: `take` yields no less, within the
        time limit of the plan; after it, what is there then. Planning again is cheap, and replaces
        what was planned before. What storage alone has is being read from now on: `pending`.

        Args:
            request: its id, any hashable.
            limit: most tokens to reuse, for example where prompt log-probabilities are wanted from
                there on, or for draft layers.
            device_tokens: attached devices: what the engine found itself; None: look in the mirror.

        Raises:
            ConfigError: an argument is not what it should be; says which.
            Detached: the manager is closed.
        """
        with self._lock:
            batch = self.lookup.single(request, prompt, options, limit, device_tokens)
            begun = time.perf_counter_ns()
            (match,) = self.lookup.plan(batch)
            self._counts["plan_ns"] += time.perf_counter_ns() - begun
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
            ConfigError: something is wrong with one of them, or they are not as many; says which.
            Detached: the manager is closed.
        """
        with self._lock:
            batch = self.lookup.batch(requests, prompts, options, limits, device_tokens)
            begun = time.perf_counter_ns()
            matches = self.lookup.plan(batch)
            self._counts["plan_ns"] += time.perf_counter_ns() - begun
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
        used, or asked of storage: it may be gone when it is planned. Arguments and errors as there,
        but that it does not matter whether the manager is closed."""
        with self._lock:
            return self.lookup.peek(prompts, options, limits, device_tokens)

    def cancel(self, request: Hashable) -> None:
        """Forget a plan. Harmless if there is none."""
        check_hashable([request], "cancel")
        with self._lock:
            self.lookup.cancel(request)

    @overload
    def take(self, request: Hashable, *, wait: Literal[True]) -> PrefixMatch: ...

    @overload
    def take(self, request: Hashable, *, wait: bool = False) -> PrefixMatch | None: ...

    def take(self, request: Hashable, *, wait: bool = False) -> PrefixMatch | None:
        """Begin a request: what was planned is its own from now on, and what has come since.

        While storage is being read for it the answer is None, "not yet": ask again in the next
        step. A read is waited for as long as computing what it may bring would take, by the pace of
        the requests before, from the first call on; 1 s while no pace is known. Then the request
        begins with what is there. The read goes on, and serves those who come next.

        Args:
            wait: block until the read is over, or its time is: the answer is never None.

        Raises:
            LeaseLost: it was not planned, or was cancelled; plan it first.
            ConfigError: it runs already.
        """
        broken = False
        while True:
            with self._lock:
                self._check_take(request)
                look = partial(self.lookup.reading, request, time.monotonic())
                reading = None if broken else self._guard.run(look, nothing, proves=False)
                if reading is None:
                    return self._begin(request)
            if not wait:
                return None
            broken = not wait_for_read(*reading)  # other threads may call meanwhile

    def begin(self, request: Hashable) -> PrefixMatch:
        """`take` with what there is now, whatever is being read; for a manager that is built on
        this one, under the lock. Raises as `take`."""
        self._check_take(request)
        return self._begin(request)

    def _check_take(self, request: Hashable) -> None:
        check_hashable([request], "take")
        if request in self._requests:
            raise ConfigError(f"take: the request {request!r} runs already; release it first")

    def _begin(self, request: Hashable) -> PrefixMatch:
        if self.lookup.failed(request):  # it was counted then
            running = self._without_cache(request)
        else:
            running = self._guard.run(
                partial(self._taken, request), partial(self._without_cache, request)
            )
        running.begun = time.monotonic()
        self._requests[request] = running
        running.counted = self._counted(running.match)
        self._counts.add(**running.counted)
        self._recent.add(running.counted)
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
            self.lookup.missed(request, plan.request.prompt)  # it may still run, without
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
        if self._storage is not None and self._storage.wants_tokens:
            stored = options.write and "storage" in options.tiers
            running.generated = bytearray() if stored else None
        blocks = min(match.device, match.usable) // self.device.block_tokens
        if hit is not None:
            running.table = hit.pages[:blocks].copy()
            running.kind = bytearray([LEASED]) * blocks
        running.named = blocks
        if first:  # else none of it need be hashed yet
            running.written = self.host.peek(host_chain.keys[:first], namespace=space.host)
        if running.written == first and host is not None:
            running.written += len(host)
        return running

    def _counted(self, match: PrefixMatch) -> Counters:
        from_host = min(max(0, match.usable - match.device), match.host)
        return Counters(
            requests=1,
            hit_requests=int(match.usable > 0),
            prompt_tokens=match.tokens,
            device_tokens=min(match.device, match.usable),
            host_tokens=from_host,
            storage_tokens=max(0, match.usable - match.device - from_host),
            below_break_even=match.host if match.why is MissReason.BREAK_EVEN else 0,
            cut_items=int(match.why is MissReason.ITEM),
        )

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
                wait, or `skip_load` what the host has and ask for fewer.
            ConfigError: no number of tokens, or of seconds.
            LeaseLost: no such request.
        """
        limit = seconds_of(timeout)
        end = None if limit is None else time.monotonic() + limit
        while True:
            with self._lock:
                try:
                    return self._allocated(request, tokens)
                except OutOfPages:
                    copy = self._write_back.running()
                    left = None if end is None else end - time.monotonic()
                    if not copy or (left is not None and left <= 0):
                        raise
            with contextlib.suppress(WaitTimeout):  # tried once more, which raises
                copy.block(left)  # other threads may call meanwhile

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
        # They are the request's from here on; until then `fresh` gives them back.
        assign((running, running, fresh), ("table", "kind", "ended"), (table, kind, True))
        return running.table

    def _fresh_blocks(self, device: ManagedBlocks, missing: int) -> Allocation:
        if self.config.write is not WritePolicy.BACK or device.index is None:
            return device.hold(missing)
        free = self._write_back.make_room(missing)
        if free < missing and (leaving := self._write_back.blocks):
            raise OutOfPages(
                f"allocate: {missing} blocks were asked for, {free} are free, and {leaving} are "
                "being written to the host first; `poll`, and ask again"
                + (", when transfers are resumed" if self._traffic.paused else "")
            )
        return device.hold(missing)

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
                free = self._write_back.make_room(blocks)
                if free < blocks and self._write_back.blocks:
                    return False
            try:
                with Hurried(self.config.time_limit):
                    return device.can_allocate(blocks, evict=evict)
            except LockTimeout:
                return False

    def skip_load(self, request: Hashable) -> PrefixMatch:
        """Instead of `load`, when there is no room for what it would bring: the host's pages go
        back, the device's part stays, the rest is computed. Returns what is usable now.

        Raises:
            ConfigError: it was fetched already.
            LeaseLost: no such request.
        """
        with self._lock:
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
            change = self._counted(running.match)
            change.subtract(running.counted)
            self._counts.update(change)
            self._recent.change(running.counted, **change)
            return running.match

    def load(self, request: Hashable, table: Pages | None = None) -> LoadHandle:
        """Bring what was found on the host to the device. Returns at once.

        Args:
            table: attached devices: the request's blocks, for `match.usable` tokens at least.

        Raises:
            ConfigError: the table is too short, or no table of blocks.
            LeaseLost: no such request.
        """
        with self._lock:
            running = self.request(request)
            before = running.table
            if table is not None:
                running.table = check_table(self.device, running, table, running.match.usable)
            try:
                without = self.lookup.usable.without_host(running.prompt, running.match)
                return self._guard.run(
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
        tables, delivery = None if table is None else [table], Delivery()
        changed = self._commit([request], [total], [new_tokens], tables, delivery)
        delivery.done = True  # no call: no interrupt comes between this and the return
        return changed[0]

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
        """See `commit_many`. Exchanged blocks are returned again unless the delivery is done."""
        with self._lock:
            self._full_blocks.settle()
            known = self._requests
            try:
                running = [known.get(request) or self.request(request) for request in requests]
            except TypeError:
                check_hashable(requests, "commit")
                raise
            for each in running:
                if each.loading is not None and each.is_loading:
                    self._traffic.poll()
                    break
            packed, tables = check_commits(self.device, running, totals, new_tokens, tables)
            for each, total, fresh in zip(running, totals, packed, strict=True):
                each.note(total, fresh)
                if each.begun and total >= len(each.prompt):
                    self._prompt_computed(each)
            if tables is not None:
                for each, table in zip(running, tables, strict=True):
                    each.table = table
            self._guard.run(partial(self._publish, running), nothing)
            # Also what was exchanged before an error, or in a call that an interrupt has ended.
            if not [each for each in running if each.owed is not None]:  # nearly always
                return [NOTHING] * len(running)
            return [NOTHING if each.owed is None else each.owed.by(delivery) for each in running]

    def _prompt_computed(self, running: Request) -> None:
        """Note how long computing the prompt took, unless some of it was loaded."""
        begun, running.begun = running.begun, 0.0
        if running.match.load <= 0:
            computed = len(running.prompt) - running.match.usable
            self.state.pace.note(computed, time.monotonic() - begun)

    def _publish(self, running: list[Request]) -> None:
        spaces = CheckedSpaces(self._weights)
        self._full_blocks.cache_blocks(running, spaces)
        self.offloader.due(running, spaces)

    def release(self, request: Hashable, *, publish: bool = True, wait: bool = False) -> None:
        """End a request. Its blocks are free when no copy touches them any more; named ones stay to
        be found. Harmless if there is no such request (it may have ended by a clear).

        Args:
            publish: False: an abort; what is not written yet is not written.
            wait: block until its copies are over.
        """
        self.release_many([request], publish=publish)
        if wait:
            self._frees.wait(request)

    def release_many(self, requests: Sequence[Hashable], *, publish: bool = True) -> None:
        """`release` for several."""
        with self._lock:
            check_hashable(requests, "release")
            self._full_blocks.settle()
            ended = self._end(requests, publish)
            try:
                if publish and ended:
                    self._guard.run(partial(self._publish_rest, ended), nothing)
            finally:
                self._frees.poll(ended)

    def _end(self, requests: Sequence[Hashable], publish: bool) -> list[Request]:
        """Move those of these requests that run to the pending frees: all or, after an interrupt,
        none."""
        running = self._requests
        ended = [running[each] for each in dict.fromkeys(requests) if each in running]
        for each in ended:
            self.lookup.computed(each)
            each.stored = publish
        together(
            partial(self._frees.extend, ended),
            partial(deque, map(running.pop, [each.id for each in ended]), 0),
        )
        for request in requests:
            self.lookup.cancel(request)
        return ended

    def _publish_rest(self, ended: list[Request]) -> None:
        spaces = CheckedSpaces(self._weights)
        late = [each for each in ended if each.loading is not None or each.sound is not None]
        if late:  # perhaps a load was in flight at the last commit
            self._traffic.poll()
            self._full_blocks.cache_blocks(late, spaces)
        self.offloader.rest(ended, spaces)

    # ---- for a manager that is built on this one, under the lock

    def request(self, request: Hashable) -> Request:
        """A request between `take` and `release`.

        Raises:
            LeaseLost: no such request.
        """
        self._full_blocks.settle()
        try:
            running = self._requests.get(request)
        except TypeError:
            check_hashable([request], "request")
            raise
        if running is None:
            raise LeaseLost(f"there is no running request {request!r}; plan and take it first")
        return running

    def has_ended(self, running: Request) -> bool:
        """Whether a request has ended, and no copy touches its blocks any more."""
        return self._requests.get(running.id) is not running and running not in self._frees

    def untake(self, request: Hashable) -> Request:
        """As if a request had not been taken: its KV goes back, and it is not counted.

        Raises:
            LeaseLost: no such request.
        """
        running = self.request(request)
        self.release(request, publish=False)
        back = {name: -count for name, count in running.counted.items()}
        self._counts.update(back)
        self._recent.change(running.counted, **back)
        return running

    def needs_host(self, call: str) -> None:
        """Raises ConfigError where there is no host cache."""
        if self._own_host is not None:
            raise ConfigError(
                f"{call}: expected a manager with a host cache, found one of a device alone; pages "
                "travel through the host"
            )

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
            self.state.closed = True
            self.release_many(list(self._requests), publish=False)
            self.lookup.close()
            self._write_back.close()
            self._traffic.paused = False
            self._traffic.poll()
        self._traffic.wait(None, timeout)
        self._frees.poll()
        with self._lock:
            self._write_back.poll()
            self._tell()
        if self._own_storage is not None:  # what ended requests have to be written is written
            self._own_storage.close()
            with self._lock:
                self._tell()  # of what was written just now
        if self._own_host is not None:
            self._own_host.close()
        with self._lock:
            self._traffic.foreign.tell()

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)

    def _let_go(self) -> None:
        """The manager has disabled itself: pins that are not needed go."""
        self.lookup.let_go()
        for running in self._requests.values():
            running.let_go_of_host()

    def _owned(self, call: str) -> ManagedBlocks:
        if not isinstance(self.device, ManagedBlocks):
            raise ConfigError(f"{call}: the engine owns the blocks of an attached device")
        return self.device

    # ---- keeping order

    def poll(self) -> int:
        """Each step: notice what is over, begin what waits, give back what has ended, and finish
        what an interrupt has left. Returns the transfers in flight. Does not block.

        Raises:
            Whatever a transfer backend has raised since the last call, in whichever of ours, that
            is none of our errors: once, when all of this is done. Of several the first; the others
            are logged. So too what a storage has raised when a request or a plan ended.
        """
        with self._lock:
            going = self._traffic.poll()
            self._frees.poll()
            self._write_back.poll()
            self._keep_low_water()
            if self._counters is not None and time.monotonic() >= self._tell_at:
                self._tell()
            self._traffic.foreign.tell()
            return going

    def _keep_low_water(self) -> None:
        device = self.device
        if self.config.kept_free and isinstance(device, ManagedBlocks) and device.index is not None:
            wanted = int(self.config.kept_free * device.blocks)
            missing = wanted - device.free - self._write_back.blocks
            if missing > 0:
                demote = partial(self._write_back.demote, missing, "low_water")
                self._guard.run(demote, lambda: 0, proves=False)

    def in_flight(self, blocks: Pages | Sequence[int] | None = None) -> Any:
        """Which of these device blocks a copy reads or writes: bool of their shape; none does of
        what is no block, as the -1 that pads a table. None: how many transfers go on, as `poll`.

        Raises:
            ConfigError: no block numbers.
        """
        with self._lock:
            self._traffic.poll()
            if blocks is None:
                return self._traffic.in_flight
            return self._traffic.busy(numbers_of(blocks))

    def wait_blocks(
        self, blocks: Pages | Sequence[int] | None = None, timeout: float | None = None
    ) -> None:
        """Until no copy touches these blocks (None: any): before they are used for something else,
        as when a request is preempted or aborted. Blocks.

        Raises:
            WaitTimeout: a copy still does.
            ConfigError: no number of seconds, or no block numbers.
        """
        self._traffic.wait(None if blocks is None else numbers_of(blocks).reshape(-1), timeout)
        self._frees.poll()

    def evicted(self, blocks: Pages | Sequence[int]) -> int:
        """Attached devices: the engine has evicted these blocks, or is about to overwrite them.
        Returns how many had a name."""
        with self._lock:
            if not isinstance(self.device, MirroredBlocks):
                raise ConfigError("evicted: an owned device evicts by itself; see `drop`")
            return self.device.evicted(numbers_of(blocks))

    def evicting(self, blocks: Pages | Sequence[int]) -> int:
        """Attached devices, with write-back: these blocks are going to be evicted. Begins to write
        to the host what they hold; report them as `evicted` when `wait_blocks` or `in_flight` says
        that no copy touches them. Returns how many pages are on their way."""
        with self._lock:
            index = self.device.index
            if index is None or not isinstance(self.device, MirroredBlocks):
                return 0
            named = self.device.named(numbers_of(blocks))
            return self._write_back.evicting(named, index.keys_of(named))

    def set_blocks(self, blocks: int) -> None:
        """The engine has found out how many device blocks fit, or has changed it: the device's
        index begins empty. Plans are forgotten; the host keeps what it has.

        Raises:
            InUse: a request runs, or a copy goes on; release, and wait for it.
            ConfigError: not 1 to 40 million, or more than the engine's planes hold.
        """
        with self._lock:
            self._traffic.poll()
            self._frees.poll()
            self._write_back.poll()
            copies = self._traffic.in_flight + self._traffic.queued
            if self._requests or len(self._frees) or copies:
                raise InUse(
                    f"set_blocks: {len(self._requests)} requests run, and {copies} copies go on "
                    "or wait; release, resume, and wait for them first"
                )
            count(blocks, "blocks", 1, MAX_PAGES)  # before anything is forgotten
            check_blocks(self.backend, blocks, self.device.block_tokens)
            self.lookup.close()
            self._write_back.close()
            self.device.set_blocks(blocks)

    # ---- prefixes, whoever runs

    def protect(self, prompt: Prompt) -> Mapping[str, int]:
        """Protect every cached page and block of a prompt, on the host and on an owned device, from
        eviction until `unprotect` or a weights update. Returns the tokens kept, by tier."""
        with self._lock:
            self.state.check_open("protect")
            return self._set_kept(prompt, True)

    def unprotect(self, prompt: Prompt) -> Mapping[str, int]:
        """Undo `keep`."""
        with self._lock:
            return self._set_kept(prompt, False)

    def _set_kept(self, prompt: Prompt, kept: bool) -> dict[str, int]:
        space = self._weights.scope_of(prompt.tenant)
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
        """Evict a branch now, from its end up to token `start`, as far as no other request uses it.
        Returns the tokens dropped, by tier."""
        with self._lock:
            if start < 0:
                raise ConfigError(f"start: expected a token's position, found {start}")
            space = self._weights.scope_of(prompt.tenant)
            if space is None:
                return {"host": 0, "device": 0}
            device, pages, blocks = self.device, 0, 0
            first, keys = -(-start // self.page_tokens), prompt.keys(space.host_spec)
            if first < len(keys):
                pages = self.host.index.drop(keys, start=first, namespace=space.host)
            first, keys = -(-start // device.block_tokens), prompt.keys(space.device_spec)
            if device.owned and device.index is not None and first < len(keys):
                blocks = device.index.drop(keys, start=first, namespace=space.device)
            return {"host": pages * self.page_tokens, "device": blocks * device.block_tokens}

    def prefetch(self, prompt: Prompt) -> StorageTask:
        """Begin to bring a prompt's pages from storage to the host, before a request needs them.
        Returns the task."""
        with self._lock:
            if self._storage is None:
                raise ConfigError("prefetch: the manager has no storage; make it with storage=")
            space = self._weights.scope_of(prompt.tenant)
            if space is None:
                raise Abandoned(
                    "prefetch: the weights are being changed; ask again behind finish_update"
                )
            keys = prompt.keys(space.host_spec)
            first = self.host.peek(keys, namespace=space.host)
            return self._storage.prefetch(keys, first, namespace=space.host)

    def demote(self, blocks: int) -> int:
        """Owned devices: begin to write back so many blocks, those unused for longest, and free
        them. Returns how many are on their way."""
        with self._lock:
            return self._write_back.demote(count(blocks, "blocks", -(1 << 62), 1 << 62), "demote")

    # ---- weights

    @property
    def weights_state(self) -> WeightsState:
        """Whether what we serve is good, or was cleared, by whatever process."""
        with self._lock:
            return self._weights.state()

    def begin_update(self, timeout: float | None = None, *, wait: bool = True) -> None:
        """The weights are about to change. From the first instant nothing of the present version is
        found or published, in no process and no tier; neighbours on another version keep theirs.
        Running requests go on, and publish nothing; their releases are harmless.

        Args:
            wait: for transfers in flight; False: they run out without effect.
            timeout: seconds for that.

        Raises:
            WaitTimeout: some go on; the update has begun all the same.
            ConfigError: no number of seconds; nothing was begun.
        """
        timeout = seconds_of(timeout)
        with self._lock:
            self._weights.begin()
        if wait:
            self._traffic.wait(None, timeout)

    def finish_update(self, version: str) -> None:
        """Serve this version from now on.

        Raises:
            ConfigError: no update was begun.
        """
        with self._lock:
            self._weights.finish(version)

    def clear_tenant(self, tenant: str) -> bool:
        """Forget what a tenant has: from the first instant nothing of it is found or published, in
        no process and no tier; other devices give it back when they look next. What it asks for
        next begins empty. Its running requests go on, and publish nothing.

        Returns:
            False: nothing was cleared, for the weights are being changed, or have gone.

        Raises:
            ConfigError: no name.
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        with self._lock:
            return self._weights.clear_tenant(tenant)

    # ---- transfers

    def pause(self, timeout: float | None = None) -> None:
        """No transfer begins until `resume`; those that go on are waited for.

        Raises:
            WaitTimeout: some go on still; the manager is paused.
            ConfigError: no number of seconds; it is not paused.
        """
        timeout = seconds_of(timeout)
        with self._lock:
            self._traffic.paused = True
        self._traffic.wait(None, timeout)

    def resume(self) -> None:
        """Transfers begin again, those first that were asked for meanwhile."""
        with self._lock:
            self._traffic.paused = False
            self._traffic.poll()

    @property
    def disabled(self) -> bool:
        """Whether the manager asks nothing of the cache any more, after too many errors."""
        return self._guard.disabled

    def enable(self) -> None:
        """Ask the cache again."""
        self._guard.enable()

    def stats(self) -> ManagerStats:
        """This process's figures."""
        with self._lock:
            self.state.gather()
            return self._counts.snapshot()

    def node_stats(self) -> ManagerStats:
        """The figures of all managers of the node, those that are gone included; of others as of
        half a second ago, or their last step.

        Raises:
            ConfigError: the manager was made without counters.
        """
        if self._counters is None:
            raise ConfigError("node_stats: make the manager with counters=NodeCounters.open(cache)")
        with self._lock:
            self._tell()
        return self._counters.total()

    def reset_stats(self) -> ManagerStats:
        """The figures so far; counting begins anew."""
        with self._lock:
            self.state.gather()
            found = self._counts.snapshot()
            self._tell()  # the node's total goes on
            self._counts.clear()
            self._told.clear()
            self._recent.clear()
            return found

    def recent_stats(self) -> ManagerStats:
        """The same of the last `config.window` requests: what they asked and found, no more."""
        with self._lock:
            return self._recent.snapshot()

    def gauges(self) -> TierGauges:
        """How things stand now: room in each tier, requests, transfers. No lock of others."""
        with self._lock:
            return TierGauges(
                device=self.device.room(),
                host=capacity_of(self.host.index),
                running=len(self._requests),
                leaving=len(self._frees),
                transfers=self._traffic.in_flight,
                queued=self._traffic.queued,
            )

    def _tell(self) -> None:
        """Add to the node's counters what we have counted since."""
        self._tell_at = time.monotonic() + TELL
        self.state.gather()
        more = {name: n - self._told[name] for name, n in self._counts.items()}
        more = {name: n for name, n in more.items() if n > 0}
        if self._counters is not None and more:
            self._told.update(more)
            self._guard.run(partial(self._counters.add, **more), nothing)


__all__ = ["KVCacheManager"]
