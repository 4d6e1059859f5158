"""Run as a program: the other side of tests with plans.

plan_side.py NAME churn SEED    evict and reserve without pause until stdin ends; a line for each
                                ten prompts, of how many pages were freed and written so far
plan_side.py NAME plan          plan every prompt, say how many pages, and wait to be killed
"""

from __future__ import annotations

import select
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from multi.stress_worker import SECRET, SLICES, stamps, words_of

from lightcache import Cache

PROMPTS = 40
LENGTH = 12
PAGES = PROMPTS * LENGTH // 2  # half of what all prompts have


def keys(prompt: int) -> Any:
    """The keys of a prompt; each two of them share half."""
    both = np.random.default_rng(prompt // 2).integers(0, 1 << 64, (LENGTH // 2, 2), np.uint64)
    own = np.random.default_rng(prompt + 1000).integers(0, 1 << 64, (LENGTH // 2, 2), np.uint64)
    return np.concatenate([both, own])


def sound(cache: Cache, pages: Any, wanted: Any) -> bool:
    """Whether these pages hold these keys' bytes, all of one write each."""
    found: npt.NDArray[np.uint64] = words_of(cache)[pages]
    return bool((found == stamps(wanted, found[:, :, 2])).all())


def churn(cache: Cache, seed: int) -> None:
    """See above."""
    rng = np.random.default_rng(seed)
    freed = written = turn = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        freed += cache.evict(int(rng.integers(1, LENGTH)))
        chosen = keys(int(rng.integers(PROMPTS)))[: rng.integers(1, LENGTH + 1)]
        with cache.reserve(chosen) as new:
            serials = rng.integers(0, 1 << 64, len(new.new), np.uint64)
            words = stamps(chosen[new.new], np.repeat(serials[:, None], SLICES, axis=1))
            words_of(cache)[new.pages] = words
            new.publish()
            written += len(serials)
        turn += 1
        if turn % 10 == 0:
            print(freed, written, flush=True)


def main(arguments: list[str]) -> None:
    """See above."""
    name, what, *more = arguments
    with Cache.attach(name, secret=SECRET, role=what, lock_timeout=60.0) as cache:
        if what == "churn":
            churn(cache, int(more[0]))
            return
        every = np.concatenate([keys(prompt) for prompt in range(PROMPTS)])
        offsets = np.arange(0, len(every) + 1, LENGTH)
        print(int(cache.plan_many(range(PROMPTS), every, offsets).sum()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
