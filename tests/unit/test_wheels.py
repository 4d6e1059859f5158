"""The wheels: what their names promise, and that one works where there is no compiler."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.packages import need

ROOT = Path(__file__).resolve().parents[2]
BuiltOnce = Callable[[str, Callable[[Path], object]], Path]
Build = Callable[[str], Path]
FOR = ("--fingerprint", "model")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def build(built_once: BuiltOnce) -> Build:
    """`build(architecture)`: its wheel."""

    def make(architecture: str) -> Path:
        def into(folder: Path) -> None:
            command = [sys.executable, str(ROOT / ".ci/wheels"), str(folder), architecture]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert [done.stdout.strip()] == [str(each) for each in folder.glob("*.whl")]

        (wheel,) = built_once(f"wheel-{architecture}", into).glob("*.whl")
        return wheel

    return make


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_a_wheel_is_for_every_python_of_its_platform(architecture: str, build: Build) -> None:
    need("gcc" if architecture == "x86_64" else "aarch64-linux-gnu-gcc")
    wheel = build(architecture)
    name = re.fullmatch(rf".+-py3-none-manylinux_2_(\d+)_{architecture}\.whl", wheel.name)
    assert name
    assert int(name[1]) >= 17
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [each for each in names if each.endswith(".so")]
        assert len(libraries) == 2
        for each in libraries:
            symbols = re.findall(rb"GLIBC_2\.(\d+)", archive.read(each))
            assert max(map(int, symbols)) <= int(name[1])
            machine = int.from_bytes(archive.read(each)[18:20], "little")
            assert machine == {"x86_64": 62, "aarch64": 183}[architecture]
        (metadata,) = (each for each in names if each.endswith("/METADATA"))
        facts = email.message_from_bytes(archive.read(metadata))
    extras = facts.get_all("Provides-Extra", [])
    assert {"vllm", "sglang"} <= set(extras)
    wanted = "\n".join(facts.get_all("Requires-Dist", []))
    assert not re.search("vllm|sglang", wanted)  # neither engine nor torch


def test_a_wheel_works_where_there_is_no_compiler(
    tmp_path: Path, segment_name: str, build: Build
) -> None:
    need("gcc")
    wheel = build("x86_64")
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    # What it depends on is taken from here; a path file of that folder is not read again, so the
    # clone, which is installed there, is not.
    (site / "others.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    home = {"PATH": str(place / "bin"), "HOME": str(tmp_path)}
    environment = {**{k: v for k, v in os.environ.items() if k.startswith("LC_")}, **home}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    lightcache, python = str(place / "bin/lightcache"), str(place / "bin/python")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", str(wheel))
    where = run(python, "-c", "import lightcache, shutil as s; print(lightcache, s.which('cc'))")
    assert str(site) in where
    assert "None" in where
    run(lightcache, "create", segment_name, "--pages", "8", "--page-bytes", "4096", *FOR)
    try:
        assert segment_name in run(lightcache, "ls")
    finally:
        run(lightcache, "rm", segment_name, "--force")
    text = (ROOT / "README.md").read_text()
    first = re.search(r"\n## In ten lines\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert first
    program = first[1].replace('"llama', f'"{segment_name}')
    try:
        said = [run(python, "-c", program) for _ in range(2)]
    finally:
        run(lightcache, "rm", f"{segment_name}-3-8b", "--force")
    assert said == [f"{reused} of 300 tokens need not be computed\n" for reused in (0, 256)]
