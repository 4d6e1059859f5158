"""Copies through cuda-bindings: in one call, or one by one where the driver knows no such call."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import types

import numpy as np
import pytest
from support.fake_runtime import Error, FakeRuntime
from support.inline_device import InlineDevice
from support.refusals import refused
from support.transfer_cases import flat

from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.rows import BatchCopier
from lightcache.shm.errors import TransferFailed

pytest.importorskip("triton")
STREAM = types.SimpleNamespace(cuda_stream=77)
TOO_OLD = [
    Error.cudaErrorInsufficientDriver,
    Error.cudaErrorCallRequiresNewerDriver,
    Error.cudaErrorNotSupported,
    RuntimeError('Function "cuMemcpyBatchAsync" not found'),
]


@pytest.fixture(params=[12, 13])
def runtime(request, monkeypatch):
    return FakeRuntime(request.param).install(monkeypatch)


class Work:
    """A few copies of different sizes, there and nowhere else."""

    def __init__(self, count=3):
        self.source = np.random.default_rng(count).integers(1, 256, 256).astype(np.uint8)
        self.target = np.zeros(256, np.uint8)
        self.places = [(16 * i + 3, 200 - 16 * i, 5 + i) for i in range(count)]

    def lists(self):
        to, at = self.target.ctypes.data, self.source.ctypes.data
        targets, sources, sizes = zip(*self.places, strict=True)
        return [to + place for place in targets], [at + place for place in sources], list(sizes)

    def check(self, copied=None):
        """The first so many have arrived; None: all."""
        expected = np.zeros(256, np.uint8)
        for to, at, size in self.places[:copied]:
            expected[to : to + size] = self.source[at : at + size]
        np.testing.assert_array_equal(self.target, expected)


def copied(copier, count=3):
    work = Work(count)
    copier(*work.lists(), STREAM)
    work.check()


def test_many_copies_are_one_call(runtime):
    copied(BatchCopier())
    assert runtime.calls == [("batch", 3, 77)]


def test_one_copy_and_none(runtime):
    copier = BatchCopier()
    copied(copier, 1)
    copier([], [], [], STREAM)
    assert runtime.calls == [("copy", 1, 77)]


@pytest.mark.parametrize("refusal", TOO_OLD, ids=str)
def test_a_driver_that_is_too_old_gets_them_one_by_one(runtime, refusal):
    copier, runtime.batches = BatchCopier(), refusal
    copied(copier)
    assert runtime.calls == [("batch", 3, 77), *[("copy", 1, 77)] * 3]
    assert runtime.last_error == Error.cudaSuccess, "left for whoever asks next"
    runtime.batches = Error.cudaSuccess
    copied(copier, 2)
    assert runtime.calls[4:] == [("copy", 1, 77)] * 2, "asked again"
    copied(BatchCopier())
    assert runtime.calls[6:] == [("batch", 3, 77)], "another copier has not been told"


def test_bindings_that_do_not_know_a_code(runtime, monkeypatch):
    few = types.SimpleNamespace(cudaSuccess=0, cudaErrorCallRequiresNewerDriver=36)
    monkeypatch.setattr(FakeRuntime, "cudaError_t", few)
    copier, runtime.batches = BatchCopier(), Error.cudaErrorCallRequiresNewerDriver
    copied(copier)
    assert len(runtime.calls) == 4


def test_other_refusals_are_failures(runtime):
    copier, runtime.batches, work = BatchCopier(), Error.cudaErrorInvalidValue, Work()
    with pytest.raises(TransferFailed, match="3 copies of 18 bytes: cudaErrorInvalidValue; is"):
        copier(*work.lists(), STREAM)
    work.check(0)
    runtime.batches = Error.cudaSuccess
    copied(copier)
    assert runtime.calls == [("batch", 3, 77)] * 2


@pytest.mark.parametrize("error", [RuntimeError("List is too small: 1 < 2"), MemoryError("no")])
def test_other_exceptions_are_not_taken_for_a_refusal(runtime, error):
    copier, runtime.batches, work = BatchCopier(), error, Work()
    refused(type(error), str(error), copier, *work.lists(), STREAM)
    work.check(0)
    runtime.batches = Error.cudaSuccess
    copied(copier)
    assert runtime.calls == [("batch", 3, 77)] * 2


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (Error.cudaErrorInvalidValue, "is all host memory registered"),
        (Error.cudaErrorInsufficientDriver, "it is older than cuda-bindings: update it"),
    ],
)
def test_one_of_single_copies_is_refused(runtime, code, advice):
    copier, work = BatchCopier(), Work()
    runtime.batches, runtime.refuse_copy = Error.cudaErrorCallRequiresNewerDriver, (1, code)
    with pytest.raises(TransferFailed, match=f"refused a copy of 6 bytes: {code.name}; {advice}"):
        copier(*work.lists(), STREAM)
    work.check(1)
    assert runtime.calls == [("batch", 3, 77), ("copy", 1, 77), ("copy", 1, 77)]


def test_a_single_copy_says_nothing_of_batches(runtime):
    copier, runtime.refuse_copy = BatchCopier(), (0, Error.cudaErrorNotSupported)
    with pytest.raises(TransferFailed, match="a copy of 5 bytes: cudaErrorNotSupported"):
        copier(*Work(1).lists(), STREAM)
    copied(copier)
    assert runtime.calls == [("copy", 1, 77), ("batch", 3, 77)]


def test_bindings_without_such_a_call(runtime, monkeypatch):
    monkeypatch.delattr(FakeRuntime, "cudaMemcpyBatchAsync")
    refused(AttributeError, "", BatchCopier)


# ---- under an engine


class Device(InlineDevice):
    """Whose copies go through the fake bindings, in streams that are numbers there."""

    def copier(self, tensors):
        return BatchCopier()


@pytest.mark.parametrize("refusal", [Error.cudaSuccess, *TOO_OLD], ids=str)
def test_pages_arrive_with_any_driver(runtime, refusal):
    runtime.batches = refusal
    case = flat("cpu", 1)
    slots = np.random.default_rng(1).permutation(96)[:48]
    parts = slots[:16], slots[16:32], slots[32:]
    order = [0, 2, 1]  # no neighbours, which would be one copy
    memory = HostPages(np.zeros((3, case.geometry.page_bytes), np.uint8))
    before = case.snapshot()
    engine = TransferEngine(case.geometry, case.planes, memory, mode="staged", device=Device())
    with engine:
        engine.offload(Move(order, slots)).wait()
        for page, part in zip(order, parts, strict=True):
            np.testing.assert_array_equal(memory.array[page], case.page(part))
        case.poison()
        engine.load(Move(order, slots)).wait()
    for key, view in case.snapshot().items():
        assert (view[slots] == before[key][slots]).all()
    batches = sum(kind == "batch" for kind, *_ in runtime.calls)
    assert batches == 1 if refusal else batches > 1


def test_a_refused_copy_fails_the_transfer(runtime):
    runtime.batches, runtime.refuse_copy = TOO_OLD[0], (2, Error.cudaErrorInsufficientDriver)
    case = flat("cpu", 1)
    memory = HostPages(np.zeros((3, case.geometry.page_bytes), np.uint8))
    engine = TransferEngine(case.geometry, case.planes, memory, mode="staged", device=Device())
    with engine:
        transfer = engine.offload(Move([0, 2, 1], np.arange(48)))
        refused(TransferFailed, "cudaErrorInsufficientDriver", transfer.wait)
