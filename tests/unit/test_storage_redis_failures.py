"""A real Redis or Valkey that goes away, hangs, is slow, or is cut off in the middle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.proxy import Proxy
from support.redis_server import Server
from support.refusals import refused
from support.remote_pages import KEYS, read, write
from support.storing import fill, sound

from lightcache import Cache, StorageError
from lightcache.storage import StorageSpec, StorageTier, TaskState, open_storage
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.remote.base import TRAILER_BYTES
from lightcache.storage.remote.redis.wire import Wire
from lightcache.storage.testing.conformance import PAGE_BYTES, SPEC

pytestmark = pytest.mark.servers

SHORT = 0.3  # seconds for a call that is to run out of them
VALUE = PAGE_BYTES + TRAILER_BYTES
MIB = 1 << 20


@pytest.fixture
def proxy(redis_server: Server, redis_url: str) -> Iterator[Proxy]:
    """In front of a server that is empty."""
    with Proxy(redis_server.port) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stop and start."""
    with Server(tmp_path) as made:
        yield made


def through(proxy: Proxy, options: str = "connections=1", spec: StorageSpec = SPEC) -> Any:
    return open_storage(f"redis://127.0.0.1:{proxy.port}/0?{options}", spec=spec)


# ---- it goes away


def test_a_server_that_is_not_there(own: Server) -> None:
    own.stop()
    with pytest.raises(
        StorageError, match=rf"127\.0\.0\.1:{own.port}/0: cannot connect: .*refused"
    ):
        open_storage(own.url(), spec=SPEC)
    with open_storage(own.url(options="required=no"), spec=SPEC) as storage:
        for call in (
            lambda: storage.contains(KEYS, timeout=60.0),
            lambda: read(storage),
            lambda: write(storage),
        ):
            refused(StorageError, "is the server started", call)
        own.start()
        assert write(storage).count(WriteStatus.STORED) == 12
        assert read(storage).prefix == 12


def test_a_server_that_is_started_again_is_used_at_once(own: Server) -> None:
    with open_storage(own.url(), spec=SPEC) as storage:
        write(storage)
        own.stop()
        own.start()  # the connections of before are dead
        assert storage.contains(KEYS, timeout=60.0) == 0
        assert write(storage).count(WriteStatus.STORED) == 12
        own.stop()
        refused(StorageError, "cannot connect", read, storage)
        own.start()
        assert read(storage).count(ReadStatus.ABSENT) == 12


def test_a_server_that_dies_in_the_middle_of_an_answer(own: Server) -> None:
    with Proxy(own.port) as proxy, through(proxy) as storage:
        write(storage)
        proxy.answers.cut_after(3 * VALUE)
        own_pages = read(storage)
        assert own_pages.statuses[:2] == (ReadStatus.OK,) * 2
        assert own_pages.statuses[-1] is ReadStatus.FAILED
        assert "connection" in own_pages.reason
        own.stop()
        with pytest.raises(StorageError, match=r"close[sd] the connection|is gone"):  # FIN or RST
            read(storage)
        own.start()
        assert read(storage).count(ReadStatus.ABSENT) == 12


def test_what_was_answered_before_sending_failed_is_used(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with through(proxy) as storage:
        write(storage)
        send, sent = Wire.send, [0]

        def fails(wire: Wire, *parts: Any) -> None:
            sent[0] += 1
            if sent[0] > 5:
                raise StorageError("no route")
            send(wire, *parts)

        with monkeypatch.context() as patched:
            patched.setattr(Wire, "send", fails)
            result = read(storage)
        assert result.statuses == (ReadStatus.OK,) * 5 + (ReadStatus.FAILED,) * 7
        assert result.reason == "no route"
        assert read(storage).prefix == 12


def test_nothing_leaks_when_calls_fail(proxy: Proxy, wait_until: Any) -> None:
    with through(proxy, "connections=4") as storage:
        write(storage)
        read(storage)
        proxy.refuse()
        proxy.cut()
        refused(StorageError, "", read, storage)
        held = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            refused(StorageError, "", write, storage)
            refused(StorageError, "", storage.contains, KEYS, timeout=60.0)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= held, "descriptors are given back")
        proxy.listen()
        assert read(storage).prefix == 12


# ---- it hangs, or is slow


