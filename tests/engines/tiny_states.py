"""Models of random weights with recurrent states: a Qwen3-Next of three layers of Gated DeltaNet
and one of full attention, for which vLLM makes a group each; and a Mamba 2."""

from __future__ import annotations

import torch
from tiny_llama import VOCABULARY
from transformers import Mamba2Config, Mamba2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

BLOCK = 96
"""Tokens of a block of the first, as vLLM chooses it."""


def save_next(folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=4,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    Qwen3NextForCausalLM(config).save_pretrained(folder)


def save_mamba(folder: str) -> None:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=64,
        state_size=64,
        n_groups=1,
        initializer_range=0.2,
    )
    Mamba2ForCausalLM(config).save_pretrained(folder)
