"""Storage services of tests: one beside its client in one process, so that whatever is true of a
`StorageTier` can be asked of both; and the command."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightcache import Cache, LockTimeout
from lightcache.shm import layout
from lightcache.storage import MemoryStorage, Storage, StorageSpec, StorageTier
from lightcache.storage.service import StorageClient, StorageService, board

LIMIT = 60.0


class ServedTier(StorageClient):
    """A client that owns its service: made, used and closed as a `StorageTier` is."""

    def __init__(self, cache: Cache, storage: Storage, **how: Any) -> None:
        """`how` is the tier's."""
        self.storage = storage
        self.serving = StorageService(cache, storage, **how)
        try:
            super().__init__(cache, timeout=how.get("timeout", 30.0), silence=60.0)
        except BaseException:
            self.serving.close()
            raise

    @property
    def _executor(self) -> Any:
        """The threads of the service's tier, once it has done all that this client asked for."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._asked, 60.0)
        return self.serving._tier._executor

    def close(self, timeout: float = 10.0) -> bool:
        """The client first: what it waits for, the service does."""
        super().close(timeout)
        return self.serving.close(timeout)


@contextlib.contextmanager
def serving(name: str) -> Iterator[StorageService]:
    """A service of this process, with a storage in memory."""
    with (
        Cache.attach(name, role="storage") as cache,
        MemoryStorage(StorageSpec.of(cache)) as storage,
        StorageService(cache, storage) as service,
    ):
        yield service


KINDS: dict[str, Callable[..., Any]] = {"tier": StorageTier, "service": ServedTier}


@pytest.fixture(params=list(KINDS))
def make_tier(request: Any) -> Callable[..., Any]:
    """Makes a tier of each kind: `make_tier(cache, storage, **how)`."""
    return KINDS[request.param]


@pytest.fixture
def client(cache: Cache) -> Iterator[StorageClient]:
    """One that came before any service."""
    with StorageClient(cache, grace=0.2, silence=60.0) as made:
        yield made


def ours(cache: Cache) -> list[str]:
    """What a service and its clients have in /dev/shm."""
    start = f"lightcache.{cache.name}.storage-"
    return sorted(path.name for path in Path("/dev/shm").glob(f"{start}*"))


def silent(service: StorageService) -> threading.Event:
    """It takes nothing out any more, and lives; set what is returned before it is closed."""
    gate, whole = threading.Event(), service._take
    service._take = lambda message: (gate.wait(60.0), whole(message))[0]  # type: ignore
    return gate


def failing(error: Exception) -> Callable[..., Any]:
    """What raises this, whatever it is given."""

    def fail(*given: object) -> Any:
        raise error

    return fail


def push(cache: Cache, *messages: bytes) -> None:
    with board.tasks_ring(cache) as ring:
        for message in messages:
            ring.push(message, timeout=60.0)


@contextlib.contextmanager
def held_lock(cache: Cache, client: StorageClient) -> Iterator[None]:
    """Of the ring of tasks, as by somebody who was stopped in a push."""
    with board.tasks_ring(cache) as other:
        lock = layout.LockRecord.from_address(other.segment.address + layout.LOCK_OFFSET)
        holder = other.segment.client
        assert holder is not None
        while True:  # the service takes it for its pops
            lock.word = holder.slot | holder.epoch << layout.LOCK_EPOCH_SHIFT
            try:
                client._tasks.push_many([b""])
            except LockTimeout:
                break
        try:
            yield
        finally:
            lock.word = 0


class Served:
    """A `lightcache storage` that runs."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from lightcache.tools.cli import main; main()", "storage"]
            + [str(each) for each in arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        assert ready
        self.begun = self.process.stdout.readline()

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Signal it; status, the rest of what it said, and its errors."""
        self.process.send_signal(number)
        out, errors = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, out, errors


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """Starts them, and kills what is left."""
    made: list[Served] = []

    def start(*arguments: object) -> Served:
        made.append(Served(*arguments))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate(timeout=LIMIT)
