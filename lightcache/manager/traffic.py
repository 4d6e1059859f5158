"""Transfers of a manager: which go on, which blocks they touch, and what waits for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages
from lightcache._borrowed import Borrowed
from lightcache._keeper import in_doubt
from lightcache.errors import LightcacheError, TransferFailed, WaitTimeout
from lightcache.manager.foreign import Foreign
from lightcache.manager.limits import seconds_of
from lightcache.manager.movers import Moving


class State(Enum):
    """Of a movement."""

    QUEUED = "queued"
    """Not begun: the manager is paused."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Never begun."""
    UNKNOWN = "unknown"
    """An interrupt came out of the call that begins it, or an error when an engine of ours may have
    begun it: it may go on, and nobody can say until when. What it touches is given to nobody any
    more, and nothing waits for it."""


# Looking a member up costs a microsecond in Python 3.11; these are looked up for every movement.
_QUEUED, _RUNNING, _DONE, _FAILED = State.QUEUED, State.RUNNING, State.DONE, State.FAILED
_UNKNOWN = State.UNKNOWN


Over = Callable[[bool, "int | None"], None]


class Movement:
    """One copy, asked for. Its blocks are in flight until it is over, whatever becomes of the
    request: nothing cuts a copy off."""

    def __init__(
        self,
        traffic: Traffic,
        blocks: Pages,
        begin: Callable[[], Moving],
        over: Over,
        give_back: Callable[[], None],
    ) -> None:
        """For `Traffic.begin`."""
        self._traffic, self._begin, self._over, self._give_back = traffic, begin, over, give_back
        self.blocks = blocks
        """Device blocks that it reads or writes."""
        self.counted = False
        """Whether `Traffic.busy` knows of them."""
        self.state = _QUEUED
        self.moving: Moving | None = None
        self.error: Exception | None = None
        """Why it failed: an error of ours, or whatever its mover has raised."""

    @property
    def over(self) -> bool:
        """Whether nothing of it goes on, as far as was looked."""
        return self.state not in (_QUEUED, _RUNNING, _UNKNOWN)

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
            WaitTimeout: it goes on, or is paused; wait again. Of a copy of which nobody knows
                (`State.UNKNOWN`): at once.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        timeout = seconds_of(timeout)
        self._traffic.poll()
        if self.state is _QUEUED:
            raise WaitTimeout("wait: transfers are paused; resume the manager first")
        if self.state is _UNKNOWN:
            raise WaitTimeout(_nobody_knows(self))
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
            self.error = error
        except Exception as error:  # whatever a driver may raise
            if goes_on(moving):
                raise
            self.error = error

    def cancel(self) -> None:
        """Not begun yet: never begin, and give back what it holds. Begun: nothing."""
        with self._traffic.lock:
            if self.state is _QUEUED:
                self._traffic.forget(self)
                self.state = State.CANCELLED
                self._let_go()
                self._over(False, None)

    def _raise(self) -> None:
        if self.state is _FAILED:
            raise TransferFailed(
                f"the transfer failed: {self.error}; compute these tokens instead"
            ) from self.error

    def _start(self) -> None:
        self.state = _UNKNOWN
        try:
            self.moving = self._begin()
        except Exception as error:  # as in `block`
            self.error = error
            held = self._give_back
            if isinstance(held, Handed) and held.in_doubt:
                self._traffic.foreign.note(error)  # and `_UNKNOWN` it stays
            else:
                self._end(_FAILED)
        else:
            self.state = _RUNNING

    def _look(self) -> bool:
        """Whether it is over now. Raises what came out of the asking, and not of the copy, which
        goes on: as in `block`."""
        assert self.moving is not None
        moved = None
        try:
            if self.error is None:
                if not self.moving.done():
                    return False
                moved = getattr(self.moving, "nbytes", None)
        except LightcacheError as error:
            self.error = error
        except Exception as error:
            if goes_on(self.moving):
                raise
            self.error = error
        self._end(_DONE if self.error is None else _FAILED, moved)
        return True

    def _end(self, state: State, moved: int | None = None) -> None:
        self.state = state
        self._traffic.landed(self)
        self._over(state is _DONE, moved)
        if state is _FAILED:
            self._let_go()

    def _let_go(self) -> None:
        # A lock that is held for too long: the pages go with the last reference to them.
        with contextlib.suppress(LightcacheError):
            self._give_back()


class Asked(Protocol):
    """What can be asked whether it is over."""

    def done(self) -> bool:
        """See `Moving`, and `Copying`."""


def goes_on(copy: Asked) -> bool:
    """Of a copy that something foreign came out of when it was asked or waited for: whether that
    was not its own end, as an exception of a signal handler. It is asked once more."""
    try:
        return not copy.done()
    except Exception:  # its own, then
        return False


def stuck(movements: list[Movement]) -> bool:
    """Whether one of them is a copy of which nobody knows: who waits for all waits for ever."""
    return any(each.state is _UNKNOWN for each in movements)


class Handed:
    """Pages that a mover was handed. Called, it gives back what that has not made its own, or given
    back."""

    def __init__(self, held: Borrowed) -> None:
        """For `unless_taken`."""
        self._held = held

    def __call__(self) -> None:
        """Give back."""
        if not self._held._done:
            self._held._let_go()

    @property
    def in_doubt(self) -> bool:
        """Whether an engine of ours keeps them, not knowing whether it has begun to copy."""
        return in_doubt(self._held)


def unless_taken(held: Borrowed) -> Handed:
    """What gives back pages that a mover was handed and has not made its own, or given back."""
    return Handed(held)


