"""Matches over groups against an oracle, with random calls and tiny capacities.

LIGHTCACHE_TEST_EXAMPLES chooses how many runs of up to 40 calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from model.groups_machine import (
    EVICT_CHOSEN,
    EVICT_MARKED,
    EVICT_UNLINKED,
    LOCKED,
    PIN_COUNTED,
    TREE,
    WALK_NEXT,
    Dying,
    GroupsMachine,
    Turns,
)
from model.groups_side import Layers
from multi.pausing import BUILD

from lightcache import layout

EXAMPLES = int(os.environ.get("LIGHTCACHE_TEST_EXAMPLES", "60"))
SHARE = 8  # of them in `make test`

pytestmark = pytest.mark.skipif(
    not (BUILD / "_index.so").exists(), reason="no libraries with pause points; run `make test`"
)


@pytest.fixture
def dying() -> Iterator[Dying]:
    """A program whose clients die."""
    made = Dying()
    yield made
    made.close()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """With the core that has pause points."""
    library = layout.load(BUILD / "_index.so")
    monkeypatch.setattr(layout, "load", lambda: library)
    return Turns(library.quick)


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("rules", [("window",), ("prefix", "point"), ("window", "point")], ids=str)
def test_a_page_goes_between_its_look_up_and_its_pin(
    segment_name: str, turns: Turns, dying: Dying, rules: tuple[str, ...], parts: int
) -> None:
    """Wherever the match stands, another client evicts a page until it is in no chain, and the
    match continues. Random turns seldom meet this."""
    for passed in range(1, 13):
        machine = GroupsMachine(segment_name, turns, dying)
        machine.open([Layers(rule, 3, i, "", parts) for i, rule in enumerate(rules)], 1, 12)
        try:
            stops = [(LOCKED, 1), (WALK_NEXT, passed), (EVICT_UNLINKED, 1)]
            machine.match_while(
                count=1,
                end=3,
                kept=False,
                number=len(rules) - 1,
                other=[],
                path=TREE[0],
                served=3,
                step=1,
                turns=stops,
                what="drop",
            )
        finally:
            machine.teardown()


@pytest.mark.parametrize("rule", ["prefix", "window", "point"])
def test_a_part_goes_between_its_pin_and_the_second_look(
    segment_name: str, turns: Turns, dying: Dying, rule: str
) -> None:
    """Another client has chosen the last parts when they are pinned, and marks them."""
    for marked in range(1, 4):
        machine = GroupsMachine(segment_name, turns, dying)
        machine.open([Layers(rule, 3, 0, "", 3)], 1, 12)
        try:
            stops = [(EVICT_CHOSEN, 1), (PIN_COUNTED, 1), (EVICT_MARKED, marked)]
            machine.match_while(
                count=1,
                end=3,
                kept=False,
                number=0,
                other=[],
                path=TREE[0],
                served=3,
                step=1,
                turns=stops,
                what="part",
            )
        finally:
            machine.teardown()


@pytest.mark.timeout(360 + 2 * EXAMPLES)  # 300 s of them to shrink a failure
@pytest.mark.parametrize(
    "examples", [SHARE, pytest.param(EXAMPLES, marks=pytest.mark.slow)], ids=["share", "all"]
)
def test_groups_and_oracle_agree(
    segment_name: str, turns: Turns, dying: Dying, examples: int
) -> None:
    run_state_machine_as_test(
        lambda: GroupsMachine(segment_name, turns, dying),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
