"""Hybrid models with random weights whose recurrent states matter for hundreds of tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from support.tiny_models import SIZES

LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FEW_EXPERTS: dict[str, Any] = {"mlp_only_layers": [0, 1, 2]}
"""For Qwen3Next: in one layer only, which takes half the time."""
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Next": LINEAR | EXPERTS,
    "Qwen3_5": LINEAR,
    "FalconH1": MAMBA | {"num_hidden_layers": 3, "mamba_d_ssm": 64},
    "Jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_dt_rank": 4,
    },
    "NemotronH": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "Bamba": MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": MAMBA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "Zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "Lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
}


def hybrid(
    kind: str = "Qwen3Next", *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Any:
    """A causal model of this kind, the same for the same seed; see `draw`."""
    name = {"Qwen3_5": "Qwen3_5Text"}.get(kind, kind)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **KINDS[kind], **sizes})
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    return draw(made, seed).to(dtype).eval()


def draw(made: Any, seed: int = 0) -> Any:
    """Give a model random weights with which tokens far back matter.

    As transformers draws them, weights let a state forget a token within a few: it decays by e^-10
    a token on average, and is a small part of what a layer adds. So they are drawn larger here, and
    states decay by 0.5 to 5 % a token.
    """
    seeded = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, one in sorted(made.named_parameters()):
            if name.endswith("A_log"):
                one.uniform_(math.log(0.005), math.log(0.05), generator=seeded)
            elif name.endswith("dt_bias"):
                one.fill_(math.log(math.e - 1))  # softplus of it is 1
            elif one.dim() >= 2:
                one.normal_(0.0, 1.2 / one[0].numel() ** 0.5, generator=seeded)
    return made
