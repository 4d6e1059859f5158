"""Fuzzing of segments: damage of every kind, at rest and while others work, and then every call.

    python tests/hostile/fuzz.py [--cases 1000000] [--first SEED] [--workers N] [--sanitize]

A plain script: gcc and the standard library are all it takes; where lightcache is installed, also
some files are opened through Python (`python_side.py`). It compiles `hostile.c` with the
core's own sources, lets one process for each processor work through its share of the seeds, and
prints what was damaged, who noticed, what came back, and what was found. Case N alone:
`--first N --cases 1`. Exit status: 0 nothing was found, 1 something was.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NATIVES = [ROOT / "shm" / "native", ROOT / "lightcache" / "native"]
ENTRY = ROOT / "tests" / "native" / "entry.h"
FLAGS = ["-std=c11", "-g", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
COLUMNS = [
    "cases",
    "idle",
    "refused",
    "named",
    "noticed",
    "unseen",
    "misled",
    "mended",
    "declined",
    "lost",
]
SHARE = 5_000  # seeds that one process is given at a time


def build(folder: Path, *, sanitize: bool = False, compiler: str = "cc") -> Path:
    """Compile the harness with the core, optimised as the core is when installed."""
    program = folder / ("hostile-sanitized" if sanitize else "hostile")
    sources = [path for place in [HERE, *NATIVES] for path in sorted(place.glob("*.c"))]
    headers = [path for place in [HERE, *NATIVES] for path in place.glob("*.h")]
    newest = max(path.stat().st_mtime for path in [*sources, *headers, ENTRY])
    if program.exists() and program.stat().st_mtime > newest:
        return program
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *(["-O1", *SANITIZE] if sanitize else ["-O2"])]
    includes = [f"-I{place}" for place in NATIVES]
    command = [compiler, *flags, *includes, "-o", str(program), *map(str, sources), "-lrt"]
    subprocess.run(command, check=True)
    return program


@dataclass
class Sums:
    """The numbers of several runs, added up."""

    totals: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    unmended: Counter[int] = field(default_factory=Counter)
    fields: dict[str, list[int]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    python: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest: tuple[int, str] = (0, "")

    def add(self, text: str) -> None:
        """Take in what `hostile` printed."""
        for line in text.splitlines():
            words = line.split()
            if not words:
                continue
            if words[0] == "FINDING":
                self.findings.append(line)
            elif words[0] == "total":
                for name, number in zip(words[1::2], words[2::2], strict=True):
                    self.totals[name] += int(number)
            elif words[0] == "python":
                self.totals["files"] += int(words[1])
                for name, number in zip(words[2::2], words[3::2], strict=True):
                    self.python[name] += int(number)
            elif words[0] == "code":
                self.codes[int(words[1])] += int(words[2])
            elif words[0] == "unmended":
                self.unmended[int(words[1])] += int(words[2])
            elif words[0] == "slowest":
                self.slowest = max(
                    self.slowest, (int(words[1]), f"{' '.join(words[3:])}, seed {words[2]}")
                )
            elif words[0] == "field":
                numbers = [int(word) for word in words[3:]]
                before = self.fields.setdefault(words[1], [0] * len(COLUMNS))
                self.fields[words[1]] = [a + b for a, b in zip(before, numbers, strict=True)]
                self.roles[words[1]] = words[2]
            else:
                self.findings.append(line)  # a sanitizer's report, a message of the C library


def run(program: Path, arguments: list[str], eviction: str = "") -> tuple[int, str]:
    """One process of the harness: its exit status and what it printed. `eviction`: of its indexes,
    instead of LIGHTCACHE_TEST_EVICTION."""
    done = subprocess.run(
        [str(program), *arguments],
        env=os.environ | ({"LIGHTCACHE_TEST_EVICTION": eviction} if eviction else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 2:
        raise SystemExit(f"{program} did not run:\n{done.stdout}")
    return done.returncode, done.stdout


def shares(verb: list[str], first: int, cases: int, each: int) -> list[list[str]]:
    """Command lines for cases `first` .. `first + cases - 1`, each for some of them."""
    return [
        [*verb, str(at), str(min(each, first + cases - at))]
        for at in range(first, first + cases, each)
    ]


def fuzz(program: Path, first: int, cases: int, workers: int, files: int = 0) -> Sums:
    """Cases `first` .. `first + cases - 1` of the index, a tenth as many of list, dict and ring,
    and so many files that Python opens, on so many processors."""
    sums = Sums()
    commands = [
        *shares([sys.executable, str(HERE / "python_side.py")], first, files, 50),
        *shares([str(program), "seeds"], first, cases, SHARE),
        *shares([str(program), "structures"], first, cases // 10, SHARE),
    ]
    with ThreadPoolExecutor(workers) as pool:
        for status, text in pool.map(lambda c: run(Path(c[0]), c[1:]), commands):
            sums.add(text)
            if status and not sums.findings:
                sums.findings.append(f"exit status {status}: {text[-500:]}")
    return sums


def report(sums: Sums, seconds: float) -> None:
    """The table."""
    print(f"{'field':32} {'role':9}" + "".join(f"{name:>9}" for name in COLUMNS))
    for name, numbers in sums.fields.items():
        print(f"{name:32} {sums.roles[name]:9}" + "".join(f"{n:9}" for n in numbers))
    print("\nresults of operations: ", end="")
    print(", ".join(f"{code or 'success'}: {n}" for code, n in sorted(sums.codes.items())[::-1]))
    if sums.unmended:
        print("broken after a repair, by invariant: ", end="")
        print(", ".join(f"{number}: {n}" for number, n in sorted(sums.unmended.items())))
    if sums.python:
        print("results in Python: ", end="")
        print(", ".join(f"{name}: {n}" for name, n in sorted(sums.python.items())))
    print(f"slowest operation: {sums.slowest[0] / 1e6:.1f} ms ({sums.slowest[1]})")
    totals = sums.totals
    print(
        f"{totals['cases']} cases, {totals['files']} files, {totals['calls']} calls, "
        f"{totals['flips']} flips while others worked, {len(sums.findings)} findings, "
        f"{seconds:.0f} s"
    )
    for line in sums.findings[:100]:
        print(line)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--files", type=int, help="opened by Python, where lightcache is installed")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sanitize", action="store_true", help="address and undefined behaviour")
    parser.add_argument(
        "--build", type=Path, default=Path(tempfile.gettempdir()) / "lightcache-fuzz"
    )
    given = parser.parse_args()
    begun = time.monotonic()
    program = build(given.build, sanitize=given.sanitize, compiler=os.environ.get("CC", "cc"))
    files = given.files
    if files is None:
        files = given.cases // 500 if importlib.util.find_spec("lightcache") else 0
    sums = fuzz(program, given.first, given.cases, given.workers, files)
    report(sums, time.monotonic() - begun)
    return 1 if sums.findings else 0


if __name__ == "__main__":
    sys.exit(main())
