"""An operation is stopped after every instruction: what would the others find if it died there?

`stepper.c` says what is asked at each step, `run.py` how it is built and run, `scenes/` what is
stepped. `make crash-test` looks at every change under every compiler and level; here the scenes
take turns with these, and every few changes are looked at.

LIGHTCACHE_STEP_STRIDE: look after every so many changes of the segment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from crash import run

STRIDE = int(os.environ.get("LIGHTCACHE_STEP_STRIDE", "11"))
EFFORT = run.Effort(stride=STRIDE, kills=2, seconds=1, dumps=7)
SCENES = run.scenes()


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[run.Outcome]]]:
    """The selected scenes, run by as many workers as there are cores; each under another build."""
    builds = run.builds()
    if not builds:
        pytest.skip("stepping needs x86-64 and a C compiler")
    if os.environ.get("CI") == "true":
        assert len(builds) == len(run.COMPILERS) * len(run.LEVELS), "gcc or clang is missing"
    selected = [
        item.callspec.params["scene"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    chosen = {scene: builds[SCENES.index(scene) % len(builds)] for scene in selected}
    folder = tmp_path_factory.mktemp("stepper")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        stepper = pool.submit(run.make_stepper, folder)
        victims = {
            build: pool.submit(run.make_victim, folder, build) for build in set(chosen.values())
        }

        def play(scene: str, build: run.Build) -> run.Outcome:
            return run.run_scene(stepper.result(), victims[build].result(), scene, EFFORT, 110)

        yield {scene: pool.submit(play, scene, build) for scene, build in chosen.items()}
        pool.shutdown(cancel_futures=True)


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(900)  # the first waits for all builds
@pytest.mark.parametrize("scene", SCENES)
def test_death_after_every_instruction(
    scene: str, outcomes: dict[str, Future[run.Outcome]], tmp_path: Path
) -> None:
    outcome = outcomes[scene].result()
    print(outcome.build, outcome.text)
    assert outcome.status == 0, outcome.text
    assert outcome.wrong == []
    assert outcome.counts["looked"] > 1
    assert outcome.counts["dumps"] > 0
