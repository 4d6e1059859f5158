"""Slots of a request against a device that writes later than it is told, and slots of drafts."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hybrid.saving import Drafts, Grid, RequestSlots, Rest, Saved, decode_saves

EXAMPLES = int(os.environ.get("LIGHTCACHE_TEST_EXAMPLES", "50"))
WORKING, FIRST, SECOND = 10, 11, 12

Stamp = tuple[int, ...]


def ahead() -> RequestSlots:
    return RequestSlots(WORKING, (FIRST, SECOND), ahead=True)


def saved(slots: RequestSlots, *positions: int) -> RequestSlots:
    """Saved one behind the other, each confirmed at once."""
    for position in positions:
        assert slots.begin_save(position) is not None
        slots.confirm(position)
    return slots


# ---- a device and a scheduler


@dataclass(eq=False)
class Work:
    """Something that was launched: stamps to be written by slot, or a copy."""

    writes: list[tuple[int, Stamp]] = field(default_factory=list)
    copy: tuple[int, int] | None = None
    begin: int = 0
    save: int | None = None
    """Position that was saved, to the last of `writes`."""
    stale: bool = False
    """Computed behind tokens that were rejected meanwhile."""
    done: bool = False


class Device:
    """Executes what was launched in its order, some time."""

    def __init__(self) -> None:
        self.memory: dict[int, Stamp] = {}
        self.queue: deque[Work] = deque()

    def run(self) -> None:
        work = self.queue.popleft()
        self.memory.update(work.writes)
        if work.copy is not None:
            self.memory[work.copy[1]] = self.memory[work.copy[0]]
        work.done = True

    @property
    def pending(self) -> set[int]:
        """Slots that something in the queue writes."""
        return {slot for work in self.queue for slot, _ in work.writes}


class SlotMachine(RuleBasedStateMachine):
    """Requests one behind the other. A state's stamp is the tokens that it has taken in."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.named: dict[int, Stamp] = {}  # checkpoints
        self.read: set[int] = set()
        self.over = True
        self.slot = self.token = 0  # the next that nobody has had

    def new_slot(self) -> int:
        self.slot += 1
        self.device.memory[self.slot] = ()
        return self.slot

    @precondition(lambda self: self.over)
    @rule(ahead=st.booleans(), beside=st.booleans())
    def start(self, ahead: bool, beside: bool) -> None:
        count = RequestSlots.needed(ahead) if beside else 0
        numbers = [self.new_slot() for _ in range(1 + count)]
        self.slots = RequestSlots(numbers[0], numbers[1:], ahead=ahead)
        self.mine = set(numbers)
        self.flying: deque[Work] = deque()  # steps whose results have not arrived
        self.context: list[int] = []  # tokens that were launched and, as far as is known, count
        self.again: list[int] = []  # accepted, but the working slot is not so far any more
        self.good: list[Saved] = []  # confirmed, neither void nor overwritten nor given away
        self.read = set()
        self.over = False

    # ---- steps

    @precondition(lambda self: not self.over and len(self.flying) < 1 + self.slots.ahead)
    @rule(count=st.integers(1, 4), at=st.none() | st.integers(0, 3))
    def launch(self, count: int, at: int | None) -> None:
        work = Work(begin=len(self.context))
        taken, self.again = self.again[:count], self.again[count:]
        while len(taken) < count:
            self.token += 1
            taken.append(self.token)
        self.context += taken
        work.writes.append((self.slots.working, tuple(self.context)))
        if at is not None:
            self.save(work, work.begin + 1 + at % count)
        self.flying.append(work)
        self.device.queue.append(work)

    def save(self, work: Work, position: int) -> None:
        slot = self.slots.begin_save(position)
        if slot is None:
            return
        flying = [work.save for work in self.flying if work.save and not work.stale]
        assert position > max([*flying, *(state.position for state in self.good)], default=0)
        assert slot in self.mine - {self.slots.working} - self.read
        assert slot not in [other.writes[-1][0] for other in self.flying if other.save]
        if self.slots.ahead and self.good:
            assert slot != self.good[-1].slot
        self.good = [state for state in self.good if state.slot != slot]
        work.save = position
        work.writes.append((slot, tuple(self.context[:position])))

    @precondition(lambda self: self.device.queue)
    @rule()
    def execute(self) -> None:
        self.device.run()

    @precondition(lambda self: not self.over and self.flying)
    @rule(lost=st.integers(0, 3), late=st.booleans())
    def process(self, lost: int, late: bool) -> None:
        """The oldest step's results arrive: the last `lost` of its tokens are rejected."""
        work = self.flying.popleft()
        while not work.done:
            self.device.run()
        end = len(work.writes[0][1])
        accepted = max(work.begin + 1, end - lost)
        if late:
            self.confirm(work)
        if accepted < end and not work.stale:
            self.fall_back(accepted)
            work.stale = work.save is not None and work.save > accepted
        if not late:
            self.confirm(work)

    def confirm(self, work: Work) -> None:
        if work.save is not None:
            self.slots.confirm(work.save)
            if not work.stale:
                self.good.append(Saved(work.writes[-1][0], work.save))

    def fall_back(self, accepted: int) -> None:
        """What was launched behind the rejected tokens is void; go on from a saved state."""
        for work in self.flying:
            work.stale = True
        self.good = [state for state in self.good if state.position <= accepted]
        found = self.slots.reject(accepted)
        assert found == (self.good[-1] if self.good else None)
        at = 0 if found is None else found.position
        every = self.context[:accepted] + self.again
        self.context, self.again = every[:at], every[at:]
        work = Work(writes=[(self.slots.working, ())])
        if found is not None:
            assert self.device.memory[found.slot] == tuple(self.context)
            work = Work(copy=(found.slot, self.slots.working))
        self.device.queue.append(work)

    # ---- giving away

    @precondition(lambda self: not self.over)
    @rule(can=st.booleans())
    def exchange(self, can: bool) -> None:
        replacement = self.new_slot() if can else None
        best = self.good[-1] if self.good and can else None
        assert self.slots.exchange(replacement) == best
        if best is not None and replacement is not None:
            self.good.pop()
            self.mine = (self.mine - {best.slot}) | {replacement}
            self.name(best)

    @precondition(lambda self: not self.over and self.good)
    @rule(which=st.integers(0, 1))
    def begin_read(self, which: int) -> None:
        slot = self.good[which % len(self.good)].slot
        self.slots.begin_read(slot)
        self.read.add(slot)

    @precondition(lambda self: not self.over and self.read)
    @rule()
    def end_read(self) -> None:
        self.slots.end_read(self.read.pop())

    def name(self, found: Saved) -> None:
        stamp = tuple((self.context + self.again)[: found.position])
        assert len(stamp) == found.position
        assert self.device.memory[found.slot] == stamp
        self.named[found.slot] = stamp

    @precondition(lambda self: not self.over)
    @rule(behind=st.integers(0, 5), working=st.booleans(), donates=st.booleans())
    def finish(self, behind: int, working: bool, donates: bool) -> None:
        known = min([work.begin for work in self.flying] + [len(self.context)])
        kept = max(0, known - behind)
        idle = not self.flying and not self.device.queue
        found = None
        if donates:
            at = known if idle and working else None
            fit = [state for state in self.good if state.position <= kept]
            if at is not None and 0 < at <= kept:
                fit.append(Saved(self.slots.working, at))
            best = max((state.position for state in fit), default=None)
            found = self.slots.donate(kept, working_at=at)
            assert (None if found is None else found.position) == best
        if found is not None:
            self.mine.discard(found.slot)
            self.name(found)
        self.leave(self.slots.rest(idle=idle), idle)

    def leave(self, rest: Rest, idle: bool) -> None:
        """Whoever gets the free slots loads into them at once, on another stream."""
        assert sorted(rest.free + rest.busy) == sorted(self.mine)
        assert not self.read & set(rest.free)
        if idle:
            assert set(rest.busy) <= self.read
        for slot in rest.free:
            self.device.memory[slot] = (-1,)
        while self.device.queue:
            self.device.run()
        assert all(self.device.memory[slot] == (-1,) for slot in rest.free)
        self.over = True

    @invariant()
    def nothing_is_read_while_it_is_written(self) -> None:
        assert not self.device.pending & (self.read | self.named.keys())

    @invariant()
    def a_checkpoint_never_changes(self) -> None:
        assert all(self.device.memory[slot] == stamp for slot, stamp in self.named.items())


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


