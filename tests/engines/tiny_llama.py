"""A Llama of random weights, in a folder as engines load it."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512


def save(folder: str, kv_heads: int = 1) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def prompt(length: int) -> list[int]:
    return [number * 37 % (VOCABULARY - 12) for number in range(length)]
