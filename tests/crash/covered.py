#!/usr/bin/env python3
"""Which lines and branches of the core are executed under the stepper, and which are not.

    python covered.py                   all scenes; compares with uncovered.txt
    python covered.py --seconds 40      more second victims, killed at other changes
    python covered.py --write FILE      what is neither covered nor listed

Victims are compiled by gcc with counters, which are set to zero where an operation begins. Every
scene is played once, and then again with a victim killed at changes spread over it, whose
survivor's recovery is counted too. Lines of headers count in whatever file they were compiled into.

A line is covered when it was executed and each of its branches was taken, as gcov sees them at
-O0: both ways of `if`, of loops, of `?:`, and of each operand of `&&` and `||`. uncovered.txt
lists, with reasons, what no death can be tried in; uncovered.py says how.

A line that is not covered and not listed is reported, and so is an entry that excepts nothing any
more. Exit status 1: there is one; 2: it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from crash import run, uncovered

FLAGS = ["-O0", "--coverage", "-fprofile-update=atomic"]
# Looking only: check and the calls that say what is there store nothing. Formatting comes before a
# segment is ready (life_cycle.py). Lists, dicts, rings and logs on their own: structures.c.
LEFT_OUT = (
    *("check", "sparse", "supply", "facts", "layout_api", "list_api", "dict_api", "ring_api"),
    *("sync_api", "log_api", "log_look_api", "log_handle"),
)


@dataclass
class Line:
    """One line of the core in one function."""

    count: int = 0
    branches: dict[int, int] = field(default_factory=dict)

    @property
    def missed(self) -> bool:
        return self.count == 0 or not all(self.branches.values())


Place = tuple[str, str, int]  # file, function, line
Lines = dict[Place, Line]


def victim(folder: Path) -> Path:
    """The victim with counters. Its objects, and the counts beside them, stay in `folder`."""
    return run.compile_all("gcc", FLAGS, [*run.VICTIM, *run.SHARED], folder / "counted")


def play(folder: Path, names: list[str], seconds: int, jobs: int) -> list[run.Outcome]:
    """Every scene once, and its second victims."""
    effort = run.Effort(stride=1 << 30, kills=0, seconds=seconds, dumps=1 << 30)
    with ThreadPoolExecutor(jobs) as pool:
        stepper = pool.submit(run.make_stepper, folder)
        program = pool.submit(victim, folder).result()
        tasks = [pool.submit(run.run_scene, stepper.result(), program, n, effort) for n in names]
        return [task.result() for task in tasks]


def reports(folder: Path) -> list[dict[str, object]]:
    """What gcov says of each object of the core."""
    counts = sorted((folder / "counted.objects").glob("*/*.gcda"))
    command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", *map(str, counts)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.strip()]


def of_core(name: str) -> Path | None:
    path = Path(name)
    inside = path.parent in run.NATIVES and not path.stem.startswith(LEFT_OUT)
    return path if inside else None


def gather(folder: Path) -> Lines:
    """Counts of all objects, added up: a header's line counts once."""
    lines: Lines = defaultdict(Line)
    for report in reports(folder):
        for file in report["files"]:  # type: ignore[attr-defined]
            path = of_core(file["file"])
            if path is None:
                continue
            for entry in file["lines"]:
                name = str(path.relative_to(run.ROOT))
                line = lines[name, entry.get("function_name", ""), entry["line_number"]]
                line.count += entry["count"]
                for i, branch in enumerate(entry["branches"]):
                    line.branches[i] = line.branches.get(i, 0) + branch["count"]
    return lines


def text_of(place: Place) -> str:
    name, _, number = place
    return uncovered.squeeze((run.ROOT / name).read_text().splitlines()[number - 1])


@dataclass
class Verdict:
    """What uncovered.txt says of what was missed."""

    unknown: list[Place]  # missed, and not excepted
    excepted: dict[str, int]  # lines, by class
    stale: list[uncovered.Entry]  # entries that except nothing


def compare(lines: Lines, entries: list[uncovered.Entry]) -> Verdict:
    unknown, excepted, used = [], defaultdict(int), set()
    missed = [place for place, line in lines.items() if line.missed]
    for place in sorted(missed, key=lambda place: (place[0], place[2])):
        what = place[0], place[1], text_of(place)
        found = [entry for entry in entries if entry.excepts(*what)]
        used.update(found)
        if found:
            excepted[min(found, key=lambda entry: entry.text.startswith("~")).kind] += 1
        else:
            unknown.append(place)
    stale = [entry for entry in entries if entry not in used and not entry.by_chance]
    return Verdict(unknown, excepted, stale)


def show(lines: Lines, verdict: Verdict) -> None:
    branches = [count for line in lines.values() for count in line.branches.values()]
    hit = sum(line.count > 0 for line in lines.values())
    print(f"lines {hit} of {len(lines)} ({100 * hit / len(lines):.1f} %)")
    taken = sum(count > 0 for count in branches)
    print(f"branches {taken} of {len(branches)} ({100 * taken / len(branches):.1f} %)")
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(verdict.excepted.items()))
    print(f"lines excepted {sum(verdict.excepted.values())}: {kinds}")
    for place in verdict.unknown:
        line = lines[place]
        kind = "never executed" if line.count == 0 else f"branches {[*line.branches.values()]}"
        print(f"{place[0]}:{place[2]} {place[1]}: {kind}: {text_of(place)}")
    for entry in verdict.stale:
        print(f"listed, and covered or gone: {entry}")


def write(path: Path, unknown: list[Place]) -> None:
    said = [f"{place[0]} {place[1]} | {text_of(place)} | ?\n" for place in unknown]
    path.write_text("".join(dict.fromkeys(said)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scenes", nargs="*", help="which (all)")
    parser.add_argument("--seconds", type=int, default=12, help="second victims a scene")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="workers")
    parser.add_argument("--write", type=Path, help="write what is missing to a file")
    given = parser.parse_args()
    names = run.pick(run.scenes(), given.scenes, "scene")
    entries = uncovered.read()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcomes = play(folder, names, given.seconds, given.jobs)
        for outcome in outcomes:
            if not outcome.good:
                print(f"{outcome.scene}: {outcome.text}", *outcome.wrong, sep="\n")
        lines = gather(folder)
    verdict = compare(lines, entries)
    show(lines, verdict)
    if given.write:
        write(given.write, verdict.unknown)
    if not all(outcome.good for outcome in outcomes):
        return 2
    return 1 if verdict.unknown or verdict.stale else 0


if __name__ == "__main__":
    sys.exit(main())
