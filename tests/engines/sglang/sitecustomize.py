"""Every process of SGLang reads this at its start: its torchvision is built for CUDA, and asks
torch for operators that only its compiled part would define. They are declared, and never called.
HiCache registers its host memory with CUDA and copies with kernels; on a CPU it need not, and torch
copies. Adapters ask for pinned memory, which torch has only beside a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class Declare(MetaPathFinder):
    """Declares the operators when torchvision is imported first, and not at each start."""

    def find_spec(self, name: str, _: Sequence[str] | None, __: ModuleType | None = None) -> Any:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                signature = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
                library.define(f"{operator}{signature}")
            self.kept = library  # it ends with its last reference
            torch.lightcache_tests_keep = self  # type: ignore[attr-defined]


class CopyWithTorch(MetaPathFinder):
    """Replaces what HiCache's host pools call, when they are about to be used."""

    def find_spec(self, name: str, _: Sequence[str] | None, __: ModuleType | None = None) -> Any:
        if name == "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler":
            sys.meta_path.remove(self)
            from sglang.srt.mem_cache.pool_host import common, mha, mla

            common._cuda_host_register = lambda *_, **__: None
            for module in (mha, mla):
                module.transfer_kv_direct = copy_layers
                module.transfer_kv_per_layer_direct_pf_lf = copy_layer_of_pages
                module.transfer_kv_all_layer_direct_lf_pf = copy_layers_to_pages


class NothingPinned(MetaPathFinder):
    """Memory of adapters is not pinned."""

    def find_spec(self, name: str, _: Sequence[str] | None, __: ModuleType | None = None) -> Any:
        if name == "sglang.srt.lora.lora_manager":
            sys.meta_path.remove(self)
            import torch

            torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
            for made in ("tensor", "empty", "zeros", "empty_like"):
                setattr(torch, made, unpinned(getattr(torch, made)))


def unpinned(method: Any) -> Any:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return method(*arguments, **named)

    return call


def copy_layers(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_layer_of_pages(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def copy_layers_to_pages(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for place, source in enumerate(src_ptrs):
        pages = dst_ptrs[place // layers]
        pages[dst_indices // page_size, place % layers, dst_indices % page_size] = source[
            src_indices
        ]


sys.meta_path.insert(0, Declare())
sys.meta_path.insert(0, CopyWithTorch())
sys.meta_path.insert(0, NothingPinned())
