"""A coordinator and its ranks in one process: each rank has a client, a device and a transfer
backend of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.keys import prompt
from support.shard_backend import SECRET, ShardBackend, open_sharded
from support.stamped import StampedDevice, Stamps, stamps_of

from lightcache import Cache, Reservation
from lightcache.manager.ranks.coordinator import RankCoordinator, RankTransfer
from lightcache.manager.ranks.messages import Decisions
from lightcache.manager.ranks.worker import RankWorker
from lightcache.shm import SharedLog

PAGE = 4


class Rank:
    """One rank."""

    def __init__(self, cache_name: str, log_name: str, rank: int, slots: int = 256) -> None:
        self.cache = Cache.attach(cache_name, secret=SECRET, role=f"rank {rank}")
        self.log = SharedLog.attach(log_name)
        self.device = StampedDevice(slots // PAGE, PAGE)
        self.backend = ShardBackend(self.cache, self.device, rank)
        self.worker = RankWorker(self.log, self.cache, self.backend, rank)
        self.rank = rank

    def compute(self, tokens: Any, slots: Any) -> None:
        """Have computed the KV of these tokens."""
        self.device.slots[slots] = self.stamps(tokens)

    def stamps(self, tokens: Any) -> Stamps:
        """What this rank computes of tokens."""
        return stamps_of(tokens, self.rank)

    def close(self) -> None:
        """Leave."""
        self.backend.finish()
        self.worker.close()
        self.log.close()
        self.cache.close()


class Crew:
    """A host cache, a log, a coordinator, and ranks."""

    def __init__(
        self, name: str, ranks: int = 3, *, pages: int = 16, capacity: int = 64, **how: Any
    ) -> None:
        self.name, self.log_name = name, f"{name}.log"
        self.cache = open_sharded(name, pages, PAGE, ranks)
        self.log = SharedLog.create(self.log_name, capacity=capacity, message_bytes=64)
        self.ranks = [Rank(name, self.log_name, rank) for rank in range(ranks)]
        self.coordinator = RankCoordinator(
            self.log, [each.cache.client_id for each in self.ranks], **how
        )
        self.steps = 0

    def reserve(self, number: int, pages: int) -> Reservation:
        """Pages of a prompt, to be written by all ranks."""
        return self.cache.reserve(prompt(number, pages), shards=len(self.ranks))

    def step(self, ranks: list[Rank] | None = None, **what: Any) -> Decisions:
        """One step: every rank gets the same decisions."""
        told = self.coordinator.step(Decisions(self.steps, **what))
        self.steps += 1
        for each in self.ranks if ranks is None else ranks:
            assert each.worker.step(60) == told
        return told

    def poll(self) -> None:
        """All ranks notice finished copies."""
        for each in self.ranks:
            each.worker.poll()

    def settled(self, wait_until: Callable[..., None] | None = None) -> None:
        """No copy is in flight: no client may hold anything."""
        assert self.coordinator.poll() == 0
        assert self.coordinator.in_flight() == (0,) * len(self.coordinator.ranks)
        self.cache.reap()
        self.cache.evict(1)  # collects what was doomed
        found = self.cache.stats()
        assert (found.writing, found.doomed, found.held) == (0, 0, 0), found
        report = self.cache.check()
        assert report.clean, report.message
        assert report.pins == 0

    def ended(self, made: RankTransfer) -> bool:
        """Let every rank finish its copies; whether this copy has finished."""
        self.poll()
        return made.done()

    def close(self) -> None:
        """Leave."""
        for each in self.ranks:
            each.close()
        self.coordinator.poll()
        self.log.close()
        self.cache.close()
