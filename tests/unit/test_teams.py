"""Reservations that the ranks of a team write together, each handle being a rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.filling import pins
from support.interrupts import interrupt
from support.keys import Keys, prompt
from support.refusals import refused

from lightcache import Abandoned, ConfigError, LeaseLost, PageIndex, Reservation, WaitTimeout

A = prompt(1, 4)


@pytest.fixture
def first(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=16) as made:
        yield made


@pytest.fixture
def second(first: PageIndex) -> Iterator[PageIndex]:
    with PageIndex.attach(first.name) as attached:
        yield attached


def reserve(index: PageIndex, shard: int, **more: Any) -> Reservation:
    return index.reserve(A, shards=2, shard=shard, team=5, **more)


def test_ranks_write_together(first: PageIndex, second: PageIndex) -> None:
    with reserve(first, 0) as ours, reserve(second, 1) as theirs:
        assert (ours.joined, theirs.joined) == (False, True)
        assert (ours.own_shard, theirs.own_shard) == (0, 1)
        assert theirs.pages.tolist() == ours.pages.tolist()
        assert pins(first) == 8
        refused(LeaseLost, "belongs to the client", theirs.publish, 0)
        assert not theirs.publish()
        assert ours.publish()
    assert first.peek(A) == 4
    assert pins(first) == 0


def test_the_owner_does_not_publish_for_ranks_that_have_not_joined(
    first: PageIndex, second: PageIndex
) -> None:
    with reserve(first, 0) as ours:
        refused(LeaseLost, "belongs to the client", ours.publish, 1)
        assert not ours.publish()
        refused(LeaseLost, "published before", ours.publish)
    # Released after publishing: the others may still come, join and finish.
    with reserve(second, 1) as theirs:
        assert theirs.joined
        assert theirs.publish()
    assert first.peek(A) == 4


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_gives_up_gives_up_for_all(
    first: PageIndex, second: PageIndex, who: int
) -> None:
    with reserve(first, 0) as ours, reserve(second, 1) as theirs:
        ours, theirs = (ours, theirs) if who else (theirs, ours)
        ours.release()
        refused(Abandoned, "abandoned", theirs.publish)
    assert first.stats().reservations == 0
    assert pins(first) == 0


def test_what_is_there_is_present_for_each_rank(first: PageIndex, second: PageIndex) -> None:
    first.reserve(A[:2]).publish()
    with reserve(first, 0) as ours, reserve(second, 1) as theirs:
        for rank in (ours, theirs):
            assert rank.present.tolist() == [0, 1]
            assert rank.new.tolist() == [2, 3]
            rank.publish()
    with reserve(first, 0) as ours, reserve(second, 1) as theirs:
        assert ours.publish()  # nothing is to be written
        assert not theirs.joined


def test_keys_that_the_first_rank_has_no_room_for(first: PageIndex, second: PageIndex) -> None:
    long = prompt(2, 20)
    with (
        first.reserve(long, shards=2, shard=1, team=5) as ours,
        second.reserve(long, shards=2, shard=0, team=5) as theirs,
    ):
        assert theirs.joined
        assert theirs.missing.tolist() == ours.missing.tolist() == [16, 17, 18, 19]
        assert "the rank of the team" in theirs.why


def test_ranks_that_do_not_come_in_time(first: PageIndex, second: PageIndex) -> None:
    ours = reserve(first, 0, join_timeout=0)
    assert not ours.publish()
    assert second.wait(A, timeout=60) == 0  # who waits sees to it
    ours.release()
    with reserve(second, 1, join_timeout=math.inf) as theirs:
        assert not theirs.joined
        refused(WaitTimeout, "still being written", first.wait, A, timeout=0.03)


def test_copies_of_a_team_are_as_those_of_one_shard(first: PageIndex, second: PageIndex) -> None:
    with reserve(first, 1) as ours, reserve(second, 0) as theirs:
        hold = theirs.hold()
        assert hold.publish is not None
        assert not hold.publish()
        hold.give_back()
        assert ours.publish()
    assert first.peek(A) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"team": 5},
        {"shard": 0},
        {"team": 0, "shard": 0},
        {"team": 1 << 64, "shard": 0},
        {"team": 5, "shard": 2},
        {"team": 5, "shard": -1},
        {"team": 5, "shard": 0, "join_timeout": -1},
        {"team": 5.0, "shard": 0},
    ],
)
def test_bad_arguments_change_nothing(first: PageIndex, wrong: dict[str, Any]) -> None:
    refused(ConfigError, "team|shard|timeout", first.reserve, A, shards=2, **wrong)
    assert first.stats().reservations == 0
    assert pins(first) == 0


def test_no_tickets_of_a_team(first: PageIndex, second: PageIndex) -> None:
    with reserve(first, 0) as ours:
        refused(ConfigError, "without tickets", ours.ticket, [second.client_id])


@pytest.mark.parametrize("joins", [False, True])
def test_an_interrupt_anywhere_leaks_nothing(
    first: PageIndex, second: PageIndex, joins: bool
) -> None:
    for at in itertools.count():
        keys = prompt(at, 4)

        def call(keys: Keys = keys) -> None:
            with second.reserve(keys, shards=2, shard=1, team=5, join_timeout=0) as theirs:
                assert theirs.joined == joins
                theirs.publish()

        ours = first.reserve(keys, shards=2, shard=0, team=5) if joins else None
        interrupted = interrupt(call, at)
        if ours is not None:
            ours.release()
        assert pins(first) == 0
        if not interrupted:
            break
    first.reserve(prompt(0, 1)).release()
    assert first.stats().reservations == 0
