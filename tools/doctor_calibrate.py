"""`lightcache doctor --calibrate`: how fast pages are loaded, and what each load costs beside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lightcache._arguments import parse_size
from lightcache.costs import Costs
from lightcache.kernels import Move
from lightcache.kernels.calibration import page_geometry, plane_shape, planes_at
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.pinned import HostPages
from lightcache.tools.output import cell, console, emit, lines, table

BATCHES = (1, 2, 4, 8, 16, 32)
"""Pages of a transfer."""
_MOST = 256 << 20  # bytes of a transfer
_REPEATS = 7  # the fastest counts: what else the machine does only adds

Measured = dict[str, Any]


def calibrated(
    page_bytes: str, device: str | None, page_tokens: int | None, prefill: float | None
) -> Measured:
    """Measure. Blocks for seconds; the device should be idle.

    Raises:
        ConfigError: a size that is none, or no multiple of 512 bytes; no such device.
    """
    each = parse_size(page_bytes, "page_bytes")
    plane_shape(each, 1)
    wanted = _first_device() if device is None else device
    batches = [pages for pages in BATCHES if pages <= 2 or pages * each <= _MOST]
    name, took = (_on_host if wanted == "cpu" else _on_gpu)(wanted, each, batches)
    load, overhead = fitted([(pages * each, seconds[1]) for pages, seconds in took.items()])
    offload, _ = fitted([(pages * each, seconds[0]) for pages, seconds in took.items()])
    known = {"page_tokens": page_tokens, "prefill_tokens_per_s": prefill}
    return {
        "load_bytes_per_s": load,
        "offload_bytes_per_s": offload,
        "per_load_overhead_s": overhead,
        "page_bytes": each,
        "device": name,
        "batches": [
            {"pages": pages, "load_s": seconds[1], "offload_s": seconds[0]}
            for pages, seconds in took.items()
        ],
        **{key: value for key, value in known.items() if value is not None},
    }


def fitted(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(bytes a second, seconds of each transfer beside) of (bytes, seconds): a straight line, on
    which a point of twice the time weighs half. Where noise makes it fall, or cut the axis below 0,
    there is no overhead, and the rate is that of the largest transfer."""
    sizes, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    slope, overhead = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    if slope <= 0 or overhead < 0:
        return float(sizes[-1] / seconds[-1]), 0.0
    return float(1 / slope), float(overhead)


def _first_device() -> str:
    try:
        torch: Any = import_module("torch")
    except ImportError:
        return "cpu"
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _on_host(device: str, page_bytes: int, batches: list[int]) -> tuple[str, dict[int, Any]]:
    shape = plane_shape(page_bytes, batches[-1])
    pool = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    planes = planes_at([int(plane.ctypes.data) for plane in pool], shape, "cpu", pool)
    memory = HostPages(np.zeros((batches[-1], page_bytes), np.uint8))
    with HostEngine(page_geometry(page_bytes), planes, memory) as engine:
        return "cpu", _times(engine, batches, shape[1])


def _on_gpu(device: str, page_bytes: int, batches: list[int]) -> tuple[str, dict[int, Any]]:
    from lightcache.kernels.calibration import TransferRig
    from lightcache.kernels.device import CudaDevice

    gpu = CudaDevice(device)
    rig = TransferRig(gpu.name, page_bytes, batches[-1], contiguous=False)
    engines: Any = import_module("lightcache.kernels.engine")
    with engines.TransferEngine(rig.geometry, rig.planes, rig.memory) as engine:
        engine.warm()
        slots = plane_shape(page_bytes, batches[-1])[1]
        return gpu.model, _times(engine, batches, slots)


def _times(engine: Any, batches: list[int], slots: int) -> dict[int, tuple[float, float]]:
    """Seconds of (offloading, loading) so many pages in one transfer, to slots all over."""
    order = np.random.default_rng(0).permutation(slots)
    found = {}
    for pages in batches:
        move = Move(np.arange(pages), order[: pages * slots // batches[-1]])
        found[pages] = (
            _fastest(lambda move=move: engine.offload(move).wait()),  # type: ignore[misc]
            _fastest(lambda move=move: engine.load(move).wait()),  # type: ignore[misc]
        )
    return found


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def show(measured: Measured, out: str | None, as_json: bool) -> None:
    """Print it, and write it to a file: whole, or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    if out is not None:
        path = Path(out)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(measured, indent=1) + "\n")
        draft.replace(path)
    if as_json:
        emit(measured)
        return
    screen = console()
    facts: list[tuple[str, object]] = [
        ("device", measured["device"]),
        ("page", f"{measured['page_bytes']} bytes"),
        ("load", f"{measured['load_bytes_per_s'] / 1e9:.2f} GB/s"),
        ("offload", f"{measured['offload_bytes_per_s'] / 1e9:.2f} GB/s"),
        ("each load", f"{measured['per_load_overhead_s'] * 1e6:.0f} us beside"),
    ]
    if {"page_tokens", "prefill_tokens_per_s"} <= measured.keys():
        costs = Costs(**{name: measured[name] for name in Costs.__dataclass_fields__})
        least = costs.break_even_pages()
        facts.append(
            ("worth loading", "never" if least is None else f"from {max(least, 1)} page(s) on")
        )
    screen.print(lines("calibration", facts))
    rows = [
        (batch["pages"], batch["load_s"] * 1e3, batch["offload_s"] * 1e3)
        for batch in measured["batches"]
    ]
    screen.print(table("transfers", ("pages", "load ms", "offload ms"), rows))
    if out is not None:
        screen.print(cell(f"written to {out}"))


__all__ = ["BATCHES", "calibrated", "fitted", "show"]