# ---- case by case


def test_saves_alternate() -> None:
    slots = ahead()
    assert [slots.begin_save(position) for position in (64,)] == [FIRST]
    slots.confirm(64)
    assert slots.begin_save(128) == SECOND
    assert slots.newest == Saved(FIRST, 64)  # the other is not confirmed
    slots.confirm(128)
    assert slots.begin_save(192) == FIRST
    assert slots.newest == Saved(SECOND, 128)


def test_one_slot_is_enough_without_running_ahead() -> None:
    slots = saved(RequestSlots(WORKING, (FIRST,), ahead=False), 64)
    assert slots.begin_save(128) == FIRST
    assert slots.newest is None
    slots.confirm(128)
    assert slots.donate(200) == Saved(FIRST, 128)


def test_the_newest_confirmed_is_not_overwritten_for_one_in_flight() -> None:
    slots = saved(ahead(), 64)
    assert slots.begin_save(128) == SECOND
    assert slots.begin_save(192) is None  # FIRST is the newest confirmed, SECOND being written
    slots.confirm(128)
    assert slots.begin_save(192) == FIRST


def test_a_state_that_stays_in_its_slot() -> None:
    slots = ahead()
    assert (slots.next_slot(64), slots.working) == (FIRST, FIRST)
    assert slots.next_slot(128) == SECOND
    assert slots.next_slot(192) is None  # neither of the two is confirmed
    assert slots.working == SECOND
    slots.confirm(64)
    slots.confirm(128)
    assert slots.confirmed == (Saved(WORKING, 64), Saved(FIRST, 128))
    assert slots.next_slot(192) == WORKING
    assert slots.donate(200) == Saved(FIRST, 128)
    assert slots.rest() == Rest((), (WORKING, SECOND))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_plain_decoding_skips_no_save(is_ahead: bool) -> None:
    grid = Grid(16, 16, chunk=16, every=16)
    slots = RequestSlots(WORKING, (FIRST, SECOND) if is_ahead else (FIRST,), ahead=is_ahead)
    written: deque[int | None] = deque()
    for tokens in range(1, 400):
        due = decode_saves(grid, [tokens - 1], [tokens]).positions.tolist()
        if due:
            assert slots.begin_save(due[0]) is not None
        written.append(due[0] if due else None)
        if len(written) > is_ahead:
            position = written.popleft()
            if position is not None:
                slots.confirm(position)
    assert slots.donate(399) == Saved(slots.newest.slot if slots.newest else -1, 384)


