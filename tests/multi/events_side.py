"""A writer of test_events.py: publishes, drops, evicts and clears at random until it is killed."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
from support.keys import keys

from lightcache import LightcacheError, PageIndex


def main(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    with PageIndex.attach(name) as index:
        print("begun", flush=True)
        while True:
            a, b, length = (int(random.integers(6)) for _ in range(3))
            which = keys(a, b, *range(length))
            with contextlib.suppress(LightcacheError):
                match int(random.integers(12)):
                    case 0:
                        index.drop(which)
                    case 1:
                        index.evict(int(random.integers(1, 6)))
                    case 2 if random.random() < 0.02:
                        index.clear()
                    case _:
                        index.use(index.namespace())  # another writer may have cleared it
                        with index.reserve(which, timeout=5.0) as new:
                            new.publish()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
