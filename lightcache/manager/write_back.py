"""Write-back: what a device index would evict next is copied to the host, and then freed.

`WriteBack` pins blocks, or slots of states, in the order of eviction, has copies made of what the
host lacks, and frees them when these have finished. `BlockWriteBack` adds what an allocation of
blocks does. What is copied, and what is counted, say the parts that own the pages: `KVWriteBack`,
windows and states. A host page may span several blocks of KV: when the last of them is named, the
blocks and the page's key are noted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError, OutOfPages, WaitTimeout
from lightcache.kernels.moves import slots_of_blocks
from lightcache.leases import Allocation, Lease
from lightcache.manager.blocks import DeviceTier, ManagedBlocks, MirroredBlocks
from lightcache.manager.limits import nothing, seconds_of
from lightcache.manager.offload import Offloader
from lightcache.manager.request import HELD, CacheScope, Request, RequestOptions
from lightcache.manager.state import ManagerState
from lightcache.manager.transfers import BlockTransfer, State
from lightcache.page_index import PageIndex
from lightcache.prompt import TokenIds

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

    def __init__(self, state: ManagerState, device: DeviceTier, offloader: Offloader) -> None:
        """Nothing is being written back."""
        super().__init__()
        self._state, self._device, self._offloader = state, device, offloader

    def demote(self, n: int, cause: str = "demote") -> int:
        """See `WriteBack`. While copies are disabled none: allocating evicts blocks unwritten, as
        if the host had no room."""
        return super().demote(n, cause) if self._offloader.may_copy() else 0

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


# ---- Of KV


@dataclass(frozen=True, eq=False)
class _Origin:
    """A host page that can be written from the device."""

    space: CacheScope
    device_key: bytes
    """Key of its last block. While the block has this key, it holds the page."""
    host_keys: Keys
    """Keys of the prompt's pages from the first to this one. Arrays of one request share memory."""
    options: RequestOptions
    blocks: Pages
    offset: int
    """Token of the first block at which it begins."""
    tokens: TokenIds | None
    """Its token ids, shape (1, page_tokens); None: they are not noted."""
    lives: Any = None
    """Mirrored blocks: for each block a number that changes with its content. For managed blocks a
    block stays as long as its descendants, so the last block's key is enough."""


@dataclass(frozen=True, eq=False)
class _Home:
    """The key under which the host has a block's content, if it has it."""

    space: CacheScope
    device_key: Keys
    """Valid while the block has this key, shape (1, 2)."""
    host_key: Keys
    """Key of the page in which the block ends, shape (1, 2)."""


@dataclass(eq=False)
class _Batch(WrittenBack):
    """Blocks of KV that are being written back."""

    homes: dict[int, _Home] = field(default_factory=dict)
    """Homes of the blocks that lie in a host page, by block number."""
    written: list[_Origin] = field(default_factory=list)
    """Pages that are being written to the host, and to storage afterwards."""


