"""HybridManager: KV and recurrent states as one prefix cache, for a scheduler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

import numpy as np

from lightcache._arguments import Pages
from lightcache._together import together
from lightcache.errors import ConfigError, LeaseLost, LightcacheError, OutOfPages, TransferFailed
from lightcache.hybrid.checkpoints import (
    Checkpoints,
    CheckpointStats,
    Copied,
    Counts,
    Path,
    StateSpace,
    Tier,
)
from lightcache.hybrid.planning import HybridMatch, HybridParts, HybridPlan, HybridPlanner
from lightcache.hybrid.saving import (
    Grid,
    HybridConfig,
    RequestSlots,
    Rest,
    Saved,
    SavePlan,
    SavePolicy,
    Stretch,
    check_features,
)
from lightcache.leases import Allocation, Lease
from lightcache.manager.limits import seconds_of
from lightcache.manager.load import LoadHandle, wait_on
from lightcache.manager.lookup import LookupBatch, LookupRequest, begin_when_read
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.request import (
    ANY,
    PrefixMatch,
    Prompt,
    Request,
    RequestOptions,
    check_hashable,
)
from lightcache.manager.stats import TierCapacity, TierGauges
from lightcache.manager.transfers import BlockTransfer, OnEnd, State
from lightcache.manager.weights import WeightsState
from lightcache.plans import TIMEOUT

if TYPE_CHECKING:
    from lightcache.storage.tasks import StorageTask

# ---- A running request

Taken = tuple[Tier, Lease]
"""A checkpoint in use: where it is, and its pin."""


@dataclass(eq=False)
class HybridRequest:
    """One request, from `take` until no copy uses its slots any more."""

    inner: Request
    """Its request in the KV manager."""
    match: HybridMatch
    states: StateSpace | None
    """None: it saves no checkpoints."""
    found: Taken | None
    """Until it is restored."""
    slots: RequestSlots | None = None
    """Its slots, from `restore` on."""
    loading: BlockTransfer | None = None
    """The load of its state from the host."""
    transfers: list[BlockTransfer] = field(default_factory=list)
    """Copies between its slots and the host, including `loading`."""
    copies: list[Copied] = field(default_factory=list)
    """Launches that write its slots."""
    ended: tuple[bool, Any] = (False, None)
    """At its end: whether no step of it is in flight, and the stream of its last one."""
    leaving: list[int] | None = None
    """After its end: slots to give back. None: not known yet."""

    counted: Counts = field(default_factory=Counts)
    """Its counts in the statistics."""

    @property
    def own_slots(self) -> RequestSlots:
        """Its slots.

        Raises:
            ConfigError: it was not restored.
        """
        if self.slots is None:
            raise ConfigError(f"the request {self.inner.id!r} has no slots; restore it first")
        return self.slots

    @property
    def busy(self) -> bool:
        """Whether a copy used its slots at the last look."""
        self.transfers = [transfer for transfer in self.transfers if not transfer.finished]
        self.copies = [copy for copy in self.copies if not copy.finished]
        return bool(self.transfers or self.copies)

    def sound(self) -> bool:
        """Whether both of its loads have finished and succeeded. Until then no other request may
        find what it computes after them. Does not block."""
        return loaded_well(self.inner, [] if self.loading is None else [self.loading])

    def let_go(self) -> None:
        """Release a checkpoint that was not restored."""
        taken, self.found = self.found, None
        if taken is not None:
            taken[1].release()


def loaded_well(inner: Request, loads: Sequence[BlockTransfer]) -> bool:
    """Whether the load of a request's KV and these others have finished and succeeded."""
    if inner.match.load > 0 and inner.loading is None:
        return False  # not loaded yet, or the manager had disabled itself
    return all(map(_went_well, loads if inner.loading is None else [*loads, inner.loading]))


def _went_well(load: BlockTransfer) -> bool:
    if not load.finished:
        with contextlib.suppress(TransferFailed):
            load.done()
    return load.state is State.DONE


# ---- Restore: a request's initial state in its working slot


@dataclass(frozen=True)
class Restored:
    """Loads and copies that `restore` launched."""

    working: Pages
    """The working slot of each, int32."""
    sources: Pages
    """Slots of checkpoints that one launch copies to `targets`."""
    targets: Pages
    """Working slots."""
    zeroed: Pages
    """Working slots without a match."""
    loads: dict[Hashable, BlockTransfer]
    """Loads of states from the host, by request."""

    def wait_on(self, stream: Any = None) -> None:
        """Let a device stream (None: the current one) wait for the loads. Copies need no wait: they
        are launched on the computing stream.

        Raises:
            TransferFailed: a load has failed already; `HybridLoadHandle.failed` tells whose.
        """
        for transfer in self.loads.values():
            wait_on(transfer, stream)


class HybridLoadHandle:
    """The loads of one request: of its KV, and of its state or windows. If one fails, the whole
    match is unusable: call `restart`."""

    def __init__(self, usable: int, kv: LoadHandle, others: Sequence[BlockTransfer]) -> None:
        """For `HybridManager.load` and `WindowManager.load`."""
        self._usable, self._kv, self._others = usable, kv, others
        self._loads: list[BlockTransfer | LoadHandle] = [kv, *others]

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed, as known now: all usable ones, or 0."""
        return 0 if self.failed else self._usable

    @property
    def failed(self) -> bool:
        """Whether one has failed."""
        lost = any(load.state in (State.FAILED, State.CANCELLED) for load in self._others)
        return lost or self._kv.tokens < self._usable

    def done(self) -> bool:
        """Whether all have finished. Does not block.

        Raises:
            TransferFailed: one failed.
        """
        finished = [load.done() for load in self._loads]
        return all(finished)

    def wait(self, timeout: float | None = None) -> None:
        """Block until all have finished.

        Raises:
            WaitTimeout: they are still in flight.
            TransferFailed: as `done`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for load in self._loads:
            load.wait(None if end is None else max(0.0, end - time.monotonic()))

    def wait_on(self, stream: Any = None) -> None:
        """Let a device stream (None: the current one) wait for all, instead of this thread.

        Raises:
            TransferFailed: one has failed already.
        """
        self._kv.wait_on(stream)
        for load in self._others:
            wait_on(load, stream)


