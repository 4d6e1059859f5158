"""One rank of a coordinator, in a process of its own: computes stamps, copies its shard, and
reports in each step the decisions it got and whether it read what it should.

    rank_worker_side.py CACHE LOG RANK BLOCKS [KIND STAGE]

With a kind ("load" or "offload") and a stage it stops there at its first such copy, says so, and
waits to be killed.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from typing import Any

import numpy as np
from support.crew import PAGE
from support.shard_backend import SECRET, ShardBackend
from support.stamped import StampedDevice, stamps_of

from lightcache import Cache
from lightcache.manager.ranks.messages import Decisions
from lightcache.manager.ranks.worker import RankWorker
from lightcache.reservations import ReservationShard
from lightcache.shm import SharedLog


def say(**what: Any) -> None:
    """A line to the process that started us."""
    print(json.dumps(what), flush=True)


def stop(stage: str) -> None:
    """Here we are killed."""
    say(stopped=stage)
    while True:
        signal.pause()


class DoomedBackend(ShardBackend):
    """Stops during its first copy of one kind."""

    kind = stage = ""

    def _stops(self, moving: Any, stage: str) -> bool:
        kind = "offload" if isinstance(moving.held, ReservationShard) else "load"
        return (kind, stage) == (self.kind, self.stage)

    def finish(self, count: int | None = None) -> None:
        if self.going and self._stops(self.going[0], "adopted"):
            stop("adopted")
        super().finish(count)

    def _offload(self, moving: Any) -> None:
        if self._stops(moving, "copying"):
            self._page(int(moving.held.pages[0]))[:2] = 0xBAD
            stop("copying")
        if self._stops(moving, "verdict"):
            moving.held.publish = lambda: stop("verdict")
        super()._offload(moving)

    def _load(self, moving: Any) -> None:
        if self._stops(moving, "copying"):
            self.device.slots[moving.slots[moving.slots >= 0][:2]] = 0xBAD
            stop("copying")
        super()._load(moving)
        if self._stops(moving, "verdict"):
            stop("verdict")


class Side:
    """This rank."""

    def __init__(self, cache: str, log: str, rank: str, blocks: str, *doom: str) -> None:
        self.rank = int(rank)
        self.cache = Cache.attach(cache, secret=SECRET, role=f"rank {rank}")
        self.device = StampedDevice(int(blocks), PAGE)
        self.backend = DoomedBackend(self.cache, self.device, self.rank)
        if doom:
            self.backend.kind, self.backend.stage = doom
        self.log = SharedLog.attach(log)
        self.worker = RankWorker(self.log, self.cache, self.backend, self.rank)
        self.worker.ready(60)

    def compute(self, tokens: list[int], table: list[int], begin: int) -> int:
        """Check the tokens before `begin`, compute the rest. Returns the number of wrong tokens."""
        stamps = stamps_of(tokens, self.rank)
        found = self.device.read(np.array(table), 0, begin)
        self.device.write(table, begin, stamps[begin:])
        return int((found != stamps[:begin]).sum())

    def step(self) -> bool:
        """One step. False: it was the last."""
        told = self.worker.step(60)
        work = json.loads(told.extra)
        wrong = sum(self.compute(*what) for what in work["compute"])
        say(step=told.step, digest=digest_of(told), wrong=wrong)
        return bool(work["go_on"])

    def close(self) -> None:
        """Leave."""
        self.worker.close(60)
        self.log.close()
        self.cache.close()


def digest_of(told: Decisions) -> str:
    """A digest of all decisions of a step."""
    said = [told.step, sorted(map(repr, told.lengths.items())), told.completed, told.failed]
    whole = repr([*said, told.releases]).encode() + told.extra
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


def main() -> None:
    """Carry out every step."""
    side = Side(*sys.argv[1:])
    while side.step():
        pass
    side.close()


if __name__ == "__main__":
    main()