class KVWriteBack(BlockWriteBack):
    """The write-back of one manager's KV. Its lock is around every call."""

    _new = _Batch

    def __init__(self, state: ManagerState, offloader: Offloader) -> None:
        """No block is being written back."""
        super().__init__(state, state.device, offloader)
        self._origins: dict[int, dict[bytes, _Origin]] = {}
        """Pages by last block and page key."""
        self._homes: dict[int, _Home] = {}
        """Managed blocks: homes by block. A home is stale if its block has another key by now."""
        self._evicting: list[tuple[list[BlockTransfer], list[_Origin]]] = []
        """Mirrored blocks: copies of blocks that the engine is going to evict, and their pages."""

    def note(self, request: Request, begin: int, end: int) -> None:
        """Note that blocks [begin, end) of a request's table were named."""
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        space, options, table = request.space, request.options, request.table
        device = self._state.device
        assert space is not None
        goes = "host" in options.tiers and options.priority >= 0
        keys = request.host_chain.keys
        for page in range(begin * block // tokens, end * block // tokens):
            # `last` is the block of the page's last token; a page may be part of one block.
            first, last = page * tokens // block, ((page + 1) * tokens - 1) // block
            if not goes or (device.owned and HELD in request.kind[first : last + 1]):
                # A block without a name is freed with its request. An earlier note of this block
                # may be for a page that begins in other blocks.
                self._origins.pop(int(table[last]), None)
                continue
            origin = _Origin(
                space,
                request.device_chain.keys[last].tobytes(),
                keys[: page + 1],
                options,
                table[first : last + 1].copy(),
                page * tokens % block,
                request.token_rows(page, page + 1),
                self._lives(table[first : last + 1]),
            )
            known = self._origins.setdefault(int(origin.blocks[-1]), {})
            if known and next(iter(known.values())).device_key != origin.device_key:
                known.clear()
            # Replaces an equal key: its parents may lie in other blocks by now.
            known[origin.host_keys[-1].tobytes()] = origin
            if device.owned:
                host_key = origin.host_keys[-1:].copy()
                for position in range(first, last + 1):
                    device_key = request.device_chain.keys[position : position + 1].copy()
                    self._homes[int(table[position])] = _Home(space, device_key, host_key)

    def _lives(self, blocks: Pages) -> Any:
        device = self._state.device
        return device.lives(blocks) if isinstance(device, MirroredBlocks) else None

    def _write(self, batch: WrittenBack, pages: Pages, keys: Keys) -> bool:
        assert isinstance(batch, _Batch)
        batch.homes = self._homes_of(pages, keys)
        return self.write(pages, keys, batch.transfers, batch.written)

    def evicting(self, blocks: Pages, keys: Keys) -> int:
        """Mirrored blocks: see `KVCacheManager.evicting`. Returns how many copies were begun."""
        begun: list[BlockTransfer] = []
        written: list[_Origin] = []
        self._evicting.append((begun, written))
        self.write(blocks, keys, begun, written)
        self.poll()
        return len(begun)

    def write(
        self, blocks: Pages, keys: Keys, begun: list[BlockTransfer], written: list[_Origin]
    ) -> bool:
        """Begin to write the pages that end in these blocks. Returns False after an error; the
        first one ends the loop, since each may be a long wait. Pages without room on the host are
        skipped. The notes stay: the host may evict a page before the device does.

        Args:
            keys: device keys of the blocks.
            begun: the copies are appended here.
            written: their pages are appended here, for `_store`.
        """
        refused: set[bytes] = set()
        for i in range(len(blocks) - 1, -1, -1):  # prefixes first: a host page needs its parent
            for origin in self._origins.get(int(blocks[i]), {}).values():
                lives = self._lives(origin.blocks)
                same = lives is None or (lives == origin.lives).all()
                if not same or origin.device_key != keys[i].tobytes():
                    continue
                if not self._offloader.may_copy():
                    self._offloader.count_unwritten("disabled", 1)
                    return False
                try:
                    self._write_page(origin, begun, written, refused)
                except LightcacheError as error:
                    self._state.counts.add(failed_offloads=1)
                    self._offloader.count_unwritten("refused", 1, str(error))
                    return False
        return True

    def _write_page(
        self,
        origin: _Origin,
        begun: list[BlockTransfer],
        written: list[_Origin],
        refused: set[bytes],
    ) -> None:
        """Begin to write a page, unless the host has it already or has no room.

        Args:
            refused: keys of pages without room. Their children are skipped: they would never be
                found, and would evict pages that can be.
        """
        state, keys = self._state, origin.host_keys[-2:]  # its own key, after its parent's
        before = len(keys) - 1
        key = keys[before].tobytes()
        if before and keys[0].tobytes() in refused:
            refused.add(key)
            self._offloader.count_unwritten("no_room", 1, "the page before them has no room")
            return
        new = state.host.reserve(
            keys,
            before,
            shards=state.backend.shards,
            admission=self._offloader.admits(origin.options),
            hint=origin.options.hint,
            namespace=origin.space.host,
            timeout=state.config.time_limit,
        )
        if len(new.new):
            if origin.tokens is not None:
                state.host.note_tokens(new, keys[before:], origin.tokens, before)
            slots = self._slots(origin, before)
            self._offloader.begin_kv(new, slots, origin.blocks, begun, origin.space)
            written.append(origin)
            return
        if self._offloader.count_missing(new):
            refused.add(key)
        new.release()

    def _slots(self, origin: _Origin, before: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        own = slots_of_blocks(origin.blocks, block, first=origin.offset, tokens=tokens)
        return np.concatenate([np.full(before * tokens, -1, np.int64), own])

    def poll(self) -> None:
        """Free blocks whose copies have finished. If an index fails, they stay."""
        if self._evicting:
            every, self._evicting = self._evicting, []
            for begun, written in every:
                if all(transfer.finished for transfer in begun):
                    store = partial(self._store_pages, written)
                    self._state.fail_open.run(store, nothing, proves=False)
                else:
                    self._evicting.append((begun, written))
        super().poll()

    def _store(self, batch: WrittenBack) -> None:
        assert isinstance(batch, _Batch)
        self._store_pages(batch.written)

    def _store_pages(self, written: list[_Origin]) -> None:
        """Write pages that were written back from the host to storage, each prompt as far as it was
        written. The host did not have these pages when their request ended."""
        last = dict[bytes, _Origin]()
        for origin in sorted(written, key=lambda each: len(each.host_keys)):
            if "storage" in origin.options.tiers and self._state.weights.is_valid(origin.space):
                if len(origin.host_keys) > 1:
                    last.pop(origin.host_keys[-2].tobytes(), None)
                last[origin.host_keys[-1].tobytes()] = origin
        stored_with = self._state.stored_with
        for origin in last.values():
            keys = origin.host_keys
            if stored_with is not None:
                try:
                    keys = stored_with(keys, origin.space)
                except LightcacheError:  # as a write that fails: the others are tried
                    continue
            if len(keys):
                self._write_to_storage(keys, origin.space)

    def _freed(self, batch: WrittenBack, index: PageIndex, listed: int, freed: int) -> None:
        assert isinstance(batch, _Batch)
        ask = partial(self._on_host, batch, index)
        present = min(freed, self._state.fail_open.run(ask, lambda: 0, proves=False))
        self._state.counts.add(
            demotions=present,
            demotions_lost=freed - present,
            kept_by_match=listed - freed,
            **{f"device_evicted_{batch.cause}": freed},
        )

    def _homes_of(self, blocks: Pages, keys: Keys) -> dict[int, _Home]:
        """Homes of those blocks that lie in a host page."""
        homes = {}
        for block, key in zip(blocks.tolist(), keys, strict=True):
            home = self._homes.get(block)
            if home is not None and (home.device_key == key).all():
                homes[block] = home
        return homes

    def _on_host(self, batch: _Batch, index: PageIndex) -> int:
        """Number of a batch's blocks that the device has freed and the host has. Looks on the host:
        pages that were there before count, and pages whose copy failed do not."""
        present, host = 0, self._state.host
        for block, home in batch.homes.items():
            if index.peek(home.device_key, namespace=home.space.device):
                continue  # it stayed on the device
            if self._homes.get(block) is home:
                del self._homes[block]
            present += host.peek(home.host_key, namespace=home.space.host)
        return present

    def close(self) -> None:
        """Stop: blocks that are being written back stay on the device."""
        super().close()
        self._evicting.clear()
        self._origins.clear()
        self._homes.clear()


# ---- For callers


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


__all__ = ["BlockWriteBack", "KVWriteBack", "WriteBack", "WrittenBack", "when_there_is_room"]
