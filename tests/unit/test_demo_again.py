"""What is asked behind a restart: conversations go on where their last turn ended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from support.demo_turns import served

from lightcache.errors import ConfigError
from lightcache.tools.demo.again import Again, write_again
from lightcache.tools.demo.messages import Served

VOCABULARY = 4096


def turn(number: int, conversation: int, which: int, tokens: int, answer: int = 3) -> Served:
    """One of `tokens` tokens and an answer."""
    every = np.arange(number * 1000, number * 1000 + tokens + answer, dtype=np.int32)
    return served(number, conversation=conversation, turn=which, prompt=tokens, tokens=every)


def written(
    path: Path, turns: Iterable[Served], count: int = 4, positions: int | None = None
) -> Again:
    """What goes on from these."""
    how = {"vocabulary": VOCABULARY, "positions": positions, "seed": 5}
    wrote = write_again(path, turns, count, **how)  # type: ignore[arg-type]
    found = Again(path=str(path), first=100, vocabulary=VOCABULARY)
    assert found.total == wrote
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns.json"


def test_a_conversation_goes_on(path: Path) -> None:
    turns = [turn(0, 0, 0, 20), turn(2, 0, 1, 40), turn(1, 1, 0, 30)]
    again = written(path, turns)
    (first,) = again.begin()
    assert (first.number, first.conversation, first.turn, first.answer_tokens) == (100, 0, 2, 3)
    assert first.tokens[:43].tolist() == turns[1].tokens.tolist()
    assert len(first.tokens) > 43, "with a message of its own"
    assert 0 <= first.tokens[43:].min() <= first.tokens[43:].max() < VOCABULARY
    (other,) = again.answered(100, [1, 2, 3])
    assert (other.number, other.conversation, other.turn) == (101, 1, 1)
    assert other.tokens[:33].tolist() == turns[2].tokens.tolist()
    assert other.tokens[33:].tolist() != first.tokens[43:].tolist()
    assert again.answered(101, [1]) == []


def test_the_first_answer_releases_all_others(path: Path) -> None:
    again = written(path, [turn(number, number, 0, 10) for number in range(4)])
    assert [one.number for one in again.begin()] == [100]
    assert [one.number for one in again.answered(100, [1])] == [101, 102, 103]
    assert [again.answered(number, [1]) for number in (102, 101, 103)] == [[], [], []]


def test_those_that_were_asked_last(path: Path) -> None:
    """What was stored last is evicted last."""
    turns = [turn(9, 0, 1, 10), *(turn(number, number, 0, 10) for number in (3, 2, 7, 5))]
    again = written(path, turns, 3)
    found = again.begin() + again.answered(100, [1])
    assert [one.conversation for one in found] == [0, 5, 7]


def test_one_that_is_too_long_is_asked_again(path: Path) -> None:
    turns = [turn(0, 0, 0, 20), turn(1, 1, 0, 100)]
    again = written(path, turns, positions=103)
    short, long = again.begin() + again.answered(100, [1])
    assert (short.turn, long.turn) == (1, 0)
    assert long.tokens.tolist() == turns[1].tokens[:100].tolist()
    assert len(short.tokens) + 3 <= 103


def test_a_seed_makes_the_same_messages(path: Path, tmp_path: Path) -> None:
    one, other = (
        written(where, [turn(0, 0, 0, 20)]).begin()[0] for where in (path, tmp_path / "other")
    )
    assert one.tokens.tolist() == other.tokens.tolist()
    with pytest.raises(ValueError, match="read-only"):
        one.tokens[0] = 1


def test_out_of_order(path: Path) -> None:
    again = written(path, [turn(0, 0, 0, 20), turn(1, 1, 0, 20)])
    with pytest.raises(ConfigError, match="not handed out"):
        again.answered(100, [1])
    again.begin()
    with pytest.raises(ConfigError, match="has begun"):
        again.begin()
    with pytest.raises(ConfigError, match="not handed out"):
        again.answered(101, [1])
    with pytest.raises(ConfigError, match="token ids"):
        again.answered(100, [VOCABULARY])
    with pytest.raises(ConfigError, match="number of the turn"):
        again.answered(99, [1])


@pytest.mark.parametrize("text", ["", "[]", "{}", "[{}]", "[1]", '[{"tokens": "x"}]'])
def test_a_file_of_something_else(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="path: expected"):
        Again(path=str(path), first=0, vocabulary=10)


def test_no_file(path: Path) -> None:
    with pytest.raises(ConfigError, match="path: expected turns that"):
        Again(path=str(path), first=0, vocabulary=10)
