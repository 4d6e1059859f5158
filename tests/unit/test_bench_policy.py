"""`bench policy`: orders of eviction against naive ones, the index among them, traces, and rows."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightcache import ConfigError
from lightcache.tools import cli
from lightcache_bench import _traces, policy
from lightcache_bench._policies import BOUND, POLICIES, Policy, Ranked
from lightcache_bench._traces import Request, Trace

RANKED = ("lfu", "lru-2", "gdsf", "belady")
MADE = [
    ("loop", 6000, 120000),
    ("phases", 7500, 187500),
    ("turns", 7778, 201389),
    ("reversed", 12000, 144000),
    ("scan", 5420, 184000),
    ("zipf", 8000, 160326),
    ("turns-bursts", 10103, 247889),
]
"""Requests of each pattern, and their blocks."""


def trace_of(*asked: str) -> Trace:
    """A letter is a block."""
    return Trace.of("letters", [Request(i, path) for i, path in enumerate(asked)])


def random_trace(seed: int) -> Trace:
    """Paths in a small tree; some prompts come again and again, others once."""
    chance = random.Random(seed)
    letters = "ab" if seed % 2 else "abcdef"
    prompts = ["".join(chance.choices(letters, k=chance.randint(1, 9))) for _ in range(30)]
    asked = []
    for _ in range(200):
        path = chance.choice(prompts[: chance.randint(1, 30)])
        asked.append(path[: chance.randint(1, 9)] + chance.choice(["", "", "x", "yz"]))
    return trace_of(*asked)


def hits(cache: Policy, trace: Trace) -> list[int]:
    return [cache.request(path) for path in trace.requests]


def hit_letters(name: str, pages: int, *asked: str) -> list[int]:
    trace = trace_of(*asked)
    return hits(POLICIES[name](trace, pages), trace)


# ---- orders of eviction


@pytest.mark.parametrize("pages", [1, 2, 3, 7, 20, 60, 500])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_true_of_all(seed: int, pages: int) -> None:
    """No more than fits, nothing without what is before it, and never better than Belady."""
    trace = random_trace(seed)
    most = sum(hits(POLICIES[BOUND](trace, pages), trace))
    for name, order in POLICIES.items():
        cache, total = order(trace, pages), 0
        for path in trace.requests:
            total += cache.request(path)
            cached = [block for block, here in enumerate(cache.cached) if here]
            assert len(cached) == cache.size <= pages, name
            above = [trace.parents[block] for block in cached]
            assert all(parent < 0 or cache.cached[parent] for parent in above), name
        assert total <= most, name


@pytest.mark.parametrize("pages", [1, 3, 7, 20, 60])
def test_lru_is_the_oldest_first(pages: int) -> None:
    """Against a list of all cached blocks, sorted each time; the deeper of one request first."""
    trace = random_trace(5)
    cache = POLICIES["lru"](trace, pages)
    used: dict[int, tuple[int, int]] = {}
    for number, path in enumerate(trace.requests):
        found = sum(1 for _ in itertools.takewhile(used.__contains__, path))
        assert cache.request(path) == found
        used |= {block: (number, -depth) for depth, block in enumerate(path)}
        kept = sorted(used, key=used.__getitem__, reverse=True)[:pages]
        used = {block: used[block] for block in kept}


@pytest.mark.parametrize("name", RANKED)
@pytest.mark.parametrize("pages", [1, 3, 7, 20, 60])
def test_the_lowest_leaf_goes_first(name: str, pages: int) -> None:
    """The heap, against a search of all leaves."""
    trace = random_trace(6)
    order = POLICIES[name]
    assert isinstance(order, type)

    class Searching(order):  # type: ignore[misc, valid-type]
        def _use(self, blocks: Sequence[int]) -> None:
            limit, self.pages = self.pages, len(trace.parents)
            super()._use(blocks)
            self.pages = limit
            while self.size > self.pages:
                leaves = [
                    block
                    for block, here in enumerate(self.cached)
                    if here and not self._children[block]
                ]
                leaf = min(leaves, key=self._rank)
                self._evicted(leaf)
                self._drop(leaf)

    assert issubclass(order, Ranked)
    assert hits(order(trace, pages), trace) == hits(Searching(trace, pages), trace)


def test_frequency_and_the_use_before_the_last() -> None:
    asked = ("a", "b", "a", "b", "c", "d", "a", "b")  # of c and d each one goes
    assert hit_letters("lru", 3, *asked) == [0, 0, 1, 1, 0, 0, 0, 0]
    for name in ("lfu", "lru-2"):
        assert hit_letters(name, 3, *asked) == [0, 0, 1, 1, 0, 0, 1, 1]
    # a was used most often, but not of late. The first c is not kept, yet it counts.
    assert hit_letters("lfu", 2, *"aaabbcca")[-1] == 1
    assert hit_letters("lru-2", 2, *"aaabbcca")[-1] == 0


def test_gdsf_ages() -> None:
    """What was used three times gives way when those that went have risen above it."""
    asked = ("a", "a", "a", *"bcdefg", "a")
    assert hit_letters("lfu", 2, *asked)[-1] == 1
    assert hit_letters("gdsf", 2, *asked)[-1] == 0
    # d was used twice before it went; when it comes back it is as new as c, and older.
    assert hit_letters("gdsf", 2, *"dbadacd") == [0, 0, 0, 0, 1, 0, 0]


def test_belady_knows_what_comes() -> None:
    # The block that it does not need again goes, were it used just now.
    assert hit_letters("belady", 2, "a", "b", "c", "a", "b") == [0, 0, 0, 1, 1]
    assert hit_letters("belady", 2, "abc", "abd", "abc") == [0, 2, 2]


def test_arc_keeps_what_was_used_twice() -> None:
    asked = ("a", "b", "a", "b", *"cdefgh", "a", "b")
    assert hit_letters("lru", 4, *asked)[-2:] == [0, 0]
    assert hit_letters("arc", 4, *asked)[-2:] == [1, 1]
    # What goes from the other list, where one has no leaf, is a ghost of the list that it was in.
    assert hit_letters("arc", 3, *"fdadfcacdefc")[-1] == 1


def test_s3_fifo_lets_new_blocks_go_soon() -> None:
    asked = ("a", "b", "a", "b", *"cdefgh", "a", "b")
    assert hit_letters("s3-fifo", 4, *asked)[-2:] == [1, 1]
    # A ghost comes back into the main queue, where what is new does not reach it.
    assert hit_letters("s3-fifo", 4, *"abcdea", *"fghi", "a")[-1] == 1
    assert hit_letters("s3-fifo", 4, *"abcdex", *"fghi", "a")[-1] == 0


def test_sieve_passes_what_was_used() -> None:
    # The hand passes a, takes b, and stays there: c goes next.
    assert hit_letters("sieve", 3, *"abca", "d", "e", "a") == [0, 0, 0, 1, 0, 0, 1]
    assert hit_letters("sieve", 3, *"abca", "d", "e", "c")[-1] == 0
    assert hit_letters("sieve", 3, *"abca", "d", "e", "d")[-1] == 1
    # It comes to a for the second time, and passes it, since b continues it.
    asked = ("a", "ab", "ab", "x", "y", "y", "z", "ab")
    assert hit_letters("sieve", 3, *asked) == [0, 1, 2, 0, 0, 1, 0, 1]


def test_w_tinylfu_admits_what_is_used_more_often() -> None:
    assert hit_letters("w-tinylfu", 3, *"abab", *"cdefgh", "a", "b")[-2:] == [1, 1]
    # Uses are halved after 20: d's many, most of them before that, are too few at the end.
    assert hit_letters("w-tinylfu", 2, *"cdcdccbcbdcdbadabddbd")[-1] == 0
    # A scan does not replace a loop of which a part fits.
    loop = "abcdefgh" * 5
    assert sum(hit_letters("lru", 5, *loop)) == 0
    assert sum(hit_letters("w-tinylfu", 5, *loop)) > 10


# ---- the index


@pytest.mark.parametrize("pages", [1, 3, 7, 20])
def test_the_index_is_lru(pages: int) -> None:
    trace = random_trace(pages)
    expected = hits(POLICIES["lru"](trace, pages), trace)
    for seed in (0, 1):
        with policy.Core(trace, pages, seed, policy.Replay()) as core:
            assert [core.request(path) for path in trace.requests] == expected
            assert core.written > 0


def test_further_calls_find_nothing_and_change_nothing() -> None:
    trace = random_trace(3)
    expected = hits(POLICIES["lru"](trace, 7), trace)
    with policy.Core(trace, 7, 0, policy.Replay(calls=3)) as core:
        assert [core.request(path) for path in trace.requests] == expected


# ---- traces


def test_a_block_is_known_by_all_before_it() -> None:
    trace = trace_of("abc", "abd", "xb", "ab")
    assert trace.requests == [[0, 1, 2], [0, 1, 3], [4, 5], [0, 1]]
    assert trace.parents == [-1, 0, 1, 1, -1, 4]
    assert trace.first(2).requests == trace.requests[:2]
    assert trace.first(9).requests == trace.requests


def test_requests_are_in_the_order_of_time() -> None:
    requests = [Request(2, "b"), Request(1, "a", counted=False), Request(2, "c")]
    trace = Trace.of("three", requests)
    assert trace.seconds == [1, 2, 2]
    assert trace.counted == [False, True, True]
    assert trace.requests == [[0], [1], [2]]


@pytest.mark.parametrize(("name", "requests", "blocks"), MADE)
def test_patterns_are_the_same_in_every_run(name: str, requests: int, blocks: int) -> None:
    made = _traces.makers(None)[name]()
    assert (len(made), sum(len(request.blocks) for request in made)) == (requests, blocks)


def test_bursts_never_come_again() -> None:
    others = [Request(i, "ab") for i in range(60)]
    trace = Trace.of("two", _traces.bursts(others))
    burst = [
        path for path, counted in zip(trace.requests, trace.counted, strict=True) if not counted
    ]
    assert sum(trace.counted) == 60
    assert len(burst) == 50
    assert len({block for path in burst for block in path}) == 50 * 20
    later = _traces.bursts([Request(1e5 + i, "ab") for i in range(60)])
    assert [each.counted for each in later].count(False) == 50, "none before the others begin"
    assert min(each.seconds for each in later if not each.counted) >= 1e5 + 15
    first = trace.first(30)
    assert (sum(first.counted), len(first.counted)) == (30, 30 + 25)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file(tmp_path: Path) -> None:
    lines = ({"timestamp": 1500, "hash_ids": [3, 4]}, {"hash_ids": [3]})
    path = write(tmp_path / "trace", *lines)
    assert _traces.read(path) == [Request(1.5, [3, 4]), Request(1.0, [3])]
    assert _traces.hash_ids(path) == [[3, 4], [3]]
    wrong = ({"ids": [1]}, {"hash_ids": ["x"]}, {"hash_ids": 1}, [1], {"timestamp": {}})
    infinite = ({"hash_ids": [math.inf]}, {"timestamp": math.nan, "hash_ids": [1]})
    for lines in (*((line,) for line in (*wrong, *infinite)), ()):
        with pytest.raises(ConfigError, match="is no trace with hash_ids"):
            _traces.read(write(tmp_path / "other", *lines))
    with pytest.raises(ConfigError, match="No such file"):
        _traces.read(tmp_path / "none")


# ---- rows


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two patterns, of which 5 pages hold one."""
    patterns: dict[str, Callable[[random.Random], list[Request]]] = {
        "loop": lambda chance: [Request(i, "abcdefgh"[i % 8]) for i in range(80)],
        "pair": lambda chance: [Request(i, "ab"[i % 2]) for i in range(10)],
    }
    monkeypatch.setattr(_traces, "PATTERNS", patterns)


