"""Pages and ranks made the slow, obvious way: what geometries and shares are compared with.

A model's KV is one array for each plane of each layer, of shape (units, rows, heads, row_bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane, Share

Bytes = npt.NDArray[np.uint8]
Model = dict[tuple[str, int, str], Bytes]
POISON = 0xA5


def random_model(geometry: PageGeometry, seed: int = 0) -> Model:
    """Random KV of one page's tokens, all heads and layers."""
    draw = np.random.default_rng(seed)
    return {
        (group.name, layer, plane.name): draw.integers(
            0,
            256,
            (group.page_tokens // plane.unit_tokens, plane.rows, plane.heads, plane.row_bytes),
            dtype=np.uint8,
        )
        for group in geometry.groups
        for layer in group.layers
        for plane in group.planes
    }


def packed(geometry: PageGeometry, model: Model) -> Bytes:
    """The used bytes of the page that must hold it: rows appended in the documented order."""
    finest = max(group.head_groups for group in geometry.groups)
    replicated = [group for group in geometry.groups if all(p.heads == 1 for p in group.planes)]
    others = [group for group in geometry.groups if group not in replicated]
    others.sort(key=lambda group: group.head_groups)
    rows: list[bytes] = []
    for part in range(finest):
        for group in replicated + others:
            # Three groups of 2, 4 and 4 head groups: A0 B0 C0 B1 C1 A1 B2 C2 B3 C3.
            if part * group.head_groups % finest == 0:
                rows += _rows(group, model, part * group.head_groups // finest)
    return np.frombuffer(b"".join(rows), np.uint8)


def _rows(group: KVGroup, model: Model, part: int) -> Iterable[bytes]:
    for layer in group.layers:
        for plane in group.planes:
            heads = np.split(np.arange(plane.heads), group.head_groups)[part]
            for unit in model[group.name, layer, plane.name]:
                for row in unit:
                    for head in heads:
                        yield row[head].tobytes()


def heads_of(plane: Plane, rank: int, ranks: int) -> slice:
    """The heads that engines give a rank: a run of them, or one that neighbours have as well."""
    if ranks > plane.heads:
        head = int(np.repeat(np.arange(plane.heads), ranks // plane.heads)[rank])
        return slice(head, head + 1)
    own = np.split(np.arange(plane.heads), ranks)[rank]
    return slice(int(own[0]), int(own[-1]) + 1)


def of_rank(geometry: PageGeometry, model: Model, rank: int, ranks: int) -> Model:
    """The heads of one rank; arrays of its own."""
    return {
        (group.name, layer, plane.name): model[group.name, layer, plane.name][
            :, :, heads_of(plane, rank, ranks)
        ].copy()
        for group in geometry.groups
        for layer in group.layers
        for plane in group.planes
    }


def copy(share: Share, page: Bytes, held: Model, *, to_page: bool) -> None:
    """Move a share between a page and what a rank holds, row by row, as its cells say."""
    for cell in share.cells:
        rows = held[share.geometry.groups[cell.group].name, cell.layer, cell.plane.name]
        length = cell.heads * cell.plane.row_bytes
        for unit in range(cell.units):
            start = cell.offset + unit * cell.unit_stride
            there = page[start : start + length].reshape(cell.heads, cell.plane.row_bytes)
            here = rows[unit, cell.row, cell.own_head : cell.own_head + cell.heads]
            if to_page:
                there[:] = here
            else:
                here[:] = there


def touched(share: Share) -> Bytes:
    """How often its ranges name each byte of a page."""
    counts = np.zeros(share.geometry.page_bytes, np.uint8)
    for start, length in share.ranges:
        counts[start : start + length] += 1
    return counts


Stages = Sequence[Sequence[int]]


def write(geometry: PageGeometry, model: Model, ranks: int, stages: Stages) -> Bytes:
    """A page written by all ranks of all stages; each byte must be somebody's, once, and the
    padding nobody's."""
    page = np.full(geometry.page_bytes, POISON, np.uint8)
    counts = np.zeros(geometry.page_bytes, np.uint8)
    for stage in stages:
        for rank in range(ranks):
            share = geometry.share(rank, ranks, layers=stage, writing=True)
            copy(share, page, of_rank(geometry, model, rank, ranks), to_page=True)
            own = touched(share)
            assert own.sum() == share.nbytes, f"rank {rank} of {ranks}: {share.ranges}"
            counts += own
    assert (counts[: geometry.used_bytes] == 1).all(), f"{ranks} ranks, {stages}: not once each"
    assert not counts[geometry.used_bytes :].any()
    assert (page[geometry.used_bytes :] == POISON).all()
    return page


def read(geometry: PageGeometry, page: Bytes, model: Model, ranks: int, stages: Stages) -> None:
    """Every rank of every stage must find its heads of its layers, and nothing else."""
    for stage in stages:
        for rank in range(ranks):
            expected = of_rank(geometry, model, rank, ranks)
            found = {place: np.full_like(rows, POISON) for place, rows in expected.items()}
            share = geometry.share(rank, ranks, layers=stage)
            copy(share, page, found, to_page=False)
            for (group, layer, plane), rows in found.items():
                right = expected[group, layer, plane]
                if layer not in stage:
                    right = np.full_like(rows, POISON)
                np.testing.assert_array_equal(
                    rows, right, f"{group}/{layer}/{plane}, rank {rank} of {ranks}, {stage}"
                )
