"""Failures of KV caches that users have reported, made to happen to this one: docs/kill-9.md.

`python examples/kill9.py save` shows one, without a name all. Exit status 0: each line holds. What
dies here dies by SIGKILL: nothing of it runs any more, no handler, no `finally`.
"""

import json
import logging
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from lightcache import Cache
from lightcache.shm import Segment
from lightcache.storage import StorageTier

NAME = f"kill9-{os.getpid()}"
PAGE = 16 << 10  # bytes
FORM = {"page_bytes": PAGE, "page_tokens": 16, "fingerprint": "kill9", "secret": bytes(range(16))}
PROMPT = range(6 * 16)  # token ids: six pages
CONTENT = np.repeat(np.arange(6, dtype=np.uint8)[:, None], PAGE, axis=1)  # each has its number


def say(text: str, holds: bool = True) -> None:
    print("  " + text, flush=True)
    if not holds:
        raise SystemExit("this should not be so")


def open_cache(name: str = NAME, size: int = 4 << 20) -> Cache:
    return Cache.open(name, size=size, **FORM)


def found(cache: Cache) -> int:
    return cache.peek(cache.hash_pages(PROMPT))


def mib(folder: Path, names: str) -> float:
    return round(sum(file.stat().st_blocks / 2048 for file in folder.glob(names)), 1)


def whole(cache: Cache, pages: int = 6) -> bool:
    return np.array_equal(cache.get(PROMPT), CONTENT[:pages])


def victim(does: str, name: str, pipe: Connection) -> None:
    """Another process of the cache: it comes to a point, says so, and waits there."""
    with open_cache(name) as cache:
        keys = cache.hash_pages(PROMPT)
        if does == "has saved":
            cache.put(PROMPT, CONTENT)
        elif does == "loads":
            held = cache.match(keys)
        elif does == "is rank 1":
            held = cache.reserve(keys, team=7, shards=2, shard=1)
        elif does == "saves":
            held = cache.reserve(keys)
            cache.pool.array[held.pages[:3]] = CONTENT[:3]
        pipe.send("here")
        while does == "takes the lock":
            cache.reserve(cache.hash_pages(range(256 * 16))).abandon()
        pipe.recv()
        if does == "saves":
            cache.pool.array[held.pages[3:]] = CONTENT[3:]
            held.publish()
    pipe.send("has ended in order")


@contextmanager
def process(does: str) -> Iterator[tuple[int, Connection]]:
    """A victim that has come to its point. SIGKILL where the block ends."""
    context = mp.get_context("forkserver")  # a forked child would not be attached
    context.set_forkserver_preload(["lightcache.storage"])
    here, there = context.Pipe()
    child = context.Process(target=victim, args=(does, NAME, there), daemon=True)
    child.start()
    there.close()  # who waits for a victim that could not begin gets EOFError
    try:
        here.recv()
        yield child.pid or 0, here
    finally:
        child.kill()
        child.join()


def save() -> None:
    """killed in the middle of saving pages"""
    with open_cache() as cache:
        with process("saves"):
            say(f"{cache.stats().writing} pages are being written, 3 of them are done; SIGKILL")
        say(f"a lookup finds {found(cache)}; {cache.reap()} dead is reaped", not found(cache))
        cache.put(PROMPT, CONTENT)
        say(f"another one saves them, and finds {found(cache)}, whole", whole(cache))
        say(f"check: {cache.check().message}", cache.check().clean)


def load() -> None:
    """killed while it loads: its pins, that kept pages from eviction"""
    with open_cache() as cache:
        cache.put(PROMPT, CONTENT)
        with process("loads"):
            say(f"{cache.check().pins} pins; SIGKILL")
        say(f"{cache.reap()} dead is reaped: {cache.check().pins} pins", not cache.check().pins)


def loop() -> None:
    """eight starts, eight kills, and no process in between"""
    used = []
    for _ in range(8):
        with process("has saved"):
            used.append(mib(Path("/dev/shm"), f"*{NAME}*"))
    say(f"MiB of /dev/shm: {used}", used[-1] < used[0] + 1)
    with open_cache() as cache:
        say(f"the next `open` finds {found(cache)} of 6 pages", whole(cache))


def generation() -> None:
    """an old generation that ends after its name has gone to a new one"""
    with process("has saved") as (_, old):
        Segment.unlink(NAME, force=True)  # as `lightcache rm NAME --force`
        with open_cache() as cache:
            say(f"a new cache has the name, with {found(cache)} pages", not found(cache))
            cache.put(PROMPT, CONTENT)
            old.send("end")
            say(f"it gets 6; the process of the old one {old.recv()}")
            with open_cache() as another:
                say(f"who opens the name finds {found(another)} of 6 new pages", whole(another))


def lock() -> None:
    """killed inside the lock"""
    beside = Path(sys.executable).with_name("lightcache")
    command = beside if beside.exists() else shutil.which("lightcache") or beside
    dump = [command, "dump", NAME, "--json"]
    with open_cache() as cache:
        kills = undone = 0
        while not undone and (kills := kills + 1) < 300:
            with process("takes the lock"):
                time.sleep(0.001 * (kills % 7))
            cache.reap()
            undone = json.loads(subprocess.check_output(dump))["lock"]["undone_words"]
        say(f"SIGKILL {kills} came inside; {undone} stores of the dead were undone", undone > 0)
        with cache.reserve(cache.hash_pages(range(256 * 16))) as new:
            say(f"the next reservation gets {len(new.pages)} of 256 pages", len(new.pages) == 256)


