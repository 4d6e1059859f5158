"""An SGLang that does what it is told: lines of JSON on stdin, an answer to each on stdout.

    sglang_engine.py '{"name": ..., ...}' [tensor parallel size [llama|latent|gemma|mellum|lora
        [device tokens]]]

The first argument is the extra configuration of the linker; "null": none. With "hicache", a layout
of host memory, it is that of a storage of HiCache.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import contracts
import sglang
import tiny_models

import lightcache

PAGE = 16
HICACHE = {
    "backend_name": "lightcache",
    "module_path": "lightcache.connectors.sglang",
    "class_name": "LightcacheStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    "prefetch_threshold": PAGE,
}
MODELS = {
    "llama": functools.partial(tiny_models.save_llama, kv_heads=2),
    "latent": tiny_models.save_latent,
    "gemma": tiny_models.save_gemma,
    "mellum": tiny_models.save_mellum,
    "lora": functools.partial(tiny_models.save_llama, kv_heads=2),
}


def main() -> None:
    extra = json.loads(sys.argv[1])
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    model = sys.argv[3] if len(sys.argv) > 3 else "llama"
    tokens = int(sys.argv[4]) if len(sys.argv) > 4 else 2048
    if ranks > 1:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    how: dict[str, Any] = {}
    name = f"engine-{os.getpid()}"
    if extra is not None and "hicache" in extra:
        how["enable_hierarchical_cache"] = True
        how["hicache_mem_layout"] = extra.pop("hicache")
        how["hicache_io_backend"] = "direct"
        how["hicache_ratio"] = 2.0  # else it takes what memory is free, less 10 GiB
        how["hicache_storage_prefetch_policy"] = "wait_complete"
        how["hicache_storage_backend"] = "dynamic"
        how["hicache_storage_backend_extra_config"] = json.dumps(HICACHE | extra)
    elif extra is not None:
        how["enable_unified_cache_external_linker"] = True
        how["unified_cache_external_linker_backend"] = "dynamic"
        how["unified_cache_external_linker_config"] = {
            "linker": "ToldLinker",
            "linker_module_path": "told_linker",
            "linker_extra_config": extra | {"told": name},
        }
    if not os.path.exists(model):  # its files' times are in the fingerprint
        MODELS[model](model)
    if model == "lora":
        for seed, adapter in enumerate("ab"):
            if not os.path.exists(adapter):
                tiny_models.save_adapter(adapter, seed)
        how |= {"lora_paths": {name: name for name in "ab"}, "max_loras_per_batch": 3}
        how["lora_backend"] = "torch_native"
    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        tp_size=ranks,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        max_total_tokens=tokens,
        max_running_requests=4,
        chunked_prefill_size=256,
        disable_cuda_graph=True,
        page_size=PAGE,
        mem_fraction_static=0.5,
        log_level="warning",
        sleep_on_idle=True,
        **how,
    )
    told = Told(engine, name, ranks)
    print("READY", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        answer = getattr(told, ask.pop("do"))(**ask)
        print("OUT", json.dumps(answer), flush=True)
    engine.shutdown()


class Told:
    """What a test may ask."""

    def __init__(self, engine: Any, name: str, ranks: int) -> None:
        self.engine, self.name, self.ranks = engine, name, ranks
        self.asked = 0

    def ask(
        self,
        prompts: list[list[int]],
        tokens: int = 8,
        flush: bool = True,
        at_once: int = 6,
        **more: Any,
    ) -> dict[str, Any]:
        """Answers, with the device's tree empty before."""
        if flush:
            self.flush()
        how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        begun = time.monotonic()
        outputs = []
        for first in range(0, len(prompts), at_once):
            some = prompts[first : first + at_once]
            outputs += self.engine.generate(input_ids=some, sampling_params=how, **more)
        infos = [output["meta_info"] for output in outputs]
        details = [info.get("cached_tokens_details") or {} for info in infos]
        return {
            "answers": [output.get("output_ids") for output in outputs],
            "cached": [info["cached_tokens"] for info in infos],
            "host": [detail.get("host", 0) for detail in details],
            "storage": [detail.get("storage", 0) for detail in details],
            "seconds": time.monotonic() - begun,
        }

    def ask_each(self, prompts: list[list[int]]) -> list[Any]:
        """The answer to each, or the status of the error that SGLang has ended it with."""
        self.flush()
        how = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        found: list[Any] = []
        for ids in prompts:
            try:
                found.append(self.engine.generate(input_ids=ids, sampling_params=how)["output_ids"])
            except Exception as error:
                found.append(getattr(error, "status_code", repr(error)))
        return found

    def flush(self) -> bool:
        """Empty the device's tree, which tells the linker."""
        while not self.engine.flush_cache().success:  # a request has not ended quite yet
            time.sleep(0.01)
        return True

    def figures(self) -> list[dict[str, int]]:
        """Of each rank, when all saves have ended and what the device has whole was touched. Those
        of a step that began after this call: of one before they may lack the last prompt."""
        self.asked += 1
        Path(f"{self.name}-asked.new").write_text(str(self.asked))
        os.replace(f"{self.name}-asked.new", f"{self.name}-asked")
        self.engine.get_server_info()  # else an idle scheduler sleeps for up to a second
        found: list[dict[str, int]] = []
        while True:
            files = [Path(f"{self.name}-figures-{rank}") for rank in range(self.ranks)]
            if all(map(Path.exists, files)):
                found = [json.loads(file.read_text()) for file in files]
                fresh = all(each["asked"] == self.asked for each in found)
                if fresh and not any(each["saves"] or each["untouched"] for each in found):
                    return found
            time.sleep(0.02)

    def hold(self, what: str) -> bool:
        """From now on copies of this kind begin only after `release`."""
        Path(f"{self.name}-hold-{what}").touch()
        return True

    def release(self, what: str) -> bool:
        """Copies run again."""
        Path(f"{self.name}-hold-{what}").unlink()
        return True

    def touch_whole_chains(self, yes: bool) -> bool:
        """Whether the linker uses each prompt from its beginning on, whatever the device has."""
        file = Path(f"{self.name}-whole")
        file.touch() if yes else file.unlink()
        return True

    def lose(self, rank: int, lost: bool = True) -> bool:
        """The plans of a rank are taken away between look-up and load, and its pages are gone."""
        file = Path(f"{self.name}-lose-{rank}")
        file.touch() if lost else file.unlink()
        return True

    def abort_while_loading(self, prompt: list[int]) -> list[Any]:
        """How it ends."""
        self.flush()
        self.hold("load")
        how = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}

        async def both() -> Any:
            task = asyncio.ensure_future(
                self.engine.async_generate(input_ids=[prompt], sampling_params=how)
            )
            while not Path(f"{self.name}-hold-load-seen").exists():
                await asyncio.sleep(0.005)
            self.engine.tokenizer_manager.abort_request(abort_all=True)
            self.release("load")
            return await task

        outputs = self.engine.loop.run_until_complete(both())
        return [output["meta_info"]["finish_reason"]["type"] for output in outputs]

    def chains(self, prompts: list[list[int]]) -> list[list[str]]:
        """SGLang's hashes of the pages of each."""
        from sglang.srt.mem_cache.utils import get_hash_str

        return [list(get_hash_str(ids, None, page_size=PAGE)) for ids in prompts]

    def contract(self) -> dict[str, Any]:
        """What SGLang calls on a linker, and where lightcache was found."""
        from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

        return {
            "calls": contracts.parameters([UnifiedCacheLinker], contracts.SGLANG),
            "where": lightcache.__file__,
        }


if __name__ == "__main__":
    main()
