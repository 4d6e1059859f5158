"""A Redis or Valkey server of a test, on loopback and a Unix socket, and ways to stop it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.packages import need
from support.servers import free_port, hold, listens, running

DATABASES = 16


class Server:
    """One that may be stopped and started again, on the same port. It keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        """Not started.

        Args:
            options: further ones of the command line.
            tls: its port takes TLS alone.
        """
        self.port, self.folder = free_port(), folder
        self.socket = folder / "s"
        self._tls, self._options = tls, options
        self._stack = contextlib.ExitStack()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        port = ("--port", "0", "--tls-port") if self._tls else ("--port",)
        command: Sequence[str | Path] = (
            program(),
            *("--save", "", "--bind", "127.0.0.1", *port, str(self.port)),
            *("--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *("--dir", str(self.folder), "--databases", str(DATABASES), *self._options),
        )
        log = self.folder / "log"
        self.process = self._stack.enter_context(running(command, lambda: listens(self.port), log))

    def stop(self) -> None:
        """SIGKILL; what it had is gone."""
        self._stack.close()
        self.process = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def url(self, database: int = 0, options: str = "", port: int | None = None) -> str:
        """Over TCP; `port`: of a proxy in front of it."""
        return f"redis://127.0.0.1:{port or self.port}/{database}{'?' + options if options else ''}"

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """It lives, and does nothing."""
        assert self.process is not None
        hold(self.process.pid)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def client(self, database: int = 0, **how: Any) -> Any:
        """Another client, that of the library."""
        import redis

        return redis.Redis(unix_socket_path=str(self.socket), db=database, protocol=2, **how)


def program() -> str:
    """The server's program."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    need("redis-server")
    raise AssertionError


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of a module."""
    with Server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: Server) -> Iterator[str]:
    """Of an empty database of it."""
    with redis_server.client() as client:
        client.flushall()
        yield redis_server.url()
        client.flushall()


__all__ = ["DATABASES", "Server", "program", "redis_server", "redis_url"]
