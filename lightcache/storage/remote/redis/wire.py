"""Commands and answers over one connection, all of it bounded by a deadline.

The client library only makes the connection. Its reader restarts the timeout for each piece of an
answer, however small, and copies a page four times. This module sends and receives pages straight
between the socket and the caller's buffers.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from lightcache.errors import ConfigError, StorageError
from lightcache.storage.common import Deadline, Options
from lightcache.storage.remote.base import TRAILER_BYTES

# ---- URLs such as `redis://user:password@host:6379/0?ttl=3600`
#
# No error shows text that may be part of a password: the text before an "@", or in place of a port.

PORT = 6379
_TLS = ("ca", "cert", "key")
_COMMON = ("connect_timeout", "connections", "password_file", "required", "ttl", "user")
_NUMBER = re.compile(r"[0-9]{1,9}")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class RedisOptions:
    """The address of a server, the user, and options."""

    scheme: str
    host: str = ""
    """Empty: a Unix socket."""
    port: int = PORT
    path: str = ""
    """The path of the Unix socket."""
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    """File read for each new connection, so that the password may change."""
    ca: str = ""
    """File of CA certificates to verify the server with; empty: those of the system."""
    cert: str = ""
    """File of the client certificate, if the server wants one."""
    key: str = ""
    """File of the key of that certificate."""
    ttl: int = 0
    """Seconds until a page expires after its last use; 0: as long as the server keeps it."""
    connections: int = 4
    """Number of connections that move pages at a time."""
    connect_timeout: float = 5.0
    """Seconds for making a connection, within the time of the call that needs it."""
    required: bool = True
    """Whether opening fails if the server cannot be reached."""

    @property
    def tls(self) -> bool:
        """True if the connection is encrypted."""
        return self.scheme in ("rediss", "valkeys")

    @property
    def shown(self) -> str:
        """The server's name in errors, without secrets."""
        if self.path:
            return f"{self.scheme}:{self.path}?db={self.database}"
        return f"{self.scheme}://{self.host}:{self.port}/{self.database}"

    def secret(self) -> str:
        """The current password; empty: none.

        Raises:
            ConfigError: its file cannot be read.
        """
        if not self.password_file:
            return self.password
        try:
            return Path(self.password_file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.scheme}: password_file: expected a file with a password, found {error}"
            ) from None


def parse(scheme: str, where: str, options: Mapping[str, str]) -> RedisOptions:
    """Parse the URL after "scheme:", without connecting.

    Raises:
        ConfigError: no host, a bad port or database, an unknown option, or a bad value.
    """
    tls = scheme in ("rediss", "valkeys")
    known = (*_COMMON, *_TLS, "db")
    if any("@" in name + value for name, value in options.items() if name not in known):
        raise ConfigError(f"{scheme}: {_ESCAPE}")
    if where.startswith("/") and not where.startswith("//"):
        given = Options(scheme, options, (*_COMMON, "db"))
        found = _socket(scheme, where, given, tls)
    else:
        if "db" in options:
            raise ConfigError(
                f"{scheme}: expected the database behind the host, as in '{scheme}://host:6379/1', "
                "found db= among the options, which is for Unix sockets"
            )
        given = Options(scheme, options, _COMMON + (_TLS if tls else ()))
        found = _server(scheme, where)
    return _with_options(found, given)


def _socket(scheme: str, where: str, given: Options, tls: bool) -> dict[str, object]:
    if tls:
        raise ConfigError(
            f"{scheme}: expected '{scheme}://host:{PORT}/0', found a Unix socket, which "
            f"has no TLS; write '{scheme[:-1]}:/path'"
        )
    return {"scheme": scheme, "path": where, "database": given.count("db", 0, low=0)}


