"""What a run has shown: every problem is found, and it is told to people and to scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.demo_turns import served

from lightcache.snapshot import CheckReport
from lightcache.tools.demo.messages import Hello, Holding, Recovered, Verified
from lightcache.tools.demo.summary import Outcome, sample

Change = Callable[[Outcome], Any]

CLEAN = CheckReport(
    clean=True,
    message="64 pages: every invariant holds",
    invariant=0,
    page=0,
    free=1,
    writing=0,
    ready=63,
    doomed=0,
    held=0,
    pins=0,
    quiet=True,
    recovered=0,
)


def outcome(**changes: Any) -> Outcome:
    """Of a run in which all of it held."""
    plain = Outcome(
        wanted_turns=4,
        wanted_kill=True,
        turns=[
            served(0, reused={"host": 0}, loaded_bytes=0),
            served(1),
            served(2, attempts=2, worker=1, life=1),
            served(3),
        ],
        holding=Holding(2, 0, 0, 3, 6),
        recovered=[Recovered(0, 2, 6, 1, 0.004)],
        successors=[Hello(0, 1, 77, "demo-cache", "demo-device")],
        successor_s=2.5,
        lookup_us=41.5,
        check=CLEAN,
        verified=[Verified(number, True, 1e-6 * number) for number in (1, 2, 3)],
        wanted_verified=3,
        seconds=12.25,
    )
    return replace(plain, **changes)


def text(found: Outcome) -> str:
    return "\n".join(line.plain for line in found.lines())


# ---- whether it held


def test_all_of_it_held() -> None:
    assert outcome().problems() == []
    assert outcome(wanted_kill=False, holding=None, recovered=[], successors=[]).problems() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wanted_turns": 5}, ["expected 5 answers, found 4"]),
        (
            {
                "turns": [served(n, reused={}) for n in range(4)],
                "verified": [],
                "wanted_verified": 0,
            },
            ["no turn reused anything; give --size more, or prompts that share prefixes"],
        ),
        (
            {"holding": None},
            ["no worker was killed: from the middle on no turn wrote pages; give --size more"],
        ),
        ({"recovered": []}, ["what the killed worker held was not taken back"]),
        (
            {"recovered": [Recovered(0, 1, 6, 1, 0.1), Recovered(1, None, 6, 1, 0.1)]},
            ["what the killed worker held was not taken back"],
        ),
        ({"recovered": [Recovered(0, 2, 0, 1, 0.1)]}, ["the killed worker left no doomed page"]),
        ({"successors": []}, ["the killed worker has no successor"]),
        (
            {"successors": [], "recovered": [Recovered(0, 2, 0, 1, 0.1)]},
            ["the killed worker left no doomed page", "the killed worker has no successor"],
        ),
        ({"check": None}, ["check: it did not run"]),
        (
            {"check": replace(CLEAN, clean=False, invariant=7, message="page 3 is in no chain")},
            ["check: page 3 is in no chain"],
        ),
        ({"verified": []}, ["expected 3 turns computed again, found 0"]),
        ({"verified": [], "wanted_verified": 0}, ["expected 0 turns computed again, found 0"]),
        ({"wanted_verified": 4}, ["expected 4 turns computed again, found 3"]),
        (
            {"verified": [Verified(9, False, 2e-5)], "wanted_verified": 1},
            [
                "turn 9 is not what an uncached run gives: tokens differ, log-probabilities "
                "by 2.0e-05"
            ],
        ),
        (
            {"verified": [Verified(9, True, 2e-4)], "wanted_verified": 1},
            [
                "turn 9 is not what an uncached run gives: tokens equal, log-probabilities "
                "by 2.0e-04"
            ],
        ),
        (
            {"verified": [Verified(9, True, math.nan)], "wanted_verified": 1},
            ["turn 9 is not what an uncached run gives: tokens equal, log-probabilities by nan"],
        ),
        (
            {"left": ["demo-1-x", "demo-1-y"]},
            ["demo-1-x was not removed", "demo-1-y was not removed"],
        ),
    ],
)
def test_what_did_not_hold(changes: dict[str, Any], said: list[str]) -> None:
    assert outcome(**changes).problems() == said


def restarted(**changes: Any) -> dict[str, Any]:
    """Changes of a run that went on behind a restart."""
    again = [
        served(4, reused={"host": 0, "storage": 64}),
        served(5, reused={"host": 16, "storage": 48}),
    ]
    return {
        "wanted_restart": True,
        "wanted_again": 2,
        "again": again,
        "storage": "disk:/there",
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"wanted_again": 3}, ["expected 3 answers behind the restart, found 2"]),
        (
            {"again": [served(4, reused={"host": 0}), served(5, reused={"storage": 0})]},
            [
                "nothing came from storage behind the restart; give it more room, or leave the "
                "restart out (--no-restart)"
            ],
        ),
        (
            {"again": [served(5, reused={"storage": 9}), served(4, reused={"host": 3})]},
            [
                "the first turn behind the restart had 3 tokens from the host tier, which should "
                "have been empty"
            ],
        ),
        (
            {"again": [served(4, reused={"device": 3, "storage": 9}), served(5)]},
            [
                "the first turn behind the restart had 3 tokens from the device tier, which should "
                "have been empty"
            ],
        ),
        # Its first attempt had read to the host what the second found there.
        ({"again": [served(4, attempts=2), served(5, reused={"storage": 1})]}, []),
    ],
)
def test_what_did_not_hold_behind_a_restart(changes: dict[str, Any], said: list[str]) -> None:
    assert outcome(**restarted(**changes)).problems() == said


def test_nobody_was_asked_behind_a_restart() -> None:
    for count in (0, 2):
        found = outcome(**restarted(again=[], wanted_again=count))
        assert len(found.problems()) == 2
        assert "restart        nobody was asked anything" in text(found)
        json.dumps(found.facts(), allow_nan=False)


def test_a_restart_that_nobody_asked_for_is_no_problem() -> None:
    found = outcome(**restarted(wanted_restart=False, again=[]))
    assert found.problems() == []
    assert "restart " not in text(found)
    assert found.facts()["restart"] is None


def test_exactly_the_tolerance_is_within() -> None:
    assert not outcome(verified=[Verified(1, True, 1e-4)] * 3).problems()


def test_a_kill_that_nobody_asked_for_is_no_problem() -> None:
    found = outcome(wanted_kill=False, holding=None, recovered=[Recovered(1, None, 0, 1, 0.1)])
    assert found.problems() == []


# ---- for people


def test_the_summary() -> None:
    assert text(outcome()) == "\n".join(
        [
            "turns          4 answered in 12 s",
            "prompt tokens  400, of which 192 (48%) came from the host tier",
            "first token    10 ms with the cache, 50 ms from nothing: 5.0 times as fast "
            "(medians of 3 reused turns)",
            "lookup         42 us to hash, find and pin what there is (median)",
            "moved          3.0 MiB loaded, 2.0 MiB offloaded",
            "killed         worker 0, with 3 of 6 pages of turn 2 copied: 6 pages doomed, usable "
            "again 4 ms after the signal; its successor was ready after 2.5 s",
            "check          clean: 64 pages: every invariant holds",
            "equal          3 of 3 reused turns gave the tokens of an uncached run in a fresh "
            "process; log-probabilities within 3.0e-06",
        ]
    )


@pytest.mark.parametrize(
    ("changes", "has", "lacks"),
    [
        ({"wanted_kill": False}, "check ", "killed "),
        ({"holding": None}, "killed         nobody", "doomed"),
        ({"recovered": []}, "killed         nobody", "doomed"),
        ({"successors": []}, "after the signal", "successor"),
        ({"check": None}, "equal ", "check "),
        ({"checked": 1}, "clean: 64 pages", "caches"),
        ({"checked": 2}, "clean: 2 caches, the last of 64 pages: every invariant", "broken"),
        ({"check": replace(CLEAN, clean=False, message="[red]")}, "broken: [red]", "clean"),
        ({"verified": []}, "equal          not compared", "fresh process"),
        ({"verified": [Verified(1, False, 0.5), Verified(2, True, 0.1)]}, "1 of 2", "2 of 2"),
        ({"verified": [Verified(1, True, 0.5), Verified(2, True, math.nan)]}, "within nan", "0.5"),
        ({"turns": []}, "none was reused", "came from"),
        ({"turns": []}, "first token    not compared", "times as fast"),
        ({"turns": [served(0, baseline_s=None)]}, "not compared", "times as fast"),
        (
            {"turns": [served(0, reused={"host": 25, "disk": 50})]},
            "50 (50%) came from the disk",
            "none",
        ),
        (
            {"storage": "mine://me:password@there", "turns": [served(0, reused={"storage": 1500})]},
            "storage        1,500 tokens that the host did not have came from mine:\n",
            "password",
        ),
        (
            {"storage": "memory:"},
            "nothing came from memory:, the host had all that was asked for; give --size less",
            "the storage tier",
        ),
        ({"storage": "memory:"}, "and to read what storage has (median)", "pin what there is ("),
        ({}, "lookup ", "storage"),
        (
            restarted(),
            "restart        everything ended and began anew, with an empty cache: of 200 prompt "
            "tokens 112 came from disk:, 16 from the host, where these had been read to before; "
            "the first of 2 turns had its first token after 10 ms, 50 ms from nothing\n",
            "nothing came from",
        ),
        (
            restarted(again=[served(4, reused={"storage": 64})], storage="mine:me:word@there"),
            "tokens 64 came from mine:; the first of 1 turns",
            "word",
        ),
        (
            restarted(turns=[served(0, reused={"storage": 7})]),
            "storage        7 tokens that the host did not have came from disk:\n",
            "nothing came from",
        ),
    ],
)
def test_what_is_said_otherwise(changes: dict[str, Any], has: str, lacks: str) -> None:
    said = text(outcome(**changes))
    assert has in said
    assert lacks not in said


# ---- for scripts


def test_facts() -> None:
    facts = json.loads(json.dumps(outcome().facts(), allow_nan=False))
    assert facts == {
        "turns": 4,
        "prompt_tokens": 400,
        "hit_tokens": {"host": 192},
        "reused_turns": 3,
        "first_token_s": 0.01,
        "first_token_from_nothing_s": 0.05,
        "lookup_us": 41.5,
        "loaded_bytes": 3 << 20,
        "offloaded_bytes": 2 << 20,
        "killed": {
            "worker": 0,
            "turn": 2,
            "copied_pages": 3,
            "doomed_pages": 6,
            "recovered_s": 0.004,
        },
        "restart": None,
        "check": "64 pages: every invariant holds",
        "clean": True,
        "verified_turns": 3,
        "largest_difference": 3e-6,
        "seconds": 12.25,
        "problems": [],
    }


def test_facts_of_a_restart() -> None:
    """Apart from those before it."""
    facts = outcome(**restarted()).facts()
    assert facts["restart"] == {
        "turns": 2,
        "prompt_tokens": 200,
        "hit_tokens": {"host": 16, "storage": 112},
        "reused_turns": 2,
        "first_token_s": 0.01,
        "first_token_from_nothing_s": 0.05,
    }
    plain = outcome().facts()
    assert {name: facts[name] for name in plain if name != "restart"} == {
        name: plain[name] for name in plain if name != "restart"
    }


@pytest.mark.parametrize("difference", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_facts_of_a_run_that_did_not_hold(difference: float, where: int) -> None:
    verified = [Verified(n, True, difference if n == where else 0.5) for n in range(3)]
    facts = outcome(turns=[], check=None, holding=None, verified=verified).facts()
    json.dumps(facts, allow_nan=False)
    assert facts["largest_difference"] is None
    assert (facts["clean"], facts["check"], facts["killed"]) == (False, None, None)
    assert facts["first_token_s"] is None
    assert len(facts["problems"]) >= 4


def test_nothing_was_compared() -> None:
    assert outcome(verified=[]).facts()["largest_difference"] is None


# ---- the sample


def test_a_sample_is_spread() -> None:
    turns = [served(number) for number in range(20)]
    assert [turn.number for turn in sample(turns, 5)] == [0, 4, 8, 12, 16]
    assert [turn.number for turn in sample(turns[:7], 5)] == [0, 1, 2, 4, 5]
    assert sample(turns[:3], 5) == turns[:3]
    assert sample(turns, 0) == []


def test_a_sample_has_what_was_asked_twice() -> None:
    turns = [served(number, attempts=1 + (number in (5, 11))) for number in range(20)]
    assert [turn.number for turn in sample(turns, 5)] == [5, 11, 0, 7, 14]
    assert [turn.number for turn in sample(turns, 1)] == [5]
    again = [served(number, attempts=2) for number in range(9)]
    assert [turn.number for turn in sample(again, 4)] == [0, 1, 2, 3]


def test_half_of_a_sample_is_what_storage_gave() -> None:
    both = {"host": 16, "storage": 16}
    turns = [
        served(number, reused=both if number in (3, 9, 15) else {"host": 16})
        for number in range(20)
    ]
    assert [turn.number for turn in sample(turns, 4)] == [3, 9, 0, 10]
    assert [turn.number for turn in sample(turns, 8)] == [3, 9, 15, 0, 4, 7, 12, 16]
    assert [turn.number for turn in sample(turns[2:4], 4)] == [3, 2]
    stored = [served(number, reused=both) for number in range(8)]
    assert [turn.number for turn in sample(stored, 4)] == [0, 2, 4, 6]


def test_a_sample_has_only_what_was_reused() -> None:
    turns = [served(number, reused={"host": 16 * (number % 2)}) for number in range(10)]
    turns[4] = served(4, attempts=2, reused={})
    assert [turn.number for turn in sample(turns, 9)] == [1, 3, 5, 7, 9]
