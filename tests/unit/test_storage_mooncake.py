"""The storage in a Mooncake cluster, over a real master and a process that lends memory."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import servers
from support.mooncake_server import Intruder, cluster, name_of, silent
from support.packages import LIBRARIES, need
from support.refusals import refused
from support.storing import PAGE_TOKENS, fill, make_cache, nothing_is_held, sound

from lightcache import ConfigError, Detached, StorageError
from lightcache.storage import StorageSpec, StorageTier, open_storage
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.remote.base import TRAILER_BYTES, make_trailer
from lightcache.storage.remote.mooncake import backend
from lightcache.storage.remote.mooncake import client as mooncake_client
from lightcache.storage.remote.mooncake.backend import MooncakeStorage
from lightcache.storage.remote.mooncake.client import MooncakeOptions, parse
from lightcache.storage.testing.conformance import CHECKS, PAGE_BYTES, SPEC, make_keys, pages_of
from lightcache.storage.urls import check_url

pytestmark = pytest.mark.servers

KEYS = make_keys(12, seed=5)
PAGES = list(pages_of(KEYS))
TIMEOUT = 60.0
_specs = itertools.count()


@pytest.fixture(scope="module")
def client_libraries() -> None:
    """What Mooncake's client loads; `mooncake_url` has asked for it already."""
    need(*LIBRARIES)


@pytest.fixture(scope="module")
def conforming(mooncake_url: str) -> Iterator[Any]:
    """Sees the pages of the conformance suite, to remove what a check has left."""
    with open_storage(mooncake_url, spec=SPEC) as made:
        yield made


@pytest.fixture
def storage(mooncake_url: str) -> Iterator[Any]:
    """For pages that no other test sees."""
    spec = StorageSpec(PAGE_BYTES, f"test {next(_specs)}")
    with open_storage(mooncake_url, spec=spec) as made:
        yield made
        made.clear(timeout=TIMEOUT)


def write(storage: Any, keys: Any = KEYS, pages: Any = PAGES, timeout: float = TIMEOUT) -> Any:
    return storage.write(keys, pages[: len(keys)], timeout=timeout)


def read(storage: Any, keys: Any = KEYS, timeout: float = TIMEOUT) -> tuple[Any, Any]:
    into = np.zeros((len(keys), PAGE_BYTES), np.uint8)
    return storage.read(keys, list(into), timeout=timeout), into


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[..., None], mooncake_url: str, conforming: Any) -> None:
    try:
        check(lambda spec: open_storage(mooncake_url, spec=spec))
    finally:
        conforming.clear(timeout=TIMEOUT)


# ---- the URL, and opening


def test_a_url_says_how_to_join() -> None:
    assert parse("mooncake", "//host", {}) == MooncakeOptions("host", 50051)
    given = {
        "local": "10.0.0.1:1234",
        "metadata": "http://host:8080/metadata",
        "protocol": "rdma",
        "device": "mlx5_0,mlx5_1",
        "segment": "1GiB",
        "buffer": "128MiB",
        "threads": "3",
        "replicas": "2",
        "connect": "1.5",
    }
    found = parse("mooncake", "//[fd00::1]:7", given)
    assert found.master == "[fd00::1]:7"
    assert (found.segment, found.buffer, found.threads) == (1 << 30, 128 << 20, 3)
    assert (found.local, found.protocol, found.device) == ("10.0.0.1:1234", "rdma", "mlx5_0,mlx5_1")
    assert (found.replicas, found.connect, found.metadata) == (2, 1.5, given["metadata"])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mooncake:", "expected the host of a master.*found nothing"),
        ("mooncake://", "found nothing"),
        ("mooncake:host", "found no //"),
        ("mooncake://:50051", "expected host or host:port"),
        ("mooncake://host:port", "expected host or host:port"),
        ("mooncake://host:0", "expected a port from 1 to 65535, found 0"),
        ("mooncake://host:65536", "found 65536"),
        ("mooncake://host/0", "found a path: '/0'"),
        ("mooncake://host?segmnt=1GiB", "expected local, metadata.*found segmnt"),
        ("mooncake://host?segment=much", "segment"),
        ("mooncake://host?segment=1MiB", "expected 16MiB or more"),
        ("mooncake://host?threads=0", "threads: expected a number from 1"),
        ("mooncake://host?replicas=two", "replicas: expected a number"),
        ("mooncake://host?connect=-1", "connect: expected seconds"),
        ("mooncake://host?protocol=udp", "protocol: expected tcp or rdma"),
        ("mooncake://host?device=mlx5_0", "device is of protocol=rdma"),
        ("mooncake://host?local=", "local: expected a value, found none"),
    ],
)
def test_bad_urls(url: str, why: str) -> None:
    for act in (lambda: check_url(url), lambda: open_storage(url, page_bytes=4096)):
        refused(ConfigError, why, act)


