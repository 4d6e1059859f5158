"""Transfer backends, copiers and storages of states that raise what is none of our errors: as
KV's, out of `poll`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.hybrid_case import HybridWorld
from support.manager_case import Reading, Shelf, tokens
from support.raising import Odd, raising
from support.refusals import refused

from lightcache.errors import LockTimeout, TransferFailed
from lightcache.manager import Prompt, WritePolicy

PROMPT = Prompt(tokens(42))


def odd(*_: Any, **__: Any) -> Any:
    raise Odd("arranged")


def raised_once(world: HybridWorld) -> None:
    """By `poll` of both together."""
    refused(Odd, "arranged", world.hybrid.poll)
    assert world.hybrid.poll() == 0


@pytest.mark.parametrize("what", ["kv", "state"])
def test_a_load(hybrids: Any, what: str) -> None:
    world = hybrids()
    world.run("a", PROMPT)
    world.slots.evict(16)
    world.world.index.evict(64)
    world.hybrid.plan("b", PROMPT)
    assert world.hybrid.take("b").usable == 40
    world.hybrid.allocate("b", 42)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.backend if what == "state" else world.world.backend, "load", odd)
        world.hybrid.restore(["b"])
        load = world.hybrid.load("b")
    refused(TransferFailed, "arranged", load.wait)
    assert (load.failed, load.tokens) == (True, 0)
    raised_once(world)
    assert world.hybrid.restart("b").usable == 0
    world.hybrid.allocate("b", 42)
    world.begun("b", PROMPT, 0)
    world.step("b", 42)
    world.end("b")
    assert world.look(PROMPT).usable == 40


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.BACK], ids=["now", "later"])
def test_an_offload(hybrids: Any, write: WritePolicy) -> None:
    world = hybrids(states={"write": write, "low_water": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.backend, "offload", odd)
        world.run("a", PROMPT)
        if write is WritePolicy.BACK:
            world.checkpoints.demote(4)
    raised_once(world)
    assert world.hybrid.stats().failed_offloads == 1
    assert world.there(PROMPT) == {"device": [40], "host": []}  # it stays where it is


def test_of_both_in_one_step_neither_is_lost(hybrids: Any) -> None:
    world = hybrids()
    with pytest.MonkeyPatch.context() as patch:
        for backend in (world.backend, world.world.backend):
            patch.setattr(backend, "offload", odd)
        world.run("a", PROMPT)
    with pytest.raises(Odd, match="arranged") as found:
        world.hybrid.poll()
    assert isinstance(found.value.__context__, Odd)
    assert world.hybrid.poll() == 0


def test_a_copy_between_slots(hybrids: Any) -> None:
    """The device has failed, so it copies nothing more: what that held goes back."""
    world = hybrids()
    world.run("a", PROMPT)
    world.copier.at_once = False
    world.begin("b", PROMPT, wait=False)
    world.copier.going[0].done = odd
    raised_once(world)
    world.copier.going.clear()
    world.hybrid.release("b", publish=False, at=40)


def test_closing_raises_what_nobody_has_polled_for(hybrids: Any) -> None:
    world = hybrids()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.backend, "offload", odd)
        world.run("a", PROMPT)
    refused(Odd, "arranged", world.checkpoints.close)
    world.checkpoints.close()


class OddShelf(Shelf):
    """A storage that fails each write."""

    write = odd

    def prefetch_last_ready(self, keys: Any, **how: Any) -> Any:
        """It has nothing."""
        del how
        return Reading(self, keys, 0, None)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
def test_a_storage_of_states(hybrids: Any, late: bool) -> None:
    """The call within which it was asked goes on, and so does the bound."""
    world = hybrids(state_storage=OddShelf, states={"most": 1})
    world.backend.at_once = not late
    for request, prompt in (("a", Prompt(PROMPT.tokens[:26])), ("b", PROMPT)):
        world.begin(request, prompt)
        world.step(request, len(prompt))
        world.backend.finish()
        assert not world.checkpoints.in_flight(range(16)).any()
        raised_once(world)
        world.end(request)
    assert world.there(PROMPT)["host"] == [24, 40]
    world.states.evict(1)  # what the bound supersedes goes first
    assert world.there(PROMPT)["host"] == [40]


def test_closing_a_hybrid_manager_looks_for_what_is_over(hybrids: Any) -> None:
    """Behind what its checkpoints raise."""
    world = hybrids()
    world.begin("a", PROMPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.backend, "offload", odd)
        world.step("a", 42)
    world.copier.at_once = False
    world.hybrid.release("a")
    assert world.hybrid.leaving == 1
    world.copier.finish()
    refused(Odd, "arranged", world.hybrid.close)
    assert (world.hybrid.leaving, world.slots.stats().held) == (0, 0)
    world.hybrid.close()


def test_a_launch_whose_pins_cannot_go_holds_up_no_other(hybrids: Any) -> None:
    world = hybrids()
    transfers, slots = world.checkpoints.transfers, np.array([15], np.int32)
    stuck: Any = SimpleNamespace(release=raising(LockTimeout))
    transfers.launch(slots, world.copier.zero, (slots,), odd, of=[], leases=[stuck])
    world.begin("a", PROMPT)
    world.step("a", 40)
    world.end("a")
    assert world.hybrid.poll() == 0
