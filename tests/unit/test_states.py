"""Copying recurrent states from slot to slot, with the kernel interpreted and on the CPU, against
plain indexing."""

import inspect
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inline_device import InlineDevice
from support.refusals import refused
from support.transfer_cases import Builder, flat, states

from lightcache.errors import ConfigError, TransferFailed
from lightcache.hybrid.copiers import StateCopier as HybridCopier
from lightcache.kernels.geometry import KVGroup, Plane
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.kernels.states import ZERO, StateCopier, StateCopy

SLOTS = 9
SIDES = [InlineDevice, lambda: None]


def copier_of(case, device=None, **more):
    return StateCopier(case.geometry, case.planes, device=device, **more)


def expected(before, sources, targets):
    """The same by indexing."""
    after = {key: view.clone() for key, view in before.items()}
    for key, view in after.items():
        for source, target in zip(sources, targets, strict=True):
            view[target] = 0 if source == ZERO else before[key][source]
    return after


def same(case, wanted):
    for key, view in case.snapshot().items():
        assert torch.equal(view, wanted[key]), key


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("side", SIDES, ids=["kernel", "host"])
def test_pairs_in_one_launch(side, data):
    order = data.draw(st.permutations(range(SLOTS)))
    targets = order[: data.draw(st.integers(0, 5))]
    rest = [*order[len(targets) :], ZERO]
    sources = [data.draw(st.sampled_from(rest)) for _ in targets]
    case = states("cpu")
    before = case.snapshot()
    copy = copier_of(case, side()).copy(sources, targets)
    copy.wait()
    assert copy.done()
    same(case, expected(before, sources, targets))


@pytest.mark.parametrize("side", SIDES, ids=["kernel", "host"])
def test_nothing_but_states_is_written(side):
    """Bytes between planes belong to somebody else."""
    build = Builder("cpu")
    backing = torch.full((SLOTS, 64), 0xAB, dtype=torch.uint8)
    view = backing[:, 16:48].unflatten(1, (2, 16)).unsqueeze(1)  # slots, rows, heads, bytes
    build.views["state", 0, "ssm"] = view
    build.planes["state", 0, "ssm"] = DevicePlane(
        int(view.data_ptr()), unit_stride=64, slots=SLOTS, head_stride=16
    )
    case = build.case([KVGroup.state("state", layers=1, parts=[Plane("ssm", 16, 2)])])
    backing[3, 16:48] = 7
    copier = copier_of(case, side())
    assert copier.nbytes == 32
    copier.copy([3, ZERO], [5, 0]).wait()
    wanted = torch.full((SLOTS, 64), 0xAB, dtype=torch.uint8)
    wanted[3, 16:48] = wanted[5, 16:48] = 7
    wanted[0, 16:48] = 0
    assert torch.equal(backing, wanted)