def test_donating_prefers_the_newest_within_what_is_kept() -> None:
    assert saved(ahead(), 64, 128).donate(200) == Saved(SECOND, 128)
    assert saved(ahead(), 64, 128).donate(128) == Saved(SECOND, 128)
    assert saved(ahead(), 64, 128).donate(127) == Saved(FIRST, 64)
    assert saved(ahead(), 64, 128).donate(63) is None
    unconfirmed = saved(ahead(), 64)
    unconfirmed.begin_save(128)
    assert unconfirmed.donate(200) == Saved(FIRST, 64)


def test_the_working_slot_is_as_good() -> None:
    assert saved(ahead(), 64).donate(200, working_at=192) == Saved(WORKING, 192)
    assert saved(ahead(), 64).donate(128, working_at=192) == Saved(FIRST, 64)
    slots = RequestSlots(WORKING, ahead=True)
    assert slots.begin_save(64) is None
    assert slots.donate(64, working_at=64) == Saved(WORKING, 64)
    assert slots.rest() == Rest((), ())


def test_what_is_left_says_what_steps_still_write() -> None:
    slots = saved(ahead(), 64)
    slots.begin_save(128)
    slots.donate(200)
    assert slots.rest() == Rest((), (WORKING, SECOND))
    slots = saved(ahead(), 64)
    slots.donate(0)
    assert slots.rest(idle=True) == Rest((WORKING, SECOND, FIRST), ())
    slots = saved(ahead(), 64)
    slots.begin_read(FIRST)
    assert slots.rest(idle=True) == Rest((WORKING, SECOND), (FIRST,))


def test_an_exchange_needs_a_slot() -> None:
    slots = saved(ahead(), 64)
    assert slots.exchange(None) is None
    assert slots.newest == Saved(FIRST, 64)
    assert slots.exchange(20) == Saved(FIRST, 64)
    assert slots.newest is None
    assert slots.exchange(21) is None  # nothing is confirmed: 21 stays the caller's
    assert [slots.begin_save(position) for position in (128, 192)] == [SECOND, 20]
    assert slots.donate(500) is None
    assert slots.rest() == Rest((), (WORKING, SECOND, 20))


