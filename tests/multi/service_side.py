"""Run as a program: a storage service, or a client of one, to be killed or stopped.

service_side.py serve NAME FOLDER SLOTS        says "serving"; serves until stdin ends
service_side.py ask NAME SEED                  writes and reads prompts of its own, again and
                                               again; says the number of each round
service_side.py half NAME                      pushes the first part of a task; says "half"
service_side.py ready NAME SEED                says "ready", then prefetches a prompt; says how many
                                               pages came
service_side.py wait NAME SEED                 asks for a prompt, and again for each line; says
                                               how it ended
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from support.disks import disk
from support.storing import SECRET, fill, sound

from lightcache import Cache
from lightcache.storage import StorageSpec
from lightcache.storage.service import StorageClient, StorageService
from lightcache.storage.service.messages import Ask, split
from lightcache.storage.testing.conformance import make_keys

PROMPT = 12  # pages


def prompt(seed: int, number: int) -> object:
    """Keys of a client's own."""
    return make_keys(PROMPT, seed=1000 * seed + number)


def serve(name: str, folder: str, slots: str) -> None:
    """See above."""
    with Cache.attach(name, role="storage", secret=SECRET) as cache:
        storage = disk(Path(folder), int(slots), StorageSpec.of(cache))
        with storage, StorageService(cache, storage, group=4, timeout=600.0):
            print("serving", flush=True)
            sys.stdin.read()


def ask(name: str, seed: str) -> None:
    """See above."""
    cache = Cache.attach(name, role="engine", secret=SECRET)
    client = StorageClient(cache, timeout=5.0, grace=0.1)
    for number in range(1 << 30):
        keys = prompt(int(seed), number % 8)
        client.prefetch(keys).wait(60.0)  # type: ignore[arg-type]
        sound(cache, keys)
        fill(cache, keys)  # the rest is computed
        sound(cache, keys)
        client.write(keys, number).wait(60.0)  # type: ignore[arg-type]
        cache.evict(PROMPT)
        print(number, flush=True)


def half(name: str) -> None:
    """See above."""
    cache = Cache.attach(name, role="engine", secret=SECRET)
    client = StorageClient(cache)
    space = cache.index.default_namespace
    how = {"request": None, "tokens": 1}
    body = Ask("write", 1e9, make_keys(3000, seed=1), space, how).pack()
    parts = split(client._client, 1, body)
    client._push(parts[:1])
    print("half", flush=True)
    sys.stdin.read()


def ready(name: str, seed: str) -> None:
    """See above."""
    with (
        Cache.attach(name, role="engine", secret=SECRET) as cache,
        StorageClient(cache, silence=60.0) as client,
    ):
        print("ready", flush=True)
        sys.stdin.readline()
        result = client.prefetch(prompt(int(seed), 0)).wait(60.0)  # type: ignore[arg-type]
        print(result.prefix, *result.reasons, flush=True)
        sys.stdin.readline()


def wait(name: str, seed: str) -> None:
    """See above."""
    with Cache.attach(name, role="engine", secret=SECRET) as cache:
        with StorageClient(cache, timeout=60.0) as client:
            keys = prompt(int(seed), 0)
            for _ in itertools.chain([""], sys.stdin):
                result = client.prefetch(keys).wait(60.0)  # type: ignore[arg-type]
                print(result.prefix, *result.reasons, flush=True)


if __name__ == "__main__":
    sides = {"serve": serve, "ask": ask, "half": half, "ready": ready, "wait": wait}
    sides[sys.argv[1]](*sys.argv[2:])
