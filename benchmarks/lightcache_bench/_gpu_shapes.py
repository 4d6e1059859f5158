"""The pages that are moved: their geometry, where their rows lie on the device, and the calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError, TransferFailed
from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane, Share, held_heads
from lightcache.kernels.moves import Move
from lightcache.kernels.planes import DevicePlane, DevicePlanes

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Pages of one kind, and how many of them a call moves."""

    name: str
    geometry: PageGeometry
    batch: int
    target: str | None = None
    """Of offload and load, each against the copy engine moving whole pages."""
    rank: int = 0
    ranks: int = 1

    @property
    def share(self) -> Share:
        """What is moved of a page."""
        return self.geometry.share(self.rank, self.ranks)


def attention(
    name: str, layers: int, heads: int, tokens: int, batch: int, target: str | None, ranks: int = 1
) -> Shape:
    """128 dims, bf16; with `ranks` a head group for each, of which one rank's is moved."""
    group = KVGroup.attention(
        "kv",
        layers=layers,
        heads=heads,
        head_dim=128,
        dtype_bytes=2,
        page_tokens=tokens,
        head_groups=ranks,
    )
    return Shape(name, PageGeometry([group]), batch, target, rank=ranks // 2, ranks=ranks)


def state(mib: int, layers: int, batch: int, target: str | None) -> Shape:
    """Recurrent states of `mib` MiB: a small and a large part in each layer."""
    return states_of(f"{mib} MiB states", layers, (mib << 20) // layers, batch, target)


def states_of(
    name: str,
    layers: int,
    layer_bytes: int,
    batch: int,
    target: str | None,
    part_bytes: int | None = None,
) -> Shape:
    """Recurrent states, whole in a page of the host, or in parts of `part_bytes`."""
    small = 48 << 10
    parts = [Plane("conv", small), Plane("ssm", layer_bytes - small)]
    group = KVGroup.state("state", layers=layers, parts=parts)
    return Shape(name, PageGeometry([group], part_bytes=part_bytes), batch, target)


LARGE = attention("8 MiB pages", 32, 8, 64, batch=16, target=">= 0.97")
SMALL = (
    attention("256 KiB pages", 32, 1, 16, batch=64, target=">= 0.90"),
    attention("256 KiB of 2 MiB pages (TP 8)", 32, 8, 16, batch=64, target=">= 0.90", ranks=8),
    attention("32 KiB pages (2 tokens)", 32, 1, 2, batch=512, target=">= 0.80"),
    attention("32 KiB pages (4 layers)", 4, 1, 16, batch=512, target=">= 0.80"),
)
STATES = (
    state(9, 18, batch=8, target=">= 0.97"),
    state(74, 37, batch=1, target=">= 0.97"),
    state(190, 38, batch=1, target=">= 0.97"),
)
PART = 3 << 19
"""Bytes of a host page of 64 tokens of Qwen3-Next-80B, whose states are the second of these."""
IN_PARTS = tuple(
    states_of(f"{mib} MiB states in parts of 1.5 MiB", layers, layer_bytes, batch, ">= 0.97", PART)
    for mib, layers, layer_bytes, batch in (
        (9, 18, 1 << 19, 8),
        (73.7, 36, (2 << 20) + (48 << 10), 1),
        (190, 38, 5 << 20, 1),
    )
)


@dataclass(frozen=True)
class Place:
    """One plane of one layer on the device: uint8 of shape (slots, width) at an offset."""

    key: tuple[str, int, str]
    offset: int
    slots: int
    width: int
    row_bytes: int


def places(shape: Shape, nbytes: int) -> list[Place]:
    """Divide device memory as SGLang does: a tensor [tokens, heads, dim] for each layer's K and V;
    states the same, a slot a state."""
    found = []
    for group in shape.geometry.groups:
        for layer in group.layers:
            for plane in group.planes:
                heads = held_heads(plane, shape.rank, shape.ranks).count
                key = (group.name, layer, plane.name)
                found.append((key, heads * plane.row_bytes, plane.row_bytes))
    slots = nbytes // sum(width for _, width, _ in found)
    made, at = [], 0
    for key, width, row_bytes in found:
        made.append(Place(key, at, slots, width, row_bytes))
        at += slots * width
    return made


def device_planes(where: list[Place], address: int, device: str, keep: object) -> DevicePlanes:
    """The same for an engine."""
    planes = {
        place.key: DevicePlane(
            address + place.offset, place.width, place.slots, head_stride=place.row_bytes
        )
        for place in where
    }
    return DevicePlanes(planes, device=device, keep=keep)


@dataclass(frozen=True)
class Calls:
    """What one repetition asks for in one direction: calls of `shape.batch` pages each."""

    moves: tuple[Move, ...]
    nbytes: int
    """Of all calls together."""
    pages: Numbers
    """Of the host, of shape (n, parts)."""
    slots: Numbers
    """Of these pages in turn, `page_tokens` of them for each."""


def calls(shape: Shape, pages: Numbers, slots: Numbers, total: int) -> Calls:
    """Calls that move `total` bytes, or a little more; they begin anew where pages run out.

    Args:
        pages: host pages; each page of the shape takes the next `geometry.parts` of them.

    Raises:
        ConfigError: not even one call's worth of pages or slots.
    """
    tokens, each = shape.geometry.page_tokens, shape.share.nbytes
    count = -(-total // (each * shape.batch))
    parts = shape.geometry.parts
    pages = pages[: len(pages) // parts * parts].reshape(-1, parts)
    have = min(len(pages) // shape.batch, len(slots) // tokens // shape.batch, count) * shape.batch
    if not have:
        raise ConfigError(
            f"{shape.name}: expected {shape.batch} pages of {each} bytes for a call, found room "
            f"for {len(pages)} pages and {len(slots)} slots of the device; use more memory"
        )
    pages, slots = pages[:have], slots[: have * tokens]
    cut = range(0, have, shape.batch)
    moves = [
        Move(pages[at : at + shape.batch].ravel(), slots[at * tokens : (at + shape.batch) * tokens])
        for at in cut
    ]
    moved = tuple(moves[i % len(moves)] for i in range(count))
    return Calls(moved, count * each * shape.batch, pages, slots)


def scattered(
    shape: Shape, pages: range, slots: int, total: int, seed: int = 3
) -> tuple[Calls, Calls]:
    """Calls of an offload and of a load that have no page and no slot in common; both in random
    order, tokens singly."""
    rng = np.random.default_rng(seed)
    page_order, slot_order = rng.permutation(np.asarray(pages)), rng.permutation(slots)
    half_pages, half_slots = len(pages) // 2, slots // 2
    return (
        calls(shape, page_order[:half_pages], slot_order[:half_slots], total),
        calls(shape, page_order[half_pages:], slot_order[half_slots:], total),
    )


def check(
    shape: Shape, where: list[Place], rows: Callable[[Place], Bytes], pages: Bytes, what: str
) -> None:
    """Compare pages with the rows of the device that belong to them, byte by byte.

    Args:
        rows: the device rows of a place, uint8 of shape (pages * page_tokens, width).
        pages: uint8 of shape (pages, page_bytes).

    Raises:
        TransferFailed: they differ.
    """
    by_key = {place.key: place for place in where}
    for cell in shape.share.cells:
        name = shape.geometry.groups[cell.group].name
        place = by_key[name, cell.layer, cell.plane.name]
        size = cell.heads * cell.plane.row_bytes
        first = cell.head - held_heads(cell.plane, shape.rank, shape.ranks).first
        begin = first * cell.plane.row_bytes
        held = rows(place).reshape(len(pages), cell.units, place.width)[:, :, begin : begin + size]
        found = np.lib.stride_tricks.as_strided(
            pages[:, cell.offset :],
            (len(pages), cell.units, size),
            (pages.strides[0], cell.unit_stride, 1),
            writeable=False,
        )
        if not np.array_equal(held, found):
            wrong = int((held != found).any(axis=(1, 2)).sum())
            raise TransferFailed(
                f"{what}, {shape.name}: plane {place.key} differs in {wrong} of {len(pages)} pages"
            )
