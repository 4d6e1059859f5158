"""A real SGLang, as `_vllm_engine`: the same model, lines of JSON and answers.

python -m lightcache_bench._sglang_engine FOLDER BLOCKS '{an argument of sglang.Engine: ...}' | null
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module

from lightcache_bench._vllm_engine import BLOCK, prompts, save


def main() -> None:
    """Until stdin ends."""
    folder = os.path.join(sys.argv[1], "model")
    if not os.path.exists(folder):
        save(folder)
    engine = import_module("sglang").Engine(
        model_path=folder,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        max_total_tokens=int(sys.argv[2]) * BLOCK,
        max_running_requests=8,
        chunked_prefill_size=512,
        disable_cuda_graph=True,
        page_size=BLOCK,
        mem_fraction_static=0.5,
        log_level="warning",
        sleep_on_idle=True,
        **(json.loads(sys.argv[3]) or {}),
    )
    print("READY", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        while "seed" in ask and not engine.flush_cache().success:  # a request has not quite ended
            time.sleep(0.01)
        how = {"temperature": 0, "max_new_tokens": ask.pop("out"), "ignore_eos": True}
        many = [ask["ids"]] if "ids" in ask else prompts(**ask)
        begun = time.perf_counter()
        outputs = engine.generate(input_ids=many, sampling_params=how)
        answer = {
            "s": time.perf_counter() - begun,
            "cached": [output["meta_info"]["cached_tokens"] for output in outputs],
            "first": [output["output_ids"][0] for output in outputs],
        }
        print("OUT", json.dumps(answer), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
