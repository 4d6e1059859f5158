"""What a hybrid manager does for no request in particular: transfers, weights, keys."""

from __future__ import annotations

import threading

import numpy as np

from lightcache._arguments import Keys
from lightcache.hybrid.checkpoints import Checkpoints
from lightcache.hybrid.grids import Grid
from lightcache.hybrid.spaces import StateSpace
from lightcache.hybrid.statistics import CheckpointStats
from lightcache.manager.extension import Extension
from lightcache.manager.guard import Guard
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Space


class HybridUpkeep:
    """Part of `HybridManager`: see there."""

    manager: KVCacheManager
    inner: Extension
    checkpoints: Checkpoints
    grid: Grid
    step: int
    by_blocks: bool
    _lock: threading.RLock
    _guard: Guard

    # ---- transfers and weights

    def pause(self, timeout: float | None = None) -> None:
        """No transfer of KV or states begins until `resume`. Those that go on are waited for.

        Raises:
            WaitTimeout: some go on still; all is paused.
        """
        with self._lock:
            self.inner.pause()
            self.checkpoints.traffic.moves.paused = True
        self.manager.pause(timeout)
        self.checkpoints.pause(timeout)

    def resume(self) -> None:
        """Transfers begin again."""
        self.manager.resume()
        self.checkpoints.resume()

    def begin_update(self, timeout: float | None = None, *, wait: bool = True) -> None:
        """As `KVCacheManager.begin_update`, for KV and states."""
        with self._lock:
            version = self.inner.weights
            self.manager.begin_update(wait=False)
            self.checkpoints.clear_weights(version, everywhere=self.inner.cleared_by_us)
        if wait:
            self.inner.wait(timeout)
            self.checkpoints.traffic.moves.wait(None, timeout)

    def finish_update(self, version: str) -> None:
        """As `KVCacheManager.finish_update`."""
        with self._lock:
            self.checkpoints.clear_weights(self.inner.weights, everywhere=False)
            self.manager.finish_update(version)

    def clear_tenant(self, tenant: str) -> bool:
        """As `KVCacheManager.clear_tenant`, for KV and states."""
        with self._lock:
            weights = self.inner.weights
            cleared = self.manager.clear_tenant(tenant)
            if cleared:
                self.checkpoints.clear_tenant(weights, tenant)
            return cleared

    @property
    def disabled(self) -> bool:
        """Whether nothing is asked of the cache of KV, or of both, any more, after too many
        errors: then nothing is usable."""
        return self._guard.disabled or self.manager.disabled

    def enable(self) -> None:
        """Ask both again. `KVCacheManager.enable` alone does not."""
        self.manager.enable()
        self._guard.enable()

    def stats(self) -> CheckpointStats:
        """This process's figures of checkpoints; those of KV are the manager's."""
        return self.checkpoints.stats()

    # ---- for the parts

    def states_of(self, space: Space) -> StateSpace | None:
        """Where the states of a space are; None: nowhere, for it was cleared."""
        spaces = self.checkpoints.spaces
        return spaces.beside(space.host, lambda: self.inner.good(space))

    def keys_of(self, prompt: Prompt, space: Space) -> Keys:
        """Of the positions of a prompt at which checkpoints are looked for."""
        spec = space.device_spec if self.by_blocks else space.host_spec
        return self.strided(prompt.keys(spec))

    def strided(self, every: Keys) -> Keys:
        """Of these among all keys of a sequence."""
        ratio = self.step // self.grid.fine
        return every if ratio == 1 else np.ascontiguousarray(every[ratio - 1 :: ratio])

    @property
    def owned(self) -> bool:
        """Whether blocks of the device are evicted by us."""
        return self.manager.device.owned


__all__ = ["HybridUpkeep"]
