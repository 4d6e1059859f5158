"""One name for each device, however it was written: what compares names compares devices."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import numpy as np
import pytest
import torch
from support.fake_driver import FakeDriver
from support.inline_device import InlineDevice
from support.refusals import refused
from support.transfer_cases import flat

from lightcache import Cache
from lightcache.kernels import layouts
from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.layouts import Shard
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlane, DevicePlanes, device_name, join
from lightcache.shm.errors import ConfigError

pytest.importorskip("triton")
MOVE = Move(np.array([0]), np.arange(16))


@pytest.fixture
def current(monkeypatch):
    """Says which GPU is the current one, of a torch that has used it already."""

    def choose(number):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: number)

    return choose


@pytest.fixture
def unused(monkeypatch):
    """Torch has not used a GPU, and must not be asked for the current one."""

    def asked():
        raise AssertionError("this makes a context")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", asked)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("cpu"), "cpu"),
        (torch.device("cpu", 0), "cpu"),
        ("cuda:0", "cuda:0"),
        ("cuda:12", "cuda:12"),
        (torch.device("cuda", 3), "cuda:3"),
        (0, "cuda:0"),
        (5, "cuda:5"),
        ("npu:0", "npu:0"),  # of an engine that is not ours
        (torch.device("xpu", 2), "xpu:2"),
    ],
)
def test_what_has_a_number_keeps_it(given, name, current):
    current(7)
    assert device_name(given) == name
    assert device_name(name) == name


@pytest.mark.parametrize("given", ["cuda", torch.device("cuda")], ids=["text", "torch"])
def test_without_a_number_it_is_the_current_one(given, current):
    for number in (2, 0):
        current(number)
        assert device_name(given) == f"cuda:{number}"


def test_torch_that_has_used_no_gpu_is_not_asked(unused):
    assert device_name("cuda") == "cuda:0"


def test_torch_is_not_imported_for_it(script):
    done = script(
        "import sys\n"
        "from lightcache.kernels.planes import DevicePlanes\n"
        "assert DevicePlanes({}, device='cuda').device == 'cuda:0'\n"
        "print('torch' in sys.modules)\n"
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "given",
    [
        *(
            "",
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:01",
            "cuda:1 ",
            "cuda:0\n",
            "CUDA:0",
            "cpu:1",
            "meta",
            "meta:0",
            "npu",
            "n pu:0",
        ),
        *("cuda:\u0661", -1, True, 1.0, None, b"cpu"),
    ],
)
def test_names_that_are_none(given):
    for call in (device_name, lambda device: DevicePlanes({}, device=device)):
        refused(ConfigError, "device: expected 'cpu' or a GPU such as 'cuda:0'", call, given)


def planes_of(case, device):
    return DevicePlanes(case.planes.planes, device=device, keep=case)


@pytest.mark.parametrize("names", [("cuda", "cuda:1"), ("cuda:1", "cuda")])
def test_planes_of_one_call_on_the_same_gpu(names, current):
    current(1)
    case = flat("cpu", 1)
    first, second = (planes_of(case, name) for name in names)
    memory = HostPages(np.zeros((2, case.geometry.page_bytes), np.uint8))
    with TransferEngine(case.geometry, first, memory, device=InlineDevice()) as engine:
        engine.offload(MOVE, planes=second).wait()
        np.testing.assert_array_equal(memory.array[0], case.page(range(16)))
        for other in ("cuda:0", "cpu"):
            with pytest.raises(ConfigError, match=f"expected some on cuda:1, found {other}"):
                engine.offload(MOVE, planes=planes_of(case, other))


def test_parts_on_the_same_gpu_are_joined(current):
    current(1)
    plane = DevicePlane(64, 8, 8)
    first, second = (
        DevicePlanes({("kv", 0, name): plane}, device=device)
        for name, device in (("k", "cuda"), ("v", "cuda:1"))
    )
    assert join(first, second).device == "cuda:1"
    current(0)
    with pytest.raises(ConfigError, match=r"found \['cuda:0', 'cuda:1'\]"):
        join(DevicePlanes({}, device="cuda"), second)


class Described:
    """A tensor of 9 slots, 2 heads and 3 elements that says of its device what it likes."""

    dtype, shape = torch.bfloat16, (9, 2, 3)

    def __init__(self, device):
        self.device = device

    def data_ptr(self):
        return 1 << 44

    def stride(self):
        return 6, 3, 1

    def element_size(self):
        return 2


def test_tensors_on_the_same_gpu(current):
    shape = {"layers": 2, "heads": 2, "head_dim": 3, "dtype_bytes": 2, "page_tokens": 8}
    mine = Shard(PageGeometry([KVGroup.attention("kv", **shape)]))
    current(1)
    keys = [Described("cuda"), Described("cuda:1")]
    assert layouts.sglang(mine, "kv", keys, keys[::-1]).device == "cuda:1"
    current(0)
    with pytest.raises(ConfigError, match=r"found \['cuda:0', 'cuda:1'\]"):
        layouts.sglang(mine, "kv", keys, keys[::-1])


def test_tensors_on_a_device_of_another_kind():
    shape = {"layers": 1, "heads": 2, "head_dim": 3, "dtype_bytes": 2, "page_tokens": 8}
    mine = Shard(PageGeometry([KVGroup.attention("kv", **shape)]))
    assert layouts.sglang(mine, "kv", *2 * [[Described("npu:1")]]).device == "npu:1"


def test_our_engines_serve_no_device_of_another_kind(cache):
    made, case = cache
    there = planes_of(case, "npu:0")
    refused(ConfigError, "found npu:0", made.transfer_engine, case.geometry, there)
    memory = HostPages(made.pool.array)
    for engine in (HostEngine, TransferEngine):
        refused(ConfigError, "npu:0", engine, case.geometry, there, memory)


@pytest.fixture
def cache(segment_name):
    case = flat("cpu", 1)
    fingerprint = case.geometry.fingerprint()
    page_bytes = case.geometry.page_bytes
    like = {"page_bytes": page_bytes, "fingerprint": fingerprint, "secret": bytes(16)}
    with Cache.create(segment_name, pages=4, **like) as made:
        yield made, case


def test_the_engine_of_a_cache(cache, current):
    current(1)
    made, case = cache
    with made.transfer_engine(case.geometry, planes_of(case, "cpu:0")) as engine:
        assert type(engine) is HostEngine
    with pytest.raises(ConfigError, match=r"memory=cache.pin\(device='cuda:1'\)"):
        made.transfer_engine(case.geometry, planes_of(case, "cuda"))
    with made.pin(driver=FakeDriver()) as pinned:
        pinned.wait()
        there = planes_of(case, "cuda")
        with made.transfer_engine(
            case.geometry, there, memory=pinned, device=InlineDevice()
        ) as engine:
            assert type(engine) is TransferEngine
            engine.offload(MOVE, planes=planes_of(case, "cuda:1")).wait()
