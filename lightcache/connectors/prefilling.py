"""Prefill of a hybrid model: forward passes that end where a state is to be saved."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightcache.connectors._requirements import torch
from lightcache.connectors.hybrid_cache import HybridPrefixCache
from lightcache.connectors.prefix_cache import TokenIds, token_ids
from lightcache.connectors.trial import forward
from lightcache.errors import ConfigError
from lightcache.hybrid.grids import Grid
from lightcache.kernels.groups import whole


def prefill(model: Any, past: Any, tokens: Any, *, grid: Grid, at_most: int | None) -> None:
    """See `Connector.prefill`.

    Transformers gives a state at the end of a forward pass only, so each position at which one is
    saved ends a pass. A prompt that ends on the grid leaves two: its last one is for longer
    prompts, the one before it for itself, which must leave a token to compute.
    """
    if not isinstance(past, HybridPrefixCache):
        raise ConfigError(
            f"past: expected a cache of this connector's `prefix`, found {type(past).__name__}"
        )
    if at_most is not None:
        whole(at_most, "at_most")
    prompt = past.name(None if tokens is None else token_ids(tokens))
    most = len(prompt) - 1  # the last token is the caller's: only its logits say what follows
    positions = {past.branching or 0, grid.floor(most)}
    past.save_at(positions)
    if grid.floor(len(prompt)) == len(prompt):
        past.save_at({len(prompt)})
    for end in sorted(positions):
        _compute(model, past, prompt[: min(end, most)], at_most)
        past.look()
    if not past.several:
        _compute(model, past, prompt[:most], at_most)


def _compute(model: Any, past: HybridPrefixCache, prompt: TokenIds, at_most: int | None) -> None:
    """Compute what of a prompt is not held."""
    body = getattr(model, "base_model", model)  # no logits are asked for
    with torch.no_grad():
        while past.held < len(prompt):
            most = len(prompt) if past.several or not past.held else 1
            piece = prompt[past.held :][: min(most, at_most or most)]
            ids = torch.from_numpy(np.ascontiguousarray(piece))[None]
            forward(body, past, ids.to(model.device))


__all__ = ["prefill"]