def test_rows(small: None) -> None:
    loop, pair, mean, worst, *others = policy.rows(False, pages="5", seeds=2)
    assert (loop.name, loop.value, loop.baseline) == ("loop: blocks hit", 0, "w-tinylfu")
    assert loop.params["lru"] == 0
    assert loop.params["belady"] == 56.25  # 5 of 8 blocks, but in the first of ten rounds
    assert loop.params["written"] == 80
    assert (loop.params["seeds"], loop.params["deviation"]) == (2, 0)
    assert (pair.name, pair.value, pair.ratio) == ("pair: blocks hit", 80, 1)
    best = loop.params["w-tinylfu"]
    assert (mean.value, mean.met) == (pytest.approx(best / 2, abs=0.01), False)
    assert (worst.value, worst.met) == (pytest.approx(best, abs=0.01), False)
    assert mean.params["in"] == "loop, 5 pages"
    assert [row.params["of"] for row in others] == [name for name in POLICIES if name != BOUND]
    assert {row.params["of"]: row.value for row in others}["w-tinylfu"] == 0


def test_rows_of_a_file(tmp_path: Path) -> None:
    """Alone and beside bursts, of which no hit counts."""
    lines = [{"timestamp": 2000 * i, "hash_ids": [i % 3, 10 + i % 3]} for i in range(30)]
    path = write(tmp_path / "trace", *lines)
    wanted = {"trace": path, "only": "trace,trace-bursts", "policies": "lru,belady", "pages": "8"}
    alone, beside, kept = policy.rows(False, **wanted)
    assert (alone.name, alone.value) == ("trace: blocks hit", pytest.approx(90))
    assert alone.params["requests"] == 30
    assert beside.params["requests"] == 30 + 50
    assert beside.value == pytest.approx(70)  # each of two bursts took all three prompts
    assert (kept.name, kept.value) == ("trace: hits kept beside bursts", pytest.approx(700 / 9))
    assert kept.params["lru"] == pytest.approx(77.78)
    assert kept.params["belady"] > kept.params["lru"]


