"""A client that queues copies from its GPU into pages that it has reserved, and is killed then."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from support.keys import prompt

from lightcache import Cache

PAGE_BYTES = 8 << 20
PAGES = 64
"""Of the pool."""
TAKEN = 60
"""By the client."""
SWEEPS = 20
"""Times that all its pages are written, each time with another byte: 1,200 copies, 10 GB, 180 ms of
a copy engine of 55 GB/s."""
SECRET = bytes(16)


def byte_of(sweep: int) -> int:
    """What a sweep writes: never 0, never what the test stamps."""
    return sweep + 1


def make_context() -> Any:
    """Have a CUDA context, and thereby its files open. Returns torch."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return torch


def main(name: str, order: str, kind: str) -> None:
    """Queue the copies, say so, and wait to be killed.

    Args:
        name: of the cache.
        order: "before" or "after": when the liveness lock is opened, and the context is made.
        kind: "device": say that we have a device; "plain": do not, so there is no quarantine.
    """
    if order == "after":
        make_context()
    cache = Cache.attach(name, secret=SECRET, role="copier", device=kind == "device", grow=False)
    torch = make_context()
    reservation = cache.reserve(prompt(1, TAKEN))
    assert len(reservation.new) == TAKEN, repr(reservation)
    pool = cache.pool.tensor()
    code = torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), pool.numel(), 0)
    assert int(code) == 0, f"cudaHostRegister: {code}"
    pages = [pool[int(page)] for page in reservation.pages]
    sources = [
        torch.full((PAGE_BYTES,), byte_of(sweep), dtype=torch.uint8, device="cuda")
        for sweep in range(SWEEPS)
    ]
    pages[0].copy_(sources[0], non_blocking=True)  # whatever the first copy has to set up
    torch.cuda.synchronize()
    for source in sources:
        for page in pages:
            page.copy_(source, non_blocking=True)
    os.write(1, b"queued\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
