"""Run as a program: a rank that matches, computes and publishes as fast as it can, in threads.

update_side.py NAME RANK VERSION SEED    until a line comes; then says how many requests it had, and
                                         waits for the next line to leave

Pages bear the stamps of VERSION, in whatever namespace they are.
"""

from __future__ import annotations

import random
import select
import sys
import threading
from typing import Any

import numpy as np
from support.manager_case import open_cache
from support.stamped import StampedBackend, StampedDevice, stamps_of

from lightcache.errors import OutOfPages
from lightcache.manager import KVCacheManager, ManagedBlocks, ManagerConfig, Prompt

BLOCK = PAGE = 4
BLOCKS, PAGES = 64, 256
TENANTS = ["", *(f"tenant {i}" for i in range(30))]  # some are new to everybody during an update
THREADS = 3


def prompt_of(number: int, tenant: str) -> Prompt:
    """One of a few."""
    return Prompt(np.random.default_rng(number).integers(0, 1000, 21), tenant=tenant)


class Lived:
    """Requests of one process, of several threads."""

    def __init__(self, name: str, rank: int, version: str, seed: int) -> None:
        self.version, self.seed = version, seed
        self.cache = open_cache(name, PAGES, PAGE)
        self.store = StampedDevice(BLOCKS, BLOCK)
        self.device = ManagedBlocks(f"{name}.{rank}", block_tokens=BLOCK, blocks=BLOCKS)
        self.manager = KVCacheManager(
            self.cache,
            self.device,
            StampedBackend(self.cache, self.store),
            config=ManagerConfig(write_group=1),
            weights=version,
        )
        self.over = threading.Event()
        self.requests = [0] * THREADS
        self.wrong: list[BaseException] = []
        self.one = threading.Lock()  # around what the transfer backend of arrays is not made for

    def live(self, thread: int) -> None:
        """Requests until it is over."""
        choose = random.Random(self.seed * THREADS + thread)
        try:
            while not self.over.is_set():
                self.request((thread, self.requests[thread]), choose)
                self.requests[thread] += 1
        except BaseException as error:
            self.wrong.append(error)
            raise

    def request(self, request: Any, choose: random.Random) -> None:
        """One, whole."""
        manager = self.manager
        prompt = prompt_of(choose.randrange(8), choose.choice(TENANTS))
        for _ in range(choose.randrange(1, 4)):
            manager.plan(request, prompt)
        match = manager.take(request)
        try:
            with self.one:
                table = manager.allocate(request, len(prompt))
                load = manager.load(request)
                assert load.done()
            wanted = stamps_of(prompt.tokens, int(self.version or 0))
            found = self.store.read(table, 0, match.usable)
            assert (found == wanted[: match.usable]).all(), "somebody else's stamps"
            self.store.write(table, match.usable, wanted[match.usable :])
            with self.one:
                manager.commit(request, choose.randrange(match.usable, len(prompt) + 1))
        except OutOfPages:
            pass
        with self.one:
            manager.release(request, publish=choose.random() < 0.8)
            manager.poll()

    def close(self) -> None:
        """Leave; nothing may be left."""
        self.manager.close()
        index = self.device.index
        assert index is not None
        assert index.check().pins == index.stats().held == 0
        self.device.close()
        self.cache.close()


def main(arguments: list[str]) -> None:
    """See above."""
    name, rank, version, seed = arguments
    lived = Lived(name, int(rank), version, int(seed))
    threads = [threading.Thread(target=lived.live, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    while not select.select([sys.stdin], [], [], 0.05)[0] and not lived.wrong:
        print(sum(lived.requests), flush=True)
    lived.over.set()
    for thread in threads:
        thread.join()
    assert not lived.wrong, lived.wrong
    print("lived", sum(lived.requests), lived.manager.stats().hit_requests, flush=True)
    sys.stdin.readline()
    sys.stdin.readline()
    lived.close()


if __name__ == "__main__":
    main(sys.argv[1:])
