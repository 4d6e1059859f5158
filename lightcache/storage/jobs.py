"""What the tier's threads carry out, a step at a time: the side of a task that holds pages.

Pages belong to the storage's call that reads or writes them until that call returns, whatever
becomes of the task: a backend that hangs may still write into them. So giving up has two halves.
Keys are abandoned at once, and nobody waits for them. Pins go when the call has returned, by the
thread that made it.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any, cast

from lightcache.errors import ConfigError, StorageError
from lightcache.leases import Lease
from lightcache.storage.arguments import Deadline
from lightcache.storage.protocol import Keys, TokenRows, WriteStatus
from lightcache.storage.tasks import StorageTask

if TYPE_CHECKING:
    from lightcache.storage.worker import StorageTier


class Stopped(Exception):
    """Unwinds a step whose task was cancelled, or whose call came back too late."""


class Job:
    """One task's work and what it holds."""

    def __init__(self, tier: StorageTier, task: StorageTask, deadline: Deadline) -> None:
        """Nothing is held."""
        self.tier = tier
        self.task = task
        self.deadline = deadline
        self.request: object = self
        """Jobs of one request stand together in the queue."""
        self.stopping = False
        """Begin nothing more; what was done counts."""
        self.kept: Deadline | None = None
        """Of a job that holds pages: until when it waits for `publish`."""
        self._lock = threading.RLock()
        self._given_up = False
        task._job = self

    @property
    def pinned(self) -> int:
        """Pages that it pins for a write."""
        return 0

    @property
    def reads(self) -> int:
        """Pages that it may still read."""
        return 0

    def step(self) -> bool:
        """Do some of it, in a thread of the tier; whether there is more.

        Raises:
            Stopped: given up.
            LightcacheError: broken off.
        """
        raise NotImplementedError

    def give_up(self) -> None:
        """Abandon keys; keep pins. Any thread; more than once is once."""
        with self._lock:
            self._given_up = True
            self._abandon()

    def lose(self) -> None:
        """Its call is overdue: what that has is given up, what was done before is not."""
        self.give_up()

    def _abandon(self) -> None:
        pass

    @property
    def holds(self) -> bool:
        """Whether it has pages for `publish`."""
        return False

    def release(self) -> None:
        """Give back what is not wanted any more, and no call has. More than once is once.

        Raises:
            LockTimeout: not yet; call again.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises Stopped when given up."""
        if self._given_up:
            raise Stopped

    def take(self) -> None:
        """See `StorageTask.take`."""
        self.task.wait()

    def cancel(self) -> None:
        """See `StorageTask.cancel`."""
        self.tier._cancel(self)

    def stop(self) -> None:
        """See `StorageTask`."""
        self.stopping = True

    def publish(self, pages: int) -> StorageTask:
        """See `StorageTask.publish`."""
        raise ConfigError("publish: this task holds nothing; prefetch with hold=True")


class WriteJob(Job):
    """Pages of a lease, written group by group."""

    def __init__(
        self,
        tier: StorageTier,
        task: StorageTask,
        deadline: Deadline,
        keys: Keys,
        lease: Lease,
        tokens: TokenRows | None,
    ) -> None:
        """Owns the lease.

        Args:
            tokens: of these pages and perhaps of more behind them.
        """
        super().__init__(tier, task, deadline)
        self._keys = keys
        self._lease = lease
        self._tokens = tokens
        self._numbers = lease.pages.tolist()
        self._pinned = len(lease)
        self._at: int | None = None  # None: not asked yet what is stored

    @property
    def pinned(self) -> int:
        """See `Job`."""
        return self._pinned

    def step(self) -> bool:
        """See `Job`."""
        if self._at is None:
            self._at = self.tier._contains(self, self._keys)
            self.task._count(present=self._at)
        else:
            self._at = self._write(self._at)
        self.task._reach(self._at)
        return self._at < len(self._keys) and not self.stopping

    def _write(self, first: int) -> int:
        """Write the next group; up to where everything is stored now."""
        end = min(first + self.tier.group, len(self._keys))
        keys = self._keys[first:end]
        buffers = [self.tier.cache.pool[page] for page in self._numbers[first:end]]
        for buffer in buffers:
            buffer.flags.writeable = False
        parent = self._keys[first - 1 : first] if first else None
        tokens = None if self._tokens is None else self._tokens[first:end]
        result = self.tier._write(self, keys, buffers, parent, tokens)
        self.task._count(
            stored=result.count(WriteStatus.STORED),
            present=result.count(WriteStatus.PRESENT),
            failed=result.count(WriteStatus.FAILED),
            refused=result.count(WriteStatus.REFUSED),
        )
        self.task._say(result.reason)
        if result.prefix < len(keys):  # what lies behind a hole would not be found
            self.task._count(skipped=len(self._keys) - end)
            self.stopping = True
        return first + result.prefix

    def release(self) -> None:
        """See `Job`."""
        with self._lock:
            self._lease.__exit__(None, None, None)


def checked_contains(found: object, keys: int) -> int:
    """What `Storage.contains` returned.

    Raises:
        StorageError: no count of these keys.
    """
    try:
        count = operator.index(cast(Any, found))
    except TypeError:
        count = -1
    if not 0 <= count <= keys:
        raise StorageError(
            f"contains: expected a count of {keys} keys, the backend returned {found!r}; see "
            "lightcache.storage.conformance"
        )
    return int(count)


def checked_statuses(what: str, statuses: object, keys: int) -> None:
    """What `Storage.read` or `write` returned.

    Raises:
        StorageError: not one status for each key.
    """
    if not isinstance(statuses, tuple) or len(statuses) != keys:
        raise StorageError(
            f"{what}: expected a tuple of {keys} statuses, the backend returned {statuses!r}; see "
            "lightcache.storage.conformance"
        )


__all__ = ["Job", "Stopped", "WriteJob", "checked_contains", "checked_statuses"]
