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
# Hooks after every store, pause points, and no more optimisation than keeps building short.
JUDGED = [*LANGUAGE, "-O1", "-DLC_PAUSE_POINTS", "-include", "tests/mutants/hooks.h"]
TESTS = [*LANGUAGE, "-O1", "-DLC_PAUSE_POINTS"]
INSTALLED = [*LANGUAGE, "-O2", "-fPIC", "-fvisibility=hidden"]

WORLD = ["native/harness", "native/world", "mutants/hooks"]
# Program: the test sources that it is linked from, besides the core.
PROGRAMS = {
    "core_tests": [
        "native/main",
        "native/harness",
        "native/world",
        "native/test_*",
        "mutants/hooks",
    ],
    "deaths": ["mutants/deaths", "mutants/scenes", "mutants/difference", *WORLD],
    "gaps": ["mutants/gaps", *WORLD],
    "meetings": ["mutants/meetings", *WORLD],
    "structures": ["mutants/structures", *WORLD],
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
        for made in ("judged", "judges", "installed"):
            (folder / made).mkdir()
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda source: shop.compile(source, "judged", JUDGED), shop.core()))
            list(pool.map(lambda source: shop.compile(source, "judges", TESTS), shop.tests()))
        shop.link()
        return shop

    def copy(self, folder: Path) -> Workshop:
        shutil.copytree(self.folder, folder)
        return Workshop(folder, self.programs)

    def core(self) -> list[str]:
        files = [path for part in CORE for path in sorted((self.folder / part).glob("*.c"))]
        return [str(path.relative_to(self.folder)) for path in files]

    def parts(self, program: str) -> list[str]:
        """The test sources of a program."""
        found = [self.folder.glob(f"tests/{name}.c") for name in PROGRAMS[program]]
        return sorted(str(path.relative_to(self.folder)) for paths in found for path in paths)

    def tests(self) -> list[str]:
        return sorted({part for program in self.programs for part in self.parts(program)})

    def compile(self, source: str, into: str, flags: list[str]) -> Path:
        made = self.folder / into / (Path(source).stem + ".o")
        fresh = made.with_suffix(f".{get_ident()}")  # two workers may make the same one
        done = run(["gcc", *flags, "-c", source, "-o", str(fresh)], self.folder, 120)
        if done.rc != 0:
            raise BuildError(done.output)
        return fresh.rename(made)

    def link(self) -> None:
        core = [str(path) for path in sorted((self.folder / "judged").glob("*.o"))]
        for program in self.programs:
            own = [f"judges/{Path(part).stem}.o" for part in self.parts(program)]
            command = ["gcc", "-pthread", "-o", program, *own, *core, "-lrt"]
            done = run(command, self.folder, 120)
            if done.rc != 0:
                raise BuildError(done.output)

    def affected(self, mutant: Mutant) -> list[str]:
        """The core's sources that have to be compiled again."""
        return [mutant.path] if mutant.path.endswith(".c") else self.core()

    def change(self, mutant: Mutant, text: str) -> None:
        (self.folder / mutant.path).write_text(text, encoding="utf-8")

    def build(self, mutant: Mutant) -> None:
        """Every program with the mutant in it."""
        for source in self.affected(mutant):
            self.compile(source, "judged", JUDGED)
        if mutant.path.endswith(".h"):
            for source in self.tests():
                self.compile(source, "judges", TESTS)
        self.link()

    def is_same_when_installed(self, mutant: Mutant, first: Workshop) -> bool:
        """Does the optimising compiler make the same code of it?"""
        for source in self.affected(mutant):
            was = first.folder / "installed" / (Path(source).stem + ".o")
            if not was.exists():
                first.compile(source, "installed", INSTALLED)
            made = self.compile(source, "installed", INSTALLED)
            if made.read_bytes() != was.read_bytes():
                return False
        return True

    def restore(self, mutant: Mutant, first: Workshop) -> None:
        shutil.copy2(first.folder / mutant.path, self.folder / mutant.path)
        objects = [f"judged/{Path(source).stem}.o" for source in self.affected(mutant)]
        if mutant.path.endswith(".h"):
            objects += [f"judges/{Path(source).stem}.o" for source in self.tests()]
        for name in objects:
            shutil.copy2(first.folder / name, self.folder / name)
