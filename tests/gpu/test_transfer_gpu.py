"""The transfer engine on a GPU: the conformance suite, and every layout and mode against pages
packed the slow way."""

from functools import partial

import numpy as np
import pytest
import torch
from gpu.place import HostGate
from support.gpu_memory import Pinned
from support.transfer_cases import CASES, check_loaded, some_slots

from lightcache.kernels.moves import Move
from lightcache.kernels.testing import CHECKS, Rig

pytest.importorskip("triton")
PAGES = 6


def engine_of(case, mode="auto", pages=PAGES, **more):
    from lightcache.kernels.engine import TransferEngine

    memory = Pinned(pages, case.geometry.page_bytes)
    made = TransferEngine(case.geometry, case.planes, memory, mode=mode, **more)
    return made, memory


def rig(how, setup):
    """An engine between tensors, with this mode and rate."""
    from lightcache.kernels.engine import TransferEngine

    device = torch.zeros(setup.device_bytes, dtype=torch.uint8, device="cuda:0")
    memory, where = Pinned(*setup.pages_shape), {"device": "cuda:0", "keep": device}

    def write(data):
        device.copy_(torch.from_numpy(data))
        torch.cuda.synchronize()

    planes = setup.planes(device.data_ptr(), **where)
    return Rig(
        TransferEngine(setup.geometry, planes, memory, staging_bytes=1 << 14, **how),
        memory.array,
        moved_planes=setup.moved_planes(device.data_ptr(), **where),
        read_device=lambda: device.cpu().numpy(),
        write_device=write,
        gate=lambda: HostGate("cuda:0"),
    )


@pytest.mark.parametrize("how", [{"mode": "staged"}, {"mode": "direct", "rate": 1e9}, {}], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, how):
    check(partial(rig, how))


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
    check_loaded(case, before, slots)


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
