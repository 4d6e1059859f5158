"""Write-back: blocks that the device needs for something else go to the host first.

A host page may be several blocks. When the last of them gets its name, here is noted of which
blocks and under which key the page would be written; nothing of it is needed for anything but
writing back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError
from lightcache.leases import Lease
from lightcache.manager.attached import AttachedDevice
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.requests import HELD, Request, Space
from lightcache.manager.traffic import Movement, State, stuck

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager
    from lightcache.page_index import PageIndex


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


@dataclass(frozen=True, eq=False)
class Home:
    """Where the host has a block's content, if it has it."""

    space: Space
    device_key: Keys
    """As long as this is the block's, shape (1, 2)."""
    host_key: Keys
    """Of the page in which the block ends, shape (1, 2)."""


@dataclass(eq=False)
class Group:
    """Blocks on their way out, pinned until their copies are over."""

    lease: Lease
    movements: list[Movement]
    homes: dict[int, Home]
    """Of those that lie in a page of the host, by their numbers."""
    cause: str
    """"room", "low_water" or "demote"."""
    stay: bool
    """The host did not answer: not all of it is written, so the blocks are not given up."""


class Demotion:
    """The write-back of one manager. Its lock is around every call."""

    def __init__(self, manager: KVCacheManager) -> None:
        """Nothing is on its way."""
        self._manager = manager
        self._origins: dict[int, dict[bytes, Origin]] = {}
        """By the last block of each, and the host page's key."""
        self._homes: dict[int, Home] = {}
        """Owned devices, by block. A stale one is known by its key."""
        self._groups: list[Group] = []

    @property
    def going(self) -> int:
        """Blocks on their way out. Not those that wait for a copy of which nobody knows: they never
        get there."""
        return sum(len(group.lease) for group in self._groups if not stuck(group.movements))

    def note(self, one: Request, begin: int, end: int) -> None:
        """Blocks [begin, end) of a request's table got their names."""
        tokens, block = self._manager.page_tokens, self._manager.device.block_tokens
        assert one.space is not None
        device, wishes = self._manager.device, one.wishes
        goes = "host" in wishes.tiers and wishes.priority >= 0
        for page in range(begin * block // tokens, end * block // tokens):
            # The page's last token lies in this block; a page may be a part of one.
            first, last = page * tokens // block, ((page + 1) * tokens - 1) // block
            if not goes or (device.owned and HELD in one.kind[first : last + 1]):
                # Without a name it is gone as soon as the request is. What was noted of this block
                # may have begun in others.
                self._origins.pop(int(one.table[last]), None)
                continue
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
            if device.owned:
                own = made.host_keys[-1:].copy()
                for at in range(first, last + 1):
                    key = one.device_chain.keys[at : at + 1].copy()
                    home = Home(one.space, key, own)
                    self._homes[int(one.table[at])] = home

    def _lives(self, blocks: Pages) -> Any:
        device = self._manager.device
        return device.lives(blocks) if isinstance(device, AttachedDevice) else None

    def demote(self, n: int, cause: str) -> int:
        """Begin to write back up to n blocks, those that eviction would take next. They are free
        when that is over, but for those that somebody came for. Returns how many are on their
        way.

        Args:
            cause: under which they are counted: "room", "low_water" or "demote".
        """
        device = self._manager.device
        if not isinstance(device, OwnedDevice) or device.index is None or n < 1:
            return 0
        oldest = device.index.oldest(min(n, 4096))
        blocks = oldest.pages.copy()
        homes = self._homes_of(blocks, oldest.keys)
        group = Group(oldest.lease, [], homes, cause, stay=True)
        self._groups.append(group)
        group.stay = not self.write(blocks, oldest.keys, group.movements)
        self.poll()
        return len(blocks)

    def make_room(self, wanted: int) -> None:
        """Begin to write back what stands in the way of so many free blocks, if they can be had.
        What is over was looked at just now."""
        device = self._manager.device
        assert isinstance(device, OwnedDevice)
        assert device.index is not None
        made = device.free + self.going
        while made < wanted and device.index.can_allocate(wanted - self.going):
            self.demote(wanted - made, "room")
            before, made = made, device.free + self.going
            if made <= before:
                return  # they stay, for whatever reason

    def running(self) -> Movement | None:
        """A copy that blocks on their way out wait for, and that goes on; None: there is none."""
        movements = (each for group in self._groups for each in group.movements)
        return next((each for each in movements if each.state is State.RUNNING), None)

    def write(self, blocks: Pages, keys: Keys, begun: list[Movement]) -> bool:
        """Begin to write the pages that end in these blocks. Whether all were begun that the host
        had room for: the first error ends it, for each may be a long wait. What was noted stays:
        the host may lose a page before the device does.

        Args:
            keys: that the device has them under.
            begun: the copies are appended here.
        """
        refused: set[bytes] = set()
        for i in range(len(blocks) - 1, -1, -1):  # prefixes first: host pages hang on each other
            for origin in self._origins.get(int(blocks[i]), {}).values():
                lives = self._lives(origin.blocks)
                same = lives is None or (lives == origin.lives).all()
                if not same or origin.device_key != keys[i].tobytes():
                    continue
                try:
                    self._write(origin, begun, refused)
                except LightcacheError:
                    self._manager._figures.add(failed_offloads=1)
                    return False
        return True

    def _write(self, origin: Origin, begun: list[Movement], refused: set[bytes]) -> None:
        """Unless the host has it already, or no room for it.

        Args:
            refused: keys of pages that there was no room for. What hangs on one of them would
                never be found, and drive out what is.
        """
        manager = self._manager
        before = len(origin.host_keys) - 1
        own = origin.host_keys[before].tobytes()
        if before and origin.host_keys[0].tobytes() in refused:
            refused.add(own)
            manager._figures.add(no_room_pages=1)
            return
        new = manager.host.reserve(
            origin.host_keys,
            before,
            shards=manager.mover.shards,
            namespace=origin.space.host,
            timeout=manager.config.time_limit,
        )
        if len(new.new):
            manager._writer.launch(new, self._slots(origin, before), origin.blocks, begun)
            return
        if len(new.missing):
            refused.add(own)
        manager._figures.add(no_room_pages=len(new.missing))
        new.release()

    def _slots(self, origin: Origin, before: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        tokens, block = self._manager.page_tokens, self._manager.device.block_tokens
        own = origin.blocks.astype(np.int64)[:, None] * block + np.arange(block)
        flat = own.reshape(-1)[origin.offset : origin.offset + tokens]
        return np.concatenate([np.full(before * tokens, -1, np.int64), flat])

    def poll(self) -> None:
        """Give up blocks whose copies are over. They stay where an index does not answer."""
        over = [group for group in self._groups if all(each.over for each in group.movements)]
        if not over:
            return
        self._groups = [group for group in self._groups if group not in over]
        for group in over:
            give_up = partial(self._give_up, group)
            self._manager._guard.run(give_up, group.lease._let_go, proves=False)

    def _give_up(self, group: Group) -> None:
        index, n = self._manager.device.index, len(group.lease)
        if group.stay or index is None:
            group.lease._let_go()
            return
        gone = index.discard(group.lease)
        ask = partial(self._on_host, group, index)
        there = min(gone, self._manager._guard.run(ask, lambda: 0, proves=False))
        self._manager._figures.add(
            demotions=there,
            demotions_lost=gone - there,
            kept_by_match=n - gone,
            **{f"device_evicted_{group.cause}": gone},
        )

    def _homes_of(self, blocks: Pages, keys: Keys) -> dict[int, Home]:
        """Of those of these blocks that lie in a page of the host."""
        found = {}
        for block, key in zip(blocks.tolist(), keys, strict=True):
            home = self._homes.get(block)
            if home is not None and (home.device_key == key).all():
                found[block] = home
        return found

    def _on_host(self, group: Group, index: PageIndex) -> int:
        """Blocks of a group that the device has given up and the host has. It is asked, so that
        what was there before counts, and what did not get there does not."""
        there, host = 0, self._manager.host
        for block, home in group.homes.items():
            if index.peek(home.device_key, namespace=home.space.device):
                continue  # it stayed
            if self._homes.get(block) is home:
                del self._homes[block]
            there += host.peek(home.host_key, namespace=home.space.host)
        return there

    def close(self) -> None:
        """Keep what is on its way where it is."""
        for group in self._groups:
            group.lease.release()
        self._groups.clear()
        self._origins.clear()
        self._homes.clear()


__all__ = ["Demotion"]
