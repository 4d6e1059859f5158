"""A process that is killed while it stores pages in Redis: what others find is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi import pausing
from multi.redis_side import SEED
from support.proxy import Proxy
from support.redis_server import Server

from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.remote.base import TRAILER_BYTES
from lightcache.storage.testing.conformance import make_keys, pages_of

pytestmark = [pytest.mark.crash, pytest.mark.servers]

PAGES, PAGE_BYTES = 8, 1 << 20
KEYS = make_keys(PAGES, SEED)
SPEC = StorageSpec(PAGE_BYTES, "killed")
TESTS = Path(__file__).parent.parent
LIMIT = 60.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": pausing.python_path(TESTS)}


@pytest.fixture
def proxy(redis_server: Server, redis_url: str) -> Iterator[Proxy]:
    """In front of a server that is empty."""
    with Proxy(redis_server.port) as made:
        yield made


def found(storage: Any) -> Any:
    """What is there; it must be right."""
    into = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    result = storage.read(KEYS, list(into), timeout=LIMIT)
    for data, expected, status in zip(
        into, pages_of(KEYS, PAGE_BYTES), result.statuses, strict=True
    ):
        assert status in (ReadStatus.OK, ReadStatus.ABSENT)
        assert status is ReadStatus.ABSENT or (data == expected).all()
    return result


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("after", [0.3, 1.5, 3.9, 7.99, 8.5, 20.2])
def test_killed_in_the_middle_of_a_write(
    redis_server: Server,
    redis_url: str,
    proxy: Proxy,
    connections: int,
    after: float,
    wait_until: Any,
) -> None:
    """The proxy stops after so many pages, wherever in one that is."""
    proxy.requests.pause(after=int(after * PAGE_BYTES))
    with redis_server.client() as client:
        others = {each["id"] for each in client.client_list()}
    url = f"redis://127.0.0.1:{proxy.port}/0?connections={connections}"
    program = TESTS / "multi" / "redis_side.py"
    child = subprocess.Popen(
        [sys.executable, "-W", "error", str(program), url, str(PAGES), str(PAGE_BYTES)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert child.stdout
        assert child.stdout.readline().strip() == "ready"
        proxy.requests.wait(int(after * PAGE_BYTES))
        child.kill()
        child.wait()
        proxy.refuse()  # a connection that it was making is not to reach the server after the cut
        proxy.cut()
        with redis_server.client() as client:
            known = {*others, str(client.client_id())}
            wait_until(
                lambda: {each["id"] for each in client.client_list()} <= known,
                "the server has noticed",
            )
            assert {client.strlen(name) for name in client.scan_iter()} <= {
                PAGE_BYTES + TRAILER_BYTES
            }
        with open_storage(redis_url, spec=SPEC) as storage:
            there = found(storage)
            data = list(pages_of(KEYS, PAGE_BYTES))
            wrote = storage.write(KEYS, data, timeout=LIMIT)
            assert wrote.count(WriteStatus.STORED) == there.count(ReadStatus.ABSENT)
            assert found(storage).prefix == PAGES
    finally:
        child.kill()
        child.wait()
        assert child.stdout
        child.stdout.close()


def test_two_processes_that_write_the_same_pages(redis_url: str, wait_until: Any) -> None:
    """And remove them again, all the time: whoever reads finds them whole or not at all."""
    program = TESTS / "multi" / "redis_side.py"
    command = [sys.executable, "-W", "error", str(program), redis_url, str(PAGES), str(PAGE_BYTES)]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout
            assert child.stdout.readline().strip() == "ready"
        with open_storage(redis_url, spec=SPEC) as storage:
            seen = sum(found(storage).count(ReadStatus.OK) for _ in range(40))
            wait_until(lambda: bool(seen or found(storage).count(ReadStatus.OK)), "a page")
        assert all(child.poll() is None for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout
            child.stdout.close()
