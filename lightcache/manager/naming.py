"""Keys of full blocks in the device's index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightcache._arguments import Pages
from lightcache.layout import KeyStatus
from lightcache.leases import NamingResult
from lightcache.manager.request import (
    HELD,
    PINNED,
    CacheScope,
    Owed,
    Request,
    WritePolicy,
    keys_of,
)
from lightcache.manager.state import ManagerState
from lightcache.manager.write_back import KVWriteBack

NOTHING: Mapping[int, int] = {}
"""No block to exchange."""
_KINDS = bytes(
    PINNED if status in (KeyStatus.NEW, KeyStatus.PRESENT) else HELD for status in range(256)
)
"""The kind of a block in its request's table, by the status that the index returned for its key."""
Filled = tuple[Request, int, int]
"""A request, the number of its named blocks, and of its full blocks."""


@dataclass(frozen=True, eq=False)
class _RequestNaming:
    """Full blocks of requests that the device's index is naming. It fills `named` in the same call.
    After an interrupt, the manager's next call updates the requests."""

    members: list[Filled]
    ours: Pages
    named: NamingResult


class FullBlocks:
    """Names full blocks of running requests. The manager's lock is around every call."""

    def __init__(self, state: ManagerState, write_back: KVWriteBack) -> None:
        """No block is being named."""
        self._state, self._write_back = state, write_back
        self._naming: _RequestNaming | None = None
        """The last naming, for `settle`."""

    def cache_blocks(self, running: list[Request]) -> None:
        """Name full blocks that have no name yet, in one call for each space. If another block has
        the same content already, it replaces the request's block, and `Request.owed` has the
        exchange."""
        by_space: dict[CacheScope, list[Filled]] = {}
        block = self._state.device.block_tokens
        for request in running:
            if request.total < (request.named + 1) * block or not request.on_device:
                continue  # nearly always, while single tokens are generated
            full = min(request.publishable() // block, len(request.table))
            if full > request.named:
                assert request.space is not None
                members = by_space.get(request.space)
                if members is None:
                    members = by_space[request.space] = []
                members.append((request, request.named, full))
        for space, members in by_space.items():
            if self._state.weights.is_valid(space):
                self._name(space, members)

    def _name(self, space: CacheScope, members: list[Filled]) -> None:
        blocks: list[Pages] = []
        packed: list[bytes] = []
        starts: list[int] = []
        offsets, count = [0], 0
        for request, first, full in members:
            begin = first - 1 if first else 0  # includes the parent key of the new blocks
            blocks.append(request.table[first:full])
            packed += request.device_chain.packed(begin, full)
            starts.append(first - begin)
            count += full - begin
            offsets.append(count)
        assert space.device is not None
        ours = np.concatenate(blocks)
        keys = keys_of(packed)
        naming = self._naming = _RequestNaming(members, ours, NamingResult(len(ours)))
        try:
            self._state.device.name_many(
                ours, keys, np.array(offsets), np.array(starts), space.device, naming.named
            )
        finally:
            self.settle()

    def settle(self) -> None:
        """Update the requests whose blocks were named last: kinds, exchanges, and `named`. Safe to
        repeat."""
        naming = self._naming
        if naming is None:
            return
        settled, offset = naming.named.settled, 0
        kinds = naming.named.status.tobytes().translate(_KINDS)
        owned, back = self._state.device.owned, self._state.config.write is WritePolicy.BACK
        if owned and naming.named.pages[:settled].tobytes() != naming.ours[:settled].tobytes():
            self._exchange(naming, settled)
        for request, first, full in naming.members:
            end = full
            if settled < offset + full - first:  # interrupted before its last block was named
                end = first + max(0, settled - offset)
            if owned:
                request.kind[first:end] = kinds[offset : offset + end - first]
            if back and end > first:
                self._write_back.note(request, first, end)
            if end > request.named:
                request.named = end
            offset += full - first
        self._naming = None

    def _exchange(self, naming: _RequestNaming, settled: int) -> None:
        """Replace our blocks by blocks that have the same content already."""
        theirs = naming.named.pages[:settled]
        exchanged = np.flatnonzero(theirs != naming.ours[:settled])
        offset = 0
        for request, first, full in naming.members:
            mine = exchanged[(exchanged >= offset) & (exchanged < offset + full - first)]
            if len(mine):
                positions = (mine - offset + first).tolist()
                changed = dict(zip(positions, theirs[mine].tolist(), strict=True))
                owed = request.owed
                before = {} if owed is None or owed.told else owed.changed
                request.owed = Owed({**before, **changed})
                for position, block in changed.items():
                    request.table[position] = block
            offset += full - first
        self._state.counts.add(duplicates=len(exchanged))


__all__ = ["NOTHING", "FullBlocks"]
