"""Which keys this process is writing just now: two of its threads do not send one page twice."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from lightcache.storage.arguments import Deadline

_LOOK = 0.5  # seconds between two looks at claims of calls that ended without a word


class Owner:
    """A call. What it has claimed is free when nothing refers to it any more, however it ended: an
    interrupt may come in front of `give_back`, too."""

    __slots__ = ("__weakref__",)


class Claims:
    """A key is one call's from `take` to `give_back`."""

    def __init__(self) -> None:
        """Nobody writes anything."""
        self._changed = threading.Condition()
        self._taken: dict[bytes, weakref.ref[Owner]] = {}

    def take(self, names: Sequence[bytes], owner: Owner) -> list[bytes]:
        """Those of these keys that nobody else writes, once each; the owner's from now on."""
        with self._changed:
            mine = [name for name in dict.fromkeys(names) if self._free(name)]
            self._taken.update(dict.fromkeys(mine, weakref.ref(owner)))
            return mine

    def give_back(self, owner: Owner) -> None:
        """What it took was written, or was not."""
        with self._changed:
            for name in [name for name, its in self._taken.items() if its() in (owner, None)]:
                del self._taken[name]
            self._changed.notify_all()

    def wait(self, names: Sequence[bytes], deadline: Deadline) -> bool:
        """Until nobody writes any of them; False: not in time. Who waits holds no claims, so nobody
        waits in a circle."""
        with self._changed:
            while not all(map(self._free, names)):
                if deadline.passed:
                    return False
                self._changed.wait(min(deadline.left, _LOOK))
            return True

    def _free(self, name: bytes) -> bool:
        its = self._taken.get(name)
        return its is None or its() is None


__all__ = ["Claims", "Owner"]
