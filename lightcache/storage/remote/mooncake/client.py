"""The store's client: found, started, asked. Every call may block; none needs our buffers."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightcache.errors import StorageError
from lightcache.storage.remote.mooncake.codes import meaning
from lightcache.storage.remote.mooncake.options import MooncakeOptions

BATCH = 2048  # objects of one call: batches of 4,096 have stalled for a minute
ATTEMPTS = 5  # to start the client, which chooses a port that may be taken
ANSWERING = 2.0  # seconds in which a master must answer to be told that we leave

_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",  # instead of a dozen lines for each client
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # of 20, in which it holds the interpreter for 90 s
    "MC_RPC_TIMEOUT_MS": "5000",  # instead of 30 s: starting and closing hold it as well
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
}
_environment = threading.Lock()
_started_by: list[int] = []  # the process that started the library's threads: a fork has none
_left: list[object] = []  # clients that could not be closed, and their memory: never freed


class Client:
    """One membership in a cluster. After `close` nothing may be called: the library would crash."""

    def __init__(self, options: MooncakeOptions, memory: object, address: int, nbytes: int) -> None:
        """Join. The library holds the interpreter while it does, so the master is tried first.

        Args:
            memory: owner of what is registered; kept as long as the library may touch it.
            address: of the memory through which values pass; `nbytes` of it.

        Raises:
            StorageError: the library is not installed or does not load; the master cannot be
                reached; the cluster cannot be joined.
        """
        self._memory = memory
        with _settings():
            library = _library()
            _check_process()
            local = options.local or _way_to(options)
            self._store = _started(library, options, local)
        self._replicas = library.ReplicateConfig()
        self._replicas.replica_num = options.replicas
        if code := self._store.register_buffer(address, nbytes):
            self.close()
            raise StorageError(
                f"mooncake: {nbytes} bytes of memory cannot be registered: {meaning(code)}; "
                "give a smaller buffer=, or raise the limit of locked memory (ulimit -l)"
            )

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each is stored whole.

        Raises:
            StorageError: it could not be found out.
        """
        codes = self.ask(names)
        if bad := next((code for code in codes if code < 0), 0):
            raise StorageError(f"mooncake: {meaning(bad)}")
        return [code == 1 for code in codes]

    def ask(self, names: Sequence[str]) -> list[int]:
        """1 of each that is stored whole, 0 of others, or a code."""
        return self._batches(self._store.batch_is_exist, names)

    def put(self, names: Sequence[str], addresses: Sequence[int], size: int) -> list[int]:
        """Store values of one size; 0 or a code of each. 0 is also the answer for a value that is
        there, or that somebody else has begun to write: it says nothing about the value."""
        sizes = [size] * len(names)
        found: list[int] = self._store.batch_put_from(
            list(names), list(addresses), sizes, self._replicas
        )
        return found

    def get(self, names: Sequence[str], addresses: Sequence[int], size: int) -> list[int]:
        """Fetch values of up to this size; bytes or a code of each."""
        sizes = [size] * len(names)
        found: list[int] = self._store.batch_get_into(list(names), list(addresses), sizes)
        return found

    def size(self, name: str) -> int:
        """Bytes of a value, or a code."""
        return int(self._store.get_size(name))

    def remove(self, names: Sequence[str]) -> list[int]:
        """0 or a code of each. Also what somebody reads just now: its memory may get other bytes
        under that reader, who notices by the trailer."""
        return self._batches(lambda part: self._store.batch_remove(part, True), names)

    def remove_all(self, pattern: str) -> int:
        """Remove what matches a regular expression; how many values, or a code."""
        return int(self._store.remove_by_regex(pattern, True))

    def close(self) -> None:
        """Leave. The library holds the interpreter until the master has answered: not to be called
        when it does not."""
        self._store.close()

    def leave(self) -> None:
        """Instead of `close`: the library's threads go on, and its memory stays, until the process
        ends."""
        _left.append((self._store, self._memory))

    def _batches(self, call: Callable[[list[str]], list[int]], names: Sequence[str]) -> list[int]:
        found: list[int] = []
        for first in range(0, len(names), BATCH):
            found += call(list(names[first : first + BATCH]))
        return found


def _library() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise StorageError(
            "mooncake: its client is not installed; pip install 'lightcache[mooncake]' (with CUDA: "
            "pip install mooncake-transfer-engine)"
        ) from error
    except ImportError as error:
        raise StorageError(
            f"mooncake: its client does not load: {error}; install the library that it names "
            "(libibverbs.so.1: the package libibverbs1), or the client that fits this machine: "
            "mooncake-transfer-engine-non-cuda, or mooncake-transfer-engine with CUDA"
        ) from error


def _check_process() -> None:
    if _started_by and _started_by[0] != os.getpid():
        raise StorageError(
            "mooncake: its client was started by the process that forked us, and does not work in "
            "a fork; open it in a process that was spawned"
        )
    _started_by[:] = [os.getpid()]


def _way_to(options: MooncakeOptions) -> str:
    """The address of ours that a master sees, if it answers."""
    try:
        with socket.create_connection((options.host, options.port), options.connect) as way:
            found = str(way.getsockname()[0])
            return f"[{found}]" if ":" in found else found
    except (OSError, UnicodeError) as error:
        raise StorageError(
            f"mooncake: the master at {options.master} cannot be reached: {error}; see whether "
            "mooncake_master runs there, and listens on that address and port"
        ) from error


def _started(library: Any, options: MooncakeOptions, local: str) -> Any:
    deadline = time.monotonic() + options.connect
    code = 0
    for _ in range(ATTEMPTS):
        store = library.MooncakeDistributedStore()
        code = store.setup(
            local,
            options.metadata,
            options.segment,
            0,  # no buffer of its own: values pass through ours
            options.protocol,
            options.device,
            options.master,
        )
        if not code:
            return store
        if time.monotonic() > deadline:
            break
    raise StorageError(
        f"mooncake: the cluster of {options.master} cannot be joined: {meaning(code)}; see whether "
        f"that is a mooncake_master, of the client's version, whether {local} is an address of "
        f"this machine, and what the client has logged"
    )


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """The library is set by its environment alone. What the user has set goes before."""
    with _environment:
        ours = {name: text for name, text in _DEFAULTS.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)


__all__ = ["ANSWERING", "BATCH", "Client"]
