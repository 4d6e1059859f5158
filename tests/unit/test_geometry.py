"""The format of a page, byte by byte, against pages that are packed the slow way."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.pages import packed, random_model, write
from support.refusals import refused

from lightcache.kernels import geometry as module
from lightcache.kernels.geometry import (
    KVGroup,
    PageGeometry,
    Plane,
    Rule,
    held_heads,
    split,
)
from lightcache.shm.errors import ConfigError


def attention(name: str = "kv", **changes: Any) -> KVGroup:
    values = {"layers": 3, "heads": 4, "head_dim": 4, "dtype_bytes": 2, "page_tokens": 2}
    return KVGroup.attention(name, **{**values, **changes})


def test_attention_page_is_one_transpose() -> None:
    """Eight groups of 8 heads, as numpy orders them: [head_group][layer][K|V][token][head][dim]."""
    layers, heads, dim, tokens, groups = 4, 8, 16, 8, 4
    kv = attention(layers=4, heads=8, head_dim=16, page_tokens=8, head_groups=groups)
    geometry = PageGeometry([kv])
    model = random_model(geometry)
    tensor = np.stack([[model["kv", layer, plane] for plane in "kv"] for layer in range(layers)])
    assert tensor.shape == (layers, 2, tokens, 1, heads, dim * 2)
    apart = tensor.reshape(layers, 2, tokens, groups, heads // groups, dim * 2)
    page = apart.transpose(3, 0, 1, 2, 4, 5).reshape(-1)
    assert geometry.used_bytes == geometry.page_bytes == page.nbytes == 16384
    np.testing.assert_array_equal(write(geometry, model, 1, [range(layers)]), page)


def test_known_sizes() -> None:
    """Pages of models that people run, computed by hand."""
    llama = attention(layers=32, heads=8, head_dim=128, page_tokens=64)
    assert PageGeometry([llama]).page_bytes == 8 << 20
    latent = attention("latent", layers=61, heads=1, head_dim=576, page_tokens=64, content="single")
    assert PageGeometry([latent]).used_bytes == 61 * 64 * 1152
    indexer = KVGroup.opaque("indexer", layers=61, row_bytes=132, page_tokens=64)
    assert PageGeometry([latent, indexer]).used_bytes == 61 * 64 * (1152 + 132)
    scaled = attention(layers=32, heads=8, head_dim=128, dtype_bytes=1, scale_bytes=4)
    assert PageGeometry([scaled]).used_bytes == 32 * 2 * 2 * 8 * (128 + 4)
    both = attention(dtype_bytes=1, content="packed", scale_bytes=4)
    assert [plane.row_bytes for plane in both.planes] == [8, 8]


GROUPS = {
    "bf16": [attention(head_groups=4)],
    "one head group": [attention()],
    "K and V of two sizes": [attention(value_dim=3, head_groups=2)],
    "packed": [attention(content="packed", value_dim=2, head_groups=2)],
    "fp8 with scales": [attention(dtype_bytes=1, scale_bytes=4, head_groups=4)],
    "packed int8 with scales": [attention(dtype_bytes=1, content="packed", scale_bytes=2)],
    "latent": [attention(heads=1, content="single", head_dim=9)],
    "opaque rows": [KVGroup.opaque("indexer", layers=2, row_bytes=132, page_tokens=4)],
    "opaque blocks": [
        KVGroup.opaque("block", layers=2, row_bytes=132 * 64, page_tokens=128, unit_tokens=64)
    ],
    "shapes that alternate": [
        attention("full", layers=[0, 2], heads=2, head_dim=8, head_groups=2),
        attention("small", layers=[1, 3, 4], heads=4, dtype_bytes=1, head_groups=2),
    ],
    "replicated last": [
        attention(head_groups=2),
        attention("latent", heads=1, content="single"),
        KVGroup.opaque("indexer", layers=[1], row_bytes=5, page_tokens=2),
    ],
    "head groups in head groups": [
        attention("fine", head_groups=4),
        attention("coarse", heads=2, head_groups=2),
        attention("undivided", layers=[5]),
        attention("latent", heads=1, content="single"),
    ],
    "state": [
        KVGroup.state(
            "delta",
            layers=[0, 1, 3],
            parts=[
                Plane("conv_q", 2 * 4, 4, rows=3),
                Plane("conv_k", 2 * 4, 4, rows=3),
                Plane("conv_v", 2 * 6, 8, rows=3),
                Plane("ssm", 4 * 6 * 4, 8),
            ],
            head_groups=4,
        )
    ],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_rows_lie_in_the_documented_order(groups: list[KVGroup]) -> None:
    geometry = PageGeometry(groups)
    model = random_model(geometry)
    right = packed(geometry, model)
    assert geometry.used_bytes == right.nbytes
    page = write(geometry, model, 1, [geometry.layers])
    np.testing.assert_array_equal(page[: right.nbytes], right)


def test_padding() -> None:
    """A multiple of the OS page where that costs little; of 16 where it would cost much."""
    sizes = {4096: 4096, 4096 * 16 - 1000: 4096 * 16, 4097: 4112, 10: 16, 132 * 64: 132 * 64}
    for used, padded in sizes.items():
        group = KVGroup.opaque("o", layers=1, row_bytes=used, page_tokens=1)
        assert PageGeometry([group]).page_bytes == padded
        assert PageGeometry([group], align=1).page_bytes == used
        assert PageGeometry([group], align=2 << 20).page_bytes == 2 << 20


def test_split_makes_a_geometry_for_each_rule_and_page_size() -> None:
    """A hybrid model: full layers, two windows, states; each layer is in one geometry."""
    groups = [
        attention("full", layers=[0, 4]),
        attention("near", layers=[1, 5], rule=Rule.window(128)),
        attention("far", layers=[2], rule=Rule.window(4096)),
        attention("wide", layers=[6], head_dim=8),
        attention("coarse", layers=[7], page_tokens=4),
        KVGroup.state("ssm", layers=[3], parts=[Plane("ssm", 64, 4)]),
        attention("near2", layers=[8], rule=Rule.window(128)),
    ]
    made = split(groups)
    assert [[group.name for group in geometry.groups] for geometry in made] == [
        ["full", "wide"],
        ["near", "near2"],
        ["far"],
        ["coarse"],
        ["ssm"],
    ]
    rules = [Rule.prefix(), Rule.window(128), Rule.window(4096), Rule.prefix(), Rule.point()]
    assert [geometry.rule for geometry in made] == rules
    assert [geometry.page_tokens for geometry in made] == [2, 2, 2, 4, 1]
    # A stage's layers serve all of them; together its shares have its layers, and no other.
    held = [layer for one in made for layer in one.share(1, 2, layers=range(4, 9)).layers]
    assert sorted(held) == [4, 5, 6, 7, 8]


def test_fingerprint_and_equality_follow_the_bytes() -> None:
    same, again = (PageGeometry([attention(head_groups=2)]) for _ in range(2))
    assert same == again == pickle.loads(pickle.dumps(same))
    assert hash(same) == hash(again)
    assert same.fingerprint() == again.fingerprint()
    others = [
        *(
            PageGeometry([attention(**{"head_groups": 2, **change})])
            for change in (
                {"layers": [0, 1, 3]},
                {"heads": 8},
                {"head_dim": 5},
                {"dtype_bytes": 1},
                {"page_tokens": 4},
                {"value_dim": 5},
                {"content": "packed"},
                {"scale_bytes": 2},
                {"rule": Rule.window(2)},
                {"rule": Rule.window(3)},
                {"head_groups": 4},
                {"name": "other"},
            )
        ),
        PageGeometry([attention(head_groups=2)], align=8192),
        PageGeometry([attention(head_groups=2), attention("second", heads=1)]),
        PageGeometry([KVGroup.opaque("a", layers=1, row_bytes=4, page_tokens=4)]),
        PageGeometry([KVGroup.opaque("a", layers=1, row_bytes=4, page_tokens=4, unit_tokens=2)]),
        PageGeometry([KVGroup("a", (0,), (Plane("opaque", 4, rows=2),), 4)]),
        *(PageGeometry([KVGroup("a", (0,), (Plane("k", 1, heads),), 1)]) for heads in (2, 4)),
    ]
    assert len({geometry.fingerprint() for geometry in [same, *others]}) == len(others) + 1
    assert all(geometry != same for geometry in others)
    assert same != "geometry"


def test_lists_become_tuples() -> None:
    planes: Any = [Plane("k", 4, 2)]
    layers: Any = range(2)
    group = KVGroup("kv", layers, planes, 2)
    assert (group.layers, group.planes) == ((0, 1), (Plane("k", 4, 2),))
    assert hash(group) == hash(KVGroup("kv", (0, 1), (Plane("k", 4, 2),), 2))
    assert group.plane("k") is group.planes[0]
    assert PageGeometry([group]).group("kv") is group


K = Plane("k", 4, 4)
none: Any = None
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "row of no bytes": (lambda: Plane("k", 0), "row_bytes: expected .* >= 1, found 0"),
    "row of half bytes": (lambda: Plane("k", 1.5), "row_bytes: expected .*, found 1.5"),
    "no heads": (lambda: Plane("k", 1, 0), "'k': heads: expected .*, found 0"),
    "a boolean": (lambda: Plane("k", 1, True), "heads: expected .*, found True"),
    "no rows": (lambda: Plane("k", 1, rows=-1), "rows: expected .*, found -1"),
    "nameless plane": (lambda: Plane("", 1), "plane: expected a name .*, found ''"),
    "separator in a name": (lambda: Plane("k,v", 1), "expected letters, .* found 'k,v'"),
    "name that is none": (lambda: KVGroup(none, (0,), (K,), 2), "group: expected a name"),
    "no layers": (lambda: attention(layers=0), "layers: expected .*, found 0"),
    "empty layers": (lambda: attention(layers=[]), r"must ascend, each once, found \(\)"),
    "a layer twice": (lambda: attention(layers=[0, 1, 1]), r"found \(0, 1, 1\)"),
    "layers descend": (lambda: attention(layers=[1, 0]), r"must ascend.*found \(1, 0\)"),
    "layer below 0": (lambda: attention(layers=[-1, 0]), "layer: expected .* >= 0, found -1"),
    "layers of text": (lambda: attention(layers="01"), "expected numbers of layers, found '01'"),
    "layers of nothing": (lambda: KVGroup("a", none, (K,), 2), "numbers of layers, found None"),
    "no planes": (lambda: KVGroup("a", (0,), (), 2), "at least one.*found \\[\\]"),
    "a plane twice": (lambda: KVGroup("a", (0,), (K, K), 2), r"own name, found \['k', 'k'\]"),
    "planes of text": (lambda: KVGroup("a", (0,), ("k",), 2), "expected Plane, found 'k'"),
    "no tokens": (lambda: attention(page_tokens=0), "page_tokens: expected .*, found 0"),
    "units do not tile": (
        lambda: KVGroup.opaque("a", layers=1, row_bytes=1, page_tokens=96, unit_tokens=64),
        "page_tokens must be a multiple of the 64 tokens .*, found 96",
    ),
    "head groups": (lambda: attention(head_groups=3), "must divide the 4 heads .*, found 3"),
    "one head and several": (
        lambda: KVGroup("a", (0,), (K, Plane("s", 4, 1)), 2),
        r"found \[\('k', 4\), \('s', 1\)\]; give those with one head",
    ),
    "groups of one head": (lambda: attention(heads=1, head_groups=2), "divide the 1 heads"),
    "state of tokens": (
        lambda: KVGroup("a", (0,), (K,), 2, Rule.point()),
        "page_tokens=1, found 2",
    ),
    "rule of text": (lambda: KVGroup("a", (0,), (K,), 2, "prefix"), "found 'prefix'"),
    "rule of a number": (lambda: KVGroup("a", (0,), (K,), 2, 4), "such as .*, found 4"),
    "window of nothing": (lambda: Rule.window(0), "window: expected .*, found 0"),
    "chunk of nothing": (lambda: Rule.chunk(0), "chunk: expected .*, found 0"),
    "window of text": (lambda: Rule.window("4"), "window: expected .*, found '4'"),
    "rule of no align": (lambda: Rule("mine", 0, 0), "rule 'mine': align: expected .*, found 0"),
    "rule of much": (lambda: Rule("mine", 1, 1 << 63), "rule 'mine': back: expected at most"),
    "content": (lambda: attention(content="both"), "single, found 'both'"),
    "single with a value": (lambda: attention(content="single", value_dim=2), "found 2"),
    "no dim": (lambda: attention(head_dim=0), "head_dim: expected .*, found 0"),
    "no value dim": (lambda: attention(value_dim=0), "value_dim: expected .*, found 0"),
    "no width": (lambda: attention(dtype_bytes=0), "dtype_bytes: expected .*, found 0"),
    "scale": (lambda: attention(scale_bytes=-1), "scale_bytes: expected .* >= 0, found -1"),
    "page of nothing": (lambda: PageGeometry([]), r"at least one, .* found \[\]"),
    "page of text": (lambda: PageGeometry("kv"), "expected KVGroup, found 'k'"),
    "a group twice": (lambda: PageGeometry([attention()] * 2), r"found \['kv', 'kv'\]"),
    "group without a list": (lambda: split(K), "expected KVGroup, found Plane"),
    "two rules": (
        lambda: PageGeometry([attention(), attention("w", rule=Rule.window(8))]),
        r"one rule and one page_tokens, found .*'prefix', 2\), \('window8', 2\).*`split`",
    ),
    "two page sizes": (
        lambda: PageGeometry([attention(), attention("w", page_tokens=4)]),
        r"found .*\('prefix', 2\), \('prefix', 4\)",
    ),
    "two head groups": (
        lambda: PageGeometry(
            [attention(heads=12, head_groups=part, name=f"g{part}") for part in (1, 2, 3)]
        ),
        r"divide the largest one, found \[1, 2, 3\]",
    ),
    "too large": (lambda: PageGeometry([attention(head_dim=1 << 40)]), "expected at most .* found"),
    "align": (lambda: PageGeometry([attention()], align=0), "align: expected .*, found 0"),
    "split of nothing": (lambda: split([]), "groups of a model: expected at least one"),
    "unknown group": (lambda: PageGeometry([attention()]).group("x"), r"\['kv'\], found 'x'"),
    "unknown plane": (lambda: attention().plane("x"), r"\['k', 'v'\], found 'x'"),
    "rank": (lambda: PageGeometry([attention()]).share(4, 4), "rank: expected 0 to 3, found 4"),
    "rank below 0": (lambda: PageGeometry([attention()]).share(-1, 4), "0 to 3, found -1"),
    "rank of text": (lambda: held_heads(K, "0", 1), "rank: expected 0 to 0, found '0'"),
    "no ranks": (lambda: PageGeometry([attention()]).share(0, 0), "ranks: expected .*, found 0"),
    "ranks do not divide": (
        lambda: PageGeometry([attention()]).share(0, 3),
        "4 heads of plane 'k' cannot be divided among 3 ranks; choose",
    ),
    "ranks are no multiple": (lambda: held_heads(K, 0, 6), "among 6 ranks"),
    "share of one layer": (lambda: PageGeometry([attention()]).share(layers=1), "found 1"),
    "share of layer -1": (lambda: PageGeometry([attention()]).share(layers=[-1]), "found -1"),
    "window of layer x": (lambda: PageGeometry([attention()]).share().window(["x"]), "found 'x'"),
    "windows of none": (lambda: PageGeometry([attention()]).share().windows(0), "found 0"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(make: Callable[[], object], message: str) -> None:
    refused(ConfigError, message, make)


def test_public_names() -> None:
    assert all(hasattr(module, name) for name in module.__all__)
