"""Run as a program: a client of a cache that does what it is told, and may be stopped on the way.

    stopped_side.py NAME ROLE HOOK GATE

Attaches with the core that has pause points, says "ready", and then obeys lines on stdin, each
answered by a line of JSON: an operation of `Side` and its numbers. After `gate POINT OCCURRENCE` it
stands at that passing of that point until GATE is opened.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from multi import pausing
from multi.stress_worker import SECRET, SLICES, stamps, words_of

from lightcache import Cache, LockTimeout, page_index
from lightcache._core import reap_unjoined
from lightcache.shm import Segment
from lightcache.shm.layout import SegmentKind

LENGTH = 4  # pages of a prompt


def keys(prompt: int) -> Any:
    """The keys of a prompt, all in one chain of a small index."""
    made = np.random.default_rng(prompt).integers(0, 1 << 64, (LENGTH, 2), np.uint64)
    made[:, 0] -= made[:, 0] % np.uint64(1 << 16)
    return made


def sound(cache: Cache, pages: Any, prompt: int) -> bool:
    """Whether pages hold the beginning of a prompt, as `Side.reserve` writes it."""
    wanted = keys(prompt)[: len(pages)]
    serials = np.full((len(pages), SLICES), prompt, np.uint64)
    return bool((words_of(cache)[pages] == stamps(wanted, serials)).all())


def write(cache: Cache, pages: Any, prompt: int) -> None:
    """Give the pages of a prompt their contents."""
    words_of(cache)[pages] = stamps(keys(prompt), np.full((len(pages), SLICES), prompt, np.uint64))


class Side:
    """What can be asked for."""

    def __init__(self, name: str, role: str, hook: str, gate: str) -> None:
        """Attach."""
        self.hook, self.at = Path(hook), np.memmap(gate, np.uint32, "r+")
        self.cache = Cache.attach(name, role=role, secret=SECRET, lock_timeout=600.0)
        self.held: list[Any] = []

    def gate(self, point: int, occurrence: int) -> Any:
        """Stand there from now on."""
        pausing.install_gate(self.hook, self.at, point, occurrence)

    def reserve(self, prompt: int) -> Any:
        """Reserve a prompt, write it, publish it; it stays pinned."""
        made = self.cache.reserve(keys(prompt))
        self.held.append(made)
        write(self.cache, made.pages, prompt)
        return {"pages": made.pages.tolist(), "ready": made.publish()}

    def give_up(self, prompt: int, milliseconds: int) -> Any:
        """Reserve, but not for ever: what the error says."""
        try:
            self.held.append(self.cache.reserve(keys(prompt), timeout=milliseconds / 1e3))
        except LockTimeout as error:
            return str(error)
        return None

    def match(self, prompt: int) -> Any:
        """Match a prompt and read it; it stays pinned."""
        made = self.cache.match(keys(prompt))
        self.held.append(made)
        return {"pages": made.pages.tolist(), "sound": sound(self.cache, made.pages, prompt)}

    def reap(self) -> Any:
        """Take back from the dead: how many there were."""
        return self.cache.reap()

    def reap_as_guest(self) -> None:
        """The same as a process that wants to join and finds all slots taken."""
        config = {"kind": SegmentKind.INDEX, "layout_facts": page_index._facts()}
        with Segment.attach(self.cache.name, **config) as segment:
            reap_unjoined(segment, self.cache.pages)

    def release(self) -> None:
        """Let go of everything."""
        while self.held:
            self.held.pop().release()


def main(arguments: list[str]) -> None:
    """See above."""
    pausing.use()
    side = Side(*arguments)
    print("ready", flush=True)
    for line in sys.stdin:
        operation, *numbers = line.split()
        print(json.dumps(getattr(side, operation)(*map(int, numbers))), flush=True)
    side.release()
    side.cache.close()


if __name__ == "__main__":
    main(sys.argv[1:])