# ---- Tail eviction: KV after the last checkpoint of a path


class TailEviction:
    """Evicts KV of ended requests after the last position from which a request could continue."""

    def __init__(self, owner: HybridManager) -> None:
        """Notes no request yet."""
        self._owner = owner
        self._waiting: list[tuple[Request, Path]] = []

    def note(self, request: HybridRequest) -> None:
        """Note a request that ends, before the KV manager releases it."""
        owner, running = self._owner, self._owner.inner.requests.get(request.inner.id)
        if not owner.config.drop_tails or request.states is None or running is None:
            return
        if running.space is not None:
            chain = running.device_chain if owner.parts.by_blocks else running.host_chain
            path = Path(owner.parts.strided(chain.keys), request.states)
            self._waiting.append((running, path))

    def poll(self) -> None:
        """Evict tails that no copy uses any more."""
        still = []
        for running, path in self._waiting:
            if self._owner.manager.has_ended(running):
                with contextlib.suppress(LightcacheError):  # then eviction takes it in its order
                    self._drop(running, path)
            else:
                still.append((running, path))
        self._waiting = still

    def _drop(self, request: Request, path: Path) -> None:
        owner, space = self._owner, request.space
        if space is None or not owner.inner.weights.is_valid(space):
            return
        last_ready = owner.checkpoints.last_ready(path)
        begin = 0 if last_ready is None else last_ready[1] * owner.parts.step
        dropped = owner.manager.drop_keys(
            space, request.host_chain.keys, request.device_chain.keys, begin
        )
        owner.checkpoints.counts.add(dropped_tokens=sum(dropped.values()))


# ---- Promotion: saved states become checkpoints, and slots of ended requests are given back


