"""Four engines are replaced, one after the other, by those of another release or configuration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from multi.rolling_side import PAGE_BYTES, PAGES, pools

from lightcache.shm import Segment, names
from lightcache.shm.listing import read_segment

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
ENGINES = 4
Wait = Callable[[Callable[[], bool], str], None]
Kind = tuple[str, str, str]
"""Fingerprint, layout and ABI number of a release; see `rolling_side.main`."""


class Engine:
    """A process of rolling_side.py."""

    def __init__(self, model: str, *kind: str) -> None:
        command = [sys.executable, "-m", "multi.rolling_side", model, *kind]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS
        )
        self.cache = self.line()
        assert self.cache.startswith(model)

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, prompts: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{prompts}\n")
        self.process.stdin.flush()

    def end(self, kill: bool) -> None:
        if kill:
            self.process.kill()
        self.process.communicate(timeout=60)


def serve(engines: list[Engine]) -> list[int]:
    """All at once; the pages each has found."""
    for engine in engines:
        engine.ask(150)
    answers = [[int(word) for word in engine.line().split()] for engine in engines]
    assert [wrong for _, wrong in answers] == [0] * len(engines)
    return [found for found, _ in answers]


@pytest.fixture
def model(segment_name: str) -> Iterator[str]:
    yield segment_name
    for name in names.segment_names():
        if name.startswith(f"{segment_name}-"):
            Segment.unlink(name, force=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("bf16", "", "1"), ("fp8", "", "1")),
        (("bf16", "", "1"), ("bf16", "another layout", "1")),
        (("bf16", "", "1"), ("bf16", "", "2")),
    ],
    ids=["fingerprint", "layout", "abi"],
)
def test_a_rolling_restart(model: str, old: Kind, new: Kind, wait_until: Wait) -> None:
    """There is room for one pool and a quarter."""
    with ExitStack() as stack:

        def start(kind: Kind) -> Engine:
            engine = Engine(model, *kind)
            stack.callback(engine.end, kill=True)
            return engine

        running = [start(old) for _ in range(ENGINES)]
        assert len({engine.cache for engine in running}) == 1
        former = running[0].cache
        serve(running)
        assert min(serve(running)) > 0
        for number in range(ENGINES):
            running[number].end(kill=number % 2 == 1)
            running[number] = start(new)
            assert running[number].cache != former
            if number < ENGINES - 1:
                assert read_segment(former) is not None, "engines live in it"
                assert len(pools(model)) == 2
            assert min(serve(running)) > 0, "none runs without a cache"
        assert read_segment(former) is None
        [pool] = pools(model)
        assert len({engine.cache for engine in running}) == 1
        serve(running)
        # A pool that found no memory asks again after a while.
        wait_until(lambda: pool.stat().st_blocks * 512 == PAGES * PAGE_BYTES, "all its memory")