def test_credentials_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="knows no users") as found:
        check_url("mooncake://user:secret@host:50051")
    assert "secret" not in str(found.value)


def test_a_url_is_checked_without_connecting() -> None:
    check_url("mooncake://no-such-host.invalid:50051?segment=1GiB")


@pytest.mark.usefixtures("client_libraries")
def test_nobody_is_there() -> None:
    port = servers.free_port()
    with pytest.raises(StorageError, match=rf"127.0.0.1:{port} cannot be reached.*mooncake_master"):
        open_storage(f"mooncake://127.0.0.1:{port}", page_bytes=4096)


def test_no_client_is_started_where_no_master_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining stops the interpreter for seconds: the master is tried first, whatever `local=`."""

    class Library:
        def __getattr__(self, name: str) -> None:
            raise AssertionError(name)

    monkeypatch.setattr("lightcache.storage.remote.mooncake.client._library", Library)
    monkeypatch.setattr("lightcache.storage.remote.mooncake.client._started_by", [])
    url = f"mooncake://127.0.0.1:{servers.free_port()}?local=127.0.0.1"
    refused(StorageError, "cannot be reached", open_storage, url, page_bytes=4096)


@pytest.mark.usefixtures("client_libraries")
def test_a_host_without_an_address() -> None:
    with pytest.raises(StorageError, match="cannot be reached"):
        open_storage("mooncake://no-such-host.invalid", page_bytes=4096)


@pytest.mark.usefixtures("client_libraries")
def test_a_master_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")
    with silent() as port, pytest.raises(StorageError, match=r"cannot be joined.*mooncake_master"):
        open_storage(f"mooncake://127.0.0.1:{port}?connect=0.1", page_bytes=4096)
    assert "MC_LOG_LEVEL" not in os.environ


def test_a_buffer_without_room_for_a_page() -> None:
    with pytest.raises(ConfigError, match=r"buffer: expected 4160 bytes or more.*found 4096"):
        open_storage("mooncake://127.0.0.1:1?buffer=4096", page_bytes=4096)


def test_without_the_client(monkeypatch: pytest.MonkeyPatch, mooncake_url: str) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StorageError, match=r"not installed; pip install 'lightcache\[mooncake\]'"):
        open_storage(mooncake_url, page_bytes=4096)


def test_a_client_that_does_not_load(monkeypatch: pytest.MonkeyPatch, mooncake_url: str) -> None:
    def load(name: str) -> Any:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", load)
    spec = StorageSpec(4096)
    options = parse("mooncake", mooncake_url[len("mooncake:") :].partition("?")[0], {})
    with pytest.raises(StorageError, match=r"does not load: libibverbs.so.1.*package libibverbs1"):
        MooncakeStorage(options, spec)


def test_without_threads(monkeypatch: pytest.MonkeyPatch, mooncake_url: str) -> None:
    """Nobody has joined anything then, and the one that was started has ended."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def few(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(StorageError, match=r"can't start new thread; give fewer threads="):
        open_storage(mooncake_url, page_bytes=4096)
    started[0].join(TIMEOUT)
    assert not started[0].is_alive()


def test_a_fork_cannot_open_one(storage: Any, mooncake_url: str) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            storage.contains(KEYS, timeout=TIMEOUT)
        except Detached:
            try:
                open_storage(mooncake_url, page_bytes=4096)
            except StorageError as error:
                status = 0 if "spawned" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.contains(KEYS, timeout=TIMEOUT) == 0


# ---- values that are not ours


def damage(value: bytes, what: str) -> bytes:
    return {
        "a bit": value[:7] + bytes([value[7] ^ 1]) + value[8:],
        "the trailer": value[:-1] + bytes([value[-1] ^ 1]),
        "shorter": value[:-1],
        "longer": value + b"x",
        "foreign": b"something else",
    }[what]


