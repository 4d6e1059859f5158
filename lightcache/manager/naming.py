"""Naming: full blocks of running requests get their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages
from lightcache.layout import KeyStatus
from lightcache.manager.matches import WritePolicy
from lightcache.manager.requests import HELD, PINNED, Request, Space

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager
    from lightcache.manager.weights import Look

NOTHING: Mapping[int, int] = {}
"""No block is to be exchanged."""
# As plain numbers: numpy takes members of an enum for objects first.
_NEW, _PRESENT = int(KeyStatus.NEW), int(KeyStatus.PRESENT)

Filled = tuple[int, Request, int]
"""A request's place in the batch, the request, and how many of its blocks are full."""


def name_blocks(
    manager: KVCacheManager,
    running: list[Request],
    look: Look,
    changed: list[Mapping[int, int]],
) -> None:
    """Name what is full and has no name yet, in one call for each space.

    Args:
        changed: for each request, to be filled here: the blocks that others hold already, position
            -> block. An error leaves in it what was exchanged before: ours were given back.
    """
    by_space: dict[Space, list[Filled]] = {}
    block = manager.device.block_tokens
    for i, one in enumerate(running):
        if one.total < (one.named + 1) * block or not one.on_device:
            continue  # nearly always, while single tokens are generated
        full = min(one.publishable() // block, len(one.table))
        if full > one.named:
            assert one.space is not None
            members = by_space.get(one.space)
            if members is None:
                members = by_space[one.space] = []
            members.append((i, one, full))
    for space, members in by_space.items():
        if look.good(space):
            _name(manager, space, members, changed)


def _name(
    manager: KVCacheManager,
    space: Space,
    members: list[Filled],
    changed: list[Mapping[int, int]],
) -> None:
    blocks: list[Pages] = []
    packed: list[bytes] = []
    starts: list[int] = []
    offsets, count = [0], 0
    for _, one, full in members:
        first = one.named
        begin = first - 1 if first else 0  # the key before the first new one: what that hangs on
        blocks.append(one.table[first:full])
        packed += one.device_chain.packed(begin, full)
        starts.append(first - begin)
        count += full - begin
        offsets.append(count)
    assert space.device is not None
    ours = np.concatenate(blocks)
    keys = np.frombuffer(bytearray().join(packed), np.uint64).reshape(-1, 2)
    theirs, status = manager.device.name_many(
        ours, keys, np.array(offsets), np.array(starts), space.device
    )
    if manager.device.owned:
        _pin(members, status)
        for at in np.flatnonzero(theirs != ours).tolist():
            _exchange(manager, members, at, int(theirs[at]), changed)
    if manager.config.write is WritePolicy.BACK:
        for _, one, full in members:
            manager._demotion.note(one, one.named, full)
    for _, one, full in members:
        one.named = full


def _pin(members: list[Filled], status: npt.NDArray[np.uint8]) -> None:
    """Those that have a name now are pinned; the others are held as before."""
    named = (status == _NEW) | (status == _PRESENT)
    kinds, at = np.where(named, np.uint8(PINNED), np.uint8(HELD)).tobytes(), 0
    for _, one, full in members:
        count = full - one.named
        one.kind[one.named : full] = kinds[at : at + count]
        at += count


def _exchange(
    manager: KVCacheManager,
    members: list[Filled],
    at: int,
    block: int,
    changed: list[Mapping[int, int]],
) -> None:
    """Another block holds what the at-th of those to be named does, and takes its place."""
    for i, one, full in members:
        count = full - one.named
        if at < count:
            changed[i] = {**changed[i], one.named + at: block}
            one.table[one.named + at] = block
            manager._figures.add(duplicates=1)
            return
        at -= count


__all__ = ["NOTHING", "name_blocks"]
