"""`lightcache demo`: one process writes pages, another finds and reads them."""

from __future__ import annotations

import multiprocessing as mp
import os
from multiprocessing.synchronize import Event

import click
import numpy as np

from lightcache.cache import Cache
from lightcache.errors import LightcacheError
from lightcache.tools.output import Command

_PAGE_TOKENS = 16
_PROMPT = 1000
_PATIENCE = 60.0  # seconds for the other process to start


def _cache(name: str, role: str) -> Cache:
    return Cache.open(
        name,
        pages=256,
        page_bytes=64 << 10,
        page_tokens=_PAGE_TOKENS,
        fingerprint="demo",
        secret=b"the demo keeps no secret",
        role=role,
    )


def _write(name: str, written: Event, read: Event) -> None:
    with _cache(name, "writer") as cache:
        keys = cache.hash_pages(np.arange(_PROMPT))
        with cache.reserve(keys) as new:
            for i, page in enumerate(new.pages):
                cache.pool[page][:] = i
            new.publish()
            print(f"writer (pid {os.getpid()}): {len(new.pages)} pages written, published")
        written.set()
        read.wait(_PATIENCE)


def _read(name: str, written: Event, read: Event) -> None:
    with _cache(name, "reader") as cache:
        keys = cache.hash_pages(np.arange(_PROMPT), leave_one=True)
        if not written.wait(_PATIENCE):
            raise LightcacheError("the writer did not write")
        with cache.match(keys) as hit:
            if any((cache.pool[page] != i).any() for i, page in enumerate(hit.pages)):
                raise LightcacheError("a page holds other bytes than were written")
            print(f"reader (pid {os.getpid()}): {hit.tokens} of {_PROMPT} tokens found, all right")
        read.set()


@click.command(cls=Command)
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Two processes share a small cache: one writes pages, the other finds and reads them."""
    spawn = mp.get_context("spawn")  # a forked child would not be attached
    name, events = f"demo-{os.getpid()}", (spawn.Event(), spawn.Event())
    both = [spawn.Process(target=run, args=(name, *events)) for run in (_write, _read)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    ctx.exit(1 if any(process.exitcode for process in both) else 0)
