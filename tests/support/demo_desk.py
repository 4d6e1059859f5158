"""The router of the demo at a desk: a test drives it message by message, and plays its workers."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

import lightcache
from lightcache.manager import AttachedDevice, KVCacheManager, ManagerStats, NullMover, Prompt
from lightcache.manager.backend import Moving
from lightcache.tools.demo.messages import Answer, Hello, Lost, Mailbox, Recovered, Request, Served
from lightcache.tools.demo.models import ModelChoice
from lightcache.tools.demo.router import Router
from lightcache.tools.demo.seats import Seats
from lightcache.tools.demo.settings import SECRET, Settings
from lightcache.tools.demo.workload import Turn

PAGE_BYTES = 4096
PAGE_TOKENS = 4
PAGES = 64
WAIT = 30.0  # seconds; nothing here takes one
VOCABULARY = 1000
WORKLOAD: dict[str, Any] = {
    "kind": "conversations",
    "seed": 3,
    "users": 2,
    "turns": 3,
    "system_tokens": 17,
    "message_tokens": 8,
    "answer_tokens": 3,
    "vocabulary": VOCABULARY,
    "branches": 0,
}


LEAVES_A_RING = """
import os, signal, sys
from lightcache.shm import SharedRing
ring = SharedRing.create(sys.argv[1], capacity=1, message_bytes=8)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A script: what a process leaves that is killed, under the name that is its argument."""


def settings_of(run: str, **changes: Any) -> Settings:
    """Of a run that is looked after by whoever looks after the tests: nobody is an orphan."""
    plain = Settings(
        run=run,
        parent=os.getppid(),
        model=ModelChoice(),
        workload=WORKLOAD,
        size=PAGES * PAGE_BYTES,
        page_tokens=PAGE_TOKENS,
    )
    return replace(plain, **changes)


def open_cache(settings: Settings, worker: int, life: int) -> lightcache.Cache | None:
    """As a worker does, with small pages."""
    name = settings.cache(worker, life)
    if name is None:
        return None
    return lightcache.Cache.open(
        name,
        size=settings.cache_size,
        page_bytes=PAGE_BYTES,
        page_tokens=settings.page_tokens,
        fingerprint="demo",
        secret=SECRET,
        role=f"worker {worker}",
        grow=False,
    )


def assert_nothing_is_held(cache: lightcache.Cache) -> None:
    """No pin, no ticket, no reservation. Evicts a page."""
    cache.reap()
    report, stats = cache.check(), cache.stats()
    assert report.clean, report.message
    assert report.pins == 0
    assert (stats.tickets, stats.writing) == (0, 0)
    cache.evict(1)  # whoever makes room collects what has ended
    stats = cache.stats()
    assert (stats.reservations, stats.doomed) == (0, 0)


class PlayedMover:
    """Copies nothing to the device, and writes to each page its position in the prompt."""

    shards = 1

    def __init__(self, cache: lightcache.Cache) -> None:
        self.cache = cache

    def load(self, lease: lightcache.Lease, slots: Any, first: int) -> Moving:
        """See `Mover`."""
        return NullMover().load(lease, slots, first)

    def offload(self, new: lightcache.Reservation, slots: Any) -> Moving:
        """See `Mover`."""
        for page, position in zip(new.pages.tolist(), new.new.tolist(), strict=True):
            self.cache.pool[page][:] = position
        return NullMover().offload(new, slots)


class FakeWorker:
    """A worker without a model: it answers what the test says."""

    def __init__(self, settings: Settings, number: int, life: int, stack: ExitStack) -> None:
        self.settings, self.number, self.life = settings, number, life
        self.inbox = stack.enter_context(Mailbox(settings.worker_ring(number, life)))
        self.cache: Any = open_cache(settings, number, life)
        self.seats = Seats(settings.kept, PAGES)
        self._own = stack.enter_context(ExitStack())
        name = device = None
        if self.cache is not None:
            self._own.callback(self.cache.close)
            name, device = self.cache.name, settings.device_index(number, life)
            tier = AttachedDevice(
                device, block_tokens=settings.page_tokens, blocks=self.seats.blocks
            )
            self._own.callback(tier.close)
            mover = PlayedMover(self.cache)
            self.manager = self._own.enter_context(KVCacheManager(self.cache, tier, mover))
        self.hello = Hello(number, life, os.getpid(), name, device)

    def request(self) -> Any:
        """The next request, or None."""
        return self.inbox.receive(0)

    def die(self) -> None:
        """Be gone, as far as one can within a process that lives."""
        self._own.close()

    def through(self, request: Request, answer: Any) -> ManagerStats:
        """Take a request through the cache, as a worker does."""
        seat, total = self.seats.take(request.tokens), len(request.tokens) + len(answer) - 1
        there = len(seat.tokens)
        self.manager.plan(request.number, Prompt(request.tokens), device_tokens=there)
        self.manager.take(request.number)
        table = seat.table(total // self.settings.page_tokens + 1)
        self.manager.fetch(request.number, table)
        self.manager.commit(request.number, len(request.tokens), table=table)
        self.manager.commit(request.number, total, new_tokens=answer[:-1], table=table)
        self.manager.release(request.number, wait=True)
        seat.tokens = np.concatenate([request.tokens, answer[:-1]])
        gone = self.seats.leave(seat)
        if gone is not None:
            self.manager.evicted(gone.table(PAGES))
        found: ManagerStats = self.manager.reset_stats()
        return found

    def answer(self, request: Request) -> Answer:
        """Do all of it. The answer depends on the prompt alone."""
        start = int(request.tokens.sum())
        tokens = np.array(
            [(start + at) % VOCABULARY for at in range(request.answer_tokens)], np.int32
        )
        cached = request.cached and self.cache is not None
        stats = self.through(request, tokens) if cached else ManagerStats()
        return Answer(
            number=request.number,
            worker=self.number,
            life=self.life,
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            reused={"host": stats.host_tokens, "device": stats.device_tokens},
            loaded_bytes=stats.loaded_pages * PAGE_BYTES,
            stored_bytes=stats.offloaded_pages * PAGE_BYTES,
            first_s=0.25,
            steps_s=[0.5] * (len(tokens) - 1),
            total_s=2.0,
            lookup_s=0.125 if cached else None,
            baseline_s=None,
        )


class Desk:
    """A router, its rings, and the workers that a test plays."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self.settings, self.stack = settings, stack
        self.report = stack.enter_context(Mailbox(settings.report_ring))
        self.inbox = stack.enter_context(Mailbox(settings.router_ring))
        self.outbox = stack.enter_context(Mailbox(settings.router_ring))
        self.router = Router(settings, self.inbox, self.report, stack)
        self.workers: list[Any] = [None] * settings.workers
        self.served: list[Served] = []
        self.recovered: list[Recovered] = []

    def tell(self, message: Any) -> None:
        """Something for the router, which handles it now."""
        self.outbox.send(message)
        self.router.handle()

    def arrive(self, number: int, life: int = 0) -> FakeWorker:
        """A worker comes and says so."""
        worker = self.workers[number] = FakeWorker(self.settings, number, life, self.stack)
        self.tell(worker.hello)
        return worker

    def begin(self) -> list[Turn]:
        """All workers come, and the first turns, which are returned, are routed."""
        for number in range(self.settings.workers):
            self.arrive(number)
        turns = self.router.workload.begin()
        self.router.route(turns)
        return turns

    def dispatch(self) -> None:
        """Whoever is free gets something to do."""
        for number in range(self.settings.workers):
            self.router.dispatch(number)

    def lost(self, number: int) -> Recovered:
        """Say that the last worker of this number has ended; what the router made of it."""
        self.tell(Lost(number, self.workers[number].life, time.monotonic()))
        self.collect()
        return self.recovered[-1]

    def collect(self) -> None:
        """Take what the router has told the report."""
        while (message := self.report.receive(0)) is not None:
            if isinstance(message, Served):
                self.served.append(message)
            else:
                assert isinstance(message, Recovered)
                self.recovered.append(message)

    def serve_all(self) -> list[tuple[int, Request]]:
        """Until nothing is left to do: worker and request of each turn, in their order."""
        done: list[tuple[int, Request]] = []
        while self.router.answered < self.router.workload.total:
            self.dispatch()
            asked = [(each, each.request()) for each in self.workers if each is not None]
            asked = [(worker, request) for worker, request in asked if request is not None]
            assert asked, "nobody has anything to do"
            for worker, request in asked:
                done.append((worker.number, request))
                self.tell(worker.answer(request))
                self.collect()
        return done
