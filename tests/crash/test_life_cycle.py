"""Creating, attaching, replacing, growing, leaving, unlinking: killed around every system call.

LIGHTCACHE_LIFE_STRIDE: kill at every 41st stop only; 1 kills at all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from crash.life_scenes import SCENES

TESTS = Path(__file__).parent.parent
STRIDE = int(os.environ.get("LIGHTCACHE_LIFE_STRIDE", "41"))


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("scene", SCENES)
def test_death_around_every_system_call(scene: str, segment_name: str) -> None:
    # Each scene begins at another stop, so that a stride sees entries and exits of calls.
    first = list(SCENES).index(scene) % STRIDE
    done = subprocess.run(
        [
            sys.executable,
            TESTS / "crash" / "life_cycle.py",
            segment_name,
            scene,
            str(STRIDE),
            str(first),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"tracing is not permitted here: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    print(scene, done.stdout, end="")
