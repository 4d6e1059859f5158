"""Engines that are killed and started again, in a loop: each is a scheduler and a worker. Run as a
process of its own, which forks them; it opens no cache itself. A kill comes at any time: while they
work, or when they wait with what they hold."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from support.index_view import IndexView
from support.keys import prompt

from lightcache import Cache

PAGES, PAGE_BYTES, PROMPTS = 512, 4096, 96
PR_SET_PDEATHSIG = 1


def schedule(cache: Cache, draw: random.Random) -> None:
    """Hold what some prompts have."""
    held = [cache.match(prompt(draw.randrange(PROMPTS), 8)) for _ in range(4)]
    for _ in range(draw.randrange(8)):
        held.append(cache.match(prompt(draw.randrange(PROMPTS), 8)))
        held.pop(0).release()
    signal.pause()


def write(cache: Cache, draw: random.Random) -> None:
    """Write prompts, two at a time: a kill finds pages that are being written."""
    held = [cache.reserve(prompt(draw.randrange(PROMPTS), 8))]
    for _ in range(draw.randrange(8)):
        held.append(cache.reserve(prompt(draw.randrange(PROMPTS), 8)))
        with held.pop(0) as new:
            cache.pool.array[new.pages] = new.pages.astype(np.uint8)[:, None]
            new.publish()
    signal.pause()


def live(name: str, out: int, part: Callable[[Cache, random.Random], None], apart: bool) -> None:
    """One half of an engine. Says when it is in, and works until it is killed."""
    device = part is write
    try:
        cache = Cache.attach(name, role=part.__name__, device=device)
        if apart:  # as a process of another PID namespace, whose end cannot be seen
            IndexView(cache.index).client(cache.client_id.slot).pidns += 1
        os.write(out, b".")
        part(cache, random.Random(os.getpid()))
    except BaseException as error:
        os.write(out, f"{type(error).__name__}: {error}"[:2000].encode())


def fork(*arguments: object) -> int:
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        live(*arguments)  # type: ignore[arg-type]
        os._exit(1)
    return child


def main(name: str, engines: int, rounds: int, apart: bool) -> NoReturn:
    """Print what went wrong, or nothing; the exit status says which."""
    gc.collect()
    gc.freeze()  # a collection in each child would copy all of this process
    ends, out = os.pipe()
    living: list[list[int]] = [[] for _ in range(engines)]
    said = b""
    for turn in range((rounds + 1) * engines):
        engine = living[turn % engines]
        for pid in engine:
            os.kill(pid, signal.SIGKILL)
        for pid in engine:
            os.waitpid(pid, 0)
        engine[:] = [fork(name, out, part, apart) for part in (schedule, write)]
        said = b""
        while len(said) < 2 and not said.strip(b"."):
            said += os.read(ends, 2000)
        if said != b"..":
            break
    for pid in itertools.chain(*living):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(said.decode().strip("."))
    sys.exit(said != b"..")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "apart")
