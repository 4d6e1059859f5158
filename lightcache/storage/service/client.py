"""StorageClient: a tier whose tasks run in the storage service of a cache."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from lightcache.storage.protocol import Keys
from lightcache.storage.service import board
from lightcache.storage.service.board import Board, Service, ServiceStats
from lightcache.storage.service.messages import MOST_KEYS, Answer, Ask, Malformed, split
from lightcache.storage.tasks import StorageTask, TaskProgress, TaskState, TierStats
from lightcache.storage.tier import BaseTier, Call, check_cache

HELD = 1.0  # seconds without calls after a stopped process held the ring's lock
SLICE = 0.05  # seconds of waiting for an answer between checks of the service
_AT_ONCE = 64  # answers


@dataclass(eq=False)
class ClientTask:
    """The client's side of a task: its `TaskOwner`."""

    client: StorageClient
    number: int
    progress: TaskProgress
    deadline: Deadline
    service: Service
    end: Deadline
    """When the task is given up if the service has not answered."""

    def stop(self) -> None:
        """See `StorageTask.stop`."""
        if not self.progress.ended:
            self.client.tell("stop", self)

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""
        if not self.progress.ended and not self.client.tell("cancel", self):
            self.client.give_up(self, "cancelled; the storage service could not be told")

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
        self._silence = silence
        self._warned = ""  # why the service is not asked, as it was logged
        self._pid = os.getpid()
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
            self._client = board.client_word(self._tasks.segment)
            self._answers = board.answers_ring(cache, self._tasks, self._client)
            stack.callback(self._answers.close)
            self._thread = threading.Thread(
                target=self._listen, name="lightcache-storage-client", daemon=True
            )
            self._thread.start()
            stack.pop_all()

    # ---- asking

    def _deadline_of(self, timeout: float | None, namespace: Namespace | None) -> Deadline:
        self.cache.index.segment.check_usable()
        if self._closing:
            raise Detached("this storage client was closed; make another one")
        if namespace is not None and not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {namespace!r}")
        return Deadline(self.timeout if timeout is None else timeout, self.clock)

    def _start(
        self,
        call: Call,
        keys: Keys,
        namespace: Namespace | None,
        deadline: Deadline,
        **how: Any,
    ) -> StorageTask:
        """Push a task. If that is not possible, the task is FAILED."""
        if how.pop("hold", False):
            raise ConfigError(
                "hold: expected False, as the storage service holds no pages for its clients; open "
                "the storage embedded in this process, by StorageTier.open"
            )
        how.pop("rows", None)  # token ids are more than a message has room for
        if how.get("request") is not None:  # that of another client is another request
            how["request"] = hash((self._client, how["request"]))
        space = self.cache.index.default_namespace if namespace is None else namespace
        ask = Ask(call, self.clock() + deadline.left, keys, space, how)
        progress, number = TaskProgress(ask.kind, ask.pages, self._page_tokens), next(self._numbers)
        try:
            service = self._serving()
            if len(keys) > MOST_KEYS:
                raise StorageError(f"{len(keys)} keys are more than one task may have, {MOST_KEYS}")
            last = self._patient(deadline.left)
            task = progress.owner = ClientTask(self, number, progress, deadline, service, last)
            with self._changed:
                if self._closing:
                    raise Detached("the storage client was closed")
                self._asked[number] = task
            self._push(split(self._client, number, ask.pack()))
        except BaseException as error:
            self._forget(number)
            if not isinstance(error, LightcacheError):
                raise
            if isinstance(error, LockTimeout):  # of a stopped process: spare later calls the wait
                self._held_until = time.monotonic() + HELD
            progress.owner = None
            before = (
                "" if isinstance(error, StorageError) else "the storage service cannot be asked: "
            )
            self._end(progress, f"{before}{error}")
        with self._changed:  # after the push: the listening thread does not delay it
            self._changed.notify_all()
        return StorageTask(progress)

    def _patient(self, seconds: float) -> Deadline:
        """The end of a task's time, of `grace`, and of that of the service."""
        return Deadline(seconds + self.grace + self._board.load("grace_us") / 1e6, self.clock)

    def _serving(self) -> Service:
        """The service to ask.

        Raises:
            StorageError: there is none; the message says why. Logged once.
            Detached: the board was removed.
        """
        name, service = self.cache.name, self._board.service()
        if service is None or not self._board.load("serving"):
            why = (
                f"no storage service serves {name!r}; `lightcache storage {name} --url ...` "
                "starts one"
            )
        else:
            why = self._silent(service)
        with self._changed:
            first, self._warned = why != self._warned, why
        if why and first:
            log.warning("%s", why)
        if time.monotonic() < self._held_until:
            why = why or "another process holds the lock of the storage service's ring"
        if why or service is None:
            raise StorageError(why)
        return service

    def _silent(self, service: Service) -> str:
        """Why a service counts as stopped: it has not looked at its messages for long. Empty: it
        does not; one that closes is not judged."""
        late = self.clock() - self._board.load("looked_us") / 1e6 > self._silence
        if not late or not self._board.load("serving"):
            return ""
        return (
            f"the storage service (pid {service.pid}) has not looked at its messages for "
            f"{self._silence:g} s, as if it was stopped; it is asked again when it does"
        )

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
            while parts:
                pushed = self._tasks.push_many(parts)
                if not pushed:
                    raise WaitTimeout("its queue is full")
                parts = parts[pushed:]

    def tell(self, call: Literal["stop", "cancel"], task: ClientTask) -> bool:
        """For `ClientTask`: push a message about a task; False: that failed."""
        try:
            self._push(split(self._client, task.number, Ask(call).pack()))
        except LightcacheError:
            return False
        return True

    # ---- listening

    def _listen(self) -> None:
        while self._wait_for_work():
            try:
                lost = self._lost()
                # What the ring has comes first: answers from before the service ended, or from the
                # time in which this process was stopped.
                if not self._hear(0.0 if lost else SLICE):
                    for task, why in lost:
                        self.give_up(task, why)
            except Exception as error:  # the segments were removed or are broken, or our own bug
                if not isinstance(error, LightcacheError):
                    log.exception("the storage service could not be listened to")
                for task in self._all_asked():
                    self.give_up(task, f"the storage service cannot be heard: {error}")
                time.sleep(SLICE)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._closing)
            return bool(self._asked)

    def _hear(self, timeout: float) -> bool:
        """Process some answers; wait for one. False: none came."""
        messages: list[bytes] = []
        with contextlib.suppress(WaitTimeout, LockTimeout):
            messages = self._answers.pop_many(_AT_ONCE) or [self._answers.pop(timeout=timeout)]
        for message in messages:
            try:
                answer = Answer.unpack(message)
            except Malformed as error:
                log.warning("a malformed answer of the storage service was ignored: %s", error)
                continue
            with self._changed:
                task = self._asked.get(answer.task)
            if task is None:
                continue  # given up meanwhile
            if answer.state in (TaskState.FINISHED, TaskState.FAILED):
                self._forget(task.number)
            elif answer.prefix > task.progress.prefix and task.progress.kind == "write":
                # It gets its whole time again, see `WriteJob`.
                task.end = self._patient(task.deadline.timeout)
            task.progress.replace(answer.state, answer.prefix, answer.counts, answer.reasons)
        return bool(messages)

    def _lost(self) -> list[tuple[ClientTask, str]]:
        """The tasks to give up, and why: their service is gone or silent, or they are overdue."""
        every = self._all_asked()
        service = self._board.service()  # after the list: a later task may be for the next service
        silent = "" if service is None else self._silent(service)
        lost = []
        for task in every:
            if service is None or service.word != task.service.word:
                gone = f"the storage service of {self.cache.name!r} is gone"
                lost.append((task, f"{gone} (pid {task.service.pid})"))
            elif task.end.passed:
                mute = f"the storage service (pid {service.pid}) does not say how far it is"
                lost.append((task, f"{task.deadline.reason}; {mute}"))
            elif silent:
                lost.append((task, silent))
        return lost

    def _all_asked(self) -> list[ClientTask]:
        with self._changed:
            return list(self._asked.values())

    def give_up(self, task: ClientTask, reason: str) -> None:
        """End a task as FAILED, unless it has ended."""
        if self._forget(task.number):
            self._end(task.progress, reason)

    def _forget(self, number: int) -> bool:
        with self._changed:
            known = self._asked.pop(number, None) is not None
            self._changed.notify_all()
            return known

    def _end(self, progress: TaskProgress, reason: str) -> None:
        """End a task as FAILED. Its pages that no answer has counted have failed."""

        def count(pages: Mapping[str, int]) -> None:
            progress.count(failed=progress.pages - sum(pages.values()))
            with self._changed:
                self._local.update(tasks_failed=1, failed=pages["failed"])

        progress.end(reason, failed=True, count=count)

    # ---- inspection, closing

    def service(self) -> ServiceStats:
        """Statistics of the service. Takes no lock and sends no message."""
        return self._board.stats()

    def stats(self) -> TierStats:
        """Totals of the service's tier, for all of its clients. `failed` and `tasks_failed` include
        the tasks that this client could not push or gave up."""
        tier = self._board.stats().tier
        with self._changed:
            more = {name: getattr(tier, name) + n for name, n in self._local.items()}
        return replace(tier, **more)

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
            sent = sent and self.tell("cancel", task)
            self.give_up(task, "the storage client was closed")
        self._thread.join()
        self._answers.close()
        with self._pushing:  # after a push in flight
            self._tasks.close()
        self._board.close()
        return True

    def __repr__(self) -> str:
        return f"<StorageClient of {self.cache.name!r}>"
