"""Pages in an S3-compatible store, against a real server."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import S3Store
from support.disks import ABSENT, CORRUPT, FAILED, KEYS, OK, PRESENT, STORED, found, got, put
from support.refusals import refused
from support.s3_server import BUCKET, Server, opened
from support.s3_server import KEYS as KEYS_OF_TESTS

from lightcache import ConfigError, Detached, StorageError
from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.protocol import ReadStatus
from lightcache.storage.remote import s3
from lightcache.storage.remote.base import make_trailer
from lightcache.storage.remote.s3.backend import S3Storage
from lightcache.storage.testing.conformance import CHECKS, PAGE_BYTES, SPEC, make_keys, pages_of
from lightcache.storage.urls import check_url

pytestmark = pytest.mark.servers


@pytest.fixture
def storage(s3_url: str) -> Iterator[S3Storage]:
    """Open and empty; emptied again."""
    with opened(s3_url, SPEC) as made:
        yield made
        made.clear(timeout=60.0)


class Bucket:
    """The objects of a storage, past it: another client."""

    def __init__(self, storage: S3Storage) -> None:
        place = storage.place
        where = {"endpoint": place.endpoint}
        client = {"allow_http": True}
        self._storage = storage
        self._store = S3Store(BUCKET, prefix=place.prefix, config=where, client_options=client)

    def name(self, key: Any) -> str:
        return self._storage.object_name(key.astype("<u8").tobytes())

    def get(self, key: Any) -> bytes:
        return bytes(obstore.get(self._store, self.name(key)).bytes())

    def put(self, key: Any, data: bytes) -> None:
        obstore.put(self._store, self.name(key), data)

    def names(self) -> list[str]:
        return [each["path"] for part in obstore.list(self._store) for each in part]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[..., None], s3_url: str) -> None:
    check(lambda spec: opened(s3_url, spec))
    with opened(s3_url, SPEC) as storage:
        storage.clear(timeout=60.0)


def test_stores_without_conditions_and_deletes_in_bulk(s3_server: Server) -> None:
    url = s3_server.url(conditional="no", bulk_delete="no", requests=3)
    with opened(url, SPEC) as storage:
        assert put(storage, KEYS) == [STORED] * 12
        assert put(storage, KEYS) == [PRESENT] * 12
        assert got(storage, KEYS) == [OK] * 12
        assert storage.delete(KEYS[:5], timeout=60.0) == 5
        assert storage.clear(timeout=60.0) == 7


def test_an_object_is_the_page_and_its_trailer(storage: S3Storage) -> None:
    put(storage, KEYS[:1])
    bucket = Bucket(storage)
    page = pages_of(KEYS[:1])[0].tobytes()
    data = bucket.get(KEYS[0])
    assert data[:PAGE_BYTES] == page
    assert data[PAGE_BYTES:] == make_trailer(KEYS[0].astype("<u8").tobytes(), page)
    assert bucket.names() == [bucket.name(KEYS[0])]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data[:-1], "an object of 4119 bytes"),
        (lambda data: b"", "an object of 0 bytes"),
        (lambda data: data + bytes(1 << 20), "an object of 1052696 bytes"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "another checksum"),
        (lambda data: data[:-24] + b"somebody's other trailer", "by something else"),
    ],
    ids=["short", "empty", "long", "damaged", "foreign"],
)
def test_what_another_client_changed_is_corrupt_and_stored_anew(
    storage: S3Storage, change: Callable[[bytes], bytes], why: str
) -> None:
    put(storage, KEYS[:3])
    bucket = Bucket(storage)
    bucket.put(KEYS[1], change(bucket.get(KEYS[1])))
    assert found(storage, KEYS[:3]) == 3  # a lookup reads nothing
    into = list(np.zeros((3, PAGE_BYTES), np.uint8))
    result = storage.read(KEYS[:3], into, timeout=60.0)
    assert result.statuses == (OK, CORRUPT, OK)
    assert why in result.reason
    assert got(storage, KEYS[:3]) == [OK, ABSENT, OK]
    assert put(storage, KEYS[:3]) == [PRESENT, STORED, PRESENT]
    assert got(storage, KEYS[:3]) == [OK] * 3


def test_who_was_faster_is_present(storage: S3Storage, monkeypatch: Any) -> None:
    put(storage, KEYS[:2])
    monkeypatch.setattr(storage, "_exists", lambda names, deadline: [False] * len(names))
    assert put(storage, KEYS[:3]) == [PRESENT, PRESENT, STORED]


def test_specs_and_prefixes_do_not_see_each_other(s3_server: Server) -> None:
    other = StorageSpec(PAGE_BYTES, "other")
    with (
        opened(s3_server.url("one"), SPEC) as one,
        opened(s3_server.url("one"), other) as same,
        opened(s3_server.url("one/two"), SPEC) as below,
    ):
        for each in (one, same, below):
            assert put(each, KEYS[:2]) == [STORED] * 2
        assert one.clear(timeout=60.0) == 2
        assert found(same, KEYS[:2]) == found(below, KEYS[:2]) == 2
        assert same.clear(timeout=60.0) == below.clear(timeout=60.0) == 2


def test_behind_an_absent_key_no_more_windows_are_asked(s3_server: Server) -> None:
    with opened(s3_server.url(requests=4), SPEC) as storage:
        put(storage, KEYS[:5])
        asked: list[int] = []
        exists = storage._exists

        def note(names: Any, deadline: Any) -> list[bool]:
            asked.append(len(names))
            return exists(names, deadline)

        storage._exists = note  # type: ignore[method-assign]
        assert found(storage, KEYS) == 5
        assert asked == [4, 4]
        storage.clear(timeout=60.0)


def test_more_than_a_thousand_pages_are_listed_and_removed(s3_server: Server) -> None:
    spec = StorageSpec(16)
    keys = make_keys(1_050, seed=9)
    with opened(s3_server.url(), spec) as storage:
        pages = [np.zeros(16, np.uint8)] * len(keys)
        assert storage.write(keys, pages, timeout=60.0).prefix == len(keys)
        assert storage.clear(timeout=60.0) == len(keys)
        assert Bucket(storage).names() == []


# ---- the server


def test_a_server_that_stops_answering(s3_server: Server, storage: S3Storage) -> None:
    put(storage, KEYS[:4])
    s3_server.hold(True)
    try:
        into = list(np.zeros((4, PAGE_BYTES), np.uint8))
        result = storage.read(KEYS[:4], into, timeout=0.2)
        assert result.statuses == (ReadStatus.FAILED,) * 4
        assert result.reason.startswith("timed out")
        wrote = storage.write(KEYS[4:], list(pages_of(KEYS[4:])), timeout=0.2)
        assert list(wrote.statuses) == [FAILED] * 8
        refused(StorageError, "timed out", storage.contains, KEYS, timeout=0.2)
        assert storage.stats().timeouts == 3
        refused(StorageError, r"no answer within 0\.1 s", opened, s3_server.url(wait=0.1), SPEC)
    finally:
        s3_server.hold(False)
    assert got(storage, KEYS[:4]) == [OK] * 4
    assert put(storage, KEYS)[:4] == [PRESENT] * 4


def test_a_server_that_dies_and_comes_back(
    s3_server: Server, storage: S3Storage, wait_until: Any
) -> None:
    put(storage, KEYS[:4])
    s3_server.stop()
    try:
        into = list(np.zeros((4, PAGE_BYTES), np.uint8))
        result = storage.read(KEYS[:4], into, timeout=60.0)
        assert result.statuses == (ReadStatus.FAILED,) * 4
        assert "Connection refused" in result.reason
        refused(StorageError, "Connection refused", storage.contains, KEYS, timeout=60.0)
        refused(StorageError, "wait=0", opened, s3_server.url(), SPEC)
        with opened(s3_server.url(wait=0), SPEC) as patient:
            refused(StorageError, "Connection refused", found, patient, KEYS)
            s3_server.start()
            assert found(patient, KEYS) == 0
    finally:
        if not s3_server.process:
            s3_server.start()
    assert put(storage, KEYS) == [STORED] * 12  # it has forgotten the first four
    assert got(storage, KEYS) == [OK] * 12


def test_a_bucket_that_is_not_there(s3_server: Server) -> None:
    url = s3_server.url().replace(BUCKET, "nowhere")
    refused(StorageError, "404 NoSuchBucket: there is no such bucket; create it", opened, url, SPEC)
    with opened(url + "&wait=0", SPEC) as storage:
        assert set(got(storage, KEYS)) == {ReadStatus.FAILED}
        result = storage.write(KEYS, list(pages_of(KEYS)), timeout=60.0)
        assert list(result.statuses) == [FAILED] * 12
        assert "NoSuchBucket" in result.reason


def test_no_thread_and_no_connection_is_left(s3_server: Server, wait_until: Any) -> None:
    def connections() -> set[str]:
        there = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                there.add(os.readlink(f"/proc/self/fd/{name}"))
        return {each for each in there if each.startswith("socket:")}

    threads, before = set(threading.enumerate()), connections()
    for _ in range(3):
        with opened(s3_server.url(), SPEC) as storage:
            put(storage, KEYS)
            storage.clear(timeout=60.0)
    assert not set(threading.enumerate()) - threads
    wait_until(lambda: connections() <= before, "connections to close")


def test_a_process_that_forgets_to_close_ends_without_a_word(s3_url: str, script: Any) -> None:
    source = """
