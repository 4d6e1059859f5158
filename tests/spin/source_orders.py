"""Which memory order stands where, read from the C source, and what the models ask to know.

A marker ends the line on which a statement of the core ends whose order a model relies on:

    atomic_thread_fence(memory_order_seq_cst); /* order: pin-fence */

A model says in its first comment which of its macros come from which markers:

    order PIN_FENCE: pin-fence pin-present-fence    the weakest of them
    order DOOMED_FENCE (DOOM): doomed-fence         needed when the model is built with -DDOOM
    spare CONFIRM_GEN_ORDER: confirm-gen            it holds without, too
    sequence A_FIRST: a b                           1 if a stands above b, else 0
    together SHARDS: SHARD_DONE SHARD_FENCE         each may be weaker, not all of these macros
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELAXED, ACQUIRE, RELEASE, ACQ_REL, SEQ_CST = 0, 1, 2, 3, 7  # bits, see weak.pml
ORDERS = {
    "relaxed": RELAXED,
    "acquire": ACQUIRE,
    "release": RELEASE,
    "acq_rel": ACQ_REL,
    "seq_cst": SEQ_CST,
}

_MARKER = re.compile(r"/\* order: ([a-z0-9-]+) \*/\s*$")
_COMMENT = re.compile(r"/\*.*?\*/|//.*")
# memory_order_X as an argument (of a compare-and-swap the first counts: what success has), or a
# function of lc_base.h that says its order in its name.
_NAMED = re.compile(
    r"(?:memory_order|lc_load|lc_store|lc_fence)_(acquire|release|acq_rel|seq_cst|relaxed)"
)
_DEFAULT = re.compile(r"\b(?:atomic_(?:fetch_\w+|compare_exchange_\w+)|lc_fence)\s*\(")
_DECLARATION = re.compile(
    r"^ \* (order|spare|sequence|together) ([A-Z_0-9]+)(?: \(([A-Z_]+)\))?: ([A-Za-z0-9_ -]+)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Place:
    """Where a marker stands, and the order that its statement has."""

    file: Path
    line: int
    order: int


@dataclass(frozen=True)
class Switch:
    """A macro of a model that the source decides."""

    kind: str  # order, spare, sequence or together
    macro: str
    variant: str  # the model proves it when built with this; empty: when built plainly
    names: tuple[str, ...]  # of markers; together: of macros


def _statement(lines: list[str], at: int) -> str:
    """The statement that ends on line `at`, without comments."""
    text = _COMMENT.sub("", lines[at])
    while at > 0 and text.strip():
        above = _COMMENT.sub("", lines[at - 1]).rstrip()
        if not above or above.endswith((";", "{", "}", "\\", "*/")):
            break
        at -= 1
        text = above + " " + text
    return text


def _order(statement: str) -> int:
    """The order that a statement names; relaxed if it names none, or is gone."""
    named = _NAMED.search(statement)
    if named:
        return ORDERS[named[1]]
    return SEQ_CST if _DEFAULT.search(statement) else RELAXED


def places(root: Path = ROOT) -> dict[str, Place]:
    """Every marker of the core."""
    found: dict[str, Place] = {}
    for folder in ("shm/native", "lightcache/native"):
        for file in sorted((root / folder).glob("*.[ch]")):
            lines = file.read_text().splitlines()
            for at, line in enumerate(lines):
                marker = _MARKER.search(line)
                if marker:
                    assert marker[1] not in found, f"{marker[1]} stands twice"
                    found[marker[1]] = Place(file, at + 1, _order(_statement(lines, at)))
    return found


def switches(model: Path) -> Iterator[Switch]:
    """What a model wants to know."""
    for kind, macro, variant, markers in _DECLARATION.findall(model.read_text()):
        yield Switch(kind, macro, variant, tuple(markers.split()))


def value(switch: Switch, source: dict[str, Place]) -> int:
    """What the source says; what it does not say counts as relaxed, and as the wrong sequence."""
    found = [source[marker] for marker in switch.names if marker in source]
    missing = len(found) < len(switch.names)
    if switch.kind == "sequence":
        lines = [place.line for place in found]
        same_file = len({place.file for place in found}) == 1
        return int(not missing and same_file and lines == sorted(lines))
    weakest = RELAXED if missing else SEQ_CST
    for place in found:
        weakest &= place.order
    return weakest
