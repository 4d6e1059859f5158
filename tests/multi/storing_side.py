"""Run as a program: a client that reads from a storage which hangs in the middle of a batch.

    storing_side.py NAME PAGES GROUP BAD

Fills a storage with PAGES pages and prefetches them in groups of GROUP; in the second group the
storage gives BAD pages and hangs then. Says "hanging" when it does; stays so until it is killed.
"""

from __future__ import annotations

import sys

from support.storing import SECRET, stored

from lightcache import Cache
from lightcache.storage import StorageTier
from lightcache.storage.testing import Fault, FlakyStorage
from lightcache.storage.testing.conformance import make_keys

SEED = 11


def main(name: str, pages: str, group: str, bad: str) -> None:
    """See above."""
    cache = Cache.attach(name, role="doomed", secret=SECRET)
    keys = make_keys(int(pages), SEED)
    script = {"read": [None, Fault("hang", at=int(bad))]}
    flaky = FlakyStorage(stored(cache, keys), script=script)  # type: ignore[arg-type]
    tier = StorageTier(cache, flaky, group=int(group), timeout=600.0)
    task = tier.prefetch(keys)
    assert flaky.wait_hanging()
    print("hanging", flush=True)
    task.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
