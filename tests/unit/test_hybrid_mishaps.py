"""What goes wrong in the middle of a hybrid manager's calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.manager_case import Reading, Shelf, switch_off, tokens
from support.raising import raising
from support.refusals import refused

from lightcache.errors import CacheCorrupted, TransferFailed
from lightcache.manager import Prompt, WritePolicy
from lightcache.manager.transfers import State

PROMPT = Prompt(tokens(42))


@pytest.mark.parametrize("which", ["host", "device"])
@pytest.mark.parametrize("low_water", [0, 16], ids=["demoted", "low water"])
def test_an_index_that_is_disabled_while_states_are_written_back(
    hybrids: Any, which: str, low_water: int
) -> None:
    world = hybrids(states={"write": WritePolicy.BACK, "low_water": low_water})
    world.backend.at_once = False
    world.run("a", PROMPT)
    if not low_water:
        assert world.checkpoints.demote(4) == 1
    world.hybrid.poll()
    world.backend.finish()
    index = world.states.index if which == "host" else world.slots
    switch_off(index, 1)
    for _ in range(3):
        assert world.hybrid.poll() == 0
    switch_off(index, 0)
    world.backend.at_once = True
    assert world.there(PROMPT)["host"] == [40]
    world.hybrid.poll()


# ---- two threads


class Looked:
    """A copy that is over, and while that is seen another thread looks as well."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.thread = threading.Thread(target=self.other, args=(look,))
        self.both = threading.Barrier(2)
        self.raised: list[BaseException] = []

    def other(self, look: Callable[[], object]) -> None:
        try:
            look()
        except BaseException as error:
            self.raised.append(error)

    def done(self) -> bool:
        if self.thread.ident is None:
            self.thread.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            self.both.wait(timeout=0.2)  # who has to wait for the lock does not come
        return True

    def wait(self, timeout: float | None = None) -> None:
        del timeout


def test_a_load_that_two_threads_see_to_be_over(hybrids: Any) -> None:
    world = hybrids()
    world.run("a", PROMPT)
    world.slots.evict(16)
    world.hybrid.plan("b", PROMPT)
    assert world.hybrid.take("b").usable == 40
    world.hybrid.allocate("b", 42)
    looked = Looked(lambda: world.checkpoints.in_flight([0]))

    def load(lease: Any, *_: Any) -> Looked:
        lease.release()
        return looked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.backend, "load", load)
        world.hybrid.restore(["b"])
    looked.thread.join(30)
    assert looked.raised == []
    assert world.hybrid.stats().loads == 1
    world.hybrid.release("b", publish=False, at=0)


