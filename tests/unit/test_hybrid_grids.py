"""Grid: its sizes, its positions, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hybrid.saving import Grid

SIZES = [
    # block, page, chunk, every: fine, chunk, grid, interval
    ((16, 64, 64, 256), (16, 64, 64, 256)),
    ((64, 16, 64, 256), (16, 64, 64, 256)),
    ((1, 1, 64, 256), (1, 64, 64, 256)),
    ((1, 1024, 64, 256), (1, 64, 1024, 1024)),
    ((128, 128, 64, 256), (128, 128, 128, 256)),
    ((528, 528, 64, 256), (528, 528, 528, 8448)),
    ((48, 48, 64, 256), (48, 64, 192, 768)),
    ((256, 512, 64, 384), (256, 256, 512, 1536)),
    ((16, 16, 1, 1), (16, 16, 16, 16)),
    ((800, 3200, 256, 3200), (800, 800, 3200, 3200)),
]


@pytest.mark.parametrize(("given_sizes", "wanted"), SIZES)
def test_sizes(given_sizes: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    grid = Grid(*given_sizes)
    assert (grid.fine, grid.chunk, grid.grid, grid.interval) == wanted


def test_the_usual_chunk_and_interval() -> None:
    assert Grid(16, 16) == Grid(16, 16, chunk=64, every=256)
    assert hash(Grid(16, 16)) == hash(Grid(16, 16))
    assert Grid(128, 128) != Grid(128, 128, chunk=128)  # the same grid, but not the same reach


def test_it_never_changes() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Grid(16, 16).every = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ((0, 16), "block_tokens"),
        ((16, 0), "page_tokens"),
        ((16, 16, 0), "model_chunk"),
        ((16, 16, 64, 0), "every"),
        ((16, 16.0), "page_tokens"),
        ((True, 16), "block_tokens"),
        ((16, 1 << 21), "page_tokens"),
        ((16, 24), "host pages of 24 tokens and device blocks of 16"),
        ((1 << 20, 1 << 20, 1 << 20, (1 << 20) - 1), None),
        (((1 << 20) - 3, (1 << 20) - 3, 1 << 20, (1 << 20) - 1), "every=1048575"),
    ],
)
def test_sizes_that_do_not_fit(sizes: Any, what: str | None) -> None:
    if what is None:  # large, but reachable
        assert Grid(*sizes).interval == (1 << 20) * ((1 << 20) - 1)
        return
    refused(ConfigError, what, Grid, *sizes)


def test_floors() -> None:
    grid = Grid(16, 64)
    assert [grid.floor(n) for n in (0, 63, 64, 127, 128)] == [0, 0, 64, 64, 128]
    assert [grid.fine_floor(n) for n in (0, 15, 16, 63, 64)] == [0, 0, 16, 48, 64]


def test_branching() -> None:
    grid = Grid(16, 64)
    assert grid.branching(200, 0) == 192
    assert grid.branching(200, 128) == 192
    assert grid.branching(200, 192) is None
    assert grid.branching(63, 0) is None
    assert grid.branching(0, 0) is None
    assert grid.branching(100, 80) is None  # a tail's checkpoint lies behind the grid's last


def test_reachable_counts_from_where_a_pass_begins() -> None:
    grid = Grid(128, 128)
    assert grid.reachable(0, 128)
    assert grid.reachable(64, 128)  # chunks of 64, though the grid has steps of 128
    assert not grid.reachable(16, 128)
    assert not grid.reachable(128, 128)
    assert not Grid(528, 528).reachable(0, 528)  # 8.25 chunks: only a pass that ends there
