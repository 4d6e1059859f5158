"""The threads that call storages: calls that may not return, each with an end of its time.

Python cannot break a call off. A call that has not returned at its end is late: its waiter is told,
and its thread counts as lost until it returns. A lost thread is replaced, by `spare` threads at
most; beyond that work is refused at once (`Exhausted`). What a call uses, pages of a pool above
all, stays its own until it returns, late or not: its caller sees to that, by `after` or `Late`.

Reads go before writes. Work of one group stands together.

Data, all of it under `changed`: the queue; the threads; the calls in flight, each with its end. A
call goes from the queue to a thread, may become late there, and ends when it returns.
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
from lightcache.storage.arguments import Clock, Deadline

T = TypeVar("T")
READ, WRITE = 0, 1
_INTERRUPTS = (KeyboardInterrupt, SystemExit)


class Exhausted(StorageError):
    """Too many calls have not returned: there is no thread for another one."""


class Late(Exception):
    """A call has returned after its end: its result is not used."""


class Work:
    """Work for a thread; in the queue until one takes it."""

    kind = READ
    end = math.inf
    """By the executor's clock: after it the work is not started."""

    @property
    def group(self) -> object:
        """Of one kind, work of one group stands together in the queue."""
        return self

    def run(self) -> None:
        """Do it, in a thread of the executor. Raises nothing."""
        raise NotImplementedError

    def expire(self, reason: str) -> None:
        """It will not be started; no lock is held. An empty reason: its time is up."""


class WorkQueue:
    """Reads before writes, groups in the order of their first. Under the executor's lock."""

    def __init__(self) -> None:
        """Empty."""
        self._kinds: tuple[OrderedDict[object, deque[Work]], ...] = (OrderedDict(), OrderedDict())

    def put(self, work: Work) -> None:
        """After all others of its kind, or of its group."""
        self._kinds[work.kind].setdefault(work.group, deque()).append(work)

    def put_back(self, work: Work) -> None:
        """Work that was started: it is the next of its kind."""
        groups = self._kinds[work.kind]
        groups.setdefault(work.group, deque()).appendleft(work)
        groups.move_to_end(work.group, last=False)

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
        """Take it out; False: it is not here."""
        groups = self._kinds[work.kind]
        works = groups.get(work.group)
        if works is None or work not in works:
            return False
        works.remove(work)
        if not works:
            del groups[work.group]
        return True

    def drop(self, kind: int, group: object) -> None:
        """Take all work of a group out."""
        self._kinds[kind].pop(group, None)

    def __len__(self) -> int:
        reads, writes = self._kinds
        return sum(map(len, reads.values())) + sum(map(len, writes.values()))

    @property
    def reads(self) -> int:
        """Groups of reads that wait."""
        return len(self._kinds[READ])

    def all(self) -> list[Work]:
        """All work that waits, the next first."""
        reads, writes = self._kinds
        return list(chain(*reads.values(), *writes.values()))


class Running:
    """A call in flight."""

    def __init__(self, what: str, end: float, ours: bool, late: Callable[[], None] | None) -> None:
        self.what, self.end = what, end
        self.ours = ours
        """Made by a thread of the executor, which is lost while the call is late."""
        self.late = False
        self._told = late

    def tell(self) -> None:
        """Tell the caller that it is late; no lock is held."""
        if self._told is not None:
            self._told()


