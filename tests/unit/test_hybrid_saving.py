"""Save plans: case by case, and over whole prompts cut in any way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hybrid.saving import Grid, SavePlan, SavePolicy, Saves, Stretch, decode_saves

INTERIOR, END_ONLY = Saves.INTERIOR, Saves.END_ONLY
GRID = Grid(16, 64)  # saves at multiples of 64, keys at multiples of 16
WIDE = Grid(128, 128)  # chunks of 64 within a grid of 128
ODD = Grid(528, 528)  # a grid that no chunk ends on


def planned(policy: SavePolicy, *where: int, **more: Any) -> tuple[Any, ...]:
    plan = policy.plan(Stretch(*where, **more))
    return plan.position, plan.offset, plan.end, plan.final, plan.needed


CASES = {
    # name: (grid, begin, end, prompt, more), what interior engines do, what end-only ones do
    "short": ((GRID, 0, 63, 63, {}), (None, None, 63), (None, None, 63)),
    "end on the grid": ((GRID, 0, 128, 128, {}), (128, 128, 128), (128, 128, 128)),
    "last inside": ((GRID, 0, 150, 150, {}), (128, 128, 150), (128, 128, 128)),
    "not the last": ((GRID, 0, 150, 900, {}), (128, 128, 150), (128, 128, 128)),
    "last was before": ((GRID, 128, 150, 150, {}), (None, None, 150), (None, None, 150)),
    "branching inside": ((GRID, 0, 150, 900, {"branching": 64}), (64, 64, 150), (64, 64, 64)),
    "branching at the end": (
        (GRID, 0, 128, 900, {"branching": 128}),
        (128, 128, 128),
        (128, 128, 128),
    ),
    "branching later": ((GRID, 0, 150, 900, {"branching": 192}), (128, 128, 150), (128, 128, 128)),
    "branching before": (
        (GRID, 128, 300, 900, {"branching": 64}),
        (256, 128, 300),
        (256, 128, 256),
    ),
    "branching and last": (
        (GRID, 0, 400, 400, {"branching": 64}),
        (64, 64, 320),  # two passes: the second saves 384
        (64, 64, 64),
    ),
    "branching is the last": (
        (GRID, 0, 150, 150, {"branching": 128}),
        (128, 128, 150),
        (128, 128, 128),
    ),
    "matched": ((GRID, 64, 100, 100, {"matched": 64}), (None, None, 100), (None, None, 100)),
    "matched beyond": ((GRID, 0, 150, 900, {"matched": 128}), (None, None, 150), (None, None, 150)),
    "branching matched": (
        (GRID, 0, 300, 900, {"matched": 64, "branching": 64}),
        (256, 256, 300),
        (256, 256, 256),
    ),
    "begin off the grid": ((GRID, 100, 300, 900, {}), (256, 156, 256), (256, 156, 256)),
    "begin off, end on": ((GRID, 100, 256, 900, {}), (256, 156, 256), (256, 156, 256)),
    "begin a chunk off": ((WIDE, 64, 300, 900, {}), (256, 192, 300), (256, 192, 256)),
    "no chunk ends there": ((ODD, 0, 600, 600, {}), (528, 528, 528), (528, 528, 528)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_stretch(case: Any) -> None:
    (grid, begin, end, prompt, more), interior, end_only = case
    for saves, wanted in ((INTERIOR, interior), (END_ONLY, end_only)):
        found = planned(SavePolicy(grid, saves), begin, end, prompt, **more)
        assert found[:3] == wanted, saves
        assert found[3] == (wanted[0] == wanted[2])


def test_the_tail_ends_at_the_last_key() -> None:
    for saves in Saves:
        policy = SavePolicy(GRID, saves, tail=True)
        assert planned(policy, 0, 150, 150) == (144, 144, 144, True, True)
        assert planned(policy, 144, 150, 150) == (None, None, 150, False, False)
        assert planned(policy, 128, 144, 144) == (144, 16, 144, True, True)
        assert policy.last(150) == 144
    # With the branching point before it there are two passes more.
    policy = SavePolicy(GRID, INTERIOR, tail=True)
    assert planned(policy, 0, 150, 150, branching=64) == (64, 64, 128, False, True)
    assert planned(policy, 128, 150, 150, branching=64) == (144, 16, 144, True, True)


def test_without_those_between_only_two_are_saved() -> None:
    policy = SavePolicy(GRID, INTERIOR, between=False)
    assert planned(policy, 0, 150, 900, branching=512)[0] is None
    assert planned(policy, 500, 700, 900, branching=512) == (512, 12, 512, True, True)
    assert planned(policy, 700, 900, 900, branching=512) == (896, 196, 896, True, True)


def test_what_is_needed_is_said() -> None:
    policy = SavePolicy(GRID, INTERIOR)
    assert not policy.plan(Stretch(0, 150, 900)).needed
    assert policy.plan(Stretch(0, 150, 900, branching=64)).needed
    assert policy.plan(Stretch(0, 150, 150)).needed
    assert policy.plan(Stretch(0, 150, 900)) == SavePlan(0, 150, 128)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[SavePolicy, int, int, int | None, list[int]]:
    """A policy, a prompt's tokens, what was matched, its branching point, and sizes of passes."""
    grid = draw(
        st.builds(
            lambda small, times, swap, chunk: Grid(
                *((small, small * times) if swap else (small * times, small)), chunk=chunk
            ),
            st.sampled_from([1, 3, 4, 12]),
            st.integers(1, 4),
            st.booleans(),
            st.sampled_from([1, 4, 6]),
        )
    )
    policy = SavePolicy(
        grid, draw(st.sampled_from(Saves)), draw(st.booleans()), draw(st.booleans())
    )
    prompt = draw(st.integers(1, 12 * grid.grid))
    matched = draw(st.integers(0, prompt // grid.fine)) * grid.fine
    if matched == prompt:
        matched = 0
    kv = draw(st.integers(matched, prompt))
    sizes = st.integers(1, 4 * grid.grid) | st.integers(1, 4).map(lambda n: n * grid.grid)
    return policy, prompt, matched, grid.branching(kv, matched), draw(st.lists(sizes, min_size=1))


@given(prompts())
@example((SavePolicy(GRID, INTERIOR), 400, 0, 64, [400]))
@example((SavePolicy(ODD, INTERIOR), 1700, 0, 528, [1700]))
def test_over_any_stretches_what_is_needed_is_saved(case: Any) -> None:
    policy, prompt, matched, branching, sizes = case
    grid, begin, saved, passes = policy.grid, matched, [], 0
    while begin < prompt:
        end = min(prompt, begin + sizes[passes % len(sizes)])
        plan = policy.plan(Stretch(begin, end, prompt, matched, branching))
        assert plan.begin == begin < plan.end <= end
        if plan.position is None:
            assert plan.end == end
        else:
            assert begin < plan.position <= plan.end  # one number: never two in one pass
            assert plan.position % grid.fine == 0
            reached = plan.position == plan.end
            if policy.saves is INTERIOR:
                reached = reached or (plan.position - begin) % grid.model_chunk == 0
            assert reached
            saved.append(plan.position)
            assert plan.needed == (plan.position in (branching, policy.last(prompt)))
        begin, passes = plan.end, passes + 1
    assert saved == sorted(set(saved))
    assert all(position > matched for position in saved)
    last = policy.last(prompt)
    needed = {position for position in (branching, last) if position and position > matched}
    assert needed <= set(saved)
    if not policy.between:
        assert set(saved) == needed
    if policy.tail:
        assert prompt - max(saved, default=matched) < grid.fine or last <= matched
    else:
        assert all(position % grid.grid == 0 for position in saved)


@given(prompts())
def test_an_engine_that_saves_inside_needs_few_more_passes(case: Any) -> None:
    """On a grid of whole chunks, and for begins on it, only a second save costs a pass."""
    policy, prompt, matched, branching, _ = case
    grid = policy.grid
    policy = SavePolicy(grid, INTERIOR)
    if grid.grid % grid.model_chunk or matched % grid.grid:
        return
    begin, passes = matched, 0
    while begin < prompt:
        begin = policy.plan(Stretch(begin, prompt, prompt, matched, branching)).end
        passes += 1
    both = branching is not None and branching < policy.last(prompt)
    assert passes == (2 if both else 1)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ((5, 5, 9), "begin < end"),
        ((-1, 5, 9), "begin < end"),
        ((0, 10, 9), "end <= prompt"),
        ((0, 5.0, 9), "counts of tokens"),
        ((0, 5, None), "counts of tokens"),
        ((0, 5, 9, 10), "matched=10"),
        ((0, 5, 9, -1), "matched=-1"),
        ((0, 5, 9, 0, 10), "branching=10"),
        ((0, 5, 9, 0, "x"), "counts of tokens"),
    ],
)
def test_stretches_that_are_none(where: Any, what: str) -> None:
    refused(ConfigError, what, Stretch, *where)


