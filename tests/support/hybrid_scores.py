"""How near log-probabilities are to those of a run without a cache; and whether an engine's are the
same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support.hybrid_engine import HybridEngine
from support.tiny_models import prompt
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


def ids(length: int, seed: int = 0) -> list[int]:
    """Token ids."""
    found: list[int] = prompt(length, seed)[0].tolist()
    return found


def same(engine: HybridEngine, *served: Any) -> None:
    """What was served is what is computed without a cache."""
    for one in served:
        every = torch.tensor([one.answer().tokens[0].tolist()])
        whole, begin = scores(engine.store.model, every[:, :-1]), one.match.usable
        found = torch.cat(one.scores)[: len(whole) - begin]
        torch.testing.assert_close(found, whole[begin:], atol=1e-4, rtol=0)
        known = len(one.prompt)
        assert every[0, known:].tolist() == whole[known - 1 :].argmax(-1).tolist()


def ask(engine: HybridEngine, tokens: list[int], more: int = 3) -> tuple[int, list[int]]:
    """One request, seen to be right. Returns its hit, and prompt and answer."""
    (one,) = engine.serve([tokens], more)
    same(engine, one)
    engine.settle()
    return one.match.usable, one.answer().tokens[0].tolist()


__all__ = ["ask", "divergence", "ids", "in_pieces", "same", "scores"]
