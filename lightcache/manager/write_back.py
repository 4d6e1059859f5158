"""Write-back: what a device index would evict next is copied to the host, and then freed.

`WriteBack` pins blocks, or slots of states, in the order of eviction, has copies made of what the
host lacks, and frees them when these have finished. `BlockWriteBack` adds what an allocation of
blocks does. What is copied, and what is counted, say the parts that own the pages: KV
(`offload.KVWriteBack`), windows and states.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError, OutOfPages, WaitTimeout
from lightcache.leases import Allocation, Lease
from lightcache.manager.blocks import DeviceTier, ManagedBlocks
from lightcache.manager.limits import nothing, seconds_of
from lightcache.manager.request import CacheScope
from lightcache.manager.state import ManagerState
from lightcache.manager.transfers import BlockTransfer, State
from lightcache.page_index import PageIndex

T = TypeVar("T")


@dataclass(eq=False)
class WrittenBack:
    """Pages of a device index that are being written back, pinned until their copies have
    finished."""

    lease: Lease
    cause: str
    """"room", "low_water" or "demote"."""
    transfers: list[BlockTransfer] = field(default_factory=list)
    stay: bool = True
    """Whether they stay on the device: not all of them are written, since the host failed, or an
    interrupt came."""


class WriteBack:
    """The write-back of one device index. The manager's lock is around every call."""

    _new: type[WrittenBack] = WrittenBack
    """Makes what `_write` notes its copies in."""

    def __init__(self) -> None:
        """Nothing is being written back."""
        self._batches: list[WrittenBack] = []

    @property
    def blocks(self) -> int:
        """Number of blocks, or slots, that are being written back."""
        return sum(len(batch.lease) for batch in self._batches)

    def demote(self, n: int, cause: str = "demote") -> int:
        """Begin to write back up to n pages, those that eviction would take next. They are freed
        when their copies have finished, unless a request matches them. Returns their number."""
        index = self._index()
        if index is None or n < 1:
            return 0
        oldest = index.oldest(min(n, 4096))
        pages, batch = oldest.pages.copy(), self._new(oldest.lease, cause)
        self._batches.append(batch)
        batch.stay = not self._write(batch, pages, oldest.keys)
        self.poll()
        return len(pages)

    def running(self) -> BlockTransfer | None:
        """A copy in flight of what is being written back; None: there is none."""
        transfers = (transfer for batch in self._batches for transfer in batch.transfers)
        return next((transfer for transfer in transfers if transfer.state is State.RUNNING), None)

    def poll(self) -> None:
        """Free what has been copied. If an index fails, it stays."""
        for batch in self._batches[:]:
            if all(transfer.finished for transfer in batch.transfers):
                self._batches.remove(batch)
                self._end(batch)

    def close(self) -> None:
        """Stop: what is being written back stays on the device."""
        for batch in self._batches:
            batch.lease.release()
        self._batches.clear()

    # ---- by the owner of the pages

    def _index(self) -> PageIndex | None:
        """The device's index. None: nothing can be written back now."""
        raise NotImplementedError

    def _write(self, batch: WrittenBack, pages: Pages, keys: Keys) -> bool:
        """Begin the copies of these pages, which have these keys, and note them in the batch.
        False: not all that the host should have were begun, since it failed."""
        raise NotImplementedError

    def _end(self, batch: WrittenBack) -> None:
        """Free the pages of a batch whose copies have finished. Its lease has ended afterwards."""
        raise NotImplementedError


