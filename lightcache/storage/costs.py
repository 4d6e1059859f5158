"""Which pages are worth reading from a storage: is computing them faster?"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache.errors import ConfigError
from lightcache.storage.common import Clock

_KEPT = 0.9
"""Decay of older measurements with each new one: the last ten have two thirds of the weight."""
_APART = 0.1
"""Minimum relative spread of call sizes at which overhead and rate are separated."""


@dataclass(frozen=True)
class Verdict:
    """The decision whether to read pages."""

    declined: str = ""
    """Why they are not read, with both times; empty: they are read."""
    probe: bool = False
    """They are read only to measure reading again."""


class ReadCosts:
    """Decides whether to read pages or compute them, by a cost model.

    Reading n pages in c calls takes `lookup + c * overhead + n * page` seconds; computing them
    takes `n * page_tokens / prefill_tokens_per_s`. The terms of reading are decaying averages of
    measured calls; overhead and page come from a least-squares line. While all calls read about the
    same number of pages, these two cannot be separated, and all of the time is attributed to the
    pages. Then small reads are not declined, and their times separate the two.

    Declined reads are not measured. So after `retry` seconds without a measurement, the next read
    that would be declined is made as a probe, and its time replaces all earlier ones. If it was
    fast, the following reads are made, and correct the average.

    Any thread may use it.
    """

    def __init__(
        self, prefill_tokens_per_s: float, page_tokens: int, group: int, retry: float, clock: Clock
    ) -> None:
        """Declines nothing before the first measurement.

        Args:
            prefill_tokens_per_s: the model's prefill speed.
            group: maximum pages of one call.
            retry: seconds without a measurement until a probe.

        Raises:
            ConfigError: `prefill_tokens_per_s` is not a finite number above 0.
        """
        self._page_seconds = page_tokens / _positive(prefill_tokens_per_s)
        self._group = group
        self._retry = retry
        self._clock = clock
        self._lock = threading.Lock()
        self._reads = np.zeros(5)  # weight, pages, seconds, pages * pages, pages * seconds
        self._lookups = np.zeros(2)  # weight, seconds
        self._found = np.zeros(2)  # pages looked up, pages found
        self._tried = clock()
        self._renew = False

    # ---- measurements

    def note_read(self, pages: int, seconds: float) -> None:
        """Add a call that read `pages` pages; a call that read none is ignored."""
        if pages <= 0:
            return
        with self._lock:
            kept = 0.0 if self._renew else _KEPT
            new = np.array([1.0, pages, seconds, pages * pages, pages * seconds])
            self._reads = self._reads * kept + new
            self._renew = False
            self._tried = self._clock()

    def note_lookup(self, pages: int, found: int, seconds: float) -> None:
        """Add a lookup of `pages` pages that found `found` of them."""
        with self._lock:
            self._lookups = self._lookups * _KEPT + np.array([1.0, seconds])
            self._found = self._found * _KEPT + np.array([pages, found])

    def figures(self) -> tuple[float, float] | None:
        """The fixed seconds of a call, and those of each page; None: not measured yet."""
        with self._lock:
            return self._line()

    def _line(self) -> tuple[float, float] | None:
        weight, pages, seconds, squares, products = (float(each) for each in self._reads)
        if weight == 0.0:
            return None
        mean, each = pages / weight, seconds / weight
        spread = squares / weight - mean * mean
        if spread <= (_APART * mean) ** 2:
            return 0.0, each / mean
        slope = max(0.0, (products / weight - mean * each) / spread)
        overhead = each - slope * mean
        return (overhead, slope) if overhead >= 0.0 else (0.0, each / mean)

    # ---- decisions

    def decide(self, pages: int, ahead: Sequence[int], threads: int) -> Verdict:
        """Decide before the lookup.

        Args:
            ahead: requested pages of each read ahead of this one.
            threads: number of threads that run them; with fewer reads ahead there is no wait.
        """
        with self._lock:
            line = self._line()
            if line is None or pages <= 0:
                return Verdict()
            lookup = float(self._lookups[1] / max(1.0, self._lookups[0]))
            share = float(self._found[1] / max(1.0, self._found[0]))
            wait = 0.0
            if len(ahead) >= threads:  # assume that the usual share of their pages is stored
                busy = sum(lookup + self._seconds(line, math.ceil(n * share)) for n in ahead)
                wait = busy / threads
            return self._verdict(pages, wait + lookup + self._seconds(line, pages), wait)

    def decide_found(self, pages: int) -> Verdict:
        """Decide after the lookup, which found `pages` pages; the read would start now."""
        with self._lock:
            line = self._line()
            if line is None or pages <= 0:
                return Verdict()
            return self._verdict(pages, self._seconds(line, pages), 0.0)

    def _seconds(self, line: tuple[float, float], pages: int) -> float:
        return -(-pages // self._group) * line[0] + pages * line[1]

    def _verdict(self, pages: int, reading: float, wait: float) -> Verdict:
        computing = pages * self._page_seconds
        if reading <= computing:
            return Verdict()
        now = self._clock()
        if now - self._tried >= self._retry:
            self._tried, self._renew = now, True
            return Verdict(probe=True)
        waiting = f", {wait:.3g} s of it behind others" if wait else ""
        return Verdict(
            f"declined: reading {pages} pages would take {reading:.3g} s{waiting}, computing them "
            f"{computing:.3g} s"
        )


def _positive(value: Any) -> float:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not 0.0 < float(value) < math.inf:
        raise ConfigError(
            f"prefill_tokens_per_s: expected a finite number above 0, found {value!r}"
        )
    return float(value)


__all__ = ["ReadCosts", "Verdict"]
