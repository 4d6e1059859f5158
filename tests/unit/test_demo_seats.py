"""Seats of the demo's workers: whose cache a prompt goes on from, and whose blocks are free."""

from __future__ import annotations

import numpy as np

from lightcache.tools.demo.messages import Tokens
from lightcache.tools.demo.seats import Seat, Seats


def row(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def served(seats: Seats, prompt: Tokens, *answer: int) -> tuple[Seat, Seat | None]:
    seat = seats.take(prompt)
    seat.tokens, seat.past = np.concatenate([prompt, row(*answer)]), "its cache"
    return seat, seats.leave(seat)


def test_nothing_is_kept() -> None:
    seats = Seats(0, 8)
    assert seats.blocks == 8
    one, gone = served(seats, row(1, 2, 3))
    assert gone is one
    assert gone.past is None
    other, _ = served(seats, row(1, 2, 3, 4))
    assert other is not one
    assert other.first == one.first == 0


def test_a_prompt_goes_on_in_the_longest() -> None:
    seats = Seats(3, 8)
    short, _ = served(seats, row(1, 2))
    seats.leave(Seat(seats._free.pop() * 8, 8, row(1, 2, 3, 4)))
    assert seats.take(row(9, 9)).tokens.tolist() == []
    found = seats.take(row(1, 2, 3, 4, 5))
    assert found.tokens.tolist() == [1, 2, 3, 4]
    assert seats.take(row(1, 2, 7)) is short


def test_one_that_is_left_differently_or_to_its_end_is_not_gone_on_with() -> None:
    seats = Seats(2, 8)
    served(seats, row(1, 2, 3))
    for prompt in (row(1, 2, 3), row(1, 2), row(1, 2, 4, 5)):
        seat = seats.take(prompt)
        assert len(seat.tokens) == 0
        seats._free.append(seat.first // 8)


def test_the_one_that_was_left_first_goes() -> None:
    seats = Seats(2, 8)
    one, _ = served(seats, row(1))
    two, _ = served(seats, row(2))
    again, gone = served(seats, row(1, 5))
    assert again is one
    assert gone is None
    three, gone = served(seats, row(3))
    assert gone is two
    assert len({one.first, two.first, three.first}) == 3
    assert seats.take(row(4)).first == two.first, "its blocks are the next one's"
    assert max(one.first, two.first, three.first) + 8 == seats.blocks


def test_blocks_of_a_seat() -> None:
    seat = Seat(16, 8, row())
    assert seat.table(3).tolist() == [16, 17, 18]
    assert seat.table(99).tolist() == list(range(16, 24))
    assert seat.table(3).dtype == np.int32
