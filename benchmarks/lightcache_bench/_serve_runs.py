"""Runs of `bench serve`: workers as in the demo, and turns that are given to them."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

import lightcache
from lightcache.errors import CacheCorrupted
from lightcache.tools.demo.messages import SECRET, Holding, ModelSpec, Ready, Turn, WorkerConfig
from lightcache.tools.demo.processes import WorkerProcess, Workers
from lightcache_bench._serve_workloads import WORKLOADS, Workload

Pool = Literal["shared", "private", "none"]
_runs = iter(range(1 << 30))


@dataclass(frozen=True)
class Settings:
    """One run."""

    run: str
    """The names of its segments begin with it."""
    model: ModelSpec
    workload: dict[str, Any]
    """`kind`: a name of `WORKLOADS`; the others are its arguments."""
    size: int
    """Bytes of host memory for pages, of all workers together."""
    page_tokens: int = 16
    workers: int = 2
    devices: tuple[str, ...] = ("cpu",)
    """Worker i has devices[i % n]."""
    threads: int = 1
    pool: Pool = "shared"
    random_routing: bool = True
    """Otherwise turns go round."""
    storage: str | None = None
    alternate: bool = False
    """Every other turn goes past the cache, in both directions."""
    hold_at: int | None = None
    """After so many answers a worker is killed in the middle of an offload."""

    def make_workload(self) -> Workload:
        """The turns, from the beginning."""
        arguments = dict(self.workload)
        return WORKLOADS[arguments.pop("kind")](**arguments)

    def cached(self, turn: Turn) -> bool:
        """Whether a turn goes through the cache; as many of either kind for each worker."""
        return not (self.alternate and turn.number // self.workers % 2)


@dataclass(frozen=True)
class Served:
    """A turn that was answered."""

    number: int
    conversation: int
    turn: int
    prompt: int
    cached: bool
    waited_s: float
    """From when the turn could be asked until its worker had time."""
    reused: dict[str, int]
    first_s: float
    steps_s: list[float]
    total_s: float


@dataclass
class Run:
    """What came out of one run."""

    turns: list[Served] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    """Of each death: from the signal until the pages could be used again."""
    seconds: float = 0.0
    """From the first request to the last answer."""

    def values(
        self, what: Callable[[Served], Sequence[float]], where: Callable[[Served], bool] = bool
    ) -> list[float]:
        """Some figure of all turns that fulfil a condition."""
        return [value for turn in self.turns if where(turn) for value in what(turn)]


@dataclass(eq=False)
class _Peer:
    """A worker of a number, whichever lives."""

    pipe: Connection | None = None
    running: tuple[Turn, float] | None = None
    waiting: deque[Turn] = field(default_factory=deque)


class _Serving:
    """One run, while it goes on."""

    def __init__(self, settings: Settings, workers: Workers, stack: contextlib.ExitStack) -> None:
        self.settings, self.workers, self.run, self._stack = settings, workers, Run(), stack
        self.workload = settings.make_workload()
        self.caches: dict[str, lightcache.Cache] = {}
        self._peers = [_Peer() for _ in range(settings.workers)]
        self._random = random.Random(0)
        self._asked: dict[int, float] = {}
        self._held: int | None = None
        self._killed = settings.hold_at is None

    def serve(self) -> None:
        """Have every turn answered, then check the caches."""
        while any(peer.pipe is None for peer in self._peers):
            self._hear()
        began = time.monotonic()
        self._ask(self.workload.begin())
        while len(self.run.turns) < self.workload.total:
            for peer in self._peers:
                self._send(peer)
            self._hear()
        self.run.seconds = time.monotonic() - began
        for cache in self.caches.values():
            _check(cache)

    def _ask(self, turns: list[Turn]) -> None:
        for turn in turns:
            number = turn.conversation + turn.turn
            if self.settings.random_routing:
                number = self._random.randrange(len(self._peers))
            self._asked[turn.number] = time.monotonic()
            self._peers[number % len(self._peers)].waiting.append(turn)

    def _send(self, peer: _Peer) -> None:
        from lightcache_bench._serve_worker import Job

        if peer.pipe is None or peer.running is not None or not peer.waiting:
            return
        turn, now = peer.waiting.popleft(), time.monotonic()
        peer.running = turn, now - self._asked[turn.number]
        due = len(self.run.turns) >= (self.settings.hold_at or 0) and not self._killed
        hold = due and self._held is None
        if hold:
            self._held = turn.number
        job = Job(replace(turn, sent=now, hold=hold), self.settings.cached(turn))
        with contextlib.suppress(OSError):  # it has just died
            peer.pipe.send(job)

    def _hear(self) -> None:
        for worker, message in self.workers.messages():
            if message is None:
                self._on_death(worker)
            elif isinstance(message, Ready):
                self._on_ready(worker)
            elif isinstance(message, Holding):
                worker.kill()
                self._killed = True
            else:
                self._on_answer(self._peers[worker.number], message)

    def _name(self, worker: WorkerProcess) -> str:
        own = f"-{worker.process.pid}" if self.settings.pool == "private" else ""
        return f"{self.settings.run}{own}-kv"

    def _on_ready(self, worker: WorkerProcess) -> None:
        self._peers[worker.number].pipe = worker.pipe
        name = self._name(worker)
        if self.settings.pool != "none" and name not in self.caches:
            cache = lightcache.Cache.attach(name, secret=SECRET, grow=False)
            self.caches[name] = self._stack.enter_context(cache)

    def _on_answer(self, peer: _Peer, timed: Any) -> None:
        assert peer.running is not None
        (turn, waited_s), peer.running = peer.running, None
        if turn.number == self._held:
            self._held = None  # it had too little to write: the next turn then
        self.run.turns.append(
            Served(
                turn.number,
                turn.conversation,
                turn.turn,
                len(turn.prompt),
                self.settings.cached(turn),
                waited_s,
                timed.reused,
                timed.first_s,
                timed.steps_s,
                timed.total_s,
            )
        )
        self._ask(self.workload.answered(turn, timed.answer))

    def _on_death(self, worker: WorkerProcess) -> None:
        """Its turns wait for its successor. A private pool ends with its worker."""
        assert worker.killed_at is not None
        peer, cache = self._peers[worker.number], self.caches.get(self._name(worker))
        if cache is not None:
            cache.reap()
            self.run.recovered_s.append(time.monotonic() - worker.killed_at)
            if self.settings.pool == "private":
                _check(self.caches.pop(cache.name))
                cache.close()
        peer.pipe = None
        if peer.running is not None:
            peer.waiting.appendleft(peer.running[0])
            peer.running = None


def _check(cache: lightcache.Cache) -> None:
    report = cache.check()
    if not report.clean:
        raise CacheCorrupted(f"{cache.name}: {report.message}")


def serve(settings: Settings) -> Run:
    """Start everything, answer every turn, check the caches, end everything. Blocks.

    Raises:
        RunFailed: a process could not continue. CacheCorrupted: a check found something.
    """
    from lightcache_bench._serve_worker import Setup

    settings = replace(settings, run=f"{settings.run}-{next(_runs)}")
    config = WorkerConfig(
        settings.run,
        settings.model,
        settings.size,
        settings.make_workload().longest,
        settings.storage,
        settings.page_tokens,
        settings.threads,
    )
    setup: Any = Setup(settings.run, config, settings.devices, settings.pool, settings.workers)
    with contextlib.ExitStack() as stack:
        workers = Workers(setup, settings.workers, "lightcache_bench._serve_worker:run", stack)
        serving = _Serving(settings, workers, stack)
        serving.serve()
    return serving.run


def median(values: Sequence[float]) -> float:
    """nan of none."""
    return statistics.median(values) if values else float("nan")


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank; nan of none."""
    if not values:
        return float("nan")
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


def steps(run: Run) -> Iterator[float]:
    """Seconds between tokens, of all turns."""
    for turn in run.turns:
        yield from turn.steps_s


__all__ = ["Pool", "Run", "Served", "Settings", "median", "percentile", "serve", "steps"]
