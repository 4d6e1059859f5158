"""Every layout of an engine that we describe, as tensors of random bytes on any device.

    case = CASES["vllm, HND"]("cuda:0", 64)
    case.planes                 # what is tested
    case.read()                 # what the engine itself finds in its tensors, by plain indexing

All but the replicated ones are rank 1 of 2 of a model with 4 heads, and of its layers 0, 1, 3 and
4 the pipeline stage that has 1 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from support.engine_layouts import (
    flashinfer_case,
    latents_case,
    lightllm_case,
    lightllm_latents_case,
    sglang_case,
    sglang_latents_case,
    vllm_case,
    vllm_lbhnc_case,
)
from support.layout_case import (
    BF16,
    BLOCK,
    BLOCKS,
    F32,
    HEADS,
    I8,
    STAGE,
    TOKENS,
    U8,
    Case,
    Place,
    both,
    random,
    shard,
    tokens,
)

from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane
from lightcache.kernels.layouts import Shard, convolution, dynamic_cache, join, plane, sglang


def _dynamic_cache(style: str, row: int, device: str, dim: int) -> Case:
    """One row of a batch of 3: prompts' keys are a permuted projection, later ones contiguous."""
    group = KVGroup.attention(
        "kv", layers=list(STAGE), heads=4, head_dim=dim, dtype_bytes=2, page_tokens=8
    )
    mine = Shard(PageGeometry([group]), 1, 2)
    k = [random((3, TOKENS, HEADS, dim), device=device).transpose(1, 2) for _ in STAGE]
    v = [random((3, HEADS, TOKENS, dim), device=device) for _ in STAGE]
    keys, values = [None, k[0], None, k[1]], [None, v[0], None, v[1]]
    cache = SimpleNamespace(key_cache=keys, value_cache=values)
    if style == "layers":
        layers = [
            SimpleNamespace(keys=one, values=other, get_seq_length=lambda: TOKENS)
            for one, other in zip(keys, values, strict=True)
        ]
        cache = SimpleNamespace(layers=layers)
    planes = dynamic_cache(mine, "kv", cache, row=row)
    pairs = list(zip(k, v, strict=True))
    return Case(
        mine, planes, k + v, lambda: both(pairs, lambda one: tokens(one[row].transpose(0, 1)))
    )


def _scales(axes: str, device: str, dim: int) -> Case:
    """SGLang's rows of fp8, and one float32 for each token and head in tensors of their own."""
    mine = shard(dim, I8, scale_bytes=4)
    sizes = {"t": BLOCKS * BLOCK, "b": BLOCKS, "n": BLOCK, "h": HEADS}
    shape = tuple(sizes[letter] for letter in axes)
    k, v = ([random((TOKENS, HEADS, dim), I8, device) for _ in STAGE] for _ in "kv")
    k_scale, v_scale = ([random(shape, F32, device) for _ in STAGE] for _ in "kv")
    planes = join(
        sglang(mine, "kv", k, v),
        plane(mine, "kv", "k_scale", k_scale, axes=axes),
        plane(mine, "kv", "v_scale", v_scale, axes=axes),
    )

    def flat(one: torch.Tensor) -> torch.Tensor:
        apart = one.transpose(1, 2) if axes == "bhn" else one
        return apart.reshape(-1, HEADS, 1, 1)

    def rows() -> dict[Place, torch.Tensor]:
        values, widths = zip(k, v, strict=True), zip(k_scale, v_scale, strict=True)
        return {**both(list(values), tokens), **both(list(widths), flat, "_scale")}

    return Case(mine, planes, [*k, *v, *k_scale, *v_scale], rows)


def _opaque_blocks(axes: str, device: str, dim: int) -> Case:
    """A slot is a block of 64 tokens, whose bytes are nobody's business; two of them a page."""
    size = 64 * dim
    group = KVGroup.opaque("o", layers=1, row_bytes=size, page_tokens=128, unit_tokens=64)
    mine = Shard(PageGeometry([group]))
    tensor = random((BLOCKS, 64, dim), U8, device)
    given = tensor if axes == "tcc" else tensor.reshape(BLOCKS, size)
    planes = plane(mine, "o", "opaque", [given], axes=axes)
    return Case(
        mine, planes, [tensor], lambda: {("o", 0, "opaque"): tensor.reshape(BLOCKS, 1, 1, size)}
    )