def test_names_in_any_order(tmp_path: Path) -> None:
    """Twice is once, and what is beside bursts comes after what it is compared with."""
    path = write(tmp_path / "trace", {"hash_ids": [1]}, {"hash_ids": [1]})
    wanted = {"trace": path, "policies": "lru", "pages": "8"}
    names = [row.name for row in policy.rows(False, **wanted, only="trace-bursts,trace,trace")]
    assert names[:3] == [
        "trace: blocks hit",
        "trace-bursts: blocks hit",
        "trace: hits kept beside bursts",
    ]
    assert len(names) == 3


def test_where_nothing_hits_nothing_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = {"new": lambda chance: [Request(i, [i]) for i in range(9)]}
    monkeypatch.setattr(_traces, "PATTERNS", patterns)
    assert [row.name for row in policy.rows(False, pages="5")] == ["new: blocks hit"]


def test_what_is_not_compared(small: None) -> None:
    """Belady's is a bound, not one of the best; without others nothing falls short."""
    (first, second) = policy.rows(True, only="pair", policies="belady")
    assert [row.params["pages"] for row in (first, second)] == [1000, 3000]
    assert (first.value, first.baseline, first.ratio) == (80, None, None)


def test_the_command(small: None, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.group, ["bench", "policy", *arguments])

    shown = run("--only", "pair", "--pages", "1,5", "--policies", "lru", "--calls", "2", "--json")
    assert shown.exit_code == 0, shown.stderr
    rows = [row for row in json.loads(shown.stdout)["rows"] if row["unit"] == "%"]
    assert [(row["params"]["pages"], row["value"]) for row in rows] == [(1, 0.0), (5, 80.0)]
    for arguments, message in (
        (("--only", "none"), "--only: expected some of loop, pair, found 'none'"),
        (("--policies", "lru,mru"), "--policies: expected some of lru, arc, lfu,"),
        (("--pages", "10,x"), "--pages: expected sizes such as 1000,3000, found '10,x'"),
        (("--pages", "0"), "--pages: expected sizes"),
        (("--trace", str(write(tmp_path / "trace", 1))), "is no trace with hash_ids"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr
