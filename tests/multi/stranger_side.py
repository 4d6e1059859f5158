"""Somebody else on the node, who evicts and reserves without pause until killed."""

from __future__ import annotations

import itertools
import sys

import numpy as np
from support.keys import prompt
from support.shard_backend import SECRET

from lightcache import Cache


def main() -> None:
    """Never ends."""
    cache = Cache.attach(sys.argv[1], secret=SECRET, role="stranger")
    print("running", flush=True)
    random = np.random.default_rng(1)
    for number in itertools.count(1000):
        cache.evict(int(random.integers(0, 4)))
        with cache.reserve(prompt(number, int(random.integers(1, 6)))) as new:
            for page in new.pages.tolist():
                np.frombuffer(memoryview(cache.pool[page]), np.uint64)[:] = number
            if number % 3 and len(new.new):
                new.publish()


if __name__ == "__main__":
    main()
