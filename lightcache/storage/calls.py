"""Who is in a backend just now: it is closed when nobody is, and is of no use in a forked child.

A forked child has the memory of a backend and none of its threads; its locks as they were held, and
its sockets and files together with its parent. So there is one rule: what was opened before is the
parent's, and every call of the child's but `stats` raises Detached before it takes a lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import TracebackType

from lightcache.errors import Detached, StorageError
from lightcache.shm.errors import leave
from lightcache.shm.waiting import Condition
from lightcache.storage.protocol import Storage

CLOSING = 10.0  # seconds that `close` waits for calls


class Calls:
    """Counts the calls that are under way."""

    def __init__(self) -> None:
        """Open, of this process."""
        self._state = Condition()
        self._process = os.getpid()
        self._under_way = 0
        self._closed = False
        self._released = False

    @property
    def ours(self) -> bool:
        """Whether this process opened it."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raises Detached: closed, or opened by the process that forked us."""
        if not self.ours:
            raise Detached("this storage belongs to the process that forked us; open it here")
        if self._closed:
            raise Detached("this storage was closed; open it again")

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around a call: nothing is closed meanwhile.

        Raises:
            Detached: see `check`.
        """
        self.check()  # before the lock: it may have been held at a fork, or be held by `end`
        entered = 0
        try:  # around the count as well: an interrupt may come behind any line
            with self._state:
                self.check()
                self._under_way, entered = self._under_way + 1, 1
            yield
        finally:
            interrupt: KeyboardInterrupt | None = None
            while entered:
                try:
                    with self._state:
                        self._under_way, entered = self._under_way - entered, 0
                        self._state.notify_all()
                except KeyboardInterrupt as found:
                    interrupt = found
            if interrupt is not None:
                raise interrupt

    def end(self, release: Callable[[], None]) -> None:
        """Refuse further calls, wait for those under way, then give back what they used; once. What
        that raises leaves it to another call.

        Raises:
            StorageError: a call hangs; call again.
            Detached: in a forked child.
        """
        if not self.ours:
            self.check()
        with self._state:
            self._closed = True
            if not self._state.wait_for(lambda: not self._under_way, CLOSING):
                raise StorageError(
                    f"close: {self._under_way} calls have not returned; close it again"
                )
            if not self._released:
                release()
                self._released = True


class Owned(Storage):
    """A storage of the process that opened it."""

    _calls: Calls

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._calls.ours:  # a forked child leaves the statement without a word
            leave(self.close, error)


__all__ = ["CLOSING", "Calls", "Owned"]
