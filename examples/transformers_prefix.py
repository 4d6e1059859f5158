"""Two processes with the same model of transformers: one computes a prompt, the other finds it and
computes only what is new. The model is tiny and random; the calls are those for a large one."""

import multiprocessing as mp
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightcache.connectors import transformers as lct

PROMPT = list(range(100))  # token ids: six full pages of 16, and 4 tokens


def load_model() -> LlamaForCausalLM:
    """In place of `from_pretrained`: the same weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def ask(name: str | None, who: str, question: list[int]) -> list[int]:
    """One request: the answer's token ids. What was computed for it is in the cache afterwards."""
    model = load_model()
    input_ids = torch.tensor([PROMPT + question])
    mask = torch.ones_like(input_ids)
    with lct.open_cache(model, name=name, size="16MiB") as cache:
        with lct.Connector(cache, model) as connector:  # once in a process, for all its requests
            with connector.prefix(input_ids) as past:
                reused = past.reused
                output = model.generate(
                    input_ids,
                    attention_mask=mask,
                    past_key_values=past,
                    max_new_tokens=8,
                    do_sample=False,
                )
                past.extend(output[:, input_ids.shape[1] :])  # the answer may be asked about, too
        plain = model.generate(input_ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert torch.equal(output, plain)
        print(f"{who}: {reused} of {input_ids.shape[1]} tokens were not computed", flush=True)
    answer: list[int] = output[0, input_ids.shape[1] :].tolist()
    return answer


def main(name: str | None) -> None:
    """Hold the cache open, so that it outlives both processes, and goes with this one: without
    `lifetime="attached"` it would stay for the next run."""
    with lct.open_cache(load_model(), name=name, size="16MiB", lifetime="attached"):
        for who, question in (("first", [7, 8, 9]), ("second", [11, 12])):
            process = mp.get_context("spawn").Process(target=ask, args=(name, who, question))
            process.start()
            process.join()
            assert process.exitcode == 0


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)  # None: the model's default name
