"""Caches that fit a model: one for each kind of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from lightcache import Cache, Namespace
from lightcache._arguments import parse_size
from lightcache.connectors.model_pages import TokenPages, describe
from lightcache.errors import ConfigError, LightcacheError
from lightcache.hybrid.checkpoints import clear_states
from lightcache.shm import Segment
from lightcache.shm.errors import leave
from lightcache.shm.listing import read_segment

STATES = "-states"
"""Suffix of the name of a cache of states, after the name of the cache of keys and values."""


_TYPICAL = 4096
"""Tokens of a prompt by which bytes are divided among caches."""
_PROMPTS = 16
"""Prompts for which every cache has room."""
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
        model: as `describe`; one whose layers are all of one kind.
        page_tokens: tokens of a page.
        lifetime: "attached": removed with its last client. "persistent": it stays. None: the
            existing cache's lifetime, "persistent" for a new one.
        idle_limit: of a new cache; None: it stays until it is removed, and must be persistent.
        options: of `Cache.open`; `size` or `pages` is needed.

    Raises:
        ConfigError: as `describe`, layers of several kinds, or options that the model decides.
        LayoutMismatch: there is one of that name for another model.
        Otherwise as `Cache.open`.
    """
    pages = describe(model, page_tokens=page_tokens)
    if pages.attention and pages.states is not None:
        raise ConfigError(
            f"model: expected only keys and values, found recurrent states in "
            f"{type(model).__name__}, which need a cache of their own; use open_caches"
        )
    if pages.others:
        raise ConfigError(
            f"model: expected one kind of layers, found {', '.join(of.name for of in pages.others)}"
            f" beside {pages.attention[0].name} in {type(model).__name__}, which need caches of "
            "their own; use open_caches"
        )
    return _open(name, pages.options, _lasting(lifetime, idle_limit) | options)


@dataclass(frozen=True)
class Caches:
    """The caches of a model's prefixes. As a context manager: leaving closes all."""

    kv: Cache
    """The first, whose keys name the pages of all: of full attention; for a model without it, of
    its windows, or of its states if these are all it has."""
    states: Cache | None = None
    """One page a state; None: the model has none, or `kv` has them."""
    windows: Mapping[str, Cache] = field(default_factory=dict)
    """Of layers with windows or chunks, beside the first, by `TokenPages.name`."""

    @property
    def all(self) -> list[Cache]:
        """Every cache; the first is `kv`."""
        states = [] if self.states is None else [self.states]
        return [self.kv, *states, *self.windows.values()]

    def clear(self, namespace: Namespace | None = None) -> None:
        """Clear a namespace in all, see `Cache.clear`; in those beside the first, the one of the
        same weights version and tenant.

        Args:
            namespace: of `kv`; None: its default one.
        """
        cleared = self.kv.index.default_namespace if namespace is None else namespace
        self.kv.clear(namespace)
        for other in self.all[1:]:
            clear_states(other, cleared.weights, cleared.tenant)

    def close(self) -> None:
        """Close all; close connectors first."""
        with ExitStack() as stack:
            for cache in self.all:
                stack.callback(cache.close)

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
    """Open the caches of a model: one for each kind of its layers. For their lifetime see
    `open_cache`.

    Args:
        name: of the first cache: of full attention; of a model without it, of windows, or of states
            if these are all it has. The cache of states is named `f"{name}-states"`, and others
            `f"{name}-window4096"` and the like.
        model: as `describe`.
        size: bytes for keys and values, or as "32GiB"; divided among caches of full attention,
            windows and chunks by what a prompt of 4,096 tokens needs of each. Of a model of states
            alone: bytes for these.
        states: bytes for states beside keys and values; None: an eighth of `size`. Not used for
            other models.
        page_tokens: tokens of a page of keys and values.
        lifetime, idle_limit: see `open_cache`.
        options: of `Cache.open`, for all.

    Raises:
        ConfigError: as `describe`, or options that the model decides.
        LayoutMismatch: there is one of that name for another model.
        Otherwise as `Cache.open`.
    """
    pages = describe(model, page_tokens=page_tokens)
    options = _lasting(lifetime, idle_limit) | options
    room = parse_size(size)
    wanted = {name: (pages.options, room)}
    for of, share in zip(pages.attention, _shares(pages.attention, room), strict=True):
        own = name if of is pages.first else f"{name}-{of.name}"
        wanted[own] = (of.options, share)
    if pages.attention and pages.states is not None:
        more = room // 8 if states is None else parse_size(states)
        wanted[name + STATES] = (pages.states.options, more)
    with ExitStack() as stack:
        opened = {}
        for own, (found, share) in wanted.items():
            stack.push(_undo(own))
            opened[own] = stack.enter_context(_open(own, found, {"size": share, **options}))
        stack.pop_all()
    windows = {of.name: opened[f"{name}-{of.name}"] for of in pages.others}
    return Caches(opened[name], opened.get(name + STATES), windows)


def _shares(attention: tuple[TokenPages, ...], room: int) -> list[int]:
    """Bytes for the cache of each of these, in proportion to what a typical prompt needs of it;
    beside the first at least for some prompts."""
    needed = []
    for of in attention:
        size = of.geometry.page_tokens
        last = -(-_TYPICAL // size)
        needed.append(max(1, last - of.rule.first(last, size)) * of.geometry.page_bytes)
    others = [max(room * part // sum(needed), _PROMPTS * part) for part in needed[1:]]
    return [room - sum(others), *others] if needed else []


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
