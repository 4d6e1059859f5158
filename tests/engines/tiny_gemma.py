"""A Gemma 3 of random weights: windows of 64 tokens in five layers, full attention in two. vLLM
makes four groups of them. And a Gemma 4, whose layers with full attention have wider heads, so that
their blocks have half as many tokens."""

from __future__ import annotations

import torch
from tiny_llama import VOCABULARY
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

WINDOW = 64


def save(folder: str) -> None:
    torch.manual_seed(0)
    short, full = "sliding_attention", "full_attention"
    layers = [short, short, full, short, short, full, short]
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(layers),
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        layer_types=layers,
        initializer_range=0.2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)


def save_4(folder: str) -> None:
    torch.manual_seed(0)
    short, full = "sliding_attention", "full_attention"
    layers = [short, short, full, short, short, full]
    config = Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=128,
        hidden_size_per_layer_input=0,
        intermediate_size=256,
        num_hidden_layers=len(layers),
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        global_head_dim=128,
        num_kv_shared_layers=0,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        layer_types=layers,
        initializer_range=0.2,
        tie_word_embeddings=False,  # else it repeats the last token, whatever came before
    )
    Gemma4ForCausalLM(config).save_pretrained(folder)
