"""Pages in several pages of the host, with a GPU's driver: every byte of the pool is looked at."""

import mmap

import numpy as np
import pytest
import torch
from support.gpu_memory import Pinned
from support.transfer_cases import (
    CASES,
    Builder,
    check_parts,
    in_parts,
    some_slots,
    whole_blocks,
)

from lightcache.kernels.geometry import KVGroup, Plane
from lightcache.kernels.pinned import PinnedPages

pytest.importorskip("triton")


def engine_of(case, memory, **how):
    from lightcache.kernels.engine import TransferEngine

    return TransferEngine(case.geometry, case.planes, memory, **how)


def places_of(case, pages, others=3):
    """Host pages for the parts of some pages, in no order, and how many pages the host has."""
    count = pages * case.geometry.parts
    order = np.random.default_rng(5).permutation(count + others)
    return order[:count].reshape(pages, case.geometry.parts), count + others


@pytest.mark.parametrize("staging", [1 << 12, 1 << 20])
@pytest.mark.parametrize("mode", ["staged", "direct", "auto"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_there_and_back(make, mode, staging):
    """In three parts, whose borders fall into rows."""
    case = make("cuda:0")
    case = in_parts(case, case.geometry.used_bytes // 3 // 16 * 16 + 16)
    assert case.geometry.parts == 3
    places, host_pages = places_of(case, 3)
    memory = Pinned(host_pages, case.geometry.part_bytes)
    with engine_of(case, memory, mode=mode, staging_bytes=staging) as engine:
        check_parts(engine, memory, case, places, some_slots(case, 3))


@pytest.mark.parametrize("part_bytes", [1024, 1040])
def test_the_copy_engine_alone(part_bytes):
    case = in_parts(whole_blocks("cuda:0"), part_bytes)
    places, host_pages = places_of(case, 2)
    memory = Pinned(host_pages, part_bytes)
    with engine_of(case, memory, mode="copies") as engine:
        check_parts(engine, memory, case, places, some_slots(case, 2, scattered=False))


def states_of_9_mib():
    """Whose layers are no multiple of a part."""
    build, ssm = Builder("cuda:0"), (9 << 18) - (48 << 10)
    for layer in range(4):
        build.add(("state", layer, "conv"), build.tensor((9, 4, 12 << 10), torch.uint8))
        build.add(("state", layer, "ssm"), build.tensor((9, 4, ssm // 16), torch.float32))
    parts = [Plane("conv", 12 << 10, 4), Plane("ssm", ssm // 4, 4)]
    return build.case([KVGroup.state("state", layers=4, parts=parts)])


@pytest.mark.parametrize("mode", ["auto", "staged", "direct"])
def test_large_states_in_many_registrations(mode):
    """Host pages of 1.5 MiB that are registered three at a time: no copy may span two of them, and
    neighbours are often in two."""
    case = in_parts(states_of_9_mib(), 3 << 19)
    assert (case.geometry.parts, case.geometry.padding) == (6, 0)
    places, host_pages = places_of(case, 8)
    places[:4] = np.sort(places[:4], axis=None).reshape(4, -1)
    nbytes = host_pages * case.geometry.part_bytes
    array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8).reshape(host_pages, -1)
    array[...] = 0xCD
    step = 3 * case.geometry.part_bytes
    with PinnedPages(array, device="cuda:0", chunk_bytes=step, first_bytes=step) as memory:
        memory.wait(timeout=60)
        with engine_of(case, memory, mode=mode) as engine:
            check_parts(engine, memory, case, places, some_slots(case, 8))


@pytest.mark.parametrize("mode", ["auto", "staged"])
def test_a_cell_in_several_parts_and_several_slots(mode):
    """A ring whose slots hold one layer: a page passes in four cuts, each in parts of its own."""
    case = in_parts(states_of_9_mib(), (3 << 19) + 16)
    places, host_pages = places_of(case, 3)
    memory = Pinned(host_pages, case.geometry.part_bytes)
    with engine_of(case, memory, mode=mode, staging_bytes=8 << 20) as engine:
        check_parts(engine, memory, case, places, some_slots(case, 3))
