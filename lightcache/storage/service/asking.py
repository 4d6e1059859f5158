"""What a client has asked of the storage service and not heard the end of."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightcache import _arguments
from lightcache.errors import ConfigError, WaitTimeout
from lightcache.storage.arguments import Clock, Deadline
from lightcache.storage.breaker import log
from lightcache.storage.service.board import Service
from lightcache.storage.service.bodies import Ask, Publish
from lightcache.storage.service.messages import Kind
from lightcache.storage.tiers import StorageTask

if TYPE_CHECKING:
    from lightcache.storage.service.client import StorageClient


class Asked:
    """The client's side of a task: see `tasks.Carrier`."""

    def __init__(
        self,
        client: StorageClient,
        number: int,
        task: StorageTask,
        deadline: Deadline,
        service: Service,
        ask: Ask | Publish,
    ) -> None:
        """It was not pushed yet."""
        self.number = number
        self.task = task
        self.deadline = deadline
        self.service = service
        self.pushed = False
        """Whether the service was told of it."""
        self._holds = isinstance(ask, Ask) and ask.hold
        self._settling = threading.Lock()
        self._settled = False
        """What was held was published, or given back."""
        self._client = client
        policy, seconds, grace = client._board.policy()
        self._policy = policy
        self._soft = Deadline(seconds, client.clock)
        self._slack = grace + client.grace
        self.end = Deadline(deadline.left + self._slack, client.clock)
        """Behind it, the service's silence is taken for its answer."""
        task._job = self

    def got_on(self) -> None:
        """The service said that it gets on: a write has its time anew then, see `WriteJob`."""
        if self.task.kind == "write":
            self.end = Deadline(self.deadline.timeout + self._slack, self._client.clock)

    @property
    def awaits_pages(self) -> bool:
        """Whether pages are to be held for it, of which nothing was heard."""
        return self._holds and not self.task.pages_done

    def take(self) -> None:
        """See `StorageTask.take`."""
        if self._policy == "wait" or self.task.kind == "write":
            self.task.wait()
        elif self._policy == "deadline":
            with contextlib.suppress(WaitTimeout):
                self.task.wait(self._soft.left)
        if not self.task.over:
            self.stop()

    def stop(self) -> None:
        """See `StorageTask`."""
        self._client._say(Kind.STOP, self)

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""
        if not self.task.over:
            self._settled = self._holds
            if not self._client._say(Kind.CANCEL, self):
                self._client._give_up(self, "cancelled; the storage service could not be told")
        elif self._holds:  # where it cannot be told, the service gives it back when its time is up
            with self._settling:
                if not self._settled:
                    self._settled = self._client._say(Kind.CANCEL, self)

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        if not self._holds:
            raise ConfigError("publish: this task holds nothing; prefetch with hold=True")
        with self._settling:
            if self._settled or not self.task.over:
                raise ConfigError(
                    f"publish: expected a prefetch with hold=True that is over, and was neither "
                    f"published nor cancelled before, found {self.task!r}"
                )
            _arguments.count(pages, "pages", 0, self.task.pages_done)
            if not self.task.pages_done:
                return self.task  # what others agreed on is none: nothing is held
            task = self._client._publish(self, pages)
            # What could not even be said may be said again.
            self._settled = isinstance(task._job, Asked) and task._job.pushed
            return task


class Pulse:
    """Whether a service still looks at its messages: it counts in a word of the board, four times a
    second. One that is stopped does not: nothing is asked of it until it counts again."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        """Nothing was seen.

        Args:
            seconds: without a count until the service is taken for stopped.
        """
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._silent = False

    def silent(self, service: Service, beat: int) -> str:
        """Why it is not asked; empty: it is. Tells of the first time in the log.

        Args:
            beat: the word, as it is now.
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


class Warned:
    """Says something once, until it is over."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Nothing is wrong."""
        self._say = say
        self._lock = threading.Lock()
        self._wrong = False

    def wrong(self, why: str) -> None:
        """It is wrong, now or still."""
        with self._lock:
            first, self._wrong = not self._wrong, True
        if first:
            self._say(why)

    def right(self) -> None:
        """It is right, again or still."""
        if self._wrong:
            with self._lock:
                self._wrong = False


__all__ = ["Asked", "Pulse", "Warned"]
