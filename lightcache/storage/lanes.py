"""A few threads that read and write for a backend, what is read before what is written."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from lightcache.storage.arguments import Deadline

Piece = Callable[[], None]
"""One page's transfer."""

READ, WRITE, _LEAVE = 0, 1, 2


class _Batch:
    """Pieces of one call. The queue has a turn for each, not the pieces themselves: when the call
    is over nothing of it is left anywhere, though turns of it may still wait."""

    def __init__(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._waiting = deque(pieces)
        self._running = 0
        self._error: BaseException | None = None

    def turn(self) -> None:
        """Do the next piece, if the call still waits for it."""
        with self._changed:
            if self._deadline.passed:
                self._waiting.clear()
            if not self._waiting:
                self._tell()
                return
            piece = self._waiting.popleft()
            self._running += 1
        error: BaseException | None = None
        try:
            piece()
        except BaseException as found:  # told to the caller: this thread has others to serve
            error = found
        with self._changed:
            # Not kept here as well: its traceback has this frame, and views of the caller's.
            self._error, error = self._error or error, None
            self._running -= 1
            self._tell()

    def _tell(self) -> None:
        """Once, in the end: whoever waits is not woken for each piece."""
        if not self._waiting and not self._running:
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all is done, or the time is up."""
        left = min(self._deadline.left, threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running, left)

    def leave(self) -> None:
        """Nothing more begins; wait for what has begun, Ctrl-C or not."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._waiting.clear()
                    self._changed.wait_for(lambda: not self._running)
                break
            except KeyboardInterrupt as found:
                interrupt = found
        if interrupt is not None:
            raise interrupt

    def raise_error(self) -> None:
        """The first that a piece raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # as in `turn`


class Lanes:
    """A disk, and a network, is at its best with several requests at a time, and calls block."""

    def __init__(self, threads: int, name: str = "disk") -> None:
        """Starts them. Daemons: a disk that hangs does not keep the process alive.

        Args:
            name: of whose they are, for who looks at a process's threads.
        """
        self._queue: queue.PriorityQueue[tuple[int, int, _Batch | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"lightcache-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        started = 0
        try:
            for thread in self._threads:
                thread.start()
                started += 1
        except BaseException:  # no more threads here
            self._threads = self._threads[:started]
            self.close()
            raise

    def run(self, pieces: Sequence[Piece], kind: int, deadline: Deadline) -> None:
        """Have these done. When the time is up, what has not begun is left out; what has begun is
        waited for, however long it takes: its memory is the caller's. So it is when Ctrl-C comes.

        Raises:
            What a piece raises, when all are over.
        """
        batch = _Batch(pieces, deadline)
        try:
            for _ in pieces:
                self._queue.put((kind, next(self._numbers), batch))
            batch.wait()
        finally:
            batch.leave()
        batch.raise_error()

    def _work(self) -> None:
        while True:
            _, _, batch = self._queue.get()
            if batch is None:
                return
            batch.turn()

    def close(self) -> None:
        """Turns that wait come before they end."""
        for _ in self._threads:
            self._queue.put((_LEAVE, next(self._numbers), None))
        for thread in self._threads:
            thread.join()


__all__ = ["READ", "WRITE", "Lanes", "Piece"]
