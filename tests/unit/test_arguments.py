"""Arguments: arrays of another shape, dtype or layout are refused before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.keys import prompt
from support.refusals import refused

from lightcache import ConfigError, PageIndex
from lightcache._arguments import format_size, parse_size


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=8) as made:
        with made.reserve(prompt(1, 4)) as new:
            new.publish()
        yield made
        report = made.check()
        assert report.clean
        assert report.pins == 0
        assert report.writing == 0


GOOD = prompt(1, 4)
BAD_KEYS = {
    "list": GOOD.tolist(),
    "none": None,
    "bytes": GOOD.tobytes(),
    "memoryview": memoryview(GOOD),
    "signed": GOOD.astype(np.int64),
    "narrow": GOOD.astype(np.uint32),
    "float": GOOD.astype(np.float64),
    "swapped": GOOD.astype(GOOD.dtype.newbyteorder()),
    "one dimension": GOOD.ravel(),
    "three dimensions": GOOD.reshape(1, 4, 2),
    "three columns": np.zeros((4, 3), np.uint64),
    "one column": np.zeros((4, 1), np.uint64),
    "no columns": np.zeros((4, 0), np.uint64),
    "scalar": np.uint64(3),
    "zero dimensions": np.array(3, np.uint64),
    "rows skipped": GOOD[::2],
    "reversed": GOOD[::-1],
    "column-major": np.asfortranarray(GOOD),
    "transposed": np.zeros((2, 4), np.uint64).T,
}


@pytest.mark.parametrize("keys", BAD_KEYS.values(), ids=BAD_KEYS.keys())
def test_keys_that_are_none(index: PageIndex, keys: Any) -> None:
    bounds = np.array([0, 4])
    for call in (
        lambda: index.peek(keys),
        lambda: index.match(keys),
        lambda: index.reserve(keys),
        lambda: index.wait(keys, timeout=0),
        lambda: index.peek_many(keys, bounds),
        lambda: index.match_many(keys, bounds),
        lambda: index.reserve_batch(keys, bounds),
        lambda: index.wait_many(keys, bounds, timeout=0),
    ):
        refused(ConfigError, "keys", call)


def test_keys_in_any_memory(index: PageIndex) -> None:
    frozen = GOOD.copy()
    frozen.flags.writeable = False
    part = np.concatenate([GOOD, GOOD])[4:]
    raw = np.frombuffer(GOOD.tobytes(), np.uint64).reshape(-1, 2)
    for keys in (frozen, part, raw):
        assert index.peek(keys) == 4
        with index.match(keys) as lease, index.reserve(keys) as got:
            assert (len(lease), len(got.present)) == (4, 4)
        assert index.wait(keys, timeout=0) == 4
        assert index.peek_many(keys, np.array([0, 4])).tolist() == [4]


BAD_OFFSETS = {
    "empty": [],
    "none": None,
    "text": "04",
    "floats": [0.0, 4.0],
    "two dimensions": [[0, 4]],
    "scalar": 4,
    "not from 0": [1, 4],
    "not to the end": [0, 3],
    "past the end": [0, 5],
    "descending": [0, 3, 2, 4],
    "negative": [0, -1, 4],
    "ragged": [[0], [1, 2]],
    "unsigned and huge": np.array([0, 1 << 63, 4], np.uint64),
}


@pytest.mark.parametrize("offsets", BAD_OFFSETS.values(), ids=BAD_OFFSETS.keys())
def test_offsets_that_are_none(index: PageIndex, offsets: Any) -> None:
    for call in (
        index.peek_many,
        index.match_many,
        index.reserve_batch,
        lambda k, o: index.wait_many(k, o, timeout=0),
    ):
        refused(ConfigError, "offsets", call, GOOD, offsets)


def test_offsets_of_any_integer_kind(index: PageIndex) -> None:
    for offsets in (
        [0, 2, 4],
        (0, 2, 4),
        np.array([0, 2, 4], np.uint8),
        np.array([0, 0, 2, 4])[1:],
    ):
        assert index.peek_many(GOOD, offsets).tolist() == [2, 2]  # type: ignore[arg-type]


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("1", 1),
        (" 64 GiB ", 64 << 30),
        ("64gib", 64 << 30),
        ("1.5KiB", 1536),
        ("2 TB", 2 * 10**12),
        ("500MB", 500 * 10**6),
        ("7b", 7),
        ("1PiB", 1 << 50),
        ("1EiB", 1 << 60),
        ("2eb", 2 * 10**18),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


def test_sizes_for_people() -> None:
    assert format_size(0) == "0 B"
    assert format_size(1023) == "1023 B"
    assert format_size(1536) == "1.5 KiB"
    assert format_size(64 << 30) == "64.0 GiB"
    assert format_size(5000 << 40) == "4.9 PiB"
