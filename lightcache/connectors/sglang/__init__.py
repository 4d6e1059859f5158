"""SGLang: one line switches the cache on, for every server of a node.

    python -m sglang.launch_server --model-path MODEL --page-size 64
        --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
        --unified-cache-external-linker-config '{"linker": "LightcacheLinker",
            "linker_module_path": "lightcache.connectors.sglang",
            "linker_extra_config": {"size": "64GiB"}}'

`Options` has what may stand in `linker_extra_config`. Where HiCache stays, `LightcacheStorage` is a
storage of it; docs/guides/sglang.md has its line, docs/design/sglang.md says how both work.
SGLang itself is imported when one of the two is asked for, by SGLang or by you.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightcache.connectors.sglang.rank import Options

if TYPE_CHECKING:
    from lightcache.connectors.sglang.hicache import LightcacheStorage
    from lightcache.connectors.sglang.linker import LightcacheLinker

_MODULES = {"LightcacheLinker": "linker", "LightcacheStorage": "hicache"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = ["LightcacheLinker", "LightcacheStorage", "Options"]
