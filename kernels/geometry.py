"""The format of a page: where each row of bytes lies.

    kv = KVGroup.attention("kv", layers=32, heads=8, head_dim=128, dtype_bytes=2, page_tokens=64)
    geometry = PageGeometry([kv])           # geometry.page_bytes == 8 MiB

A page is `[head_group][group][layer][plane][unit][row][head][bytes]`. If a group has fewer head
groups than the others, each of its head groups precedes the first of theirs that it goes with; so
replicated groups (one head: latent attention, opaque caches) precede all. Nothing here imports
torch, so a router can use it. dtypes are only widths; the engine gives rows their meaning.

A page may lie in several pages of the host, its parts: then the pool's pages can be smaller.

    states = PageGeometry([state], part_bytes=geometry.page_bytes)    # states.parts host pages each
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightcache.kernels.groups import (
    KVGroup,
    Plane,
    Rule,
    distinct,
    layer_numbers,
    whole,
)
from lightcache.shm.errors import ConfigError

# ---- Parts of a page: for a tensor-parallel rank, a pipeline stage, a window of layers


@dataclass(frozen=True)
class HeldHeads:
    """The heads of a plane that one rank holds, and the ranks that hold the same heads."""

    first: int
    count: int
    copy: int
    """Which of the ranks with these heads it is."""
    copies: int
    """How many ranks have these heads."""


def check_rank(rank: int, ranks: int) -> None:
    """Raises ConfigError: a rank outside its group."""
    whole(ranks, "ranks")
    if type(rank) is not int or not 0 <= rank < ranks:
        raise ConfigError(f"rank: expected 0 to {ranks - 1}, found {rank!r}")


def held_heads(plane: Plane, rank: int, ranks: int) -> HeldHeads:
    """How tensor parallelism divides a plane: into contiguous runs of heads. With fewer heads than
    ranks, several neighbouring ranks hold each head.

    Raises:
        ConfigError: a rank outside its group, or numbers of heads and ranks neither of which is a
            multiple of the other.
    """
    check_rank(rank, ranks)
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


@dataclass(frozen=True)
class Cell:
    """The smallest piece with its own address on both sides: one row number of one plane of one
    layer of one head group, in all units.

    Byte `b` of the `h`-th of its `heads` heads of unit `u` is in the page at
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
    own_head: int
    """The same head as the rank counts, from the first one that it holds: as `DevicePlane` does."""
    heads: int
    units: int
    offset: int
    unit_stride: int

    @property
    def contiguous(self) -> bool:
        """Whether its bytes in the page are contiguous."""
        return self.units == 1 or self.unit_stride == self.heads * self.plane.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the cell."""
        return self.units * self.heads * self.plane.row_bytes


class Share:
    """A part of every page: the cells that one rank reads or writes, in the order of the page. It
    may be empty: the rank then moves nothing."""

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
        """(offset, length) of each contiguous piece of the share in a page, ascending."""
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
        """The part of the share that belongs to some layers; other numbers are ignored."""
        wanted = set(layer_numbers(layers, "window"))
        return Share(self.geometry, tuple(cell for cell in self.cells if cell.layer in wanted))

    def windows(self, layers: int) -> list[Share]:
        """Consecutive windows of `layers` layers; the last may be smaller."""
        whole(layers, "layers of a window")
        own = self.layers
        return [self.window(own[first : first + layers]) for first in range(0, len(own), layers)]

    def __repr__(self) -> str:
        return f"<Share of {len(self.cells)} cells, {self.nbytes} bytes of {self.geometry!r}>"


# ---- The format

MAX_PAGE_BYTES = 1 << 40
MOST_PADDING = 1 / 16
"""Of a page in parts: more is worth a warning, see `fitting_page_tokens`."""
_OS_PAGE = 4096
_WORTH = 1 << 16  # bytes of padding that are worth a warning
_ACCESS = 16  # bytes of a device's widest access, which no border may cut


class PageGeometry:
    """The format of the pages of one index: groups with one rule and one page size in tokens.
    Geometries are equal if their pages are, byte for byte."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        align: int | None = None,
        part_bytes: int | None = None,
    ) -> None:
        """Lay the groups out.

        Args:
            align: page_bytes is a multiple of it; None: 4096, so that no page shares an OS page
                with its neighbour, or 16 if 4096 would waste more than a sixteenth.
            part_bytes: of a page of the host, where a page of these groups takes as many host pages
                as it needs; None: one.

        Raises:
            ConfigError: no groups, a duplicate name, different rules or page sizes, numbers of head
                groups that do not divide the largest one, part_bytes that is no multiple of 16, or
                both align and part_bytes.
        """
        self.groups = distinct(groups, KVGroup, "groups of a page")
        kinds = {(group.rule.name, group.page_tokens) for group in self.groups}
        if len(kinds) > 1:
            raise ConfigError(
                "groups of a page: expected one rule and one page_tokens, found (rule, "
                f"page_tokens) {sorted(kinds)}; `split` makes a geometry for each"
            )
        parts = {group.head_groups for group in self.groups}
        self.head_groups = max(parts)
        if any(self.head_groups % part for part in parts):
            raise ConfigError(
                "groups of a page: expected numbers of head groups that divide the largest one, "
                f"found {sorted(parts)}"
            )
        self.rule, self.page_tokens = self.groups[0].rule, self.groups[0].page_tokens
        self._starts, self.used_bytes = self._lay_out()
        if self.used_bytes > MAX_PAGE_BYTES:
            raise ConfigError(
                f"a page: expected at most {MAX_PAGE_BYTES} bytes, found {self.used_bytes}; choose "
                "a smaller page_tokens"
            )
        if part_bytes is None:
            align = self._alignment() if align is None else whole(align, "align")
        else:
            align = _checked_part(part_bytes, align)
        self.page_bytes = -(-self.used_bytes // align) * align
        """Bytes of a page in the pool: used_bytes, and padding that is never read or written."""
        self.part_bytes = self.page_bytes if part_bytes is None else part_bytes
        """Bytes of a page of the host."""
        self.parts = self.page_bytes // self.part_bytes
        """Pages of the host that a page takes. Part `i` holds its bytes from `i * part_bytes` on,
        whatever layer or head they belong to."""

    def _lay_out(self) -> tuple[dict[tuple[int, int], int], int]:
        """The offset of each (group, head group), and the end of the last."""
        starts, offset = {}, 0
        order = sorted(
            enumerate(self.groups), key=lambda one: (one[1].head_groups, not one[1].replicated)
        )
        for part in range(self.head_groups):
            for number, group in order:
                own, within = divmod(part, self.head_groups // group.head_groups)
                if within == 0:
                    starts[number, own] = offset
                    offset += len(group.layers) * group.layer_bytes
        return starts, offset

    def _alignment(self) -> int:
        waste = -self.used_bytes % _OS_PAGE
        return _OS_PAGE if waste * 16 <= self.used_bytes else 16

    @property
    def padding(self) -> float:
        """The fraction of a page that holds nothing."""
        return (self.page_bytes - self.used_bytes) / self.page_bytes

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers of these pages, ascending."""
        return tuple(sorted({layer for group in self.groups for layer in group.layers}))

    def group(self, name: str) -> KVGroup:
        """The group of that name.

        Raises:
            ConfigError: there is none.
        """
        for group in self.groups:
            if group.name == name:
                return group
        names = [group.name for group in self.groups]
        raise ConfigError(f"expected a group among {names}, found {name!r}")

    def fingerprint(self) -> str:
        """Names the format: equal for equal formats. Put it into a cache's fingerprint, so that no
        page is read with another geometry than it was written with. It covers widths, not dtypes:
        name the model and its KV dtype as well."""
        parts = []
        for group in self.groups:
            planes = ",".join(
                f"{plane.name}:{plane.row_bytes}x{plane.heads}/{plane.unit_tokens}/{plane.rows}"
                for plane in group.planes
            )
            layers = ",".join(f"{first}-{last}" for first, last in _runs(group.layers))
            parts.append(f"{group.name}[{layers}]({planes})/{group.head_groups}")
        size = str(self.page_bytes) if self.parts == 1 else f"{self.parts}x{self.part_bytes}"
        return f"{self.rule.name}/{self.page_tokens}/{size}/" + "+".join(parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PageGeometry):
            return NotImplemented
        same = self.page_bytes == other.page_bytes and self.parts == other.parts
        return same and self.groups == other.groups

    def __hash__(self) -> int:
        return hash((self.groups, self.page_bytes, self.parts))

    def share(
        self,
        rank: int = 0,
        ranks: int = 1,
        *,
        layers: Sequence[int] | None = None,
        writing: bool = False,
    ) -> Share:
        """The part of a page that one tensor-parallel rank holds.

        Args:
            rank, ranks: of the tensor-parallel group.
            layers: of this pipeline stage, or of a window; None: all. Numbers that no group has are
                ignored, so a stage's layers serve every geometry of a model.
            writing: divide parts that several ranks hold among them, by layer, so that every byte
                is written once; a rank may then have nothing to write.

        Raises:
            ConfigError: a rank outside its group, or heads that the ranks cannot divide.
        """
        check_rank(rank, ranks)
        stage = set(self.layers if layers is None else layer_numbers(layers, "layers of a share"))
        cells: list[Cell] = []
        for number, group in enumerate(self.groups):
            in_layer = 0
            for plane in group.planes:
                held = held_heads(plane, rank, ranks)
                held_layers = [
                    (index, layer) for index, layer in enumerate(group.layers) if layer in stage
                ]
                if writing:
                    low, high = held.copy * len(held_layers), (held.copy + 1) * len(held_layers)
                    held_layers = held_layers[low // held.copies : high // held.copies]
                for index, layer in held_layers:
                    layer_offset = index * group.layer_bytes + in_layer
                    cells += self._cells(number, layer, plane, layer_offset, held)
                in_layer += group.plane_bytes(plane)
        return Share(self, tuple(sorted(cells, key=lambda cell: cell.offset)))

    def _cells(
        self, number: int, layer: int, plane: Plane, within: int, held: HeldHeads
    ) -> Iterator[Cell]:
        """Cells of one plane of one layer, which begins `within` bytes after its group's start."""
        group = self.groups[number]
        heads_each = plane.heads // group.head_groups
        row = heads_each * plane.row_bytes
        end = held.first + held.count
        for part in range(held.first // heads_each, (end - 1) // heads_each + 1):
            low, high = max(held.first, part * heads_each), min(end, (part + 1) * heads_each)
            start = (
                self._starts[number, part] + within + (low - part * heads_each) * plane.row_bytes
            )
            for line in range(plane.rows):
                yield Cell(
                    group=number,
                    layer=layer,
                    plane=plane,
                    row=line,
                    head=low,
                    own_head=low - held.first,
                    heads=high - low,
                    units=group.units(plane),
                    offset=start + line * row,
                    unit_stride=plane.rows * row,
                )

    def __repr__(self) -> str:
        return f"<PageGeometry {self.fingerprint()}>"


def split(groups: Sequence[KVGroup]) -> list[PageGeometry]:
    """A geometry for each rule and page size among a model's groups, in order of appearance. Each
    has its own index; the usable prefix is the longest that all rules accept."""
    kinds: dict[tuple[Rule, int], list[KVGroup]] = {}
    for group in distinct(groups, KVGroup, "groups of a model"):
        kinds.setdefault((group.rule, group.page_tokens), []).append(group)
    return [PageGeometry(members) for members in kinds.values()]


def fitting_page_tokens(kv: PageGeometry, others: Sequence[PageGeometry]) -> list[int]:
    """Numbers of tokens for a page of `kv` with which no page of the others, cut into parts of
    `kv`'s page size, has more padding than `MOST_PADDING`: the nearest to today's first. Doubles
    and halves of today's number are tried, as device blocks want; up to 16 times as many. The size
    of a page of the others must not depend on them. May be empty.
    """
    tokens = kv.page_tokens
    halves = [tokens >> step for step in range(tokens.bit_length()) if tokens % (1 << step) == 0]
    sizes = [tokens, *halves[1:], *(tokens << step for step in range(1, 5))]
    units = {plane.unit_tokens for group in kv.groups for plane in group.planes}
    fitting = []
    for size in sizes:
        if any(size % unit for unit in units):
            continue
        part = PageGeometry([replace(group, page_tokens=size) for group in kv.groups]).page_bytes
        paddings = [PageGeometry(other.groups, part_bytes=part).padding for other in others]
        if all(padding <= MOST_PADDING for padding in paddings):
            fitting.append(size)
    return sorted(fitting, key=lambda size: max(size, tokens) // min(size, tokens))


def waste_of(what: str, kv: PageGeometry, other: PageGeometry) -> str | None:
    """A warning, if much of the memory for pages of a group stays empty: more than `MOST_PADDING`,
    and 64 KiB of each page.

    Args:
        what: the pages, such as "states".
        kv: of the pages by which those of the group are cut.
    """
    wasted = other.page_bytes - other.used_bytes
    if other.padding <= MOST_PADDING or wasted < _WORTH:
        return None
    fits = fitting_page_tokens(kv, [other]) if other.rule == Rule.point() else []
    advice = f"page_tokens={fits[0]} would fit" if fits else "no page_tokens near it fits"
    return (
        f"{what}: {other.used_bytes} bytes take up {other.parts} x {other.part_bytes} bytes of the "
        f"pool, {100 * other.padding:.0f} % of which stay empty; {advice}"
    )


def _checked_part(part_bytes: int, align: int | None) -> int:
    if align is not None:
        raise ConfigError(
            f"expected align or part_bytes, found both ({align!r}, {part_bytes!r}); part_bytes "
            "alone decides where a page ends"
        )
    if whole(part_bytes, "part_bytes") % _ACCESS:
        raise ConfigError(
            f"part_bytes: expected a multiple of {_ACCESS}, found {part_bytes}; give the "
            "page_bytes of the cache"
        )
    return part_bytes


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


__all__ = [
    "MAX_PAGE_BYTES",
    "MOST_PADDING",
    "Cell",
    "HeldHeads",
    "KVGroup",
    "PageGeometry",
    "Plane",
    "Rule",
    "Share",
    "check_rank",
    "fitting_page_tokens",
    "held_heads",
    "split",
    "waste_of",
]
