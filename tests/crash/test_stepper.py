"""An operation is stopped after every instruction: what would the others find if it died there?

`stepper.c` says what is asked at each step, `run.py` how it is built and run, `scenes/` what is
stepped. `make crash-test` looks at every change under every compiler and level; here the scenes
take turns with three of these, and every few changes are looked at.

LIGHTCACHE_STEP_STRIDE: look after every so many changes of the segment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from crash import run
from support.packages import need

STRIDE = int(os.environ.get("LIGHTCACHE_STEP_STRIDE", "11"))
EFFORT = run.Effort(stride=STRIDE, kills=2, seconds=1, dumps=7)
RANKED = run.Effort(stride=5 * STRIDE, kills=1, seconds=0, dumps=7, eviction="hz")
SCENES = run.scenes()
BUILDS = ("gcc-O2", "gcc-lto", "clang-O3")  # a build takes as long as ten scenes

pytestmark = [pytest.mark.crash, pytest.mark.slow]

BuiltOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="module")
def builds() -> list[run.Build]:
    """Those of this machine."""
    found = run.builds()
    if not found:
        need("gcc")
        pytest.skip("stepping needs x86-64")
    if len(found) < len(run.COMPILERS) * len(run.LEVELS):
        assert os.environ.get("CI") != "true", "gcc or clang is missing"
    return [build for build in found if build.name in BUILDS] or found[:1]


@pytest.mark.timeout(900)  # the first waits for its build
@pytest.mark.parametrize("scene", SCENES)
def test_death_after_every_instruction(
    scene: str, builds: list[run.Build], built_once: BuiltOnce
) -> None:
    build = builds[SCENES.index(scene) % len(builds)]
    stepper = built_once("stepper", run.make_stepper) / "stepper"
    victim = built_once(build.name, lambda folder: run.make_victim(folder, build)) / build.name
    outcome = run.run_scene(stepper, victim, scene, EFFORT, 110)
    print(outcome.build, outcome.text)
    assert outcome.status == 0, outcome.text
    assert outcome.wrong == []
    assert outcome.counts["looked"] > 1
    assert outcome.counts["dumps"] > 0


# Each fifteenth; `make crash-test` goes through all.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scene", SCENES[:: len(SCENES) // 20])
def test_where_lists_are_ranked(scene: str, builds: list[run.Build], built_once: BuiltOnce) -> None:
    stepper = built_once("stepper", run.make_stepper) / "stepper"
    victim = built_once(builds[0].name, lambda folder: run.make_victim(folder, builds[0]))
    outcome = run.run_scene(stepper, victim / builds[0].name, scene, RANKED, 110)
    assert outcome.status == 0, outcome.text
    assert outcome.wrong == []
