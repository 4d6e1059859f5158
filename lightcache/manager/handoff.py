"""KV hand-off within a node: one engine computes a prompt, another engine decodes it.

Full pages travel by their keys through the host cache: the prefill side has reserved them when
`hand_off` returns, and the decode side waits until they are published. Tokens that fill only part
of a page have no key. They are copied into a page without a key, which travels by a ticket. The
prefill side holds nothing of it when `hand_off` returns; the page is freed when the decode side has
loaded it, has died, or has not adopted it in time.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Keys, Pages, count
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    LightcacheError,
    OutOfPages,
    TransferFailed,
)
from lightcache.leases import TICKET_BYTES, Allocation, ClientId, Lease
from lightcache.manager.blocks import ManagedBlocks
from lightcache.manager.load import JointLoad, LoadHandle
from lightcache.manager.request import CacheScope, Prompt, Request, slots_of
from lightcache.manager.transfers import BlockTransfer

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager
_VERSION = 1
_MARK_BYTES = 16
_TRAVELS = struct.Struct(f"<BQI{TICKET_BYTES}s{_MARK_BYTES}s")


@dataclass(frozen=True)
class KVHandoff:
    """A computed prefix that is handed to another engine of the node. Send it as
    `bytes(handoff)`."""

    tokens: int
    """Tokens in full pages, which are in the host cache or being written there."""
    partial: int = 0
    """Tokens after these, in the page of the ticket."""
    ticket: bytes | None = None
    """Ticket of the partly filled page; None: there is no such page."""
    mark: bytes = b""
    """Digest of everything that these tokens' KV depends on: a receiver with another prompt, or
    other weights, does not load them."""

    def __bytes__(self) -> bytes:
        """About 69 bytes; `KVHandoff.parse` reads them."""
        ticket = self.ticket or bytes(TICKET_BYTES)
        return _TRAVELS.pack(_VERSION, self.tokens, self.partial, ticket, self.mark)

    @staticmethod
    def parse(data: bytes) -> KVHandoff:
        """The hand-off that `bytes` wrote.

        Raises:
            CacheCorrupted: other data, or data of another release.
        """
        if len(data) != _TRAVELS.size or data[0] != _VERSION:
            raise CacheCorrupted(
                f"hand-off: expected {_TRAVELS.size} bytes of version {_VERSION}, found "
                f"{len(data)}; run the same release everywhere, and look at the message"
            )
        _, tokens, partial, ticket, mark = _TRAVELS.unpack(data)
        if not partial:
            return KVHandoff(tokens)
        return KVHandoff(tokens, partial, ticket, mark)


def hand_off(
    manager: KVCacheManager,
    request: Hashable,
    adopters: list[ClientId],
    timeout: float = 10.0,
    *,
    adopt_timeout: float = 60.0,
) -> KVHandoff:
    """Hand the computed KV of a running request to another engine of this node. Writes the full
    pages that the host lacks, whatever the write policy, without waiting for them; waits for the
    copy of the partly filled page. The request keeps running; release it at any time.

    Args:
        adopters: clients of the host cache that receive it, each once: `Cache.client_id` of the
            decode side's scheduler, or of several, which must all adopt it.
        timeout: seconds that the copy of the partly filled page may take.
        adopt_timeout: seconds in which all adopters must adopt this page.

    Returns:
        The hand-off to send. The decode side computes pages that found no room or whose copy
        failed.

    Raises:
        WaitTimeout: the copy is in flight; it gives its page back when it has finished.
        ConfigError: no adopters, or one twice; the request publishes nothing; or there is no host
            cache.
        LeaseLost: no such running request, or an adopter has left or died.
    """
    end = time.monotonic() + timeout
    manager.needs_host("hand_off")
    with manager.state.lock:
        running = manager.request(request)
        if not running.options.write:
            raise ConfigError(
                f"hand_off {request!r}: its options say write=False, so nothing of it may be "
                "shared; compute it where it is decoded"
            )
        space = running.space
        if space is None or not manager.state.weights.is_valid(space):
            return KVHandoff(0)
        page = manager.page_tokens
        full = running.total // page
        _publish(manager, running, space, full)
        tail = running.unfilled(full * page)
        saving = _Saving.begin(manager, running, full * page, len(tail)) if len(tail) else None
    handoff = KVHandoff(full * page)
    if saving is None:
        return handoff
    ticket = saving.ticket(adopters, max(0.0, end - time.monotonic()), adopt_timeout)
    if ticket is None:
        return handoff
    keys = running.host_chain.keys[:full]
    return KVHandoff(handoff.tokens, len(tail), ticket, mark_of(running.prompt, space, keys, tail))


def _publish(manager: KVCacheManager, request: Request, space: CacheScope, full: int) -> None:
    """Begin to write the full pages that are neither on the host nor being written."""
    present = manager.host.peek(request.host_chain.keys[:full], namespace=space.host)
    if present < full:
        manager.offloader.write(request, present, full)
    request.written = max(request.written, full)


def mark_of(prompt: Prompt, space: CacheScope, keys: Keys, tail: Any) -> bytes:
    """The counterpart of a key, for tokens that fill no page."""
    page = space.host_spec.page_tokens
    salt = prompt.salt.encode() if isinstance(prompt.salt, str) else prompt.salt
    parts = [space.weights.encode(), space.tenant.encode(), salt, prompt.lora]
    parts.append(keys[-1].tobytes() if len(keys) else b"")
    parts.append(prompt.item_marks(page).get(len(keys), b""))
    parts.append(np.ascontiguousarray(tail, "<u4").tobytes())
    digest = hashlib.blake2b(digest_size=_MARK_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class _Saving:
    """A page without a key, and the copy of a partly filled page into it."""

    def __init__(self, manager: KVCacheManager, held: Allocation, tokens: int) -> None:
        self._manager, self._held, self._tokens = manager, held, tokens
        self._given_up = False
        self._transfer: BlockTransfer | None = None

    @classmethod
    def begin(cls, manager: KVCacheManager, request: Request, begin: int, n: int) -> _Saving | None:
        """Allocate the page and begin the copy; None: no room. The manager's lock is held."""
        block = manager.device.block_tokens
        if len(request.table) * block < begin + n:
            return None  # the engine has freed these blocks
        try:
            held = manager.host.index.allocate(1, timeout=manager.config.time_limit)
        except LightcacheError:
            manager.state.counts.add(no_room_pages=1)
            return None
        saving = cls(manager, held, n)
        slots = slots_of(request.table, block, begin, begin + n)
        blocks = np.unique(slots // block).astype(np.int32)
        manager.state.transfers.begin(
            blocks,
            manager.backend,
            manager.backend.save,
            held,
            (slots,),
            saving.on_result,
            of=request.transfers,
            on_end=saving.ended,
            into=(saving, "_transfer"),
        )
        return saving

    def ticket(
        self, adopters: list[ClientId], timeout: float, adopt_timeout: float
    ) -> bytes | None:
        """Block until the copy has finished and return the page's ticket; None: the copy failed.
        In every case the page is not ours afterwards."""
        assert self._transfer is not None
        try:
            self._transfer.wait(timeout)
            ticket = self._held.ticket(adopters, timeout=adopt_timeout)
            data = bytes(ticket)
            ticket.drop()  # the ticket lasts without us: `Ticket`
        except (TransferFailed, OutOfPages):
            return None
        finally:
            with self._manager.state.lock:
                self._given_up = True
                if self._transfer.finished:
                    self._free()
        return data

    def on_result(self, ok: bool, nbytes: int | None) -> None:
        counts = self._manager.state.counts
        if ok:
            moved = self._manager.state.moved_bytes(self._tokens, nbytes)
            counts.add(offloads=1, offloaded_pages=1, offloaded_bytes=moved)
        else:
            counts.add(failed_offloads=1)

    def ended(self, ok: bool) -> None:
        del ok
        if self._given_up:
            self._free()

    def _free(self) -> None:
        if len(self._held):
            # If the lock does not come in time, the last reference to the page frees it.
            with contextlib.suppress(LightcacheError):
                self._held.free()


# ---- Decode side


class HandoffLoad(JointLoad):
    """The load of a hand-off to the device; used as `LoadHandle`."""

    def __init__(self, load: LoadHandle, partial: tuple[BlockTransfer, int] | None) -> None:
        """For `receive`."""
        super().__init__(load, [] if partial is None else [partial[0]])
        self._partial = 0 if partial is None else partial[1]

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed: `LoadHandle.tokens`, plus those of the partly
        filled page unless a copy failed."""
        return self._kv.tokens if self.failed else self._kv.tokens + self._partial


def receive(
    manager: KVCacheManager,
    request: Hashable,
    prompt: Prompt,
    handed: KVHandoff | bytes,
    table: Pages | None = None,
    timeout: float = 10.0,
    *,
    device_tokens: int | None = None,
) -> HandoffLoad:
    """Begin a request whose prefix another engine has computed: wait until its full pages are
    published, plan and take it, and load all of it to the device. The request then runs, as after
    `load`.

    Blocks while pages are being written, for `timeout` seconds at most. Pages that are missing
    then, or whose writer died, are computed here: `HandoffLoad.tokens` says from where.

    Args:
        prompt: the computed tokens and at least one more; else the last one is computed again.
        handed: the hand-off from the prefill side.
        table: mirrored blocks: the request's blocks, for `handed.tokens + handed.partial` tokens
            at least. Managed blocks: None; blocks for the whole prompt are allocated here.
        device_tokens: as for `plan`.

    Raises:
        OutOfPages: not enough blocks. Nothing of the request is left, as after every error.
        ConfigError: it runs already, the table is too short, or there is no host cache.
        CacheCorrupted: `handed` was not made by `hand_off`.
    """
    manager.needs_host("receive")
    handoff = handed if isinstance(handed, KVHandoff) else KVHandoff.parse(bytes(handed))
    count(handoff.tokens % manager.page_tokens, "handed.tokens: rest of a page", 0, 0)
    page = _Adopted(manager, handoff)
    began = False
    try:
        page.adopt()  # first: once adopted, the page stays until we give it back
        _wait_for_pages(manager, prompt, handoff, timeout)
        manager.plan(request, prompt, device_tokens=device_tokens)
        with manager.state.lock:
            manager.begin(request)
        began = True
        if table is None and isinstance(manager.device, ManagedBlocks):
            manager.allocate(request, len(prompt))
        load = manager.load(request, table)
        with manager.state.lock:
            return HandoffLoad(load, page.load(manager.request(request)))
    except BaseException:
        if began:
            manager.release(request, publish=False)
        else:
            manager.cancel(request)
        raise
    finally:
        page.close()


def _wait_for_pages(
    manager: KVCacheManager, prompt: Prompt, handoff: KVHandoff, timeout: float
) -> None:
    with manager.state.lock:
        space = manager.state.weights.open_space(prompt.tenant)
    keys = prompt.keys(space.host_spec)[: handoff.tokens // manager.page_tokens]
    # Missing pages are computed; errors of the cache are misses, as everywhere.
    with contextlib.suppress(LightcacheError):
        manager.host.wait(keys, timeout=timeout, namespace=space.host)


class _Adopted:
    """The page of a hand-off's ticket, adopted by us until a copy takes it over."""

    def __init__(self, manager: KVCacheManager, handoff: KVHandoff) -> None:
        """Not adopted yet."""
        self._manager, self._given = manager, handoff
        self._lease: Lease | None = None
        self._in_doubt = False
        """Adoption is in progress: after an interrupt the page may be ours without a lease here."""

    def adopt(self) -> None:
        """Adopt the page. If that is refused, there is no page."""
        manager, ticket = self._manager, self._given.ticket
        if ticket is None or not self._given.partial:
            return
        self._in_doubt = True
        with contextlib.suppress(LightcacheError):
            adopted = manager.host.adopt(ticket, timeout=manager.config.time_limit)
            assert isinstance(adopted, Lease)
            self._lease = adopted
        self._in_doubt = False

    def load(self, request: Request) -> tuple[BlockTransfer, int] | None:
        """Load the page after the request's full pages, if those end where it begins. Returns the
        copy and its number of tokens. The manager's lock is held."""
        manager, begin = self._manager, self._given.tokens
        lease, n = self._lease, self._usable(request)
        block = manager.device.block_tokens
        if lease is None or n <= 0 or len(request.table) * block < begin + n:
            return None
        slots = np.full(manager.page_tokens, -1, np.int64)
        slots[:n] = slots_of(request.table, block, begin, begin + n)
        blocks = np.unique(slots[:n] // block).astype(np.int32)

        def on_result(ok: bool, nbytes: int | None) -> None:
            if ok:
                moved = manager.state.moved_bytes(n, nbytes)
                manager.state.counts.add(loads=1, loaded_pages=1, loaded_bytes=moved)
            else:
                manager.state.counts.add(failed_loads=1)

        transfer = manager.state.transfers.begin(
            blocks,
            manager.backend,
            manager.backend.load,
            lease,
            (slots, 0),
            on_result,
            of=request.transfers,
            on_end=self._tell,
            instead_of=(self, "_lease"),
        )
        return transfer, n

    def _usable(self, request: Request) -> int:
        """Tokens of the page that this request may use: never the prompt's last."""
        handoff, space = self._given, request.space
        begin, page = handoff.tokens, self._manager.page_tokens
        n = min(handoff.partial, page, len(request.prompt) - 1 - begin)
        if space is None or request.match.usable != begin or n < 1:
            return 0
        if handoff.partial > len(request.prompt) - begin:
            return 0  # our prompt is shorter, so its tokens cannot be compared
        keys = request.prompt.keys(space.host_spec)[: begin // page]
        tail = request.prompt.tokens[begin : begin + handoff.partial]
        return n if mark_of(request.prompt, space, keys, tail) == handoff.mark else 0

    def close(self) -> None:
        """Give the page back unless a copy has it. A lease that an interrupt lost is released by
        itself; its ticket still needs a verdict."""
        lease = self._lease
        if lease is not None:
            self._tell(False)
            lease.close()
            self._lease = None
        elif self._in_doubt:
            self._tell(False)

    def _tell(self, ok: bool) -> None:
        assert self._given.ticket is not None
        with contextlib.suppress(LightcacheError):  # the verdict may be lost
            self._manager.host.done(self._given.ticket, ok)


__all__ = ["HandoffLoad", "KVHandoff", "hand_off", "mark_of", "receive"]