import os, sys
from lightcache.storage import open_storage
from lightcache.storage.testing.conformance import SPEC, make_keys, pages_of
from lightcache.errors import Detached

storage = open_storage(sys.argv[1], spec=SPEC)
keys = make_keys(8)
assert storage.write(keys, list(pages_of(keys)), timeout=60.0).prefix == 8
child = os.fork()
try:
    storage.contains(keys, timeout=60.0)
    assert child
except Detached:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
storage.clear(timeout=60.0)
"""
    done = script(source, s3_url)
    assert done.stderr == ""


@pytest.mark.parametrize("ending", ["", "storage.close()"], ids=["forgotten", "closed"])
def test_a_process_ends_while_the_client_is_still_delivering(
    ending: str, s3_url: str, script: Any
) -> None:
    """The client's thread has handed over the result, and waits for the interpreter's lock."""
    source = f"""
import asyncio, sys, threading, time
from lightcache.storage import open_storage
from lightcache.storage.testing.conformance import SPEC, make_keys

deliver = asyncio.BaseEventLoop.call_soon_threadsafe

def slowly(self, *arguments, **context):
    handle = deliver(self, *arguments, **context)
    if threading.current_thread() is not threading.main_thread():
        for _ in range(200):
            time.sleep(0.001)
    return handle

