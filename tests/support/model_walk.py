"""Every model type of transformers with a causal language model, as a tiny instance."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from support.hybrid_models import draw
from support.window_models import opened
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.models.auto import modeling_auto

from lightcache import ConfigError
from lightcache.connectors import transformers as lct
from lightcache.connectors.trial import forward

_UNFIT = (AttributeError, ImportError, KeyError, TypeError, ValueError)
MOST_PARAMETERS = 8_000_000
VOCABULARY = 128
WINDOW = 9
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "is_decoder": True,
    # Widths, as different models call them.
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "lru_width", "decoder_hidden_size"], 32),
    **dict.fromkeys(["emb_dim", "embedding_size", "embedding_dim"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"], 48),
    **dict.fromkeys(["n_inner", "dim_ff", "d_inner", "ffn_hidden_size"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 4),
    **dict.fromkeys(["decoder_layers", "encoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_decoder_attention_heads", "num_encoder_attention_heads"], 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(["head_dim", "attention_head_dim", "d_kv", "dim_head", "rotary_dim"], 8),
    # Windows and chunks shorter than the prompts.
    **dict.fromkeys(["sliding_window", "sliding_window_size", "window_size"], WINDOW),
    "attention_window_size": WINDOW,
    "attention_chunk_size": 12,
    # Experts.
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["intermediate_size_mlp", "shared_intermediate_size"], 16),
    **dict.fromkeys(["expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"], 1),
    # Latent attention.
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"], 8),
    # States.
    **dict.fromkeys(["state_size", "mamba_d_state", "ssm_state_size", "mamba_head_dim"], 8),
    **dict.fromkeys(["mamba_d_head", "mamba_headdim", "linear_key_head_dim"], 8),
    **dict.fromkeys(["linear_value_head_dim", "mamba_n_heads", "mamba_num_heads"], 8),
    **dict.fromkeys(["linear_num_value_heads", "linear_num_key_heads"], 4),
    **dict.fromkeys(["conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"], 4),
    **dict.fromkeys(["n_groups", "mamba_n_groups", "mamba_ngroups"], 1),
    **dict.fromkeys(["time_step_rank", "mamba_dt_rank"], 4),
    **dict.fromkeys(["chunk_size", "mamba_chunk_size"], 16),
}
"""Fields of configurations; each model takes those that it has."""
LATENT = {"num_key_value_heads": 4}
"""As many heads of keys as of queries."""
PADDED = {"pad_token_id": 1}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"], LATENT),
    **dict.fromkeys(["glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3"], LATENT),
    **dict.fromkeys(["youtu", "dots3_note_text", "kimi_linear"], LATENT),
    **dict.fromkeys(["camembert", "data2vec-text", "roberta", "roberta-prelayernorm"], PADDED),
    **dict.fromkeys(["xlm-roberta", "xlm-roberta-xl", "prophetnet", "xlm"], PADDED),
    "xmod": PADDED | {"default_language": "en_XX"},
    "bailing_hybrid": LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1]},
    "cwm": {"bos_token_id": 0, "eos_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "global_head_dim": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "modernbert-decoder": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that a model type needs beside, or in place of these."""


