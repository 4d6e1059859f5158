"""A real server of S3's protocol on loopback (moto's), with one bucket for all tests.

It is not S3: it accepts any signature and any region, asks for no rights, never says SlowDown,
closes the connection behind every answer, and forgets all when it stops. What S3 does in these
matters is played by `failing_s3`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import ssl
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import servers
from support.packages import skip_or_fail

from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.remote.s3.backend import S3Storage

BUCKET = "pages"
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests"}
_COUNTER = itertools.count(1)


class Server:
    """moto's, which keeps everything in memory: what is stopped has forgotten all."""

    def __init__(self, folder: Path, port: int, certificates: Path | None = None) -> None:
        """
        Args:
            certificates: a folder with `ca`, `cert` and `key`; then it speaks TLS.
        """
        self.folder, self.port, self.certificates = folder, port, certificates
        self.scheme = "https" if certificates else "http"
        self.endpoint = f"{self.scheme}://127.0.0.1:{port}"
        self._stack = contextlib.ExitStack()
        self.process = 0

    def start(self) -> None:
        """With an empty bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        if self.certificates:
            command += ["-c", str(self.certificates / "cert")]
            command += ["-k", str(self.certificates / "key")]
        server = self._stack.enter_context(
            servers.running(
                command,
                lambda: servers.listens(self.port),
                self.folder / "s3.log",
                cwd=self.folder,
                env={**os.environ, **KEYS},
            )
        )
        self.process = server.pid
        self.make_bucket(BUCKET)

    def make_bucket(self, name: str) -> None:
        """moto asks for no signature."""
        bucket = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        trusted = None
        if self.certificates:
            trusted = ssl.create_default_context(cafile=str(self.certificates / "ca"))
        urllib.request.urlopen(bucket, timeout=60.0, context=trusted).close()

    def stop(self) -> None:
        """Killed."""
        self.hold(False)
        self._stack.close()

    def hold(self, stopped: bool) -> None:
        """It answers no more, or again; connections stand."""
        if stopped:
            servers.hold(self.process)
        else:
            os.kill(self.process, signal.SIGCONT)

    def url(self, prefix: str = "", port: int | None = None, **options: object) -> str:
        """Of the bucket; a prefix of its own if none is given."""
        prefix = prefix or f"test-{next(_COUNTER)}"
        address = f"{self.scheme}://127.0.0.1:{self.port if port is None else port}"
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"s3://{BUCKET}/{prefix}?endpoint={address}{more}"


@contextlib.contextmanager
def serving(folder: Path, certificates: Path | None = None) -> Iterator[Server]:
    """A server that runs; stopped in the end."""
    if find_spec("moto") is None or find_spec("obstore") is None:
        skip_or_fail("no server for S3; install: pip install 'moto[s3]' flask flask-cors obstore")
    server = Server(folder, servers.free_port(), certificates)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of a module; each has a prefix of its own there."""
    with serving(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the server, and nothing else of the environment's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_url(s3_server: Server) -> Iterator[str]:
    """Where a test may store pages. In the end nothing is left there."""
    url = s3_server.url()
    yield url
    prefix = url.partition("?")[0].removeprefix(f"s3://{BUCKET}/")
    assert not _objects(s3_server, prefix), "a test left objects"


def _objects(server: Server, prefix: str) -> list[str]:
    import obstore
    from obstore.store import S3Store

    where = {"endpoint": server.endpoint, "skip_signature": True}
    store = S3Store(BUCKET, prefix=prefix, config=where, client_options={"allow_http": True})
    names = [each["path"] for part in obstore.list(store) for each in part]
    if names:
        obstore.delete(store, names)
    return names


def opened(url: str, spec: StorageSpec) -> S3Storage:
    """A storage of S3."""
    storage = open_storage(url, spec=spec)
    assert isinstance(storage, S3Storage)
    return storage


__all__ = ["BUCKET", "KEYS", "Server", "opened", "s3_credentials", "s3_server", "s3_url", "serving"]
