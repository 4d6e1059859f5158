"""Writing what was found far away to the storages nearer by, in the background.

Whoever reads has its pages already and waits for nobody. Pages wait in a queue of bounded bytes, in
memory of the stack's; what does not fit is not promoted, and will be when it is read again.

What is deleted must not come back: a page may have been read before it was deleted, and wait here
until it is written anew. So deleting empties the queue and waits for what is being written, and
every read says in which generation it began: deleting begins one before, and another one behind.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightcache.errors import LightcacheError, StorageError
from lightcache.storage.arguments import Deadline
from lightcache.storage.breaker import log
from lightcache.storage.levels import Level, Pages
from lightcache.storage.protocol import Keys, WriteStatus


@dataclass(frozen=True)
class Promotion:
    """Pages for one level that stand one behind the other in a prefix."""

    level: Level
    keys: Keys
    pages: Pages
    parent: Keys | None
    bytes: int
    """Of the memory that `pages` is a part of: that much is kept until it is written."""


class Promoter:
    """A queue and the thread that empties it, which starts with the first page to be promoted."""

    def __init__(self, most_bytes: int, seconds: float) -> None:
        """
        Args:
            most_bytes: of pages that wait or are being written; 0: nothing is promoted.
            seconds: that writing one promotion may take.
        """
        self.most_bytes = most_bytes
        self._seconds = seconds
        self._changed = threading.Condition()
        self._queue: deque[Promotion] = deque()
        self._bytes = 0
        self._writing = False
        self._paused = 0
        self._generation = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def generation(self) -> int:
        """To be asked before reading, and given to `put`."""
        with self._changed:
            return self._generation

    def put(self, one: Promotion, generation: int) -> bool:
        """Take over pages; False: they are not promoted. Does not block."""
        with self._changed:
            full = self._bytes + one.bytes > self.most_bytes
            if full or generation != self._generation or self._closing or one.level.shut:
                return False
            if not self._works():
                return False
            self._queue.append(one)
            self._bytes += one.bytes
            self._changed.notify_all()
        return True

    def _works(self) -> bool:
        """Whether there is a thread, which is started when it is first needed. It is known before
        it starts: behind an interrupt there must not be two."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._work, name="lightcache-stack-promote", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # no more threads here
                self._thread = None
                return False
        return True

    def settle(self, timeout: float) -> bool:
        """Wait until nothing is left to be promoted; False: not in these seconds.

        Raises:
            ConfigError: no number of seconds.
        """
        seconds = min(Deadline(timeout).left, threading.TIMEOUT_MAX)
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._writing), seconds)

    @contextlib.contextmanager
    def paused(self, deadline: Deadline) -> Iterator[None]:
        """Nothing is promoted meanwhile, nor what was read before or meanwhile.

        Raises:
            StorageError: a page is being written for longer than that.
        """
        entered = 0
        try:  # around the count as well: an interrupt may come behind any line
            with self._changed:
                self._paused, entered = self._paused + 1, 1
                self._begin_generation()
                quiet = self._changed.wait_for(
                    lambda: not self._writing, min(deadline.left, threading.TIMEOUT_MAX)
                )
            if not quiet:
                raise StorageError(f"{deadline.reason}; a page is still being promoted, call again")
            yield
        finally:
            with self._changed:
                self._paused -= entered
                self._begin_generation()

    def _begin_generation(self) -> None:
        self._generation += 1
        self._bytes -= sum(one.bytes for one in self._queue)
        self._queue.clear()
        self._changed.notify_all()

    def stop(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closing = True
            self._begin_generation()

    def join(self, timeout: float) -> bool:
        """Behind `stop`: wait for the thread to end; False: it writes still."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    # ---- the thread

    def _work(self) -> None:
        while (one := self._next()) is not None:
            try:
                self._write(one)
            finally:
                with self._changed:
                    self._writing = False
                    self._bytes -= one.bytes
                    self._changed.notify_all()

    def _next(self) -> Promotion | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (self._queue and not self._paused))
            if self._closing:
                return None
            self._writing = True
            return self._queue.popleft()

    def _write(self, one: Promotion) -> None:
        rows: Sequence[Pages] = list(one.pages)
        try:
            result = one.level.write(one.keys, rows, one.parent, self._seconds)
        except LightcacheError as error:  # its breaker was told, and warns
            log.debug("%d pages were not promoted: %s", len(one.keys), error)
            return
        one.level.promoted += result.count(WriteStatus.STORED)


__all__ = ["Promoter", "Promotion"]
