"""Transfers of a manager: which are in flight, and which blocks they touch.

An interrupt may come between any two steps of a transfer. Therefore each change of state is one
assignment, the manager and the owner of the blocks learn of a transfer in the same instant, and
every step can be repeated: the next `poll` continues each transfer where it was left.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from operator import length_hint
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages
from lightcache._together import append_to, keep_result, together
from lightcache.errors import LightcacheError, TransferFailed, WaitTimeout
from lightcache.leases import Lease, Releasable
from lightcache.manager.backend import TransferBackend, TransferHandle
from lightcache.manager.limits import Foreign, seconds_of
from lightcache.shm.locking import Hurried


class State(Enum):
    """State of a transfer."""

    QUEUED = "queued"
    """Not begun: the manager is paused."""
    BEGINNING = "beginning"
    """Its transfer backend is being called to begin it; after an interrupt, until the next
    `poll`."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Never begun."""


# Reading an enum member costs a microsecond in Python 3.11; these are read for every transfer.
_QUEUED, _BEGINNING, _RUNNING = State.QUEUED, State.BEGINNING, State.RUNNING
_DONE, _FAILED, _CANCELLED = State.DONE, State.FAILED, State.CANCELLED
_UNDER_WAY, _UNFINISHED = (_BEGINNING, _RUNNING), (_QUEUED, _BEGINNING, _RUNNING)


OnResult = Callable[[bool, "int | None"], None]
OnEnd = Callable[[bool], None]
OnFailure = Callable[[Exception], None]


