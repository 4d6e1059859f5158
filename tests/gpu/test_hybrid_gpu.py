"""A hybrid model on one GPU: states and KV on the device and in pinned host pages, with nobody
waiting but streams. What every pass sees is compared with a model alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu.hybrid_rig import Rig
from gpu.place import place
from support.refusals import refused

from lightcache.errors import OutOfPages
from lightcache.hybrid.checkpoints import Tier
from lightcache.hybrid.saving import Saves
from lightcache.manager import WritePolicy

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STAND_IN = True


@pytest.fixture
def where() -> Iterator[Any]:
    made = place()
    with made.computing():
        yield made
    made.close()


@pytest.fixture
def rigs(where: Any, segment_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Rig] = []

    def make(**how: Any) -> Rig:
        made.append(Rig(where, f"{segment_name}-{len(made)}", monkeypatch, **how))
        made[-1].warm()
        return made[-1]

    yield make
    for rig in reversed(made):
        rig.close()


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 800, n).tolist()


# ---- a request's way


@pytest.mark.parametrize("saves", Saves)
def test_prompts_hit_where_others_saved(rigs: Any, saves: Saves) -> None:
    rig = rigs(saves=saves)
    every = tokens(42)
    assert rig.run("a", every).usable == 0
    assert rig.there(every)["device"] == [16, 32, 40]
    rig.settle()
    assert rig.there(every)["host"] == [16, 32, 40]
    match = rig.run("b", [*every, *tokens(9, 1)])
    assert (match.usable, match.tier) == (40, Tier.DEVICE)
    # Where prompts part, the second leaves a state for the third.
    match = rig.run("c", [*every[:26], *tokens(9, 2)])
    assert (match.usable, match.branching) == (16, 24)
    assert rig.begin("d", [*every[:26], *tokens(9, 3)], 35).usable == 24
    rig.prefill("d")
    rig.end("d")
    rig.nothing_left()


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("idle", [True, False])
def test_what_is_generated_is_found(rigs: Any, ahead: bool, idle: bool) -> None:
    """Decoding saves at multiples of 8, and its newest saved state is donated, with a pass in
    flight that may still write the slots, or behind all of them."""
    rig = rigs(ahead=ahead)
    every = tokens(45)
    rig.begin("a", every, 22)
    rig.prefill("a")
    rig.decode("a", ahead=ahead)
    rig.end("a", idle=idle)
    rig.settle()
    found = rig.there([*every, 0])
    assert found["device"] == found["host"] == [16, 20, 40]
    assert rig.run("b", [*every, *tokens(5, 1)]).usable == 40
    rig.nothing_left()


def test_slots_without_a_match_are_zero(rigs: Any, where: Any) -> None:
    """Whatever was in them, and while another request's last kernels run."""
    rig = rigs(slots=4, state_pages=1)
    for turn in range(6):
        rig.begin(turn, tokens(9, turn), 9)
        rig.prefill(turn)
        rig.end(turn, idle=turn % 2 == 0)
    rig.nothing_left()


# ---- streams


def test_restoring_waits_for_nobody(rigs: Any, where: Any) -> None:
    rig = rigs()
    every = tokens(42)
    rig.run("a", every)
    rig.settle()
    gate = where.gate()
    where.compute.wait_event(gate.event)
    try:
        longer = [*every, *tokens(9, 1)]
        assert rig.begin("b", longer, len(longer)).usable == 40
        rig.begin("c", tokens(20, 2), 20)  # zeroed
        for request in ("b", "c"):
            rig.launch(request, rig.running[request].at + 4)
        working = [rig.working("b"), rig.working("c")]
        assert rig.checkpoints.in_flight(working).all()
        rig.forget_device(kv=False)
        assert rig.pinned_checkpoints() == 1, "as long as it is read"
    finally:
        gate.open()
    for request in ("b", "c"):
        rig.arrive(request)
        rig.prefill(request)
        rig.end(request)
    assert rig.there(every)["device"] == [40], "the others were evicted"
    rig.nothing_left()


def test_a_checkpoint_never_changes(rigs: Any, where: Any) -> None:
    """Requests that continue from it write slots of their own, also when they run at once, each on
    a stream of its own."""
    rig = rigs(slots=20)
    every = tokens(41)
    rig.run("a", every)
    streams = [None, where.stream(), where.stream()]
    branches = [[*every[:40], *tokens(20, seed)] for seed in (1, 2, 3)]
    for number, stream in enumerate(streams):
        match = rig.begin(number, branches[number], 44, stream)
        assert (match.usable, match.tier) == (40, Tier.DEVICE)
    for _ in range(10):
        for number in range(3):
            rig.launch(number, rig.running[number].at + 2)
    for number in range(3):
        rig.end(number)
    assert rig.there(every)["device"] == [16, 32, 40]
    for branch in branches:
        assert rig.there(branch)["device"] == [16, 32, 40, 60]
    rig.settle()
    rig.nothing_left()