class Donor:
    """Saves and ends of requests for one `HybridManager`, which holds its lock around every
    call."""

    def __init__(self, owner: HybridManager) -> None:
        """No request saves yet."""
        self._owner = owner
        self.ending: list[HybridRequest] = []
        """Ended requests that still hold slots."""
        self._tails = TailEviction(owner)

    # ---- while a request runs

    def copy(self, pairs: list[tuple[HybridRequest, int, int]], stream: Any) -> tuple[Pages, Pages]:
        """Copy from slot to slot of each request, in one launch. Takes over checkpoints that are
        being restored. Returns the sources and targets."""
        owner, leases = self._owner, []
        sources, targets = _slots([pair[1] for pair in pairs]), _slots([pair[2] for pair in pairs])
        copying = owner.copier.copy(sources, targets, stream)
        for request, _, _ in pairs:
            taken, request.found = request.found, None
            if taken is not None:
                leases.append(taken[1])
        copied = owner.checkpoints.traffic.copied(copying, targets, leases)
        for request, _, _ in pairs:
            request.copies.append(copied)
        return sources, targets

    def zero(self, running: list[HybridRequest], stream: Any) -> Pages:
        """Set the working slots of these requests to zero. Returns them."""
        slots = _slots([request.own_slots.working for request in running])
        if running:
            copying = self._owner.copier.zero(slots, stream)
            copied = self._owner.checkpoints.traffic.copied(copying, slots, [])
            for request in running:
                request.copies.append(copied)
        return slots

    def exchange(self, request: HybridRequest, slots: RequestSlots) -> list[int]:
        """Turn saved states of the prompt into checkpoints, if a replacement slot is free for each;
        first the state to keep. Returns the positions of the new checkpoints."""
        checkpoints = self._owner.checkpoints
        waiting = [state for state in slots.confirmed if state.position <= request.match.tokens]
        if checkpoints.slots is None or not waiting or not request.sound():
            return []
        donated = []
        for state in sorted(waiting, key=lambda each: each.position != slots.keep):
            if self._path(request, state.position) is None:
                continue
            with checkpoints.lock:  # while a slot is loose
                try:
                    replacement = checkpoints.acquire(1)
                except LightcacheError:
                    break
                with replacement:
                    (slot,) = replacement.pages.tolist()
                    slots.exchange(slot, state.position, _taking_over(replacement))
                if self._give(request, state):
                    donated.append(state.position)
        return donated

    def lend(self, request: HybridRequest, slots: RequestSlots, newest: Saved) -> bool:
        """Without device slots for checkpoints: the host gets a copy, the request keeps the
        slot."""
        if not request.sound():
            return False
        slots.begin_read(newest.slot)  # before the copy begins, which reports its end
        known = len(request.transfers)
        try:
            donated = self._give(request, newest, lambda _: slots.end_read(newest.slot))
        finally:
            if len(request.transfers) == known:
                slots.end_read(newest.slot)
        if donated and newest.position == slots.keep:
            slots.keep = None
        return donated

    def _give(self, request: HybridRequest, state: Saved, on_end: OnEnd | None = None) -> bool:
        """Turn a slot into a checkpoint. The request no longer owns it."""
        owner = self._owner
        path = self._path(request, state.position)
        if path is None:
            owner.checkpoints.give_back([state.slot])
            return False
        transfer = owner.checkpoints.donate(
            state.slot,
            path,
            state.position // owner.parts.step,
            host="host" in request.inner.options.tiers,
            fork=state.position == request.match.branching,
            of=request.transfers,
            on_end=on_end,
        )
        return owner.checkpoints.slots is not None or transfer is not None

    def _path(self, request: HybridRequest, position: int) -> Path | None:
        """None: the request may not save, or its keys are unknown since its tokens were not
        reported."""
        owner, running = self._owner, self._owner.inner.requests.get(request.inner.id)
        if request.states is None or running is None or running.space is None:
            return None
        every = running.device_chain if owner.parts.by_blocks else running.host_chain
        keys = owner.parts.strided(every.keys)
        return Path(keys, request.states) if len(keys) >= position // owner.parts.step else None

    # ---- when a request ends

    def end(
        self,
        running: list[HybridRequest],
        kept: Sequence[int | None],
        at: Sequence[int | None],
        publish: bool,
    ) -> list[int]:
        """See `HybridManager.release_many`. The requests are in `ending` already: slots are given
        back also after an exception. Returns the position of the last state that each donated."""
        positions = []
        try:
            for request in running:
                request.let_go()
                if request.loading is not None and request.loading.state is State.QUEUED:
                    request.loading.cancel()
            for request, limit, position in zip(running, kept, at, strict=True):
                positions.append(self._donate_last(request, limit, position) if publish else 0)
        finally:
            self._leave(running)
            for request in running:
                self._tails.note(request)
        return positions

    def _donate_last(self, request: HybridRequest, kept: int | None, at: int | None) -> int:
        with self._owner.checkpoints.lock:  # while slots are loose
            states = self._last(request, kept, at)
            return max((each.position for each in states if self._give(request, each)), default=0)

    def _leave(self, running: list[HybridRequest]) -> None:
        """Note the remaining slots of requests whose last steps were on one stream: they go back
        once no copy uses them. May be repeated after an interrupt: `leaving` is set last."""
        rests = [(request, _rest(request)) for request in running if request.leaving is None]
        busy = [slot for _, rest in rests for slot in rest.busy]  # a launched step may write them
        mark = self._mark(_slots(busy), running[0].ended[1]) if busy else []
        for request, rest in rests:
            if rest.busy:
                request.copies += mark
            request.leaving = [*rest.free, *rest.busy]

    def _mark(self, busy: Pages, stream: Any) -> list[Copied]:
        """Note when all work launched before has been executed. Empty if the device failed: then
        it writes nothing more."""
        nothing, traffic = np.zeros(0, np.int32), self._owner.checkpoints.traffic
        try:
            mark = self._owner.copier.copy(nothing, nothing, stream)
        except Exception as error:
            traffic.moves.foreign.note(error)
            return []
        return [traffic.copied(mark, busy, [])]

    def _last(self, request: HybridRequest, kept: int | None, position: int | None) -> list[Saved]:
        """The saved states to donate: the newest, preceded by the one to keep."""
        running, slots = self._owner.inner.requests.get(request.inner.id), request.slots
        if slots is None or running is None or request.states is None or not request.sound():
            return []
        limit = running.publishable()
        if kept is not None:
            limit = min(limit, kept)
        # At the checkpoint itself nothing was computed, and its copy may still be in flight.
        fits = (
            position is not None
            and position % self._owner.parts.step == 0
            and position > request.match.checkpoint
        )
        newest = slots.donate(limit, working_at=position if fits else None)
        return [state for state in (slots.donate_kept(limit), newest) if state is not None]

    def poll(self) -> None:
        """Give back slots that no copy uses."""
        still, checkpoints = [], self._owner.checkpoints
        for request in self.ending:
            self._leave([request])
            if request.busy:
                still.append(request)
            elif request.leaving:
                checkpoints.give_back(request.leaving)
        self.ending = still
        self._tails.poll()

    @property
    def going(self) -> int:
        """Number of ended requests that still hold slots."""
        return len(self.ending)

    @property
    def slots_alone(self) -> int:
        """Of these, those whose KV has been given back already."""
        has_ended = self._owner.manager.has_ended
        return sum([has_ended(request.inner) for request in self.ending])


def _slots(numbers: list[int]) -> Pages:
    return np.array(numbers, np.int32)


def _taking_over(slots: Allocation) -> partial[None]:
    """For `together`: the slots are no longer those of the object that took them."""
    return partial(setattr, slots, "ended", True)


def _rest(request: HybridRequest) -> Rest:
    return Rest((), ()) if request.slots is None else request.slots.rest(idle=request.ended[0])


# ---- The manager


@dataclass(frozen=True)
class HybridGauges(TierGauges):
    """Current room of KV and of states; requests and transfers of both together. `device` and
    `host` are KV's. A request is leaving while a copy touches its blocks or its slots; `transfers`
    also counts launches from slot to slot that have not finished."""

    device_states: TierCapacity
    """Slots, in states; all 0 if the engine has its own."""
    host_states: TierCapacity
    """Host pages, in states."""


P = ParamSpec("P")
R = TypeVar("R")


class Joined(Protocol):
    """A manager that joins KV with other groups."""

    manager: KVCacheManager


