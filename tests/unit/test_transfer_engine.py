"""The device engine with its kernels interpreted, against pages packed the slow way."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import numpy as np
import pytest
import torch
from support.inline_device import InlineDevice
from support.transfer_cases import CASES, TOKENS

from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.memory import HostPages
from lightcache.kernels.transfer import Move

pytest.importorskip("triton")
PAGES = 6


def engine_of(case, mode="auto", **more):
    memory = HostPages(np.full((PAGES, case.geometry.page_bytes), 0xCD, np.uint8))
    device = InlineDevice()
    made = TransferEngine(
        case.geometry, case.planes, memory, mode=mode, device=device, staging_bytes=1 << 14, **more
    )
    return made, memory, device


def some_slots(case, pages, seed=1, scattered=True):
    """Slots for the tokens of some pages, whole units together."""
    if case.geometry.rule.kind == "point":
        return np.random.default_rng(seed).permutation(9)[:pages]
    unit = max(plane.unit_tokens for group in case.geometry.groups for plane in group.planes)
    size = unit if scattered else case.geometry.page_tokens
    starts = np.random.default_rng(seed).permutation(TOKENS // size)
    starts = starts[: pages * case.geometry.page_tokens // size] * size
    return (starts[:, None] + np.arange(size)).ravel()


@pytest.mark.parametrize("mode", ["auto", "staged", "direct"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_there_and_back(make, mode):
    case = make("cpu")
    engine, memory, _ = engine_of(case, mode)
    tokens = case.geometry.page_tokens
    slots, pages = some_slots(case, 3), [4, 0, 5]
    with engine:
        engine.offload(Move(pages, slots)).wait()
        for number, page in enumerate(pages):
            expected = case.page(slots[number * tokens : (number + 1) * tokens])
            used = case.geometry.used_bytes
            np.testing.assert_array_equal(memory.array[page][:used], expected[:used])
        assert (memory.array[[1, 2, 3]] == 0xCD).all()

        before = case.snapshot()
        case.poison()
        engine.load(Move(pages, slots)).wait()
    check_loaded(case, before, slots)


def check_loaded(case, before, slots):
    """The slots have their bytes again, everything else stays poisoned."""
    for key, view in case.snapshot().items():
        plane = next(
            plane
            for group in case.geometry.groups
            if group.name == key[0]
            for plane in group.planes
            if plane.name == key[2]
        )
        mine = np.zeros(len(view), bool)
        mine[np.unique(np.asarray(slots) // plane.unit_tokens)] = True
        assert torch.equal(view[mine], before[key][mine]), key
        assert (view[~mine] == 0xEE).all(), key
