"""Pending frees: blocks and pages of ended requests, held until no copy touches them. Then the
offloader begins their write to storage, and they are given back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np

from lightcache._together import together
from lightcache.errors import Detached, LeaseLost, LightcacheError, WaitTimeout
from lightcache.leases import Allocation, Lease
from lightcache.manager.blocks import ManagedBlocks
from lightcache.manager.naming import FullBlocks
from lightcache.manager.offload import Offloader
from lightcache.manager.request import HELD, PINNED, Request
from lightcache.manager.state import ManagerState
from lightcache.manager.transfers import State
from lightcache.shm.locking import Hurried


class PendingFrees:
    """Ended requests. Their blocks are given back when no copy touches them any more. The manager's
    lock is around every call that does not block."""

    def __init__(self, state: ManagerState, offloader: Offloader, full_blocks: FullBlocks) -> None:
        """No request has ended."""
        self._state, self._offloader, self._full_blocks = state, offloader, full_blocks
        self._waiting: list[Request] = []
        self._holdings: list[_Holdings] = []
        """Blocks and pages that no copy touches any more. Only blocks without a key stay here, if
        they could not be freed because the lock did not come."""

    def __len__(self) -> int:
        """Number of ended requests that still hold blocks."""
        return len(self._waiting) + sum([len(holdings.requests) for holdings in self._holdings])

    def __contains__(self, request: Request) -> bool:
        """Whether it has ended, and a copy may touch its blocks."""
        return request in self._waiting

    @property
    def extend(self) -> Callable[[list[Request]], None]:
        """A C function that adds ended requests. `poll` then cancels their queued copies, except
        those that publish, and gives their blocks back."""
        return self._waiting.extend

    def poll(self, ended: Sequence[Request] = ()) -> None:
        """Give back blocks and pages that no copy touches any more, and retry earlier failures.

        Args:
            ended: requests that have ended just now; if one has a copy in flight, copies are
                polled.
        """
        with self._state.lock, Hurried(self._state.config.time_limit):
            self._full_blocks.settle()
            for holdings in self._holdings:
                holdings.give_back()
            self._sort_out()
            if not self._waiting:
                return
            for request in self._waiting:
                for transfer in request.transfers:
                    if transfer is request.loading or request.aborted:
                        transfer.cancel()
                request.let_go_of_host()
            if any(not transfer.finished for request in ended for transfer in request.transfers):
                self._state.transfers.poll()
            self._part()

    def _part(self) -> None:
        """Take the blocks and pages of requests whose copies have finished."""
        finished: list[Request] = []
        busy: list[Request] = []
        for request in self._waiting:
            copied = request.transfers and not all(
                transfer.finished for transfer in request.transfers
            )
            (busy if copied else finished).append(request)
        if not finished:
            return
        holdings, take = _Holdings.of(self._state, self._offloader, finished)
        together(
            partial(setattr, self, "_waiting", busy),
            partial(self._holdings.append, holdings),
            *take,
        )
        holdings.give_back()
        self._sort_out()

    def _sort_out(self) -> None:
        if self._holdings:
            self._holdings = [holdings for holdings in self._holdings if not holdings.given_back]

    def wait(self, request: Hashable) -> None:
        """Block, without the manager's lock, until no copy of an ended request is in flight, then
        give its blocks back, unless the lock does not come.

        Raises:
            WaitTimeout: transfers are paused, and one of its copies waits for them.
        """
        transfers = [
            transfer
            for leaving in self._waiting
            if leaving.id == request
            for transfer in leaving.transfers
        ]
        for transfer in transfers:
            try:
                transfer.block(None)
            except WaitTimeout:  # the transfer backend has its own limit
                continue
        self._state.transfers.poll()
        self.poll()
        if any(transfer.state is State.QUEUED for transfer in transfers):
            raise WaitTimeout(
                f"release {request!r}: transfers are paused, and what it publishes waits for them; "
                "resume the manager"
            )


class _Holdings:
    """Blocks and pages of ended requests. Each part is given back once, even if `give_back` is
    called again after an interrupt."""

    def __init__(self, state: ManagerState, offloader: Offloader, requests: list[Request]) -> None:
        """The requests still hold all parts."""
        self._state, self._offloader, self.requests = state, offloader, requests
        self._leases_closed = False
        self.pinned: Lease | None = None
        self.held: Allocation | None = None

    @classmethod
    def of(
        cls, state: ManagerState, offloader: Offloader, requests: list[Request]
    ) -> tuple[_Holdings, list[partial[None]]]:
        """The holdings, and the calls that take them from the requests, for `together`."""
        holdings, take = cls(state, offloader, requests), []
        device = state.device
        if isinstance(device, ManagedBlocks) and device.index is not None:
            tables = np.concatenate([request.table for request in requests])
            kinds = np.frombuffer(b"".join([request.kind for request in requests]), np.uint8)
            if len(pinned := tables[kinds == PINNED]):
                holdings.pinned, call = Lease.attached_to(device.index.core, pinned)
                take.append(call)
            if len(held := tables[kinds == HELD]):
                holdings.held, call = Allocation.attached_to(device.index.core, held)
                take.append(call)
        return holdings, take

    @property
    def given_back(self) -> bool:
        """Whether all parts were given back."""
        return self._leases_closed and (self.held is None or self.held.ended)

    def give_back(self) -> None:
        """Let the offloader begin the write to storage, then give all parts back, even if a storage
        raises; blocks without a key as soon as the lock comes."""
        try:
            if not self._leases_closed:
                self._offloader.write_to_storage(self.requests)
        finally:  # also after an interrupt
            self._let_go()

    def _let_go(self) -> None:
        try:
            for request in self.requests:
                if request.hit is not None:
                    request.hit.close()
            if self.pinned is not None:
                self.pinned.close()
            self._leases_closed = True
        finally:
            self._free()

    def _free(self) -> None:
        held = self.held
        if held is not None and not held.ended:
            try:
                held.close()
            except (LeaseLost, Detached):  # a second call would raise the same
                held.ended = True
                raise
            except LightcacheError:
                return


__all__ = ["PendingFrees"]
