"""What ranks, stages and windows have of a page: written by some, read by others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pages import heads_of, packed, random_model, read, touched, write

from lightcache.kernels.geometry import (
    KVGroup,
    PageGeometry,
    Plane,
    Rule,
    held_heads,
    split,
)


def attention(name: str = "kv", **changes: Any) -> KVGroup:
    values = {"layers": 4, "heads": 8, "head_dim": 3, "dtype_bytes": 2, "page_tokens": 2}
    return KVGroup.attention(name, **{**values, **changes})


def latent(layers: int = 5) -> list[KVGroup]:
    return [
        attention("latent", layers=layers, heads=1, content="single", head_dim=9),
        KVGroup.opaque("indexer", layers=layers, row_bytes=132, page_tokens=2),
    ]


def state(head_groups: int) -> KVGroup:
    """Gated delta net: the convolution sharded in sections, 4 q and k heads, 8 v heads."""
    parts = [
        Plane("conv_q", 2 * 4, 4, rows=3),
        Plane("conv_k", 2 * 4, 4, rows=3),
        Plane("conv_v", 2 * 6, 8, rows=3),
        Plane("ssm", 4 * 6 * 4, 8),
    ]
    return KVGroup.state("delta", layers=[0, 1, 3], parts=parts, head_groups=head_groups)


# Groups, and every number of ranks that may write and read them.
MODELS: dict[str, tuple[list[KVGroup], list[int]]] = {
    "bf16": ([attention(head_groups=8)], [8, 4, 2, 1]),
    "more ranks than head groups": ([attention(head_groups=2)], [8, 4, 2, 1]),
    "undivided": ([attention()], [8, 4, 1]),
    "fp8 with scales": ([attention(dtype_bytes=1, scale_bytes=4, head_groups=8)], [8, 4, 2, 1]),
    "int8 with scales": (
        [attention(dtype_bytes=1, scale_bytes=2, content="packed", head_groups=4)],
        [8, 4, 1],
    ),
    "fewer heads than ranks": ([attention(heads=4, head_groups=4)], [16, 8, 4, 2, 1]),
    "more ranks than layers": ([attention(heads=2, layers=3, head_groups=2)], [16, 2, 1]),
    "latent": (latent(), [8, 4, 3, 1]),
    "shapes that alternate": (
        [
            attention("full", layers=[0, 2], heads=2, head_groups=2),
            attention("small", layers=[1, 3, 4], heads=8, head_dim=2, head_groups=2),
            KVGroup.opaque("block", layers=[1], row_bytes=7, page_tokens=2, unit_tokens=2),
        ],
        [8, 4, 2, 1],
    ),
    "head groups in head groups": (
        [
            attention("fine", layers=[0, 2], head_groups=8),
            attention("coarse", layers=[1, 3], heads=2, head_groups=2),
            KVGroup.opaque("indexer", layers=[3], row_bytes=132, page_tokens=2),
        ],
        [16, 8, 4, 2, 1],
    ),
    "six heads": ([attention(heads=6, head_groups=3)], [12, 6, 3, 2, 1]),
    "window": ([attention(rule=Rule.window(6), head_groups=4)], [8, 4, 1]),
    "opaque blocks": (
        [KVGroup.opaque("block", layers=3, row_bytes=192, page_tokens=128, unit_tokens=64)],
        [4, 1],
    ),
    "state": ([state(4)], [8, 4, 2, 1]),
    "state of one group": ([state(1)], [8, 2, 1]),
}


@pytest.mark.parametrize(("groups", "ranks"), MODELS.values(), ids=MODELS.keys())
def test_written_by_some_ranks_and_read_by_others(groups: list[KVGroup], ranks: list[int]) -> None:
    geometry = PageGeometry(groups)
    model = random_model(geometry)
    right = packed(geometry, model)
    everything = [geometry.layers]
    for writers in ranks:
        page = write(geometry, model, writers, everything)
        np.testing.assert_array_equal(page[: right.nbytes], right)
    for readers in ranks:
        read(geometry, page, model, readers, everything)


@pytest.mark.parametrize(("groups", "ranks"), MODELS.values(), ids=MODELS.keys())
def test_pipeline_stages_times_ranks(groups: list[KVGroup], ranks: list[int]) -> None:
    """Stages of 2, 1 and the other layers write; two other stages read."""
    geometry = PageGeometry(groups)
    model = random_model(geometry)
    layers = geometry.layers
    page = write(geometry, model, ranks[0], [layers[:2], layers[2:3], layers[3:]])
    np.testing.assert_array_equal(page[: geometry.used_bytes], packed(geometry, model))
    read(geometry, page, model, ranks[-2], [layers[:1], layers[1:]])


def test_a_share_is_contiguous_where_the_page_is_divided_enough() -> None:
    """One copy for each rank: 1 MiB of 8, in the order of ranks; and for a stage of it."""
    llama = attention(layers=32, heads=8, head_dim=128, page_tokens=64, head_groups=8)
    geometry = PageGeometry([llama])
    mib = 1 << 20
    assert [geometry.share(rank, 8).ranges for rank in range(8)] == [
        ((rank * mib, mib),) for rank in range(8)
    ]
    assert geometry.share(1, 2).ranges == ((4 * mib, 4 * mib),)
    assert geometry.share(3, 8, layers=range(16, 32)).ranges == ((7 * mib // 2, mib // 2),)
    assert geometry.share().ranges == ((0, 8 * mib),)
    # Beside a group of 2 heads, each of which four ranks have: that piece, and one's own.
    both = PageGeometry(
        [llama, attention("few", layers=1, heads=2, head_dim=64, page_tokens=64, head_groups=2)]
    )
    assert both.share(6, 8).ranges == ((4 * mib + 16384, 16384), (6 * mib + 32768, mib))
    # More ranks than heads: the layers of a head in two halves.
    assert geometry.share(7, 16, writing=True).ranges == ((7 * mib // 2, mib // 2),)
    assert geometry.share(7, 16).ranges == ((3 * mib, mib),)


def test_undivided_pages_have_pieces() -> None:
    """Without head groups a rank has a piece of each token: 2 of 8 heads of 6 bytes."""
    geometry = PageGeometry([attention(layers=1)])
    pieces = tuple((12 + 48 * row, 12) for row in range(4))  # 2 planes of 2 tokens
    assert geometry.share(1, 4).ranges == pieces
    assert geometry.share(1, 4).nbytes == 48


def test_cells_name_heads_of_the_model_and_of_the_rank() -> None:
    """Rank 1 of 2 has heads 4 to 7: two cells of two head groups, for one plane of one layer."""
    geometry = PageGeometry([attention(layers=1, content="packed", head_groups=4)])
    cells = geometry.share(1, 2).cells
    assert [(cell.head, cell.own_head, cell.heads) for cell in cells] == [(4, 0, 2), (6, 2, 2)]
    assert all(cell.contiguous for cell in cells)
    assert not any(cell.contiguous for cell in geometry.share(0, 8).cells)
    state_cells = PageGeometry([state(1)]).share(1, 8).cells
    assert all(cell.contiguous for cell in state_cells)  # one unit: nothing to be apart from


def test_latent_caches_are_split_by_layer() -> None:
    """61 layers on 8 ranks: nobody writes more than one layer more than another."""
    geometry = PageGeometry(latent(61))
    shares = [geometry.share(rank, 8, writing=True) for rank in range(8)]
    counts = [len(share.layers) for share in shares]
    assert sum(counts) == 61
    assert set(counts) == {7, 8}
    assert all(len(share.ranges) == 2 for share in shares)  # latent and indexer
    for share in shares:  # both groups of a layer belong to one rank
        assert len(share.cells) == 2 * len(share.layers)
    assert geometry.share(5, 8).ranges == ((0, geometry.used_bytes),)


def test_a_rank_may_have_nothing_to_write() -> None:
    geometry = PageGeometry([attention(heads=1, layers=2, content="single")])
    shares = [geometry.share(rank, 4, writing=True) for rank in range(4)]
    empty = [share for share in shares if not share.cells]
    assert len(empty) == 2
    assert (empty[0].nbytes, empty[0].ranges, empty[0].layers) == (0, (), ())
    assert empty[0].windows(2) == []
    assert geometry.share(layers=[7]).cells == ()


def test_windows_partition_a_share() -> None:
    geometry = PageGeometry([attention(layers=[1, 2, 5, 7, 8], head_groups=4)])
    share = geometry.share(2, 4)
    windows = share.windows(2)
    assert [part.layers for part in windows] == [(1, 2), (5, 7), (8,)]
    assert sum(part.nbytes for part in windows) == share.nbytes
    np.testing.assert_array_equal(sum(map(touched, windows)), touched(share))
    for part in windows:
        np.testing.assert_array_equal(
            touched(part), touched(geometry.share(2, 4, layers=part.layers))
        )
    assert share.window([5, 99]).layers == (5,)
    assert all(part.geometry is geometry for part in windows)


def test_held_heads_are_those_of_the_engines() -> None:
    for heads in (1, 2, 4, 8):
        plane = Plane("k", 4, heads)
        for ranks in (1, 2, 4, 8, 16):
            seen: dict[int, list[int]] = {}
            for rank in range(ranks):
                held = held_heads(plane, rank, ranks)
                assert slice(held.first, held.first + held.count) == heads_of(plane, rank, ranks)
                seen.setdefault(held.first, []).append(held.copy)
                assert held.copies == max(1, ranks // heads)
            assert all(copies == list(range(len(copies))) for copies in seen.values())


def test_hybrid_models_move_in_parts() -> None:
    """Windows, states and full attention: each geometry of a split is written and read alone."""
    groups = [
        attention("near", layers=[1], rule=Rule.window(4)),
        attention("full", layers=[0]),
        state(2),
    ]
    made = split(groups)
    assert [geometry.rule for geometry in made] == [Rule.window(4), groups[1].rule, Rule.point()]
    for geometry in made:
        model = random_model(geometry)
        page = write(geometry, model, 8, [[0, 1], [2, 3]])
        read(geometry, page, model, 2, [[0, 1, 2, 3]])


@st.composite
def geometries(draw: st.DrawFn) -> PageGeometry:
    """One to three groups of random shapes, whose heads any power of 2 of ranks divides."""
    head_groups = draw(st.sampled_from([1, 2, 4]))
    tokens = draw(st.sampled_from([1, 2, 4]))
    groups = []
    for number in range(draw(st.integers(1, 3))):
        layers = sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=4)))
        shared = draw(st.booleans())
        parts = 1 if shared else draw(st.sampled_from([n for n in (1, 2, 4) if n <= head_groups]))
        planes = [
            Plane(
                f"p{which}",
                draw(st.integers(1, 9)),
                1 if shared else max(2, head_groups) * draw(st.sampled_from([1, 2])),
                draw(st.sampled_from([unit for unit in (1, 2, 4) if unit <= tokens])),
                draw(st.integers(1, 2)),
            )
            for which in range(draw(st.integers(1, 3)))
        ]
        groups.append(
            KVGroup(f"g{number}", tuple(layers), tuple(planes), tokens, head_groups=parts)
        )
    return PageGeometry(groups)


@st.composite
def stages(draw: st.DrawFn, geometry: PageGeometry) -> list[list[int]]:
    """Each layer in one of up to three stages, not even in order."""
    where = [draw(st.integers(0, 2)) for _ in geometry.layers]
    return [
        [layer for layer, at in zip(geometry.layers, where, strict=True) if at == stage]
        for stage in range(3)
    ]


@pytest.mark.slow
@settings(deadline=None)  # nothing here is timed
@given(st.data())
def test_any_ranks_and_stages_write_once_and_read_what_is_theirs(data: st.DataObject) -> None:
    geometry = data.draw(geometries())
    counts = st.sampled_from([1, 2, 4, 8, 16])
    model = random_model(geometry)
    page = write(geometry, model, data.draw(counts), data.draw(stages(geometry)))
    np.testing.assert_array_equal(page[: geometry.used_bytes], packed(geometry, model))
    read(geometry, page, model, data.draw(counts), data.draw(stages(geometry)))
