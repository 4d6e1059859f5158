"""KVCacheManager: device, host and storage as one prefix cache, for a scheduler."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from lightcache._arguments import Pages, count
from lightcache._together import assign, together
from lightcache.cache import Cache
from lightcache.errors import (
    Abandoned,
    ConfigError,
    Detached,
    InUse,
    LeaseLost,
    LightcacheError,
    LockTimeout,
    OutOfPages,
    WaitTimeout,
)
from lightcache.hashing import Tokens
from lightcache.layout import MAX_PAGES
from lightcache.leases import Held, Lease
from lightcache.manager.device import AttachedDevice, DeviceTier, OwnedDevice, room_of
from lightcache.manager.fetching import Fetch, Leaving, begin_fetch, no_fetch
from lightcache.manager.foreign import Guard, nothing, seconds_of
from lightcache.manager.movers import Mover, NullMover
from lightcache.manager.planning import (
    Asked,
    AskedMany,
    Planned,
    Planner,
    asked_many,
    asked_of,
    check_blocks,
    check_commits,
    check_hashable,
    check_parts,
    check_table,
    numbers_of,
    peek,
    peek_behind,
)
from lightcache.manager.requests import (
    ANY,
    DEVICE_ALONE,
    HELD,
    LEASED,
    TIERS,
    Chain,
    Delivery,
    ManagerConfig,
    NoChain,
    PrefixMatch,
    Prompt,
    Request,
    Space,
    Why,
    Wishes,
    WritePolicy,
)
from lightcache.manager.state import ManagerState
from lightcache.manager.statistics import Figures, Gauges, ManagerStats
from lightcache.manager.weights import Look, WeightsState, open_keys
from lightcache.manager.writing import NOTHING, Demotion, Namer, Writer
from lightcache.shm.errors import leave
from lightcache.shm.locking import Hurried

if TYPE_CHECKING:
    from lightcache.costs import Costs
    from lightcache.manager.statistics import NodeCounters
    from lightcache.storage.tasks import StorageTask
    from lightcache.storage.tier import BaseTier


# ---- Beginning: what a plan becomes when its request is taken.


def without_cache(request: Hashable, prompt: Prompt, miss: PrefixMatch) -> Request:
    """A request of which nothing is found or published."""
    nothing = NoChain()
    return Request(request, prompt, ANY, None, miss, nothing, nothing, known=len(prompt))


def begin_request(
    manager: KVCacheManager,
    request: Hashable,
    planned: Planned,
    match: PrefixMatch,
    hit: Lease | None,
    host: Lease | None,
) -> Request:
    """A request that holds what was planned for it: device blocks and host pages are its own."""
    (prompt, wishes, _), space = planned.asked, planned.space
    if space is None:
        return without_cache(request, prompt, match)
    device_chain = Chain(prompt, space.device_spec)
    same = space.host_spec is space.device_spec
    made = Request(
        request,
        prompt,
        wishes,
        space,
        match,
        device_chain,
        device_chain if same else Chain(prompt, space.host_spec),
        hit,
        host,
        planned.host_first,
        known=len(prompt),
    )
    storage = manager._storage
    if storage is not None and storage.wants_tokens:
        stored = wishes.write and "storage" in wishes.tiers
        made.said = bytearray() if stored else None
    blocks = min(match.device, match.usable) // manager.device.block_tokens
    if hit is not None:
        made.table = hit.pages[:blocks].copy()
        made.kind = bytearray([LEASED]) * blocks
    made.named = blocks
    if planned.host_first:  # else nothing of it need be hashed yet
        before = made.host_chain.keys[: planned.host_first]
        made.written = manager.host.peek(before, namespace=space.host)
    if made.written == planned.host_first and host is not None:
        made.written += len(host)
    return made


# ---- Hints without a request: keep, drop, prefetch. The manager's lock is around every call.


def keep(manager: KVCacheManager, prompt: Prompt, kept: bool) -> dict[str, int]:
    """Tokens of a prefix that are kept from now on, or no more, by tier."""
    space = manager._weights.space_of(prompt.tenant)
    if space is None:
        return {"host": 0, "device": 0}
    host, device = manager.host.index, manager.device
    verb = host.keep if kept else host.unkeep
    found = {"host": verb(prompt.keys(space.host_spec), namespace=space.host), "device": 0}
    if device.owned and device.index is not None:
        verb = device.index.keep if kept else device.index.unkeep
        found["device"] = verb(prompt.keys(space.device_spec), namespace=space.device)
    return _tokens(manager, found)


def drop(manager: KVCacheManager, prompt: Prompt, start: int) -> dict[str, int]:
    """Tokens behind `start` that were dropped, by tier: from the end upward, as far as nobody else
    uses them."""
    if start < 0:
        raise ConfigError(f"start: expected a token's position, found {start}")
    space = manager._weights.space_of(prompt.tenant)
    if space is None:
        return {"host": 0, "device": 0}
    device = manager.device
    first = -(-start // manager.page_tokens)
    keys = prompt.keys(space.host_spec)
    gone = {"host": 0, "device": 0}
    if first < len(keys):
        gone["host"] = manager.host.index.drop(keys, start=first, namespace=space.host)
    first = -(-start // device.block_tokens)
    keys = prompt.keys(space.device_spec)
    if device.owned and device.index is not None and first < len(keys):
        gone["device"] = device.index.drop(keys, start=first, namespace=space.device)
    return _tokens(manager, gone)


def prefetch(manager: KVCacheManager, prompt: Prompt, storage: BaseTier | None) -> StorageTask:
    """Bring what storage has of a prompt to the host; its task."""
    if storage is None:
        raise ConfigError("prefetch: the manager has no storage; make it with storage=")
    space = manager._weights.space_of(prompt.tenant)
    if space is None:
        raise Abandoned("prefetch: the weights are being changed; ask again behind finish_update")
    keys = prompt.keys(space.host_spec)
    there = manager.host.peek(keys, namespace=space.host)
    return storage.prefetch(keys, there, namespace=space.host)


def _tokens(manager: KVCacheManager, pages: dict[str, int]) -> dict[str, int]:
    return {
        "host": pages["host"] * manager.page_tokens,
        "device": pages["device"] * manager.device.block_tokens,
    }


# ---- What a manager tells of itself: its figures, those of the node, and how things stand.

TELL = 0.5
"""Seconds between two times at which the node's counters are told of our figures."""


