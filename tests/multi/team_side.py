"""One rank of a team, in a process of its own: writes its half of each page when it is told to."""

from __future__ import annotations

import sys

import numpy as np
from support.keys import prompt

from lightcache import Abandoned, Cache, Reservation

PAGE_BYTES = 4096


def main(name: str, team: int, shard: int) -> None:
    """Answer each line of standard input with one."""
    with Cache.attach(name) as cache:
        print("ready", flush=True)
        held: dict[int, Reservation] = {}
        for line in sys.stdin:
            words = line.split()
            number, pages = int(words[1]), int(words[2])
            if words[0] == "reserve":
                made = cache.reserve(prompt(number, pages), shards=2, shard=shard, team=team)
                held[number] = made
                print(len(made.pages), int(made.joined), len(made.busy), flush=True)
            elif words[0] == "publish":
                half = slice(shard * PAGE_BYTES // 2, (shard + 1) * PAGE_BYTES // 2)
                for i, page in enumerate(held[number].pages):
                    cache.pool[page][half] = np.uint8(number * 16 + i * 2 + shard)
                try:
                    print("ready" if held[number].publish() else "others", flush=True)
                except Abandoned:
                    print("abandoned", flush=True)
                held.pop(number).release()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
