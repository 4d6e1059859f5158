"""Reads uncovered.txt: which lines of the core no scene has to step through, and why.

Each line of it excepts something of a function, of a file, or of the whole core:

    FILE FUNCTION | TEXT | CLASS: why
    FILE * | TEXT | CLASS: why
    * * | TEXT | CLASS: why

TEXT is a source line without its spaces; or `~` and a regular expression that the whole of such a
line has to match; or `*`, for all of a function.

The last two cannot hide a change of the segment: they do not except a line that stores to it or
calls what does (STORES), executed or not. Such a line is named as it stands, or its function by
`*` under `elsewhere:` with the test that kills in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = Path(__file__).resolve().parent / "uncovered.txt"
CLASSES = {
    "damage", "argument", "system", "process", "reading", "waiting", "compiler", "size", "race",
    "elsewhere",
}  # fmt: skip
NAMES_TEST = {"race", "elsewhere"}  # a test plays it: the reason says which
BY_CHANCE = {"race", "waiting"}  # covered in some runs and not in others
STORES = re.compile(
    r"lc_store|lc_raise|lc_futex_wake|lc_txn_(set|add|swap|undo)|memset\(base"
    r"|atomic_(store|exchange|compare|fetch)|lc_list_(insert|append|remove)|lc_dict_(insert|unlink)"
    r"|lci_(flag_ended|notify|touch|pin_one|pin_free|unpin_one|queue_(add|put|return|remove)|give_free"
    r"|rebuild\b|evict_(page|settle)|child_(comes|goes))"
    r"|lci_doom|lci_free_doomed|lci_list_p(ush|op)|(?<!\w)(doom|free|end)_(record|ticket|slot)"
)


class BadEntry(Exception):
    """An entry that says nothing, or too much."""


def squeeze(text: str) -> str:
    return "".join(text.split())


@dataclass(frozen=True)
class Entry:
    """One line of uncovered.txt."""

    file: str
    function: str
    text: str
    kind: str
    reason: str

    @property
    def by_chance(self) -> bool:
        return self.kind in BY_CHANCE

    def excepts(self, file: str, function: str, text: str) -> bool:
        if self.file not in ("*", file) or self.function not in ("*", function):
            return False
        if self.text == "*":
            return self.kind == "elsewhere" or not STORES.search(text)
        if self.text.startswith("~"):
            return re.fullmatch(self.text[1:], text) is not None and not STORES.search(text)
        return self.text == text

    def __str__(self) -> str:
        return f"{self.file} {self.function} | {self.text} | {self.kind}: {self.reason}"


def parse(line: str) -> Entry:
    parts = line.split(" | ")
    if len(parts) != 3 or len(parts[0].split(" ")) != 2:
        raise BadEntry(f"not FILE FUNCTION | TEXT | CLASS: why: {line}")
    (file, function), text = parts[0].split(" "), parts[1]
    kind, _, reason = parts[2].partition(": ")
    if kind not in CLASSES or not reason:
        raise BadEntry(f"no class and reason: {line}")
    if text == "*" and "*" in (file, function):
        raise BadEntry(f"excepts more than a function: {line}")
    tests = re.findall(r"\btests/[\w/.]+\w", reason)
    if kind in NAMES_TEST and not tests:
        raise BadEntry(f"names no test: {line}")
    for name in tests:
        if not (ROOT / name).exists():
            raise BadEntry(f"there is no {name}: {line}")
    return Entry(file, function, text, kind, reason)


def read(path: Path = LIST) -> list[Entry]:
    """All entries. Raises BadEntry."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [parse(line) for line in lines if line and not line.startswith("#")]
