"""Repetitions that take turns, their medians and their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Case = Callable[[int], float]
"""Does its work for the i-th repetition and returns the microseconds it took."""


def clocked(work: Callable[[int], Any]) -> Case:
    """A case that measures `work` from outside, by the wall clock."""

    def run(i: int) -> float:
        begin = time.perf_counter_ns()
        work(i)
        return (time.perf_counter_ns() - begin) / 1e3

    return run


def clocked_cpu(work: Callable[[int], Any]) -> Case:
    """A case that measures the processor time of `work`. For comparing short work with long on a
    machine that others use too: by the wall clock only the long is interrupted by them, and would
    look slower than it is."""

    def run(i: int) -> float:
        begin = time.thread_time_ns()
        work(i)
        return (time.thread_time_ns() - begin) / 1e3

    return run


def interleaved(cases: Mapping[str, Case], rounds: int, each: int = 1) -> dict[str, Any]:
    """`each` repetitions of every case in turn, `rounds` times over. On a machine that others use
    too, what slows one case down slows its neighbours as well, and their ratio stays.

    Returns:
        The samples of each case, in microseconds.
    """
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds):
        for name, case in cases.items():
            samples[name].extend(case(turn * each + i) for i in range(each))
    return {name: np.asarray(found) for name, found in samples.items()}


def median(samples: Any) -> float:
    return float(np.median(samples))


def spread(samples: Any) -> dict[str, Any]:
    """Half of the samples lie within these bounds: for a row's `params`."""
    low, high = np.percentile(samples, [25, 75])
    return {"quartiles": f"{low:.4g}..{high:.4g}", "samples": len(samples)}


def tails(samples: Any) -> tuple[float, float, float]:
    """p50, p99 and p99.9."""
    found: Sequence[float] = np.percentile(samples, [50, 99, 99.9])
    return float(found[0]), float(found[1]), float(found[2])
