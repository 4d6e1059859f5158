"""A process that is killed while it stores pages in S3: each is found whole, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from multi import pausing
from multi.s3_side import SEED
from support.proxy import Proxy
from support.s3_server import Server, opened

from lightcache.storage import StorageSpec
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.testing.conformance import make_keys, pages_of

pytestmark = [pytest.mark.crash, pytest.mark.servers]

TESTS = Path(__file__).parent.parent
PAGES, PAGE_BYTES = 6, 1 << 20
KEYS = make_keys(PAGES, SEED)
SPEC = StorageSpec(PAGE_BYTES)


@pytest.mark.parametrize("after", [0.1, 0.9, 1.5, 2.0, 4.7])
def test_killed_in_the_middle_of_a_write(s3_server: Server, after: float) -> None:
    program = TESTS / "multi" / "s3_side.py"
    nbytes = int(after * PAGE_BYTES)
    url = s3_server.url()
    with Proxy(s3_server.port) as proxy:
        proxy.requests.pause(after=nbytes)
        through = url.replace(str(s3_server.port), str(proxy.port)) + "&requests=2"
        child = subprocess.Popen(
            [sys.executable, "-W", "error", str(program), through, str(PAGES), str(PAGE_BYTES)],
            env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS)},
        )
        try:
            proxy.requests.wait(nbytes)
            os.kill(child.pid, signal.SIGKILL)
        finally:
            child.kill()
            child.wait()
        proxy.cut()
        proxy.requests.resume()
    with opened(url, SPEC) as storage:
        into = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        result = storage.read(KEYS, list(into), timeout=60.0)
        assert set(result.statuses) <= {ReadStatus.OK, ReadStatus.ABSENT}
        expected = pages_of(KEYS, PAGE_BYTES)
        for data, page, status in zip(into, expected, result.statuses, strict=True):
            assert status is not ReadStatus.OK or (data == page).all()
        assert result.count(ReadStatus.OK) <= after
        wrote = storage.write(KEYS, list(expected), timeout=60.0)
        assert set(wrote.statuses) <= {WriteStatus.STORED, WriteStatus.PRESENT}
        assert storage.read(KEYS, list(into), timeout=60.0).prefix == PAGES
        assert (into == expected).all()
        storage.clear(timeout=60.0)
