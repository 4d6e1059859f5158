"""A vLLM that does what it is told: lines of JSON on stdin, an answer to each on stdout.

    vllm_engine.py '{"name": ..., ...}' [tensor parallel size]

The first argument is the extra configuration of the connector; "null": none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import tiny_llama

BLOCK = 32


def main() -> None:
    extra = json.loads(sys.argv[1])
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if ranks > 1:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    from vllm import LLM

    how: dict[str, Any] = {}
    if extra is not None:
        how["kv_transfer_config"] = {
            "kv_connector": "LightcacheConnector",
            "kv_connector_module_path": "lightcache.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    tiny_llama.save("model")
    engine = LLM(
        model="model",
        skip_tokenizer_init=True,
        block_size=BLOCK,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        num_gpu_blocks_override=80,
        tensor_parallel_size=ranks,
        distributed_executor_backend="uni" if ranks == 1 else "mp",
        enable_prefix_caching=True,
        **how,
    )
    told = Told(engine)
    print("READY", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        answer = getattr(told, ask.pop("do"))(**ask)
        print("OUT", json.dumps(answer), flush=True)
    if ranks == 1:
        engine.llm_engine.engine_core.shutdown()


class Told:
    """What a test may ask."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def scheduler(self) -> Any:
        return self.engine.llm_engine.engine_core.engine_core.scheduler

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().of_worker

    def ask(
        self, prompts: list[list[int]], salt: str | None = None, tokens: int = 8, reset: bool = True
    ) -> dict[str, Any]:
        """Answers, with the device's index empty before."""
        from vllm import SamplingParams

        if reset:
            self.engine.reset_prefix_cache()
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
        begun = time.monotonic()
        outputs = self.engine.generate(given, how, use_tqdm=False)
        return {
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "seconds": time.monotonic() - begun,
        }

    def idle(self) -> bool:
        """Make steps until nothing is saved any more."""
        while self.scheduler.has_requests():
            self.engine.llm_engine.step()
        return True

    def figures(self) -> dict[str, Any]:
        """Of the connector, since it was asked last."""
        both = [self.scheduler.connector.of_scheduler, self.worker]
        return {"errors": sum(half.voice.count for half in both)}

    def call(self, name: str, arguments: list[Any]) -> Any:
        """A method of the engine."""
        return repr(getattr(self.engine, name)(*arguments))


if __name__ == "__main__":
    main()
