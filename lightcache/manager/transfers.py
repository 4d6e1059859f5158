"""Transfers of a manager: which go on, which blocks they touch, and what waits for them.

An interrupt may come between any two steps of a movement. So each state is told by one assignment,
a movement is known to its manager and to whoever holds its blocks from the same instant on, and
every step may be made again: the next look at all movements takes up each where it was left.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from operator import length_hint
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages
from lightcache._together import append_to, keep_result, together
from lightcache.errors import LightcacheError, TransferFailed, WaitTimeout
from lightcache.leases import Releasable
from lightcache.manager.backend import TransferBackend, TransferHandle
from lightcache.manager.limits import Foreign, seconds_of
from lightcache.shm.locking import Hurried


class State(Enum):
    """Of a movement."""

    QUEUED = "queued"
    """Not begun: the manager is paused."""
    BEGINNING = "beginning"
    """Its transfer backend is asked to begin it. After an interrupt of that, until the next
    `poll`."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Never begun."""


# Looking a member up costs a microsecond in Python 3.11; these are looked up for every movement.
_QUEUED, _BEGINNING, _RUNNING = State.QUEUED, State.BEGINNING, State.RUNNING
_DONE, _FAILED, _CANCELLED = State.DONE, State.FAILED, State.CANCELLED
_UNDER_WAY = (_BEGINNING, _RUNNING)
_FIRST = (0,)  # what a load begins with


Over = Callable[[bool, "int | None"], None]
Ends = Callable[[bool], None]