class Executor:
    """Threads, their queue, and the calls that they make. Not for forked children."""

    def __init__(
        self, threads: int, name: str, *, spare: int = 8, clock: Clock = time.monotonic
    ) -> None:
        """No thread yet: each is started when it is first needed, as a daemon, since a call that
        hangs is no reason to keep the process alive.

        Args:
            threads: that work at a time.
            name: of the threads, as debuggers show it.
            spare: threads that replace lost ones, at most.
        """
        self.changed = Condition()
        self.queue = WorkQueue()
        self.calls: set[Running] = set()
        self.threads: set[threading.Thread] = set()
        self._ready = Condition(self.changed.lock)
        self._most, self._spare, self._name, self._clock = threads, spare, name, clock
        self._idle = 0
        self._begun = 0
        self.closing = False
        self._process = os.getpid()

    @property
    def now(self) -> float:
        """By its clock."""
        return self._clock()

    # ---- threads

    def start(self) -> None:
        """All threads now.

        Raises:
            RuntimeError: no more threads here; none is left.
        """
        try:
            with self.changed:
                while len(self.threads) < self._most:
                    self._hire()
        except BaseException:
            self.close(math.inf)
            raise

    @property
    def lost(self) -> int:
        """Threads in calls that are late."""
        lost = 0
        with self.changed:
            for call in self.calls:
                lost += call.late and call.ours
        return lost

    @property
    def late(self) -> int:
        """Calls that are late, in whatever thread."""
        if self._process != os.getpid():  # before the lock, which may have been held at the fork
            return 0
        with self.changed:
            return sum(call.late for call in self.calls)

    def _hire(self) -> None:
        """One more thread; the lock is held."""
        self._begun += 1
        name = f"lightcache-{self._name}-{self._begun}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:  # around the adding as well: an interrupt may come after any line
            self.threads.add(thread)  # first: it looks for itself
            thread.start()
        except BaseException:
            if thread.ident is None:  # else it has begun, and an interrupt came while we waited
                self.threads.discard(thread)
            raise

    def _staff(self) -> None:
        """See that a thread does what waits; the lock is held.

        Raises:
            Exhausted: none will.
        """
        if self._idle > len(self.queue):
            return
        lost = self.lost
        working = len(self.threads) - lost
        if working < self._most and len(self.threads) < self._most + self._spare:
            try:
                self._hire()
                working += 1
            except RuntimeError as error:  # no more threads here
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
            del work  # and with it what the call holds

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
        """Work was taken out of the queue; the lock is held. For subclasses."""

    def due(self, end: float) -> None:
        """A call or work has come that may be late at `end`; the lock is held. For subclasses."""

    # ---- work

    def put(self, work: Work, *, back: bool = False) -> None:
        """Have this done.

        Raises:
            Exhausted: there is no thread for it, and none will be started.
            Detached: closed; or in a forked child.
        """
        if self._process != os.getpid():
            raise Detached(f"{self._name}: its threads are the parent's; open it in this process")
        with self.changed:
            if self.closing and not back:
                raise Detached(f"{self._name}: closed")
            self._staff()
            if back:
                self.queue.put_back(work)
            else:
                self.queue.put(work)
            self._ready.notify()
            self.due(work.end)

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
            after: called once when nothing is done for it any more: right away if it is left
                before it began.
            late: as of `here`; also told when it is not begun in time.
        """
        call = Call(self, run, self._clock() + seconds, what, after, late)
        self.put(call)
        return call

    def ask(self, run: Callable[[], T], deadline: Deadline) -> T:
        """Have a thread make this call, and wait for what it returns or raises.

        Raises:
            TimeoutError: not in time.
        """
        call = self.submit(run, deadline.left)
        try:
            if not call.wait(deadline):
                raise TimeoutError("no answer in time")
            return call.result()
        finally:
            call.leave()

    def run(self, pieces: Sequence[Callable[[], None]], kind: int, deadline: Deadline) -> None:
        """Have these done. When the time is up, what has not begun is left out; what has begun is
        waited for, however long it takes: its memory is the caller's. So it is when Ctrl-C comes.

        Raises:
            Exhausted: there is no thread for them.
            Exception: what a piece raised, when none of them runs any more.
        """
        batch = _Batch(self, pieces, kind, deadline)
        try:
            for _ in pieces:
                self.put(_Turn(batch))
            batch.wait()
        finally:
            batch.leave()
        batch.raise_error()

    def here(
        self,
        run: Callable[[], T],
        end: float,
        what: str = "",
        late: Callable[[], None] | None = None,
    ) -> T:
        """Make a call in this thread, which is lost while it is late.

        Args:
            end: of its time, by the executor's clock.
            late: called once, by the thread that finds it late.

        Raises:
            Late: it has returned, or raised, and was late by then.
        """
        call = Running(what, end, threading.current_thread() in self.threads, late)
        try:  # around the adding as well: an interrupt may come after any line
            with self.changed:
                self.calls.add(call)
                self.due(end)
            return run()
        finally:
            with self.changed:
                self.calls.discard(call)
            if call.late and not isinstance(sys.exc_info()[1], _INTERRUPTS):
                raise Late

    # ---- what is late

    def poll(self) -> None:
        """Find out what is late: tell of the calls, and of work that is not started any more."""
        if self._process != os.getpid():
            return
        reason = ""
        late: list[Running] = []
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
                        self._staff()
                    except Exhausted as error:
                        expired, reason = waiting, str(error)
                expired = [work for work in expired if self.queue.remove(work)]
                self.expired(expired)
        for call in late:
            call.tell()
        for work in expired:
            work.expire("" if work.end <= now else reason)

    def expired(self, works: list[Work]) -> None:
        """Work that will not be started; the lock is held. For subclasses."""

    def pause(self) -> float | None:
        """Seconds until something is late; None: not until something changes. The lock is held."""
        first = math.inf
        for call in self.calls:
            if call.end < first and not call.late:
                first = call.end
        for work in self.queue.all():
            if work.end < first:
                first = work.end
        return None if first == math.inf else max(0.0, first - self._clock())

    # ---- the end

    def close(self, seconds: float) -> bool:
        """Take nothing more, do what waits, end the threads. In a forked child nothing is done.

        Returns:
            Whether they have ended. False: one is still in a call; call again to wait for it.
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
            self._executor.here(self._called, self.end, self._what, self._late)
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
        """It has ended; whether its waiter is still there."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return not self._left

    @property
    def ended(self) -> bool:
        """Whether it has returned, or will not begin."""
        return self._ended

    def wait(self, deadline: Deadline) -> bool:
        """Whether it ends in time."""
        with self._changed:
            while not self._ended and not deadline.passed:  # a wait may end a little early
                self._changed.wait(min(deadline.left, threading.TIMEOUT_MAX))
            ended = self._ended
        if not ended:
            self._executor.poll()
        return ended

    def result(self) -> T:
        """Of one that has ended; raises what the call raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame, and views of the waiter
        return self._result

    def leave(self) -> None:
        """Nobody wants its result any more. What it holds is given back now, or when it returns."""
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


