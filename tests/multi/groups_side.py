"""Run as a program: a worker that publishes, evicts and matches pages of a model's groups.

    python groups_side.py NAME FOLDER NUMBER

A page's bytes are the key that it was published under, in a file beside the index. What a match
has pinned is read when it is had, and again before it is released.
"""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from support.keys import prompt

from lightcache import OutOfPages, PageIndex
from lightcache.groups import Group, GroupMatch, GroupSet, Rule

RULES = {"prefix": Rule.prefix(), "window": Rule.window(9), "point": Rule.point()}
PAGE_TOKENS = 4
PAGES = 40
PROMPTS = [prompt(number, 12) for number in range(6)]
WORKERS = 4
COUNTS = ("turns", "positions", "pages")


def board(folder: Path) -> np.memmap:
    """What each worker has counted."""
    return np.memmap(folder / "board", np.uint64, "r+", shape=(WORKERS, len(COUNTS)))


def stamps(folder: Path, group: str) -> np.memmap:
    """Two words a page."""
    return np.memmap(folder / group, np.uint64, "r+", shape=(PAGES, 2))


class Worker:
    """One process."""

    def __init__(self, name: str, folder: Path, number: int) -> None:
        self.random = random.Random()
        self.indexes = {group: PageIndex.attach(f"{name}-{group}") for group in RULES}
        self.stamps = {group: stamps(folder, group) for group in RULES}
        self.set = GroupSet(
            [Group(group, rule, self.indexes[group]) for group, rule in RULES.items()],
            page_tokens=PAGE_TOKENS,
        )
        self.counts = board(folder)[number]

    def publish(self) -> None:
        """The pages of a prompt that a request would have: all, the last ones, one."""
        keys = self.random.choice(PROMPTS)
        end = self.random.randint(1, len(keys))
        for group, rule in RULES.items():
            begin = rule.first(end, PAGE_TOKENS)
            start = 0 if group == "prefix" else begin
            with self.indexes[group].reserve(keys[start:end]) as new:
                self.stamps[group][new.pages] = keys[start:end][new.new]
                new.publish()

    def evict(self) -> None:
        self.random.choice(list(self.indexes.values())).evict(self.random.randint(1, 8))

    def match(self) -> None:
        keys = self.random.choice(PROMPTS)
        step = self.random.choice([1, 1, 2, 3])
        with self.set.match(keys, step=step) as found:
            self.verify(found, keys)
            if self.random.random() < 0.3:
                self.evict()
            self.verify(found, keys)
        self.counts[1] += found.pages > 0

    def verify(self, found: GroupMatch, keys: np.ndarray) -> None:
        """Every page that the position needs has the bytes of its key."""
        for (group, rule), lease, first in zip(
            RULES.items(), found.leases, found.first, strict=True
        ):
            assert first == rule.first(found.pages, PAGE_TOKENS), group
            assert len(lease) == found.pages - first, group
            assert np.array_equal(self.stamps[group][lease.pages], keys[first : found.pages]), group
            self.counts[2] += len(lease)

    def run(self) -> None:
        while True:
            with contextlib.suppress(OutOfPages):  # others pin them
                self.random.choice([self.publish, self.match, self.match, self.evict])()
            self.counts[0] += 1


if __name__ == "__main__":
    Worker(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])).run()
