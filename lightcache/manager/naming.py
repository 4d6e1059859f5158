"""Naming: full blocks of running requests get their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from lightcache.layout import KeyStatus
from lightcache.manager.matches import WritePolicy
from lightcache.manager.requests import PINNED, Request, Space

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager

_NOTHING: Mapping[int, int] = {}


def name_blocks(manager: KVCacheManager, running: list[Request]) -> list[Mapping[int, int]]:
    """Name what is full and has no name yet, in one call for each space. Returns for each request
    the blocks that others hold already: position -> block."""
    changed = [_NOTHING] * len(running)
    by_space: dict[int, tuple[Space, list[tuple[int, int]]]] = {}
    block = manager.device.block_tokens
    for i, one in enumerate(running):
        full = min(one.publishable() // block, len(one.table))
        space, wanted = one.space, one.wishes.write and "device" in one.wishes.tiers
        if full > one.named and wanted and space is not None and space.device is not None:
            by_space.setdefault(id(space), (space, []))[1].append((i, full))
    for space, members in by_space.values():
        if manager._weights.good(space):
            _name(manager, space, running, members, changed)
    return changed


def _name(
    manager: KVCacheManager,
    space: Space,
    running: list[Request],
    members: list[tuple[int, int]],
    changed: list[Mapping[int, int]],
) -> None:
    blocks, keys, starts = [], [], []
    offsets = np.zeros(len(members) + 1, np.int64)
    at = 0
    for k, (i, full) in enumerate(members):
        one = running[i]
        begin = max(0, one.named - 1)  # the key before the first new one: what that hangs on
        blocks.append(one.table[one.named : full])
        keys.append(one.device_chain.keys[begin:full])
        starts.append(one.named - begin)
        at += full - begin
        offsets[k + 1] = at
    assert space.device is not None
    ours = np.concatenate(blocks)
    theirs, status = manager.device.name_many(
        ours, np.concatenate(keys), offsets, np.array(starts, np.int64), space.device
    )
    if not manager.device.owned:
        for i, full in members:
            _named(manager, running[i], full)
        return
    pinned = (status == KeyStatus.NEW) | (status == KeyStatus.PRESENT)
    at = 0
    for i, full in members:
        one = running[i]
        end = at + full - one.named
        part = slice(one.named, full)
        one.kind[part][pinned[at:end]] = PINNED
        for k in np.flatnonzero(theirs[at:end] != ours[at:end]).tolist():
            position = one.named + k
            if changed[i] is _NOTHING:
                changed[i] = {}
            changed[i][position] = int(theirs[at + k])  # type: ignore[index]
            one.table[position] = theirs[at + k]
            manager._figures.add(duplicates=1)
        _named(manager, one, full)
        at = end


def _named(manager: KVCacheManager, one: Request, full: int) -> None:
    if manager.config.write is WritePolicy.BACK:
        manager._demotion.note(one, one.named, full)
    one.named = full


__all__ = ["name_blocks"]