def of_kv(
    method: Callable[Concatenate[KVCacheManager, P], R],
) -> Callable[Concatenate[Joined, P], R]:
    """A method of a manager of several groups that is the KV manager's method of that name."""

    @wraps(method)
    def call(self: Joined, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(self.manager, method.__name__)(*args, **kwargs)
        return result

    return call


class HybridManager:
    """Joins a `KVCacheManager` and `Checkpoints` for the scheduler of a hybrid model.

    A request makes the same calls as a dense one, on this object: `plan`, `take`, `allocate`,
    `restore` and `load`, `commit`, `release`. A hit is as long as both the prompt's KV and a
    checkpoint reach. Calls share the manager's lock; none waits for bytes unless documented.

    Methods with the docstring of `KVCacheManager` are its own: `commit`, `demote` and those of
    blocks. They leave checkpoints and slots as they are; see `Checkpoints.demote`,
    `Checkpoints.in_flight` and `gauges` for these. What a request commits is found by others once
    its loads have succeeded; a later commit, or its release, makes up for that.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        checkpoints: Checkpoints,
        grid: Grid,
        *,
        config: HybridConfig | None = None,
    ) -> None:
        """The caller closes both, after this object.

        Args:
            checkpoints: with a copier.
            grid: positions at which states are saved, made for the manager's blocks and pages.

        Raises:
            ConfigError: a grid of other blocks or pages, no copier, or conflicting settings, all in
                one message.
        """
        sizes = manager.device.block_tokens, manager.page_tokens
        if (grid.block_tokens, grid.page_tokens) != sizes:
            raise ConfigError(
                f"grid: expected one for blocks of {sizes[0]} tokens and pages of {sizes[1]}, "
                f"found {grid}"
            )
        if checkpoints.copier is None:
            raise ConfigError("checkpoints: expected a copier, found none; give copier=")
        self.manager, self.checkpoints, self.grid = manager, checkpoints, grid
        self.config = config or HybridConfig()
        check_features(self.config, checkpoints, grid)
        self.copier = checkpoints.copier
        step = grid.fine if self.config.tail else grid.grid
        self.parts = HybridParts(manager, checkpoints, grid, step)
        """Shared by its parts."""
        self._policy = SavePolicy(grid, self.config.saves, self.config.tail, self.config.between)
        self.inner = manager.state
        """The state shared by the parts of the KV manager."""
        self._lock = self.inner.lock
        self._planner = HybridPlanner(self.parts)
        self._donor = Donor(self)
        # A separate guard: the KV manager's calls within these succeed while states fail, and would
        # tell a shared guard that the cache works.
        self._fail_open = self.inner.new_fail_open(self._planner.let_go, "HybridManager")
        self._requests: dict[Hashable, HybridRequest] = {}

    # ---- lookup

    def plan(
        self,
        request: Hashable,
        prompt: Prompt,
        *,
        options: RequestOptions = ANY,
        limit: int | None = None,
        device_tokens: int | None = None,
    ) -> HybridMatch:
        """Find the last position that both KV and a checkpoint reach, over all tiers, and pin both
        tentatively up to it. Otherwise as `KVCacheManager.plan`: cheap when repeated."""
        with self._lock:
            return self._planned(
                self.manager.lookup.batch_of_one(request, prompt, options, limit, device_tokens)
            )[0]

    def plan_many(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        *,
        options: Sequence[RequestOptions] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[HybridMatch]:
        """`plan` for a whole queue in one call."""
        with self._lock:
            return self._planned(
                self.manager.lookup.batch(requests, prompts, options, limits, device_tokens)
            )

    def _planned(self, batch: LookupBatch) -> list[HybridMatch]:
        return self._fail_open.run(
            lambda: self._planner.plan(batch),
            lambda: [
                self._missed(request, LookupRequest._make(asks)) for request, asks in batch.entries
            ],
        )

    def peek_many(
        self,
        prompts: Sequence[Prompt],
        *,
        options: Sequence[RequestOptions] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[HybridMatch]:
        """What `plan_many` would find on the device and the host now, KV and checkpoint both.
        Nothing is pinned, counted as used, or asked of storage, so a later plan may find less.
        Arguments and errors as `KVCacheManager.peek_many`."""
        with self._lock:
            every = self.manager.peek_many(
                prompts, options=options, limits=limits, device_tokens=device_tokens
            )
            options = [ANY] * len(prompts) if options is None else options
            return self._fail_open.run(
                lambda: self._planner.peek(every, prompts, options, device_tokens),
                lambda: [HybridMatch(PrefixMatch(len(prompt))) for prompt in prompts],
            )

    def _missed(self, request: Hashable, lookup: LookupRequest) -> HybridMatch:
        """An empty match: the request runs without the cache."""
        self._planner.forget(request)
        with contextlib.suppress(LightcacheError):  # else its plan expires
            self.checkpoints.cancel(request)
        return HybridMatch(
            self.manager.plan(request, lookup.prompt, options=lookup.options, limit=0)
        )

    def cancel(self, request: Hashable) -> None:
        """Drop a plan. Harmless if there is none."""
        with self._lock:
            self._planner.cancel(request)

    @overload
    def take(self, request: Hashable, *, wait: Literal[True]) -> HybridMatch: ...

    @overload
    def take(self, request: Hashable, *, wait: bool = False) -> HybridMatch | None: ...

    def take(self, request: Hashable, *, wait: bool = False) -> HybridMatch | None:
        """Begin a request, which takes over its plan. Returns None, as `KVCacheManager.take` does,
        while its KV or checkpoint is being read from storage: call again in the next step.

        Args:
            wait: block until reading has finished or timed out.

        Raises:
            LeaseLost: not planned, or cancelled; plan it first.
            ConfigError: the request is running already.
        """
        return begin_when_read(
            self._lock,
            partial(self.manager.check_take, request),
            partial(self._planner.reading, request),
            partial(self._begin, request),
            self._fail_open,
            wait,
        )

    def _begin(self, request: Hashable) -> HybridMatch:
        """Begin a request with the pages present now. If its plan expired and its pins were
        released, look for them once more."""
        plan = self._planner.taken(request)
        try:
            match = self._taken(request, plan)
        except LeaseLost:
            if plan is None:
                raise
            options = plan.asked.options
            longer = replace(options, ttl=max(options.ttl or 0.0, TIMEOUT))
            lookup = plan.asked.prompt, longer, plan.asked.limit
            tokens = None if plan.given is None else (plan.given,)
            self._planned(LookupBatch(((request, lookup),), tokens))
            match = self._taken(request, self._planner.taken(request))
        self._requests[request] = match
        return match.match

    def _taken(self, request: Hashable, plan: HybridPlan | None) -> HybridRequest:
        """Take the checkpoint first: without it no KV is taken."""
        manager, checkpoint = self.manager, None
        position = 0 if plan is None else self._planner.position(plan)
        try:
            if position:
                checkpoint = self._fail_open.run(
                    lambda: self.checkpoints.take(request), lambda: None
                )
            if checkpoint is None and plan is not None and position:  # cleared meanwhile
                manager.plan(request, plan.asked.prompt, options=plan.asked.options, limit=0)
            kv = self.manager.begin(request)
            if kv.usable and (checkpoint is None or kv.usable != position):
                kv = self._take_nothing(request)
            if checkpoint is not None and not kv.usable:
                checkpoint[1].release()
                checkpoint = None
        except BaseException:
            if checkpoint is not None:
                checkpoint[1].release()
            self._planner.cancel(request)
            raise
        return self._made(request, plan, kv, checkpoint)

    def _take_nothing(self, request: Hashable) -> PrefixMatch:
        """A taken request restarts from its first token."""
        inner = self.manager.untake(request)
        self.manager.plan(request, inner.prompt, options=inner.options, limit=0)
        return self.manager.begin(request)

    def _made(
        self, request: Hashable, plan: HybridPlan | None, kv: PrefixMatch, checkpoint: Taken | None
    ) -> HybridRequest:
        tier = None if checkpoint is None else checkpoint[0]
        deep = kv.usable if plan is None else max(plan.kv.usable, kv.usable)
        if plan is not None:
            kv = plan.stored.attributed(kv, self.manager.page_tokens)
        match = HybridMatch(kv, deep, kv.usable, tier, self.grid.branching(deep, kv.usable))
        inner = self.inner.requests.get(request)
        assert inner is not None
        states = None
        if inner.space is not None and inner.options.write and "device" in inner.options.tiers:
            states = self.parts.states_of(inner.space)
        running = HybridRequest(inner, match, states, checkpoint)
        inner.sound = running.sound
        running.counted = Counts(
            requests=1, usable_tokens=match.usable, unusable_tokens=match.unusable
        )
        if tier is not None:
            running.counted[f"{tier.value}_hits"] = 1
        if plan is not None and match.usable:
            from_storage = plan.stored.brought * self.parts.step == match.usable
            running.counted["storage_hits"] = int(from_storage and tier is Tier.HOST)
        self.checkpoints.counts.update(running.counted)
        return running

    # ---- running

    allocate = of_kv(KVCacheManager.allocate)
    can_allocate = of_kv(KVCacheManager.can_allocate)
    commit = of_kv(KVCacheManager.commit)
    commit_many = of_kv(KVCacheManager.commit_many)
    wait_blocks = of_kv(KVCacheManager.wait_blocks)
    evicted = of_kv(KVCacheManager.evicted)
    evicting = of_kv(KVCacheManager.evicting)
    demote = of_kv(KVCacheManager.demote)

    def restore(
        self,
        requests: Sequence[Hashable],
        slots: Sequence[Sequence[int]] | None = None,
        stream: Any = None,
    ) -> Restored:
        """Give taken requests their slots, and begin to fill each working slot with the initial
        state: copied from a device checkpoint, loaded from the host, or zero. One launch makes all
        copies. A checkpoint stays pinned until its copy has been executed. Does not block.

        Args:
            slots: the engine's, if checkpoints have no device slots: for each request a working
                slot, and `RequestSlots.needed` slots to save in, or none of these. Steps that use
                them may be in flight on the current stream only.
            stream: the computing stream, for copies and zeros; None: the current one. Loads from
                the host always wait for the current stream: no step uses a free slot of the cache.

        Raises:
            OutOfPages: fewer working slots than requests. Nothing changed; release a request.
            ConfigError: invalid slots, or a request that was restored before.
            LeaseLost: no such request.
        """
        with self._lock:
            running = [self._request(name) for name in requests]
            for request in running:
                if request.slots is not None:
                    raise ConfigError(
                        f"restore: {request.inner.id!r} has its slots already; restart or release "
                        "it if its restore was interrupted"
                    )
            if slots is not None:
                self._give_slots(running, slots)
            elif running:
                with self._acquired(len(running)) as acquired:
                    numbers = acquired.pages.reshape(len(running), -1).tolist()
                    self._give_slots(running, numbers, _taking_over(acquired))
            return self._launch(running, stream)

    def _give_slots(
        self,
        running: list[HybridRequest],
        numbers_of: Sequence[Sequence[int]],
        *calls: partial[Any],
    ) -> None:
        """Give all requests their slots, and make these calls, in one instruction."""
        loose = self.checkpoints.loose if self.checkpoints.slots is not None else None
        slots_of = [
            RequestSlots(
                numbers[0],
                numbers[1:],
                ahead=self.config.ahead,
                keep=request.match.branching,
                loose=loose,
            )
            for request, numbers in zip(running, numbers_of, strict=True)
        ]
        each = zip(running, slots_of, strict=True)
        together(*(partial(setattr, request, "slots", slots) for request, slots in each), *calls)

    def _acquired(self, requests: int) -> Allocation:
        """Slots for each request: only a working slot if there are too few."""
        needed = RequestSlots.needed(self.config.ahead) if self.config.alternating else 0
        try:
            return self.checkpoints.acquire(requests * (1 + needed))
        except OutOfPages:
            return self.checkpoints.acquire(requests)

    def _launch(self, running: list[HybridRequest], stream: Any) -> Restored:
        slots_of = [request.own_slots for request in running]
        traffic, loads = self.checkpoints.traffic, {}
        pairs: list[tuple[HybridRequest, int, int]] = []
        empty: list[HybridRequest] = []
        for request, slots in zip(running, slots_of, strict=True):
            if request.found is None:
                empty.append(request)
            elif request.found[0] is Tier.DEVICE:
                pairs.append((request, int(request.found[1].pages[0]), slots.working))
            else:
                (_, lease), request.found = request.found, None
                request.loading = loads[request.inner.id] = traffic.load(
                    lease, slots.working, request.transfers
                )
        working = _slots([slots.working for slots in slots_of])
        zeroed = self._donor.zero(empty, stream)
        sources = targets = _slots([])
        if pairs:
            sources, targets = self._donor.copy(pairs, stream)
            self.checkpoints.counts.add(copies=len(pairs))
        return Restored(working, sources, targets, zeroed, loads)

    def load(self, request: Hashable, table: Pages | None = None) -> HybridLoadHandle:
        """Load KV found on the host to the device; see `KVCacheManager.load`. The result covers the
        state's load as well, so call `restore` first.

        Raises:
            ConfigError: it was not restored.
        """
        with self._lock:
            running = self._request(request)
            if running.slots is None:
                raise ConfigError(
                    f"load {request!r}: restore it first, or `skip_load` what it found"
                )
            states = [] if running.loading is None else [running.loading]
            kv = self.manager.load(request, table)
            return HybridLoadHandle(running.match.usable, kv, states)

    def skip_load(self, request: Hashable) -> HybridMatch:
        """Call instead of `restore` and `load` if there is no room for the KV to load: takes the
        last checkpoint within the KV on the device instead. Returns the new match.

        Raises:
            ConfigError: the request was restored already.
        """
        with self._lock:
            running = self._request(request)
            if running.slots is not None:
                raise ConfigError(f"skip_load {request!r}: it was restored already; restart it")
            if not running.match.kv.load:
                return running.match
            self._begin_anew(running, running.match.device_tokens)
            return self._request(request).match

    def restart(self, request: Hashable, stream: Any = None) -> HybridMatch:
        """Restart a request after a failed load: from its first token, in the same slots, with
        empty tables; `allocate` again.

        Raises:
            ConfigError: it was not restored, or its state's load is in flight; wait for it.
        """
        with self._lock:
            running = self._request(request)
            if running.slots is None or (
                running.loading is not None and not running.loading.finished
            ):
                raise ConfigError(f"restart {request!r}: restore it, and wait for its loads first")
            slots = running.slots
            self._begin_anew(running, 0)
            restarted = self._request(request)
            restarted.copies, restarted.transfers = running.copies, running.transfers
            together(
                partial(self._donor.ending.remove, running),
                partial(setattr, restarted, "slots", slots),
            )
            slots.reject(0)
            slots.keep = restarted.match.branching
            self._donor.zero([restarted], stream)
            return restarted.match

    def _begin_anew(self, running: HybridRequest, limit: int) -> None:
        """Plan and take again, with at most `limit` tokens. Until the caller takes them, its slots
        are those of a request that has ended."""
        inner = running.inner
        together(partial(self._donor.ending.append, running), partial(self._requests.pop, inner.id))
        running.let_go()
        self.checkpoints.counts.subtract(running.counted)
        self.manager.untake(inner.id)
        self.plan(inner.id, inner.prompt, options=inner.options, limit=limit)
        self._begin(inner.id)

    # ---- saving

    def save_plan(self, request: Hashable, begin: int, end: int) -> SavePlan:
        """The state that a forward pass over tokens [begin, end) of the prompt saves, and the
        position at which the pass must end for that.

        Raises:
            ConfigError: tokens outside of the prompt.
            LeaseLost: no such request.
        """
        with self._lock:
            running = self._request(request)
            stretch = Stretch(
                begin,
                end,
                running.match.tokens,
                running.match.checkpoint,
                running.match.branching,
            )
            if running.states is None:
                return SavePlan(begin, end, None)
            return self._policy.plan(stretch)

    def saving(self, request: Hashable, position: int) -> int | None:
        """The slot to which the pass being launched writes the state after `position` tokens: for
        states inside a pass, and for engines that write two states in a pass. None: save nothing.

        Raises:
            ConfigError: not a position at which checkpoints are looked up, or not after those saved
                before.
        """
        with self._lock:
            slots = self._saving(request, position)
            return None if slots is None else slots.begin_save(position)

    def next_slot(self, request: Hashable, position: int) -> int | None:
        """As `saving`, without a copy, for kernels that read one slot and write another: the
        working slot keeps the state after `position` tokens. The step being launched begins at that
        position or crosses it, and writes the returned slot, which is the working slot from now on;
        call `saved` with the results of this step. None: save nothing, continue in the same slot.

        Raises:
            ConfigError: as `saving`.
        """
        with self._lock:
            slots = self._saving(request, position)
            return None if slots is None else slots.next_slot(position)

    def _saving(self, request: Hashable, position: int) -> RequestSlots | None:
        """The slots of a request that saves at this position. None: it saves nothing."""
        running = self._request(request)
        slots = running.own_slots
        if position < 1 or position % self.parts.step:
            raise ConfigError(
                f"saving {request!r}: expected a position that is a multiple of "
                f"{self.parts.step}, found {position}; use that of `save_plan`"
            )
        if running.states is None:
            return None
        # states that found no replacement slot, or waited for a load
        self._donor.exchange(running, slots)
        return slots

    def save(
        self, requests: Sequence[Hashable], positions: Sequence[int], stream: Any = None
    ) -> list[bool]:
        """Copy each request's working slot to its save slot, in one launch after the forward pass
        that ends at these positions. Returns which are saved. Call `saved` when the results have
        arrived."""
        with self._lock:
            running = [self._request(name) for name in requests]
            slots = [self.saving(*each) for each in zip(requests, positions, strict=True)]
            pairs = [
                (request, request.own_slots.working, slot)
                for request, slot in zip(running, slots, strict=True)
                if slot is not None
            ]
            if pairs:
                self._donor.copy(pairs, stream)
            return [slot is not None for slot in slots]

    def saved(self, request: Hashable, position: int) -> bool:
        """Confirm a save: the results of its pass have arrived. A state of the prompt becomes a
        checkpoint now if a replacement slot is free and the request's loads have succeeded;
        while a load is in flight it waits for the end, and after a failed load it never becomes
        one. A state of generated tokens becomes a checkpoint when the request ends. Returns whether
        it is one now.

        Raises:
            ConfigError: not the oldest save in flight.
        """
        with self._lock:
            running = self._request(request)
            slots = running.own_slots
            slots.confirm(position)
            newest = slots.newest
            if newest is None or newest.position != position or position > running.match.tokens:
                return False  # rejected, or from decoding, whose last state is donated at the end
            if self.checkpoints.slots is None:
                return self._donor.lend(running, slots, newest)
            return position in self._donor.exchange(running, slots)

    def reject(self, request: Hashable, accepted: int) -> Saved | None:
        """Speculation failed and only the first `accepted` tokens count: see
        `RequestSlots.reject`."""
        with self._lock:
            slots = self._request(request).slots
            return None if slots is None else slots.reject(accepted)

    # ---- the end

    def release(
        self,
        request: Hashable,
        *,
        at: int | None = None,
        kept: int | None = None,
        publish: bool = True,
        stream: Any = None,
    ) -> int:
        """End or preempt a request: its newest saved state becomes a checkpoint, and so does the
        state of the branching point if it is not one yet; its slots go back when no copy uses them.
        Harmless if there is no such request.

        Args:
            at: position of the working slot's state, if no step of the request is in flight: it can
                be donated like a saved state. None: a step may still write its slots.
            kept: maximum tokens to keep; None: all committed ones.
            publish: False: abort; make no checkpoint.
            stream: of its last step; None: the current one.

        Returns:
            Position of the last state donated now; 0: none.
        """
        return self.release_many([request], at=[at], kept=[kept], publish=publish, stream=stream)[0]

    def release_many(
        self,
        requests: Sequence[Hashable],
        *,
        at: Sequence[int | None] | None = None,
        kept: Sequence[int | None] | None = None,
        publish: bool = True,
        stream: Any = None,
    ) -> list[int]:
        """`release` for several different requests, which ran on one stream; one mark on it waits
        for the steps of all. Does not block.

        Args:
            at, kept: as for `release`, for each request; None: None for all.

        Returns:
            For each request, the position of the last state donated now; 0: none.

        Raises:
            ConfigError: lists of different lengths, a request that is named twice, or an id that
                is not hashable. Nothing changed.
        """
        n = len(requests)
        if check_hashable(requests, "release") != n:
            raise ConfigError("release: one of the requests is named twice; name each once")
        at, kept = [None] * n if at is None else at, [None] * n if kept is None else kept
        for name, values in (("at", at), ("kept", kept)):
            if len(values) != n:
                raise ConfigError(
                    f"{name}: expected one for each of {n} requests, found {len(values)}"
                )
        with self._lock:
            for request in requests:
                self._planner.cancel(request)
            rows = [row for row, request in enumerate(requests) if request in self._requests]
            running, positions = [self._requests[requests[row]] for row in rows], [0] * n
            for row, each in zip(rows, running, strict=True):
                each.ended = at[row] is not None, stream
            together(
                partial(self._donor.ending.extend, running),
                *(partial(self._requests.pop, requests[row]) for row in rows),
            )
            try:
                ended = self._donor.end(
                    running, [kept[i] for i in rows], [at[i] for i in rows], publish
                )
                for row, position in zip(rows, ended, strict=True):
                    positions[row] = position
            finally:
                try:
                    self.manager.release_many(requests, publish=publish)
                finally:
                    self._donor.poll()
            return positions

    def poll(self) -> int:
        """Call in each step: `KVCacheManager.poll` for KV and states. Returns the number of copies
        in flight."""
        with self._lock:
            try:
                going = self.manager.poll()
            finally:  # an error of one transfer backend does not stop the other
                try:
                    states = self.checkpoints.poll()
                finally:
                    self._donor.poll()
            return going + states

    # ---- blocks of the device

    def in_flight(self, blocks: Pages | Sequence[int] | None = None) -> Any:
        """Which of these device blocks a copy reads or writes, as `KVCacheManager.in_flight`; for
        slots see `Checkpoints.in_flight`. None: the number of transfers of KV and states, as
        `poll`."""
        with self._lock:
            found = self.manager.in_flight(blocks)
            return found if blocks is not None else found + self.checkpoints.in_flight()

    @property
    def leaving(self) -> int:
        """Number of ended requests whose slots a copy still uses."""
        return self._donor.going

    def close(self, timeout: float | None = 10.0) -> None:
        """End running requests, wait for copies of states.

        Raises:
            WaitTimeout: a copy is still in flight; call again.
            As `poll`, when all of this is done.
        """
        with self._lock:
            self._planner.close()
            self.release_many(list(self._requests), publish=False)
        try:
            self.checkpoints.close(timeout)
        finally:  # slots with finished copies go back, whatever the others do
            self.poll()

    # ---- prefixes, independent of running requests

    def protect(self, prompt: Prompt) -> Mapping[str, int]:
        """As `KVCacheManager.protect`, and the last checkpoint within that KV, in each tier.
        Returns the tokens of KV protected, by tier, and under "checkpoints" their number.

        Raises:
            Detached: the manager is closed.
            LockTimeout: as `PageIndex.protect`; a part may be protected.
        """
        with self._lock:
            tokens = self.manager.protect(prompt)
            path = self.parts.path_of(prompt, max(tokens.values()))
            return {**tokens, "checkpoints": 0 if path is None else self.checkpoints.protect(path)}

    def unprotect(self, prompt: Prompt) -> Mapping[str, int]:
        """Undo `protect`. Returns what was protected, as `protect` does.

        Raises:
            Detached, LockTimeout: as `protect`.
        """
        with self._lock:
            tokens = self.manager.unprotect(prompt)
            path = self.parts.path_of(prompt, len(prompt))
            count = 0 if path is None else self.checkpoints.unprotect(path)
            return {**tokens, "checkpoints": count}

    def drop(self, prompt: Prompt, start: int = 0) -> Mapping[str, int]:
        """As `KVCacheManager.drop`, and all checkpoints after token `start` that are not in use.
        Returns the tokens of KV dropped, by tier, and the number of "checkpoints".

        Raises:
            ConfigError, Detached, LockTimeout: as `KVCacheManager.drop`.
        """
        with self._lock:
            tokens = self.manager.drop(prompt, start)
            path = self.parts.path_of(prompt, len(prompt))
            count = 0 if path is None else self.checkpoints.drop(path, start // self.parts.step)
            return {**tokens, "checkpoints": count}

    def prefetch(self, prompt: Prompt) -> list[StorageTask]:
        """Begin to read a prompt's KV and its last stored checkpoint from storage to the host,
        before a request needs them. Returns the tasks: one for each that has a storage. Does not
        block.

        Raises:
            ConfigError: neither KV nor the checkpoints have a storage.
            Abandoned, Detached: as `KVCacheManager.prefetch`.
        """
        with self._lock:
            storage, tasks = self.checkpoints.storage, []
            if self.inner.storage is not None or storage is None:
                tasks.append(self.manager.prefetch(prompt))
            path = self.parts.path_of(prompt, LookupRequest(prompt).most)
            if storage is not None and path is not None:
                space, groups = path.space.host, self.checkpoints.groups
                tasks.append(storage.prefetch_last_ready(path.keys, groups=groups, namespace=space))
            return tasks

    def set_blocks(self, blocks: int) -> None:
        """See `KVCacheManager.set_blocks`: plans are forgotten, with their checkpoints. Slots
        stay."""
        with self._lock:
            self.manager.set_blocks(blocks)
            self._planner.close()

    # ---- for the parts

    def _request(self, request: Hashable) -> HybridRequest:
        running = self._requests.get(request)
        if running is None:
            raise LeaseLost(f"there is no running request {request!r}; plan and take it first")
        return running

    # ---- transfers and weights

    def pause(self, timeout: float | None = None) -> None:
        """Hold back new transfers of KV or states until `resume`. Waits for transfers in flight.

        Raises:
            WaitTimeout: some are still in flight; all is paused.
            ConfigError: no number of seconds; nothing is paused.
        """
        timeout = seconds_of(timeout)
        with self._lock:
            self.checkpoints.traffic.moves.paused = True
        self.manager.pause(timeout)
        self.checkpoints.pause(timeout)

    def resume(self) -> None:
        """Let transfers begin again."""
        self.manager.resume()
        self.checkpoints.resume()

    @property
    def weights_state(self) -> WeightsState:
        """See `KVCacheManager.weights_state`; states go with KV."""
        return self.manager.weights_state

    def begin_update(self, timeout: float | None = None, *, wait: bool = True) -> None:
        """As `KVCacheManager.begin_update`, for KV and states."""
        with self._lock:
            version = self.inner.weights.version
            self.manager.begin_update(wait=False)
            self.checkpoints.clear(version, everywhere=self.inner.weights.ours)
        if wait:
            self.inner.transfers.wait(None, timeout)
            self.checkpoints.traffic.moves.wait(None, timeout)

    def finish_update(self, version: str) -> None:
        """As `KVCacheManager.finish_update`."""
        with self._lock:
            self.checkpoints.clear(self.inner.weights.version, everywhere=False)
            self.manager.finish_update(version)

    def clear_tenant(self, tenant: str) -> bool:
        """As `KVCacheManager.clear_tenant`, for KV and states."""
        with self._lock:
            weights = self.inner.weights.version
            cleared = self.manager.clear_tenant(tenant)
            if cleared:
                self.checkpoints.clear(weights, tenant)
            return cleared

    @property
    def disabled(self) -> bool:
        """Whether the cache of KV, or both caches, are disabled after too many errors: then nothing
        is usable."""
        return self._fail_open.disabled or self.manager.disabled

    def enable(self) -> None:
        """Enable both again. `KVCacheManager.enable` alone does not."""
        self.manager.enable()
        self._fail_open.enable()

    def stats(self) -> CheckpointStats:
        """This process's figures of checkpoints; `KVCacheManager` has those of KV."""
        return self.checkpoints.stats()

    def gauges(self) -> HybridGauges:
        """Current room in each tier, requests and transfers, of KV and states. Does not block.

        Raises:
            Detached: a cache of KV or states is closed.
        """
        with self._lock, self.checkpoints.lock:
            kv, states = self.manager.gauges(), self.checkpoints.room()
            traffic = self.checkpoints.traffic
            return HybridGauges(
                device=kv.device,
                host=kv.host,
                running=kv.running,
                leaving=kv.leaving + self._donor.slots_alone,
                transfers=kv.transfers + traffic.in_flight,
                queued=kv.queued + traffic.moves.queued,
                offloads=kv.offloads,
                device_states=states["device"],
                host_states=states["host"],
            )


__all__ = [
    "Donor",
    "HybridGauges",
    "HybridLoadHandle",
    "HybridManager",
    "HybridRequest",
    "Restored",
    "TailEviction",
    "Taken",
]
