"""Lookups for several requests in one call of an index, and for one alone at less cost."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from lightcache._arguments import Keys, Offsets
from lightcache.manager.requests import NO_KEYS
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex


def there(index: PageIndex, packed: list[bytes], space: Namespace) -> list[int]:
    """Which of these keys, each for itself, are there; an empty one is not."""
    asked = [i for i, key in enumerate(packed) if key]
    if not asked:
        return []
    keys = np.frombuffer(bytearray().join(packed), np.uint64).reshape(-1, 2)
    if len(asked) == 1:
        return asked if index.peek(keys, namespace=space) else []
    found = index.peek_many(keys, np.arange(len(asked) + 1), namespace=space)
    return [i for i, ready in zip(asked, found.tolist(), strict=True) if ready]


def peeked(index: PageIndex, parts: list[Keys], space: Namespace) -> list[int]:
    """How many keys at the beginning of each part are ready. One part alone, as when one request
    is planned, needs none of what gathers many: that would cost more than the call."""
    if len(parts) == 1:
        return [index.peek(parts[0], namespace=space)]
    keys, offsets = joined(parts)
    found: list[int] = index.peek_many(keys, offsets, namespace=space).tolist()
    return found


def pinned(
    index: PageIndex, ids: Sequence[Hashable], parts: list[Keys], space: Namespace, ttl: float
) -> list[int]:
    """The same, pinned tentatively for these requests for so many seconds. Nobody writes to the
    keys behind that: prompts do not change."""
    if len(parts) == 1:
        return [index.plan(ids[0], parts[0], namespace=space, timeout=ttl, frozen=True)]
    keys, offsets = joined(parts)
    plan_many = index.plan_many
    found: list[int] = plan_many(ids, keys, offsets, namespace=space, timeout=ttl).tolist()
    return found


def joined(parts: list[Keys]) -> tuple[Keys, Offsets]:
    """Keys of many requests in one array."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.concatenate(parts) if parts else NO_KEYS, offsets


__all__ = ["joined", "peeked", "pinned", "there"]
