"""The core's own tests, in C: built in several ways, by the Makefile beside this file, and run."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.packages import need

BuiltOnce = Callable[[str, Callable[[Path], object]], Path]
Build = Callable[..., Path]

HERE = Path(__file__).parent
SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "1"))
LIMIT = 600  # seconds for a build or a run: a hundred times what any takes on an idle machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT)]


def run(*command: object, eviction: str = "lru") -> str:
    """Run a command, its tests for this order of eviction; what it prints, in its failure too."""
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | {"LIGHTCACHE_TEST_EVICTION": eviction},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.fixture
def build(built_once: BuiltOnce) -> Build:
    """`build(variant, target)`: the folder that holds what was built."""

    def make(variant: str, target: str = "all") -> Path:
        command = ("make", "-s", "-j2", "-C", HERE, f"VARIANT={variant}")
        name = f"native-{variant}-{target}"
        return built_once(name, lambda out: run(*command, f"OUT={out}", target)) / variant

    return make


both_orders = pytest.mark.parametrize("eviction", ["lru", "hz"])


@both_orders
@pytest.mark.parametrize("variant", ["gcc", "clang"])
def test_plain(variant: str, eviction: str, build: Build) -> None:
    need("make", variant)
    print(run(build(variant) / "core_tests", eviction=eviction))


@both_orders
def test_addresses_and_undefined_behaviour(eviction: str, build: Build) -> None:
    need("make", "gcc")
    print(run(build("asan") / "core_tests", eviction=eviction))


@pytest.mark.stress
def test_races_of_threads(build: Build) -> None:
    need("make", "gcc")
    stress = build("tsan", "stress") / "stress"
    for seed in (SEED, SEED + 1):
        print(run(stress, 3000, seed))


@both_orders
def test_undefined_behaviour_as_clang_sees_it(eviction: str, build: Build) -> None:
    need("make", "clang")
    print(run(build("ubsan") / "core_tests", eviction=eviction))


def test_aarch64(build: Build) -> None:
    """Builds, lays everything out as here, and works; on an emulator, which runs on this machine's
    own memory: nothing is said about the orders that the hardware would allow."""
    need("make", "gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64")
    there, here = build("aarch64") / "core_tests", build("gcc") / "core_tests"
    assert run("qemu-aarch64", there, "--facts") == run(here, "--facts")
    print(run("qemu-aarch64", there))


def test_aarch64_spins_with_isb(build: Build) -> None:
    """The processor waits a little in each round, as x86-64 does with `pause`."""
    need("make", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objdump")
    lock = build("aarch64") / "core" / "lock.o"
    code = run("aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", lock)
    spinning = code.partition("<lcs_lock_take>:")[2].partition(">:\n")[0]
    assert re.search(r"\tisb\b", spinning), spinning
