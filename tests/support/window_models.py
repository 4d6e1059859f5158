"""Models with windows, chunks, shared keys and states alone, and requests to them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.hybrid_models import draw
from support.tiny_models import SIZES, Answer, answer

from lightcache import Cache
from lightcache.connectors import transformers as lct
from lightcache.connectors.trial import past_argument

BOTH = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
FOUR = {"num_hidden_layers": 4, "layer_types": BOTH["layer_types"] * 2}
EACH = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
STATE = {"conv_kernel": 4, "state_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "Mistral": {"head_dim": 8},
    "Gemma2": BOTH,
    "Gemma3": BOTH,
    "Ministral": BOTH,
    "GptOss": BOTH | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Cohere2": BOTH,
    "Exaone4": BOTH,
    "Olmo3": BOTH,
    "Llama4": {
        "head_dim": 8,
        "num_hidden_layers": 4,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "num_local_experts": 2,
        "intermediate_size_mlp": 32,
    },
    "Gemma3n": BOTH
    | FOUR
    | EACH
    | {
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4": BOTH | FOUR | EACH | {"num_kv_shared_layers": 2, "global_head_dim": 16},
    "Mamba": STATE | {"time_step_rank": 4},
    "Mamba2": STATE | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "FalconMamba": STATE | {"time_step_rank": 4},
}
"""Kinds of layers: windows alone or beside full attention, chunks, shared keys, states alone."""
STATES_ALONE = ("Mamba", "Mamba2", "FalconMamba")


def windowed(kind: str = "Gemma2", *, window: int = 9, seed: int = 0, **sizes: Any) -> Any:
    """A causal model of this kind, the same for the same seed.

    Args:
        window: of the window or chunk, in tokens; its own among them.
    """
    config_of = getattr(transformers, f"{kind}TextConfig", None) or getattr(
        transformers, f"{kind}Config"
    )
    spans = {"attention_chunk_size": window} if kind == "Llama4" else {"sliding_window": window}
    config = config_of(**{**SIZES, **spans, **KINDS[kind], **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(transformers, f"{kind}ForCausalLM")(config)
    return draw(made, seed).eval()


def opened(name: str, model: Any, *, page: int = 4, size: str = "4MiB") -> Cache:
    """A cache for this model."""
    return lct.open_cache(
        model, name=name, size=size, page_tokens=page, secret=bytes(16), lifetime="attached"
    )


def answered(model: Any, ids: Any, past: Any = None, *, steps: int = 4) -> Answer:
    """Greedy, through a cache if there is one."""
    if past is None or past_argument(model) == "past_key_values":
        found: Answer = answer(model, ids, past, steps=steps)
        return found
    made = model.generate(
        past.rest(ids),
        cache_params=past,
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    scores = torch.log_softmax(torch.cat(made.logits).float(), dim=-1)
    return Answer(torch.cat([ids, made.sequences[:, -steps:]], dim=1), scores)


def request(
    connector: lct.Connector, model: Any, ids: Any, *, steps: int = 4
) -> tuple[int, Answer]:
    """A prompt and an answer through the caches: the tokens reused, and the answer."""
    with connector.prefix(ids) as past:
        connector.prefill(past)
        found = answered(model, ids, past, steps=steps)
        past.extend(found.tokens[:, ids.shape[1] :])
    return past.reused, found
