"""StorageClient: a tier whose tasks another process carries out."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import numpy as np

from lightcache import _arguments
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached, LightcacheError, LockTimeout, StorageError
from lightcache.hashing import Tokens
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.protocol import Keys
from lightcache.storage.service.asking import Asked, Pulse
from lightcache.storage.service.board import Service, tier_stats
from lightcache.storage.service.bodies import MOST_KEYS, Ask, Publish
from lightcache.storage.service.listening import Listening
from lightcache.storage.service.messages import MOST_BYTES, Kind, split
from lightcache.storage.service.status import ServiceStats, stats_of
from lightcache.storage.tiers import (
    ReadPolicy,
    StorageTask,
    TierStats,
    check_cache,
    checked_write,
    token_rows,
)

HELD = 1.0  # seconds without calls when a process that is stopped holds the ring's lock


class StorageClient(Listening):
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
        silence: float = 2.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Attaches to what it has in common with the service, and makes a ring for its answers.

        Args:
            timeout: seconds that a task may take, from `write` or `prefetch` on.
            grace: seconds behind that, and behind the service's own, until a task of which the
                service says nothing is given up.
            silence: seconds in which the service has not looked at its messages, after which its
                tasks are given up and it is not asked, until it looks again.
            clock: in seconds, and CLOCK_MONOTONIC's but in tests: the service goes by it.

        Raises:
            ConfigError: no Cache, or an argument out of range.
            Detached: the cache is closed.
            InUse: all 63 slots of the service's ring are taken by living clients.
            LightcacheError: what lies in shared memory is of another release.
        """
        for name, seconds in (("timeout", timeout), ("grace", grace), ("silence", silence)):
            if Deadline(seconds, clock, name).timeout < 0:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        check_cache(cache)
        pulse = Pulse(silence, clock)
        super().__init__(cache, pulse, timeout=timeout, grace=grace, clock=clock)
        self._numbers = itertools.count(1)
        self._held_until = 0.0  # somebody held the ring's lock just now

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
        should be written. Token ids pass through shared memory if the service's storage wants
        them; a task of so many that they do not fit fails."""
        deadline = self._begin(timeout, namespace)
        wanted = checked_write(keys, request, lease, tokens)
        rows = None
        if token_ids is not None:
            wants = self.wants_tokens
            rows = token_rows(token_ids, len(wanted), self._page_tokens, wanted=wants)
        ask = Ask(
            end=self.clock() + deadline.left,
            timeout=deadline.timeout,
            keys=wanted,
            namespace=self._space(namespace),
            tokens=len(keys) * (self._page_tokens or 0) if tokens is None else tokens,
            request=None if request is None else hash(request) & 0xFFFFFFFFFFFFFFFF,
            token_ids=None if rows is None else rows.reshape(-1).astype(np.uint32, copy=False),
        )
        task = StorageTask("write", len(wanted), self._page_tokens)
        return self._ask(Kind.WRITE, task, deadline, ask)

    def prefetch(
        self,
        keys: Keys,
        start: int = 0,
        *,
        namespace: Namespace | None = None,
        hold: bool = False,
        timeout: float | None = None,
    ) -> StorageTask:
        """See `BaseTier`. What is held is the service's, which gives it back when this process
        ends or closes the client; `StorageTask.publish` returns a task that the service carries
        out: wait for it, it may fail."""
        deadline = self._begin(timeout, namespace)
        _arguments.keys(keys)
        _arguments.count(start, "start", 0, len(keys))
        ask = Ask(
            end=self.clock() + deadline.left,
            timeout=deadline.timeout,
            keys=keys,
            namespace=self._space(namespace),
            start=start,
            hold=bool(hold),
        )
        task = StorageTask("read", len(keys) - start, self._page_tokens)
        return self._ask(Kind.PREFETCH, task, deadline, ask)

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
        ask = Ask(
            end=self.clock() + deadline.left,
            timeout=deadline.timeout,
            keys=keys,
            namespace=self._space(namespace),
            most=most,
        )
        task = StorageTask("read", len(keys), self._page_tokens)
        return self._ask(Kind.DEEPEST, task, deadline, ask)

    def _publish(self, held: Asked, pages: int) -> StorageTask:
        """Of what `held` holds. Raises what any call does; `held` is not published then."""
        deadline = self._begin(None, None)
        end = self.clock() + deadline.left
        task = StorageTask("read", pages, self._page_tokens)
        ask = Publish(end, deadline.timeout, held.number, pages)
        return self._ask(Kind.PUBLISH, task, deadline, ask, held.service)

    # ---- asking

    def _begin(self, timeout: float | None, namespace: Namespace | None) -> Deadline:
        self.cache.index.segment.check_usable()
        if self._closing:
            raise Detached("this storage client was closed; make another one")
        if namespace is not None and not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {namespace!r}")
        return Deadline(self.timeout if timeout is None else timeout, self.clock)

    def _space(self, namespace: Namespace | None) -> Namespace:
        return self.cache.index.default_namespace if namespace is None else namespace

    def _ask(
        self,
        kind: Kind,
        task: StorageTask,
        deadline: Deadline,
        ask: Ask | Publish,
        holder: Service | None = None,
    ) -> StorageTask:
        """Push it. What cannot be asked is a task that FAILED.

        Args:
            holder: who alone can do it.
        """
        try:
            service = self._serving() if holder is None else self._still(holder)
            asked = Asked(self, next(self._numbers), task, deadline, service, ask)
            body = _body(ask)
        except (StorageError, Detached) as error:
            return self._refused(task, str(error))
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
        asked.pushed = True
        with self._changed:  # behind the push: who listens does not take our time for it
            self._changed.notify_all()
        self._missing.right()
        return task

    def _serving(self) -> Service:
        """Who is to be asked.

        Raises:
            StorageError: nobody is, and why.
            Detached: what we had in common was removed.
        """
        name = self.cache.name
        service = self._board.service()
        if service is None or not self._board.open_for_tasks:
            why = f"no storage service serves {name!r}; `lightcache storage {name} --url ...`"
            self._missing.wrong(f"{why} starts one")
            raise StorageError(f"{why} starts one")
        if reason := self._pulse.silent(service, self._board.beat):
            raise StorageError(reason)
        if time.monotonic() < self._held_until:
            raise StorageError("somebody holds the lock of the storage service's ring")
        return service

    def _still(self, holder: Service) -> Service:
        """The one that holds pages for us, which may be closing.

        Raises:
            StorageError: it is gone, and they were given back.
        """
        service = self._board.service()
        if service is None or service.word != holder.word:
            raise StorageError(
                f"the storage service that held pages (pid {holder.pid}) is gone: they were given "
                "back; prefetch them again"
            )
        return service

    def _refused(self, task: StorageTask, reason: str) -> StorageTask:
        task._count(failed=task.result.pages)
        self._end(task, reason)
        return task

    # ---- looking at it

    @property
    def wants_tokens(self) -> bool:
        """Of the service that serves, or did last."""
        try:
            return self._board.wants_tokens
        except Detached:
            return False

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

    def __repr__(self) -> str:
        return f"<StorageClient of {self.cache.name!r}>"


def _body(ask: Ask | Publish) -> bytes:
    """Raises StorageError: it is more than the ring takes."""
    keys = len(ask.keys) if isinstance(ask, Ask) else 0
    if keys > MOST_KEYS:
        raise StorageError(f"{keys} keys are more than one task may have, {MOST_KEYS}")
    body = ask.pack()
    if len(body) > MOST_BYTES:
        raise StorageError(
            f"{keys} keys with their token ids are {len(body)} bytes, more than one task may have, "
            f"{MOST_BYTES}; a StorageTier writes prompts of this length"
        )
    return body


_LOCAL = ("failed", "tasks_failed")

__all__ = ["StorageClient"]
