"""Remove or weaken every store, fence and step of recovery in the core, one at a time, and see
whether a test notices.

    python tests/mutants/run.py [--only PATTERN] [--every N] [--jobs N] [--stages NAME...]
                                [--json FILE]
    python tests/mutants/run.py --list [--diff] [--only PATTERN]

Needs gcc and Python 3.10; without spin, what only a model could tell is left open. Everything
happens in a temporary folder. Status 1: there is a survivor that survivors.txt does not name, or
it names one that did not survive.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mutants import models
from mutants.build import HOOKED, ROOT, TSAN, BuildError, Variant, Workshop, run
from mutants.csource import CSource
from mutants.mutate import Mutant, mutants

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Stage:
    """A program of build.py that is asked, and the seconds that it may take."""

    name: str
    seconds: float


# The quickest first. The last is built with ThreadSanitizer.
STAGES = [
    Stage("structures", 20),
    Stage("gaps", 40),
    Stage("core_tests", 120),
    Stage("meetings", 120),
    Stage("deaths", 200),
    Stage("stress", 100),
]
MODELS, NEEDS_SPIN = "models", "needs spin"
NOT_COMPILING, EQUIVALENT, SURVIVED = "not compiling", "equivalent", "survived"
# Orders and fences: most of them make no instruction on x86-64. So first those are asked who look
# at the orders as such, the models and the sanitizer; then whether there is another instruction.
ORDERS = {"relaxed", "no-total-order"}


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the stage that killed it, or why none did."""

    identity: str
    kind: str
    line: int
    end: str
    timed_out: bool
    seconds: float
    said: str


def judge(shop: Workshop, variant: Variant) -> tuple[str, bool, str]:
    """The first stage that fails, whether by its time limit, and the last line that it printed."""
    wanted = shop.of(variant)
    for stage in STAGES:
        if stage.name not in wanted:
            continue
        done = run([f"./{stage.name}"], shop.folder, stage.seconds)
        if done.rc != 0:
            lines = done.output.strip().splitlines() or [""]
            return stage.name, done.rc is None, f"{done.rc}: {lines[-1]}"
    return SURVIVED, False, ""


Ending = tuple[str, bool, str]


def ask_models(shop: Workshop) -> Ending:
    found = models.verdict(shop.folder, shop.folder / "model")
    return NEEDS_SPIN if found is None else MODELS if found else SURVIVED, False, ""


def ask(shop: Workshop, mutant: Mutant, variant: Variant) -> Ending:
    if variant not in shop.variants():
        return SURVIVED, False, ""
    shop.build(mutant, variant)
    return judge(shop, variant)


def end_of(shop: Workshop, first: Workshop, mutant: Mutant) -> Ending:
    """What becomes of the mutant that the workshop's sources hold."""

    def same() -> Ending:
        alike = shop.is_same_when_installed(mutant, first)
        return EQUIVALENT if alike else SURVIVED, False, ""

    questions: list[Callable[[], Ending]] = [
        lambda: ask(shop, mutant, HOOKED),
        lambda: ask(shop, mutant, TSAN),
        lambda: ask_models(shop),
        same,
    ]
    if mutant.kind in ORDERS or "fence" in mutant.identity:
        questions = [questions[2], questions[1], same, questions[0]]
    open_question = None
    for question in questions:
        ending = question()
        if ending[0] == NEEDS_SPIN:
            open_question = ending
        elif ending[0] != SURVIVED and not (open_question and ending[0] == EQUIVALENT):
            return ending
    return open_question or (SURVIVED, False, "")


def try_one(shop: Workshop, first: Workshop, source: CSource, mutant: Mutant) -> Verdict:
    begun = time.monotonic()
    shop.change(mutant, mutant.apply(source))
    try:
        end, timed_out, said = end_of(shop, first, mutant)
    except BuildError as error:
        end, timed_out, said = NOT_COMPILING, False, str(error)[:500]
    finally:
        shop.restore(mutant, first)
    seconds = round(time.monotonic() - begun, 2)
    return Verdict(mutant.identity, mutant.kind, mutant.line, end, timed_out, seconds, said)


def prepare(stages: list[str], jobs: int, folder: Path) -> Workshop:
    """The workshop without any change, in which every stage passes. Without the sanitizer's library
    its stage is left out, and said to be."""
    try:
        first = Workshop.first(folder / "first", stages, jobs)
    except BuildError as error:
        if "tsan" not in str(error) or "stress" not in stages:
            raise
        print("no ThreadSanitizer here: orders are judged without it")
        rest = [name for name in stages if name != "stress"]
        first = Workshop.first(folder / "plain", rest, jobs)
    for variant in first.variants():
        name, _, said = judge(first, variant)
        if name != SURVIVED:
            raise SystemExit(f"{name} fails without any change: {said}")
    return first


def try_all(
    chosen: list[tuple[CSource, Mutant]], stages: list[str], jobs: int, folder: Path
) -> list[Verdict]:
    first = prepare(stages, jobs, folder)
    shops: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
    for number in range(jobs):
        shops.put(first.copy(folder / f"shop{number}"))

    def one(pair: tuple[CSource, Mutant]) -> Verdict:
        shop = shops.get()
        try:
            verdict = try_one(shop, first, *pair)
        finally:
            shops.put(shop)
        print(f"{verdict.end:14} {verdict.seconds:6.1f} s  {verdict.identity}", flush=True)
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, chosen))


# ------------------------------------------------------------------ the table


def table(verdicts: Iterable[Verdict]) -> str:
    verdicts = list(verdicts)
    ends = [stage.name for stage in STAGES]
    ends += [MODELS, NEEDS_SPIN, EQUIVALENT, NOT_COMPILING, SURVIVED]
    counts = Counter((v.kind, v.end) for v in verdicts)
    kinds = sorted({v.kind for v in verdicts})
    lines = ["".join(f"{word:>16}" for word in ["", "all", *ends])]
    for kind in [*kinds, "all"]:
        row = [sum(counts[k, end] for k in kinds if kind in (k, "all")) for end in ends]
        lines.append("".join(f"{word:>16}" for word in [kind, sum(row), *row]))
    lines.append(f"{sum(v.timed_out for v in verdicts)} of these were killed by their time limit")
    return "\n".join(lines)


def accepted() -> dict[str, str]:
    """survivors.txt: an identity and, behind blanks, why it may survive."""
    lines = (HERE / "survivors.txt").read_text(encoding="utf-8").splitlines()
    entries = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    return {entry[0]: entry[1] if len(entry) > 1 else "" for entry in entries}


def compare(verdicts: list[Verdict], known: set[str]) -> list[str]:
    """What is not as survivors.txt says."""
    listed, found = accepted(), []
    for verdict in verdicts:
        if verdict.end == SURVIVED and verdict.identity not in listed:
            found.append(f"survived and is not listed: {verdict.identity} (line {verdict.line})")
        if verdict.end != SURVIVED and verdict.identity in listed:
            found.append(f"listed, but {verdict.end}: {verdict.identity}")
    found += [f"listed, but there is no such mutant: {name}" for name in set(listed) - known]
    found += [f"listed without a reason: {name}" for name, reason in listed.items() if not reason]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only print the identities")
    parser.add_argument("--diff", action="store_true", help="with --list: what is changed")
    parser.add_argument("--only", default="", help="identities that this expression matches")
    parser.add_argument("--every", type=int, default=1, help="only each N-th: a sample")
    parser.add_argument("--stages", nargs="*", default=[stage.name for stage in STAGES])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write all verdicts there")
    given = parser.parse_args()
    everything = list(mutants(ROOT))
    chosen = [pair for pair in everything if re.search(given.only, pair[1].identity)]
    chosen = chosen[:: given.every]
    if given.list:
        for source, mutant in chosen:
            print(mutant.diff(source) if given.diff else mutant.identity)
        return 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        verdicts = try_all(chosen, given.stages, given.jobs, Path(folder))
    print(table(verdicts))
    print(f"{len(verdicts)} mutants in {time.monotonic() - begun:.0f} s, {given.jobs} at a time")
    if given.json:
        given.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    found = compare(verdicts, {mutant.identity for _, mutant in everything})
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
