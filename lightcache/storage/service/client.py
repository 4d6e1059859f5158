"""StorageClient: a tier whose tasks run in the storage service of a cache."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from lightcache.cache import Cache
from lightcache.errors import (
    ConfigError,
    Detached,
    LightcacheError,
    LockTimeout,
    StorageError,
    WaitTimeout,
)
from lightcache.namespaces import Namespace
from lightcache.shm.waiting import Condition
from lightcache.storage.common import Clock, Deadline, log
from lightcache.storage.jobs import LastReady
from lightcache.storage.protocol import Keys
from lightcache.storage.service import board
from lightcache.storage.service.board import Board, Service, ServiceStats, stats_of, tier_stats
from lightcache.storage.service.messages import (
    MOST_KEYS,
    Answer,
    Ask,
    Kind,
    Malformed,
    Part,
    split,
)
from lightcache.storage.tasks import (
    StorageTask,
    TaskProgress,
    TaskState,
    TierStats,
)
from lightcache.storage.tier import BaseTier, check_cache

HELD = 1.0  # seconds without calls after a stopped process held the ring's lock
SLICE = 0.05  # seconds of waiting for an answer between checks of the service
_AT_ONCE = 64  # answers


class Pulse:
    """Detects a stopped service. A service that reads its messages increments a word of the board
    four times a second; a stopped one is not asked until it increments the word again."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        """
        Args:
            seconds: time without an increment after which the service counts as stopped.
        """
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._silent = False

    def silent(self, service: Service, beat: int) -> str:
        """Why the service is not asked; empty: it is. Logs when it becomes silent.

        Args:
            beat: the current value of the word.
        """
        with self._lock:
            now = self._clock()
            if self._seen != (service.word, beat):
                self._seen, self._since = (service.word, beat), now
            was, self._silent = self._silent, now - self._since > self._seconds
            if not self._silent:
                return ""
        why = (
            f"the storage service (pid {service.pid}) has not looked at its messages for "
            f"{self._seconds:g} s, as if it was stopped; it is asked again when it does"
        )
        if not was:
            log.warning("%s", why)
        return why


class ClientTask:
    """The client's side of a task: its `TaskOwner`."""

    def __init__(
        self,
        client: StorageClient,
        number: int,
        progress: TaskProgress,
        deadline: Deadline,
        service: Service,
        grace: float,
    ) -> None:
        """Pushes nothing yet.

        Args:
            grace: the sum of the service's and the client's.
        """
        self.number, self.progress, self.task = number, progress, StorageTask(progress)
        self.deadline, self.service = deadline, service
        self._client, self._grace = client, grace
        self.end = Deadline(deadline.left + self._grace, client.clock)
        """When the task is given up if the service has not answered."""
        progress.owner = self

    def advanced(self) -> None:
        """The task has advanced: a write gets its whole time again, see `WriteJob`."""
        if self.progress.kind == "write":
            self.end = Deadline(self.deadline.timeout + self._grace, self._client.clock)

    def stop(self) -> None:
        """See `StorageTask.stop`."""
        self._client.tell(Kind.STOP, self)

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""
        if not self.task.ended and not self._client.tell(Kind.CANCEL, self):
            self._client.give_up(self, "cancelled; the storage service could not be told")

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        raise ConfigError("publish: this task holds nothing; see `StorageClient.prefetch`")


