"""Data-parallel ranks with a manager each and one host cache; one is killed, the others go on.

LIGHTCACHE_MANAGER_KILLS: kills at random (4). LIGHTCACHE_TEST_SEED: other chances.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from multi.manager_side import PAGE, PAGES, STAGES
from support.manager_case import open_cache
from support.stamped import stamps_of

from lightcache import Cache, PageIndex
from lightcache.manager import MultimodalItem, Prompt

TESTS = Path(__file__).parent.parent
ROUNDS = 20
KILLS = int(os.environ.get("LIGHTCACHE_MANAGER_KILLS", "4"))
SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "0"))


class Rank:
    """A rank's process."""

    def __init__(self, name: str, rank: int, seed: int, stage: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "multi.manager_side", name, str(rank), str(seed), stage],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )

    def tell(self, order: str) -> None:
        """One line."""
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def hear(self, wanted: str = "") -> str:
        """The next line; with `wanted`, the next one that is it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == wanted or not wanted:
                return line.strip()
        pytest.fail(f"a rank ended with status {self.process.wait()}; its output says more")

    def ask(self, order: str, answer: str = "") -> str:
        """Tell and hear."""
        self.tell(order)
        return self.hear(answer)

    def kill(self) -> None:
        """SIGKILL, wherever it is."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):
                    pipe.close()


@contextmanager
def living(rank: Rank) -> Iterator[Rank]:
    """A rank that does not outlive the test."""
    try:
        yield rank
    finally:
        rank.kill()


def prompts_of(rank: Rank) -> list[Prompt]:
    """What it knows."""
    found = []
    line = rank.ask("tell")
    while not line.startswith("["):
        line = rank.hear()
    for tokens, items, tenant in json.loads(line):
        every = [MultimodalItem(begin, end, bytes([digest])) for begin, end, digest in items]
        found.append(Prompt(np.array(tokens), items=every, tenant=tenant))
    return found


def check_host(cache: Cache, prompts: list[Prompt]) -> int:
    """Every page that can be matched holds its tokens' stamps, under whatever weights. Returns how
    many were looked at."""
    looked = 0
    for space in cache.index.namespaces():
        spec, seed = cache.key_spec(namespace=space), 7919 * int(space.weights or 0)
        for prompt in prompts:
            every = prompt.tokens.astype(np.int64)
            for item in prompt.items:
                every[item.start : item.end] += 1000 * (1 + item.digest[0])
            wanted = stamps_of(every, seed)
            with cache.match(prompt.keys(spec), namespace=space) as lease:
                for i, page in enumerate(lease.pages.tolist()):
                    found = np.frombuffer(bytes(memoryview(cache.pool[page])), np.uint64)
                    assert (found == wanted[i * PAGE : (i + 1) * PAGE]).all(), (space, i)
                looked += len(lease)
    return looked


def nothing_left(cache: Cache) -> None:
    """Of the dead, and of those that have left."""
    cache.reap()
    found = cache.stats()
    cache.index.allocate(found.free + found.doomed).free()
    found, report = cache.stats(), cache.check()
    assert report.clean, report.message
    assert (found.writing, found.doomed, found.held, report.pins) == (0, 0, 0, 0)


def device_is_whole(name: str, rank: int) -> None:
    """A successor could have been made, and has left nothing."""
    with PageIndex.create(f"{name}.{rank}.device", pages=4) as index:
        assert index.stats().free == 4


def go_on(others: list[Rank], lines: int) -> None:
    """They take ten more steps for each line, and look at what they have. What they said before
    does not count."""
    for other in others:
        other.ask("stop", "stopped")
        other.tell("live")
    for other in others:
        for _ in range(lines):
            other.hear(".")


def live_on(cache: Cache, ranks: list[Rank]) -> list[Prompt]:
    """They live until the host has pages to look at, each of which is right; behind an update a few
    steps may write none. Returns what the ranks know."""
    for _ in range(ROUNDS):
        prompts = []
        go_on(ranks, 3)
        for rank in ranks:
            rank.ask("stop", "stopped")
            prompts += prompts_of(rank)
        if check_host(cache, prompts) > 0:
            return prompts
    pytest.fail(f"nothing could be matched on the host behind {30 * ROUNDS} steps of each rank")


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_a_stage(segment_name: str, stage: str) -> None:
    with ExitStack() as stack:
        cache = stack.enter_context(open_cache(segment_name, PAGES, PAGE))
        names = [(0, SEED * 10 + 1, stage), (1, SEED * 10 + 2, ""), (2, SEED * 10 + 3, "")]
        doomed, *others = [stack.enter_context(living(Rank(segment_name, *n))) for n in names]
        for rank in (doomed, *others):
            rank.hear("ready")
        for other in others:
            other.tell("live")
        doomed.ask("stage", "here")
        go_on(others, 3)  # it is stopped, and nobody waits for it
        doomed.kill()
        go_on(others, 3)
        successor = stack.enter_context(living(Rank(segment_name, 0, SEED * 10 + 4)))
        successor.hear("ready")
        if stage.startswith("update"):
            successor.ask("update 1", "updated")
        prompts = live_on(cache, [successor, *others])
        for rank in (successor, *others):
            rank.ask("leave", "left")
            assert rank.process.wait() == 0
        check_host(cache, [*prompts, Prompt(np.arange(100, 131)), Prompt(np.arange(200, 231))])
        nothing_left(cache)
        device_is_whole(segment_name, 0)


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(120 + 10 * KILLS)
def test_killed_anywhere(segment_name: str) -> None:
    choose = random.Random(SEED)
    with ExitStack() as stack:
        cache = stack.enter_context(open_cache(segment_name, PAGES, PAGE))
        ranks = [stack.enter_context(living(Rank(segment_name, i, SEED + i))) for i in range(3)]
        for rank in ranks:
            rank.ask("live", "ready")
        for kill in range(KILLS):
            go_on(ranks, choose.randrange(1, 5))
            which = choose.randrange(3)
            ranks[which].kill()
            go_on([rank for rank in ranks if rank is not ranks[which]], 2)
            rank = stack.enter_context(living(Rank(segment_name, which, SEED + 10 + kill)))
            rank.ask("live", "ready")
            ranks[which] = rank
        live_on(cache, ranks)
        for rank in ranks:
            rank.ask("leave", "left")
        nothing_left(cache)
