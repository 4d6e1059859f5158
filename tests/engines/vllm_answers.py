"""vLLM starts on a CPU and answers, with lightcache in its process."""

from __future__ import annotations

import json
import sys

import contracts
import tiny_models
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import base

import lightcache


def main() -> None:
    tiny_models.save_llama("model")
    engine = LLM(
        model="model",
        skip_tokenizer_init=True,
        block_size=32,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        distributed_executor_backend="uni",
        enable_prefix_caching=True,
    )
    cache = lightcache.Cache.create(
        sys.argv[1], pages=8, page_bytes=4096, fingerprint="model", page_tokens=32
    )
    ask = {"prompt_token_ids": tiny_models.prompt(300)}
    how = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    outputs = [engine.generate([ask], how, use_tqdm=False)[0] for _ in range(2)]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    cached = [output.num_cached_tokens for output in outputs]
    owners = (base.KVConnectorBase_V1, base.SupportsHMA)
    facts = {
        "answers": answers,
        "cached": cached,
        "where": lightcache.__file__,
        "contract": contracts.parameters(owners, contracts.VLLM),
    }
    print(json.dumps(facts))
    cache.close()


if __name__ == "__main__":
    main()
