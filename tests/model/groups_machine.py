"""Matches of a model's groups against an oracle that knows which pages are there.

The oracle tries every position, from the definition of the rules. What an index chooses itself,
which pages it evicts, is read from it afterwards; that it may choose these is `IndexMachine`'s.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from model import groups_side
from model.groups_side import Layers, Shape, pins_of
from support import group_oracle as oracle
from support import keys as make

from lightcache import Abandoned, PageIndex
from lightcache.groups import GroupMatch
from lightcache.namespaces import Namespace
from lightcache.runs import Run

T = TypeVar("T")
_numbers = itertools.count()
LONG = 14  # pages of the longest prompt
TRIES = 8  # of groups.c
TREE = [[0] * LONG, [0] * 5 + [1] * (LONG - 5), [0] * 9 + [2] * (LONG - 9), [3] * LONG]
Scope = tuple[int, str]
"""An index's number, and a tenant there."""
Pages = dict[tuple[int, make.Pair], tuple[str, int]]
"""Of an index's number and a key: whose the page is, and its number. A run has one a part."""
NEEDS: dict[str, Callable[[int], oracle.Need]] = {
    "prefix": lambda tokens: oracle.prefix(),
    "window": oracle.window,
    "chunk": oracle.chunk,
    "point": lambda tokens: oracle.point(),
}

Turn = tuple[int, int]
"""A pause point of the core, and how often it is passed."""
PIN_COUNTED, PIN_FENCED, EVICT_MARKED, EVICT_FENCED, EVICT_UNLINKED = range(1, 6)
WALK_NEXT, LOCKED, EVICT_CHOSEN = 12, 13, 17

layers = st.builds(
    Layers,
    st.sampled_from(["prefix", "window", "chunk", "point"]),
    st.integers(1, 40),
    st.integers(0, 2),
    st.sampled_from(["", "", "", "", "", "", "", "a"]),
    st.sampled_from([0, 0, 0, 1, 2, 3]),
)
paths = st.sampled_from(TREE)
ends = st.integers(0, LONG)
deep = st.one_of(ends, st.integers(LONG - 4, LONG))
brief = st.integers(1, 5)  # so that a turn ends within any of its pages
steps = st.sampled_from([1, 1, 1, 2, 3, 5])
first_stop = st.sampled_from([LOCKED, LOCKED, LOCKED, EVICT_CHOSEN, EVICT_MARKED])
changing = st.tuples(
    st.sampled_from([EVICT_MARKED, EVICT_FENCED, EVICT_UNLINKED, EVICT_UNLINKED]),
    st.integers(1, 6),
)
matching = st.one_of(
    st.tuples(st.sampled_from([PIN_COUNTED, PIN_FENCED]), st.just(1)),
    st.tuples(st.just(WALK_NEXT), st.integers(1, 12)),
)
within = st.builds(lambda stop: [(LOCKED, 1), stop], matching)  # all of it within a match
mixed = st.builds(
    lambda first, *more: [(first, 1), *more], first_stop, matching, changing, matching
)
pick = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Held:
    """What pins pages: a match, a reservation, or (None) what a process holds that will die."""

    real: Any
    pins: list[tuple[int, int]]
    scope: Scope | None = None
    new: dict[make.Pair, int] = field(default_factory=dict)
    """Of a reservation: the pages that it writes."""
    cleared: bool = False


