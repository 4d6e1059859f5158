"""The examples run, and say what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, segment_name: str, home: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), segment_name],
        capture_output=True,
        text=True,
        timeout=100,
        # Unbuffered, a line and its end are two writes, and lines of several processes mix.
        env={**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return sorted(done.stdout.splitlines())


def test_two_processes(segment_name: str, tmp_path: Path) -> None:
    assert run_example("two_processes.py", segment_name, tmp_path) == [
        "reader: 96 of 100 tokens need not be computed",
        "writer: 6 pages written and published",
    ]


@pytest.mark.models
def test_two_processes_with_a_model(segment_name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert run_example("transformers_prefix.py", segment_name, tmp_path) == [
        "first: 0 of 103 tokens were not computed",
        "second: 96 of 102 tokens were not computed",
    ]


@pytest.mark.slow
def test_two_ranks_write_and_a_third_process_reads(segment_name: str, tmp_path: Path) -> None:
    lines = run_example("transfer.py", segment_name, tmp_path)
    half = 6 * 4 * 2 * 16 * 4 * 64 * 2  # pages, layers, planes, tokens, heads of a rank, bf16
    assert lines[:2] == [f"rank {rank}: {half} bytes of 6 pages written" for rank in range(2)]
    assert lines[2].startswith("reader: 96 of 100 tokens are on ")
    assert len(lines) == 3
