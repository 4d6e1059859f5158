"""The index against a model of it, with random calls and tiny capacities.

LIGHTCACHE_TEST_EXAMPLES chooses how many runs of up to 50 calls: 10,000 take a quarter of an hour.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from model.holding import HoldingMachine
from model.machine import IndexMachine

EXAMPLES = int(os.environ.get("LIGHTCACHE_TEST_EXAMPLES", "60"))
SHARE = 12  # of them in `make test`


@pytest.mark.timeout(360 + 2 * EXAMPLES)  # 300 s of them to shrink a failure
@pytest.mark.parametrize(
    ("independent", "eviction", "examples"),
    [
        pytest.param(None, "lru", SHARE, id="share"),
        pytest.param(False, "lru", EXAMPLES, id="prefixes", marks=pytest.mark.slow),
        pytest.param(True, "lru", EXAMPLES, id="independent", marks=pytest.mark.slow),
        pytest.param(None, "lru", EXAMPLES, id="mixed", marks=pytest.mark.slow),
        pytest.param(None, "hz", EXAMPLES, id="ranked", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("machine", [IndexMachine, HoldingMachine])
def test_index_and_model_agree(
    segment_name: str,
    machine: type[IndexMachine],
    independent: bool | None,
    eviction: str,
    examples: int,
) -> None:
    run_state_machine_as_test(
        lambda: machine(segment_name, independent, eviction),
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            report_multiple_bugs=False,
            database=None,
            # As often as one asks for, the same calls: a failure in CI is a failure here. More
            # examples are more calls, never other ones.
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
