"""Storms: eight processes in two PID namespaces, killed or stopped at random; see storm.py.

LIGHTCACHE_STORM_SECONDS: how long the storms of kills rage, over all sizes (30; a soak: 600); those
of stops take a sixth of that. LIGHTCACHE_KILLS_INSIDE: how many must have died inside a critical
section (20; a soak: 1,000). LIGHTCACHE_TEST_SEED: other chances.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from multi import pausing
from multi.stress_worker import TALLY

SECONDS = float(os.environ.get("LIGHTCACHE_STORM_SECONDS", "30"))
INSIDE = int(os.environ.get("LIGHTCACHE_KILLS_INSIDE", "20"))
SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "1"))
CAPACITIES = (4, 16, 64, 20_000)
TESTS = Path(__file__).parent.parent
LIMIT = 180 + 3 * SECONDS + INSIDE  # seconds; a watchdog, nothing is measured

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(LIMIT)]


def storm(*arguments: object) -> dict[str, Any]:
    """Run one: what it counted, or how it failed."""
    program = str(TESTS / "multi" / "storm.py")
    running = subprocess.Popen(
        [sys.executable, "-W", "error", program, "--seed", str(SEED), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS), "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        out, errors = running.communicate(timeout=LIMIT - 30)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # the workers hold the pipes too
        out, errors = running.communicate()
        pytest.fail(f"the storm did not end\n{out}\n{errors}")
    assert running.returncode == 0, f"{out}\n{errors}"
    counted: dict[str, Any] = json.loads(out)
    print(counted)
    return counted


def judge(counted: dict[str, Any]) -> None:
    """A storm that could not do all of it says why."""
    for why in ("one PID namespace because", "no pause points because"):
        if counted[why]:
            pytest.skip(f"all was well, but {why}: {counted[why]}")


@pytest.mark.parametrize("pages", CAPACITIES)
def test_kills(pages: int, segment_name: str) -> None:
    share, inside = SECONDS / len(CAPACITIES), -(-INSIDE // len(CAPACITIES))
    wanted = ["kills", "reaps", "operations", "pages verified", "published"]
    if pages >= 64:
        wanted += ["recoveries", *set(TALLY) - {"lock timeouts", "shards"}]
    counted = storm(
        "--name", segment_name, "--pages", pages, "--seconds", share, "--inside", inside,
        "--until", *wanted,
    )  # fmt: skip
    assert counted["kills inside"] >= inside or counted["no pause points because"]
    judge(counted)


@pytest.mark.parametrize("pages", [16, 20_000])
def test_stops(pages: int, segment_name: str) -> None:
    counted = storm(
        "--name", segment_name, "--pages", pages, "--seconds", SECONDS / 12, "--stops",
        "--inside", 3, "--checkpoints", 1, "--until", "stops", "operations", "pages verified",
    )  # fmt: skip
    assert counted["stops inside"] >= 3 or counted["no pause points because"]
    judge(counted)
