"""Write-back: blocks are written to the host before the device evicts them.

A host page may span several blocks. When the last of them is named, `WriteBack` notes the blocks
and the key of the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError
from lightcache.kernels.moves import slots_of_blocks
from lightcache.leases import Lease
from lightcache.manager.blocks import ManagedBlocks, MirroredBlocks
from lightcache.manager.limits import nothing
from lightcache.manager.offload import Offloader
from lightcache.manager.request import HELD, CacheScope, Request
from lightcache.manager.state import ManagerState
from lightcache.manager.transfers import BlockTransfer, State

if TYPE_CHECKING:
    from lightcache.page_index import PageIndex


@dataclass(frozen=True, eq=False)
class _Origin:
    """A host page that can be written from the device."""

    space: CacheScope
    device_key: bytes
    """Key of its last block. While the block has this key, it holds the page."""
    host_keys: Keys
    """Keys of the prompt's pages from the first to this one. Arrays of one request share memory."""
    to_storage: bool
    """Whether it is written to storage after the host has it."""
    blocks: Pages
    offset: int
    """Token of the first block at which it begins."""
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
class _Group:
    """Blocks that are being written back, pinned until their copies have finished."""

    lease: Lease
    transfers: list[BlockTransfer]
    homes: dict[int, _Home]
    """Homes of the blocks that lie in a host page, by block number."""
    cause: str
    """"room", "low_water" or "demote"."""
    stay: bool
    """Whether the blocks stay on the device: the host failed, so not all of them are written."""
    written: list[_Origin] = field(default_factory=list)
    """Pages that are being written to the host, and to storage afterwards."""


