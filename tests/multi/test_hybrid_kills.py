"""Engines of a hybrid model share the host's caches of KV and states; one is killed while it plans,
restores, donates or offloads, and another hits what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from multi.hybrid_side import NEXT, PROMPT, SHAPE, STAGES
from support.hybrid_case import HybridWorld

from lightcache.hybrid.opening import create_slots
from lightcache.manager import ManagedBlocks

TESTS = Path(__file__).parent.parent


def killed_at(name: str, stage: str) -> None:
    """A process that was killed there."""
    side = subprocess.Popen(
        [sys.executable, "-m", "multi.hybrid_side", name, stage],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_path())},
    )
    try:
        assert side.stdout is not None
        assert side.stdout.readline().strip() == "here"
    finally:
        side.kill()
        side.wait()
        for pipe in (side.stdin, side.stdout):
            assert pipe is not None
            pipe.close()


def _path() -> list[str]:
    return [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_a_stage(segment_name: str, stage: str) -> None:
    world = HybridWorld(f"{segment_name}.own", shared=segment_name, **SHAPE)
    try:
        killed_at(segment_name, stage)
        assert world.look(PROMPT).usable == 40
        match = world.look(NEXT)
        assert match.usable == STAGES[stage]
        if stage == "commit":  # KV without a state: the next prefill saves one
            assert (match.kv_tokens, match.branching) == (72, 72)
        match = world.begin("a", NEXT)  # which looks at every byte
        assert match.usable == STAGES[stage]
        world.step("a", len(NEXT))
        world.end("a")
        world.settle()
        assert world.begin("b", NEXT).usable == 72
        world.hybrid.release("b", at=72)
        assert world.states is not None
        for cache in (world.states, world.manager.host):
            cache.reap()
        world.nothing_left()
    finally:
        world.close()
    with create_slots(f"{segment_name}.side.slots", 4) as index:  # its successor
        assert index.stats().free == 4
    ManagedBlocks(f"{segment_name}.side.device", block_tokens=4, blocks=4).close()
