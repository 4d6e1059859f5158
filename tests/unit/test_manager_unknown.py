"""Copies of which nobody knows whether they go on: nothing is endless by them. And what stands
before another number of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hybrid_case import made_hybrids
from support.manager_case import World, made_worlds, tokens
from support.raising import Odd, raising

from lightcache.errors import InUse
from lightcache.manager import Prompt, WritePolicy

PROMPT = Prompt(tokens(18))
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def hybrids(segment_name: str) -> Iterator[Any]:
    yield from made_hybrids(segment_name)


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Callable[..., World]]:
    yield from made_worlds(segment_name)


def interrupted(mover: Any, call: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mover, "offload", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            call()


def test_nothing_goes_on_as_far_as_anybody_can_tell(worlds: Any) -> None:
    """Whoever polls until nothing goes on comes to an end; the blocks stay out of use."""
    world = worlds()
    manager = world.manager
    world.start("a", PROMPT)
    table = manager.allocate("a", 18)[:4]
    interrupted(world.mover, lambda: manager.commit("a", 18))
    assert (manager.poll(), manager.in_flight(), manager.gauges().transfers) == (0, 0, 0)
    assert manager.in_flight(table).all()
    manager.release("a")
    with pytest.raises(InUse, match="nobody knows"):
        manager.set_blocks(16)


def test_a_demotion_starves_nobody(worlds: Any) -> None:
    """Who needs room has others written back, and is not told to wait for that one."""
    world = worlds(write=WritePolicy.BACK, low_water=0.0)
    manager = world.manager
    for i in range(8):
        world.run(i, tokens(16, i))
    assert world.device.free == 0
    interrupted(world.mover, lambda: manager.demote(8))
    manager.plan("a", Prompt(tokens(50, 99)))
    manager.take("a")
    assert len(manager.allocate("a", 50, timeout=0.0)) == 13
    assert manager._demotion.going == 0
    manager.release("a")
    manager.close(timeout=0)


def test_a_demotion_of_states_is_not_on_its_way(hybrids: Any) -> None:
    world = hybrids(states={"write": WritePolicy.BACK, "low_water": 0})
    world.run("a", Prompt(tokens(42)))
    interrupted(world.mover, lambda: world.checkpoints.demote(4))
    assert world.checkpoints.traffic.going == 0
    assert world.hybrid.poll() == 0


def test_another_number_of_blocks_tells_nothing_foreign(worlds: Any) -> None:
    """What a mover has raised is for `poll`: the number is changed, and it is still told."""
    world = worlds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.mover, "offload", raising(Odd))
        world.run("a", PROMPT)
    world.manager.set_blocks(16)
    assert world.device.blocks == 16
    with pytest.raises(Odd, match="arranged"):
        world.manager.poll()
    world.nothing_left()
