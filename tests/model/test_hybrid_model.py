"""A hybrid manager against an oracle, with random calls and tiny capacities.

LIGHTCACHE_TEST_EXAMPLES chooses how many runs of up to 100 calls; a quarter of them here.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from model.hybrid_machine import HybridMachine

EXAMPLES = int(os.environ.get("LIGHTCACHE_TEST_EXAMPLES", "60")) // 4
SHARE = 8  # of them in `make test`


@pytest.mark.timeout(420 + 4 * EXAMPLES)  # 300 s of them to shrink a failure
@pytest.mark.parametrize(
    "examples", [SHARE, pytest.param(EXAMPLES, marks=pytest.mark.slow)], ids=["share", "all"]
)
def test_what_is_usable_is_what_must_be(segment_name: str, examples: int) -> None:
    run_state_machine_as_test(
        lambda: HybridMachine(segment_name),
        settings=settings(
            max_examples=examples,
            stateful_step_count=100,
            deadline=None,
            report_multiple_bugs=False,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