class Turns:
    """Two threads of which one runs at a time. They take turns at the core's pause points."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._place = ctypes.c_void_p.in_dll(library, "lc_pause_hook")
        self._hook = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._pass)

    def _pass(self, point: int) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0 and not self._alone:
                self._switch()

    def _switch(self) -> None:
        mine, other = self._running, 1 - self._running
        self._point, self._left = next(self._turns, (0, 0))
        self._running = other
        self._go[other].release()
        self._go[mine].acquire()

    def _end(self) -> None:
        """The other one runs to its end."""
        if not self._alone:
            self._alone = True
            self._go[1 - self._running].release()

    def run(self, turns: list[Turn], first: Callable[[], None], other: Callable[[], T]) -> T:
        """The result of `other`.

        Args:
            turns: the point at which each stops in turn, and at its how manieth passing; after
                these, its end.
        """
        self._go = threading.Semaphore(0), threading.Semaphore(0)
        self._turns, self._running, self._alone = iter(turns), 0, False
        self._point, self._left = next(self._turns, (0, 0))
        self._place.value = ctypes.cast(self._hook, ctypes.c_void_p).value
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(self._run_other, other)
            try:
                first()
            finally:
                self._end()
            found = result.result()
        self._place.value = None
        return found

    def _run_other(self, other: Callable[[], T]) -> T:
        self._go[1].acquire()
        try:
            return other()
        finally:
            self._end()


class Dying:
    """A program that makes one client at a time, and kills it."""

    def __init__(self) -> None:
        self.program = subprocess.Popen(
            [sys.executable, "-W", "error", groups_side.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, line: str) -> str:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(f"{line}\n")
        self.program.stdin.flush()
        return self.program.stdout.readline()

    def hold(self, *what: Any) -> list[tuple[int, int]]:
        return [(index, page) for index, page in json.loads(self._ask(json.dumps(what)))]

    def kill(self) -> None:
        assert self._ask("") == "killed\n"

    def close(self) -> None:
        self.program.communicate()


class GroupsMachine(RuleBasedStateMachine):
    """One model: its own handles match, the others write and evict, and a process dies."""

    def __init__(self, name: str, turns: Turns, dying: Dying) -> None:
        super().__init__()
        self.name = f"{name}-{next(_numbers)}"
        self.turns, self.dying = turns, dying
        self.own: list[PageIndex] = []
        self.others: list[PageIndex] = []
        self.pages: Pages = {}
        self.closed: set[Scope] = set()
        self.held: list[Held] = []

    @initialize(
        groups=st.lists(layers, min_size=1, max_size=5),
        page_tokens=st.integers(1, 9),
        pages=st.sampled_from([3, 8, 20, 60, 150]),
    )
    def open(self, groups: list[Layers], page_tokens: int, pages: int) -> None:
        names = [f"{self.name}-{i}" for i in range(1 + max(group.index for group in groups))]
        self.shape = Shape(page_tokens, groups, names)
        self.others = [PageIndex.create(name, pages=pages) for name in names]
        self.own = [PageIndex.attach(name) for name in names]
        self.set = self.shape.join(self.own)

    # ---- what must be there

    def scope(self, number: int) -> tuple[Layers, Scope]:
        group = self.shape.groups[self.number(number)]
        return group, (group.index, group.tenant)

    def space(self, scope: Scope) -> Namespace:
        return self.others[scope[0]].namespace("", scope[1])

    def number(self, number: int) -> int:
        return number % len(self.shape.groups)

    def parts(self, number: int, chain: list[make.Pair]) -> list[make.Pair]:
        """The keys of the pages of the index that a group has for these."""
        keys = self.shape.run(self.number(number)).keys(make.array(chain))
        return [(int(low), int(high)) for low, high in keys]

    def present(self, pages: Pages, scope: Scope, keys: list[make.Pair]) -> set[int]:
        index, tenant = scope
        return {i for i, key in enumerate(keys) if pages.get((index, key), ("-",))[0] == tenant}

    def whole(self, pages: Pages, number: int, chain: list[make.Pair], peeked: bool) -> set[int]:
        """The pages of a group that are there: with all parts, or, for a peek, the last one."""
        _, scope = self.scope(number)
        size = self.shape.run(number).parts
        there = self.present(pages, scope, self.parts(number, chain))
        first = size - 1 if peeked else 0
        return {i for i in range(len(chain)) if {i * size + k for k in range(first, size)} <= there}

    def hollow(self, chain: list[make.Pair]) -> int:
        """How many pages have their last part, and lack another one."""
        return sum(
            len(self.whole(self.pages, i, chain, True) - self.whole(self.pages, i, chain, False))
            for i in range(len(self.shape.groups))
        )

    def deepest(
        self, pages: Pages, chain: list[make.Pair], step: int, peeked: bool = False
    ) -> tuple[int, set[str | None]]:
        """The position, and what may be named as its limit."""
        scopes = [(group.index, group.tenant) for group in self.shape.groups]
        closed = [number for number, scope in enumerate(scopes) if scope in self.closed]
        if closed:
            return 0, {str(closed[0])} | ({None} if len(chain) < step else set())
        groups = [
            (NEEDS[group.rule](group.tokens), self.whole(pages, number, chain, peeked))
            for number, group in enumerate(self.shape.groups)
        ]
        position, refusing = oracle.deepest(groups, len(chain), self.shape.page_tokens, step)
        return position, {str(number) for number in refusing} or {None}

    def needed(self, group: Layers, pages: int) -> set[int]:
        return oracle.needed(NEEDS[group.rule](group.tokens), pages, self.shape.page_tokens)

    def learn(self, index: int) -> int:
        """Which pages have gone. None of them was pinned."""
        known = [key for key in self.pages if key[0] == index]
        keys = make.array(key for _, key in known)
        there = np.zeros(len(known), bool)
        for tenant in {self.pages[key][0] for key in known}:
            space = self.space((index, tenant))
            there |= (
                self.others[index].peek_many(keys, np.arange(len(known) + 1), namespace=space) > 0
            )
        gone = [key for key, is_there in zip(known, there, strict=True) if not is_there]
        pinned = {pin for held in self.held for pin in held.pins}
        for key in gone:
            assert (index, self.pages.pop(key)[1]) not in pinned
        return len(gone)

    # ---- writing

    def reserve(self, number: int, path: list[int], start: int, end: int) -> Held:
        """Pages of one group, for another client to write."""
        group, scope = self.scope(number)
        run = self.shape.run(self.number(number))
        chain = self.parts(number, make.chain(path[:end]))
        start = 0 if group.rule == "prefix" else min(start, end) * run.parts
        return self.begin(group, scope, chain, start, group.rule != "prefix", run)

    def begin(
        self,
        group: Layers,
        scope: Scope,
        chain: list[make.Pair],
        start: int,
        independent: bool,
        run: Run,
    ) -> Held:
        present = {i for i in self.present(self.pages, scope, chain) if i >= start}
        made = self.others[group.index].reserve(
            make.array(chain),
            start,
            independent=independent,
            run=run,
            namespace=self.space(scope),
        )
        if run.group and independent:  # a chain takes what it gets
            assert not (len(made.new) and len(made.missing)), "all of a run, or nothing"
        self.learn(group.index)
        assert set(made.present.tolist()) == present
        pages = made.pages.tolist()
        new = dict(zip((chain[i] for i in made.new.tolist()), pages, strict=True))
        held = Held(
            made,
            [(group.index, page) for page in pages + made.present_pages.tolist()],
            scope,
            new,
        )
        self.held.append(held)
        return held

    def publish(self, held: Held) -> None:
        assert held.scope is not None
        index, tenant = held.scope
        if held.cleared:
            if held.new:
                with pytest.raises(Abandoned):
                    held.real.publish()
            return
        assert held.real.publish()
        self.pages |= {(index, key): (tenant, page) for key, page in held.new.items()}

    def release(self, held: Held) -> None:
        self.held.remove(held)
        held.real.release()

    def write_now(self, number: int, path: list[int], start: int, end: int) -> None:
        held = self.reserve(number, path, start, end)
        self.publish(held)
        self.release(held)

    @rule(number=pick, path=paths, start=ends, end=ends)
    def write(self, number: int, path: list[int], start: int, end: int) -> None:
        """Pages of one group."""
        self.write_now(number, path, start, end)

    @rule(path=paths, end=deep)
    def serve(self, path: list[int], end: int) -> None:
        """What a request leaves: all that a position needs."""
        for number, group in enumerate(self.shape.groups):
            needs = self.needed(group, end)
            self.write_now(number, path, min(needs, default=end), end)

    @rule(number=pick, path=paths, end=st.integers(1, LONG), parts=pick, last=st.booleans())
    def write_parts(self, number: int, path: list[int], end: int, parts: int, last: bool) -> None:
        """Not all parts of a page: as a death leaves it. The last one says that it is there."""
        number = self.number(number)
        group, scope = self.scope(number)
        run = self.shape.run(number)
        if run.parts < 2:
            return
        chain = self.parts(number, make.chain(path[:end])[-1:])
        some, how = chain[: 1 + parts % (run.parts - 1)], run
        if last:
            some, how = chain[-1:], Run(run.group, 1)
        held = self.begin(group, scope, some, 0, group.rule != "prefix", how)
        self.publish(held)
        self.release(held)

    @rule(number=pick, path=paths, start=ends, end=ends)
    def begin_write(self, number: int, path: list[int], start: int, end: int) -> None:
        self.reserve(number, path, start, end)

    # ---- matching

    def verify(self, found: GroupMatch, chain: list[make.Pair], there: Pages) -> None:
        """Pinned is what the position needs, and these are the pages of its keys."""
        for i, group in enumerate(self.shape.groups):
            needs = sorted(self.needed(group, found.pages))
            pages = found.leases[i].pages
            assert found.first[i] == (needs[0] if needs else found.pages)
            wanted = self.parts(i, [chain[j] for j in needs])
            assert pages.tolist() == [there.get((group.index, key), ("", -1))[1] for key in wanted]
            if all((group.index, key) in self.pages for key in wanted):  # else they were cleared
                assert np.array_equal(self.own[group.index].keys_of(pages), make.array(wanted))

    def hold(self, found: GroupMatch) -> Held:
        held = Held(found, pins_of(self.shape, found))
        self.held.append(held)
        return held

    def settle(self, held: Held, kept: bool) -> None:
        self.check_pins()
        if not kept:
            self.release(held)

    @rule(path=paths, end=deep, step=steps, kept=st.booleans())
    def match(self, path: list[int], end: int, step: int, kept: bool) -> None:
        self.compare(path, end, step, kept)

    @rule(path=paths, served=deep, end=deep, step=steps, kept=st.booleans())
    def match_again(self, path: list[int], served: int, end: int, step: int, kept: bool) -> None:
        """A prompt that was there, or another one of its stem."""
        self.serve(path, served)
        self.compare(path, end, step, kept)

    def compare(self, path: list[int], end: int, step: int, kept: bool) -> None:
        chain = make.chain(path[:end])
        peeked = self.set.peek(make.array(chain), step=step)
        pages, limits = self.deepest(self.pages, chain, step, peeked=True)
        assert peeked.pages == pages
        assert peeked.limit in limits
        found = self.set.match(make.array(chain), step=step)
        held = self.hold(found)
        self.matched(found, chain, step)
        self.settle(held, kept)

    def matched(self, found: GroupMatch, chain: list[make.Pair], step: int) -> None:
        pages, limits = self.deepest(self.pages, chain, step)
        if found.pages or self.hollow(chain) < TRIES:  # each attempt may meet one of these
            assert found.pages == pages
            assert found.limit in limits
        self.verify(found, chain, self.pages)

    @rule(number=pick, path=paths, end=deep, page=pick, from_part=pick, kept=st.booleans())
    def match_hollow(
        self, number: int, path: list[int], end: int, page: int, from_part: int, kept: bool
    ) -> None:
        """A page that a position needs has lost parts, and its last one is there again."""
        number = self.number(number)
        group, scope = self.scope(number)
        run = self.shape.run(number)
        self.serve(path, end)
        chain, needs = make.chain(path[:end]), sorted(self.needed(group, end))
        if run.parts > 1 and needs:
            which = needs[page % len(needs)]
            parts = self.parts(number, chain[which : which + 1])
            gone = make.array(parts[from_part % (run.parts - 1) :])
            self.others[scope[0]].drop(gone, namespace=self.space(scope))
            self.learn(scope[0])
            self.write_parts(number, path, which + 1, 0, True)
        self.match_many([(path, end), (path, end)], 1, kept)
        self.compare(path, end, 1, False)

    @rule(chosen=st.lists(st.tuples(paths, deep), max_size=4), step=steps, kept=st.booleans())
    def match_many(self, chosen: list[tuple[list[int], int]], step: int, kept: bool) -> None:
        chains = [make.chain(path[:end]) for path, end in chosen]
        keys = make.array(key for chain in chains for key in chain)
        offsets = np.cumsum([0, *map(len, chains)])
        many = [self.hold(one) for one in self.set.match_many(keys, offsets, step=step).split()]
        for held, chain in zip(many, chains, strict=True):
            self.matched(held.real, chain, step)
        for held in many:
            self.settle(held, kept)

    @rule(
        path=paths,
        served=brief,
        end=brief,
        step=steps,
        kept=st.booleans(),
        turns=st.one_of(within, mixed, mixed),
        what=st.sampled_from(["evict", "drop", "part", "write", "clear"]),
        number=pick,
        other=paths,
        count=st.integers(1, LONG),
    )
    def match_while(
        self,
        path: list[int],
        served: int,
        end: int,
        step: int,
        kept: bool,
        turns: list[Turn],
        what: str,
        number: int,
        other: list[int],
        count: int,
    ) -> None:
        """Another client does something within the call."""
        self.serve(path, served)
        chain, before = make.chain(path[:end]), dict(self.pages)
        changes: dict[str, Callable[[], None]] = {
            "evict": lambda: self.evict_some(number, count),
            "drop": lambda: self.drop(number, chain),
            "part": lambda: self.drop(number, chain, last=True),
            "write": lambda: self.write_now(number, other, 0, count),
            "clear": lambda: self.clear_scope(number),
        }
        found = self.turns.run(
            turns, changes[what], lambda: self.set.match(make.array(chain), step=step)
        )
        held = self.hold(found)
        stayed = {key: page for key, page in self.pages.items() if before.get(key) == page}
        least, _ = self.deepest(stayed, chain, step)
        was_cleared = bool(self.closed)
        self.reopen()
        most, _ = self.deepest(before | self.pages, chain, step)
        assert found.pages <= most
        # A page that is marked between finding and confirming it may stay, and counts as lost.
        assert found.pages >= least or len(turns) > 2
        self.verify(found, chain, before if was_cleared else self.pages)
        self.settle(held, kept)

    # ---- what takes pages away

    def evict_some(self, number: int, count: int) -> None:
        _, (index, _) = self.scope(number)
        assert self.others[index].evict(count) == self.learn(index)

    def drop(self, number: int, chain: list[make.Pair], last: bool = False) -> None:
        """The pages that are matched, or the last part of each."""
        _, scope = self.scope(number)
        index, space = self.others[scope[0]], self.space(scope)
        run = self.shape.run(self.number(number))
        keys = run.last(make.array(chain)) if last else run.keys(make.array(chain))
        assert index.drop(keys, namespace=space) == self.learn(scope[0])

    def evict_group(self, number: int, count: int) -> None:
        """Pages of one group alone; a run goes whole."""
        _, (index, _) = self.scope(number)
        run = self.shape.run(self.number(number))
        mine = {(index, key) for path in TREE for key in self.parts(number, make.chain(path))}
        others = {key for key in self.pages if key[0] == index and key not in mine}
        evicted = self.others[index].evict(count, group=run.group)
        assert evicted == self.learn(index)
        if run.group:
            assert others <= self.pages.keys(), "of another group"

    @rule(
        what=st.sampled_from(["evict", "evict", "group", "group", "clear"]),
        number=pick,
        count=st.integers(1, LONG),
        path=paths,
        end=deep,
    )
    def take(self, what: str, number: int, count: int, path: list[int], end: int) -> None:
        if what != "clear":
            (self.evict_some if what == "evict" else self.evict_group)(number, count)
            return
        self.clear_scope(number)
        self.compare(path, end, 1, False)  # the set that was made before finds nothing any more
        self.reopen()

    def clear_scope(self, number: int) -> None:
        _, scope = self.scope(number)
        self.others[scope[0]].clear(self.space(scope))
        self.closed.add(scope)
        self.pages = {key: page for key, page in self.pages.items() if (key[0], page[0]) != scope}
        for held in self.held:
            held.cleared |= held.scope == scope

    def reopen(self) -> None:
        if self.closed:
            self.closed.clear()
            self.set = self.shape.join(self.own)

    # ---- what is held

    def ours(self) -> list[Held]:
        return [held for held in self.held if held.real is not None]

    @precondition(lambda self: self.ours())
    @rule(which=pick, published=st.booleans())
    def end_one(self, which: int, published: bool) -> None:
        held = self.ours()[which % len(self.ours())]
        if published and held.scope is not None:
            self.publish(held)
        self.release(held)

    @precondition(lambda self: len(self.ours()) == len(self.held))
    @rule(path=paths, end=ends, step=st.sampled_from([0, 1, 2]), number=pick, start=ends)
    def begin_dying(self, path: list[int], end: int, step: int, number: int, start: int) -> None:
        """A process holds a match, or a reservation (step 0)."""
        number %= len(self.shape.groups)
        start = 0 if self.shape.groups[number].rule == "prefix" else min(start, end)
        pins = self.dying.hold(self.shape, path[:end], step, number, start)
        if step:
            chain = make.chain(path[:end])
            pages, _ = self.deepest(self.pages, chain, step)
            assert pins == [
                (group.index, self.pages[group.index, key][1])
                for number, group in enumerate(self.shape.groups)
                for key in self.parts(number, [chain[i] for i in sorted(self.needed(group, pages))])
            ]
        for index in range(len(self.others)):
            self.learn(index)
        self.held.append(Held(None, pins))

    @precondition(lambda self: len(self.ours()) < len(self.held))
    @rule()
    def die(self) -> None:
        """It is killed, and what it held is taken back."""
        self.dying.kill()
        assert [index.reap() for index in self.others] == [1] * len(self.others)
        self.held = self.ours()

    @invariant()
    def check_pins(self) -> None:
        counts = Counter(index for held in self.held for index, _ in held.pins)
        for i, index in enumerate(self.others):
            report = index.check()
            assert report.clean, report.message
            assert (report.pins, report.late_pins) == (counts[i], 0), (i, self.held)

    def teardown(self) -> None:
        try:
            if len(self.ours()) < len(self.held):
                self.die()
            for held in self.ours():
                self.release(held)
            self.check_pins()
        finally:
            for index in (*self.own, *self.others):
                index.close()
