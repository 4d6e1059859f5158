"""Bytes of a model's recurrent state, from its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightcache._arguments import count
from lightcache.errors import ConfigError


@dataclass(frozen=True)
class StatePart:
    """One of the tensors that a linear layer keeps for each sequence."""

    name: str
    shape: tuple[int, ...]
    """Of one layer, of the whole model."""
    dtype_bytes: int
    layers: int = 1
    sharded: bool = True
    """Divided among tensor-parallel ranks; otherwise each has all of it."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a figure out of range.
        """
        object.__setattr__(self, "shape", tuple(self.shape))
        for size in self.shape:
            count(size, f"state part {self.name!r}: shape", 1, 1 << 40)
        count(self.dtype_bytes, f"state part {self.name!r}: dtype_bytes", 1, 16)
        count(self.layers, f"state part {self.name!r}: layers", 1, 1 << 20)

    def bytes_of(self, ranks: int = 1) -> int:
        """Of one rank, in all its layers.

        Raises:
            ConfigError: the ranks cannot share it evenly.
        """
        whole = math.prod(self.shape) * self.dtype_bytes * self.layers
        if not self.sharded or ranks == 1:
            return whole
        if math.prod(self.shape) % ranks:
            raise ConfigError(
                f"state part {self.name!r}: {self.shape} cannot be divided among {ranks} ranks"
            )
        return whole // ranks


def state_bytes(parts: Iterable[StatePart], ranks: int = 1) -> int:
    """Bytes of one state in all linear layers, on one of so many tensor-parallel ranks.

    Raises:
        ConfigError: no parts, or ranks that cannot share one evenly.
    """
    found = list(parts)
    count(ranks, "ranks", 1, 1 << 20)
    if not found:
        raise ConfigError("state: expected at least one part")
    return sum(part.bytes_of(ranks) for part in found)


def gated_delta_parts(
    config: Any, *, recurrent_bytes: int = 4, conv_bytes: int = 2
) -> list[StatePart]:
    """The parts of a model of gated delta nets, as Qwen3-Next and Qwen3.5, from its Hugging Face
    config: `linear_num_value_heads` and its like, and `layer_types`.

    Args:
        recurrent_bytes, conv_bytes: of an element: engines keep the recurrent part in float32.

    Raises:
        ConfigError: names what the config lacks. Of other models, name the parts by hand.
    """
    text = getattr(config, "text_config", config)

    def of(name: str) -> Any:
        found = getattr(text, name, None)
        if found is None:
            raise ConfigError(
                f"config: {type(config).__name__} has no {name!r}, so it is no model of gated "
                "delta nets; list its parts as StatePart"
            )
        return found

    layers = list(of("layer_types")).count("linear_attention")
    key = of("linear_num_key_heads") * of("linear_key_head_dim")
    heads, width = of("linear_num_value_heads"), of("linear_value_head_dim")
    channels = 2 * key + heads * width  # q, k and v
    before = of("linear_conv_kernel_dim") - 1  # tokens that the convolution looks back on
    return [
        StatePart("recurrent", (heads, of("linear_key_head_dim"), width), recurrent_bytes, layers),
        StatePart("conv", (channels, before), conv_bytes, layers),
    ]


__all__ = ["StatePart", "gated_delta_parts", "state_bytes"]
