"""transformers and torch, or one line that says what to install."""

from __future__ import annotations

from typing import Any

from lightcache.errors import NotInstalled

try:
    import torch
    from transformers import DynamicCache, PreTrainedModel, cache_utils
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:
    raise NotInstalled(
        f"lightcache.connectors.transformers needs torch and transformers 5.0 or later ({error}); "
        "install them with: pip install 'lightcache[transformers]'"
    ) from error


def _known(*names: str) -> tuple[Any, ...]:
    """The classes of these names that this release of transformers has."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


BOTH = _known("LinearAttentionAndFullAttentionLayer")
"""Layers that keep a state beside the keys and values of every token."""
BOTH_SLIDING = _known("LinearAttentionAndSlidingWindowAttentionLayer")
"""Layers that keep a state beside the keys and values of a window."""
STATEFUL = _known("LinearAttentionLayer") + BOTH + BOTH_SLIDING
"""Layers that keep a state."""
EMPTY = _known("DummyLayer")
"""Layers that keep nothing: of experts alone, or of those that read other layers' keys."""

__all__ = [
    "BOTH",
    "BOTH_SLIDING",
    "EMPTY",
    "STATEFUL",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "PreTrainedModel",
    "torch",
]
