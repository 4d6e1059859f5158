"""Threads that call the store's client, so that who waits for an answer can stop waiting.

A call of the client cannot be broken off: it returns when it has an answer, or when its own limits
are reached, up to a minute later. A thread that is in one is not there for others meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from lightcache.storage.arguments import Deadline

T = TypeVar("T")


class Task(Generic[T]):
    """A call of the client: queued, under way, over, or abandoned."""

    def __init__(self, call: Callable[[], T], after: Callable[[], None]) -> None:
        """
        Args:
            after: called once when nothing is done for it any more: right away if it was
                abandoned before it began.
        """
        self._call, self._after = call, after
        self._changed = threading.Condition()
        self._begun = self._over = self._abandoned = False
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """By a thread of `Callers`."""
        with self._changed:
            if self._abandoned:
                return
            self._begun = True
        try:
            self._result = self._call()
        except BaseException as error:  # for who waits, whatever it is
            self._error = error
        if not self._wanted():
            self._after()

    def _wanted(self) -> bool:
        """It is over; whether somebody waits for it."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            return not self._abandoned

    def wait(self, deadline: Deadline) -> bool:
        """Whether it is over in time."""
        with self._changed:
            while not self._over and not deadline.passed:  # a wait may end a little early
                self._changed.wait(min(deadline.left, threading.TIMEOUT_MAX))
            return self._over

    def result(self) -> T:
        """Of one that is over; raises what the call raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame, and views of who waits
        return self._result

    def finish(self) -> None:
        """Nobody wants its result any more. What it holds is given back, now or when it is over."""
        with self._changed:
            if self._abandoned:
                return
            self._abandoned = True
            if self._begun and not self._over:
                return
        self._after()


class Callers:
    """A number of threads; calls are begun in the order in which they came."""

    def __init__(self, threads: int) -> None:
        """Starts them. Daemons: a call that hangs does not keep the process alive.

        Raises:
            RuntimeError: no more threads; none is left.
        """
        self._queue: queue.SimpleQueue[Task[object] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"lightcache-mooncake-{i}", daemon=True)
            for i in range(threads)
        ]
        started = 0
        try:
            for thread in self._threads:
                thread.start()
                started += 1
        except BaseException:  # no more threads here
            self._threads = self._threads[:started]
            self.stop(0.0)
            raise

    def submit(self, call: Callable[[], T], after: Callable[[], None] = lambda: None) -> Task[T]:
        """Have a thread call this."""
        task: Task[T] = Task(call, after)
        self._queue.put(task)  # type: ignore[arg-type]
        return task

    def ask(self, call: Callable[[], T], deadline: Deadline) -> T:
        """Call, and wait for the answer.

        Raises:
            TimeoutError: none in time.
        """
        task = self.submit(call)
        try:
            if not task.wait(deadline):
                raise TimeoutError("the store has not answered")
            return task.result()
        finally:
            task.finish()

    def stop(self, seconds: float) -> bool:
        """End the threads; False: one is still in a call, and calling this again goes on."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = Deadline(seconds)
        for thread in self._threads:
            thread.join(deadline.left)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task  # and with it what the call holds


__all__ = ["Callers", "Task"]
