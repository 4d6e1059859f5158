#!/usr/bin/env python3
"""Every operation, stopped after every instruction, under every compiler and level.

    python run.py                       all scenes, all builds, every change looked at
    python run.py --builds gcc-O2 --stride 5 reserve publish
    python run.py --eviction hz         in indexes with that order of eviction
    python run.py --builds clang-O2,clang-lto --make FOLDER      for a machine without clang, there
    python run.py --victims FOLDER                               run as well
    python run.py --list

`stepper.c` says what is asked at each step, `scenes/` what is stepped. The victim is compiled once
for each build; the stepper once, with pause points. Needs a C compiler and nothing else; where
lightcache and numpy are installed, recovered copies are read by the second checker
(tests/checker/raw.py) too.

Exit status: 0 nothing was found, 1 something was, 2 it could not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NATIVES = [ROOT / "shm" / "native", ROOT / "lightcache" / "native"]
COMPILERS = ("gcc", "clang")
LEVELS = {"O0": ["-O0"], "O2": ["-O2"], "O3": ["-O3"], "lto": ["-O2", "-flto"]}
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]
# Spinning stores nothing and is most of the steps of a takeover: it ends at the first look at the
# clock.
FLAGS += ["-DLC_SPIN_ROUNDS=20"]
# A portion of what a dead client held is 12 pages that it was writing: scenes have few.
FLAGS += ["-DLCI_REAP_MOST=12*LCI_REAP_PAGE"]
# Learning looks at each entry of the sample several times, and scenes have few pages.
FLAGS += ["-DLCH_SMALL_SAMPLE=512"]
FLAGS += [f"-I{folder}" for folder in [*NATIVES, HERE]]
SHARED = ["stage.c", "deeds.c", "scenes.c"]
STEPPER = ["stepper.c", "judge.c", "touched.c", "goon.c", "trace.c"]
VICTIM = ["victim.c", "step.c", "watch.c"]


@dataclasses.dataclass(frozen=True)
class Build:
    """How the victim is compiled."""

    compiler: str
    level: str

    @property
    def name(self) -> str:
        return f"{self.compiler}-{self.level}"


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much of a scene is looked at; see stepper.c."""

    stride: int = 1
    kills: int = 12
    seconds: int = 6
    dumps: int = 25
    eviction: str = "lru"


@dataclasses.dataclass
class Outcome:
    """What came of one scene under one build."""

    scene: str
    build: str
    status: int
    counts: dict[str, int]
    text: str
    took: float
    wrong: list[str]

    @property
    def good(self) -> bool:
        return self.status == 0 and not self.wrong


def scenes() -> list[str]:
    """The names of all scenes, in the order of files and lines."""
    found: list[str] = []
    for path in sorted((HERE / "scenes").glob("*.c")):
        found += re.findall(r"^SCENE\((\w+), \.pages", path.read_text(), re.MULTILINE)
    return found


