"""A vLLM that does what it is told: lines of JSON on stdin, an answer to each on stdout.

    vllm_engine.py '{"name": ..., ...}' [tensor parallel size, or "latent"]

The first argument is the extra configuration of the connector; "null": none. "latent": a model with
latent attention.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import tiny_llama

BLOCK = 32


def main() -> None:
    extra = json.loads(sys.argv[1])
    kind = sys.argv[2] if len(sys.argv) > 2 else "1"
    ranks = 1 if kind == "latent" else int(kind)
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
    if kind == "latent":
        keep_prefix_caching()
        tiny_llama.save_latent("latent")
    elif not os.path.exists("model"):  # its files' times are in the fingerprint
        tiny_llama.save("model", kv_heads=2)
        for seed, name in enumerate("ab"):
            tiny_llama.save_adapter(name, seed)
    if kind == "1":
        how |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine = LLM(
        model="latent" if kind == "latent" else "model",
        skip_tokenizer_init=True,
        block_size=16 if kind == "latent" else BLOCK,
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


def keep_prefix_caching() -> None:
    """vLLM switches it off for latents on a CPU, as its backend computes wrongly after a cached
    prefix. It does so always in the same way, so its answers tell whether the bytes are right."""
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def change(config: Any) -> None:
        usual(config)
        config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = staticmethod(change)


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
        self,
        prompts: list[list[int]],
        salt: str | None = None,
        adapter: str | None = None,
        tokens: int = 8,
        reset: bool = True,
    ) -> dict[str, Any]:
        """Answers, with the device's index empty before."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        if reset:
            self.engine.reset_prefix_cache()
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [
            {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts
        ]
        begun = time.monotonic()
        lora = LoRARequest(adapter, ord(adapter), os.path.abspath(adapter)) if adapter else None
        outputs = self.engine.generate(given, how, use_tqdm=False, lora_request=lora)
        return {
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "seconds": time.monotonic() - begun,
        }

    def idle(self) -> bool:
        """Make steps until nothing is saved any more, and all is stored."""
        while self.scheduler.has_requests():
            self.engine.llm_engine.step()
        tier = self.scheduler.connector.of_scheduler._link.current.tier
        while tier is not None:
            stats = tier.stats()
            if not stats.queued + stats.running + stats.writing:
                break
            time.sleep(0.01)
        return True

    def errors(self) -> int:
        """Of both halves, since the start."""
        both = [self.scheduler.connector.of_scheduler, self.worker]
        return sum(half.voice.count for half in both)

    def forget(self, everything: bool) -> bool:
        """Empty the device's index; with `everything`, tell the connector, as new weights do."""
        return bool(self.engine.reset_prefix_cache(reset_connector=everything))

    def pause(self, prompt: list[int] | None) -> list[str]:
        """Pause and resume, as sleep does; with a prompt while its load is under way."""
        from vllm import SamplingParams

        engine, said = self.engine.llm_engine, []
        core = engine.engine_core.engine_core
        if prompt is not None:
            self.engine.reset_prefix_cache()
            self.hold()
            engine.add_request("paused", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4))
            engine.step()
            said += [str(each.status) for each in self.scheduler.requests.values()]
        try:
            core.pause_scheduler(mode="abort")
        except RuntimeError as error:
            said.append(str(error))
        if prompt is not None:
            engine.abort_request(["paused"])
            self.release()
        core.resume_scheduler()
        while self.scheduler.requests:
            engine.step()
        return said

    def hold(self) -> bool:
        """From now on copies begin only after `release`."""
        self.gate = Gate()
        self.usual = self.worker._events
        self.worker._events = lambda: [self.gate]
        return True

    def release(self) -> bool:
        """Copies run again."""
        self.worker._events = self.usual
        self.gate.open.set()
        return True

    def fail_loads(self, count: int) -> bool:
        """The next loads of the worker fail."""
        usual, left = self.worker._begin_load, [count]

        def begin(order: Any) -> Any:
            if left[0] == 0:
                return usual(order)
            left[0] -= 1
            raise RuntimeError("a load that fails")

        self.worker._begin_load = begin
        return True

    def abort_while_loading(self, prompt: list[int]) -> list[Any]:
        """The request's states before it is aborted, after, and when its load has ended."""
        from vllm import SamplingParams

        self.engine.reset_prefix_cache()
        self.hold()
        engine, seen = self.engine.llm_engine, []
        engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4))
        for _ in range(3):
            engine.step()
        seen.append([str(each.status) for each in self.scheduler.requests.values()])
        engine.abort_request(["aborted"])
        for _ in range(3):
            engine.step()
        seen.append(len(self.scheduler.requests))
        self.release()
        while self.scheduler.requests:
            engine.step()
        seen.append(len(self.scheduler.connector.of_scheduler._requests))
        return seen


class Gate:
    """An event that copies wait for."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def wait(self) -> None:
        if not self.open.is_set():
            print("HELD", flush=True)
        self.open.wait()


if __name__ == "__main__":
    main()
