"""What a manager does for no request in particular: transfers, prefixes, weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightcache._arguments import Pages, count
from lightcache.attached import MAX_PAGES
from lightcache.errors import ConfigError, InUse
from lightcache.manager import hints
from lightcache.manager.attached import AttachedDevice
from lightcache.manager.checks import numbers_of
from lightcache.manager.limits import seconds_of
from lightcache.manager.matches import ManagerConfig
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.prompts import Prompt
from lightcache.manager.reporting import Reporting
from lightcache.manager.weights import WeightsState

if TYPE_CHECKING:
    from lightcache.manager.demoting import Demotion
    from lightcache.manager.planning import Planner
    from lightcache.manager.traffic import Movement
    from lightcache.manager.weights import Weights
    from lightcache.storage.tasks import StorageTask
    from lightcache.storage.tiers import BaseTier


class Upkeep(Reporting):
    """Part of `KVCacheManager`: see there."""

    config: ManagerConfig
    _weights: Weights
    _planner: Planner
    _demotion: Demotion
    _storage: BaseTier | None

    # ---- keeping order

    def poll(self) -> int:
        """Each step: notice what is over, begin what waits, give back what has ended. Returns
        transfers that go on; one of which nobody knows, since an interrupt or an error came while
        it was begun, is none of them. Does not block.

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
            begun: list[Movement] = []
            self._demotion.write(named, index.keys_of(named), begun)
            return len(begun)

    def set_blocks(self, blocks: int) -> None:
        """The engine has found out how many device blocks fit, or has changed it: the device's
        index begins empty. Plans are forgotten; the host keeps what it has.

        Raises:
            InUse: a request runs, or a copy goes on; release, and wait for it. Or nobody knows
                whether one goes on: then never again, for it may touch what the new blocks hold.
            ConfigError: not 1 to 40 million.
        """
        with self._lock:
            self._traffic.poll()
            self._leaving.poll()
            self._demotion.poll()
            if self._traffic.unknown:
                raise InUse(
                    "set_blocks: an interrupt or an error came while a copy was begun, and nobody "
                    "knows whether it goes on; make another manager and device"
                )
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


__all__ = ["Upkeep"]
