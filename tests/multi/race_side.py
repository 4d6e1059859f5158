"""Run as a program: one side of a race, with the core that has pause points.

    race_side.py NAME HOOK GATE POINT OCCURRENCE OPERATION SEED

Attaches, prepares what OPERATION needs, says "ready", and at a line on stdin begins; stands at the
OCCURRENCE-th passing of POINT (0: nowhere) until GATE is opened. Says what it got as JSON, then
holds it until stdin ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from multi import pausing

from lightcache import Abandoned, PageIndex

N = 3  # keys of the run that both sides care for


def keys(seed: int, n: int = N) -> Any:
    """A run of keys, all in one chain."""
    made = np.random.default_rng(seed).integers(0, 1 << 64, (n, 2), np.uint64)
    made[:, 0] -= made[:, 0] % np.uint64(1 << 16)
    return made


def prepare(index: PageIndex, operation: str, seed: int) -> Any:
    """What is done before the race."""
    if operation in ("publish", "abandon"):
        return index.reserve(keys(seed))
    return None


def perform(index: PageIndex, operation: str, seed: int, made: Any) -> Any:
    """The operation; what we hold afterwards is kept alive by the caller."""
    if operation == "match":
        made = index.match(keys(seed))
        return made, {"pages": made.pages.tolist()}
    if operation == "peek":
        return None, {"found": index.peek(keys(seed))}
    if operation == "evict":
        return None, {"evicted": index.evict(N)}
    if operation == "reserve":  # in a full index: takes the pages of others
        made = index.reserve(keys(seed))
        return made, {"pages": made.pages.tolist()}
    if operation == "publish":
        try:
            return made, {"ready": made.publish()}
        except Abandoned:
            return made, {"ready": False}
    if operation == "abandon":
        pages = made.pages.tolist()
        made.abandon()
        return None, {"pages": pages}
    assert operation == "clear"
    index.clear()
    return None, {}


def main(arguments: list[str]) -> None:
    """See above."""
    name, hook, gate_path, point, occurrence, operation, seed = arguments
    pausing.use()
    gate = np.memmap(gate_path, np.uint32, "r+")
    with PageIndex.attach(name, role=operation) as index:
        made = prepare(index, operation, int(seed))
        if int(point):
            pausing.install_gate(Path(hook), gate, int(point), int(occurrence))
        print("ready", flush=True)
        sys.stdin.readline()
        made, got = perform(index, operation, int(seed), made)
        print(json.dumps(got), flush=True)
        sys.stdin.read()
        if made is not None:
            made.release()


if __name__ == "__main__":
    main(sys.argv[1:])
