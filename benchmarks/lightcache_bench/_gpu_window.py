"""Steps and transfers side by side: both are measured in the same stretch of time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache.errors import WaitTimeout
from lightcache.kernels.moves import Transfer
from lightcache_bench._gpu_device import Gpu
from lightcache_bench._gpu_interface import TIMEOUT
from lightcache_bench._gpu_steps import Step

_LEAD = 3  # steps before those that count
_AHEAD = 5  # steps queued on the device: the processor is busy with a transfer for less than these
_DEPTH = 3  # transfers queued on the device
_PAUSE = 50e-6  # between two looks


class Feed:
    """Transfers without end: always a few of them queued, the end of each noted as it is seen."""

    def __init__(
        self,
        submit: Callable[[int], Transfer],
        nbytes: int,
        *,
        depth: int = _DEPTH,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`submit(i)` starts the i-th one, of `nbytes` bytes each."""
        self._submit, self._nbytes, self._depth, self._clock = submit, nbytes, depth, clock
        self._pending: deque[Transfer] = deque()
        self._submitted = 0
        self.ends: list[float] = []

    def top_up(self) -> None:
        """Note those that are over, and start as many anew. Does not wait for any."""
        while self._pending and self._pending[0].done():
            self._pending.popleft()
            self.ends.append(self._clock())
        while len(self._pending) < self._depth:
            self._pending.append(self._submit(self._submitted))
            self._submitted += 1

    def start(self) -> None:
        """Begin, and return when the first ones are over."""
        self.ends.clear()
        deadline = time.monotonic() + TIMEOUT
        while len(self.ends) < 2:
            self.top_up()
            _rest(deadline, "the first transfers of a window")

    def drain(self) -> None:
        """Wait for those under way."""
        while self._pending:
            self._pending.popleft().wait(TIMEOUT)

    def rate(self, begin: float, end: float) -> float:
        """GB/s between the first and the last transfer that ended between two times; nan where
        there are too few to tell."""
        seen = [at for at in self.ends if begin <= at <= end]
        if len(seen) < 3 or seen[-1] <= seen[0]:
            return float("nan")
        return (len(seen) - 1) * self._nbytes / (seen[-1] - seen[0]) / 1e9


@dataclass(frozen=True)
class Window:
    """One stretch of time."""

    steps: Any
    """Milliseconds between the ends of consecutive steps, by events of the device."""
    rate: float
    """GB/s of the transfers beside them; nan without any."""


def window(gpu: Gpu, step: Step, count: int, feed: Feed | None) -> Window:
    """Run `count` steps, one after the other without a gap, while transfers go on."""
    marks = [gpu.event() for _ in range(_LEAD + count + 1)]
    if feed:
        feed.start()
    begin = end = float("nan")
    launched = over = 0
    deadline = time.monotonic() + TIMEOUT
    marks[0].record(step.stream)
    while over < _LEAD + count:
        while launched < _LEAD + count and launched - over < _AHEAD:
            step.launch()
            launched += 1
            marks[launched].record(step.stream)
        if feed:
            feed.top_up()
        while over < launched and marks[over + 1].query():
            over += 1
            end = time.perf_counter()
            if over == _LEAD:
                begin = end
        _rest(deadline, f"{_LEAD + count} steps")
    if feed:
        feed.drain()
    gpu.synchronize()
    times = [marks[i].elapsed_time(marks[i + 1]) for i in range(_LEAD, _LEAD + count)]
    return Window(np.asarray(times), feed.rate(begin, end) if feed else float("nan"))


def windows(
    gpu: Gpu, step: Step, feeds: Mapping[str, Feed | None], rounds: int, count: int
) -> dict[str, list[Window]]:
    """Windows with each of these feeds in turn, `rounds` times over; one of each before is not
    counted."""
    found: dict[str, list[Window]] = {name: [] for name in feeds}
    for turn in range(rounds + 1):
        for name, feed in feeds.items():
            seen = window(gpu, step, count if turn else 2, feed)
            if turn:
                found[name].append(seen)
    return found


def _rest(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise WaitTimeout(f"{what} were not over after {TIMEOUT:.0f} s")
    time.sleep(_PAUSE)
