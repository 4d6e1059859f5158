"""Greedy generation with log-probabilities, and the same computed again in one piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lightcache.tools.demo.messages import Tokens


@dataclass(frozen=True)
class Generated:
    """An answer."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token; float32."""
    first_at: float
    """When the first token was there; `time.monotonic()`."""
    steps_s: list[float]
    """Between tokens, in seconds."""


@torch.inference_mode()
def generate(
    model: Any,
    prompt: Tokens,
    past: Any,
    count: int,
    after_prompt: Callable[[], None] = lambda: None,
) -> Generated:
    """Compute what of the prompt `past` does not hold, then `count` tokens. Blocks.

    Args:
        prompt: token ids, int32 of shape (n,).
        past: a transformers cache with the first tokens of it, fewer than n; it grows.
        after_prompt: called when the first token is known.
    """
    rest = prompt[past.get_seq_length() :]
    inputs = torch.from_numpy(rest.astype("int64")).to(model.device)[None]
    tokens: list[int] = []
    logprobs: list[float] = []
    times: list[float] = []
    while True:
        found = model(inputs, past_key_values=past, use_cache=True, logits_to_keep=1)
        best, token = found.logits[0, -1].float().log_softmax(-1).max(-1)
        tokens.append(int(token))  # waits for the device
        logprobs.append(float(best))
        times.append(time.monotonic())
        if len(tokens) == 1:
            after_prompt()
        if len(tokens) == count:
            steps = [after - before for before, after in pairwise(times)]
            return Generated(tokens, logprobs, times[0], steps)
        inputs = token.reshape(1, 1)


@torch.inference_mode()
def compare(model: Any, prompt: int, tokens: Tokens, logprobs: list[float]) -> tuple[bool, float]:
    """Compute a prompt and its answer in one piece, without any cache.

    Args:
        prompt: tokens of it.
        tokens: the prompt, then the answer.
        logprobs: of the answer, as they were found.

    Returns:
        Whether each token of the answer is the likeliest one here as well; the largest difference
        between log-probabilities.
    """
    answer = torch.from_numpy(tokens[prompt:].astype("int64")).to(model.device)
    inputs = torch.from_numpy(tokens[:-1].astype("int64")).to(model.device)[None]
    logits = model(inputs, use_cache=False, logits_to_keep=len(answer)).logits[0]
    found = logits.float().log_softmax(-1)
    own = found.gather(1, answer[:, None])[:, 0].cpu()
    difference = (own - torch.tensor(logprobs)).abs().max()
    return bool((found.argmax(-1) == answer).all()), float(difference)
