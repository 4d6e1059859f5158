"""A DynamicCache that knows the tokens it holds, and the copies between its tensors and pages."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.connectors._requirements import DynamicCache, DynamicLayer, torch
from lightcache.connectors.cache_layers import (
    KEEP_EVERY_TOKEN,
    Pair,
    WindowTail,
    attention_layers,
)
from lightcache.connectors.model_pages import TokenPages
from lightcache.errors import ConfigError
from lightcache.hybrid.checkpoints import CheckpointStats
from lightcache.kernels import layouts
from lightcache.kernels.planes import DevicePlanes, join
from lightcache.notices import Notices

# ---- Statistics, and warnings that are logged once

log = logging.getLogger("lightcache.connectors")


@dataclass(frozen=True)
class ConnectorStats:
    """Counters of a connector, since it was made."""

    requests: int = 0
    """Calls of `prefix`."""
    prompt_tokens: int = 0
    """Tokens of their prompts."""
    host_hits: int = 0
    """Requests that restored something from shared memory."""
    host_tokens: int = 0
    """Tokens that they restored."""
    stateless_tokens: int = 0
    """Of hybrid models: tokens with stored keys and values that were computed again because no
    state was saved after them."""
    saved_pages: int = 0
    present_pages: int = 0
    """Pages that were stored already."""
    busy_pages: int = 0
    """Pages that another process was writing."""
    no_room_pages: int = 0
    """Pages that were not saved because there was no room."""
    cleared: int = 0
    """Requests whose namespace was cleared meanwhile: nothing of them was saved."""
    refused: int = 0
    """Requests of which nothing was saved because of an error, or because of the model's input."""
    off_grid: int = 0
    """Of hybrid models: prompts too short to have a position at which a state is saved."""
    states: CheckpointStats | None = None
    """Of a hybrid model: hits and saves of states."""


class Counters:
    """Counts by the names of `ConnectorStats`. For several threads."""

    def __init__(self) -> None:
        """All zero."""
        self._counts: Counter[str] = Counter()
        self._notices = Notices(log)
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Raise some of them."""
        with self._lock:
            self._counts.update(counts)

    def say_once(self, reason: str, message: str) -> None:
        """Log a warning, the first time that this reason occurs."""
        self._notices.first(reason, "%s", message)

    def no_room(self, cache: str, missing: int, wanted: int, why: str) -> None:
        """Count pages that were not saved, and say so the first time."""
        self.add(no_room_pages=missing)
        self.say_once(
            f"room {cache}",
            f"cache {cache!r}: no room for {missing} of {wanted} pages ({why}); they are not "
            "saved. Further ones are counted in `no_room_pages` only; a larger cache is the remedy",
        )

    def snapshot(self, states: CheckpointStats | None) -> ConnectorStats:
        """The current values."""
        with self._lock:
            return ConnectorStats(**self._counts, states=states)


# ---- The cache of one sequence

_REST = "past.rest(input_ids), as cache_params=past"
TokenIds = npt.NDArray[np.int64]


def token_ids(tokens: Any) -> TokenIds:
    """Ids of one row as a new int64 array; waits for a tensor on a device.

    Args:
        tokens: a list, an array or a tensor, of shape (n,) or (1, n).

    Raises:
        ConfigError: several rows, or not whole numbers.
    """
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"tokens: expected ids of one prompt, found {error}") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ConfigError(
            f"tokens: expected ids of one prompt, of shape (n,) or (1, n), found {ids.dtype} "
            f"{ids.shape}; give each row of a batch a call of its own"
        )
    if ids.size and ids.dtype.kind not in "iu":
        raise ConfigError(f"tokens: expected whole numbers, found {ids.dtype}")
    return ids.astype(np.int64)


class Given:
    """The token ids that a connector saw the model get, by position."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._pieces: list[tuple[int, int, Any]] = []
        """First position, end, and ids; None: they were restored."""

    def add(self, first: int, count: int, ids: Any) -> None:
        """Note tokens from this position on: a tensor of any device, which is copied, or None."""
        self.cut(first)
        if count:
            copied = None if ids is None else ids.detach().clone()
            self._pieces.append((first, first + count, copied))

    def cut(self, length: int) -> None:
        """Forget the ids from this position on."""
        while self._pieces and self._pieces[-1][1] > length:
            first, _, ids = self._pieces.pop()
            if first < length:
                self._pieces.append((first, length, None if ids is None else ids[: length - first]))

    def unseen(self, length: int) -> int | None:
        """The first of `length` positions whose ids are unknown."""
        end = 0
        for first, stop, _ in self._pieces:
            if first != end:
                break
            end = stop
        return end if end < length else None

    def _join(self) -> None:
        """Join the ids of adjacent pieces, on the CPU; waits for a device once."""
        runs: list[list[tuple[int, int, Any]]] = []
        for piece in self._pieces:
            before = runs[-1][-1] if runs else None
            if before and before[2] is not None and piece[2] is not None and before[1] == piece[0]:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        self._pieces = [
            (run[0][0], run[-1][1], None if run[0][2] is None else _on_cpu([p[2] for p in run]))
            for run in runs
        ]

    def other(self, tokens: TokenIds, first: int) -> tuple[int, int] | None:
        """The first position from `first` on where another id was computed, and that id."""
        self._join()
        for start, stop, ids in self._pieces:
            low, high = max(start, first), min(stop, len(tokens))
            if ids is None or low >= high:
                continue
            known = ids[low - start : high - start].numpy()
            wrong = np.flatnonzero(known != tokens[low:high])
            if len(wrong):
                return low + int(wrong[0]), int(known[wrong[0]])
        return None


