"""A real vLLM with a small model of random weights: lines of JSON on stdin, an answer to each.

    python -m lightcache_bench._vllm_engine FOLDER BLOCKS '{"kv_connector": ...}' | null

BLOCKS of 32 tokens are the device's. The model is made in FOLDER/model by the first engine. What is
asked has a `seed`, for prompts that share nothing and an empty device; or `ids`, of one prompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np

VOCABULARY = 4096
MOST = 2048
"""Tokens of a request."""
BLOCK = 32
TOKEN_BYTES = 8 * 2 * 2 * 64 * 4
"""Of keys and values, in float32."""


def save(folder: str) -> None:
    """The model, as engines load it."""
    transformers = import_module("transformers")
    import_module("torch").manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=MOST,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    """Of this seed."""
    made: list[list[int]] = (
        np.random.default_rng(seed).integers(0, VOCABULARY, (count, tokens)).tolist()
    )
    return made


def main() -> None:
    """Until stdin ends."""
    folder, connector = os.path.join(sys.argv[1], "model"), json.loads(sys.argv[3])
    how: dict[str, Any] = {}
    if connector is not None:
        how["kv_transfer_config"] = connector | {"kv_role": "kv_both"}
    if not os.path.exists(folder):
        save(folder)
    vllm = import_module("vllm")
    engine = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        block_size=BLOCK,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MOST,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        num_gpu_blocks_override=int(sys.argv[2]),
        distributed_executor_backend="uni",
        # One group in any case. Else vLLM imports the connector early, and with LMCache's comes
        # numba, which vLLM 0.32 cannot stand at that time: AttributeError in triton_utils.
        disable_hybrid_kv_cache_manager=True,
        **how,
    )
    print("READY", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if "seed" in ask:
            engine.reset_prefix_cache()
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=ask.pop("out"), ignore_eos=True, detokenize=False
        )
        many = [ask["ids"]] if "ids" in ask else prompts(**ask)
        given = [{"prompt_token_ids": ids} for ids in many]
        begun, cpu = time.perf_counter(), time.process_time()
        outputs = engine.generate(given, sampling, use_tqdm=False)
        took, cpu = time.perf_counter() - begun, time.process_time() - cpu
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        while scheduler.has_requests():  # saves under way
            engine.llm_engine.step()
        answer = {
            "s": took,
            "cpu_s": cpu,
            "cached": [one.num_cached_tokens for one in outputs],
            "first": [one.outputs[0].token_ids[0] for one in outputs],
        }
        print("OUT", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
