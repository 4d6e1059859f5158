"""vLLM's KV events for pages that the cache has stored. Imported only if vLLM has them switched on.

Their hashes are those of vLLM's own blocks, so that a router joins the host's with the device's.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from lightcache.connectors.vllm.scheduler import Stored


class Events:
    """Makes events, of the first group of layers with full attention."""

    def __init__(self, spec: Any, number: int) -> None:
        """The group's specification and number are vLLM's."""
        self._number = number
        self._block, self._kind = spec.block_size, get_kv_cache_spec_kind(spec).value
        self._hashed = self._block
        """Tokens of one of vLLM's hashes."""

    def begin(self, device: Any) -> None:
        """The engine starts, `device` is its pool of blocks: what a router knows of its address is
        of an engine that has ended. Stands before all events of the device."""
        self._hashed = device.hash_block_size
        device.kv_event_queue.append(AllBlocksCleared())

    def of(self, stored: Stored) -> BlockStored | None:
        """The event of one save. None: vLLM has no hashes of these blocks."""
        request, first, end = stored.request, stored.first, stored.end
        hashes = resolve_block_hashes(request.block_hashes, self._hashed, self._block)
        if end > len(hashes):
            return None
        extra, item = [], 0
        for block in range(first, end):
            place = block * self._block
            keys, item = generate_block_hash_extra_keys(request, place, place + self._block, item)
            extra.append(keys)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[block]) for block in range(first, end)],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * self._block : end * self._block]),
            block_size=self._block,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=self._number,
            kv_cache_spec_kind=self._kind,
            locality="LOCAL",
            session_id=request.session_id,
        )


__all__ = ["Events"]
