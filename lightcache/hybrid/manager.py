"""HybridManager: KV and recurrent states as one prefix cache, for a scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import ConfigError, LightcacheError
from lightcache.hybrid.checkpoints import Checkpoints
from lightcache.hybrid.grids import Grid
from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.planning import HybridPlan, HybridPlanner
from lightcache.hybrid.requests import HybridRequest, Taken
from lightcache.hybrid.spaces import StateSpace
from lightcache.manager.guard import Guard
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.matches import ANY, PrefixMatch, Wishes
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Space

if TYPE_CHECKING:
    pass


class HybridManager:
    """A `KVCacheManager` and `Checkpoints`, joined: what the scheduler of a hybrid model holds.

    A request's way is that of a dense one, through this object: `plan`, `take`, `allocate`,
    `restore` and `fetch`, `commit`, `release`. A prompt hits as deep as both its KV and a
    checkpoint go. Calls share the manager's lock; none waits for bytes unless it says so.
    """

    def __init__(
        self, manager: KVCacheManager, checkpoints: Checkpoints, grid: Grid, *, tails: bool = False
    ) -> None:
        """Both stay the caller's to close, behind this.

        Args:
            grid: positions at which states are saved; for the manager's blocks and pages.
            tails: look for checkpoints wherever KV has a key, not on the grid alone: for those at
                the ends of prompts.

        Raises:
            ConfigError: a grid of other blocks or pages.
        """
        found = manager.device.block_tokens, manager.page_tokens
        if (grid.block_tokens, grid.page_tokens) != found:
            raise ConfigError(
                f"grid: expected one for blocks of {found[0]} tokens and pages of {found[1]}, "
                f"found {grid}"
            )
        self.manager, self.checkpoints, self.grid, self.tails = manager, checkpoints, grid, tails
        self.step = grid.fine if tails else grid.grid
        """Checkpoints are looked for at its multiples."""
        self._lock = manager._lock
        self._planner = HybridPlanner(self)
        self._guard = Guard(manager.config.failures, manager._figures)
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
        return self.plan_many(
            [request],
            [prompt],
            wishes=[wishes],
            limits=[limit],
            device_tokens=None if device_tokens is None else [device_tokens],
        )[0]

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
            return self._guard.run(
                lambda: self._planner.plan(requests, prompts, wishes, limits, device_tokens),
                lambda: self._missed(requests, prompts, wishes),
            )

    def _missed(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        wishes: Sequence[Wishes] | None,
    ) -> list[HybridMatch]:
        """Nothing is found: these run without the cache."""
        for request in requests:
            self._planner.forget(request)
            self._let_go(request)
        nothing = [0] * len(requests)
        kvs = self.manager.plan_many(requests, prompts, wishes=wishes, limits=nothing)
        return [HybridMatch(kv) for kv in kvs]

    def _let_go(self, request: Hashable) -> None:
        with contextlib.suppress(LightcacheError):  # else its plan ends by itself
            self.checkpoints.cancel(request)

    def cancel(self, request: Hashable) -> None:
        """Nothing is wanted of a plan any more. Harmless if there is none."""
        with self._lock:
            self._planner.cancel(request)

    def take(self, request: Hashable) -> HybridMatch:
        """Begin a request: what was planned is its own from now on.

        Raises:
            LeaseLost: it was not planned, or its plan's time is over; plan it again.
            ConfigError: it runs already.
        """
        reading = self.manager._planner.reading(request)
        if reading is not None:
            reading.take()  # may wait; others go on
        with self._lock:
            if request in self._requests:
                raise ConfigError(f"take: the request {request!r} runs already; release it first")
            plan = self._planner.forget(request)
            made = self._taken(request, plan)
            self._requests[request] = made
            return made.match

    def _taken(self, request: Hashable, plan: HybridPlan | None) -> HybridRequest:
        """The checkpoint first: without it no KV is taken."""
        manager, found = self.manager, None
        position = 0 if plan is None else self._planner.position(plan)
        try:
            if position:
                found = self._guard.run(lambda: self.checkpoints.take(request), lambda: None)
            if found is None and plan is not None and position:  # it was cleared meanwhile
                manager.plan(request, plan.prompt, wishes=plan.wishes, limit=0)
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
        one = self.manager._request(request)
        self.manager.release(request, publish=False)
        self.manager.plan(request, one.prompt, wishes=one.wishes, limit=0)
        return self.manager.take(request)

    def _made(
        self, request: Hashable, plan: HybridPlan | None, kv: PrefixMatch, found: Taken | None
    ) -> HybridRequest:
        tier = None if found is None else found[0]
        kv_tokens = kv.usable if plan is None else max(plan.kv.usable, kv.usable)
        match = HybridMatch(
            kv, kv_tokens, kv.usable, tier, self.grid.branching(kv_tokens, kv.usable)
        )
        states = None
        if plan is not None and plan.path is not None and plan.wishes.write:
            states = plan.path.space
        elif plan is not None and plan.space is not None and plan.wishes.write:
            states = self.states_of(plan.space)  # it does not read
        counts = self.checkpoints.counts
        counts.add(requests=1, usable_tokens=match.usable, unusable_tokens=match.unusable)
        if tier is not None:
            counts.add(**{f"{tier.value}_hits": 1})
        return HybridRequest(request, match, states, found)

    # ---- the end

    def release(self, request: Hashable, *, publish: bool = True) -> None:
        """End a request. Harmless if there is none."""
        with self._lock:
            self._planner.cancel(request)
            one = self._requests.pop(request, None)
            self.manager.release(request, publish=publish)
            if one is not None and one.found is not None:
                one.found[1].release()
                one.found = None

    def poll(self) -> int:
        """Each step: as `KVCacheManager.poll`, for KV and states. Returns copies that go on."""
        with self._lock:
            return self.manager.poll() + self.checkpoints.poll()

    @property
    def nothing_runs(self) -> bool:
        """Whether no request runs, and none that has ended holds anything."""
        return not self._requests

    def close(self) -> None:
        """Forget the plans, end what runs."""
        with self._lock:
            self._planner.close()
            for request in list(self._requests):
                self.release(request, publish=False)

    # ---- for the parts

    def states_of(self, space: Space) -> StateSpace | None:
        """Where the states of a space are; None: nowhere, for the weights have gone.

        Who forgets a version clears KV's spaces first, and then those of states that it sees. Who
        opens one of these looks at KV's behind that: so one of the two sees the other."""
        spaces = self.checkpoints.spaces
        found = spaces.known(space.weights, space.tenant)
        if found is None:
            found = spaces.open(space.weights, space.tenant)
            if not self.manager._weights.good(space):
                spaces.clear(space.weights, space.tenant)
                return None
        return found

    def keys_of(self, prompt: Prompt, space: Space) -> Keys:
        """Of the positions of a prompt at which checkpoints are looked for."""
        device_first = self.grid.block_tokens <= self.grid.page_tokens
        every = prompt.keys(space.device_spec if device_first else space.host_spec)
        ratio = self.step // self.grid.fine
        return every if ratio == 1 else np.ascontiguousarray(every[ratio - 1 :: ratio])


__all__ = ["HybridManager"]
