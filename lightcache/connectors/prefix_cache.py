"""A DynamicCache that knows which tokens it holds, and how its tensors meet pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.connectors._requirements import DynamicCache, DynamicLayer, torch
from lightcache.connectors.cache_layers import KEEP_EVERY_TOKEN, attention_layers
from lightcache.connectors.model_pages import GROUP, ModelPages
from lightcache.errors import ConfigError
from lightcache.kernels import layouts
from lightcache.kernels.planes import DevicePlanes

TokenIds = npt.NDArray[np.int64]


def token_ids(tokens: Any) -> TokenIds:
    """Ids of one row as an int64 array of its own; a tensor of a device is waited for.

    Args:
        tokens: a list, an array or a tensor, of shape (n,) or (1, n).

    Raises:
        ConfigError: several rows, or no whole numbers.
    """
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    try:
        found = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"tokens: expected ids of one prompt, found {error}") from None
    if found.ndim == 2 and len(found) == 1:
        found = found[0]
    if found.ndim != 1:
        raise ConfigError(
            f"tokens: expected ids of one prompt, of shape (n,) or (1, n), found {found.dtype} "
            f"{found.shape}; give each row of a batch a call of its own"
        )
    if found.size and found.dtype.kind not in "iu":
        raise ConfigError(f"tokens: expected whole numbers, found {found.dtype}")
    return found.astype(np.int64)


class PrefixCache(DynamicCache):
    """The keys and values of one sequence, for `past_key_values=`.

    `reused` of its tokens came from the cache. Everything of `DynamicCache` works, but for batches
    of several rows. What is in it is saved under the ids that were named: those of `prefix`, and of
    `extend`. So compute these very tokens, from position 0 on, without padding; nothing else could
    notice.
    """

    def __init__(self, config: Any, tokens: TokenIds | None = None) -> None:
        """Empty, with a layer for each of the model's.

        Args:
            config: of the model.
            tokens: which it is going to hold; None: it is never saved under its tokens.
        """
        super().__init__(config=config)
        self._attention = attention_layers(self)
        """Layers that keep keys and values: of a hybrid model not all."""
        self._reused = 0
        self._tokens = tokens
        self._cropped = False
        self._load: Any = None
        self._awaited: set[int] = set()
        """Layers that have not waited for `_load` yet."""

    @property
    def reused(self) -> int:
        """Tokens that were restored."""
        return self._reused

    @property
    def tokens(self) -> TokenIds:
        """Ids of the tokens that it holds, as far as they are known: int64 of shape (n,)."""
        known = np.empty(0, np.int64) if self._tokens is None else self._tokens
        return known[: self.held]

    @property
    def held(self) -> int:
        """Tokens that every layer holds."""
        return min((int(self.layers[at].get_seq_length()) for at in self._attention), default=0)

    def extend(self, tokens: Any) -> None:
        """Name the tokens behind those known, so that they are saved as well: usually what was
        generated, `output[:, prompt:]`. Call it when they have been computed. The last one may be
        without keys and values, as `generate` leaves it.

        Args:
            tokens: as `prefix`: ids of shape (n,) or (1, n).

        Raises:
            ConfigError: no ids of one row, or more than have been computed (perhaps the prompt is
                among them again), or the cache was cropped into the known tokens, or made by
                `restore`, which knows none.
        """
        more = token_ids(tokens)
        if self._tokens is None:
            raise ConfigError(
                "extend: expected a cache made by `prefix`, found one of `restore`, whose tokens "
                "are not known; save it with `offload`"
            )
        if self._cropped:
            raise ConfigError(
                f"extend: this cache was cropped to {len(self._tokens)} of its known tokens, and "
                "what was computed behind them is not known; begin another `prefix`"
            )
        if len(self._tokens) + len(more) > self.held + 1:
            raise ConfigError(
                f"extend: {len(self._tokens)} tokens are known, and {self.held} computed, so "
                f"expected at most {max(0, self.held + 1 - len(self._tokens))} more, found "
                f"{len(more)}; give only what was generated, output[:, prompt:], and not before"
            )
        self._tokens = np.concatenate([self._tokens, more])

    # ---- what would make known tokens untrue

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *arguments: Any, **more: Any
    ) -> Any:
        """See `DynamicCache.update`.

        Raises:
            ConfigError: several rows.
            TransferFailed: what was being restored by layers did not arrive.
        """
        one_row(int(key_states.shape[0]))
        if layer_idx in self._awaited:
            self._load.transfer.wait_layer(layer_idx)
            self._awaited.discard(layer_idx)
            if not self._awaited:
                self._load.done()  # gives the lease back, if it is over; else a later call does
                self._load = None
        return super().update(key_states, value_states, layer_idx, *arguments, **more)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `DynamicCache`. Raises ConfigError: several rows."""
        one_row(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """See `DynamicCache`."""
        self.settle()
        super().batch_select_indices(indices)

    def crop(self, *arguments: Any, **more: Any) -> None:
        """See `DynamicCache.crop`. Known tokens that are cropped are not saved, nor is anything
        computed behind them later: it may be of other tokens."""
        before = self.held
        super().crop(*arguments, **more)
        if self.held < before:
            self._forget(self.held)

    def reset(self) -> None:
        """See `DynamicCache.reset`. Drops the tensors instead of clearing them, since a copy may
        still read them."""
        used = self.held > 0
        self._load, self._awaited = None, set()
        for layer in map(self.layers.__getitem__, self._attention):
            layer.keys = layer.values = None
            layer.is_initialized = False
        if used:
            self._forget(0)

    def _forget(self, length: int) -> None:
        if self._tokens is not None and length < len(self._tokens):
            self._tokens = self._tokens[:length]
            self._cropped = True

    # ---- for the connector

    def expect(self, load: Any) -> None:
        """Let each layer wait at its first `update` for its part of a `Load`, by layer windows."""
        self._load, self._awaited = load, set(self._attention)

    def settle(self) -> None:
        """Let the current stream wait for all that `expect` left: the tensors are about to be read.

        Raises:
            TransferFailed: it did not arrive.
        """
        if self._awaited:
            self._load.transfer.wait_on()
            self._load, self._awaited = None, set()

    def allocate(self, pages: ModelPages, tokens: int) -> None:
        """Give every layer tensors for so many restored tokens more, with nothing in these yet."""
        planes = pages.geometry.group(GROUP).planes
        self.settle()
        before = self.held
        for layer in map(self.layers.__getitem__, self._attention):
            # Heads of a token together, as in a page: copies of whole pages instead of rows. The
            # first `update` joins them with new tokens into tensors of the usual order anyway.
            keys, values = (
                torch.empty(
                    (1, before + tokens, plane.heads, plane.row_bytes // pages.dtype.itemsize),
                    dtype=pages.dtype,
                    device=pages.device,
                ).transpose(1, 2)
                for plane in planes
            )
            if before:
                keys[:, :, :before], values[:, :, :before] = layer.keys, layer.values
            else:
                # Initialised with no tokens, then given the tensors themselves: nothing is copied.
                layer.update(keys[:, :, :0], values[:, :, :0])
            layer.keys, layer.values = keys, values
        self._reused += tokens

    def withdraw(self, tokens: int) -> None:
        """Undo `allocate`: nothing is going to be loaded there."""
        self._shorten(tokens)
        self._reused -= tokens

    def _shorten(self, tokens: int) -> None:
        """Crop keys and values."""
        for layer in map(self.layers.__getitem__, self._attention):
            DynamicLayer.crop(layer, -tokens)


def one_row(rows: int) -> None:
    if rows != 1:
        raise ConfigError(
            f"past_key_values: expected a batch of one row, found {rows}; a PrefixCache holds one "
            "sequence: no beams, no num_return_sequences, a `prefix` for each prompt"
        )


def planes_of(pages: ModelPages, past: Any) -> DevicePlanes:
    """Where a cache has its keys and values now; keeps the tensors alive.

    Raises:
        ConfigError: no DynamicCache of this model that keeps every token of one row.
    """
    if not isinstance(past, DynamicCache):
        raise ConfigError(f"past: expected a DynamicCache, found {type(past).__name__}")
    layers = pages.geometry.layers
    if attention_layers(past) != layers:
        found = len(attention_layers(past))
        raise ConfigError(f"past: expected {len(layers)} layers, found {found}")
    if isinstance(past, PrefixCache):
        past.settle()
    for number, layer in ((at, past.layers[at]) for at in layers):
        if type(layer) not in KEEP_EVERY_TOKEN:
            raise ConfigError(
                f"past: expected layers that keep every token as it is, found layer {number} of "
                f"{type(layer).__name__}"
            )
        for one in (layer.keys, layer.values):
            if one is not None and one.numel():
                one_row(int(one.shape[0]))
                if one.dtype != pages.dtype:
                    raise ConfigError(
                        f"past: expected {pages.dtype}, as the model computes, found {one.dtype} "
                        f"in layer {number}; is it computed under autocast?"
                    )
    return layouts.dynamic_cache(layouts.Shard(pages.geometry), GROUP, past)


__all__ = ["PrefixCache", "TokenIds", "one_row", "planes_of", "token_ids"]
