"""Engines with windows share the host's cache; one is killed while it plans, loads, computes or
saves, and another hits what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from multi.windows_side import NEXT, PROMPTS, RULES, SHAPE, STAGES
from support.window_engine import WindowEngine

from lightcache.hybrid import WindowBlocks
from lightcache.manager import ManagedBlocks

TESTS = Path(__file__).parent.parent
KILLS = 6


@contextmanager
def side(name: str, what: str) -> Iterator[subprocess.Popen[str]]:
    """Such a process, which is killed at the end."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "multi.windows_side", name, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        succeed(f"{name}.side")


def succeed(name: str) -> None:
    """Another engine takes the names of the dead one's blocks, which are all free then."""
    how = {"block_tokens": 4, "blocks": 4}
    windows = [WindowBlocks(f"{name}.{rule.name}", rule=rule, **how) for rule in RULES]
    for device in (*windows, ManagedBlocks(f"{name}.device", **how)):
        assert device.free == 4
        device.close()


@pytest.fixture
def engine(segment_name: str) -> Iterator[WindowEngine]:
    """The one that lives."""
    engine = WindowEngine(f"{segment_name}.own", RULES, host=segment_name, **SHAPE)
    yield engine
    engine.settle()
    engine.host.reap()
    engine.nothing_left()
    everything = engine.host.index.stats()
    assert everything.free + everything.ready == engine.host.pages
    engine.close()


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_a_stage(segment_name: str, engine: WindowEngine, stage: str) -> None:
    with side(segment_name, stage) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "here"
    engine.host.reap()  # else what it was writing stays its own until there is no room
    seq = engine.run(NEXT, 2)
    assert seq.match.usable == STAGES[stage]
    if stage.startswith("saved"):
        assert (seq.match.kv_tokens, seq.match.branching) == (88, 88)
        assert seq.match.limit in {rule.name for rule in RULES}
    engine.settle()
    engine.forget_device()
    assert engine.run(NEXT, 2).match.usable == 88


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(180)
def test_killed_at_any_moment(segment_name: str, engine: WindowEngine) -> None:
    """Its answers are compared where they are made; ours are those of what it has left."""
    for kill in range(KILLS):
        with side(segment_name, str(kill)) as process:
            assert process.stdout is not None
            for _ in range(20 + 7 * kill):
                assert process.stdout.readline().strip() == "step"
        for prompt in PROMPTS:
            engine.run(prompt, 3, budget=30)
            engine.settle()
            engine.forget_device()
    assert engine.manage.window_stats().host_hits
