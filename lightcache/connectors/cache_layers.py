"""Layers of a transformers cache that keep keys or states: what a later token needs of each,
windows that keep what whole pages need, and the named parts of a state."""

from __future__ import annotations

from typing import Any

from lightcache.connectors._requirements import (
    BOTH,
    BOTH_SLIDING,
    EMPTY,
    STATEFUL,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    torch,
)
from lightcache.errors import ConfigError
from lightcache.kernels import Rule

KEEP_EVERY_TOKEN = (DynamicLayer, *BOTH)
"""Classes of layers that keep the keys and values of every token unchanged."""
KEEP_WINDOW = (DynamicSlidingWindowLayer, *BOTH_SLIDING)
"""Classes of layers that keep the keys and values of the last tokens."""
_KINDS = ("conv", "recurrent")
DECODED = 2
"""Copies kept of generated tokens: the newest, and one before it, for use if the newest is after
the kept tokens."""

Pair = tuple[Any, Any]
"""Keys and values of some tokens of a layer: [1, heads, tokens, dim]."""


def unknown_layers(past: Any) -> list[str]:
    """Names of the classes of layers that keep something that is not known here."""
    known = (*KEEP_EVERY_TOKEN, *KEEP_WINDOW, *STATEFUL, *EMPTY)
    return sorted({type(layer).__name__ for layer in past.layers if type(layer) not in known})


def attention_layers(past: Any) -> tuple[int, ...]:
    """Numbers of the layers that keep keys and values, ascending."""
    return tuple(
        [number for number, layer in enumerate(past.layers) if isinstance(layer, DynamicLayer)]
    )


def state_layers(past: Any) -> tuple[int, ...]:
    """Numbers of the layers that keep a state, ascending; some may keep keys as well."""
    return tuple(number for number, layer in enumerate(past.layers) if isinstance(layer, STATEFUL))


def rules_of(past: Any, config: Any) -> dict[int, Rule]:
    """What each layer that keeps keys and values needs for the next token.

    Args:
        config: of the decoder: chunks and windows have the same layers, and only it tells them.
    """
    types = getattr(config, "layer_types", None)
    chunks = getattr(config, "attention_chunk_size", None)
    rules = {}
    for number in attention_layers(past):
        layer = past.layers[number]
        if not layer.is_sliding:
            rules[number] = Rule.prefix()
        elif types[number] == "chunked_attention" if types else layer.sliding_window == chunks:
            rules[number] = Rule.chunk(layer.sliding_window)
        else:
            rules[number] = Rule.window(max(1, layer.sliding_window - 1))
    return rules


# ---- Windows


