"""What goes wrong in the middle of a hybrid manager's calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.hybrid_case import made_hybrids
from support.manager_case import switch_off, tokens

from lightcache.manager import Prompt, WritePolicy

PROMPT = Prompt(tokens(42))


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Any]:
    yield from made_hybrids(segment_name)


@pytest.mark.parametrize("which", ["host", "device"])
@pytest.mark.parametrize("low_water", [0, 16], ids=["demoted", "low water"])
def test_an_index_that_is_disabled_while_states_are_written_back(
    worlds: Any, which: str, low_water: int
) -> None:
    world = worlds(states={"write": WritePolicy.BACK, "low_water": low_water})
    world.mover.at_once = False
    world.run("a", PROMPT)
    if not low_water:
        assert world.checkpoints.demote(4) == 1
    world.hybrid.poll()
    world.mover.finish()
    index = world.states.index if which == "host" else world.slots
    switch_off(index, 1)
    for _ in range(3):
        assert world.hybrid.poll() == 0
    switch_off(index, 0)
    world.mover.at_once = True
    assert world.there(PROMPT)["host"] == [40]
    world.hybrid.poll()
    world.nothing_left()
