"""Just enough of a C reader to rewrite one expression: comments and strings blanked, parentheses
matched, calls, conditions and functions found. Offsets are those of the text as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

OPEN, CLOSE = "([{", ")]}"
NOISE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Call:
    """`name(args)` at [start, end) of the text; `opened` is the place of its parenthesis."""

    name: str
    start: int
    opened: int
    end: int
    args: tuple[str, ...]


@dataclass(frozen=True)
class Condition:
    """What stands in the parentheses of an `if` or a `while`, at [start, end)."""

    keyword: str
    start: int
    end: int


class CSource:
    """One file of the core. `path` is relative to the root of the clone."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        # Of the same length, so that offsets agree; line ends stay.
        self.bare = NOISE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)

    @classmethod
    def read(cls, root: Path, path: str) -> CSource:
        return cls(path, (root / path).read_text(encoding="utf-8"))

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def match(self, opened: int) -> int:
        """The offset behind the bracket that closes the one at `opened`."""
        depth = 0
        for at in range(opened, len(self.bare)):
            depth += (self.bare[at] in OPEN) - (self.bare[at] in CLOSE)
            if depth == 0:
                return at + 1
        raise ValueError(f"{self.path}:{self.line(opened)}: bracket is never closed")

    def split(self, start: int, end: int, separators: tuple[str, ...]) -> list[tuple[int, int]]:
        """The parts of [start, end) between separators that stand in no bracket."""
        parts, depth, begin, at = [], 0, start, start
        while at < end:
            depth += (self.bare[at] in OPEN) - (self.bare[at] in CLOSE)
            found = next((s for s in separators if depth == 0 and self.bare.startswith(s, at)), "")
            if found:
                parts.append((begin, at))
                begin = at + len(found)
            at += len(found) or 1
        return [*parts, (begin, end)]

    def strip(self, start: int, end: int) -> tuple[int, int]:
        """[start, end) without the blanks (and comments) at its ends."""
        while start < end and self.bare[start] in " \n\\":
            start += 1
        while end > start and self.bare[end - 1] in " \n\\":
            end -= 1
        return start, end

    def calls(self) -> Iterator[Call]:
        """Everything of the form `name(...)` inside a function or a macro's body."""
        for word in WORD.finditer(self.bare):
            opened = word.end()
            if not self.bare.startswith("(", opened) or not self.function(word.start()):
                continue
            end = self.match(opened)
            parts = [self.strip(*part) for part in self.split(opened + 1, end - 1, (",",))]
            args = tuple(self.text[a:b] for a, b in parts)
            yield Call(word.group(), word.start(), opened, end, args)

    def conditions(self) -> Iterator[Condition]:
        for word in re.finditer(r"\b(if|while) \(", self.bare):
            if word.start() and self.bare[self.bare.rfind("\n", 0, word.start()) + 1] == "#":
                continue
            if self.function(word.start()):
                opened = word.end() - 1
                yield Condition(word.group(1), opened + 1, self.match(opened) - 1)

    def is_statement(self, call: Call) -> bool:
        """Does the call stand for itself, so that nothing uses what it returns?"""
        return self.ends_statement(call) and self.begins_statement(call.start)

    def ends_statement(self, call: Call) -> bool:
        return self.bare[call.end :].lstrip(" \n\\").startswith(";")

    def begins_statement(self, at: int) -> bool:
        before = self.bare[:at].rstrip(" \n\\")
        if before.endswith((";", "{", "}", "else", "do")):
            return True
        if before.endswith(":"):  # a label, or what stands behind a question mark
            return "?" not in re.split(r"[;{}]", before)[-1]
        if not before.endswith(")"):
            return False
        return bool(re.search(r"\b(if|while|for) $", self.bare[: self.opening(len(before) - 1)]))

    def opening(self, closed: int) -> int:
        """The offset of the bracket that the one at `closed` closes."""
        depth = 0
        for at in range(closed, -1, -1):
            depth += (self.bare[at] in CLOSE) - (self.bare[at] in OPEN)
            if depth == 0:
                return at
        raise ValueError(f"{self.path}:{self.line(closed)}: bracket was never opened")

    def statement_before(self, at: int) -> tuple[int, int] | None:
        """The simple statement (`...;` in the same block) that ends before `at`."""
        end = len(self.bare[:at].rstrip())
        if end == 0 or self.bare[end - 1] != ";":
            return None
        depth, start = 0, end - 1
        while start > 0:
            symbol = self.bare[start - 1]
            depth += (symbol in CLOSE) - (symbol in OPEN)
            if depth < 0 or (depth == 0 and symbol in ";{}"):
                break
            if depth == 1 and symbol == "}":
                return None
            start -= 1
        start, end = self.strip(start, end)
        return (start, end) if end - start > 1 else None

    @cached_property
    def functions(self) -> list[tuple[int, int, str]]:
        """(start, end, name) of every function's and function-like macro's body."""
        found = []
        macro = r"^#define (\w+)\([^)\n]*\)((?:.*\\\n)*.*)$"
        for m in re.finditer(macro, self.bare, re.M):
            found.append((m.start(2), m.end(2), m.group(1)))
        taken = [(start, end) for start, end, _ in found]
        head = r"^(?![# ])[^;{}()\n=]*?\b(\w+)\((?:[^(){};]|\([^(){};]*\))*\) \{"
        for m in re.finditer(head, self.bare, re.M):
            if not any(start <= m.start() < end for start, end in taken):
                opened = m.end() - 1
                found.append((opened, self.match(opened), m.group(1)))
        return sorted(found)

    def function(self, at: int) -> str:
        """The function (or macro) whose body `at` lies in, or ""."""
        return next((name for start, end, name in self.functions if start < at < end), "")
