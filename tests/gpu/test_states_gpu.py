"""States from slot to slot of a GPU, against plain indexing."""

import numpy as np
import pytest
import torch
from support.transfer_cases import Builder, states

from lightcache.kernels.geometry import KVGroup, Plane
from lightcache.kernels.states import ZERO, StateCopier

pytest.importorskip("triton")


def expected(before, sources, targets):
    after = {key: view.clone() for key, view in before.items()}
    for key, view in after.items():
        for source, target in zip(sources, targets, strict=True):
            view[target] = 0 if source == ZERO else before[key][source]
    return after


def test_pairs_in_one_launch():
    case = states("cuda:0")
    before = case.snapshot()
    copier = StateCopier(case.geometry, case.planes)
    copy = copier.copy([1, ZERO, 1], [4, 0, 8])
    copy.wait()
    assert copy.done()
    for key, view in case.snapshot().items():
        assert torch.equal(view, expected(before, [1, ZERO, 1], [4, 0, 8])[key]), key


def test_copies_are_in_the_order_of_the_stream():
    """Each copy reads what the one before it wrote, without anybody waiting."""
    build = Builder("cuda:0")
    build.add(("state", 0, "ssm"), build.tensor((9, 4, 1 << 18), torch.float32))
    case = build.case([KVGroup.state("state", layers=1, parts=[Plane("ssm", 1 << 20, 4)])])
    before = case.snapshot()
    copier = StateCopier(case.geometry, case.planes)
    stream = torch.cuda.Stream()
    copies = [copier.copy([slot], [slot + 1], stream) for slot in range(8)]
    assert torch.cuda.current_stream() != stream
    copies[-1].wait()
    assert all(copy.done() for copy in copies)
    after = case.snapshot()["state", 0, "ssm"]
    assert (after == before["state", 0, "ssm"][0]).all()


def test_slots_beyond_two_gib():
    """Addresses are 64 bits all the way."""
    nbytes, slots = 1 << 20, 4100
    tensor = torch.zeros((slots, nbytes), dtype=torch.uint8, device="cuda:0")
    build = Builder("cuda:0")
    view = tensor.view(slots, 1, nbytes)
    build.add(("state", 0, "ssm"), view)
    case = build.case([KVGroup.state("state", layers=1, parts=[Plane("ssm", nbytes, 1)])])
    stamp = torch.from_numpy(np.random.default_rng(0).integers(0, 256, nbytes, np.uint8))
    tensor[4099] = stamp.cuda()
    copier = StateCopier(case.geometry, case.planes)
    copier.copy([4099, ZERO], [2, 4098]).wait()
    assert torch.equal(tensor[2].cpu(), stamp)
    assert int(tensor.sum(dtype=torch.int64)) == 2 * int(stamp.sum(dtype=torch.int64))


def test_more_pairs_than_a_buffer_and_more_tiles_than_programs():
    build = Builder("cuda:0")
    build.add(("state", 0, "ssm"), build.tensor((700, 4, 5000), torch.float32))
    case = build.case([KVGroup.state("state", layers=1, parts=[Plane("ssm", 20000, 4)])])
    before = case.snapshot()
    order = np.random.default_rng(1).permutation(700)
    StateCopier(case.geometry, case.planes, programs=7).copy(order[:350], order[350:]).wait()
    wanted = expected(before, order[:350].tolist(), order[350:].tolist())
    assert torch.equal(case.snapshot()["state", 0, "ssm"], wanted["state", 0, "ssm"])
