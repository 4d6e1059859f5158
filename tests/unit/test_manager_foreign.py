"""Transfer backends that raise foreign exceptions: the transfer fails, and the next `poll` raises
the exception once."""

from __future__ import annotations

from typing import Any

import pytest
from support.manager_case import Shelf, World, on_host, tokens
from support.raising import Odd
from support.refusals import refused
from support.stamped import StampedBackend, StampedMoving, stamps_of

from lightcache.errors import TransferFailed
from lightcache.manager import Prompt, RequestOptions, WritePolicy

PROMPT = Prompt(tokens(18))


class OddMoving(StampedMoving):
    """A copy whose end is an exception, and whose pages are left to whoever has begun it."""

    def done(self) -> bool:
        if not self.over:
            return False
        raise Odd(f"arranged: done {self.backend.raised()}")

    def wait(self, timeout: float | None = None) -> None:
        del timeout
        self.over = True
        raise Odd(f"arranged: wait {self.backend.raised()}")


class OddBackend(StampedBackend):
    """Raises in one of three places, as long as `where` says so."""

    where = ""
    count = 0

    def raised(self) -> int:
        """How often, with this one."""
        self.count += 1
        return self.count

    def _begin(self, moving: StampedMoving) -> StampedMoving:
        if self.where == "begin":
            raise Odd(f"arranged: begin {self.raised()}")
        if self.where:
            odd = OddMoving(self, moving.held, moving.slots)
            odd.over = self.where == "at once"
            return odd
        return super()._begin(moving)


def made(worlds: Any, storage: bool, **config: Any) -> World:
    """A world whose transfer backend is odd when it is told to be."""
    world: World = worlds(storage=Shelf if storage else None, **config)
    world.backend = world.manager.state.backend = OddBackend(world.cache, world.store)
    return world


def begun(world: World, where: str) -> None:
    """From now on the transfer backend raises there."""
    world.backend.where = where  # type: ignore[attr-defined]


def raised_once(world: World, where: str) -> None:
    """By `poll`, and by it alone; nothing goes on then."""
    manager = world.manager
    if where == "wait":
        manager.wait_blocks()
    else:
        assert manager.in_flight() == 0
    begun(world, "")
    with pytest.raises(Odd, match="arranged") as found:
        manager.poll()
    assert manager.poll() == 0
    assert found.value.args == (f"arranged: {where.replace('at once', 'done')} 1",)
    assert manager.gauges().transfers == 0


def computed(world: World, request: str, begin: int = 0) -> Any:
    """Everything behind `begin`, and committed."""
    table = world.manager.allocate(request, 18)
    world.store.write(table, begin, stamps_of(PROMPT.tokens)[begin:])
    assert world.manager.commit(request, 18) == {}
    return table


every_place = pytest.mark.parametrize("where", ["begin", "at once", "wait"])
both = pytest.mark.parametrize("storage", [False, True], ids=["no storage", "storage"])


@every_place
@both
def test_an_offload(worlds: Any, where: str, storage: bool) -> None:
    world = made(worlds, storage)
    begun(world, where)
    world.start("a", PROMPT)
    table = computed(world, "a")
    raised_once(world, where)
    assert not world.manager.in_flight(table).any()
    figures = world.manager.stats()
    assert (figures.failed_offloads, figures.offloads, figures.errors) == (1, 0, 0)
    assert on_host(world, PROMPT) == 0
    world.manager.release("a", wait=True)
    world.nothing_left()
    assert world.run("b", PROMPT).device == 16


@every_place
@both
def test_a_load(worlds: Any, where: str, storage: bool) -> None:
    world = made(worlds, storage)
    manager = world.manager
    if storage:
        shelf: Any = manager._storage
        shelf.store(PROMPT)
        manager.plan("a", PROMPT)
        shelf.tasks[0].go_on()
    else:
        world.run("first", PROMPT)
        assert manager.can_allocate(32, evict=True)
    assert manager.plan("a", PROMPT).usable == 16
    manager.take("a")
    table = manager.allocate("a", 18)
    begun(world, where)
    load = manager.load("a")
    if where == "wait":
        refused(TransferFailed, "arranged", load.wait)
    with pytest.raises(TransferFailed, match="compute these tokens instead") as found:
        load.done()
    assert isinstance(found.value.__cause__, Odd)
    assert (load.tokens, load.failed) == (0, True)
    raised_once(world, where)
    assert world.cache.check().pins == 0  # though the request runs, and its load handle exists
    assert manager.stats().failed_loads == 1
    assert not manager.in_flight(table).any()
    computed(world, "a")
    manager.release("a", wait=True)
    world.nothing_left()
    assert world.run("b", PROMPT).device == 16


