"""A Llama 4 of random weights: attention within chunks, and full attention, in turns."""

from __future__ import annotations

import torch
from tiny_llama import VOCABULARY
from transformers import Llama4ForCausalLM, Llama4TextConfig

CHUNK = 96


def save(folder: str) -> None:
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        intermediate_size_mlp=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        num_local_experts=2,
        moe_layers=[],  # as the next line says, in the words of vLLM
        interleave_moe_layer_step=9,
        no_rope_layers=[1, 0, 1, 0],
        attention_chunk_size=CHUNK,
        initializer_range=0.2,
    )
    Llama4ForCausalLM(config).save_pretrained(folder)