def waited(task: StorageTask, seconds: float) -> bool:
    """Wait for a read. False: it cannot be waited for; what it has brought is there, and counts."""
    try:
        task.wait(seconds)
    except WaitTimeout:
        return True
    except LightcacheError:
        return False
    return True


# ---- What a manager is given as its storage: a tier, or a URL of which it makes one.


def storage_of(host: Cache, storage: BaseTier | str | Sequence[str] | None) -> BaseTier | None:
    """The tier; made here, with a storage of its own, if it is a URL or several.

    Raises:
        ConfigError: something else, a tier of another cache, or no such URL.
        StorageError: the storage cannot be opened.
    """
    if storage is None:
        return None
    from lightcache.storage.tier import (
        BaseTier,  # who has no storage does not need its modules
        StorageTier,
    )

    if isinstance(storage, (str, list, tuple)):
        return StorageTier.open(host, storage)
    found: Any = storage
    if not isinstance(found, BaseTier):
        raise ConfigError(
            "storage: expected a StorageTier, a StorageClient, or a URL such as "
            f"'disk:/mnt/nvme/cache?capacity=1TiB', found {storage!r}"
        )
    if found.cache.index.segment.uuid != host.index.segment.uuid:
        raise ConfigError(
            f"storage: expected a tier of the host cache {host.name!r}, found one of "
            f"{found.cache.name!r}"
        )
    return found


# ---- Extension: what a manager offers to what is built on it, as `lightcache.hybrid` is.


