"""Storages in a forked child: what was opened before the fork is the parent's, whatever it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.disks import disk
from support.stacks import KEYS, get, put

from lightcache import Detached
from lightcache.storage import MemoryStorage, Storage
from lightcache.storage.stacked import StackedStorage
from lightcache.storage.testing import FlakyStorage
from lightcache.storage.testing.conformance import SPEC

STORAGES: dict[str, Callable[[Path], Storage]] = {
    "memory": lambda where: MemoryStorage(SPEC),
    "flaky": lambda where: FlakyStorage(MemoryStorage(SPEC)),
    "stack": lambda where: StackedStorage([MemoryStorage(SPEC), MemoryStorage(SPEC)]),
    "a stack of a disk": lambda where: StackedStorage([disk(where), MemoryStorage(SPEC)]),
    "flaky of a stack": lambda where: FlakyStorage(
        StackedStorage([MemoryStorage(SPEC), MemoryStorage(SPEC)])
    ),
    "disk": disk,
}
CALLS: list[Callable[[Storage], object]] = [
    lambda storage: storage.contains(KEYS, timeout=60.0),
    get,
    put,
    lambda storage: storage.delete(KEYS, timeout=60.0),
    lambda storage: storage.clear(timeout=60.0),
    lambda storage: storage.close(),
]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("name", STORAGES)
def test_a_forked_child_is_refused(name: str, closed: bool, where: Path) -> None:
    with STORAGES[name](where) as storage:
        assert put(storage).prefix == 8
        if closed:
            storage.close()
        _hold(storage)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os._exit(_refused(storage))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _hold(storage, release=True)
        assert status == 0
        if not closed:
            assert get(storage).prefix == 8


def _hold(storage: Any, release: bool = False) -> None:
    """Its locks, as another thread may at a fork: the child waits for none of them."""
    for lock in _locks(storage):
        lock.release() if release else lock.acquire()


def _locks(storage: Any) -> list[Any]:
    found = [storage._lock] if hasattr(storage, "_lock") else []
    for each in [getattr(storage, "inner", None)]:
        found += _locks(each) if each else []
    for level in getattr(storage, "_levels", []):
        found += [level._executor.changed, *_locks(level.storage)]
    return found


def _refused(storage: Storage) -> int:
    """0: every call is, and says why."""
    for number, call in enumerate(CALLS, 1):
        try:
            call(storage)
        except Detached as error:
            if "the process that forked us; open it here" not in str(error):
                return 10 + number
        except BaseException:
            return 20 + number
        else:
            return 30 + number
    try:
        with storage:
            return 0
    except BaseException:
        return 9
