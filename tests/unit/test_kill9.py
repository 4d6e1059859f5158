"""docs/kill-9.md: its commands show what they say, and the tests that it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kill-9.md").read_text()
EXAMPLE = ROOT / "examples/kill9.py"
ROWS = sorted(set(re.findall(r"examples/kill9\.py ([a-z]+)`", PAGE)))


def shown(name: str, home: Path) -> str:
    """What a row prints; it leaves nothing in shared memory."""
    env = {**os.environ, "HOME": str(home)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    with subprocess.Popen([sys.executable, str(EXAMPLE), name], **pipes) as row:
        output, errors = row.communicate(timeout=100)
    assert not row.returncode, f"{row.returncode}\n{output}\n{errors}"
    assert not errors
    assert not list(Path("/dev/shm").glob(f"*kill9-{row.pid}*"))
    return output


def form(output: str) -> list[str]:
    """Its lines, without what differs from run to run."""
    return [re.sub(r"[\d.]+", "0", line) for line in output.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_row_holds_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    output = form(shown(name, tmp_path))
    assert len(output) >= 2
    (printed,) = re.findall(r"```text\n\$ python examples/kill9\.py .*?\n(.*?)```", PAGE, re.DOTALL)
    if f"\n{output[0]}\n" in f"\n{printed}":
        assert "\n".join(output) in "\n".join(form(printed))
    assert not list(tmp_path.iterdir())  # no secret was made


def test_the_page_has_each_row() -> None:
    (rows,) = re.findall(r"^ROWS = \((.*?)\)", EXAMPLE.read_text(), re.DOTALL | re.MULTILINE)
    assert sorted(re.findall(r"\w+", rows)) == ROWS


def test_the_page_names_tests_that_there_are() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("|")]
    named = 0
    for row in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", row)
        sources = "".join((ROOT / file).read_text() for file in files)
        for test in re.findall(r"`(test_\w+)`", row):
            assert f"def {test}(" in sources, test
            named += 1
    assert named >= 6