class WriteBack:
    """The write-back of one manager. Its lock is around every call."""

    def __init__(self, state: ManagerState, offloader: Offloader) -> None:
        """No block is being written back."""
        self._state, self._offloader = state, offloader
        self._origins: dict[int, dict[bytes, _Origin]] = {}
        """Pages by last block and page key."""
        self._homes: dict[int, _Home] = {}
        """Managed blocks: homes by block. A home is stale if its block has another key by now."""
        self._groups: list[_Group] = []
        self._evicting: list[tuple[list[BlockTransfer], list[_Origin]]] = []
        """Mirrored blocks: copies of blocks that the engine is going to evict, and their pages."""

    @property
    def blocks(self) -> int:
        """Number of blocks that are being written back."""
        return sum(len(group.lease) for group in self._groups)

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
                "storage" in options.tiers,
                table[first : last + 1].copy(),
                page * tokens % block,
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

    def demote(self, n: int, cause: str) -> int:
        """Begin to write back up to n blocks, those that eviction would take next. They are freed
        when their copies have finished, unless a request matches them. Returns their number.

        Args:
            cause: counts them as "room", "low_water" or "demote".
        """
        device = self._state.device
        if not isinstance(device, ManagedBlocks) or device.index is None or n < 1:
            return 0
        if not self._offloader.may_copy():
            return 0  # allocating evicts them unwritten, as if the host had no room
        oldest = device.index.oldest(min(n, 4096))
        blocks = oldest.pages.copy()
        homes = self._homes_of(blocks, oldest.keys)
        group = _Group(oldest.lease, [], homes, cause, stay=True)
        self._groups.append(group)
        group.stay = not self.write(blocks, oldest.keys, group.transfers, group.written)
        self.poll()
        return len(blocks)

    def evicting(self, blocks: Pages, keys: Keys) -> int:
        """Mirrored blocks: see `KVCacheManager.evicting`. Returns how many copies were begun."""
        begun: list[BlockTransfer] = []
        written: list[_Origin] = []
        self._evicting.append((begun, written))
        self.write(blocks, keys, begun, written)
        self.poll()
        return len(begun)

    def make_room(self, wanted: int) -> int:
        """Begin to write back the blocks that eviction would take next, until `wanted` blocks are
        free or being written. Begins none if that many cannot be made available. An error leaves
        the blocks as they were. Returns the number of free blocks now."""
        device, state = self._state.device, self._state
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

    def running(self) -> BlockTransfer | None:
        """A copy in flight of blocks that are being written back; None: there is none."""
        transfers = (transfer for group in self._groups for transfer in group.transfers)
        return next((transfer for transfer in transfers if transfer.state is State.RUNNING), None)

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
                    self._offloader.unwritten("disabled", 1)
                    return False
                try:
                    self._write(origin, begun, written, refused)
                except LightcacheError as error:
                    self._state.counts.add(failed_offloads=1)
                    self._offloader.unwritten("refused", 1, str(error))
                    return False
        return True

    def _write(
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
            self._offloader.unwritten("no_room", 1, "the page before them has no room")
            return
        new = state.host.reserve(
            keys,
            before,
            shards=state.backend.shards,
            namespace=origin.space.host,
            timeout=state.config.time_limit,
        )
        if len(new.new):
            slots = self._slots(origin, before)
            self._offloader.launch(new, slots, origin.blocks, begun, origin.space)
            written.append(origin)
            return
        if len(new.missing):
            refused.add(key)
        self._offloader.unwritten("no_room", len(new.missing), f"no room, {new.why}")
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
                    self._guard_store(written)
                else:
                    self._evicting.append((begun, written))
        finished = [
            group
            for group in self._groups
            if all(transfer.finished for transfer in group.transfers)
        ]
        if not finished:
            return
        self._groups = [group for group in self._groups if group not in finished]
        for group in finished:
            give_up = partial(self._give_up, group)
            self._state.fail_open.run(give_up, group.lease.close, proves=False)
            self._guard_store(group.written)

    def _guard_store(self, written: list[_Origin]) -> None:
        self._state.fail_open.run(partial(self._store, written), nothing, proves=False)

    def _store(self, written: list[_Origin]) -> None:
        """Write pages that were written back from the host to storage, each prompt as far as it was
        written. The host did not have these pages when their request ended."""
        storage, last = self._state.storage, dict[bytes, _Origin]()
        if storage is None:
            return
        for origin in sorted(written, key=lambda each: len(each.host_keys)):
            if origin.to_storage and self._state.weights.is_valid(origin.space):
                if len(origin.host_keys) > 1:
                    last.pop(origin.host_keys[-2].tobytes(), None)
                last[origin.host_keys[-1].tobytes()] = origin
        for origin in last.values():
            try:
                task = storage.write(origin.host_keys, namespace=origin.space.host)
                self._state.tasks.add(task)
            except LightcacheError:
                self._state.counts.add(errors=1)
            except Exception as error:
                self._state.transfers.foreign.note(error)

    def _give_up(self, group: _Group) -> None:
        index, n = self._state.device.index, len(group.lease)
        if group.stay or index is None:
            group.lease.close()
            return
        discarded = index.discard(group.lease)
        ask = partial(self._on_host, group, index)
        present = min(discarded, self._state.fail_open.run(ask, lambda: 0, proves=False))
        self._state.counts.add(
            demotions=present,
            demotions_lost=discarded - present,
            kept_by_match=n - discarded,
            **{f"device_evicted_{group.cause}": discarded},
        )

    def _homes_of(self, blocks: Pages, keys: Keys) -> dict[int, _Home]:
        """Homes of those blocks that lie in a host page."""
        homes = {}
        for block, key in zip(blocks.tolist(), keys, strict=True):
            home = self._homes.get(block)
            if home is not None and (home.device_key == key).all():
                homes[block] = home
        return homes

    def _on_host(self, group: _Group, index: PageIndex) -> int:
        """Number of a group's blocks that the device has freed and the host has. Looks on the host:
        pages that were there before count, and pages whose copy failed do not."""
        present, host = 0, self._state.host
        for block, home in group.homes.items():
            if index.peek(home.device_key, namespace=home.space.device):
                continue  # it stayed on the device
            if self._homes.get(block) is home:
                del self._homes[block]
            present += host.peek(home.host_key, namespace=home.space.host)
        return present

    def close(self) -> None:
        """Stop: blocks that are being written back stay on the device."""
        for group in self._groups:
            group.lease.release()
        self._groups.clear()
        self._evicting.clear()
        self._origins.clear()
        self._homes.clear()


__all__ = ["WriteBack"]
