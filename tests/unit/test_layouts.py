"""Layouts of engines: every row is where its description says, compared with plain indexing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from support.devices import check, move
from support.layouts import CASES, Case, random
from support.pages import POISON, copy

from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.layouts import Shard, sglang, vllm

Make = Callable[[str, int], Case]


@pytest.mark.parametrize("dim", [3, 8])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_rows_are_where_the_description_says(make: Make, dim: int) -> None:
    case = make("cpu", dim)
    assert case.planes.device == "cpu"
    check(case.planes, case.read())


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_planes_hold_the_share_of_their_shard(make: Make) -> None:
    """Pages are written from the described planes, and read into other slots."""
    case = make("cpu", 4)
    share = case.shard.share()
    (units,) = {cell.units for cell in share.cells}  # the same for all planes of these cases
    rows = case.read()
    there = min(len(found) for found in rows.values())
    slots, places = (
        np.random.default_rng(seed).permutation(there)[:units].tolist() for seed in (0, 1)
    )
    page, right = (np.full(share.geometry.page_bytes, POISON, np.uint8) for _ in range(2))
    move(share, page, case.planes, slots, to_page=True)
    copy(share, right, {place: found[slots] for place, found in rows.items()}, to_page=True)
    np.testing.assert_array_equal(page, right)
    for tensor in case.tensors:
        tensor.view(torch.uint8).fill_(POISON)
    move(share, page, case.planes, places, to_page=False)
    for place, found in case.read().items():
        expected = np.full_like(found, POISON)
        expected[places] = rows[place][slots]
        np.testing.assert_array_equal(found, expected, str(place))


@pytest.mark.parametrize("order", list(permutations("lbhn")), ids="".join)
def test_axes_in_any_order(order: tuple[str, ...]) -> None:
    """What matters is which letter stands for which axis."""
    sizes = {"l": 2, "b": 5, "h": 2, "n": 4}
    tensor = random((*(sizes[letter] for letter in order), 3))
    group = KVGroup.attention(
        "kv", layers=2, heads=2, head_dim=3, dtype_bytes=2, page_tokens=8, content="single"
    )
    mine = Shard(PageGeometry([group]))
    logical = tensor.permute(*(order.index(letter) for letter in "lbnh"), 4)
    raw = logical.contiguous().view(torch.uint8).reshape(2, 20, 1, 2, 6).numpy()
    rows = {("kv", layer, "kv"): raw[layer] for layer in range(2)}
    check(vllm(mine, "kv", tensor, axes="".join(order) + "c"), rows)


def test_pages_pass_from_one_engine_to_another() -> None:
    """Written by two ranks of vLLM (HND), read by four of SGLang, heads and slots as they are."""
    group = KVGroup.attention(
        "kv", layers=2, heads=8, head_dim=3, dtype_bytes=2, page_tokens=8, head_groups=8
    )
    geometry = PageGeometry([group])
    caches = [[random((2, 5, 4, 4, 3)).transpose(2, 3) for _ in "01"] for _ in "01"]
    page = np.zeros(geometry.page_bytes, np.uint8)
    slots = [13, 2, 3, 19, 0, 7, 6, 5]
    for rank, tensors in enumerate(caches):
        mine = Shard(geometry, rank, 2)
        move(mine.share(writing=True), page, vllm(mine, "kv", tensors), slots, to_page=True)
    places = [4, 1, 9, 8, 7, 11, 3, 10]
    for rank in range(4):
        k, v = ([torch.zeros(12, 2, 3, dtype=torch.bfloat16) for _ in "01"] for _ in "kv")
        mine = Shard(geometry, rank, 4)
        move(mine.share(), page, sglang(mine, "kv", k, v), places, to_page=False)
        for layer in range(2):
            for half, tensor in enumerate((k[layer], v[layer])):
                both = torch.cat([caches[other][layer][half] for other in range(2)], dim=2)
                right = both.reshape(-1, 8, 3)[slots, 2 * rank : 2 * rank + 2]
                found = tensor[places]
                assert torch.equal(found.view(torch.uint8), right.contiguous().view(torch.uint8))
                tensor[places] = 0
                assert not tensor.view(torch.uint8).any()
