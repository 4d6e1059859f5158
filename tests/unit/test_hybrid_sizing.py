"""The split of a budget against a cache that is run with every split; parts of a state."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.keys import prompt
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hybrid.copiers import StatePart, gated_delta_parts, state_bytes
from lightcache.hybrid.saving import Grid
from lightcache_bench.hybrid_sizing import Workload, best_split, check_split, paths_of, reuse_of

PAGE = 4  # tokens
GRID = Grid(PAGE, PAGE, chunk=1)


class Cache:
    """Pages, evicted from the end of a prefix, and states, each on its own: both by last use."""

    def __init__(self, states: int, pages: int, grid: int) -> None:
        self.room, self.pages, self.grid = states, pages, grid
        self.kv: dict[int, list[int]] = {}  # page: last use, children, parent
        self.states: OrderedDict[int, None] = OrderedDict()
        self.now = 0

    def save(self, state: int) -> None:
        if self.room:
            self.states[state] = None
            self.states.move_to_end(state)
            if len(self.states) > self.room:
                self.states.popitem(last=False)

    def request(self, path: list[int]) -> int:
        """Pages that it need not compute."""
        depth = next((i for i, page in enumerate(path) if page not in self.kv), len(path))
        places = range(self.grid, depth + 1, self.grid)
        hit = max((at for at in places if path[at - 1] in self.states), default=0)
        if hit:
            self.save(path[hit - 1])
        kept = self.insert(path)
        branching, last = (n // self.grid * self.grid for n in (depth, kept))
        for at in (branching, last):
            if at > hit:
                self.save(path[at - 1])
        return hit

    def insert(self, path: list[int]) -> int:
        mine, parent = set(path), -1
        for i, page in enumerate(path):
            if page not in self.kv:
                if len(self.kv) == self.pages and not self.evict(mine):
                    path = path[:i]
                    break
                self.kv[page] = [0, 0, parent]
                if parent >= 0:
                    self.kv[parent][1] += 1
            parent = page
        for page in reversed(path):
            self.now += 1
            self.kv[page][0] = self.now
        return len(path)

    def evict(self, mine: set[int]) -> bool:
        leaves = [(at[0], page) for page, at in self.kv.items() if not at[1] and page not in mine]
        if leaves:
            parent = self.kv.pop(min(leaves)[1])[2]
            if parent >= 0:
                self.kv[parent][1] -= 1
        return bool(leaves)


def simulated(load: Workload, states: int, pages: int, grid: Grid = GRID) -> int:
    """Hit tokens."""
    cache = Cache(states, pages, grid.grid // PAGE)
    return PAGE * sum(cache.request(path.tolist()) for path in load.trace(PAGE))


WORKLOADS = {
    "turns": (Workload(24, turns=4, turn_tokens=16, conversations=6), GRID, 5, 150),
    "shared": (
        Workload(40, shared_tokens=32, turns=2, turn_tokens=12, conversations=8),
        GRID,
        6,
        120,
    ),
    "branches": (Workload(32, turns=3, turn_tokens=8, branching=3, conversations=6), GRID, 4, 100),
    "one turn": (Workload(24, shared_tokens=20, conversations=10, rounds=4), GRID, 5, 60),
    "coarse": (
        Workload(40, shared_tokens=24, turns=4, turn_tokens=16, conversations=6),
        Grid(PAGE, 2 * PAGE, chunk=8),
        5,
        160,
    ),
    "cheap states": (Workload(24, turns=4, turn_tokens=16, conversations=6), GRID, 1, 100),
    "dear states": (Workload(48, turns=6, turn_tokens=8, conversations=5), GRID, 15, 240),
    "roomy": (Workload(24, turns=3, turn_tokens=16, conversations=4), GRID, 3, 2000),
}


@pytest.mark.parametrize("case", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_the_split_is_nearly_the_best(case: Any) -> None:
    load, grid, state, budget = case
    sizes = {"state_bytes": state, "page_bytes": 1, "page_tokens": PAGE}
    found = best_split(budget, load=load, grid=grid, **sizes)
    assert found.states * state + found.pages <= budget < found.states * state + found.pages + 1
    every = [
        simulated(load, states, budget - states * state, grid)
        for states in range(budget // state + 1)
    ]
    assert max(every) > 0
    assert every[found.states] >= 0.97 * max(every)
    assert found.hit_tokens == every[found.states]
    assert found.hit_tokens <= found.kv_tokens <= found.prompt_tokens


@pytest.mark.parametrize("case", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_with_room_for_all_the_figures_are_exact(case: Any) -> None:
    load, grid, _, _ = case
    sizes = {"state_bytes": 5, "page_bytes": 1, "page_tokens": PAGE}
    found = check_split(10_000, 10_000, load=load, grid=grid, **sizes)
    assert found.hit_tokens == found.state_tokens == simulated(load, 10_000, 10_000, grid)
    assert found.prompt_tokens == PAGE * sum(map(len, load.trace(PAGE)))
    assert found.warnings == ()


@pytest.mark.parametrize("case", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_kv_alone_is_counted_exactly(case: Any) -> None:
    """Without states: what a cache of so many pages finds."""
    load, grid, _, _ = case
    for pages in (0, 3, 8, 20, 60, 1000):
        cache, wanted = Cache(0, pages, 1), 0
        for path in load.trace(PAGE):
            known = [page in cache.kv for page in path.tolist()]
            wanted += known.index(False) if False in known else len(known)
            cache.request(path.tolist())
        found = check_split(
            0, pages, state_bytes=5, page_bytes=1, page_tokens=PAGE, load=load, grid=grid
        )
        assert (found.kv_tokens, found.hit_tokens) == (wanted * PAGE, 0)


def test_a_starved_side_is_named_with_the_numbers_to_use() -> None:
    load, _, state, budget = WORKLOADS["turns"]
    sizes: dict[str, Any] = {"state_bytes": state, "page_bytes": 1, "page_tokens": PAGE}
    sizes |= {"load": load, "grid": GRID}
    best = best_split(budget, **sizes)
    few = check_split(1, budget - state, **sizes)
    assert len(few.warnings) == 1
    assert few.warnings[0].startswith(f"1 states starve {budget - state} pages of KV")
    assert f"{best.states} states and {best.pages} pages" in few.warnings[0]
    assert f"hit {best.hit_tokens}" in few.warnings[0]
    many = check_split(budget // state - 2, 2 * state, **sizes)
    assert many.warnings[0].startswith(f"{2 * state} pages of KV starve")
    assert check_split(best.states, best.pages, **sizes).warnings == ()


def test_a_trace_of_keys() -> None:
    keys = [prompt(1, 8), prompt(1, 6), prompt(2, 4), prompt(1, 8)]
    sizes: dict[str, Any] = {"state_bytes": 5, "page_bytes": 1, "page_tokens": PAGE, "grid": GRID}
    found = best_split(100, load=keys, **sizes)
    # The second finds KV of 6 pages and no state there, so it leaves one; the last finds its own.
    assert (found.hit_tokens, found.prompt_tokens) == (8 * PAGE, 26 * PAGE)
    numbers = [np.arange(8), np.arange(6), np.arange(100, 104), np.arange(8)]
    assert best_split(100, load=numbers, **sizes) == found
    assert best_split(100, load=[], **sizes).hit_tokens == 0
    assert best_split(100, load=[np.empty(0, np.int64), np.arange(3)], **sizes).hit_tokens == 0


def test_a_trace_that_was_looked_at_once() -> None:
    load, grid, state, budget = WORKLOADS["coarse"]
    sizes: dict[str, Any] = {"state_bytes": state, "page_bytes": 1, "page_tokens": PAGE}
    sizes |= {"grid": grid}
    reuse = reuse_of(paths_of(load.trace(PAGE)), grid.grid // PAGE)
    for bytes_ in (budget, 2 * budget):
        assert best_split(bytes_, load=reuse, **sizes) == best_split(bytes_, load=load, **sizes)
    with pytest.raises(ConfigError, match="load: expected one for a grid of 4 tokens, found 8"):
        best_split(budget, load=reuse, **{**sizes, "grid": GRID})


def test_a_workload_is_what_it_says() -> None:
    load = Workload(
        16, shared_tokens=8, turns=3, turn_tokens=8, branching=2, conversations=4, rounds=2
    )
    trace = [path.tolist() for path in load.trace(PAGE)]
    assert len(trace) == 4 * 2 * 3
    assert sorted(map(len, trace)) == [4] * 8 + [6] * 8 + [8] * 8
    assert len({tuple(path[:2]) for path in trace}) == 1
    assert len({tuple(path[:4]) for path in trace}) == 4  # groups of two conversations
    assert len({tuple(path) for path in trace if len(path) == 8}) == 8
    for path in trace:  # each turn goes on from the one before
        if len(path) > 4:
            assert path[:-2] in trace[: trace.index(path)]
    assert [path.tolist() for path in load.trace(PAGE)] == trace
    assert [path.tolist() for path in load.trace(PAGE, seed=1)] != trace


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: Workload(0), "prompt_tokens"),
        (lambda: Workload(8, shared_tokens=9), "shared_tokens"),
        (lambda: Workload(8, turns=0), "turns"),
        (lambda: Workload(8, conversations=True), "conversations"),
        (lambda: split(budget=0), "budget"),
        (lambda: split(state_bytes=0), "state_bytes"),
        (lambda: split(page_bytes=0), "page_bytes"),
        (lambda: split(page_tokens=0), "page_tokens"),
        (lambda: split(grid=Grid(2, 2, chunk=1)), "grid: expected a multiple of pages of 4"),
        (lambda: split(load=[np.zeros((3, 3), np.int64)]), "prompt 0"),
        (lambda: split(load=[np.zeros((3, 2))]), "float64"),
    ],
)
def test_figures_that_are_none(call: Any, what: str) -> None:
    refused(ConfigError, what, call)


def split(budget: int = 100, **more: Any) -> Any:
    sizes: dict[str, Any] = {"state_bytes": 5, "page_bytes": 1, "page_tokens": 4}
    return best_split(budget, **(sizes | {"load": Workload(8)} | more))


# ---- parts


def test_parts_add_up() -> None:
    parts = [StatePart("a", (4, 8), 4, layers=3), StatePart("b", (5,), 2, sharded=False)]
    assert state_bytes(parts) == 4 * 8 * 4 * 3 + 10
    assert state_bytes(parts, ranks=2) == 2 * 8 * 4 * 3 + 10
    refused(ConfigError, r"'a' .* among 5 ranks", state_bytes, parts, ranks=5)
    refused(ConfigError, "at least one", state_bytes, [])
    refused(ConfigError, "'a': shape", StatePart, "a", (0,), 4)


QWEN = {
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def test_a_state_of_qwen3_next() -> None:
    config = SimpleNamespace(**QWEN)
    recurrent, conv = gated_delta_parts(config)
    assert recurrent.bytes_of() == 72 << 20
    assert conv.bytes_of() == 36 * 8192 * 3 * 2
    assert state_bytes([recurrent, conv]) / (1 << 20) == pytest.approx(73.7, abs=0.05)
    assert 4 * state_bytes([recurrent, conv], ranks=4) == state_bytes([recurrent, conv])
    assert gated_delta_parts(SimpleNamespace(text_config=config)) == [recurrent, conv]


def test_a_config_of_another_model() -> None:
    refused(ConfigError, r"no 'layer_types'.*list its parts", gated_delta_parts, SimpleNamespace())