def test_policies_that_are_none() -> None:
    refused(ConfigError, "expected a Saves", SavePolicy, GRID, "interior")
    with pytest.raises(ConfigError, match="grid of 64 tokens, found 80"):
        SavePolicy(GRID, INTERIOR).plan(Stretch(0, 100, 100, 0, 80))


# ---- decoding


def test_decoding_saves_where_it_crosses_the_interval() -> None:
    found = decode_saves(GRID, [254, 255, 256, 250, 0], [255, 256, 257, 259, 600])
    assert (found.rows.tolist(), found.positions.tolist()) == ([1, 3, 4], [256, 256, 512])
    assert (found.behind.tolist(), len(found)) == ([0, 3, 88], 3)
    assert len(decode_saves(GRID, [], [])) == 0
    assert decode_saves(GRID, np.array([255], np.uint32), np.array([256], np.int32)).rows.size == 1


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 600)), min_size=1))
def test_decoding_against_a_loop(steps: list[tuple[int, int]]) -> None:
    before = [begin for begin, _ in steps]
    after = [begin + more for begin, more in steps]
    wanted = []
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        crossed = [n for n in range(old + 1, new + 1) if n % GRID.interval == 0]
        if crossed:
            wanted.append((row, crossed[-1], new - crossed[-1]))
    found = decode_saves(GRID, before, after)
    rows = zip(found.rows.tolist(), found.positions.tolist(), found.behind.tolist(), strict=True)
    assert list(rows) == wanted


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ([1, 2], [1], "one length"),
        ([[1]], [[2]], "whole numbers|of one length"),
        ([1.0], [2.0], "whole numbers|of one length"),
        ([1, 9], [2, 8], "row 1 goes back from 9 to 8"),
    ],
)
def test_steps_that_are_none(before: Any, after: Any, what: str) -> None:
    refused(ConfigError, what, decode_saves, GRID, before, after)
