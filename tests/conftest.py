"""What tests share: names of their own in /dev/shm, children, waiting for a condition."""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE = 60.0  # seconds after which waiting is a failure: generous, nothing is measured here

# Other runs may work beside this one; only what carries our token is ours to judge.
_TOKEN = f"test-{secrets.token_hex(4)}"
_COUNTER = itertools.count(1)
_SHM = Path("/dev/shm")

Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def segment_name() -> str:
    """A segment name that nobody else uses; longer names may be made from it."""
    return f"{_TOKEN}-{next(_COUNTER)}"


@pytest.fixture(autouse=True)
def clean_shm() -> Iterator[None]:
    """Every test leaves /dev/shm as it found it; what one left is named, and then removed."""
    yield
    left = sorted(path for path in _SHM.iterdir() if _TOKEN in path.name)
    for path in left:
        path.unlink()
    assert not left, f"left in {_SHM}: {[path.name for path in left]}"


@pytest.fixture(autouse=True)
def young_heap() -> Iterator[None]:
    """`gc.collect()` looks at what a test made, not at all of torch and transformers: that takes
    a fifth of a second, and some tests collect at every place of an operation."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool], str], None]:
    """`wait_until(condition, what)` asks again and again; a failure names `what`."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"waited {DEADLINE} s for: {what}"
            time.sleep(0.001)

    return wait


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """`script(source, *arguments)` runs Python in a process of its own, which may fork, crash or
    exit as it likes, and asserts its exit status (`status=`; None: any)."""

    def run(
        source: str, *arguments: object, status: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / f"script{next(_COUNTER)}.py"
        path.write_text(source)
        done = subprocess.run(
            [sys.executable, "-W", "error", str(path), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONFAULTHANDLER": ""},
            check=False,
        )
        if status is not None:
            assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
