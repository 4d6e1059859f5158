"""The host side of transfers: pages of one size in one stretch of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.shm.errors import ConfigError


class HostPages:
    """Pages in ordinary host memory: all that an engine without a device needs. For a device the
    memory must be registered with its driver: see `lightcache.kernels.pinned`."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        """Use an array, such as `cache.pool.array`, which is kept alive.

        Args:
            array: uint8 of shape (pages, page_bytes), rows that touch.

        Raises:
            ConfigError: another dtype or shape, or rows apart.
        """
        if array.dtype != np.uint8 or array.ndim != 2 or not array.flags.c_contiguous:
            raise ConfigError(
                "page memory: expected a contiguous uint8 array of shape (pages, page_bytes), "
                f"found {array.dtype} {array.shape}"
            )
        self.array = array
        self.address = int(array.ctypes.data)
        self.pages, self.page_bytes = (int(number) for number in array.shape)
        self.nbytes = self.pages * self.page_bytes

    def check(self, pages: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Page numbers as int64, all of them usable now.

        Raises:
            ConfigError: not whole numbers, or outside of 0 to pages - 1.
        """
        found = np.asarray(pages)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise ConfigError(
                f"pages: expected whole numbers in one dimension, found {found.dtype} {found.shape}"
            )
        numbers = found.astype(np.int64)
        if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < self.pages):
            raise ConfigError(
                f"pages: expected 0 to {self.pages - 1}, found {int(numbers.min())} to "
                f"{int(numbers.max())}; are they pages of another cache?"
            )
        return numbers


__all__ = ["HostPages"]
