"""A tenant of a hybrid model is cleared whole: KV and states, on the device and the host."""

from __future__ import annotations

from typing import Any

import pytest
from support.hybrid_case import HybridWorld, tokens
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hybrid import HybridConfig, HybridManager
from lightcache.hybrid.saving import Saves
from lightcache.manager import Prompt

NOTHING: dict[str, list[int]] = {"device": [], "host": []}
ONE = Prompt(tokens(41), tenant="a")
OTHER = Prompt(tokens(41), tenant="b")


def states_left(world: HybridWorld) -> list[int]:
    """Checkpoints in each tier, whoever could find them."""
    return [index.stats().ready for _, _, index in world.checkpoints.tiers]


def test_a_tenant_is_cleared_whole(hybrids: Any) -> None:
    world = hybrids(weights="v1")
    for prompt in (ONE, OTHER):
        world.run("r", prompt)
    assert world.look(ONE).usable == world.look(OTHER).usable == 40
    before = states_left(world)
    assert world.hybrid.clear_tenant("a")
    assert states_left(world) == [count // 2 for count in before]
    assert world.there(ONE) == NOTHING
    assert world.look(ONE).kv.usable == 0
    assert world.look(OTHER).usable == 40
    world.run("r", ONE)
    assert world.look(ONE).usable == 40


def test_what_runs_leaves_nothing_behind(hybrids: Any) -> None:
    world = hybrids(weights="v1")
    world.begin("r", ONE)
    world.step("r", 20)
    assert world.hybrid.clear_tenant("a")
    world.step("r", 41)
    world.end("r")
    assert world.look(ONE).usable == 0
    assert states_left(world) == [0, 0]


def test_kv_cleared_alone(hybrids: Any) -> None:
    """By the cache's own call, of whatever process: the states go when the tenant comes again."""
    world = hybrids(weights="v1")
    for prompt in (ONE, OTHER):
        world.run("r", prompt)
    before = states_left(world)
    host = world.manager.host
    host.clear(host.namespace("v1", "a"))
    assert world.look(ONE).usable == 0
    assert world.there(ONE) == NOTHING
    assert states_left(world) == [count // 2 for count in before]
    assert world.look(OTHER).usable == 40


def test_a_request_of_before_clears_nothing(hybrids: Any) -> None:
    """It knows the namespace of before, beside which there is nothing any more."""
    world = hybrids(weights="v1")
    before = world.manager.state.weights.scope_of("a")
    world.hybrid.clear_tenant("a")
    world.run("r", ONE)
    kept = states_left(world)
    assert world.hybrid.parts.states_of(before) is None
    assert states_left(world) == kept != [0, 0]
    assert world.look(ONE).usable == 40


def test_another_process_clears(hybrids: Any, segment_name: str) -> None:
    """Its states on the host are the same, those of our device go when we look."""
    shared = f"{segment_name}-shared"
    world, other = (hybrids(weights="v1", shared=shared) for _ in range(2))
    world.run("r", ONE)
    assert world.look(ONE).usable == 40
    assert other.hybrid.clear_tenant("a")
    assert world.look(ONE).usable == 0
    assert states_left(world) == [0, 0]
    other.run("r", ONE)
    kept = other.there(ONE)
    world.run("r", ONE)  # what it had opened before is not what it clears
    assert other.there(ONE) == kept
    world.nothing_left()


def test_nothing_to_clear(hybrids: Any) -> None:
    world = hybrids(weights="v1")
    assert world.hybrid.clear_tenant("nobody"), "who never was is empty"
    with pytest.raises(ConfigError, match="clear_tenant: expected a tenant's name, found ''"):
        world.hybrid.clear_tenant("")
    world.run("r", ONE)
    world.hybrid.begin_update()
    assert not world.hybrid.clear_tenant("a")
    world.hybrid.finish_update("v2")
    world.run("r", ONE)
    assert world.hybrid.clear_tenant("a")
    assert states_left(world) == [0, 0]


# ---- what a manager is made with


@pytest.mark.parametrize(
    "how",
    [
        {"config": {"running": 5}},
        {"config": {"running": 5, "ahead": True}},
        {"slots": None, "config": {"running": 50}},
        {"slots": 16, "config": {"running": 3, "drafted": 1, "draft_slots": 6}},
        {"tail": True, "chunk": 8, "config": {"running": 1}},
        {"state_pages": None, "config": {"running": 5, "saves": Saves.END_ONLY}},
    ],
)
def test_settings_that_go_together(hybrids: Any, how: dict[str, Any]) -> None:
    hybrids(**how)


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ({"config": {"running": 9}}, ["device_slots=16: 9 requests with 1 alternating"]),
        ({"slots": 10, "state_pages": None, "config": {"running": 5}}, ["no checkpoint would"]),
        ({"slots": None, "config": {"running": 50, "draft_slots": 1}}, ["nothing is drafted"]),
        ({"config": {"alternating": False}}, ["interior saves: .* alternating=1"]),
        ({"config": {"state_block_tokens": 3}}, ["not always at the end", "only every 4 tokens"]),
        (
            {
                "chunk": 4,
                "config": {
                    "running": 5,
                    "ahead": True,
                    "alternating": False,
                    "drafted": 3,
                    "tail": True,
                },
            },
            ["draft_slots=0: 3 drafted", "interior saves: .* alternating=2", "tail: "],
        ),
    ],
)
def test_settings_that_do_not(hybrids: Any, how: dict[str, Any], texts: list[str]) -> None:
    lines = r"\n.*".join(f"{number}. .*{text}.*" for number, text in enumerate(texts, 1))
    match = f"{len(texts)} of its settings conflict:\n" + lines
    config = HybridConfig(**how.pop("config"))
    world = hybrids(**how)
    with pytest.raises(ConfigError, match=match):
        HybridManager(world.manager, world.checkpoints, world.grid, config=config)


@pytest.mark.parametrize("name", ["running", "drafted", "draft_slots", "state_block_tokens"])
def test_figures_that_are_none(name: str) -> None:
    refused(ConfigError, name, HybridConfig, **{name: -1})
