"""Extension: what a manager offers to what is built on it, as `lightcache.hybrid` is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from lightcache.manager.asking import Asked
from lightcache.manager.guard import Guard
from lightcache.manager.matches import PrefixMatch
from lightcache.manager.peeking import peek_behind
from lightcache.manager.requests import Request, Space

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager
    from lightcache.storage.tasks import StorageTask
    from lightcache.storage.tiers import BaseTier


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
        return Guard(self._manager.config.failures, self._manager._figures, let_go, of)

    # ---- weights

    @property
    def weights(self) -> str:
        """The version that is served."""
        return self._manager._spaces.weights

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
        return peek_behind(self._manager, request, limit)

    def holds(self, request: Hashable, now: float) -> bool:
        """Whether what was planned for a request stays pinned for a while, so that planning it
        again would find no less.

        Args:
            now: `time.monotonic()`.
        """
        return self._manager._planner.holds(request, now)

    def reading(self, request: Hashable) -> StorageTask | None:
        """What brings pages from storage for a plan; None: nothing does."""
        return self._manager._planner.reading(request)

    # ---- requests

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
        one = manager._request(request)
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


__all__ = ["Extension"]