def stopped() -> None:
    """stopped in the middle of saving, for as long as you like"""
    with open_cache() as cache, process("saves") as (pid, pipe):
        os.kill(pid, signal.SIGSTOP)
        say(f"SIGSTOP; {cache.reap()} reaped; a lookup finds {found(cache)}", not found(cache))
        os.kill(pid, signal.SIGCONT)
        pipe.send("go on")
        pipe.recv()
        say(f"SIGCONT; the process publishes them: {found(cache)} of 6, whole", whole(cache))


def ranks() -> None:
    """one of two ranks killed after the other has saved its part"""
    with open_cache() as cache:
        keys = cache.hash_pages(PROMPT)
        with cache.reserve(keys, team=7, shards=2, shard=0) as new:
            with process("is rank 1"):
                say(f"rank 0 has published its part; ready: {new.publish()}; rank 1: SIGKILL")
            say(f"who waits for them gets {cache.wait(keys, timeout=60)} of 6", not found(cache))
        with cache.reserve(keys) as again:
            say(f"{len(again.pages)} of 6 can be saved anew", len(again.pages) == 6)


@contextmanager
def stored(url: str) -> Iterator[tuple[Cache, StorageTier]]:
    """A cache whose six pages are in a storage and no longer in memory."""
    with open_cache() as cache, StorageTier.open(cache, url) as tier:
        cache.put(PROMPT, CONTENT)
        tier.write(cache.hash_pages(PROMPT)).wait()
        cache.clear()
        yield cache, tier


def failed() -> None:
    """reads that fail, pages that are damaged, pages that were never stored"""
    for fault, salt in (("read_fail", ""), ("corrupt", ""), ("corrupt", "never stored")):
        with stored(f"flaky:{fault}=0.4,seed=2:memory:") as (cache, tier):
            read = tier.prefetch(cache.hash_pages(PROMPT, salt=salt)).wait()
            counts = f"{read.failed} failed, {read.corrupt} corrupt, {read.absent} absent"
            say(f"{salt or fault}: {read.loaded} loaded, {counts}", read.loaded < 6)
            say(f"a lookup finds {found(cache)}, whole", whole(cache, read.loaded))


def hang() -> None:
    """a storage that never answers"""
    logging.getLogger("lightcache").setLevel(logging.ERROR)  # it warns of the same
    with open_cache() as cache:
        tier = StorageTier.open(cache, "flaky:hang=1:memory:", call_timeout=0.3, grace=0.1)
        for _ in range(2):
            read = tier.prefetch(cache.hash_pages(PROMPT))
            say(f"a read has begun; a lookup meanwhile finds {found(cache)} pages")
            say(f"the read ends: {read.wait().reasons[0]}", read.state.name == "FAILED")
        tier.storage.close()
        tier.close()


def full() -> None:
    """a disk that is written to without end"""
    with tempfile.TemporaryDirectory() as folder, open_cache() as cache:
        with StorageTier.open(cache, f"disk:{folder}?capacity=1MiB") as tier:
            for first in range(64):
                prompt = range(first, first + len(PROMPT))
                cache.put(prompt, CONTENT)
                tier.write_tokens(prompt).wait()
            used = mib(Path(folder), "**/*")
            say(f"{64 * 6 * PAGE >> 20} MiB written, {used} MiB of disk", used < 2)
            cache.clear()
            read = tier.prefetch(cache.hash_pages(prompt)).wait().loaded
            say(f"{read} of 6 pages of the newest prompt are there", read == 6)


def salt() -> None:
    """two tenants with one prompt, and a disk below"""
    folder = tempfile.TemporaryDirectory()
    with folder, stored(f"disk:{folder.name}?capacity=1MiB") as (cache, tier):
        for salt, pages in (("tenant b", 0), ("", 6)):
            read = tier.prefetch(cache.hash_pages(PROMPT, salt=salt)).wait().loaded
            say(f"with the salt {salt!r} {read} of 6 pages come from the disk", read == pages)


def start() -> None:
    """a large pool, for which the kernel takes its time"""
    size = min(512 << 20, shutil.disk_usage("/dev/shm").free // 4)
    began = time.monotonic()
    with open_cache(size=size) as cache:
        cache.put(PROMPT, CONTENT)
        ms, grown = 1000 * (time.monotonic() - began), cache.stats().grown
        say(f"a prompt is saved after {ms:.0f} ms, {grown} of {cache.pages} pages have memory")


ROWS = (save, load, loop, generation, lock, stopped, ranks, failed, hang, full, salt, start)

if __name__ == "__main__":
    rows = {row.__name__: row for row in ROWS}
    if unknown := set(sys.argv[1:]) - set(rows):
        sys.exit(f"{', '.join(sorted(unknown))}: no such row; expected {', '.join(rows)}")
    for name in sys.argv[1:] or rows:
        print(f"{name}: {rows[name].__doc__}")
        rows[name]()
