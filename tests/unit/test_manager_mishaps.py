"""What goes wrong in the middle of a manager's calls: nothing is lost by it, nothing is endless."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.manager_case import Shelf, World, switch_off, tokens
from support.raising import Odd, raising
from support.refusals import refused
from support.stamped import StampedBackend, StampedMoving, stamps_of

from lightcache.errors import CacheCorrupted, ConfigError, LeaseLost, OutOfPages, WaitTimeout
from lightcache.manager import MissReason, Prompt, WritePolicy

PROMPT = Prompt(tokens(18))
LONGER = Prompt([*PROMPT.tokens, *tokens(8, 3)])


def writing_back(worlds: Any) -> World:
    """8 blocks, all with names: 4 of them on their way out, to a transfer backend that waits."""
    world: World = worlds(blocks=8, write=WritePolicy.BACK, low_water=0.0)
    for request, seed in (("a", 0), ("b", 2)):
        world.run(request, tokens(16, seed))
    world.backend.at_once = False
    assert world.manager.demote(4) == 4
    return world


# ---- demotions


@pytest.mark.parametrize("which", ["host", "device"])
def test_an_index_that_is_disabled_while_blocks_are_written_back(worlds: Any, which: str) -> None:
    world = writing_back(worlds)
    world.backend.finish()
    index = world.cache.index if which == "host" else world.index
    switch_off(index, 1)
    for _ in range(3):
        assert world.manager.poll() == 0
    switch_off(index, 0)
    assert world.manager._write_back.blocks == 0
    figures = world.manager.stats()
    assert (figures.errors, figures.demotions, figures.demotions_lost) == (1, 0, 4)
    assert world.device.free == 4


def test_a_device_that_is_closed_while_blocks_are_written_back(worlds: Any) -> None:
    world = writing_back(worlds)
    world.device.close()
    world.backend.finish()
    assert world.manager.poll() == 0
    assert world.manager._write_back.blocks == 0


@pytest.mark.timeout(30)
def test_making_room_ends_when_the_host_answers_no_more(worlds: Any) -> None:
    world = writing_back(worlds)
    manager = world.manager
    manager.plan("c", Prompt(tokens(24, 9)))
    manager.take("c")
    switch_off(world.cache.index, 1)
    refused(OutOfPages, "", manager.allocate, "c", 24)
    switch_off(world.cache.index, 0)
    manager.release("c")


@pytest.mark.timeout(30)
def test_waiting_for_room_ends_if_the_cache_is_not_asked_any_more(worlds: Any) -> None:
    world = writing_back(worlds)
    manager = world.manager
    manager.plan("c", Prompt(tokens(24, 9)))
    manager.take("c")
    while not manager.state.fail_open.disabled:
        manager.state.fail_open._breaker.failure("tests")
    assert len(manager.allocate("c", 24, timeout=None)) == 6
    manager.release("c")
    manager.enable()


# ---- requests


def test_releases_of_which_one_is_no_request(world: Any) -> None:
    world.start("a", PROMPT)
    refused(ConfigError, "hashable", world.manager.release_many, ["a", []])
    assert world.manager.gauges().running == 1
    world.manager.release("a")


@pytest.mark.parametrize(
    ("call", "more"),
    [
        ("cancel", ()),
        ("take", ()),
        ("allocate", (3,)),
        ("skip_load", ()),
        ("load", ()),
        ("commit", (3,)),
        ("release", ()),
    ],
)
def test_ids_that_are_none(worlds: Any, call: str, more: tuple[int, ...]) -> None:
    refused(ConfigError, "hashable", getattr(worlds().manager, call), [], *more)


def test_taking_while_the_host_breaks(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the plan, whose pins were taken already."""
    world.run("a", PROMPT)
    world.manager.plan("b", PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(world.cache.index, "peek", raising(CacheCorrupted))
        match = world.manager.take("b")
    assert (match.usable, match.why) == (0, MissReason.DISABLED)
    assert (world.index.check().pins, world.cache.check().pins) == (0, 0)
    world.manager.allocate("b", 18)
    world.manager.release("b")


def test_blocks_to_exchange_are_told_though_writing_breaks(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours were given back: who goes on with them would write into another's."""
    for request in "ab":
        world.start(request, PROMPT)
        table = world.manager.allocate(request, 18)
        world.store.write(table, 0, stamps_of(PROMPT.tokens))
    world.manager.commit("a", 18)
    with monkeypatch.context() as patch:
        patch.setattr(world.manager.offloader, "write_due", raising(CacheCorrupted))
        changed = world.manager.commit("b", 18)
    assert list(changed.values()) == world.manager.request("a").table[:4].tolist()
    assert world.manager.stats().errors == 1
    for request in "ab":
        world.manager.release(request)


def test_of_two_tenants_one_breaks(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was exchanged for the one is told though naming the other's blocks raises."""
    other = Prompt(tokens(18, 5), tenant="t")
    for request, prompt in (("a", PROMPT), ("b", PROMPT), ("c", other)):
        world.start(request, prompt)
        table = world.manager.allocate(request, 18)
        world.store.write(table, 0, stamps_of(prompt.tokens))
    world.manager.commit("a", 18)
    name_many = world.device.name_many

    def breaks(blocks: Any, keys: Any, offsets: Any, starts: Any, space: Any, into: Any) -> None:
        if space.tenant:
            raise CacheCorrupted("arranged")
        name_many(blocks, keys, offsets, starts, space, into)

    with monkeypatch.context() as patch:
        patch.setattr(world.device, "name_many", breaks)
        changed = world.manager.commit_many(["b", "c"], [18, 18])
    assert [len(each) for each in changed] == [4, 0]
    for request in "abc":
        world.manager.release(request)


def test_what_failed_to_be_planned_cannot_be_taken_when_all_is_closed(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(failures=1)
    world.manager.plan("a", PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(world.manager.lookup, "find", raising(CacheCorrupted))
        assert world.manager.plan("b", PROMPT).why is MissReason.DISABLED
    world.manager.close()
    refused(LeaseLost, "not planned", world.manager.take, "a")


# ---- storage


@pytest.mark.parametrize("error", [Odd, OutOfPages, CacheCorrupted])
def test_a_storage_that_raises_when_a_request_ends(worlds: Any, error: type[Exception]) -> None:
    world = worlds(storage=Shelf)
    manager = world.manager
    manager._storage.write = raising(error)
    for request, seed in (("a", 0), ("b", 1)):
        world.start(request, tokens(18, seed))
        manager.commit(request, 18)
    manager.release_many("ab")
    assert manager.gauges().leaving == 0
    assert manager.stats().errors == (0 if error is Odd else 2)
    if error is Odd:  # of a storage as of a transfer backend
        refused(Odd, "arranged", manager.poll)


@pytest.mark.parametrize("error", [Odd, CacheCorrupted])
@pytest.mark.parametrize("how", ["cancel", "another prompt", "weights", "disabled", "close"])
def test_a_reading_that_cannot_be_cancelled(worlds: Any, error: type[Exception], how: str) -> None:
    world = worlds(storage=Shelf)
    manager = world.manager
    world.run("a", PROMPT)
    for request in "bc":
        assert manager.plan(request, LONGER).pending
    manager._storage.tasks[-2].cancel = raising(error)
    if how == "another prompt":
        manager.plan("b", Prompt(tokens(3)))
    if how == "weights":
        manager.begin_update()
        assert manager.plan("b", LONGER).why is MissReason.WEIGHTS
    if how == "disabled":
        manager._let_go()
    if how == "close" and error is Odd:
        refused(Odd, "arranged", manager.close)
    elif how == "close":
        manager.close()
    for request in "bc":
        manager.cancel(request)
    assert (world.index.check().pins, world.cache.check().pins) == (0, 0)
    if error is Odd and how != "close":
        refused(Odd, "arranged", manager.poll)


def test_a_reading_that_breaks_while_it_is_waited_for(worlds: Any) -> None:
    world = worlds(storage=Shelf)
    manager = world.manager
    world.run("a", PROMPT)
    assert manager.plan("b", LONGER).pending
    manager._storage.tasks[-1].wait = raising(CacheCorrupted)
    assert manager.take("b", wait=True).usable == 16
    manager.release("b")


# ---- interrupts


def interrupted(world: World, what: str, call: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.backend, what, raising(KeyboardInterrupt))
        refused(KeyboardInterrupt, "", call)


class Beginner(StampedBackend):
    """Has begun a copy when the interrupt comes out of the call, and can tell."""

    def _begin(self, moving: StampedMoving) -> StampedMoving:
        super()._begin(moving)
        raise KeyboardInterrupt

    def begun(self, held: Any) -> StampedMoving | None:
        """See `TransferBackend`."""
        return next((each for each in self.going if each.held is held), None)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("what", ["load", "offload", "demote"])
def test_an_interrupt_while_a_copy_is_begun(worlds: Any, what: str, begins: bool) -> None:
    """The transfer backend says whether it goes on. If it does, its blocks are given to nobody
    before it is over; if not, nothing of it is left."""
    policy = WritePolicy.BACK if what == "demote" else WritePolicy.THROUGH
    world = worlds(write=policy, low_water=0.0)
    manager = world.manager
    if what == "load":
        world.run("a", PROMPT)
        assert manager.can_allocate(32, evict=True)
    if begins:
        manager.state.backend = world.backend = Beginner(world.cache, world.store)
        world.backend.at_once = False
    else:
        manager.state.backend = TransferBackend(raising(KeyboardInterrupt))
    if what == "offload":
        world.start("a", PROMPT)
        table = manager.allocate("a", 18)[:4].copy()
        call: Callable[[], object] = partial(manager.commit, "a", 18)
    elif what == "demote":
        world.start("a", PROMPT)
        table = manager.allocate("a", 18)[:4].copy()
        manager.commit("a", 18)
        manager.release("a")
        call = partial(manager.demote, 4)
    else:
        manager.plan("a", PROMPT)
        manager.take("a")
        table = manager.allocate("a", 18)[:4].copy()
        call = partial(manager.load, "a")
    refused(KeyboardInterrupt, "", call)
    manager.poll()
    manager.state.backend = world.backend
    manager.release("a")
    assert manager.in_flight(table).any() == begins
    if begins:
        manager.plan("b", Prompt(tokens(18, 9)))
        manager.take("b")
        taken = manager.allocate("b", 4 * world.device.available)
        busy = table[manager.in_flight(table)]
        assert not set(taken.tolist()) & set(busy.tolist())
        manager.release("b")
        refused(WaitTimeout, "still touches", manager.wait_blocks, table, timeout=0)
    world.backend.finish()
    manager.poll()
    assert not manager.in_flight(table).any()
    world.nothing_left()
    manager.set_blocks(16)


class TransferBackend:
    """One that raises whatever it is asked."""

    shards = 1

    def __init__(self, call: Callable[..., Any]) -> None:
        self.load = self.offload = self.save = call


def test_another_number_of_blocks_tells_nothing_foreign(world: Any) -> None:
    """What a transfer backend has raised is for `poll`: the number is changed, and it is still
    told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.backend, "offload", raising(Odd))
        world.run("a", PROMPT)
    world.manager.set_blocks(16)
    assert world.device.blocks == 16
    refused(Odd, "arranged", world.manager.poll)
