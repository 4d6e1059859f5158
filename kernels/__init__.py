"""Pages between devices and shared host memory: what they hold, and how they get there.

    geometry = PageGeometry([KVGroup.attention("kv", layers=32, heads=8, head_dim=128,
                                               dtype_bytes=2, page_tokens=64)])
    planes = layouts.vllm(Shard(geometry, rank, ranks), "kv", kv_caches, axes="kbnhc")
    engine = cache.transfer_engine(geometry, planes, memory=cache.pin())
    engine.offload(Move(pages, slots)).wait()

Describe the model's KV once (`geometry`), where the engine keeps it once (`layouts`, `planes`),
then move pages by number. docs/kernels.md has a picture. What is exported here imports no torch.
"""

from lightcache.kernels.geometry import (
    KVGroup,
    PageGeometry,
    Plane,
    Rule,
    split,
)
from lightcache.kernels.layouts import Shard
from lightcache.kernels.measured import layout_digest
from lightcache.kernels.moves import Move
from lightcache.kernels.planes import DevicePlane, DevicePlanes, join
from lightcache.kernels.states import StateCopier

__all__ = [
    "DevicePlane",
    "DevicePlanes",
    "KVGroup",
    "Move",
    "PageGeometry",
    "Plane",
    "Rule",
    "Shard",
    "StateCopier",
    "join",
    "layout_digest",
    "split",
]
