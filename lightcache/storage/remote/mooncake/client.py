"""The store's client: its URL options, error codes and calls. Every call may block."""

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
from lightcache.storage.common import Options

# ---- Error codes of the client: those of 0.3.13 that occur here

SMALLER = -600  # the value is longer than the buffer
NO_ROOM = -200
NOT_READY = -703
ABSENT = -704
LEASE_OVER = -707
FAILED = -800
_GONE = (-710, -712)  # a copy that the master knew is gone

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
    """True if the code means that there is no such value, or not yet, or not any more."""
    return code in (ABSENT, NOT_READY, *_GONE)


def no_room(code: int) -> bool:
    """True if the code means that the cluster has no memory for a value."""
    return code in (NO_ROOM, -101)


def meaning(code: int) -> str:
    """The meaning of a code, for people."""
    return f"{_MEANINGS.get(code, 'see the error codes of Mooncake Store')} ({code})"


# ---- URLs such as `mooncake://host:50051?segment=64GiB`

PORT = 50051  # the default port of a master
SEGMENT = 16 << 20  # minimum bytes that the client lends
_HANDSHAKE = "P2PHANDSHAKE"  # the client's word for: no metadata server
_OPTIONS = (
    *("local", "metadata", "protocol", "device"),
    *("segment", "buffer", "threads", "replicas", "connect"),
)
_NAMED = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]/\s]+)(:(?P<port>[0-9]+))?")


@dataclass(frozen=True)
class MooncakeOptions:
    """How a cluster is joined."""

    host: str
    """The master's host, without brackets."""
    port: int
    local: str = ""
    """The address, or address:port, at which other machines reach this process. Empty: the local
    address of the connection to the master."""
    metadata: str = _HANDSHAKE
    """Where addresses of peers are found; by default peers ask each other."""
    protocol: str = "tcp"
    device: str = ""
    """RDMA device, such as mlx5_0; several separated by commas."""
    segment: int = 0
    """Bytes of memory that this process lends to the cluster while it lives."""
    buffer: int = 64 << 20
    """Bytes of staging memory."""
    threads: int = 3
    """Batches in flight at a time. With two, other transfers do not hide the master's look-up of a
    page of 8 MiB; a fourth gains nothing (docs/benchmarks.md)."""
    replicas: int = 1
    """Copies of each page, in memory of different processes."""
    connect: float = 5.0
    """Seconds in which the master must accept a connection."""

    @property
    def master(self) -> str:
        """The master's address in the client's format."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(scheme: str, where: str, options: Mapping[str, str]) -> MooncakeOptions:
    """Check a URL without connecting.

    Raises:
        ConfigError: no host, a bad port, credentials, a path, an unknown option, or a bad value.
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
    if "@" in where:  # do not show the text before it
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


# ---- The store's client

BATCH = 2048  # objects in one call: batches of 4,096 have stalled for a minute
ATTEMPTS = 5  # attempts to start the client, which chooses a port that may be taken
ANSWERING = 2.0  # seconds in which the master must answer, or we leave without telling it
_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",  # instead of a dozen lines for each client
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # instead of 20, which hold the interpreter for 90 s
    "MC_RPC_TIMEOUT_MS": "5000",  # instead of 30 s: starting and closing hold the interpreter too
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
}
_environment = threading.Lock()
_started_by: list[int] = []  # the process that started the library's threads; a fork lacks them
_left: list[object] = []  # clients that could not be closed, with their memory; never freed


class Client:
    """One membership in a cluster. Call nothing after `close`: the library would crash."""

    def __init__(self, options: MooncakeOptions, memory: object, address: int, nbytes: int) -> None:
        """Join the cluster. The library holds the interpreter meanwhile, so this first checks that
        the master can be reached.

        Args:
            memory: owner of the registered memory; kept as long as the library may touch it.
            address: address of the memory through which values pass, `nbytes` bytes.

        Raises:
            StorageError: the library is not installed or does not load; the master cannot be
                reached; the cluster cannot be joined.
        """
        self._memory = memory
        with _settings():
            library = _library()
            _check_process()
            way = _way_to(options)  # even if `local` is set: joining holds the interpreter
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
        """For each name, whether it is stored whole.

        Raises:
            StorageError: the master could not tell.
        """
        codes = self.ask(names)
        if bad := next((code for code in codes if code < 0), 0):
            raise StorageError(f"mooncake: {meaning(bad)}")
        return [code == 1 for code in codes]

    def ask(self, names: Sequence[str]) -> list[int]:
        """For each name: 1 if it is stored whole, 0 if not, or an error code."""
        return self._batches(self._store.batch_is_exist, names)

    def put(self, names: Sequence[str], addresses: Sequence[int], size: int) -> list[int]:
        """Store values of one size; returns 0 or an error code for each. It is also 0 if the value
        exists or another process has begun to write it, so 0 does not mean that it is stored."""
        sizes = [size] * len(names)
        found: list[int] = self._store.batch_put_from(
            list(names), list(addresses), sizes, self._replicas
        )
        return found

    def get(self, names: Sequence[str], addresses: Sequence[int], size: int) -> list[int]:
        """Fetch values of up to this size; returns the bytes or an error code of each."""
        sizes = [size] * len(names)
        found: list[int] = self._store.batch_get_into(list(names), list(addresses), sizes)
        return found

    def size(self, name: str) -> int:
        """The bytes of a value, or an error code."""
        return int(self._store.get_size(name))

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove values; returns 0 or an error code for each. Values being read are removed too:
        their memory may change under the reader, which the trailer detects."""
        return self._batches(lambda part: self._store.batch_remove(part, True), names)

    def remove_all(self, pattern: str) -> int:
        """Remove the values that match a regular expression; returns their number or an error
        code."""
        return int(self._store.remove_by_regex(pattern, True))

    def close(self) -> None:
        """Leave the cluster. The library holds the interpreter until the master answers: do not
        call it if the master does not answer."""
        self._store.close()

    def leave(self) -> None:
        """Call it instead of `close` if the master does not answer: the library's threads and
        memory stay until the process ends."""
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
    """Our local address on the way to the master, which must accept a connection."""
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
            0,  # bytes of its own buffer: none, as values pass through ours
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
    """Set our defaults in the environment, which alone configures the library. Settings of the user
    take precedence."""
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
