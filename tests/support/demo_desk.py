"""The router of the demo at a desk: a test drives it message by message, and plays its workers."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

import lightcache
from lightcache.tools.demo.messages import Answer, Hello, Lost, Mailbox, Recovered, Request, Served
from lightcache.tools.demo.models import ModelChoice
from lightcache.tools.demo.router import Router
from lightcache.tools.demo.settings import SECRET, Settings

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


class FakeWorker:
    """A worker without a model: it answers what the test says."""

    def __init__(self, settings: Settings, number: int, life: int, stack: ExitStack) -> None:
        self.settings, self.number, self.life = settings, number, life
        self.inbox = stack.enter_context(Mailbox(settings.worker_ring(number, life)))
        self.cache: Any = open_cache(settings, number, life)
        if self.cache is not None:
            stack.callback(self.cache.close)
        client = tuple(self.cache.client_id) if self.cache else (0, 0)
        name = self.cache.name if self.cache else None
        self.hello = Hello(number, life, os.getpid(), client, name)  # type: ignore[arg-type]

    def request(self) -> Any:
        """The next request, or None."""
        return self.inbox.receive(0)

    def load(self, request: Request) -> list[int]:
        """Adopt the lease, give the verdict, and return its pages."""
        if not request.lease:
            return []
        ticket = bytes.fromhex(request.lease)
        with self.cache.adopt(ticket) as lease:
            pages: list[int] = lease.pages.tolist()
        self.cache.done(ticket)
        return pages

    def store(self, request: Request) -> list[int]:
        """Adopt the shard, write it, publish it, and return its pages."""
        if not request.shard:
            return []
        with self.cache.adopt(bytes.fromhex(request.shard), shard=0) as shard:
            pages: list[int] = shard.pages.tolist()
            for page, position in zip(pages, request.positions, strict=True):
                self.cache.pool[page][:] = position
            assert shard.publish()
        return pages

    def answer(self, request: Request) -> Answer:
        """Do all of it. The answer depends on the prompt alone."""
        loaded, stored = self.load(request), self.store(request)
        start = int(request.tokens.sum())
        tokens = [(start + at) % VOCABULARY for at in range(request.answer_tokens)]
        return Answer(
            number=request.number,
            worker=self.number,
            life=self.life,
            tokens=np.array(tokens, np.int32),
            logprobs=[-0.5] * len(tokens),
            reused={"host": len(loaded) * self.settings.page_tokens},
            loaded_bytes=len(loaded) * PAGE_BYTES,
            stored_bytes=len(stored) * PAGE_BYTES,
            first_s=0.25,
            steps_s=[0.5] * (len(tokens) - 1),
            total_s=2.0,
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

    def begin(self) -> None:
        """All workers come, and the first turns are routed."""
        for number in range(self.settings.workers):
            self.arrive(number)
        self.router.route(self.router.workload.begin())

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
