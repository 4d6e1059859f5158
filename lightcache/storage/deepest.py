"""Prefetching one page of many: the last that is stored, whatever of those before it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightcache.namespaces import Namespace
from lightcache.storage.arguments import Deadline
from lightcache.storage.protocol import Keys
from lightcache.storage.reading import ReadJob
from lightcache.storage.tasks import StorageTask

if TYPE_CHECKING:
    from lightcache.storage.worker import StorageTier


class DeepestJob(ReadJob):
    """Of some keys the last that is stored, alone. Storages know of prefixes, and these are none:
    each key is asked for by itself, from the end."""

    def __init__(
        self,
        tier: StorageTier,
        task: StorageTask,
        deadline: Deadline,
        keys: Keys,
        most: int,
        namespace: Namespace | None,
    ) -> None:
        """Nothing was asked yet."""
        super().__init__(tier, task, deadline, keys[:0], 0, namespace, False)
        self._every, self._most = keys, most

    @property
    def reads(self) -> int:
        """See `Job`."""
        return 1

    def step(self) -> bool:
        """See `Job`."""
        for last in range(len(self._every), max(0, len(self._every) - self._most), -1):
            self.check()
            if self.stopping or self.deadline.passed:
                break
            key = np.ascontiguousarray(self._every[last - 1 : last])
            if self.tier.cache.peek(key, namespace=self._namespace):
                self.task._reach(last)
                break
            if self.tier._contains(self, key):
                self._keys = key
                super().step()
                self.task._reach(last if self.task.pages_done else 0)
                break
        return False


__all__ = ["DeepestJob"]
