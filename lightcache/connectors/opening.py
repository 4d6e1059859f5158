"""Caches that fit a model: one of keys and values, and for a hybrid model one of states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from lightcache import Cache, Namespace
from lightcache._arguments import parse_size
from lightcache.connectors.model_pages import describe
from lightcache.errors import ConfigError, LightcacheError
from lightcache.hybrid.checkpoints import clear_states
from lightcache.shm import Segment
from lightcache.shm.errors import leave
from lightcache.shm.listing import read_segment

STATES = "-states"
"""Suffix of the name of a cache of states, after the name of the cache of keys and values."""


IDLE_LIMIT = 24 * 3600.0
"""Seconds without use after which a cache may be removed to make room."""


def open_cache(
    name: str,
    model: Any,
    *,
    page_tokens: int = 16,
    lifetime: str | None = None,
    idle_limit: float | None = IDLE_LIMIT,
    **options: Any,
) -> Cache:
    """`Cache.open` for the pages of a model: with the page_bytes, fingerprint and device that
    `describe` finds.

    The cache stays in shared memory when this process ends, so that the next process reuses its
    pages. The last process to leave it logs its size and how to remove it. Once it has been unused
    for `idle_limit` seconds, the next `open` or `sweep` that needs its room removes it.

    Args:
        name: of the cache.
        model: as `describe`; one without recurrent states.
        page_tokens: tokens of a page.
        lifetime: "attached": removed with its last client. "persistent": it stays. None: the
            existing cache's lifetime, "persistent" for a new one.
        idle_limit: of a new cache; None: it stays until it is removed, and must be persistent.
        options: of `Cache.open`; `size` or `pages` is needed.

    Raises:
        ConfigError: as `describe`, a hybrid model, or options that the model decides.
        LayoutMismatch: there is one of that name for another model.
        Otherwise as `Cache.open`.
    """
    pages = describe(model, page_tokens=page_tokens)
    if pages.states is not None:
        raise ConfigError(
            f"model: expected only keys and values, found recurrent states in "
            f"{type(model).__name__}, which need a cache of their own; use open_caches"
        )
    return _open(name, pages.options, _lasting(lifetime, idle_limit) | options)


@dataclass(frozen=True)
class Caches:
    """The caches of a model's prefixes. As a context manager: leaving closes both."""

    kv: Cache
    """Keys and values."""
    states: Cache | None
    """One page a state; None for a model without recurrent states."""

    def clear(self, namespace: Namespace | None = None) -> None:
        """Clear a namespace in both, see `Cache.clear`; in the cache of states, the one of the same
        weights version and tenant.

        Args:
            namespace: of `kv`; None: its default one.
        """
        cleared = self.kv.index.default_namespace if namespace is None else namespace
        self.kv.clear(namespace)
        if self.states is not None:
            clear_states(self.states, cleared.weights, cleared.tenant)

    def close(self) -> None:
        """Close both; close connectors first."""
        with ExitStack() as stack:
            stack.callback(self.kv.close)
            if self.states is not None:
                stack.callback(self.states.close)

    def __enter__(self) -> Caches:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)


def open_caches(
    name: str,
    model: Any,
    *,
    size: int | str,
    states: int | str | None = None,
    page_tokens: int = 16,
    lifetime: str | None = None,
    idle_limit: float | None = IDLE_LIMIT,
    **options: Any,
) -> Caches:
    """Open the caches of a model, hybrid or not. For their lifetime see `open_cache`.

    Args:
        name: of the cache of keys and values; the cache of states is named `f"{name}-states"`.
        model: as `describe`.
        size: bytes for keys and values, or as "32GiB".
        states: bytes for states; None: an eighth of `size`. Not used for a model without any.
        page_tokens: tokens of a page of keys and values.
        lifetime, idle_limit: see `open_cache`.
        options: of `Cache.open`, for both.

    Raises:
        ConfigError: as `describe`, or options that the model decides.
        LayoutMismatch: there is one of that name for another model.
        Otherwise as `Cache.open`.
    """
    pages = describe(model, page_tokens=page_tokens)
    options = _lasting(lifetime, idle_limit) | options
    with ExitStack() as stack:
        stack.push(_undo(name))
        kv = stack.enter_context(_open(name, pages.options, {"size": size, **options}))
        second = None
        if pages.states is not None:
            room = parse_size(size) // 8 if states is None else states
            wanted = {"size": room, **options}
            second = stack.enter_context(_open(name + STATES, pages.states.options, wanted))
        stack.pop_all()
    return Caches(kv, second)


def _undo(name: str) -> Callable[..., None]:
    """A callback that removes a cache that did not exist when this was called, if a later step
    fails: one cache without the other is of no use, and would stay."""
    exists = read_segment(name) is not None

    def undo(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not exists:
            with suppress(LightcacheError):  # another process uses it now
                Segment.unlink(name)

    return undo


def _lasting(lifetime: str | None, idle_limit: float | None) -> dict[str, Any]:
    """The options of `Cache.open` for these of `open_cache`."""
    if lifetime == "attached":
        options = {} if idle_limit == IDLE_LIMIT else {"idle_limit": idle_limit}  # which is refused
        return {"lifetime": lifetime, **options}
    if idle_limit is None:
        return {"lifetime": "persistent"}
    return {"lifetime": lifetime, "idle_limit": idle_limit}


def _open(name: str, found: dict[str, Any], options: dict[str, Any]) -> Cache:
    twice = sorted(found.keys() & options.keys())
    if twice:
        raise ConfigError(
            f"open_cache: {', '.join(twice)} follow from the model, found them given as well; "
            "leave them out, or use Cache.open(**describe(model, name=...).options)"
        )
    return Cache.open(name, **found, **options)


__all__ = ["IDLE_LIMIT", "Caches", "open_cache", "open_caches"]
