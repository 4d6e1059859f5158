"""Layouts of engines: every row is where its description says, compared with plain indexing."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from support.devices import check, move, random

from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane
from lightcache.kernels.layouts import (
    Shard,
    convolution,
    flashinfer,
    join,
    lightllm,
    plane,
    sglang,
    vllm,
)

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]
HEADS, DIM, BLOCKS, BLOCK = 2, 3, 5, 4  # heads of one of two ranks
STAGE = (1, 3)  # the layers that are here, of 0, 1, 3, 4


def shard(dtype: torch.dtype = torch.bfloat16, heads: int = 4, **changes: Any) -> Shard:
    """Rank 1 of 2, second pipeline stage."""
    values = {"layers": [0, 1, 3, 4], "heads": heads, "head_dim": DIM, "page_tokens": 8}
    width = torch.empty((), dtype=dtype).element_size()
    group = KVGroup.attention("kv", **{**values, "dtype_bytes": width, **changes})
    return Shard(PageGeometry([group]), 1, 2, range(1, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axes", ["kbnhc", "bknhc"])
@pytest.mark.parametrize("order", ["NHD", "HND", "layers in one allocation"])
def test_vllm_per_layer(dtype: torch.dtype, axes: str, order: str) -> None:
    """HND has the shape of NHD over memory in which heads come before the tokens of a block; and
    layers may be slices of one allocation with gaps between their blocks."""
    shape = [{"k": 2, "b": BLOCKS, "n": BLOCK, "h": HEADS, "c": DIM}[letter] for letter in axes]
    if order == "NHD":
        tensors = [random(tuple(shape), dtype) for _ in STAGE]
    elif order == "HND":
        shape[2], shape[3] = shape[3], shape[2]
        tensors = [random(tuple(shape), dtype).transpose(2, 3) for _ in STAGE]
    else:
        whole = random((*shape[:-1], len(STAGE), DIM), dtype)
        tensors = [whole.select(-2, at) for at in range(len(STAGE))]
    planes = vllm(shard(dtype), "kv", tensors, axes=axes)
    assert planes.device == "cpu"
    assert set(planes.planes) == {("kv", layer, name) for layer in STAGE for name in "kv"}
    for layer, tensor in zip(STAGE, tensors, strict=True):
        for at, name in enumerate("kv"):
            half = tensor[at] if axes == "kbnhc" else tensor[:, at]
            check(
                planes,
                ("kv", layer, name),
                lambda slot, head, _, half=half: half[slot // BLOCK, slot % BLOCK, head],
                slots=BLOCKS * BLOCK,
                heads=HEADS,
            )


@pytest.mark.parametrize("content", ["packed", "separate"])
@pytest.mark.parametrize("order", list(permutations("lbhn")), ids="".join)
@pytest.mark.parametrize("permuted_back", [False, True])
def test_vllm_contents_of_both(content: str, order: tuple[str, ...], permuted_back: bool) -> None:
    """All permutations of [L, B, H, N] before C with K and V in it, as shaped and as strided."""
    sizes = {"l": len(STAGE), "b": BLOCKS, "h": HEADS, "n": BLOCK}
    tensor = random((*(sizes[letter] for letter in order), DIM + 2))
    logical = tensor.permute(*(order.index(letter) for letter in "lbnh"), 4)
    given, axes = (logical, "lbnhc") if permuted_back else (tensor, "".join(order) + "c")
    planes = vllm(shard(content=content, value_dim=2), "kv", given, axes=axes)
    parts = {"kv": slice(0, DIM + 2)} if content == "packed" else {}
    for name, part in (parts or {"k": slice(0, DIM), "v": slice(DIM, None)}).items():
        for at, layer in enumerate(STAGE):
            check(
                planes,
                ("kv", layer, name),
                lambda slot, head, _, at=at, part=part: logical[
                    at, slot // BLOCK, slot % BLOCK, head, part
                ],
                slots=BLOCKS * BLOCK,
                heads=HEADS,
            )


def test_vllm_latents_and_indexer() -> None:
    """Latents of one head, and 132 bytes a token beside them: every rank has all of it."""
    latent = KVGroup.attention(
        "latent",
        layers=2,
        heads=1,
        head_dim=9,
        dtype_bytes=2,
        page_tokens=BLOCK,
        content="single",
    )
    indexer = KVGroup.opaque("indexer", layers=[1], row_bytes=132, page_tokens=BLOCK)
    mine = Shard(PageGeometry([latent, indexer]), 5, 8)
    caches = [random((BLOCKS, BLOCK, 9)) for _ in range(2)]
    extra = {1: random((BLOCKS, BLOCK, 132), torch.uint8)}
    planes = join(
        vllm(mine, "latent", caches, axes="bnc"),
        plane(mine, "indexer", "opaque", extra, axes="bnc"),
    )
    for place, tensor in {
        ("latent", 0, "kv"): caches[0],
        ("latent", 1, "kv"): caches[1],
        ("indexer", 1, "opaque"): extra[1],
    }.items():
        check(
            planes,
            place,
            lambda slot, _, __, tensor=tensor: tensor[slot // BLOCK, slot % BLOCK],
            slots=BLOCKS * BLOCK,
        )
    assert planes.keep == [caches, extra]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sglang(dtype: torch.dtype) -> None:
    k, v = ([random((17, HEADS, DIM), dtype) for _ in STAGE] for _ in range(2))
    planes = sglang(shard(dtype), "kv", k, v)
    for at, layer in enumerate(STAGE):
        for name, tensor in (("k", k[at]), ("v", v[at])):
            check(
                planes,
                ("kv", layer, name),
                lambda slot, head, _, tensor=tensor: tensor[slot, head],
                slots=17,
                heads=HEADS,
            )


def test_sglang_latents() -> None:
    caches = [random((17, 1, DIM)) for _ in STAGE]
    planes = sglang(shard(heads=1, content="single"), "kv", caches)
    for at, layer in enumerate(STAGE):
        check(
            planes, ("kv", layer, "kv"), lambda slot, head, _, at=at: caches[at][slot, 0], slots=17
        )


def test_lightllm_with_scales() -> None:
    """Heads of V follow those of K; so do their scales."""
    buffer = random((len(STAGE), 11, 2 * HEADS, DIM), torch.int8)
    scales = random((len(STAGE), 11, 2 * HEADS, 1), torch.float32)
    mine = shard(torch.int8, scale_bytes=4)
    assert set(lightllm(mine, "kv", buffer).planes) == {("kv", at, n) for at in STAGE for n in "kv"}
    planes = lightllm(mine, "kv", buffer, scales)
    for at, layer in enumerate(STAGE):
        for half, name in enumerate("kv"):
            for tensor, suffix in ((buffer, ""), (scales, "_scale")):
                check(
                    planes,
                    ("kv", layer, name + suffix),
                    lambda slot, head, _, of=tensor[at], half=half: of[slot, half * HEADS + head],
                    slots=11,
                    heads=HEADS,
                )


def test_lightllm_latents() -> None:
    buffer = random((len(STAGE), 11, 1, DIM))
    planes = lightllm(shard(heads=1, content="single"), "kv", buffer)
    for at, layer in enumerate(STAGE):
        check(planes, ("kv", layer, "kv"), lambda slot, _, __, at=at: buffer[at, slot, 0], slots=11)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True], ids=["one tensor", "a pair"])
def test_flashinfer(kv_layout: str, pair: bool) -> None:
    inner = (BLOCK, HEADS) if kv_layout == "NHD" else (HEADS, BLOCK)
    caches: list[Any] = [random((BLOCKS, 2, *inner, DIM)) for _ in STAGE]
    if pair:
        caches = [(random((BLOCKS, *inner, DIM)), random((BLOCKS, *inner, DIM))) for _ in STAGE]
    planes = flashinfer(shard(), "kv", dict(zip(STAGE, caches, strict=True)), kv_layout=kv_layout)
    for at, layer in enumerate(STAGE):
        for half, name in enumerate("kv"):
            tensor = caches[at][half] if pair else caches[at][:, half]
            tensor = tensor if kv_layout == "NHD" else tensor.transpose(1, 2)
            check(
                planes,
                ("kv", layer, name),
                lambda slot, head, _, of=tensor: of[slot // BLOCK, slot % BLOCK, head],
                slots=BLOCKS * BLOCK,
                heads=HEADS,
            )


@pytest.mark.parametrize("axes", ["th", "bnh", "bhn"])
def test_scales_beside(axes: str) -> None:
    """One element for each token and head, in a tensor of its own."""
    sizes = {"t": BLOCKS * BLOCK, "b": BLOCKS, "n": BLOCK, "h": HEADS}
    tensors = [random(tuple(sizes[letter] for letter in axes), torch.float32) for _ in STAGE]
    planes = plane(shard(torch.int8, scale_bytes=4), "kv", "k_scale", tensors, axes=axes)
    for layer, tensor in zip(STAGE, tensors, strict=True):
        apart = tensor.transpose(1, 2) if axes == "bhn" else tensor
        flat = apart.reshape(-1, HEADS)
        check(
            planes,
            ("kv", layer, "k_scale"),
            lambda slot, head, _, flat=flat: flat[slot, head],
            slots=BLOCKS * BLOCK,
            heads=HEADS,
        )


def test_opaque_blocks() -> None:
    """A slot is a block of 64 tokens, of so many bytes; or so many rows in one piece."""
    group = KVGroup.opaque("o", layers=1, row_bytes=64 * 5, page_tokens=128, unit_tokens=64)
    mine = Shard(PageGeometry([group]))
    flat = random((BLOCKS, 64 * 5), torch.uint8)
    for tensor, axes in ((flat, "tc"), (flat.reshape(BLOCKS, 64, 5), "tcc")):
        planes = plane(mine, "o", "opaque", [tensor], axes=axes)
        check(planes, ("o", 0, "opaque"), lambda slot, _, __: flat[slot], slots=BLOCKS)


@pytest.mark.parametrize(
    ("rows", "shape", "memory"),
    [(3, "trc", "trc"), (3, "tcr", "trc"), (1, "tcr", "tcr"), (1, "trc", "tcr")],
    ids=["rows", "rows, transposed", "one piece", "one piece, transposed"],
)
def test_states(rows: int, shape: str, memory: str) -> None:
    """Convolution in sections of 2, 2 and 4 heads of a rank; width 3; and the state beside it."""
    each = {"conv_q": (4, 5), "conv_k": (4, 5), "conv_v": (8, 2)}  # heads, channels of a head
    parts = [
        Plane(name, channels * 2 * (1 if rows == 3 else 3), heads, rows=rows)
        for name, (heads, channels) in each.items()
    ]
    parts.append(Plane("ssm", 4 * 6, 8))
    mine = Shard(PageGeometry([KVGroup.state("delta", layers=[0, 2], parts=parts)]), 1, 2, [2])
    sizes = {"t": 7, "r": 3, "c": 2 * 5 + 2 * 5 + 4 * 2}
    tensor = random(tuple(sizes[letter] for letter in memory))
    tensor = tensor if shape == memory else tensor.transpose(1, 2)
    ssm = random((7, 4, 2, 3), torch.float32)
    planes = join(
        convolution(mine, "delta", list(each), [tensor], axes=shape),
        plane(mine, "delta", "ssm", {2: ssm}, axes="thcc"),
    )
    logical = tensor if shape == "tcr" else tensor.transpose(1, 2)  # [slot, channel, width]
    first = 0
    for name, (heads, channels) in each.items():
        section = logical[:, first : first + heads // 2 * channels].unflatten(1, (heads // 2, -1))
        first += heads // 2 * channels
        check(
            planes,
            ("delta", 2, name),
            lambda slot, head, row, of=section: (
                of[slot, head, :, row] if rows == 3 else of[slot, head]
            ),
            slots=7,
            heads=heads // 2,
            rows=rows,
        )
    check(planes, ("delta", 2, "ssm"), lambda slot, head, _: ssm[slot, head], slots=7, heads=4)


def test_pages_pass_from_one_engine_to_another() -> None:
    """Written by two ranks of vLLM (HND), read by four of SGLang, heads and slots as they are."""
    group = KVGroup.attention(
        "kv", layers=2, heads=8, head_dim=DIM, dtype_bytes=2, page_tokens=8, head_groups=8
    )
    geometry = PageGeometry([group])
    caches = [[random((2, BLOCKS, 4, BLOCK, DIM)).transpose(2, 3) for _ in "01"] for _ in "01"]
    page = np.zeros(geometry.page_bytes, np.uint8)
    slots = [13, 2, 3, 19, 0, 7, 6, 5]
    for rank, tensors in enumerate(caches):
        mine = Shard(geometry, rank, 2)
        move(mine.share(writing=True), page, vllm(mine, "kv", tensors), slots, to_page=True)
    places = [4, 1, 9, 8, 7, 11, 3, 10]
    for rank in range(4):
        k, v = ([torch.zeros(12, 2, DIM, dtype=torch.bfloat16) for _ in "01"] for _ in "kv")
        mine = Shard(geometry, rank, 4)
        move(mine.share(), page, sglang(mine, "kv", k, v), places, to_page=False)
        for layer in range(2):
            for half, tensor in enumerate((k[layer], v[layer])):
                both = torch.cat([caches[other][layer][half] for other in range(2)], dim=2)
                right = both.reshape(-1, 8, DIM)[slots, 2 * rank : 2 * rank + 2]
                found = tensor[places]
                assert torch.equal(found.view(torch.uint8), right.contiguous().view(torch.uint8))
                tensor[places] = 0
                assert not tensor.view(torch.uint8).any()