def test_states_come_from_the_host(rigs: Any, where: Any) -> None:
    """Straight to the working slot, on another stream: the model's does not run ahead of it."""
    rig = rigs()
    every = tokens(42)
    rig.run("a", every)
    rig.settle()
    rig.forget_device()
    assert rig.there(every)["device"] == []
    gate = where.gate()
    rig.after.append(gate.event)
    try:
        match = rig.begin("b", [*every, *tokens(9, 1)], 51)
        assert (match.usable, match.tier, match.device_tokens) == (40, Tier.HOST, 0)
        loading = rig.running["b"].load
        rig.launch("b", 44)
        assert not loading.done()
        assert not rig.running["b"].passes[0].mark.query(), "the pass waits for the loads"
        assert rig.checkpoints.in_flight([rig.working("b")]).all()
        # Nobody is given what the copy reads or writes.
        rig.host.evict(rig.host.pages)
        rig.cache.evict(rig.cache.pages)
        refused(OutOfPages, "", rig.checkpoints.acquire, 9)
        others = rig.host.index.allocate(11)
        rig.host.pool.array[others.pages] = 0xEE
    finally:
        rig.after.clear()
        gate.open()
    rig.arrive("b")
    assert loading.done()
    others.free()
    rig.prefill("b")
    rig.end("b")
    rig.nothing_left()


def test_an_abort_while_its_state_is_loaded(rigs: Any, where: Any) -> None:
    rig = rigs()
    every = tokens(42)
    rig.run("a", every)
    rig.settle()
    rig.forget_device()
    gate = where.gate()
    rig.after.append(gate.event)
    try:
        rig.begin("b", every, 42)
        slot = rig.working("b")
        rig.end("b", publish=False)
        rig.hybrid.poll()
        assert rig.hybrid.leaving == 1
        refused(OutOfPages, "", rig.checkpoints.acquire, 9)
        taken = rig.checkpoints.acquire(8)  # all but its two
        assert slot not in taken.pages
    finally:
        rig.after.clear()
        gate.open()
    rig.settle()
    taken.free()
    assert rig.hybrid.leaving == 0
    assert rig.there(every)["host"] == [16, 32, 40]
    rig.nothing_left()


def test_an_abort_while_its_state_is_copied(rigs: Any, where: Any) -> None:
    """A slot whose copy has not been executed is no target of a load for the next request."""
    rig = rigs(slots=4)
    every = tokens(21)
    rig.run("a", every)
    rig.settle()
    gate = where.gate()
    where.compute.wait_event(gate.event)
    try:
        assert rig.begin("b", every, 21).tier is Tier.DEVICE
        slot = rig.working("b")
        rig.end("b", publish=False)
        assert rig.hybrid.leaving == 1
        checkpoints = rig.hybrid.checkpoints
        others = checkpoints.acquire(checkpoints.slots.stats().free)
        assert slot not in others.pages
        others.free()
        assert rig.pinned_checkpoints() == 1
    finally:
        gate.open()
    rig.settle()
    assert rig.run("c", every).usable == 20
    rig.nothing_left()


# ---- to the host


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.BACK])
def test_slots_stay_while_the_host_gets_them(rigs: Any, where: Any, write: WritePolicy) -> None:
    rig = rigs(states={"write": write})
    every, back = tokens(21), write is WritePolicy.BACK
    if back:
        rig.run("a", every)
        assert rig.there(every) == {"device": [16, 20], "host": []}
    gate = where.gate()
    rig.after.append(gate.event)
    try:
        if back:
            assert rig.checkpoints.demote(2) == 2
        else:
            rig.run("a", every)
        rig.hybrid.poll()
        assert rig.host.index.stats().writing == 2
        rig.slots.evict(rig.slots.pages)
        assert rig.pinned_checkpoints() == 2, "copies read them"
        refused(OutOfPages, "", rig.checkpoints.acquire, 9)
    finally:
        rig.after.clear()
        gate.open()
    rig.settle()
    assert rig.there(every)["host"] == [16, 20]
    assert rig.there(every)["device"] == ([] if back else [16, 20])
    rig.forget_device()
    assert rig.run("b", every).tier is Tier.HOST
    rig.nothing_left()


def test_a_storm(rigs: Any, where: Any) -> None:
    """Requests that begin, go on, end and are aborted on several streams, with so few slots and
    pages that everything is evicted all the time."""
    rig = rigs(slots=12, state_pages=6, blocks=56, pages=24, ahead=True)
    random = np.random.default_rng(5)
    trunk, streams = tokens(64, 9), [None, where.stream(), where.stream()]
    for number in range(120):
        running = list(rig.running)
        if len(running) < 3:
            cut, length = int(random.integers(0, 40)), int(random.integers(2, 24))
            every = [*trunk[:cut], *tokens(length, int(random.integers(0, 4)))]
            prompt = max(1, len(every) - int(random.integers(0, 10)))
            try:
                rig.begin(number, every, prompt, streams[number % 3])
            except OutOfPages:
                rig.hybrid.release(number, publish=False)
            continue
        one = running[int(random.integers(0, 3))]
        kind = int(random.integers(0, 6))
        if kind == 0:
            rig.end(one, publish=False, idle=False)
        else:
            rig.prefill(one)
            rig.decode(one)
            rig.end(one, idle=kind > 2)
        rig.hybrid.poll()
        if kind == 5:
            rig.forget_device()
    for one in list(rig.running):
        rig.end(one, publish=False)
    found = rig.hybrid.stats()
    assert min(found.device_hits, found.host_hits, found.loads, found.copies) > 0, found
    assert found.failed_loads == found.failed_offloads == 0
    rig.nothing_left()
