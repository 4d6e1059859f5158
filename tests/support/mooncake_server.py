"""A Mooncake cluster on loopback: a master, and a process that lends memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import servers
from support.packages import LIBRARIES, need, skip_or_fail

from lightcache.storage import StorageSpec
from lightcache.storage.remote.mooncake.backend import Staging
from lightcache.storage.remote.mooncake.client import Client, MooncakeOptions

LEASE = "200ms"
HOST = "127.0.0.1"


@dataclass
class Cluster:
    """Its master may be stopped, killed and started anew by a test that has one of its own."""

    folder: Path
    silence: int = 3
    """Seconds after which the master takes a client that says nothing for dead."""
    port: int = field(default_factory=servers.free_port)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    lenders: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Of this cluster, with a small buffer."""
        return f"mooncake://{HOST}:{self.port}?buffer=4MiB"

    @property
    def master(self) -> subprocess.Popen[bytes]:
        """The one that was started last."""
        return self._master

    def start_master(self) -> None:
        """On the port of this cluster; it knows of nothing yet."""
        command = [
            program("mooncake_master"),
            f"--rpc_address={HOST}",
            f"--rpc_port={self.port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={servers.free_port()}",
            f"--default_kv_lease_ttl={LEASE}",
            f"--client_ttl={self.silence}",
            "--put_start_discard_timeout_sec=1",
            "--logtostderr",
        ]
        self._master = self._run(command, lambda: servers.listens(self.port), "master")

    def lend(self, size: str = "256 MB") -> None:
        """Start another process that lends memory."""
        port = servers.free_port()
        command = [
            program("mooncake_client"),
            f"--host={HOST}",
            f"--port={port}",
            f"--master_server_address={HOST}:{self.port}",
            "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={size}",
            "--logtostderr",
        ]
        ready = self._run(command, lambda: servers.listens(port), f"lender-{port}")
        self.lenders.append(ready)

    def _run(
        self, command: list[str], ready: Callable[[], bool], name: str
    ) -> subprocess.Popen[bytes]:
        how = {"cwd": self.folder, "env": {**os.environ, "TMPDIR": str(self.folder)}}
        log = self.folder / f"{name}.log"
        return self.stack.enter_context(servers.running(command, ready, log, **how))


def program(name: str) -> str:
    """A program of the package; without it the test is skipped."""
    found = find_spec("mooncake")
    path = Path(next(iter(found.submodule_search_locations or [""]))) / name if found else Path()
    if not path.is_file():
        skip_or_fail(f"no {name}; install: pip install mooncake-transfer-engine-non-cuda")
    need(*LIBRARIES)
    path.chmod(path.stat().st_mode | 0o111)
    return str(path)


@contextlib.contextmanager
def cluster(folder: Path, lenders: int = 1, silence: int = 3) -> Iterator[Cluster]:
    """One with a master and so many lenders; all of it is killed in the end."""
    made = Cluster(folder, silence)
    with made.stack:
        made.start_master()
        for _ in range(lenders):
            made.lend()
        yield made


@pytest.fixture(scope="module")
def mooncake_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a cluster that nobody disturbs."""
    with cluster(tmp_path_factory.mktemp("mooncake"), silence=60) as made:
        yield made.url


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """For a test that disturbs it."""
    with cluster(tmp_path) as made:
        yield made


class Intruder:
    """Another client of a cluster, which stores what it likes under any name."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("mooncake://").partition("?")[0].partition(":")
        self._staging = Staging(1 << 20, 1 << 19)
        options = MooncakeOptions(host, int(port))
        memory = self._staging.address, self._staging.nbytes
        self.client = Client(options, self._staging, *memory)

    def value(self, name: str) -> bytes:
        """All of it."""
        size = self.client.size(name)
        assert self.client.get([name], [self._staging.address], size) == [size]
        return self._bytes()[:size].tobytes()

    def store(self, name: str, value: bytes) -> None:
        """Instead of what is there."""
        self.client.remove([name])
        self._bytes()[: len(value)] = np.frombuffer(value, np.uint8)
        assert self.client.put([name], [self._staging.address], len(value)) == [0]
        assert self.client.exists([name]) == [True]

    def begin(self, name: str, size: int) -> None:
        """To store, and no more than begin."""
        assert self.client._store.batch_put_session_start([name], [size]) == [0]

    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self._staging._memory


@pytest.fixture
def intruder(mooncake_url: str) -> Iterator[Intruder]:
    """In the cluster that nobody disturbs."""
    made = Intruder(mooncake_url)
    yield made
    made.client.close()


def name_of(key: Any, spec: StorageSpec) -> str:
    """Of a page in the store."""
    return f"lightcache/{spec.name}/{key.astype('<u8').tobytes().hex()}"


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port of loopback that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()
        yield int(listening.getsockname()[1])


__all__ = [
    "Cluster",
    "Intruder",
    "cluster",
    "intruder",
    "mooncake_url",
    "name_of",
    "own_cluster",
    "silent",
]
