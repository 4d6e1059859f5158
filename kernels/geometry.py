"""What a page holds: groups of layers, their planes, and where each row of bytes lies.

    kv = KVGroup.attention("kv", layers=32, heads=8, head_dim=128, dtype_bytes=2, page_tokens=64)
    geometry = PageGeometry([kv])           # geometry.page_bytes == 8 MiB

A page is `[head_group][group][layer][plane][unit][row][head][bytes]`; replicated groups (one head:
latent attention, opaque caches) stand in front of the head groups. Nothing here imports torch: a
router can compute with it. dtypes are only widths; what a row means is the engine's affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lightcache.shm.errors import ConfigError

MAX_PAGE_BYTES = 1 << 40
_OS_PAGE = 4096


def _number(value: object, name: str, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}: expected a whole number >= {least}, found {value!r}")
    return value


@dataclass(frozen=True)
class Rule:
    """When a page of a group may be used: see `prefix`, `window` and `point`."""

    kind: Literal["prefix", "window", "point"] = "prefix"
    tokens: int = 0
    """Of the window; 0 for the other kinds."""

    def __post_init__(self) -> None:
        if self.kind not in ("prefix", "window", "point"):
            raise ConfigError(f"rule: expected prefix, window or point, found {self.kind!r}")
        if (self.kind == "window") != (self.tokens > 0):
            raise ConfigError(f"rule: only a window has tokens, found {self.kind}({self.tokens})")


def prefix() -> Rule:
    """Full attention: every page from the first token on is needed."""
    return Rule("prefix")


def window(tokens: int) -> Rule:
    """Sliding window: only pages that hold one of the last `tokens` tokens are needed."""
    return Rule("window", _number(tokens, "window"))


def point() -> Rule:
    """Recurrent state: one page says everything about the tokens before it."""
    return Rule("point")


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
        for name in ("row_bytes", "heads", "unit_tokens", "rows"):
            _number(getattr(self, name), f"plane {self.name!r}: {name}")


@dataclass(frozen=True)
class KVGroup:
    """Layers of one shape and one match rule.

    Raises:
        ConfigError: no layers or planes, a layer twice, or heads or tokens that do not divide.
    """

    name: str
    layers: tuple[int, ...]
    """Numbers of the model's layers, ascending: what pipeline stages and windows speak of."""
    planes: tuple[Plane, ...]
    page_tokens: int
    """Tokens of a page; 1 for a recurrent state."""
    rule: Rule = field(default_factory=prefix)
    head_groups: int = 1
    """Parts a page is divided into by heads: the largest tensor-parallel size whose ranks have
    contiguous shares. Fixed when the cache is created."""

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        _number(self.page_tokens, f"{where}: page_tokens")
        _number(self.head_groups, f"{where}: head_groups")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"{where}: layers must ascend, each once, found {self.layers!r}")
        for layer in self.layers:
            _number(layer, f"{where}: layer", 0)
        names = [plane.name for plane in self.planes]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"{where}: planes need names of their own, found {names}")
        if self.rule.kind == "point" and self.page_tokens != 1:
            raise ConfigError(f"{where}: a state has page_tokens=1, found {self.page_tokens}")
        for plane in self.planes:
            if self.page_tokens % plane.unit_tokens:
                raise ConfigError(
                    f"{where}: {self.page_tokens} tokens a page are no multiple of the "
                    f"{plane.unit_tokens} tokens of a unit of plane {plane.name!r}"
                )
            if plane.heads % self.head_groups:
                raise ConfigError(
                    f"{where}: {plane.heads} heads of plane {plane.name!r} cannot be divided into "
                    f"{self.head_groups} head groups"
                )
        if self.head_groups == 1 and len({plane.heads == 1 for plane in self.planes}) > 1:
            raise ConfigError(
                f"{where}: planes with one head and with several; give those with one head, which "
                "every rank has, a group of their own"
            )

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank has all of it."""
        return all(plane.heads == 1 for plane in self.planes)

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one head group of a page."""
        return sum(self.plane_bytes(plane) for plane in self.planes)

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
        """The usual attention layers.

        Args:
            layers: how many (numbered from 0), or their numbers.
            heads: KV heads of the whole model; 1 for latent attention.
            head_dim, value_dim: elements of a key and a value (None: the same).
            content: K and V as two planes, both in each row ("packed"), or one plane ("single").
            scale_bytes: of one head of one token of K, and of V, for quantised caches; each makes
                a plane of its own.
        """
        width = _number(dtype_bytes, f"group {name!r}: dtype_bytes")
        key = _number(head_dim, f"group {name!r}: head_dim") * width
        value = (
            key if value_dim is None else _number(value_dim, f"group {name!r}: value_dim") * width
        )
        if content == "separate":
            wanted = [("k", key, scale_bytes), ("v", value, scale_bytes)]
        elif content == "packed":
            wanted = [("kv", key + value, 2 * scale_bytes)]
        elif content == "single":
            wanted = [("kv", key, scale_bytes)]
        else:
            raise ConfigError(f"content: expected separate, packed or single, found {content!r}")
        planes = [Plane(plane, size, heads) for plane, size, _ in wanted]
        if scale_bytes:
            planes += [Plane(f"{plane}_scale", size, heads) for plane, _, size in wanted]
        return cls(name, _layers(layers), tuple(planes), page_tokens, rule or prefix(), head_groups)

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
        """Bytes whose inside is not ours to know: `row_bytes` for every `unit_tokens` tokens."""
        plane = Plane("opaque", row_bytes, 1, unit_tokens)
        return cls(name, _layers(layers), (plane,), page_tokens, rule or prefix())

    @classmethod
    def state(
        cls, name: str, *, layers: int | Sequence[int], parts: Sequence[Plane], head_groups: int = 1
    ) -> KVGroup:
        """Recurrent state: named parts, one page for one state. A part that is sharded in sections
        (the q, k and v channels of a convolution) is given as one part for each section."""
        return cls(name, _layers(layers), tuple(parts), 1, point(), head_groups)


