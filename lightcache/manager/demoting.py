"""Write-back: blocks that the device needs for something else go to the host first.

A host page may be several blocks. When the last of them gets its name, here is noted of which
blocks and under which key the page would be written; nothing of it is needed for anything but
writing back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError
from lightcache.leases import Lease
from lightcache.manager.attached import AttachedDevice
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.requests import HELD, Request, Space
from lightcache.manager.traffic import Movement

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


@dataclass(frozen=True, eq=False)
class Origin:
    """A host page that could be written from the device."""

    space: Space
    device_key: bytes
    """Of its last block: the block is still this one's."""
    host_keys: Keys
    """Of the page before, if there is one, and its own."""
    blocks: Pages
    offset: int
    """Where it begins, in tokens of the first of them."""
    lives: Any = None
    """Attached devices: of each of the blocks, what says that it is the same still. Of an owned
    one prefixes stay as long as what hangs on them, so the last block's key says it for all."""


@dataclass(eq=False)
class Group:
    """Blocks on their way out, pinned until their copies are over."""

    lease: Lease
    movements: list[Movement]


class Demotion:
    """The write-back of one manager. Its lock is around every call."""

    def __init__(self, manager: KVCacheManager) -> None:
        """Nothing is on its way."""
        self._manager = manager
        self._origins: dict[int, dict[bytes, Origin]] = {}
        """By the last block of each, and the host page's key."""
        self._groups: list[Group] = []

    @property
    def going(self) -> int:
        """Blocks on their way out."""
        return sum(len(group.lease) for group in self._groups)

    def note(self, one: Request, begin: int, end: int) -> None:
        """Blocks [begin, end) of a request's table got their names."""
        tokens, block = self._manager.page_tokens, self._manager.device.block_tokens
        assert one.space is not None
        device = self._manager.device
        for page in range(begin * block // tokens, end * block // tokens):
            # The page's last token lies in this block; a page may be a part of one.
            first, last = page * tokens // block, ((page + 1) * tokens - 1) // block
            if device.owned and HELD in one.kind[first : last + 1]:
                continue  # without a name it is gone as soon as the request is
            made = Origin(
                one.space,
                one.device_chain.keys[last].tobytes(),
                one.host_chain.keys[max(0, page - 1) : page + 1],
                one.table[first : last + 1].copy(),
                page * tokens % block,
                self._lives(one.table[first : last + 1]),
            )
            known = self._origins.setdefault(int(made.blocks[-1]), {})
            if known and next(iter(known.values())).device_key != made.device_key:
                known.clear()
            # The same key in the same block once more: what it hangs on may lie elsewhere by now.
            known[made.host_keys[-1].tobytes()] = made

    def _lives(self, blocks: Pages) -> Any:
        device = self._manager.device
        return device.lives(blocks) if isinstance(device, AttachedDevice) else None

    def demote(self, n: int) -> int:
        """Begin to write back up to n blocks, those that eviction would take next. They are free
        when that is over, but for those that somebody came for. Returns how many are on their
        way."""
        device = self._manager.device
        if not isinstance(device, OwnedDevice) or device.index is None or n < 1:
            return 0
        oldest = device.index.oldest(min(n, 4096))
        blocks = oldest.pages.copy()
        self._groups.append(Group(oldest.lease, self.write(blocks, oldest.keys)))
        self.poll()
        return len(blocks)

    def write(self, blocks: Pages, keys: Keys) -> list[Movement]:
        """Begin to write the pages that end in these blocks.

        Args:
            keys: that the device has them under.
        """
        begun = []
        for i in range(len(blocks) - 1, -1, -1):  # prefixes first: host pages hang on each other
            for origin in self._origins.pop(int(blocks[i]), {}).values():
                movement = None
                lives = self._lives(origin.blocks)
                same = lives is None or (lives == origin.lives).all()
                if same and origin.device_key == keys[i].tobytes():
                    movement = self._write(origin)
                if movement is not None:
                    begun.append(movement)
        return begun

    def _write(self, origin: Origin) -> Movement | None:
        """None: the host has it already, or no room for it."""
        manager = self._manager
        before = len(origin.host_keys) - 1
        try:
            new = manager.host.reserve(
                origin.host_keys,
                before,
                shards=manager.mover.shards,
                namespace=origin.space.host,
                timeout=manager.config.time_limit,
            )
        except LightcacheError:
            return None
        if not len(new.new):
            manager._figures.add(no_room_pages=len(new.missing))
            new.release()
            return None
        return manager._writer.launch(new, self._slots(origin, before), origin.blocks)

    def _slots(self, origin: Origin, before: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        tokens, block = self._manager.page_tokens, self._manager.device.block_tokens
        own = origin.blocks.astype(np.int64)[:, None] * block + np.arange(block)
        flat = own.reshape(-1)[origin.offset : origin.offset + tokens]
        return np.concatenate([np.full(before * tokens, -1, np.int64), flat])

    def poll(self) -> None:
        """Give up blocks whose copies are over."""
        device = self._manager.device
        left = []
        for group in self._groups:
            if not all(movement.over for movement in group.movements):
                left.append(group)
                continue
            n = len(group.lease)
            assert device.index is not None
            gone = device.index.discard(group.lease)
            self._manager._figures.add(
                demotions=gone, kept_by_match=n - gone, device_evictions=gone
            )
        self._groups = left

    def close(self) -> None:
        """Keep what is on its way where it is."""
        for group in self._groups:
            group.lease.release()
        self._groups.clear()
        self._origins.clear()


__all__ = ["Demotion"]
