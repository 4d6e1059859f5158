"""README's programs as they stand, each run twice: the second run finds the pages of the first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightcache.shm import Segment

README = (Path(__file__).parents[2] / "README.md").read_text()


def program(heading: str, name: str, instead_of: str) -> str:
    """The code of a section, for a cache of another name."""
    section = README[README.index(f"\n## {heading}\n") + 1 :]
    section = section[: section.find("\n## ")]
    source = "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    assert f'"{instead_of}' in source
    return source.replace(f'"{instead_of}', f'"{name}')


def test_ten_lines(
    segment_name: str, script: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    source = program("In ten lines", segment_name, "llama")
    output = [script(source).stdout for _ in range(2)]
    assert output == [f"{reused} of 300 tokens need not be computed\n" for reused in (0, 256)]
    assert Segment.unlink(segment_name)


@pytest.mark.parametrize(
    ("heading", "says"),
    [
        ("Transfers", "256 tokens were loaded\n"),
        ("A scheduler", "PrefixMatch(tokens=300, device=288, "),
    ],
)
def test_programs_of_an_engine(
    heading: str,
    says: str,
    segment_name: str,
    script: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """They leave nothing: their caches end with their last process."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = program(heading, segment_name, "llama")
    for _ in range(2):
        assert script(source).stdout.startswith(says)


@pytest.mark.models
def test_five_lines_for_transformers(
    segment_name: str, script: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    source = program("With transformers, in five lines", segment_name, "llama-chat")
    runs = [script(source) for _ in range(2)]
    assert [run.stdout for run in runs] == [
        f"{reused} tokens were not computed\n" for reused in (0, 96)
    ]
    for run in runs:
        (line,) = [line for line in run.stderr.splitlines() if "stays in shared memory" in line]
        assert line.startswith(segment_name)
        assert "MiB" in line
        assert "after 24 h without use" in line
        assert f"`lightcache rm {segment_name}`" in line
    assert Segment.unlink(segment_name)
