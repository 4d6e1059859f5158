"""Rows A7, A13 and A15 to A19: what a CPU cache beside an engine does for a scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.manager_case import Shelf, World, tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import ConfigError, LeaseLost, OutOfPages
from lightcache.hashing import PageHasher
from lightcache.manager import MissReason, MultimodalItem, Prompt, RequestOptions, WritePolicy


class Costs:
    """Loading is worth it from so many pages on."""

    def __init__(self, pages: int) -> None:
        self.pages, self.asked = pages, 0

    def worth_loading(self, pages: int) -> bool:
        self.asked += 1
        return pages >= self.pages


# ---- A7


def test_a7_only_what_the_device_lacks_is_loaded(worlds: Any) -> None:
    world = worlds(block=4, page=16, blocks=64)
    prompt = Prompt(tokens(70))
    world.run("a", prompt)
    assert world.index.evict(11) == 11  # of 17 blocks: 24 tokens stay, the second page from within
    world.backend.at_once = False
    match = world.start("b", prompt)
    assert (match.device, match.host, match.usable) == (24, 40, 64)
    slots = world.backend.going[0].slots
    assert len(slots) == 48  # whole pages: the second to the fourth
    assert (slots[:8] == -1).all()
    assert (slots[8:] >= 0).all()
    assert not world.manager.in_flight(world.manager.request("b").table[:6]).any()
    assert world.manager.in_flight(world.manager.request("b").table[6:16]).all()
    world.backend.finish()
    assert (world.content("b", 64) == stamps_of(prompt.tokens)[:64]).all()
    world.manager.release("b")


@pytest.mark.parametrize(("least", "loads"), [(4, True), (5, False)])
def test_a7_a_threshold_from_measured_costs(worlds: Any, least: int, loads: bool) -> None:
    costs = Costs(least)
    world = worlds(costs=costs)
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    world.index.evict(32)
    match = world.run("b", prompt)
    assert costs.asked
    assert (match.host, match.usable) == (16, 16 if loads else 0)
    assert (match.why is MissReason.BREAK_EVEN) is not loads
    assert world.backend.loads == loads
    assert world.manager.stats().below_break_even == (0 if loads else 16)


@pytest.mark.parametrize(("tokens_least", "loads"), [(0, True), (16, True), (17, False)])
def test_a7_a_threshold_of_the_callers(worlds: Any, tokens_least: int, loads: bool) -> None:
    costs = Costs(1000)
    world = worlds(costs=costs, min_load_tokens=tokens_least)
    world.run("a", tokens(18))
    world.index.evict(32)
    assert world.run("b", tokens(18)).usable == (16 if loads else 0)
    assert not costs.asked


def test_a7_the_threshold_counts_what_is_left_before_an_item(worlds: Any) -> None:
    world = worlds(min_load_tokens=12)
    prompt = Prompt(tokens(40), items=[MultimodalItem(14, 39, b"image")])
    world.run("a", prompt)
    world.index.evict(8)  # of 10: eight tokens stay, and one page of the host ends before the item
    match = world.run("b", prompt)
    assert (match.device, match.why, match.usable) == (8, MissReason.ITEM, 8)
    assert world.backend.loads == 0


# ---- A13


def test_a13_hit_tokens_of_each_tier(worlds: Any) -> None:
    world = worlds(storage=Shelf, page=8)
    prompt = Prompt(tokens(41))
    world.run("a", Prompt(prompt.tokens[:25]))
    world.index.evict(4)
    shelf = world.manager._storage
    shelf.store(prompt)
    assert world.manager.plan("b", prompt).pending
    shelf.tasks[-1].go_on()
    match = world.run("b", prompt)
    assert (match.device, match.host, match.storage) == (8, 16, 16)
    assert match.found == match.usable == 40
    found = world.manager.stats()
    assert (found.device_tokens, found.host_tokens, found.storage_tokens) == (8, 16, 16)
    assert found.prompt_tokens == 25 + 41
    assert found.hit_ratio == pytest.approx(40 / 66)


def test_a13_what_is_found_and_not_used_is_no_hit(worlds: Any) -> None:
    world = worlds(page=8)
    world.run("a", tokens(41))
    world.index.evict(4)
    match = world.run("b", tokens(41), limit=27)
    assert (match.device, match.host, match.usable) == (24, 0, 24)
    world.index.evict(32)
    match = world.run("c", tokens(41), limit=27)
    assert (match.device, match.host, match.usable) == (0, 24, 24)
    found = world.manager.stats()
    assert (found.device_tokens, found.host_tokens) == (24, 24)


# ---- A15


def test_a15_a_request_that_skips_loading_gives_back_what_it_matched(world: Any) -> None:
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    world.index.evict(2)
    manager = world.manager
    match = manager.plan("b", prompt)
    assert (match.device, match.host) == (8, 8)
    manager.take("b")
    assert world.cache.check().pins == 2
    manager.release("b", publish=False)  # never fetched
    world.nothing_left()
    with manager.host.match(prompt.keys(world.cache.key_spec())) as lease:
        assert len(lease) == 4
    assert world.cache.check().pins == 0


def test_a15_who_does_not_read_holds_nothing_and_still_writes(world: Any) -> None:
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    manager = world.manager
    assert manager.plan("b", prompt).usable == 16
    match = manager.plan("b", prompt, options=RequestOptions(read=False))
    assert (match.found, match.why) == (0, MissReason.OPTIONS)
    assert (world.index.plans.pages, world.cache.index.plans.pages) == (0, 0)
    manager.cancel("b")
    other = Prompt(tokens(18, 5))
    world.run("c", other, options=RequestOptions(read=False))
    assert world.run("d", other).usable == 16


def test_a15_a_plan_that_nobody_takes_lets_go_by_itself(world: Any, wait_until: Any) -> None:
    world.run("a", tokens(18))
    world.manager.plan("b", Prompt(tokens(18)), options=RequestOptions(ttl=0.001))
    wait_until(lambda: world.index.plans.pages == 0, "the plan's end on the device")
    assert world.manager.take("b").usable == 16  # looked for again
    world.manager.release("b")


def test_a15_leaving_the_manager_gives_back_all_of_it(world: Any) -> None:
    world.run("a", tokens(18))
    with world.manager as manager:
        world.run("b", tokens(18), keep=True)
        manager.plan("c", Prompt(tokens(18)))


# ---- A16


@pytest.mark.parametrize("output", [True, False])
def test_a16_generated_tokens_are_offloaded_or_not(world: Any, output: bool) -> None:
    every = tokens(30)
    world.start("a", every[:10], options=RequestOptions(output=output))
    for begin, end in ((0, 10), (10, 13), (13, 21), (21, 27)):
        world.compute("a", every, begin, end)
    world.manager.release("a")
    assert world.manager.stats().offloaded_pages == (6 if output else 2)
    match = world.manager.plan("b", Prompt(every))
    assert match.found == (24 if output else 8)
    world.manager.cancel("b")
    world.index.evict(32)
    match = world.manager.plan("b", Prompt(every))
    assert (match.device, match.host) == (0, 24 if output else 8)
    world.manager.cancel("b")


# ---- A17


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late copies"])
def test_a17_of_n_samples_of_one_prompt_one_offloads(worlds: Any, late: bool) -> None:
    world = worlds(blocks=64)
    world.backend.at_once = not late
    prompt = Prompt(tokens(18))
    hashed: list[int] = []
    original = PageHasher.extend

    def counted(self: PageHasher, tokens: Any, **how: Any) -> Any:
        if len(tokens) == len(prompt):
            hashed.append(1)
        return original(self, tokens, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageHasher, "extend", counted)
        for request in range(6):
            world.start(request, prompt)
        for request in range(6):
            world.compute(request, prompt.tokens, 0, 18)
    assert len(hashed) == 1  # one Prompt, one pass over its tokens
    # Each answers something else, from within the block in which the prompt ends.
    for request in range(6):
        world.compute(request, np.concatenate([prompt.tokens, [request] * 6]), 18, 24)
    for request in range(6):
        world.manager.release(request)
    world.backend.finish()
    world.manager.poll()
    found = world.manager.stats()
    assert found.offloaded_pages == 4 + 6 * 2
    assert found.duplicates == 5 * 4
    assert found.no_room_pages == 0
    assert world.cache.stats().ready == 4 + 6 * 2


def test_a17_another_goes_on_where_the_one_that_wrote_was_aborted(world: Any) -> None:
    prompt = Prompt(tokens(18))
    for request in "ab":
        world.start(request, prompt)
    world.manager.pause()
    world.compute("a", prompt.tokens, 0, 18)
    world.manager.release("a", publish=False)
    world.compute("b", prompt.tokens, 0, 18)
    world.manager.release("b")
    world.manager.resume()
    assert world.manager.stats().offloaded_pages == 4


def a_copy_goes_on(world: World, prompt: Prompt, samples: str) -> None:
    """All samples have computed the prompt; the first of them is writing it."""
    world.backend.at_once = False
    for request in samples:
        world.start(request, prompt)
    for request in samples:
        world.compute(request, prompt.tokens, 0, len(prompt))
    assert len(world.backend.going) == 1
    world.backend.at_once = True


@pytest.mark.parametrize("goes_on", ["computing", "ending", "beginning"])
def test_a17_another_takes_over_when_the_copy_fails(world: Any, goes_on: str) -> None:
    prompt = Prompt(tokens(18))
    a_copy_goes_on(world, prompt, "a" if goes_on == "beginning" else "abc")
    world.backend.fail_next = 1
    world.backend.finish()
    world.manager.poll()
    assert world.cache.stats().ready == 0
    pages = 4
    if goes_on == "computing":
        more, pages = np.concatenate([prompt.tokens, tokens(30, 7)]), 12
        for end in range(19, 49):  # the next write: a group of 8 pages
            assert world.cache.stats().ready == 0
            for request in "bc":
                world.compute(request, more, end - 1, end)
    elif goes_on == "ending":
        world.manager.release("b")
    else:
        world.run("d", prompt)
    assert world.cache.stats().ready == pages
    found = world.manager.stats()
    assert (found.failed_offloads, found.offloads, found.offloaded_pages) == (1, 1, pages)
    for request in "abc":
        world.manager.release(request)
    assert world.manager.stats().offloaded_pages == pages


def test_a17_another_takes_over_what_was_queued_and_aborted(world: Any) -> None:
    prompt = Prompt(tokens(18))
    world.manager.pause()
    for request in "ab":
        world.start(request, prompt)
    for request in "ab":
        world.compute(request, prompt.tokens, 0, 18)
    world.manager.release("a", publish=False)
    world.compute("b", np.concatenate([prompt.tokens, [7]]), 18, 19)
    world.manager.resume()
    assert world.cache.stats().ready == 0
    world.manager.release("b")
    assert world.cache.stats().ready == 4


def test_a17_when_all_copies_fail_each_sample_tries_once_a_write(worlds: Any) -> None:
    world = worlds(blocks=64, failures=100)
    every = np.concatenate([tokens(18), tokens(40, 7)])
    a_copy_goes_on(world, Prompt(every[:18]), "abc")
    world.backend.fail_next = 100
    world.backend.finish()
    for end in range(19, 59):
        world.manager.poll()
        for request in "abc":
            world.compute(request, every, end - 1, end)
    assert world.manager.stats().failed_offloads == 1 + 3
    world.backend.fail_next = 0
    for request in "abc":
        world.manager.release(request)


def test_a17_what_was_asked_for_once_is_not_written_with_it(worlds: Any) -> None:
    world = worlds(write=WritePolicy.SELECTIVE)
    prompt = Prompt(tokens(18))
    world.run("first", prompt)
    a_copy_goes_on(world, prompt, "ab")
    world.compute("b", np.concatenate([prompt.tokens, tokens(7, 3)]), 18, 25)
    world.backend.fail_next = 1
    world.backend.finish()
    world.manager.poll()
    world.manager.release("b")
    assert world.cache.stats().ready == 4  # and not what "b" alone has generated
    world.manager.release("a")


# ---- A18

STAGES = [
    "planned",
    "taken",
    "allocated",
    "loading",
    "loaded",
    "computed",
    "offloading",
    "generating",
]


def reach(world: World, stage: str, prompt: Prompt) -> None:
    """Bring request "b" so far; the device has 8 of its tokens, the host 8 more."""
    manager, step = world.manager, STAGES.index(stage)
    world.backend.at_once = stage not in ("loading", "offloading")
    manager.plan("b", prompt)
    if step >= 1:
        manager.take("b")
    if step >= 2:
        manager.allocate("b", len(prompt))
    if step >= 3:
        load = manager.load("b")
        if stage != "loading":
            world.backend.finish()
            assert load.done()
    if step >= 5:
        world.compute("b", prompt.tokens, 16, len(prompt))
    if stage == "generating":
        every = np.concatenate([prompt.tokens, tokens(9, 9)])
        world.compute("b", every, len(prompt), len(prompt) + 9)


@pytest.mark.parametrize("publish", [False, True], ids=["abort", "end"])
@pytest.mark.parametrize(
    ("stage", "paused"), [(each, False) for each in STAGES] + [(each, True) for each in STAGES[:4]]
)
def test_a18_an_abort_at_any_time_returns_everything(
    world: Any, stage: str, publish: bool, paused: bool
) -> None:
    prompt = Prompt(tokens(30))
    world.run("a", Prompt(prompt.tokens[:18]))
    world.index.evict(2)
    if paused:
        world.manager.pause()
    reach(world, stage, prompt)
    free = world.device.free
    world.manager.release("b", publish=publish)
    if stage in ("loading", "offloading") and not paused:
        # The copy is not cut off: what it touches is given back behind it.
        assert world.manager.gauges().leaving == 1
        assert world.manager.in_flight() == 1
        assert world.device.free == free
        world.backend.finish()
        world.manager.poll()
        assert world.manager.gauges().leaving == 0
    world.manager.resume()
    world.nothing_left()
    world.manager.release("b")  # late and harmless
    match = world.run("c", prompt)
    assert match.usable >= 16


def test_a18_what_was_published_before_a_pause_is_written_behind_it(world: Any) -> None:
    world.manager.pause()
    world.run("a", tokens(18))
    assert world.manager.gauges().leaving == 1
    assert world.backend.offloads == 0
    world.manager.resume()
    assert world.manager.stats().offloaded_pages == 4


# ---- A19


def test_a19_too_few_blocks_for_a_match_and_the_request_recomputes(worlds: Any) -> None:
    world = worlds(blocks=12)
    manager, prompt = world.manager, Prompt(tokens(34))
    world.run("a", prompt)
    world.index.evict(12)
    world.run("b", tokens(25, 7), keep=True)  # seven blocks of twelve
    match = manager.plan("c", prompt)
    assert (match.host, match.usable) == (32, 32)
    manager.take("c")
    assert world.cache.check().pins == 8
    refused(OutOfPages, "", manager.allocate, "c", 34)
    assert world.cache.check().pins == 8  # nothing changed
    match = manager.skip_load("c")
    assert (match.usable, match.why, match.load) == (0, MissReason.LOAD_SKIPPED, 0)
    assert world.cache.check().pins == 0
    manager.allocate("c", 16)  # a chunk of it fits
    load = manager.load("c")
    assert (load.done(), load.tokens) == (True, 0)
    assert world.backend.loads == 0
    world.compute("c", prompt.tokens, 0, 16)
    manager.release("b")
    world.compute("c", prompt.tokens, 16, 34)
    assert (world.content("c", 34) == stamps_of(prompt.tokens)).all()
    found = manager.stats()
    assert (found.host_tokens, found.hit_requests) == (0, 0)
    assert manager.recent_stats().host_tokens == 0
    manager.release("c")


def test_a19_the_devices_part_stays(world: Any) -> None:
    prompt = Prompt(tokens(30), items=[MultimodalItem(6, 14, b"image")])
    world.run("a", prompt)
    world.index.evict(5)
    manager = world.manager
    manager.plan("b", prompt)
    match = manager.take("b")
    assert (match.device, match.host, match.usable) == (8, 20, 28)
    match = manager.skip_load("b")
    assert (match.usable, match.device) == (4, 8)  # eight would cut the item
    assert manager.stats().device_tokens == 4
    assert manager.skip_load("b") == match
    manager.allocate("b", 30)
    manager.load("b")
    refused(ConfigError, "loaded", manager.skip_load, "b")
    manager.release("b")


def test_a19_skipping_no_load_changes_nothing(world: Any) -> None:
    world.run("a", tokens(18))
    world.manager.plan("b", Prompt(tokens(18)))
    match = world.manager.take("b")
    assert world.manager.skip_load("b") == match
    assert world.manager.stats().device_tokens == 16
    refused(LeaseLost, "", world.manager.skip_load, "nobody")
    world.manager.release("b")
