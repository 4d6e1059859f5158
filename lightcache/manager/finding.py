"""What a manager finds for requests that wait, and how they begin."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence

from lightcache.errors import ConfigError, Detached, LightcacheError
from lightcache.manager.beginning import begin_request, without_cache
from lightcache.manager.checks import asked_many, asked_of, check_hashable
from lightcache.manager.matches import ANY, PrefixMatch, Why, Wishes
from lightcache.manager.peeking import peek
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Request
from lightcache.manager.statistics import Figures
from lightcache.manager.upkeep import Upkeep


class Finding(Upkeep):
    """Part of `KVCacheManager`: see there."""

    _closed: bool

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
        time limit of the plan. Planning again is cheap, and replaces what was planned before.

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
            planner, weights = self._planner, self._weights
            return self._guard.run(
                lambda: planner.plan_one(
                    request, asked, weights.space_or_none(prompt.tenant), device_tokens
                ),
                lambda: planner.missed(request, prompt),
            )

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
            many = asked_many(requests, prompts, wishes, limits, device_tokens)
            return self._guard.run(
                lambda: self._planner.plan(many),
                lambda: list(map(self._planner.missed, requests, prompts)),
            )

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
            return self._guard.run(
                lambda: peek(self._whole, many),
                lambda: [PrefixMatch(len(prompt), why=Why.DISABLED) for prompt in prompts],
            )

    def cancel(self, request: Hashable) -> None:
        """Nothing is wanted of a plan any more. Harmless if there is none."""
        check_hashable([request], "cancel")
        with self._lock:
            self._planner.cancel(request)

    def take(self, request: Hashable) -> PrefixMatch:
        """Begin a request: what was planned is its own from now on, and what has come since. If
        storage is being read for it, waits as the tier's `read_policy` says.

        Raises:
            LeaseLost: it was not planned, or its plan's time is over; plan it again.
            ConfigError: it runs already.
        """
        check_hashable([request], "take")
        reading = self._planner.reading(request)
        if reading is not None:
            with contextlib.suppress(LightcacheError):  # what it has brought is there, and counts
                reading.take()  # may wait; others go on
        with self._lock:
            if request in self._requests:
                raise ConfigError(f"take: the request {request!r} runs already; release it first")
            if self._planner.failed(request):  # it was counted then
                made = self._missed(request)
            else:
                made = self._guard.run(lambda: self._taken(request), lambda: self._missed(request))
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
            made = begin_request(self._whole, request, planned, match, hit, host)
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


__all__ = ["Finding"]
