"""Programs that run in an engine's environment, with this clone's package beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# One thread: OpenMP's threads spin, and two of them on a core make each step slow.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "SGLANG_USE_CPU_ENGINE": "1",
}


@pytest.fixture
def in_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """`in_engine(program, argument...)`: what a file of this folder prints there."""
    engine = request.path.stem.removeprefix("test_")
    if os.environ.get("LIGHTCACHE_ENGINE") != engine:
        pytest.skip(f"runs in an environment of its own: .ci/engines {engine}")
    folders = [os.environ["LIGHTCACHE_ENGINE_PATH"], str(HERE / engine), str(HERE)]

    def run(program: str, *arguments: str) -> str:
        process = subprocess.Popen(
            [os.environ["LIGHTCACHE_ENGINE_PYTHON"], str(HERE / program), *arguments],
            cwd=tmp_path,
            env={**os.environ, **SETTINGS, "PYTHONPATH": ":".join(folders), "HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=500)
        finally:
            with contextlib.suppress(ProcessLookupError):  # engines leave children
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.returncode == 0, out[-4000:] + errors[-8000:]
        return out

    return run