def _state(rows: int, shape: str, memory: str, device: str, dim: int) -> Case:
    """Gated delta net: a convolution of width 3 in sections, and its float32 state.

    Args:
        rows: 3: channels of one width touch; 1: widths of one channel touch.
        shape, memory: the order of slots, width (r) and channels, as shaped and as allocated.
    """
    each = {"conv_q": (4, dim), "conv_k": (4, dim), "conv_v": (8, 2)}  # heads, channels of a head
    parts = [
        Plane(name, channels * 2 * (1 if rows == 3 else 3), heads, rows=rows)
        for name, (heads, channels) in each.items()
    ]
    parts.append(Plane("ssm", 4 * 2 * dim, 8))
    mine = Shard(PageGeometry([KVGroup.state("delta", layers=[0, 2], parts=parts)]), 1, 2, [2])
    sizes = {"t": 7, "r": 3, "c": 2 * dim + 2 * dim + 4 * 2}
    tensor = random(tuple(sizes[letter] for letter in memory), device=device)
    given = tensor if shape == memory else tensor.transpose(1, 2)
    ssm = random((7, 4, 2, dim), F32, device)
    planes = join(
        convolution(mine, "delta", list(each), [given], axes=shape),
        plane(mine, "delta", "ssm", {2: ssm}, axes="thcc"),
    )

    def found() -> dict[Place, torch.Tensor]:
        logical = tensor if memory == "tcr" else tensor.transpose(1, 2)  # [slot, channel, width]
        result, first = {("delta", 2, "ssm"): ssm.unsqueeze(2)}, 0
        for name, (heads, channels) in each.items():
            many = heads // 2 * channels
            section = logical[:, first : first + many].reshape(7, heads // 2, channels, 3)
            first += many
            one = section.transpose(2, 3) if rows == 3 else section.unsqueeze(2)
            result["delta", 2, name] = one
        return result

    return Case(mine, planes, [tensor, ssm], found)


_ORDERS = ("lbhn", "lbnh", "lhbn", "blhn", "blnh", "bhln")
_DTYPES = {"bf16": BF16, "fp32": F32, "fp8": torch.float8_e4m3fn, "int8": I8}
CASES: dict[str, Callable[[str, int], Case]] = {
    **{
        f"vllm, {axes}, {order}, {name}": partial(vllm_case, axes, order, dtype)
        for axes in ("kbnhc", "bknhc")
        for order in ("NHD", "HND", "sliced")
        for name, dtype in _DTYPES.items()
    },
    **{
        f"vllm, {order}c, {content}": partial(vllm_lbhnc_case, content, order)
        for order in _ORDERS
        for content in ("packed", "separate")
    },
    "vllm, latents and indexer": latents_case,
    **{f"sglang, {name}": partial(sglang_case, dtype) for name, dtype in _DTYPES.items()},
    "sglang, latents": sglang_latents_case,
    "lightllm, int8 with scales": lightllm_case,
    "lightllm, latents": lightllm_latents_case,
    **{
        f"flashinfer, {order}, {'k and v' if pair else 'one tensor'}": partial(
            flashinfer_case, order, pair
        )
        for order in ("NHD", "HND")
        for pair in (False, True)
    },
    **{
        f"dynamic cache, {style}, row {row}": partial(_dynamic_cache, style, row)
        for style in ("layers", "key_cache")
        for row in (0, 2)
    },
    **{f"scales, {axes}": partial(_scales, axes) for axes in ("th", "bnh", "bhn")},
    **{f"opaque blocks, {axes}": partial(_opaque_blocks, axes) for axes in ("tc", "tcc")},
    **{
        f"state, {rows} rows, {shape} over {memory}": partial(_state, rows, shape, memory)
        for rows, shape, memory in (
            (3, "trc", "trc"),
            (3, "tcr", "trc"),
            (1, "tcr", "tcr"),
            (1, "trc", "tcr"),
        )
    },
}

__all__ = ["CASES", "Case", "random"]
