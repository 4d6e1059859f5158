"""Ways to a store of S3's protocol: over TLS, and with the bucket in the host's name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.certificates import make
from support.disks import KEYS, OK, STORED, found, got, put
from support.failing_s3 import failing
from support.refusals import refused
from support.s3_server import Server, opened, serving

from lightcache import ConfigError, StorageError
from lightcache.storage import StorageSpec
from lightcache.storage.protocol import ReadStatus
from lightcache.storage.testing.conformance import SPEC
from lightcache.storage.urls import check_url

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def encrypted(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A store that speaks TLS."""
    with serving(tmp_path_factory.mktemp("s3"), certificates) as server:
        yield server


def test_tls(encrypted: Server, certificates: Path) -> None:
    with opened(encrypted.url(ca=certificates / "ca"), SPEC) as storage:
        assert put(storage, KEYS) == [STORED] * 12
        assert found(storage, KEYS) == 12
        assert got(storage, KEYS) == [OK] * 12
        assert storage.delete(KEYS[:4], timeout=60.0) == 4
        assert storage.clear(timeout=60.0) == 8


def test_pages_of_many_records(encrypted: Server, certificates: Path) -> None:
    page = np.frombuffer(bytes(range(256)) * (3 << 12), np.uint8)
    into = np.zeros_like(page)
    with opened(encrypted.url(ca=certificates / "ca"), StorageSpec(len(page))) as storage:
        assert storage.write(KEYS[:1], [page], timeout=60.0).prefix == 1
        assert storage.read(KEYS[:1], [into], timeout=60.0).prefix == 1
        assert (into == page).all()
        storage.clear(timeout=60.0)


def test_a_certificate_that_nobody_knows(encrypted: Server, tmp_path: Path) -> None:
    other = make(tmp_path, "IP:127.0.0.1") / "ca"
    for how in ({}, {"ca": other}):
        with pytest.raises(StorageError, match=r"certificate is not accepted \(.*\); .* ca="):
            opened(encrypted.url(retries=0, **how), SPEC)
        with opened(encrypted.url(retries=0, wait=0, **how), SPEC) as storage:
            assert set(got(storage, KEYS[:2])) == {ReadStatus.FAILED}
            with pytest.raises(StorageError, match=r"certificate is not accepted \(.*\); .* ca="):
                found(storage, KEYS)


def test_a_certificate_of_another_host(tmp_path: Path) -> None:
    folder = make(tmp_path, "IP:127.0.0.1,DNS:store.test")
    with serving(tmp_path, folder) as server:
        url = server.url(retries=0, ca=folder / "ca").replace("//127.0.0.1", "//localhost")
        refused(StorageError, r"certificate is not accepted \(NotValidForName", opened, url, SPEC)


def test_a_file_of_certificates_that_is_none(tmp_path: Path, certificates: Path) -> None:
    url = "s3://bucket?endpoint=https://127.0.0.1:1&ca="
    check_url(f"{url}/nowhere/at/all")
    for path, why in (
        ("/nowhere/at/all", "expected a file to read"),
        (tmp_path, "expected a file to read"),
        (certificates / "key", "expected certificates in PEM, found none in"),
    ):
        refused(ConfigError, f"s3: ca: {why}", opened, f"{url}{path}", SPEC)
    broken = tmp_path / "broken"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    refused(StorageError, "s3: s3://bucket", opened, f"{url}{broken}", SPEC)
    with pytest.raises(ConfigError, match="ca: expected an endpoint of https beside it"):
        check_url("s3://bucket?endpoint=http://127.0.0.1:1&ca=/x")
    refused(ConfigError, "ca: expected a value, found none", check_url, url)


@pytest.mark.parametrize("version", ["0.10.3", None])
def test_a_client_that_is_too_old_for_it(
    monkeypatch: pytest.MonkeyPatch, certificates: Path, version: str | None
) -> None:
    import obstore

    if version is None:
        monkeypatch.delattr(obstore, "__version__")
    else:
        monkeypatch.setattr(obstore, "__version__", version)
    found = version or "one that does not say which it is"
    with pytest.raises(StorageError, match=f"obstore 0.11 or later, found {found};"):
        opened(f"s3://bucket?endpoint=https://127.0.0.1:1&ca={certificates / 'cert'}", SPEC)


@pytest.mark.parametrize(
    ("addressing", "where"),
    [("virtual", "http://bucket.store.test/"), ("path", "http://store.test/bucket/")],
)
def test_the_bucket_in_the_name_of_the_host(
    addressing: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked through a proxy, which is told the whole address and resolves no names."""
    with failing() as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        url = f"s3://bucket/t?endpoint=http://store.test&addressing={addressing}"
        with opened(url, SPEC) as storage:
            assert put(storage, KEYS) == [STORED] * 12
            assert len(server.objects) == 12
            assert all(name.startswith(f"{where}t/lightcache/") for name in server.objects)
            assert got(storage, KEYS) == [OK] * 12
            assert storage.delete(KEYS, timeout=60.0) == 12
            assert not server.objects


def test_without_a_thread_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(StorageError, match="end some threads"):
        opened("s3://bucket?endpoint=http://127.0.0.1:1", SPEC)
    assert len(os.listdir("/proc/self/fd")) == before