def test_nothing_overwrites_the_state_to_keep() -> None:
    slots = saved(RequestSlots(WORKING, (FIRST, SECOND), ahead=True, keep=32), 32, 64)
    assert slots.begin_save(96) == SECOND  # of the two the newer: the other one stays
    assert slots.begin_save(128) is None
    slots.confirm(96)
    assert slots.confirmed == (Saved(FIRST, 32), Saved(SECOND, 96))
    assert slots.donate(100) == Saved(SECOND, 96)
    assert slots.donate_kept(31) is None
    assert slots.donate_kept(100) == Saved(FIRST, 32)
    assert slots.donate_kept(100) is None
    assert slots.rest(idle=True) == Rest((WORKING,), ())

    slots = saved(RequestSlots(WORKING, (FIRST,), ahead=False, keep=32), 32)
    assert slots.begin_save(64) is None
    assert slots.exchange(SECOND, 64) is None
    assert slots.exchange(SECOND, 32) == Saved(FIRST, 32)
    assert slots.begin_save(64) == SECOND
    slots = saved(RequestSlots(WORKING, (FIRST,), ahead=False, keep=32), 32)
    assert slots.donate(100) == Saved(FIRST, 32)
    assert slots.donate_kept(100) is None


def test_rejection_voids_what_lies_behind() -> None:
    slots = saved(ahead(), 64, 128)
    assert slots.reject(100) == Saved(FIRST, 64)
    assert slots.begin_save(128) == SECOND  # the same position, from other tokens
    slots.confirm(128)
    assert slots.reject(10) is None
    assert slots.donate(500) is None


def test_a_rejected_write_is_confirmed_but_never_donated() -> None:
    slots = saved(ahead(), 64)
    assert slots.begin_save(128) == SECOND
    assert slots.reject(100) == Saved(FIRST, 64)
    assert slots.begin_save(128) is None  # SECOND's first write may still land
    slots.confirm(128)
    assert slots.newest == Saved(FIRST, 64)
    assert slots.begin_save(128) == SECOND
    slots.confirm(128)
    assert slots.newest == Saved(SECOND, 128)


def test_a_rejected_write_keeps_no_other_from_being_saved() -> None:
    slots = ahead()
    assert slots.begin_save(200) == FIRST
    assert slots.reject(100) is None
    assert slots.begin_save(128) == SECOND  # before 200, which does not count any more
    slots.confirm(200)
    slots.confirm(128)
    assert slots.donate(500) == Saved(SECOND, 128)


def test_what_is_computed_again_is_not_saved_again() -> None:
    slots = saved(ahead(), 64)
    assert slots.begin_save(128) == SECOND
    assert slots.reject(150) == Saved(FIRST, 64)  # 128 is good, and on its way
    assert [slots.begin_save(position) for position in (64, 100, 128)] == [None, None, None]
    slots.confirm(128)
    assert slots.begin_save(192) == FIRST


def test_a_slot_that_is_read_is_not_overwritten() -> None:
    slots = saved(ahead(), 64, 128)
    slots.begin_read(FIRST)
    assert slots.begin_save(192) is None
    slots.end_read(FIRST)
    assert slots.begin_save(192) == FIRST
    void = saved(ahead(), 64)
    void.begin_read(FIRST)
    void.reject(0)
    assert [void.begin_save(position) for position in (64, 128)] == [SECOND, None]


def test_misuse_is_refused() -> None:
    for wrong in ((10, 10), (10, 10, 11)):
        refused(ConfigError, "each once", RequestSlots, wrong[0], wrong[1:], ahead=len(wrong) == 3)
    refused(ConfigError, r"expected 2 .* runs ahead, found 1", RequestSlots, 1, (2,), ahead=True)
    with pytest.raises(ConfigError, match=r"expected 1 .* does not run ahead, found 2"):
        RequestSlots(1, (2, 3), ahead=False)
    refused(ConfigError, "slot", RequestSlots, -1, ahead=False)
    slots = ahead()
    refused(ConfigError, "found 64; confirm each once", slots.confirm, 64)
    slots.begin_save(64)
    refused(ConfigError, "oldest write in flight, that of 64, found 128", slots.confirm, 128)
    refused(ConfigError, "position: expected 1", slots.begin_save, 0)
    slots.confirm(64)
    refused(ConfigError, "begin_read", slots.begin_read, SECOND)
    for own in (WORKING, FIRST, SECOND):
        refused(ConfigError, "own", slots.exchange, own)
    slots.donate(64)
    for late in (
        lambda: slots.begin_save(128),
        lambda: slots.exchange(20),
        lambda: slots.reject(1),
        lambda: slots.donate(64),
    ):
        refused(ConfigError, "has ended", late)


# ---- drafts


def test_room_follows_the_running_requests() -> None:
    assert Drafts.room(256, 3) == 1024
    drafts = Drafts(np.arange(100, 112), running=3, drafted=3)
    assert drafts.writes([0, 2]).tolist() == [[100, 101, 102, 103], [108, 109, 110, 111]]
    every = drafts.writes(range(3)).ravel()
    assert len(set(every.tolist())) == Drafts.room(3, 3)
    assert Drafts(range(20), running=2, drafted=1).writes([1]).tolist() == [[2, 3]]


