"""Hand-over within a node: one engine computes a prompt, another one goes on with it.

Full pages go by their keys, through the host cache, as everything does: the prefill side has
reserved them when `hand_over` returns, the decode side waits until they are published. What fills
only a part of a page has no key. It is copied into a page that is not named, and goes by a ticket.
Nothing of it is left on the prefill side when `hand_over` returns; the page is free again when the
decode side has loaded it, has died, or has not come in time."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    LightcacheError,
    OutOfPages,
    TransferFailed,
)
from lightcache.held import Held
from lightcache.manager.gathering import moved_bytes
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Request, Space, slots_of
from lightcache.manager.traffic import Movement
from lightcache.tickets import TICKET_BYTES, ClientId

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager

_VERSION = 1
_MARK_BYTES = 16
_TRAVELS = struct.Struct(f"<BQI{TICKET_BYTES}s{_MARK_BYTES}s")


@dataclass(frozen=True)
class HandOver:
    """A computed prefix on its way to another engine of the node; `bytes(it)` is what travels."""

    tokens: int
    """In full pages, which are in the host cache or being written there."""
    partial: int = 0
    """Tokens behind these, in the page of the ticket."""
    ticket: bytes | None = None
    """Of the partly filled page; None: there is none."""
    mark: bytes = b""
    """Digest of what these tokens depend on: whoever has another prompt, or other weights, does
    not load them."""

    def __bytes__(self) -> bytes:
        """69 bytes or so; `HandOver.parse` reads them."""
        ticket = self.ticket or bytes(TICKET_BYTES)
        return _TRAVELS.pack(_VERSION, self.tokens, self.partial, ticket, self.mark)

    @staticmethod
    def parse(data: bytes) -> HandOver:
        """What `bytes` was asked of.

        Raises:
            CacheCorrupted: something else, or of another release.
        """
        if len(data) != _TRAVELS.size or data[0] != _VERSION:
            raise CacheCorrupted(
                f"hand-over: expected {_TRAVELS.size} bytes of version {_VERSION}, found "
                f"{len(data)}; run the same release everywhere, and look at the message"
            )
        _, tokens, partial, ticket, mark = _TRAVELS.unpack(data)
        if not partial:
            return HandOver(tokens)
        return HandOver(tokens, partial, ticket, mark)


def hand_over(
    manager: KVCacheManager,
    request: Hashable,
    adopters: list[ClientId],
    timeout: float = 10.0,
    *,
    adopt_timeout: float = 60.0,
) -> HandOver:
    """Hand what a running request has computed to another engine of this node. Full pages that the
    host has not are written now, whatever the write policy, and not waited for; the partly filled
    page is. The request goes on; release it when you like.

    Args:
        adopters: clients of the host cache that may receive it, each once: `Cache.client_id` of
            the decode side's scheduler, or of several of which all will.
        timeout: seconds that the copy of the partly filled page may take.
        adopt_timeout: seconds that this page waits for all of them.

    Returns:
        What to send. Pages for which there was no room, or that failed, are not in it or will not
        be found: the decode side computes them.

    Raises:
        WaitTimeout: the copy goes on; it gives its page back when it is over.
        ConfigError: an adopter is not attached, or the request publishes nothing.
        LeaseLost: no such running request.
    """
    end = time.monotonic() + timeout
    with manager._lock:
        one = manager._request(request)
        if not one.wishes.write:
            raise ConfigError(
                f"hand_over {request!r}: its wishes say write=False, so nothing of it may be "
                "shared; compute it where it is decoded"
            )
        space = one.space
        if space is None or not manager._weights.good(space):
            return HandOver(0)
        page = manager.page_tokens
        full = one.total // page
        _publish(manager, one, space, full)
        tail = _tail(one, full * page)
        saving = _Saving.begin(manager, one, full * page, len(tail)) if len(tail) else None
    made = HandOver(full * page)
    if saving is None:
        return made
    ticket = saving.ticket(adopters, max(0.0, end - time.monotonic()), adopt_timeout)
    if ticket is None:
        return made
    keys = one.host_chain.keys[:full]
    return HandOver(made.tokens, len(tail), ticket, mark_of(one.prompt, space, keys, tail))


def _publish(manager: KVCacheManager, one: Request, space: Space, full: int) -> None:
    """What of the full pages the host has not, and nobody writes, is written now."""
    there = manager.host.peek(one.host_chain.keys[:full], namespace=space.host)
    if there < full:
        manager._writer.write(one, there, full)
    one.written = max(one.written, full)


def _tail(one: Request, begin: int) -> Any:
    """Ids of the computed tokens from `begin` on, less than a page; none if they are not known
    any more."""
    if one.total <= len(one.prompt):
        return one.prompt.tokens[begin : one.total]
    hasher = one.host_chain._hasher
    if hasher is None or hasher.pages * hasher.spec.page_tokens != begin:
        return one.prompt.tokens[:0]
    return np.frombuffer(hasher._tail, "<u4")[: one.total - begin]


def mark_of(prompt: Prompt, space: Space, keys: Keys, tail: Any) -> bytes:
    """What a key would say, for tokens that fill no page."""
    page = space.host_spec.page_tokens
    salt = prompt.salt.encode() if isinstance(prompt.salt, str) else prompt.salt
    parts = [space.weights.encode(), space.tenant.encode(), salt, prompt.lora]
    parts.append(keys[-1].tobytes() if len(keys) else b"")
    parts.append(prompt._extra(page).get(len(keys), b""))
    parts.append(np.ascontiguousarray(tail, "<u4").tobytes())
    digest = hashlib.blake2b(digest_size=_MARK_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class _Saving:
    """The copy of a partly filled page into one without a key, and that page."""

    def __init__(self, manager: KVCacheManager, held: Held, tokens: int) -> None:
        self._manager, self._held, self._tokens = manager, held, tokens
        self._given_up = False
        self._movement: Movement | None = None

    @classmethod
    def begin(cls, manager: KVCacheManager, one: Request, begin: int, n: int) -> _Saving | None:
        """None: no room for it. The manager's lock is held."""
        block = manager.device.block_tokens
        if len(one.table) * block < begin + n:
            return None  # the engine has let go of these blocks
        try:
            held = manager.host.index.allocate(1, timeout=manager.config.time_limit)
        except LightcacheError:
            manager._figures.add(no_room_pages=1)
            return None
        made = cls(manager, held, n)
        slots = slots_of(one.table, block, begin, begin + n)
        blocks = np.unique(slots // block).astype(np.int32)
        made._movement = manager._traffic.begin(
            blocks,
            lambda: manager.mover.save(held, slots),
            made._over,
            made._free,
            one.movements,
        )
        return made

    def ticket(
        self, adopters: list[ClientId], timeout: float, adopt_timeout: float
    ) -> bytes | None:
        """The page's ticket, when the copy is over; None: it failed. Blocks. The page is not ours
        any more, however this ends."""
        assert self._movement is not None
        try:
            self._movement.wait(timeout)
            given = self._held.ticket(adopters, timeout=adopt_timeout)
            found = bytes(given)
            given.drop()  # it lasts without us: `Ticket`
        except (TransferFailed, OutOfPages):
            return None
        finally:
            with self._manager._lock:
                self._given_up = True
                if self._movement.over:
                    self._free()
        return found

    def _over(self, ok: bool, nbytes: int | None) -> None:
        figures = self._manager._figures
        if ok:
            moved = moved_bytes(self._manager.host, self._tokens, nbytes)
            figures.add(offloads=1, offloaded_pages=1, offloaded_bytes=moved)
        else:
            figures.add(failed_offloads=1)
        if self._given_up:
            self._free()

    def _free(self) -> None:
        if len(self._held):
            # A lock that is held for too long: the page goes with the last reference to it.
            with contextlib.suppress(LightcacheError):
                self._held.free()


__all__ = ["HandOver", "hand_over", "mark_of"]
