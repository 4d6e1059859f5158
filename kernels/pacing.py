"""A rate limit: a thread that enqueues pieces of transfers when they are due."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Pacer:
    """Runs what it is given in order, so that the bytes of it keep to a rate."""

    def __init__(self, rate: float) -> None:
        """Starts its thread.

        Args:
            rate: bytes a second.
        """
        self._rate = rate
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lightcache-pacer", daemon=True)
        self._thread.start()

    def put(self, run: Callable[[], None], nbytes: int) -> None:
        """Run this when what was put before has had its time. `run` must not raise."""
        self._queue.put((run, nbytes))

    def _work(self) -> None:
        due = time.monotonic()
        while (item := self._queue.get()) is not None:
            run, nbytes = item
            now = time.monotonic()
            if due > now and nbytes:
                time.sleep(due - now)
            run()
            due = max(due, now) + nbytes / self._rate
            del item, run  # they hold an engine: not until there is more to do

    def close(self) -> None:
        """Run what is left, at its rate, and end. From its own thread: end after this."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
