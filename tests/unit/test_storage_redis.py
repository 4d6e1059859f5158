"""Pages in a real Redis or Valkey: what is stored, what is found, what is damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.redis_server import DATABASES, Server
from support.remote_pages import KEYS, PAGES, TIMEOUT, read, write
from support.storing import SECRET, fill, make_cache, nothing_is_held, sound

from lightcache import StorageError
from lightcache.storage import StorageSpec, StorageTier, open_storage
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.remote.base import make_trailer
from lightcache.storage.remote.redis import backend
from lightcache.storage.remote.redis.backend import RedisStorage
from lightcache.storage.testing.conformance import CHECKS, PAGE_BYTES, SPEC, make_keys

pytestmark = pytest.mark.servers


def opened(url: str, spec: StorageSpec = SPEC) -> RedisStorage:
    storage = open_storage(url, spec=spec)
    assert isinstance(storage, RedisStorage)
    return storage


@pytest.fixture
def storage(redis_url: str) -> Iterator[RedisStorage]:
    with opened(redis_url) as made:
        yield made


@pytest.fixture
def client(redis_server: Server) -> Iterator[Any]:
    """Somebody else's, of the same database."""
    with redis_server.client() as made:
        yield made


def name_of(storage: RedisStorage, number: int) -> str:
    return storage.object_name(KEYS[number].astype("<u8").tobytes())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("how", ["tcp", "socket", "one", "ttl"])
def test_conformance(
    redis_server: Server, redis_url: str, how: str, check: Callable[..., None]
) -> None:
    url = {
        "tcp": redis_url,
        "socket": f"redis:{redis_server.socket}",
        "one": redis_url.replace("redis:", "valkey:") + "?connections=1",
        "ttl": redis_url + "?ttl=3600",
    }[how]
    check(lambda spec: opened(url, spec))


def test_a_value_is_the_page_and_its_trailer(storage: RedisStorage, client: Any) -> None:
    write(storage)
    key = KEYS[3].astype("<u8").tobytes()
    assert client.get(name_of(storage, 3)) == bytes(PAGES[3]) + make_trailer(key, bytes(PAGES[3]))
    assert client.ttl(name_of(storage, 3)) == -1


def test_another_machine_finds_it(storage: RedisStorage, redis_url: str) -> None:
    write(storage)
    with opened(redis_url) as other:
        assert other.contains(KEYS, timeout=TIMEOUT) == 12
        assert read(other).prefix == 12
        assert write(other).count(WriteStatus.PRESENT) == 12


def test_another_database_does_not(redis_server: Server, storage: RedisStorage) -> None:
    write(storage)
    with opened(redis_server.url(1)) as other:
        assert other.contains(KEYS, timeout=TIMEOUT) == 0