def _server(scheme: str, where: str) -> dict[str, object]:
    expected = (
        f"{scheme}: expected '{scheme}://host:{PORT}/0' or, for a Unix socket, "
        f"'{scheme}:/run/redis/redis.sock'"
    )
    if not where.startswith("//"):
        raise ConfigError(f"{expected}, found neither two slashes nor a path behind '{scheme}:'")
    authority, _, database = where[2:].partition("/")
    if "@" in database:
        raise ConfigError(f"{scheme}: {_ESCAPE}")
    user, password, place = _credentials(scheme, authority)
    host, port = _place(expected, scheme, place)
    if database and not _NUMBER.fullmatch(database):
        raise ConfigError(
            f"{scheme}: expected the number of a database behind the host, found {database!r}"
        )
    return {
        "scheme": scheme,
        "host": host,
        "port": port,
        "database": int(database or "0"),
        "user": user,
        "password": password,
    }


def _credentials(scheme: str, authority: str) -> tuple[str, str, str]:
    """User, password, and the rest."""
    before, at, place = authority.rpartition("@")
    if not at:
        return "", "", place
    user, colon, password = before.partition(":")
    if "@" in before:
        raise ConfigError(f"{scheme}: {_ESCAPE}")
    if not colon or not password:
        raise ConfigError(
            f"{scheme}: expected 'user:password@host' or ':password@host', found no password "
            "behind a ':' before the '@'"
        )
    return unquote(user), unquote(password), place


def _place(expected: str, scheme: str, place: str) -> tuple[str, int]:
    """Host and port."""
    head, colon, tail = place.rpartition(":")
    if not colon or tail.endswith("]"):
        head, colon, tail = place, "", str(PORT)
    if not head:
        raise ConfigError(f"{expected}, found no host")
    if not _HOST.fullmatch(head):
        raise ConfigError(f"{expected}, found a host that is none (IPv6 is written in brackets)")
    if not (_NUMBER.fullmatch(tail) and 1 <= int(tail) <= 65535):
        raise ConfigError(
            f"{scheme}: expected a port from 1 to 65535 behind the host, found something else"
        )
    return head.strip("[]"), int(tail)


def _with_options(found: dict[str, object], given: Options) -> RedisOptions:
    scheme = str(found["scheme"])
    if "user" in given:
        if found.get("password"):
            raise ConfigError(f"{scheme}: expected the user once, found it in two places")
        found["user"] = given.text("user")
    if "password_file" in given:
        if found.get("password"):
            raise ConfigError(f"{scheme}: expected the password once, found it and its file")
        found["password_file"] = given.text("password_file")
    if found.get("user") and not (found.get("password") or found.get("password_file")):
        raise ConfigError(f"{scheme}: expected password_file= beside user=, found none")
    if ("cert" in given) != ("key" in given):
        raise ConfigError(f"{scheme}: expected cert= and key= together, found one of them")
    found.update({name: given.text(name) for name in _TLS if name in given})
    return RedisOptions(
        **found,  # type: ignore[arg-type]
        ttl=given.count("ttl", 0, low=1) if "ttl" in given else 0,
        connections=given.count("connections", 4, high=64),
        connect_timeout=given.seconds("connect_timeout", 5.0, low=0.001),
        required=given.choice("required", ("yes", "no")) == "yes",
    )


_ESCAPE = (
    "expected one '@' in front of the host; in a password, '@' is written %40, '/' %2F, ':' %3A, "
    "'?' %3F and '%' %25"
)


# ---- Errors of the server, with remedies

_REMEDIES = {
    "OOM": "it is full: raise maxmemory, or set maxmemory-policy allkeys-lru",
    "READONLY": "it is a replica: give the address of the primary",
    "LOADING": "it reads its data from disk; try again when it has",
    "NOAUTH": "give user and password: redis://user:password@host",
    "WRONGPASS": "correct user or password",
    "NOPERM": "allow this user the keys lightcache/* and the commands of docs/storage.md",
    "MISCONF": "it cannot save its data and takes no writes: see its log; a cache needs no saving",
    "MASTERDOWN": "it is a replica without its primary: give the address of the primary",
    "MOVED": "it is a node of a cluster, which is not supported: give one server",
    "ASK": "it is a node of a cluster, which is not supported: give one server",
    "CROSSSLOT": "it is a node of a cluster, which is not supported: give one server",
    "CLUSTERDOWN": "it is a node of a cluster, which is not supported: give one server",
    "BUSY": "it runs a script; stop that, or wait for it",
    "ERR max number of clients": "raise maxclients, or have fewer connections=",
    "ERR unknown command": "lightcache needs Redis 6.2 or Valkey, with that command",
    "ERR Protocol error: invalid bulk length": "raise proto-max-bulk-len above the size of a page",
    "ERR DB index is out of range": "give the number of a database that there is",
    "ERR AUTH": "it wants no password: leave it out",
    "-DENIED": "it is in protected mode: set a password, or bind it to the address that is meant",
    "DENIED": "it is in protected mode: set a password, or bind it to the address that is meant",
}


