"""The linker, as told by files in the folder of the test: what a test does to a scheduler, which is
another process."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper

from lightcache.connectors.sglang.linker import LightcacheLinker


class Gate:
    """An event that copies wait for, while there is a file of this name."""

    def __init__(self, name: str) -> None:
        self.file = Path(name)

    def synchronize(self) -> None:
        Path(f"{self.file}-seen").touch()
        while self.file.exists():
            time.sleep(0.005)


class Known:
    """The event that says that the numbers of slots are known: at once."""

    def synchronize(self) -> None:
        """It has happened."""


class ToldLinker(LightcacheLinker):
    """Does and says what a test asks for."""

    def __init__(self, *arguments: Any, extra_config: dict[str, Any], **how: Any) -> None:
        extra = dict(extra_config)
        self.name = extra.pop("told")
        super().__init__(*arguments, extra_config=extra, **how)
        self.said = ""
        self.saves = 0

    def file(self, what: str) -> str:
        return f"{self.name}-{what}"

    def _events(self) -> list[Any]:
        for what in ("hold-load", "hold-save"):
            if os.path.exists(self.file(what)):
                return [Known(), Gate(self.file(what))]
        return []

    def start_layer_wise_loading(self) -> int:
        usual = self._events
        self._events = lambda: usual() if os.path.exists(self.file("hold-load")) else []
        try:
            return super().start_layer_wise_loading()
        finally:
            del self._events

    def load(self, rid: str, transfers: list[Any]) -> bool:
        if os.path.exists(self.file(f"lose-{self.rank.rank}")):
            # Its plan, and the pages too: else a second look would find them.
            self.rank._link.current.cache.cancel(rid)
            for transfer in transfers:
                transfer.keys = ["ab" * 32] * len(transfer.keys)
        return super().load(rid, transfers)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        accepted = super().offload(transfers, session_id)
        self.saves += accepted
        return accepted

    def pop_completed_offload(self) -> bool:
        self.saves -= 1
        return super().pop_completed_offload()

    def reset(self) -> None:
        self.saves = 0
        super().reset()

    def num_completed_offloads(self) -> int:
        rank, asked = self.rank, Path(self.file("asked"))
        under_way = {"saves": self.saves, "untouched": len(rank._used)}
        under_way["asked"] = int(asked.read_text()) if asked.exists() else 0
        said = json.dumps({"count": rank.voice.count} | under_way | rank.figures)
        if said != self.said:
            self.said, target = said, self.file(f"figures-{rank.rank}")
            Path(f"{target}.new").write_text(said)
            os.replace(f"{target}.new", target)
        return super().num_completed_offloads()

    def touch(self, chain: list[str]) -> None:
        """Use these pages, of a prompt from its beginning on."""
        opened = self.rank._link.current
        space, keys = opened.space(self.rank._weights)
        opened.cache.index.match(keys.encode(chain), count=False, namespace=space).release()


def touched(method: Any, place: int) -> Any:
    """A method of SGLang's wrapper of linkers, that uses first what the device has of a prompt,
    while there is a file."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        linker = self.cache_linker
        if isinstance(linker, ToldLinker) and os.path.exists(linker.file("whole")):
            node = arguments[0] if place == 0 else arguments[1].last_device_node
            tree = self.cache.tree_core
            linker.touch(tree.get_prefix_hash_values(node) + list(tree.get_hash_values(node)))
        return method(self, *arguments)

    return call


for name, place in (("_offload_node", 0), ("_tail_hashes", 1)):
    method = getattr(UnifiedCacheLinkerWrapper, name)
    setattr(UnifiedCacheLinkerWrapper, name, touched(method, place))


def in_the_pool_of_windows(method: Any) -> Any:
    """A forward pass of SGLang's attention in torch. It writes KV of a layer with a window into the
    slots of the pool of windows, and reads it from the slots that the whole prompt has in the other
    pool: without this its own answers depend on what else is in the batch."""

    @functools.wraps(method)
    def call(self: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **how: Any) -> Any:
        pool, whole = self.token_to_kv_pool, self.req_to_token_pool
        if not self.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
            return method(self, q, k, v, layer, *rest, **how)
        slots = pool.translate_loc_from_full_to_swa(whole.req_to_token)
        self.req_to_token_pool = SimpleNamespace(req_to_token=slots)
        try:
            return method(self, q, k, v, layer, *rest, **how)
        finally:
            self.req_to_token_pool = whole

    return call


for name in ("forward_extend", "forward_decode"):
    method = getattr(TorchNativeAttnBackend, name)
    setattr(TorchNativeAttnBackend, name, in_the_pool_of_windows(method))
