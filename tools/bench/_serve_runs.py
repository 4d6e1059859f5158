"""Runs of `bench serve`: a router and workers as in the demo, without the show."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import lightcache
from lightcache.errors import CacheCorrupted
from lightcache.tools.demo.messages import Finished, Hello, Holding, Lost, Recovered, Served
from lightcache.tools.demo.settings import SECRET, Settings
from lightcache.tools.demo.stage import Stage

_runs = iter(range(1 << 30))


@dataclass
class Run:
    """What came out of one run."""

    turns: list[Served] = field(default_factory=list)
    recovered: list[Recovered] = field(default_factory=list)
    finished: Finished | None = None
    ready_s: float = 0.0
    """From the start until the last worker was ready."""

    def values(
        self, what: Callable[[Served], Sequence[float]], where: Callable[[Served], bool] = bool
    ) -> list[float]:
        """Some figure of all turns that fulfil a condition."""
        return [value for turn in self.turns if where(turn) for value in what(turn)]

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        assert self.finished is not None
        return self.finished.seconds


def serve(settings: Settings) -> Run:
    """Start everything, answer every turn, check the caches, end everything. Blocks.

    Raises:
        RunFailed: a process could not go on. CacheCorrupted: a check found something.
    """
    found = Run()
    began = time.monotonic()
    settings = replace(settings, run=f"{settings.run}-{next(_runs)}", parent=os.getpid())
    with Stage(settings) as stage, ExitStack() as caches:
        attached: dict[str, lightcache.Cache] = {}
        for event in stage.events():
            _note(event, found, stage)
            if isinstance(event, Hello):
                found.ready_s = max(found.ready_s, time.monotonic() - began)
                if event.cache is not None and event.cache not in attached:
                    attached[event.cache] = caches.enter_context(
                        lightcache.Cache.attach(event.cache, secret=SECRET, grow=False)
                    )
            if isinstance(event, Finished):
                break
        for cache in attached.values():
            report = cache.check()
            if not report.clean:
                raise CacheCorrupted(f"{cache.name}: {report.message}")
    return found


def _note(event: Any, found: Run, stage: Stage) -> None:
    if isinstance(event, Served):
        found.turns.append(event)
    elif isinstance(event, Recovered):
        found.recovered.append(event)
    elif isinstance(event, Finished):
        found.finished = event
    elif isinstance(event, Holding):
        stage.kill(event.worker, event.life)
    else:
        assert isinstance(event, (Hello, Lost))


def median(values: Sequence[float]) -> float:
    """nan of none."""
    return statistics.median(values) if values else float("nan")


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank; nan of none."""
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def steps(run: Run) -> Iterator[float]:
    """Seconds between tokens, of all turns."""
    for turn in run.turns:
        yield from turn.steps_s
