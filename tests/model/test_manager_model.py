"""Random requests against a manager, every token stamped with its prefix.

Small devices and hosts, so that everything is evicted, refused, and asked for again: chunked
prefills, decodes, preemptions, aborts, branches, weights updates, copies that are late or fail.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from support.manager_world import Engine, Running

from lightcache.manager import Prompt, WritePolicy

SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "0"))
STEPS = 300
SHAPES = [
    # owned, blocks, block, page, pages
    (True, 24, 4, 4, 24),
    (True, 40, 2, 8, 12),
    (True, 10, 8, 2, 60),
    (False, 24, 4, 4, 24),
    (False, 24, 2, 4, 20),
    (False, 10, 8, 4, 30),
]


class Random:
    """A life of random steps."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.known: list[list[int]] = [[self.random.randrange(50) for _ in range(30)]]
        self.numbers = iter(range(1 << 30))

    def prompt(self) -> Prompt:
        """New, or the beginning of one that was there, with another end."""
        base = self.random.choice(self.known)
        cut = self.random.randrange(len(base) + 1)
        tokens = base[:cut] + [
            self.random.randrange(50) for _ in range(self.random.randrange(1, 16))
        ]
        self.known = [*self.known[-11:], tokens]
        return Prompt(np.array(tokens))

    def step(self) -> None:
        """One thing that a scheduler does."""
        engine, choose = self.engine, self.random
        chosen = choose.choices(
            [
                "begin",
                "compute",
                "end",
                "abort",
                "finish",
                "fail",
                "plan",
                "demote",
                "update",
                "poll",
            ],
            [4, 10, 3, 1, 4, 1, 2, 1, 0.3, 2],
        )[0]
        request = choose.choice(list(engine.running)) if engine.running else None
        if chosen == "begin" and len(engine.running) < 5:
            engine.begin(next(self.numbers), self.prompt())
        elif chosen == "compute" and request is not None:
            self.compute(engine.running[request], request)
        elif chosen in ("end", "abort") and request is not None:
            engine.end(request, publish=chosen == "end")
        elif chosen == "finish":
            engine.mover.at_once = choose.random() < 0.3
            engine.mover.finish(choose.randrange(4))
        elif chosen == "fail":
            engine.mover.fail_next = choose.randrange(2)
        elif chosen == "plan":
            planned = next(self.numbers)
            engine.manager.plan(planned, self.prompt())
            if choose.random() < 0.7:
                engine.manager.cancel(planned)
        elif chosen == "demote":
            engine.manager.demote(choose.randrange(1, 6))
        elif chosen == "update":
            engine.update(engine.weights + 1)
        engine.manager.poll()

    def compute(self, one: Running, request: int) -> None:
        left = len(one.tokens) - one.computed
        generated = [self.random.randrange(50)]
        count = self.random.randrange(1, left + 1) if left > 0 else 1
        self.engine.compute(request, count, generated)
        if one.computed == len(one.tokens):
            self.known = [*self.known[-11:], list(one.tokens)]

    def check(self) -> None:
        for tokens in self.known:
            prompt = Prompt(np.array(tokens))
            self.engine.check_host(prompt)
            self.engine.check_device(prompt)


@pytest.mark.parametrize("policy", list(WritePolicy), ids=lambda policy: policy.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_requests(segment_name: str, shape: tuple, policy: WritePolicy) -> None:
    owned, blocks, block, page, pages = shape
    engine = Engine(
        segment_name,
        owned=owned,
        blocks=blocks,
        block=block,
        page=page,
        pages=pages,
        write=policy,
        write_group=2,
    )
    try:
        life = Random(engine, SEED * 1000 + blocks * page + len(policy.value))
        for step in range(STEPS):
            life.step()
            if step % 10 == 0:
                life.check()
        engine.settle()
    finally:
        engine.close()
