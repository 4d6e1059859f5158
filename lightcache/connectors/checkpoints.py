"""Checkpoints: states that were copied while a model computed, and the cache that keeps them.

A checkpoint behind n tokens has the key of the page of keys and values that ends there, in a cache
of its own, whose pages are one state each. There it is found, evicted and counted apart from keys
and values; what joins the two is a match, see `Connector.prefix`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache import Cache, Lease, Load, Offload
from lightcache._arguments import Keys
from lightcache.connectors.cache_layers import parts_of
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.prefix_cache import PrefixCache
from lightcache.connectors.state_pages import StatePages, planes_of_states, prepare
from lightcache.errors import Abandoned, NoSpace

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages

_SLOT = np.zeros(1, np.int64)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state behind the first tokens of a sequence; nothing changes it."""

    tokens: int
    """How many it knows: everything about them, and of nothing else."""
    states: dict[int, dict[str, Any]] = field(repr=False)
    """Tensors by layer and part."""
    named: int = 0
    """Tokens whose ids were known when it was taken, computed or not."""


def copied(past: PrefixCache, layers: tuple[int, ...], named: int) -> Checkpoint:
    """A checkpoint of what these layers keep now. On a GPU the copies are enqueued."""
    states = {
        at: {name: one.clone() for name, one in parts_of(past.layers[at]).items()} for at in layers
    }
    return Checkpoint(past.held, states, named)


class Checkpoints:
    """The checkpoints of one model in one cache, and what moves them."""

    def __init__(self, cache: Cache, pages: StatePages, config: Any, pinned: PinnedPages | None):
        """Args:
        config: of the model.
        pinned: see `Connector`.
        """
        self.pages = pages
        seen = PrefixCache(config)  # every transfer brings planes of its own
        prepare(pages, seen)
        self.cache = cache
        self._pool = Pooled(cache, pages.geometry, self._planes(seen), pages.device, pinned)

    def _planes(self, past: PrefixCache) -> Any:
        layers = self.pages.geometry.layers
        return planes_of_states(self.pages, {at: parts_of(past.layers[at]) for at in layers})

    def deepest(self, keys: Keys) -> int:
        """How many of a prompt's first pages the deepest checkpoint of it knows, by looking only;
        0: there is none. One call, about 5 ns a key."""
        found = self.cache.peek_many(keys, np.arange(len(keys) + 1))
        there = np.flatnonzero(found)
        return int(there[-1]) + 1 if len(there) else 0

    def match(self, key: Keys) -> Lease:
        """The checkpoint of one key, pinned and marked as used; an empty lease: it is gone."""
        return self.cache.match(key)

    def load(self, past: PrefixCache, lease: Lease) -> None:
        """Restore a state into an empty cache, and take the lease over as `Load` does. Blocks on
        the CPU; on a GPU the current stream waits.

        Raises:
            TransferFailed: the copy failed.
        """
        self._pool.engine.poll()
        prepare(self.pages, past)
        self._pool.wait_for(lease.pages)
        load = Load(self._pool.engine, lease, _SLOT, planes=self._planes(past))
        load.transfer.wait_on()
        load.done()

    def save(self, key: Keys, found: Checkpoint) -> None:
        """Copy a checkpoint into the cache, unless it is there or somebody writes it just now.
        Blocks until it is published. Without room it is not saved."""
        self._pool.engine.poll()
        with contextlib.suppress(Abandoned, NoSpace), self.cache.reserve(key) as held:
            if len(held.new):
                self._pool.wait_for(held.pages)
                planes = planes_of_states(self.pages, found.states)
                Offload(self._pool.engine, held, _SLOT, planes=planes).wait()

    def close(self) -> None:
        """Wait for copies, and let go of the cache."""
        self._pool.close()


__all__ = ["Checkpoint", "Checkpoints", "copied"]
