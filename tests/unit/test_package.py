"""The clone is a package as it lies, and what is built from it has every module of it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def modules() -> set[str]:
    """Python files of the package, as paths in a wheel."""
    return {
        str(Path(folder, name).relative_to(ROOT))
        for folder, _, names in os.walk(ROOT / "lightcache", followlinks=True)
        for name in names
        if name.endswith(".py")
    }


def run(*command: str, where: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=where,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_started_in_the_root_finds_everything() -> None:
    names = "lightcache.shm, lightcache.kernels, lightcache.tools.cli"
    out = run(sys.executable, "-c", f"import {names}; print(lightcache.__file__)", where=ROOT)
    assert out.strip() == str(ROOT / "lightcache/__init__.py")


def test_the_folders_are_not_importable_by_their_bare_names(tmp_path: Path) -> None:
    names = "('shm', 'kernels', 'tools')"
    program = f"from importlib.util import find_spec as f; print([n for n in {names} if f(n)])"
    assert run(sys.executable, "-c", program, where=tmp_path).strip() == "[]"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_made_from_the_source_distribution_has_every_module(tmp_path: Path) -> None:
    config = tmp_path / "dist.cfg"  # nothing is built in the clone
    config.write_text(f"[build]\nbuild_base={tmp_path}/build\n[egg_info]\negg_base={tmp_path}\n")
    build = (sys.executable, "-W", "ignore", "-c", BUILD)
    run(*build, "build_sdist", str(tmp_path), where=ROOT, DIST_EXTRA_CONFIG=str(config))
    (archive,) = tmp_path.glob("*.tar.gz")
    run("tar", "-xzf", str(archive), where=tmp_path)
    (source,) = (path.parent for path in tmp_path.glob("*/setup.py"))
    run(*build, "build_wheel", str(tmp_path), where=source)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == modules()
    assert sum(name.endswith(".abi3.so") for name in names) == 2
    assert "-py3-none-" in wheel.name
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lightcache"}
