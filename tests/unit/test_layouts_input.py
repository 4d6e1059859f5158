"""Device planes: tensors that do not fit, what cannot be described, and addresses by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.devices import address, check
from support.layouts import random
from support.refusals import refused

from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane
from lightcache.kernels.layouts import (
    Shard,
    attention,
    convolution,
    flashinfer,
    join,
    lightllm,
    plane,
    sglang,
    vllm,
)
from lightcache.kernels.planes import DevicePlane, DevicePlanes, view
from lightcache.shm.errors import ConfigError


def shard(rank: int = 0, ranks: int = 1, **changes: Any) -> Shard:
    """All of two layers of two heads of 3 bf16 elements, in pages of 8 tokens."""
    values = {"layers": 2, "heads": 2, "head_dim": 3, "dtype_bytes": 2, "page_tokens": 8}
    return Shard(PageGeometry([KVGroup.attention("kv", **{**values, **changes})]), rank, ranks)


class Described:
    """A tensor that is none: shape and strides in elements of 2 bytes, at 1 << 44."""

    dtype = torch.bfloat16

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], device: str = "cuda:1"):
        self.shape, self._strides, self.device = shape, strides, device

    def data_ptr(self) -> int:
        return 1 << 44

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return 2


def dense(*shape: int, device: str = "cuda:1") -> Described:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return Described(shape, tuple(reversed(strides)), device)


def test_offsets_beyond_32_bits() -> None:
    """A pool of 2^38 elements on a GPU, by hand: [2, 2^24 blocks, 16, 8 heads, 64]."""
    mine = shard(layers=1, heads=8, head_dim=64, page_tokens=64)
    planes = vllm(mine, "kv", [dense(2, 1 << 24, 16, 8, 64)])
    assert planes.device == "cuda:1"
    k, v = planes.planes["kv", 0, "k"], planes.planes["kv", 0, "v"]
    assert v.address - k.address == 2 * (1 << 24) * 16 * 8 * 64
    assert v.slots == 1 << 28
    assert v.spacing == (1, 1024, 1024)
    last = address(v, (1 << 28) - 1, head=7)
    assert last == (1 << 44) + 2 * 2 * (1 << 24) * 16 * 8 * 64 - 128


def test_arrays_of_numpy_are_as_tensors() -> None:
    """Views of one memory, as either: dense, permuted, and a field of a record."""
    mine = shard(layers=1)
    tensor = random((2, 6, 4, 2, 3))
    array = tensor.view(torch.uint16).numpy()
    fields = np.zeros((6, 4, 2, 3), [("k", "u2"), ("step", "u1"), ("v", "u2")])
    for one, other, axes in (
        (tensor, array, "kbnhc"),
        (tensor.permute(1, 0, 3, 2, 4), array.transpose(1, 0, 3, 2, 4), "bkhnc"),
        (tensor[:, ::2], array[:, ::2], "kbnhc"),
    ):
        planes = vllm(mine, "kv", [other], axes=axes)
        assert planes.planes == vllm(mine, "kv", [one], axes=axes).planes
        assert planes.device == "cpu"
    with pytest.raises(ConfigError, match=r"contents that touch each other, found 5 bytes"):
        plane(mine, "kv", "v", [fields["v"]], axes="bnhc")
    whole = np.zeros((2, 48, 2, 3), np.uint16)  # two layers
    with pytest.raises(ConfigError, match=r"one tensor for each of layers .*name its axis"):
        plane(shard(), "kv", "v", whole, axes="thc")
    assert len(plane(shard(), "kv", "v", whole, axes="lthc").planes) == 2


def test_blocks_of_one_slot() -> None:
    """Device pages of one token, wherever the allocator put them."""
    tensor = random((6, 2, 1, 2, 3))
    planes = vllm(shard(layers=1), "kv", [tensor], axes="bknhc")
    halves = tensor.view(torch.uint8).reshape(6, 2, 1, 2, 6).numpy()
    check(planes, {("kv", 0, "k"): halves[:, 0], ("kv", 0, "v"): halves[:, 1]})
    assert planes.planes["kv", 0, "v"].spacing == (1, 24, 24)


def test_tensors_live_as_long_as_their_planes() -> None:
    tensors = tokens()
    one = plane(shard(), "kv", "k", tensors, axes="thc")
    both = join(one, plane(shard(), "kv", "v", tokens(), axes="thc"))
    assert one.keep is tensors
    assert both.keep[0] is tensors


def test_contents_of_one_element() -> None:
    """Nothing needs to touch it: scales sliced out of something wider."""
    wide = random((6, 2, 4), torch.float32)
    mine = shard(layers=1, content="single", head_dim=1, dtype_bytes=4)
    planes = sglang(mine, "kv", [wide[..., 1::4]])
    rows = wide[..., 1::4].contiguous().view(torch.uint8).reshape(6, 1, 2, 4).numpy()
    check(planes, {("kv", 0, "kv"): rows})


@pytest.mark.parametrize(("page_tokens", "block"), [(8, 4), (8, 8), (4, 16), (1, 3), (6, 2)])
def test_blocks_that_tile(page_tokens: int, block: int) -> None:
    tensor = random((2, 3, block, 2, 3))
    planes = vllm(shard(layers=1, page_tokens=page_tokens), "kv", [tensor])
    assert planes.planes["kv", 0, "k"].slots == 3 * block


def test_shares_of_a_shard() -> None:
    mine = Shard(shard(heads=1).geometry, 1, 2, [0, 1])
    assert mine.share().layers == (0, 1)
    assert mine.share(writing=True).layers == (1,)


def kbnhc(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape or (2, 3, 4, 2, 3), dtype=dtype) for _ in range(2)]


def tokens(count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(9, 2, 3, dtype=torch.bfloat16) for _ in range(count)]


def state(rows: int) -> KVGroup:
    """Channels of q and v, 4 and 2 for each of two heads, of width 3."""
    sizes = {"q": 24 // rows, "v": 12 // rows}
    parts = [Plane(name, size, 2, rows=rows) for name, size in sizes.items()]
    return KVGroup.state("s", layers=1, parts=parts)


def conv(shape: tuple[int, ...], axes: str = "tcr", rows: int = 3) -> DevicePlanes:
    mine = Shard(PageGeometry([state(rows)]))
    return convolution(mine, "s", "qv", [torch.zeros(shape, dtype=torch.bfloat16)], axes=axes)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (
        lambda: vllm(shard(), "kv", kbnhc(dtype=torch.float32)),
        "layer 0, torch.float32 .* rows of 6 bytes for plane 'k', found 12 bytes; is the dtype",
    ),
    "heads of the model": (
        lambda: vllm(shard(1, 2), "kv", kbnhc()),
        "expected 1 heads of this rank .of 2 of the model., found 2",
    ),
    "K and V swapped with blocks": (
        lambda: vllm(shard(), "kv", kbnhc(), axes="bknhc"),
        "expected 2 K and V .K, then V., found 3",
    ),
    "contents apart": (
        lambda: sglang(
            shard(head_dim=2), "kv", [one.transpose(1, 2) for one in tokens()], tokens()
        ),
        "contents that touch each other, found 6 bytes from one to the next where they have 2",
    ),
    "contents doubled": (
        lambda: vllm(shard(), "kv", [one[..., ::2] for one in kbnhc(2, 3, 4, 2, 6)]),
        "touch each other, found 4 bytes",
    ),
    "layers missing": (
        lambda: vllm(shard(), "kv", kbnhc()[:1]),
        r"group 'kv': expected 2 tensors, for layers \(0, 1\), found 1",
    ),
    "layers by other numbers": (
        lambda: vllm(shard(), "kv", dict(zip((1, 2), kbnhc(), strict=True))),
        r"tensors of layers \(0, 1\), found \[1, 2\]",
    ),
    "layers of one tensor": (
        lambda: lightllm(shard(), "kv", torch.zeros(3, 9, 4, 3, dtype=torch.bfloat16)),
        r"expected 2 layers .numbers \(0, 1\).*, found 3",
    ),
    "one tensor for all": (
        lambda: vllm(shard(), "kv", kbnhc()[0]),
        r"one tensor for each of layers \(0, 1\), found Tensor; name its axis of layers `l`",
    ),
    "no tensors": (lambda: vllm(shard(), "kv", 7), "found int"),
    "no layers here": (
        lambda: vllm(Shard(shard().geometry, layers=[5]), "kv", []),
        r"layers \(\) on one device, found \[\]",
    ),
    "a list": (
        lambda: sglang(shard(), "kv", [[0], [1]], tokens()),
        "a torch tensor or a numpy array, found list",
    ),
    "an array that is read only": (
        lambda: plane(
            shard(layers=1), "kv", "k", [np.broadcast_to(np.uint16(0), (9, 2, 3))], axes="thc"
        ),
        "an array that loads can write, found one that is read only",
    ),
    "axes": (lambda: vllm(shard(), "kv", kbnhc(2, 3, 4, 6)), "expected 5 axes, found 4"),
    "device": (
        lambda: sglang(shard(), "kv", [dense(9, 2, 3), *tokens(1)], tokens()),
        r"layers \(0, 1\) on one device, found \['cpu', 'cuda:1'\]",
    ),
    "devices of K and V": (
        lambda: sglang(shard(), "kv", [dense(9, 2, 3)] * 2, tokens()),
        r"parts on one device, found \['cpu', 'cuda:1'\]",
    ),
    "device of nothing": (
        lambda: vllm(shard(), "kv", [one.to("meta") for one in kbnhc()]),
        "dense tensor in a device's memory, found meta",
    ),
    "sparse": (
        lambda: sglang(shard(), "kv", [one.to_sparse() for one in tokens()], tokens()),
        "dense tensor .*, found torch.sparse_coo",
    ),
    "expanded": (
        lambda: sglang(shard(), "kv", [one[:1].expand(9, 2, 3) for one in tokens()], tokens()),
        "elements of their own, found an expanded tensor",
    ),
    "no slots": (
        lambda: sglang(shard(), "kv", [one[:0] for one in tokens()], tokens()),
        "slot, found none",
    ),
    "blocks do not tile": (
        lambda: vllm(shard(), "kv", kbnhc(2, 4, 3, 2, 3)),
        "blocks that divide the 8 units of a page, or are divided by them, found blocks of 3",
    ),
    "large blocks do not tile": (
        lambda: vllm(shard(), "kv", kbnhc(2, 4, 12, 2, 3)),
        "found blocks of 12; choose page_tokens",
    ),
    "K and V apart for a packed plane": (
        lambda: vllm(shard(content="packed", head_dim=1, value_dim=2), "kv", kbnhc()),
        "expected 1 K and V .plane 'kv' is one row of each head., found 2",
    ),
    "one row for K and V": (
        lambda: vllm(shard(), "kv", [one[0] for one in kbnhc()], axes="bnhc"),
        "rows of 6 bytes of K and 6 of V in one axis of contents, found 6 bytes in 1",
    ),
    "odd heads": (
        lambda: lightllm(shard(), "kv", torch.zeros(2, 9, 3, 3, dtype=torch.bfloat16)),
        "heads of this rank that 2 K and V divide, found 3",
    ),
    "letters": (lambda: vllm(shard(), "kv", kbnhc(), axes="kbnhd"), "letters lktbnhrc, found 'kb"),
    "letters twice": (lambda: vllm(shard(), "kv", kbnhc(), axes="kkbnc"), "each letter but c once"),
    "no letters": (lambda: vllm(shard(), "kv", kbnhc(), axes=None), "letters .*, found None"),
    "no slots named": (lambda: vllm(shard(), "kv", kbnhc(), axes="kbhc"), "either slots .t., or"),
    "slots named twice": (lambda: vllm(shard(), "kv", kbnhc(), axes="ktbnc"), "either slots"),
    "unknown group": (lambda: vllm(shard(), "k", kbnhc()), r"among \['kv'\], found 'k'"),
    "unknown plane": (
        lambda: plane(shard(), "kv", "scale", tokens(), axes="thc"),
        r"plane among \['k', 'v'\], found 'scale'",
    ),
    "scales of none": (
        lambda: attention(shard(), "kv", kbnhc(), axes="kbnhc", suffix="_scale"),
        "found 'k_scale'",
    ),
    "flashinfer layout": (
        lambda: flashinfer(shard(), "kv", kbnhc(), kv_layout="HDN"),
        "expected NHD or HND, found 'HDN'",
    ),
    "flashinfer triple": (
        lambda: flashinfer(shard(), "kv", [tuple(kbnhc()), (1, 2, 3)]),
        r"layer 1: expected \(k, v\), found a tuple of 3",
    ),
    "described twice": (
        lambda: join(*[plane(shard(), "kv", "k", tokens(), axes="thc")] * 2),
        r"each .* once, found \('kv', 0, 'k'\) twice",
    ),
    "nothing to join": (lambda: join(), r"parts on one device, found \[\]"),
    "rank": (lambda: Shard(shard().geometry, 2, 2), "rank: expected 0 to 1, found 2"),
    "shard of a group": (lambda: Shard(state(1)), "expected a PageGeometry, found KVGroup"),
    "layers of a shard": (lambda: Shard(shard().geometry, layers=3), "found 3"),
    "channels left": (lambda: conv((5, 13, 3)), "expected 12 contents .channels of q, v.*found 13"),
    "width": (lambda: conv((5, 4, 12), "trc"), "expected 3 rows of a unit .plane 'q'., found 4"),
    "no width": (
        lambda: conv((5, 12, 0), rows=1),
        "expected 36 contents .channels of q, v of this rank., found 12",
    ),
    "one piece of another width": (
        lambda: conv((5, 12, 4), rows=1),
        "channels that divide the 12 bytes of a head of plane 'v', found channels of 8 bytes",
    ),
    "channels apart": (lambda: conv((5, 12, 3)), "touch each other, found 6 bytes"),
    "plane at address 0": (lambda: DevicePlane(0, 4, 4), "address: expected .*, found 0"),
    "plane of no slots": (lambda: DevicePlane(4096, 4, 0), "slots: expected .*, found 0"),
    "plane that goes back": (lambda: DevicePlane(4096, -4, 1), "unit_stride: expected .* found -4"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(make: Callable[[], object], message: str) -> None:
    refused(ConfigError, message, make)


def test_planes_that_were_not_described() -> None:
    mine = shard()
    planes = plane(mine, "kv", "k", tokens(), axes="thc")
    cells = {cell.plane.name: cell for cell in mine.share().cells if cell.layer == 1}
    assert planes.find(mine.geometry, cells["k"]) is planes.planes["kv", 1, "k"]
    with pytest.raises(ConfigError, match="plane 'v' of layer 1 of group 'kv' is not among the 2"):
        planes.find(mine.geometry, cells["v"])


def test_errors_say_which_tensor() -> None:
    with pytest.raises(ConfigError) as caught:
        view(tokens()[0], "tc", "layer 7").plane(Plane("k", 6, 2), 2, 8)
    assert str(caught.value) == (
        "layer 7, torch.bfloat16 (9, 2, 3) on cpu as 'tc': expected 2 axes, found 3"
    )