def model_types() -> dict[str, str]:
    """Names of the classes by model type, sorted."""
    return dict(sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def config_of(kind: str) -> Any:
    """The configuration of a tiny instance."""
    made = CONFIG_MAPPING[kind]
    known = set(inspect.signature(made.__init__).parameters) | set(
        getattr(made, "__annotations__", {})
    )
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return made(**{**sizes, **SPECIAL.get(kind, {})})


class NotBuiltError(Exception):
    """The model type has no tiny instance; says why, or which model type it contains."""


def tiny(kind: str) -> Any:
    """A tiny instance with random weights, the same each time.

    Raises:
        NotBuiltError: there is none.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = config_of(kind)
            text = config.get_text_config(decoder=True).model_type
            kind_of = getattr(transformers, model_types()[kind])
            with torch.device("meta"):
                count = sum(one.numel() for one in kind_of(config).parameters())
            if count <= MOST_PARAMETERS:
                return draw(kind_of(config)).eval()
    except (*_UNFIT, StrictDataclassError):  # sizes that do not fit together
        inner = CONFIG_MAPPING[kind].sub_configs.get("text_config")
        text = getattr(inner, "model_type", kind)
    raise NotBuiltError("not tried" if text == kind else f"as its part `{text}`")


# ---- verdicts


@dataclass(frozen=True)
class Verdict:
    """What became of a model type."""

    kind: str
    kept: str
    """Kinds of layers; empty: it is refused or was not tried."""
    result: str


LENGTH = 40


def verdict(kind: str, name: str) -> Verdict:
    """Try a model type: describe it, and compare logits with and without a cache.

    Args:
        name: of caches that are made for it, and removed.
    """
    try:
        made = tiny(kind)
    except NotBuiltError as error:
        return Verdict(kind, "", str(error))
    try:
        pages = lct.describe(made, page_tokens=4)
    except ConfigError as error:
        return Verdict(kind, "", f"refused: {reason(str(error))}")
    kept = [of.name for of in pages.attention] + ["states"] * (pages.states is not None)
    return Verdict(kind, ", ".join(kept), rounded(difference(made, name)))


REASONS = {
    "DynamicIndexedLayer": "keys of an indexer",
    "DeepseekV4": "compressed entries",
    "cannot compute a token with a DynamicCache": "a cache of its own, or other inputs than ids",
    "cached no keys and values": "its past is outside of the layers of a cache",
    "layers of .* without": "its states are in its modules",
    "continues from the keys": "does not continue from its cache",
    "one row of keys": "adds rows of its own",
    "found windows": "a pass of many tokens ignores its windows",
    "rotary": "rotary positions that change with the length of the prompt",
}
"""Reasons by a part of the message of `describe`."""


def reason(message: str) -> str:
    """Why a model is refused, in a few words."""
    return next((words for part, words in REASONS.items() if re.search(part, message)), message)


def difference(model: Any, name: str) -> float:
    """The greatest difference of the logits of the last tokens of a prompt, computed after a
    prefix that another request has saved, from those of the whole prompt in one pass.

    Raises:
        AssertionError: nothing was restored.
    """
    seeded = torch.Generator().manual_seed(3)
    ids = torch.randint(4, VOCABULARY, (1, LENGTH), generator=seeded)
    greatest = 0.0
    with torch.no_grad():
        whole = forward(model, DynamicCache(config=model.config), ids, 0).logits
        with opened(name, model) as caches, lct.Connector(caches, model, chunk=4) as connector:
            for saved in (False, True):
                with connector.prefix(ids) as past:
                    assert (past.reused > 0) == saved
                    connector.prefill(past)
                    held = past.held
                    step = LENGTH if getattr(past, "several", True) else 1
                    for begin in range(held, LENGTH, step):
                        found = forward(model, past, past.rest(ids)[:, :step], begin).logits
                        other = whole[:, begin : begin + step]
                        assert torch.isfinite(found).all()
                        greatest = max(greatest, float((found - other).abs().max()))
    return greatest


def rounded(value: float) -> str:
    """A bound that machines agree on: they differ by a factor of a few in what rounding does."""
    return "< 1e-4" if value < 1e-4 else f"wrong: {value:.1g}"


# ---- the document

HEAD = """# Models

Every model type of transformers {release} that has a causal language model, tried as an instance
of a few layers with random weights: a prompt of {length} tokens is computed twice through
[the connector](guides/transformers.md), in pages of 4 tokens, and its logits are compared with
those of one pass without a cache. `make test-all` does so, and fails if this document is not what
it finds; `tests/support/model_walk.py` writes it.

Layers: `kv` is full attention, `window{window}` and `chunk12` keep the last tokens, `states` are
recurrent. A type that contains a tried one works as that does, if its prompts are text alone.
"Not tried": no tiny instance is known here.

| model type | layers | greatest difference of a logit, or why not |
|---|---|---|
"""


def document(name: str) -> str:
    """The text of docs/models.md.

    Args:
        name: of caches that are made for it, and removed.
    """
    head = HEAD.format(release=transformers.__version__, length=LENGTH, window=WINDOW)
    found = [verdict(kind, f"{name}-{number}") for number, kind in enumerate(model_types())]
    return head + "".join(f"| {one.kind} | {one.kept} | {one.result} |\n" for one in found)


def main() -> None:
    """Write docs/models.md."""
    path = Path(__file__).resolve().parents[2] / "docs" / "models.md"
    path.write_text(document(f"walk-{os.getpid()}"))


if __name__ == "__main__":
    main()
