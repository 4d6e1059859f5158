"""What engines call on a connector, and with which arguments. A connector of ours must fit it; the
tests compare it with the pinned engine, so another version that calls otherwise is seen at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

VLLM = {
    "__init__": "vllm_config role kv_cache_config",
    "bind_gpu_block_pool": "gpu_block_pool",
    "bind_kv_cache_manager": "kv_cache_manager",
    "build_connector_meta": "scheduler_output",
    "build_connector_worker_meta": "",
    "get_handshake_metadata": "",
    "get_loaded_kv_cache_group_ids": "request",
    "get_num_new_matched_tokens": "request num_computed_tokens",
    "get_required_kvcache_layout": "vllm_config",
    "get_transfer_results": "finished_req_ids",
    "handle_preemptions": "kv_connector_metadata",
    "has_pending_block_frees": "",
    "has_pending_push_work": "",
    "on_new_request": "request",
    "register_kv_caches": "kv_caches",
    "request_finished": "request block_ids",
    "request_finished_all_groups": "request block_ids",
    "reset_cache": "",
    "save_kv_layer": "layer_name kv_layer attn_metadata **kwargs",
    "requires_piecewise_for_cudagraph": "extra_config",
    "set_xfer_handshake_metadata_pp_aware": "metadata",
    "shutdown": "",
    "start_load_kv": "forward_context **kwargs",
    "take_events": "",
    "update_connector_output": "connector_output",
    "update_state_after_alloc": "request blocks num_external_tokens",
    "wait_for_layer_load": "layer_name",
    "wait_for_save": "",
}

SGLANG = {
    "cancel_queued_load": "rid",
    "close": "",
    "finish_layer_wise_loading": "counter_index",
    "load": "rid transfers",
    "lookup": "rid transfers",
    "num_completed_offloads": "",
    "offload": "transfers session_id",
    "pop_completed_offload": "",
    "reset": "",
    "start_layer_wise_loading": "",
}


def parameters(owners: Iterable[type], names: Iterable[str]) -> dict[str, str | None]:
    """The parameters of each method that one of the classes has; None: none of them has it."""
    classes = list(owners)
    return {
        name: next((found for one in classes if (found := _of(one, name)) is not None), None)
        for name in names
    }


def _of(owner: type, name: str) -> str | None:
    method = inspect.getattr_static(owner, name, None)
    method = getattr(method, "__func__", method)  # of a class method
    if not inspect.isfunction(method):
        return None
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    wanted = list(inspect.signature(method).parameters.values())[1:]  # without self
    return " ".join(marks.get(one.kind, "") + one.name for one in wanted)
