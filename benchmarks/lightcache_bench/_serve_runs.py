"""Runs of `bench serve`: a router and workers as in the demo, without the show."""

from __future__ import annotations

import math
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
        lost: dict[int, Lost] = {}
        for event in stage.events():
            _note(event, found, stage)
            if isinstance(event, Hello):
                found.ready_s = max(found.ready_s, time.monotonic() - began)
                if event.cache is not None and event.cache not in attached:
                    attached[event.cache] = caches.enter_context(
                        lightcache.Cache.attach(event.cache, secret=SECRET, grow=False)
                    )
            elif isinstance(event, Lost):
                lost[event.worker] = event
            elif isinstance(event, Recovered) and settings.pool == "private":
                for life in range(lost[event.worker].life + 1):
                    dead = attached.pop(settings.cache(event.worker, life) or "", None)
                    if dead is not None:
                        _check(dead)
                        dead.close()  # it ends with us: the successor needs the memory
            elif isinstance(event, Finished):
                break
        for cache in attached.values():
            _check(cache)
    return found


def _check(cache: lightcache.Cache) -> None:
    report = cache.check()
    if not report.clean:
        raise CacheCorrupted(f"{cache.name}: {report.message}")


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
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


def steps(run: Run) -> Iterator[float]:
    """Seconds between tokens, of all turns."""
    for turn in run.turns:
        yield from turn.steps_s
