"""Two processes share one KV cache: one writes pages, the other finds and reads them."""

import multiprocessing as mp
import sys
from multiprocessing.synchronize import Event

import numpy as np

import lightcache

CACHE = {"pages": 64, "page_bytes": 4096, "page_tokens": 16, "fingerprint": "demo/bf16/16"}
PROMPT = np.arange(100)  # token ids: six full pages of 16, and 4 tokens


def writer(name: str, written: Event, read: Event) -> None:
    with lightcache.Cache.open(name, **CACHE, role="writer") as cache:
        keys = cache.hash_pages(PROMPT)
        with cache.reserve(keys) as new:  # leaving without publishing would abandon the pages
            for i, page in enumerate(new.pages):
                cache.pool[page][:] = i  # here an engine copies KV from the device
            new.publish()
            print(f"writer: {len(new.pages)} pages written and published")
        written.set()
        read.wait()


def reader(name: str, written: Event, read: Event) -> None:
    with lightcache.Cache.open(name, **CACHE, role="reader") as cache:
        keys = cache.hash_pages(PROMPT, leave_one=True)
        written.wait()
        with cache.match(keys) as hit:  # pinned: nobody reuses these pages meanwhile
            for i, page in enumerate(hit.pages):
                assert (cache.pool[page] == i).all()
            print(f"reader: {hit.tokens} of {len(PROMPT)} tokens need not be computed")
        read.set()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")  # a forked child would not be attached
    name = sys.argv[1] if len(sys.argv) > 1 else "example-two-processes"
    events = spawn.Event(), spawn.Event()
    both = [spawn.Process(target=f, args=(name, *events)) for f in (writer, reader)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    raise SystemExit(max(process.exitcode or 0 for process in both))
