"""A worker of `bench serve`: the demo's, timed, with turns past the cache."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import transformers

from lightcache.tools.demo.messages import Ready, Turn, WorkerConfig
from lightcache.tools.demo.model import build, forward
from lightcache.tools.demo.worker import Worker, reporting, stop_in_offload

Pool = Literal["shared", "private", "none"]


@dataclass(frozen=True)
class Setup:
    """What a worker is started with."""

    run: str
    config: WorkerConfig
    devices: tuple[str, ...]
    pool: Pool
    workers: int

    def of(self, name: str) -> WorkerConfig:
        """The configuration of one worker, in its process: "worker-NUMBER"."""
        number = int(name.split("-")[1])
        spec = replace(self.config.model, device=self.devices[number % len(self.devices)])
        made = replace(self.config, model=spec)
        if self.pool == "private":
            size = self.config.host_bytes // self.workers
            made = replace(made, run=f"{self.run}-{os.getpid()}", host_bytes=size)
        return made


@dataclass(frozen=True)
class Job:
    """A turn, and whether it goes through the cache."""

    turn: Turn
    cached: bool


@dataclass(frozen=True)
class Timed:
    """An answered turn."""

    answer: list[int]
    """Token ids."""
    reused: dict[str, int]
    first_s: float
    """From `Turn.sent` to the first token."""
    steps_s: list[float]
    """Between tokens."""
    total_s: float
    """From `Turn.sent` until all pages are published."""


def through_the_cache(worker: Worker, turn: Turn) -> Timed:
    """Answer a turn as the demo's worker does."""
    answer = worker.serve(turn)
    worker.settle()
    return _timed(turn, answer.tokens, dict(answer.reused), answer.times)


def past_the_cache(model: Any, turn: Turn) -> Timed:
    """Answer a turn as transformers does by itself."""
    past = transformers.DynamicCache(config=model.config)
    given = turn.prompt.tolist()
    tokens: list[int] = []
    times: list[float] = []
    while len(tokens) < turn.answer_tokens:
        token, _ = forward(model, given, past)
        times.append(time.monotonic() - turn.sent)
        tokens.append(token)
        given = [token]
    return _timed(turn, tokens, {}, times)


def _timed(turn: Turn, tokens: list[int], reused: dict[str, int], times: list[float]) -> Timed:
    steps = [after - before for before, after in pairwise(times)]
    return Timed(tokens, reused, times[0], steps, time.monotonic() - turn.sent)


def run(setup: Setup, name: str, pipe: Connection) -> None:
    """The whole of a worker process."""
    config = setup.of(name)
    torch.set_num_threads(config.threads)
    with reporting(pipe), ExitStack() as stack:
        worker: Worker | None = None
        if setup.pool != "none":
            worker = Worker(config, name, stack)
            worker.kv.cache.pool.prefault()  # figures are of memory that is there
            if worker.kv.pinned is not None:
                worker.kv.pinned.wait()
        model = build(config.model) if worker is None else worker.model
        pipe.send(Ready())
        while True:
            job: Job = pipe.recv()
            if worker is None or not job.cached:
                pipe.send(past_the_cache(model, job.turn))
                continue
            if job.turn.hold:
                stop_in_offload(worker.kv.backend, job.turn, pipe)
            pipe.send(through_the_cache(worker, job.turn))


__all__ = ["Job", "Pool", "Setup", "Timed", "run"]
