"""Layouts of serving engines: see `support.layouts`, which lists them."""

from __future__ import annotations

from typing import Any

import torch
from support.layout_case import (
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
    paged,
    random,
    shard,
    tokens,
)

from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.layouts import Shard, flashinfer, join, lightllm, plane, sglang, vllm


def vllm_case(axes: str, order: str, dtype: torch.dtype, device: str, dim: int) -> Case:
    """One tensor for each layer; HND has the shape of NHD over permuted memory."""
    sizes = {"k": 2, "b": BLOCKS, "n": BLOCK, "h": HEADS, "c": dim}
    shape = [sizes[letter] for letter in axes]
    if order == "sliced":  # layers within one allocation: gaps between rows
        whole = random((*shape[:-1], len(STAGE), dim), dtype, device)
        tensors = [whole.select(-2, at) for at in range(len(STAGE))]
    elif order == "HND":
        shape[2], shape[3] = shape[3], shape[2]
        tensors = [random(tuple(shape), dtype, device).transpose(2, 3) for _ in STAGE]
    else:
        tensors = [random(tuple(shape), dtype, device) for _ in STAGE]
    mine = shard(dim, dtype)
    halves = [one.unbind(axes.index("k")) for one in tensors]
    return Case(mine, vllm(mine, "kv", tensors, axes=axes), tensors, lambda: both(halves, paged))


def vllm_lbhnc_case(content: str, order: str, device: str, dim: int) -> Case:
    """One tensor for all layers, K and V in C, logically [L, B, H, N, C]."""
    sizes = {"l": len(STAGE), "b": BLOCKS, "h": HEADS, "n": BLOCK}
    tensor = random((*(sizes[letter] for letter in order), dim + 2), device=device)
    logical = tensor.permute(*(order.index(letter) for letter in "lbhn"), 4)
    mine = shard(dim, content=content, value_dim=2)
    planes = vllm(mine, "kv", logical, axes="lbhnc")

    def rows() -> dict[Place, torch.Tensor]:
        plain = [paged(logical[at].transpose(1, 2)) for at in range(len(STAGE))]
        if content == "packed":
            return {("kv", layer, "kv"): plain[at] for at, layer in enumerate(STAGE)}
        return both([(one[..., :dim], one[..., dim:]) for one in plain], lambda half: half)

    return Case(mine, planes, [tensor], rows)


def latents_case(device: str, dim: int) -> Case:
    """vLLM's latents, and an indexer's 132 bytes a token beside them: the same on 8 ranks."""
    latent = KVGroup.attention(
        "latent", layers=2, heads=1, head_dim=dim, dtype_bytes=2, page_tokens=8, content="single"
    )
    indexer = KVGroup.opaque("indexer", layers=[1], row_bytes=132, page_tokens=8)
    mine = Shard(PageGeometry([latent, indexer]), 5, 8)
    caches = [random((BLOCKS, BLOCK, dim), device=device) for _ in range(2)]
    extra = random((BLOCKS, BLOCK, 132), U8, device)
    planes = join(
        vllm(mine, "latent", caches, axes="bnc"),
        plane(mine, "indexer", "opaque", [extra], axes="bnc"),
    )
    found = {("latent", 0, "kv"): caches[0], ("latent", 1, "kv"): caches[1]}
    found["indexer", 1, "opaque"] = extra
    return Case(
        mine,
        planes,
        [*caches, extra],
        lambda: {place: paged(one.unsqueeze(2)) for place, one in found.items()},
    )


def sglang_case(dtype: torch.dtype, device: str, dim: int) -> Case:
    mine = shard(dim, dtype)
    k, v = ([random((TOKENS, HEADS, dim), dtype, device) for _ in STAGE] for _ in range(2))
    planes = sglang(mine, "kv", k, v)
    return Case(mine, planes, k + v, lambda: both(list(zip(k, v, strict=True)), tokens))


def sglang_latents_case(device: str, dim: int) -> Case:
    mine = shard(dim, heads=1, content="single")
    tensors = [random((TOKENS, 1, dim), device=device) for _ in STAGE]
    return Case(
        mine,
        sglang(mine, "kv", tensors),
        tensors,
        lambda: {("kv", layer, "kv"): tokens(tensors[at]) for at, layer in enumerate(STAGE)},
    )


def lightllm_case(device: str, dim: int) -> Case:
    """int8 with scales: heads of V follow those of K, and so do their scales."""
    mine = shard(dim, I8, scale_bytes=4)
    buffer = random((len(STAGE), TOKENS, 2 * HEADS, dim), I8, device)
    scales = random((len(STAGE), TOKENS, 2 * HEADS, 1), F32, device)

    def rows() -> dict[Place, torch.Tensor]:
        values, widths = (
            [(one[:, :HEADS], one[:, HEADS:]) for one in tensor] for tensor in (buffer, scales)
        )
        return {**both(values, tokens), **both(widths, tokens, "_scale")}

    return Case(mine, lightllm(mine, "kv", buffer, scales), [buffer, scales], rows)


def lightllm_latents_case(device: str, dim: int) -> Case:
    mine = shard(dim, heads=1, content="single")
    buffer = random((len(STAGE), TOKENS, 1, dim), device=device)
    return Case(
        mine,
        lightllm(mine, "kv", buffer),
        [buffer],
        lambda: {("kv", layer, "kv"): tokens(buffer[at]) for at, layer in enumerate(STAGE)},
    )


def flashinfer_case(kv_layout: str, pair: bool, device: str, dim: int) -> Case:
    mine = shard(dim)
    inner = (BLOCK, HEADS) if kv_layout == "NHD" else (HEADS, BLOCK)
    if pair:
        caches: list[Any] = [
            tuple(random((BLOCKS, *inner, dim), device=device) for _ in "kv") for _ in STAGE
        ]
    else:
        caches = [random((BLOCKS, 2, *inner, dim), device=device) for _ in STAGE]
    given = dict(zip(STAGE, caches, strict=True))
    halves = [one if pair else one.unbind(1) for one in caches]

    def rows() -> dict[Place, torch.Tensor]:
        swapped = kv_layout == "HND"
        return both(halves, lambda half: paged(half.transpose(1, 2) if swapped else half))

    tensors = [half for one in halves for half in one]
    return Case(mine, flashinfer(mine, "kv", given, kv_layout=kv_layout), tensors, rows)