class BlockWriteBack(WriteBack):
    """The write-back of a manager's blocks: of KV, or of one window."""

    def __init__(self, state: ManagerState, device: DeviceTier) -> None:
        """Nothing is being written back."""
        super().__init__()
        self._state, self._device = state, device

    def _index(self) -> PageIndex | None:
        return self._device.index if isinstance(self._device, ManagedBlocks) else None

    def _end(self, batch: WrittenBack) -> None:
        run = self._state.fail_open.run
        run(partial(self._free, batch), batch.lease.close, proves=False)
        run(partial(self._store, batch), nothing, proves=False)

    def _free(self, batch: WrittenBack) -> None:
        index, listed = self._device.index, len(batch.lease)
        if batch.stay or index is None:
            batch.lease.close()
            return
        self._freed(batch, index, listed, index.discard(batch.lease))

    def _freed(self, batch: WrittenBack, index: PageIndex, listed: int, freed: int) -> None:
        """Count what became of a batch, of which so many blocks were freed; others were matched
        meanwhile."""
        raise NotImplementedError

    def _store(self, batch: WrittenBack) -> None:
        """Offer to storage what the host has got by a batch."""
        raise NotImplementedError

    def hold(self, n: int) -> Allocation:
        """`ManagedBlocks.hold`, once what makes room for these blocks is on the host.

        Raises:
            OutOfPages: not enough blocks, or not yet: copies are in flight; ask again.
        """
        device = self._device
        assert isinstance(device, ManagedBlocks)
        free = n if device.index is None else self.make_room(n)
        if free < n and (leaving := self.blocks):
            raise OutOfPages(
                f"allocate: {n} blocks were asked for, {free} are free, and {leaving} are being "
                "written to the host first; `poll`, and ask again"
                + (", when transfers are resumed" if self._state.transfers.paused else "")
            )
        return device.hold(n)

    def make_room(self, wanted: int) -> int:
        """Begin to write back the blocks that eviction would take next, until `wanted` blocks are
        free or being written. Begins none if that many cannot be made available. An error leaves
        the blocks as they were. Returns the number of free blocks now."""
        device, state = self._device, self._state
        assert isinstance(device, ManagedBlocks)
        free = device.free
        if free < wanted:
            state.transfers.poll()  # also while the manager is disabled: copies in flight finish
            self.poll()
            state.fail_open.run(partial(self._make_room, device, wanted), nothing, proves=False)
            free = device.free
        return free

    def _make_room(self, device: ManagedBlocks, wanted: int) -> None:
        assert device.index is not None
        coming = device.free + self.blocks
        while coming < wanted and device.index.can_allocate(wanted - self.blocks):
            self.demote(wanted - coming, "room")
            before, coming = coming, device.free + self.blocks
            if coming <= before:
                return  # no other block can be written back now

    def keep_free(self, share: float) -> None:
        """Write back ahead of need, so that this share of the blocks is free."""
        device = self._device
        if share and isinstance(device, ManagedBlocks) and device.index is not None:
            missing = int(share * device.blocks) - device.free - self.blocks
            if missing > 0:
                demote = partial(self.demote, missing, "low_water")
                self._state.fail_open.run(demote, lambda: 0, proves=False)

    def _write_to_storage(self, keys: Keys, space: CacheScope) -> None:
        """Begin to write host pages to storage. Errors are counted or noted."""
        state = self._state
        if state.storage is None:
            return
        try:
            state.tasks.add(state.storage.write(keys, namespace=space.host))
        except LightcacheError:
            state.counts.add(errors=1)
        except Exception as error:
            state.transfers.foreign.note(error)


def when_there_is_room(
    lock: threading.RLock,
    attempt: Callable[[], T],
    running: Callable[[], BlockTransfer | None],
    timeout: float | None,
) -> T:
    """The result of an allocation, tried again as long as copies that make room for it are in
    flight, and its time lasts.

    Args:
        attempt, running: called with the lock; see `WriteBack.running`.
        timeout: seconds; None: until they have finished.

    Raises:
        OutOfPages: as `attempt`.
        ConfigError: no number of seconds.
    """
    limit = seconds_of(timeout)
    end = None if limit is None else time.monotonic() + limit
    while True:
        with lock:
            try:
                return attempt()
            except OutOfPages:
                copy = running()
                left = None if end is None else end - time.monotonic()
                if not copy or (left is not None and left <= 0):
                    raise
        with contextlib.suppress(WaitTimeout):  # the next try raises OutOfPages
            copy.block(left)  # other threads may call meanwhile


__all__ = ["BlockWriteBack", "WriteBack", "WrittenBack", "when_there_is_room"]