def _layers(layers: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(layers, int):
        return tuple(range(_number(layers, "layers")))
    return tuple(layers)


@dataclass(frozen=True)
class Cell:
    """The smallest piece that has an address of its own on both sides: one row number of one plane
    of one layer of one head group, all units of it.

    Byte `b` of head `h` (counted from `head`, `heads` of them) of unit `u` is in the page at
    `offset + u * unit_stride + h * row_bytes + b`.
    """

    group: int
    """Position of its group in the geometry."""
    layer: int
    """Number of the model's layer."""
    plane: Plane
    row: int
    head: int
    """The first head of these, of the whole model."""
    heads: int
    units: int
    offset: int
    unit_stride: int

    @property
    def contiguous(self) -> bool:
        """Whether its bytes in the page touch each other."""
        return self.units == 1 or self.unit_stride == self.heads * self.plane.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return self.units * self.heads * self.plane.row_bytes


class PageGeometry:
    """The format of the pages of one index: groups of one rule and one page size in tokens."""

    def __init__(self, groups: Sequence[KVGroup], *, align: int | None = None) -> None:
        """Lay the groups out.

        Args:
            align: what page_bytes is a multiple of; None: 4096, so that no page shares an OS page
                with its neighbour, or 16 where 4096 would waste more than a sixteenth.

        Raises:
            ConfigError: no groups, a name twice, different rules or page sizes, or head groups
                that differ among sharded groups.
        """
        self.groups = tuple(groups)
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"a page needs groups with names of their own, found {names}")
        kinds = {(group.rule, group.page_tokens) for group in self.groups}
        if len(kinds) > 1:
            raise ConfigError(
                "groups of one page have one rule and one page_tokens, found "
                f"{sorted((rule.kind, rule.tokens, tokens) for rule, tokens in kinds)}; "
                "`split` makes a geometry for each"
            )
        parts = {group.head_groups for group in self.groups if not group.replicated}
        if len(parts) > 1:
            raise ConfigError(f"sharded groups of one page have one head_groups, found {parts}")
        self.head_groups = parts.pop() if parts else 1
        self.rule, self.page_tokens = self.groups[0].rule, self.groups[0].page_tokens
        self._starts = self._lay_out()
        align = self._alignment() if align is None else _number(align, "align")
        self.page_bytes = -(-self.used_bytes // align) * align
        """Bytes of a page in the pool."""

    def _lay_out(self) -> dict[tuple[int, int], int]:
        """Where each (group, head group) begins."""
        starts, at = {}, 0
        order = [(number, 0) for number, group in enumerate(self.groups) if group.replicated]
        order += [
            (number, part)
            for part in range(self.head_groups)
            for number, group in enumerate(self.groups)
            if not group.replicated
        ]
        for number, part in order:
            starts[number, part] = at
            at += len(self.groups[number].layers) * self.groups[number].layer_bytes
        if at > MAX_PAGE_BYTES:
            raise ConfigError(f"a page of {at} bytes is more than a page may have")
        self.used_bytes = at
        """Bytes of a page that mean something; the rest is padding."""
        return starts

    def _alignment(self) -> int:
        waste = -self.used_bytes % _OS_PAGE
        return _OS_PAGE if waste * 16 <= self.used_bytes else 16

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers that these pages speak of, ascending."""
        return tuple(sorted({layer for group in self.groups for layer in group.layers}))

    def fingerprint(self) -> str:
        """Names the format: equal for equal formats. Belongs in a cache's fingerprint, so that no
        page is read with another geometry than it was written with."""
        parts = []
        for group in self.groups:
            planes = ",".join(
                f"{plane.name}:{plane.row_bytes}x{plane.heads}/{plane.unit_tokens}/{plane.rows}"
                for plane in group.planes
            )
            layers = ",".join(f"{first}-{last}" for first, last in _runs(group.layers))
            parts.append(f"{group.name}[{layers}]({planes})/{group.head_groups}")
        rule = self.rule.kind + (str(self.rule.tokens) if self.rule.tokens else "")
        return f"{rule}/{self.page_tokens}/" + "+".join(parts)

    def share(
        self,
        rank: int = 0,
        ranks: int = 1,
        *,
        layers: Sequence[int] | None = None,
        writing: bool = False,
    ) -> Share:
        """What one tensor-parallel rank holds of a page.

        Args:
            rank, ranks: of the tensor-parallel group.
            layers: of this pipeline stage, or of a window; None: all.
            writing: divide what several ranks hold alike among them, by layer, so that every byte
                is written once; a rank may then have nothing to write.

        Raises:
            ConfigError: a rank outside its group, or heads that cannot be divided so.
        """
        _number(ranks, "ranks")
        if type(rank) is not int or not 0 <= rank < ranks:
            raise ConfigError(f"rank: expected 0 to {ranks - 1}, found {rank!r}")
        stage = set(self.layers if layers is None else layers)
        cells: list[Cell] = []
        for number, group in enumerate(self.groups):
            at = 0
            for plane in group.planes:
                held = held_heads(plane, rank, ranks)
                mine = [layer for layer in group.layers if layer in stage]
                if writing:
                    low, high = held.copy * len(mine), (held.copy + 1) * len(mine)
                    mine = mine[low // held.copies : high // held.copies]
                for layer in mine:
                    start = group.layers.index(layer) * group.layer_bytes + at
                    cells += self._cells(number, layer, plane, start, held)
                at += group.plane_bytes(plane)
        return Share(self, tuple(sorted(cells, key=lambda cell: cell.offset)))

    def _cells(
        self, number: int, layer: int, plane: Plane, at: int, held: HeldHeads
    ) -> Iterator[Cell]:
        group = self.groups[number]
        each = plane.heads // group.head_groups
        row = each * plane.row_bytes
        end = held.first + held.count
        for part in range(held.first // each, (end - 1) // each + 1):
            low, high = max(held.first, part * each), min(end, (part + 1) * each)
            start = self._starts[number, part] + at + (low - part * each) * plane.row_bytes
            for line in range(plane.rows):
                yield Cell(
                    group=number,
                    layer=layer,
                    plane=plane,
                    row=line,
                    head=low,
                    heads=high - low,
                    units=group.units(plane),
                    offset=start + line * row,
                    unit_stride=plane.rows * row,
                )

    def __repr__(self) -> str:
        return f"<PageGeometry {self.fingerprint()} {self.page_bytes} bytes>"


@dataclass(frozen=True)
class HeldHeads:
    """The heads of a plane that one rank holds, and who else holds the same."""

    first: int
    count: int
    copy: int
    """Which of the ranks with these heads it is."""
    copies: int
    """How many ranks have these heads."""


def held_heads(plane: Plane, rank: int, ranks: int) -> HeldHeads:
    """How tensor parallelism divides a plane: contiguous runs of heads; fewer heads than ranks are
    held by several neighbouring ranks each.

    Raises:
        ConfigError: neither number is a multiple of the other.
    """
    if plane.heads % ranks == 0:
        count = plane.heads // ranks
        return HeldHeads(rank * count, count, 0, 1)
    if ranks % plane.heads == 0:
        copies = ranks // plane.heads
        return HeldHeads(rank // copies, 1, rank % copies, copies)
    raise ConfigError(
        f"{plane.heads} heads of plane {plane.name!r} cannot be divided among {ranks} ranks; "
        "choose ranks that divide the heads or are a multiple of them"
    )


class Share:
    """A part of every page: the cells that one rank reads or writes, in the order of the page."""

    def __init__(self, geometry: PageGeometry, cells: tuple[Cell, ...]) -> None:
        """For `PageGeometry.share`."""
        self.geometry = geometry
        self.cells = cells

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a page that it covers."""
        return sum(cell.nbytes for cell in self.cells)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers in it, ascending."""
        return tuple(sorted({cell.layer for cell in self.cells}))

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of each contiguous piece of a page that belongs to it, ascending."""
        pieces: list[tuple[int, int]] = []
        for start, length in sorted(self._pieces()):
            if pieces and sum(pieces[-1]) == start:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + length)
            else:
                pieces.append((start, length))
        return tuple(pieces)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for cell in self.cells:
            row = cell.heads * cell.plane.row_bytes
            if cell.contiguous:
                yield cell.offset, cell.nbytes
            else:
                for unit in range(cell.units):
                    yield cell.offset + unit * cell.unit_stride, row

    def window(self, layers: Sequence[int]) -> Share:
        """The part of it that belongs to some layers."""
        wanted = set(layers)
        return Share(self.geometry, tuple(cell for cell in self.cells if cell.layer in wanted))

    def windows(self, layers: int) -> list[Share]:
        """Consecutive windows of so many layers, the last of them perhaps smaller."""
        _number(layers, "layers of a window")
        own = self.layers
        return [self.window(own[at : at + layers]) for at in range(0, len(own), layers)]


def split(groups: Sequence[KVGroup]) -> list[PageGeometry]:
    """A geometry for each rule and page size among a model's groups: each has its own index, and
    the usable prefix is the longest that all rules accept. In the order in which they appear."""
    kinds: dict[tuple[Rule, int], list[KVGroup]] = {}
    for group in groups:
        kinds.setdefault((group.rule, group.page_tokens), []).append(group)
    return [PageGeometry(members) for members in kinds.values()]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
