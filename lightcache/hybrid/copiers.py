"""Copies of states between slots of one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages, count
from lightcache.errors import ConfigError
from lightcache.kernels.geometry import KVGroup, Plane, held_heads

# ---- Parts of a recurrent state, their bytes and their place in a page


@dataclass(frozen=True)
class Section:
    """A range of a part's first axis that tensor-parallel ranks divide by heads."""

    name: str
    heads: int
    size: int = 1
    """Elements of the axis in each head."""


@dataclass(frozen=True)
class StatePart:
    """One tensor of a linear layer's state, for one sequence."""

    name: str
    shape: tuple[int, ...]
    """Of one layer, of the whole model."""
    dtype_bytes: int
    layers: int = 1
    sharded: bool = True
    """Divided among tensor-parallel ranks; otherwise each has all of it."""
    sections: tuple[Section, ...] = ()
    """Of the first axis, in its order. Each is divided by itself, as the q, k and v channels of a
    convolution. None: every element of the axis is a head."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a figure out of range.
        """
        where = f"state part {self.name!r}"
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "sections", tuple(self.sections))
        for size in self.shape:
            count(size, f"{where}: shape", 1, 1 << 40)
        count(self.dtype_bytes, f"{where}: dtype_bytes", 1, 16)
        count(self.layers, f"{where}: layers", 1, 1 << 20)
        for section in self.sections:
            count(section.heads, f"{where}, {section.name}: heads", 1, 1 << 40)
            count(section.size, f"{where}, {section.name}: size", 1, 1 << 40)
        if self.sections and (
            not self.sharded
            or sum(each.heads * each.size for each in self.sections) != self.shape[0]
        ):
            raise ConfigError(
                f"{where}: expected sections of a sharded part that cover the {self.shape[0]} "
                f"elements of its first axis, found sharded={self.sharded} and "
                f"{self.sections}"
            )

    def planes(self) -> tuple[Plane, ...]:
        """Planes of a page: one for each section, named `part_section`; without sections one with
        the part's name. A head's row has all its elements, in the order of the shape."""
        inner = math.prod(self.shape[1:]) * self.dtype_bytes
        if self.sections:
            return tuple(
                Plane(f"{self.name}_{section.name}", section.size * inner, section.heads)
                for section in self.sections
            )
        if self.sharded and self.shape:
            return (Plane(self.name, inner, self.shape[0]),)
        return (Plane(self.name, math.prod(self.shape) * self.dtype_bytes, 1),)

    def bytes_of(self, ranks: int = 1) -> int:
        """Of one rank, in all its layers. Of fewer heads than ranks each has one.

        Raises:
            ConfigError: the ranks cannot share its heads evenly.
        """
        planes = self.planes()
        held = (held_heads(plane, 0, ranks).count * plane.row_bytes for plane in planes)
        return sum(held) * self.layers


def state_bytes(parts: Iterable[StatePart], ranks: int = 1) -> int:
    """Bytes of one state in all linear layers, on one of so many tensor-parallel ranks.

    Raises:
        ConfigError: no parts, or ranks that cannot share one evenly.
    """
    listed = list(parts)
    count(ranks, "ranks", 1, 1 << 20)
    if not listed:
        raise ConfigError("state: expected at least one part")
    return sum(part.bytes_of(ranks) for part in listed)


def state_groups(
    parts: Iterable[StatePart], layers: Sequence[int], *, name: str = "state"
) -> list[KVGroup]:
    """Pages of one state each, for `PageGeometry`: written by tensor-parallel ranks of one number,
    read by those of another.

    The first group, of this name, has the parts that are divided, in as many head groups as all
    of them can be: a rank of any number that divides these finds its share in one piece. Parts that
    every rank has are a group of their own, `name.whole`. Where an engine keeps them is said with
    `layouts.plane`, and of a part in sections `layouts.convolution`.

    Args:
        layers: numbers of the layers that keep a state.

    Raises:
        ConfigError: no parts, or one of another number of layers.
    """
    listed = list(parts)
    for part in listed:
        if part.layers != len(layers):
            raise ConfigError(
                f"state part {part.name!r}: expected {len(layers)} layers, those of {layers}, "
                f"found {part.layers}"
            )
    planes = [plane for part in listed for plane in part.planes()]
    divided = [plane for plane in planes if plane.heads > 1]
    whole = [plane for plane in planes if plane.heads == 1]
    groups = []
    if divided:
        divisor = math.gcd(*(plane.heads for plane in divided))
        groups.append(KVGroup.state(name, layers=layers, parts=divided, head_groups=divisor))
    if whole or not divided:
        groups.append(KVGroup.state(f"{name}.whole", layers=layers, parts=whole))
    return groups


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
        value = getattr(text, name, None)
        if value is None:
            raise ConfigError(
                f"config: {type(config).__name__} has no {name!r}, so it is no model of gated "
                "delta nets; list its parts as StatePart"
            )
        return value

    layers = list(of("layer_types")).count("linear_attention")
    key = of("linear_num_key_heads") * of("linear_key_head_dim")
    heads, width = of("linear_num_value_heads"), of("linear_value_head_dim")
    before = of("linear_conv_kernel_dim") - 1  # tokens that the convolution looks back on
    sections = (
        *(Section(part, of("linear_num_key_heads"), of("linear_key_head_dim")) for part in "qk"),
        Section("v", heads, width),
    )
    channels = 2 * key + heads * width
    return [
        StatePart("recurrent", (heads, of("linear_key_head_dim"), width), recurrent_bytes, layers),
        StatePart("conv", (channels, before), conv_bytes, layers, sections=sections),
    ]


# ---- Copies of states between slots of one device.


class Copying(Protocol):
    """Launched copies."""

    def done(self) -> bool:
        """Whether they have been executed, so that reads on any stream see the result. Does not
        block.

        Raises:
            TransferFailed: the device has failed.
        """


class StateCopier(Protocol):
    """Copies states from slot to slot, in one launch for all pairs. Launches of one stream are
    executed in order with all other work there."""

    def copy(self, sources: Pages, targets: Pages, stream: Any = None) -> Copying:
        """Copy slot sources[i] to slot targets[i], int32. No slot is both a source and a target, or
        a target twice. Without any pair it tells when all that was launched on the stream before
        has been executed.

        Args:
            stream: of the device; None: the current one, on which the model computes.
        """

    def zero(self, slots: Pages, stream: Any = None) -> Copying:
        """Set slots to zero: the state before the first token."""


class _Done:
    """No copy is in flight."""

    def done(self) -> bool:
        return True


class ArrayCopier:
    """For states in a host array, slot by slot. Copies synchronously."""

    def __init__(self, states: npt.NDArray[Any]) -> None:
        """Args:
        states: of shape (slots, ...).
        """
        self.states = states

    def copy(self, sources: Pages, targets: Pages, stream: Any = None) -> Copying:
        """See `StateCopier`."""
        del stream
        if len(sources) != len(targets) or len(np.intersect1d(sources, targets)):
            raise ConfigError(
                f"copy: expected pairs of slots, none both read and written, found {sources} to "
                f"{targets}"
            )
        self.states[targets] = self.states[sources]
        return _Done()

    def zero(self, slots: Pages, stream: Any = None) -> Copying:
        """See `StateCopier`."""
        del stream
        self.states[slots] = 0
        return _Done()


__all__ = [
    "ArrayCopier",
    "Copying",
    "Section",
    "StateCopier",
    "StatePart",
    "gated_delta_parts",
    "state_bytes",
    "state_groups",
]
