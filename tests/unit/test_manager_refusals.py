"""What a KVCacheManager answers to calls that make no sense: an error that says why, and nothing
has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.manager_case import World, tokens
from support.refusals import refused

from lightcache.errors import ConfigError, Detached, LeaseLost, LightcacheError, OutOfPages
from lightcache.manager import KVCacheManager, Prompt, RequestOptions

PROMPT = Prompt(tokens(18))
TABLE = np.array([3, 9, 4, 1, 7], np.int32)


def picture(world: World) -> Any:
    """All that a refused call might have changed."""
    manager = world.manager
    return (
        manager.gauges(),
        manager.stats(),
        world.index.check().pins if world.device.owned else 0,
        world.cache.check().pins,
        {one: plan.request for one, plan in manager.lookup._plans.items()},
        {
            one.id: (one.total, one.known, one.table.tolist(), len(one.device_chain.keys))
            for one in manager._requests.values()
        },
    )


def unchanged(
    world: World, call: Callable[[], Any], error: type[LightcacheError], says: str
) -> None:
    before = picture(world)
    refused(error, says, call)
    assert picture(world) == before


# ---- prompts


@pytest.mark.parametrize("what", [[1.0, 2.0], ["a"], [[1, 2], [3]], None, [True], [1 << 70], [-1]])
def test_tokens_that_are_none(what: Any) -> None:
    refused(ConfigError, "tokens: expected", Prompt, what)


@pytest.mark.parametrize("what", [{"salt": 3}, {"lora": "name"}, {"tenant": 3}, {"tenant": None}])
def test_what_else_a_prompt_is_given(what: Any) -> None:
    refused(ConfigError, next(iter(what)), Prompt, [1, 2], **what)


@pytest.mark.parametrize("n", [0, 1])
def test_prompts_of_nearly_nothing(world: Any, n: int) -> None:
    for request in "ab":
        assert world.run(request, tokens(n)).usable == 0


# ---- planning

PLANS = {
    "prompts": lambda m: m.plan_many("ab", [PROMPT]),
    "options: expected one": lambda m: m.plan_many("ab", [PROMPT] * 2, options=[RequestOptions()]),
    "limits": lambda m: m.plan_many("ab", [PROMPT] * 2, limits=[3]),
    "named twice": lambda m: m.plan_many("cc", [PROMPT] * 2),
    "hashable": lambda m: m.plan([1], PROMPT),
    "prompts: expected a Prompt": lambda m: m.plan("c", [1, 2, 3]),
    "options: expected RequestOptions": lambda m: m.plan("c", PROMPT, options=None),
    "limit: expected tokens": lambda m: m.plan_many("cd", [PROMPT] * 2, limits=[3, -1]),
    "found 1.5": lambda m: m.plan_many("cd", [PROMPT] * 2, limits=[None, 1.5]),
    "device_tokens: ManagedBlocks": lambda m: m.plan("c", PROMPT, device_tokens=4),
}


@pytest.mark.parametrize("says", PLANS)
def test_plans(world: Any, says: str) -> None:
    world.run("first", PROMPT)
    world.manager.plan("a", PROMPT)
    unchanged(world, lambda: PLANS[says](world.manager), ConfigError, says)
    assert world.manager.take("a").usable == 16
    world.manager.release("a")


@pytest.mark.parametrize("given", [[4], [4, -4], [4, 4.0], [4, None]])
def test_plans_of_what_an_engine_found_itself(worlds: Any, given: Any) -> None:
    world = worlds(owned=False)

    def call() -> Any:
        return world.manager.plan_many("ab", [PROMPT] * 2, device_tokens=given)

    unchanged(world, call, ConfigError, "device_tokens")


# ---- allocating


@pytest.mark.parametrize("n", [-1, 3.5, "3", None])
def test_no_number_of_tokens(worlds: Any, n: Any) -> None:
    world = worlds(ends_busy=True)
    world.start("a", PROMPT)
    unchanged(world, lambda: world.manager.allocate("a", n), ConfigError, "tokens: expected")


def test_more_than_there_is(worlds: Any) -> None:
    world = worlds(ends_busy=True)
    world.start("a", PROMPT)
    unchanged(world, lambda: world.manager.allocate("a", 10**9), OutOfPages, "the device has 32")


@pytest.mark.parametrize("n", [0, -1, "x", 1 << 40])
def test_no_number_of_blocks(world: Any, n: Any) -> None:
    world.run("a", PROMPT)
    world.manager.plan("b", PROMPT)
    unchanged(world, lambda: world.manager.set_blocks(n), ConfigError, "blocks: expected")
    assert world.manager.take("b").device == 16
    world.manager.release("b")


# ---- committing

NEW = [[8, 9], [7]]
COMMITS = {
    "found 100": lambda m: m.commit_many("ab", [20, 100], NEW),
    "expected 18 to 19": lambda m: m.commit_many("ab", [20, 3], NEW),
    "number of tokens": lambda m: m.commit_many("ab", [20, 18.0], NEW),
    "'b': new_tokens: token": lambda m: m.commit_many("ab", [20, 19], [[8, 9], [-1]]),
    "'b': new_tokens: tokens must be": lambda m: m.commit_many("ab", [20, 19], [[8, 9], [7.0]]),
    "have one dimension": lambda m: m.commit_many("ab", [20, 19], [[8, 9], 5]),
    "totals": lambda m: m.commit_many("ab", [20], NEW),
    "new_tokens: expected": lambda m: m.commit_many("ab", [20, 19], [[8, 9]]),
    "named twice": lambda m: m.commit_many("aa", [20, 20], NEW),
    "leave the table out": lambda m: m.commit_many("ab", [20, 19], NEW, [TABLE, TABLE]),
}


@pytest.mark.parametrize("says", COMMITS)
def test_commits_of_which_one_is_wrong(world: Any, says: str) -> None:
    for request in "ab":
        world.start(request, Prompt(tokens(18, ord(request))))
        world.compute(request, tokens(18, ord(request)), 0, 18)
    unchanged(world, lambda: COMMITS[says](world.manager), ConfigError, says)
    unchanged(world, lambda: world.manager.commit_many("ax", [20, 1], NEW), LeaseLost, "'x'")
    world.manager.allocate("a", 20)
    world.manager.commit_many("ab", [20, 19], NEW)  # as if nothing had been
    for request in "ab":
        world.manager.release(request)
    found = world.manager.plan("c", Prompt(np.concatenate([tokens(18, ord("a")), [8, 9, 1]])))
    assert found.device == 20
    world.manager.cancel("c")


WRONG_TABLES = {
    "give the request's as table=": None,
    "pages: expected": [TABLE.astype(float)],
    "found int64": [[TABLE.tolist()]],
    "tables": [TABLE, TABLE],
    "found -1 to 9": [np.array([3, 9, 4, -1, 7], np.int32)],
    "found 3 to 500": [np.array([3, 9, 4, 500, 7], np.int32)],
}


@pytest.mark.parametrize("says", WRONG_TABLES)
def test_tables_of_an_attached_device(worlds: Any, says: str) -> None:
    world = worlds(owned=False)
    manager = world.manager
    manager.plan("a", PROMPT)
    manager.take("a")
    tables = WRONG_TABLES[says]

    def call() -> Any:
        return manager.commit_many(["a"], [18], tables=tables)

    unchanged(world, call, ConfigError, says)
    manager.commit("a", 18, table=TABLE.tolist())
    manager.release("a")
    assert manager.plan("b", PROMPT).device == 16


@pytest.mark.parametrize("table", [[1.5, 2], [-1] * 5, [100] * 5, [1, 2]])
def test_tables_to_load_into(worlds: Any, table: Any) -> None:
    world = worlds(owned=False)
    manager = world.manager
    manager.plan("a", PROMPT)
    manager.take("a")
    manager.commit("a", 18, table=TABLE)
    manager.release("a")
    manager.plan("b", PROMPT, device_tokens=0)
    manager.take("b")
    unchanged(world, lambda: manager.load("b", table), ConfigError, "expected")
    assert manager.load("b", [11, 12, 13, 14, 15]).tokens == 16
    manager.release("b")


# ---- out of turn


def test_out_of_turn(world: Any) -> None:
    manager = world.manager
    unchanged(world, lambda: manager.take("a"), LeaseLost, "plan it first")
    world.run("a", PROMPT, keep=True)
    unchanged(world, lambda: manager.take("a"), ConfigError, "runs already")
    unchanged(world, lambda: manager.skip_load("a"), ConfigError, "loaded already")
    manager.release("a")
    manager.release("a")
    for call in (
        lambda: manager.allocate("a", 18),
        lambda: manager.load("a"),
        lambda: manager.skip_load("a"),
        lambda: manager.commit("a", 18),
    ):
        unchanged(world, call, LeaseLost, "no running request 'a'")


OTHERS = {
    "evict by themselves": lambda m: m.evicted([1]),
    "n: expected an integer": lambda m: m.can_allocate("x"),
    "a token's position": lambda m: m.drop(PROMPT, -1),
    "has no storage": lambda m: m.prefetch(PROMPT),
}


@pytest.mark.parametrize("says", OTHERS)
def test_other_calls(world: Any, says: str) -> None:
    world.run("a", PROMPT)
    unchanged(world, lambda: OTHERS[says](world.manager), ConfigError, says)


def test_a_closed_cache_is_detached(segment_name: str) -> None:
    world = World(segment_name)
    manager = world.manager
    world.close()
    for call in (manager.gauges, lambda: manager.weights_state, lambda: manager.drop(PROMPT)):
        refused(Detached, "after close", call)


# ---- blocks


def test_blocks_that_are_none(worlds: Any) -> None:
    manager = worlds(owned=False).manager
    for wrong in ("x", [1.5], [[1, 2], [3]]):
        for call in (manager.in_flight, manager.wait_blocks, manager.evicted, manager.evicting):
            refused(ConfigError, "blocks: expected", call, wrong)
    refused(ConfigError, "blocks: expected", manager.demote, "x")


def test_a_padded_table_is_looked_at(worlds: Any) -> None:
    world = worlds(ends_busy=True)
    world.start("a", PROMPT)
    world.backend.at_once = False
    world.compute("a", PROMPT.tokens, 0, 18)
    table = world.manager.allocate("a", 18)
    padded = np.full((2, 8), -1, np.int32)
    padded[0, :5] = table
    expected = np.zeros((2, 8), bool)
    expected[0, :4] = True
    assert (world.manager.in_flight(padded) == expected).all()
    world.manager.wait_blocks(padded)
    assert not world.manager.in_flight(padded).any()


# ---- made of something else


@pytest.mark.parametrize("what", ["host", "device", "config"])
def test_a_manager_of_something_else(world: Any, what: str) -> None:
    parts = {"host": world.cache, "device": world.device, "backend": world.backend, "config": None}
    parts[what] = {"a": 1}
    refused(ConfigError, f"{what}: expected a", KVCacheManager, **parts)
