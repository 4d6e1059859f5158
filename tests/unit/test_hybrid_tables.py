"""State block tables against a loop over sequences, in every form; what is refused; capacity."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hybrid.tables import Capacity, StateTables, capacity, state_block_tables

BLOCK = 16


def one(prev: int, total: int, table: list[int], **more: Any) -> tuple[int, int]:
    found = state_block_tables(
        StateTables.padded([table]), [prev], [total], block_tokens=BLOCK, **more
    )
    return int(found.read[0]), int(found.write[0])


def padded(tables: list[list[int]]) -> StateTables:
    width = max(map(len, tables))
    return StateTables.padded([[*table, *[-1] * (width - len(table))] for table in tables])


def ragged(tables: list[list[int]]) -> StateTables:
    return StateTables.ragged([*chain.from_iterable(tables)], np.cumsum([0, *map(len, tables)]))


def compact(tables: list[list[int]]) -> StateTables:
    """Without the blocks that have no slot."""
    kept = [[(block, slot) for block, slot in enumerate(row) if slot >= 0] for row in tables]
    flat = [*chain.from_iterable(kept)]
    bounds = np.cumsum([0, *map(len, kept)])
    return StateTables.compact([slot for _, slot in flat], bounds, [block for block, _ in flat])


FORMS = [padded, ragged, compact]


def by_loop(tables: list[list[int]], prev: list[int], total: list[int], block: int) -> Any:
    """A sequence at a time, a token at a time."""
    rows = []
    for table, old, new in zip(tables, prev, total, strict=True):
        holder = {}
        for token in range(1, new + 1):
            holder[token] = table[sum(1 for n in range(1, token) if n % block == 0)]
        rows.append([holder[old] if old else -1, holder[new]])
    return rows


@pytest.mark.parametrize(
    ("prev", "total", "wanted"),
    [
        (0, 1, (-1, 5)),
        (0, 16, (-1, 5)),
        (0, 17, (-1, 6)),
        (1, 2, (5, 5)),
        (15, 16, (5, 5)),
        (16, 17, (5, 6)),
        (16, 16, (5, 5)),
        (17, 32, (6, 6)),
        (17, 33, (6, 7)),
        (3, 48, (5, 7)),
    ],
)
def test_a_sequence(prev: int, total: int, wanted: tuple[int, int]) -> None:
    assert one(prev, total, [5, 6, 7]) == wanted


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[list[int]], list[int], list[int]]:
    """A block size, tables with blocks that have no slot, and both counts."""
    block = draw(st.sampled_from([1, 2, 3, 8]))
    slots = iter(draw(st.permutations(range(60))))
    tables, prev, total = [], [], []
    for _ in range(draw(st.integers(1, 5))):
        blocks = draw(st.integers(1, 6))
        new = draw(st.integers(1, blocks * block))
        old = draw(st.integers(0, new))
        used = {(old - 1) // block, (new - 1) // block}
        table = [next(slots) for _ in range(blocks)]
        kept = draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))
        tables.append([slot if i in used or kept[i] else -1 for i, slot in enumerate(table)])
        prev.append(old)
        total.append(new)
    return block, tables, prev, total


@given(batches())
@example((2, [[3, -1, 4], [7]], [2, 0], [5, 1]))
def test_every_form_against_the_loop(case: Any) -> None:
    block, tables, prev, total = case
    wanted = by_loop(tables, prev, total, block)
    for form in FORMS:
        found = state_block_tables(form(tables), prev, total, block_tokens=block)
        assert found.table.tolist() == wanted
        assert found.table.shape == (len(tables), 2)
        assert found.read.dtype == found.write.dtype == np.int32


@given(batches(), st.randoms(use_true_random=False))
def test_neighbours_change_nothing(case: Any, random: Any) -> None:
    block, tables, prev, total = case
    for form in FORMS:
        whole = state_block_tables(form(tables), prev, total, block_tokens=block).table
        order = random.sample(range(len(tables)), random.randint(1, len(tables)))
        part = state_block_tables(
            form([tables[row] for row in order]),
            np.array(prev)[order],
            np.array(total)[order],
            block_tokens=block,
        )
        assert part.table.tolist() == whole[order].tolist()


def test_sequences_may_read_what_they_share() -> None:
    found = state_block_tables(ragged([[1, 2], [1, 3]]), [16, 16], [17, 20], block_tokens=BLOCK)
    assert found.table.tolist() == [[1, 2], [1, 3]]


def test_an_empty_batch() -> None:
    for tables in (StateTables.padded(np.empty((0, 4), np.int32)), StateTables.ragged([], [0])):
        assert state_block_tables(tables, [], [], block_tokens=BLOCK).table.shape == (0, 2)


def test_any_integers() -> None:
    tables = StateTables.padded(np.array([[1, 2]], np.uint8))
    found = state_block_tables(
        tables, np.array([3], np.uint16), np.array([17], np.int32), block_tokens=np.int64(16)
    )
    assert found.table.tolist() == [[1, 2]]


GOOD = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
WRONG: dict[str, tuple[Any, list[int], list[int], str]] = {
    "empty": ([[1, 2, 3], [], [7]], [0, 0, 0], [1, 1, 1], "sequence 1: .* an empty table"),
    "all empty": ([[], []], [0, 0], [1, 1], "sequence 0: .* an empty table"),
    "no tokens": (GOOD, [0, 0, 0], [1, 1, 0], "sequence 2: expected total_tokens of 1 or more"),
    "negative": (GOOD, [0, 0, 0], [1, -5, 1], "sequence 1: .* found -5"),
    "negative before": (GOOD, [0, -1, 0], [1, 1, 1], "sequence 1: .* found -1 of 1"),
    "goes back": (GOOD, [0, 9, 0], [1, 8, 1], "sequence 1: .* found 9 of 8"),
    "short for the write": (
        [[1, 2, 3], [4, 5, 6], [7]],
        [16, 16, 16],
        [17, 17, 17],
        r"sequence 2: .* block 1 of 16 tokens .*found",
    ),
    "short for both": ([[1]], [40], [50], "sequence 0: .* block 3"),
    "missing for the read": (
        [[1, 2, 3], [-1, 5, 6], [7, 8, 9]],
        [16, 16, 16],
        [17, 17, 17],
        "sequence 1: .* block 0",
    ),
    "missing for the write": (
        [[1, 2, 3], [4, -1, 6], [7, 8, 9]],
        [16, 16, 16],
        [17, 17, 17],
        "sequence 1: .* block 1",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("form", FORMS)
def test_what_is_wrong_names_the_sequence(form: Any, case: Any) -> None:
    tables, prev, total, what = case
    refused(ConfigError, what, state_block_tables, form(tables), prev, total, block_tokens=BLOCK)
    names = [f"request {chr(97 + row)}" for row in range(len(tables))]
    row = int(what[len("sequence ")])
    with pytest.raises(ConfigError, match=f"sequence 'request {chr(97 + row)}'"):
        state_block_tables(form(tables), prev, total, block_tokens=BLOCK, names=names)


def test_a_message_says_what_the_table_has() -> None:
    long = [list(range(100, 120))]
    with pytest.raises(
        ConfigError, match=r"block 20 .*found 20 blocks, in slots \[100, .*\.\.\.\]"
    ):
        state_block_tables(padded(long), [0], [321], block_tokens=BLOCK)
    with pytest.raises(ConfigError, match=r"found states at blocks \[0, 2\]"):
        state_block_tables(compact([[1, -1, 3]]), [0], [20], block_tokens=BLOCK)


def test_what_another_sequence_writes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slot 5 is written by sequence \d in the same step"):
        state_block_tables(padded([[5], [6], [5]]), [0, 0, 0], [1, 1, 1], block_tokens=BLOCK)
    with pytest.raises(ConfigError, match="sequence 'b': its slot 1 is written by sequence 'a'"):
        state_block_tables(
            padded([[1, -1], [1, 2]]), [3, 16], [4, 17], block_tokens=BLOCK, names="ab"
        )


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: StateTables.padded([1, 2]), "shape"),
        (lambda: StateTables.padded([[1.5]]), "integers"),
        (lambda: StateTables.padded([[-2]]), "found -2"),
        (lambda: StateTables.padded([[-1, 1 << 31]]), "pages"),
        (lambda: StateTables.ragged([1, 2], [0, 1]), "offsets"),
        (lambda: StateTables.ragged([1, 2], [0, 3, 2]), "offsets"),
        (lambda: StateTables.compact([1, 2], [0, 2], [0]), "one for each slot"),
        (lambda: StateTables.compact([1, 2], [0, 2], [0.0, 1.0]), "2 integers"),
        (lambda: StateTables.compact([1, 2], [0, 2], [1, 0]), "ascending"),
        (lambda: StateTables.compact([1, 2], [0, 2], [3, 3]), "ascending"),
        (lambda: StateTables.compact([1, 2], [0, 2], [-1, 0]), "ascending"),
        (lambda: StateTables.compact([1, 2], [0, 2], [0, 1 << 32]), "ascending"),
        (lambda: state_block_tables(padded(GOOD), [0], [1], block_tokens=16), "3 tables, 1 prev"),
        (lambda: one(0, 1, [1], names=[]), "0 names"),
        (lambda: state_block_tables(padded(GOOD), [[0]], [1], block_tokens=16), "prev_tokens"),
        (lambda: state_block_tables(padded(GOOD), [0], [1.0], block_tokens=16), "total_tokens"),
        (lambda: state_block_tables(padded(GOOD), [0], [1], block_tokens=0), "block_tokens"),
    ],
)
def test_tables_that_are_none(call: Any, what: str) -> None:
    refused(ConfigError, what, call)


# ---- capacity

SIZES = {"block_bytes": 100, "state_bytes": 1000, "block_tokens": 16}


@given(st.integers(0, 20), st.integers(1, 500), st.integers(0, 300_000))
@example(0, 1, 907)  # rounding asks for a state in place of the only block
def test_capacity_uses_the_budget(running: int, tokens: int, more: int) -> None:
    budget = running * 1000 + 100 + more
    found = capacity(budget, running_states=running, tokens_per_state=tokens, **SIZES)
    free = budget - found.blocks * 100 - found.states * 1000
    assert 0 <= free < 100  # not another block
    own = found.states - running
    assert found.blocks >= 1
    assert own * tokens <= found.blocks * 16  # as many tokens for each as asked, or more
    blocks = (100 + more - (own + 1) * 1000) // 100  # with one state more
    assert blocks < 1 or (own + 1) * tokens > blocks * 16


def test_capacity_of_one_kind_alone() -> None:
    assert capacity(10_100, running_states=10, tokens_per_state=1 << 30, **SIZES) == Capacity(1, 10)
    with pytest.raises(
        ConfigError, match=r"10 states of running requests .* 10100 bytes, found 100"
    ):
        capacity(10_099, running_states=10, tokens_per_state=64, **SIZES)
    with pytest.raises(ConfigError, match="tokens_per_state"):
        capacity(10_100, running_states=10, tokens_per_state=0, **SIZES)