def test_a_launch_that_two_threads_see_to_be_over(hybrids: Any) -> None:
    world = hybrids()
    looked = Looked(lambda: world.checkpoints.in_flight([0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.copier, "zero", lambda *_: looked)
        world.begin("a", PROMPT, wait=False)
    looked.thread.join(30)
    assert looked.raised == []
    world.hybrid.release("a", publish=False, at=0)


# ---- a copier, a transfer backend or an index that fails at a request's end


@pytest.mark.parametrize("error", [RuntimeError, TransferFailed])
def test_a_copier_that_fails_at_a_requests_end(hybrids: Any, error: type[Exception]) -> None:
    world = hybrids()
    world.begin("a", PROMPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.copier, "copy", raising(error))
        with pytest.raises(error) if error is RuntimeError else contextlib.nullcontext():
            world.hybrid.release("a")
            world.hybrid.poll()  # tells of it, once; what is an error of ours nobody has to know
    assert world.hybrid.leaving == 0
    assert world.slots.stats().held == 0


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
def test_a_donation_that_fails_at_a_requests_end(hybrids: Any, first: bool) -> None:
    """Before the slot has a key, or behind it: it goes back, or is the cache's."""
    world = hybrids()
    world.begin("a", PROMPT)
    world.step("a", 40, save=False)
    donate = world.checkpoints.donate

    def failing(*given: Any, **how: Any) -> Any:
        if not first:
            donate(*given, **how)
        raise RuntimeError("arranged")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.checkpoints, "donate", failing)
        refused(RuntimeError, "arranged", world.end, "a")
    assert world.hybrid.poll() == 0
    assert world.slots.stats().held == 0
    assert world.there(PROMPT)["device"] == ([] if first else [40])


def test_an_interrupt_of_a_copier_at_a_requests_end(hybrids: Any) -> None:
    """The next poll asks the device once more how long a step writes what was its own."""
    world = hybrids()
    world.begin("a", PROMPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.copier, "copy", raising(KeyboardInterrupt))
        refused(KeyboardInterrupt, "", world.hybrid.release, "a")
    assert (world.hybrid.leaving, world.slots.stats().held) == (1, 2)
    assert world.hybrid.poll() == 0
    assert (world.hybrid.leaving, world.slots.stats().held) == (0, 0)


@pytest.mark.parametrize("which", ["host", "device"])
def test_an_index_that_is_disabled_while_states_are_donated(hybrids: Any, which: str) -> None:
    world = hybrids()
    world.begin("a", PROMPT)
    index = world.states.index if which == "host" else world.slots
    switch_off(index, 1)
    world.step("a", 40, save=False)
    world.end("a")
    switch_off(index, 0)
    assert world.hybrid.poll() == 0
    assert world.there(PROMPT) == {"device": [40] if which == "host" else [], "host": []}
    figures = world.hybrid.stats()
    assert (figures.failed_offloads, figures.refused) == ((1, 0) if which == "host" else (0, 1))


def test_an_index_that_is_disabled_while_a_prompts_state_is_saved(hybrids: Any) -> None:
    world = hybrids()
    world.begin("a", PROMPT)
    switch_off(world.states.index, 1)
    world.step("a", 42)
    switch_off(world.states.index, 0)
    assert world.there(PROMPT) == {"device": [40], "host": []}
    world.end("a")


# ---- storage that is being read


class BrokenReading(Reading):
    """Of which nothing can be waited for."""

    def wait(self, timeout: float | None = None) -> None:
        raise CacheCorrupted("arranged")


class Broken(Shelf):
    """Readings that break."""

    def prefetch(self, keys: Any, start: int = 0, *, namespace: Any = None, **_: Any) -> Any:
        return BrokenReading(self, keys, start, namespace)

    def prefetch_last_ready(self, keys: Any, *, namespace: Any = None, **_: Any) -> Any:
        return BrokenReading(self, keys, 0, namespace)


@pytest.mark.parametrize("which", ["storage", "state_storage"])
def test_a_reading_that_breaks(hybrids: Any, which: str) -> None:
    world = hybrids(**{which: Broken})
    world.run("a", PROMPT)
    longer = Prompt(tokens(60, 9))
    if which == "state_storage":
        world.compute(longer)
    world.hybrid.plan("b", longer)
    if which == "storage":  # nobody has asked for KV, as no state was found
        space = world.manager.state.weights.scope_of(longer.tenant)
        plan = world.manager.lookup._plans["b"]
        plan.reading = world.manager._storage.prefetch(longer.keys(space.host_spec))
    assert world.hybrid.take("b", wait=True).usable == 0
    world.hybrid.release("b")


# ---- an engine's own slots


def test_an_interrupt_while_a_copy_from_an_engines_slot_is_begun(hybrids: Any) -> None:
    """The transfer backend has begun nothing, so steps may write the slot again."""
    world = hybrids(slots=None)
    world.begin("a", PROMPT, slots=[1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.backend, "offload", raising(KeyboardInterrupt))
        refused(KeyboardInterrupt, "", world.step, "a", 42)
    world.hybrid.poll()
    transfer = world.hybrid._request("a").transfers[-1]
    assert transfer.state is State.FAILED
    assert world.hybrid._request("a").slots._read == set()
    world.hybrid.release("a", at=42)


def test_a_slot_of_an_engine_that_the_host_has_no_room_for(hybrids: Any) -> None:
    world = hybrids(slots=None, state_pages=1)
    full = world.states.reserve(world.path(Prompt(tokens(8, 5))).keys[:1])
    world.begin("a", PROMPT, slots=[1, 2])
    world.step("a", 42)
    assert world.hybrid._request("a").slots._read == set()
    full.release()
    world.end("a", at=False)


def test_a_plan_whose_pins_are_of_a_deeper_position_is_made_again(hybrids: Any) -> None:
    """An interrupt came after the position was lowered, and before its pins."""
    world = hybrids()
    world.run("x", PROMPT)
    world.hybrid.plan("a", PROMPT)
    world.hybrid._planner._plans["a"].position -= world.hybrid.parts.step
    match = world.hybrid.take("a")
    assert match.usable == 40
    assert world.hybrid._request("a").found is not None
    world.hybrid.release("a")
