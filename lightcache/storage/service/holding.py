"""Pages that a storage service holds for its clients until they say what becomes of them.

They are pinned, and reserved, by the service's own client of the cache: its death dooms them, as
any other reservation. Of a client's death the service sees to it: who is gone publishes nothing.
"""

from __future__ import annotations

import contextlib

from lightcache.errors import LightcacheError
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.service.answering import Served
from lightcache.storage.tiers import StorageTask


class Holds:
    """Prefetches with `hold`, from their beginning until they were published or given back. For
    the thread that takes messages out."""

    def __init__(self, keep: float, clock: Clock) -> None:
        """None.

        Args:
            keep: seconds behind its end until the tier itself gives back what a task holds.
        """
        self._keep, self._clock = keep, clock
        self._served: dict[tuple[int, int], Served] = {}
        self._kept: dict[tuple[int, int], Deadline] = {}

    def add(self, served: Served) -> None:
        """From now on it may be published."""
        self._served[served.name] = served

    def find(self, client: int, number: int) -> StorageTask | None:
        """One that was neither published nor given back, as far as we know."""
        served = self._served.get((client, number))
        return None if served is None else served.task

    def drop(self, client: int, number: int) -> None:
        """It was published, or given back."""
        self._served.pop((client, number), None)
        self._kept.pop((client, number), None)

    def look(self) -> None:
        """Give back what those have who are gone; forget what the tier gave back. Once the ring of
        a client that is gone was let go of."""
        for name, served in list(self._served.items()):
            if not served.peer.there:
                with contextlib.suppress(LightcacheError):  # the tier goes on trying
                    served.task.cancel()
                self.drop(*name)
            elif served.task.over:
                kept = self._kept.setdefault(name, Deadline(self._keep, self._clock))
                if kept.passed:
                    self.drop(*name)

    def __len__(self) -> int:
        return len(self._served)


__all__ = ["Holds"]
