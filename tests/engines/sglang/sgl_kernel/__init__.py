"""In place of SGLang's kernels for CPUs, which have no wheel: SGLang then computes with torch.

It has the one function that the path with torch calls; any other says that it is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _width: int,
) -> None:
    """Write the slots of all requests, one after another, into their rows of the table."""
    used = 0
    for row, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[row, begin:end] = slots[used : used + end - begin].to(table.dtype)
        used += end - begin


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: there are no kernels for CPUs here")

    return missing
