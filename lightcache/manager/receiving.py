"""The decode side of a hand-over: see `handover.py`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Pages, count
from lightcache.errors import LightcacheError, TransferFailed
from lightcache.leases import Lease
from lightcache.manager.fetching import Fetch, wait_on
from lightcache.manager.gathering import moved_bytes
from lightcache.manager.handover import HandOver, mark_of
from lightcache.manager.limits import seconds_of
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Request, slots_of
from lightcache.manager.traffic import Movement, State, unless_taken

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


class Received:
    """What was handed over, on its way to the device: as `Fetch`."""

    def __init__(
        self, manager: KVCacheManager, fetch: Fetch, partial: tuple[Movement, int] | None
    ) -> None:
        """For `receive`."""
        self._manager, self._fetch = manager, fetch
        self._movement: Movement | None = None
        self._partial = 0
        if partial is not None:
            self._movement, self._partial = partial

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed: as `Fetch.tokens`, and those of the partly
        filled page unless it failed."""
        if self._fetch.failed or self._failed(self._movement):
            return self._fetch.tokens
        return self._fetch.tokens + self._partial

    @property
    def failed(self) -> bool:
        """Whether any of it is over, and failed."""
        return self._fetch.failed or self._failed(self._movement)

    def done(self) -> bool:
        """Whether all of it is over. Does not block.

        Raises:
            TransferFailed: all is over, and something failed; `tokens` says from where to compute.
        """
        self._manager._traffic.poll()
        movements = self._movements()
        if not all(movement.over for movement in movements):
            return False  # also if one has failed: the other writes its blocks still
        for movement in movements:
            movement.done()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Until all of it is over. Blocks.

        Raises:
            WaitTimeout: some of it goes on.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        limit = seconds_of(timeout)
        end = None if limit is None else time.monotonic() + limit
        for movement in self._movements():
            with contextlib.suppress(TransferFailed):
                movement.wait(None if end is None else max(0.0, end - time.monotonic()))
        self.done()

    def wait_on(self, stream: Any = None) -> None:
        """As `Fetch.wait_on`."""
        for movement in self._movements():
            wait_on(movement, stream)

    def _movements(self) -> list[Movement]:
        both = (self._fetch._movement, self._movement)
        return [movement for movement in both if movement is not None]

    @staticmethod
    def _failed(movement: Movement | None) -> bool:
        return movement is not None and movement.state in (State.FAILED, State.CANCELLED)


def receive(
    manager: KVCacheManager,
    request: Hashable,
    prompt: Prompt,
    handed: HandOver | bytes,
    table: Pages | None = None,
    timeout: float = 10.0,
    *,
    device_tokens: int | None = None,
) -> Received:
    """Begin a request with what another engine has computed of it: wait until its full pages are
    published, plan and take it, and bring all of it to the device. The request runs then, as after
    `fetch`.

    Blocks while pages are being written, for `timeout` seconds at most; what is not there then, or
    will not come since its writer died, is computed here: `Received.tokens` says from where.

    Args:
        prompt: what was computed, and at least one token more, or that one is computed again.
        handed: what came from the prefill side.
        table: attached devices: the request's blocks, for `handed.tokens + handed.partial` tokens
            at least. Owned ones: None, blocks for the whole prompt are allocated here.
        device_tokens: as for `plan`.

    Raises:
        OutOfPages: no blocks for it. Nothing is left of it, as after every error.
        ConfigError: it runs already, or the table is too short.
        CacheCorrupted: `handed` is nothing that `hand_over` made.
    """
    given = handed if isinstance(handed, HandOver) else HandOver.parse(bytes(handed))
    count(given.tokens % manager.page_tokens, "handed.tokens: rest of a page", 0, 0)
    page = _Adopted(manager, given)  # first: from now on it waits for us, however long that takes
    began = False
    try:
        _wait_for_pages(manager, prompt, given, timeout)
        manager.plan(request, prompt, device_tokens=device_tokens)
        manager.take(request)
        began = True
        if table is None and isinstance(manager.device, OwnedDevice):
            manager.allocate(request, len(prompt))
        fetch = manager.fetch(request, table)
        with manager._lock:
            return Received(manager, fetch, page.load(manager._request(request)))
    except BaseException:
        if began:
            manager.release(request, publish=False)
        else:
            manager.cancel(request)
        raise
    finally:
        page.close()


def _wait_for_pages(
    manager: KVCacheManager, prompt: Prompt, given: HandOver, timeout: float
) -> None:
    with manager._lock:
        space = manager._spaces.of(prompt.tenant)
    keys = prompt.keys(space.host_spec)[: given.tokens // manager.page_tokens]
    # What is not there by then is computed; errors of the cache are misses, as everywhere.
    with contextlib.suppress(LightcacheError):
        manager.host.wait(keys, timeout=timeout, namespace=space.host)


class _Adopted:
    """The page of a hand-over's ticket in our own name, until a copy has it."""

    def __init__(self, manager: KVCacheManager, given: HandOver) -> None:
        """Adopts it; if that is refused, there is none."""
        self._manager, self._given = manager, given
        self._lease: Lease | None = None
        if given.ticket is None or not given.partial:
            return
        with contextlib.suppress(LightcacheError):
            adopted = manager.host.adopt(given.ticket, timeout=manager.config.time_limit)
            assert isinstance(adopted, Lease)
            self._lease = adopted

    def load(self, one: Request) -> tuple[Movement, int] | None:
        """Bring it to where the request's full pages end, if they do there: the copy, and how many
        tokens it brings. The manager's lock is held."""
        manager, begin = self._manager, self._given.tokens
        lease, n = self._lease, self._usable(one)
        block = manager.device.block_tokens
        if lease is None or n <= 0 or len(one.table) * block < begin + n:
            return None
        slots = np.full(manager.page_tokens, -1, np.int64)
        slots[:n] = slots_of(one.table, block, begin, begin + n)
        blocks = np.unique(slots[:n] // block).astype(np.int32)
        self._lease = None

        def over(ok: bool, nbytes: int | None) -> None:
            if ok:
                moved = moved_bytes(manager.host, n, nbytes)
                manager._figures.add(loads=1, loaded_pages=1, loaded_bytes=moved)
            else:
                manager._figures.add(failed_loads=1)
            self._tell(ok)

        movement = manager._traffic.begin(
            blocks,
            lambda: manager.mover.load(lease, slots, 0),
            over,
            unless_taken(lease),
            one.movements,
        )
        return movement, n

    def _usable(self, one: Request) -> int:
        """Tokens of it that this request may use: never its last."""
        given, space = self._given, one.space
        begin, page = given.tokens, self._manager.page_tokens
        n = min(given.partial, page, len(one.prompt) - 1 - begin)
        if space is None or one.match.usable != begin or n < 1:
            return 0
        if given.partial > len(one.prompt) - begin:
            return 0  # we do not know all of its tokens, so not whether they are ours
        keys = one.prompt.keys(space.host_spec)[: begin // page]
        tail = one.prompt.tokens[begin : begin + given.partial]
        return n if mark_of(one.prompt, space, keys, tail) == given.mark else 0

    def close(self) -> None:
        """No copy has it: give it back."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
            self._tell(False)

    def _tell(self, ok: bool) -> None:
        assert self._given.ticket is not None
        with contextlib.suppress(LightcacheError):  # nobody has to hear it
            self._manager.host.done(self._given.ticket, ok)


__all__ = ["Received", "receive"]
