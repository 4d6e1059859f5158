"""Which keys this process is writing just now: two of its threads do not send one page twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lightcache.storage.arguments import Deadline


class Claims:
    """A key is one thread's from `take` to `give_back`."""

    def __init__(self) -> None:
        """Nobody writes anything."""
        self._changed = threading.Condition()
        self._taken: set[bytes] = set()

    def take(self, names: Sequence[bytes]) -> list[bytes]:
        """Those of these keys that nobody else writes, once each; ours from now on."""
        with self._changed:
            mine = [name for name in dict.fromkeys(names) if name not in self._taken]
            self._taken.update(mine)
            return mine

    def give_back(self, names: Sequence[bytes]) -> None:
        """They were written, or were not."""
        with self._changed:
            self._taken.difference_update(names)
            self._changed.notify_all()

    def wait(self, names: Sequence[bytes], deadline: Deadline) -> bool:
        """Until nobody writes any of them; False: not in time. Who waits holds no claims, so nobody
        waits in a circle."""
        with self._changed:
            left = min(deadline.left, threading.TIMEOUT_MAX)
            return self._changed.wait_for(lambda: self._taken.isdisjoint(names), left)


__all__ = ["Claims"]
