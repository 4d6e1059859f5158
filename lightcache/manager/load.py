"""Load: copies host pages to the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightcache.errors import ConfigError, TransferFailed
from lightcache.manager.limits import seconds_of
from lightcache.manager.request import Request, slots_of
from lightcache.manager.state import ManagerState
from lightcache.manager.stats import LOAD
from lightcache.manager.transfers import BlockTransfer, State


class LoadHandle:
    """The load of one request's prefix. The blocks are not valid until it has finished. If it
    fails, compute the tokens from `tokens` on."""

    def __init__(self, request: Request, transfer: BlockTransfer | None, without: int) -> None:
        """For `KVCacheManager.load`.

        Args:
            without: usable tokens if it fails.
        """
        self._request, self._without = request, without
        self.transfer = transfer
        """The copy; None: nothing is loaded."""
        self._lost = transfer is None and request.match.load > 0

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed: all usable ones, or only those of the device if
        the load is known to have failed."""
        return self._request.match.usable if not self.failed else self._without

    @property
    def failed(self) -> bool:
        """Whether it has finished, and failed."""
        if self.transfer is None:
            return self._lost
        return self.transfer.state in (State.FAILED, State.CANCELLED)

    def done(self) -> bool:
        """Whether it has finished. Does not block.

        Raises:
            TransferFailed: it failed, or the manager disabled itself before it began; no page is
                leaked.
        """
        if self._lost:
            raise TransferFailed(
                f"load {self._request.id!r}: the manager has disabled itself, nothing was loaded; "
                "compute these tokens instead"
            )
        return self.transfer is None or self.transfer.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished.

        Raises:
            WaitTimeout: it is in flight.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        timeout = seconds_of(timeout)
        if self.transfer is not None:
            self.transfer.wait(timeout)
        else:
            self.done()

    def wait_on(self, stream: Any = None) -> None:
        """Make a stream of the device (None: the current one) wait for it, instead of this thread.
        Needs a transfer engine of this process. See `Transfer.wait_on`.

        Raises:
            TransferFailed: it has finished already, and failed.
        """
        if self.transfer is not None:
            wait_on(self.transfer, stream)
        else:
            self.done()

    @property
    def number(self) -> int | None:
        """The copy's number in `Decisions`; None: ranks do not make the copy."""
        moving = None if self.transfer is None else self.transfer.moving
        return getattr(moving, "number", None)


class JointLoad:
    """The load of a request's KV, and other copies to the device that belong to it."""

    def __init__(self, kv: LoadHandle, others: Sequence[BlockTransfer]) -> None:
        """Join them."""
        self._kv, self._others = kv, others
        self._loads: tuple[LoadHandle | BlockTransfer, ...] = (kv, *others)

    @property
    def failed(self) -> bool:
        """Whether one is known to have failed."""
        lost = any(other.state in (State.FAILED, State.CANCELLED) for other in self._others)
        return lost or self._kv.failed

    def done(self) -> bool:
        """Whether all have finished. Does not block.

        Raises:
            TransferFailed: all have finished, and one failed.
        """
        finished, failed = True, None
        for load in self._loads:
            try:
                finished &= load.done()
            except TransferFailed as error:
                failed = failed or error
        if failed is not None and finished:  # else others still write their blocks
            raise failed
        return finished

    def wait(self, timeout: float | None = None) -> None:
        """Block until all have finished.

        Raises:
            WaitTimeout: one is in flight.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        limit = seconds_of(timeout)
        end = None if limit is None else time.monotonic() + limit
        for load in self._loads:
            with contextlib.suppress(TransferFailed):
                load.wait(None if end is None else max(0.0, end - time.monotonic()))
        self.done()

    def wait_on(self, stream: Any = None) -> None:
        """Make a stream of the device (None: the current one) wait for all: see
        `LoadHandle.wait_on`.

        Raises:
            TransferFailed: one has failed already.
        """
        self._kv.wait_on(stream)
        for other in self._others:
            wait_on(other, stream)


def wait_on(transfer: BlockTransfer, stream: Any) -> None:
    """Make a stream of the device wait for a copy; this thread waits instead if no engine of this
    process makes the copy.

    Raises:
        TransferFailed: it has finished already, and failed.
    """
    if transfer.finished:
        transfer.done()
        return
    engine_transfer = getattr(transfer.moving, "transfer", None)
    if engine_transfer is None:
        transfer.wait()
    else:
        engine_transfer.wait_on(stream)


def begin_load(state: ManagerState, request: Request, without: int) -> LoadHandle:
    """See `KVCacheManager.load`."""
    lease, match, tokens = request.host, request.match, state.page_tokens
    if lease is None or match.load <= 0 or request.loading is not None:
        return no_load(request, without)
    block = state.device.block_tokens
    if len(request.table) * block < match.usable:
        raise ConfigError(
            f"load {request.id!r}: expected blocks for {match.usable} tokens, found "
            f"{len(request.table)} of {block}; allocate them first"
        )
    begin, end = request.host_first * tokens, (request.host_first + len(lease)) * tokens
    slots = np.full(end - begin, -1, np.int64)
    first = match.device
    device_slots = slots_of(request.table, block, first, match.usable)
    slots[first - begin : match.usable - begin] = device_slots
    blocks = request.table[first // block : -(-match.usable // block)]
    pages = len(lease)
    counts, begun = state.counts, time.perf_counter_ns()

    def on_result(ok: bool, nbytes: int | None) -> None:
        if ok:
            moved = state.moved_bytes(match.usable - first, nbytes)
            took = LOAD.of(time.perf_counter_ns() - begun)
            counts.add(loads=1, loaded_pages=pages, loaded_bytes=moved, **took)
        else:
            counts.add(failed_loads=1)

    transfer = state.transfers.begin(
        blocks,
        state.backend,
        state.backend.load,
        lease,
        (slots, 0),
        on_result,
        of=request.transfers,
        into=(request, "loading"),
        instead_of=(request, "host"),
    )
    request.loaded = True
    return LoadHandle(request, transfer, without)


def no_load(request: Request, without: int) -> LoadHandle:
    """A load of nothing: there is nothing to load, or the manager is disabled."""
    request.let_go_of_host()
    request.loaded = True
    return LoadHandle(request, request.loading, without)


__all__ = ["JointLoad", "LoadHandle", "begin_load", "no_load", "wait_on"]
