"""What each call of a storage in S3 asks for: the table of docs/storage.md, which people pay by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from support import s3_server as real
from support.failing_s3 import FailingS3, failing

from lightcache.storage import Storage, open_storage
from lightcache.storage.testing.conformance import PAGE_BYTES, SPEC, make_keys, pages_of

pytestmark = pytest.mark.servers

pytest.importorskip("obstore")

KEYS = make_keys(40, seed=8)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingS3]:
    for name, value in real.KEYS.items():
        monkeypatch.setenv(name, value)
    with failing() as made:
        yield made


def opened(server: FailingS3, **options: object) -> Storage:
    """With windows of ten."""
    return open_storage(server.url(requests=10, **options), spec=SPEC)


def asked(server: FailingS3) -> Counter[str]:
    """What it was asked since this was called last."""
    with server.lock:
        found, server.seen[:] = Counter(server.seen), []
    return found


def test_opening(server: FailingS3) -> None:
    opened(server).close()
    assert asked(server) == {"GET": 1}
    opened(server, wait=0).close()
    assert asked(server) == {}


def test_calls(server: FailingS3) -> None:
    with opened(server, wait=0) as storage:
        storage.write(KEYS[:25], list(pages_of(KEYS[:25])), timeout=60.0)
        assert asked(server) == {"HEAD": 25, "PUT": 25}
        storage.write(KEYS[20:30], list(pages_of(KEYS[20:30])), timeout=60.0)
        assert asked(server) == {"HEAD": 10, "PUT": 5}
        assert storage.contains(KEYS, timeout=60.0) == 30
        assert asked(server) == {"HEAD": 40}
        storage.delete(KEYS[12:13], timeout=60.0)
        assert asked(server) == {"HEAD": 1, "POST": 1}
        assert storage.contains(KEYS, timeout=60.0) == 12
        assert asked(server) == {"HEAD": 20}  # the window with the first that is absent is the last
        buffers = [bytearray(PAGE_BYTES) for _ in KEYS]
        assert storage.read(KEYS, buffers, timeout=60.0).prefix == 12
        assert asked(server) == {"GET": 40}
        assert storage.delete(KEYS, timeout=60.0) == 29
        assert asked(server) == {"HEAD": 40, "POST": 1}
        assert storage.delete(KEYS, timeout=60.0) == 0
        assert asked(server) == {"HEAD": 40}
