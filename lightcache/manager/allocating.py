"""Allocating blocks of an owned device: what has to make room is written back first."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import numpy as np

from lightcache._arguments import Pages, count
from lightcache.errors import OutOfPages, WaitTimeout
from lightcache.manager.limits import seconds_of
from lightcache.manager.matches import WritePolicy
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.requests import HELD, Request

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lightcache.manager.manager import KVCacheManager


def allocate(
    manager: KVCacheManager, request: Hashable, tokens: int, timeout: float | None
) -> Pages:
    """See `KVCacheManager.allocate`. The manager's lock is not held."""
    limit = seconds_of(timeout)
    end = None if limit is None else time.monotonic() + limit
    while True:
        with manager._lock:
            try:
                return _allocated(manager, request, tokens)
            except OutOfPages:
                going = manager._demotion.running()
                left = None if end is None else end - time.monotonic()
                if not going or (left is not None and left <= 0):
                    raise
        with contextlib.suppress(WaitTimeout):  # once more, then it is said
            going.block(left)  # others go on meanwhile


def _allocated(manager: KVCacheManager, request: Hashable, tokens: int) -> Pages:
    device, one = manager._owned("allocate"), manager._request(request)
    needed = -(-count(tokens, "tokens", 0, 1 << 62) // device.block_tokens)
    missing = needed + manager.config.reserve_blocks - len(one.table)
    if missing > 0:
        try:
            fresh = _fresh(manager, device, missing)
        except OutOfPages:
            if not 0 < needed <= len(one.table):
                raise
            return one.table  # this is what the reserve is for
        _append(one, fresh)
    return one.table


def _append(one: Request, fresh: Pages) -> None:
    one.table = np.concatenate([one.table, fresh])
    one.kind += bytes([HELD]) * len(fresh)


def _fresh(manager: KVCacheManager, device: OwnedDevice, missing: int) -> Pages:
    if manager.config.write is not WritePolicy.BACK or device.index is None:
        return device.allocate(missing)
    free = make_room(manager, device, missing)
    if free < missing and (going := manager._demotion.going):
        raise OutOfPages(
            f"allocate: {missing} blocks were asked for, {free} are free, and {going} are being "
            "written to the host first; `poll`, and ask again"
            + (", when transfers are resumed" if manager._traffic.paused else "")
        )
    return device.allocate(missing)


def make_room(manager: KVCacheManager, device: OwnedDevice, wanted: int) -> int:
    """With write-back: begin to write what eviction would take next, until so many blocks are free
    or on their way. Nothing is begun where so many cannot be had at all. Returns how many are free
    now. What goes wrong is a miss: then the blocks are as they were."""
    free = device.free
    if free < wanted:
        demotion = manager._demotion
        manager._traffic.poll()  # also if the cache is not asked: what goes on comes to its end
        demotion.poll()
        manager._guard.run(lambda: demotion.make_room(wanted), lambda: None, proves=False)
        free = device.free
    return free


__all__ = ["allocate", "make_room"]
