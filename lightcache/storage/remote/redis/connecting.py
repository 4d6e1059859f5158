"""Connections: made by the client library, lent to one user at a time, dropped when they fail."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from lightcache.errors import ConfigError, StorageError
from lightcache.storage.arguments import Deadline
from lightcache.storage.remote.redis.options import RedisOptions
from lightcache.storage.remote.redis.wire import Wire
from lightcache.storage.remote.redis.words import ServerError

_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, and how often: that a server's machine is gone is noticed within 45 s."""

_THERE = "is the server started, and the address right?"


def library(scheme: str) -> ModuleType:
    """The client library.

    Raises:
        StorageError: it is not installed, or too old. No ConfigError: the URL may be right.
    """
    install = "pip install 'lightcache[redis]'"
    try:
        import redis
    except ImportError as error:
        raise StorageError(f"{scheme}: the package redis is not installed; {install}") from error
    version = str(getattr(redis, "__version__", "0"))
    if not (found := re.match("[0-9]+", version)) or int(found[0]) < 5:
        raise StorageError(
            f"{scheme}: expected the package redis 5 or later, found {version}; {install}"
        )
    return redis


class Connections:
    """Those of one storage. Idle ones are kept, up to so many."""

    def __init__(self, options: RedisOptions, keep: int) -> None:
        """None yet.

        Raises:
            ConfigError: a file that the URL names is not there.
            StorageError: no client library.
        """
        self._options, self._keep = options, keep
        self._redis = library(options.scheme)
        self._lock = threading.Lock()
        self._idle: list[tuple[Any, Wire]] = []
        self._closed = False
        self._certificates()
        options.secret()

    @contextlib.contextmanager
    def one(self, deadline: Deadline) -> Iterator[Wire]:
        """A connection that is ours until the end of the statement; an exception drops it, since
        nobody knows what of an answer is still to come.

        Raises:
            StorageError: the server is not there, or will not have us, or not in time.
        """
        connection, wire = self._idle_one() or self._made(deadline)
        wire.by(deadline)
        try:
            yield wire
        except BaseException:
            connection.disconnect()
            raise
        with self._lock:
            if not self._closed and len(self._idle) < self._keep:
                self._idle.append((connection, wire))
                return
        connection.disconnect()

    def close(self) -> None:
        """Nobody has one any more."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.disconnect()

    def _idle_one(self) -> tuple[Any, Wire] | None:
        """One that the server has not closed meanwhile, as it does when it ends."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, wire = self._idle.pop()
            if not wire.stale:
                return connection, wire
            connection.disconnect()

    # ---- making one

    def _made(self, deadline: Deadline) -> tuple[Any, Wire]:
        options = self._options
        hurry = Deadline(min(options.connect_timeout, deadline.left))
        wire = Wire(options.shown)
        wire.by(hurry)
        try:
            secret = options.secret()
        except ConfigError as error:  # the file was there before
            raise StorageError(f"{options.shown}: {error}") from None
        kind, place = self._place(hurry)
        # Connecting and the handshake of TLS each take as long as they are given.
        parts = 2 if options.tls else 1
        connection = kind(
            **place,
            db=options.database,
            username=options.user or None,
            password=secret or None,
            protocol=2,
            socket_timeout=max(hurry.left / parts, 1e-3),
            parser_class=lambda socket_read_size: wire,
        )
        try:
            connection.connect()
            return connection, wire
        except BaseException as error:
            connection.disconnect()
            if not isinstance(error, Exception):
                raise
            raise self._failed(error) from error

    def _place(self, hurry: Deadline) -> tuple[Any, dict[str, Any]]:
        """Of which kind it is, and where to. A name may have several addresses, which are tried
        one after the other: each has its part of the time."""
        options = self._options
        if options.path:
            place: dict[str, Any] = {"path": options.path}
            place["socket_connect_timeout"] = max(hurry.left, 1e-3)
            return self._redis.UnixDomainSocketConnection, place
        try:
            found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise StorageError(f"{options.shown}: this host is not known: {error}") from error
        place = {
            "host": options.host,
            "port": options.port,
            "socket_connect_timeout": max(hurry.left / len(found) / (1 + options.tls), 1e-3),
            "socket_keepalive": True,
            "socket_keepalive_options": {
                getattr(socket, name): value
                for name, value in _ALIVE.items()
                if hasattr(socket, name)
            },
        }
        if not options.tls:
            return self._redis.Connection, place
        place.update(
            ssl_ca_certs=options.ca or None,
            ssl_certfile=options.cert or None,
            ssl_keyfile=options.key or None,
            ssl_cert_reqs="required",
            ssl_check_hostname=True,
        )
        return self._redis.SSLConnection, place

    def _failed(self, error: Exception) -> StorageError:
        if isinstance(error, StorageError):
            return StorageError(f"{error}; {_THERE}")
        server, exceptions = self._options.shown, self._redis.exceptions
        if isinstance(error, exceptions.ResponseError):
            # A server that does not know AUTH repeats what it was given.
            return ServerError(server, str(error).partition(", with args")[0])
        what = "no answer in time" if isinstance(error, exceptions.TimeoutError) else str(error)
        return StorageError(f"{server}: cannot connect: {what.rstrip('.')}; {_THERE}")

    def _certificates(self) -> None:
        for name in ("ca", "cert", "key"):
            path = getattr(self._options, name)
            try:
                if path:
                    with open(path, "rb"):
                        pass
            except OSError as error:
                raise ConfigError(
                    f"{self._options.scheme}: {name}: expected a file to read, found {error}"
                ) from None


__all__ = ["Connections", "library"]