@pytest.mark.parametrize("what", ["a bit", "the trailer", "shorter", "longer", "foreign"])
def test_a_value_that_is_not_ours(storage: Any, intruder: Intruder, what: str) -> None:
    assert write(storage).count(WriteStatus.STORED) == 12
    name = name_of(KEYS[4], storage.spec)
    intruder.store(name, damage(intruder.value(name), what))
    result, into = read(storage)
    assert result.statuses[4] is ReadStatus.CORRUPT
    assert result.reason.startswith("corrupt")
    assert result.count(ReadStatus.OK) == 11
    assert (into[:4] == PAGES[:4]).all()
    assert read(storage)[0].statuses[4] is ReadStatus.ABSENT
    assert write(storage).count(WriteStatus.STORED) == 1
    assert read(storage)[0].prefix == 12


def test_a_value_is_the_page_and_its_trailer(storage: Any, intruder: Intruder) -> None:
    write(storage)
    name = KEYS[0].astype("<u8").tobytes()
    value = intruder.value(name_of(KEYS[0], storage.spec))
    assert value == PAGES[0].tobytes() + make_trailer(name, PAGES[0].data)


def test_a_page_that_another_began_to_write_is_not_taken_for_stored(
    storage: Any, intruder: Intruder, wait_until: Any
) -> None:
    intruder.begin(name_of(KEYS[0], storage.spec), PAGE_BYTES + TRAILER_BYTES)
    found = write(storage)
    assert found.statuses[0] is WriteStatus.FAILED
    assert "is writing this page, or died" in found.reason
    assert found.count(WriteStatus.STORED) == 11
    assert storage.contains(KEYS, timeout=TIMEOUT) == 0
    assert read(storage)[0].statuses[0] is ReadStatus.ABSENT
    wait_until(lambda: write(storage).prefix == 12, "the master to give up on who began")
    assert read(storage)[0].prefix == 12


def test_pages_are_removed_while_they_are_leased(storage: Any) -> None:
    write(storage)
    read(storage)
    assert storage.delete(KEYS[:3], timeout=TIMEOUT) == 3
    assert storage.clear(timeout=TIMEOUT) == 9
    assert storage.contains(KEYS, timeout=TIMEOUT) == 0


