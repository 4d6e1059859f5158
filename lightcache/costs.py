"""When loading pages from the host is faster than computing them again.

costs = Costs.load("costs.json", prefill_tokens_per_s=12_000, page_tokens=64)
if costs.worth_loading(len(lease)): ...

`lightcache doctor --calibrate --out costs.json` makes the file. The prefill speed of a model is
known only to its engine.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

from lightcache import _arguments
from lightcache.errors import ConfigError

_MEASURED = ("load_bytes_per_s", "per_load_overhead_s", "page_bytes")
_GIVEN = ("prefill_tokens_per_s", "page_tokens")


@dataclass(frozen=True)
class Costs:
    """Loading n pages takes `per_load_overhead_s + n * page_bytes / load_bytes_per_s` seconds,
    computing them `n * page_tokens / prefill_tokens_per_s`."""

    load_bytes_per_s: float
    """Of one transfer from host to device, for any number of pages."""
    per_load_overhead_s: float
    """Fixed cost of each transfer, in seconds."""
    prefill_tokens_per_s: float
    """Prefill speed of the model."""
    page_bytes: int
    """Bytes of a page that this rank loads."""
    page_tokens: int

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: a value is not a number, or out of range.
        """
        for name in ("load_bytes_per_s", "per_load_overhead_s", "prefill_tokens_per_s"):
            _check(getattr(self, name), name, zero=name == "per_load_overhead_s")
        _arguments.count(self.page_bytes, "page_bytes", 1, 1 << 50)
        _arguments.count(self.page_tokens, "page_tokens", 1, 1 << 30)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        prefill_tokens_per_s: float | None = None,
        page_tokens: int | None = None,
    ) -> Costs:
        """Read a file that `lightcache doctor --calibrate --out` wrote.

        Args:
            prefill_tokens_per_s, page_tokens: None: as in the file, if it has them.

        Raises:
            ConfigError: no such file, another format, or a value is neither in it nor given.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"costs: {os.fspath(path)!r} cannot be read ({error}); make it with `lightcache "
                "doctor --calibrate --out FILE`"
            ) from None
        measured = dict(data) if isinstance(data, dict) else {}
        overrides = {"prefill_tokens_per_s": prefill_tokens_per_s, "page_tokens": page_tokens}
        measured.update((name, value) for name, value in overrides.items() if value is not None)
        for name in (*_MEASURED, *_GIVEN):
            if measured.get(name) is None:
                remedy = "give it here" if name in _GIVEN else "calibrate again"
                raise ConfigError(f"costs: {os.fspath(path)!r} says no {name}; {remedy}")
        return cls(**{name: measured[name] for name in (*_MEASURED, *_GIVEN)})

    def load_seconds(self, pages: int) -> float:
        """Seconds to load this many pages in one transfer; 0 for none."""
        if pages <= 0:
            return 0.0
        return self.per_load_overhead_s + pages * self.page_bytes / self.load_bytes_per_s

    def break_even_pages(self) -> int | None:
        """The smallest number of pages for which loading is faster than computing. 0: loading is
        always faster, since it has no overhead; None: it never is."""
        return self._break_even

    @cached_property
    def _break_even(self) -> int | None:
        # Exact fractions: near the break-even point rounding would decide.
        gain = Fraction(self.page_tokens) / Fraction(float(self.prefill_tokens_per_s))
        gain -= Fraction(int(self.page_bytes)) / Fraction(float(self.load_bytes_per_s))
        if gain <= 0:
            return None
        overhead = Fraction(float(self.per_load_overhead_s))
        return math.floor(overhead / gain) + 1 if overhead else 0

    def worth_loading(self, pages: int) -> bool:
        """True if loading this many pages is faster than computing them. False for no pages."""
        least = self._break_even
        return least is not None and pages >= max(least, 1)

    @property
    def host_weight(self) -> float:
        """Cost of loading a token, relative to computing it, at most 1: for
        `RouterPolicy.host_weight`. Excludes the overhead, which is per request."""
        page_s = self.page_bytes / self.load_bytes_per_s
        return min(1.0, page_s * self.prefill_tokens_per_s / self.page_tokens)


def _check(value: Any, name: str, *, zero: bool) -> None:
    number = -1.0 if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        limit = "at least 0" if zero else "above 0"
        raise ConfigError(f"{name}: expected a finite number {limit}, found {value!r}")


__all__ = ["Costs"]