class BlockTransfer:
    """One copy, asked for. Its blocks are in flight until it is over, whatever becomes of the
    request: nothing cuts a copy off."""

    _asked: Iterator[Releasable]
    """Has an element as long as the transfer backend was not asked."""
    _result: tuple[bool, int | None] | None = None
    """Whether its copy, which is over, went well, and how many bytes it moved."""
    _counted = False
    _why: Exception | None = None
    """What came out of the call that has begun it."""
    error: Exception | None = None
    """Why it failed: an error of ours, or whatever its transfer backend has raised."""

    def __init__(
        self,
        traffic: TransferTracker,
        blocks: Pages,
        backend: TransferBackend,
        verb: str,
        held: Releasable,
        slots: Any,
        over: Over,
        ends: Ends | None,
    ) -> None:
        """For `TransferTracker.begin`."""
        self._traffic, self._backend, self._verb = traffic, backend, verb
        self._held, self._slots = held, slots
        self._over, self._ends = over, ends
        self.blocks = blocks
        """Device blocks that it reads or writes."""
        self.state = _QUEUED
        self._box: list[TransferHandle | None] = []
        """What its transfer backend has begun; None: nothing, though it was asked."""

    @property
    def moving(self) -> TransferHandle | None:
        """What its transfer backend has begun."""
        return self._box[0] if self._box else None

    @property
    def over(self) -> bool:
        """Whether nothing of it goes on, as far as was looked."""
        return self.state not in (_QUEUED, _BEGINNING, _RUNNING)

    def done(self) -> bool:
        """Whether it is over. Does not block.

        Raises:
            TransferFailed: it is over, and failed; the error is chained.
        """
        self._traffic.poll()
        self._raise()
        return self.over

    def wait(self, timeout: float | None = None) -> None:
        """Until it is over. Blocks; no lock is held meanwhile.

        Raises:
            WaitTimeout: it goes on, or is paused; wait again.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        timeout = seconds_of(timeout)
        self._traffic.poll()
        if self.state is _QUEUED:
            raise WaitTimeout("wait: transfers are paused; resume the manager first")
        self.block(timeout)
        self._traffic.poll()
        self._raise()

    def block(self, timeout: float | None) -> None:
        """Until its copy is over, whether it went well or not.

        Raises:
            WaitTimeout: it goes on.
            Whatever has ended the waiting and not the copy, as an exception of a signal handler.
        """
        moving = self.moving
        if moving is None or self.over:
            return
        try:
            moving.wait(seconds_of(timeout))
        except WaitTimeout:
            raise
        except LightcacheError as error:
            self.error = without_frames(error)
        except Exception as error:  # whatever a driver may raise
            if goes_on(moving):
                raise
            self.error = without_frames(error)

    def cancel(self) -> None:
        """Not begun yet: never begin, and give back what it holds. Begun: nothing."""
        with self._traffic.lock:
            if self.state is _QUEUED:
                if self._result is None:
                    self._result = False, None
                self._finish(_CANCELLED)
                self._traffic.sort_out()

    def _raise(self) -> None:
        if self.state is _FAILED:
            raise TransferFailed(
                f"the transfer failed: {self.error}; compute these tokens instead"
            ) from self.error

    def go_on(self, *, paused: bool) -> None:
        """Take the next steps that can be taken now. Raises what came out of asking whether it is
        over, and not of the copy, which goes on: as in `block`."""
        if self.state is _QUEUED:
            if self._result is not None:
                self._finish(_CANCELLED)
                return
            if paused:
                return
            self._start()
        elif self.state is _BEGINNING:
            self._see_what_began()
        if self.state is _RUNNING:
            self._look()

    def _start(self) -> None:
        call, slots = getattr(self._backend, self._verb), (self._slots,)
        arguments = (slots, _FIRST) if self._verb == "load" else (slots,)
        self._asked = iter((self._held,))
        self.state = _BEGINNING
        try:
            keep_result(self._box, call, self._asked, *arguments)
        except Exception as error:  # as in `block`
            self._why = without_frames(error)
            self._see_what_began()
        else:
            self.state = _RUNNING

    def _see_what_began(self) -> None:
        """Its transfer backend has raised, or an interrupt came: has it begun?"""
        if not self._box:
            if length_hint(self._asked):  # the transfer backend knows nothing of it
                self.state = _QUEUED
                return
            keep_result(self._box, partial(begun_of, self._backend), (self._held,))
        self.state = _RUNNING

    def _look(self) -> None:
        if self._result is None and not self._is_over():
            return
        self._finish(_DONE if self._result is not None and self._result[0] else _FAILED)

    def _is_over(self) -> bool:
        moving, moved = self.moving, None
        error = self.error
        if moving is None:
            error = self._why or TransferFailed("an interrupt came while it was begun")
        elif error is None:
            try:
                if not moving.done():
                    return False
                moved, error = getattr(moving, "nbytes", None), self._why
            except LightcacheError as found:
                error = self._why or without_frames(found)
            except Exception as found:
                if goes_on(moving):
                    raise
                error = self._why or without_frames(found)
        self.error = error
        self._result = error is None, moved
        return True

    def _finish(self, state: State) -> None:
        """What is owed at the end. All but the counting is done once more after an interrupt."""
        assert self._result is not None
        ok, moved = self._result
        if not self._counted:
            self._counted = True
            if state is _FAILED:
                self._traffic.failed += 1
                self._traffic.foreign.note(self.error)
            self._over(ok, moved)
        if not ok:
            # A lock that is held for too long: the pages go with the last reference to them.
            with contextlib.suppress(LightcacheError):
                self._held.close()
        if self._ends is not None:
            with contextlib.suppress(LightcacheError):
                self._ends(ok)
        self.state = state


def begun_of(backend: TransferBackend, held: Releasable) -> TransferHandle | None:
    """What a transfer backend has begun with these pages, though its call has raised. None:
    nothing, or it does not say, and then what raises moves nothing."""
    begun = getattr(backend, "begun", None)
    found: TransferHandle | None = None if begun is None else begun(held)
    return found


def without_frames(error: Exception) -> Exception:
    """An error that is kept: what the calls had that raised it is let go of, such as views of the
    pool, which could not be closed otherwise before a garbage collection."""
    traceback.clear_frames(error.__traceback__)
    return error


class Asked(Protocol):
    """What can be asked whether it is over."""

    def done(self) -> bool:
        """See `TransferHandle`, and `Copying`."""


def goes_on(copy: Asked) -> bool:
    """Of a copy that something foreign came out of when it was asked or waited for: whether that
    was not its own end, as an exception of a signal handler. It is asked once more."""
    try:
        return not copy.done()
    except Exception:  # its own, then
        return False


class TransferTracker:
    """All movements of one manager."""

    def __init__(
        self,
        lock: threading.RLock,
        time_limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing moves yet.

        Args:
            lock: the manager's; never held while waiting for a copy.
            time_limit: seconds that a look waits for a tier's lock, to abandon what has failed: see
                `Hurried`.
        """
        self.lock, self._time_limit = lock, time_limit
        self._clock = clock
        self._all: list[BlockTransfer] = []
        """Those that are not over, in their order, and perhaps some that are."""
        self.paused = False
        self.failed = 0
        """Movements that failed."""
        self.foreign = Foreign()
        """What transfer backends have raised that is none of ours: for whoever polls the
        manager."""

    @property
    def in_flight(self) -> int:
        """Movements that run."""
        return sum([each.state in _UNDER_WAY for each in self._all])

    @property
    def queued(self) -> int:
        """Movements that wait for `resume`."""
        return sum([each.state is _QUEUED for each in self._all])

    def begin(
        self,
        blocks: Pages,
        backend: TransferBackend,
        verb: str,
        held: Releasable,
        slots: Any,
        over: Over,
        *,
        of: list[BlockTransfer] | None = None,
        ends: Ends | None = None,
        into: tuple[object, str] | None = None,
        instead_of: tuple[object, str] | None = None,
    ) -> BlockTransfer:
        """Begin a copy, or queue it while paused.

        Args:
            blocks: that it touches.
            backend: who makes it.
            verb: "load", "offload" or "save". What it raises fails the movement, and comes out of
                nothing here; what is none of ours is for `foreign`.
            held: what the transfer backend is given. The movement's from now on: it gives it back
                if it never begins and if it fails, unless the transfer backend has done so, or has
                made it its own.
            slots: for the transfer backend.
            over: told whether it went well, and how many bytes it moved; None: who moved them does
                not say. For counting: an interrupt may lose this call.
            of: of whoever holds its blocks while it goes on; it is appended. None: something else
                holds them.
            ends: told whether it went well, when it is over. Perhaps twice.
            into: an object and its attribute that is to be this movement from the same instant on.
            instead_of: an object and its attribute that had `held`; None from then on.
        """
        made = BlockTransfer(self, blocks, backend, verb, held, slots, over, ends)
        if into is None and instead_of is None:  # nearly always: this is the shorter way
            append_to((self._all,) if of is None else (self._all, of), made)
        else:
            known = [partial(list.append, self._all, made)]
            if of is not None:
                known.append(partial(list.append, of, made))
            if into is not None:
                known.append(partial(setattr, *into, made))
            if instead_of is not None:
                known.append(partial(setattr, *instead_of, None))
            together(*known)
        made.go_on(paused=self.paused)
        if made.over:
            self._all.remove(made)
        return made

    def sort_out(self) -> None:
        """Forget those that are over."""
        self._all = [each for each in self._all if not each.over]

    def poll(self) -> int:
        """Begin what waits, if not paused; notice what is over. Returns how many go on: see
        `in_flight`."""
        with self.lock, Hurried(self._time_limit):
            for transfer in self._all:
                transfer.go_on(paused=self.paused)
            self.sort_out()
            return self.in_flight

    def busy(self, blocks: Pages) -> npt.NDArray[np.bool_]:
        """Which of these blocks a copy reads or writes, or will when transfers are resumed, as far
        as was looked."""
        found = np.zeros(blocks.shape, np.bool_)
        touched = [each.blocks for each in self._all if not each.over]
        if touched and blocks.size:
            every = np.concatenate(touched)
            flags = np.zeros(int(every.max(initial=-1)) + 1, np.bool_)
            flags[every] = True
            known = (blocks >= 0) & (blocks < len(flags))
            found[known] = flags[blocks[known]]
        return found

    def touching(self, blocks: Pages | None) -> list[BlockTransfer]:
        """Movements that touch any of these blocks, or will; None: all that go on."""
        with self.lock:
            if blocks is None:
                return [each for each in self._all if each.state in _UNDER_WAY]
            wanted = set(blocks.tolist())
            every = [each for each in self._all if not each.over]
            return [each for each in every if not wanted.isdisjoint(each.blocks.tolist())]

    def wait(self, blocks: Pages | None, timeout: float | None) -> None:
        """Until no copy touches these blocks; None: until none goes on. Blocks, without the lock.

        Raises:
            WaitTimeout: some go on, or wait for `resume`; says which.
            ConfigError: no number of seconds.
            As `BlockTransfer.block`.
        """
        limit = seconds_of(timeout)
        end = None if limit is None else self._clock() + limit
        self.poll()  # after an interrupt, some may have to be begun or ended still
        for transfer in self.touching(blocks):
            if transfer.state is State.QUEUED:
                raise WaitTimeout(
                    f"wait: transfers are paused, and one will touch blocks "
                    f"{transfer.blocks[:8].tolist()}; resume the manager first"
                )
            try:
                transfer.block(None if end is None else max(0.0, end - self._clock()))
            except WaitTimeout:
                raise WaitTimeout(
                    f"wait: a copy still touches blocks {transfer.blocks[:8].tolist()} after "
                    f"{timeout} s; wait again before they are used for anything else"
                ) from None
        self.poll()


__all__ = ["BlockTransfer", "Ends", "State", "TransferTracker", "goes_on"]
