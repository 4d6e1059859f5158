"""Random requests over a tree of prompts, against an oracle that knows what must be usable.

States and KV are stamps of the tokens they belong to. The device runs behind its scheduler: what is
launched on its stream happens later, in order; transfers happen whenever they like.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.hybrid_case import HybridWorld
from support.stamped import stamps_of

from lightcache.errors import OutOfPages, TransferFailed, WaitTimeout
from lightcache.hybrid.saving import Grid, Saves
from lightcache.manager import Prompt, WritePolicy

_numbers = itertools.count()
MOST = 120
SHAPES: list[dict[str, Any]] = [
    # Room for everything: the oracle needs not look what is there.
    {"slots": 400, "state_pages": 400, "blocks": 2000, "pages": 2000},
    {"slots": 400, "state_pages": None, "blocks": 2000, "pages": 2000, "chunk": 8},
    # States run short, then KV, then both.
    {"slots": 6, "state_pages": 3, "blocks": 200, "pages": 200},
    {"slots": 6, "state_pages": 60, "blocks": 200, "pages": 200},
    {"slots": 8, "state_pages": 30, "blocks": 48, "pages": 30, "chunk": 8},
    {"slots": 5, "state_pages": 8, "blocks": 40, "pages": 12, "block": 4, "page": 8},
    {"slots": 9, "state_pages": None, "blocks": 60, "pages": 90, "block": 4, "page": 2},
    {"slots": None, "state_pages": 6, "blocks": 50, "pages": 50},
]
pick = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Step:
    """A pass that was launched, and what it saves."""

    positions: list[int] = field(default_factory=list)
    executed: bool = False


@dataclass(eq=False)
class One:
    """A running request as the engine sees it."""

    prompt: Prompt
    every: list[int]
    """Tokens whose ids are known."""
    at: int
    """Tokens behind which its state stands, when all that was launched has happened."""
    load: Any
    slots: list[int] | None
    ready: bool = False
    steps: list[Step] = field(default_factory=list)
    due: int | None = None
    """Where the last pass ended, to be saved by `next_slot` when the next one is launched."""


class HybridMachine(RuleBasedStateMachine):
    """One engine."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = f"{name}.{next(_numbers)}"
        self.world: HybridWorld | None = None

    @initialize(
        shape=st.sampled_from(SHAPES),
        tail=st.booleans(),
        ahead=st.booleans(),
        saves=st.sampled_from(Saves),
        write=st.sampled_from([WritePolicy.THROUGH, WritePolicy.BACK]),
        most=st.sampled_from([None, None, 1, 2]),
        drop=st.booleans(),
    )
    def open(
        self,
        shape: dict[str, Any],
        tail: bool,
        ahead: bool,
        saves: Saves,
        write: WritePolicy,
        most: int | None,
        drop: bool,
    ) -> None:
        """An engine of some shape."""
        self.roomy = shape["blocks"] == 2000
        # Where blocks, pages and grid are the same there is no key after the grid's last position.
        block, page = shape.get("block", 4), shape.get("page", 4)
        grid = Grid(block, page, shape.get("chunk", 4), 16)
        tail = tail and grid.grid > grid.fine
        self.world = HybridWorld(
            self.name,
            tail=tail,
            every=16,
            weights="",
            states={"write": write, "most": None if self.roomy else most, "low_water": 1},
            config={"ahead": ahead, "saves": saves, "drop_tails": drop and not self.roomy},
            **shape,
        )
        self.hybrid, self.ahead = self.world.hybrid, ahead
        self.step_of = self.hybrid.parts.step
        self.seed = 0
        self.known: list[Prompt] = [Prompt(list(range(1, 40)))]
        self.running: dict[int, One] = {}
        self.planned: dict[int, Prompt] = {}
        self.ids = itertools.count()
        self.kv: set[tuple[int, ...]] = set()
        """Prefixes whose KV was published; where there is room for everything."""
        self.states: set[tuple[int, ...]] = set()
        """The same of checkpoints."""

    # ---- what must be usable

    def flags(self, index: Any, keys: Any, space: Any) -> list[bool]:
        """Which of these keys are there, each for itself."""
        found = index.peek_many(keys, np.arange(len(keys) + 1), namespace=space)
        return [bool(each) for each in found]

    def expected(self, prompt: Prompt) -> tuple[int, int]:
        """Tokens whose KV is there, and those that are usable, by trying every position."""
        assert self.world is not None
        manager = self.world.manager
        space = manager.state.weights.scope_of(prompt.tenant)
        block, page = manager.device.block_tokens, manager.page_tokens
        device = self.flags(manager.device.index, prompt.keys(space.device_spec), space.device)
        host = self.flags(manager.host.index, prompt.keys(space.host_spec), space.host)

        def reach(limit: int) -> int:
            end = 0
            while (end + 1) * block <= limit and device[end]:
                end += 1
            at = end * block
            number = at // page
            while (number + 1) * page <= limit and host[number]:
                number += 1
                at = max(at, number * page)
            return at

        deep = reach(len(prompt) - 1)
        there = {position for each in self.world.there(prompt).values() for position in each}
        usable = [
            position for position in there if position <= deep and reach(position) == position
        ]
        return deep, max(usable, default=0)

    def imagined(self, prompt: Prompt) -> tuple[int, int]:
        """The same by what was ever published, where nothing is evicted."""
        tokens = tuple(prompt.tokens.tolist())
        lengths = range(len(tokens))
        deep = max((n for n in lengths if tokens[:n] in self.kv), default=0)
        return deep, max((n for n in lengths if n <= deep and tokens[:n] in self.states), default=0)

    def compare(self, prompt: Prompt, match: Any) -> None:
        """A match against both."""
        found = match.kv_tokens, match.usable
        assert found == self.expected(prompt)
        if self.roomy:
            assert found == self.imagined(prompt)
        assert match.device_tokens + match.host_tokens + match.storage_tokens == match.usable
        assert min(match.device_tokens, match.host_tokens, match.storage_tokens) >= 0
        assert match.branching == self.hybrid.grid.branching(match.kv_tokens, match.usable)

    def stamps(self, tokens: Any) -> Any:
        """Of other weights they are others."""
        return stamps_of(tokens, self.seed * 7919)

    # ---- prompts

    def prompt(self, base: int, cut: int, tail: list[int]) -> Prompt:
        """A branch of one that was there."""
        stem = self.known[base % len(self.known)]
        tokens = [*stem.tokens[: cut % (len(stem) + 1)].tolist(), *tail][:MOST]
        made = Prompt(tokens)
        self.known = [*self.known[-7:], made]
        return made

    # ---- rules

    @rule(base=pick, cut=pick, tail=st.lists(st.integers(0, 3), min_size=1, max_size=40))
    def begin(self, base: int, cut: int, tail: list[int]) -> None:
        """A request."""
        if len(self.running) < 3:
            self.start(next(self.ids), self.prompt(base, cut, tail))

    @rule(base=pick)
    def begin_again(self, base: int) -> None:
        """A prompt that was there."""
        if len(self.running) < 3:
            self.start(next(self.ids), self.known[base % len(self.known)])

    @rule(
        base=pick,
        cut=st.one_of(pick, st.just(-1)),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=30),
        size=st.integers(1, 60),
        more=st.integers(0, 20),
        finish=st.booleans(),
    )
    def serve(
        self, base: int, cut: int, tail: list[int], size: int, more: int, finish: bool
    ) -> None:
        """A request that nothing holds up, and perhaps it is let go on later."""
        if len(self.running) >= 3:
            return
        request = next(self.ids)
        self.start(request, self.prompt(base, cut, tail))
        if request not in self.running:
            return
        one, where = self.running[request], len(self.running) - 1
        self.hybrid.resume()
        self.transfers(99, 99, True)
        while request in self.running and one.at < len(one.prompt):
            before = one.at
            self.compute(where, size, 0)
            if one.at == before:
                return  # no room
        for _ in range(more):
            if request in self.running:
                self.compute(where, 1, 1)
        if finish and request in self.running:
            self.end(where, True, None)

    @rule(base=pick, cut=pick, tail=st.lists(st.integers(0, 3), min_size=1, max_size=9))
    def plan(self, base: int, cut: int, tail: list[int]) -> None:
        """Look, and perhaps take it later."""
        if len(self.planned) < 3:
            request, prompt = next(self.ids), self.prompt(base, cut, tail)
            self.compare(prompt, self.hybrid.plan(request, prompt))
            self.planned[request] = prompt

    @rule(base=pick, tail=st.lists(st.integers(0, 3), min_size=20, max_size=40), size=pick)
    def served_meanwhile(self, base: int, tail: list[int], size: int) -> None:
        """A prompt that waits is computed by somebody else, and then finds more."""
        if len(self.running) >= 3:
            return
        request, prompt = next(self.ids), self.prompt(base, -1, tail)
        self.compare(prompt, self.hybrid.plan(request, prompt))
        self.serve(-1, -1, [7, 7], size % 40 + 1, 0, True)
        self.compare(prompt, self.hybrid.plan(request, prompt))
        self.hybrid.cancel(request)

    @precondition(lambda self: self.running and not self.roomy)
    @rule(which=pick, base=pick)
    def aborted_for(self, which: int, base: int) -> None:
        """A request goes while the device is behind, and another one's state is loaded."""
        assert self.world is not None
        self.hybrid.resume()
        self.transfers(99, 99, True)
        if self.world.slots is not None:
            self.world.slots.evict(99)
        self.abort(which)
        self.begin_again(base)

    @precondition(lambda self: self.planned)
    @rule(which=pick, take=st.booleans())
    def planned_before(self, which: int, take: bool) -> None:
        """What was planned is planned again, and taken or not."""
        request = list(self.planned)[which % len(self.planned)]
        prompt = self.planned[request]
        match = self.hybrid.plan(request, prompt)
        self.compare(prompt, match)
        assert self.hybrid.plan(request, prompt) is match
        if take and len(self.running) < 3:
            del self.planned[request]
            self.start(request, prompt)

    @precondition(lambda self: self.planned)
    @rule(which=pick)
    def cancel(self, which: int) -> None:
        """Nothing is wanted of it any more."""
        request = list(self.planned)[which % len(self.planned)]
        del self.planned[request]
        self.hybrid.cancel(request)

    def start(self, request: int, prompt: Prompt) -> None:
        """Plan, take, allocate, restore, fetch; without room nothing is left of it."""
        assert self.world is not None
        planned = self.hybrid.plan(request, prompt)
        self.compare(prompt, planned)
        match = self.hybrid.take(request)
        assert match.usable == planned.usable
        slots = None
        try:
            self.hybrid.allocate(request, len(prompt))
            if self.world.slots is None:
                slots = self.engine_slots()
            restored = self.hybrid.restore([request], None if slots is None else [slots])
        except OutOfPages:
            self.hybrid.release(request, publish=False)
            return
        assert len(restored.working) == 1
        load = self.hybrid.load(request)
        self.running[request] = One(prompt, prompt.tokens.tolist(), match.usable, load, slots)

    def engine_slots(self) -> list[int]:
        """Of an engine that numbers them itself: those that nobody has and no copy touches."""
        assert self.world is not None
        used = {slot for one in self.running.values() for slot in one.slots or []}
        flying = self.world.checkpoints.in_flight(np.arange(64, dtype=np.int32))
        free = [slot for slot in range(64) if slot not in used and not flying[slot]]
        return free[: 3 if self.ahead else 2]

    @precondition(lambda self: self.running)
    @rule(which=pick, size=st.integers(1, 40), generated=st.integers(0, 3))
    def compute(self, which: int, size: int, generated: int) -> None:
        """A pass."""
        request = list(self.running)[which % len(self.running)]
        one = self.running[request]
        if not self.is_ready(request, one):
            return
        self.results(request, one, 1 if self.ahead else 0)
        begin, known = one.at, len(one.prompt)
        if begin < known:
            plan = self.hybrid.save_plan(request, begin, min(known, begin + size))
            end, position = plan.end, plan.position
        elif begin < MOST:
            if begin == len(one.every):
                one.every.append(generated)
            end, position = begin + 1, begin + 1
            position = position if position % self.hybrid.grid.interval == 0 else None
        else:
            return
        self.launch(request, one, begin, end, position)

    def is_ready(self, request: int, one: One) -> bool:
        """Whether its loads are over; what failed begins anew."""
        assert self.world is not None
        if one.ready:
            return True
        try:
            one.ready = one.load.done()
        except TransferFailed:
            loading = self.hybrid._request(request).loading
            if loading is not None and not loading.finished:
                return False
            assert one.load.tokens == 0
            assert self.hybrid.restart(request).usable == 0
            one.at = 0
            try:
                self.hybrid.allocate(request, len(one.prompt))
            except OutOfPages:
                self.over(request, publish=False, at=None)
                return False
            one.load = self.hybrid.load(request)
            one.ready = one.load.done()
        if one.ready:
            stamps = self.stamps(one.every)[: one.at]
            assert (self.world.world.content(request, one.at) == stamps).all()
        return one.ready

    def launch(self, request: int, one: One, begin: int, end: int, position: int | None) -> None:
        """A forward pass on the device's stream."""
        assert self.world is not None
        hybrid, store = self.hybrid, self.world.store.slots
        try:
            table = hybrid.allocate(request, end)["prefix"]
        except OutOfPages:
            return
        stamps = self.stamps(one.every)
        self.world.world.store.write(table, begin, stamps[begin:end])
        source, slot, step = hybrid._request(request).slots.working, None, Step()
        if one.due is not None:
            assert one.due == begin
            if hybrid.next_slot(request, begin) is not None:
                step.positions.append(begin)
            one.due = None
        if position is not None and position < end:
            slot = hybrid.saving(request, position)
        if slot is not None and position is not None:
            step.positions.append(position)
        target = hybrid._request(request).slots.working
        before = stamps[begin - 1] if begin else 0

        def act() -> None:
            assert store[source] == before, f"not the state after {begin} tokens"
            if slot is not None and position is not None:
                store[slot] = stamps[position - 1]
            store[target] = stamps[end - 1]

        self.world.copier.launch(act)
        if position == end and request % 2:  # as kernels that read one slot and write another
            one.due = end
        elif position == end and hybrid.save([request], [end])[0]:
            step.positions.append(end)

        def executed() -> None:
            step.executed = True

        self.world.copier.launch(executed)
        one.steps.append(step)
        one.at = end
        known = len(one.prompt)
        fresh = np.array(one.every[max(begin, known) : end], np.int64)
        hybrid.commit(request, end, new_tokens=fresh if len(fresh) else None)
        if self.roomy:
            block = self.world.manager.device.block_tokens
            for n in range(0, end + 1, block):
                self.kv.add(tuple(one.every[:n]))

    def results(self, request: int, one: One, left: int) -> None:
        """The results of its steps have arrived, but for those of the last `left`."""
        assert self.world is not None
        while len(one.steps) > left:
            step = one.steps[0]
            while not step.executed:
                self.world.copier.finish(1)
            del one.steps[0]
            for position in step.positions:
                made = self.hybrid.saved(request, position)
                if self.roomy and position <= len(one.prompt):
                    assert made
                if made:
                    self.states.add(tuple(one.every[:position]))

    @precondition(lambda self: self.running)
    @rule(which=pick, idle=st.booleans(), kept=st.sampled_from([None, None, 30]))
    def end(self, which: int, idle: bool, kept: int | None) -> None:
        """A request is over, or is preempted; or a step of it is still in flight."""
        request = list(self.running)[which % len(self.running)]
        one = self.running[request]
        if not one.ready:
            return
        self.results(request, one, 0 if idle or not self.ahead else 1)
        self.known = [*self.known[-7:], Prompt([*one.every, 1][:MOST])]
        self.over(request, publish=True, at=one.at if idle else None, kept=kept)

    @precondition(lambda self: self.running)
    @rule(which=pick)
    def abort(self, which: int) -> None:
        """It is not, and goes, whatever goes on."""
        request = list(self.running)[which % len(self.running)]
        self.over(request, publish=False, at=None)

    def over(self, request: int, *, publish: bool, at: int | None, kept: int | None = None) -> None:
        """Release."""
        one = self.running.pop(request)
        position = self.hybrid.release(request, at=at, publish=publish, kept=kept)
        assert position <= one.at
        assert kept is None or position <= kept
        if position:
            self.states.add(tuple(one.every[:position]))

    @rule(count=st.integers(1, 6))
    def stream(self, count: int) -> None:
        """The device gets on."""
        assert self.world is not None
        self.world.copier.at_once = False
        self.world.copier.finish(count)
        self.hybrid.poll()

    @rule(kv=st.integers(0, 4), states=st.integers(0, 4), at_once=st.booleans())
    def transfers(self, kv: int, states: int, at_once: bool) -> None:
        """Some happen, and whether the next ones happen at once."""
        assert self.world is not None
        for backend, count in ((self.world.world.backend, kv), (self.world.backend, states)):
            if backend is not None:
                backend.at_once = at_once
                backend.finish(count)
        self.hybrid.poll()

    @precondition(lambda self: not self.roomy)
    @rule(kv=st.booleans(), really=st.integers(0, 3))
    def fail(self, kv: bool, really: int) -> None:
        """The next copy fails."""
        assert self.world is not None
        backend = self.world.world.backend if kv else self.world.backend
        if backend is not None and not really:
            backend.fail_next = 1

    @precondition(lambda self: not self.roomy)
    @rule(which=st.integers(0, 3), count=st.integers(1, 6))
    def evict(self, which: int, count: int) -> None:
        """Somebody needs room."""
        assert self.world is not None
        manager = self.world.manager
        states = None if self.world.states is None else self.world.states.index
        index = (self.world.slots, states, manager.device.index, manager.host.index)[which]
        if index is not None:
            index.evict(count)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        """Transfers wait, or go on."""
        if not paused:
            self.hybrid.resume()
            return
        with contextlib.suppress(WaitTimeout):
            self.hybrid.pause(0)

    @rule(rename=st.booleans(), really=st.integers(0, 3))
    def update(self, rename: bool, really: int) -> None:
        """Other weights, perhaps under the same name."""
        if really:
            return
        self.hybrid.begin_update(wait=False)
        for request in list(self.running):
            self.over(request, publish=True, at=None)
        self.world.copier.finish()  # type: ignore[union-attr]
        self.seed += 1
        self.kv.clear()
        self.states.clear()
        self.hybrid.finish_update(str(self.seed) if rename else "")

    @rule()
    def look(self) -> None:
        """Every checkpoint that anybody might find is right."""
        world = self.world
        assert world is not None
        for prompt in self.known:
            path, stamps = world.path(prompt), self.stamps(prompt.tokens)
            for tier, _, index in world.checkpoints.tiers:
                for count in range(1, len(path.keys) + 1):
                    key = np.ascontiguousarray(path.key(count))
                    with index.match(key, namespace=path.space.of(tier)) as lease:
                        for page in lease.pages.tolist():
                            wanted = stamps[count * self.step_of - 1]
                            assert world.content_of(tier, page) == wanted

    def teardown(self) -> None:
        """Nothing is left of anybody."""
        world = self.world
        if world is None:
            return
        try:
            self.hybrid.resume()
            for request in list(self.planned):
                self.hybrid.cancel(request)
            for request in list(self.running):
                self.over(request, publish=True, at=None)
            world.nothing_left()
            self.look()
        finally:
            world.close()


__all__ = ["HybridMachine"]
