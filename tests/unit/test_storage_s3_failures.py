"""An S3-compatible store on a bad day: what it says, what it sends, and what it never sends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.disks import ABSENT, CORRUPT, KEYS, OK, PRESENT, STORED, found, got, put
from support.failing_s3 import (
    FailingS3,
    cut,
    failing,
    garbage,
    hold,
    lengthen,
    refuse,
    until_gone,
    web_page,
)
from support.proxy import Proxy
from support.refusals import refused
from support.s3_server import Server, opened

from lightcache import StorageError
from lightcache.storage import StorageSpec
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.remote.s3.backend import S3Storage
from lightcache.storage.testing.conformance import PAGE_BYTES, SPEC, pages_of

pytestmark = pytest.mark.servers

SECRETS = ("tests", "a-secret-of-tests")


@pytest.fixture
def server() -> Iterator[FailingS3]:
    """Healthy at first, with an empty bucket."""
    with failing() as made:
        yield made


@pytest.fixture
def storage(server: FailingS3) -> Iterator[S3Storage]:
    """With the first four keys stored, and without retries."""
    with opened(server.url(retries=0, requests=4), SPEC) as made:
        assert put(made, KEYS[:4]) == [STORED] * 4
        yield made


def read(storage: S3Storage, n: int = 4, timeout: float = 60.0) -> tuple[Any, Any]:
    into = np.full((n, PAGE_BYTES), 7, np.uint8)
    return storage.read(KEYS[:n], list(into), timeout=timeout), into


# ---- what it says


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (404, "NoSuchBucket", "404 NoSuchBucket: there is no such bucket; create it"),
        (403, "AccessDenied", "403 AccessDenied: the credentials do not allow it: .*ListBucket"),
        (403, "InvalidAccessKeyId", "not accepted; look at AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "not accepted; look at AWS_ACCESS_KEY_ID"),
        (403, "RequestTimeTooSkewed", "the clocks of this machine and the store differ"),
        (400, "ExpiredToken", "the credentials have expired; renew them"),
        (400, "AuthorizationHeaderMalformed", "another region; say which by region="),
        (301, "PermanentRedirect", "another region; say which by region="),
        (503, "SlowDown", "503 SlowDown: the store asks for fewer requests"),
        (500, "InternalError", "500 InternalError"),
        (418, "Teapot", "418 Teapot"),
    ],
)
def test_what_it_says_becomes_what_to_do(
    server: FailingS3, storage: S3Storage, status: int, code: str, why: str
) -> None:
    for method in ("GET", "HEAD", "PUT"):
        server.fail(method, refuse(status, code, "of tests, with a-secret-of-tests"))
    with pytest.raises(StorageError, match=why) as opening:
        opened(server.url(retries=0), SPEC)
    result, _ = read(storage)
    assert result.statuses == (ReadStatus.FAILED,) * 4
    storage._exists = lambda names, deadline: [False] * len(names)  # type: ignore[method-assign]
    wrote = storage.write(KEYS[4:], list(pages_of(KEYS[4:])), timeout=60.0)
    assert wrote.statuses == (WriteStatus.FAILED,) * 8
    for text in (str(opening.value), result.reason, wrote.reason):
        assert text.startswith("s3: s3://bucket/t at http://127.0.0.1:")
        assert why.partition(":")[0].split(";")[0] in text
        assert not any(secret in text for secret in SECRETS)
        assert "\n" not in text


@pytest.mark.parametrize("status", [400, 401, 403, 500, 501, 503])
def test_a_lookup_that_is_refused_is_no_absence(
    server: FailingS3, storage: S3Storage, status: int
) -> None:
    server.fail("HEAD", refuse(status, "Unseen"))  # an answer to HEAD has no body
    for call in (
        lambda: found(storage, KEYS),
        lambda: storage.delete(KEYS, timeout=60.0),
        lambda: put(storage, KEYS),
    ):
        refused(StorageError, str(status), call)
    server.heal()
    assert found(storage, KEYS) == 4


def test_a_server_that_is_no_store_has_no_absent_pages(server: FailingS3) -> None:
    server.fail("GET", web_page)
    refused(StorageError, "404, but not as a store says it", opened, server.url(), SPEC)
    with opened(server.url(wait=0), SPEC) as storage:
        assert set(got(storage, KEYS)) == {ReadStatus.FAILED}


def test_behind_a_failure_no_more_of_a_call_is_asked(server: FailingS3, storage: S3Storage) -> None:
    server.fail("GET", refuse(503, "SlowDown"))
    before = server.count("GET")
    result, _ = read(storage, 12)
    assert result.statuses == (ReadStatus.FAILED,) * 12
    assert server.count("GET") - before <= 7  # four under way, and what began beside the first end
    server.fail("PUT", refuse(503, "SlowDown"))
    before = server.count("PUT")
    assert set(put(storage, KEYS[4:])) == {WriteStatus.FAILED}
    assert server.count("PUT") - before <= 7


def test_without_memory_the_pages_before_are_stored(
    storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, made = storage._whole, [0]

    def few(name: bytes, view: memoryview) -> Any:
        made[0] += 1
        if made[0] > 3:
            raise MemoryError
        return whole(name, view)

    monkeypatch.setattr(storage, "_whole", few)
    result = storage.write(KEYS[4:], list(pages_of(KEYS[4:])), timeout=60.0)
    assert result.statuses == (WriteStatus.STORED,) * 3 + (WriteStatus.FAILED,) * 5
    assert result.reason == f"s3: no memory for a page of {PAGE_BYTES} bytes"


def test_a_failure_that_passes_is_not_seen(server: FailingS3) -> None:
    with opened(server.url(retries=2), SPEC) as storage:
        for method in ("HEAD", "PUT", "GET"):
            server.fail(method, refuse(503, "SlowDown"), times=2)
        assert put(storage, KEYS[:1]) == [STORED]
        assert got(storage, KEYS[:1]) == [OK]


def test_retries_end_with_the_time_of_the_call(
    server: FailingS3, wait_until: Callable[..., None]
) -> None:
    with opened(server.url(retries=10), SPEC) as storage:
        server.fail("GET", refuse(503, "SlowDown"))
        result, _ = read(storage, timeout=0.3)
        assert result.statuses == (ReadStatus.FAILED,) * 4
        assert result.reason.startswith("timed out")
        loop = storage._requests._loop
        wait_until(lambda: not asyncio.all_tasks(loop), "retries to end")


def test_requests_whose_time_is_up_are_given_up(server: FailingS3, storage: S3Storage) -> None:
    server.fail("GET", until_gone(1000))
    result, _ = read(storage, timeout=0.3)
    assert result.reason.startswith("timed out")
    for _ in range(server.count("GET") - 1):  # but for the one of opening
        assert server.gone.acquire(timeout=60.0)


# ---- what it sends


@pytest.mark.parametrize("fault", [cut(1000), cut(0), garbage], ids=["cut", "none", "garbage"])
def test_an_answer_that_is_none_is_a_failure_and_nothing_is_removed(
    server: FailingS3, storage: S3Storage, fault: Any
) -> None:
    server.fail("GET", fault)
    result, _ = read(storage)
    assert result.statuses == (ReadStatus.FAILED,) * 4
    assert "no proper answer" in result.reason
    server.heal()
    assert got(storage, KEYS[:4]) == [OK] * 4


def test_an_object_that_would_fill_the_memory_is_not_read(
    server: FailingS3, storage: S3Storage
) -> None:
    server.fail("GET", lengthen(1 << 40))
    result, _ = read(storage, 1)
    assert result.statuses == (CORRUPT,)
    assert f"an object of {(1 << 40) + PAGE_BYTES + 24} bytes, not" in result.reason
    server.heal()
    assert got(storage, KEYS[:1]) == [ABSENT]


def test_late_bytes_never_reach_a_page_that_was_given_to_somebody_else(
    server: FailingS3, storage: S3Storage
) -> None:
    server.fail("GET", hold(1000))
    into = np.full((1, PAGE_BYTES), 7, np.uint8)
    asked = server.count("GET")
    while server.count("GET") == asked:  # so short a time may be over before it asks
        result = storage.read(KEYS[:1], list(into), timeout=0.2)
        assert result.statuses == (ReadStatus.FAILED,)
        assert result.reason.startswith("timed out")
    assert server.held.acquire(timeout=60.0)
    into[:] = 9  # somebody else's page by now
    server.released.set()
    assert server.late.acquire(timeout=60.0)
    server.heal()
    assert got(storage, KEYS[:4]) == [OK] * 4  # the client has looked at its sockets since
    assert (into == 9).all()


def test_a_page_that_changes_behind_a_call_is_not_what_is_sent(
    s3_server: Server, wait_until: Any
) -> None:
    spec = StorageSpec(4 << 20)
    page = np.full(4 << 20, 1, np.uint8)
    with Proxy(s3_server.port) as proxy:
        with opened(s3_server.url(port=proxy.port, retries=0), spec) as storage:
            proxy.requests.pause(after=100_000)
            wrote = storage.write(KEYS[:1], [page], timeout=0.3)
            assert wrote.statuses == (WriteStatus.FAILED,)
            page[:] = 2  # somebody else's by now
            proxy.requests.resume()
            into = np.zeros(4 << 20, np.uint8)
            result = storage.read(KEYS[:1], [into], timeout=60.0)
            assert result.statuses[0] in (ABSENT, OK)
            assert result.statuses[0] is ABSENT or (into == 1).all()
            storage.clear(timeout=60.0)


def test_memory_is_used_again_when_the_store_has_what_is_in_it(
    server: FailingS3, storage: S3Storage
) -> None:
    assert len(storage._spare) == 4
    server.fail("PUT", hold(0))
    sent = 0
    while sent < 4:  # so short a time may be over before it asks
        before = server.count("PUT")
        wrote = storage.write(KEYS[4:8], list(pages_of(KEYS[4:8])), timeout=0.3)
        assert wrote.statuses == (WriteStatus.FAILED,) * 4
        sent = server.count("PUT") - before
    assert not storage._spare  # somebody may still read what was given up
    server.heal()
    server.released.set()
    assert set(put(storage, KEYS)) <= {STORED, PRESENT}
    assert len(storage._spare) <= 4
    assert got(storage, KEYS) == [OK] * 12


def test_a_connection_that_is_cut_in_the_middle_of_an_answer(s3_server: Server) -> None:
    with Proxy(s3_server.port) as proxy:
        with opened(s3_server.url(port=proxy.port, retries=0), SPEC) as storage:
            assert put(storage, KEYS) == [STORED] * 12
            proxy.answers.cut_after(6_000)
            result, into = read(storage, 12)
            assert ReadStatus.FAILED in result.statuses
            for data, page, status in zip(into, pages_of(KEYS), result.statuses, strict=True):
                assert status is not OK or (data == page).all()
            assert got(storage, KEYS) == [OK] * 12
            storage.clear(timeout=60.0)


def test_a_bit_that_turns_on_the_way_is_found(s3_server: Server) -> None:
    with Proxy(s3_server.port) as proxy:
        with opened(s3_server.url(port=proxy.port, retries=0), SPEC) as storage:
            assert put(storage, KEYS[:1]) == [STORED]
            proxy.answers.corrupt_after(3_000)  # headers are shorter than that
            result, _ = read(storage, 1)
            assert result.statuses == (CORRUPT,)
            assert got(storage, KEYS[:1]) == [ABSENT]


# ---- Ctrl-C, and many at once


@pytest.mark.parametrize("method", ["HEAD", "GET", "PUT"])
def test_ctrl_c_while_the_store_does_not_answer(
    server: FailingS3, storage: S3Storage, method: str
) -> None:
    def press() -> None:
        assert server.held.acquire(timeout=60.0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    calls = {"HEAD": found, "PUT": put, "GET": got}
    server.fail(method, hold(0))
    presser = threading.Thread(target=press)
    # A shell that starts us in the background has SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presser.start()
    try:
        refused(KeyboardInterrupt, "", calls[method], storage, KEYS)
    finally:
        signal.signal(signal.SIGINT, before)
    presser.join(60.0)
    server.heal()
    server.released.set()
    assert got(storage, KEYS[:4]) == [OK] * 4
    assert set(put(storage, KEYS)[6:]) <= {STORED, PRESENT}
    assert got(storage, KEYS) == [OK] * 12


def test_requests_are_bounded_over_all_calls(server: FailingS3, storage: S3Storage) -> None:
    server.fail("GET", hold(10))
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(read(storage)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert server.held.acquire(timeout=60.0)
    server.released.set()
    for thread in threads:
        thread.join(60.0)
    assert [result.prefix for result in results] == [4] * 3
    assert server.most == 4


# ---- behind a tier
