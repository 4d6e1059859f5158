"""The messages of a coordinator to its ranks."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightcache.errors import CacheCorrupted, ConfigError, LayoutMismatch
from lightcache.manager.ranks.messages import (
    Decisions,
    Joiner,
    Kind,
    Order,
    check_entries,
    decode,
    encode,
    parts_of,
)
from lightcache.shm import SharedLog

slots = st.lists(
    st.tuples(st.integers(-1, 200), st.integers(1, 9)).map(
        lambda run: [-1] * run[1] if run[0] < 0 else list(range(run[0], run[0] + run[1]))
    ),
    max_size=12,
).map(lambda runs: np.array([slot for run in runs for slot in run], np.int64))
request = st.one_of(st.integers(-(2**60), 2**60), st.text(max_size=8))
decisions = st.builds(
    Decisions,
    st.integers(0, 2**40),
    st.dictionaries(request, st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=5),
    st.binary(max_size=200),
    st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    st.lists(request, max_size=5).map(tuple),
)


@given(slots, st.binary(min_size=16, max_size=16), st.sampled_from(list(Kind)[:3]))
def test_an_order_arrives_as_it_was(given: Any, ticket: bytes, kind: Kind) -> None:
    found = decode(encode(Order(kind, 7, ticket, given, 3)))
    assert isinstance(found, Order)
    assert (found.kind, found.number, found.ticket, found.first) == (kind, 7, ticket, 3)
    assert found.slots.dtype == np.int64
    assert found.slots.tolist() == given.tolist()


def test_what_is_left_out_is_not_joined_with_slot_0() -> None:
    given = np.array([-1, 0, 1, -1, -1, 3], np.int64)
    found = decode(encode(Order(Kind.LOAD, 1, bytes(16), given, 0)))
    assert isinstance(found, Order)
    assert found.slots.tolist() == given.tolist()


def test_a_block_is_one_run() -> None:
    blocks = np.array([5, 9, 6], np.int64)[:, None] * 64 + np.arange(64)
    ticket = bytes(16)
    short = len(encode(Order(Kind.LOAD, 1, ticket, np.arange(0), 0)))
    assert len(encode(Order(Kind.LOAD, 1, ticket, blocks.reshape(-1), 0))) == short + 3 * 12


@pytest.mark.slow
@given(decisions, st.integers(16, 90))
def test_decisions_arrive_in_parts(given: Decisions, entry: int) -> None:
    joiner = Joiner()
    message = encode(given)
    for _ in range(2):
        *most, last = parts_of(message, entry)
        assert all(len(part) <= entry for part in (*most, last))
        assert all(joiner.take(part) is None for part in most)
        whole = joiner.take(last)
        assert whole == message
        assert decode(whole) == given


def test_who_joins_in_the_middle_waits_for_the_next() -> None:
    joiner = Joiner()
    parts = parts_of(encode(Decisions(1, extra=bytes(100))), 32)
    assert [joiner.take(part) for part in parts[1:]] == [None] * (len(parts) - 1)
    assert joiner.take(parts_of(encode(None), 32)[0]) is not None


def test_a_message_that_was_never_ended_is_forgotten() -> None:
    joiner = Joiner()
    assert joiner.take(parts_of(encode(Decisions(1, extra=bytes(100))), 32)[0]) is None
    for part in parts_of(message := encode(Decisions(2, extra=bytes(50))), 32):
        found = joiner.take(part)
    assert found == message


def test_a_startup_message_is_empty() -> None:
    assert decode(encode(None)) is None
    assert len(parts_of(encode(None), 16)) == 1


def test_another_release_is_named() -> None:
    with pytest.raises(LayoutMismatch, match="version 9"):
        Joiner().take(b"\x09\x03abc")


def test_bytes_of_another_writer_are_refused() -> None:
    with pytest.raises(CacheCorrupted):
        Joiner().take(b"x")
    whole = encode(Order(Kind.LOAD, 1, bytes(16), np.arange(8), 0))
    for wrong in (b"", b"\x01", whole[:-1], b"\xff" + whole[1:], struct.pack("<BI", 4, 2) + b"{}"):
        with pytest.raises(CacheCorrupted, match="makes no sense"):
            decode(wrong)


@pytest.mark.parametrize("bad", [np.zeros((2, 2)), np.zeros(2, np.float32)])
def test_slots_that_are_none(bad: Any) -> None:
    with pytest.raises(ConfigError, match="slots"):
        encode(Order(Kind.LOAD, 1, bytes(16), bad, 0))


def test_decisions_that_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="request ids"):
        Decisions(1, {(1, 2): (0, 0)})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="step"):
        Decisions(-1)
    with pytest.raises(ConfigError, match="extra"):
        Decisions(1, extra="text")  # type: ignore[arg-type]


def test_a_log_of_short_entries(segment_name: str) -> None:
    with SharedLog.create(segment_name, capacity=4, message_bytes=15) as log:
        with pytest.raises(ConfigError, match="16 bytes"):
            check_entries(log)
