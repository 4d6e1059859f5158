"""Requests of a client whose calls are awaited, for threads that wait only as long as they may.

An event loop in a thread of its own has the requests under way. It never sees a caller's buffers:
it is given bytes of our own to send, and hands over the client's bytes as they came; the calling
thread copies them. So nothing that comes late can touch a page, and a call returns when its time is
up, without waiting for whoever does not answer: its requests are cancelled behind it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from lightcache.errors import StorageError
from lightcache.storage.arguments import Deadline

ENDING = 10.0  # seconds in which the loop must have ended: it only runs callbacks

Job = tuple[int, Callable[[], Awaitable[Any]]]
"""A number, by which its result is known, and what begins the request, in the loop."""
Result = tuple[int, Any]
"""The number of a job, and what was awaited, or the exception that was raised."""


class Requests:
    """At most `at_once` requests under way, of all calls together."""

    def __init__(self, at_once: int, name: str) -> None:
        """Starts the thread.

        Args:
            name: of the thread.

        Raises:
            RuntimeError: no more threads.
        """
        self.at_once = at_once
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(at_once)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads here
            self._loop.close()
            raise

    def each(self, jobs: Iterator[Job], deadline: Deadline) -> Iterator[Result]:
        """Results as they come, until all are there or time is up: what has none by then is
        cancelled. A job is taken when there is room for it, so no more than `at_once` results of
        a call are in memory; an end of `jobs` that comes early begins no more. An exception of a
        request is its result; none is raised here.
        """
        call = _Call(self._loop, self._slots)
        try:
            yield from call.results(jobs, self.at_once, deadline)
        finally:
            call.drop()

    def one(self, begin: Callable[[], Awaitable[Any]], deadline: Deadline) -> Any:
        """The result of one request.

        Raises:
            StorageError: time is up.
            Exception: what it raised.
        """
        for _, result in self.each(iter([(0, begin)]), deadline):
            if isinstance(result, BaseException):
                raise result
            return result
        raise StorageError(deadline.reason)

    def close(self) -> None:
        """Cancel what is under way and end the thread. A second call does nothing, and so does one
        in a forked child, which has no such thread.

        Raises:
            StorageError: it did not end; call again.
        """
        if self._process != os.getpid() or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is threading.current_thread():  # garbage is collected by any thread
            return
        self._thread.join(ENDING)
        if self._thread.is_alive():
            raise StorageError(f"close: requests did not end within {ENDING:g} s; close it again")

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_end_others())
        finally:
            self._loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class _Call:
    """Requests of one call. `begin`, `results` and `drop` are for the calling thread, what has an
    underline is for the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: asyncio.Semaphore) -> None:
        self._loop, self._slots = loop, slots
        self._done: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped = False

    def begin(self, job: Job) -> None:
        self._loop.call_soon_threadsafe(self._begin, *job)

    def results(self, jobs: Iterator[Job], at_once: int, deadline: Deadline) -> Iterator[Result]:
        under_way = 0
        while True:
            while under_way < at_once and not deadline.passed:
                job = next(jobs, None)
                if job is None:
                    break
                self.begin(job)
                under_way += 1
            if not under_way:
                return
            try:
                result = self._done.get(timeout=min(deadline.left, threading.TIMEOUT_MAX))
            except queue.Empty:
                if deadline.passed:
                    return
                continue
            under_way -= 1
            yield result

    def drop(self) -> None:
        """Cancel what is under way; a request that has not begun never will."""
        self._loop.call_soon_threadsafe(self._drop)

    def _begin(self, number: int, begin: Callable[[], Awaitable[Any]]) -> None:
        if not self._dropped:
            task = self._loop.create_task(self._one(number, begin))
            self._tasks.add(task)  # the loop itself keeps no reference
            task.add_done_callback(self._tasks.discard)

    async def _one(self, number: int, begin: Callable[[], Awaitable[Any]]) -> None:
        result: Any
        try:
            async with self._slots:
                result = await begin()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic of the client's is no Exception
            result = error
        self._done.put((number, result))

    def _drop(self) -> None:
        self._dropped = True
        for task in self._tasks:
            task.cancel()


__all__ = ["Job", "Requests", "Result"]
