"""KV formats of a model: groups of layers with one shape and one match rule, and their planes.

`lightcache.kernels.geometry` lays out the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, TypeVar

from lightcache.shm.errors import ConfigError

_MAX_NAME = 64
_EVERYTHING = (1 << 63) - 1
T = TypeVar("T")


def whole(value: object, name: str, least: int = 1) -> int:
    """Check a whole number and return it.

    Raises:
        ConfigError: not a whole number, or less than `least`.
    """
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}: expected a whole number >= {least}, found {value!r}")
    return value


def layer_numbers(layers: object, name: str) -> tuple[int, ...]:
    """Numbers of layers as a tuple, in their order.

    Raises:
        ConfigError: not a series of whole numbers >= 0.
    """
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ConfigError(f"{name}: expected numbers of layers, found {layers!r}")
    return tuple(whole(layer, f"{name}: layer", 0) for layer in layers)


def _checked_name(value: object, what: str) -> str:
    # Names are part of fingerprints, so they must not contain the separators.
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME:
        raise ConfigError(
            f"{what}: expected a name of 1 to {_MAX_NAME} characters, found {value!r}"
        )
    if not all(letter.isalnum() or letter in "_.-" for letter in value):
        raise ConfigError(f"{what}: expected letters, digits, '_', '.' and '-', found {value!r}")
    return value


def _members(values: object, kind: type[T], what: str) -> tuple[T, ...]:
    """Objects of one type, in a tuple. Raises ConfigError: objects of another type."""
    members = tuple(values) if isinstance(values, Iterable) else (values,)
    for value in members:
        if not isinstance(value, kind):
            raise ConfigError(f"{what}: expected {kind.__name__}, found {value!r}")
    return members


def distinct(values: object, kind: type[T], what: str) -> tuple[T, ...]:
    """One or more planes or groups, with distinct names.

    Raises:
        ConfigError: none, objects of another type, or a duplicate name.
    """
    members: tuple[Any, ...] = _members(values, kind, what)
    names = [value.name for value in members]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"{what}: expected at least one, each with its own name, found {names}")
    return members


@dataclass(frozen=True)
class Rule:
    """The pages of a group that a position needs: those that hold tokens from
    `floor(position / align) * align - back` to the position. They are one run that ends there. A
    rule of another kind is made of these two numbers where its model is described."""

    name: str
    """Part of fingerprints: with the number of tokens, if there is one."""
    align: int
    back: int

    @classmethod
    @cache
    def prefix(cls) -> Rule:
        """Every page from the first on: full attention."""
        return cls("prefix", _EVERYTHING, 0)

    @classmethod
    def window(cls, tokens: int) -> Rule:
        """The pages of so many tokens before the position: sliding windows. A layer that sees W
        tokens, its own among them, needs W - 1.

        Raises:
            ConfigError: not a whole number, or less than 1.
        """
        return cls(f"window{whole(tokens, 'window')}", 1, tokens)

    @classmethod
    def chunk(cls, tokens: int) -> Rule:
        """The pages of the position's chunk: attention within chunks of so many tokens. At the
        beginning of a chunk it needs none.

        Raises:
            ConfigError: not a whole number, or less than 1.
        """
        return cls(f"chunk{whole(tokens, 'chunk')}", tokens, 0)

    @classmethod
    @cache
    def point(cls) -> Rule:
        """The one page that ends at the position: a recurrent state."""
        return cls("point", 1, 1)

    def __post_init__(self) -> None:
        """Check the two numbers.

        Raises:
            ConfigError: out of range.
        """
        _checked_name(self.name, "rule")
        for what, value, least in (("align", self.align, 1), ("back", self.back, 0)):
            if whole(value, f"rule {self.name!r}: {what}", least) > _EVERYTHING:
                raise ConfigError(
                    f"rule {self.name!r}: {what}: expected at most {_EVERYTHING}, found {value}"
                )

    def first(self, pages: int, page_tokens: int) -> int:
        """The first page needed by the position after so many pages; at most `pages`, which is
        none."""
        position = pages * page_tokens
        return max(0, position // self.align * self.align - self.back) // page_tokens

    def most(self, page_tokens: int) -> int:
        """The most pages that any position needs."""
        return -(-(self.align - 1 + self.back) // page_tokens)


@dataclass(frozen=True)
class Plane:
    """One of the tensors of a layer: K, V, both packed, scales, a latent, an opaque cache, a part
    of a recurrent state."""

    name: str
    row_bytes: int
    """Contiguous bytes of one head in one row, on the device and in the page."""
    heads: int = 1
    """Of the whole model. 1: not divided among tensor-parallel ranks, each has all of it."""
    unit_tokens: int = 1
    """Tokens that share a row: 1, or the device block of an opaque cache."""
    rows: int = 1
    """Rows of a unit: more than one where a state's rows are apart on the device."""

    def __post_init__(self) -> None:
        _checked_name(self.name, "plane")
        for name in ("row_bytes", "heads", "unit_tokens", "rows"):
            whole(getattr(self, name), f"plane {self.name!r}: {name}")


