"""The cache that fits a model."""

from __future__ import annotations

import logging
from typing import Any

from lightcache import Cache
from lightcache.connectors.model_pages import ModelPages, describe
from lightcache.errors import ConfigError
from lightcache.kernels.geometry import waste_of

_log = logging.getLogger("lightcache.connectors")
IDLE_LIMIT = 24 * 3600.0
"""Seconds without use after which a cache may be removed to make room."""


def open_cache(
    model: Any,
    *,
    name: str | None = None,
    page_tokens: int = 16,
    lifetime: str | None = None,
    idle_limit: float | None = IDLE_LIMIT,
    **options: Any,
) -> Cache:
    """`Cache.open` for the pages of a model: with the page_bytes, fingerprint and device that
    `describe` finds. All kinds of its layers share the bytes: what was unused for longest makes
    room, whether it is keys and values, a window or a recurrent state.

    The cache stays in shared memory when this process ends, so that the next process reuses its
    pages. The last process to leave it logs its size and how to remove it. Once it has been unused
    for `idle_limit` seconds, the next `open` or `sweep` that needs its room removes it.

    Args:
        model: as `describe`.
        name: of the cache; None: the model's default, with the last part of the name or path that
            it was loaded from; see `Cache.create`.
        page_tokens: tokens of a page.
        lifetime: "attached": removed with its last client. "persistent": it stays. None: the
            existing cache's lifetime, "persistent" for a new one.
        idle_limit: of a new cache; None: it stays until it is removed, and must be persistent.
        options: of `Cache.open`; `size` or `pages` is needed. `minimums` leaves a kind of layers
            some of the bytes, by the names in `describe(model).options["kv_groups"]`.

    Raises:
        ConfigError: as `describe`, or options that the model decides.
        LayoutMismatch: there is one of the given name for another model.
        Otherwise as `Cache.open`.
    """
    pages = describe(model, page_tokens=page_tokens)
    cache = _open(name, pages.options, _lasting(lifetime, idle_limit) | options)
    _warn_of_padding(cache.name, pages)
    return cache


def _warn_of_padding(name: str, pages: ModelPages) -> None:
    cut = [(of.name, of.geometry) for of in pages.attention[1:]]
    if pages.attention and pages.states is not None:
        cut.append(("states", pages.states.geometry))
    for what, geometry in cut:
        if waste := waste_of(what, pages.geometry, geometry):
            _log.warning("cache %r: %s", name, waste)


def _lasting(lifetime: str | None, idle_limit: float | None) -> dict[str, Any]:
    """The options of `Cache.open` for these of `open_cache`."""
    if lifetime == "attached":
        options = {} if idle_limit == IDLE_LIMIT else {"idle_limit": idle_limit}  # which is refused
        return {"lifetime": lifetime, **options}
    if idle_limit is None:
        return {"lifetime": "persistent"}
    return {"lifetime": lifetime, "idle_limit": idle_limit}


def _open(name: str | None, found: dict[str, Any], options: dict[str, Any]) -> Cache:
    twice = sorted(found.keys() & options.keys())
    if twice:
        raise ConfigError(
            f"open_cache: {', '.join(twice)} follow from the model, found them given as well; "
            "leave them out, or use Cache.open(**describe(model, name=...).options)"
        )
    return Cache.open(name, **found, **options)


__all__ = ["IDLE_LIMIT", "open_cache"]
