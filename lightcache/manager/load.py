"""Load: pages of the host on their way to the device."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from lightcache.errors import ConfigError, TransferFailed
from lightcache.manager.limits import seconds_of
from lightcache.manager.request import Request, slots_of
from lightcache.manager.state import ManagerState
from lightcache.manager.transfers import Movement, State


class Fetch:
    """The load of one request's prefix. The blocks are not valid before it has finished; if it
    fails, compute these tokens: `tokens` says from where."""

    def __init__(self, request: Request, movement: Movement | None, without: int) -> None:
        """For `KVCacheManager.fetch`.

        Args:
            without: tokens that are usable if it fails.
        """
        self._request, self._without = request, without
        self.movement = movement
        """The copy; None: there is none."""
        self._lost = movement is None and request.match.load > 0

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed, as far as is known: all usable ones, or those
        of the device if it failed."""
        return self._request.match.usable if not self.failed else self._without

    @property
    def failed(self) -> bool:
        """Whether it has finished, and failed."""
        if self.movement is None:
            return self._lost
        return self.movement.state in (State.FAILED, State.CANCELLED)

    def done(self) -> bool:
        """Whether it has finished. Does not block.

        Raises:
            TransferFailed: it failed, or the manager has disabled itself before it began; nothing
                is leaked.
        """
        if self._lost:
            raise TransferFailed(
                f"fetch {self._request.id!r}: the manager has disabled itself, nothing was loaded; "
                "compute these tokens instead"
            )
        return self.movement is None or self.movement.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished.

        Raises:
            WaitTimeout: it is in flight.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        timeout = seconds_of(timeout)
        if self.movement is not None:
            self.movement.wait(timeout)
        else:
            self.done()

    def wait_on(self, stream: Any = None) -> None:
        """Let a stream of the device wait for it (None: the current one), not this thread: with an
        engine of this process. See `Transfer.wait_on`.

        Raises:
            TransferFailed: it has finished already, and failed.
        """
        if self.movement is not None:
            wait_on(self.movement, stream)
        else:
            self.done()

    @property
    def number(self) -> int | None:
        """The copy's number in `Decisions`, if ranks make it. None: they do not."""
        moving = None if self.movement is None else self.movement.moving
        return getattr(moving, "number", None)


def wait_on(movement: Movement, stream: Any) -> None:
    """Let a stream of the device wait for a copy, or this thread where no engine of this process
    makes it.

    Raises:
        TransferFailed: it has finished already, and failed.
    """
    if movement.over:
        movement.done()
        return
    transfer = getattr(movement.moving, "transfer", None)
    if transfer is None:
        movement.wait()
    else:
        transfer.wait_on(stream)


def begin_fetch(state: ManagerState, request: Request, without: int) -> Fetch:
    """See `KVCacheManager.fetch`."""
    lease, match, tokens = request.host, request.match, state.page_tokens
    if lease is None or match.load <= 0 or request.loading is not None:
        return no_fetch(request, without)
    block = state.device.block_tokens
    if len(request.table) * block < match.usable:
        raise ConfigError(
            f"fetch {request.id!r}: expected blocks for {match.usable} tokens, found "
            f"{len(request.table)} of {block}; allocate them first"
        )
    begin, end = request.host_first * tokens, (request.host_first + len(lease)) * tokens
    slots = np.full(end - begin, -1, np.int64)
    first = match.device
    device_slots = slots_of(request.table, block, first, match.usable)
    slots[first - begin : match.usable - begin] = device_slots
    blocks = request.table[first // block : -(-match.usable // block)]
    pages = len(lease)
    figures, begun = state.figures, time.perf_counter_ns()

    def over(ok: bool, nbytes: int | None) -> None:
        if ok:
            moved = state.moved_bytes(match.usable - first, nbytes)
            taken = time.perf_counter_ns() - begun
            figures.add(loads=1, loaded_pages=pages, loaded_bytes=moved, load_ns=taken)
        else:
            figures.add(failed_loads=1)

    movement = state.traffic.begin(
        blocks,
        state.mover,
        "load",
        lease,
        slots,
        over,
        of=request.movements,
        into=(request, "loading"),
        instead_of=(request, "host"),
    )
    request.fetched = True
    return Fetch(request, movement, without)


def no_fetch(request: Request, without: int) -> Fetch:
    """`fetch` that loads nothing: there is nothing to load, or the manager is disabled."""
    request.let_go_of_host()
    request.fetched = True
    return Fetch(request, request.loading, without)


__all__ = ["Fetch", "begin_fetch", "no_fetch", "wait_on"]
