"""Pools to measure in: made and filled by another process, their pages in no order."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import LightcacheError
from lightcache.page_index import PageIndex

PROMPT = 2000
"""Pages of a prompt."""


def keys_of(seed: int, n: int) -> Keys:
    """Keys of a made-up prefix: as good as digests, the same in every process."""
    return np.random.default_rng(seed).integers(0, 2**64, (n, 2), dtype=np.uint64)


def prompts_for(pages: int, quick: bool) -> int:
    """200 prompts, or as many as fit with a tenth of the pool left."""
    return max(1, min(20 if quick else 200, pages * 9 // 10 // PROMPT))


def fill(index: PageIndex, prompts: int) -> None:
    """Publish that many prompts, seeds 1000 on, on pages that lie all over the pool."""
    scatter(index)
    for i in range(prompts):
        with index.reserve(keys_of(1000 + i, PROMPT)) as made:
            made.publish()


def scatter(index: PageIndex) -> None:
    """Bring the free pages into random order: name all of them in short chains, use them in a
    random order, each chain from its end, and evict them in that order."""
    pages = index.pages
    chain = max(2, pages // 10_000)
    keys = keys_of(1, pages)
    for begin in range(0, pages, chain):
        with index.reserve(keys[begin : begin + chain]) as made:
            made.publish()
    owner = np.random.default_rng(2).permutation(pages) // chain
    turn = np.argsort(owner, kind="stable")
    rank = np.empty(pages, np.int64)
    rank[turn] = np.arange(pages) - np.searchsorted(owner[turn], owner[turn])
    order = np.minimum((owner + 1) * chain, pages) - 1 - rank
    with index.match_many(np.ascontiguousarray(keys[order]), np.arange(pages + 1)):
        pass
    left = pages
    while left:  # in pieces: one call moves a limited number of pages to where they belong
        freed = index.evict(min(left, 1000))
        if not freed:
            raise LightcacheError(f"{left} of {pages} pages of a new pool could not be evicted")
        left -= freed


class Helper:
    """Another process that plays a role of `_roles`, and is killed when we are done with it."""

    def __init__(
        self, role: str, *, before: tuple[str, ...] = (), module: str = "_roles", **arguments: Any
    ) -> None:
        """`before`: what starts the interpreter, such as unshare and its options. What that says
        when its child is killed is nobody's business. `module`: where the role is."""
        path = f"lightcache_bench.{module}"
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", path, role, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if before else None,
            text=True,
        )

    def answer(self) -> Any:
        """Its next line.

        Raises:
            LightcacheError: it ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise LightcacheError(f"a helper process ended early: {self.process.args!r}")
        return json.loads(line)

    def go_on(self) -> None:
        """Let it go on to what it does after its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *exception: Any) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self.process.communicate(timeout=5 if exception[0] else 30)
        self.kill()


@contextlib.contextmanager
def pool(pages: int, prompts: int) -> Iterator[PageIndex]:
    """An index that another process created and filled, attached here."""
    name = f"bench-{os.getpid()}-{pages}"
    with Helper("fill", name=name, pages=pages, prompts=prompts) as maker:
        maker.answer()
        with PageIndex.attach(name, role="bench") as index:
            yield index
