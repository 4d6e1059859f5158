"""Models with random weights that compute within milliseconds, and what they answer without a
cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # No token ends an answer or pads a prompt: lengths are those asked for.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def model(
    kind: str = "Llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Any:
    """`LlamaForCausalLM` and the like, the same for the same seed."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made.to(dtype).eval()


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Ids of shape (1, length)."""
    seeded = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (1, length), generator=seeded)


class Answer(NamedTuple):
    """What `generate` found."""

    tokens: torch.Tensor
    """Prompt and answer, shape (1, n)."""
    scores: torch.Tensor
    """Log-probabilities of each step, shape (steps, vocabulary)."""


def answer(model: Any, ids: torch.Tensor, past: Any = None, *, steps: int = 12, **more: Any) -> Any:
    """Greedy, with `past_key_values` if there are any."""
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=past,
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )
    scores = torch.log_softmax(torch.cat(found.logits).float(), dim=-1)
    return Answer(found.sequences, scores)


def assert_same(one: Answer, other: Answer) -> None:
    """Equal tokens, and log-probabilities within 1e-4."""
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.scores, other.scores, atol=1e-4, rtol=0)


def kept(past: Any, tokens: int) -> list[torch.Tensor]:
    """Keys and values of the first tokens, layer by layer, copied."""
    return [
        one[:, :, :tokens].clone() for layer in past.layers for one in (layer.keys, layer.values)
    ]
