"""Transfers of the layouts of `support.layouts`, both ways, compared with plain indexing.

On any device: whoever calls says how memory and engine are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from support.layout_case import Case
from support.pages import Model, copy

from lightcache.kernels.geometry import KVGroup, PageGeometry, Share
from lightcache.kernels.layouts import Shard
from lightcache.kernels.moves import Engine, Move
from lightcache.kernels.options import Thresholds
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.rows import Plan

PAGES = 5
UNTOUCHED = 0xCD
FORGOTTEN = 0xA7
DEADLINE = 60.0
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Way:
    """How pages are moved, and what is chosen so that they do move so."""

    mode: str
    grouped: bool
    """One head group for each rank: its share is one range. Else nothing could be staged."""
    runs: bool
    """Neighbouring slots, else scattered ones."""
    holes: bool = False
    """One unit of the second page is left out as it is written, too."""
    shift: int = 0
    """What the first of neighbouring slots is."""
    staging_bytes: int = 1 << 14
    thresholds: Thresholds | None = None


WAYS = {
    "staged": Way("staged", grouped=True, runs=False),
    "staged in small slots": Way("staged", grouped=True, runs=False, staging_bytes=512),
    "direct": Way("direct", grouped=False, runs=False),
    "auto": Way("auto", grouped=True, runs=True, thresholds=Thresholds(0, 0, 1)),
    "copies": Way("copies", grouped=True, runs=True),
}
HOLES = Way("staged", grouped=True, runs=False, holes=True)
"""For some layouts: the first page is staged, and the second, of which a row must stay, is not."""
ACROSS = replace(WAYS["auto"], shift=2)
"""Neighbours, but of different blocks: no copy may go on from one block to the next."""
IN_BLOCKS = ("vllm, bknhc, NHD, bf16", "vllm, blnhc, packed", "flashinfer, NHD, one tensor")
WITH_HOLES = (
    "vllm, bknhc, HND, bf16",
    "vllm, lbnhc, packed",
    "vllm, latents and indexer",
    "sglang, fp32",
    "scales, bhn",
    "opaque blocks, tc",
)
EngineOf = Callable[[Shard, Share, Case, Way], tuple[Engine, HostPages]]


def shard_of(case: Case, way: Way) -> Shard:
    """The case's, or the same model's with pages of finer head groups; planes do not change."""
    mine = case.shard
    if not way.grouped:
        return mine
    groups = [_grouped(group, mine.ranks) for group in mine.geometry.groups]
    return Shard(PageGeometry(groups), mine.rank, mine.ranks, mine.layers)


def _grouped(group: KVGroup, ranks: int) -> KVGroup:
    heads = min(plane.heads for plane in group.planes)
    return group if heads == 1 else replace(group, head_groups=min(heads, ranks))


def runs_exist(case: Case, way: Way, memory: HostPages) -> bool:
    """Whether the copy engine alone can move whole pages of neighbouring slots."""
    mine = shard_of(case, way)
    return Plan(mine.share(), case.planes, memory.address, memory.page_bytes).runnable


def both_ways(case: Case, way: Way, engine_of: EngineOf) -> None:
    """Two pages are offloaded and loaded into other slots, but for one unit that has none."""
    mine = shard_of(case, way)
    share = mine.share()
    (units,) = {cell.units for cell in share.cells}  # the same for all planes of these cases
    before = case.read()
    there = min(len(found) for found in before.values())
    first, second = _units(units, there, way, 0), _units(units, there, way, 1)
    pages = [3, 1]
    engine, memory = engine_of(mine, share, case, way)
    try:
        memory.array[:] = UNTOUCHED
        size = mine.geometry.page_tokens // units
        slots, written = _tokens(first, size), {at: rows[first] for at, rows in before.items()}
        if way.holes:
            slots[size * units : size * (units + 1)] = -1
            for rows in written.values():
                rows[units] = UNTOUCHED
        engine.offload(Move(pages, slots)).wait(DEADLINE)
        expected = np.full_like(memory.array, UNTOUCHED)
        for at, page in enumerate(pages):
            own = slice(at * units, (at + 1) * units)
            rows_of_page = {place: rows[own] for place, rows in written.items()}
            copy(share, expected[page], rows_of_page, to_page=True)
        _same(memory.array, expected, "pages")

        for tensor in case.tensors:
            tensor.view(torch.uint8).fill_(FORGOTTEN)
        slots = _tokens(second, size)
        if not way.runs:
            slots[size * (units - 1) : size * units] = -1
        engine.load(Move(pages, slots)).wait(DEADLINE)
        _same(memory.array, expected, "pages, by a load")
        check_loaded(case.read(), written, np.where(slots[::size] < 0, -1, second))
    finally:
        engine.close()


def _units(units: int, there: int, way: Way, seed: int) -> Ints:
    """Slots for the units of two pages, counted in units."""
    if way.runs:
        whole = way.shift + np.arange(2 * units).reshape(2, units)
        return whole[:: 1 if seed == 0 else -1].reshape(-1)
    found: Ints = np.random.default_rng(seed).permutation(there)[: 2 * units]
    return found


def _tokens(units: Ints, size: int) -> Ints:
    return (units[:, None] * size + np.arange(size)).reshape(-1)


def check_loaded(found: Model, written: Model, units: Ints) -> None:
    """What was written is in these units, but for negative ones, and nothing in any other."""
    kept = units >= 0
    for place, rows in found.items():
        expected = np.full_like(rows, FORGOTTEN)
        expected[units[kept]] = written[place][kept]
        _same(rows, expected, f"slots of {place}")


def _same(found: Any, expected: Any, what: str) -> None:
    wrong = np.argwhere(found != expected)
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {found.size} bytes differ, first at {wrong[0].tolist()}: "
        f"{found[tuple(wrong[0])]:#x} instead of {expected[tuple(wrong[0])]:#x}; last at "
        f"{wrong[-1].tolist()}"
    )


__all__ = [
    "ACROSS",
    "HOLES",
    "IN_BLOCKS",
    "PAGES",
    "WAYS",
    "WITH_HOLES",
    "Case",
    "EngineOf",
    "Way",
    "both_ways",
    "runs_exist",
    "shard_of",
]
