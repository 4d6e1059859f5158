"""Building the core with one file changed, and the programs that judge it.

A `Workshop` is a folder with a copy of the sources and of the objects made from them: a worker
changes one file in it, compiles what depends on that file, links, and puts everything back.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident

from mutants.mutate import CORE, Mutant

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (*CORE, "tests/native", "tests/mutants")
LANGUAGE = ["-std=c11", "-D_GNU_SOURCE", "-pthread", "-w", *(f"-I{folder}" for folder in SOURCES)]
INSTALLED = [*LANGUAGE, "-O2", "-fPIC", "-fvisibility=hidden"]


@dataclass(frozen=True)
class Variant:
    """A way to build the core and what is linked with it. Its name is that of a folder."""

    name: str
    core: list[str]
    tests: list[str]
    link: list[str]


# With hooks after every store, with pause points, and no more optimised than keeps building short.
PAUSE = [*LANGUAGE, "-O1", "-DLC_PAUSE_POINTS"]
HOOKED = Variant("hooked", [*PAUSE, "-include", "tests/mutants/hooks.h"], PAUSE, [])
SANITIZER = ["-fsanitize=thread", "-include", "tests/native/tsan_fence.h"]
TSAN = Variant(
    "tsan", [*LANGUAGE, "-O1", *SANITIZER], [*LANGUAGE, "-O1", *SANITIZER], ["-fsanitize=thread"]
)


@dataclass(frozen=True)
class Program:
    """What judges a mutant: its test sources (patterns), besides the core."""

    variant: Variant
    parts: tuple[str, ...]


WORLD = ("native/harness", "native/world", "native/pair", "native/calls")
PROGRAMS = {
    "core_tests": Program(HOOKED, ("native/main", "native/test_*", "mutants/hooks", *WORLD)),
    "deaths": Program(
        HOOKED,
        (
            *(
                f"mutants/{name}"
                for name in ("deaths", "heirs", "prepared", "scenes*", "difference")
            ),
            "mutants/hooks",
            *WORLD,
        ),
    ),
    "gaps": Program(HOOKED, ("mutants/gaps*", "mutants/hooks", *WORLD)),
    "meetings": Program(HOOKED, ("mutants/meetings", "mutants/hooks", *WORLD)),
    "structures": Program(
        HOOKED, ("mutants/structures", "mutants/hooks", "native/structure_*", *WORLD)
    ),
    "stress": Program(TSAN, ("native/stress*", *WORLD)),
}


@dataclass(frozen=True)
class Done:
    """How a command ended. `rc` is None when it was stopped at its time limit."""

    rc: int | None
    output: str


def run(command: list[str], folder: Path, seconds: float) -> Done:
    """Run in a session of its own, so that a time limit ends whatever it has started."""
    environment = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        rc: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        rc = None
    return Done(rc, output.decode(errors="replace"))


class BuildError(Exception):
    """The compiler refused; what it said."""


class Workshop:
    """A folder in which one mutant after another is built."""

    def __init__(self, folder: Path, programs: Iterable[str]) -> None:
        self.folder = folder
        self.programs = sorted(programs)

    @classmethod
    def first(cls, folder: Path, programs: Iterable[str], jobs: int) -> Workshop:
        """The one that all others are copies of: everything compiled, nothing changed."""
        for part in SOURCES:
            kept = shutil.ignore_patterns("*.py", "__pycache__", "*.txt")
            shutil.copytree(ROOT / part, folder / part, ignore=kept)
        shop = cls(folder, programs)
        (folder / "installed").mkdir()
        for variant in shop.variants():
            for made in ("core", "tests"):
                (folder / variant.name / made).mkdir(parents=True)
            shop.compile_all(variant, shop.core(), shop.tests(variant), jobs)
            shop.link(variant)
        return shop

    def copy(self, folder: Path) -> Workshop:
        shutil.copytree(self.folder, folder)
        return Workshop(folder, self.programs)

    def variants(self) -> list[Variant]:
        return [one for one in (HOOKED, TSAN) if self.of(one)]

    def of(self, variant: Variant) -> list[str]:
        """The programs of a variant."""
        return [name for name in self.programs if PROGRAMS[name].variant is variant]

    def core(self) -> list[str]:
        files = [path for part in CORE for path in sorted((self.folder / part).glob("*.c"))]
        return [str(path.relative_to(self.folder)) for path in files]

    def parts(self, program: str) -> list[str]:
        """The test sources of a program."""
        found = [self.folder.glob(f"tests/{name}.c") for name in PROGRAMS[program].parts]
        return sorted(str(path.relative_to(self.folder)) for paths in found for path in paths)

    def tests(self, variant: Variant) -> list[str]:
        return sorted({part for program in self.of(variant) for part in self.parts(program)})

    def compile(self, source: str, into: str, flags: list[str]) -> Path:
        made = self.folder / into / (Path(source).stem + ".o")
        fresh = made.with_suffix(f".{get_ident()}")  # two workers may make the same one
        done = run(["gcc", *flags, "-c", source, "-o", str(fresh)], self.folder, 120)
        if done.rc != 0:
            raise BuildError(done.output)
        return fresh.rename(made)

    def compile_all(self, variant: Variant, core: list[str], tests: list[str], jobs: int) -> None:
        work = [(source, f"{variant.name}/core", variant.core) for source in core]
        work += [(source, f"{variant.name}/tests", variant.tests) for source in tests]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda one: self.compile(*one), work))

    def link(self, variant: Variant) -> None:
        core = [str(path) for path in sorted((self.folder / variant.name / "core").glob("*.o"))]
        for program in self.of(variant):
            own = [f"{variant.name}/tests/{Path(part).stem}.o" for part in self.parts(program)]
            command = ["gcc", "-pthread", *variant.link, "-o", program, *own, *core, "-lrt"]
            done = run(command, self.folder, 120)
            if done.rc != 0:
                raise BuildError(done.output)

    def affected(self, mutant: Mutant, variant: Variant) -> tuple[list[str], list[str]]:
        """The core's sources and the tests that have to be compiled again."""
        if mutant.path.endswith(".c"):
            return [mutant.path], []
        return self.core(), self.tests(variant)

    def change(self, mutant: Mutant, text: str) -> None:
        (self.folder / mutant.path).write_text(text, encoding="utf-8")

    def build(self, mutant: Mutant, variant: Variant) -> None:
        """Every program of a variant, with the mutant in it."""
        self.compile_all(variant, *self.affected(mutant, variant), 1)
        self.link(variant)

    def is_same_when_installed(self, mutant: Mutant, first: Workshop) -> bool:
        """Does the optimising compiler make the same code of it?"""
        for source in self.affected(mutant, HOOKED)[0]:
            was = first.folder / "installed" / (Path(source).stem + ".o")
            if not was.exists():
                first.compile(source, "installed", INSTALLED)
            made = self.compile(source, "installed", INSTALLED)
            if made.read_bytes() != was.read_bytes():
                return False
        return True

    def restore(self, mutant: Mutant, first: Workshop) -> None:
        shutil.copy2(first.folder / mutant.path, self.folder / mutant.path)
        for variant in self.variants():
            core, tests = self.affected(mutant, variant)
            objects = [f"{variant.name}/core/{Path(source).stem}.o" for source in core]
            objects += [f"{variant.name}/tests/{Path(source).stem}.o" for source in tests]
            for name in objects:
                shutil.copy2(first.folder / name, self.folder / name)
