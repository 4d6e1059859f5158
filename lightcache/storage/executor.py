"""The threads that call storages. Each call has a deadline, as it may never return.

Python cannot interrupt a call. A call that has not returned by its deadline is late: its waiter is
told, and its thread counts as lost until the call returns. At most `spare` threads replace lost
ones; beyond that, work is refused at once (`Exhausted`). Everything a call uses, above all pages of
a pool, belongs to the call until it returns, late or not. Its caller ensures that, with `after` or
`Late`.

Reads run before writes. Work of one group is adjacent in the queue.

All data is under `changed`: the queue, the threads, and the calls in flight with their deadlines. A
call moves from the queue to a thread, may become late there, and ends when it returns.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Generic, TypeVar

from lightcache.errors import Detached, StorageError
from lightcache.shm.waiting import Condition
from lightcache.storage.common import Clock, Deadline

T = TypeVar("T")
READ, WRITE = 0, 1
_INTERRUPTS = (KeyboardInterrupt, SystemExit)


class Exhausted(StorageError):
    """Too many calls have not returned; no thread is left for another one."""


class Late(Exception):
    """A call returned after its deadline; its result is not used."""


class Work:
    """Work for a thread. It is in the queue until a thread takes it."""

    kind = READ
    end = math.inf
    """The deadline for its start, by the executor's clock."""
    group: object = None
    """Work of one kind and group is adjacent in the queue; None: a group of its own."""

    def run(self) -> None:
        """Do the work, in a thread of the executor. Raises nothing."""
        raise NotImplementedError

    def expire(self, reason: str) -> None:
        """Called, without a lock, if it will not be started. An empty reason: its time is up."""


class WorkQueue:
    """Reads before writes; groups in order of their first work. Needs the executor's lock."""

    def __init__(self) -> None:
        """Empty."""
        self.reads: OrderedDict[object, deque[Work]] = OrderedDict()
        """Reads, by their groups."""
        self._writes: OrderedDict[object, deque[Work]] = OrderedDict()
        self._kinds = self.reads, self._writes

    def put(self, work: Work, *, back: bool = False) -> None:
        """Append it to its group; a new group comes after all others of its kind.

        Args:
            back: it was started before: it becomes the next of its kind.
        """
        groups, group = self._kinds[work.kind], work if work.group is None else work.group
        works = groups.setdefault(group, deque())
        if back:
            works.appendleft(work)
            groups.move_to_end(group, last=False)
        else:
            works.append(work)

    def pop(self) -> Work | None:
        """The next work; None: the queue is empty."""
        for groups in self._kinds:
            while groups:
                group, works = next(iter(groups.items()))
                work = works.popleft() if works else None  # an interrupt may leave an empty group
                if not works:
                    del groups[group]
                if work is not None:
                    return work
        return None

    def remove(self, work: Work) -> bool:
        """Remove work; False: it is not in the queue."""
        groups, group = self._kinds[work.kind], work if work.group is None else work.group
        works = groups.get(group)
        if works is None or work not in works:
            return False
        works.remove(work)
        if not works:
            del groups[group]
        return True

    def drop(self, kind: int, group: object) -> None:
        """Remove all work of a group."""
        self._kinds[kind].pop(group, None)

    def __len__(self) -> int:
        return sum(map(len, self.reads.values())) + sum(map(len, self._writes.values()))

    def all(self) -> list[Work]:
        """All queued work, in order."""
        return list(chain(*self.reads.values(), *self._writes.values()))


class RunningCall:
    """A call in flight."""

    def __init__(self, what: str, end: float, ours: bool, late: Callable[[], None] | None) -> None:
        self.what, self.end = what, end
        self.ours = ours
        """Whether a thread of the executor makes it; that thread is lost while the call is late."""
        self.late = False
        self._told = late

    def tell(self) -> None:
        """Tell the caller that the call is late; no lock is held."""
        if self._told is not None:
            self._told()


