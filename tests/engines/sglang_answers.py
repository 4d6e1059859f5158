"""SGLang starts on a CPU and answers, with lightcache in its process."""

from __future__ import annotations

import json
import sys

import contracts
import sglang
import tiny_llama
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

import lightcache


def main() -> None:
    tiny_llama.save("model")
    engine = sglang.Engine(
        model_path="model",
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        max_total_tokens=2048,
        max_running_requests=4,
        chunked_prefill_size=256,
        disable_cuda_graph=True,
        page_size=16,
        mem_fraction_static=0.5,
        log_level="warning",
    )
    cache = lightcache.Cache.create(
        sys.argv[1], pages=8, page_bytes=4096, fingerprint="model", page_tokens=16
    )
    how = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    outputs = [engine.generate(input_ids=tiny_llama.prompt(300), sampling_params=how) for _ in "12"]
    answers = [output["output_ids"] for output in outputs]
    cached = [output["meta_info"]["cached_tokens"] for output in outputs]
    cache.close()
    engine.shutdown()
    facts = {
        "answers": answers,
        "cached": cached,
        "where": lightcache.__file__,
        "contract": contracts.parameters([UnifiedCacheLinker], contracts.SGLANG),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