class StorageClient(BaseTier):
    """Asks the storage service of a cache. The service may run in this process or another, and may
    start later.

    Every call pushes a message and returns. Without a service, tasks are FAILED at once, with one
    warning; each call looks for a service again. The service decides for all its clients which
    pages are worth writing and how reads wait, and it keeps the statistics.

    A `write` pins nothing: the service pins the pages when it takes the message out, and pages
    evicted before count as skipped. Keep a lease until the task is running if all pages should be
    written. A `prefetch` with `hold` raises ConfigError: the service holds no pages for its
    clients.

    Close it before the cache. It cannot be used in a forked child.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        timeout: float = 30.0,
        grace: float = 1.0,
        silence: float = 2.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Attaches to the board and the ring of tasks, and creates a ring for its answers.

        Args:
            timeout: seconds that a task may take, from `write` or `prefetch` on.
            grace: seconds after that, and after the service's own grace, until a task that the
                service has not answered is given up.
            silence: seconds without the service reading its messages after which its tasks are
                given up. It is not asked until it reads them again.
            clock: in seconds; CLOCK_MONOTONIC except in tests, as the service uses the same.

        Raises:
            ConfigError: `cache` is not a Cache, or an argument is out of range.
            Detached: the cache is closed.
            InUse: living clients have all 63 slots of the service's ring.
            LightcacheError: the segments in shared memory are from another release.
        """
        for name, seconds in (("timeout", timeout), ("grace", grace), ("silence", silence)):
            if Deadline(seconds, clock, name).timeout < 0:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        check_cache(cache)
        self.cache, self.timeout, self.grace, self.clock = cache, timeout, grace, clock
        self._page_tokens = cache.index.segment.config.get("page_tokens")
        self._pulse = Pulse(silence, clock)
        self._missing = False  # the warning that there is no service was logged
        self._pid, self._client = os.getpid(), secrets.randbits(64)
        self._numbers = itertools.count(1)
        self._held_until = 0.0  # until then no calls: another process held the ring's lock
        self._pushing = threading.Lock()  # keeps the parts of a task together
        self._changed = Condition()
        self._asked: dict[int, ClientTask] = {}
        self._local: Counter[str] = Counter()
        self._closing = False
        with contextlib.ExitStack() as stack:
            self._board = Board.open(cache)
            stack.callback(self._board.close)
            self._tasks = board.tasks_ring(cache, board.ASKING_SECONDS)
            stack.callback(self._tasks.close)
            self._answers = board.make_answers(cache, self._pid, self._client)
            stack.callback(self._answers.close)
            self._thread = threading.Thread(
                target=self._listen, name="lightcache-storage-client", daemon=True
            )
            self._thread.start()
            stack.pop_all()

    # ---- the calls

    def _start_write(
        self,
        keys: Keys,
        request: object,
        tokens: int,
        namespace: Namespace | None,
        deadline: Deadline,
    ) -> StorageTask:
        how: dict[str, Any] = {
            "tokens": tokens,
            "request": None if request is None else hash(request) & 0xFFFFFFFFFFFFFFFF,
        }
        return self._ask(Kind.WRITE, keys, deadline, namespace, **how)

    def _start_read(
        self,
        keys: Keys,
        start: int,
        hold: bool,
        namespace: Namespace | None,
        deadline: Deadline,
    ) -> StorageTask:
        if hold:
            raise ConfigError(
                "hold: expected False, as the storage service holds no pages for its clients; open "
                "the storage embedded in this process, by StorageTier.open"
            )
        return self._ask(Kind.PREFETCH, keys, deadline, namespace, start=start)

    def _start_last_ready(
        self,
        keys: Keys,
        wanted: LastReady,
        namespace: Namespace | None,
        deadline: Deadline,
    ) -> StorageTask:
        return self._ask(Kind.LAST_READY, keys, deadline, namespace, **vars(wanted))

    # ---- asking

    def _deadline_of(self, timeout: float | None, namespace: Namespace | None) -> Deadline:
        self.cache.index.segment.check_usable()
        if self._closing:
            raise Detached("this storage client was closed; make another one")
        if namespace is not None and not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {namespace!r}")
        return Deadline(self.timeout if timeout is None else timeout, self.clock)

    def _ask(
        self,
        kind: Kind,
        keys: Keys,
        deadline: Deadline,
        namespace: Namespace | None,
        *,
        start: int = 0,
        **how: Any,
    ) -> StorageTask:
        """Push a task. If that is not possible, the task is FAILED."""
        pages = len(keys) - start
        progress = TaskProgress("write" if kind is Kind.WRITE else "read", pages, self._page_tokens)
        space = self.cache.index.default_namespace if namespace is None else namespace
        end = self.clock() + deadline.left
        ask = Ask(end, deadline.timeout, keys, space, start=start, **how)
        try:
            service = self._serving()
            grace = self._board.grace + self.grace
            task = ClientTask(self, next(self._numbers), progress, deadline, service, grace)
            parts = split(kind, self._pid, self._client, task.number, _body(ask))
        except (StorageError, Detached) as error:
            return self._refuse(progress, str(error))
        try:
            with self._changed:
                if self._closing:
                    raise Detached("the storage client was closed")
                self._asked[task.number] = task
            self._push(parts)
        except LightcacheError as error:
            if isinstance(error, LockTimeout):  # of a stopped process: spare later calls the wait
                self._held_until = time.monotonic() + HELD
            self._forget(task)
            return self._refuse(progress, f"the storage service cannot be asked: {error}")
        except BaseException:
            self._forget(task)
            raise
        with self._changed:  # after the push: the listening thread does not delay it
            self._missing = False
            self._changed.notify_all()
        return task.task

    def _serving(self) -> Service:
        """The service to ask.

        Raises:
            StorageError: there is none; the message says why.
            Detached: the board was removed.
        """
        name = self.cache.name
        service = self._board.service()
        if service is None or not self._board.open_for_tasks:
            why = (
                f"no storage service serves {name!r}; `lightcache storage {name} --url ...` "
                "starts one"
            )
            with self._changed:
                first, self._missing = not self._missing, True
            if first:
                log.warning("%s", why)
            raise StorageError(why)
        if reason := self._pulse.silent(service, self._board.beat):
            raise StorageError(reason)
        if time.monotonic() < self._held_until:
            raise StorageError("another process holds the lock of the storage service's ring")
        return service

    def _refuse(self, progress: TaskProgress, reason: str) -> StorageTask:
        progress.owner = None
        progress.count(failed=progress.pages)
        self._end(progress, reason)
        return StorageTask(progress)

    def _push(self, parts: list[bytes]) -> None:
        """Push parts into the service's ring.

        Raises:
            WaitTimeout: there is no room; the service drops the parts that were pushed.
            Detached: called in a forked child. Raised before taking a lock, which may have been
                held at the fork.
        """
        if os.getpid() != self._pid:
            raise Detached("this storage client belongs to the process that forked us; make one")
        with self._pushing:
            if len(parts) == 1:
                self._tasks.push(parts[0], timeout=0)
                return
            while parts:
                pushed = self._tasks.push_many(parts)
                if not pushed:
                    raise WaitTimeout("its queue is full")
                parts = parts[pushed:]

    def tell(self, kind: Literal[Kind.STOP, Kind.CANCEL], task: ClientTask) -> bool:
        """For `ClientTask`: push a message about a task; False: that failed."""
        part = Part(kind, self._pid, self._client, task.number, 0, 1, b"")
        try:
            self._push([part.pack()])
        except LightcacheError:
            return False
        return True

    # ---- listening

    def _listen(self) -> None:
        looked = 0.0
        while self._wait_for_work():
            self._try(lambda: self._hear_all(self._messages()))
            if time.monotonic() - looked >= SLICE:
                looked = time.monotonic()
                self._try(self._look)

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step. A step that fails may fail each time: it must neither block the other step
        nor keep a processor busy."""
        try:
            step()
        except LightcacheError as error:  # the segments were removed, or are broken
            for task in self._all_asked():
                self.give_up(task, f"the storage service cannot be heard: {error}")
            time.sleep(SLICE)
        except Exception:  # our own bug: other tasks should continue
            log.exception("the storage service could not be listened to")
            time.sleep(SLICE)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._closing)
            return bool(self._asked)

    def _messages(self) -> list[bytes]:
        try:
            return self._answers.pop_many(_AT_ONCE) or [self._answers.pop(timeout=SLICE)]
        except (WaitTimeout, LockTimeout):
            return []

    def _hear_all(self, messages: list[bytes]) -> None:
        for message in messages:
            try:
                self._hear(message)
            except Exception:  # our own bug: the others answer other tasks
                log.exception("a message of the storage service could not be used")

    def _hear(self, message: bytes) -> None:
        try:
            answer = Answer.unpack(message)
        except Malformed as error:
            log.warning("a malformed answer of the storage service was ignored: %s", error)
            return
        with self._changed:
            task = self._asked.get(answer.task)
        if task is None:
            return  # given up meanwhile
        if answer.state in (TaskState.FINISHED, TaskState.FAILED):
            self._forget(task)
        elif answer.prefix > task.progress.prefix:
            task.advanced()
        task.progress.replace(answer.state, answer.prefix, answer.counts, answer.reasons)

    def _look(self) -> None:
        """Give up tasks whose service is gone or silent, and overdue ones."""
        every = self._all_asked()
        service = self._board.service()  # after the list: a later task may be for the next service
        silent = ""
        if service is not None and self._board.open_for_tasks:  # a closing one does not count
            silent = self._pulse.silent(service, self._board.beat)
        lost = [(task, why) for task in every if (why := self._lost(task, service) or silent)]
        if lost:
            # The ring may hold answers from before the service ended, or from the time in which
            # this process was stopped.
            self._drain()
        for task, why in lost:
            self.give_up(task, why)

    def _lost(self, task: ClientTask, service: Service | None) -> str:
        """Why the task is given up; empty: it is not."""
        if service is None or service.word != task.service.word:
            message = f"the storage service of {self.cache.name!r} is gone"
            return f"{message} (pid {task.service.pid})"
        if task.end.passed:
            silent = f"the storage service (pid {service.pid}) does not say how far it is"
            return f"{task.deadline.reason}; {silent}"
        return ""

    def _drain(self) -> None:
        """Process the answers in the ring. Bounded, as the service may keep answering."""
        for _ in range(board.ANSWERS // _AT_ONCE):
            try:
                messages = self._answers.pop_many(_AT_ONCE)
            except LockTimeout:
                return
            self._hear_all(messages)
            if not messages:
                return

    def _all_asked(self) -> list[ClientTask]:
        with self._changed:
            return list(self._asked.values())

    def give_up(self, task: ClientTask, reason: str) -> None:
        """End a task as FAILED, unless it has ended."""
        if self._forget(task):
            self._end(task.progress, reason)

    def _forget(self, task: ClientTask) -> bool:
        with self._changed:
            known = self._asked.pop(task.number, None) is not None
            self._changed.notify_all()
            return known

    def _end(self, progress: TaskProgress, reason: str) -> None:
        with self._changed:
            self._local.update(tasks_failed=1, failed=progress.result.failed)
        progress.end(reason, failed=True)

    # ---- inspection, closing

    def service(self) -> ServiceStats:
        """Statistics of the service. Takes no lock and sends no message."""
        return stats_of(self._board)

    def stats(self) -> TierStats:
        """Totals of the service's tier, for all of its clients. `failed` and `tasks_failed` include
        the tasks that this client could not push or gave up."""
        stats = tier_stats(self._board.read(), self._board.service() is not None)
        with self._changed:
            local = self._local
            failed, tasks = stats.failed + local["failed"], local["tasks_failed"]
            return replace(stats, failed=failed, tasks_failed=stats.tasks_failed + tasks)

    def take_figures(self) -> Counter[str]:
        """See `BaseTier`. Each increase of the service's totals goes to only one of its clients."""
        try:
            return self._board.give()
        except Detached:
            return Counter()

    def close(self, timeout: float = 10.0) -> bool:
        """See `BaseTier`. Waits for the tasks of this client. Tasks left then are cancelled and
        FAILED; they may still run in the service, which continues."""
        if os.getpid() != self._pid:
            return True
        seconds = min(Deadline(timeout).timeout, threading.TIMEOUT_MAX)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._asked, seconds)
        sent = True
        for task in self._all_asked():  # wait only once for a stopped process with the ring's lock
            sent = sent and self.tell(Kind.CANCEL, task)
            self.give_up(task, "the storage client was closed")
        self._thread.join()
        self._answers.close()
        with self._pushing:  # after a push in flight
            self._tasks.close()
        self._board.close()
        return True

    def __repr__(self) -> str:
        return f"<StorageClient of {self.cache.name!r}>"


def _body(ask: Ask) -> bytes:
    """The message's body. Raises StorageError if it is larger than the ring takes."""
    keys = len(ask.keys)
    if keys > MOST_KEYS:
        raise StorageError(f"{keys} keys are more than one task may have, {MOST_KEYS}")
    return ask.pack()


__all__ = ["ClientTask", "Pulse", "StorageClient"]