def test_a_lease_that_ended_meanwhile_matters_only_if_the_page_does(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(storage)
    real = storage._client.get

    def slow(names: Any, addresses: Any, size: int) -> list[int]:
        found = real(names, addresses, size)
        storage._staging._memory[addresses[3] - storage._staging.address] ^= 1
        return [mooncake_client.LEASE_OVER] * len(found)

    monkeypatch.setattr(storage._client, "get", slow)
    result, into = read(storage)
    assert result.count(ReadStatus.OK) == 11
    assert result.count(ReadStatus.FAILED) == 1
    assert "default_kv_lease_ttl" in result.reason
    for status, page, expected in zip(result.statuses, into, PAGES, strict=True):
        assert status is ReadStatus.FAILED or (page == expected).all()


# ---- much at a time


class Sizes:
    """Notes of how many names each call of the library was."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._library, name)

        def noted(*given: Any) -> Any:
            if given and isinstance(given[0], list):
                self.sizes.append(len(given[0]))
            return call(*given)

        return noted


def opened(url: str, spec: StorageSpec) -> Any:
    return open_storage(url, spec=spec)


def test_more_keys_than_the_client_takes_and_more_pages_than_slots(mooncake_url: str) -> None:
    keys = make_keys(5000, seed=8)
    pages = np.arange(5000, dtype=np.uint64).view(np.uint8).reshape(5000, 8)
    url = mooncake_url.replace("4MiB", "64KiB")
    with opened(url, StorageSpec(8, "many")) as storage:
        storage._client._store = noted = Sizes(storage._client._store)
        assert storage.write(keys, list(pages), timeout=TIMEOUT).count(WriteStatus.STORED) == 5000
        assert storage.contains(keys, timeout=TIMEOUT) == 5000
        into = np.zeros_like(pages)
        assert storage.read(keys, list(into), timeout=TIMEOUT).prefix == 5000
        assert (into == pages).all()
        assert storage.delete(keys[:4000], timeout=TIMEOUT) == 4000
        assert storage.clear(timeout=TIMEOUT) == 1000
        assert 1000 < max(noted.sizes) <= 2048
        assert len(storage._staging._free) == storage._staging.slots


def test_one_key_several_times(storage: Any) -> None:
    write(storage)
    storage._staging._memory[:] = 0  # what a slot held before must not help
    which = [0, 1, 0, 0, 1]
    result, into = read(storage, KEYS[which])
    assert result.prefix == 5
    assert (into == [PAGES[i] for i in which]).all()


def test_slots_that_the_client_may_still_touch_are_used_no_more(
    mooncake_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_storage(
        f"{mooncake_url.replace('4MiB', '64KiB')}", spec=StorageSpec(4096, "lost")
    ) as storage:
        monkeypatch.setattr(backend, "PATIENCE", -1.0)  # every call took too long
        write(storage)
        slots = storage._staging.slots
        assert storage._staging.lost == 12
        result, into = read(storage)  # what came is as good as ever
        assert result.prefix == slots - 12
        assert result.count(ReadStatus.FAILED) == 24 - slots
        assert "close this storage and open it anew" in result.reason
        assert (into[: slots - 12] == PAGES[: slots - 12]).all()
        assert storage._staging.lost == slots
        refused(StorageError, "close this storage and open it anew", read, storage)
        storage.clear(timeout=TIMEOUT)


@pytest.mark.parametrize("verb", ["get", "put"])
@pytest.mark.parametrize(("bad", "good"), [([0], [1]), ([1], [0, 2]), ([0, 1, 2, 3], [])])
def test_a_group_that_fails_leaves_the_others(
    mooncake_url: str, monkeypatch: pytest.MonkeyPatch, verb: str, bad: list[int], good: list[int]
) -> None:
    """Four groups of seven, two at a time: behind one that failed none begins, and what is under
    way counts."""
    keys = make_keys(28, seed=9)
    pages = list(pages_of(keys))
    url = mooncake_url.replace("4MiB", "64KiB&threads=1")
    with open_storage(url, spec=StorageSpec(PAGE_BYTES, f"groups {next(_specs)}")) as made:
        storage: Any = made

        def act() -> Any:
            return read(storage, keys)[0] if verb == "get" else write(storage, keys, pages)

        if verb == "get":
            write(storage, keys, pages)
        broken = {name_of(keys[7 * group], storage.spec) for group in bad}
        real = getattr(storage._client, verb)

        def call(names: Any, *how: Any) -> Any:
            if broken & set(names):
                raise RuntimeError("the client is broken")
            return real(names, *how)

        with monkeypatch.context() as patch:
            patch.setattr(storage._client, verb, call)
            if good:
                result = act()
                assert result.reason == "mooncake: the client is broken"
                found = [i for i, one in enumerate(result.statuses) if one.name != "FAILED"]
                assert found == [i for i in range(28) if i // 7 in good]
            else:
                refused(StorageError, r"^mooncake: the client is broken$", act)
        assert len(storage._staging._free) == storage._staging.slots
        assert act().prefix == 28
        storage.clear(timeout=TIMEOUT)


# ---- room


def test_no_room(tmp_path: Any) -> None:
    with cluster(tmp_path, lenders=0) as own:
        keys = make_keys(24, seed=2)
        page = np.arange(1 << 20, dtype=np.uint8)
        pages = [page] * 24
        with open_storage(own.url, spec=StorageSpec(1 << 20)) as storage:
            nobody = storage.write(keys, pages, timeout=TIMEOUT)
            assert nobody.statuses == (WriteStatus.REFUSED,) * 24
            assert "lend" in nobody.reason
            own.lend("16 MB")
            some = storage.write(keys, pages, timeout=TIMEOUT)
            assert set(some.statuses) == {WriteStatus.STORED, WriteStatus.REFUSED}
            assert "no room; lend more memory" in some.reason
            into = np.zeros((24, 1 << 20), np.uint8)
            found = storage.read(keys, list(into), timeout=TIMEOUT)
            assert found.count(ReadStatus.OK) >= 1
            for status, got in zip(found.statuses, into, strict=True):
                assert status in (ReadStatus.OK, ReadStatus.ABSENT)
                assert status is ReadStatus.ABSENT or (got == page).all()


# ---- the whole stack


def test_a_second_cache_finds_what_the_first_stored(mooncake_url: str, segment_name: str) -> None:
    tokens = np.arange(10 * PAGE_TOKENS)
    for life in (1, 2):
        with make_cache(f"{segment_name}-{life}") as cache:
            keys = cache.hash_pages(tokens)
            url = f"flaky:seed=1,read_fail=0:{mooncake_url}" if life == 2 else mooncake_url
            with open_storage(url, spec=StorageSpec.of(cache)) as storage:
                with StorageTier(cache, storage, group=4) as tier:
                    if life == 1:
                        fill(cache, keys)
                        assert tier.write_tokens(tokens).wait(TIMEOUT).stored == 10
                    else:
                        assert tier.prefetch(keys).wait(TIMEOUT).prefix == 10
                        assert sound(cache, keys) == 10
                if life == 2:
                    assert storage.clear(timeout=TIMEOUT) == 10
            nothing_is_held(cache)