asyncio.BaseEventLoop.call_soon_threadsafe = slowly
storage = open_storage(sys.argv[1], spec=SPEC)
assert storage.contains(make_keys(8), timeout=60.0) == 0
{ending}
"""
    assert script(source, s3_url).stderr == ""


def test_without_the_client_it_says_what_to_install(monkeypatch: Any, s3_server: Server) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    check_url(s3_server.url())
    with pytest.raises(StorageError, match=r"obstore is not installed; pip install 'lightcache\["):
        opened(s3_server.url(), SPEC)


# ---- URLs


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3:bucket", "expected 's3://bucket/prefix', found 'bucket'"),
        ("s3://", "expected 's3://bucket/prefix'"),
        ("s3:///prefix", "expected 's3://bucket/prefix'"),
        ("s3://ab", "3 to 63 letters"),
        ("s3://127.0.0.1:9000/bucket", "a server's address belongs to endpoint="),
        ("s3://bucket/a//b", "between single slashes"),
        ("s3://bucket/../b", "between single slashes"),
        ("s3://bucket/a b", "between single slashes"),
        ("s3://name:hidden@bucket", "credentials do not belong in a URL"),
        ("s3://bucket?endpoint=http://name:hidden@host", "credentials do not belong in a URL"),
        ("s3://bucket?secret_access_key=hidden", "found secret_access_key: credentials do not"),
        ("s3://bucket?aws_session_token=hidden", "set AWS_ACCESS_KEY_ID"),
        ("s3://bucket?endpoint=localhost:9000", "expected one such as http://127.0.0.1:9000"),
        ("s3://bucket?endpoint=ftp://host", "expected one such as"),
        ("s3://bucket?endpoint=http://host:99999", "expected one such as"),
        ("s3://bucket?endpoint=http://host/path", "expected one such as"),
        ("s3://bucket?endpoint=", "endpoint: expected a value, found none"),
        ("s3://bucket?region=eu west", "region: expected one such as eu-west-1"),
        ("s3://bucket?requests=0", "requests: expected a number from 1 to 1024"),
        ("s3://bucket?addressing=host", "addressing: expected path or virtual"),
        ("s3://bucket?anonymous=true", "anonymous: expected no or yes"),
        ("s3://bucket?wait=soon", "wait: expected seconds"),
        ("s3://bucket?endpont=http://host", "expected endpoint, region, .* found endpont"),
    ],
)
def test_a_url_that_is_wrong_is_refused_with_a_reason(url: str, why: str) -> None:
    for call in (check_url, lambda text: open_storage(text, page_bytes=4096)):
        with pytest.raises(ConfigError, match=why) as error:
            call(url)
        assert "hidden" not in str(error.value)


def test_a_bucket_in_the_name_of_the_host() -> None:
    place = s3.parse("s3", "//pages", {"endpoint": "https://host:90/", "addressing": "virtual"})
    assert place.config["endpoint"] == "https://pages.host:90"
    assert place.config["virtual_hosted_style_request"]
    assert not place.client["allow_http"]


def test_an_endpoint_of_http_must_stand_in_the_url(s3_server: Server, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    refused(StorageError, "say endpoint=http://", opened, f"s3://{BUCKET}/t", SPEC)


def test_without_credentials_it_says_so(s3_server: Server, monkeypatch: Any) -> None:
    for name in KEYS_OF_TESTS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    refused(StorageError, "credentials", opened, s3_server.url(retries=0), SPEC)
    with opened(s3_server.url(anonymous="yes"), SPEC) as storage:
        assert found(storage, KEYS) == 0


def test_pages_that_no_request_can_hold_are_refused(s3_server: Server) -> None:
    refused(ConfigError, "5368709096 bytes at most", opened, s3_server.url(), StorageSpec(5 << 30))


def test_a_closed_storage_does_nothing(s3_url: str) -> None:
    storage = opened(s3_url, SPEC)
    storage.close()
    storage.close()
    refused(Detached, "", found, storage, KEYS)
