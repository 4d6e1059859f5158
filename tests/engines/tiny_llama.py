"""A Llama of random weights, in a folder as engines load it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512


def config(kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
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


def save(folder: str, kv_heads: int = 1) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(config(kv_heads)).save_pretrained(folder)


def save_latent(folder: str) -> None:
    """A DeepSeek V2 without experts: the one size of latents that vLLM's CPU kernel has."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)


def save_adapter(folder: str, seed: int) -> None:
    """A LoRA adapter of `save`'s model, as peft writes it."""
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer, name in itertools.product(range(2), ("q_proj", "v_proj")):
        for part in "AB":
            shape = (8, 128) if part == "A" else (128, 8)
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"
            weights[place] = 0.3 * torch.randn(*shape, generator=chance)
    Path(folder).mkdir()
    save_file(weights, f"{folder}/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    Path(folder, "adapter_config.json").write_text(json.dumps(config))


def prompt(length: int) -> list[int]:
    return [number * 37 % (VOCABULARY - 12) for number in range(length)]
