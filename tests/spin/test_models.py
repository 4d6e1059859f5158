"""The models of the protocols without a lock, explored to the last state by spin.

As the source stands, each model must hold. With any one order weakened that a model relies on, it
must fail: else the model proves nothing about that order. What stands in the source decides which
orders a model is built with, so a fence that is removed from the C core fails the model's own test.

Without spin the models are skipped, but where CI is `true` they fail.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from spin.source_orders import ACQ_REL, RELAXED, SEQ_CST, Switch, places, switches, value
from support.packages import need

# A minute at most where nothing else runs; the larger ones take longer where much does.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
MEMORY = 1800  # MiB that an exploration may use
DEPTH = 1_000_000
FAST = "-O0"  # an error is found early, so compiling is what takes the time
SOURCE = places()

# model, how it is built. Each of these must hold.
VARIANTS = [
    ("pin_evict", ""),
    ("pin_evict", "THREADS"),
    ("pin_evict", "DOOM"),
    ("pin_evict", "GIVEN"),
    ("publish", ""),
    ("dict", ""),
    ("dict", "GUESS"),
    ("event", ""),
    ("event", "API"),
    ("event", "DEATH"),
    ("lock", ""),
    ("lock", "DEATH"),
    ("lock", "APART"),
    ("log", ""),
    ("life", ""),
    ("life", "REAPER"),
    ("join", ""),
]
# model, how it is built, and what of the protocol (not an order) that takes away. Each must fail.
BROKEN = [
    ("pin_evict", "THREADS", "NO_MUTEX"),
    ("pin_evict", "GIVEN", "UNSEEN"),
    ("dict", "", "TAIL"),
    ("dict", "", "NO_BUCKET"),
    ("dict", "", "LINK_ODD"),
    ("event", "API", "LOADED_TWICE"),
    ("event", "DEATH", "UNBOUNDED"),
    ("lock", "", "BIT_FORGOTTEN"),
    ("lock", "", "NO_SEQUENCE"),
    ("lock", "", "NO_TAG"),
    ("lock", "", "STARVED_ALONE"),
    ("lock", "DEATH", "UNBOUNDED"),
    ("lock", "DEATH", "NOT_UNDONE"),
    ("lock", "APART", "NO_TAG"),
    ("lock", "APART", "LED_EARLY"),
    ("lock", "APART", "LED_LATE"),
    ("log", "", "BEGIN_AT_FIRST"),
    ("log", "", "LIMIT_HIGH"),
    ("life", "", "UNLOGGED_WORD"),
    ("life", "", "UNLOGGED_LINK"),
    ("life", "", "UNLOGGED_LIST"),
    ("life", "", "NOT_UNDONE"),
    ("life", "", "BLIND_EVICT"),
    ("life", "", "BLIND_DOOMED"),
    ("life", "", "NO_QUARANTINE"),
    ("life", "", "NO_FINISH"),
    ("life", "", "LISTED_LATE"),
    ("life", "", "FREED_EARLY"),
    ("life", "REAPER", "NO_BYTE"),
    ("life", "REAPER", "READY_LOGGED"),
    ("join", "", "OPEN_COUNTS"),
    ("join", "", "PINNED_LATE"),
    ("join", "", "OPEN_IS_OTHERS"),
    ("join", "", "CLEARED_EARLY"),
    ("join", "", "NO_DEADLINE"),
    ("join", "", "ABANDON_UNPINS"),
    ("join", "", "NOT_UNDONE"),
]


@dataclass(frozen=True)
class Explored:
    """What spin found."""

    errors: int
    text: str


def model(name: str) -> Path:
    """A model's file."""
    return HERE / f"{name}.pml"


def macros(name: str, **changed: int) -> list[str]:
    """What decides a model's orders: the source, but for what is changed."""
    asked = [switch for switch in switches(model(name)) if switch.kind != "together"]
    wanted = {switch.macro: value(switch, SOURCE) for switch in asked}
    return [f"-D{macro}={number}" for macro, number in (wanted | changed).items()]


def explore(
    name: str, variants: list[str], flags: list[str], folder: Path, optimize: str = "-O1"
) -> Explored:
    """Every state of a model, or those up to the first error."""
    need("spin")
    defines = [f"-D{variant}" for variant in variants if variant] + flags
    compiler = ["cc", optimize, "-w", f"-DMEMLIM={MEMORY}", "-DSAFETY", "-o", "pan", "pan.c"]
    if name == "life":  # 300 MiB are enough for its states as they are, in two thirds of the time
        compiler.append("-DNOCOMP")
    for command in (["spin", "-a", *defines, str(model(name))], compiler):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    run = ["./pan", f"-m{DEPTH}", "-w22"]
    text = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert "Search not completed" not in text or "errors: 1" in text, text
    assert "max search depth too small" not in text, text
    found = re.search(r"errors: (\d+)", text)
    assert found, text
    trail = (folder / f"{name}.pml.trail").exists()
    assert trail == (found[1] != "0"), text
    return Explored(int(found[1]), text)


def kinds(*wanted: str) -> list[object]:
    """Each switch of these kinds, with its model."""
    return [
        pytest.param(path.stem, switch, id=f"{path.stem}-{switch.macro}")
        for path in sorted(HERE.glob("*.pml"))
        for switch in switches(path)
        if switch.kind in wanted
    ]


def weaker(name: str, switch: Switch) -> dict[str, int]:
    """The macros that a weakening changes: itself; or of several that stand in for each other all,
    by what they have in common: without seq_cst, or, if they do not have that, relaxed."""
    if switch.kind != "together":
        return {switch.macro: RELAXED}
    values = {one.macro: value(one, SOURCE) for one in switches(model(name))}
    return {macro: ACQ_REL if values[macro] == SEQ_CST else RELAXED for macro in switch.names}


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_as_the_source_stands_a_model_holds(name: str, variant: str, tmp_path: Path) -> None:
    # Of the largest model the program is so long that optimizing it takes longer than running it.
    optimize = FAST if name == "life" else "-O1"
    explored = explore(name, [variant], macros(name), tmp_path, optimize)
    assert explored.errors == 0, explored.text


@pytest.mark.parametrize(("name", "switch"), kinds("order", "sequence", "together"))
def test_weakened_in_one_order_a_model_fails(name: str, switch: Switch, tmp_path: Path) -> None:
    flags = macros(name, **weaker(name, switch))
    explored = explore(name, [switch.variant], flags, tmp_path, FAST)
    assert explored.errors, explored.text


@pytest.mark.parametrize(("name", "variant", "without"), BROKEN)
def test_without_a_part_of_the_protocol_a_model_fails(
    name: str, variant: str, without: str, tmp_path: Path
) -> None:
    explored = explore(name, [variant, without], macros(name), tmp_path, FAST)
    assert explored.errors, explored.text


@pytest.mark.parametrize(("name", "switch"), kinds("spare"))
def test_a_spare_order_is_not_relied_on(name: str, switch: Switch, tmp_path: Path) -> None:
    flags = macros(name, **weaker(name, switch))
    explored = explore(name, [switch.variant], flags, tmp_path)
    assert explored.errors == 0, explored.text


def test_markers_and_models_name_the_same_orders() -> None:
    asked = [one for path in HERE.glob("*.pml") for one in switches(path)]
    modelled = {name for one in asked if one.kind != "together" for name in one.names}
    assert modelled == set(SOURCE)
