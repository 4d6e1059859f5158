"""vLLM: one line switches the cache on, for every `vllm serve` of a node.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "LightcacheConnector",
        "kv_connector_module_path": "lightcache.connectors.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"size": "64GiB"}}'

`Options` has what may stand in `kv_connector_extra_config`. docs/design/vllm.md says how it works.
vLLM itself is imported when `LightcacheConnector` is asked for, by vLLM or by you.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightcache.connectors.vllm.options import Options

if TYPE_CHECKING:
    from lightcache.connectors.vllm.connector import LightcacheConnector


def __getattr__(name: str) -> Any:
    if name != "LightcacheConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightcache.connectors.vllm import connector

    return connector.LightcacheConnector


__all__ = ["LightcacheConnector", "Options"]