@dataclass(frozen=True)
class KVGroup:
    """Layers with one shape and one match rule.

    Raises:
        ConfigError: no layers or planes, a duplicate layer, or heads or tokens that do not divide.
    """

    name: str
    layers: tuple[int, ...]
    """Numbers of the model's layers, ascending: what pipeline stages and windows speak of."""
    planes: tuple[Plane, ...]
    page_tokens: int
    """Tokens of a page; 1 for a recurrent state."""
    rule: Rule = field(default_factory=Rule.prefix)
    head_groups: int = 1
    """Parts a page is divided into by heads: the largest tensor-parallel size whose ranks have
    contiguous shares. Fixed when the cache is created; 1 where the group is replicated."""

    def __post_init__(self) -> None:
        where = f"group {_checked_name(self.name, 'group')!r}"
        whole(self.page_tokens, f"{where}: page_tokens")
        whole(self.head_groups, f"{where}: head_groups")
        # Lists are accepted; the frozen object holds tuples.
        object.__setattr__(self, "layers", layer_numbers(self.layers, f"{where}: layers"))
        object.__setattr__(self, "planes", distinct(self.planes, Plane, f"{where}: planes"))
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"{where}: layers must ascend, each once, found {self.layers!r}")
        if not isinstance(self.rule, Rule):
            raise ConfigError(
                f"{where}: expected a Rule, such as Rule.prefix(), found {self.rule!r}"
            )
        if self.rule == Rule.point() and self.page_tokens != 1:
            raise ConfigError(f"{where}: a state has page_tokens=1, found {self.page_tokens}")
        for plane in self.planes:
            self._check_divides(plane, where)
        if len({plane.heads == 1 for plane in self.planes}) > 1:
            raise ConfigError(
                f"{where}: expected planes that all have one head, or all several, found "
                f"{[(plane.name, plane.heads) for plane in self.planes]}; give those with one "
                "head, which every rank has, a group of their own"
            )

    def _check_divides(self, plane: Plane, where: str) -> None:
        if self.page_tokens % plane.unit_tokens:
            raise ConfigError(
                f"{where}: page_tokens must be a multiple of the {plane.unit_tokens} tokens of a "
                f"unit of plane {plane.name!r}, found {self.page_tokens}"
            )
        if plane.heads % self.head_groups:
            raise ConfigError(
                f"{where}: head_groups must divide the {plane.heads} heads of plane "
                f"{plane.name!r}, found {self.head_groups}"
            )

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank holds the whole group."""
        return all(plane.heads == 1 for plane in self.planes)

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one head group of a page."""
        return sum(self.plane_bytes(plane) for plane in self.planes)

    def plane(self, name: str) -> Plane:
        """The plane of that name.

        Raises:
            ConfigError: there is none.
        """
        for plane in self.planes:
            if plane.name == name:
                return plane
        names = [plane.name for plane in self.planes]
        raise ConfigError(f"group {self.name!r}: expected a plane among {names}, found {name!r}")

    def units(self, plane: Plane) -> int:
        """Units of a plane in a page."""
        return self.page_tokens // plane.unit_tokens

    def plane_bytes(self, plane: Plane) -> int:
        """Bytes of one plane of one layer of one head group of a page."""
        heads = plane.heads // self.head_groups
        return self.units(plane) * plane.rows * heads * plane.row_bytes

    @classmethod
    def attention(
        cls,
        name: str,
        *,
        layers: int | Sequence[int],
        heads: int,
        head_dim: int,
        dtype_bytes: int,
        page_tokens: int,
        value_dim: int | None = None,
        content: Literal["separate", "packed", "single"] = "separate",
        scale_bytes: int = 0,
        rule: Rule | None = None,
        head_groups: int = 1,
    ) -> KVGroup:
        """Attention layers.

        Args:
            layers: how many (numbered from 0), or their numbers.
            heads: KV heads of the whole model; 1 for latent attention.
            head_dim, value_dim: elements of a key and a value (None: the same).
            content: "separate": planes `k` and `v`; "packed": one plane `kv` with both in each row;
                "single": one plane `kv` with another row, such as a latent.
            scale_bytes: of one head of one token of K, and of V, for quantised caches; each plane
                gets a second plane, such as `k_scale`. Scales that all heads share are a separate
                group.
        """
        where = f"group {name!r}"
        width = whole(dtype_bytes, f"{where}: dtype_bytes")
        key = whole(head_dim, f"{where}: head_dim") * width
        scale = whole(scale_bytes, f"{where}: scale_bytes", 0)
        if content == "single" and value_dim is not None:
            raise ConfigError(f"{where}: a single plane has no value_dim, found {value_dim!r}")
        value = key if value_dim is None else whole(value_dim, f"{where}: value_dim") * width
        if content == "separate":
            wanted = [("k", key, scale), ("v", value, scale)]
        elif content == "packed":
            wanted = [("kv", key + value, 2 * scale)]
        elif content == "single":
            wanted = [("kv", key, scale)]
        else:
            raise ConfigError(
                f"{where}: content: expected separate, packed or single, found {content!r}"
            )
        planes = [Plane(plane, size, heads) for plane, size, _ in wanted]
        if scale:
            planes += [Plane(f"{plane}_scale", size, heads) for plane, _, size in wanted]
        return cls(
            name, _layers(layers), tuple(planes), page_tokens, rule or Rule.prefix(), head_groups
        )

    @classmethod
    def opaque(
        cls,
        name: str,
        *,
        layers: int | Sequence[int],
        row_bytes: int,
        page_tokens: int,
        unit_tokens: int = 1,
        rule: Rule | None = None,
    ) -> KVGroup:
        """Opaque bytes: `row_bytes` for every `unit_tokens` tokens, in one plane named `opaque`."""
        plane = Plane("opaque", row_bytes, 1, unit_tokens)
        return cls(name, _layers(layers), (plane,), page_tokens, rule or Rule.prefix())

    @classmethod
    def state(
        cls, name: str, *, layers: int | Sequence[int], parts: Sequence[Plane], head_groups: int = 1
    ) -> KVGroup:
        """Recurrent state: named parts, one page for one state. Give a part that is sharded in
        sections (the q, k and v channels of a convolution) as one part for each section."""
        return cls(name, _layers(layers), tuple(parts), 1, Rule.point(), head_groups)


def _layers(layers: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(layers, int):
        return tuple(range(whole(layers, "layers")))
    return layer_numbers(layers, "layers")


__all__ = ["KVGroup", "Plane", "Rule"]
