"""A handoff of which one side is killed, at any stage: the other side continues, nothing is
left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multi import pausing
from multi.handoff_side import LONGER, PAGE, PAGES, PROMPT, engine_of
from support.manager_world import Engine, open_cache

from lightcache import Cache
from lightcache.manager.handoff import KVHandoff, hand_off, receive
from lightcache.shm import Segment

TESTS = Path(__file__).parent.parent


class Side:
    """A process of handoff_side.py."""

    def __init__(self, which: str, cache: str, stage: str) -> None:
        self.device = f"{cache}.{which}.device"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                str(TESTS / "multi" / "handoff_side.py"),
                which,
                cache,
                stage,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS)},
        )

    def tell(self, what: Any) -> None:
        assert self.process.stdin
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self.process.wait(60)
        return json.loads(line)

    def kill(self) -> None:
        """Kill it. Its device's index was its own, so that stays behind."""
        with self.process:
            self.process.kill()
        Segment.unlink(self.device)


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with open_cache(segment_name, PAGES, PAGE) as made:
        yield made


@pytest.fixture
def engines(cache: Cache) -> Iterator[Any]:
    made: list[Engine] = []

    def make(side: str) -> Engine:
        made.append(engine_of(cache.name, side))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        engine.cache.close()


def nothing_is_left(cache: Cache, engine: Engine) -> None:
    cache.reap()
    for request in list(engine.manager.state.requests):
        engine.manager.release(request)
    engine.settle()
    cache.evict(1)  # collects what was doomed
    found = cache.stats()
    assert (found.held, found.writing, found.doomed, found.tickets) == (0, 0, 0, 0), found
    report = cache.check()
    assert report.clean, report.message
    assert report.pins == 0


@pytest.mark.crash
@pytest.mark.parametrize(("stage", "tokens"), [("saving", None), ("writing", 0), ("handed", 21)])
def test_the_prefill_side_is_killed(
    cache: Cache, engines: Any, stage: str, tokens: int | None
) -> None:
    engine = engines("decode")
    side = Side("prefill", cache.name, stage)
    side.tell(list(engine.cache.client_id))
    said = side.hear()
    if tokens is None:
        assert said == "stopped"
        side.kill()
        return nothing_is_left(cache, engine)
    handed = bytes.fromhex(said)
    assert side.hear() == "stopped"
    side.kill()
    assert KVHandoff.parse(handed).partial == 5
    found = receive(engine.manager, 1, LONGER, handed, timeout=60)
    assert found.done()
    assert found.tokens == tokens
    table = engine.manager.state.requests[1].table
    assert (engine.store.read(table, 0, tokens) == engine.stamps(PROMPT)[:tokens]).all()
    return nothing_is_left(cache, engine)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("stage", ["named", "adopted", "taken", "loading", "received"])
def test_the_decode_side_is_killed(cache: Cache, engines: Any, stage: str) -> None:
    engine = engines("prefill")
    assert engine.begin(1, PROMPT)
    assert engine.compute(1, 21, [])
    side = Side("decode", cache.name, stage)
    adopter = side.hear()
    handed = hand_off(engine.manager, 1, [type(cache.client_id)(*adopter)])
    side.tell(bytes(handed).hex())
    assert side.hear() == "stopped"
    side.kill()
    nothing_is_left(cache, engine)