class ServerError(StorageError):
    """The server answered with an error."""

    def __init__(self, server: str, words: str) -> None:
        """
        Args:
            server: its name in errors.
            words: its own message.
        """
        self.words = words
        remedy = next((do for what, do in _REMEDIES.items() if words.startswith(what)), "")
        super().__init__(f"{server}: {words}{'; ' + remedy if remedy else ''}")

    @property
    def kind(self) -> str:
        """The first word, the kind of error."""
        return self.words.partition(" ")[0]


# ---- Commands and answers over one connection

Answer = Any
"""int, bytes, None, a list of them, or a ServerError."""
_CHUNK = 1 << 14
_LONGEST = 1 << 20  # maximum bytes of an answer other than a page, for a Redis or Valkey server
_AGES = 1e6  # maximum seconds that a socket waits


class Wire:
    """The two directions of a connection. After any exception the connection is unusable."""

    def __init__(self, server: str) -> None:
        """Not connected yet.

        Args:
            server: its name in errors.
        """
        self._server = server
        self._socket: Any = None
        self._deadline = Deadline(0.0)
        self._kept = bytearray(_CHUNK)
        self._view = memoryview(self._kept)
        self._start = self._end = 0

    def by(self, deadline: Deadline) -> None:
        """Set the deadline of the following calls."""
        self._deadline = deadline

    @property
    def stale(self) -> bool:
        """True if the server has closed the connection or sent unrequested data."""
        if self._socket is None or self._start < self._end:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    # ---- the library's parser interface, used while it makes a connection

    def on_connect(self, connection: Any) -> None:
        """The library has connected a socket, and is about to log in."""
        self._socket = connection._sock
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        """The library has closed the socket."""
        self._socket = None

    def can_read(self, timeout: float) -> bool:
        """True if there is data to read; does not wait."""
        del timeout
        return self.stale

    def read_response(self, **how: Any) -> Answer:
        """The next answer, with the library's exceptions."""
        del how
        from redis.exceptions import ResponseError

        answer = self.answer()
        return ResponseError(answer.words) if isinstance(answer, ServerError) else answer

    # ---- sending

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts.

        Raises:
            StorageError: not in time, or the connection is gone.
        """
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[self._within("sent", lambda rest=left: self._socket.send(rest)) :]

    # ---- receiving

    def ask(self, *parts: bytes) -> Answer:
        """Send a command and read its answer.

        Raises:
            ServerError: the server answered with an error.
            StorageError: not in time, or the connection is gone.
        """
        self.send(command(*parts))
        answer = self.answer()
        if isinstance(answer, ServerError):
            raise answer
        return answer

    def answer(self) -> Answer:
        """The next answer. An error of the server is returned, as other answers may follow.

        Raises:
            StorageError: not in time, the connection is gone, or it is not a Redis answer.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return self._number(line)
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(self._server, rest.decode(errors="replace"))
        if kind == b"$":
            length = self._number(line)
            return None if length < 0 else self._bytes(length)
        if kind == b"*":
            return [self.answer() for _ in range(self._number(line))]
        raise self._strange(line)

    def page(self, view: memoryview) -> tuple[int, bytes] | ServerError | None:
        """Read the answer to GET: the page into the view, and its trailer.

        Returns:
            The length of the value, and its trailer. The view is filled if the value has the length
            of page and trailer, and undefined otherwise. None: there is no value.
        """
        line = self._line()
        if line[:1] == b"-":
            return ServerError(self._server, line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise self._strange(line)
        length = self._number(line)
        if length < 0:
            return None
        beside = b""
        if length == len(view) + TRAILER_BYTES:
            self._fill(view)
            beside = self._take(TRAILER_BYTES)
        else:
            self._skip(length)
        self._end_of_value()
        return length, beside

    # ---- bytes

    def _number(self, line: bytes) -> int:
        try:
            found = int(line[1:])
        except ValueError:
            raise self._strange(line) from None
        return found

    def _bytes(self, length: int) -> bytes:
        if length > _LONGEST:
            raise self._strange(b"$%d" % length)
        found = self._take(length)
        self._end_of_value()
        return found

    def _end_of_value(self) -> None:
        if (found := self._take(2)) != b"\r\n":
            raise self._strange(found)

    def _line(self) -> bytes:
        while (at := self._kept.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start == _CHUNK:
                raise self._strange(bytes(self._kept[:40]))
            self._more()
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        if not line:
            raise self._strange(line)
        return line

    def _more(self) -> None:
        """Receive at least one more byte into the kept ones."""
        if self._start:
            rest = bytes(self._view[self._start : self._end])
            self._kept[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._receive(self._view[self._end :])

    def _take(self, length: int) -> bytes:
        found = bytearray(length)
        self._fill(memoryview(found))
        return bytes(found)

    def _skip(self, length: int) -> None:
        nowhere = memoryview(bytearray(min(length, _LONGEST)))
        while length:
            part = nowhere[: min(length, len(nowhere))]
            self._fill(part)
            length -= len(part)

    def _fill(self, view: memoryview) -> None:
        kept = min(len(view), self._end - self._start)
        view[:kept] = self._view[self._start : self._start + kept]
        self._start += kept
        if kept < len(view) <= 64:  # the end of a value: receive the bytes after it as well
            self._more()
            self._fill(view[kept:])
            return
        view = view[kept:]
        while view:
            view = view[self._receive(view) :]

    def _receive(self, view: memoryview) -> int:
        count: int = self._within("answered", lambda: self._socket.recv_into(view))
        if not count:
            raise StorageError(f"{self._server}: it closed the connection")
        return count

    def _within(self, what: str, work: Any) -> Any:
        """Make one system call, with the deadline as its timeout."""
        late = f"{self._server}: not {what} in time"
        left = self._deadline.left
        if not left:
            raise StorageError(late)
        try:
            self._socket.settimeout(min(left, _AGES))
            return work()
        except TimeoutError:
            raise StorageError(late) from None
        except OSError as error:
            raise StorageError(f"{self._server}: the connection is gone: {error}") from error

    def _strange(self, line: bytes) -> StorageError:
        return StorageError(
            f"{self._server}: expected an answer of Redis or Valkey, found {line[:40]!r}; is it "
            "another server, or does it want TLS?"
        )


def command(*parts: bytes) -> bytes:
    """A command as it is sent."""
    pieces = [b"*%d\r\n" % len(parts)]
    pieces += [b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]
    return b"".join(pieces)


def around_value(
    before: Sequence[bytes], length: int, after: Sequence[bytes]
) -> tuple[bytes, bytes]:
    """For a command with a value of `length` bytes: the bytes sent before and after the value."""
    pieces = [b"*%d\r\n" % (len(before) + 1 + len(after))]
    pieces += [b"$%d\r\n%b\r\n" % (len(part), part) for part in before]
    pieces.append(b"$%d\r\n" % length)
    return b"".join(pieces), b"\r\n" + b"".join(
        b"$%d\r\n%b\r\n" % (len(part), part) for part in after
    )


# ---- Connections: made by the client library, lent to one user at a time, dropped if they fail

_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds and a count: the loss of a server's machine is noticed within 45 s."""
_LOOK = 0.3  # seconds for finding out why a server refuses us
_CLOSED = (ConnectionResetError, BrokenPipeError, EOFError)
_THERE = "is the server started, and the address right?"


def library(scheme: str) -> ModuleType:
    """The client library.

    Raises:
        StorageError: it is not installed, or too old. Not a ConfigError, as the URL may be right.
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


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class Connections:
    """The connections of one storage. At most `keep` idle ones are kept."""

    def __init__(self, options: RedisOptions, keep: int) -> None:
        """Connects nothing yet.

        Raises:
            ConfigError: a file named in the URL cannot be read.
            StorageError: the client library is missing or too old.
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
        """Lend a connection for the `with` statement. An exception drops it, as the rest of an
        answer may still arrive.

        Raises:
            StorageError: the server cannot be reached or refuses us, or the time is up.
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
        """Close the idle connections; lent ones are closed when they are returned."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.disconnect()

    def _idle_one(self) -> tuple[Any, Wire] | None:
        """An idle connection that the server has not closed meanwhile."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, wire = self._idle.pop()
            if not wire.stale:
                return connection, wire
            connection.disconnect()

    # ---- connecting

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
        # Connecting and the TLS handshake may each use their whole timeout.
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
        """The class of the connection, and its address arguments. A name may have several
        addresses, which are tried in turn; each gets its part of the time."""
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
        """The error to report. A server that accepts a connection and no more is asked why once."""
        if isinstance(error, ServerError):
            return error
        server, exceptions = self._options.shown, self._redis.exceptions
        if isinstance(error, exceptions.ResponseError):
            # A server that does not know AUTH repeats the arguments, with the password.
            return ServerError(server, str(error).partition(", with args")[0])
        causes = list(_causes(error))
        for cause in causes:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return StorageError(
                    f"{server}: its certificate is refused: CERTIFICATE_VERIFY_FAILED: "
                    f"{cause.verify_message.rstrip('.')}; give the authority that signed it with "
                    "ca=, and a host that it is for"
                )
        if found := self._refusal(any(isinstance(one, _CLOSED) for one in causes)):
            return found
        if isinstance(error, StorageError):
            return StorageError(f"{error}; {_THERE}")
        what = "no answer in time" if isinstance(error, exceptions.TimeoutError) else str(error)
        return StorageError(f"{server}: cannot connect: {what.rstrip('.')}; {_THERE}")

    def _refusal(self, closed: bool) -> StorageError | None:
        """Why a server refuses us, judged by its answer to a PING without TLS.

        Args:
            closed: it closed our connection before it sent anything.
        """
        server, said = self._options.shown, self._said()
        words = said[1:].decode(errors="replace")
        if words.startswith("ERR max number of clients"):
            return ServerError(server, words)
        if said[:1] in (b"+", b"-") and self._options.tls:
            scheme = self._options.scheme.removesuffix("s")
            return StorageError(
                f"{server}: it answers without TLS; write {scheme}:, or give the port where it "
                "speaks TLS"
            )
        if not self._options.tls and (said[:1] == b"\x15" or (closed and not said)):
            return StorageError(
                f"{server}: it closes the connection before it says a word; does it want TLS "
                f"({self._options.scheme}s:), or a password?"
            )
        return None

    def _said(self) -> bytes:
        """The server's first line after a PING; empty: it is unreachable or sends nothing."""
        options = self._options
        try:
            if options.path:
                way = socket.socket(socket.AF_UNIX)
            else:
                way = socket.create_connection((options.host, options.port), _LOOK)
            with way:
                if options.path:
                    way.settimeout(_LOOK)
                    way.connect(options.path)
                with contextlib.suppress(OSError):  # it may have sent the reason before
                    way.sendall(b"PING\r\n")
                return way.recv(256).partition(b"\r\n")[0]
        except (OSError, UnicodeError):
            return b""

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


__all__ = [
    "PORT",
    "Answer",
    "Connections",
    "RedisOptions",
    "ServerError",
    "Wire",
    "around_value",
    "command",
    "library",
    "parse",
]
