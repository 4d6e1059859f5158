"""Offloads that complete in the order of their submission, though nothing polls. See
docs/design/transfers.md, section 19."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lightcache.errors import ConfigError, Detached, LightcacheError, LockTimeout, WaitTimeout
from lightcache.page_transfers import Offload
from lightcache.shm.waiting import Condition

_SHORTEST, _LONGEST = 0.2e-3, 2e-3  # seconds between two looks at the copies in flight


@dataclass(frozen=True)
class CompletedOffload:
    """How an offload ended."""

    tag: object
    """What `submit` was given."""
    error: Exception | None
    """Why it failed; None: its pages are published, or this rank's shard of them is."""


class _Entry:
    """An offload in the queue."""

    def __init__(self, tag: object) -> None:
        """Not begun."""
        self.tag = tag
        self.offload: Offload | None = None
        self.result: CompletedOffload | None = None

    def end(self, error: Exception | None) -> None:
        """Set the result, once."""
        if self.result is None:
            self.result = CompletedOffload(self.tag, error)


class OffloadQueue:
    """Offloads of one rank: first in, first out, whichever copy ends first.

        queue = OffloadQueue()
        queue.submit(lambda: Offload(engine, cache.reserve(keys), slots, after=[event]))
        ...
        for _ in range(queue.completed()):  # each step
            queue.pop()

    A thread publishes pages and gives back pins as copies end, whether or not anybody asks. It
    lives while copies are in flight, also after the queue was dropped. Thread-safe. Close it
    before the transfer engine.
    """

    def __init__(self) -> None:
        """Empty, without a thread."""
        self._entries: deque[_Entry] = deque()
        self._in_flight: list[_Entry] = []
        self._changed = Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    def submit(self, begin: Callable[[], Offload], tag: object = None) -> None:
        """Begin an offload, after those submitted before. If it cannot begin it takes its place in
        the order all the same, and has failed: ranks that submit the same see the same order.

        Args:
            begin: makes the `Offload`, now and in this thread. An exception is its result; a
                reservation that only `begin` knows is given back then.
            tag: for `CompletedOffload`.

        Raises:
            Detached: the queue is closed, or this is a forked child; `begin` was not called.
        """
        self._check_process()
        if self._closed:
            raise Detached("this queue of offloads was closed; make another one")
        entry = _Entry(tag)
        try:
            offload = begin()
            if not isinstance(offload, Offload):
                raise ConfigError(f"submit: expected an Offload, found {type(offload).__name__}")
            entry.offload = offload
        except Exception as error:
            # Its frames have what `begin` reserved, which is given back with the last reference.
            cause: BaseException | None = error
            while cause is not None:
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__context__
            entry.end(error)
        with self._changed:
            if entry.offload is not None:
                self._in_flight.append(entry)
            self._entries.append(entry)  # last: an interrupt leaves none that nothing completes
            with contextlib.suppress(RuntimeError):  # no thread now: `completed` tries again
                self._ensure_thread()
            self._changed.notify_all()

    def completed(self) -> int:
        """Offloads that `pop` returns: completed, and all before them as well. Does not block, and
        neither polls nor touches the index.

        Raises:
            Detached: in a forked child.
        """
        self._check_process()
        with self._changed:
            self._ensure_thread()
            return self._ready()

    def _ready(self) -> int:
        for number, entry in enumerate(self._entries):
            if entry.result is None:
                return number
        return len(self._entries)

    def pop(self) -> CompletedOffload:
        """Remove the oldest offload, which has completed.

        Raises:
            ConfigError: it has not, or there is none: ask `completed` first.
            Detached: in a forked child.
        """
        self._check_process()
        with self._changed:
            result = self._entries[0].result if self._entries else None
            if result is None:
                raise ConfigError("pop: none has completed; call it as often as completed() says")
            self._entries.popleft()
            return result

    def __len__(self) -> int:
        """Offloads that were submitted and not popped."""
        return len(self._entries)

    def wait(self, timeout: float) -> bool:
        """Block until all have completed, at most `timeout` seconds. False: some have not.

        Raises:
            Detached: in a forked child.
        """
        self._check_process()
        with self._changed:
            self._ensure_thread()
            return self._changed.wait_for(lambda: self._ready() == len(self._entries), timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Wait for at most `timeout` seconds, then abort what is in flight, so that no client waits
        for its keys; results can still be popped. Returns whether all copies have ended: else their
        slots and pages are in use until they do, and closing the transfer engine waits for that. A
        second call waits again. Does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return False
        self._closed = True
        with contextlib.suppress(RuntimeError):  # no thread can start: all are aborted
            self.wait(timeout)
        with self._changed:
            left = [entry for entry in self._in_flight if entry.result is None]
        late = WaitTimeout(f"its copy was in flight {timeout} s after the queue was closed")
        for entry in left:
            if (offload := entry.offload) is not None:  # else it has just ended
                with contextlib.suppress(LightcacheError):  # a lock: it is abandoned at its end
                    offload.abort()
            with self._changed:
                entry.end(late)
        with self._changed:
            self._changed.notify_all()
            return not self._in_flight

    # ---- the thread

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Detached("this queue of offloads belongs to the parent process; make one here")

    def _ensure_thread(self) -> None:
        # Nearly always `submit` starts it; after an interrupt of `submit` the next call does.
        if self._in_flight and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._run, name="lightcache-offloads", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        nap = _SHORTEST
        while True:
            with self._changed:
                if not self._in_flight:
                    self._thread = None
                    return
                looked_at = list(self._in_flight)
            ended = [entry for entry in looked_at if self._ended(entry)]
            nap = _SHORTEST if ended else min(2 * nap, _LONGEST)
            with self._changed:
                self._in_flight = [each for each in self._in_flight if each not in ended]
                self._changed.notify_all()
            del looked_at, ended  # they keep offloads, and these the pool's pages
            time.sleep(nap)

    def _ended(self, entry: _Entry) -> bool:
        """Ask an offload, which publishes it if its copy has ended."""
        if (offload := entry.offload) is None:
            return True
        try:
            if not offload.done():
                return False
            error: Exception | None = None
        except LockTimeout:  # its pages could not be given back yet
            return False
        except Exception as raised:
            error = raised
        with self._changed:
            entry.end(error)
        entry.offload = None
        return True


__all__ = ["CompletedOffload", "OffloadQueue"]
