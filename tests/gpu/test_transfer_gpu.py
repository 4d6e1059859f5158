"""The transfer engine on a GPU, in every layout and mode, against pages packed the slow way."""

import numpy as np
import pytest
import torch
from support.gpu_memory import Pinned
from support.transfer_cases import CASES, TOKENS

from lightcache.kernels.moves import Move

pytest.importorskip("triton")
PAGES = 6


def engine_of(case, mode="auto", pages=PAGES, **more):
    from lightcache.kernels.engine import TransferEngine

    memory = Pinned(pages, case.geometry.page_bytes)
    made = TransferEngine(case.geometry, case.planes, memory, mode=mode, **more)
    return made, memory


def some_slots(case, pages, seed=1):
    if case.geometry.rule.name == "point":
        return np.random.default_rng(seed).permutation(9)[:pages]
    unit = max(plane.unit_tokens for group in case.geometry.groups for plane in group.planes)
    starts = np.random.default_rng(seed).permutation(TOKENS // unit)
    starts = starts[: pages * case.geometry.page_tokens // unit] * unit
    return (starts[:, None] + np.arange(unit)).ravel()


@pytest.mark.parametrize("staging", [1 << 14, 1 << 20])
@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_there_and_back(make, mode, staging):
    case = make("cuda:0")
    engine, memory = engine_of(case, mode, staging_bytes=staging)
    tokens = case.geometry.page_tokens
    slots, pages = some_slots(case, 3), [4, 0, 5]
    with engine:
        engine.offload(Move(pages, slots)).wait(60)
        for number, page in enumerate(pages):
            expected = case.page(slots[number * tokens : (number + 1) * tokens])
            used = case.geometry.used_bytes
            np.testing.assert_array_equal(memory.array[page][:used], expected[:used])
        assert (memory.array[[1, 2, 3]] == 0xCD).all()

        before = case.snapshot()
        case.poison()
        engine.load(Move(pages, slots)).wait(60)
        torch.cuda.synchronize()
    after = case.snapshot()
    for key, view in after.items():
        group = next(group for group in case.geometry.groups if group.name == key[0])
        plane = next(plane for plane in group.planes if plane.name == key[2])
        mine = np.zeros(len(view), bool)
        mine[np.unique(slots // plane.unit_tokens)] = True
        assert torch.equal(view[mine], before[key][mine]), key
        assert (view[~mine] == 0xEE).all(), key


def test_without_cuda_bindings(monkeypatch):
    """What AMD's GPUs have: copies through torch alone."""
    from lightcache.kernels import device

    def missing():
        raise ImportError("cuda-bindings")

    monkeypatch.setattr(device, "BatchCopier", missing)
    case = CASES[0]("cuda:0")
    engine, memory = engine_of(case, "staged", staging_bytes=1 << 14)
    slots = some_slots(case, 3)
    with engine:
        assert not engine._parts.copier.anywhere
        engine.offload(Move([4, 0, 5], slots)).wait(60)
        before = case.snapshot()
        for number, page in enumerate([4, 0, 5]):
            np.testing.assert_array_equal(
                memory.array[page], case.page(slots[number * 16 : (number + 1) * 16])
            )
        case.poison()
        engine.load(Move([4, 0, 5], slots)).wait(60)
        torch.cuda.synchronize()
    after = case.snapshot()
    for key, view in after.items():
        assert torch.equal(view[slots], before[key][slots]), key
