"""Whether the memory that an operator asks for can be had: said before a model is loaded."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from lightcache._arguments import format_size, parse_size
from lightcache.connectors.engine_cache import REMEDY
from lightcache.connectors.vllm.options import Options
from lightcache.errors import LightcacheError
from lightcache.shm.folders import Folder
from lightcache.shm.listing import list_segments
from lightcache.shm.names import FOLDER
from lightcache.shm.objects import memory_of

_log = logging.getLogger("lightcache.connectors")


def shortage(options: Options, index_bytes: int = 0, held: int = 0) -> str | None:
    """What there is too little of for a new cache, and what to do; None: it fits.

    Args:
        held: memory that may be its own already, or come free.
    """
    needed = parse_size(options.size) + index_bytes
    try:
        with Folder.open(Path(options.pool_path or FOLDER)) as folder:
            room = folder.room()
    except LightcacheError as error:
        return f"no memory for the pool: {error}"
    if needed <= room.bytes + held:
        return None
    caches = f", and {format_size(held)} in caches" if held else ""
    return (
        f"a new cache needs {format_size(needed)}, found {format_size(room.bytes)} {room.limit}"
        f"{caches}; set size to {max(room.bytes * 9 // 10 >> 20, 1)}MiB, or {REMEDY}"
    )


@functools.cache
def warn_of_shortage(options: Options) -> None:
    """Say it, once in a process: vLLM asks each time it makes a configuration. Which cache it will
    be is not known yet: the memory of all may be its own, or that of one that gives way."""
    held = sum(memory_of(full) for each in list_segments() for full in each.dependents)
    if lacking := shortage(options, held=held):
        _log.warning("lightcache: %s. vLLM runs without the cache until there is room", lacking)


__all__ = ["shortage", "warn_of_shortage"]
