"""Structures, whose user dies behind every instruction, and who recovers from that as well:
`structures.c`.

LIGHTCACHE_STEP_BUILDS=all: under every compiler and level; else under two that differ much.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from crash import run
from support.packages import need, skip_or_fail

NATIVE = run.HERE.parent / "native"
SUPPORT = [
    NATIVE / f"{name}.c" for name in ("harness", "world", "structure_calls", "structure_log")
]
NAMES = [f"{compiler}-{level}" for compiler in run.COMPILERS for level in run.LEVELS]
if os.environ.get("LIGHTCACHE_STEP_BUILDS") != "all":
    NAMES = ["gcc-O2", "clang-O0"]


def make(build: run.Build, folder: Path) -> Path:
    """The program, with all of the core in it: world.c knows the index too."""
    core = [path for native in run.NATIVES for path in sorted(native.glob("*.c"))]
    made = folder / build.name
    flags = [*run.FLAGS, *run.LEVELS[build.level], f"-I{NATIVE}"]
    sources = [str(path) for path in [run.HERE / "structures.c", *SUPPORT, *core]]
    subprocess.run([build.compiler, *flags, "-o", str(made), *sources, "-lrt"], check=True)
    return made


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_death_after_every_instruction(name: str, tmp_path: Path) -> None:
    build = next((build for build in run.builds() if build.name == name), None)
    if build is None:
        need(name.partition("-")[0])
        skip_or_fail(f"stepping needs x86-64 and a compiler that links {name}")
    done = subprocess.run([make(build, tmp_path)], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    figures = {name: map(int, rest) for name, *rest in map(str.split, done.stdout.splitlines())}
    assert set(figures) == {"list", "dict", "ring", "log"}
    for _, deaths, second_deaths in figures.values():
        assert deaths > 100, "deaths that were looked at"
        assert second_deaths > 5 * deaths
