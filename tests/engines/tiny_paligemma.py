"""A PaliGemma of random weights, whose prompts have images."""

from __future__ import annotations

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

WORDS = ["<pad>", "<bos>", "<eos>", "\n", "<image>", *(f"t{number}" for number in range(5, 600))]
SIDE, PATCH = 56, 14
PATCHES = (SIDE // PATCH) ** 2
"""Tokens of an image, before the prompt's own."""
WIDTH = 128


def save(folder: str) -> None:
    torch.manual_seed(0)
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<pad>",
    )
    pictures = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    pictures.image_seq_length = PATCHES
    PaliGemmaProcessor(pictures, tokenizer).save_pretrained(folder)
    vision = SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=WIDTH,
        vision_use_head=False,
    )
    text = GemmaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    config = PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=words["<image>"],
        projection_dim=WIDTH,
        hidden_size=WIDTH,
    )
    config.architectures = ["PaliGemmaForConditionalGeneration"]
    config.save_pretrained(folder)
    weights = PaliGemmaForConditionalGeneration(config).state_dict()
    weights.pop("lm_head.weight", None)  # that of the embedding
    # The names of older checkpoints, which vLLM knows.
    tower = "model.vision_tower."
    named = {name.replace(tower, f"{tower}vision_model."): each for name, each in weights.items()}
    save_file({name: each.clone() for name, each in named.items()}, f"{folder}/model.safetensors")
