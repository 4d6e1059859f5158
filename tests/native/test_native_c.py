"""The core's own tests, in C: built in several ways, by the Makefile beside this file, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "1"))
LIMIT = 600  # seconds for a build or a run: a hundred times what any takes on an idle machine
pytestmark = pytest.mark.timeout(2 * LIMIT)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that everything is built in."""
    return tmp_path_factory.mktemp("native")


def run(*command: object) -> str:
    """Run a command; what it prints, in its failure too."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def need(*tools: str) -> None:
    """Skip where one of the tools is missing, unless this is the machine that must have them."""
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"missing: {missing}")
    if missing:
        pytest.skip(f"missing: {missing}")


def build(variant: str, out: Path, target: str = "all") -> Path:
    """The folder that holds what was built."""
    run("make", "-s", "-j2", "-C", HERE, f"VARIANT={variant}", f"OUT={out}", target)
    return out / variant


@pytest.mark.parametrize("variant", ["gcc", "clang"])
def test_plain(variant: str, out: Path) -> None:
    need("make", variant)
    print(run(build(variant, out) / "core_tests"))


@pytest.mark.slow
def test_addresses_and_undefined_behaviour(out: Path) -> None:
    need("make", "gcc")
    print(run(build("asan", out) / "core_tests"))


@pytest.mark.slow
@pytest.mark.stress
def test_races_of_threads(out: Path) -> None:
    need("make", "gcc")
    stress = build("tsan", out, "stress") / "stress"
    for seed in (SEED, SEED + 1):
        print(run(stress, 3000, seed))


@pytest.mark.slow
def test_undefined_behaviour_as_clang_sees_it(out: Path) -> None:
    need("make", "clang")
    print(run(build("ubsan", out) / "core_tests"))


@pytest.mark.slow
def test_aarch64(out: Path) -> None:
    """Builds, lays everything out as here, and works; on an emulator, which runs on this machine's
    own memory: nothing is said about the orders that the hardware would allow."""
    need("make", "gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64")
    there, here = build("aarch64", out) / "core_tests", build("gcc", out) / "core_tests"
    assert run("qemu-aarch64", there, "--facts") == run(here, "--facts")
    print(run("qemu-aarch64", there))
