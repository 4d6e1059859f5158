"""Random requests against a manager, every token stamped with its prefix.

Small devices and hosts, so that everything is evicted, refused, and asked for again: chunked
prefills, decodes, preemptions, aborts, branches, weights updates, copies that are late or fail,
that are paused and cancelled, plans that are old, wishes, items, tenants, what is kept and dropped.
"""

from __future__ import annotations

import os

import pytest
from support.manager_life import Life
from support.manager_world import Engine

from lightcache.manager import WritePolicy

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
        # Something is always on its way out where pages are of several blocks.
        low_water=0.4 if block < page else 0.0,
    )
    try:
        life = Life(engine, SEED * 1000 + blocks * page + len(policy.value))
        for step in range(STEPS):
            life.step()
            if step % 10 == 0:
                life.check()
        life.over()
        engine.settle()
    finally:
        engine.close()
