"""Which way a transfer goes: thresholds, measured once for each model of GPU and stored.

engine = TransferEngine(..., calibration=calibration.stored("cuda:0", folder))
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.moves import Move
from lightcache.kernels.options import DEFAULTS, Thresholds
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.shm.errors import ConfigError

VERSION = 1
"""Of the file: older ones are measured anew."""


_GIVEN_UP = 1.25  # on an idle device: beside a model staging leaves it the multiprocessors
_LAYERS, _TOKENS, _TOTAL = 16, 16, 64 << 20
_SIZES = tuple(1 << power for power in range(17, 24))  # 128 KiB to 8 MiB


def stored(device: str, folder: Path | str) -> Thresholds:
    """The thresholds for a GPU: from a file in `folder`, or measured now and stored there.

    Blocks for seconds if they have to be measured, most of them Triton's, which compiles for each
    size the first time; the device should be idle. A file that cannot be read is measured anew;
    one that cannot be written is left out.

    Raises:
        ConfigError: no such GPU.
    """
    from lightcache.kernels.device import CudaDevice

    gpu = CudaDevice(device)
    path = Path(folder) / f"transfer-{re.sub(r'[^A-Za-z0-9]+', '-', gpu.model).lower()}.json"
    thresholds = read(path)
    if thresholds is None:
        thresholds = measure(gpu.name)
        with contextlib.suppress(OSError):
            write(path, thresholds)
    return thresholds


def read(path: Path) -> Thresholds | None:
    """What a file says; None if it is missing, of another version, or makes no sense."""
    try:
        data = json.loads(path.read_text())
        values = {name: data[name] for name in asdict(DEFAULTS)}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sane = all(type(value) is int and value > 0 for value in values.values())
    return Thresholds(**values) if sane and data.get("version") == VERSION else None


def write(path: Path, thresholds: Thresholds) -> None:
    """Store them, whole or not at all: many processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"version": VERSION, **asdict(thresholds)}, indent=1) + "\n")
    draft.replace(path)


def measure(device: str) -> Thresholds:
    """Race the ways of moving against each other, at sizes from 128 KiB to 8 MiB."""
    pages = {size: _seconds(device, size, _TOTAL // size, False) for size in _SIZES}
    totals = {size: _seconds(device, size, 1, False) for size in _SIZES}
    copies = {size: _seconds(device, size * _LAYERS * 2, 2, True) for size in _SIZES}
    return Thresholds(
        direct_page=_first(pages, "staged", "direct", _GIVEN_UP),
        direct_total=_first(totals, "staged", "direct", _GIVEN_UP),
        copy_bytes=_first(copies, "copies", "staged", 1.02),
        programs=DEFAULTS.programs,
    )


def _first(times: dict[int, dict[str, float]], wanted: str, other: str, slower: float) -> int:
    """The smallest size from which on one way takes at most so many times as long as the other;
    else twice the largest."""
    answer = 2 * max(times)
    for size in sorted(times, reverse=True):
        if times[size][wanted] > slower * times[size][other]:
            break
        answer = size
    return answer


def _seconds(device: str, page_bytes: int, pages: int, contiguous: bool) -> dict[str, float]:
    """Time of offloading and loading so many pages, by each way that applies."""
    from lightcache.kernels.engine import TransferEngine

    rig = TransferRig(device, page_bytes, pages, contiguous)
    seconds = {}
    for mode in ("copies", "staged") if contiguous else ("direct", "staged"):
        with TransferEngine(rig.geometry, rig.planes, rig.memory, mode=mode) as engine:
            engine.warm()

            def both(engine: Any = engine) -> None:
                engine.offload(rig.move).wait()
                engine.load(rig.move).wait()

            seconds[mode] = _best(both)
    return seconds


def _best(call: Callable[[], None]) -> float:
    """Seconds of the fastest of a few calls: what else the machine does only adds."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


class TransferRig:
    """Pages of some size, their memory and planes of their own."""

    def __init__(self, device: str, page_bytes: int, pages: int, contiguous: bool) -> None:
        import torch

        self.geometry = page_geometry(page_bytes)
        shape = plane_shape(page_bytes, pages)
        pool = torch.empty(shape, dtype=torch.uint8, device=device).random_(256)
        addresses = [pool[number].data_ptr() for number in range(shape[0])]
        self.planes = planes_at(addresses, shape, device, pool)
        memory = torch.zeros((pages, page_bytes), dtype=torch.uint8, pin_memory=True)
        self.memory = _TorchPages(memory)
        order = np.arange(shape[1])
        if not contiguous:
            order = np.random.default_rng(0).permutation(order)
        self.move = Move(np.arange(pages), order)


def page_geometry(page_bytes: int) -> PageGeometry:
    """Pages of that size: 16 tokens, 16 layers, K and V.

    Raises:
        ConfigError: the size is no multiple of 512 bytes.
    """
    row = plane_shape(page_bytes, 1)[2]
    group = KVGroup.attention(
        "kv", layers=_LAYERS, heads=1, head_dim=row, dtype_bytes=1, page_tokens=_TOKENS
    )
    return PageGeometry([group])


def plane_shape(page_bytes: int, pages: int) -> tuple[int, int, int]:
    """(planes, slots, bytes of a slot) for so many of these pages."""
    row, rest = divmod(page_bytes, 2 * _LAYERS * _TOKENS)
    if row < 1 or rest:
        raise ConfigError(
            f"calibration: expected pages of a multiple of {2 * _LAYERS * _TOKENS} bytes, found "
            f"{page_bytes}"
        )
    return 2 * _LAYERS, pages * _TOKENS, row


def planes_at(
    addresses: list[int], shape: tuple[int, int, int], device: str, keep: Any
) -> DevicePlanes:
    """The planes of `plane_shape` at these addresses."""
    _, slots, row = shape
    names = [("kv", layer, name) for layer in range(_LAYERS) for name in "kv"]
    planes = {
        name: DevicePlane(address, row, slots)
        for name, address in zip(names, addresses, strict=True)
    }
    return DevicePlanes(planes, device=device, keep=keep)


class _TorchPages(HostPages):
    """Pages that torch has registered."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.numpy())
        self._tensor = tensor
        self.ready = self.pages
