"""The `Transfer` of a device engine: events that say when its copies are over."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightcache.shm.errors import ConfigError, TransferFailed, WaitTimeout

if TYPE_CHECKING:
    from lightcache.kernels.staging import IndexBlock
    from lightcache.kernels.traffic import Traffic

_SPIN = 300e-6  # seconds of asking before sleeping: small transfers are over by then
_NAP = 100e-6


class DeviceTransfer:
    """See `lightcache.kernels.transfer.Transfer`. Made by `TransferEngine`."""

    __slots__ = (
        "__weakref__",
        "_calls",
        "_enqueued",
        "_error",
        "_going_out",
        "_marks",
        "_over",
        "_traffic",
        "_uses",
        "_windows",
        "nbytes",
    )

    def __init__(self, traffic: Traffic, nbytes: int) -> None:
        """Nothing is enqueued yet."""
        self.nbytes = nbytes
        self._traffic = traffic
        self._going_out = False
        self._marks: list[Any] = []
        self._windows: list[tuple[frozenset[int], list[Any]]] = []
        self._enqueued: threading.Event | None = None
        self._error: BaseException | None = None
        self._over = False
        self._uses: tuple[IndexBlock | None, object] = (None, None)
        self._calls: deque[Callable[[bool], None]] = deque()

    # ---- for the engine, which holds its lock

    def uses(self, block: IndexBlock | None, other: object) -> None:
        """What must stay until it is over."""
        self._uses = block, other

    def mark(self, event: Any) -> None:
        """An event behind copies of this transfer."""
        self._marks.append(event)

    def mark_layers(self, events: list[Any], layers: Sequence[int]) -> None:
        """Which of its events are behind all copies of some layers."""
        self._windows.append((frozenset(layers), events))

    def fail(self, error: BaseException) -> None:
        """It did not all go; over when what has been enqueued is."""
        self._error = self._error or error

    def begin(self, *, later: bool = False) -> None:
        """From now on something may have been enqueued that no event tells of yet.

        Args:
            later: by another thread, that others will wait for.
        """
        if later:
            self._enqueued = threading.Event()
        self._going_out = True

    def enqueued(self) -> None:
        """Nothing more will be enqueued, and events tell of all that was."""
        self._going_out = False
        if self._enqueued is not None:
            self._enqueued.set()

    def settle(self) -> bool:
        """Whether it is over, without raising or calling anybody; gives its buffers back."""
        if self._over:
            return True
        if self._going_out:
            return False
        try:
            if not all(mark.query() for mark in self._marks):
                return False
        except Exception as error:
            if not self._traffic.device.lost(error):
                return False
            self.fail(error)  # and whatever it was copying is lost as well
        self._over = True
        marks, self._marks, self._windows = self._marks, [], []
        uses, self._uses = self._uses, (None, None)
        self._traffic.settled(marks, uses[0])
        return True

    @property
    def waited_for(self) -> bool:
        """Whether somebody is still to be told."""
        return bool(self._calls)

    def run_calls(self) -> None:
        """Tell those who asked to be told. Each call is made once, by one thread; those behind one
        that raises are made all the same, then its error is raised."""
        first: Exception | None = None
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                call(self._error is None)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    # ---- for everybody

    def done(self) -> bool:
        """See `Transfer.done`."""
        with self._traffic.lock:
            over = self.settle()
        if over:
            self.run_calls()
            self._raise()
        return over

    def _raise(self) -> None:
        if self._error is not None:
            raise TransferFailed(
                f"a transfer of {self.nbytes} bytes failed: {self._error!r}; what it should have "
                "written does not count: abandon those pages, or compute those tokens"
            ) from self._error

    def wait(self, timeout: float | None = None) -> None:
        """See `Transfer.wait`. Asks for 0.3 ms, then sleeps."""
        start = time.monotonic()
        while not self.done():
            passed = time.monotonic() - start
            if timeout is not None and passed >= timeout:
                raise WaitTimeout(
                    f"a transfer of {self.nbytes} bytes goes on after {timeout} s; wait again: "
                    "its pages and slots are in use until it is over"
                )
            if passed < _SPIN:
                continue
            if timeout is None:
                self.sleep()
            else:
                time.sleep(min(_NAP, max(0.0, timeout - passed)))

    def sleep(self) -> None:
        """Block until it is over, as far as can be told; `settle` tells for sure.

        Another thread may see it over meanwhile and use its events again: then this waits for
        more than it must, once.
        """
        if self._enqueued is not None:
            self._enqueued.wait()
        with self._traffic.lock:
            marks = list(self._marks)
        try:
            for mark in marks:
                mark.synchronize()
        except Exception:  # whether the device is lost, `settle` finds out
            time.sleep(_NAP)

    def wait_on(self, stream: Any = None) -> None:
        """See `Transfer.wait_on`. Blocks this thread only while a rate limit holds copies back."""
        self._wait_events(lambda: self._marks, stream)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """See `Transfer.wait_layer`.

        Raises:
            ConfigError: a layer that is in none of its windows, while it goes on.
            TransferFailed: see `Transfer.wait_layer`.
        """
        self._wait_events(lambda: self._window(layer), stream)

    def _window(self, layer: int) -> list[Any]:
        if self._over or not self._windows:
            return self._marks
        for layers, events in self._windows:
            if layer in layers:
                return events
        known = sorted(set().union(*(layers for layers, _ in self._windows)))
        raise ConfigError(f"layer {layer!r} is not part of this transfer, its layers are {known}")

    def _wait_events(self, events: Callable[[], list[Any]], stream: Any) -> None:
        if self._enqueued is not None:
            self._enqueued.wait()
        with self._traffic.lock:
            if self._error is not None:
                self._raise()
            found = events()
            if found:
                stream = self._traffic.device.current() if stream is None else stream
                for event in found:
                    stream.wait_event(event)

    def when_done(self, call: Callable[[bool], None]) -> None:
        """See `Transfer.when_done`."""
        with self._traffic.lock:
            self._calls.append(call)
            over = self.settle()
        if over:
            self.run_calls()

    def __repr__(self) -> str:
        state = "failed" if self._error else "over" if self._over else "going on"
        return f"<Transfer {self.nbytes} bytes, {state}>"
