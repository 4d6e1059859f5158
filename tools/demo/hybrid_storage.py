"""Storage behind the two caches of a hybrid model: pages of keys and values, and checkpoints.

A checkpoint without the keys and values in front of it is of no use, nor the reverse: so the
deepest checkpoint that is stored says how far keys and values are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from lightcache import Cache
from lightcache._arguments import Keys
from lightcache.storage import StorageSpec, StorageTier, open_storage


class HybridStorage:
    """What a worker stores, and brings back to the host."""

    def __init__(self, url: str, caches: Any, checkpoints: Any, stack: ExitStack) -> None:
        """Open the storage once for each cache: their pages are of different sizes.

        Args:
            caches: `Caches` of the connector, of a hybrid model.
            checkpoints: of the connector.
            stack: closes everything.
        """
        self._kv, self._checkpoints = caches.kv, checkpoints
        self._kv_tier = _tier(url, caches.kv, stack)
        self._states_tier = _tier(url, caches.states, stack)

    def bring(self, keys: Keys) -> int:
        """Read the deepest checkpoint of a prompt that the host has not, and keys and values up to
        it. Blocks.

        Args:
            keys: of the prompt.

        Returns:
            Pages of keys and values that were read.
        """
        path = self._checkpoints.path(keys)
        reach, brought = len(keys), 0
        while path is not None and reach:
            task = self._states_tier.prefetch_deepest(
                np.ascontiguousarray(keys[:reach]), namespace=path.space.host
            )
            task.wait()
            depth = task.pages_done
            there = self._kv.peek(keys[:depth])
            if there < depth:
                read = self._kv_tier.prefetch(keys[:depth], there)
                read.wait()
                brought += read.pages_done
                there += read.pages_done
            if there >= depth:
                break
            reach = there  # a checkpoint behind that is of no use: one before it may be
        return brought

    def write(self, keys: Keys, positions: Iterable[int]) -> None:
        """Store what the host has of a request that is over. Does not block.

        Args:
            keys: of all its tokens.
            positions: tokens behind which a checkpoint was saved.
        """
        self._kv_tier.write(keys)
        path = self._checkpoints.path(keys)
        if path is None:
            return
        for position in positions:
            key = path.key(position // self._kv.index.page_tokens)
            self._states_tier.write(np.ascontiguousarray(key), namespace=path.space.host)


def _tier(url: str, cache: Cache, stack: ExitStack) -> StorageTier:
    backend = stack.enter_context(open_storage(url, spec=StorageSpec.of(cache)))
    # One request at a time: what it has may all be pinned until it is written.
    return stack.enter_context(StorageTier(cache, backend, write_pages=cache.pages))


__all__ = ["HybridStorage"]