class Executor:
    """Threads, their queue and the calls they make. Cannot be used in a forked child."""

    def __init__(
        self, threads: int, name: str, *, spare: int = 8, clock: Clock = time.monotonic
    ) -> None:
        """Starts no thread: each is started when first needed. They are daemons, so that a hanging
        call does not keep the process alive.

        Args:
            threads: number of threads that work at a time.
            name: the threads' name in debuggers.
            spare: maximum number of threads that replace lost ones.
        """
        self.changed = Condition()
        self.queue = WorkQueue()
        self.calls: set[RunningCall] = set()
        self.threads: set[threading.Thread] = set()
        self._ready = Condition(self.changed.lock)
        self._look = Condition(self.changed.lock)
        """For a subclass with a watching thread."""
        self._looks_at = -math.inf
        """When the watching thread looks next; an earlier deadline wakes it."""
        self._most, self._spare, self._name, self._clock = threads, spare, name, clock
        self._idle = 0
        self._begun = 0
        self.closing = False
        self._process = os.getpid()

    @property
    def now(self) -> float:
        """The time by the executor's clock."""
        return self._clock()

    # ---- threads

    def start(self) -> None:
        """Start all threads now.

        Raises:
            RuntimeError: a thread could not be started; none is left running.
        """
        try:
            with self.changed:
                while len(self.threads) < self._most:
                    self._start_thread()
        except BaseException:
            self.close(math.inf)
            raise

    @property
    def lost(self) -> int:
        """The number of threads in late calls."""
        lost = 0
        with self.changed:
            for call in self.calls:
                lost += call.late and call.ours
        return lost

    @property
    def late(self) -> int:
        """The number of late calls, in any thread."""
        if self._process != os.getpid():  # before the lock, which may have been held at the fork
            return 0
        with self.changed:
            return sum(call.late for call in self.calls)

    def _start_thread(self) -> None:
        """Start one more thread; the lock is held."""
        self._begun += 1
        name = f"lightcache-{self._name}-{self._begun}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:  # around the adding as well: an interrupt may come after any line
            self.threads.add(thread)  # first: the thread looks itself up
            thread.start()
        except BaseException:
            if thread.ident is None:  # else it has started, and an interrupt came while we waited
                self.threads.discard(thread)
            raise

    def _ensure_thread(self) -> None:
        """Ensure that a thread will do the queued work; the lock is held.

        Raises:
            Exhausted: no thread is left for it.
        """
        if self._idle > len(self.queue):
            return
        lost = self.lost
        working = len(self.threads) - lost
        if working < self._most and len(self.threads) < self._most + self._spare:
            try:
                self._start_thread()
                working += 1
            except RuntimeError as error:  # the system starts no more threads
                if not working:
                    raise Exhausted(f"{self._name}: {error}") from error
        if not working:
            raise Exhausted(
                f"{self._name}: {lost} calls have not come back, and no thread is left for "
                "another; it is asked again when one of them returns"
            )

    def _serve(self) -> None:
        with self.changed:
            self.threads.add(threading.current_thread())
        while (work := self._next()) is not None:
            work.run()
            del work  # and with it everything the call holds

    def _next(self) -> Work | None:
        me = threading.current_thread()
        with self.changed:
            while True:
                threads = len(self.threads)
                surplus = threads > self._most and threads - self.lost > self._most
                work = None if surplus else self.queue.pop()
                if work is not None:
                    self.begun(work)
                    return work
                if surplus or self.closing:
                    self.threads.discard(me)
                    self.changed.notify_all()
                    return None
                self._idle += 1
                try:
                    self._ready.wait()
                finally:
                    self._idle -= 1

    def begun(self, work: Work) -> None:
        """Called when work leaves the queue to run; the lock is held. For subclasses."""

    # ---- work

    def put(self, work: Work, *, times: int = 1, back: bool = False) -> None:
        """Queue work.

        Args:
            times: how often it is run.
            back: it was started before: it becomes the next of its kind, even while closing.

        Raises:
            Exhausted: there is no thread for it, and none can be started.
            Detached: the executor is closed, or this is a forked child.
        """
        if self._process != os.getpid():
            raise Detached(f"{self._name}: its threads are the parent's; open it in this process")
        with self.changed:
            if self.closing and not back:
                raise Detached(f"{self._name}: closed")
            for _ in range(times):
                self._ensure_thread()
                self.queue.put(work, back=back)
            self._ready.notify(times)
            if work.end < self._looks_at:
                self._look.notify()

    def submit(
        self,
        run: Callable[[], T],
        seconds: float,
        *,
        what: str = "",
        after: Callable[[], None] | None = None,
        late: Callable[[], None] | None = None,
    ) -> Call[T]:
        """Have a thread make this call.

        Args:
            seconds: until it is late.
            after: called once, when the call has ended and was left; at once if it was left before
                it began.
            late: as in `call_here`; also called if the call is not started in time.
        """
        call = Call(self, run, self._clock() + seconds, what, after, late)
        self.put(call)
        return call

    def ask(self, run: Callable[[], T], deadline: Deadline) -> T:
        """Have a thread make this call, and return its result or raise its exception.

        Raises:
            TimeoutError: it did not end in time.
        """
        call = self.submit(run, deadline.left)
        try:
            if not call.wait(deadline):
                raise TimeoutError("no answer in time")
            return call.result()
        finally:
            call.leave()

    def run(self, pieces: Sequence[Callable[[], None]], kind: int, deadline: Deadline) -> None:
        """Have threads run these pieces. When the time is up, or on Ctrl-C, pieces that have not
        started are dropped; running ones are waited for, however long they take, as their memory
        is the caller's.

        Raises:
            Exhausted: there is no thread for them.
            Exception: raised by a piece; re-raised once no piece is running.
        """
        batch = _Pieces(self, pieces, kind, deadline)
        try:
            if pieces:
                self.put(batch, times=len(pieces))
            batch.wait()
        finally:
            batch.leave()
        batch.raise_error()

    def call_here(
        self,
        run: Callable[[], T],
        end: float,
        what: str = "",
        late: Callable[[], None] | None = None,
    ) -> T:
        """Make a call in this thread, which counts as lost while the call is late.

        Args:
            end: its deadline, by the executor's clock.
            late: called once, by the thread that finds the call late.

        Raises:
            Late: it returned or raised after it was found late.
        """
        call = RunningCall(what, end, threading.current_thread() in self.threads, late)
        try:  # around the adding as well: an interrupt may come after any line
            with self.changed:
                self.calls.add(call)
                if end < self._looks_at:
                    self._look.notify()
            return run()
        finally:
            with self.changed:
                self.calls.discard(call)
            if call.late and not isinstance(sys.exc_info()[1], _INTERRUPTS):
                raise Late

    # ---- deadlines

    def poll(self) -> None:
        """Find late calls and expired work, and tell their owners."""
        if self._process != os.getpid():
            return
        reason = ""
        late: list[RunningCall] = []
        expired: list[Work] = []
        with self.changed:
            now, waiting = self._clock(), self.queue.all()
            for call in self.calls:
                if not call.late and call.end <= now:
                    call.late = True
                    late.append(call)
            if waiting:
                expired = [work for work in waiting if work.end <= now]
                if late:
                    try:
                        self._ensure_thread()
                    except Exhausted as error:
                        expired, reason = waiting, str(error)
                expired = [work for work in expired if self.queue.remove(work)]
                self.expired(expired)
        for call in late:
            call.tell()
        for work in expired:
            work.expire("" if work.end <= now else reason)

    def expired(self, works: list[Work]) -> None:
        """Called for work that will not be started; the lock is held. For subclasses."""

    def pause(self) -> float | None:
        """Seconds until the next deadline; None: there is none. The lock is held."""
        first = math.inf
        for call in self.calls:
            if call.end < first and not call.late:
                first = call.end
        for work in self.queue.all():
            if work.end < first:
                first = work.end
        return None if first == math.inf else max(0.0, first - self._clock())

    # ---- closing

    def close(self, seconds: float) -> bool:
        """Accept no more work, finish the queue, end the threads. Does nothing in a forked child.

        Returns:
            True if all threads have ended. False: one is still in a call; call again to wait for
            it.
        """
        if self._process != os.getpid():
            return True
        with self.changed:
            self.closing = True
            self._ready.notify_all()
            threads = list(self.threads)
        deadline = Deadline(seconds)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(min(deadline.left, threading.TIMEOUT_MAX))
        return not any(thread.is_alive() for thread in threads)


