"""HybridManager: KV and recurrent states as one prefix cache, for a scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lightcache._arguments import Pages
from lightcache.errors import ConfigError, LeaseLost, LightcacheError
from lightcache.hybrid.checkpoints import Checkpoints
from lightcache.hybrid.config import HybridConfig
from lightcache.hybrid.donating import Donor
from lightcache.hybrid.features import check_features
from lightcache.hybrid.grids import Grid
from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.planned import HybridPlan
from lightcache.hybrid.planning import HybridPlanner
from lightcache.hybrid.requests import HybridRequest, Taken
from lightcache.hybrid.restoring import HybridFetch, Restored, restore, zero
from lightcache.hybrid.saving import SavePlan, SavePolicy, Stretch
from lightcache.hybrid.slots import Saved
from lightcache.hybrid.spaces import Tier
from lightcache.hybrid.statistics import Counts
from lightcache.hybrid.upkeep import HybridUpkeep
from lightcache.manager.asking import Asked
from lightcache.manager.checks import asked_many, asked_of
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.matches import ANY, PrefixMatch, Wishes
from lightcache.manager.prompts import Prompt


class HybridManager(HybridUpkeep):
    """A `KVCacheManager` and `Checkpoints`, joined: what the scheduler of a hybrid model holds.

    A request's way is that of a dense one, through this object: `plan`, `take`, `allocate`,
    `restore` and `fetch`, `commit`, `release`. A prompt hits as deep as both its KV and a
    checkpoint go. Calls share the manager's lock; none waits for bytes unless it says so.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        checkpoints: Checkpoints,
        grid: Grid,
        *,
        config: HybridConfig | None = None,
    ) -> None:
        """Both stay the caller's to close, behind this.

        Args:
            checkpoints: with a copier.
            grid: positions at which states are saved; for the manager's blocks and pages.

        Raises:
            ConfigError: a grid of other blocks or pages, no copier, or, if the config says how many
                requests run, settings that do not go together, all of them in one message.
        """
        found = manager.device.block_tokens, manager.page_tokens
        if (grid.block_tokens, grid.page_tokens) != found:
            raise ConfigError(
                f"grid: expected one for blocks of {found[0]} tokens and pages of {found[1]}, "
                f"found {grid}"
            )
        if checkpoints.copier is None:
            raise ConfigError("checkpoints: requests are restored by a copier; give copier=")
        self.manager, self.checkpoints, self.grid = manager, checkpoints, grid
        self.config = config or HybridConfig()
        check_features(self.config, checkpoints, grid)
        self.copier = checkpoints.copier
        self.step = grid.fine if self.config.tail else grid.grid
        """Checkpoints are looked for at its multiples."""
        self.by_blocks = grid.block_tokens <= grid.page_tokens
        """Whether keys are those of device blocks, not of host pages."""
        self._policy = SavePolicy(grid, self.config.saves, self.config.tail, self.config.between)
        self.inner = manager.extension
        self._lock = self.inner.lock
        self._planner = HybridPlanner(self)
        self._donor = Donor(self)
        # Of our own: calls of the manager within ours go well while states fail, and would prove to
        # a guard of both that the cache is well.
        self._guard = self.inner.guard(self._planner.let_go, "HybridManager")
        self._requests: dict[Hashable, HybridRequest] = {}

    # ---- finding

    def plan(
        self,
        request: Hashable,
        prompt: Prompt,
        *,
        wishes: Wishes = ANY,
        limit: int | None = None,
        device_tokens: int | None = None,
    ) -> HybridMatch:
        """The deepest position that both KV and a checkpoint reach, over all tiers, and both pinned
        tentatively that far. As `KVCacheManager.plan` otherwise: cheap when repeated."""
        with self._lock:
            self.inner.may_plan(device_tokens)
            asked = asked_of(request, prompt, wishes, limit, device_tokens)
            return self._guard.run(
                lambda: self._planner.plan_one(request, asked, device_tokens),
                lambda: self._missed(request, asked),
            )

    def plan_many(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        *,
        wishes: Sequence[Wishes] | None = None,
        limits: Sequence[int | None] | None = None,
        device_tokens: Sequence[int] | None = None,
    ) -> list[HybridMatch]:
        """`plan` for a whole queue in one call."""
        with self._lock:
            self.inner.may_plan(device_tokens)
            many = asked_many(requests, prompts, wishes, limits, device_tokens)
            return self._guard.run(
                lambda: self._planner.plan(many),
                lambda: list(map(self._missed, requests, map(Asked, prompts, many.wishes))),
            )

    def _missed(self, request: Hashable, asked: Asked) -> HybridMatch:
        """Nothing is found: it runs without the cache."""
        self._planner.forget(request)
        with contextlib.suppress(LightcacheError):  # else its plan ends by itself
            self.checkpoints.cancel(request)
        return HybridMatch(self.manager.plan(request, asked.prompt, wishes=asked.wishes, limit=0))

    def cancel(self, request: Hashable) -> None:
        """Nothing is wanted of a plan any more. Harmless if there is none."""
        with self._lock:
            self._planner.cancel(request)

    def take(self, request: Hashable) -> HybridMatch:
        """Begin a request: what was planned is its own from now on. If storage is being read for
        it, waits as the tiers' `read_policy` says.

        Raises:
            LeaseLost: it was not planned, or its plan's time is over; plan it again.
            ConfigError: it runs already.
        """
        self._await_storage(request)
        with self._lock:
            if request in self._requests:
                raise ConfigError(f"take: the request {request!r} runs already; release it first")
            plan = self._planner.forget(request)
            made = self._taken(request, plan)
            self._requests[request] = made
            return made.match

    def _await_storage(self, request: Hashable) -> None:
        """What storage is being read for is waited for as its tier says; others go on meanwhile."""
        for _ in range(2):  # the state; then the KV up to it
            tasks = self._planner.readings(request)
            for task in tasks:
                with contextlib.suppress(LightcacheError):  # what has come is there, and counts
                    task.take()
            if tasks:
                with self._lock:
                    self._guard.run(partial(self._planner.again, request), lambda: None)
        reading = self.inner.reading(request)
        if reading is not None:
            with contextlib.suppress(LightcacheError):
                reading.take()

    def _taken(self, request: Hashable, plan: HybridPlan | None) -> HybridRequest:
        """The checkpoint first: without it no KV is taken."""
        manager, found = self.manager, None
        position = 0 if plan is None else self._planner.position(plan)
        try:
            if position:
                found = self._guard.run(lambda: self.checkpoints.take(request), lambda: None)
            if found is None and plan is not None and position:  # it was cleared meanwhile
                manager.plan(request, plan.asked.prompt, wishes=plan.asked.wishes, limit=0)
            kv = manager.take(request)
            if kv.usable and (found is None or kv.usable != position):
                kv = self._take_nothing(request)
            if found is not None and not kv.usable:
                found[1].release()
                found = None
        except BaseException:
            if found is not None:
                found[1].release()
            self._planner.cancel(request)
            raise
        return self._made(request, plan, kv, found)

    def _take_nothing(self, request: Hashable) -> PrefixMatch:
        """A request that was taken begins anew, from its first token."""
        one = self.inner.untake(request)
        self.manager.plan(request, one.prompt, wishes=one.wishes, limit=0)
        return self.manager.take(request)

    def _made(
        self, request: Hashable, plan: HybridPlan | None, kv: PrefixMatch, found: Taken | None
    ) -> HybridRequest:
        tier = None if found is None else found[0]
        deep = kv.usable if plan is None else max(plan.kv.usable, kv.usable)
        if plan is not None:
            kv = plan.stored.attributed(kv, self.manager.page_tokens)
        match = HybridMatch(kv, deep, kv.usable, tier, self.grid.branching(deep, kv.usable))
        one = self.inner.running(request)
        assert one is not None
        states = None
        if one.space is not None and one.wishes.write and "device" in one.wishes.tiers:
            states = self.states_of(one.space)
        made = HybridRequest(request, one.prompt, one.wishes, match, states, found, one)
        one.sound = made.sound
        made.counted = Counts(
            requests=1, usable_tokens=match.usable, unusable_tokens=match.unusable
        )
        if tier is not None:
            made.counted[f"{tier.value}_hits"] = 1
        if plan is not None and match.usable:
            from_storage = plan.stored.brought * self.step == match.usable
            made.counted["storage_hits"] = int(from_storage and tier is Tier.HOST)
        self.checkpoints.counts.update(made.counted)
        return made

    # ---- running

    def allocate(self, request: Hashable, tokens: int) -> Pages:
        """See `KVCacheManager.allocate`."""
        return self.manager.allocate(request, tokens)

    def restore(
        self,
        requests: Sequence[Hashable],
        slots: Sequence[Sequence[int]] | None = None,
        stream: Any = None,
    ) -> Restored:
        """Give requests that were taken their slots, and begin to bring the state that each begins
        with to its working slot: copied from a checkpoint of the device, loaded from the host, or
        zero. One launch for all copies. A checkpoint stays pinned until the copy from it has been
        executed. Returns at once.

        Args:
            slots: of the engine, where checkpoints have none on the device: for each request the
                working one, and `RequestSlots.needed` to save in, or none. No step that uses them
                may be in flight on any but the current stream.
            stream: that computes, for copies and zeros; None: the current one. Loads from the host
                begin behind the current one, whatever this is: no step uses a free slot of ours.

        Raises:
            OutOfPages: not even a working slot for each. Nothing changed; release somebody.
            ConfigError: slots that are none, or a request that was restored before.
            LeaseLost: no such request.
        """
        with self._lock:
            return restore(self, [self._request(each) for each in requests], slots, stream)

    def fetch(self, request: Hashable, table: Pages | None = None) -> HybridFetch:
        """Bring KV that was found on the host to the device; see `KVCacheManager.fetch`. Its result
        tells of the state's load, too, so `restore` first.

        Raises:
            ConfigError: it was not restored.
        """
        with self._lock:
            one = self._request(request)
            if one.slots is None:
                raise ConfigError(f"fetch {request!r}: restore it first, or forgo what it found")
            return HybridFetch(one, self.manager.fetch(request, table))

    def forgo(self, request: Hashable) -> HybridMatch:
        """Instead of `restore` and `fetch`, when there is no room for the KV that would be loaded:
        the deepest checkpoint within the device's part is taken instead. What is usable now.

        Raises:
            ConfigError: it was restored already.
        """
        with self._lock:
            one = self._request(request)
            if one.slots is not None:
                raise ConfigError(f"forgo {request!r}: it was restored already; restart it")
            if not one.match.kv.load:
                return one.match
            self._begin_anew(one, one.match.device_tokens)
            return self._request(request).match

    def restart(self, request: Hashable, stream: Any = None) -> HybridMatch:
        """A load failed: the request begins anew from its first token, in the same slots, with
        empty tables; `allocate` again.

        Raises:
            ConfigError: it was not restored, or its state's load goes on; wait for it.
        """
        with self._lock:
            one = self._request(request)
            if one.slots is None or (one.loading is not None and not one.loading.over):
                raise ConfigError(f"restart {request!r}: restore it, and wait for its loads first")
            slots = one.slots
            self._begin_anew(one, 0)
            made = self._request(request)
            made.slots, made.copies, made.movements = slots, one.copies, one.movements
            slots.reject(0)
            slots.keep = made.match.branching
            zero([made], np.array([slots.working], np.int32), self, stream)
            return made.match

    def _begin_anew(self, one: HybridRequest, limit: int) -> None:
        """Plan and take again, no deeper than that."""
        del self._requests[one.id]
        one.let_go()
        self.checkpoints.counts.subtract(one.counted)
        self.inner.untake(one.id)
        self.plan(one.id, one.prompt, wishes=one.wishes, limit=limit)
        self.take(one.id)

    def commit(self, request: Hashable, total: int, **how: Any) -> Mapping[int, int]:
        """See `KVCacheManager.commit`. Until its loads are over and went well nothing that it has
        computed is found by others; a later call, or its end, makes up for that."""
        return self.manager.commit(request, total, **how)

    # ---- saving

    def save_plan(self, request: Hashable, begin: int, end: int) -> SavePlan:
        """What a forward pass over tokens [begin, end) of the prompt saves, and where it must end
        for that.

        Raises:
            ConfigError: tokens that the prompt does not have.
            LeaseLost: no such request.
        """
        with self._lock:
            one = self._request(request)
            stretch = Stretch(
                begin, end, len(one.prompt), one.match.checkpoint, one.match.branching
            )
            if one.states is None:
                return SavePlan(begin, end, None)
            return self._policy.plan(stretch)

    def saving(self, request: Hashable, position: int) -> int | None:
        """The slot to which the pass being launched writes the state behind `position` tokens:
        for states inside of a pass, and for engines that write two at once. None: it saves nothing.

        Raises:
            ConfigError: not a position where one is looked for, or not behind those saved before.
        """
        with self._lock:
            return self._donor.saving(self._request(request), position)

    def save(
        self, requests: Sequence[Hashable], positions: Sequence[int], stream: Any = None
    ) -> list[bool]:
        """The pass that was launched ends at these positions: copy each working slot beside, in one
        launch behind it. Returns which are saved. `saved` tells when the results have arrived."""
        with self._lock:
            running = [self._request(each) for each in requests]
            return self._donor.save(running, list(positions), stream)

    def saved(self, request: Hashable, position: int) -> bool:
        """The results of the pass that saved this have arrived: its write is over. A state of the
        prompt becomes a checkpoint at once, if another slot can be had in exchange and what the
        request began with has come: while a load goes on it waits for the end, and if one failed
        it never is one. One of what was generated becomes one when the request ends. Returns
        whether it is one now.

        Raises:
            ConfigError: not the oldest that is being saved.
        """
        with self._lock:
            return self._donor.saved(self._request(request), position)

    def reject(self, request: Hashable, accepted: int) -> Saved | None:
        """Speculation went wrong, only the first `accepted` tokens count: see
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
        """End a request, or preempt it: the newest saved state becomes a checkpoint, and that of
        the branching point if it is none yet; its slots go back when nothing touches them. Harmless
        if there is no such request.

        Args:
            at: tokens behind which the working slot's state stands, when no step of it is in
                flight: it is as good as a saved one. None: a step may still write its slots.
            kept: tokens that are kept at most; None: all that are committed.
            publish: False: an abort; no checkpoint is made.
            stream: on which its last step was launched; None: the current one.

        Returns:
            Position of the deepest state that was donated now; 0: none was.
        """
        with self._lock:
            self._planner.cancel(request)
            one = self._requests.pop(request, None)
            position = 0
            try:
                if one is not None:
                    position = self._donor.end(one, kept, at, publish, stream)
            finally:
                self.manager.release(request, publish=publish)
                self._donor.poll()
            return position

    def poll(self) -> int:
        """Each step: as `KVCacheManager.poll`, for KV and states. Returns copies that go on."""
        with self._lock:
            try:
                going = self.manager.poll()
            finally:  # what the movers of the one have raised holds the other up in nothing
                try:
                    states = self.checkpoints.poll()
                finally:
                    self._donor.poll()
            return going + states

    @property
    def leaving(self) -> int:
        """Requests that have ended, and whose slots a copy touches still."""
        return self._donor.going

    def close(self, timeout: float | None = 10.0) -> None:
        """End what runs, wait for copies of states.

        Raises:
            WaitTimeout: a copy goes on; call again.
            As `poll`, when all of this is done.
        """
        with self._lock:
            self._planner.close()
            for request in list(self._requests):
                self.release(request, publish=False)
        try:
            self.checkpoints.close(timeout)
        finally:  # slots go back whose copies are over, whatever the others do
            self.poll()

    # ---- for the parts

    def _request(self, request: Hashable) -> HybridRequest:
        found = self._requests.get(request)
        if found is None:
            raise LeaseLost(f"there is no running request {request!r}; plan and take it first")
        return found


__all__ = ["HybridManager"]