@every_place
@both
@pytest.mark.parametrize("cause", ["demote", "room", "low water"])
def test_a_demotion(worlds: Any, where: str, storage: bool, cause: str) -> None:
    low, gone = (0.9, 3) if cause == "low water" else (0.0, 4)
    how: Any = {"blocks": 8, "write": WritePolicy.BACK, "low_water": low, "failures": 9}
    world = made(worlds, storage, **how)
    manager = world.manager
    world.run("a", PROMPT, options=RequestOptions(tiers=frozenset({"device", "host"})))
    begun(world, where)
    if cause == "demote":
        assert manager.demote(4) == 4
        raised_once(world, where)
    elif cause == "room":
        assert manager.can_allocate(8, evict=True) is (where != "wait")
        raised_once(world, where)
    elif where == "wait":
        manager.poll()
        raised_once(world, where)
    else:
        with pytest.raises(Odd, match="arranged"):
            manager.poll()  # which had begun it
        begun(world, "")
        manager.poll()
    figures = manager.stats()
    assert figures.failed_offloads == gone
    assert (figures.demotions, figures.demotions_lost) == (0, gone)
    assert world.device.free == 4 + gone
    world.nothing_left()
    assert world.run("b", PROMPT).usable == 4 * (4 - gone)


def test_what_a_commit_says_is_not_lost(worlds: Any) -> None:
    """Blocks to exchange, in the very call in which the transfer backend raises."""
    world = made(worlds, False)
    for request in "ab":
        world.start(request, PROMPT)
    computed(world, "a")
    table = world.manager.allocate("b", 18)
    world.store.write(table, 0, stamps_of(PROMPT.tokens))
    world.cache.evict(32)
    begun(world, "begin")
    assert len(world.manager.commit("b", 18)) == 4
    raised_once(world, "begin")
    for request in "ab":
        world.manager.release(request)


def test_of_several_the_first_is_raised_and_the_others_are_logged(
    worlds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world = made(worlds, False)
    others = [Prompt(tokens(18, seed)) for seed in range(1, 4)]
    for i, prompt in enumerate(others):
        world.start(i, prompt)
        world.store.write(world.manager.allocate(i, 18), 0, stamps_of(prompt.tokens))
    begun(world, "begin")
    world.manager.commit_many(range(3), [18] * 3)
    raised_once(world, "begin")
    assert world.manager.stats().failed_offloads == 3
    said = [each.getMessage() for each in caplog.records if "beside the" in each.getMessage()]
    assert [f"begin {n}" in said[n - 2] for n in (2, 3)] == [True, True]
    for i in range(3):
        world.manager.release(i)


def test_closing_raises_what_nobody_has_polled_for(worlds: Any) -> None:
    world = made(worlds, False)
    begun(world, "begin")
    world.start("a", PROMPT)
    computed(world, "a")
    refused(Odd, "arranged", world.manager.close)
    world.manager.close()


@pytest.mark.parametrize("what", ["abort", "release", "update", "close", "resume"])
@every_place
def test_a_copy_that_was_queued(worlds: Any, where: str, what: str) -> None:
    world = made(worlds, False)
    manager = world.manager
    world.start("a", PROMPT)
    manager.pause()
    computed(world, "a")
    assert manager.gauges().queued == 1
    begun(world, where)
    if what in ("abort", "release"):
        manager.release("a", publish=what == "release")
    if what == "update":
        manager.begin_update()
        manager.finish_update("other")
    if what == "close":  # an abort of all: what was not begun never is
        manager.close()
    else:
        manager.resume()
        if what == "abort":
            begun(world, "")
            manager.poll()
        else:
            raised_once(world, where)
        manager.release("a")
    world.nothing_left()
    assert manager.stats().failed_offloads == 1


def test_a_copy_among_others_that_go_on(worlds: Any) -> None:
    """The one that raises holds nobody up: what is over behind it is seen by the same call."""
    world = made(worlds, False)
    manager, other = world.manager, Prompt(tokens(18, 7))
    for request, prompt in (("a", PROMPT), ("b", other)):
        world.start(request, prompt)
        world.store.write(manager.allocate(request, 18), 0, stamps_of(prompt.tokens))
    begun(world, "later")
    manager.commit("a", 18)
    begun(world, "")
    world.backend.at_once = False
    manager.commit("b", 18)
    assert manager.in_flight() == 2
    world.backend.finish()
    manager.state.transfers._all[0].moving.over = True
    refused(Odd, "arranged", manager.poll)
    assert manager.in_flight() == 0
    assert on_host(world, other) == 4
    for request in "ab":
        manager.release(request)
