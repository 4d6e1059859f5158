"""What a run is made of: one object, which travels to every process of it on its command line."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightcache.tools.demo.again import Again
from lightcache.tools.demo.models import ModelChoice
from lightcache.tools.demo.prompts import Prompts
from lightcache.tools.demo.returning import Returning
from lightcache.tools.demo.workload import Workload, conversations, trace

SECRET = b"a demo keeps no secret from anybody"
STATES = "-states"
"""What the cache of a hybrid model's states is called, behind the name of the other one."""
WORKLOADS: dict[str, Callable[..., Workload]] = {
    "conversations": conversations,
    "trace": trace,
    "prompts": Prompts,
    "again": Again,
    "returning": Returning,
}
Pool = Literal["shared", "private", "none"]
Routing = Literal["another", "random", "prefix"]


def run_name(kind: str) -> str:
    """A name that no other run has, not even one of the same PID: in another container with the
    same /dev/shm, or of another user who left something."""
    return f"{kind}-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Settings:
    """A run of the demo, or of `lightcache bench serve`."""

    run: str
    """What the names of its segments begin with."""
    parent: int
    """PID of the process that looks after it; without that one, all leave."""
    model: ModelChoice
    workload: dict[str, Any]
    """`kind`: a name of `WORKLOADS`; the others are its arguments."""
    size: int
    """Bytes of host memory for pages, of all workers together."""
    page_tokens: int = 16
    workers: int = 2
    devices: tuple[str, ...] = ("cpu",)
    """Worker i has devices[i % n]."""
    threads: int = 1
    """Of the processor, for each worker."""
    pool: Pool = "shared"
    routing: Routing = "another"
    """another: never the worker of the turn before; random: any; prefix: the one at which the turn
    costs least, by what is cached where and by what waits there."""
    storage: str | None = None
    """URL of what each worker writes to when a request ends, and reads from what the host does not
    have; None: nothing."""
    kept: int = 0
    """Transformers caches that each worker keeps on its device when their requests are over."""
    seed: int = 0
    baseline: bool = True
    alternate: bool = False
    """Every other turn goes past the cache, in both directions: to measure what it costs."""
    settled: bool = False
    """Workers are ready when all of a pool has its memory and is pinned, not as soon as they can
    begin: for figures."""
    hold_at: int | None = None
    """The worker that is given this turn, or the next one that writes any pages, is killed at
    it."""

    def again(self, path: str) -> Settings:
        """Of the run behind a restart. Its names are others: nothing of this one could be found by
        it even if it were there still.

        Args:
            path: of the turns that are asked, see `write_again`.
        """
        workload = {
            "kind": "again",
            "path": path,
            "first": self.make_workload().total,
            "vocabulary": self.workload["vocabulary"],
        }
        return replace(self, run=f"{self.run}-again", workload=workload, hold_at=None)

    @property
    def router_ring(self) -> str:
        """The router's inbox."""
        return f"{self.run}-router"

    @property
    def report_ring(self) -> str:
        """The report's inbox."""
        return f"{self.run}-report"

    @property
    def reference_ring(self) -> str:
        """The inbox of the reference."""
        return f"{self.run}-reference"

    def worker_ring(self, worker: int, life: int) -> str:
        """A worker's inbox: its own, so that a successor does not get what is too old."""
        return f"{self.run}-worker-{worker}-{life}"

    def cache(self, worker: int, life: int) -> str | None:
        """The name of a worker's cache. A private one ends with its worker, as a pool in the memory
        of an engine does."""
        if self.pool == "none":
            return None
        return f"{self.run}-cache" if self.pool == "shared" else f"{self.run}-{worker}-{life}-cache"

    def device_index(self, worker: int, life: int) -> str:
        """The name of the index of a worker's device blocks."""
        return f"{self.run}-{worker}-{life}-device"

    @property
    def cache_size(self) -> int:
        """Bytes of one cache."""
        return self.size if self.pool == "shared" else self.size // self.workers

    def device(self, worker: int) -> str:
        """Of a worker."""
        return self.devices[worker % len(self.devices)]

    def make_workload(self) -> Workload:
        """The turns, from the beginning."""
        arguments = dict(self.workload)
        return WORKLOADS[arguments.pop("kind")](**arguments)

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """What `to_json` was called on."""
        found = json.loads(text)
        found["model"] = ModelChoice(**found["model"])
        found["devices"] = tuple(found["devices"])
        return cls(**found)
