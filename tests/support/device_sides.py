"""Device planes in CPU memory, in any arrangement."""

from __future__ import annotations

import numpy as np

from lightcache.kernels.geometry import Share
from lightcache.kernels.testing import Bytes, PlacedPlanes


class Device(PlacedPlanes):
    """The planes of one rank, in a buffer of random bytes."""

    def __init__(self, share: Share, slots: int, seed: int = 0) -> None:
        super().__init__(share, slots, seed)
        self.memory: Bytes = np.random.default_rng(seed).integers(0, 256, self.nbytes, np.uint8)
        self.planes = self.at(int(self.memory.ctypes.data), keep=self.memory)
