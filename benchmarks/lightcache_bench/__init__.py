"""Benchmarks: one module each, and the frame they share: machine facts, versions, table, JSON.

A benchmark is a module `lightcache_bench.<name>` with a docstring whose first line says what
it measures, and

    def rows(quick: bool) -> Iterator[Row]: ...

which yields each row as soon as it is measured. `quick` asks for few repetitions: the figures are
then good for nothing but seeing that it works. Compare ratios, never absolute times: `baseline`
names what a value was measured against in the same run, `ratio` is the value divided by it.
"""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, cast

from lightcache.errors import ConfigError
from lightcache.shm.names import FOLDER

PACKAGES = (
    *("lightcache", "numpy", "xxhash", "posix_ipc", "lmdb"),
    *("torch", "triton", "cuda-bindings"),
)


@dataclass(frozen=True)
class Row:
    """One measured figure. The fields are those of the JSON output, in its order."""

    name: str
    """What was measured: "peek", "match + release"."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Under which circumstances, and the spread: {"pages": 20000, "state": "hot", "p90": 9.1}."""
    value: float = 0.0
    """Median of interleaved repetitions."""
    unit: str = "us"
    baseline: str | None = None
    """What `ratio` compares with, measured in the same run; None: nothing."""
    ratio: float | None = None
    """`value` divided by the baseline, in the sense that `target` is stated in."""
    target: str | None = None
    """What was promised, in words: "<= 2.5", ">= 10"; None: nothing was."""
    met: bool | None = None
    """Whether the promise was kept; None where there is none. See `meets`."""


class Benchmark(Protocol):
    """What a benchmark's module offers."""

    __doc__: str | None

    def rows(self, quick: bool, **options: Any) -> Iterator[Row]:
        """Measure, and yield each row when it is known. `options`: what only some take (trace)."""
        ...


def meets(value: float, target: str) -> bool:
    """Whether a value (or ratio) keeps a target such as "<= 2.5" or ">= 10".

    Raises:
        ValueError: the target does not begin with "<=" or ">=".
    """
    sign, _, rest = target.partition(" ")
    limit = float(rest.split()[0])
    if sign not in ("<=", ">="):
        raise ValueError(f"a target begins with '<= ' or '>= ', found {target!r}")
    return math.isfinite(value) and (value <= limit if sign == "<=" else value >= limit)


TOOLS = ("hybrid_sizing",)
"""Modules that are no benchmarks: people import them."""


def names() -> list[str]:
    """The benchmarks there are; modules that begin with an underscore are helpers of theirs."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_") and module.name not in TOOLS and not module.ispkg
    )


def load(name: str) -> Benchmark:
    """A benchmark's module, imported only now.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in names():
        known = ", ".join(names()) or "none"
        raise ConfigError(f"there is no benchmark {name!r}; there are: {known}")
    return cast(Benchmark, importlib.import_module(f"{__name__}.{name}"))


def summary(name: str) -> str:
    """The first line of a benchmark's docstring."""
    return (load(name).__doc__ or "").strip().partition("\n")[0]


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores that we may use, memory, kernel, /dev/shm."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "shm_bytes": _folder_bytes(FOLDER),
        "architecture": platform.machine(),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str | None]:
    """Python and the packages that matter, without importing them; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def document(rows: list[Row]) -> dict[str, Any]:
    """The JSON output of a run."""
    return {"machine": machine(), "versions": versions(), "rows": [_as_json(row) for row in rows]}


def _as_json(row: Row) -> dict[str, Any]:
    """A row's fields; null for figures that could not be measured, because JSON has no nan."""
    fields = asdict(row)
    return {**_finite(fields), "params": _finite(fields["params"])}


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def _field(path: Path, key: str) -> str:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return ""


def _folder_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize
