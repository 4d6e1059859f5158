"""Run as a program: the other side of tests with loans.

loans_side.py NAME RING worker        say who it is; then pin, read and give back what each line of
                                      stdin lends, and answer whether its bytes were sound
loans_side.py NAME RING taker SLOT EPOCH SEED
                                      lend prompts to that worker, a line for each; a line of stdin
                                      for each of them beyond the first 64
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from multi.plan_side import PROMPTS, keys, sound
from multi.stress_worker import SECRET

from lightcache import Cache, ClientId, GiveBack, LeaseLost, Loans
from lightcache.shm import SharedRing

AHEAD = 64


def open_ring(name: str) -> SharedRing:
    """Small: it is full now and then."""
    return SharedRing.open(name, capacity=16, message_bytes=20)


def serve(cache: Cache, gives: GiveBack, loan: Any) -> str:
    """Do as a worker does: pin, read, and give back, as a whole or in parts."""
    number, prompt, pages, generations = loan
    numbers = np.array(pages, np.int32)
    try:
        with cache.index.pin(numbers, generations):
            answer = "sound" if sound(cache, numbers, keys(prompt)[: len(pages)]) else "WRONG"
    except LeaseLost:
        answer = "refused"
    if number % 3 == 0:
        gives.put(number)
    else:
        for part in np.array_split(numbers, number % 3):
            gives.put(number, part)
    return answer


def lend(cache: Cache, loans: Loans, prompt: int) -> list[Any]:
    """The message of a loan of a prompt's pages."""
    with cache.match(keys(prompt)) as lease:
        pages = lease.pages
        generations = cache.index.generations(pages).tolist()
        return [loans.lend(pages), prompt, pages.tolist(), generations]


def main(arguments: list[str]) -> None:
    """See above."""
    name, ring_name, what, *more = arguments
    with (
        Cache.attach(name, secret=SECRET, role=what, lock_timeout=60.0) as cache,
        open_ring(ring_name) as ring,
    ):
        if what == "worker":
            gives = GiveBack(ring)
            print(*cache.index.client_id, flush=True)
            for line in sys.stdin:
                print(serve(cache, gives, json.loads(line)), flush=True)
            return
        slot, epoch, seed = map(int, more)
        rng = np.random.default_rng(seed)
        with Loans(cache.index, ring, ClientId(slot, epoch)) as loans:
            for count in range(1 << 30):
                if count >= AHEAD and not sys.stdin.readline():
                    break
                try:
                    print(json.dumps(lend(cache, loans, int(rng.integers(PROMPTS)))), flush=True)
                except LeaseLost:  # dropped between the look at its generation and the pin
                    print("[]", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
