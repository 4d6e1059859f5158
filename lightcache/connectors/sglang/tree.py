"""The hash before a piece of a prompt, and the token ids of one that is saved. SGLang's tree has
them and its interface for linkers leaves them out, so three methods of the wrapper that calls
linkers are wrapped here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from lightcache.connectors.sglang.rank import ROOT
from lightcache.hashing import MARK

_MARK = "_lightcache_before"


class Piece(NamedTuple):
    """A node of the tree."""

    hashes: list[str]
    """Of its pages."""
    tokens: Sequence[int]
    """Their token ids."""


class Told(Protocol):
    """A linker of ours."""

    before: str | None
    """Hash before the piece of the call that comes next; `ROOT`: there is none; None: unknown."""

    piece: Piece | None
    """What the call that comes next saves; None: not known, or not wanted, or tokens alone do not
    decide its hashes."""

    def untold(self, why: str) -> None:
        """From now on it may be unknown."""

    @property
    def wants_tokens(self) -> bool:
        """Whether `piece` is of use."""

    @property
    def window(self) -> int:
        """Pages that a window has; 0: there is no pool of them."""

    def used(self, last: list[str]) -> None:
        """The device has all whole pages of a prompt, up to the last of these hashes, which are
        those of the window that ends there, or one: no call names them."""


def tell_linkers(wrapper: Any, linker: type) -> bool:
    """From now on `UnifiedCacheLinkerWrapper` sets `before` of linkers of this class ahead of each
    call. Linkers of others see no difference. A second call does nothing. False: it has not the
    methods, or is None."""
    if hasattr(wrapper, _MARK):
        return True
    asks: dict[str, Callable[..., str | None]] = {
        "_tail_hashes": _before_tail,
        "_offload_node": _before_node,
    }
    methods = {name: getattr(wrapper, name, None) for name in asks}
    if not all(map(callable, methods.values())):
        return False
    for name, ask in asks.items():
        setattr(wrapper, name, _wrapped(methods[name], ask, linker))
    if callable(getattr(wrapper, "match", None)):
        wrapper.match = _noting_whole(wrapper.match, linker)
    setattr(wrapper, _MARK, True)
    return True


def _wrapped(method: Any, ask: Callable[..., str | None], linker: type) -> Any:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        ours: Any = getattr(self, "cache_linker", None)
        told: Any = ours if isinstance(ours, linker) else None
        if told is not None:
            try:
                told.before = ask(self, *arguments, **named)
            except Exception as error:
                told.before = None
                told.untold(f"SGLang's tree did not tell what is before one ({error!r})")
        found = method(self, *arguments, **named)
        if found == [] and told is not None and told.before:
            _use(told, self.cache, arguments[1].last_device_node)
        return found

    return call


def _noting_whole(match: Any, linker: type) -> Any:
    """`match` asks nothing about a prompt that ends with a page and is whole on the device."""

    @functools.wraps(match)
    def call(self: Any, key: Any, req: Any, result: Any) -> Any:
        ours: Any = getattr(self, "cache_linker", None)
        if isinstance(ours, linker):
            told: Any = ours
            if result.device_prefix_len >= len(key) > 0:
                _use(told, self.cache, result.last_device_node)
        return match(self, key, req, result)

    return call


def _use(told: Told, cache: Any, node: Any) -> None:
    """The device has a prompt up to this node. `Rank.used` bounds what is touched of it later."""
    try:
        if not told.window:
            told.used([str(cache.get_last_hash_value(node))])
            return
        tree = cache.tree_core
        hashes = list(tree.get_hash_values(node))
        if len(hashes) < told.window:
            hashes = [*tree.get_prefix_hash_values(node), *hashes]
        told.used(hashes[-told.window :])
    except Exception as error:
        told.untold(f"SGLang's tree did not tell what the device has ({error!r})")


def _before_tail(self: Any, key: Any, result: Any, device_hit_len: int) -> str | None:
    """Of what the device lacks of a prompt."""
    if device_hit_len <= 0:
        return ROOT
    last: str | None = self.cache.get_last_hash_value(result.last_device_node)
    return last


def _before_node(self: Any, node_id: Any, transfers: Any) -> str | None:
    """Of a node of the tree. It is told to the linker as well, if that wants its tokens."""
    told: Told = self.cache_linker
    told.piece = None
    if told.wants_tokens:
        with contextlib.suppress(Exception):  # they are advice
            told.piece = _piece(self.cache.tree_core, node_id)
    chain = self.cache.get_prefix_hash_values(node_id)
    return str(chain[-1]) if chain else ROOT


def _piece(tree: Any, node: Any) -> Piece | None:
    found = tree.snapshot_buffer_backup(node, False)
    if found is None or found.key.is_bigram or found.key.extra_key or found.key.cache_salt:
        return None
    tokens = found.key.raw_token_ids()
    fit = len(tokens) and min(tokens) >= 0 and max(tokens) < MARK  # an image's may be longer
    return Piece(list(found.hash_values), tokens) if fit else None


__all__ = ["Piece", "Told", "tell_linkers"]
