"""The package redis alone, in a plain loop: the baseline of `storage --url redis://...`."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from lightcache.storage.remote.redis.wire import RedisOptions, library, parse


class _Plain:
    """See `_remote.Plain`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def write(self, name: str, view: memoryview) -> None:
        self._client.set(name, view)

    def read(self, name: str, view: memoryview) -> None:
        view[:] = self._client.get(name)

    def remove(self, names: list[str]) -> None:
        self._client.unlink(*names)

    def close(self) -> None:
        self._client.close()


def open_plain(url: str, page_bytes: int) -> _Plain:
    """A client of the server that this URL means."""
    del page_bytes  # the client takes any
    scheme, _, rest = url.partition(":")
    where, _, query = rest.partition("?")
    options = parse(scheme, where, dict(parse_qsl(query)))
    return _Plain(library(scheme).Redis(**_arguments(options), protocol=2))


def _arguments(options: RedisOptions) -> dict[str, Any]:
    found: dict[str, Any] = {
        "db": options.database,
        "username": options.user or None,
        "password": options.secret() or None,
    }
    if options.path:
        return {**found, "unix_socket_path": options.path}
    found.update(host=options.host, port=options.port)
    if options.tls:
        found.update(
            ssl=True,
            ssl_ca_certs=options.ca or None,
            ssl_certfile=options.cert or None,
            ssl_keyfile=options.key or None,
        )
    return found
