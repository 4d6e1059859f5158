"""docs/kill-9.md: its commands show what they say, and the tests that it names exist."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

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


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("kill9", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("begins", [True, False])
def test_a_row_that_fails_ends_its_victim(
    begins: bool, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, here = MagicMock(), MagicMock()
    context.Pipe.return_value = here, MagicMock()
    here.recv.side_effect = ["here"] if begins else EOFError
    monkeypatch.setattr(example.mp, "get_context", lambda _: context)
    with pytest.raises(SystemExit if begins else EOFError), example.process("saves"):
        example.say("what a row expects", holds=False)
    child = context.Process.return_value
    assert child.method_calls == [call.start(), call.kill(), call.join()]


@pytest.mark.parametrize("beside", [True, False])
def test_the_command_is_beside_python_or_where_the_shell_finds_it(
    beside: bool, example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Asked(Exception):
        pass

    def dumped(command: list[object]) -> bytes:
        raise Asked(str(command[0]))

    for name in ("open_cache", "process", "time"):
        monkeypatch.setattr(example, name, MagicMock())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(subprocess, "check_output", dumped)
    monkeypatch.setattr(shutil, "which", lambda name: f"/elsewhere/{name}")
    if beside:
        (tmp_path / "lightcache").touch()
    with pytest.raises(Asked) as asked:
        example.lock()
    assert asked.value.args == (f"{tmp_path if beside else '/elsewhere'}/lightcache",)


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
