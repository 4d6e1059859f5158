"""A few tokens computed, to see what a model keeps: nothing is guessed from configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightcache.connectors._requirements import DynamicCache, torch
from lightcache.errors import ConfigError


def computed(model: Any, device: str, *pieces: Sequence[int]) -> DynamicCache:
    """What a model keeps of some tokens, after one forward pass for each piece.

    Raises:
        ConfigError: it cannot compute them with a DynamicCache.
    """
    past = DynamicCache(config=model.config)
    # Eagerly: a model that is compiled need not be for this.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            for piece in pieces:
                forward(model, past, torch.tensor([piece], device=device))
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model: {type(model).__name__} cannot compute a token with a DynamicCache "
                f"({error}); a model with a cache of its own, or with other inputs than ids, is "
                "not supported"
            ) from error
    return past


def forward(model: Any, past: DynamicCache, ids: Any) -> Any:
    """One forward pass of tokens behind those that a cache holds: ids of shape (1, n)."""
    held = past.get_seq_length()
    if not held:
        return model(input_ids=ids, past_key_values=past, use_cache=True)
    # Bamba, for one, counts positions from zero in every pass if nobody tells it.
    where = torch.arange(held, held + ids.shape[1], device=ids.device)[None]
    return model(input_ids=ids, position_ids=where, past_key_values=past, use_cache=True)


__all__ = ["computed", "forward"]
