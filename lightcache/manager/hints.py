"""Hints without a request: keep, drop, prefetch. The manager's lock is around every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightcache.errors import Abandoned, ConfigError
from lightcache.manager.prompts import Prompt

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager
    from lightcache.storage.tasks import StorageTask
    from lightcache.storage.tiers import BaseTier


def keep(manager: KVCacheManager, prompt: Prompt, kept: bool) -> dict[str, int]:
    """Tokens of a prefix that are kept from now on, or no more, by tier."""
    space = manager._weights.space_of(prompt.tenant)
    if space is None:
        return {"host": 0, "device": 0}
    host, device = manager.host.index, manager.device
    verb = host.keep if kept else host.unkeep
    found = {"host": verb(prompt.keys(space.host_spec), namespace=space.host), "device": 0}
    if device.owned and device.index is not None:
        verb = device.index.keep if kept else device.index.unkeep
        found["device"] = verb(prompt.keys(space.device_spec), namespace=space.device)
    return _tokens(manager, found)


def drop(manager: KVCacheManager, prompt: Prompt, start: int) -> dict[str, int]:
    """Tokens behind `start` that were dropped, by tier: from the end upward, as far as nobody else
    uses them."""
    if start < 0:
        raise ConfigError(f"start: expected a token's position, found {start}")
    space = manager._weights.space_of(prompt.tenant)
    if space is None:
        return {"host": 0, "device": 0}
    device = manager.device
    first = -(-start // manager.page_tokens)
    keys = prompt.keys(space.host_spec)
    gone = {"host": 0, "device": 0}
    if first < len(keys):
        gone["host"] = manager.host.index.drop(keys, start=first, namespace=space.host)
    first = -(-start // device.block_tokens)
    keys = prompt.keys(space.device_spec)
    if device.owned and device.index is not None and first < len(keys):
        gone["device"] = device.index.drop(keys, start=first, namespace=space.device)
    return _tokens(manager, gone)


def prefetch(manager: KVCacheManager, prompt: Prompt, storage: BaseTier | None) -> StorageTask:
    """Bring what storage has of a prompt to the host; its task."""
    if storage is None:
        raise ConfigError("prefetch: the manager has no storage; make it with storage=")
    space = manager._weights.space_of(prompt.tenant)
    if space is None:
        raise Abandoned("prefetch: the weights are being changed; ask again behind finish_update")
    keys = prompt.keys(space.host_spec)
    there = manager.host.peek(keys, namespace=space.host)
    return storage.prefetch(keys, there, namespace=space.host)


def _tokens(manager: KVCacheManager, pages: dict[str, int]) -> dict[str, int]:
    return {
        "host": pages["host"] * manager.page_tokens,
        "device": pages["device"] * manager.device.block_tokens,
    }


__all__ = ["drop", "keep", "prefetch"]