def test_a_server_that_hangs(redis_server: Server, redis_url: str) -> None:
    with open_storage(redis_url, spec=SPEC) as storage:
        write(storage)
        with redis_server.silent():
            got = read(storage, timeout=SHORT)
            assert got.statuses == (ReadStatus.FAILED,) * 12
            assert got.reason.startswith("timed out: not done within 0.3 s")
            wrote = write(storage, timeout=SHORT)
            assert wrote.statuses == (WriteStatus.FAILED,) * 12
            assert wrote.reason.startswith("timed out")
            for call in (
                lambda: storage.contains(KEYS, timeout=SHORT),
                lambda: storage.delete(KEYS, timeout=SHORT),
                lambda: storage.clear(timeout=SHORT),
            ):
                refused(StorageError, "timed out", call)
            assert storage.stats().timeouts == 5
        assert read(storage).prefix == 12


def test_a_server_that_hangs_while_it_is_opened(redis_server: Server, redis_url: str) -> None:
    with (
        redis_server.silent(),
        pytest.raises(StorageError, match=r"not answered in time; is the server started"),
    ):
        open_storage(f"{redis_url}?connect_timeout={SHORT}", spec=SPEC)


def test_an_answer_that_trickles_ends_with_the_time(proxy: Proxy) -> None:
    """Something comes all the time, so no single wait is long."""
    spec = StorageSpec(4 * MIB, "trickling")
    with through(proxy, spec=spec) as storage:
        page = np.arange(4 * MIB, dtype=np.uint8)
        assert storage.write(KEYS[:1], [page], timeout=60.0).prefix == 1
        proxy.answers.delay(SHORT / 10)
        before = proxy.answers.passed
        while proxy.answers.passed == before:  # so short a time may be over before anything comes
            got = storage.read(KEYS[:1], [np.zeros(4 * MIB, np.uint8)], timeout=SHORT)
            assert got.reason.startswith("timed out")
        assert proxy.answers.passed - before < 4 * MIB
        proxy.answers.delay(0.0)
        into = np.zeros(4 * MIB, np.uint8)
        assert storage.read(KEYS[:1], [into], timeout=60.0).prefix == 1
        assert (into == page).all()


def test_what_comes_late_touches_no_buffer(proxy: Proxy, wait_until: Any) -> None:
    with through(proxy, "connections=2") as storage:
        write(storage)
        into = np.zeros((12, PAGE_BYTES), np.uint8)
        proxy.answers.pause(after=VALUE + 100)
        got = storage.read(KEYS, list(into), timeout=SHORT)
        assert got.count(ReadStatus.FAILED) >= 10
        into[:] = 7  # somebody else's by now
        proxy.answers.resume()
        proxy.cut()
        wait_until(lambda: not proxy._open, "what was held has been sent on")
        assert (into == 7).all()
        assert read(storage).prefix == 12
        assert (into == 7).all()


def test_what_is_sent_late_is_what_was_given(proxy: Proxy, redis_url: str) -> None:
    """A page that was on its way when the time was up: its bytes are those of then, or none."""
    spec = StorageSpec(4 * MIB, "late")
    page = np.arange(4 * MIB, dtype=np.uint8)
    with through(proxy, spec=spec) as storage:
        proxy.requests.pause(after=MIB)
        wrote = storage.write(KEYS[:1], [page], timeout=SHORT)
        assert wrote.statuses == (WriteStatus.FAILED,)
        page[:] = 7
        proxy.requests.resume()
        page = np.arange(4 * MIB, dtype=np.uint8)
        assert storage.write(KEYS[:1], [page], timeout=60.0).prefix == 1
        into = np.zeros_like(page)
        assert storage.read(KEYS[:1], [into], timeout=60.0).prefix == 1
        assert (into == page).all()


# ---- cut and damaged on the way


@pytest.mark.parametrize("after", [5, 100, VALUE, 3 * VALUE + 17, 7 * VALUE])
def test_a_write_that_is_cut_leaves_whole_pages(
    proxy: Proxy, redis_server: Server, redis_url: str, after: int, wait_until: Any
) -> None:
    with through(proxy) as storage, open_storage(redis_url, spec=SPEC) as other:
        assert storage.contains(KEYS, timeout=60.0) == 0
        asked = proxy.requests.passed
        assert storage.contains(KEYS, timeout=60.0) == 0
        proxy.requests.cut_after(proxy.requests.passed - asked + after)  # behind its question
        with contextlib.suppress(StorageError):  # all of it failed
            assert write(storage).count(WriteStatus.FAILED)
        whole = after // (VALUE + 150)
        wait_until(lambda: read(other).prefix >= whole, "the server to take what arrived")
        there = read(other)
        assert there.count(ReadStatus.ABSENT) + there.count(ReadStatus.OK) == 12
        assert there.prefix < 12
        with redis_server.client() as client:
            assert {client.strlen(name) for name in client.scan_iter()} <= {VALUE}
        assert write(storage).prefix == 12
        assert read(other).prefix == 12


