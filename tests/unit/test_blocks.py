"""Block tables as slots of tokens."""

import numpy as np
import pytest
from support.refusals import refused

from lightcache.kernels.moves import slots_of_blocks
from lightcache.shm.errors import ConfigError


@pytest.mark.parametrize("block", [1, 3, 16])
def test_each_token_finds_its_slot(block):
    table = np.random.default_rng(block).permutation(50)[:7].astype(np.int32)
    slots = slots_of_blocks(table, block)
    assert slots.dtype == np.int64
    assert slots.tolist() == [
        int(table[token // block]) * block + token % block for token in range(7 * block)
    ]
    for first in range(block + 1):
        assert slots_of_blocks(table, block, first=first).tolist() == slots[first:].tolist()
        part = slots_of_blocks(table.tolist(), block, first=first, tokens=5)
        assert part.tolist() == slots[first : first + 5].tolist()


def test_blocks_that_are_not_there_are_left_out():
    assert slots_of_blocks([2, -1, -7, 0], 2).tolist() == [4, 5, -1, -1, -1, -1, 0, 1]
    assert slots_of_blocks([], 16).tolist() == []


def test_numbers_beyond_32_bits():
    assert slots_of_blocks(np.array([2**31 - 1], np.int32), 2).tolist() == [2**32 - 2, 2**32 - 1]


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (([0.5], 16), {}, "blocks: expected whole numbers"),
        (([[1]], 16), {}, "blocks: expected whole numbers"),
        (([1], 0), {}, "block_tokens: expected"),
        (([1], 16.0), {}, "block_tokens: expected"),
        (([1], 16), {"first": 17}, "hold tokens 0 to 15"),
        (([1], 16), {"first": -1}, "hold tokens 0 to 15"),
        (([1], 16), {"first": 8, "tokens": 9}, "expected 9 from token 8 on"),
        (([1], 16), {"tokens": -1}, "expected -1 from token 0 on"),
    ],
)
def test_bad_tables(arguments, more, message):
    refused(ConfigError, message, slots_of_blocks, *arguments, **more)
