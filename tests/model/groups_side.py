"""Run as a program: it makes clients of a model's groups that hold something, and kills them.

    python groups_side.py

Each line of its input is a client: the `Shape` and what it does, as JSON. The answer says what the
client holds, [index, page] for each pin; the next line of the input kills it. Forked, so that a
client costs milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from support.keys import keys

from lightcache import PageIndex
from lightcache.groups import Group, GroupMatch, GroupSet, Rule
from lightcache.runs import PLAIN, Run


class Layers(NamedTuple):
    """One group: its rule, and where its pages are."""

    rule: str
    tokens: int
    index: int
    tenant: str
    parts: int = 0
    """Of a page; 0: it is one page of the index, with its own key."""


class Shape(NamedTuple):
    """A model's groups, and the names of their indexes."""

    page_tokens: int
    groups: list[Layers]
    names: list[str]

    def run(self, number: int) -> Run:
        """How the pages of a group lie in its index. Plain groups share what has the same key."""
        parts = self.groups[number].parts
        return Run(number + 1, parts) if parts else PLAIN

    def join(self, indexes: list[PageIndex]) -> GroupSet:
        groups = []
        for number, (rule, tokens, index, tenant, _) in enumerate(self.groups):
            kind = getattr(Rule, rule)
            made = kind(tokens) if rule in ("window", "chunk") else kind()
            space = indexes[index].namespace("", tenant)
            groups.append(Group(str(number), made, indexes[index], space, self.run(number)))
        return GroupSet(groups, page_tokens=self.page_tokens)


def pins_of(shape: Shape, found: GroupMatch) -> list[tuple[int, int]]:
    return [
        (group.index, page)
        for group, lease in zip(shape.groups, found.leases, strict=True)
        for page in lease.pages.tolist()
    ]


def hold(shape: Shape, path: list[int], step: int, number: int, start: int) -> None:
    """Match, or, where `step` is 0, reserve pages of one group; then wait to be killed."""
    indexes = [PageIndex.attach(name) for name in shape.names]
    if step:
        held: Any = shape.join(indexes).match(keys(*path), step=step)
        pins = pins_of(shape, held)
    else:
        rule, _, index, tenant, _ = shape.groups[number]
        run = shape.run(number)
        held = indexes[index].reserve(
            run.keys(keys(*path)),
            start * run.parts,
            independent=rule != "prefix",
            run=run,
            namespace=indexes[index].namespace("", tenant),
        )
        pages = [*held.pages.tolist(), *held.present_pages.tolist()]
        pins = [(index, page) for page in pages]
    print(json.dumps(pins), flush=True)
    signal.pause()


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        (page_tokens, groups, names), *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                hold(Shape(page_tokens, [Layers(*one) for one in groups], names), *arguments)
            finally:
                traceback.print_exc()
                print("null", flush=True)
                os._exit(1)
        sys.stdin.readline()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("killed", flush=True)


if __name__ == "__main__":
    main()