@pytest.mark.parametrize("side", SIDES, ids=["kernel", "host"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_copies_its_own_heads(side, rank):
    """The planes of a rank hold its heads only: the rest of the state is no business of its."""
    parts = [Plane("ssm", 80, 4)]
    geometry = states("cpu").geometry
    build = Builder("cpu")
    build.add(("state", 0, "ssm"), build.tensor((SLOTS, 2, 20), torch.float32))
    case = build.case([KVGroup.state("state", layers=1, parts=parts, head_groups=2)])
    share = case.geometry.share(rank, 2)
    copier = copier_of(case, side(), share=share)
    assert copier.nbytes == share.nbytes == 160
    before = case.snapshot()
    copier.copy([2], [7]).wait()
    same(case, expected(before, [2], [7]))
    assert geometry != case.geometry


def test_a_large_state_is_cut_into_tiles():
    """More bytes than a program copies at a time, and no multiple of it."""
    build = Builder("cpu")
    build.add(("state", 0, "ssm"), build.tensor((3, 1, 10007), torch.float32))
    case = build.case([KVGroup.state("state", layers=1, parts=[Plane("ssm", 40028, 1)])])
    before = case.snapshot()
    copier_of(case, InlineDevice(), programs=2).copy([0, ZERO], [2, 1]).wait()
    same(case, expected(before, [0, ZERO], [2, 1]))


def test_copies_are_enqueued_on_the_current_stream_and_over_when_its_event_is():
    case, device = states("cpu"), InlineDevice()
    copier = copier_of(case, device)
    device.running = False
    copy = copier.copy([1], [2])
    assert not copy.done()
    assert device.log[-1][:2] == ("record", "current")
    device.running = True
    assert copy.done()
    copy.wait()


def test_a_device_that_fails_or_cannot_be_asked():
    """While a thread captures a graph the copies go on; a device that failed copies no more."""
    case, device = states("cpu"), InlineDevice()
    copy = copier_of(case, device).copy([1], [2])

    def refuse(words):
        def hook(kind):
            if kind in ("query", "synchronize"):
                raise RuntimeError(words)

        device.hook = hook

    refuse("operation not permitted when stream is capturing")
    assert not copy.done()
    refuse("an illegal memory access was encountered")
    for call in (copy.done, copy.wait):
        refused(TransferFailed, r"not copied: .*illegal memory access", call)
    device.hook = lambda kind: None
    assert copy.done()


def test_on_a_stream_that_is_named():
    case, device = states("cpu"), InlineDevice()
    other = device.stream()
    copier_of(case, device).copy([1], [2], other)
    assert device.log[-1][:2] == ("record", other.name)
    assert device.current().name == "current"


@pytest.mark.parametrize("side", SIDES, ids=["kernel", "host"])
def test_zeros(side):
    case = states("cpu")
    before = case.snapshot()
    copier_of(case, side()).zero(np.array([3, 5], np.int32)).wait()
    same(case, expected(before, [ZERO, ZERO], [3, 5]))


def test_without_pairs_it_tells_when_the_stream_has_got_there():
    case, device = states("cpu"), InlineDevice()
    copier = copier_of(case, device)
    device.running = False
    mark = copier.copy([], [])
    assert not mark.done()
    device.running = True
    assert mark.done()
    assert copier_of(case).copy([], []).done()


def test_a_hybrid_manager_takes_it():
    """It is what `lightcache.hybrid` calls a copier."""
    wanted = inspect.signature(HybridCopier.copy).parameters
    assert list(inspect.signature(StateCopier.copy).parameters) == list(wanted)
    assert hasattr(StateCopier, "zero")
    assert hasattr(StateCopy, "done")


def test_buffers_in_use_are_left_alone():
    """The pairs of a copy that goes on must not change."""
    case, device = states("cpu"), InlineDevice()
    copier = copier_of(case, device)
    device.running = False
    allocated = device.allocated
    copier.copy([1], [2])
    copier.copy([3], [4])
    assert device.allocated == allocated + 2
    device.running = True
    copier.copy([1], [2])
    copier.copy([3], [4])
    assert device.allocated == allocated + 2


def test_a_refused_launch_leaves_no_buffer_in_use_for_good(monkeypatch):
    case, device = states("cpu"), InlineDevice()
    copier = copier_of(case, device)
    from lightcache.kernels import state_copy

    kept = state_copy.copy_states
    monkeypatch.setattr(state_copy, "copy_states", {})
    refused(KeyError, "", copier.copy, [1], [2])
    assert device.log[-1][0] == "record"
    monkeypatch.setattr(state_copy, "copy_states", kept)
    before = case.snapshot()
    copier.copy([1], [2]).wait()
    same(case, expected(before, [1], [2]))


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ([0, 1], [2], "as many sources as targets, found 2 and 1"),
        ([9], [0], "sources: expected slots -1 to 8, found 9"),
        ([-2], [0], "sources: expected slots -1 to 8, found -2"),
        ([0], [9], "targets: expected slots 0 to 8, found 9"),
        ([0], [-1], "targets: expected slots 0 to 8, found -1"),
        ([0, 1], [2, 2], "a slot is written twice"),
        ([0, 1], [1, 2], "slot 1 is read and written in one call"),
        ([3], [3], "slot 3 is read and written in one call"),
        ([0.0], [1], "sources: expected slots as integers"),
        ([[0]], [1], "sources: expected slots as integers of shape"),
    ],
)
def test_what_is_refused(sources, targets, words):
    case = states("cpu")
    before = case.snapshot()
    refused(ConfigError, words, copier_of(case).copy, sources, targets)
    same(case, before)


def test_pages_that_are_no_states():
    case = flat("cpu")
    refused(ConfigError, r"expected a geometry of KVGroup.state, found .*prefix", copier_of, case)


def test_states_in_blocks():
    build = Builder("cpu")
    tensor = build.tensor((SLOTS, 1, 8), torch.float32)
    build.add(("state", 0, "ssm"), tensor)
    build.planes["state", 0, "ssm"] = DevicePlane(
        int(tensor.data_ptr()), unit_stride=32, slots=8, block_units=4, block_stride=160
    )
    case = build.case([KVGroup.state("state", layers=1, parts=[Plane("ssm", 32, 1)])])
    refused(ConfigError, "evenly spaced, found blocks of 4", copier_of, case)


def test_planes_that_are_missing():
    case = states("cpu")
    with pytest.raises(ConfigError, match="is not among the 0 described planes"):
        StateCopier(case.geometry, DevicePlanes({}))


def test_numpy_slots_of_any_width():
    case = states("cpu")
    before = case.snapshot()
    copier_of(case).copy(np.array([1], np.int32), np.array([2], np.uint64)).wait()
    same(case, expected(before, [1], [2]))
