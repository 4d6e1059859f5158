"""Rows E1 to E5 by an engine that addresses states by blocks: a linear recurrence, whose steps read
and write the slots that the tables of its requests give."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.manager_case import open_cache
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hybrid import Checkpoints, Grid, HybridConfig, HybridManager, state_block_tables
from lightcache.hybrid.checkpoints import Tier
from lightcache.hybrid.copiers import ArrayCopier
from lightcache.hybrid.opening import States, create_slots, open_states
from lightcache.hybrid.saving import Saves, decode_saves
from lightcache.hybrid.tables import StateTables
from lightcache.manager import KVCacheManager, ManagedBlocks, NullBackend, Prompt

BLOCK, WIDTH, SLOTS = 8, 4, 24
DECAY = np.linspace(0.5, 0.99, WIDTH)


def after(state: Any, tokens: Any) -> Any:
    """The state of the model after these tokens."""
    for token in tokens:
        state = DECAY * state + np.sin(np.arange(1, WIDTH + 1) * token)
    return state


def next_token(state: Any) -> int:
    return int(abs(state).sum() * 1e6) % 997


def uncached(tokens: list[int], generate: int) -> tuple[list[int], Any]:
    """All tokens, and the last state, of a run that computes everything."""
    state = after(np.zeros(WIDTH), tokens)
    for _ in range(generate):
        tokens = [*tokens, next_token(state)]
        state = after(state, tokens[-1:])
    return tokens, state


class CountingCopier(ArrayCopier):
    """Counts the slots that it copies."""

    pairs = 0

    def copy(self, sources: Any, targets: Any, stream: Any = None) -> Any:
        self.pairs += len(sources)
        return super().copy(sources, targets, stream)


@dataclass(frozen=True)
class Pass:
    """What one request computes in a step."""

    table: dict[int, int]
    """The slot of each block."""
    begin: int
    end: int
    tokens: list[int]
    saved: tuple[int, int] | None
    """The position and slot of a state that this step saves."""


class Engine:
    """Serves requests, each step of them by the tables of their blocks."""

    def __init__(self, name: str, host: bool = False, **config: Any) -> None:
        """`host`: checkpoints are kept on the host, too."""
        self.states = np.zeros((SLOTS, WIDTH))
        self.host = open_cache(name, 64, BLOCK)
        self.device = ManagedBlocks(f"{name}.device", block_tokens=BLOCK, blocks=64)
        self.manager = KVCacheManager(self.host, self.device, NullBackend())
        self.opened = self.open_states(name) if host else None
        self.slots = create_slots(f"{name}.slots", SLOTS)
        self.copier = CountingCopier(self.states)
        self.checkpoints = self.opened_checkpoints()
        self.grid = Grid(BLOCK, BLOCK, chunk=BLOCK, every=2 * BLOCK)
        self.hybrid = HybridManager(
            self.manager,
            self.checkpoints,
            self.grid,
            config=HybridConfig(state_block_tokens=BLOCK, running=4, **config),
        )
        self.donated: dict[int, int] = {}
        """Of the last request: the slot of each position that became a checkpoint while it ran."""

    def open_states(self, name: str) -> States:
        torch = pytest.importorskip("torch")
        parts = {"recurrent": [torch.from_numpy(self.states)]}
        return open_states(parts, name=f"{name}.states", model="m", pages=SLOTS, secret=bytes(16))

    def opened_checkpoints(self) -> Checkpoints:
        if self.opened is None:
            return Checkpoints(self.slots, None, copier=self.copier, most=None)
        assert self.opened.copies is not None
        backend = self.opened.copies.backend
        return Checkpoints(self.slots, self.opened.host, backend, self.copier, most=None)

    def forget_slots(self) -> None:
        """The device loses its checkpoints, and what its slots held; no request runs."""
        self.checkpoints.transfers.wait(None, 60)
        self.checkpoints.poll()
        self.slots.evict(SLOTS)
        assert self.slots.stats().ready == 0
        self.states[:] = np.nan

    def serve(self, tokens: list[int], generate: int, budget: int = 20) -> tuple[list[int], Any]:
        """Returns all tokens, and the last state; `match` is the request's."""
        return self.serve_batch([tokens], generate, budget)[0]

    def serve_batch(
        self, prompts: list[list[int]], generate: int, budget: int = 20
    ) -> list[tuple[list[int], Any]]:
        """Several requests at a time: each step has the next pass of all that are not over."""
        running = {
            f"r{i}": self.passes(f"r{i}", tokens, generate, budget)
            for i, tokens in enumerate(prompts)
        }
        results: dict[str, tuple[list[int], Any]] = {}
        while running:
            step: dict[str, Pass] = {}
            for name, passes in list(running.items()):
                try:
                    step[name] = next(passes)
                except StopIteration as over:
                    results[name] = over.value
                    del running[name]
            if step:
                self.forward(step)
        return [results[f"r{i}"] for i in range(len(prompts))]

    def passes(
        self, name: str, tokens: list[int], generate: int, budget: int
    ) -> Generator[Pass, None, tuple[list[int], Any]]:
        """The passes of a request; each has happened when the next one is asked for."""
        hybrid, prompt, known = self.hybrid, Prompt(tokens), len(tokens)
        hybrid.plan(name, prompt)
        self.match = hybrid.take(name, wait=True)
        hybrid.allocate(name, known + generate)
        slot = int(hybrid.restore([name]).working[0])
        hybrid.load(name).wait(60)
        self.donated, done, due = {}, self.match.usable, None
        table = {(done - 1) // BLOCK: slot} if done else {}
        while done < known + generate:
            begin, saved = done, None
            if due is not None:  # the state after `begin` tokens stays in the slot of its block
                slot, saved = self.turn(name, slot, due)
            if begin < known:
                plan = hybrid.save_plan(name, begin, min(known, begin + budget))
                end, due = plan.end, plan.position if plan.final else None
                if plan.position is not None and not plan.final:
                    if saved is None:
                        table[(plan.position - 1) // BLOCK] = slot
                        slot, saved = self.turn(name, slot, plan.position)
                    else:  # one in a pass
                        end = due = plan.position
            else:
                end = begin + 1
                positions = decode_saves(self.grid, [begin], [end]).positions.tolist()
                due = positions[0] if positions else None
                tokens = [*tokens, next_token(self.states[table[(begin - 1) // BLOCK]])]
            table[(end - 1) // BLOCK] = slot
            yield Pass(table, begin, end, tokens, saved)
            hybrid.commit(name, end, new_tokens=tokens[begin:end] if begin >= known else None)
            if saved is not None:
                where = table[(saved[0] - 1) // BLOCK]
                assert where == saved[1]
                if hybrid.saved(name, saved[0]):
                    self.donated[saved[0]] = where
            done = end
        state = self.states[slot].copy()
        hybrid.release(name, at=done)
        hybrid.poll()
        return tokens, state

    def turn(self, name: str, slot: int, position: int) -> tuple[int, tuple[int, int] | None]:
        """The slot to write from now on, and the position and slot that are saved."""
        other = self.hybrid.next_slot(name, position)
        return (slot, None) if other is None else (other, (position, slot))

    def forward(self, step: dict[str, Pass]) -> None:
        """One step of a batch: what it reads and writes is what the tables say."""
        passes = list(step.values())
        slots, offsets, columns = [], [0], []
        for each in passes:
            columns += sorted(each.table)
            slots += [each.table[block] for block in sorted(each.table)]
            offsets.append(len(columns))
        rows = state_block_tables(
            StateTables.compact(slots, offsets, columns),
            [each.begin for each in passes],
            [each.end for each in passes],
            block_tokens=BLOCK,
            names=list(step),
        )
        before = self.states.copy()  # a batch reads before it writes
        for each, (read, write) in zip(passes, rows.table.tolist(), strict=True):
            state, begin = np.zeros(WIDTH) if read < 0 else before[read], each.begin
            if each.saved is not None and each.saved[0] > begin:  # inside of the pass
                position = each.saved[0]
                state = after(state, each.tokens[begin:position])
                self.states[each.table[(position - 1) // BLOCK]] = state
                begin = position
            self.states[write] = after(state, each.tokens[begin : each.end])

    def checkpoint_slots(self, tokens: list[int]) -> dict[int, int]:
        """The slot of each checkpoint of a path, by position."""
        path = self.hybrid.parts.path_of(Prompt([*tokens, 0]), len(tokens))
        found = {}
        for count in range(1, len(path.keys) + 1):
            with self.slots.match(path.key(count), namespace=path.space.device) as lease:
                if len(lease):
                    found[count * self.hybrid.parts.step] = int(lease.pages[0])
        return found

    def close(self) -> None:
        for part in (self.hybrid, self.checkpoints, self.manager, self.device, self.slots):
            part.close()
        self.host.close()
        if self.opened is not None:
            self.opened.close()


@pytest.fixture
def engines(segment_name: str) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**config: Any) -> Engine:
        made.append(Engine(f"{segment_name}.{len(made)}", **config))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def checked(
    engine: Engine, tokens: list[int], generate: int, got: tuple[list[int], Any]
) -> dict[int, int]:
    """What was generated, and each checkpoint, is that of an uncached run. Returns the slots of
    the checkpoints by position."""
    every, state = got
    wanted = uncached(tokens, generate)
    assert every == wanted[0]
    assert (state == wanted[1]).all()
    found = engine.checkpoint_slots(every)
    for position, slot in found.items():
        assert (engine.states[slot] == after(np.zeros(WIDTH), every[:position])).all()
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("saves", Saves)
def test_e1_the_slot_of_an_old_block_becomes_a_checkpoint(
    engines: Any, saves: Saves, ahead: bool
) -> None:
    engine = engines(saves=saves, ahead=ahead)
    stem = list(range(1, 38))
    hits = 0
    for seed in range(6):
        tokens = [*stem, *range(100 * seed, 100 * seed + 9)]
        got = engine.serve(tokens, 40)
        hits += engine.match.usable > 0
        assert engine.donated or engine.match.usable  # crossed in the prompt
        found = checked(engine, tokens, 40, got)
        for position, slot in engine.donated.items():
            assert found[position] == slot
        assert max(found) > len(tokens)  # one of the generated tokens, too
        # All that was copied is the checkpoints that requests began with.
        assert engine.copier.pairs == hits
        turn = [*got[0], 5, 6]
        if seed == 5:
            assert engine.serve(turn, 3)[0] == uncached(turn, 3)[0]
            assert engine.match.usable == max(found)
    assert hits >= 4


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("saves", Saves)
def test_e1_a_batch_of_requests_of_different_lengths(
    engines: Any, saves: Saves, ahead: bool
) -> None:
    """Prompts and outputs end anywhere in a block, and requests leave the batch one by one."""
    engine = engines(saves=saves, ahead=ahead)
    stem = list(range(1, 38))
    hits = 0
    for seed in range(3):
        lengths = (3, 8, 16, 37) if seed == 1 else (1, 9, 22, 31)
        prompts = [[*stem[:n], *range(100 * seed + n, 100 * seed + 2 * n)] for n in lengths]
        for prompt, got in zip(prompts, engine.serve_batch(prompts, 21), strict=True):
            hits += checked(engine, prompt, 21, got) != {}
    assert hits > 4


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("saves", Saves)
def test_e1_a_checkpoint_that_the_host_has(engines: Any, saves: Saves, ahead: bool) -> None:
    """Slots of old blocks become checkpoints and go to the host; a request continues from there."""
    engine = engines(saves=saves, ahead=ahead, host=True)
    tokens, deepest = list(range(1, 46)), 0
    for turn in range(4):
        before = engine.hybrid.stats()
        got = engine.serve(tokens, 20)
        wanted = uncached(tokens, 20)
        assert got[0] == wanted[0]
        assert (got[1] == wanted[1]).all()
        loads = engine.hybrid.stats().loads - before.loads
        if turn:
            assert engine.match.tier is Tier.HOST
            assert engine.match.usable == deepest
            assert loads == 1
        deepest = max(engine.checkpoint_slots(got[0]))
        assert deepest > len(tokens)
        engine.forget_slots()
        tokens = [*got[0], turn, 7]


@pytest.mark.parametrize(
    ("table", "counts", "text"),
    [
        ({}, (0, 1), "sequence 'a': .*an empty table"),
        ({0: 1}, (0, 0), "sequence 'a': expected total_tokens of 1 or more"),
        ({1: 1}, (3, 9), "sequence 'a': expected a slot for its block 0"),
        ({0: 1}, (8, 9), "sequence 'a': expected a slot for its block 1"),
    ],
)
def test_e5_a_step_without_its_slot(
    engines: Any, table: dict[int, int], counts: tuple[int, int], text: str
) -> None:
    engine = engines(saves=Saves.END_ONLY)
    fits = Pass({0: 2}, 0, 1, [1], None)
    wrong = Pass(table, *counts, [1] * 9, None)
    refused(ConfigError, text, engine.forward, {"a": wrong})
    refused(ConfigError, text, engine.forward, {"b": fits, "a": wrong})  # in a batch, too


def test_e4_blocks_that_do_not_fit(engines: Any) -> None:
    engine = engines(saves=Saves.END_ONLY)
    for block, saves, texts in (
        (2 * BLOCK, Saves.END_ONLY, r"1 of .*\n1\. .*not always at the end"),
        (BLOCK // 2, Saves.INTERIOR, r"1 of .*\n1\. .*only every 8 tokens"),
        (3, Saves.INTERIOR, r"2 of .*\n1\. .*not always .*\n2\. .*only every"),
    ):
        config = HybridConfig(saves, state_block_tokens=block)
        made = (engine.manager, engine.checkpoints, engine.grid)
        with pytest.raises(ConfigError, match=texts):
            HybridManager(*made, config=config)
