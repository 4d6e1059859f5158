"""Request traces for `policy`: read from a file, or generated.

A file has one JSON object a line: `hash_ids`, the blocks of a prompt from its root on (equal ids
are equal prefixes), and `timestamp` in milliseconds; the public Mooncake traces are so. The
generated patterns are made from a seed, the same in every run. Each is one habit of traffic that
an eviction order can get wrong; sizes are such that caches of 1,000 and 3,000 pages differ.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lightcache.errors import ConfigError

SEED = 1
"""Of the generated patterns."""


class Request(NamedTuple):
    """When a request came, and what it asked for."""

    seconds: float
    blocks: Sequence[Hashable]
    """From the root on. A block is known by its name and all names before it."""
    counted: bool = True
    """Whether its hits count; False: a tenant whose bursts only take room."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their times, their blocks numbered."""

    name: str
    seconds: Sequence[float]
    requests: Sequence[Sequence[int]]
    counted: Sequence[bool]
    """For each request, as `Request.counted`."""
    parents: Sequence[int]
    """Of each block, the block before it; -1: it is a root."""

    @classmethod
    def of(cls, name: str, requests: Iterable[Request]) -> Trace:
        """Number the blocks: one with other blocks before it is another block."""
        ordered = sorted(requests, key=lambda request: request.seconds)
        numbers: dict[tuple[int, Hashable], int] = {}
        parents: list[int] = []
        paths = []
        for request in ordered:
            path, parent = [], -1
            for block in request.blocks:
                number = numbers.setdefault((parent, block), len(parents))
                if number == len(parents):
                    parents.append(parent)
                path.append(number)
                parent = number
            paths.append(path)
        seconds = [each.seconds for each in ordered]
        counted = [each.counted for each in ordered]
        return cls(name, seconds, paths, counted, parents)

    def first(self, requests: int) -> Trace:
        """The same up to its request of this number, of those whose hits count: so it has the same
        requests alone and beside bursts."""
        ends = [i + 1 for i, counted in enumerate(self.counted) if counted]
        cut = slice(ends[requests - 1] if requests < len(ends) else None)
        return replace(
            self,
            seconds=self.seconds[cut],
            requests=self.requests[cut],
            counted=self.counted[cut],
        )


def _lines(path: Path) -> list[tuple[float, list[int]]]:
    try:
        with path.open() as file:
            lines = [json.loads(line) for line in file]
        found = [
            (float(line.get("timestamp", 1000 * i)) / 1000, list(map(int, line["hash_ids"])))
            for i, line in enumerate(lines)
        ]
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no trace with hash_ids: {error}") from error
    if not found:
        raise ConfigError(f"{path} is no trace with hash_ids: it is empty")
    if not all(math.isfinite(seconds) for seconds, _ in found):
        raise ConfigError(f"{path} is no trace with hash_ids: a timestamp is not finite")
    return found


def read(path: Path) -> list[Request]:
    """The requests of a file. Lines without a timestamp are a second apart.

    Raises:
        ConfigError: no such file, an empty one, or lines of another form.
    """
    return [Request(seconds, blocks) for seconds, blocks in _lines(path)]


def hash_ids(path: Path) -> list[list[int]]:
    """The blocks of each request of a file, in its order, by the numbers that it gives them.

    Raises:
        As `read`.
    """
    return [blocks for _, blocks in _lines(path)]


# ---- generated


def loop(chance: random.Random) -> list[Request]:
    """400 documents of 20 blocks, 8,000 blocks in all, asked for in turn, 15 times over."""
    return [Request(i / 2, [(i % 400, block) for block in range(20)]) for i in range(15 * 400)]


def phases(chance: random.Random) -> list[Request]:
    """Favourites that die: 150 prompts of 20 blocks, each with 5 blocks of its own, and after
    2,500 requests 150 others."""
    found = []
    for i in range(3 * 2500):
        phase, favourite = i // 2500, chance.randrange(150)
        prompt: list[Hashable] = [(phase, favourite, block) for block in range(20)]
        found.append(Request(0.3 * i, [*prompt, *((i, block) for block in range(5))]))
    return found


