"""Ranks in processes of their own that write pages together, without a message to each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from multi.team_side import PAGE_BYTES
from support.keys import prompt

from lightcache import Cache

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PAGES = 16
TEAM, OTHERS = 2**64 - 1, 7
FORM = {"page_bytes": PAGE_BYTES, "fingerprint": "teams"}


class Rank:
    """A process that writes one shard."""

    def __init__(self, name: str, team: int, shard: int) -> None:
        command = [sys.executable, "-m", "multi.team_side", name, str(team), str(shard)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: object) -> str:
        self.send(*words)
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=60)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with Cache.create(segment_name, size=PAGES * PAGE_BYTES, **FORM) as made:
        yield made


@pytest.fixture
def ranks(cache: Cache) -> Iterator[list[Rank]]:
    """Two of one team, and one of another engine."""
    made = [Rank(cache.name, TEAM, 0), Rank(cache.name, TEAM, 1), Rank(cache.name, OTHERS, 1)]
    yield made
    for rank in made:
        rank.end()


def is_whole(cache: Cache, number: int, pages: int) -> bool:
    with cache.match(prompt(number, pages)) as lease:
        return len(lease) == pages and all(
            (
                cache.pool[page] == np.repeat(number * 16 + i * 2 + np.arange(2), PAGE_BYTES // 2)
            ).all()
            for i, page in enumerate(lease.pages)
        )


@pytest.mark.parametrize("first", [0, 1])
def test_whichever_comes_first_owns_it_and_the_last_makes_it_ready(
    cache: Cache, ranks: list[Rank], first: int
) -> None:
    assert ranks[first].ask("reserve", 1, 4) == "4 0 0"
    assert ranks[2].ask("reserve", 1, 4) == "0 0 4"
    assert ranks[1 - first].ask("reserve", 1, 4) == "4 1 0"
    assert ranks[first].ask("publish", 1, 4) == "others"
    assert cache.peek(prompt(1, 4)) == 0
    assert ranks[1 - first].ask("publish", 1, 4) == "ready"
    assert is_whole(cache, 1, 4)
    assert cache.index.check().clean


def test_all_at_once(cache: Cache, ranks: list[Rank]) -> None:
    for number in range(1, 13):
        for rank in ranks[:2]:
            rank.send("reserve", number, 4)
        answers = sorted(rank.line() for rank in ranks[:2])
        assert answers == ["4 0 0", "4 1 0"]
        for rank in ranks[:2]:
            rank.send("publish", number, 4)
        assert "ready" in [rank.line() for rank in ranks[:2]]
        assert is_whole(cache, number, 4)
    assert cache.index.check().clean


@pytest.mark.parametrize("when", ["before joining", "after joining", "after publishing"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_rank(cache: Cache, ranks: list[Rank], who: int, when: str) -> None:
    """Rank 0 begins. What can still be written is; what cannot is gone, and may be begun again."""
    ranks[0].ask("reserve", 1, 4)
    if when != "before joining":
        assert ranks[1].ask("reserve", 1, 4) == "4 1 0"
    if when == "after publishing":
        assert ranks[who].ask("publish", 1, 4) == "others"
    ranks[who].kill()
    cache.index.reap()
    other = ranks[1 - who]
    if when == "after publishing":
        assert other.ask("publish", 1, 4) == "ready"
        assert is_whole(cache, 1, 4)
        return
    if when == "before joining" and who == 1:
        assert other.ask("publish", 1, 4) == "others"  # it has until the deadline to come again
        cache.index.wait(prompt(2, 1), timeout=1)
        assert cache.index.stats().writing == 4
        return
    if when == "before joining":
        assert other.ask("reserve", 1, 4) == "4 0 0"  # reserves it again
    else:
        assert other.ask("publish", 1, 4) == "abandoned"
    with cache.reserve(prompt(3, 4)) as new:
        assert len(new.pages) == 4
    assert cache.index.check().clean
