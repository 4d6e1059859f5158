"""Every process of SGLang reads this at its start: its torchvision is built for CUDA, and asks
torch for operators that only its compiled part would define. They are declared, and never called.
"""

from __future__ import annotations

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


sys.meta_path.insert(0, Declare())
