"""Random traffic of an engine whose layers see windows and chunks: every answer is that of the
model without a cache, every match is the one that trying all positions finds, and nothing is left
over."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.window_engine import PREFIX, AtOnce, LateBackend, OutOfPages, WindowEngine

from lightcache.groups import Rule
from lightcache.manager import Prompt, RequestOptions, WritePolicy

LONE = 24
"""Seeds from here on are of engines with two ranks."""
OPTIONS = (
    [RequestOptions()] * 6
    + [RequestOptions(tiers=frozenset({tier, "storage"})) for tier in ("device", "host")]
    + [RequestOptions(read=False), RequestOptions(write=False), RequestOptions(output=False)]
)


def shapes(seed: int) -> dict[str, Any]:
    """Sizes of an engine: few blocks and pages, so that much is evicted."""
    draw = random.Random(seed)
    block, page = draw.choice([(4, 8), (4, 4), (8, 4), (2, 8), (3, 3), (6, 3)])
    rules = [Rule.window(draw.randint(1, 30)), Rule.chunk(draw.randint(1, 40))]
    return {
        "rules": tuple(draw.sample(rules, draw.choice([1, 2]))),
        "block": block,
        "page": page,
        "every": draw.choice([1, 16, 40]),
        "blocks": 300 // block,
        "window_blocks": draw.choice([150, 300]) // block,
        "pages": draw.choice([80, 200, 400]) * 8 // page,
        "ranks": 2 if seed >= LONE else 0,
        "write": WritePolicy.BACK if seed % 3 == 0 else WritePolicy.THROUGH,
    }


class Traffic:
    """Requests that come, are served in passes, and end in every way."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.late = seed % 2 == 1
        wrap = LateBackend if self.late else AtOnce
        self.engine = WindowEngine(name, **shapes(seed), wrap=wrap, seed=seed)
        stem = [self.random.randint(1, 50) for _ in range(60)]
        self.prompts = [[*stem[: self.random.randint(0, 60)], *self._some(40)] for _ in range(5)]
        self.usable = self.ended = 0

    def _some(self, most: int) -> list[int]:
        return [self.random.randint(1, 50) for _ in range(self.random.randint(1, most))]

    def turn(self) -> None:
        """One thing happens."""
        engine = self.engine
        often = [self.begin] * 4 + [self.step] * 20
        acts = [*often, self.evict, self.evict, self.fail, self.look, self.pause, self.change]
        self.random.choice(acts)()
        if self.random.random() < 0.5:
            engine.order()
        if self.late:
            for backend in engine.backends:
                backend.finish(self.random.randint(0, 2))
        if self.random.random() < 0.5:
            engine.manage.poll()

    def begin(self) -> None:
        if len(self.engine.running) < 3:
            prompt = self.random.choice(self.prompts)
            request = self.engine.begin(
                prompt, self.random.randint(0, 20), self.random.choice(OPTIONS)
            )
            self.usable += self.engine.running[request].match.usable

    def step(self) -> None:
        if not self.engine.running:
            return
        request = self.random.choice(list(self.engine.running))
        try:
            if self.random.random() < 0.04:  # aborted, or preempted
                self.engine.end(request, publish=self.random.random() < 0.5)
            elif not self.engine.step(request, self.random.choice([1, 5, 30])):
                self.prompts[self.random.randrange(5)] = [
                    *self.engine.end(request).tokens[:120],
                    *self._some(6),
                ]
                self.ended += 1
        except OutOfPages as error:
            if "being written to the host first" not in str(error) or self.random.random() < 0.1:
                self.engine.end(request)

    def evict(self) -> None:
        engine = self.engine
        index = self.random.choice(
            [engine.host.index, *(each.index for each in (engine.device, *engine.windows))]
        )
        assert index is not None
        index.evict(self.random.randint(1, 30))

    def fail(self) -> None:
        """The next copies of one backend fail."""
        if self.late and self.random.random() < 0.3:
            self.random.choice(self.engine.backends).fail_next = 1

    def pause(self) -> None:
        """Nothing moves for a while, or everything again."""
        if self.late:
            tracker = self.engine.manager.state.transfers
            if tracker.paused:
                self.engine.manager.resume()
            else:
                tracker.paused = True

    def change(self) -> None:
        """Other weights under the same name, or the device forgets what no request uses."""
        if self.random.random() < 0.3:
            self.engine.change()
        elif self.random.random() < 0.5:
            self.engine.forget_device()

    def look(self) -> None:
        """A plan finds what trying each position finds."""
        if self.late:  # what copies write becomes ready at any moment
            return
        engine = self.engine
        engine.settle()
        tokens = self.random.choice(self.prompts)
        prompt = Prompt(tokens)
        match = engine.manage.plan("look", prompt)
        assert match.usable == deepest(engine, prompt)
        assert (match.limit is None) == (
            match.usable == (len(tokens) - 1) // engine.unit * engine.unit
        )
        if match.limit not in (None, PREFIX):
            assert match.kv_tokens // engine.unit * engine.unit == match.branching
        engine.manage.cancel("look")


def deepest(engine: WindowEngine, prompt: Prompt) -> int:
    """The deepest position that KV and every window have, page by page."""
    space = engine.manager.state.weights.open_space("")
    blocks, pages = prompt.keys(space.device_spec), prompt.keys(space.host_spec)
    block, page, host = engine.block, engine.host.index.page_tokens, engine.host.index

    def tier_has(index: Any, keys: Any, where: Any) -> list[bool]:
        return [bool(index.peek(keys[i : i + 1], namespace=where)) for i in range(len(keys))]

    def in_windows(position: int) -> bool:
        for window in engine.windows:
            begin = window.rule.first(position // engine.unit, engine.unit) * engine.unit
            own = tier_has(window.index, blocks, window.beside(space.host))
            parts = window.run.parts
            theirs = tier_has(host, window.run.keys(pages), space.host)
            if not (
                all(own[begin // block : position // block])
                or all(theirs[begin // page * parts : position // page * parts])
            ):
                return False
        return True

    (kv,) = engine.manager.peek_many([prompt])
    position = kv.usable // engine.unit * engine.unit
    while position and not in_windows(position):
        position -= engine.unit
    return position


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(LONE + 8))
def test_answers_and_matches(segment_name: str, seed: int) -> None:
    traffic = Traffic(segment_name, seed)
    engine = traffic.engine
    try:
        for _ in range(250):
            traffic.turn()
        for request in list(engine.running):
            engine.end(request, publish=False)
        engine.manager.resume()
        engine.settle()
        engine.nothing_left()
        assert traffic.ended
        stats = engine.manage.window_stats()
        assert bool(stats.demotions) <= (seed % 3 == 0)
    finally:
        engine.close()
