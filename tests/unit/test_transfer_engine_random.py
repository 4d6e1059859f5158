"""Random geometries, ranks, placements and moves: the device engine leaves the bytes that the host
engine leaves, and both those that a plain loop says.

LIGHTCACHE_TEST_EXAMPLES chooses how many.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.device_sides import Device
from support.inline_device import InlineDevice
from support.threaded_device import ThreadedDevice

from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane, Share
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.moves import Engine, Move
from lightcache.kernels.options import Thresholds
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.testing import PlacedPages, moved_rows, random_moves

pytest.importorskip("triton")

EXAMPLES = int(os.environ.get("LIGHTCACHE_TEST_EXAMPLES", "25"))
DEADLINE = 60.0
PAGES, SLOTS = 5, 48


class Registered(HostPages):
    """All of it at once."""

    @property
    def ready(self) -> int:
        return self.pages


@st.composite
def geometries(draw: st.DrawFn) -> PageGeometry:
    """One to three groups; heads are powers of two, so that any such number of ranks divides."""
    powers, layers = (
        st.sampled_from([1, 2, 4]),
        st.lists(st.integers(0, 4), min_size=1, unique=True),
    )
    if draw(st.integers(0, 4)) == 0:
        heads = draw(powers)
        parts = [
            Plane(name, draw(st.integers(1, 20)), heads, rows=draw(st.integers(1, 3)))
            for name in ("conv", "ssm")
        ]
        group = KVGroup.state("state", layers=sorted(draw(layers)), parts=parts)
        return _grouped(draw, [group])
    tokens = draw(st.sampled_from([2, 4, 8]))
    groups = []
    for number in range(draw(st.integers(1, 2))):
        groups.append(
            KVGroup.attention(
                f"kv{number}",
                layers=sorted(draw(layers)),
                heads=draw(powers),
                head_dim=draw(st.sampled_from([1, 3, 4, 8, 16])),
                dtype_bytes=draw(st.sampled_from([1, 2, 4])),
                page_tokens=tokens,
                content=draw(st.sampled_from(["separate", "packed", "single"])),
                scale_bytes=draw(st.sampled_from([0, 0, 2, 4])),
            )
        )
    if draw(st.booleans()):
        unit = draw(st.sampled_from([size for size in (1, 2, 4) if size <= tokens]))
        row = draw(st.integers(1, 40))
        groups.append(
            KVGroup.opaque(
                "o",
                layers=sorted(draw(layers)),
                row_bytes=row,
                page_tokens=tokens,
                unit_tokens=unit,
            )
        )
    return _grouped(draw, groups)


def _grouped(draw: st.DrawFn, groups: list[KVGroup]) -> PageGeometry:
    from dataclasses import replace

    head_groups = draw(st.sampled_from([1, 2, 4]))
    geometry = PageGeometry(
        [
            replace(one, head_groups=min(head_groups, *(p.heads for p in one.planes)))
            for one in groups
        ]
    )
    parts = draw(st.sampled_from([1, 1, 2, 3, 7]))
    if parts == 1:
        return geometry
    # Borders fall anywhere: within rows, heads and layers.
    return PageGeometry(geometry.groups, part_bytes=-(-geometry.used_bytes // (16 * parts)) * 16)


@st.composite
def shares(draw: st.DrawFn) -> Share:
    geometry = draw(geometries())
    ranks = draw(st.sampled_from([1, 1, 2, 4, 8]))
    layers = draw(st.sampled_from([None, None, [0, 1, 2], [3, 4]]))
    rank = draw(st.integers(0, ranks - 1))
    return geometry.share(rank, ranks, layers=layers, writing=draw(st.booleans()))


@contextlib.contextmanager
def device_engine(
    rng: random.Random, share: Share, planes: Any, memory: HostPages
) -> Iterator[TransferEngine]:
    """In any mode, by any thresholds, through a ring of any size, on either device of tests."""
    threads = rng.random() < 0.3
    device: Any = (
        ThreadedDevice(seed=rng.randrange(1000)) if threads else InlineDevice(interpreted=True)
    )
    thresholds = Thresholds(
        direct_page=rng.choice([0, 200, 1 << 20]),
        direct_total=rng.choice([0, 400, 1 << 20]),
        copy_bytes=rng.choice([1, 1, 1 << 20]),
        programs=rng.choice([1, 3]),
    )
    try:
        with TransferEngine(
            share.geometry,
            planes,
            memory,
            share=share,
            mode=rng.choice(["auto", "auto", "staged", "direct"]),
            staging_bytes=rng.choice([512, 2048, 1 << 16]),
            calibration=thresholds,
            device=device,
        ) as engine:
            yield engine
    finally:
        if threads:
            device.close()


def moved(engine: Engine, verb: str, moves: list[Move], window: int | None, at_once: bool) -> None:
    """All of them, in one call or in a call each."""
    calls: list[Any] = [moves] if at_once else moves
    for transfer in [getattr(engine, verb)(each, window=window) for each in calls]:
        transfer.wait(DEADLINE)


# Interpreted kernels take about a fifth of a second an example.
@pytest.mark.slow
@pytest.mark.timeout(360 + 2 * EXAMPLES)  # 300 s of them to shrink a failure
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(shares(), st.integers(0, 1 << 32))
def test_both_engines_and_a_plain_loop_agree(share: Share, seed: int) -> None:
    rng = random.Random(seed)
    more = rng.choice([0, 0, 16, 5]) if share.geometry.parts == 1 else 0
    host = PlacedPages(share.geometry, PAGES, seed, more)
    pages, other = host.pages(), host.pages()
    moves = random_moves(rng, share.geometry, PAGES, SLOTS)
    window, at_once = rng.choice([None, 1, 2]), rng.random() < 0.5
    placed = rng.randrange(1000)
    device = Device(share, SLOTS, placed)
    pairs = list(moved_rows(share, device, host.page_bytes, moves))
    calls = host.moves(moves, rng.choice([np.int32, np.int64]))
    expected = pages.copy()
    for page, slot in pairs:
        expected.reshape(-1)[page] = device.memory[slot]
    loaded = device.memory.copy()
    for page, slot in pairs:
        loaded[slot] = other.reshape(-1)[page]

    for which in ("host", "device"):
        device = Device(share, SLOTS, placed)
        before = device.memory.copy()
        memory = Registered(host.memory(pages))
        with (
            HostEngine(share.geometry, device.planes, memory, share=share, threads=2)
            if which == "host"
            else device_engine(rng, share, device.planes, memory)
        ) as engine:
            moved(engine, "offload", calls, window, at_once)
            held = host.memory(expected)
            np.testing.assert_array_equal(memory.array, held, f"{which}: pages")
            assert (device.memory == before).all(), f"{which}: an offload wrote to the device"
            memory.array[...] = held = host.memory(other)
            moved(engine, "load", calls, window, at_once)
            np.testing.assert_array_equal(device.memory, loaded, f"{which}: slots")
            assert (memory.array == held).all(), f"{which}: a load wrote to the pages"
