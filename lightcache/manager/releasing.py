"""Leaving: requests that have ended, until no copy touches their blocks any more."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lightcache._arguments import Pages
from lightcache.errors import Detached, LeaseLost, LightcacheError, WaitTimeout
from lightcache.manager.guard import nothing
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.requests import HELD, PINNED, Request
from lightcache.manager.traffic import State

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


class Leaving:
    """Gives back what ended requests hold, as soon as may be."""

    def __init__(self, manager: KVCacheManager) -> None:
        """Nobody leaves yet."""
        self._manager = manager
        self._going: list[Request] = []
        self._later: list[Request] = []
        """Those that hold nothing but blocks without a key any more, for which the lock did not
        come."""

    @property
    def going(self) -> int:
        """Requests that have ended and hold something still."""
        return len(self._going) + len(self._later)

    def __contains__(self, one: Request) -> bool:
        """Whether it is one of these, and a copy may touch its blocks."""
        return one in self._going

    def add(self, ended: list[Request]) -> None:
        """Requests have ended. What was not begun is not begun any more, but for what they
        publish."""
        for one in ended:
            for movement in one.movements:
                if movement is one.loading or not one.stored:
                    movement.cancel()
            one.let_go_of_host()
        self._going += ended
        if any(not movement.over for one in ended for movement in one.movements):
            self._manager._traffic.poll()
        self.poll()

    def poll(self) -> None:
        """Give back what no copy touches, and what could not be given back before."""
        with self._manager._lock:
            later, self._later = self._later, []
            self._free(later)
            over: list[Request] = []
            still: list[Request] = []
            for one in self._going:
                busy = one.movements and any(not each.over for each in one.movements)
                (still if busy else over).append(one)
            if over:
                self._going = still
                self._give_back(over)

    def wait(self, request: Hashable) -> None:
        """Until no copy of a request that has ended goes on, and what it held is given back, unless
        the lock does not come. Blocks, without the manager's lock.

        Raises:
            WaitTimeout: transfers are paused, and some of it waits for them.
        """
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
        if any(movement.state is State.QUEUED for movement in movements):
            raise WaitTimeout(
                f"release {request!r}: transfers are paused, and what it publishes waits for them; "
                "resume the manager"
            )

    def _give_back(self, over: list[Request]) -> None:
        try:
            if self._manager._storage is not None:
                for one in over:
                    self._store(one)
        finally:  # an interrupt
            self._let_go(over)

    def _store(self, one: Request) -> None:
        """Whatever a storage raises, what the request had is given back."""
        manager = self._manager
        try:
            manager._guard.run(partial(manager._writer.store, one), nothing)
        except LightcacheError:
            manager._figures.add(errors=1)
        except Exception as error:
            manager._traffic.foreign.note(error)

    def _let_go(self, over: list[Request]) -> None:
        device = self._manager.device
        try:
            for one in over:
                if one.hit is not None:
                    one.hit._let_go()
                    one.hit = None
            if isinstance(device, OwnedDevice):
                device.unpin(_blocks(over, PINNED))
        finally:
            self._free(over)

    def _free(self, ended: list[Request]) -> None:
        """Their blocks without a key, at once or as soon as the lock comes."""
        device = self._manager.device
        if not ended or not isinstance(device, OwnedDevice):
            return
        try:
            device.free_blocks(_blocks(ended, HELD))
        except (LeaseLost, Detached):  # nobody can: of either a second time would say the same
            raise
        except LightcacheError:
            self._later += ended


def _blocks(ended: list[Request], kind: int) -> Pages:
    """Those of this kind that they have."""
    tables = np.concatenate([one.table for one in ended])
    kinds = np.frombuffer(b"".join([one.kind for one in ended]), np.uint8)
    found: Pages = tables[kinds == kind]
    return found


__all__ = ["Leaving"]