@pytest.mark.parametrize("way", ["requests", "answers"])
def test_a_byte_that_is_damaged_on_the_way(proxy: Proxy, way: str) -> None:
    with through(proxy) as storage:
        if way == "requests":
            storage.contains(KEYS, timeout=60.0)
            asked = proxy.requests.passed
            storage.contains(KEYS, timeout=60.0)
            proxy.requests.corrupt_after(proxy.requests.passed - asked + VALUE // 2)
        write(storage)
        if way == "answers":
            proxy.answers.corrupt_after(VALUE // 2)
        got = read(storage)
        assert got.statuses[0] is ReadStatus.CORRUPT
        assert got.count(ReadStatus.OK) == 11
        assert write(storage).count(WriteStatus.STORED) == 1
        assert read(storage).prefix == 12


def test_an_answer_that_is_none(proxy: Proxy) -> None:
    with through(proxy) as storage:
        write(storage)
        proxy.answers.corrupt_after(0)
        refused(StorageError, r"expected an answer of Redis.*another server", read, storage)
        assert read(storage).prefix == 12


# ---- it says no


def test_a_replica(redis_server: Server, redis_url: str) -> None:
    with redis_server.client() as client, open_storage(redis_url, spec=SPEC) as storage:
        write(storage, KEYS[:2])
        client.replicaof("127.0.0.1", "1")
        try:
            result = write(storage)
            assert result.count(WriteStatus.FAILED) == 10
            assert "give the address of the primary" in result.reason
            assert read(storage).prefix == 2
            refused(StorageError, "give the address of the primary", storage.clear, timeout=60.0)
        finally:
            client.replicaof("NO", "ONE")
        assert write(storage).prefix == 12


def test_a_user_who_may_not(redis_server: Server, redis_url: str) -> None:
    with redis_server.client() as client:
        client.acl_setuser(
            "reader", enabled=True, passwords=["+hush"], keys=["*"], commands=["+get", "+exists"]
        )
        try:
            url = redis_url.replace("//", "//reader:hush@")
            with pytest.raises(StorageError, match=r"NOPERM.*allow this user the keys") as caught:
                open_storage(url, spec=SPEC)
            assert "hush" not in str(caught.value)
            with open_storage(f"{url}?required=no", spec=SPEC) as storage:
                assert storage.contains(KEYS, timeout=60.0) == 0
                result = write(storage)
                assert result.count(WriteStatus.FAILED) == 12
                assert "NOPERM" in result.reason
                refused(StorageError, "NOPERM", storage.delete, KEYS, timeout=60.0)
        finally:
            client.acl_deluser("reader")


# ---- behind a tier


def test_a_tier_stops_using_it_and_starts_again(own: Server, cache: Cache, wait_until: Any) -> None:
    now = [0.0]
    keys = KEYS[:8]
    how: Any = {"failures": 2, "retry": 30.0, "clock": lambda: now[0], "timeout": 60.0}
    storage = open_storage(own.url(), spec=StorageSpec.of(cache))
    with StorageTier(cache, storage, **how) as tier:
        fill(cache, keys[:4].copy())
        assert tier.write(keys[:4].copy()).wait(60.0).stored == 4
        own.stop()
        for _ in range(2):
            task = tier.prefetch(keys, 4)
            result = task.wait(60.0)
            assert task.state is TaskState.FAILED
            assert (result.absent, result.loaded) == (0, 0)
        assert tier.stats().state == "open"
        assert sound(cache, keys) == 4  # requests go on with what is there
        own.start()
        now[0] = 30.0
        assert tier.stats().state == "half-open"
        tier.poll()
        wait_until(lambda: tier.stats().state == "closed", "the probe")
        result = tier.prefetch(keys, 4).wait(60.0)
        assert (result.failed, result.absent) == (0, 4)
        assert tier.stats().state == "closed"
        assert tier.write(keys[:4].copy()).wait(60.0).stored == 4  # it has forgotten them
    storage.close()