class Extension:
    """The inside of a `KVCacheManager`, as far as a manager of more than KV joins in its calls.

    Its caller holds `lock` around each of its own calls, and around all of these.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        """Of one manager."""
        self._manager = manager

    @property
    def lock(self) -> threading.RLock:
        """What the manager's calls hold."""
        return self._manager._lock

    @property
    def storage(self) -> BaseTier | None:
        """Where KV is read from behind the host; None: nowhere."""
        return self._manager._storage

    def guard(self, let_go: Callable[[], None], of: str) -> Guard:
        """Another one of the manager's kind: its errors are counted among the manager's, and as
        many, one behind the other, disable it.

        Args:
            let_go: gives back what is not needed without the cache.
            of: whose `enable` ends that.
        """
        config = self._manager.config
        return Guard(config.failures, config.time_limit, self._manager._figures, let_go, of)

    # ---- weights

    @property
    def weights(self) -> str:
        """The version that is served."""
        return self._manager.state.spaces.weights

    @property
    def cleared_by_us(self) -> bool:
        """While an update goes on: whether the version was good when we began it. Else another
        process has cleared it, and may serve others under its name by now."""
        return self._manager._weights.ours

    def space_of(self, tenant: str) -> Space | None:
        """Where a tenant's tokens may be found and published; None: nowhere."""
        return self._manager._weights.space_of(tenant)

    def good(self, space: Space) -> bool:
        """Whether anything of a space may be found or published still."""
        return self._manager._weights.good(space)

    # ---- plans

    def may_plan(self, given: object) -> None:
        """Refuse what `KVCacheManager.plan` does, apart from arguments of other types.

        Args:
            given: device tokens that an engine found itself, if any were said.

        Raises:
            ConfigError: the device is owned, and knows that itself.
            Detached: the manager is closed.
        """
        self._manager._may_plan(given)

    def plan(
        self, request: Hashable, asked: Asked, space: Space | None, given: int | None
    ) -> PrefixMatch:
        """`KVCacheManager.plan`, of arguments that were checked.

        Args:
            space: of the prompt's tenant, as `space_of` had it in this call.
            given: device tokens that an engine found itself; None: look.
        """
        planner = self._manager._planner
        return self._manager._guard.run(
            lambda: planner.plan_one(request, asked, space, given),
            lambda: planner.missed(request, asked.prompt),
        )

    def behind(self, request: Hashable, limit: int | None) -> PrefixMatch | None:
        """What is there for a request that was planned just now with a lower limit, found by
        looking only at what lies behind that. Pins nothing. None: that plan has failed.

        Args:
            limit: most tokens; None: the whole prompt.
        """
        if self._manager._planner.failed(request):
            return None
        return peek_behind(self._manager._planner, request, limit)

    def holds(self, request: Hashable, now: float) -> bool:
        """Whether what was planned for a request stays pinned for a while, so that planning it
        again would find no less.

        Args:
            now: `time.monotonic()`.
        """
        return self._manager._planner.holds(request, now)

    def seconds(self, tokens: int) -> float:
        """That a read of so many tokens is worth waiting for."""
        return self._manager.state.pace.seconds(tokens)

    def reading(self, request: Hashable, now: float) -> StorageTask | None:
        """What brings pages from storage for a plan that is to be taken; None: nothing does, or it
        was waited for long enough."""
        found = self._manager._planner.reading(request, now)
        return None if found is None else found[0]

    # ---- requests

    def take(self, request: Hashable) -> PrefixMatch:
        """`KVCacheManager.take` with what there is now, whatever is being read."""
        self._manager._may_take(request)
        return self._manager._begin(request)

    def running(self, request: Hashable) -> Request | None:
        """A request between `take` and `release`; None: there is none of that id."""
        return self._manager._requests.get(request)

    def is_over(self, one: Request) -> bool:
        """Whether a request has ended, and no copy touches its blocks any more."""
        manager = self._manager
        return manager._requests.get(one.id) is not one and one not in manager._leaving

    def untake(self, request: Hashable) -> Request:
        """As if a request had not been taken: its KV goes back, and it is not counted.

        Raises:
            LeaseLost: no such request.
        """
        manager = self._manager
        one = manager.request(request)
        manager.release(request, publish=False)
        back = {name: -count for name, count in one.counted.items()}
        manager._figures.update(back)
        manager._recent.change(one.counted, **back)
        return one

    # ---- transfers

    def pause(self) -> None:
        """No copy begins until the manager resumes. Waits for none that goes on."""
        self._manager._traffic.paused = True

    def wait(self, timeout: float | None) -> None:
        """Until no copy goes on. Blocks, and wants no lock held.

        Raises:
            WaitTimeout: some go on still.
        """
        self._manager._traffic.wait(None, timeout)