def test_of_two_that_write_one_page_one_stores_it(
    storage: RedisStorage, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question whether it is there and the storing, the other one stored it."""
    with opened(redis_url) as other:
        before = storage._put

        def put(*arguments: Any) -> Any:
            assert write(other).count(WriteStatus.STORED) == 12
            return before(*arguments)

        monkeypatch.setattr(storage, "_put", put)
        assert write(storage).count(WriteStatus.PRESENT) == 12
    assert read(storage).prefix == 12


# ---- damage


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda good: good[:-1], "stored in 4119 bytes, not 4120"),
        (lambda good: good + b"x", "stored in 4121 bytes"),
        (lambda good: b"", "stored in 0 bytes"),
        (lambda good: b"x" * (5 << 20), "stored in 5242880 bytes"),
        (lambda good: b"x" * len(good), "stored by something else"),
        (lambda good: b"?" + good[1:], "another checksum"),
        (lambda good: good[:-1] + b"?", "another checksum"),
        (lambda good: good[:-24] + good[-24:].replace(b"lcp1", b"lcp9"), "something else"),
    ],
)
def test_a_damaged_value_is_dropped_and_stored_anew(
    storage: RedisStorage, client: Any, value: Any, why: str
) -> None:
    assert PAGE_BYTES == 4096
    write(storage)
    name = name_of(storage, 5)
    client.set(name, value(client.get(name)))
    result = read(storage)
    assert result.statuses[5] is ReadStatus.CORRUPT
    assert result.count(ReadStatus.OK) == 11  # the connection goes on behind such a value
    assert why in result.reason
    assert not client.exists(name)
    wrote = write(storage)
    assert wrote.statuses[5] is WriteStatus.STORED
    assert wrote.count(WriteStatus.PRESENT) == 11
    assert read(storage).prefix == 12


def test_a_value_of_another_kind_is_dropped(storage: RedisStorage, client: Any) -> None:
    client.rpush(name_of(storage, 0), "a", "b")
    assert storage.contains(KEYS, timeout=TIMEOUT) == 1
    result = read(storage)
    assert result.statuses[0] is ReadStatus.CORRUPT
    assert "no string" in result.reason
    assert write(storage).count(WriteStatus.STORED) == 12


# ---- time to live, room, removing


def test_ttl_comes_with_the_value_and_is_renewed_when_it_is_read(
    redis_url: str, client: Any
) -> None:
    with opened(f"{redis_url}?ttl=1000") as storage:
        write(storage)
        name = name_of(storage, 0)
        assert 990 < client.ttl(name) <= 1000
        client.expire(name, 10)
        assert storage.contains(KEYS[:1], timeout=TIMEOUT) == 1
        assert client.ttl(name) <= 10
        assert read(storage).prefix == 12
        assert 990 < client.ttl(name) <= 1000


def test_a_full_server_refuses(storage: RedisStorage, client: Any) -> None:
    write(storage, KEYS[:2])
    client.config_set("maxmemory", "1")
    try:
        result = write(storage)
        assert result.statuses == (WriteStatus.PRESENT,) * 2 + (WriteStatus.REFUSED,) * 10
        assert "OOM command not allowed" in result.reason
        assert "raise maxmemory" in result.reason
        assert read(storage).prefix == 2
    finally:
        client.config_set("maxmemory", "0")
    assert write(storage).count(WriteStatus.STORED) == 10


def test_clear_removes_what_is_ours_alone(
    storage: RedisStorage, redis_url: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_BATCH", 3)
    with opened(redis_url, StorageSpec(PAGE_BYTES, "another")) as other:
        for each in (storage, other):
            write(each)
        client.set("somebody's", "1")
        assert storage.clear(timeout=TIMEOUT) == 12
        assert storage.contains(KEYS, timeout=TIMEOUT) == 0
        assert read(other).prefix == 12
        assert other.delete(KEYS, timeout=TIMEOUT) == 12
    assert client.keys() == [b"somebody's"]


def test_many_keys_are_asked_for_in_one_round_trip(redis_server: Server, redis_url: str) -> None:
    keys = make_keys(2000)
    spec = StorageSpec(16, "small")
    with opened(redis_url, spec) as storage:
        pages = [np.full(16, i % 256, np.uint8) for i in range(2000)]
        assert storage.write(keys, pages, timeout=TIMEOUT).prefix == 2000
        with redis_server.client() as client:
            before = client.info("stats")["total_reads_processed"]
            assert storage.contains(keys, timeout=TIMEOUT) == 2000
            asked = client.info("stats")["total_reads_processed"] - before
        assert asked < 20  # as much as fits into a reading of the server's, at a time


# ---- all of it


def test_a_cache_with_another_name_finds_what_the_first_wrote(
    redis_url: str, segment_name: str
) -> None:
    tokens = np.arange(160)
    for name, work in ((f"{segment_name}-a", "write"), (f"{segment_name}-b", "read")):
        with make_cache(name, secret=SECRET) as cache:
            keys = cache.hash_pages(tokens)
            with opened(redis_url, StorageSpec.of(cache)) as storage:
                tier = StorageTier(cache, storage, group=4)
                if work == "write":
                    fill(cache, keys)
                    assert tier.write(keys).wait(TIMEOUT).stored == 10
                else:
                    assert tier.prefetch(keys).wait(TIMEOUT).prefix == 10
                    assert sound(cache, keys) == 10
                assert tier.close()
            nothing_is_held(cache)


def test_connections_are_as_many_as_the_option_says_and_end_with_it(
    redis_server: Server, redis_url: str, wait_until: Any
) -> None:
    with redis_server.client() as client:

        def connections() -> set[str]:
            return {each["id"] for each in client.client_list()}

        before = connections()  # those of other tests may end at any time
        with opened(f"{redis_url}?connections=3") as storage:
            write(storage)
            read(storage)
            assert 0 < len(connections() - before) <= 4  # three, and one that asks
        wait_until(lambda: connections() <= before, "its connections end")
    assert not [thread for thread in threading.enumerate() if "lightcache-redis" in thread.name]


def test_nothing_secret_is_shown(redis_server: Server) -> None:
    assert DATABASES > 3
    with opened(redis_server.url(3)) as storage:
        assert repr(storage) == f"RedisStorage('redis://127.0.0.1:{redis_server.port}/3')"
    url = f"redis://user:hush@127.0.0.1:{redis_server.port}/0"
    with pytest.raises(StorageError) as caught:
        opened(url)
    assert "hush" not in str(caught.value)
    assert "correct user or password" in str(caught.value)
