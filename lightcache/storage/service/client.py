"""StorageClient: a tier whose tasks another process carries out."""

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
from typing import Literal

from lightcache import _arguments
from lightcache.cache import Cache
from lightcache.errors import (
    ConfigError,
    Detached,
    LightcacheError,
    LockTimeout,
    StorageError,
    WaitTimeout,
)
from lightcache.hashing import Tokens
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.breaker import log
from lightcache.storage.protocol import Keys
from lightcache.storage.service import rings
from lightcache.storage.service.asking import Asked, Silence, Warned
from lightcache.storage.service.board import Board, Service, tier_stats
from lightcache.storage.service.messages import MOST_KEYS, Answer, Ask, Kind, Malformed, Part, split
from lightcache.storage.service.status import ServiceStats, stats_of
from lightcache.storage.tasks import StorageTask, TaskState
from lightcache.storage.tiers import BaseTier, ReadPolicy, TierStats, checked_write

SLICE = 0.05  # seconds of waiting for an answer between two looks at who serves
_AT_ONCE = 64  # answers
HELD = 1.0  # seconds without calls when a process that is stopped holds the ring's lock


class StorageClient(BaseTier):
    """Asks the storage service of a cache, which may be this process or another, or come later.

    Every call pushes a message and returns. Without a service tasks are FAILED at once, one warning
    says so, and the next call finds a service that has come meanwhile. What is worth writing, how
    reads wait, and the figures are the service's, the same for all of its clients.

    Close it before the cache. Not for forked children.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        timeout: float = 30.0,
        grace: float = 1.0,
        failures: int = 5,
        retry: float = 5.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Attaches to what it has in common with the service, and makes a ring for its answers.

        Args:
            timeout: seconds that a task may take, from `write` or `prefetch` on.
            grace: seconds behind that, and behind the service's own, until a task of which the
                service says nothing is given up.
            failures: tasks in a row of which it has said nothing, after which it is not asked.
            retry: seconds until it is asked again.
            clock: in seconds, and CLOCK_MONOTONIC's but in tests: the service goes by it.

        Raises:
            ConfigError: an argument out of range.
            InUse: all 63 slots of the service's ring are taken by living clients.
            LightcacheError: what lies in shared memory is of another release.
        """
        for name, seconds in (("timeout", timeout), ("grace", grace), ("retry", retry)):
            if Deadline(seconds, clock, name).timeout < 0:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        self.cache = cache
        self.timeout = timeout
        self.grace = grace
        self.clock = clock
        self._page_tokens: int | None = cache.index.segment.config.get("page_tokens")
        self._silence = Silence(_arguments.count(failures, "failures", 1, 1 << 30), retry, clock)
        self._missing = Warned(log.warning)
        self._pid, self._client = os.getpid(), secrets.randbits(64)
        self._numbers = itertools.count(1)
        self._pushing = threading.Lock()  # parts of a task stand one behind another
        self._changed = threading.Condition()
        self._asked: dict[int, Asked] = {}
        self._local: Counter[str] = Counter()
        self._closing = False
        self._held_until = 0.0
        with contextlib.ExitStack() as stack:
            self._board = Board.open(cache)
            stack.callback(self._board.close)
            self._tasks = rings.tasks(cache)
            stack.callback(self._tasks.close)
            self._answers = rings.make_answers(cache, self._pid, self._client)
            stack.callback(self._answers.close)
            self._thread = threading.Thread(
                target=self._listen, name="lightcache-storage-client", daemon=True
            )
            self._thread.start()
            stack.pop_all()

    # ---- the calls

    def write(
        self,
        keys: Keys,
        request: object = None,
        *,
        lease: Lease | None = None,
        tokens: int | None = None,
        token_ids: Tokens | None = None,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """See `BaseTier`. The service pins the pages when it takes the message out: what was
        evicted before counts as skipped, so keep a lease until the task is running if all of them
        should be written. Token ids do not go through the service: they are not looked at."""
        del token_ids
        deadline = self._begin(timeout, namespace)
        wanted = checked_write(keys, request, lease, tokens)
        have = len(keys) * (self._page_tokens or 0) if tokens is None else tokens
        task = StorageTask("write", len(wanted), self._page_tokens)
        number = None if request is None else hash(request) & 0xFFFFFFFFFFFFFFFF
        return self._ask(Kind.WRITE, task, deadline, wanted, namespace, tokens=have, request=number)

    def prefetch(
        self,
        keys: Keys,
        start: int = 0,
        *,
        namespace: Namespace | None = None,
        hold: bool = False,
        timeout: float | None = None,
    ) -> StorageTask:
        """See `BaseTier`. Never with `hold`: pages that wait for a word of ours would be held by
        the service, which cannot know whether that word still comes."""
        deadline = self._begin(timeout, namespace)
        _arguments.keys(keys)
        _arguments.count(start, "start", 0, len(keys))
        if hold:
            raise ConfigError(
                "hold: a storage service holds no pages for others; ranks with caches of their own "
                "use a StorageTier in the process that decides"
            )
        task = StorageTask("read", len(keys) - start, self._page_tokens)
        return self._ask(Kind.PREFETCH, task, deadline, keys, namespace, start=start)

    def prefetch_deepest(
        self,
        keys: Keys,
        *,
        most: int = 512,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> StorageTask:
        """See `BaseTier`."""
        deadline = self._begin(timeout, namespace)
        _arguments.keys(keys)
        _arguments.count(most, "most", 0, 1 << 30)
        task = StorageTask("read", len(keys), self._page_tokens)
        return self._ask(Kind.DEEPEST, task, deadline, keys, namespace, most=most)

    # ---- asking

    def _begin(self, timeout: float | None, namespace: Namespace | None) -> Deadline:
        self.cache.index.segment.check_usable()
        if self._closing:
            raise Detached("this storage client was closed; make another one")
        if namespace is not None and not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {namespace!r}")
        return Deadline(self.timeout if timeout is None else timeout, self.clock)

    def _ask(
        self,
        kind: Kind,
        task: StorageTask,
        deadline: Deadline,
        keys: Keys,
        namespace: Namespace | None,
        **what: int | None,
    ) -> StorageTask:
        try:
            service = self._serving(keys)
            asked = Asked(self, next(self._numbers), task, deadline, service)
        except (StorageError, Detached) as error:
            return self._refused(task, str(error))
        if namespace is None:
            namespace = self.cache.index.default_namespace
        body = Ask(
            end=self.clock() + deadline.left,
            timeout=deadline.timeout,
            keys=keys,
            namespace=namespace,
            **what,  # type: ignore[arg-type]
        ).pack()
        parts = split(kind, self._pid, self._client, asked.number, body)
        try:
            with self._changed:
                if self._closing:
                    raise Detached("the storage client was closed")
                self._asked[asked.number] = asked
            self._push(parts)
        except LightcacheError as error:
            if isinstance(error, LockTimeout):  # a stopped process: not every call waits for it
                self._held_until = time.monotonic() + HELD
            self._forget(asked)
            return self._refused(task, f"the storage service cannot be asked: {error}")
        except BaseException:
            self._forget(asked)
            raise
        with self._changed:  # behind the push: who listens does not take our time for it
            self._changed.notify_all()
        self._missing.right()
        return task

    def _serving(self, keys: Keys) -> Service:
        """Who is to be asked.

        Raises:
            StorageError: nobody is, and why.
            Detached: what we had in common was removed.
        """
        name = self.cache.name
        if len(keys) > MOST_KEYS:
            raise StorageError(f"{len(keys)} keys are more than one task may have, {MOST_KEYS}")
        service = self._board.service()
        if service is None or not self._board.open_for_tasks:
            why = f"no storage service serves {name!r}; `lightcache storage {name} --url ...`"
            self._missing.wrong(f"{why} starts one")
            raise StorageError(f"{why} starts one")
        if reason := self._silence.reason:
            raise StorageError(reason)
        if time.monotonic() < self._held_until:
            raise StorageError("somebody holds the lock of the storage service's ring")
        return service

    def _push(self, parts: list[bytes]) -> None:
        """Raises WaitTimeout: there is no room; what was pushed is dropped by the service."""
        with self._pushing:
            if len(parts) == 1:
                self._tasks.push(parts[0], timeout=0)
                return
            while parts:
                pushed = self._tasks.push_many(parts)
                if not pushed:
                    raise WaitTimeout("its queue is full")
                parts = parts[pushed:]

    def _refused(self, task: StorageTask, reason: str) -> StorageTask:
        task._count(failed=task.result.pages)
        self._end(task, reason)
        return task

    def _say(self, kind: Literal[Kind.STOP, Kind.CANCEL], asked: Asked) -> bool:
        """Tell the service something of a task; whether that could be pushed."""
        part = Part(kind, self._pid, self._client, asked.number, 0, 1, b"")
        try:
            self._push([part.pack()])
        except LightcacheError:
            return False
        return True

    # ---- listening

    def _listen(self) -> None:
        looked = 0.0
        while self._wait_for_work():
            self._try(self._hear_some)
            if time.monotonic() - looked >= SLICE:
                looked = time.monotonic()
                self._try(self._look)

    def _try(self, step: Callable[[], None]) -> None:
        """What fails now may fail each time: neither step keeps the other from its turn, nor a
        processor busy."""
        try:
            step()
        except LightcacheError as error:  # what we had in common was removed, or is broken
            self._give_up_all(f"the storage service cannot be heard: {error}")
            time.sleep(SLICE)
        except Exception:  # ours, then: the tasks of others should go on
            log.exception("the storage service could not be listened to")
            time.sleep(SLICE)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._closing)
            return bool(self._asked)

    def _hear_some(self) -> None:
        self._hear_all(self._messages())

    def _hear_all(self, messages: list[bytes]) -> None:
        for message in messages:
            try:
                self._hear(message)
            except Exception:  # ours, then: the others are answers to somebody, too
                log.exception("a message of the storage service could not be used")

    def _messages(self) -> list[bytes]:
        try:
            return self._answers.pop_many(_AT_ONCE) or [self._answers.pop(timeout=SLICE)]
        except (WaitTimeout, LockTimeout):
            return []

    def _hear(self, message: bytes) -> None:
        try:
            answer = Answer.unpack(message)
        except Malformed as error:
            log.warning("a malformed answer of the storage service was passed over: %s", error)
            return
        self._silence.answered()
        with self._changed:
            asked = self._asked.get(answer.task)
        if asked is None:
            return  # given up meanwhile
        asked.heard = True
        if answer.state in (TaskState.FINISHED, TaskState.FAILED):
            self._forget(asked)
        asked.task._become(answer.state, answer.prefix, answer.counts, answer.reasons)

    def _look(self) -> None:
        """Give up what nobody carries out any more, and what is overdue."""
        with self._changed:
            every = list(self._asked.values())
        service = self._board.service()  # behind the list: what is asked now, may be the next one's
        lost = [(each, why) for each in every if (why := self._lost(each, service))]
        if not lost:
            return
        # Behind both: what was answered before its service went, or while we were stopped, lies in
        # the ring, however long nobody has listened.
        self._drain()
        for asked, why in lost:
            with self._changed:
                waits = asked.number in self._asked
            if waits and not asked.heard and service and service.word == asked.service.word:
                self._silence.unanswered()
            self._give_up(asked, why)

    def _lost(self, asked: Asked, service: Service | None) -> str:
        """Why no answer is waited for any more; empty: one is."""
        if service is None or service.word != asked.service.word:
            gone = f"the storage service of {self.cache.name!r} is gone"
            return f"{gone} (pid {asked.service.pid})"
        if asked.end.passed:
            silent = f"the storage service (pid {service.pid}) does not say how far it is"
            return f"{asked.deadline.reason}; {silent}"
        return ""

    def _drain(self) -> None:
        """Hear what the ring holds now. Bounded: a service that goes on answering is no reason to
        stay."""
        for _ in range(rings.ANSWERS // _AT_ONCE):
            try:
                messages = self._answers.pop_many(_AT_ONCE)
            except LockTimeout:
                return
            self._hear_all(messages)
            if not messages:
                return

    def _give_up_all(self, reason: str) -> None:
        with self._changed:
            every = list(self._asked.values())
        for asked in every:
            self._give_up(asked, reason)

    def _give_up(self, asked: Asked, reason: str) -> None:
        if self._forget(asked):
            self._end(asked.task, reason)

    def _forget(self, asked: Asked) -> bool:
        with self._changed:
            found = self._asked.pop(asked.number, None) is not None
            self._changed.notify_all()
            return found

    def _end(self, task: StorageTask, reason: str) -> None:
        with self._changed:
            self._local.update(tasks_failed=1, failed=task.result.failed)
        task._end(reason, failed=True)

    # ---- looking at it, and the end

    @property
    def read_policy(self) -> ReadPolicy:
        """Of the service that serves, or did last."""
        return self._board.policy()[0]

    def service(self) -> ServiceStats:
        """What the service says of itself. No lock, no message."""
        return stats_of(self._board)

    def stats(self) -> TierStats:
        """Totals of the service's tier, for all of its clients; with what this client could not ask
        it, or gave up, in `failed` and `tasks_failed`."""
        stats = tier_stats(self._board.read(), self._board.service() is not None)
        with self._changed:
            local = dict(self._local)
        counts = {name: getattr(stats, name) + local.get(name, 0) for name in _LOCAL}
        return replace(stats, **counts)

    def _take_figures(self) -> Counter[str]:
        """See `BaseTier`: of all that the service counts each figure is given to one client."""
        try:
            return self._board.give()
        except Detached:
            return Counter()

    def close(self, timeout: float = 10.0) -> bool:
        """See `BaseTier`. Waits for the tasks of this client; what is left then is cancelled and
        ends FAILED, and the service may still be about it. The service goes on."""
        if os.getpid() != self._pid:
            return True
        seconds = min(Deadline(timeout).timeout, threading.TIMEOUT_MAX)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._asked, seconds)
            left = list(self._asked.values())
        told = True
        for asked in left:  # who is stopped with the ring's lock is waited for once
            told = told and self._say(Kind.CANCEL, asked)
            self._give_up(asked, "the storage client was closed")
        self._thread.join()
        self._answers.close()
        with self._pushing:  # a call that has come this far ends first
            self._tasks.close()
        self._board.close()
        return True

    def __repr__(self) -> str:
        return f"<StorageClient of {self.cache.name!r}>"


_LOCAL = ("failed", "tasks_failed")

__all__ = ["StorageClient"]