def test_a_chain() -> None:
    drafts = Drafts(range(8), running=2, drafted=3)
    assert drafts.chain.tolist() == [-1, 0, 1, 2]
    assert drafts.reads([1, 0], drafts.chain, [91, 90]).tolist() == [[91, 4, 5, 6], [90, 0, 1, 2]]
    assert drafts.accept([0, 1], [0, 3], [90, 91]).tolist() == [[0, 90], [7, 91]]
    assert drafts.ancestors(drafts.chain, [3, 2], [0, 2]).tolist() == [3, 0]


def test_nothing_runs() -> None:
    drafts = Drafts(range(8), running=2, drafted=3)
    assert drafts.writes([]).shape == (0, 4)
    assert drafts.reads([], drafts.chain, []).shape == (0, 4)
    assert drafts.accept([], [], []).shape == (0, 2)
    assert drafts.ancestors(drafts.chain, [], []).shape == (0,)


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[list[int]], list[int]]:
    drafted, n = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rows = [
        [-1, *(draw(st.integers(0, node - 1)) for node in range(1, drafted + 1))] for _ in range(n)
    ]
    return drafted, rows, [draw(st.integers(0, drafted)) for _ in range(n)]


@given(trees(), st.randoms(use_true_random=False))
def test_trees_against_stamps(case: Any, random: Any) -> None:
    """Nodes run in order; what an accepted node leaves in the working slot is its branch."""
    drafted, parents, nodes = case
    n = len(parents)
    running = n + 2
    numbers = random.sample(range(1000), Drafts.room(running, drafted) + n)
    working, room = numbers[:n], numbers[n:]
    drafts = Drafts(room, running=running, drafted=drafted)
    rows = random.sample(range(running), n)
    memory: dict[int, Stamp] = {slot: (-row,) for row, slot in enumerate(working)}
    read, written = drafts.reads(rows, parents, working), drafts.writes(rows)
    depth = []
    for row in range(n):
        for node in range(drafted + 1):
            memory[int(written[row, node])] = (*memory[int(read[row, node])], node)
        branch, node = [], nodes[row]
        while node >= 0:
            branch.append(node)
            node = parents[row][node]
        depth.append(branch[::-1])
    behind = [random.randrange(len(branch)) for branch in depth]
    before = drafts.ancestors(parents, nodes, behind)
    for row in range(n):
        branch = tuple(depth[row][: len(depth[row]) - behind[row]])
        assert memory[int(written[row, before[row]])] == (-row, *branch)
    for source, destination in drafts.accept(rows, nodes, working).tolist():
        memory[destination] = memory[source]
    for row, slot in enumerate(working):
        assert memory[slot] == (-row, *depth[row])


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda d: Drafts(range(7), running=2, drafted=3), "8, found 7"),
        (lambda d: Drafts([1] * 8, running=2, drafted=3), "each slot once"),
        (lambda d: Drafts(range(8), running=0, drafted=3), "running"),
        (lambda d: Drafts(range(8), running=2, drafted=0), "drafted"),
        (lambda d: d.writes([2]), "expected 0 to 1, found"),
        (lambda d: d.writes([-1]), "rows"),
        (lambda d: d.writes([0, 0]), "each once"),
        (lambda d: d.writes([[0]]), "whole numbers"),
        (lambda d: d.writes([0.5]), "whole numbers"),
        (lambda d: d.accept([0], [4], [9]), "nodes: expected 0 to 3"),
        (lambda d: d.accept([0], [1, 2], [9]), "nodes: expected 1, found 2"),
        (lambda d: d.accept([0], [1], [9, 8]), "working: expected 1 slots, found 2"),
        (lambda d: d.reads([0], [-1, 0, 1], [9]), "shape"),
        (lambda d: d.reads([0], [-1, 0, 1, 3], [9]), "earlier node"),
        (lambda d: d.reads([0], [0, 0, 1, 2], [9]), "-1 for node 0"),
        (lambda d: d.reads([0], [-1, 0, -1, 2], [9]), "earlier node"),
        (
            lambda d: d.ancestors(d.chain, [3, 1], [0, 2]),
            "row 1: expected at most the 1 tokens .* found 2",
        ),
    ],
)
def test_drafts_that_are_none(call: Any, what: str) -> None:
    refused(ConfigError, what, call, Drafts(range(8), running=2, drafted=3))
