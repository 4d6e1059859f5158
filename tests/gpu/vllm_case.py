"""The engine of tests/gpu/test_vllm_connector.py, the same in its child processes."""

from __future__ import annotations

from typing import Any

from lightcache_bench._gpu_device import Gpu
from lightcache_bench._vllm_device import PAGES, TINY, Engine

PROMPTS, PAGES_OF_PROMPT, POOL = 6, 16, 256


def engine(gpu: Gpu, name: str, layout: str = "LBHNC", **options: Any) -> Engine:
    """Pages of 2 MiB on a GPU, of a KiB on the processor."""
    model = PAGES["2 MiB"] if gpu.cuda else TINY
    options = {"pages": POOL, "blocks": 512, **options}
    return Engine(gpu, model, name, layout=layout, **options)
