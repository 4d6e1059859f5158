"""The PrefixCache of a hybrid model: it also takes checkpoints of its state while it grows."""

from __future__ import annotations

import weakref
from typing import Any

from lightcache.connectors.cache_layers import drop_parts, set_parts
from lightcache.connectors.checkpoints import Checkpoint, copied
from lightcache.connectors.prefix_cache import PrefixCache, TokenIds, one_row
from lightcache.connectors.state_pages import StatePages
from lightcache.errors import ConfigError

_DECODED = 2
"""Checkpoints kept of what was generated: the newest, and one before it, which is of use when the
newest is beyond what is kept."""


class HybridPrefixCache(PrefixCache):
    """Keys, values and recurrent states of one sequence, for `past_key_values=`.

    A state is of all tokens at once, so it cannot be cropped: `checkpoint` before tokens that may
    be rejected, and `rewind` to it. Between two forward passes the state may be copied, to be saved
    under the tokens that it knows: at the positions that `save_at` named, and while decoding at
    multiples of an interval.
    """

    def __init__(
        self, config: Any, pages: StatePages, every: int, tokens: TokenIds | None = None
    ) -> None:
        """Empty, with a layer for each of the model's.

        Args:
            pages: of the model's states.
            every: tokens between checkpoints that are taken while decoding.
            config, tokens: see `PrefixCache`.
        """
        super().__init__(config, tokens)
        self._pages, self._every = pages, every
        self._states = pages.geometry.layers
        # What a forward pass touches first; its states then are those of all tokens before it.
        self._first = min(self._states[0], self._attention[0])
        self._seen = 0
        """Tokens there were when it was looked at last."""
        self._valid: weakref.WeakSet[Checkpoint] = weakref.WeakSet()
        """Checkpoints of tokens that are held still."""
        self._wanted: set[int] = set()
        self._prompt: dict[int, Checkpoint] = {}
        self._decoded: dict[int, Checkpoint] = {}
        self.branching: int | None = None
        """Where the prompt leaves what others had computed, if no checkpoint was found there: a
        multiple of the grid, in tokens."""

    @property
    def several(self) -> bool:
        """Whether the model may continue from a state with several tokens in one pass."""
        return self._pages.continues

    def name(self, tokens: TokenIds | None) -> TokenIds:
        """The tokens of the whole prompt; given some, these are named from now on.

        Raises:
            ConfigError: none are known, or these do not begin with those that are held.
        """
        if tokens is not None and not self._cropped:
            known = self.tokens
            if len(tokens) >= self.held and (tokens[: len(known)] == known).all():
                self._tokens = tokens
                return tokens
        elif self._tokens is not None and not self._cropped:
            return self._tokens
        raise ConfigError(
            f"tokens: expected a prompt that begins with the {self.held} tokens held, "
            f"{len(self.tokens)} of them known, found {'none' if tokens is None else len(tokens)}; "
            "begin another `prefix`"
        )

    # ---- checkpoints

    def checkpoint(self) -> Checkpoint:
        """A copy of the state as it is now, to come back to."""
        named = 0 if self._tokens is None else len(self._tokens)
        made = copied(self, self._states, named)
        self._valid.add(made)
        return made

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Back to where a checkpoint of this cache was taken: what was computed or named since is
        dropped, as if it had not been.

        Raises:
            ConfigError: it is of another cache, or of tokens that were dropped since.
        """
        if checkpoint not in self._valid:
            raise ConfigError(
                f"rewind: expected a checkpoint that this cache made, of tokens that it still "
                f"holds, found {checkpoint!r} for {self.held} tokens; it may be of tokens that an "
                "earlier `rewind` or `reset` has dropped"
            )
        self._shorten(self.held - checkpoint.tokens)
        for at in self._states:
            if checkpoint.states[at]:
                set_parts(self.layers[at], checkpoint.states[at])
            else:
                drop_parts(self.layers[at])
        if self._tokens is not None:
            self._tokens = self._tokens[: max(checkpoint.named, checkpoint.tokens)]
        self._void(checkpoint.tokens)

    def save_at(self, positions: set[int]) -> None:
        """Take a checkpoint when a forward pass ends at one of these numbers of tokens."""
        self._wanted |= positions

    def look(self) -> None:
        """Take a checkpoint if one is wanted of what is held now. Between forward passes only; the
        cache does it by itself when the next one begins."""
        held = self.held
        if held in (self._seen, self.reused):
            return
        self._seen = held
        if held in self._wanted:
            self._prompt[held] = self.checkpoint()
        elif held % self._every == 0:
            self._decoded[held] = self.checkpoint()
            for old in sorted(self._decoded)[:-_DECODED]:
                del self._decoded[old]

    @property
    def taken(self) -> list[Checkpoint]:
        """Checkpoints that were taken, the shallowest first."""
        return [one for _, one in sorted((self._prompt | self._decoded).items())]

    def _void(self, held: int) -> None:
        """Forget checkpoints that know more than so many tokens."""
        for one in [each for each in self._valid if each.tokens > held]:
            self._valid.discard(one)
        for taken in (self._prompt, self._decoded):
            for tokens in [each for each in taken if each > held]:
                del taken[tokens]
        self._seen = min(self._seen, held)

    # ---- what a model calls

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *arguments: Any, **more: Any
    ) -> Any:
        """See `PrefixCache.update`."""
        if layer_idx == self._first and layer_idx not in self._states:
            self._begin()
        return super().update(key_states, value_states, layer_idx, *arguments, **more)

    def get_conv_state(self, layer_idx: int, *arguments: Any, **more: Any) -> Any:
        """See `DynamicCache.get_conv_state`."""
        if layer_idx == self._first:
            self._begin()
        return super().get_conv_state(layer_idx, *arguments, **more)

    def has_previous_state(self, layer_idx: int | None = None, *more: Any, **named: Any) -> bool:
        """See `DynamicCache.has_previous_state`. Models of transformers 5.17 ask this, and then
        read the layer itself."""
        if layer_idx == self._first:
            self._begin()
        return bool(super().has_previous_state(layer_idx, *more, **named))

    def update_conv_state(
        self, conv_states: Any, layer_idx: int, *arguments: Any, **more: Any
    ) -> Any:
        """See `DynamicCache.update_conv_state`.

        Raises:
            ConfigError: several rows; or several tokens behind a state, for a model that continues
                with one at a time only.
        """
        one_row(int(conv_states.shape[0]))
        several = int(conv_states.shape[-1]) > 1
        if several and not self._pages.continues and super().has_previous_state(layer_idx):
            raise ConfigError(
                f"past_key_values: expected one token at a time behind a state, found "
                f"{int(conv_states.shape[-1])}: this release of transformers ignores the state of "
                "this model with several; call connector.prefill(past) before generate"
            )
        return super().update_conv_state(conv_states, layer_idx, *arguments, **more)

    def _begin(self) -> None:
        """A forward pass begins: nothing of it is in the cache yet.

        Raises:
            ConfigError: there are keys and values, but no state that belongs to them.
        """
        if self.held and not super().has_previous_state(self._states[0]):
            raise ConfigError(
                f"past_key_values: expected the state behind the {self.held} tokens whose keys and "
                "values are held, found none; use `prefix`, which restores both"
            )
        self.look()

    # ---- what would make them untrue

    def crop(self, *arguments: Any, **more: Any) -> None:
        """Not for recurrent states.

        Raises:
            ConfigError: always.
        """
        del arguments, more
        raise ConfigError(
            "crop: expected a model of attention alone, found recurrent states, which cannot be "
            "cropped; take a `checkpoint` before tokens that may be dropped, and `rewind` to it"
        )

    def reset(self) -> None:
        """See `PrefixCache.reset`."""
        super().reset()
        for at in self._states:
            drop_parts(self.layers[at])
        self._void(0)


__all__ = ["HybridPrefixCache"]
