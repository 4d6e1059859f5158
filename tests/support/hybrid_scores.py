"""How near log-probabilities are to those of a run without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


def scores(model: Any, ids: Any, past: Any = None) -> torch.Tensor:
    """Log-probabilities behind each token that `past` does not hold."""
    with torch.no_grad():
        found = model(ids[:, past.get_seq_length() if past else 0 :], past_key_values=past).logits
    return found[0].float().log_softmax(-1)


def in_pieces(model: Any, ids: Any, cuts: Sequence[int]) -> torch.Tensor:
    """The same of all tokens, computed in passes that end at these positions and at the end."""
    past, found = DynamicCache(config=model.config), []
    for end in [*cuts, ids.shape[1]]:
        found.append(scores(model, ids[:, :end], past))
    return torch.cat(found)


def divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence from what is expected."""
    each = (expected.exp() * (expected - found)).sum(-1)
    return float(each.mean())


__all__ = ["divergence", "in_pieces", "scores"]