def turns(chance: random.Random) -> list[Request]:
    """Conversations of which many turns promise more: a first turn is answered by a second in 3 of
    10, every later one by another in 9 of 10, after a minute or so."""
    found = []
    for conversation in range(2500):
        at, blocks, turn = conversation / 2, chance.randint(4, 24), 0
        while True:
            found.append(Request(at, [(conversation, block) for block in range(blocks)]))
            turn += 1
            if chance.random() > (0.3 if turn == 1 else 0.9) or turn == 12:
                break
            at += chance.lognormvariate(4.1, 0.8)
            blocks += chance.randint(1, 6)
    return found


def reversed_turns(chance: random.Random) -> list[Request]:
    """The same signal reversed: a prompt that was asked for six times in two seconds never comes
    again, one that was asked for once comes once more, minutes later."""
    found = []
    for conversation in range(3000):
        blocks = [(conversation, block) for block in range(12)]
        if conversation % 2:
            found += [Request(conversation + 0.3 * turn, blocks) for turn in range(6)]
        else:
            found.append(Request(conversation, blocks))
            found.append(Request(conversation + chance.uniform(300, 400), blocks))
    return found


def scan(chance: random.Random) -> list[Request]:
    """200 favourites of 20 blocks, and every minute 2,000 blocks that are read once."""
    found = [
        Request(i / 2, [(favourite, block) for block in range(20)])
        for i, favourite in enumerate(chance.choices(range(200), k=5000))
    ]
    for number, at in enumerate(range(30, 2500, 60)):
        found += [
            Request(at + part / 100, [("scan", number, part, block) for block in range(200)])
            for part in range(10)
        ]
    return found


def zipf(chance: random.Random) -> list[Request]:
    """3,000 templates of 1 to 30 blocks, drawn independently, the k-th in proportion to k to the
    power of -0.9; each request has 1 to 8 blocks of its own."""
    lengths = [chance.randint(1, 30) for _ in range(3000)]
    weights = [(rank + 1) ** -0.9 for rank in range(3000)]
    found = []
    for i, rank in enumerate(chance.choices(range(3000), weights, k=8000)):
        template: list[Hashable] = [(rank, block) for block in range(lengths[rank])]
        found.append(
            Request(
                i / 10, [*template, *(("own", i, block) for block in range(chance.randint(1, 8)))]
            )
        )
    return found


def bursts(requests: Sequence[Request]) -> list[Request]:
    """A tenant beside these requests: every 30 seconds 25 prompts of 20 blocks, none of which comes
    again, from 15 seconds after the first of them on. Only the hits of the others count."""
    seconds = [request.seconds for request in requests]
    found, at, end, number = list(requests), min(seconds) + 15, max(seconds), 0
    while at < end:
        for _ in range(25):
            number += 1
            fresh = [("burst", number, block) for block in range(20)]
            found.append(Request(at + number % 25 / 100, fresh, counted=False))
        at += 30
    return found


BURSTS = "-bursts"
"""What the name of a trace ends with whose requests come beside `bursts`."""
Pattern = Callable[[random.Random], list[Request]]
PATTERNS: dict[str, Pattern] = {
    "loop": loop,
    "phases": phases,
    "turns": turns,
    "reversed": reversed_turns,
    "scan": scan,
    "zipf": zipf,
    f"turns{BURSTS}": lambda chance: bursts(turns(chance)),
}


def makers(trace: Path | None) -> dict[str, Callable[[], list[Request]]]:
    """What there is to replay, by name: of a file, alone and beside bursts, and the patterns."""
    found: dict[str, Callable[[], list[Request]]] = {}
    if trace is not None:
        path = trace
        found = {"trace": lambda: read(path), f"trace{BURSTS}": lambda: bursts(read(path))}
    return found | {
        name: partial(pattern, random.Random(SEED)) for name, pattern in PATTERNS.items()
    }
