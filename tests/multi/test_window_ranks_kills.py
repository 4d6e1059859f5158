"""A rank of an engine with windows is killed while it copies a window: the copy fails for all
ranks, nothing of it is found, and a rank that takes its place continues."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multi.window_rank_side import RULES
from support.window_engine import WindowEngine

from lightcache import ClientId
from lightcache.errors import TransferFailed
from lightcache.manager import Prompt, WritePolicy

TESTS = Path(__file__).parent.parent
STEM = [i * 7 % 50 + 1 for i in range(60)]


class Others:
    """Processes that are rank 1."""

    def __init__(self, stage: str) -> None:
        self.stage, self.made = stage, list[subprocess.Popen[str]]()

    def __call__(self, cache: str, log: str) -> list[ClientId]:
        """Start one. Returns its client."""
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "multi.window_rank_side", cache, log, self.stage]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.made.append(process)
        slot, epoch = map(int, self.line().split())
        return [ClientId(slot, epoch)]

    def line(self) -> str:
        """What the last one says next."""
        assert self.made[-1].stdout is not None
        return self.made[-1].stdout.readline().strip()

    def kill(self) -> None:
        """Kill all."""
        for process in self.made:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def serving(segment_name: str, request: Any) -> Iterator[tuple[WindowEngine, Others]]:
    """An engine whose rank 1 is a process that stops at a stage."""
    stage, write = request.param
    others = Others(stage)
    how: dict[str, Any] = {"write": write, "low_water": 0.0}
    engine = WindowEngine(segment_name, RULES, ranks=1, others=others, every=1 << 20, **how)
    yield engine, others
    others.kill()
    settle(engine)
    engine.host.reap()
    engine.nothing_left()
    everything = engine.host.index.stats()
    assert everything.free + everything.ready == engine.host.pages
    engine.close()


def settle(engine: WindowEngine) -> None:
    """Let all copies end, also those whose rank is dead."""
    while engine.manage.poll() or engine.manage.leaving:
        engine.order()
        engine.workers[0].drain(60)
        engine.host.reap()


def serve(engine: WindowEngine) -> None:
    """A request that ends at 60. What rank 1 computes is of no concern here: it has zeros."""
    request = engine.begin(STEM, 0)
    while engine.step(request):
        pass
    engine.end(request)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "serving",
    [("offload", WritePolicy.THROUGH), ("offload", WritePolicy.BACK)],
    indirect=True,
    ids=["saved", "written back"],
)
def test_killed_while_it_writes_a_window(serving: tuple[WindowEngine, Others]) -> None:
    engine, others = serving
    serve(engine)
    backs = engine.manage.parts.windows._backs.values()
    assert bool(backs) == (engine.manager.config.write is WritePolicy.BACK)
    for back in backs:
        assert back.demote(64)
    engine.order()
    assert others.line() == "here"
    others.kill()
    settle(engine)
    stats = engine.manage.window_stats()
    assert stats.failed_offloads >= 1
    assert (stats.offloads, stats.demotions) == (0, 0)
    engine.forget_device()
    assert engine.manage.peek_many([Prompt(STEM)])[0].usable == 0
    others.stage = "never"  # another process takes its place
    (client,) = others(engine.host.name, f"{engine.name}.log")
    assert engine.coordinator is not None
    engine.coordinator.replace(1, client)
    serve(engine)
    for back in backs:
        back.demote(64)
    settle(engine)
    engine.forget_device()
    usable = 0 if backs else 56  # KV has gone unwritten
    assert engine.manage.peek_many([Prompt(STEM)])[0].usable == usable
    assert engine.manage.window_stats().offloads >= 2


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(120)
@pytest.mark.parametrize("serving", [("load", WritePolicy.THROUGH)], indirect=True, ids=["load"])
def test_killed_while_it_loads_a_window(serving: tuple[WindowEngine, Others]) -> None:
    engine, others = serving
    serve(engine)
    while engine.manage.poll() or engine.manage.leaving:
        engine.order()
    engine.forget_device()
    request = engine.begin(STEM, 0)
    assert engine.running[request].match.usable == 56
    engine.step(request)
    engine.order()
    assert others.line() == "here"
    others.kill()
    settle(engine)
    load = engine.running[request].load
    with pytest.raises(TransferFailed, match=r"rank 1 .* died"):
        load.done()
    assert (load.failed, load.tokens) == (True, 0)
    # Another process takes its place, and all continues.
    others.stage = "never"
    (client,) = others(engine.host.name, f"{engine.name}.log")
    assert engine.coordinator is not None
    engine.coordinator.replace(1, client)
    assert engine.manage.restart(request).usable == 0
    engine.end(request, publish=False)
    settle(engine)
    assert engine.manage.peek_many([Prompt(STEM)])[0].usable == 56
