"""The engine for a cache: which one, and whether its pages are what the engine thinks they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightcache.errors import ConfigError, LayoutMismatch
from lightcache.kernels.geometry import PageGeometry
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.memory import HostPages
from lightcache.kernels.planes import DevicePlanes
from lightcache.kernels.transfer import Engine

if TYPE_CHECKING:
    from lightcache.cache import Cache


def engine_of(
    cache: Cache,
    geometry: PageGeometry,
    planes: DevicePlanes,
    memory: HostPages | None,
    how: Mapping[str, Any],
) -> Engine:
    """See `Cache.engine`."""
    check_format(cache, geometry)
    if memory is not None and (memory.pages, memory.page_bytes) != (cache.pages, cache.page_bytes):
        raise ConfigError(
            f"memory: expected {cache.pages} pages of {cache.page_bytes} bytes, found "
            f"{memory.pages} of {memory.page_bytes}; make it of cache.pool.array"
        )
    if planes.device == "cpu":
        return HostEngine(geometry, planes, memory or HostPages(cache.pool.array), **how)
    if memory is None:
        raise ConfigError(
            f"memory: planes on {planes.device} need the pool registered with its driver; give "
            f"memory=cache.pin(device={planes.device!r}), a PinnedPages"
        )
    from importlib import import_module  # torch is imported where a device is, not before

    made: Engine = import_module("lightcache.kernels.engine").TransferEngine(
        geometry, planes, memory, **how
    )
    return made


def check_format(cache: Cache, geometry: PageGeometry) -> None:
    """Whether a cache was created for pages of this geometry. Equal sizes are not enough: pages
    written with one geometry and read with another are nonsense that nothing else would notice.

    Raises:
        LayoutMismatch: it was not.
    """
    tokens = cache.index.segment.config.get("page_tokens")
    if cache.page_bytes != geometry.page_bytes or tokens not in (None, geometry.page_tokens):
        raise LayoutMismatch(
            f"the cache {cache.name!r} has pages of {cache.page_bytes} bytes and {tokens} tokens, "
            f"the geometry of {geometry.page_bytes} and {geometry.page_tokens}; create it with "
            "page_bytes=geometry.page_bytes and page_tokens=geometry.page_tokens"
        )
    # As a word of its own: the fingerprint of one geometry may begin another's.
    if not re.search(rf"(^|\s){re.escape(geometry.fingerprint())}($|\s)", cache.fingerprint):
        raise LayoutMismatch(
            f"the cache {cache.name!r} is for {cache.fingerprint!r}, which does not have the "
            f"geometry's {geometry.fingerprint()!r} as a word of its own; create it with "
            'fingerprint=f"{model} {geometry.fingerprint()}"'
        )
