"""Leaving: requests that have ended, until no copy touches their blocks any more."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from lightcache.errors import WaitTimeout
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.requests import HELD, PINNED, Request

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


class Leaving:
    """Gives back what ended requests hold, as soon as may be."""

    def __init__(self, manager: KVCacheManager) -> None:
        """Nobody leaves yet."""
        self._manager = manager
        self._going: list[Request] = []

    def add(self, one: Request) -> None:
        """A request has ended. What was not begun is not begun any more."""
        for movement in one.movements:
            movement.cancel()
        if one.host is not None:
            one.host.release()
            one.host = None
        self._going.append(one)
        if any(not movement.over for movement in one.movements):
            self._manager._traffic.poll()
        self.poll()

    def poll(self) -> None:
        """Give back what no copy touches."""
        with self._manager._lock:
            going, self._going = self._going, []
            for one in going:
                if all(movement.over for movement in one.movements):
                    self._give_back(one)
                else:
                    self._going.append(one)

    def wait(self, request: Hashable) -> None:
        """Until a request that has ended holds nothing any more. Blocks, without the lock."""
        movements = [
            movement for one in self._going if one.id == request for movement in one.movements
        ]
        for movement in movements:
            try:
                movement.block(None)
            except WaitTimeout:  # its mover has a limit of its own
                continue
        self._manager._traffic.poll()
        self.poll()

    def _give_back(self, one: Request) -> None:
        device = self._manager.device
        if isinstance(device, OwnedDevice) and device.index is not None:
            device.unpin(one.table[one.kind == PINNED])
            device.free_blocks(one.table[one.kind == HELD])
        if one.hit is not None:
            one.hit.release()
            one.hit = None


__all__ = ["Leaving"]
