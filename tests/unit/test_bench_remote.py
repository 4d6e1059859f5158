"""The benchmark of storages by URL: small, against a real server and against none."""

from __future__ import annotations

from typing import Any

import pytest
from support.redis_server import Server
from support.refusals import refused

from lightcache import ConfigError, StorageError
from lightcache.storage import MemoryStorage, urls
from lightcache.storage.protocol import WriteResult, WriteStatus
from lightcache_bench import _plain_redis, _remote, storage

pytestmark = pytest.mark.servers

KIB = 1 << 10


def measured(url: str) -> dict[str, Any]:
    """Rows of pages of 64 KiB, 40 of them."""
    return {row.name: row for row in _remote.rates(url, 64 * KIB, 40 * 64 * KIB, 2)}


@pytest.mark.parametrize("how", ["tcp", "socket"])
def test_against_a_plain_loop(redis_server: Server, redis_url: str, how: str) -> None:
    url = redis_url if how == "tcp" else f"redis:{redis_server.socket}?db=0&connections=2"
    rows = measured(url)
    assert set(rows) == {"write", "write: processor time", "read", "read: processor time"}
    for verb in ("write", "read"):
        row = rows[verb]
        assert row.baseline == "plain loop"
        assert row.ratio == pytest.approx(row.value / row.params["plain loop"], rel=0.01)
        assert row.met is (row.ratio >= 0.9)
        assert rows[f"{verb}: processor time"].value > 0
    row = _remote.contains(url, 100, 2)
    assert row.params["keys"] == 100
    assert row.value > 0
    with redis_server.client() as client:
        assert client.dbsize() == 0  # nothing stays behind


def test_the_plain_loop_moves_the_same(redis_url: str) -> None:
    plain = _plain_redis.open_plain(redis_url, 5)
    into = bytearray(5)
    plain.write("a", memoryview(b"hello"))
    plain.read("a", memoryview(into))
    assert into == b"hello"
    plain.remove(["a", "b"])
    refused(TypeError, "", plain.read, "a", memoryview(into))
    plain.close()


def test_a_storage_without_a_plain_loop() -> None:
    rows = measured("memory:")
    assert rows["write"].baseline is None
    assert rows["write"].value > 0


def test_a_storage_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(MemoryStorage):
        def write(self, keys: Any, *given: Any, **how: Any) -> WriteResult:
            return WriteResult((WriteStatus.REFUSED,) * len(keys), "it is full")

    monkeypatch.setattr(urls, "_openers", {**urls._openers, "full": lambda rest, spec: Full(spec)})
    refused(StorageError, "it is full", measured, "full:")
    refused(StorageError, "not all keys are stored: it is full", _remote.contains, "full:", 10, 1)


def test_what_is_asked_for_wrongly() -> None:
    with pytest.raises(ConfigError, match="expected --path or --url, found both"):
        list(storage.rows(True, path=".", url="memory:"))
    refused(ConfigError, "found no host", list, storage.rows(True, url="redis://"))
