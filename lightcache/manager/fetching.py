"""Fetch: what was found on the host, on its way to the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from lightcache._together import together
from lightcache.errors import (
    ConfigError,
    Detached,
    LeaseLost,
    LightcacheError,
    TransferFailed,
    WaitTimeout,
)
from lightcache.leases import Allocation, Lease
from lightcache.manager.device import OwnedDevice
from lightcache.manager.foreign import nothing, seconds_of
from lightcache.manager.requests import HELD, PINNED, Request, slots_of
from lightcache.manager.state import ManagerState
from lightcache.manager.statistics import moved_bytes
from lightcache.manager.traffic import Movement, State
from lightcache.manager.writing import Namer, Writer
from lightcache.shm.locking import Hurried

# ---- Leaving: requests that have ended, until no copy touches their blocks any more.


class Leaving:
    """Gives back what ended requests hold, as soon as may be."""

    def __init__(self, state: ManagerState, writer: Writer, namer: Namer) -> None:
        """Nobody leaves yet."""
        self._state, self._writer, self._namer = state, writer, namer
        self._going: list[Request] = []
        self._goods: list[_Goods] = []
        """What requests had that no copy touches any more. Those that stay are of blocks without a
        key, for which the lock did not come."""

    @property
    def going(self) -> int:
        """Requests that have ended and hold something still."""
        return len(self._going) + sum([len(goods.requests) for goods in self._goods])

    def __contains__(self, one: Request) -> bool:
        """Whether it is one of these, and a copy may touch its blocks."""
        return one in self._going

    @property
    def extend(self) -> Callable[[list[Request]], None]:
        """Called, which is one C call: these requests have ended, `poll` sees to them. What was not
        begun is not begun any more, but for what they publish."""
        return self._going.extend

    def poll(self, ended: Sequence[Request] = ()) -> None:
        """Give back what no copy touches, and what could not be given back before.

        Args:
            ended: of these it is looked what copies do, if any goes on.
        """
        with self._state.lock, Hurried(self._state.config.time_limit):
            self._namer.settle()
            for goods in self._goods:
                goods.give_back()
            self._sort_out()
            if not self._going:
                return
            for one in self._going:
                for movement in one.movements:
                    if movement is one.loading or not one.stored:
                        movement.cancel()
                one.let_go_of_host()
            if any(not movement.over for one in ended for movement in one.movements):
                self._state.traffic.poll()
            self._part()

    def _part(self) -> None:
        """From requests whose copies are over."""
        over: list[Request] = []
        still: list[Request] = []
        for one in self._going:
            busy = one.movements and not all(each.over for each in one.movements)
            (still if busy else over).append(one)
        if not over:
            return
        goods, take = _Goods.of(self._state, self._writer, over)
        together(partial(setattr, self, "_going", still), partial(self._goods.append, goods), *take)
        goods.give_back()
        self._sort_out()

    def _sort_out(self) -> None:
        if self._goods:
            self._goods = [goods for goods in self._goods if not goods.over]

    def wait(self, request: Hashable) -> None:
        """Until no copy of a request that has ended goes on, and what it held is given back, unless
        the lock does not come. Blocks, without the manager's lock.

        Raises:
            WaitTimeout: transfers are paused, and some of it waits for them.
        """
        movements = [
            movement for one in self._going if one.id == request for movement in one.movements
        ]
        for movement in movements:
            try:
                movement.block(None)
            except WaitTimeout:  # its mover has a limit of its own
                continue
        self._state.traffic.poll()
        self.poll()
        if any(movement.state is State.QUEUED for movement in movements):
            raise WaitTimeout(
                f"release {request!r}: transfers are paused, and what it publishes waits for them; "
                "resume the manager"
            )


class _Goods:
    """What some ended requests have. Each part is given back once, however often it is asked."""

    def __init__(self, state: ManagerState, writer: Writer, requests: list[Request]) -> None:
        """Nothing is taken from them yet."""
        self._state, self._writer, self.requests = state, writer, requests
        self._stored = False
        self._pinned: Lease | None = None
        self._held: Allocation | None = None

    @classmethod
    def of(
        cls, state: ManagerState, writer: Writer, requests: list[Request]
    ) -> tuple[_Goods, list[partial[None]]]:
        """And the calls that take it from them, for `together`."""
        made, take = cls(state, writer, requests), []
        device = state.device
        if isinstance(device, OwnedDevice) and device.index is not None:
            tables = np.concatenate([one.table for one in requests])
            kinds = np.frombuffer(b"".join([one.kind for one in requests]), np.uint8)
            if len(pinned := tables[kinds == PINNED]):
                made._pinned, call = Lease.attached_to(device.index.core, pinned)
                take.append(call)
            if len(held := tables[kinds == HELD]):
                made._held, call = Allocation.attached_to(device.index.core, held)
                take.append(call)
        return made, take

    @property
    def over(self) -> bool:
        """Whether nothing of it is left."""
        return self._stored and (self._held is None or self._held.ended)

    def give_back(self) -> None:
        """Whatever a storage raises, what the requests had is given back. Their blocks without a
        key, at once or as soon as the lock comes."""
        try:
            if not self._stored and self._state.storage is not None:
                for one in self.requests:
                    self._store(one)
        finally:  # an interrupt
            self._let_go()

    def _store(self, one: Request) -> None:
        state = self._state
        try:
            state.guard.run(partial(self._writer.store, one), nothing)
        except LightcacheError:
            state.figures.add(errors=1)
        except Exception as error:
            state.traffic.foreign.note(error)

    def _let_go(self) -> None:
        try:
            for one in self.requests:
                if one.hit is not None:
                    one.hit.close()
            if self._pinned is not None:
                self._pinned.close()
            self._stored = True
        finally:
            self._free()

    def _free(self) -> None:
        held = self._held
        if held is not None and not held.ended:
            try:
                held.close()
            except (LeaseLost, Detached):  # nobody can: a second time would say the same
                held.ended = True
                raise
            except LightcacheError:
                return


# ---- Fetch: what was found on the host, on its way to the device.


class Fetch:
    """The load of one request's prefix. Until it is over its blocks hold nothing that counts; if it
    fails, compute these tokens: `tokens` says from where."""

    def __init__(self, request: Request, movement: Movement | None, without: int) -> None:
        """For `KVCacheManager.fetch`.

        Args:
            without: tokens that are usable if it fails.
        """
        self._request, self._movement, self._without = request, movement, without
        self._lost = movement is None and request.match.load > 0

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed, as far as is known: all usable ones while it
        goes on or after it went well, those of the device if it failed."""
        return self._request.match.usable if not self.failed else self._without

    @property
    def failed(self) -> bool:
        """Whether it is over, and failed."""
        if self._movement is None:
            return self._lost
        return self._movement.state in (State.FAILED, State.CANCELLED)

    def done(self) -> bool:
        """Whether it is over. Does not block.

        Raises:
            TransferFailed: it failed, or the manager has disabled itself before it began; nothing
                is leaked.
        """
        if self._lost:
            raise TransferFailed(
                f"fetch {self._request.id!r}: the manager has disabled itself, nothing was loaded; "
                "compute these tokens instead"
            )
        return self._movement is None or self._movement.done()

    def wait(self, timeout: float | None = None) -> None:
        """Until it is over. Blocks.

        Raises:
            WaitTimeout: it goes on.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        timeout = seconds_of(timeout)
        if self._movement is not None:
            self._movement.wait(timeout)
        else:
            self.done()

    def wait_on(self, stream: Any = None) -> None:
        """Let a stream of the device wait for it (None: the current one), not this thread: with an
        engine of this process. See `Transfer.wait_on`.

        Raises:
            TransferFailed: it is over already, and failed.
        """
        if self._movement is not None:
            wait_on(self._movement, stream)
        else:
            self.done()

    @property
    def number(self) -> int | None:
        """Of a copy that ranks make: as `Decisions` call it. None: there is none."""
        moving = None if self._movement is None else self._movement.moving
        return getattr(moving, "number", None)


def wait_on(movement: Movement, stream: Any) -> None:
    """Let a stream of the device wait for a copy, or this thread where no engine of ours makes it.
    TransferFailed: it is over already, and failed."""
    if movement.over:
        movement.done()
        return
    transfer = getattr(movement.moving, "transfer", None)
    if transfer is None:
        movement.wait()
    else:
        transfer.wait_on(stream)


def begin_fetch(state: ManagerState, one: Request, without: int) -> Fetch:
    """See `KVCacheManager.fetch`."""
    lease, match, tokens = one.host, one.match, state.page_tokens
    if lease is None or match.load <= 0 or one.loading is not None:
        one.let_go_of_host()
        one.fetched = True
        return Fetch(one, one.loading, without)
    block = state.device.block_tokens
    if len(one.table) * block < match.usable:
        raise ConfigError(
            f"fetch {one.id!r}: expected blocks for {match.usable} tokens, found "
            f"{len(one.table)} of {block}; allocate them first"
        )
    begin, end = one.host_first * tokens, (one.host_first + len(lease)) * tokens
    slots = np.full(end - begin, -1, np.int64)
    first = match.device
    slots[first - begin : match.usable - begin] = slots_of(one.table, block, first, match.usable)
    blocks = one.table[first // block : -(-match.usable // block)]
    pages = len(lease)
    figures, begun = state.figures, time.perf_counter_ns()

    def over(ok: bool, nbytes: int | None) -> None:
        if ok:
            moved = moved_bytes(state.host, match.usable - first, nbytes)
            taken = time.perf_counter_ns() - begun
            figures.add(loads=1, loaded_pages=pages, loaded_bytes=moved, load_ns=taken)
        else:
            figures.add(failed_loads=1)

    movement = state.traffic.begin(
        blocks,
        state.mover,
        "load",
        lease,
        slots,
        over,
        of=one.movements,
        into=(one, "loading"),
        instead_of=(one, "host"),
    )
    one.fetched = True
    return Fetch(one, movement, without)


def no_fetch(one: Request, without: int) -> Fetch:
    """The cache is not asked: what was found there is not loaded."""
    one.let_go_of_host()
    one.fetched = True
    return Fetch(one, one.loading, without)


__all__ = ["Fetch", "Leaving", "begin_fetch", "no_fetch", "wait_on"]
