"""A transfer of the host engine: copies by threads, over when the last of them is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightcache.kernels.host_lanes import Copy
from lightcache.shm.errors import ConfigError, TransferFailed, WaitTimeout

if TYPE_CHECKING:
    from concurrent.futures import Future


HELP_BYTES = 256 << 10  # waking another thread takes as long as copying about so much


class Pace:
    """No more than so many bytes a second, by the time at which each piece may begin."""

    def __init__(self, rate: float) -> None:
        """In bytes a second."""
        self._rate = rate
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Sleep until so many bytes may move."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + nbytes / self._rate
        if begin > now:
            time.sleep(begin - now)


class Window:
    """Layers that are waited for together."""

    def __init__(self, layers: Sequence[int], pieces: list[tuple[int, Copy]]) -> None:
        """Pieces as `Index.pieces` gives them."""
        self.layers = frozenset(layers)
        self.pieces = pieces
        self.left = len(pieces)
        self.over = threading.Event()
        if not pieces:
            self.over.set()


class HostTransfer:
    """See `Transfer`. Whoever runs it holds it, and with it all that `when_done` calls hold."""

    def __init__(
        self, to_host: bool, windows: list[Window], befores: Sequence[Any], pace: Pace | None
    ) -> None:
        """For HostEngine; `run` does the work.

        Args:
            to_host: whether it offloads.
            befores: waited for before the first byte, with `synchronize()` or `wait()`.
        """
        self.to_host = to_host
        self.nbytes = sum(size for window in windows for size, _ in window.pieces)
        self.claimed = False
        """Whether a thread has begun with it; see `TransferQueue`."""
        self._windows = windows
        self._befores: Sequence[Any] = befores
        self._pace = pace
        self._work: deque[tuple[Window, int, Copy]] = deque(
            (window, size, copy) for window in windows for size, copy in window.pieces
        )
        self._pieces = len(self._work)
        self._cause: BaseException | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._calls: deque[Callable[[bool], None]] = deque()

    # ---- for whoever waits

    @property
    def over(self) -> bool:
        """Whether it is over, failed or not. Does not block, calls nothing, raises nothing."""
        return self._over.is_set()

    def done(self) -> bool:
        """See `Transfer.done`."""
        if not self._over.is_set():
            return False
        self.notice()
        self._check()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """See `Transfer.wait`."""
        if not self._over.wait(timeout):
            raise WaitTimeout(
                f"a transfer of {self.nbytes} bytes was not over after {timeout} s; wait again"
            )
        self.notice()
        self._check()

    def synchronize(self) -> None:
        """Block until it is over, and make no `when_done` calls: for `after=` of another transfer.

        Raises:
            TransferFailed: it failed.
        """
        self._over.wait()
        self._check()

    def wait_on(self, stream: Any = None) -> None:
        """Block until it is over: a processor has no streams.

        Raises:
            TransferFailed: it failed.
        """
        self.synchronize()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Block until the window that holds a layer is done.

        Raises:
            ConfigError: a layer that does not move.
            TransferFailed: it failed.
        """
        for window in self._windows:
            if layer in window.layers:
                window.over.wait()
                self._check()
                return
        moved = sorted(layer for window in self._windows for layer in window.layers)
        raise ConfigError(f"layer: expected one of those that move ({moved}), found {layer!r}")

    def when_done(self, call: Callable[[bool], None]) -> None:
        """See `Transfer.when_done`."""
        self._calls.append(call)
        if self._over.is_set():
            self.notice()

    def notice(self) -> None:
        """Make the calls that wait for the end. Each is made once, by one thread; those behind one
        that raises are made all the same, then its error is raised."""
        first: BaseException | None = None
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:
                break
            try:
                call(self._cause is None)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    @property
    def waited_for(self) -> bool:
        """Whether calls wait for its end."""
        return bool(self._calls)

    def _check(self) -> None:
        if self._cause is not None:
            raise TransferFailed(
                f"a transfer of {self.nbytes} bytes failed ({self._cause}); its destination is "
                "undefined, treat it as missing"
            ) from self._cause

    # ---- for the threads that run it

    def run(self, submit: Callable[[Copy], Future[None]], threads: int) -> None:
        """Do all of it in this thread and up to `threads` - 1 others, and return when it is over.
        Never raises: what goes wrong is told by `done`."""
        helpers = []
        try:
            for before in self._befores:
                _await(before)
            self._befores = ()  # streams and events are not kept longer than they are needed
            with contextlib.suppress(RuntimeError):  # Python is ending: no helpers any more
                for _ in range(min(threads, self._pieces, 1 + self.nbytes // HELP_BYTES) - 1):
                    helpers.append(submit(self._copy))
            self._copy()
        except BaseException as error:
            self._cause = self._cause or error
        for helper in helpers:  # one that has not begun may stand behind another transfer's
            if not helper.cancel():
                helper.result()
        self._finish()

    def _copy(self) -> None:
        """Take pieces until there are none."""
        while self._cause is None:
            try:
                window, size, copy = self._work.popleft()
            except IndexError:
                return
            try:
                if self._pace is not None:
                    self._pace.wait(size)
                copy()
            except BaseException as error:
                self._cause = error
                return
            with self._lock:
                window.left -= 1
                last = window.left == 0
            if last and self._cause is None:
                window.over.set()

    def _finish(self) -> None:
        self._work.clear()
        for window in self._windows:
            window.pieces = []
            window.over.set()
        self._over.set()


def _await(before: Any) -> None:
    wait = getattr(before, "synchronize", None) or before.wait
    wait()


__all__ = ["HostTransfer", "Pace", "Window"]
