"""Caches that fit a model: one of keys and values, and for a hybrid model one of states."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lightcache import Cache, Namespace
from lightcache.connectors.model_pages import describe
from lightcache.errors import ConfigError
from lightcache.hybrid.spaces import clear_states
from lightcache.sizes import parse_size

STATES = "-states"
"""What the name of a cache of states ends in, behind that of its keys and values."""


def open_cache(name: str, model: Any, *, page_tokens: int = 16, **options: Any) -> Cache:
    """`Cache.open` for the pages of a model: with the page_bytes, fingerprint and device that
    `describe` finds.

    Args:
        name: of the cache.
        model: as `describe`; one without recurrent states.
        page_tokens: tokens of a page.
        options: of `Cache.open`; `size` or `pages` is needed.

    Raises:
        ConfigError: as `describe`, a hybrid model, or options that the model decides.
        LayoutMismatch: there is one of that name for another model.
        Otherwise as `Cache.open`.
    """
    pages = describe(model, page_tokens=page_tokens)
    if pages.states is not None:
        raise ConfigError(
            f"model: expected keys and values alone, found recurrent states in "
            f"{type(model).__name__}, which need a cache of their own; use open_caches"
        )
    return _open(name, pages.options, options)


@dataclass(frozen=True)
class Caches:
    """What a model's prefixes are kept in. As a context manager: leaving closes both."""

    kv: Cache
    """Keys and values."""
    states: Cache | None
    """One page a state; None for a model without recurrent states."""

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget a namespace in both, see `Cache.clear`: of the states that of the same weights
        version and tenant.

        Args:
            namespace: of `kv`; None: its default one.
        """
        cleared = self.kv.index.default_namespace if namespace is None else namespace
        self.kv.clear(namespace)
        if self.states is not None:
            clear_states(self.states, cleared.weights, cleared.tenant)

    def close(self) -> None:
        """Let go of both; connectors before."""
        with ExitStack() as stack:
            stack.callback(self.kv.close)
            if self.states is not None:
                stack.callback(self.states.close)

    def __enter__(self) -> Caches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_caches(
    name: str,
    model: Any,
    *,
    size: int | str,
    states: int | str | None = None,
    page_tokens: int = 16,
    **options: Any,
) -> Caches:
    """Open what a model needs, hybrid or not.

    Args:
        name: of the cache of keys and values; that of the states is called `f"{name}-states"`.
        model: as `describe`.
        size: bytes for keys and values, or as "32GiB".
        states: bytes for states; None: an eighth of `size`. Not used for a model without any.
        page_tokens: tokens of a page of keys and values.
        options: of `Cache.open`, for both.

    Raises:
        ConfigError: as `describe`, or options that the model decides.
        LayoutMismatch: there is one of that name for another model.
        Otherwise as `Cache.open`.
    """
    pages = describe(model, page_tokens=page_tokens)
    with ExitStack() as stack:
        kv = stack.enter_context(_open(name, pages.options, {"size": size, **options}))
        second = None
        if pages.states is not None:
            room = parse_size(size) // 8 if states is None else states
            wanted = {"size": room, **options}
            second = stack.enter_context(_open(name + STATES, pages.states.options, wanted))
        stack.pop_all()
    return Caches(kv, second)


def _open(name: str, found: dict[str, Any], options: dict[str, Any]) -> Cache:
    twice = sorted(found.keys() & options.keys())
    if twice:
        raise ConfigError(
            f"open_cache: {', '.join(twice)} follow from the model, found them given as well; "
            "leave them out, or use Cache.open(**describe(model, name=...).options)"
        )
    return Cache.open(name, **found, **options)


__all__ = ["Caches", "open_cache", "open_caches"]
