"""The device engine in every layout that we describe: in each way with its kernel interpreted, in
one of them with the same in numpy as well, which takes little time."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.inline_device import InlineDevice
from support.layout_transfers import (
    ACROSS,
    HOLES,
    IN_BLOCKS,
    PAGES,
    WAYS,
    WITH_HOLES,
    Case,
    Way,
    both_ways,
    runs_exist,
)
from support.layouts import CASES
from support.refusals import refused

from lightcache import ConfigError
from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.geometry import Share
from lightcache.kernels.layouts import Shard
from lightcache.kernels.pinned import HostPages

pytest.importorskip("triton")

Make = Callable[[str, int], Case]


def inline(
    mine: Shard, share: Share, case: Case, way: Way, interpreted: bool = False
) -> tuple[TransferEngine, HostPages]:
    memory = HostPages(np.empty((PAGES, mine.geometry.page_bytes), np.uint8))
    engine = TransferEngine(
        mine.geometry,
        case.planes,
        memory,
        share=share,
        mode=way.mode,
        staging_bytes=way.staging_bytes,
        calibration=way.thresholds,
        device=InlineDevice(interpreted),
    )
    return engine, memory


def each_one_way() -> Iterator[Any]:
    """All cases in all ways, interpreted. `make test` has each case in one of them, the ways in
    turn, and interprets every seventh."""
    ways = [way for way in WAYS if way != "copies"]
    for number, (name, make) in enumerate(CASES.items()):
        first = ways[number % len(ways)]
        if number % 7:
            yield pytest.param(make, first, False, id=f"{name}-{first}-numpy")
        for way in ways:
            marks = [] if way == first and not number % 7 else [pytest.mark.slow]
            yield pytest.param(make, way, True, id=f"{name}-{way}", marks=marks)


@pytest.mark.parametrize(("make", "way", "interpreted"), list(each_one_way()))
def test_both_ways(make: Make, way: str, interpreted: bool) -> None:
    case, made = make("cpu", 4), []

    def engine_of(*what: Any) -> tuple[TransferEngine, HostPages]:
        made.append(inline(*what, interpreted))
        return made[-1]

    both_ways(case, WAYS[way], engine_of)
    ((engine, _),) = made
    copied = any(entry[0] == "copy" for entry in engine.device.log)
    assert copied == (way != "direct"), "it did not go that way"


@pytest.mark.parametrize("name", WITH_HOLES)
def test_rows_that_are_left_out_stay(name: str) -> None:
    both_ways(CASES[name]("cpu", 4), HOLES, partial(inline, interpreted=True))


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_runs_across_blocks(name: str) -> None:
    both_ways(CASES[name]("cpu", 4), ACROSS, inline)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_copy_engine_alone_where_bytes_lie_so(make: Make) -> None:
    case, way = make("cpu", 4), WAYS["copies"]
    memory = HostPages(np.empty((PAGES, case.shard.geometry.page_bytes * 2), np.uint8))
    if runs_exist(case, way, memory):
        both_ways(case, way, inline)
    else:
        refused(ConfigError, "mode='copies'", both_ways, case, way, inline)
