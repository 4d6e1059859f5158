"""What a URL such as `redis://user:password@host:6379/0?ttl=3600` says.

What may be a part of a password is in no error: neither what stands before an "@", nor what stands
where a port is expected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from lightcache.errors import ConfigError
from lightcache.storage.options import Options

PORT = 6379
_TLS = ("ca", "cert", "key")
_COMMON = ("connect_timeout", "connections", "password_file", "required", "ttl", "user")
_NUMBER = re.compile(r"[0-9]{1,9}")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class RedisOptions:
    """Where a server is, who asks, and how."""

    scheme: str
    host: str = ""
    """Empty: a Unix socket."""
    port: int = PORT
    path: str = ""
    """Of the Unix socket."""
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    """Read whenever a connection is made, so that a password may change."""
    ca: str = ""
    """File of certificates that a server's must come from; empty: those of the system."""
    cert: str = ""
    """File of our own certificate, if the server wants one."""
    key: str = ""
    """File of its key."""
    ttl: int = 0
    """Seconds behind the last use of a page; 0: for as long as the server keeps it."""
    connections: int = 4
    """That move pages at a time."""
    connect_timeout: float = 5.0
    """Seconds for making a connection, of the time of the call that needs it."""
    required: bool = True
    """Whether opening fails when the server is not there."""

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in ("rediss", "valkeys")

    @property
    def shown(self) -> str:
        """What errors call the server: nothing secret is in it."""
        if self.path:
            return f"{self.scheme}:{self.path}?db={self.database}"
        return f"{self.scheme}://{self.host}:{self.port}/{self.database}"

    def secret(self) -> str:
        """The password of just now; empty: none.

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
    """What stands behind "scheme:", without connecting.

    Raises:
        ConfigError: no host, a port or database that is none, an option that there is not, or a
            value that is none.
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
    """User, password, and what stands behind them."""
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

__all__ = ["PORT", "RedisOptions", "parse"]
