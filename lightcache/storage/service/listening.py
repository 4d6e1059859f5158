"""The lower half of a storage client: what it says into the service's ring, and what it hears."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from lightcache.cache import Cache
from lightcache.errors import Detached, LightcacheError, LockTimeout, WaitTimeout
from lightcache.shm.waiting import Condition
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.breaker import log
from lightcache.storage.service import rings
from lightcache.storage.service.asking import Asked, Pulse, Warned
from lightcache.storage.service.board import Board, Service
from lightcache.storage.service.messages import Answer, Kind, Malformed, Part
from lightcache.storage.tiers import BaseTier, StorageTask, TaskState

SLICE = 0.05  # seconds of waiting for an answer between two looks at who serves
_AT_ONCE = 64  # answers


class Listening(BaseTier):
    """A client without its calls: see `StorageClient`."""

    def __init__(
        self, cache: Cache, pulse: Pulse, *, timeout: float, grace: float, clock: Clock
    ) -> None:
        """Attaches to what it has in common with the service, and makes a ring for its answers."""
        self.cache = cache
        self.timeout = timeout
        self.grace = grace
        self.clock = clock
        self._page_tokens: int | None = cache.index.segment.config.get("page_tokens")
        self._pulse = pulse
        self._missing = Warned(log.warning)
        self._pid, self._client = os.getpid(), secrets.randbits(64)
        self._pushing = threading.Lock()  # parts of a task stand one behind another
        self._changed = Condition()
        self._asked: dict[int, Asked] = {}
        self._local: Counter[str] = Counter()
        self._closing = False
        with contextlib.ExitStack() as stack:
            self._board = Board.open(cache)
            stack.callback(self._board.close)
            self._tasks = rings.tasks(cache, rings.ASKING_SECONDS)
            stack.callback(self._tasks.close)
            self._answers = rings.make_answers(cache, self._pid, self._client)
            stack.callback(self._answers.close)
            self._thread = threading.Thread(
                target=self._listen, name="lightcache-storage-client", daemon=True
            )
            self._thread.start()
            stack.pop_all()

    # ---- saying

    def _push(self, parts: list[bytes]) -> None:
        """Into the service's ring.

        Raises:
            WaitTimeout: there is no room; what was pushed is dropped by the service.
            Detached: called in a forked child; before any lock, which another thread may have had.
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
        with self._changed:
            asked = self._asked.get(answer.task)
        if asked is None:
            return  # given up meanwhile
        if answer.state in (TaskState.FINISHED, TaskState.FAILED):
            self._forget(asked)
        elif answer.prefix > asked.task.pages_done:
            asked.got_on()
        asked.task._become(answer.state, answer.prefix, answer.counts, answer.reasons)

    def _look(self) -> None:
        """Give up what nobody carries out any more, and what is overdue."""
        with self._changed:
            every = list(self._asked.values())
        service = self._board.service()  # behind the list: what is asked now, may be the next one's
        silent = ""
        if service is not None and self._board.open_for_tasks:  # one that closes does not count
            silent = self._pulse.silent(service, self._board.beat)
        lost = [(each, why) for each in every if (why := self._lost(each, service) or silent)]
        if not lost:
            return
        # Behind both: what was answered before its service went, or while we were stopped, lies in
        # the ring, however long nobody has listened.
        self._drain()
        told = True
        for asked, why in lost:
            told = self._take_back(asked, why, told)

    def _take_back(self, asked: Asked, why: str, told: bool) -> bool:
        """Give it up, and say so if it was to hold pages: its words may still stand in the ring,
        and the next service would hold them for nobody. Not if some pages are known to be held: who
        asked may still publish them.

        Args:
            told: whether the last word could be said; if not, nothing more is tried.
        """
        if self._give_up(asked, why) and told and asked.awaits_pages:
            return self._say(Kind.CANCEL, asked)
        return told

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

    def _give_up(self, asked: Asked, reason: str) -> bool:
        """False: it was over."""
        found = self._forget(asked)
        if found:
            self._end(asked.task, reason)
        return found

    def _forget(self, asked: Asked) -> bool:
        with self._changed:
            found = self._asked.pop(asked.number, None) is not None
            self._changed.notify_all()
            return found

    def _end(self, task: StorageTask, reason: str) -> None:
        with self._changed:
            self._local.update(tasks_failed=1, failed=task.result.failed)
        task._end(reason, failed=True)

    # ---- the end

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


__all__ = ["Listening"]
