"""The store's client: found, started, asked. Every call may block; none needs our buffers."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightcache.errors import ConfigError, StorageError
from lightcache.storage.arguments import Options

# ---- Error codes of the client: those of 0.3.13 that occur here.

SMALLER = -600  # the value is longer than the buffer
NO_ROOM = -200
NOT_READY = -703
ABSENT = -704
LEASE_OVER = -707
FAILED = -800
_GONE = (-710, -712)  # of a copy that the master knew of

_MEANINGS = {
    -1: "the client failed inside",
    -101: "no process lends memory; start mooncake_client somewhere, or open with segment=",
    NO_ROOM: "no room; lend more memory (mooncake_client, or segment=)",
    SMALLER: "parameters that do not fit",
    NOT_READY: "it is being written",
    ABSENT: "not there",
    -706: "it is being read",
    LEASE_OVER: "the read took longer than the master's lease (default_kv_lease_ttl)",
    FAILED: "the process that holds it did not answer, or the way to it is closed",
    -900: "the master does not answer; see whether it runs",
    -901: "the master did not answer in time; see whether it is overloaded or stopped",
}


def absent(code: int) -> bool:
    """Whether it says that there is no such value (yet, or any more)."""
    return code in (ABSENT, NOT_READY, *_GONE)


def no_room(code: int) -> bool:
    """Whether it says that the cluster has no memory for a value."""
    return code in (NO_ROOM, -101)


def meaning(code: int) -> str:
    """For people."""
    return f"{_MEANINGS.get(code, 'see the error codes of Mooncake Store')} ({code})"


# ---- What a URL such as `mooncake://host:50051?segment=64GiB` says.

PORT = 50051  # of a master, unless it is told another
SEGMENT = 16 << 20  # bytes that the client lends at least
_HANDSHAKE = "P2PHANDSHAKE"  # what the client calls: no server for metadata
_OPTIONS = (
    *("local", "metadata", "protocol", "device"),
    *("segment", "buffer", "threads", "replicas", "connect"),
)
_NAMED = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]/\s]+)(:(?P<port>[0-9]+))?")


@dataclass(frozen=True)
class MooncakeOptions:
    """How a cluster is joined."""

    host: str
    """Of the master, without brackets."""
    port: int
    local: str = ""
    """Under which other machines reach this process: an address, or address:port. Empty: that from
    which the way to the master begins."""
    metadata: str = _HANDSHAKE
    """Where addresses of peers are found; by default peers ask one another."""
    protocol: str = "tcp"
    device: str = ""
    """Of RDMA, such as mlx5_0; several with commas."""
    segment: int = 0
    """Bytes of memory that this process lends to the cluster, for as long as it lives."""
    buffer: int = 64 << 20
    """Bytes through which pages pass."""
    threads: int = 3
    """Batches in flight at a time. With two, the question to the master about a page of
    8 MiB is not hidden by other transfers; a fourth gains nothing (docs/benchmarks.md)."""
    replicas: int = 1
    """Copies of each page, in memory of different processes."""
    connect: float = 5.0
    """Seconds in which the master must accept a connection."""

    @property
    def master(self) -> str:
        """As the client wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(scheme: str, where: str, options: Mapping[str, str]) -> MooncakeOptions:
    """Check a URL without connecting.

    Raises:
        ConfigError: no host, a port that is none, credentials, a path, an option that there is
            not, or a value that is none.
    """
    host, port = _address(scheme, where)
    given = Options(scheme, options, _OPTIONS)
    protocol = given.choice("protocol", ("tcp", "rdma"))
    if "device" in given and protocol != "rdma":
        raise ConfigError(f"{scheme}: device is of protocol=rdma; name both, or neither")
    local = given.text("local")
    if "local" in given:
        _host_and_port(scheme, "local", local)
    segment, buffer = given.size("segment", 0), given.size("buffer", MooncakeOptions.buffer)
    assert segment is not None
    assert buffer is not None
    if 0 < segment < SEGMENT:
        raise ConfigError(f"{scheme}: segment: expected 16MiB or more, or none, found {segment}")
    return MooncakeOptions(
        host=host,
        port=port,
        local=local,
        metadata=given.text("metadata", _HANDSHAKE),
        protocol=protocol,
        device=given.text("device"),
        segment=segment,
        buffer=buffer,
        threads=given.count("threads", MooncakeOptions.threads, high=64),
        replicas=given.count("replicas", MooncakeOptions.replicas, high=64),
        connect=given.seconds("connect", MooncakeOptions.connect, low=0.001),
    )


def _address(scheme: str, where: str) -> tuple[str, int]:
    if not where.startswith("//") or where == "//":
        raise ConfigError(
            f"{scheme}: expected the host of a master, as in '{scheme}://host:{PORT}', "
            f"found {'nothing' if where in ('', '//') else 'no //'}"
        )
    if "@" in where:  # and not a word of what stands before it
        raise ConfigError(f"{scheme}: a master knows no users; leave out what is in front of the @")
    name, slash, path = where[2:].partition("/")
    if path:
        raise ConfigError(f"{scheme}: expected '{scheme}://{name}', found a path: {slash + path!r}")
    return _host_and_port(scheme, "master", name)


def _host_and_port(scheme: str, what: str, name: str) -> tuple[str, int]:
    found = _NAMED.fullmatch(name)
    if not found:
        raise ConfigError(f"{scheme}: {what}: expected host or host:port, found {name!r}")
    port = int(found["port"] or PORT)
    if not 0 < port < 1 << 16:
        raise ConfigError(f"{scheme}: {what}: expected a port from 1 to 65535, found {port}")
    return found["host"].strip("[]"), port


# ---- The store's client: found, started, asked. Every call may block; none needs our buffers.

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
            way = _way_to(options)  # whatever `local`: joining stops the interpreter
            local = options.local or way
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
        there, or that another process has begun to write: it says nothing about the value."""
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
        """0 or a code of each. Values that are being read are removed, too: their memory may get
        other bytes under the reader, which notices by the trailer."""
        return self._batches(lambda part: self._store.batch_remove(part, True), names)

    def remove_all(self, pattern: str) -> int:
        """Remove what matches a regular expression; how many values, or a code."""
        return int(self._store.remove_by_regex(pattern, True))

    def close(self) -> None:
        """Leave. The library holds the interpreter until the master has answered: not to be called
        when it does not."""
        self._store.close()

    def leave(self) -> None:
        """Instead of `close`: the library's threads keep running, and its memory stays, until the
        process ends."""
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


__all__ = [
    "ANSWERING",
    "BATCH",
    "FAILED",
    "LEASE_OVER",
    "NOT_READY",
    "PORT",
    "SEGMENT",
    "SMALLER",
    "Client",
    "MooncakeOptions",
    "absent",
    "meaning",
    "no_room",
    "parse",
]
