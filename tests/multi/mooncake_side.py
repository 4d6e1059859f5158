"""Run as a program: a node of a Mooncake cluster.

mooncake_side.py URL SEED leave N      writes N prompts, a line for each, and leaves properly
mooncake_side.py URL SEED wait N       as that, when its input ends
mooncake_side.py URL SEED middle       stops for ever with a page that is half written
"""

from __future__ import annotations

import sys
from typing import Any

from lightcache.storage import Storage, StorageSpec, open_storage
from lightcache.storage.testing.conformance import make_keys, pages_of

PROMPT, PAGE_BYTES = 6, 1 << 18
SPEC = StorageSpec(PAGE_BYTES, "nodes")


def prompt(seed: int, number: int) -> Any:
    """The keys of one."""
    return make_keys(PROMPT, seed * 100_000 + number)


def put(storage: Storage, seed: int, number: int) -> None:
    """Store one."""
    keys = prompt(seed, number)
    found = storage.write(keys, list(pages_of(keys, PAGE_BYTES)), timeout=60.0)
    print(found.prefix, flush=True)


def stop_in_the_middle(storage: Any, seed: int) -> None:
    """The master has made room for a page, the lender has the first half of it, and no more."""
    name = storage.object_name(prompt(seed, 0)[0].astype("<u8").tobytes())
    size = storage._staging.value_bytes
    library = storage._client._store
    assert library.batch_put_session_start([name], [size]) == [0]
    here = storage._staging.addresses([0])
    half = [[size // 2]]
    wrote = library.batch_put_from_multi_buffer_ranges([name], [here], half, [[0]])
    assert wrote[0] >= 0, wrote
    print("stopped", flush=True)
    sys.stdin.read()


def main(url: str, seed: str, what: str, prompts: str = "") -> None:
    """See above."""
    with open_storage(url, spec=SPEC) as storage:
        if what == "middle":
            stop_in_the_middle(storage, int(seed))
            return
        for number in range(int(prompts)):
            put(storage, int(seed), number)
        if what == "wait":
            sys.stdin.read()
    print("closed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
