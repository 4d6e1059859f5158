"""A writer of test_events.py that gives token ids: at random until it is killed, or until it kills
itself at one point of one write."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import numpy as np

from lightcache import Cache, LightcacheError, cache

PAGE = 4
SECRET = bytes(16)
Prompt = list[int]


def prompt(a: int, b: int, pages: int) -> Prompt:
    """The prompts that writers make: tokens of a page tell it from the others."""
    return [number * 100 + place for number in (a, b, *range(pages)) for place in range(PAGE)]


def at_random(opened: Cache, seed: int) -> None:
    random = np.random.default_rng(seed)
    while True:
        tokens = prompt(*(int(random.integers(6)) for _ in range(3)))
        keys = opened.hash_pages(tokens)
        with contextlib.suppress(LightcacheError):
            match int(random.integers(8)):
                case 0:
                    opened.index.drop(keys)
                case 1:
                    opened.evict(int(random.integers(1, 6)))
                case given:
                    with opened.reserve(
                        keys, timeout=5.0, tokens=tokens if given > 3 else None
                    ) as new:
                        new.publish()


def creator(name: str) -> None:
    """Dies when it has made the object, and the segment is not ready."""
    make = cache.make_token_records

    def made(*arguments: Any) -> None:
        make(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    cache.make_token_records = made
    how: dict[str, Any] = {"page_bytes": 64, "page_tokens": PAGE, "fingerprint": "x"}
    Cache.create(name, pages=8, token_ids=True, secret=SECRET, **how)


def killed(opened: Cache, point: str) -> None:
    """Dies before the records are written, within that, or before the pages are published."""
    write = os.pwrite

    def half(fd: int, data: memoryview, offset: int) -> int:
        if point == "within":
            write(fd, data[: len(data) // 2 + 13], offset)  # two records, and a key with a token
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    if point != "after":
        os.pwrite = half
    tokens = prompt(1, 2, 3)
    opened.reserve(opened.hash_pages(tokens), tokens=tokens)
    os.kill(os.getpid(), signal.SIGKILL)


def main(name: str, how: str) -> None:
    if how == "create":
        creator(name)
    with Cache.attach(name, secret=SECRET) as opened:
        print("begun", flush=True)
        if how.isdecimal():
            at_random(opened, int(how))
        killed(opened, how)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
