"""An engine's tensors of random bytes, their description, and what plain indexing finds there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.pages import Model

from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.layouts import Shard
from lightcache.kernels.planes import DevicePlanes

HEADS, BLOCKS, BLOCK, TOKENS = 2, 5, 4, 17
STAGE = (1, 3)
Place = tuple[str, int, str]
BF16, F32, I8, U8 = torch.bfloat16, torch.float32, torch.int8, torch.uint8
_DRAW = torch.Generator().manual_seed(0)


def random(shape: tuple[int, ...], dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    """A tensor of random bytes."""
    width = torch.empty((), dtype=dtype).element_size()
    size = (*shape[:-1], shape[-1] * width)
    raw = torch.randint(0, 256, size, dtype=U8, generator=_DRAW)
    return raw.view(dtype).to(device)


@dataclass
class Case:
    """One layout."""

    shard: Shard
    planes: DevicePlanes
    tensors: list[torch.Tensor]
    """The engine's memory; fill it to forget everything."""
    rows: Callable[[], dict[Place, torch.Tensor]]
    """Of each plane, indexed plainly: shape (slots, heads, rows, ...)."""

    def read(self) -> Model:
        """Bytes in the engine's tensors now, as (slots, rows, heads, row_bytes) of each plane."""
        return {place: _bytes(tensor) for place, tensor in self.rows().items()}


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.cpu().contiguous().reshape(*tensor.shape[:3], -1).view(U8)
    return flat.permute(0, 2, 1, 3).numpy().copy()


def shard(dim: int, dtype: torch.dtype = BF16, **changes: Any) -> Shard:
    """Rank 1 of 2, second pipeline stage, pages of 8 tokens."""
    width = torch.empty((), dtype=dtype).element_size()
    values = {"layers": [0, 1, 3, 4], "heads": 4, "head_dim": dim, "page_tokens": 8}
    group = KVGroup.attention("kv", **{**values, "dtype_bytes": width, **changes})
    return Shard(PageGeometry([group]), 1, 2, range(1, 4))


def paged(tensor: torch.Tensor) -> torch.Tensor:
    """[blocks, block, heads, ...] as rows."""
    return tensor.reshape(-1, *tensor.shape[2:3], 1, *tensor.shape[3:])


def tokens(tensor: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, ...] as rows."""
    return tensor.unsqueeze(2)


def both(halves: list[tuple[torch.Tensor, torch.Tensor]], as_rows: Any, suffix: str = "") -> Any:
    """Rows of K and V of each layer of the stage."""
    return {
        ("kv", layer, name + suffix): as_rows(half)
        for layer, pair in zip(STAGE, halves, strict=True)
        for name, half in zip("kv", pair, strict=True)
    }
