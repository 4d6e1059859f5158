"""Prefixes of hybrid models: keys and values in one cache and checkpoints in another, joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightcache import Cache, Lease, Namespace
from lightcache._arguments import Keys
from lightcache.connectors.checkpoints import Checkpoints
from lightcache.connectors.hybrid_cache import HybridPrefixCache
from lightcache.connectors.model_pages import ModelPages, check_model
from lightcache.connectors.prefilling import prefill
from lightcache.connectors.prefix_cache import PrefixCache, TokenIds
from lightcache.connectors.state_pages import StatePages
from lightcache.errors import ConfigError
from lightcache.hybrid import Features, Grid, Saves

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages


def check_states(states: Any, model: Any, pages: ModelPages) -> None:
    """Whether a connector was given a cache of states exactly if its model has any.

    Raises:
        LayoutMismatch: it is of another model.
        ConfigError: no cache, one too many, one too few, or one that is not flat.
    """
    kind = type(model).__name__
    if states is not None and not isinstance(states, Cache):
        raise ConfigError(f"states: expected a lightcache.Cache, found {type(states).__name__}")
    if pages.states is None:
        if states is not None:
            raise ConfigError(
                f"states: expected None for {kind}, whose layers keep keys and values alone, found "
                f"the cache {states.name!r}"
            )
    elif states is None:
        raise ConfigError(
            f"states: expected a cache for the recurrent states of {kind}, found None; use "
            "open_caches, and give states=caches.states"
        )
    else:
        check_model(states, pages.states)
        if not states.index.flat:
            raise ConfigError(
                f"states: expected a cache made with flat=True, found {states.name!r} without; its "
                "deepest states would go first. Remove it, or take another name, and use "
                "open_caches, or Cache.open with describe(model).states.options"
            )


class HybridPrefixes:
    """What a connector does for one hybrid model besides moving keys and values."""

    def __init__(
        self,
        cache: Cache,
        states: Cache,
        model: Any,
        pages: ModelPages,
        *,
        pinned: PinnedPages | None,
        chunk: int,
        every: int,
        path_limit: int,
    ) -> None:
        """Args:
        cache, states: of the keys and values, and of the states.
        pinned: the pool of `states`, see `Connector`.
        chunk, every, path_limit: see `Connector`.

        Raises:
            ConfigError: sizes out of range, or settings that do not go together: all of them.
        """
        assert pages.states is not None
        self._cache, self._model = cache, model
        self._pages: StatePages = pages.states
        tokens = pages.geometry.page_tokens
        self.grid = Grid(tokens, tokens, chunk, every)
        """Where states are saved."""
        Features(  # one sequence at a time, in tensors of its own; what is saved is on the host
            self.grid,
            Saves.END_ONLY,
            running=1,
            device_slots=1,
            device_states=0,
            host_states=states.pages,
            path_limit=path_limit,
        ).check()
        self.checkpoints = Checkpoints(
            cache, states, pages.states, model.config, pinned, path_limit or None
        )

    def empty(self, ids: TokenIds | None) -> HybridPrefixCache:
        """A cache with nothing in it, for these tokens."""
        return HybridPrefixCache(self._model.config, self._pages, self.grid.interval, ids)

    def found(
        self,
        ids: TokenIds,
        keys: Keys,
        namespace: Namespace | None,
        load: Callable[[PrefixCache, Lease], None],
    ) -> HybridPrefixCache:
        """The longest prefix that has both: keys and values up to a checkpoint, and its state. Keys
        and values behind it are not loaded.

        Args:
            load: loads keys and values, and takes the lease over.
        """
        past = self.empty(ids)
        path = self.checkpoints.path(keys, namespace)
        if path is None:
            return past
        kv = reach = self._cache.peek(keys, namespace=namespace)
        while at := self.checkpoints.deepest(path, reach):
            with (
                self.checkpoints.match(path, at) as state,
                self._cache.match(keys[:at], namespace=namespace) as lease,
            ):
                if len(state.pages) and len(lease.pages) == at:
                    load(past, lease)
                    self.checkpoints.load(past, state)
                    break
                # Evicted between the look and the match. Each turn looks at fewer: this ends.
                reach = len(lease.pages) if len(state.pages) else at - 1
        past.branching = self.grid.branching(kv * self.grid.page_tokens, past.held)
        return past

    def prefill(self, past: Any, tokens: Any, at_most: int | None) -> None:
        """See `Connector.prefill`."""
        prefill(self._model, past, tokens, grid=self.grid, at_most=at_most)

    def save(self, past: HybridPrefixCache, keys: Keys, namespace: Namespace | None) -> None:
        """Save the checkpoints that were taken, of tokens whose keys and values are stored: nobody
        could use another.

        Args:
            keys: of the tokens that are held and known.
        """
        past.look()
        path = self.checkpoints.path(keys, namespace)
        if path is None:
            return
        stored = self._cache.peek(keys, namespace=namespace)
        for one in past.taken:
            pages, more = divmod(one.tokens, self.grid.page_tokens)
            if not more and pages <= stored:
                fork = one.tokens == past.branching
                self.checkpoints.save(path, pages, one, fork=fork)

    def close(self) -> None:
        """Wait for copies, and let go of the cache of states."""
        self.checkpoints.close()


__all__ = ["HybridPrefixes", "check_states"]
