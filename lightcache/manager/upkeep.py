"""What a manager does for no request in particular: transfers, prefixes, weights, figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from lightcache._arguments import Pages, count
from lightcache.attached import MAX_PAGES
from lightcache.cache import Cache
from lightcache.errors import ConfigError, InUse
from lightcache.manager import hints
from lightcache.manager.attached import AttachedDevice
from lightcache.manager.checks import numbers_of
from lightcache.manager.device import DeviceTier, room_of
from lightcache.manager.gathering import gather
from lightcache.manager.matches import ManagerConfig
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.prompts import Prompt
from lightcache.manager.statistics import Figures, Gauges, ManagerStats, Recent
from lightcache.manager.weights import WeightsState

if TYPE_CHECKING:
    from lightcache.manager.counters import NodeCounters
    from lightcache.manager.demoting import Demotion
    from lightcache.manager.guard import Guard
    from lightcache.manager.manager import KVCacheManager
    from lightcache.manager.planning import Planner
    from lightcache.manager.releasing import Leaving
    from lightcache.manager.requests import Request
    from lightcache.manager.traffic import Movement, Traffic
    from lightcache.manager.weights import Weights
    from lightcache.storage.tasks import StorageTask
    from lightcache.storage.tiers import BaseTier


TELL = 0.5
"""Seconds between two times at which the node's counters are told of our figures."""


class Upkeep:
    """Part of `KVCacheManager`: see there."""

    config: ManagerConfig
    host: Cache
    device: DeviceTier
    _lock: threading.RLock
    _figures: Figures
    _recent: Recent
    _guard: Guard
    _traffic: Traffic
    _weights: Weights
    _planner: Planner
    _requests: dict[Hashable, Request]
    _leaving: Leaving
    _demotion: Demotion
    _storage: BaseTier | None
    _counters: NodeCounters | None
    _told: Figures
    """What the node's counters know of our figures."""
    _tell_at: float

    @property
    def _whole(self) -> KVCacheManager:
        """Ourselves: nothing else is ever made of this part."""
        return cast("KVCacheManager", self)

    # ---- keeping order

    def poll(self) -> int:
        """Each step: notice what is over, begin what waits, give back what has ended. Returns
        transfers that go on. Does not block.

        Raises:
            Whatever a mover has raised since the last call, in whichever of ours, that is none of
            our errors: once, when all of this is done. Of several the first; the others are logged.
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

    def _tell(self) -> None:
        """Add to the node's counters what we have counted since."""
        self._tell_at = time.monotonic() + TELL
        gather(self._whole)
        more = {name: n - self._told[name] for name, n in self._figures.items()}
        more = {name: n for name, n in more.items() if n > 0}
        if self._counters is not None and more:
            self._told.update(more)
            self._guard.run(partial(self._counters.add, **more), _nothing)

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
        what is no block, as the -1 that pads a table. None: how many transfers go on.

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
            begun: list[Movement] = []
            self._demotion.write(named, index.keys_of(named), begun)
            return len(begun)

    def set_blocks(self, blocks: int) -> None:
        """The engine has found out how many device blocks fit, or has changed it: the device's
        index begins empty. Plans are forgotten; the host keeps what it has.

        Raises:
            InUse: a request runs, or a copy goes on; release, and wait for it.
            ConfigError: not 1 to 40 million.
        """
        with self._lock:
            self.poll()
            copies = self._traffic.in_flight + self._traffic.queued
            if self._requests or self._leaving.going or copies:
                raise InUse(
                    f"set_blocks: {len(self._requests)} requests run, and {copies} copies go on "
                    "or wait; release, resume, and wait for them first"
                )
            count(blocks, "blocks", 1, MAX_PAGES)  # before anything is forgotten
            self._planner.close()
            self._demotion.close()
            self.device.set_blocks(blocks)

    # ---- prefixes, whoever runs

    def keep(self, prompt: Prompt) -> Mapping[str, int]:
        """Never evict what there is of a prompt, on the host and on an owned device, until
        `unkeep`, or until its weights go. Returns the tokens kept, by tier."""
        with self._lock:
            self._whole._open("keep")
            return hints.keep(self._whole, prompt, True)

    def unkeep(self, prompt: Prompt) -> Mapping[str, int]:
        """Undo `keep`."""
        with self._lock:
            return hints.keep(self._whole, prompt, False)

    def drop(self, prompt: Prompt, start: int = 0) -> Mapping[str, int]:
        """Evict a branch now, from its end up to token `start`, as far as nobody else uses it.
        Returns the tokens dropped, by tier."""
        with self._lock:
            return hints.drop(self._whole, prompt, start)

    def prefetch(self, prompt: Prompt) -> StorageTask:
        """Bring what storage has of a prompt to the host, before anybody asks. Returns its task."""
        with self._lock:
            return hints.prefetch(self._whole, prompt, self._storage)

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
        """
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

    # ---- transfers and figures

    def pause(self, timeout: float | None = None) -> None:
        """No transfer begins until `resume`; those that go on are waited for.

        Raises:
            WaitTimeout: some go on still; the manager is paused.
        """
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
            gather(self._whole)
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
            gather(self._whole)
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


def _nothing() -> None:
    pass


__all__ = ["Upkeep"]