class WindowTail:
    """Part of a layer of a sliding window or of chunks: keeps some tokens more than the next token
    needs, so that pages at the beginning of the window are whole, and takes copies of what a
    position needs. Attention gets the tokens that it gets from transformers' own layer."""

    keys: Any
    values: Any
    is_initialized: bool
    sliding_window: int
    cumulative_length: int
    lazy_initialization: Any

    def follow(self, rule: Rule, page_tokens: int, wanted: set[int], every: int) -> None:
        """Set what is kept.

        Args:
            rule: what a position needs.
            page_tokens: tokens of a page. With 0 all tokens are kept, and no copies are taken.
            wanted: positions at which to take a copy; the caller may add to it.
            every: tokens between copies while decoding; of these the last two are kept.
        """
        self.rule, self._page_tokens = rule, page_tokens
        self._wanted, self._every = wanted, every
        self.taken: dict[int, Pair] = {}
        """Copies of what positions need, each from the beginning of a page."""
        self._first = 0
        """The first token that its rows may be of; those before it are zeros."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Pair:
        """See `DynamicSlidingWindowLayer.update`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, count = self.cumulative_length, int(key_states.shape[2])
        seen = min(before, self.sliding_window - 1) + count
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        self.cumulative_length += count
        if self._page_tokens:
            self._take(before)
        answer = self.keys[:, :, -seen:], self.values[:, :, -seen:]
        if self._page_tokens and not getattr(self, "record_past", False):
            self._trim()
        return answer

    def _trim(self) -> None:
        # Two pages: one whose beginning a position may need, and one after the last position.
        kept = self.sliding_window - 1 + 2 * self._page_tokens
        self.keys, self.values = self.keys[:, :, -kept:], self.values[:, :, -kept:]

    def _take(self, before: int) -> None:
        held = self.cumulative_length
        due = {position for position in self._wanted if before < position <= held}
        if held % self._every == 0:
            due.add(held)
        for position in due:
            rows = self.rows_of(position)
            if rows is not None:
                # After a long pass a view would keep the rows of all of it.
                few = held - before == 1
                self.taken[position] = rows if few else (rows[0].clone(), rows[1].clone())
        for position in sorted(self.taken.keys() - self._wanted)[:-DECODED]:
            del self.taken[position]

    def begin(self, position: int) -> int:
        """The first token of the pages that a position needs."""
        size = self._page_tokens
        return self.rule.first(position // size, size) * size

    def rows_of(self, position: int) -> Pair | None:
        """Views of what a position needs, from the beginning of a page; None: it is not held, or it
        is not the end of a page."""
        held, rows = self.cumulative_length, self._rows
        if position in self.taken:
            return self.taken[position]
        begin = self.begin(position)
        if position % self._page_tokens or position > held or begin < self._held_from:
            return None
        part = slice(begin - (held - rows), position - (held - rows))
        return self.keys[:, :, part], self.values[:, :, part]

    @property
    def _rows(self) -> int:
        return int(self.keys.shape[2]) if self.is_initialized and self.keys.dim() == 4 else 0

    @property
    def _held_from(self) -> int:
        """The first token whose keys and values it has."""
        return max(self._first, self.cumulative_length - self._rows)

    def place(self, keys: Any, values: Any, position: int, first: int) -> None:
        """Hold these rows, which end at a position.

        Args:
            first: the first token that they are of; rows before it are zeros.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.cumulative_length, self._first = position, first

    def copy(self) -> tuple[Any, Any, int, int]:
        """The arguments of `place` that return to the current position. Nothing is copied: rows
        are never written again."""
        return self.keys, self.values, self.cumulative_length, self._first

    def croppable(self, tokens: int) -> bool:
        """Whether the last tokens can be removed: what is before them must be held."""
        left = self.cumulative_length - tokens
        needed = self.rule.first(left, 1)
        return left <= 0 or (
            needed >= self._held_from
            and (self._rows - tokens >= min(left, self.sliding_window - 1))
        )

    def crop(self, tokens_to_remove: int) -> None:
        """See `DynamicLayer.crop`; ask `croppable` before."""
        count = min(abs(tokens_to_remove), self.cumulative_length)
        if self.is_initialized and count:
            rows = self._rows - count
            self.keys, self.values = self.keys[:, :, :rows], self.values[:, :, :rows]
            self.cumulative_length -= count
            self.forget_after(self.cumulative_length)
        if self.is_initialized and self._page_tokens:
            self._trim()

    def forget_after(self, held: int) -> None:
        """Drop copies for positions after so many tokens."""
        for position in [each for each in self.taken if each > held]:
            del self.taken[position]

    def clear(self) -> None:
        """Hold nothing. Tensors are dropped, not cleared, since a copy may still read them."""
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = self._first = 0
        self.taken.clear()


class WindowLayer(WindowTail, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Keys and values of a window or of chunks."""


class StateWindowLayer(WindowTail, *BOTH_SLIDING):  # type: ignore[misc]
    """A state beside the keys and values of a window."""


def keep_tails(
    past: Any, config: Any, page_tokens: int, wanted: set[int], every: int
) -> dict[int, WindowTail]:
    """Replace the layers of windows and chunks of an empty cache by those that keep what pages
    need; by number. Arguments: see `WindowTail.follow`."""
    tails: dict[int, WindowTail] = {}
    for number, rule in rules_of(past, config).items():
        layer = past.layers[number]
        if not layer.is_sliding:
            continue
        if isinstance(layer, STATEFUL):
            tail = StateWindowLayer(
                sliding_window=layer.sliding_window, number_of_states=layer.number_of_states
            )
        else:
            tail = WindowLayer(sliding_window=layer.sliding_window)
        tail.follow(rule, page_tokens, wanted, every)
        past.layers[number] = tails[number] = tail
    return tails


# ---- States
def parts_of(layer: Any) -> dict[str, Any]:
    """The tensors of a layer's state: "conv" and "recurrent", if it has them; "conv1" is the second
    of its kind, and so on.

    Raises:
        ConfigError: a release of transformers that keeps them in another way.
    """
    tensors: dict[str, Any] = {}
    for kind in _KINDS:
        states = getattr(layer, f"{kind}_states", None)
        if not isinstance(states, dict):
            raise ConfigError(
                f"model: expected {kind} states by number in {type(layer).__name__}, found "
                f"{type(states).__name__}; hybrid models need a later release of transformers"
            )
        tensors |= {
            f"{kind}{number or ''}": tensor
            for number, tensor in states.items()
            if tensor is not None
        }
    return tensors


def set_parts(layer: Any, parts: dict[str, Any]) -> None:
    """Give a layer a state: a copy of these tensors, into its own tensors if it has any."""
    for name, tensor in parts.items():
        kind = next(kind for kind in _KINDS if name.startswith(kind))
        number = int(name.removeprefix(kind) or 0)
        if kind == "conv":
            # It appends to an earlier state, and takes a first one as it is.
            layer.has_previous_state[number] = False
            layer.update_conv_state(tensor, number)
        else:
            layer.update_recurrent_state(tensor, number)


def drop_parts(layer: Any) -> None:
    """Remove a layer's state. Its tensors are dropped, not cleared, since a copy may still read
    them."""
    for states, known in (
        (layer.conv_states, layer.is_conv_states_initialized),
        (layer.recurrent_states, layer.is_recurrent_states_initialized),
    ):
        for number in states:
            states[number], known[number] = None, False
            layer.has_previous_state[number] = False


__all__ = [
    "DECODED",
    "KEEP_EVERY_TOKEN",
    "KEEP_WINDOW",
    "Pair",
    "StateWindowLayer",
    "WindowLayer",
    "WindowTail",
    "attention_layers",
    "drop_parts",
    "keep_tails",
    "parts_of",
    "rules_of",
    "set_parts",
    "state_layers",
    "unknown_layers",
]
