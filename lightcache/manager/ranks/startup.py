"""Startup barrier: a scheduler waits until its ranks are ready to copy.

A rank attaches to the cache, registers its memory, joins the log and reads it. The handshake needs
no reply: the scheduler appends a startup message for each reader that it has not seen before, and a
rank is ready when it has read one."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping, Sequence
from enum import Enum

from lightcache.cache import Cache
from lightcache.errors import Abandoned, ConfigError, WaitTimeout
from lightcache.leases import ClientId
from lightcache.manager.ranks.messages import append, check_entries
from lightcache.shm import SharedLog
from lightcache.shm.clients import ClientInfo

_NAP = 0.01  # seconds between two looks

_Process = tuple[int, int, int]


class RankStage(Enum):
    """How far a rank's start has come."""

    ABSENT = "has not attached to the cache"
    ATTACHED = "is attached to the cache and has not joined the log: registering its memory?"
    JOINED = "has joined the log and has not called ready()"
    READY = "is ready"


class StartupBarrier:
    """The starting ranks of a scheduler. `wait_for_ranks` is enough for most; a scheduler that
    keeps serving while a rank is replaced calls `look` between its steps."""

    def __init__(
        self,
        cache: Cache,
        log: SharedLog,
        names: Sequence[str],
        *,
        watch: Mapping[str, int] | None = None,
    ) -> None:
        """Looks for no rank yet. For the arguments see `wait_for_ranks`.

        Raises:
            ConfigError: names that are no roles or occur twice, a log without write access or with
                too short entries, or `watch` of other names.
        """
        if len(set(names)) != len(names) or not all(type(name) is str and name for name in names):
            raise ConfigError(f"names: expected roles, each once, found {list(names)}")
        if not log.is_writer:
            raise ConfigError("log: expected one that was attached with writer=True")
        check_entries(log)
        self._cache, self._log, self._names = cache, log, tuple(names)
        self._watched: dict[str, int | None] = {}
        for name, pid in (watch or {}).items():
            if name not in self._names:
                self.close()
                raise ConfigError(f"watch: expected names of {list(names)}, found {name!r}")
            self._watched[name] = _opened(pid)
        self._seen: dict[str, ClientId] = {}
        self._called: dict[tuple[int, int], int] = {}
        """For each reader, the number of the entry that it must have read to be ready."""

    def look(self) -> dict[str, RankStage]:
        """The stage of each rank. Does not block.

        Raises:
            Abandoned: a rank has died while starting, or left; names it.
        """
        stages = {}
        attached = self._attached()
        readers = self._readers({_process(client) for client in attached.values()})
        for name in self._names:
            client = attached.get(name)
            self._check_life(name, client)
            if client is None:
                stages[name] = RankStage.ABSENT
                continue
            self._seen[name] = ClientId(client.slot, client.epoch)
            # Several ranks of one process have a reader each. The assignment of readers to ranks
            # does not matter, as long as each reader counts once.
            mine = readers.get(_process(client), [])
            read = mine.pop() if mine else None
            if read is None:
                stages[name] = RankStage.ATTACHED
            else:
                stages[name] = RankStage.READY if read else RankStage.JOINED
        return stages

    def clients(self) -> list[ClientId]:
        """The ranks, in the order of their names: for `RankCoordinator`, when all are ready."""
        return [self._seen[name] for name in self._names]

    def close(self) -> None:
        """Close the process descriptors of `watch`."""
        for fd in self._watched.values():
            if fd is not None:
                os.close(fd)
        self._watched.clear()

    def _attached(self) -> dict[str, ClientInfo]:
        """Attached clients by role; a live client replaces a dead one."""
        clients: dict[str, ClientInfo] = {}
        for client in self._cache.clients():
            if client.role in self._names and (client.role not in clients or client.alive):
                clients[client.role] = client
        return clients

    def _check_life(self, name: str, client: ClientInfo | None) -> None:
        before = self._seen.get(name)
        if client is not None and not client.alive:
            raise Abandoned(
                f"start: {name} (pid {client.pid}) has died while starting; see its own messages"
            )
        if before is not None and (client is None or ClientId(client.slot, client.epoch) != before):
            raise Abandoned(f"start: {name} had attached, and has died or left since")
        if name in self._watched and _ended(self._watched[name]):
            raise Abandoned(
                f"start: the process of {name} has ended while starting; see its own messages"
            )

    def _readers(self, wanted: set[_Process]) -> dict[_Process, list[bool]]:
        """For each of these processes, whether each of its readers has read a startup message,
        False first. Appends such a message for new readers."""
        log = self._log
        appended = log.appended  # read first: readers can only seem further behind than they are
        unread = {client.slot: client.behind for client in log.behind()}
        readers: dict[_Process, list[bool]] = {}
        fresh = []
        for client in log.segment.clients():
            if client.slot not in unread or not client.alive or _process(client) not in wanted:
                continue
            key = client.slot, client.epoch
            if key not in self._called:
                fresh.append(key)
            read = appended - unread[client.slot] > self._called.get(key, appended)
            readers.setdefault(_process(client), []).append(read)
        if fresh:
            self._call(fresh)
        return {process: sorted(reads) for process, reads in readers.items()}

    def _call(self, fresh: list[tuple[int, int]]) -> None:
        number = self._log.appended
        with contextlib.suppress(WaitTimeout):  # the log is full: the next look tries again
            append(self._log, None, 0)
            self._called.update(dict.fromkeys(fresh, number))


def wait_for_ranks(
    cache: Cache,
    log: SharedLog,
    names: Sequence[str],
    timeout: float | None = None,
    *,
    watch: Mapping[str, int] | None = None,
) -> list[ClientId]:
    """Block until every rank has attached to the cache, registered its memory, joined the log and
    called `RankWorker.ready`. Append nothing else to the log meanwhile.

    Args:
        cache: the host cache. A dead client under one of these names counts as a rank that died
            while starting: if there were ranks before, `reap` before you start others.
        log: attached as its writer.
        names: the roles that ranks attach with, f"rank {i}", in order.
        timeout: seconds; None: no limit.
        watch: name -> process id, in our PID namespace, of known rank processes: one that ends
            before it attaches is noticed too.

    Returns:
        The ranks' clients, in order: for `RankCoordinator`.

    Raises:
        Abandoned: a rank has died or left; raised at once, names it.
        WaitTimeout: names the missing ranks and their stages.
        ConfigError: names that are no roles, or a log without write access.
    """
    end = None if timeout is None else time.monotonic() + timeout
    barrier = StartupBarrier(cache, log, names, watch=watch)
    try:
        while True:
            stages = barrier.look()
            if all(stage is RankStage.READY for stage in stages.values()):
                return barrier.clients()
            left = _NAP if end is None else min(_NAP, end - time.monotonic())
            if left <= 0:
                missing = "; ".join(
                    f"{name} {stage.value}"
                    for name, stage in stages.items()
                    if stage is not RankStage.READY
                )
                raise WaitTimeout(f"start: not all ranks are ready after {timeout} s: {missing}")
            time.sleep(left)
    finally:
        barrier.close()


def _process(client: ClientInfo) -> _Process:
    return client.pidns, client.pid, client.start_ticks


def _opened(pid: int) -> int | None:
    """A descriptor of the process; None: it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _ended(fd: int | None) -> bool:
    if fd is None:
        return True
    poller = select.poll()  # select.select refuses high numbers
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


__all__ = ["RankStage", "StartupBarrier", "wait_for_ranks"]
