"""A worker: has the model, and computes what the cache does not have."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

import lightcache
from lightcache.connectors import transformers as connector
from lightcache.kernels import Move
from lightcache.tools.demo import life
from lightcache.tools.demo.devices import resolve
from lightcache.tools.demo.generate import Generated, generate
from lightcache.tools.demo.messages import Answer, Hello, Holding, Mailbox, Request
from lightcache.tools.demo.models import build
from lightcache.tools.demo.settings import SECRET, Settings

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
        self.window = max(1, int(self.model.config.num_hidden_layers) // _WINDOWS)
        name = settings.cache(number, lives)
        if name is not None:
            self.cache = stack.enter_context(
                connector.open_cache(
                    name,
                    self.model,
                    page_tokens=settings.page_tokens,
                    size=settings.cache_size,
                    secret=SECRET,
                    role=f"worker {number}",
                )
            )
            self.connector = stack.enter_context(connector.Connector(self.cache, self.model))
            if settings.settled:
                self.cache.pool.prefault()
            if self.connector.pinned is not None:
                if settings.settled:
                    self.connector.pinned.wait()
                self.connector.engine.warm()  # else the first hit would wait for the compiler

    def hello(self) -> Hello:
        """Who this is."""
        client = tuple(self.cache.client_id) if self.cache else (0, 0)
        name = self.cache.name if self.cache else None
        return Hello(self.number, self.life, os.getpid(), client, name)

    def serve(self, request: Request) -> Answer:
        """Answer a request. Blocks until all of it is published."""
        past, loaded = self._restored(request)
        reused = past.get_seq_length()
        with self._offloading(request, past) as begin:
            found = generate(self.model, request.tokens, past, request.answer_tokens, begin)
        if request.lease:  # loaded, long ago; without a verdict the ticket's record is never free
            self.cache.done(bytes.fromhex(request.lease))
        stored = self._stored(request) + self._save_answer(request, found, past)
        total = time.monotonic() - request.sent
        return Answer(
            number=request.number,
            worker=self.number,
            life=self.life,
            tokens=np.array(found.tokens, np.int32),
            logprobs=found.logprobs,
            reused={"host": reused},
            loaded_bytes=loaded,
            stored_bytes=stored,
            first_s=found.first_at - request.sent,
            steps_s=found.steps_s,
            total_s=total,
            baseline_s=self._from_nothing(request) if request.baseline else None,
        )

    def _restored(self, request: Request) -> tuple[Any, int]:
        """A transformers cache with what our cache has of the prompt; bytes that were loaded."""
        if not request.lease:
            return DynamicCache(config=self.model.config), 0
        lease = self.cache.adopt(bytes.fromhex(request.lease))
        nbytes = len(lease) * self.cache.page_bytes
        # The first layers compute while the others' pages are still on their way.
        return self.connector.restore(lease, window=self.window), nbytes

    @contextmanager
    def _offloading(self, request: Request, past: Any) -> Iterator[Any]:
        """Write the new pages of the prompt: from its first token on, while the answer is computed;
        leaving waits until they are published."""
        if not request.shard:
            yield lambda: None
            return
        shard = self.cache.adopt(bytes.fromhex(request.shard), shard=0)
        begun: list[lightcache.Offload] = []

        def begin() -> None:
            if request.hold:
                self._hold(request, past, shard)
            begun.append(self.connector.offload(past, shard, positions=request.positions))

        with shard:  # until the offload takes it over
            yield begin
            for offload in begun:
                offload.wait()

    def _stored(self, request: Request) -> int:
        return len(request.positions) * int(self.cache.page_bytes) if request.shard else 0

    def _save_answer(self, request: Request, found: Generated, past: Any) -> int:
        """The pages that the answer has filled: nobody reserved them for us, so we do. The last
        token is left out, its keys and values were never computed."""
        if self.cache is None or not request.cached:
            return 0
        known = np.concatenate([request.tokens, np.array(found.tokens[:-1], np.int32)])
        keys = self.cache.hash_pages(known)
        before = len(request.tokens) // self.settings.page_tokens
        if len(keys) == before:
            return 0
        new = self.cache.reserve(keys, start=before)
        nbytes = len(new.new) * int(self.cache.page_bytes)
        if nbytes:
            self.connector.offload(past, new).wait()
        else:
            new.release()
        return nbytes

    def _from_nothing(self, request: Request) -> float:
        """Seconds to the first token without a cache."""
        started = time.monotonic()
        empty = DynamicCache(config=self.model.config)
        return generate(self.model, request.tokens, empty, 1).first_at - started

    def _hold(self, request: Request, past: Any, shard: lightcache.Shard) -> None:
        """Copy half of the pages, then wait to be killed: the middle of an offload."""
        tokens = self.settings.page_tokens
        half = max(1, len(shard.pages) // 2)
        slots = [
            position * tokens + token
            for position in request.positions[:half]
            for token in range(tokens)
        ]
        planes = self.connector.planes(past)
        engine = self.connector.engine
        engine.offload(Move(shard.pages[:half], slots), planes=planes).wait()
        self.report.send(Holding(request.number, self.number, self.life, half, len(shard.pages)))
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
