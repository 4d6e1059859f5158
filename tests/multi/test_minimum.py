"""Processes flood one namespace; what another was promised, and what is kept, survives them, and
what was listed and somebody came for."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from multi import pausing
from support.keys import prompt

from lightcache import PageIndex

TESTS = Path(__file__).parent.parent
PAGES = 64
MINE = 12  # pages that my namespace is promised
FLOODS = 2


class Flood:
    """A process of flood_side.py."""

    def __init__(self, name: str, who: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(TESTS / "multi" / "flood_side.py"), name, str(who)],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": pausing.python_path(TESTS),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )

    def line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(60)}"
        return line.strip()

    def __enter__(self) -> Flood:
        assert self.line() == "begun"
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        with self.process:
            pass


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_promise_survives_a_flood(index: PageIndex, segment_name: str) -> None:
    mine = index.namespace("mine", minimum_pages=MINE)
    with index.reserve(prompt(1, 30), namespace=mine) as new:
        new.publish()
    with index.reserve(prompt(2, 4)) as new:
        new.publish()
    assert index.protect(prompt(2, 4)) == 4
    discarded = 0
    with ExitStack() as stack:
        floods = [stack.enter_context(Flood(segment_name, who)) for who in range(1, FLOODS + 1)]
        while any(int(flood.line()) < 2000 for flood in floods) or not discarded:
            assert index.peek(prompt(1, MINE), namespace=mine) == MINE
            assert index.peek(prompt(2, 4)) == 4
            discarded += index.discard(index.oldest(8))
        index.evict(PAGES)
    index.reap()  # one flood may have taken back what the other held, which was killed before it
    assert len(index.clients()) == 1
    assert index.peek(prompt(1, 30), namespace=mine) == MINE
    assert index.peek(prompt(2, 4)) == 4
    assert discarded > 0
    report = index.check()
    assert report.clean, report.message
    assert (report.pins, report.writing) == (0, 0)
