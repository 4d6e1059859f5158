"""A few threads that do the reading and writing of a disk, what is read before what is written."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence

from lightcache.storage.arguments import Deadline

Piece = Callable[[], None]
"""One page's transfer. Raises nothing."""

READ, WRITE, _LEAVE = 0, 1, 2


class _Batch:
    """Pieces of one call."""

    def __init__(self, pieces: int, deadline: Deadline) -> None:
        self.deadline = deadline
        self.over = threading.Event()
        self._left = pieces
        self._lock = threading.Lock()

    def done(self) -> None:
        """One piece less."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.over.set()


class Lanes:
    """A disk is at its best with several requests at a time, and its system calls block."""

    def __init__(self, threads: int) -> None:
        """Starts them. Daemons: a disk that hangs does not keep the process alive."""
        self._queue: queue.PriorityQueue[tuple[int, int, Piece, _Batch | None]]
        self._queue = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"lightcache-disk-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, pieces: Sequence[Piece], kind: int, deadline: Deadline) -> None:
        """Have these done. Those whose turn comes when the time is up are left out; those that have
        begun are waited for, however long they take: their memory is the caller's."""
        if not pieces:
            return
        batch = _Batch(len(pieces), deadline)
        for piece in pieces:
            self._queue.put((kind, next(self._numbers), piece, batch))
        batch.over.wait()

    def _work(self) -> None:
        while True:
            _, _, piece, batch = self._queue.get()
            if batch is None:
                return
            try:
                if not batch.deadline.passed:
                    piece()
            finally:
                batch.done()

    def close(self) -> None:
        """What was asked for is done before they end."""
        for _ in self._threads:
            self._queue.put((_LEAVE, next(self._numbers), _nothing, None))
        for thread in self._threads:
            thread.join()


def _nothing() -> None:
    pass


__all__ = ["READ", "WRITE", "Lanes", "Piece"]
