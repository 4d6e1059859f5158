"""Transfers between device and host pool, against the copy engine: rates, latency, what they slow.

Pages of several kinds whose tokens lie singly all over a device pool; random bytes; every way of
moving is first shown to move each byte rightly, into memory that was overwritten before. A
repetition moves 1 GiB; those of what is compared take turns. Times are of the wall clock around a
device that is idle before and after, or, beside other work, of device events. Without a device the
host engine is measured in the same way, on what applies to it, against numpy copies.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator

from lightcache.errors import ConfigError
from lightcache_bench import (
    Row,
    _gpu_alternatives,
    _gpu_beside,
    _gpu_device,
    _gpu_interface,
    _gpu_layers,
    _gpu_many,
    _gpu_pinning,
    _gpu_rates,
    _gpu_states,
)
from lightcache_bench._gpu_rig import Bench

Part = Callable[[Bench], Iterator[Row]]

PARTS: dict[int, Part] = {
    1: _gpu_rates.copy_engine,
    2: _gpu_rates.large_pages,
    3: _gpu_beside.beside_product,
    4: _gpu_beside.beside_decode,
    5: _gpu_rates.single_page,
    6: _gpu_rates.small_pages,
    7: _gpu_rates.states,
    8: _gpu_alternatives.alternatives,
    9: _gpu_pinning.pinning,
    10: _gpu_many.several_devices,
    11: _gpu_states.state_copies,
    12: _gpu_rates.states_in_parts,
    13: _gpu_layers.layer_loads,
}
WITHOUT_DEVICE = (1, 2, 5, 6, 7, 12, 13)


def rows(quick: bool, only: str | None = None) -> Iterator[Row]:
    """See `Benchmark.rows`. Takes about four minutes; `quick`: one.

    Args:
        quick: less memory, few repetitions.
        only: numbers of parts, such as "2,3"; None: all.

    A part that fails gives a row without a figure that says why, and the others go on.

    Raises:
        ConfigError: no such part, or neither a device nor a host engine.
    """
    wanted = parts(only)
    gpu = _gpu_device.find()
    if not gpu.cuda:
        if not _gpu_interface.has_host_engine():
            raise ConfigError(
                "transfer: expected a device that torch can use or the host engine, found neither; "
                "run it on a machine with a GPU"
            )
        wanted = [number for number in wanted if number in WITHOUT_DEVICE]
    yield Row("device", gpu.facts(), float(_gpu_device.devices()), "devices")
    with contextlib.closing(Bench(gpu, quick)) as bench:
        for number in wanted:
            yield from guarded(PARTS[number], bench)


def parts(only: str | None) -> list[int]:
    """The numbers of the parts that were asked for, ascending.

    Raises:
        ConfigError: there is no such part.
    """
    if only is None:
        return list(PARTS)
    try:
        numbers = {int(number) for number in only.split(",")}
    except ValueError:
        numbers = {0}
    if not numbers <= set(PARTS):
        known = ", ".join(
            f"{number} ({part.__name__.replace('_', ' ')})" for number, part in PARTS.items()
        )
        raise ConfigError(f"transfer: expected parts such as 2,3 of {known}; found {only!r}")
    return sorted(numbers)


def guarded(part: Part, bench: Bench) -> Iterator[Row]:
    """A part's rows; if it fails, one that says so."""
    try:
        yield from part(bench)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        yield _gpu_alternatives.failed(part.__name__.replace("_", " "), error)
