"""What the weak-memory models say of a mutant: they are built with the orders that stand in the
source, so an order that is weakened there may be one that they need.

Uses the models of tests/spin and the reader of their markers; needs spin.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mutants.build import ROOT, run
from spin.source_orders import Switch, places, switches, value

MEMORY = 1800  # MiB that an exploration may use
DEPTH = 2_000_000
SECONDS = 300


def concerned(changed: Path) -> list[tuple[Path, Switch]]:
    """Which models see another order in the core under `changed` than in the core as it is."""
    before, after = places(ROOT), places(changed)
    return [
        (model, switch)
        for model in sorted((ROOT / "tests" / "spin").glob("*.pml"))
        for switch in switches(model)
        if switch.kind != "spare" and value(switch, before) != value(switch, after)
    ]


def can_explore() -> bool:
    return shutil.which("spin") is not None


def fails(model: Path, variant: str, changed: Path, folder: Path) -> bool:
    """Does this model find a fault, built as `variant` with the orders of the core in `changed`?"""
    orders = places(changed)
    defines = [f"-D{one.macro}={value(one, orders)}" for one in switches(model)]
    if variant:
        defines.append(f"-D{variant}")
    folder.mkdir(exist_ok=True)
    compiler = ["cc", "-O1", "-w", f"-DMEMLIM={MEMORY}", "-DSAFETY", "-o", "pan", "pan.c"]
    for command in (["spin", "-a", *defines, str(model)], compiler):
        done = run(command, folder, SECONDS)
        if done.rc != 0:
            raise RuntimeError(done.output)
    return "errors: 0" not in run(["./pan", f"-m{DEPTH}"], folder, SECONDS).output


def verdict(changed: Path, folder: Path) -> bool | None:
    """True: a model fails; False: none does, or none cares; None: spin would have to say."""
    asked = {(model, switch.variant) for model, switch in concerned(changed)}
    if asked and not can_explore():
        return None
    return any(fails(model, variant, changed, folder) for model, variant in sorted(asked))
