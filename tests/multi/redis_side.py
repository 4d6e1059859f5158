"""Run as a program: a client that stores pages over and over, until it is killed.

    redis_side.py URL PAGES PAGE_BYTES

Says "ready" when it is connected. Page i of every turn is of key i, and is removed before the next.
"""

from __future__ import annotations

import sys

from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.testing.conformance import make_keys, pages_of

SEED = 23
FOREVER = 600.0


def main(url: str, pages: str, page_bytes: str) -> None:
    """See above."""
    keys = make_keys(int(pages), SEED)
    data = list(pages_of(keys, int(page_bytes)))
    with open_storage(url, spec=StorageSpec(int(page_bytes), "killed")) as storage:
        print("ready", flush=True)
        while True:
            storage.write(keys, data, timeout=FOREVER)
            storage.delete(keys, timeout=FOREVER)


if __name__ == "__main__":
    main(*sys.argv[1:])
