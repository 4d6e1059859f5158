"""Layers of a transformers cache that keep keys or states, and the named parts of a state."""

from __future__ import annotations

from typing import Any

from lightcache.connectors._requirements import BOTH, STATEFUL, DynamicLayer
from lightcache.errors import ConfigError

KEEP_EVERY_TOKEN = (DynamicLayer, *BOTH)
"""Classes of layers that keep the keys and values of every token unchanged."""
_KINDS = ("conv", "recurrent")


def attention_layers(past: Any) -> tuple[int, ...]:
    """Numbers of the layers that keep keys and values, ascending."""
    return tuple(
        number for number, layer in enumerate(past.layers) if isinstance(layer, DynamicLayer)
    )


def state_layers(past: Any) -> tuple[int, ...]:
    """Numbers of the layers that keep a state, ascending; some may keep keys as well."""
    return tuple(number for number, layer in enumerate(past.layers) if isinstance(layer, STATEFUL))


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
    "KEEP_EVERY_TOKEN",
    "attention_layers",
    "drop_parts",
    "parts_of",
    "set_parts",
    "state_layers",
]
