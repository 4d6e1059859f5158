"""What is measured: the engines and the pinned pool, imported only when they are."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError
from lightcache.kernels.moves import Engine
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlanes
from lightcache_bench._gpu_device import Gpu
from lightcache_bench._gpu_shapes import Shape

TIMEOUT = 60.0
"""Seconds that no transfer here can need."""
GROWING_THREADS = 8


def pin_pool(gpu: Gpu, cache: Any) -> Any:
    """Register a cache's pool with the driver in the background, as an engine does, and give it
    memory by several threads meanwhile."""
    return cache.pin(device=gpu.device, grow_threads=GROWING_THREADS)


def usable_pages(gpu: Gpu, array: npt.NDArray[np.uint8]) -> Any:
    """Pages that an engine for this device can use, all of them.

    Args:
        array: uint8 of shape (pages, page_bytes); all of it has memory.
    """
    if not gpu.cuda:
        return HostPages(array)
    pinned = importlib.import_module("lightcache.kernels.pinned")
    pages = pinned.PinnedPages(array, device=gpu.device)
    pages.wait(timeout=TIMEOUT)
    return pages


def give_back(pages: Any) -> None:
    """Undo `usable_pages`; without a device there is nothing to undo."""
    close = getattr(pages, "close", None)
    if close is not None:
        close()


def make_engine(
    gpu: Gpu, shape: Shape, planes: DevicePlanes, memory: Any, **options: Any
) -> Engine:
    """The engine for this device; `options`: mode, programs, rate.

    Raises:
        ConfigError: there is no engine for it.
    """
    name, kind = ("engine", "TransferEngine") if gpu.cuda else ("host_engine", "HostEngine")
    try:
        module = importlib.import_module(f"lightcache.kernels.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"transfer: {kind} needs {error.name}, found none; install it") from error
    made: Engine = getattr(module, kind)(
        shape.geometry, planes, memory, share=shape.share, **options
    )
    return made


def has_host_engine() -> bool:
    """Whether transfers can be measured without a device."""
    return importlib.util.find_spec("lightcache.kernels.host_engine") is not None
