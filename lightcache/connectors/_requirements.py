"""transformers and torch, or one line that says what to install."""

from __future__ import annotations

try:
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer
except ImportError as error:
    raise ImportError(
        f"lightcache.connectors.transformers needs torch and transformers 5.0 or later ({error}); "
        "install them with: pip install 'lightcache[transformers]'"
    ) from error

__all__ = ["DynamicCache", "DynamicLayer", "torch"]