def _nobody_knows(movement: Movement) -> str:
    return (
        f"wait: an interrupt or an error came while a copy of blocks "
        f"{movement.blocks[:8].tolist()} was begun, and nobody knows whether it goes on; use others"
    )


class Traffic:
    """All movements of one manager."""

    def __init__(self, lock: threading.RLock, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing moves yet.

        Args:
            lock: the manager's; never held while waiting for a copy.
        """
        self.lock = lock
        self._clock = clock
        self._queued: deque[Movement] = deque()
        self._running: list[Movement] = []
        self._touching: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.paused = False
        self.failed = 0
        """Movements that failed."""
        self.foreign = Foreign()
        """What movers have raised that is none of ours: for whoever polls the manager."""

    @property
    def in_flight(self) -> int:
        """Movements that run; not those of which nobody knows."""
        return sum(each.state is _RUNNING for each in self._running)

    @property
    def unknown(self) -> int:
        """Movements of which nobody knows whether they go on."""
        return sum(each.state is _UNKNOWN for each in self._running)

    @property
    def queued(self) -> int:
        """Movements that wait for `resume`."""
        return len(self._queued)

    def begin(
        self,
        blocks: Pages,
        call: Callable[[], Moving],
        over: Over,
        give_back: Callable[[], None],
        of: list[Movement] | None = None,
    ) -> Movement:
        """Begin a copy, or queue it while paused.

        Args:
            blocks: that it touches.
            call: begins it. What it raises fails the movement, and comes out of nothing here; what
                is none of ours is for `foreign`.
            over: told once whether it went well, and how many bytes it moved; None: who moved them
                does not say.
            give_back: what it holds, unless who moved it gave that back; called if it never begins,
                and if it fails.
            of: of whoever holds its blocks while it goes on; it is appended before it begins, so
                that nothing is lost to an interrupt. None: something else holds them.
        """
        made = Movement(self, blocks, call, over, give_back)
        if of is not None:
            of.append(made)
        if self.paused:
            self._touch(made)  # a queued copy reads or writes what is in them then
            self._queued.append(made)
        else:
            self._launch(made)
        return made

    def _launch(self, movement: Movement) -> None:
        self._running.append(movement)
        try:
            movement._start()
            if movement.state is _RUNNING:
                movement._look()  # some take no time at all, and are never counted
        finally:  # after an interrupt, too: `State.UNKNOWN`
            if not movement.over:
                self._touch(movement)

    def _touch(self, movement: Movement) -> None:
        if not movement.counted:
            self._count(movement.blocks, 1)
            movement.counted = True

    def _count(self, blocks: Pages, change: int) -> None:
        if not len(blocks):
            return
        most = int(blocks.max()) + 1
        if most > len(self._touching):
            grown = np.zeros(max(most, 2 * len(self._touching)), np.int32)
            grown[: len(self._touching)] = self._touching
            self._touching = grown
        np.add.at(self._touching, blocks, change)

    def landed(self, movement: Movement) -> None:
        """A movement is over."""
        self._running.remove(movement)
        if movement.counted:
            self._count(movement.blocks, -1)
        if movement.state is _FAILED:
            self.failed += 1
            self.foreign.note(movement.error)

    def forget(self, movement: Movement) -> None:
        """A queued movement is not wanted any more."""
        self._queued.remove(movement)
        self._count(movement.blocks, -1)

    def poll(self) -> int:
        """Begin what waits, if not paused; notice what is over. Returns how many go on, as far as
        anybody knows: see `in_flight`."""
        with self.lock:
            while self._queued and not self.paused:
                self._launch(self._queued.popleft())
            for movement in list(self._running):
                if movement.state is _RUNNING:
                    movement._look()
            return self.in_flight

    def busy(self, blocks: Pages) -> npt.NDArray[np.bool_]:
        """Which of these blocks a copy reads or writes, or will when transfers are resumed, as far
        as was looked."""
        found = np.zeros(blocks.shape, np.bool_)
        known = (blocks >= 0) & (blocks < len(self._touching))
        found[known] = self._touching[blocks[known]] > 0
        return found

    def touching(self, blocks: Pages | None) -> list[Movement]:
        """Movements that touch any of these blocks, or will; None: all that go on."""
        with self.lock:
            if blocks is None:
                return [each for each in self._running if each.state is not _UNKNOWN]
            wanted, every = set(blocks.tolist()), [*self._running, *self._queued]
            return [each for each in every if not wanted.isdisjoint(each.blocks.tolist())]

    def wait(self, blocks: Pages | None, timeout: float | None) -> None:
        """Until no copy touches these blocks; None: until none goes on. Blocks, without the lock.

        Raises:
            WaitTimeout: some go on, or wait for `resume`; says which. Of a copy of which nobody
                knows (`State.UNKNOWN`): at once, if it touches these blocks.
            ConfigError: no number of seconds.
            As `Movement.block`.
        """
        limit = seconds_of(timeout)
        end = None if limit is None else self._clock() + limit
        for movement in self.touching(blocks):
            if movement.state is State.QUEUED:
                raise WaitTimeout(
                    f"wait: transfers are paused, and one will touch blocks "
                    f"{movement.blocks[:8].tolist()}; resume the manager first"
                )
            if movement.state is _UNKNOWN:
                raise WaitTimeout(_nobody_knows(movement))
            try:
                movement.block(None if end is None else max(0.0, end - self._clock()))
            except WaitTimeout:
                raise WaitTimeout(
                    f"wait: a copy still touches blocks {movement.blocks[:8].tolist()} after "
                    f"{timeout} s; wait again before they are used for anything else"
                ) from None
        self.poll()


__all__ = ["Handed", "Movement", "State", "Traffic", "goes_on", "stuck", "unless_taken"]
