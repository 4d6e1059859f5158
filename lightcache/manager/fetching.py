"""Fetch: what was found on the host, on its way to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache.errors import ConfigError, TransferFailed
from lightcache.manager.gathering import moved_bytes
from lightcache.manager.limits import seconds_of
from lightcache.manager.requests import Request, slots_of
from lightcache.manager.traffic import Movement, State, unless_taken

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


class Fetch:
    """The load of one request's prefix. Until it is over its blocks hold nothing that counts; if it
    fails, compute these tokens: `tokens` says from where."""

    def __init__(self, request: Request, movement: Movement | None, without: int) -> None:
        """For `KVCacheManager.fetch`.

        Args:
            without: tokens that are usable if it fails.
        """
        self._request, self._movement, self._without = request, movement, without
        self._lost = movement is None and request.match.load > 0

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed, as far as is known: all usable ones while it
        goes on or after it went well, those of the device if it failed."""
        return self._request.match.usable if not self.failed else self._without

    @property
    def failed(self) -> bool:
        """Whether it is over, and failed."""
        if self._movement is None:
            return self._lost
        return self._movement.state in (State.FAILED, State.CANCELLED)

    def done(self) -> bool:
        """Whether it is over. Does not block.

        Raises:
            TransferFailed: it failed, or the manager has disabled itself before it began; nothing
                is leaked.
        """
        if self._lost:
            raise TransferFailed(
                f"fetch {self._request.id!r}: the manager has disabled itself, nothing was loaded; "
                "compute these tokens instead"
            )
        return self._movement is None or self._movement.done()

    def wait(self, timeout: float | None = None) -> None:
        """Until it is over. Blocks.

        Raises:
            WaitTimeout: it goes on.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        timeout = seconds_of(timeout)
        if self._movement is not None:
            self._movement.wait(timeout)
        else:
            self.done()

    def wait_on(self, stream: Any = None) -> None:
        """Let a stream of the device wait for it (None: the current one), not this thread: with an
        engine of this process. See `Transfer.wait_on`.

        Raises:
            TransferFailed: it is over already, and failed.
        """
        if self._movement is not None:
            wait_on(self._movement, stream)
        else:
            self.done()

    @property
    def number(self) -> int | None:
        """Of a copy that ranks make: as `Decisions` call it. None: there is none."""
        moving = None if self._movement is None else self._movement.moving
        return getattr(moving, "number", None)


def wait_on(movement: Movement, stream: Any) -> None:
    """Let a stream of the device wait for a copy, or this thread where no engine of ours makes it.
    TransferFailed: it is over already, and failed."""
    if movement.over:
        movement.done()
        return
    transfer = getattr(movement.moving, "transfer", None)
    if transfer is None:
        movement.wait()
    else:
        transfer.wait_on(stream)


def begin_fetch(manager: KVCacheManager, one: Request) -> Fetch:
    """See `KVCacheManager.fetch`."""
    lease, one.host = one.host, None
    match, tokens = one.match, manager.page_tokens
    without = manager._planner.without_host(one.prompt, match)
    if lease is None or match.load <= 0:
        if lease is not None:
            lease.release()
        one.fetched = True
        return Fetch(one, one.loading, without)
    block = manager.device.block_tokens
    if len(one.table) * block < match.usable:
        one.host = lease
        raise ConfigError(
            f"fetch {one.id!r}: expected blocks for {match.usable} tokens, found "
            f"{len(one.table)} of {block}; allocate them first"
        )
    begin, end = one.host_first * tokens, (one.host_first + len(lease)) * tokens
    slots = np.full(end - begin, -1, np.int64)
    first = match.device
    slots[first - begin : match.usable - begin] = slots_of(one.table, block, first, match.usable)
    blocks = one.table[first // block : -(-match.usable // block)]
    pages = len(lease)
    figures, mover = manager._figures, manager.mover

    def over(ok: bool, nbytes: int | None) -> None:
        if ok:
            moved = moved_bytes(manager.host, match.usable - first, nbytes)
            figures.add(loads=1, loaded_pages=pages, loaded_bytes=moved)
        else:
            figures.add(failed_loads=1)

    one.fetched = True
    movement = manager._traffic.begin(
        blocks, lambda: mover.load(lease, slots, 0), over, unless_taken(lease), one.movements
    )
    one.loading = movement
    return Fetch(one, movement, without)


def no_fetch(manager: KVCacheManager, one: Request) -> Fetch:
    """The cache is not asked: what was found there is not loaded."""
    one.let_go_of_host()
    one.fetched = True
    return Fetch(one, one.loading, manager._planner.without_host(one.prompt, one.match))


__all__ = ["Fetch", "begin_fetch", "no_fetch", "wait_on"]
