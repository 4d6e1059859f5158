"""Rows E1 to E5: block tables for linear state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightcache.errors import ConfigError
from lightcache.hybrid.saving import Features, Grid, Saves
from lightcache.hybrid.tables import StateTables, capacity, state_block_tables

FULL = [[10, 11, 12, 13], [20, 21, -1, -1], [30, -1, -1, -1]]


# ---- E1


def test_e1_what_is_read_after_prev_and_written_after_total_tokens() -> None:
    found = state_block_tables(StateTables.padded(FULL), [64, 16, 0], [65, 17, 9], block_tokens=32)
    assert found.read.tolist() == [11, 20, -1]  # a third sequence that begins reads nothing
    assert found.write.tolist() == [12, 20, 30]  # the second crosses no boundary


def test_e1_equal_until_a_boundary_is_crossed() -> None:
    tables = StateTables.padded(FULL[:1])
    for total in range(2, 128):
        found = state_block_tables(tables, [total - 1], [total], block_tokens=32)
        crossed = (total - 1) % 32 == 0
        assert (found.read[0] != found.write[0]) == crossed


# ---- E2


@pytest.mark.parametrize(("block", "wanted"), [(16, [12, 13]), (32, [11, 11]), (64, [10, 10])])
def test_e2_the_block_size_is_given(block: int, wanted: list[int]) -> None:
    """The same counts and the same table, whatever its width."""
    for width in (4, 9):
        table = np.full((1, width), -1)
        table[0, :4] = FULL[0]
        found = state_block_tables(StateTables.padded(table), [48], [49], block_tokens=block)
        assert found.table[0].tolist() == wanted
    with pytest.raises(TypeError, match="block_tokens"):
        state_block_tables(StateTables.padded(FULL[:1]), [48], [49])  # type: ignore[call-arg]


# ---- E3


def test_e3_compact_tables_say_what_full_ones_do() -> None:
    counts = [64, 16, 0], [65, 17, 9]
    full = state_block_tables(StateTables.padded(FULL), *counts, block_tokens=32)
    compact = StateTables.compact([11, 12, 20, 30], [0, 2, 3, 4], [1, 2, 0, 0])
    found = state_block_tables(compact, *counts, block_tokens=32)
    assert found.table.tolist() == full.table.tolist()
    assert found.table.shape == (3, 2)  # two columns, however long the sequences are


def test_e3_capacity_of_both_kinds_together() -> None:
    sizes = {"block_bytes": 1 << 20, "state_bytes": 74 << 20, "block_tokens": 64}
    found = capacity(40 << 30, running_states=48, tokens_per_state=4096, **sizes)
    used = found.blocks * (1 << 20) + found.states * (74 << 20)
    assert (40 << 30) - (1 << 20) < used <= 40 << 30
    own = found.states - 48
    assert own * 4096 <= found.blocks * 64 < (own + 3) * 4096


# ---- E4


def test_e4_all_conflicts_in_one_message() -> None:
    features = Features(
        Grid(16, 64),
        Saves.INTERIOR,
        running=8,
        device_slots=100,
        ahead=True,
        alternating=2,
        drafted=3,
        device_states=0,
        state_block_tokens=48,
    )
    with pytest.raises(ConfigError) as caught:
        features.check()
    message = str(caught.value)
    assert "4 of its settings do not go together" in message
    for name in ("draft_slots=0", "device_states=0", "state_block_tokens=48"):
        assert name in message
    assert [line[:2] for line in message.splitlines()[1:]] == ["1.", "2.", "3.", "4."]


# ---- E5


@pytest.mark.parametrize(
    ("slots", "bounds", "prev", "total"),
    [
        ([10, 30], [0, 1, 1, 2], 0, 1),  # an empty table
        ([10, 20, 30], [0, 1, 2, 3], 0, 0),  # no tokens
        ([10, -1, 30], [0, 1, 2, 3], 0, 1),  # a missing block
        ([10, 20, 30], [0, 1, 2, 3], 32, 33),  # a table that is too short
        ([10, 20, 30], [0, 1, 2, 3], 9, 8),  # more tokens before than after
    ],
)
def test_e5_a_typed_error_names_the_sequence(
    slots: list[int], bounds: list[int], prev: int, total: int
) -> None:
    arguments: Any = (StateTables.ragged(slots, bounds), [0, prev, 0], [1, total, 1])
    with pytest.raises(ConfigError, match=r"^sequence 1: expected"):
        state_block_tables(*arguments, block_tokens=32)
    with pytest.raises(ConfigError, match=r"^sequence 'b': expected"):
        state_block_tables(*arguments, block_tokens=32, names="abc")
