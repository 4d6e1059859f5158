"""Which tests `make test` and `make test-all` run, and what a machine without packages skips."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import packages
from support.refusals import refused

TESTS = Path(__file__).parent.parent
ONES = """
import pytest

def test_quick(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.models
def test_model(): pass

@pytest.mark.servers
@pytest.mark.crash
def test_server(): pass

@pytest.mark.crash
def test_kill(): pass

@pytest.mark.parametrize("what", [1, 2])
def test_built(what, built_once, tmp_path_factory, request):
    if what == 1:
        with pytest.raises(ZeroDivisionError):
            built_once("it", lambda folder: 1 / 0)
    folder = built_once("it", lambda folder: (folder / "made").touch(exist_ok=False))
    assert [path.name for path in folder.iterdir()] == ["made"]
"""
FIRST = {"test_quick", "test_kill", "test_built[1]", "test_built[2]"}
REST = {"test_slow", "test_model", "test_server"}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A few tests of both parts, under the conftest.py and the options of ours."""
    made = tmp_path / "tests"
    made.mkdir()
    shutil.copy(TESTS / "conftest.py", made)
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    (made / "test_ones.py").write_text(ONES)
    return made


def ran(suite: Path, *arguments: str) -> str:
    """What pytest prints under these arguments, by which nothing fails."""
    environment = {name: os.environ[name] for name in os.environ if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", *arguments],
        cwd=suite,
        env={**environment, "COLUMNS": "200", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names_in(printed: str) -> set[str]:
    """The tests that pytest names, each on a line of its own."""
    words = [word for line in printed.splitlines() for word in line.split() if "::" in word]
    return {word.partition("::")[2] for word in words}


@pytest.mark.slow
def test_the_first_part_runs_in_several_processes(suite: Path) -> None:
    printed = ran(suite, "--part=first", "-n", "auto", "-v")
    assert names_in(printed) == FIRST
    cores = min(8, len(os.sched_getaffinity(0)))
    assert f"{cores} worker{'s' if cores > 1 else ''} " in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--part=rest", "--collect-only", "-q"], REST),
        (["--part=first", "-n", "auto", "-v", "test_ones.py"], FIRST | REST),
        (["--part=first", "--collect-only", "-qk", "slow or quick"], {"test_slow", "test_quick"}),
    ],
    ids=["rest", "a path", "-k"],
)
def test_parts(suite: Path, arguments: list[str], expected: set[str]) -> None:
    printed = ran(suite, *arguments)
    assert names_in(printed) == expected
    assert "worker" not in printed, "tests that are named run in this process"


def test_a_missing_package_skips_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.PROGRAMS, "no-such-program", "some-package")
    monkeypatch.setitem(packages.LIBRARIES, "libnosuch.so.1", "libnosuch1 some-package")
    names = ("cc", "no-such-program", "libnosuch.so.1")
    said = r"^missing: no-such-program, libnosuch.so.1; install: apt-get install some-package lib"
    monkeypatch.delenv("CI", raising=False)
    packages.need("cc")
    refused(pytest.skip.Exception, said, packages.need, *names)
    monkeypatch.setenv("CI", "true")
    refused(pytest.fail.Exception, said, packages.need, *names)
