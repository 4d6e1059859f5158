"""A worker of `bench serve`: the demo's, timed, with requests past the cache."""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import transformers

from lightcache.errors import LightcacheError
from lightcache.tools.demo.messages import Failed, Ready, Request, WorkerConfig
from lightcache.tools.demo.model import build, forward, one_line
from lightcache.tools.demo.process import stopping
from lightcache.tools.demo.worker import Running, Worker

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
        """The configuration of one worker: "worker-NUMBER-LIFE"."""
        number = int(name.split("-")[1])
        spec = replace(self.config.model, device=self.devices[number % len(self.devices)])
        made = replace(self.config, model=spec)
        if self.pool == "private":
            size = self.config.host_bytes // self.workers
            made = replace(made, run=f"{self.run}-{name}", host_bytes=size)
        return made


@dataclass(frozen=True)
class Job:
    """A request, and whether it goes through the cache."""

    request: Request
    cached: bool


@dataclass(frozen=True)
class Timed:
    """A finished request."""

    answer: Any
    """Token ids."""
    reused: dict[str, int]
    first_s: float
    """From `Request.sent` to the first token."""
    steps_s: list[float]
    """Between tokens."""
    total_s: float
    """From `Request.sent` until all pages are published."""


class TimedWorker(Worker):
    """The demo's worker, without its comparison."""

    running: Running

    def prefill(self, running: Running) -> None:
        self.running = running
        super().prefill(running)

    def alone(self, request: Request) -> None:
        return None

    def timed(self, request: Request) -> Timed:
        """Answer a request."""
        answer = self.serve(request)
        return _timed(request, answer.tokens, dict(answer.reused), self.running.times)


def past_the_cache(model: Any, request: Request) -> Timed:
    """Answer a request as transformers does by itself."""
    past = transformers.DynamicCache(config=model.config)
    given = request.prompt.tolist()
    tokens: list[int] = []
    times: list[float] = []
    while len(tokens) < request.answer_tokens:
        token, _ = forward(model, given, past)
        times.append(time.monotonic())
        tokens.append(token)
        given = [token]
    return _timed(request, tokens, {}, times)


def _timed(request: Request, tokens: Any, reused: dict[str, int], times: list[float]) -> Timed:
    steps = [after - before for before, after in pairwise(times)]
    total = time.monotonic() - request.sent
    return Timed(tokens, reused, times[0] - request.sent, steps, total)


def run(setup: Setup, name: str, pipe: Connection) -> None:
    """The whole of a worker process."""
    config = setup.of(name)
    torch.set_num_threads(config.threads)
    try:
        with ExitStack() as stack:
            worker: Any = None
            if setup.pool != "none":
                worker = TimedWorker(config, name, stack)
                worker.kv.cache.pool.prefault()  # figures are of memory that is there
                if worker.kv.pinned is not None:
                    worker.kv.pinned.wait()
            model = build(config.model) if worker is None else worker.model
            pipe.send(Ready(os.getpid(), "" if worker is None else worker.kv_manager.device.name))
            while True:
                job: Job = pipe.recv()
                if worker is None or not job.cached:
                    pipe.send(past_the_cache(model, job.request))
                else:
                    request, backend = job.request, worker.kv.backend
                    holding = stopping(backend, request.number, pipe)
                    with holding if request.hold else contextlib.nullcontext():
                        pipe.send(worker.timed(request))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (LightcacheError, OSError, MemoryError, ImportError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # another worker failed first, and the pipe is closed
            pipe.send(Failed(one_line(error)))


__all__ = ["Job", "Pool", "Setup", "Timed", "run"]