class BlockTransfer:
    """One requested copy. Its blocks are in flight until it has finished, even if its request ends:
    a copy cannot be aborted."""

    _asked: Iterator[Releasable]
    """Has an element until the transfer backend is called."""
    _result: tuple[bool, int | None] | None = None
    """Of a finished copy: whether it succeeded, and how many bytes it moved."""
    _counted = False
    _why: Exception | None = None
    """What the call that began the copy raised."""
    error: Exception | None = None
    """Why it failed: one of our errors, or what its transfer backend raised."""

    def __init__(
        self,
        tracker: TransferTracker,
        blocks: Pages,
        backend: TransferBackend,
        call: Callable[..., TransferHandle],
        held: Releasable,
        arguments: tuple[Any, ...],
        on_result: OnResult,
        on_end: OnEnd | None,
        on_failure: OnFailure | None,
    ) -> None:
        """For `TransferTracker.begin`."""
        self._tracker, self._backend, self._call = tracker, backend, call
        self._held, self._arguments = held, arguments
        self._on_result, self._on_end, self._on_failure = on_result, on_end, on_failure
        self.blocks = blocks
        """Device blocks that it reads or writes."""
        self.state = _QUEUED
        self._box: list[TransferHandle | None] = []
        """The copy that its transfer backend began; None: it was called and began none."""

    @property
    def moving(self) -> TransferHandle | None:
        """The copy that its transfer backend began."""
        return self._box[0] if self._box else None

    @property
    def finished(self) -> bool:
        """Whether it has finished, as of the last poll."""
        return self.state not in _UNFINISHED

    def done(self) -> bool:
        """Whether it has finished. Does not block.

        Raises:
            TransferFailed: it has finished, and failed; the error is chained.
        """
        self._tracker.poll()
        self._raise()
        return self.finished

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished, without the lock.

        Raises:
            WaitTimeout: it is in flight, or paused; wait again.
            TransferFailed: as `done`.
            ConfigError: no number of seconds.
        """
        timeout = seconds_of(timeout)
        self._tracker.poll()
        if self.state is _QUEUED:
            raise WaitTimeout("wait: transfers are paused; resume the manager first")
        self.block(timeout)
        self._tracker.poll()
        self._raise()

    def block(self, timeout: float | None) -> None:
        """Block until its copy has finished or failed.

        Raises:
            WaitTimeout: it is in flight.
            Any exception that ended the wait and not the copy, such as one of a signal handler.
        """
        moving = self.moving
        if moving is None or self.finished:
            return
        try:
            moving.wait(seconds_of(timeout))
        except WaitTimeout:
            raise
        except LightcacheError as error:
            self.error = without_frames(error)
        except Exception as error:  # whatever a driver may raise
            if still_moving(moving):
                raise
            self.error = without_frames(error)

    def cancel(self) -> None:
        """If it has not begun, never begin it, and give back what it holds. Else do nothing."""
        with self._tracker.lock:
            if self.state is _QUEUED:
                if self._result is None:
                    self._result = False, None
                self._finish(_CANCELLED)
                self._tracker.sort_out()

    def _raise(self) -> None:
        if self.state is _FAILED:
            raise TransferFailed(
                f"the transfer failed: {self.error}; compute these tokens instead"
            ) from self.error

    def advance(self, *, paused: bool) -> None:
        """Take the next steps that are possible now. Raises an exception that ended the check and
        not the copy, as in `block`; the copy continues."""
        if self.state is _QUEUED:
            if self._result is not None:
                self._finish(_CANCELLED)
                return
            if paused:
                return
            self._start()
        elif self.state is _BEGINNING:
            self._find_what_began()
        if self.state is _RUNNING and (self._result is not None or self._has_finished()):
            assert self._result is not None
            self._finish(_DONE if self._result[0] else _FAILED)

    def _start(self) -> None:
        arguments = zip(self._arguments)
        self._asked = iter((self._held,))
        self.state = _BEGINNING
        try:
            keep_result(self._box, self._call, self._asked, *arguments)
        except Exception as error:  # as in `block`
            self._why = without_frames(error)
            self._find_what_began()
        else:
            self.state = _RUNNING

    def _find_what_began(self) -> None:
        """Find out whether the copy began, after an error of its transfer backend or an
        interrupt."""
        if not self._box:
            if length_hint(self._asked):  # the transfer backend was not called
                self.state = _QUEUED
                return
            keep_result(self._box, partial(begun_of, self._backend), (self._held,))
        self.state = _RUNNING

    def _has_finished(self) -> bool:
        """Whether the copy has finished; then `_result` says how."""
        moving, moved = self._box[0] if self._box else None, None
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
                if still_moving(moving):
                    raise
                error = self._why or without_frames(found)
        self.error = error
        self._result = error is None, moved
        return True

    def _finish(self, state: State) -> None:
        """Steps at the end of a copy. After an interrupt all but the counting is repeated."""
        assert self._result is not None
        ok, moved = self._result
        if not self._counted:
            self._counted = True
            if state is _FAILED:
                self._tracker.foreign.note(self.error)
                if self._on_failure is not None and self.error is not None:
                    self._on_failure(self.error)
            self._on_result(ok, moved)
        if not ok:
            # If the lock does not come in time, the last reference to the pages frees them.
            with contextlib.suppress(LightcacheError):
                self._held.close()
        if self._on_end is not None:
            with contextlib.suppress(LightcacheError):
                self._on_end(ok)
        self.state = state


class Launch(BlockTransfer):
    """A copy on a stream of the device. It is polled as others are, but no call waits for it, and
    `pause` does not hold it back."""

    def __init__(
        self,
        tracker: TransferTracker,
        blocks: Pages,
        mark: Callable[[], Pollable],
        leases: Sequence[Lease],
    ) -> None:
        """For `TransferTracker.launch`."""
        self._tracker, self.blocks, self.leases = tracker, blocks, leases
        self._mark, self.state = mark, _BEGINNING
        self.launches: list[Pollable] = []
        """What was launched, or a mark after it."""

    @property
    def moving(self) -> TransferHandle | None:
        """None: it has no transfer backend."""
        return None

    def block(self, timeout: float | None) -> None:
        """Returns at once."""

    def _find_what_began(self) -> None:
        """An interrupt came, and it may be on the stream: a mark there tells when it has ended."""
        if not self.launches:
            try:
                self.launches.append(self._mark())
            except Exception as error:  # a failed device copies nothing more
                self.error = without_frames(error)
                self._result = False, None
        self.state = _RUNNING

    def _has_finished(self) -> bool:
        (copying,) = self.launches
        try:
            if not copying.done():
                return False
        except Exception as error:  # a failed device copies nothing more
            if still_moving(copying):
                raise  # not an error of the copy: as in `BlockTransfer.block`
            self.error = without_frames(error)
        self._result = self.error is None, None
        return True

    def refused(self) -> None:
        """The call that launches has raised: nothing moves."""
        self._counted = True  # the caller has the exception
        self._finish(_FAILED)

    def _finish(self, state: State) -> None:
        if not self._counted:
            self._counted = True
            self._tracker.foreign.note(self.error)
        for lease in self.leases:  # LeaseLost: released by a look that was interrupted
            with contextlib.suppress(LightcacheError):
                lease.release()
        self.state = state


def begun_of(backend: TransferBackend, held: Releasable) -> TransferHandle | None:
    """The copy that a transfer backend began with these pages although its call raised. None: no
    copy, or no method `begun`; then a call that raises moves nothing."""
    begun = getattr(backend, "begun", None)
    handle: TransferHandle | None = None if begun is None else begun(held)
    return handle


def without_frames(error: Exception) -> Exception:
    """Clear the frames of an error that is kept. Their locals, such as views of the pool, would
    keep the pool open until a garbage collection."""
    traceback.clear_frames(error.__traceback__)
    return error


class Pollable(Protocol):
    """An object with `done`."""

    def done(self) -> bool:
        """See `TransferHandle`, and `Copying`."""


def still_moving(copy: Pollable) -> bool:
    """Whether a copy is still in flight after `done` or `wait` raised a foreign exception, such as
    one of a signal handler. Calls `done` once more."""
    try:
        return not copy.done()
    except Exception:  # the copy itself failed
        return False


class TransferTracker:
    """All transfers of one manager."""

    def __init__(
        self,
        lock: threading.RLock,
        time_limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing moves yet.

        Args:
            lock: the manager's; never held while waiting for a copy.
            time_limit: seconds that a poll waits for a tier's lock, to abandon failed pages: see
                `Hurried`.
        """
        self.lock, self._time_limit = lock, time_limit
        self._clock = clock
        self._all: list[BlockTransfer] = []
        """Unfinished transfers in order, and perhaps some that have finished."""
        self.paused = False
        self.foreign = Foreign()
        """Exceptions of transfer backends that are none of our errors, for the manager's `poll`."""

    @property
    def in_flight(self) -> int:
        """Number of running transfers."""
        return sum([transfer.state in _UNDER_WAY for transfer in self._all])

    @property
    def queued(self) -> int:
        """Number of transfers that wait for `resume`."""
        return sum([transfer.state is _QUEUED for transfer in self._all])

    def begin(
        self,
        blocks: Pages,
        backend: TransferBackend,
        call: Callable[..., TransferHandle],
        held: Releasable,
        arguments: tuple[Any, ...],
        on_result: OnResult,
        *,
        of: list[BlockTransfer] | None = None,
        on_end: OnEnd | None = None,
        on_failure: OnFailure | None = None,
        into: tuple[object, str] | None = None,
        instead_of: tuple[object, str] | None = None,
    ) -> BlockTransfer:
        """Begin a copy, or queue it while paused.

        Args:
            blocks: device blocks that it touches.
            backend: makes the copy.
            call: the backend's `load`, `offload` or `save`. What it raises fails the transfer and
                is not raised here; an exception that is none of our errors goes to `foreign`.
            held: pages for the transfer backend. The transfer owns them from now on: it gives them
                back if it never begins and if it fails, unless the transfer backend has done so or
                has taken them over.
            arguments: of the call, after `held`.
            on_result: called with whether it succeeded and how many bytes it moved (None: the
                backend does not know). For counting: an interrupt may lose this call.
            of: list of transfers of the owner of its blocks, to which it is appended. None: the
                blocks are held otherwise.
            on_end: called with whether it succeeded, when it has finished. Perhaps twice.
            on_failure: called with the error of a copy that has failed, not of a cancelled one,
                before `on_result`; as that, an interrupt may lose the call.
            into: an object and an attribute that is set to this transfer in the same instant.
            instead_of: an object and an attribute that had `held`, set to None in the same instant.
        """
        transfer = BlockTransfer(
            self, blocks, backend, call, held, arguments, on_result, on_end, on_failure
        )
        if into is None and instead_of is None:  # nearly always, and faster
            append_to((self._all,) if of is None else (self._all, of), transfer)
        else:
            known = [partial(list.append, self._all, transfer)]
            if of is not None:
                known.append(partial(list.append, of, transfer))
            if into is not None:
                known.append(partial(setattr, *into, transfer))
            if instead_of is not None:
                known.append(partial(setattr, *instead_of, None))
            together(*known)
        transfer.advance(paused=self.paused)
        if transfer.state not in _UNFINISHED:
            self._all.remove(transfer)
        return transfer

    def launch(
        self,
        blocks: Pages,
        call: Callable[..., Pollable],
        arguments: tuple[Any, ...],
        mark: Callable[[], Pollable],
        *calls: partial[Any],
        of: Sequence[list[BlockTransfer]],
        leases: Sequence[Lease] = (),
    ) -> None:
        """Launch a copy on a stream. It is known before, so that an interrupt cannot hide it.

        Args:
            blocks: those that it writes.
            call: launches it. What it raises is raised here, and nothing moves then.
            mark: launches, on the same stream, what tells when all before it has been executed.
            calls: C functions to call in the instant in which the launch is known, as for
                `together`.
            of: lists of transfers of the owners of its blocks, to which it is appended.
            leases: of what it reads, its own from that instant on: released when it has been
                executed.
        """
        with self.lock:
            launch = Launch(self, blocks, mark, leases)
            known = [partial(list.append, each, launch) for each in (self._all, *of)]
            together(*known, *calls)
            try:
                keep_result(launch.launches, call, *[(each,) for each in arguments])
            except Exception:
                launch.refused()
                self.sort_out()
                raise
            for each in self._all:  # what earlier ones have written is wanted again soon
                if isinstance(each, Launch):
                    each.advance(paused=self.paused)
            self.sort_out()

    def sort_out(self) -> None:
        """Forget finished transfers."""
        self._all = [transfer for transfer in self._all if not transfer.finished]

    def poll(self) -> int:
        """Begin queued transfers unless paused; notice finished ones. Returns `in_flight`."""
        with self.lock, Hurried(self._time_limit):
            for transfer in self._all:
                transfer.advance(paused=self.paused)
            self.sort_out()
            return self.in_flight

    def busy(self, blocks: Pages) -> npt.NDArray[np.bool_]:
        """Which of these blocks a copy reads or writes, or will when transfers are resumed, as of
        the last poll."""
        busy = np.zeros(blocks.shape, np.bool_)
        touched = [transfer.blocks for transfer in self._all if not transfer.finished]
        if touched and blocks.size:
            every = np.concatenate(touched)
            flags = np.zeros(int(every.max(initial=-1)) + 1, np.bool_)
            flags[every] = True
            known = (blocks >= 0) & (blocks < len(flags))
            busy[known] = flags[blocks[known]]
        return busy

    def touching(self, blocks: Pages | None) -> list[BlockTransfer]:
        """Transfers that touch any of these blocks, or will; None: all in flight."""
        with self.lock:
            if blocks is None:
                return [transfer for transfer in self._all if transfer.state in _UNDER_WAY]
            wanted = set(blocks.tolist())
            every = [transfer for transfer in self._all if not transfer.finished]
            return [
                transfer for transfer in every if not wanted.isdisjoint(transfer.blocks.tolist())
            ]

    def wait(self, blocks: Pages | None, timeout: float | None) -> None:
        """Block, without the lock, until no copy touches these blocks; None: until none is in
        flight.

        Raises:
            WaitTimeout: some are in flight, or wait for `resume`; says which.
            ConfigError: no number of seconds.
            As `BlockTransfer.block`.
        """
        limit = seconds_of(timeout)
        end = None if limit is None else self._clock() + limit
        self.poll()  # after an interrupt, some may still have to begin or to end
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


__all__ = ["BlockTransfer", "OnEnd", "OnResult", "State", "TransferTracker", "still_moving"]
