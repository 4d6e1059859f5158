"""A worker: has the model, finds what the cache has of a prompt, and computes the rest."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

import lightcache
from lightcache.connectors import transformers as connector
from lightcache.kernels import Move
from lightcache.manager import AttachedDevice, KVCacheManager, ManagerStats, PrefixMatch, Prompt
from lightcache.storage import StorageSpec, StorageTier, open_storage
from lightcache.tools.demo import life
from lightcache.tools.demo.devices import resolve
from lightcache.tools.demo.generate import Generated, generate
from lightcache.tools.demo.hybrid import HybridSide
from lightcache.tools.demo.messages import Answer, Hello, Holding, Mailbox, Request
from lightcache.tools.demo.models import build
from lightcache.tools.demo.mover import CacheMover
from lightcache.tools.demo.seats import Seat, Seats
from lightcache.tools.demo.settings import SECRET, Settings

_BLOCKS = 1024  # numbers for each request, though the pool may be smaller: some 200 KiB
_WINDOWS = 8  # parts that a restored prefix arrives in, by layers


class Worker:
    """One model, on one device, attached to one cache or none."""

    def __init__(
        self, settings: Settings, number: int, lives: int, report: Mailbox, stack: ExitStack
    ) -> None:
        """Builds the model and opens the cache; seconds.

        Args:
            number, lives: which worker, and how many of this number were there before.
            stack: closes everything.
        """
        self.settings, self.number, self.life, self.report = settings, number, lives, report
        self.model = build(replace(settings.model, device=resolve(settings.device(number), number)))
        self.cache: Any = None
        self.connector: Any = None
        self.manager: Any = None
        self.storage: StorageTier | None = None
        self.hybrid: HybridSide | None = None
        name = settings.cache(number, lives)
        if name is not None and settings.model.hybrid:
            self.hybrid = HybridSide(settings, name, self.model, f"worker {number}", stack)
            self.cache, self.connector = self.hybrid.caches.kv, self.hybrid.connector
        elif name is not None:
            self._open(name, stack)

    def _open(self, name: str, stack: ExitStack) -> None:
        """The cache, who moves its pages, the index of the device, and the manager of them all."""
        settings = self.settings
        self.cache = stack.enter_context(
            connector.open_cache(
                name,
                self.model,
                page_tokens=settings.page_tokens,
                size=settings.cache_size,
                secret=SECRET,
                lifetime="attached",
                role=f"worker {self.number}",
            )
        )
        self.connector = stack.enter_context(connector.Connector(self.cache, self.model))
        if settings.settled:
            self.cache.pool.prefault()
        if self.connector.pinned is not None:
            if settings.settled:
                self.connector.pinned.wait()
            engine: Any = self.connector.engine
            engine.warm()  # else the first hit would wait for the compiler
        window = max(1, int(self.model.config.num_hidden_layers) // _WINDOWS)
        self.mover = CacheMover(self.connector, window)
        longest = -(-int(self.model.config.max_position_embeddings) // settings.page_tokens)
        self.seats = Seats(settings.kept, min(longest, max(self.cache.index.pages, _BLOCKS)))
        device = AttachedDevice(
            settings.device_index(self.number, self.life),
            block_tokens=settings.page_tokens,
            blocks=self.seats.blocks,
            role=f"worker {self.number}",
        )
        stack.callback(device.close)
        if settings.storage is not None:
            backend = open_storage(settings.storage, spec=StorageSpec.of(self.cache))
            stack.enter_context(backend)
            # One request at a time: what it has may all be pinned until it is written.
            tier = StorageTier(self.cache, backend, write_pages=self.cache.pages)
            self.storage = stack.enter_context(tier)
        self.manager = stack.enter_context(
            KVCacheManager(self.cache, device, self.mover, storage=self.storage)
        )

    def hello(self) -> Hello:
        """Who this is."""
        name = self.cache.name if self.cache else None
        device = self.manager.device.name if self.manager else None
        return Hello(self.number, self.life, os.getpid(), name, device)

    def serve(self, request: Request) -> Answer:
        """Answer a request. Blocks until all of it is published."""
        if self.hybrid is not None and request.cached:
            hold = partial(self._hold, request)
            return self._answer(request, *self.hybrid.serve(request, hold))
        if self.manager is None or not request.cached:
            past = DynamicCache(config=self.model.config)
            found = generate(self.model, request.tokens, past, request.answer_tokens)
            return self._answer(request, found, None, ManagerStats())
        seat = self.seats.take(request.tokens)
        there = min(len(seat.tokens), seat.most * self.settings.page_tokens)
        before = time.perf_counter()
        self.manager.plan(request.number, Prompt(request.tokens), device_tokens=there)
        match = self.manager.take(request.number, wait=True)  # what there is: ours from now on
        lookup = time.perf_counter() - before
        found = self._computed(request, seat, match)
        return self._answer(request, found, lookup, self.manager.reset_stats())

    def _computed(self, request: Request, seat: Seat, match: PrefixMatch) -> Generated:
        """Load what was found and compute the rest, the new pages on their way to the host as soon
        as the prompt is computed. What the answer has filled follows in the end; its last token is
        left out, whose keys and values were never computed."""
        manager, number, prompt = self.manager, request.number, request.tokens
        total = len(prompt) + request.answer_tokens - 1
        table = seat.table(-(-total // self.settings.page_tokens))
        if seat.past is None:
            seat.past = self.connector.empty()
        beyond = seat.past.held - match.device
        if beyond:  # of a block that is not whole: it is loaded with its page, or computed
            seat.past.crop(-beyond)
        self.mover.past, self.mover.hold = seat.past, None
        if request.hold:
            self.mover.hold = lambda new: self._hold(request, new, seat.past)
        manager.fetch(number, table)
        found = generate(
            self.model,
            prompt,
            seat.past,
            request.answer_tokens,
            lambda: manager.commit(number, len(prompt), table=table),
        )
        answer = np.array(found.tokens[:-1], np.int32)
        manager.commit(number, total, new_tokens=answer, table=table)
        manager.release(number, wait=True)
        seat.tokens = np.concatenate([prompt, answer])
        gone = self.seats.leave(seat)
        if gone is not None:
            manager.evicted(gone.table(-(-len(gone.tokens) // self.settings.page_tokens)))
        return found

    def _answer(
        self, request: Request, found: Generated, lookup: float | None, stats: ManagerStats
    ) -> Answer:
        """Args:
        stats: of this request alone.
        """
        total = time.monotonic() - request.sent
        tiers = {"device": stats.device_tokens, "storage": stats.storage_tokens}
        page_bytes = int(self.cache.page_bytes) if self.cache is not None else 0
        return Answer(
            number=request.number,
            worker=self.number,
            life=self.life,
            tokens=np.array(found.tokens, np.int32),
            logprobs=found.logprobs,
            reused={"host": stats.host_tokens, **{tier: n for tier, n in tiers.items() if n}},
            loaded_bytes=stats.loaded_pages * page_bytes,
            stored_bytes=stats.offloaded_pages * page_bytes,
            first_s=found.first_at - request.sent,
            steps_s=found.steps_s,
            total_s=total,
            lookup_s=lookup,
            baseline_s=self._from_nothing(request) if request.baseline else None,
        )

    def _from_nothing(self, request: Request) -> float:
        """Seconds to the first token without a cache."""
        started = time.monotonic()
        empty = DynamicCache(config=self.model.config)
        return generate(self.model, request.tokens, empty, 1).first_at - started

    def _hold(self, request: Request, new: lightcache.Reservation, past: Any) -> None:
        """Copy half of the pages, then wait to be killed: the middle of an offload."""
        tokens = self.settings.page_tokens
        half = max(1, len(new.pages) // 2)
        slots = [
            position * tokens + token
            for position in new.new[:half].tolist()
            for token in range(tokens)
        ]
        planes = self.connector.planes(past)
        engine = self.connector.engine
        engine.offload(Move(new.pages[:half], slots), planes=planes).wait()
        self.report.send(Holding(request.number, self.number, self.life, half, len(new.pages)))
        while not life.orphaned(self.settings):
            time.sleep(0.1)
        raise life.Leave


def body(settings: Settings, numbers: list[int]) -> None:
    """Serve until the end."""
    number, lives = numbers
    torch.set_num_threads(settings.threads)
    with ExitStack() as stack:
        report = stack.enter_context(Mailbox(settings.report_ring))
        router = stack.enter_context(Mailbox(settings.router_ring))
        inbox = stack.enter_context(Mailbox(settings.worker_ring(number, lives)))
        worker = Worker(settings, number, lives, report, stack)
        hello = worker.hello()
        report.send(hello)
        router.send(hello)
        while True:
            router.send(worker.serve(life.receive(inbox, settings)))


if __name__ == "__main__":
    life.run("worker", body)
