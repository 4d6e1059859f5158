"""Models of random weights, in a folder as engines load them: full attention, windows, chunks,
latent attention, recurrent states beside full attention, and states alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512
WINDOW = 64
"""Tokens, of Gemma's."""
CHUNK = 96
"""Tokens, of Llama 4's."""
STATE_BLOCK = 160
"""Tokens of a block of Qwen3-Next: the least that vLLM takes where its states are float32, as on
processors with AMX; elsewhere 96 would do."""


def save_llama(folder: str, kv_heads: int = 1, seed: int = 0) -> None:
    torch.manual_seed(seed)
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


def save_gemma(folder: str) -> None:
    """A Gemma 3: windows in five layers, full attention in two. vLLM makes four groups of them."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

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


def save_gemma4(folder: str) -> None:
    """A Gemma 4, whose layers with full attention have wider heads, so that their blocks have half
    as many tokens."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

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


def save_mellum(folder: str) -> None:
    """A Mellum without experts: windows in three layers, full attention in two. SGLang has a pool
    for each kind."""
    from transformers import MellumConfig, MellumForCausalLM

    torch.manual_seed(0)
    short, full = "sliding_attention", "full_attention"
    layers = [short, short, full, short, full]
    config = MellumConfig(
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
        mlp_layer_types=["dense"] * len(layers),
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        initializer_range=0.2,
    )
    MellumForCausalLM(config).save_pretrained(folder)


def save_oss(folder: str) -> None:
    """A GPT-OSS: windows and full attention in turns, sinks, experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        initializer_range=0.2,
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:  # as large as scores are, so that they count
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    model.save_pretrained(folder)


def save_chunks(folder: str) -> None:
    """A Llama 4: attention within chunks, and full attention, in turns."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

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


def save_next(folder: str) -> None:
    """A Qwen3-Next of three layers of Gated DeltaNet and one of full attention, for which vLLM
    makes a group each."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

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
    from transformers import Mamba2Config, Mamba2ForCausalLM

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


def prompt(length: int) -> list[int]:
    return [number * 37 % (VOCABULARY - 12) for number in range(length)]
