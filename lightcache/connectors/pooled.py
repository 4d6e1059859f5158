"""A cache, the engine that moves its pages, and its pinned pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightcache import Cache
from lightcache.errors import ConfigError

if TYPE_CHECKING:
    from lightcache.kernels.geometry import PageGeometry
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.kernels.planes import DevicePlanes


class Pooled:
    """Moves pages of one cache for a connector."""

    def __init__(
        self,
        cache: Cache,
        geometry: PageGeometry,
        planes: DevicePlanes,
        device: str,
        pinned: PinnedPages | None,
    ) -> None:
        """Pin the pool if needed, and make the engine.

        Args:
            planes: any; every transfer brings its own planes.
            device: of the model: "cpu", or as "cuda:0".
            pinned: the caller's pinned pool, which the caller closes; None: on a GPU, pinned here.

        Raises:
            InUse: this process has pinned the pool already.
        """
        self.cache = cache
        self.pinned = pinned
        """The pool as a GPU sees it; None on the CPU."""
        self._own: PinnedPages | None = None
        if device != "cpu" and pinned is None:
            self.pinned = self._own = cache.pin(device=device)
        try:
            self.engine = cache.transfer_engine(geometry, planes, memory=self.pinned)
        except BaseException:
            self._unpin()
            raise

    def wait_for(self, pages: npt.NDArray[np.int32]) -> None:
        """Wait until these pages are pinned. They have memory, so the wait is short."""
        if self.pinned is not None:
            self.pinned.wait(pages)

    def close(self) -> None:
        """Wait for copies, publish saved pages, and release the cache."""
        self.engine.close()
        self._unpin()

    def _unpin(self) -> None:
        if self._own is not None:
            self._own.close()


def check_device(cache: Cache, device: str) -> None:
    """Check that a cache was opened for a model on this device: without device=True, no process
    waits for device copies that outlive this process when it is killed.

    Raises:
        ConfigError: a GPU, and a cache opened without device=True.
    """
    if device == "cpu":
        return
    mine = cache.client_id.slot
    if not all(client.device for client in cache.clients() if client.slot == mine):
        raise ConfigError(
            f"cache: expected {cache.name!r} opened with device=True for a model on a GPU, found "
            "False; use open_cache, or describe(model).options when the model is on its device"
        )


__all__ = ["Pooled", "check_device"]