def works(build: Build) -> bool:
    """Can this machine compile and link so? Link-time optimisation needs a linker's plugin."""
    if not shutil.which(build.compiler):
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "t.c"
        source.write_text("int main(void) { return 0; }\n")
        command = [build.compiler, *LEVELS[build.level], "-o", f"{folder}/t", str(source)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def builds() -> list[Build]:
    """All that this machine can make, neighbours as different as possible."""
    if platform.machine() != "x86_64":  # see step.c
        return []
    every = [Build(compiler, level) for level in LEVELS for compiler in COMPILERS]
    return [build for build in every if works(build)]


def compile_all(compiler: str, flags: Sequence[str], sources: Iterable[str], to: Path) -> Path:
    """One program of the core and some of our sources."""
    objects = to.parent / f"{to.name}.objects"
    objects.mkdir()
    core = [str(path) for folder in NATIVES for path in sorted(folder.glob("*.c"))]
    own = [str(HERE / name) for name in sources]
    own += [str(path) for path in sorted((HERE / "scenes").glob("*.c"))]
    for name, group in (("core", core), ("own", own)):  # files of the same name do not meet
        part = objects / name
        part.mkdir()
        subprocess.run([compiler, *FLAGS, *flags, "-c", *group], cwd=part, check=True)
    parts = [str(path) for path in sorted(objects.glob("*/*.o"))]
    subprocess.run([compiler, *FLAGS, *flags, "-o", str(to), *parts, "-lrt"], check=True)
    return to


def make_stepper(folder: Path) -> Path:
    compiler = next(name for name in (*COMPILERS, "cc") if shutil.which(name))
    flags = ["-O0", "-DLC_PAUSE_POINTS"]  # it waits for the kernel: nothing is gained by more
    return compile_all(compiler, flags, [*STEPPER, *SHARED], folder / "stepper")


def make_victim(folder: Path, build: Build) -> Path:
    flags = LEVELS[build.level]
    return compile_all(build.compiler, flags, [*VICTIM, *SHARED], folder / build.name)


def run_scene(
    stepper: Path, victim: Path, scene: str, effort: Effort, timeout: float | None = None
) -> Outcome:
    """Run one scene. Its segment lies in a folder of its own in /dev/shm, under no name that is a
    cache's: nobody sweeps it away."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepped-", dir="/dev/shm") as memory:
        dumps = Path(memory) / "dumps"
        dumps.mkdir()
        figures = [effort.stride, effort.kills, effort.seconds, effort.dumps]
        command = [stepper, Path(memory) / "segment", scene, victim, dumps, *figures]
        done = subprocess.run(
            [str(word) for word in command],
            env=os.environ | {"LIGHTCACHE_TEST_EVICTION": effort.eviction},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        wrong = check_dumps(dumps)
    words = done.stdout.split()
    counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    text = (done.stdout + done.stderr).strip()
    took = time.monotonic() - began
    return Outcome(scene, victim.name, done.returncode, counts, text, took, wrong)


def check_dumps(folder: Path) -> list[str]:
    """What the checker in Python says of the recovered copies; nothing if it is not installed."""
    try:
        import numpy as np
        from checker import raw
    except ImportError:
        return []
    wrong = []
    for path in sorted(folder.iterdir()):
        kind, _, pages = path.name.split("-")[:3]
        found = raw.check(np.fromfile(path, np.uint8), quiet=kind == "reaped", pages=int(pages))
        wrong += [f"{path.name}: {what}" for what in found]
    return wrong


# ---------------------------------------------------------------------- the command


def pick(every: Sequence[str], wanted: Sequence[str], what: str) -> list[str]:
    unknown = [name for name in wanted if name not in every]
    if unknown:
        sys.exit(f"no {what} of this name here: {', '.join(unknown)}; there are {', '.join(every)}")
    return list(wanted) or list(every)


def show(outcome: Outcome) -> None:
    counts = " ".join(f"{value:>8}" for value in outcome.counts.values())
    verdict = "" if outcome.good else "  FAILED"
    print(
        f"{outcome.scene:<27}{outcome.build:<10}{counts}{outcome.took:>8.1f}{verdict}", flush=True
    )
    if not outcome.good:
        print("\n".join([outcome.text, *outcome.wrong]), flush=True)


def show_totals(outcomes: Sequence[Outcome], took: float) -> None:
    totals: dict[str, int] = {}
    for outcome in outcomes:
        for name, value in outcome.counts.items():
            totals[name] = totals.get(name, 0) + value
    failed = [outcome for outcome in outcomes if not outcome.good]
    print(
        f"\n{len(outcomes)} runs in {took:.0f} s: "
        + ", ".join(f"{v} {k}" for k, v in totals.items())
    )
    for outcome in failed:
        print(f"FAILED: {outcome.scene} under {outcome.build}")


def make_victims(builds_: Sequence[Build], to: Path) -> int:
    """Victims for another machine, which may lack a compiler: `to` holds them and nothing else."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for build in builds_:
            shutil.copy2(make_victim(Path(folder), build), to / build.name)
    return 0


def run_all(
    names: Sequence[str],
    victims: Sequence[Build],
    effort: Effort,
    jobs: int,
    elsewhere: Sequence[Path] = (),
) -> int:
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        folder = Path(name)
        stepper = pool.submit(make_stepper, folder)
        made = {build.name: pool.submit(make_victim, folder, build) for build in victims}
        programs = {build: future.result() for build, future in made.items()}
        programs |= {path.name: path.resolve() for path in elsewhere}
        print(f"built in {time.monotonic() - began:.0f} s; {jobs} workers")
        columns = "steps changes looked asked killed seconds dumps stable failures"
        heads = " ".join(f"{head:>8}" for head in columns.split())
        print(f"{'scene':<27}{'build':<10}{heads}{'time':>8}")
        futures: list[Future[Outcome]] = [
            pool.submit(run_scene, stepper.result(), program, scene, effort)
            for scene in names
            for program in programs.values()
        ]
        for future in futures:
            outcomes.append(future.result())
            show(outcomes[-1])
    show_totals(outcomes, time.monotonic() - began)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def main() -> int:
    usual = Effort()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scenes", nargs="*", help="which (all)")
    parser.add_argument("--list", action="store_true", help="name scenes and builds, and end")
    parser.add_argument("--builds", default="", help="which, with commas between (all)")
    parser.add_argument(
        "--stride", type=int, default=usual.stride, help="look at every n-th change"
    )
    parser.add_argument("--kills", type=int, default=usual.kills, help="real deaths a scene")
    parser.add_argument("--seconds", type=int, default=usual.seconds, help="second victims a scene")
    parser.add_argument("--dumps", type=int, default=usual.dumps, help="dump every n-th look")
    parser.add_argument("--eviction", choices=("lru", "hz"), default=usual.eviction)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="workers")
    parser.add_argument("--make", type=Path, help="only compile victims, into this folder")
    parser.add_argument("--victims", type=Path, help="a folder of such victims, to be run as well")
    given = parser.parse_args()
    here = {build.name: build for build in builds()}
    if not here:
        print("stepping needs x86-64 and gcc or clang", file=sys.stderr)
        return 2
    if given.list:
        print("scenes:", *scenes(), "\nbuilds:", *here)
        return 0
    names = pick(scenes(), given.scenes, "scene")
    chosen = pick(list(here), [name for name in given.builds.split(",") if name], "build")
    if given.make:
        return make_victims([here[name] for name in chosen], given.make)
    effort = Effort(given.stride, given.kills, given.seconds, given.dumps, given.eviction)
    elsewhere = sorted(given.victims.iterdir()) if given.victims else []
    return run_all(names, [here[name] for name in chosen], effort, given.jobs, elsewhere)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # `checker`
    sys.exit(main())