class _Batch:
    """Pieces of one `run`. The queue has a turn for each, not the pieces themselves."""

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

    def turn(self) -> None:
        """Do the next piece, if it is still wanted."""
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
            self._executor.here(piece, self.end)
        except Late:
            pass
        except BaseException as found:  # told to the caller: this thread has others to serve
            error = found
        with self._changed:
            # Not kept here as well: its traceback has this frame, and views of the caller's.
            self._error, error = self._error or error, None
            self._running -= 1
            if not self._waiting and not self._running:  # once, not for each piece
                self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Nothing more begins."""
        with self._changed:
            self._waiting.clear()
            if reason:
                self._error = self._error or Exhausted(reason)
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all is done, or the time is up."""
        left = min(self._deadline.left, threading.TIMEOUT_MAX)
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting and not self._running, left)
        if not done:
            self._executor.poll()

    def leave(self) -> None:
        """Nothing more begins; wait for what has begun, Ctrl-C or not."""
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
        """The first that a piece raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # as in `turn`


class _Turn(Work):
    """Of one piece of a batch, whichever is next."""

    def __init__(self, batch: _Batch) -> None:
        self.kind, self.end, self._batch = batch.kind, batch.end, batch

    @property
    def group(self) -> object:
        return self._batch

    def run(self) -> None:
        self._batch.turn()

    def expire(self, reason: str) -> None:
        self._batch.fail(reason)


__all__ = ["READ", "WRITE", "Call", "Executor", "Exhausted", "Late", "Running", "Work", "WorkQueue"]
