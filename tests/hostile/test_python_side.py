"""Attaching, calls and tools on damaged files: our own errors, and no control character."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hostile import python_side

from lightcache import Cache, CacheCorrupted, LightcacheError, PageIndex
from lightcache.shm import layout as shm_layout
from lightcache.shm.layout import SegmentHeader
from lightcache.tools.cli import group

CASES = int(os.environ.get("LIGHTCACHE_HOSTILE_FILES", "60"))
FIRST = int(os.environ.get("LIGHTCACHE_TEST_SEED", "0")) * 1_000_000
PAGES = 48
SECRET = b"s" * 16


@pytest.fixture
def made(segment_name: str) -> Iterator[str]:
    """A cache that nobody is attached to."""
    with Cache.create(
        segment_name,
        pages=PAGES,
        page_bytes=4096,
        fingerprint="f",
        secret=SECRET,
        lifetime="persistent",
    ) as cache:
        with cache.index.reserve(np.arange(40, dtype=np.uint64).reshape(-1, 2)) as got:
            got.publish()
    yield segment_name
    for left in Path("/dev/shm").glob(f"lightcache.{segment_name}*"):
        left.unlink()


def path_of(name: str) -> Path:
    return Path("/dev/shm") / f"lightcache.{name}"


def poke(name: str, at: int, what: bytes) -> None:
    with path_of(name).open("r+b") as raw:
        raw.seek(at)
        raw.write(what)


def configure(name: str, text: bytes) -> None:
    """Another configuration in the header."""
    poke(name, SegmentHeader.config.offset, text.ljust(shm_layout.CONFIG_BYTES, b"\0"))
    poke(name, SegmentHeader.config_bytes.offset, len(text).to_bytes(4, "little"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damaged_files() -> None:
    script = [sys.executable, python_side.__file__, str(FIRST), str(CASES)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "success" in done.stdout
    assert "CacheCorrupted" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 2048,
        b'{"pages":18446744073709551664,"page_bytes":4096,"fingerprint":"f","algorithm":"xxh3_128",'
        b'"secret":""}',  # 2**64 + 48
        b'{"pages":48,"page_bytes":1e400,"fingerprint":"f","algorithm":"xxh3_128","secret":""}',
        b'{"pages":48,"page_bytes":-1,"fingerprint":"f","algorithm":"xxh3_128","secret":""}',
        b'{"pages":48,"page_bytes":4096,"fingerprint":[],"algorithm":"xxh3_128","secret":""}',
    ],
)
def test_damaged_configurations(made: str, text: bytes) -> None:
    configure(made, text)
    with pytest.raises(CacheCorrupted):
        Cache.attach(made, secret=SECRET)
    with pytest.raises(CacheCorrupted):
        Cache.attach(made, secret=SECRET, readonly=True)


def test_more_pages_than_a_number_of_the_core_holds(made: str) -> None:
    configure(made, b'{"pages":%d}' % (2**64 + PAGES))
    with pytest.raises(CacheCorrupted, match="pages"):
        PageIndex.attach(made)


def test_json_holds_no_control_character(made: str) -> None:
    role = shm_layout.CLIENTS_OFFSET + 128 * 7
    poke(made, role + shm_layout.ClientRecord.role.offset, b"\xc2\x9b31m\x7f\x1b[2J")
    poke(made, role + shm_layout.ClientRecord.state.offset, b"\1\0\0\0")
    shown = CliRunner().invoke(group, ["dump", made, "--json"])
    assert shown.exit_code == 0
    assert "\\u009b31m\\u007f\\u001b[2J" in shown.stdout
    assert all(char.isprintable() or char == "\n" for char in shown.stdout)


# ---- truncation


@pytest.mark.parametrize("length", [0, 100, 4096, shm_layout.PAYLOAD_OFFSET, 60_000])
def test_a_truncated_index(made: str, length: int) -> None:
    whole = path_of(made).stat().st_size
    os.truncate(path_of(made), length)
    for readonly in (False, True):
        with pytest.raises(LightcacheError):
            PageIndex.attach(made, readonly=readonly, timeout=0)
    status = CliRunner().invoke(group, ["check", made, "--wait", "0"]).exit_code
    assert status in (1, 2)
    # Growing it back does not bring back what stood there.
    os.truncate(path_of(made), whole)
    with (
        contextlib.suppress(LightcacheError),
        PageIndex.attach(made, timeout=0, lock_timeout=1) as index,
    ):
        assert not index.check().clean


def test_an_index_truncated_behind_its_header_is_named(made: str) -> None:
    os.truncate(path_of(made), 60_000)
    with pytest.raises(CacheCorrupted, match="was truncated or extended"):
        PageIndex.attach(made)
    assert "bytes were expected" in CliRunner().invoke(group, ["check", made]).output


@pytest.mark.parametrize("change", [-4096, 4096])
def test_a_pool_of_another_length(made: str, change: int) -> None:
    (pool,) = Path("/dev/shm").glob(f"lightcache.{made}~pool-*")
    os.truncate(pool, pool.stat().st_size + change)
    with pytest.raises(CacheCorrupted, match="expected"):
        Cache.attach(made, secret=SECRET)