class Call(Work, Generic[T]):
    """A call with a waiter: queued, in flight, ended, or left."""

    def __init__(
        self,
        executor: Executor,
        run: Callable[[], T],
        end: float,
        what: str,
        after: Callable[[], None] | None,
        late: Callable[[], None] | None,
    ) -> None:
        """For `Executor.submit`."""
        self.end = end
        self._what, self._late = what, late
        self._executor, self._run, self._after = executor, run, after
        self._changed = Condition()
        self._begun = self._ended = self._left = False
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """See `Work`."""
        with self._changed:
            if self._left:
                return
            self._begun = True
        with contextlib.suppress(Late):
            self._executor.call_here(self._called, self.end, self._what, self._late)
        if not self._wanted():
            self._give_back()

    def _called(self) -> None:
        try:
            self._result = self._run()
        except BaseException as error:  # for the waiter
            self._error = error

    def expire(self, reason: str) -> None:
        """See `Work`."""
        with self._changed:
            late = StorageError("timed out: not begun in time")
            self._error = self._error or (Exhausted(reason) if reason else late)
            self._begun = self._ended = True
            self._changed.notify_all()
            left = self._left
        if self._late is not None:
            self._late()
        if left:
            self._give_back()

    def _wanted(self) -> bool:
        """Mark it as ended. Returns whether its waiter is still there."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return not self._left

    @property
    def ended(self) -> bool:
        """True if it has returned or will not start."""
        return self._ended

    def wait(self, deadline: Deadline) -> bool:
        """Wait for its end; False: it did not end in time."""
        with self._changed:
            while not self._ended and not deadline.passed:  # a wait may end a little early
                self._changed.wait(min(deadline.left, threading.TIMEOUT_MAX))
            ended = self._ended
        if not ended:
            self._executor.poll()
        return ended

    def result(self) -> T:
        """The result of an ended call; raises the call's exception."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback keeps this frame and the waiter's views alive
        return self._result

    def leave(self) -> None:
        """Drop the result. Whatever the call holds is given back now, or when it returns."""
        with self._changed:
            if self._left:
                return
            self._left = True
            if self._begun and not self._ended:
                return
        self._give_back()

    def _give_back(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            after()


class _Pieces(Work):
    """The pieces of one `run`. It is queued once for each piece, and each time runs whichever piece
    is next."""

    def __init__(
        self,
        executor: Executor,
        pieces: Sequence[Callable[[], None]],
        kind: int,
        deadline: Deadline,
    ) -> None:
        self.kind, self.end = kind, executor.now + deadline.left
        self._executor, self._deadline = executor, deadline
        self._changed = Condition()
        self._waiting = deque(pieces)
        self._running = 0
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the next piece, if the time is not up."""
        with self._changed:
            if self._deadline.passed:
                self._waiting.clear()
            if not self._waiting:
                if not self._running:
                    self._changed.notify_all()
                return
            piece = self._waiting.popleft()
            self._running += 1
        error: BaseException | None = None
        try:
            self._executor.call_here(piece, self.end)
        except Late:
            pass
        except BaseException as found:  # for the caller: this thread serves others
            error = found
        with self._changed:
            # No second reference: its traceback keeps this frame and the caller's views alive.
            self._error, error = self._error or error, None
            self._running -= 1
            if not self._waiting and not self._running:  # notify once, not for each piece
                self._changed.notify_all()

    def expire(self, reason: str) -> None:
        """Start no more pieces."""
        with self._changed:
            self._waiting.clear()
            if reason:
                self._error = self._error or Exhausted(reason)
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all pieces are done or the time is up."""
        left = min(self._deadline.left, threading.TIMEOUT_MAX)
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting and not self._running, left)
        if not done:
            self._executor.poll()

    def leave(self) -> None:
        """Start no more pieces; wait for the running ones, even on Ctrl-C."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._executor.changed:
                    self._executor.queue.drop(self.kind, self)
                with self._changed:
                    self._waiting.clear()
                    self._changed.wait_for(lambda: not self._running)
                break
            except KeyboardInterrupt as found:
                interrupt = found
        if interrupt is not None:
            raise interrupt

    def raise_error(self) -> None:
        """Raise the first exception of a piece."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # as in `run`


__all__ = [
    "READ",
    "WRITE",
    "Call",
    "Executor",
    "Exhausted",
    "Late",
    "RunningCall",
    "Work",
    "WorkQueue",
]
