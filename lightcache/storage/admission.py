"""Which pages are worth writing: those of prompts that come again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lightcache.storage.arguments import check_keys
from lightcache.storage.protocol import Keys


class SeenKeys:
    """Counts how often keys were offered. Bounded: the longest unseen are forgotten first."""

    def __init__(self, times: int, most: int) -> None:
        """
        Args:
            times: a key is admitted when it is offered for this time; 1: at once.
            most: keys to remember.
        """
        self._times = times
        self._most = most
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def admit(self, keys: Keys) -> int:
        """Count these keys; how many from the first on are admitted. Behind a key that is not, none
        is: it would not be found."""
        if self._times <= 1:
            return len(keys)
        names = check_keys(keys)
        with self._lock:
            # From the last to the first, so that of a prompt the end is forgotten first.
            for name in reversed(names):
                self._seen[name] = self._seen.pop(name, 0) + 1
            admitted = (self._seen[name] >= self._times for name in names)
            prefix = next((i for i, good in enumerate(admitted) if not good), len(names))
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return prefix


__all__ = ["SeenKeys"]
