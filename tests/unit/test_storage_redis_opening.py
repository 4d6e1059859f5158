"""Opening a storage in Redis or Valkey: what URLs say, who is let in, and which server will do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import Server
from support.refusals import refused
from support.remote_pages import KEYS, read, write
from support.servers import free_port

from lightcache import ConfigError, StorageError
from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.remote.redis.wire import ServerError, parse
from lightcache.storage.testing.conformance import SPEC
from lightcache.storage.urls import check_url

pytestmark = pytest.mark.servers

# ---- URLs


def options(url: str) -> Any:
    scheme, _, rest = url.partition(":")
    where, _, query = rest.partition("?")
    return parse(scheme, where, dict(part.split("=") for part in query.split("&") if part))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", {"host": "host", "port": 6379, "database": 0, "password": ""}),
        ("redis://host/", {"host": "host", "database": 0}),
        ("valkey://some_host.net:1234/7", {"port": 1234, "database": 7, "tls": False}),
        ("rediss://[::1]:1/2?ca=/c&cert=/d&key=/e", {"host": "::1", "tls": True, "ca": "/c"}),
        ("valkeys://[::1]", {"host": "::1", "port": 6379, "tls": True}),
        ("redis://me:p%40%2Fw%3F@h", {"user": "me", "password": "p@/w?", "host": "h"}),
        ("redis://:pw:with@h", {"user": "", "password": "pw:with"}),
        ("redis:/run/a.sock?db=3", {"path": "/run/a.sock", "database": 3, "host": ""}),
        ("redis:/a?user=me&password_file=/p", {"user": "me", "password_file": "/p"}),
        ("redis://h?ttl=60&connections=8", {"ttl": 60, "connections": 8}),
        ("redis://h?connect_timeout=1.5&required=no", {"connect_timeout": 1.5, "required": False}),
        ("redis://h", {"ttl": 0, "connections": 4, "connect_timeout": 5.0, "required": True}),
    ],
)
def test_urls(url: str, expected: dict[str, Any]) -> None:
    found = options(url)
    assert {name: getattr(found, name) for name in expected} == expected


PASSWORDS = "in a password"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis:", "neither two slashes nor a path"),
        ("redis:host:6379", "neither two slashes nor a path"),
        ("redis://", "found no host"),
        ("redis://:6379", "found no host"),
        ("redis:///run/redis.sock", "'redis:/run/redis/redis.sock', found no host"),
        ("redis://a b", "a host that is none"),
        ("redis://::1", "IPv6 is written in brackets"),
        ("redis://h:0", "a port from 1 to 65535"),
        ("redis://h:65536", "a port from 1 to 65535"),
        ("redis://h:" + "9" * 5000, "a port from 1 to 65535"),
        ("redis://h/x", "number of a database behind the host, found 'x'"),
        ("redis://h/1/2", "found '1/2'"),
        ("redis://h?db=1", r"as in 'redis://host:6379/1'"),
        ("redis:/s?db=x", "db: expected a number"),
        ("redis://h?speed=1", "expected connect_timeout, connections, .*found speed"),
        ("redis://h?ca=/x", "found ca"),
        ("rediss:/s", r"has no TLS; write 'redis:/path'"),
        ("rediss://h?cert=/x", "cert= and key= together"),
        ("redis://h?ttl=0", "ttl: expected a number from 1"),
        ("redis://h?connections=65", "connections: expected a number from 1 to 64, found '65'"),
        ("redis://h?connect_timeout=0", "connect_timeout: expected seconds"),
        ("redis://h?required=1", "required: expected yes or no, found '1'"),
        ("redis://h?ttl", PASSWORDS),
        ("redis://h?user=me", "password_file= beside user="),
    ],
)
def test_bad_urls(url: str, message: str) -> None:
    for opening in (check_url, lambda url: open_storage(url, spec=SPEC)):
        refused(ConfigError, message, opening, url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush",
        "redis://me:hush",
        "redis://hush@h",
        "redis://me:hush@h@h",
        "redis://:hush/hush@h",
        "redis://me:12/hush@h",
        "redis://:hush?hush@h",
        "redis://:x?hush=hush@h",
        "redis://:x?hush@h=1",
        "redis://me:12?hush=hush@h",
        "redis://me:hush@h:x",
        "redis://me:hush@h/x",
        "redis://me:hush@",
        "redis://me:hush@h?user=you",
        "redis://me:hush@h?password_file=/x",
        "redis://me:hush@h?ttl=x",
        "redis://h?password=hush",
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_url(url)
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(caught.value.__cause__)


def test_options_do_not_show_a_password() -> None:
    found = options("redis://me:hush@h")
    assert "hush" not in repr(found)
    assert "hush" not in found.shown


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    check_url("redis://h")
    with pytest.raises(StorageError) as caught:
        open_storage("valkey://h", spec=SPEC)
    expected = "valkey: the package redis is not installed; pip install 'lightcache[redis]'"
    assert str(caught.value) == expected


@pytest.mark.parametrize("version", ["4.6.0", "unknown", ""])
def test_a_package_that_is_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import redis

    monkeypatch.setattr(redis, "__version__", version)
    why = f"expected the package redis 5 or later, found {version};"
    refused(StorageError, why, open_storage, "redis://h", spec=SPEC)


def test_the_package_is_not_imported_before(script: Any) -> None:
    script(
        "import sys\n"
        "import lightcache.storage\n"
        "from lightcache.storage.urls import check_url\n"
        "check_url('redis://host')\n"
        "assert 'redis' not in sys.modules\n"
    )


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("LOADING Redis is loading the dataset in memory", "try again when it has"),
        ("MISCONF Redis is configured to save RDB snapshots", "see its log"),
        ("MOVED 1 127.0.0.1:1", "a cluster, which is not supported"),
        ("ERR max number of clients reached", "raise maxclients"),
        ("ERR unknown command 'GETEX'", "Redis 6.2"),
        ("DENIED Redis is running in protected mode", "set a password"),
    ],
)
def test_what_a_server_says_and_what_to_do(words: str, remedy: str) -> None:
    text = str(ServerError("redis://h:1/0", words))
    assert text.startswith(f"redis://h:1/0: {words}; ")
    assert remedy in text


# ---- who is let in


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("guarded"), "--requirepass", "p@ss/w?") as server:
        yield server


def test_a_password(guarded: Server, tmp_path: Path) -> None:
    url = guarded.url()
    refused(StorageError, "give user and password", open_storage, url, spec=SPEC)
    with pytest.raises(StorageError, match="correct user or password"):
        open_storage(url.replace("//", "//:wrong@"), spec=SPEC)
    with open_storage(url.replace("//", "//:p%40ss%2Fw%3F@"), spec=SPEC) as storage:
        assert write(storage).prefix == 12
    with open_storage(url.replace("//", "//default:p%40ss%2Fw%3F@"), spec=SPEC) as storage:
        assert read(storage).prefix == 12
    (tmp_path / "secret").write_text("p@ss/w?\n")
    for file_url in (
        f"{url}?password_file={tmp_path / 'secret'}",
        f"redis:{guarded.socket}?user=default&password_file={tmp_path / 'secret'}",
    ):
        with open_storage(file_url, spec=SPEC) as storage:
            assert read(storage).prefix == 12
    with pytest.raises(ConfigError, match="password_file: expected a file with a password"):
        open_storage(f"{url}?password_file=/nowhere/at/all", spec=SPEC)


def test_a_server_without_a_password_is_given_one(tmp_path: Path) -> None:
    with Server(tmp_path) as server, pytest.raises(StorageError, match="leave it out"):
        open_storage(server.url().replace("//", "//:some@"), spec=SPEC)


@pytest.fixture(scope="module")
def encrypted(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = ["--tls-cert-file", str(certificates / "cert")]
    files += ["--tls-key-file", str(certificates / "key")]
    files += ["--tls-ca-cert-file", str(certificates / "ca"), "--tls-auth-clients", "optional"]
    with Server(tmp_path_factory.mktemp("encrypted"), *files, tls=True) as server:
        yield server


def test_tls(encrypted: Server, certificates: Path) -> None:
    spec = StorageSpec(3 << 20, "encrypted")
    url = encrypted.url().replace("redis:", "rediss:")
    with pytest.raises(StorageError, match=r"certificate is refused: .*FAILED.*ca=") as found:
        open_storage(url, spec=spec)
    assert "started" not in str(found.value)
    ca, cert, key = (certificates / name for name in ("ca", "cert", "key"))
    for more in ("", f"&cert={cert}&key={key}"):
        with open_storage(f"{url}?ca={ca}{more}", spec=SPEC) as storage:
            write(storage)
            assert read(storage).prefix == 12
            storage.clear(timeout=60.0)
    with open_storage(f"{url}?ca={ca}", spec=spec) as storage:  # of many records
        page = bytes(range(256)) * (3 << 12)
        into = bytearray(len(page))
        assert storage.write(KEYS[:1], [memoryview(page)], timeout=60.0).prefix == 1
        assert storage.read(KEYS[:1], [memoryview(into)], timeout=60.0).prefix == 1
        assert into == page
    with pytest.raises(ConfigError, match="ca: expected a file to read"):
        open_storage(f"{url}?ca=/nowhere/at/all", spec=spec)


def test_tls_on_one_side_alone(encrypted: Server, guarded: Server, certificates: Path) -> None:
    with pytest.raises(StorageError, match=r"does it want TLS \(rediss:\)") as found:
        open_storage(encrypted.url(), spec=SPEC)
    assert "started" not in str(found.value)
    url = guarded.url().replace("redis:", "rediss:")
    for seconds in (0.5, 5, 20):  # on a busy machine it answers no sooner
        with pytest.raises(StorageError) as found:
            open_storage(f"{url}?ca={certificates / 'ca'}&connect_timeout={seconds}", spec=SPEC)
        if "it answers without TLS; write redis:" in str(found.value):
            break
    assert "it answers without TLS; write redis:" in str(found.value)
    assert "started" not in str(found.value)


def test_a_certificate_of_another_host(encrypted: Server, certificates: Path) -> None:
    url = encrypted.url().replace("redis:", "rediss:").replace("127.0.0.1", "localhost")
    with pytest.raises(StorageError, match=r"its certificate is refused: .*Hostname mismatch"):
        open_storage(f"{url}?ca={certificates / 'ca'}", spec=SPEC)


def test_a_server_with_as_many_clients_as_it_takes(tmp_path: Path) -> None:
    with Server(tmp_path, "--maxclients", "1") as server:
        with server.client() as taken:
            taken.ping()
            for url in (server.url(), server.url().replace("//", "//:some@")):
                with pytest.raises(StorageError, match=r"max number of clients.*raise maxclients"):
                    open_storage(url, spec=SPEC)


def test_a_server_that_is_not_there() -> None:
    for scheme in ("redis", "rediss"):
        with pytest.raises(StorageError, match="is the server started"):
            open_storage(f"{scheme}://127.0.0.1:{free_port()}", spec=SPEC)


# ---- which server


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    bus = str(free_port())  # that of the server and 10,000 may be none
    with Server(tmp_path, "--cluster-enabled", "yes", "--cluster-port", bus) as server:
        with pytest.raises(StorageError, match="found a cluster, which is not supported"):
            open_storage(server.url(), spec=SPEC)
        with open_storage(server.url(options="required=no"), spec=SPEC) as storage:
            with pytest.raises(StorageError, match=r"CLUSTERDOWN.*not supported"):
                storage.contains(KEYS, timeout=60.0)
            assert "not supported" in read(storage).reason


def test_pages_that_are_larger_than_the_server_takes(tmp_path: Path) -> None:
    with Server(tmp_path, "--proto-max-bulk-len", "1mb") as server:
        open_storage(server.url(), spec=StorageSpec((1 << 20) - 24)).close()
        with pytest.raises(StorageError, match=r"found proto-max-bulk-len 1048576; raise it"):
            open_storage(server.url(), spec=StorageSpec(1 << 20))


def test_a_database_that_there_is_not(tmp_path: Path) -> None:
    with Server(tmp_path) as server, pytest.raises(StorageError, match="a database that there is"):
        open_storage(server.url(99), spec=SPEC)


def test_an_address_that_is_none() -> None:
    with pytest.raises(
        StorageError, match=r"redis://no-such-host\.invalid:6379/0: this host is not known"
    ):
        open_storage("redis://no-such-host.invalid", spec=SPEC)
    with pytest.raises(StorageError, match=r"redis:/nowhere/at/all.*cannot connect"):
        open_storage("redis:/nowhere/at/all", spec=SPEC)
