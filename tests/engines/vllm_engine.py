"""A vLLM that does what it is told: lines of JSON on stdin, an answer to each on stdout.

    vllm_engine.py EXTRA [tensor parallel size [MODEL]]

EXTRA is the extra configuration of the connector, as JSON; "null": none. Models have full
attention, windows, latent attention, recurrent states beside full attention, states alone, images
in their prompts, and attention within chunks.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
import types
from typing import Any

import numpy as np
import tiny_models
import tiny_paligemma
import torch
from PIL import Image

BLOCK = 32
AMX = torch.cpu._is_amx_tile_supported()
MODELS = {
    "llama": functools.partial(tiny_models.save_llama, kv_heads=2),
    "gemma": tiny_models.save_gemma,
    "gemma4": tiny_models.save_gemma4,
    "shapes": tiny_models.save_gemma4,
    "latent": tiny_models.save_latent,
    "next": tiny_models.save_next,
    "mamba": tiny_models.save_mamba,
    "images": tiny_paligemma.save,
    "chunks": tiny_models.save_chunks,
    "oss": tiny_models.save_oss,
}
# Steps of one block, so that a prompt is divided in the same way after any hit: vLLM's kernels for
# CPUs want bfloat16 of the one, and those of the other have no state within a step.
SETTINGS: dict[str, dict[str, Any]] = {
    "next": {
        "dtype": "bfloat16",
        "block_size": tiny_models.STATE_BLOCK,
        "max_num_batched_tokens": tiny_models.STATE_BLOCK,
    },
    # With AMX, latent attention has a kernel for bfloat16 and blocks of 32 alone.
    "latent": {"dtype": "bfloat16"} if AMX else {"block_size": 16},
    "mamba": {"max_num_batched_tokens": BLOCK},
    # All layers in one group, of two shapes.
    "shapes": {"disable_hybrid_kv_cache_manager": True},
    "images": {"skip_tokenizer_init": False, "enable_prompt_embeds": True},
}


def main() -> None:
    extra = json.loads(sys.argv[1])
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    model = sys.argv[3] if len(sys.argv) > 3 else "llama"
    if ranks > 1:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    from vllm import LLM

    how: dict[str, Any] = {
        "dtype": "float32",
        "max_num_batched_tokens": 256,
        "skip_tokenizer_init": True,
        **SETTINGS.get(model, {}),
    }
    if extra is not None:
        how["kv_transfer_config"] = {
            "kv_connector": "LightcacheConnector",
            "kv_connector_module_path": "lightcache.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        how["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "null"}
    if model == "latent":
        keep_prefix_caching()
    if model == "images":
        stand_in_for_pixtral()
    if not os.path.exists(model):  # its files' times are in the fingerprint
        MODELS[model](model)
        for seed, name in enumerate("ab" if model == "llama" else ""):
            tiny_models.save_adapter(name, seed)
    if model == "llama" and ranks == 1:
        how |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine = LLM(
        model=model,
        block_size=how.pop("block_size", BLOCK),
        enforce_eager=True,
        max_model_len=1024,
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


def stand_in_for_pixtral() -> None:
    """vLLM looks for the encoder of images in a list with that of Pixtral, whose code needs
    torchvision, which is not here."""
    absent = types.ModuleType("vllm.model_executor.models.pixtral")
    absent.PixtralHFEncoderInfo = absent.PixtralVisionConfig = type("Absent", (), {})
    sys.modules[absent.__name__] = absent


class Told:
    """What a test may ask."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.published: list[Any] = []
        if hasattr(engine.llm_engine.engine_core, "engine_core"):  # in this process
            publisher = self.scheduler.kv_event_publisher
            publisher.publish = lambda batch: self.published.extend(batch.events)

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
        image: int | None = None,
        embeds: int | None = None,
    ) -> dict[str, Any]:
        """Answers, with the device's index empty before. `image` goes before each prompt, `embeds`
        take the place of its tokens: random ones."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        if reset:
            self.engine.reset_prefix_cache()
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [
            {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts
        ]
        if image is not None:
            given = [{**each, "multi_modal_data": {"image": picture(image)}} for each in given]
        if embeds is not None:
            given = [{"prompt_embeds": embedded(embeds, len(ids))} for ids in prompts]
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
        link = self.scheduler.connector.of_scheduler._link
        while (cache := link.current) is not None and cache.tier is not None:
            stats = cache.tier.stats()
            if not stats.queued + stats.running + stats.writing:
                break
            time.sleep(0.01)
        return True

    def errors(self) -> int:
        """Of both halves, since the start."""
        both = [self.scheduler.connector.of_scheduler, self.worker]
        return sum(half.voice.count for half in both)

    def events(self) -> dict[str, list[Any]]:
        """The blocks that were stored since the last call, by medium: hash, parent, tokens, extra
        keys and group of each."""
        taken, self.published = self.published, []
        found: dict[str, list[Any]] = {"GPU": [], "CPU": []}
        for event in taken:
            if type(event).__name__ != "BlockStored":
                continue
            assert event.block_size == BLOCK
            parent = event.parent_block_hash
            for at, name in enumerate(event.block_hashes):
                tokens = list(event.token_ids[at * BLOCK : (at + 1) * BLOCK])
                facts = [
                    str(name),
                    str(parent),
                    tokens,
                    repr(event.extra_keys and event.extra_keys[at]),
                ]
                found[event.medium].append([*facts, event.group_idx])
                parent = name
        return found

    def forget(self, everything: bool) -> bool:
        """Empty the device's index; with `everything`, tell the connector, as new weights do."""
        return bool(self.engine.reset_prefix_cache(reset_connector=everything))

    def update(self, how: str, prompt: list[int], seed: int) -> list[str]:
        """Other weights, while a copy of the prompt is held: a load if pages of it are there, else
        a save. What vLLM says of the reset before; where it refuses one, it is asked again when all
        copies have ended, and must not."""
        from vllm import SamplingParams

        from lightcache.connectors.vllm import scheduler, worker

        scheduler.RESET = worker.SETTLE = 0.2
        engine, half = self.engine.llm_engine, self.scheduler.connector.of_scheduler
        core, said = engine.engine_core.engine_core, []
        resets: dict[str, Any] = {
            "reset": lambda: core.reset_prefix_cache(False, True),
            "reset and preempt": lambda: core.reset_prefix_cache(True, True),
            "pause": lambda: core.pause_scheduler("abort"),
            "pause and keep": lambda: core.pause_scheduler("keep"),
            "sleep": lambda: core.sleep(1),
        }
        self.engine.reset_prefix_cache()
        self.hold()
        many = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        engine.add_request("busy", {"prompt_token_ids": prompt}, many)
        while not (half._jobs or any(state.leases for state in half._requests.values())):
            engine.step()
        said += ["load" if not half._jobs else "save"]
        before = half._weights
        for _ in range(2):
            try:
                said.append(str(resets[how]()))
            except RuntimeError as error:
                said.append("refused" if "not supported yet" in str(error) else str(error))
            if said[-1] != "refused":
                break
            self.release()
            core.resume_scheduler()
            while self.scheduler.requests:
                engine.step()
        assert half._weights != before
        orders = half._number
        folder = f"llama-{seed}"
        if not os.path.exists(folder):
            MODELS["llama"](folder, seed=seed)
        core.collective_rpc("reload_weights", kwargs={"weights_path": os.path.abspath(folder)})
        if core.is_sleeping():
            core.wake_up()
        core.resume_scheduler()
        self.release()
        self.idle()
        assert half._number == orders, "saved what is partly of the old weights"
        engine.abort_request(["busy"])  # of what a pause has ended the outputs do not know
        return said

    def hold(self) -> bool:
        """From now on copies begin only after `release`."""
        self.gate = Gate()
        self.usual = self.worker._events
        self.worker._events = lambda: [self.gate]
        return True

    def wait_for_writers(self) -> bool:
        """Wait for writers without a limit, and say it."""
        from lightcache.connectors.vllm import scheduler

        half, scheduler.WRITERS = self.scheduler.connector.of_scheduler, 600.0
        half._speed.seconds = lambda tokens: 600.0
        usual = half._coming

        def coming(*arguments: Any) -> bool:
            waits: bool = usual(*arguments)
            if waits:
                print("WAITS", flush=True)
            return waits

        half._coming = coming
        return True

    def release(self) -> bool:
        """Copies run again."""
        self.worker._events = self.usual
        self.gate.open.set()
        return True

    def fail_loads(self, count: int) -> bool:
        """The next loads of the worker fail."""
        usual, left = self.worker._begin_load, [count]

        def begin(order: Any, part: Any) -> Any:
            if left[0] == 0:
                return usual(order, part)
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


def picture(seed: int) -> Any:
    side = tiny_paligemma.SIDE
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def embedded(seed: int, tokens: int) -> Any:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, tiny_paligemma.WIDTH, generator=chance)


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
