"""How a worker's manager has bytes moved: between the pool and one request's transformers cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from lightcache import Allocation, Lease, Load, Offload, Reservation
from lightcache.connectors.transformers import Connector
from lightcache.errors import ConfigError
from lightcache.manager.backend import Slots


class CacheMover:
    """A `Mover` for caches that are not paged. A token's place is its position in the cache of the
    request that is being served, so of slots nothing is needed."""

    shards = 1

    def __init__(self, connector: Connector, window: int) -> None:
        """Args:
        window: layers of a restored prefix that arrive together.
        """
        self._connector, self._window = connector, window
        self.past: Any = None
        """Of the request that is being served; what it holds ends where a load begins."""
        self.hold: Callable[[Reservation], None] | None = None
        """Called in place of an offload's beginning."""

    def load(self, lease: Lease, slots: Slots, first: int) -> Load:
        """See `Mover`. The first layers compute while the others' pages are still on their way."""
        del slots, first
        return self._connector.load(self.past, lease, window=self._window)

    def offload(self, new: Reservation, slots: Slots) -> Offload:
        """See `Mover`."""
        del slots
        if self.hold is not None:
            self.hold(new)
        return self._connector.offload(self.past, new)

    def save(self, held: Allocation, slots: Slots) -> NoReturn:
        """See `Mover`: a demo hands nothing over."""
        del held, slots
        raise ConfigError("save: a cache of transformers is not handed over; its pages are")