def _on_cpu(pieces: list[Any]) -> Any:
    local = [piece for piece in pieces if piece.device.type == "cpu"]  # joined before
    remote = [piece for piece in pieces if piece.device.type != "cpu"]
    return torch.cat([*local, *([torch.cat(remote).cpu()] if remote else [])])


class PrefixCache(DynamicCache):
    """The keys and values of one sequence, for `past_key_values=`.

    `reused` of its tokens came from the cache. All of `DynamicCache` works, except for batches of
    several rows. Its content is saved under the ids given to `prefix` and `extend`. The connector
    compares them with the model's inputs: from position 0 on, without padding, without a mask. Any
    other input raises ConfigError, and nothing is saved any more.
    """

    def __init__(self, config: Any, tokens: TokenIds | None = None) -> None:
        """Empty, with a layer for each of the model's.

        Args:
            config: of the model.
            tokens: the tokens it will hold; None: it is never saved under its tokens.
        """
        super().__init__(config=config)
        self._attention = attention_layers(self)
        """Layers that keep keys and values: of a hybrid model not all."""
        self._whole = tuple([n for n in self._attention if not self.layers[n].is_sliding])
        """Those that keep all of them."""
        self._windows: dict[int, WindowTail] = {}
        self._counted = 0
        """Tokens computed and restored, for a model whose layers do not count them."""
        self._reused = 0
        self._tokens = tokens
        self._cropped = False
        self._load: Any = None
        self._awaited: set[int] = set()
        """Layers that have not waited for `_load` yet."""
        self.watch: Any = None
        """The `ModelWatch` of the connector that made it; None: passes are not checked."""
        self.passing: tuple[Any, ...] = ()
        """Of the current pass: the module, and the tokens before and after it."""
        self.spoilt: str | None = None
        """Why it is no longer saved; None: it is."""
        self._doubts: dict[str, Any] = {}
        """Inputs that may spoil it, each with a flag on the device: true if it does."""
        self._given = Given()

    @property
    def reused(self) -> int:
        """Tokens that were restored."""
        return self._reused

    @property
    def stateful(self) -> bool:
        """Whether the model keeps recurrent states."""
        return False

    @property
    def attentive(self) -> bool:
        """Whether any layer keeps keys and values."""
        return bool(self._attention)

    @property
    def is_compileable(self) -> bool:
        """See `DynamicCache`: the connector checks every pass, outside of compiled graphs."""
        return False

    def rest(self, tokens: Any) -> Any:
        """The part of a prompt that is not held, for models without attention: `generate` feeds
        these all that it is given.

        Args:
            tokens: the whole prompt: a list, or an array or a tensor of shape (n,) or (1, n).
        """
        return tokens[self.held :] if isinstance(tokens, list) else tokens[..., self.held :]

    @property
    def tokens(self) -> TokenIds:
        """Known ids of the tokens that it holds: int64 of shape (n,)."""
        known = np.empty(0, np.int64) if self._tokens is None else self._tokens
        return known[: self.held]

    @property
    def held(self) -> int:
        """Tokens that every layer holds."""
        return min(self.rows, default=0)

    @property
    def rows(self) -> set[int]:
        """Numbers of tokens that layers hold: between two passes they are all equal."""
        if not self._attention:
            return {self._counted}
        return {int(self.layers[number].get_seq_length()) for number in self._attention}

    def extend(self, tokens: Any) -> None:
        """Name the tokens after the known ones, so that they are saved as well: usually the
        generated tokens, `output[:, prompt:]`. Call it when they have been computed. The last one
        may lack keys and values, as `generate` leaves it.

        Args:
            tokens: as `prefix`: ids of shape (n,) or (1, n).

        Raises:
            ConfigError: not ids of one row, more than have been computed (perhaps they include the
                prompt again), or other ids than computed; or the cache was cropped into the known
                tokens, was made by `restore`, which knows none, or may not be saved.
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
                "the tokens computed after them are unknown; begin another `prefix`"
            )
        if len(self._tokens) + len(more) > self.held + 1:
            raise ConfigError(
                f"extend: {len(self._tokens)} tokens are known, and {self.held} computed, so "
                f"expected at most {max(0, self.held + 1 - len(self._tokens))} more, found "
                f"{len(more)}; give only the generated tokens, output[:, prompt:], and not before"
            )
        self.check_sound()
        tokens = np.concatenate([self._tokens, more])
        self.check_given(tokens, len(self._tokens), "extend")
        self._tokens = tokens

    # ---- one forward pass, for the connector

    def begin(self) -> None:
        """Note that a forward pass begins; all tokens held are complete."""

    def passed(self, held: int) -> None:
        """Note that a forward pass has ended after so many tokens."""
        self._counted = held

    def given(self, ids: Any) -> None:
        """Note that the model computes these ids after the tokens held: one row of a tensor.

        Raises:
            ConfigError: the known tokens differ.
        """
        held = self.held
        if held and len(ids) >= held and not self._attention:
            self._check_new(token_ids(ids))
        self._given.add(held, len(ids), ids)
        if self._tokens is not None and len(self._tokens) > held:
            wrong = self._given.other(self._tokens, held)
            if wrong is not None:
                hint = "the whole prompt that `prefix` was given, and use_cache=True"
                raise self.spoil(
                    f"the model was given token {wrong[1]} at position {wrong[0]}, expected "
                    f"{self._tokens[wrong[0]]}, as `prefix` was told; give `generate` "
                    f"{hint if self._attention else _REST}"
                )

    def _check_new(self, ids: TokenIds) -> None:
        """Check that tokens are not those held once more, which a state would take for new ones:
        `generate` feeds all that it is given if there is no attention."""
        known = self.tokens
        if (ids[: len(known)] == known).all() and self._given.other(ids[: self.held], 0) is None:
            raise self.spoil(
                f"the model was given the {self.held} tokens held once more, expected those after "
                f"them; give `generate` {_REST}"
            )

    def forget_given(self, length: int) -> None:
        """Note that nothing from this position on was computed."""
        self._given.cut(length)

    def check_given(self, tokens: TokenIds, first: int, call: str) -> None:
        """Check that these ids, from `first` on, were computed. Waits for a tensor on a device.

        Raises:
            ConfigError: other ids were computed.
        """
        wrong = self._given.other(tokens, first)
        if wrong is not None:
            raise ConfigError(
                f"{call}: expected the computed tokens, {wrong[1]} at position "
                f"{wrong[0]}, found {tokens[wrong[0]]}; give the generated tokens, "
                "output[:, prompt:]"
            )

    def doubt(self, flag: Any, reason: str, *, soon: bool) -> None:
        """Note an input that spoils the cache if the tensor `flag` is true. A flag on a device is
        read when the tokens are saved, unless `soon`.

        Raises:
            ConfigError: the flag is true.
        """
        if flag.device.type == "cpu" or soon:
            if bool(flag):
                raise self.spoil(reason)
        else:
            former = self._doubts.get(reason)
            self._doubts[reason] = flag if former is None else former | flag

    def spoil(self, reason: str) -> ConfigError:
        """Stop saving this cache; returns the error to raise."""
        self.spoilt = reason
        return ConfigError(f"past_key_values: {reason}. Nothing of it is saved")

    def check_sound(self) -> None:
        """Check that the cache may be saved.

        Raises:
            ConfigError: it may not; with the reason.
        """
        for reason, flag in self._doubts.items():
            if self.spoilt is None and bool(flag):
                self.spoilt = reason
        self._doubts = {}
        if self.spoilt is None and (self.passing or len(self.rows) > 1):
            self.spoilt = "a forward pass did not finish, and layers may hold parts of it"
        if self.spoilt is not None:
            raise self.spoil(self.spoilt)

    def check_known(self) -> None:
        """Check that the connector saw all tokens held and known.

        Raises:
            ConfigError: it did not see some, or the cache may not be saved.
        """
        self.check_sound()
        unseen = self._given.unseen(len(self.tokens))
        if unseen is not None:
            raise self.spoil(
                f"{len(self.tokens) - unseen} tokens from position {unseen} on were not computed "
                "by the connector's model; compute with the model that the Connector was given; "
                "to compile it, do so after that"
            )

    # ---- changes of the tokens held

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *arguments: Any, **more: Any
    ) -> Any:
        """See `DynamicCache.update`.

        Raises:
            ConfigError: several rows.
            TransferFailed: a restore by layers failed.
        """
        one_row(int(key_states.shape[0]))
        if layer_idx in self._awaited:
            self._load.transfer.wait_layer(layer_idx)
            self._awaited.discard(layer_idx)
            if not self._awaited:
                self._load.done()  # gives the lease back if it has finished; else a later call does
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
        """See `DynamicCache.crop`. Cropped tokens are not saved, nor is anything computed after
        them later: it may be of other tokens.

        Raises:
            ConfigError: tokens beyond those that windows hold before the last ones.
        """
        before = self.held
        count = min(abs(int(arguments[0] if arguments else more["tokens_to_remove"])), before)
        if not all(tail.croppable(count) for tail in self._windows.values()):
            raise ConfigError(
                f"crop: expected tokens whose windows are held, found {count} of {before}: before "
                "the last window only a few tokens are kept; begin another `prefix`, or take a "
                "`checkpoint` before tokens that may be dropped, and `rewind` to it"
            )
        super().crop(*arguments, **more)
        if self.held < before:
            self._given.cut(self.held)
            self._forget(self.held)

    def reset(self) -> None:
        """See `DynamicCache.reset`. Drops the tensors instead of clearing them, since a copy may
        still read them."""
        used = self.held > 0
        self._load, self._awaited = None, set()
        self._given.cut(0)
        self._counted = 0
        for layer in map(self.layers.__getitem__, self._whole):
            layer.keys = layer.values = None
            layer.is_initialized = False
        for tail in self._windows.values():
            tail.clear()
        if used:
            self._forget(0)

    def _forget(self, length: int) -> None:
        if self._tokens is not None and length < len(self._tokens):
            self._tokens = self._tokens[:length]
            self._cropped = True

    # ---- for the connector

    def expect(self, load: Any) -> None:
        """Let each layer wait at its first `update` for its part of a `Load`, by layer windows."""
        self._load, self._awaited = load, set(self._whole)

    def settle(self) -> None:
        """Let the current stream wait for the rest of the load given to `expect`, before the
        tensors are read.

        Raises:
            TransferFailed: the load failed.
        """
        if self._awaited:
            self._load.transfer.wait_on()
            self._load, self._awaited = None, set()

    def allocate(self, pages: TokenPages, tokens: int) -> None:
        """Give every layer of full attention tensors with room for `tokens` more restored tokens,
        not filled yet."""
        self.settle()
        before = self.held
        for number, (keys, values) in empty_rows(pages, before + tokens).items():
            layer = self.layers[number]
            if before:
                keys[:, :, :before], values[:, :, :before] = layer.keys, layer.values
            else:
                # Initialised without tokens, then given the tensors themselves: nothing is copied.
                layer.update(keys[:, :, :0], values[:, :, :0])
            layer.keys, layer.values = keys, values
        self.restored(before, tokens)

    def restored(self, before: int, tokens: int) -> None:
        """Note that so many tokens were restored after `before` others."""
        self._given.add(before, tokens, None)
        self._counted += tokens
        self._reused += tokens

    def withdraw(self, tokens: int) -> None:
        """Undo `allocate`: nothing will be loaded there."""
        self._shorten(tokens)
        self._reused -= tokens

    def _shorten(self, tokens: int) -> None:
        """Crop keys and values of full attention."""
        for layer in map(self.layers.__getitem__, self._whole):
            DynamicLayer.crop(layer, -tokens)
        self._given.cut(self.held)


def one_row(rows: int) -> None:
    if rows != 1:
        raise ConfigError(
            f"past_key_values: expected a batch of one row, found {rows}; a PrefixCache holds one "
            "sequence: no beams, no num_return_sequences, a `prefix` for each prompt"
        )


def empty_rows(pages: TokenPages, tokens: int) -> dict[int, Pair]:
    """Keys and values of so many tokens for each layer, not filled yet."""
    rows: dict[int, Pair] = {}
    for group in pages.geometry.groups:
        for number in group.layers:
            # Heads of a token are contiguous, as in a page: whole pages are copied instead of rows.
            # The first `update` joins them with new tokens into tensors of the usual order anyway.
            keys, values = [
                torch.empty(
                    (1, tokens, plane.heads, plane.row_bytes // pages.dtype.itemsize),
                    dtype=pages.dtype,
                    device=pages.device,
                ).transpose(1, 2)
                for plane in group.planes
            ]
            rows[number] = keys, values
    return rows


def planes_of_rows(pages: TokenPages, rows: dict[int, Pair]) -> DevicePlanes:
    """The planes of keys and values by layer; slots are rows. Keeps the tensors alive."""
    shard = layouts.Shard(pages.geometry)
    return join(
        *(
            layouts.plane(
                shard,
                group.name,
                plane.name,
                {number: rows[number][half][0] for number in group.layers},
                axes="htc",
            )
            for group in pages.geometry.groups
            for half, plane in enumerate(group.planes)
        )
    )


def planes_of(pages: TokenPages, past: Any) -> DevicePlanes:
    """The planes of a cache's current keys and values; keeps the tensors alive.

    Raises:
        ConfigError: not a DynamicCache of this model that keeps every token of one row.
    """
    if not isinstance(past, DynamicCache):
        raise ConfigError(f"past: expected a DynamicCache, found {type(past).__name__}")
    layers = pages.geometry.layers
    numbers = attention_layers(past)
    whole = tuple([number for number in numbers if not past.layers[number].is_sliding])
    if whole != layers:
        kinds = sorted({type(layer).__name__ for layer in past.layers})
        raise ConfigError(
            f"past: expected {len(layers)} layers that keep every token, found {len(whole)} among "
            f"{len(past.layers)} of {', '.join(kinds)}"
        )
    if isinstance(past, PrefixCache):
        past.settle()
    for number in layers:
        layer = past.layers[number]
        if type(layer) not in KEEP_EVERY_TOKEN:
            raise ConfigError(
                f"past: expected layers that keep every token as it is, found layer {number} of "
                f"{type(layer).__name__}"
            )
        for tensor in (layer.keys, layer.values):
            if tensor is not None and tensor.numel():
                one_row(int(tensor.shape[0]))
                if tensor.dtype != pages.dtype:
                    raise ConfigError(
                        f"past: expected {pages.dtype}, as the model computes, found "
                        f"{tensor.dtype} in layer {number}; is it computed under autocast?"
                    )
    shard = layouts.Shard(pages.geometry)
    return join(
        *(layouts.dynamic_cache(shard, group.name, past) for group in pages.geometry.groups)
    )


__all__ = [
    "ConnectorStats",
    "Counters",
    "PrefixCache",
    "TokenIds",
    "empty_rows",
    "one_row",
    "planes_of",
    "planes_of_rows",
    "token_ids",
]
