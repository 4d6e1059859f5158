"""New prompts: whose first page is nowhere is hashed no further, and found all the same when it
comes. And what is written for several requests in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.manager_case import World, tokens

from lightcache import Abandoned
from lightcache.hashing import KeySpec, hash_pages
from lightcache.manager import MultimodalItem, Prompt

SPEC = KeySpec("model", 4, b"a secret of these tests")


def is_hashed(world: World, prompt: Prompt) -> bool:
    space = world.manager.state.weights.open_space("")
    return prompt.is_hashed(space.device_spec) or prompt.is_hashed(space.host_spec)


# ---------------------------------------------------------------- the first key


@pytest.mark.parametrize("size", [4, 16, 64, 100])
@pytest.mark.parametrize(
    "items", [(), (MultimodalItem(1, 3, b"picture"),), (MultimodalItem(120, 130, b"sound"),)]
)
def test_the_first_key_is_the_first_of_all(size: int, items: tuple[MultimodalItem, ...]) -> None:
    spec = KeySpec("model", size, b"a secret of these tests")
    prompt = Prompt(tokens(200), salt="mine", lora=b"adapter", items=items)
    first = prompt.first_key(spec)
    assert not prompt.is_hashed(spec)
    assert first == prompt.keys(spec)[0].tobytes() == prompt.first_key(spec)
    again = Prompt(tokens(200), salt="mine", lora=b"adapter", items=items)
    assert (again.keys(spec) == prompt.keys(spec)).all()


def test_a_prompt_without_a_full_page_has_no_first_key() -> None:
    assert Prompt(tokens(3)).first_key(SPEC) == b""
    assert Prompt(tokens(4)).first_key(SPEC) == hash_pages(SPEC, tokens(5))[0].tobytes()


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_an_array_that_may_change_is_copied_and_another_is_kept(dtype: Any) -> None:
    array = np.arange(9).astype(dtype)
    prompt = Prompt(array)
    array[0] = 7
    assert prompt.tokens.tolist() == list(range(9))
    array.flags.writeable = False
    assert np.shares_memory(Prompt(array).tokens, array) == (dtype is np.uint32)
    whole = np.arange(18).astype(dtype)
    whole.flags.writeable = False
    assert (Prompt(whole[::2]).keys(SPEC) == hash_pages(SPEC, list(range(0, 18, 2)))).all()


# ---------------------------------------------------------------- planning


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize(("block", "page"), [(4, 4), (4, 16), (16, 4)])
def test_what_begins_nowhere_is_hashed_no_further(
    worlds: Any, owned: bool, block: int, page: int
) -> None:
    world = worlds(owned=owned, block=block, page=page)
    prompt, limited = Prompt(tokens(67)), Prompt(tokens(67, 1))
    for _ in range(3):
        match, second = world.manager.plan_many("ab", [prompt, limited], limits=[None, 40])
        assert (match.found, match.usable, match.tokens) == (0, 0, 67)
        assert second.found == 0
    assert not is_hashed(world, prompt)
    assert world.manager.stats().absent_pages == 3 * (66 // page + 40 // page)
    assert world.manager.take("a").usable == 0
    assert not is_hashed(world, prompt), "before it is computed"
    world.manager.release("a", publish=False)
    world.manager.cancel("b")


@pytest.mark.parametrize("between", ["plan", "take"])
@pytest.mark.parametrize("lost", [0, 32])
def test_a_first_page_that_comes_between(world: Any, between: str, lost: int) -> None:
    prompt = Prompt(tokens(18))
    assert world.manager.plan("b", prompt).usable == 0
    world.run("a", tokens(18))
    world.device.index.evict(lost)  # then the host alone has it
    if between == "plan":
        assert world.manager.plan("b", prompt).usable == 16
    match = world.manager.take("b")
    assert (match.device, match.host, match.usable) == ((0, 16, 16) if lost else (16, 0, 16))
    world.manager.release("b", publish=False)


def test_a_prompt_that_another_has_hashed_meanwhile(world: Any) -> None:
    prompt = Prompt(tokens(18))
    world.manager.plan("b", prompt)
    world.run("a", prompt)  # hashes it
    world.device.index.evict(32)
    assert world.manager.plan("b", prompt).usable == 16
    assert world.manager.take("b").usable == 16
    world.manager.release("b", publish=False)


def test_what_asks_for_something_else_lets_go_of_what_it_had(world: Any) -> None:
    world.run("a", tokens(18))
    assert world.manager.plan("b", Prompt(tokens(18))).usable == 16
    assert world.device.index.plans.pages == 4
    assert world.manager.plan("b", Prompt(tokens(18, 1))).usable == 0
    assert world.device.index.plans.pages == 0
    assert world.manager.take("b").usable == 0
    world.manager.release("b", publish=False)


def test_what_the_engine_has_found_itself(worlds: Any) -> None:
    world = worlds(owned=False)
    prompt = Prompt(tokens(18))
    match = world.manager.plan("a", prompt, device_tokens=9)
    assert (match.device, match.host, match.usable) == (8, 0, 8)
    prompt = Prompt(tokens(18, 1))
    assert world.manager.plan("b", prompt, device_tokens=0).found == 0
    assert not is_hashed(world, prompt)
    assert world.manager.take("b").usable == 0
    world.manager.release("b", publish=False)
    world.manager.cancel("a")


# ---------------------------------------------------------------- written in one call


def run_two(world: World) -> None:
    """Two requests compute their prompts, and both are written in one commit."""
    for request in "ab":
        world.manager.plan(request, Prompt(tokens(18, ord(request))))
        world.manager.take(request)
        world.manager.allocate(request, 18)
    world.manager.commit_many("ab", [18, 18])


def test_where_room_is_short_each_is_written_for_itself(worlds: Any) -> None:
    world = worlds(pages=6)
    run_two(world)
    world.backend.finish()
    world.manager.poll()
    stats = world.manager.stats()
    assert (stats.offloaded_pages, stats.no_room_pages) == (6, 2)
    world.manager.release_many("ab", publish=False)
    assert world.cache.index.check().pins == 0


def test_while_transfers_are_paused_nothing_is_written(world: Any) -> None:
    world.manager.pause()
    run_two(world)
    assert world.cache.index.stats().ready == 0
    world.manager.resume()
    world.backend.finish()
    world.manager.poll()
    assert world.manager.stats().offloaded_pages == 8
    world.manager.release_many("ab")


def test_a_reservation_that_fails_fails_all_of_its_call(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refused(*_: Any, **__: Any) -> Any:
        raise Abandoned("arranged")

    monkeypatch.setattr(world.cache.index, "reserve_batch", refused)
    run_two(world)
    assert world.manager.stats().failed_offloads == 2
    assert not world.manager.disabled
    monkeypatch.undo()
    world.manager.release_many("ab")


def test_slots_of_each_are_its_own(worlds: Any) -> None:
    world = worlds(block=16, page=4, blocks=16, pages=64)
    one, two = (
        type("R", (), {"table": np.array(table, np.int32)})() for table in ([5, 3], [7, 9, 2])
    )
    first, second = world.manager.offloader._slots([(one, 5, 8), (two, 3, 10)])
    expected = np.full(32, -1)
    expected[20:] = 3 * 16 + np.arange(4, 16)
    assert first.tolist() == expected.tolist()
    every = np.concatenate([7 * 16 + np.arange(16), 9 * 16 + np.arange(16), 32 + np.arange(8)])
    every[:12] = -1
    assert second.tolist() == every.tolist()
