"""SGLang: one line switches the cache on, for every server of a node.

    python -m sglang.launch_server --model-path MODEL --page-size 64
        --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
        --unified-cache-external-linker-config '{"linker": "LightcacheLinker",
            "linker_module_path": "lightcache.connectors.sglang",
            "linker_extra_config": {"size": "64GiB"}}'

`Options` has what may stand in `linker_extra_config`. docs/design/sglang.md says how it works.
SGLang itself is imported when `LightcacheLinker` is asked for, by SGLang or by you.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightcache.connectors.sglang.rank import Options

if TYPE_CHECKING:
    from lightcache.connectors.sglang.linker import LightcacheLinker


def __getattr__(name: str) -> Any:
    if name != "LightcacheLinker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightcache.connectors.sglang import linker

    return linker.LightcacheLinker


__all__ = ["LightcacheLinker", "Options"]