# ---- Allocating blocks of an owned device: what has to make room is written back first.


def allocate(
    manager: KVCacheManager, request: Hashable, tokens: int, timeout: float | None
) -> Pages:
    """See `KVCacheManager.allocate`. The manager's lock is not held."""
    limit = seconds_of(timeout)
    end = None if limit is None else time.monotonic() + limit
    while True:
        with manager._lock:
            try:
                return _allocated(manager, request, tokens)
            except OutOfPages:
                going = manager._demotion.running()
                left = None if end is None else end - time.monotonic()
                if not going or (left is not None and left <= 0):
                    raise
        with contextlib.suppress(WaitTimeout):  # once more, then it is said
            going.block(left)  # others go on meanwhile


def _allocated(manager: KVCacheManager, request: Hashable, tokens: int) -> Pages:
    device, one = manager._owned("allocate"), manager.request(request)
    needed = -(-count(tokens, "tokens", 0, 1 << 62) // device.block_tokens)
    missing = needed + manager.config.reserve_blocks - len(one.table)
    if missing > 0:
        try:
            with Hurried(manager.config.time_limit):
                fresh = _fresh(manager, device, missing)
        except (OutOfPages, LockTimeout) as error:
            if 0 < needed <= len(one.table):
                return one.table  # this is what the reserve is for
            if isinstance(error, LockTimeout):
                raise OutOfPages(f"allocate: not now; ask in the next step: {error}") from error
            raise
        _append(one, fresh)
    return one.table


def _append(one: Request, fresh: Held) -> None:
    """They are the request's; until then `fresh` gives them back."""
    table = np.concatenate([one.table, fresh.pages])
    kind = one.kind + bytes([HELD]) * len(fresh)
    assign((one, one, fresh), ("table", "kind", "_done"), (table, kind, True))


def _fresh(manager: KVCacheManager, device: OwnedDevice, missing: int) -> Held:
    if manager.config.write is not WritePolicy.BACK or device.index is None:
        return device.hold(missing)
    free = make_room(manager, device, missing)
    if free < missing and (going := manager._demotion.going):
        raise OutOfPages(
            f"allocate: {missing} blocks were asked for, {free} are free, and {going} are being "
            "written to the host first; `poll`, and ask again"
            + (", when transfers are resumed" if manager._traffic.paused else "")
        )
    return device.hold(missing)


def make_room(manager: KVCacheManager, device: OwnedDevice, wanted: int) -> int:
    """With write-back: begin to write what eviction would take next, until so many blocks are free
    or on their way. Nothing is begun where so many cannot be had at all. Returns how many are free
    now. What goes wrong is a miss: then the blocks are as they were."""
    free = device.free
    if free < wanted:
        demotion = manager._demotion
        manager._traffic.poll()  # also if the cache is not asked: what goes on comes to its end
        demotion.poll()
        manager._guard.run(lambda: demotion.make_room(wanted), lambda: None, proves=False)
        free = device.free
    return free


# ---- KVCacheManager: device, host and storage as one prefix cache, for a scheduler.


class KVCacheManager:
    """What a scheduler holds. One for each engine, or for each data-parallel rank of one; all of a
    node share the host cache.

    A request's way: `plan` it while it waits, as often as you like; `take` it; `allocate` (owned
    devices); `fetch` what is to be loaded; `commit` as tokens are computed; `release`. Call `poll`
    each step. Calls may come from several threads; none waits for bytes unless it says so.
    """

    def __init__(
        self,
        host: Cache | None,
        device: DeviceTier,
        mover: Mover | None = None,
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
            device: `OwnedDevice` or `AttachedDevice`.
            mover: moves bytes between the two; None where there is no host cache.
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
        check_parts(host, device, mover, self.config, storage)
        check_blocks(mover, device.blocks, device.block_tokens)
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
            NullMover() if mover is None else mover,
            self.config,
            self._storage,
            weights,
            self._let_go,
        )
        """What its parts work on; for them, and for what is built on a manager."""
        self._lock, self._guard, self._traffic = state.lock, state.guard, state.traffic
        self._figures, self._recent = state.figures, state.recent
        self._weights, self._requests = state.weights, state.requests
        self._counters, self._told, self._tell_at = counters, Figures(), 0.0
        self._planner = Planner(state, costs)
        self.writer = Writer(state)
        """For what is built on a manager, as `state`."""
        self._demotion = Demotion(state, self.writer)
        self._namer = Namer(state, self._demotion)
        self._leaving = Leaving(state, self.writer, self._namer)
        self._closed = False
        self.extension = Extension(self)
        """For what is built on a manager."""

    @property
    def mover(self) -> Mover:
        """What moves the bytes; moves none where there is no host cache."""
        return self.state.mover

    # ---- finding

    def plan(
        self,
        request: Hashable,
        prompt: Prompt,
        *,
        wishes: Wishes = ANY,
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
            self._may_plan(device_tokens)
            asked = asked_of(request, prompt, wishes, limit, device_tokens)
            if self.tiers is not TIERS:
                asked = asked._replace(wishes=wishes.within(self.tiers))
            planner, weights = self._planner, self._weights
            begun = time.perf_counter_ns()
            found = self._guard.run(
                lambda: planner.plan_one(
                    request, asked, weights.space_or_none(prompt.tenant), device_tokens
                ),
                lambda: planner.missed(request, prompt),
            )
            self._figures["plan_ns"] += time.perf_counter_ns() - begun
            return found

    def plan_many(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        *,
        wishes: Sequence[Wishes] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[PrefixMatch]:
        """`plan` for a whole queue in one call. A refused call changes nothing.

        Raises:
            ConfigError: something is wrong with one of them, or they are not as many; says which.
            Detached: the manager is closed.
        """
        with self._lock:
            self._may_plan(device_tokens)
            many = self._within(asked_many(requests, prompts, wishes, limits, device_tokens))
            begun = time.perf_counter_ns()
            found = self._guard.run(
                lambda: self._planner.plan(many),
                lambda: list(map(self._planner.missed, requests, prompts)),
            )
            self._figures["plan_ns"] += time.perf_counter_ns() - begun
            return found

    def peek_many(
        self,
        prompts: Sequence[Prompt],
        *,
        wishes: Sequence[Wishes] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[PrefixMatch]:
        """What `plan_many` would find on the device and the host now. Nothing is pinned, counted as
        used, or asked of storage: it may be gone when it is planned. Arguments and errors as there,
        but that it does not matter whether the manager is closed."""
        with self._lock:
            many = asked_many(range(len(prompts)), prompts, wishes, limits, device_tokens)
            many = self._within(many)
            return self._guard.run(
                lambda: peek(self._planner, many),
                lambda: [PrefixMatch(len(prompt), why=Why.DISABLED) for prompt in prompts],
            )

    def _within(self, many: AskedMany) -> AskedMany:
        """The same, of the tiers that this manager has."""
        if self.tiers is TIERS:
            return many
        return many._replace(wishes=[one.within(self.tiers) for one in many.wishes])

    def cancel(self, request: Hashable) -> None:
        """Nothing is wanted of a plan any more. Harmless if there is none."""
        check_hashable([request], "cancel")
        with self._lock:
            self._planner.cancel(request)

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
                self._may_take(request)
                reading = None if broken else self._reading(request)
                if reading is None:
                    return self._begin(request)
            if not wait:
                return None
            broken = not waited(*reading)  # others go on meanwhile

    def _may_take(self, request: Hashable) -> None:
        check_hashable([request], "take")
        if request in self._requests:
            raise ConfigError(f"take: the request {request!r} runs already; release it first")

    def _reading(self, request: Hashable) -> tuple[StorageTask, float] | None:
        """See `Planner.reading`; None where the cache is not asked, too."""
        planner, now = self._planner, time.monotonic()
        return self._guard.run(lambda: planner.reading(request, now), lambda: None, proves=False)

    def _begin(self, request: Hashable) -> PrefixMatch:
        """Begin a request with what there is now."""
        if self._planner.failed(request):  # it was counted then
            made = self._missed(request)
        else:
            made = self._guard.run(lambda: self._taken(request), lambda: self._missed(request))
        made.begun = time.monotonic()
        self._requests[request] = made
        made.counted = self._counted(made.match)
        self._figures.add(**made.counted)
        self._recent.add(made.counted)
        return made.match

    def _missed(self, request: Hashable) -> Request:
        """A request that the cache failed: it runs without."""
        prompt = self._planner.prompt_of(request)
        return without_cache(request, prompt, PrefixMatch(len(prompt), why=Why.DISABLED))

    def _taken(self, request: Hashable) -> Request:
        planned, match, hit, host = self._planner.take(request)
        try:
            made = begin_request(self, request, planned, match, hit, host)
        except BaseException:
            for lease in (hit, host):
                if lease is not None:
                    lease._let_go()
            self._planner.missed(request, planned.asked.prompt)  # it may still run, without
            raise
        self._planner.computes(made)
        return made

    def _counted(self, match: PrefixMatch) -> Figures:
        from_host = min(max(0, match.usable - match.device), match.host)
        return Figures(
            requests=1,
            hit_requests=int(match.usable > 0),
            prompt_tokens=match.tokens,
            device_tokens=min(match.device, match.usable),
            host_tokens=from_host,
            storage_tokens=max(0, match.usable - match.device - from_host),
            below_break_even=match.host if match.why is Why.BREAK_EVEN else 0,
            cut_items=int(match.why is Why.ITEM),
        )

    # ---- for the parts

    def _may_plan(self, given: object) -> None:
        """`given`: what is said of the device's tokens."""
        if self._closed:
            self._open("plan")
        if given is not None and self.device.owned:
            raise ConfigError("device_tokens: an owned device knows what it has; leave it out")

    def _open(self, what: str) -> None:
        if self._closed:
            raise Detached(f"{what}: the manager is closed; make another one")

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
            try:
                with Hurried(self.config.time_limit):
                    return device.can_allocate(blocks, evict=evict)
            except LockTimeout:
                return False

    def forgo(self, request: Hashable) -> PrefixMatch:
        """Instead of `fetch`, when there is no room for what it would bring: the host's pages go
        back, the device's part stays, the rest is computed. Returns what is usable now.

        Raises:
            ConfigError: it was fetched already.
            LeaseLost: no such request.
        """
        with self._lock:
            one = self.request(request)
            if one.fetched or one.loading is not None:
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
            one = self.request(request)
            before = one.table
            if table is not None:
                one.table = check_table(self.device, one, table, one.match.usable)
            try:
                without = self._planner.without_host(one.prompt, one.match)
                return self._guard.run(
                    lambda: begin_fetch(self.state, one, without), lambda: no_fetch(one, without)
                )
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
        """See `commit_many`. What was exchanged is told again unless the delivery is done."""
        with self._lock:
            self._namer.settle()
            known = self._requests
            try:
                running = [known.get(request) or self.request(request) for request in requests]
            except TypeError:
                check_hashable(requests, "commit")
                raise
            for one in running:
                if one.loading is not None and one.is_loading:
                    self._traffic.poll()
                    break
            packed, tables = check_commits(self.device, running, totals, new_tokens, tables)
            for one, total, fresh in zip(running, totals, packed, strict=True):
                one.note(total, fresh)
                if one.begun and total >= len(one.prompt):
                    self._computed(one)
            if tables is not None:
                for one, table in zip(running, tables, strict=True):
                    one.table = table
            self._guard.run(lambda: self._committed(running), nothing)
            # Also what was exchanged before an error, or in a call that an interrupt has ended.
            if not [one for one in running if one.owed is not None]:  # nearly always
                return [NOTHING] * len(running)
            return [_owed_to(one, delivery) for one in running]

    def _computed(self, one: Request) -> None:
        """A prompt is complete: how long that took, unless some of it was loaded."""
        begun, one.begun = one.begun, 0.0
        if one.match.load <= 0:
            self.state.pace.note(len(one.prompt) - one.match.usable, time.monotonic() - begun)

    def _committed(self, running: list[Request]) -> None:
        look = Look(self._weights)
        self._namer.name(running, look)
        self.writer.due(running, look)

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
            self._namer.settle()
            ended = self._ended(requests, publish)
            try:
                if publish and ended:
                    self._guard.run(partial(self._publish_rest, ended), nothing)
            finally:
                self._leaving.poll(ended)

    def _ended(self, requests: Sequence[Hashable], publish: bool) -> list[Request]:
        """Of these the ones that run; they are leaving from now on, all or, after an interrupt,
        none."""
        running = self._requests
        ended = [running[each] for each in dict.fromkeys(requests) if each in running]
        for one in ended:
            self._planner.computed(one)
            one.stored = publish
        together(
            partial(self._leaving.extend, ended),
            partial(deque, map(running.pop, [one.id for one in ended]), 0),
        )
        for request in requests:
            self._planner.cancel(request)
        return ended

    def _publish_rest(self, ended: list[Request]) -> None:
        look = Look(self._weights)
        late = [one for one in ended if one.loading is not None or one.sound is not None]
        if late:  # perhaps it was going on at the last commit
            self._traffic.poll()
            self._namer.name(late, look)
        self.writer.rest(ended, look)

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
        if self._own_host is not None:
            self._own_host.close()
        with self._lock:
            self._traffic.foreign.tell()

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)

    # ---- for the parts

    def needs_host(self, call: str) -> None:
        """Raises ConfigError where there is no host cache."""
        if self._own_host is not None:
            raise ConfigError(
                f"{call}: expected a manager with a host cache, found one of a device alone; pages "
                "travel through the host"
            )

    def request(self, request: Hashable) -> Request:
        """A request between `take` and `release`; for what is built on a manager, under the lock.

        Raises:
            LeaseLost: no such request.
        """
        self._namer.settle()
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

    # ---- keeping order

    def poll(self) -> int:
        """Each step: notice what is over, begin what waits, give back what has ended, and finish
        what an interrupt has left. Returns the transfers in flight. Does not block.

        Raises:
            Whatever a mover has raised since the last call, in whichever of ours, that is none of
            our errors: once, when all of this is done. Of several the first; the others are logged.
            So too what a storage has raised when a request or a plan ended.
        """
        with self._lock:
            going = self._traffic.poll()
            self._leaving.poll()
            self._demotion.poll()
            self._keep_low_water()
            if self._counters is not None and time.monotonic() >= self._tell_at:
                self._tell()
            self._traffic.foreign.tell()
            return going

    def _keep_low_water(self) -> None:
        device = self.device
        if self.config.kept_free and isinstance(device, OwnedDevice) and device.index is not None:
            wanted = int(self.config.kept_free * device.blocks)
            missing = wanted - device.free - self._demotion.going
            if missing > 0:
                demote = partial(self._demotion.demote, missing, "low_water")
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
        self._leaving.poll()

    def evicted(self, blocks: Pages | Sequence[int]) -> int:
        """Attached devices: the engine has evicted these blocks, or is about to overwrite them.
        Returns how many had a name."""
        with self._lock:
            if not isinstance(self.device, AttachedDevice):
                raise ConfigError("evicted: an owned device evicts by itself; see `drop`")
            return self.device.evicted(numbers_of(blocks))

    def evicting(self, blocks: Pages | Sequence[int]) -> int:
        """Attached devices, with write-back: these blocks are going to be evicted. Begins to write
        to the host what they hold; report them as `evicted` when `wait_blocks` or `in_flight` says
        that no copy touches them. Returns how many pages are on their way."""
        with self._lock:
            index = self.device.index
            if index is None or not isinstance(self.device, AttachedDevice):
                return 0
            named = self.device.named(numbers_of(blocks))
            return self._demotion.evicting(named, index.keys_of(named))

    def set_blocks(self, blocks: int) -> None:
        """The engine has found out how many device blocks fit, or has changed it: the device's
        index begins empty. Plans are forgotten; the host keeps what it has.

        Raises:
            InUse: a request runs, or a copy goes on; release, and wait for it.
            ConfigError: not 1 to 40 million, or more than the engine's planes hold.
        """
        with self._lock:
            self._traffic.poll()
            self._leaving.poll()
            self._demotion.poll()
            copies = self._traffic.in_flight + self._traffic.queued
            if self._requests or self._leaving.going or copies:
                raise InUse(
                    f"set_blocks: {len(self._requests)} requests run, and {copies} copies go on "
                    "or wait; release, resume, and wait for them first"
                )
            count(blocks, "blocks", 1, MAX_PAGES)  # before anything is forgotten
            check_blocks(self.mover, blocks, self.device.block_tokens)
            self._planner.close()
            self._demotion.close()
            self.device.set_blocks(blocks)

    # ---- prefixes, whoever runs

    def keep(self, prompt: Prompt) -> Mapping[str, int]:
        """Never evict what there is of a prompt, on the host and on an owned device, until
        `unkeep`, or until its weights go. Returns the tokens kept, by tier."""
        with self._lock:
            self._open("keep")
            return keep(self, prompt, True)

    def unkeep(self, prompt: Prompt) -> Mapping[str, int]:
        """Undo `keep`."""
        with self._lock:
            return keep(self, prompt, False)

    def drop(self, prompt: Prompt, start: int = 0) -> Mapping[str, int]:
        """Evict a branch now, from its end up to token `start`, as far as nobody else uses it.
        Returns the tokens dropped, by tier."""
        with self._lock:
            return drop(self, prompt, start)

    def prefetch(self, prompt: Prompt) -> StorageTask:
        """Bring what storage has of a prompt to the host, before anybody asks. Returns its task."""
        with self._lock:
            return prefetch(self, prompt, self._storage)

    def demote(self, blocks: int) -> int:
        """Owned devices: begin to write back so many blocks, those unused for longest, and free
        them. Returns how many are on their way."""
        with self._lock:
            return self._demotion.demote(count(blocks, "blocks", -(1 << 62), 1 << 62), "demote")

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
            return self._figures.snapshot()

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
            found = self._figures.snapshot()
            self._tell()  # the node's total goes on
            self._figures.clear()
            self._told.clear()
            self._recent.clear()
            return found

    def recent_stats(self) -> ManagerStats:
        """The same of the last `config.window` requests: what they asked and found, no more."""
        with self._lock:
            return self._recent.snapshot()

    def gauges(self) -> Gauges:
        """How things stand now: room in each tier, requests, transfers. No lock of others."""
        with self._lock:
            return Gauges(
                device=self.device.room(),
                host=room_of(self.host.index),
                running=len(self._requests),
                leaving=self._leaving.going,
                transfers=self._traffic.in_flight,
                queued=self._traffic.queued,
            )

    def _tell(self) -> None:
        """Add to the node's counters what we have counted since."""
        self._tell_at = time.monotonic() + TELL
        self.state.gather()
        more = {name: n - self._told[name] for name, n in self._figures.items()}
        more = {name: n for name, n in more.items() if n > 0}
        if self._counters is not None and more:
            self._told.update(more)
            self._guard.run(partial(self._counters.add, **more), nothing)


def _owed_to(one: Request, delivery: Delivery) -> Mapping[int, int]:
    """What a request's caller has not been told of its blocks; this delivery will tell it."""
    if one.owed is None or one.owed.told:
        return NOTHING
    one.owed.delivery = delivery
    return one.owed.changed


__all__ = [
    "Extension",
    "KVCacheManager",
    "allocate",
    "begin_request",
    "drop",
    "keep",
    "make_room",
    "prefetch",
    "storage_of",
    "waited",
    "without_cache",
]
